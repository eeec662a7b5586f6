"""Find programs of a problem among those without offload, without recompute, or without both.

*Argument.* A restriction forbids OFFLOAD, RECOMPUTE or both and changes nothing else. Neither the
times nor the bytes of programs without such actions depend on what is forbidden, so programs of a
restriction are as legal for the problem and exactly as long there. A bound of the problem is one of
each restriction, whose schedules are some of the problem's. A bound of a restriction is none of the
problem's: it stays in the restriction's own `Incumbent`, and says when to stop looking there.

*Why.* A family that offloads what does not fit can be longer than the same family where it may only
recompute; a search with fewer choices reaches what is good without them in fewer steps; and where
nothing can be offloaded or recomputed first in, first out loses nothing, so that searches over
counts apply. Where the choices are worth much, a bound of the restriction is above the best family,
and it costs milliseconds: so it is in 27 of 30 problems of `benchmarks` with choices (measured).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from optpipe.schedule import OPTIMAL_GAP
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.budget import Budget
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.milp.horizon.deadline import Deadline
from optpipe_solver.smallest_memory import feasibility
from optpipe_solver.starts import all_starts

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem
    from optpipe_solver.result import Progress

    Find: TypeAlias = "Callable[[Incumbent, Budget, Callable[[], bool]], object]"

__all__ = ["Restriction", "improve_by_restrictions", "restrictions"]

_LARGE = 20_000
"""Passes beyond which the families of a restriction take too long."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """A problem that allows less, and what it goes without, in words."""

    name: str
    problem: Problem


def restrictions(problem: Problem) -> tuple[Restriction, ...]:
    """Return the restrictions that have a schedule, the one that allows least first."""
    allowed = _allowed(problem)
    choices = [allowed, *((one,) for one in allowed if len(allowed) > 1)]
    found = (_without(problem, forbidden) for forbidden in choices if forbidden)
    return tuple(less for less in found if feasibility(less.problem).plan is not None)


def _allowed(problem: Problem) -> tuple[str, ...]:
    """Return what any stage can do beside keeping its activations."""
    offload = any(problem.can_offload(s) for s in range(len(problem.stages)))
    recompute = any(stage.can_recompute for stage in problem.stages)
    return ("offload",) * offload + ("recompute",) * recompute


def _without(problem: Problem, forbidden: tuple[str, ...]) -> Restriction:
    changed: dict[str, int | None] = {}
    if "offload" in forbidden:
        changed["offload_bytes"] = 0
    if "recompute" in forbidden:
        changed |= {"recompute_ms": None, "checkpoint_bytes": None}
    stages = tuple(stage.model_copy(update=changed) for stage in problem.stages)
    less = problem.model_copy(update={"stages": stages})
    return Restriction(f"without {' and '.join(forbidden)}", less)


def improve_by_restrictions(
    best: Incumbent,
    find: Find,
    *,
    time_limit_s: float,
    seed: int,
    should_stop: Callable[[], bool] | None = None,
    work_limit: float | None = None,
) -> float:
    """Look for programs in each restriction that its bound leaves room for; return the units.

    Every schedule met there is offered at once, so in the end ``best`` is no longer than any family
    of these restrictions, nor than anything that ``find`` has found in one, as long as neither time
    nor ``should_stop`` ends it before. That a problem is never worse than its restriction solved
    alone *for as long* does not follow, and is not so. Large problems are left alone.

    Parameters
    ----------
    best
        Improvements go there; its bound is used, and never changed.
    find
        Improves the incumbent of a restriction within a budget until told to stop.
    time_limit_s, work_limit
        Seconds and, where work is limited, units for all restrictions together, in equal parts.
        Bounds and families take time, and no units.
    """
    passes = 3 * len(best.problem.stages) * best.problem.num_microbatches
    if best.programs is None or passes > _LARGE:
        return 0.0
    end = Deadline(time_limit_s, should_stop or (lambda: False))
    searches = [_Search(best, less) for less in restrictions(best.problem)]
    useful = [search for search in searches if search.is_useful(end)]
    spent = 0.0
    for number, search in enumerate(useful):
        if end.is_over():
            break
        search.start(end)
        seconds = end.left_s() / (len(useful) - number)
        work = None if work_limit is None else work_limit / len(useful)
        spent += search.run(find, seconds, work, seed, end)
    return spent


class _Search:
    """One restriction: its incumbent hands on to the problem's what it takes in."""

    def __init__(self, best: Incumbent, less: Restriction) -> None:
        self.best = best
        self.less = less
        self.inner = Incumbent(less.problem, self._hand_on)
        self.inner.offer_bound(best.bound_ms, best.bound_method)

    def _hand_on(self, progress: Progress) -> None:
        if progress.programs is not None:
            self.best.offer(
                progress.programs,
                f"{progress.method} {self.less.name}",
                expected_ms=progress.objective_ms,
            )

    @property
    def is_settled(self) -> bool:
        """Whether the restriction has nothing that is better than what is known."""
        return self.inner.bound_ms >= self.best.objective_ms * (1 - OPTIMAL_GAP)

    def is_useful(self, end: Deadline) -> bool:
        """Bound the restriction until nothing better can be in it."""
        for bound in lower_bounds(self.less.problem, should_stop=end.is_over):
            if self.is_settled:
                return False
            self.inner.offer_bound(bound.ms, bound.method)
        return not self.is_settled

    def start(self, end: Deadline) -> None:
        """Offer the restriction's families."""
        for made in all_starts(self.less.problem):
            if made.programs is not None and made.legal:
                self.inner.offer(made.programs, made.method, expected_ms=made.objective_ms)
                self.inner.keep(made.programs, made.objective_ms)
            if end.is_over():
                return

    def run(
        self, find: Find, seconds: float, work: float | None, seed: int, end: Deadline
    ) -> float:
        """Let ``find`` improve the restriction; keep its best to start from; return the units."""
        inner = self.inner
        if inner.programs is None or self.is_settled or end.is_over():
            return 0.0
        budget = Budget(time_limit_s=inner.seconds() + seconds, work_limit=work, seed=seed)
        # Where work is limited, a part that is told to stop would end at another place each time.
        find(inner, budget, lambda: end.is_over() or (work is None and self.is_settled))
        self.best.keep(inner.programs, inner.objective_ms)
        return inner.work or 0.0
