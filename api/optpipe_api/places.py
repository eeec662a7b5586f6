"""Places for those who keep a connection open: followers of events, and requests that wait."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

from optpipe_api.errors import TooManyFollowersError, TooManyFollowersOfKeyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_api.access import Principal

__all__ = ["Places", "Purpose"]


class Purpose(StrEnum):
    """What somebody keeps his connection open for."""

    STREAM = "stream"
    """He hears events as they come."""
    WAIT = "wait"
    """He gets one answer, when there is news: ``?wait=``."""


class Places:
    """As many places as one server has, and as many as one key may take; for the event loop.

    Parameters
    ----------
    most, most_per_key
        Places of both purposes together. Where no keys are asked for, nobody has one, and only the
        first counts.
    """

    def __init__(self, most: int, most_per_key: int) -> None:
        self._most = most
        self._most_per_key = most_per_key
        self._by_purpose: Counter[Purpose] = Counter()
        self._by_key: Counter[str] = Counter()

    def num_taken(self, purpose: Purpose) -> int:
        """Return how many places are taken for a purpose; from any thread."""
        return self._by_purpose[purpose]

    @contextmanager
    def taken(self, who: Principal, purpose: Purpose) -> Iterator[None]:
        """Take a place, and give it back however the block ends.

        Raises
        ------
        TooManyFollowersOfKeyError
            If his key has as many as it may.
        TooManyFollowersError
            If there is none left.
        """
        if who.name and self._by_key[who.name] >= self._most_per_key:
            raise TooManyFollowersOfKeyError(who.name, self._most_per_key)
        if self._by_purpose.total() >= self._most:
            raise TooManyFollowersError(self._most)
        self._by_purpose[purpose] += 1
        self._by_key[who.name] += 1
        try:
            yield
        finally:
            self._by_purpose[purpose] -= 1
            self._by_key[who.name] -= 1
            if not self._by_key[who.name]:
                del self._by_key[who.name]
