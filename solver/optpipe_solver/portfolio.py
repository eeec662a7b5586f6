"""How a solve shares its time or work between its parts.

One thread: the parts take turns. Two or more: the local search runs beside the parts that prove,
and both work on the best schedule that either finds.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe_solver.improve.local_search import improve_by_local_search
from optpipe_solver.milp.improve import improve_by_milp, milp_fits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_solver.budget import Budget
    from optpipe_solver.incumbent import Incumbent

__all__ = ["Allowance", "Plan", "improve", "plans"]


class Part(NamedTuple):
    """A way to improve, and how many of its iterations or nodes make a unit of work."""

    run: Callable[..., int]
    per_unit: int


def _search(best: Incumbent, *, threads: int, work_limit: int | None, **given: Any) -> int:
    improve_by_local_search(best, **given)
    return 1


def _milp(best: Incumbent, *, work_limit: int | None, **given: Any) -> int:
    improve_by_milp(best, **given)
    return 1


_SEARCH = Part(_search, 20_000_000)
_MILP = Part(_milp, 200)


class Step(NamedTuple):
    """A part's turn: a share of what is left, and at most so many seconds or units."""

    part: Part
    share: float
    at_most: float = float("inf")


class Plan(NamedTuple):
    """Steps that need no start, steps to make once, steps to repeat while any of them helps."""

    early: tuple[Step, ...] = ()
    once: tuple[Step, ...] = ()
    again: tuple[Step, ...] = ()
    is_alone: bool = False


def plans(best: Incumbent, budget: Budget) -> tuple[Plan, ...]:
    """Return the plan of each lane."""
    proof = (Step(_MILP, 0.7),) if milp_fits(best.problem) else ()
    alone = budget.threads == 1 or budget.work_limit is not None
    if alone:
        return (
            Plan(
                once=(Step(_SEARCH, 0.1, 3.0), *proof),
                again=(Step(_SEARCH, 0.4, 6.0),),
                is_alone=True,
            ),
        )
    return (
        Plan(again=(Step(_SEARCH, 1.0),)),
        Plan(once=proof),
    )


class Allowance:
    """What a lane may still spend: seconds of the solve, or units of work."""

    _LEAST = 0.02

    def __init__(self, best: Incumbent, budget: Budget) -> None:
        self._best = best
        self._budget = budget
        self._units = budget.work_limit

    @property
    def left(self) -> float:
        """Seconds, or units where work is what is limited."""
        seconds = self._budget.time_limit_s - self._best.seconds()
        return seconds if self._units is None else min(self._units, max(0.0, seconds) * 1e9)

    @property
    def is_spent(self) -> bool:
        """Whether so little is left that no part can use it."""
        return self.left < self._LEAST

    def run(self, step: Step, threads: int, seed: int, stop: Callable[[], bool]) -> bool:
        """Give a part its turn; return whether it had anything to do."""
        amount = min(step.share * self.left, step.at_most)
        seconds = self._budget.time_limit_s - self._best.seconds()
        work = None if self._units is None else max(1, int(amount * step.part.per_unit))
        used = step.part.run(
            self._best,
            time_limit_s=amount if work is None else seconds,
            threads=threads,
            seed=seed,
            should_stop=stop,
            work_limit=work,
        )
        if self._units is not None:
            self._units -= used / step.part.per_unit
        return used > 0


def improve(
    best: Incumbent,
    plan: Plan,
    budget: Budget,
    *,
    threads: int,
    started: Callable[[], None],
    stop: Callable[[], bool],
) -> None:
    """Follow a plan until its allowance is spent, the gap is closed, or told to stop.

    ``started`` returns when there are starts to work on.
    """
    allowance = Allowance(best, budget)
    idle = 0
    for number, step in enumerate(_steps(plan, started)):
        if stop() or best.gap <= budget.gap or allowance.is_spent:
            return
        did = allowance.run(step, threads, budget.seed + number, stop)
        idle = 0 if did else idle + 1
        if idle > len(plan.early) + len(plan.once) + len(plan.again):
            return


def _steps(plan: Plan, started: Callable[[], None]) -> Iterator[Step]:
    yield from plan.early
    started()
    yield from plan.once
    yield from cycle(plan.again)
