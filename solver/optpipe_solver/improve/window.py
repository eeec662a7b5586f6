"""Window re-optimisation: open a piece of every program, let the MILP order it, keep the rest.

A window is a stretch of time on all devices, or a longer one on a few neighbours; around it orders
are fixed and times move, as heads and tails of the sub-problem (see `milp.horizon.context`), so a
gain in the window is a gain of the whole schedule. Windows lie around idle time; their size follows
how hard the last ones were.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from optpipe_solver.milp.highs import MilpStatus
from optpipe_solver.milp.horizon.model import Search, solve_horizon
from optpipe_solver.milp.horizon.start import relabelled
from optpipe_solver.milp.horizon.surroundings import Surroundings
from optpipe_solver.milp.improve import fifo_loses_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe.action import Programs
    from optpipe_solver.incumbent import Incumbent
    from optpipe_solver.milp.horizon.model import HorizonOutcome

__all__ = ["improve_by_windows"]

_NODES = 100
_SECONDS = 3.0
"""Most branch-and-bound nodes and seconds for one window."""

_FIRST_PAIRS, _LEAST_PAIRS, _MOST_PAIRS = 600, 60, 6_000
"""Pairs of actions open on one device, summed over devices: the size of a window."""

_GROW, _SHRINK = 1.25, 0.7
_NEIGHBOURS = 3
_ALL_DEVICES = 0.6
"""Share of windows that open all devices."""


def improve_by_windows(
    best: Incumbent,
    *,
    time_limit_s: float,
    threads: int,
    seed: int,
    should_stop: Callable[[], bool] | None = None,
    work_limit: int | None = None,
) -> int:
    """Re-optimise windows of the best schedule known; return the nodes used.

    Parameters
    ----------
    best
        Holds the schedule to start from; improvements go there as ``window``.
    time_limit_s, threads
        Seconds from now; HiGHS's threads.
    seed
        Which windows are tried, in which order, is a function of it and of the start.
    should_stop
        Asked often; True ends the call within 0.5 s.
    work_limit
        Most nodes, a window counting at least one. What is tried is then a function of the start,
        ``seed`` and ``threads`` as long as time does not end it.
    """
    if best.programs is None:
        return 0
    end = time.perf_counter() + time_limit_s
    nodes = 0
    search = _Windows(best, threads, seed, should_stop or (lambda: False))
    while not best.is_optimal and not search.should_stop():
        left_s = end - time.perf_counter()
        left = None if work_limit is None else work_limit - nodes
        if left_s <= 0 or (left is not None and left <= 0):
            break
        nodes += search.try_one(left_s, left)
        if search.is_exhausted:
            break
    return max(1, nodes)


class _Windows:
    def __init__(
        self, best: Incumbent, threads: int, seed: int, should_stop: Callable[[], bool]
    ) -> None:
        self.best = best
        self.threads = threads
        self.random = random.Random(seed)  # noqa: S311 - no secret is made of it
        self.should_stop = should_stop
        self.pairs = float(_FIRST_PAIRS)
        self.fifo = fifo_loses_nothing(best.problem)
        self.is_exhausted = False
        self.known: Programs | None = None

    def try_one(self, left_s: float, left_nodes: int | None) -> int:
        """Open one window; return the nodes it took, at least 1."""
        around = self._around()
        low, high, frozen = self._window(around)
        everything = not frozen and all(
            a == 0 and b == len(row) for a, b, row in zip(low, high, around.programs, strict=True)
        )
        outcome = solve_horizon(
            self.best.problem,
            around.programs,
            around.objective_ms,
            Search(
                time_limit_s=min(left_s, _SECONDS) if left_nodes is None else left_s,
                threads=self.threads,
                seed=self.random.randrange(2**31),
                work_limit=_NODES if left_nodes is None else min(_NODES, left_nodes),
                on_programs=self._offer,
                should_stop=self.should_stop,
            ),
            fifo=self.fifo,
            context=around.context(low, high, frozen),
            alike=self.random.random() < self._alike(around),
        )
        solved = outcome.status in (MilpStatus.OPTIMAL, MilpStatus.INFEASIBLE)
        self.is_exhausted = everything and solved
        self._adapt(outcome, solved=solved)
        return max(1, outcome.num_nodes)

    def _offer(self, programs: Programs) -> None:
        self.best.offer(programs, "window")

    def _adapt(self, outcome: HorizonOutcome, *, solved: bool) -> None:
        """Choose the next size by nodes, never by seconds: the same run is the same again."""
        easy = solved and outcome.num_nodes <= _NODES // 4
        factor = _GROW if easy else (1.0 if solved else _SHRINK)
        self.pairs = min(max(self.pairs * factor, _LEAST_PAIRS), _MOST_PAIRS)

    def _around(self) -> Surroundings:
        programs, _ = self.best.programs, self.best.objective_ms
        if programs is None:
            raise ValueError("windows need a schedule to start from")
        if programs is not self.known:
            self.known = programs
            self.around = Surroundings(self.best.problem, relabelled(programs))
        return self.around

    def _alike(self, around: Surroundings) -> float:
        """Return how often only choices already made in a window are open: half the time."""
        return 0.5 if len(around.programs) > 1 else 0.0

    def _window(self, around: Surroundings) -> tuple[list[int], list[int], frozenset[int]]:
        """Choose a stretch of time around an idle moment, as long as the size allows."""
        devices = [d for d, row in enumerate(around.programs) if row]
        open_ones = self._open_devices(devices)
        centre = self._moment(around, open_ones)
        whole = around.objective_ms
        low_s, high_s = 0.0, 2.0 * whole
        for _ in range(30):
            half = (low_s + high_s) / 2
            low, high = self._cuts(around, centre, half)
            size = sum((high[d] - low[d]) ** 2 / 2 for d in open_ones)
            if size > self.pairs:
                high_s = half
            else:
                low_s = half
        low, high = self._cuts(around, centre, low_s)
        return low, high, frozenset(devices) - frozenset(open_ones)

    def _cuts(
        self, around: Surroundings, centre: float, half: float
    ) -> tuple[list[int], list[int]]:
        low = around.cut_at(centre - half) if centre > half else [0] * len(around.programs)
        if self.best.problem.objective == "span":
            low = around.closed(low)
        high = around.cut_at(centre + half)
        return low, [max(a, b) for a, b in zip(low, high, strict=True)]

    def _open_devices(self, devices: list[int]) -> list[int]:
        if len(devices) <= _NEIGHBOURS or self.random.random() < _ALL_DEVICES:
            return devices
        first = self.random.randrange(len(devices) - _NEIGHBOURS + 1)
        return devices[first : first + _NEIGHBOURS]

    def _moment(self, around: Surroundings, devices: Sequence[int]) -> float:
        """Choose a moment in ms, where devices idle more often than elsewhere."""
        device = self.random.choice(list(devices))
        gaps = _idle(around, device)
        if gaps and self.random.random() < _IDLE:
            (begin, stop) = self.random.choices(gaps, [b - a for a, b in gaps])[0]
            return self.random.uniform(begin, stop)
        return self.random.uniform(0.0, around.objective_ms)


_IDLE = 0.8


def _idle(around: Surroundings, device: int) -> list[tuple[float, float]]:
    """Return the (start, end) in ms between a device's actions in which it does nothing."""
    gaps = []
    last = 0.0
    for action, times in zip(around.programs[device], around.times[device], strict=True):
        if action.type.is_transfer:
            continue
        if times.start > last:
            gaps.append((last, times.start))
        last = max(last, times.end)
    if last < around.objective_ms:
        gaps.append((last, around.objective_ms))
    return gaps
