"""How often somebody may ask: one token bucket each, in memory."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Rates"]

_MAX_BUCKETS = 10_000
_MINUTE_S = 60.0


class Rates:
    """Buckets that hold ``per_minute`` tokens each and fill up again within a minute.

    So whoever was quiet may ask ``per_minute`` times at once, and then that often a minute. Each
    server counts for itself. Of the buckets only the last 10,000 used are kept: memory is bounded,
    whatever the number of addresses that ask. For the event loop, or any other single thread.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._now = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, who: str) -> int:
        """Take a token; return 0, or the whole seconds until there is one."""
        now = self._now()
        tokens, since = self._buckets.get(who, (float(self.per_minute), now))
        tokens = min(self.per_minute, tokens + (now - since) * self.per_minute / _MINUTE_S)
        granted = tokens >= 1
        self._keep(who, tokens - granted, now)
        return 0 if granted else math.ceil((1 - tokens) * _MINUTE_S / self.per_minute)

    def _keep(self, who: str, tokens: float, now: float) -> None:
        self._buckets[who] = (tokens, now)
        self._buckets.move_to_end(who)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
