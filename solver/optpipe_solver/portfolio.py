"""How a solve shares its time or work between its parts.

One thread: the parts take turns. Two or more: the local search runs beside the parts that prove,
and both work on the best schedule that either finds.
"""

from __future__ import annotations

from itertools import chain, cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe_solver.exact.counts import counts_can_search
from optpipe_solver.exact.improve import improve_by_exact_search
from optpipe_solver.exact.widen import improve_by_beam
from optpipe_solver.improve.search.local_search import improve_by_local_search
from optpipe_solver.improve.window import improve_by_windows
from optpipe_solver.milp.horizon.model import num_order_pairs
from optpipe_solver.milp.improve import fifo_loses_nothing, improve_by_milp, milp_fits
from optpipe_solver.milp.periodic.improve import improve_by_periodic
from optpipe_solver.restriction import improve_by_restrictions

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem
    from optpipe_solver.budget import Budget
    from optpipe_solver.incumbent import Incumbent

__all__ = ["Allowance", "Plan", "improve", "plans"]


class Part(NamedTuple):
    """A way to improve, and how many of its iterations or nodes make a unit of work.

    ``entry`` says what it costs before the first of them, in units.
    """

    run: Callable[..., int]
    per_unit: int
    entry: Callable[[Problem], float] = lambda _: 0.0


def _search(best: Incumbent, **given: Any) -> int:
    """Search on one thread, from the best few starts."""
    del given["threads"]
    return improve_by_local_search(best, starts=best.runners_up(), **given)


def _search_stretches(best: Incumbent, **given: Any) -> int:
    """Search on one thread, one stretch of time after the other."""
    del given["threads"]
    return improve_by_local_search(best, by_stretches=True, **given)


def _root_units(problem: Problem) -> float:
    """What building the model and its root take: far less where first in, first out is exact."""
    fifo = fifo_loses_nothing(problem)
    return num_order_pairs(problem, fifo=fifo) / (3000 if fifo else 100)


def _restricted(best: Incumbent, **given: Any) -> int:
    """Look for programs without offload, recompute, or both, on one thread."""
    del given["threads"]
    work = given.pop("work_limit")
    if work is not None:
        work /= _PER_UNIT
    return int(_PER_UNIT * improve_by_restrictions(best, _find, work_limit=work, **given))


def _find(best: Incumbent, budget: Budget, stop: Callable[[], bool]) -> None:
    improve(best, _finders(best.problem, budget), budget, threads=1, stop=stop)


_PER_UNIT = 1_000_000
_RESTRICTED = Part(_restricted, _PER_UNIT)
_SEARCH = Part(_search, 10_000_000)
_STRETCHES = Part(_search_stretches, 10_000_000)
_EXACT = Part(improve_by_exact_search, 100_000)
_BEAM = Part(improve_by_beam, 100_000)
_WINDOWS = Part(improve_by_windows, 5)
_PERIODIC = Part(improve_by_periodic, 500)
_MILP = Part(improve_by_milp, 10, _root_units)


class Step(NamedTuple):
    """A part's turn: a share of what is left, and at most so many seconds or units."""

    part: Part
    share: float
    at_most: float = float("inf")


class Plan(NamedTuple):
    """Steps to make once, then steps to repeat while any of them finds something to do.

    ``before`` comes first of all, and leaves the seeds of the others as they are without it.
    """

    before: tuple[Step, ...] = ()
    once: tuple[Step, ...] = ()
    again: tuple[Step, ...] = ()
    is_alone: bool = False


def plans(best: Incumbent, budget: Budget) -> tuple[Plan, ...]:
    """Return the plan of each lane."""
    alone = budget.threads == 1 or budget.work_limit is not None
    less = (Step(_RESTRICTED, 0.25 if alone else 0.5, 4.0),)
    proof = _proof(best.problem)
    if alone:
        return (
            Plan(
                before=less,
                once=(Step(_SEARCH, 0.1, 3.0), *proof),
                again=(Step(_SEARCH, 0.4, 6.0), Step(_WINDOWS, 0.4, 6.0)),
                is_alone=True,
            ),
        )
    return (
        Plan(again=(Step(_SEARCH, 1.0),)),
        Plan(before=less, once=proof, again=(Step(_WINDOWS, 1.0),)),
    )


def _proof(problem: Problem) -> tuple[Step, ...]:
    """Return the turns of the models: what may prove soon goes first, what cannot prove last.

    The beam comes when the local search has had some seconds: the shorter the horizon, the fewer
    states it has to choose among. Where first in, first out is exact it is one over counts, and
    comes as soon as what can be proven quickly is. On large problems it was never seen to find
    anything. Stretches come when what they would delay is proven or will hardly be.
    """
    exact = Step(_EXACT, 0.3, 8.0)
    blocks = Step(_PERIODIC, 0.2, 15.0)
    if not milp_fits(problem):
        return (exact, blocks)
    if fifo_loses_nothing(problem):
        counts = Step(_EXACT, 0.1, 2.0), Step(_BEAM, 0.6, 12.0)
        return (*counts, exact, Step(_MILP, 0.5), blocks)
    beam = Step(_BEAM, 0.25, 5.0)
    stretches = Step(_STRETCHES, 0.5, 8.0)
    again = Step(_PERIODIC, 0.1, 5.0), Step(_EXACT, 0.5, 30.0)
    return (exact, beam, *again, stretches, Step(_MILP, 0.5))


def _finders(problem: Problem, budget: Budget) -> Plan:
    """Return the plan for a restriction: what finds schedules, and nothing that only proves.

    A beam's first round alone is more work than a restriction mostly has: it is for who has time.
    """
    search = Step(_SEARCH, 1.0)
    if not counts_can_search(problem):
        return Plan(again=(search,))
    beam = (Step(_BEAM, 0.7),) if budget.work_limit is None else ()
    return Plan(once=(Step(_SEARCH, 0.2), Step(_EXACT, 0.3), *beam), again=(search,))


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
        work = None
        if self._units is not None:
            amount -= step.part.entry(self._best.problem)
            if amount <= 0:
                return False
            work = max(1, int(amount * step.part.per_unit))
        used = step.part.run(
            self._best,
            time_limit_s=amount if work is None else seconds,
            threads=threads,
            seed=seed,
            should_stop=stop,
            work_limit=work,
        )
        if self._units is not None:
            spent = used / step.part.per_unit + step.part.entry(self._best.problem)
            self._units -= spent
            self._best.work = (self._best.work or 0.0) + spent
        return used > 0


def improve(
    best: Incumbent,
    plan: Plan,
    budget: Budget,
    *,
    threads: int,
    stop: Callable[[], bool],
) -> None:
    """Follow a plan until its allowance is spent, the gap is closed, or told to stop."""
    allowance = Allowance(best, budget)
    idle = 0
    turns = enumerate(chain(plan.once, cycle(plan.again)))
    for number, step in chain(((0, step) for step in plan.before), turns):
        if stop() or best.gap <= budget.good_gap or allowance.is_spent:
            return
        did = allowance.run(step, threads, budget.seed + number, stop)
        idle = 0 if did else idle + 1
        if idle > len(plan.before) + len(plan.once) + len(plan.again):
            return
