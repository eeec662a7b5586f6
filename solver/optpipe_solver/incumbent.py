"""The best schedule and bound known so far, shared by all parts of a solve."""

from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe.schedule import OPTIMAL_GAP, TraceEntry, gap_of
from optpipe_solver.arrays.encoding import Evaluator
from optpipe_solver.budget import Progress
from optpipe_solver.feasibility import usable_modes
from optpipe_solver.ranking import EQUAL, Contender, NoisyTimes, ranks_equals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays.encoding import CompiledProblem, Metrics

__all__ = ["Goal", "Incumbent", "grid_ms"]


_MOST_OTHERS, _MOST_OTHER_ACTIONS = 4, 3_000_000
"""Schedules kept for `Incumbent.runners_up`, and actions in all of them.

An action takes about 150 bytes: 512 stages and 1,024 micro-batches take 250 MB a schedule.
"""

_MOST_POOLED = 40
"""Schedules that are kept to be judged under noise, the shortest of those that were met."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A legal schedule that was found: its objective in ms, its method, and its turn."""

    objective_ms: float
    method: str
    programs: Programs
    turn: float | None = None


class Incumbent:
    """Holds only checked and simulated programs, and only better ones; thread-safe.

    Of two schedules with equal objectives, v2 keeps the better one (`Contender`), v1 the first.

    Parameters
    ----------
    problem
        What is being solved.
    on_progress
        Called with every improvement of the schedule or the bound, by one thread at a time.
    pools
        Whether to keep other schedules in addition to the best, for `pool`.
    compiled
        The compiled problem, if it exists already. Then short programs, too, are evaluated on
        arrays, in a tenth of the time.

    Attributes
    ----------
    evaluate_s
        Seconds that evaluating programs took the last time.
    metrics
        Metrics of the best programs.
    objective_ms
        The shortest known, inf without any: that of the best programs, or of equal programs that
        were shorter by rounding.
    cpu_seconds
        CPU seconds by part, of its thread and, if it uses HiGHS, of the first thread of HiGHS.
    unfinished
        State that parts continue with at their next turn, by a name that the part chooses.
    work
        None, or, if work is limited, the units spent by the end of the last turn. The trace then
        has units of work instead of seconds. Of a turn's improvements by one method it has only the
        last, because the moments at which a part reports depend on the clock.
    """

    def __init__(
        self,
        problem: Problem,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        pools: bool = False,
        compiled: CompiledProblem | None = None,
    ) -> None:
        self.problem = problem
        self.on_progress = on_progress
        self.began = time.perf_counter()
        self.programs: Programs | None = None
        self.metrics: Metrics | None = None
        self.objective_ms = float("inf")
        self.method = ""
        self.bound_ms = 0.0
        self.bound_method = ""
        self.trace: list[TraceEntry] = []
        self.evaluate_s = 0.0
        self.cpu_seconds: dict[str, float] = {}
        self.work: float | None = None
        self.unfinished: dict[str, object] = {}
        self._evaluate = Evaluator(problem, compiled)
        self._noisy: NoisyTimes | None = None
        self._holder: Contender | None = None
        self._others: list[tuple[float, Programs]] = []
        actions = 3 * len(problem.stages) * problem.num_microbatches
        self._most_others = min(_MOST_OTHERS, _MOST_OTHER_ACTIONS // actions)
        self._pooled: list[Pooled] | None = [] if pools else None
        self._lock = threading.RLock()
        self._is_closed = False

    def seconds(self) -> float:
        """Return the seconds since the solve began."""
        return time.perf_counter() - self.began

    @contextmanager
    def clocked(self, part: str) -> Iterator[None]:
        """Count the CPU seconds of this thread as those of a part."""
        began = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - began
            with self._lock:
                self.cpu_seconds[part] = self.cpu_seconds.get(part, 0.0) + spent

    def offer(self, programs: Programs, method: str, *, expected_ms: float | None = None) -> bool:
        """Take programs if they are legal and better than the best known.

        ``expected_ms`` is the objective, if the caller knows it: longer programs are not evaluated.
        """
        if expected_ms is not None and not self._may_be_better(expected_ms):
            return False
        began = time.perf_counter()
        metrics = self._evaluate(programs)
        if metrics is None:
            return False
        objective = metrics.objective_ms(self.problem.objective)
        self.evaluate_s = time.perf_counter() - began
        contender = Contender(self.problem, programs, metrics, self._percentile)
        while True:
            # Outside the lock, as it may take a second.
            holder = self._holder
            is_better = self._is_better(contender, objective, holder)
            with self._lock:
                if self._is_closed:
                    return False
                if holder is not self._holder:
                    continue
                if not is_better:
                    self.objective_ms = min(objective, self.objective_ms)
                    self._add_to_pool(Pooled(objective, method, programs))
                    return False
                self._take(contender, objective, method)
                return True

    def _may_be_better(self, objective_ms: float) -> bool:
        if ranks_equals(self.problem):
            return objective_ms <= self.objective_ms * (1 + EQUAL)
        return objective_ms < self.objective_ms

    def _is_better(
        self, contender: Contender, objective_ms: float, holder: Contender | None
    ) -> bool:
        if holder is None or not ranks_equals(self.problem):
            return objective_ms < self.objective_ms
        if objective_ms < holder.metrics.objective_ms(self.problem.objective) * (1 - EQUAL):
            return True
        return self._may_be_better(objective_ms) and contender.is_better_than(holder)

    def _take(self, contender: Contender, objective_ms: float, method: str) -> None:
        is_shorter = objective_ms < self.objective_ms * (1 - EQUAL)
        least_ms = objective_ms if is_shorter else min(objective_ms, self.objective_ms)
        # Programs last, so that readers without the lock see no older objective with them.
        self.method, self.objective_ms, self.metrics = method, least_ms, contender.metrics
        self._holder, self.programs = contender, contender.programs
        self._add_to_pool(Pooled(objective_ms, method, contender.programs, self.work))
        self._check_bound()
        self._tell(method, contender.programs)

    def _percentile(self, programs: Programs) -> float:
        if self._noisy is None:
            self._noisy = NoisyTimes(self.problem)
        return self._noisy.percentile(programs)

    def offer_bound(self, bound_ms: float, method: str) -> bool:
        """Take a proven bound if it is better than the best known.

        Raises
        ------
        AssertionError
            If it is above a schedule that exists: one of the two is wrong, and a false proof is
            worse than no answer.
        """
        with self._lock:
            if self._is_closed or bound_ms <= self.bound_ms * (1 + 1e-9):
                return False
            before = self.bound_ms, self.bound_method
            self.bound_ms, self.bound_method = bound_ms, method
            self._check_bound()
            if self.bound_ms <= before[0] * (1 + 1e-9):
                self.bound_ms, self.bound_method = before
                return False
            self._tell(method, None)
            return True

    def keep(self, programs: Programs, objective_ms: float, method: str = "") -> None:
        """Keep legal programs in addition to the best ones, for a search to start from."""
        with self._lock:
            self._add_to_pool(Pooled(objective_ms, method, programs))
            if all(objective_ms != known for known, _ in self._others):
                self._others.append((objective_ms, programs))
                self._others.sort(key=lambda other: other[0])
                del self._others[self._most_others :]

    def runners_up(self) -> tuple[Programs, ...]:
        """Return the best of the kept programs, best first."""
        with self._lock:
            return tuple(programs for _, programs in self._others)

    def _add_to_pool(self, new: Pooled) -> None:
        if self._pooled is None:
            return
        if new.turn is not None:
            # How often a part tells is a matter of time; what it has found in the end is not.
            part = (new.turn, new.method)
            self._pooled = [old for old in self._pooled if (old.turn, old.method) != part]
        self._pooled.append(new)
        if self.work is None and len(self._pooled) > 2 * _MOST_POOLED:
            self._pooled = sorted(self._pooled, key=lambda old: old.objective_ms)[:_MOST_POOLED]

    def pool(self) -> list[Pooled]:
        """Return schedules that were met, each once: the best, then the shortest of the others."""
        with self._lock:
            if self.programs is None:
                return []
            found = [Pooled(self.objective_ms, self.method, self.programs)]
            for one in sorted(self._pooled or (), key=lambda old: old.objective_ms):
                if len(found) == _MOST_POOLED:
                    break
                if all(one.programs != known.programs for known in found):
                    found.append(one)
            return found

    def put_first(self, chosen: Pooled) -> None:
        """Replace the best schedule, whatever the new one's objective, and close.

        Raises
        ------
        ValueError
            If it is not legal.
        """
        metrics = self._evaluate(chosen.programs)
        if metrics is None:
            raise ValueError(f"the schedule of {chosen.method} is not legal; put a legal one first")
        with self._lock:
            self.method, self.metrics, self.programs = chosen.method, metrics, chosen.programs
            self._is_closed = True

    def close(self) -> None:
        """Ignore all later offers."""
        with self._lock:
            self._is_closed = True

    @property
    def is_optimal(self) -> bool:
        """Whether the gap is closed."""
        return self.gap <= OPTIMAL_GAP

    @property
    def gap(self) -> float:
        """(objective - bound) / objective; infinite while there is no schedule."""
        with self._lock:
            gap = gap_of(self.objective_ms, self.bound_ms) if self.programs is not None else None
            return float("inf") if gap is None else gap

    def _check_bound(self) -> None:
        """A bound above a schedule is a fault; above by rounding alone it is that schedule's."""
        if self.bound_ms > self.objective_ms * (1 + OPTIMAL_GAP):
            raise AssertionError(
                f"the bound {self.bound_ms} ms of {self.bound_method} is above the schedule of "
                f"{self.method}, {self.objective_ms} ms; please report the problem"
            )
        self.bound_ms = min(self.bound_ms, self.objective_ms)

    def _tell(self, method: str, programs: Programs | None) -> None:
        objective = self.objective_ms if self.programs is not None else None
        now = self.seconds()
        self._note(
            TraceEntry(
                seconds=round(now if self.work is None else self.work, 4),
                method=method,
                objective_ms=objective,
                bound_ms=self.bound_ms,
            )
        )
        if self.on_progress is not None:
            self.on_progress(Progress(now, method, objective, self.bound_ms, programs))

    def _note(self, entry: TraceEntry) -> None:
        """Append to the trace; with limited work, overwrite the entry of the same turn."""
        if self.work is not None and self.trace:
            last = self.trace[-1]
            if (last.seconds, last.method) == (entry.seconds, entry.method):
                self.trace.pop()
        self.trace.append(entry)


# --- The next shorter objective: if all times are multiples of one, every objective is one too.

_LEAST_GRID = 1e-4
"""Times that are multiples of less than this share of the objective are no grid worth using."""

_UNIT_MS = 1e-6
_EXACT = 1e-9


def grid_ms(problem: Problem) -> float:
    """Return the largest time in ms, a whole number of ns, of which all times are multiples; or 0.

    Every start is a sum of durations and delays, because everything runs as soon as possible. So
    the objective is a multiple too, and two different objectives differ by at least this time.
    Unequal micro-batches have no known grid: 0.
    """
    if not problem.is_even:
        return 0.0
    common = 0
    for value in _times(problem):
        units = round(value / _UNIT_MS)
        if abs(units * _UNIT_MS - value) > _EXACT * max(1.0, value):
            return 0.0
        common = math.gcd(common, units)
    return common * _UNIT_MS


@dataclass(frozen=True, slots=True)
class Goal:
    """A horizon below a schedule of ``incumbent_ms``, and the bound if no schedule reaches it.

    ``horizon_ms``: the search is for schedules with at most this objective. If there are none,
    ``proven_ms`` is a lower bound.
    """

    horizon_ms: float
    proven_ms: float
    grid: float

    @classmethod
    def of(cls, problem: Problem, incumbent_ms: float) -> Goal:
        """Return the goal of being better by one step of the grid, else by a hair.

        The hair is half of the gap that counts as none.
        """
        grid = grid_ms(problem)
        if grid > 0.0 and grid >= _LEAST_GRID * incumbent_ms:
            return cls(incumbent_ms - grid / 2, incumbent_ms, grid)
        hair = incumbent_ms * (1 - OPTIMAL_GAP / 2)
        return cls(hair, hair, 0.0)

    def between(self, low_ms: float, share: float) -> float:
        """Return a horizon a share of the way up to this one, between two steps of the grid."""
        middle_ms = low_ms + share * (self.horizon_ms - low_ms)
        return self.grid * (math.floor(middle_ms / self.grid) + 0.5) if self.grid else middle_ms

    def proven(self, bound_ms: float) -> float:
        """Return the bound of all schedules, given one of those looked for."""
        if self.grid > 0.0:
            # The next value on the grid, rounding aside.
            bound_ms = self.grid * math.ceil(bound_ms / self.grid - 1e-5)
        return min(bound_ms, self.proven_ms)


def _times(problem: Problem) -> Iterator[float]:
    for s, stage in enumerate(problem.stages):
        yield from (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
        yield from (stage.fused_backward_ms, stage.grad_sync_ms)
        for mode in (problem.menus[s][number] for number in usable_modes(problem, s)):
            yield mode.recompute_ms
            if mode.offload_bytes:
                yield problem.offload_ms(s, mode.offload_bytes)
                yield problem.reload_ms(s, mode.offload_bytes)
    for there, back in problem.boundary_ms:
        yield from (there, back)
    yield from (pair.hidden_ms for pair in problem.pairs)
    for lanes in problem.boundary_lanes:
        yield from (lane.ms for lane in lanes)
