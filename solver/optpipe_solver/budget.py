"""What a solve may spend, and with which seed."""

from __future__ import annotations

from dataclasses import dataclass

from optpipe.errors import InputError
from optpipe.schedule import OPTIMAL_GAP

__all__ = ["Budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Time, work, threads, seed and the gap that is good enough.

    Parameters
    ----------
    time_limit_s
        Seconds, > 0.
    work_limit
        None, or units > 0 of about one second of one core, counted in iterations and nodes and
        not by the clock: then the parts run one after another, and the result is a function of
        problem, seed, threads and this number alone, unless the time limit cuts it short.
    threads
        >= 1. From 2 on the search for schedules and the proofs run side by side.
    seed
        >= 0.
    gap
        In [0, 1): stop where (objective - bound) / objective is at most this, or optimal.

    Raises
    ------
    InputError
        With value, rule and fix.
    """

    time_limit_s: float = 60.0
    work_limit: float | None = None
    threads: int = 1
    seed: int = 0
    gap: float = OPTIMAL_GAP

    def __post_init__(self) -> None:
        if not self.time_limit_s > 0:
            raise InputError(f"time_limit_s = {self.time_limit_s}: must be > 0 seconds; raise it")
        if self.work_limit is not None and not self.work_limit > 0:
            raise InputError(
                f"work_limit = {self.work_limit}: must be > 0 units; raise it or leave it out"
            )
        if self.threads < 1:
            raise InputError(f"threads = {self.threads}: must be >= 1; raise it")
        if self.seed < 0:
            raise InputError(f"seed = {self.seed}: must be >= 0; change it")
        if not 0 <= self.gap < 1:
            raise InputError(f"gap = {self.gap}: must be in [0, 1), e.g. 0.01 for 1 %; change it")

    @property
    def good_gap(self) -> float:
        """The gap to stop at: one that counts as optimal leaves nothing to look for."""
        return max(self.gap, OPTIMAL_GAP)
