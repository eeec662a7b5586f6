"""When a search is over, for the parts that come before HiGHS looks at the clock itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from optpipe_solver.milp.highs import MilpStatus

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Deadline"]


class Deadline:
    """A time limit that began when this was made, and a caller who may stop before."""

    def __init__(self, time_limit_s: float, should_stop: Callable[[], bool]) -> None:
        self._end = time.perf_counter() + time_limit_s
        self._should_stop = should_stop

    def left_s(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self._end - time.perf_counter())

    def is_over(self) -> bool:
        """Whether the time is up or the caller says so."""
        return self.left_s() <= 0.0 or self._should_stop()

    def status(self) -> MilpStatus:
        """Return why it is over."""
        return MilpStatus.INTERRUPTED if self._should_stop() else MilpStatus.TIME_LIMIT
