"""The time of a plan and of its phases."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Clock"]


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since the start, and whether they are used up or somebody said stop."""

    limit_s: float
    asked: Callable[[], bool]
    began: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.began

    def left(self) -> float:
        """Return the seconds until the time is over, at least 0."""
        return max(0.0, self.limit_s - self.seconds())

    def turn(self, share: float) -> Clock:
        """Return a clock that starts now, for a share of what is left."""
        return Clock(share * self.left(), self.asked)

    def is_over(self) -> bool:
        """Whether the time is used up, or somebody asked to stop."""
        return self.asked() or self.left() <= 0
