"""How a solve shares its time or work between its parts.

With one thread, the parts take turns. With more, the local search and the parts that prove run at
the same time, and both work on the best schedule that either finds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain, cycle
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from optpipe.schedule import OPTIMAL_GAP
from optpipe_solver.arrays.encoding import (
    CompiledProblem,
    keeps_limits,
    keeps_turns,
    keeps_uniform_modes,
)
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.budget import Stopped, stopped_by
from optpipe_solver.exact.fifo_search import fifo_can_search
from optpipe_solver.exact.rounds import (
    IN_TURN,
    SMALL,
    beam_can_improve,
    exact_search_can_prove,
    improve_by_beam,
    improve_by_exact_search,
)
from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.families.common import NotApplicableReason
from optpipe_solver.families.polish_blocks import blocks_can_improve, improve_by_blocks
from optpipe_solver.feasibility import exact_parts_know, feasibility, fifo_loses_nothing
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.local_search.dispatching import dispatched, rules_can_dispatch
from optpipe_solver.local_search.pairing import improve_by_pairing, pairing_can_improve
from optpipe_solver.local_search.search import (
    improve_by_local_search,
    improve_by_stretches,
    local_search_can_improve,
)
from optpipe_solver.milp.horizon.items import MOST_PAIRS, num_order_pairs
from optpipe_solver.milp.horizon.model import improve_by_milp
from optpipe_solver.offload_fit.fit import Frame, fit
from optpipe_solver.reductions import (
    fewer_choices,
    kept_alone,
    orders,
    projections,
    stand_ins,
    whole_samples,
)
from optpipe_solver.uniform_modes import with_uniform_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Ints
    from optpipe_solver.arrays.encoding import Rows
    from optpipe_solver.budget import Limits, Progress, Stop
    from optpipe_solver.families.registry import Family
    from optpipe_solver.reductions import Reduction

__all__ = [
    "MILP_PLAN",
    "FamilyStart",
    "Improve",
    "SearchPlan",
    "all_starts",
    "improve",
    "improve_by_restrictions",
    "is_large",
    "milp_may_prove",
    "plans",
    "restrictions",
    "rule_starts",
    "run_threads",
]


class Improve(Protocol):
    """A method of improvement: it offers results to ``best`` and counts its work in ``stop``."""

    def __call__(self, best: Incumbent, stop: Stop, /) -> None:
        """Work until the turn is over or nothing is left to do, which nothing spent says."""


class SearchPart(NamedTuple):
    """A way to improve, its name, and how many of its iterations or nodes make a unit of work.

    ``supports`` returns whether the part can run on a problem; if not, its turns are left out.
    """

    name: str
    run: Improve
    per_unit: int | None
    supports: Callable[[Problem], bool] = lambda _: True


def _restricted(best: Incumbent, stop: Stop) -> None:
    """Look for programs without offload, recompute, or both, on one thread."""
    improve_by_restrictions(best, stop, _find)


def _find(best: Incumbent, stop: Stop) -> None:
    improve(best, _finders(best.problem, stop), stop)


_RESTRICTED = SearchPart("restrictions", _restricted, None)
_SEARCH = SearchPart("local-search", improve_by_local_search, 10_000_000, local_search_can_improve)
_PAIRING = SearchPart("pairing", improve_by_pairing, 200_000, pairing_can_improve)
_STRETCHES = SearchPart("stretches", improve_by_stretches, 10_000_000, local_search_can_improve)
_EXACT = SearchPart("exact", improve_by_exact_search, 700_000, exact_search_can_prove)
_BEAM = SearchPart("beam", improve_by_beam, 100_000, beam_can_improve)
_PERIODIC = SearchPart("periodic", improve_by_blocks, 500, blocks_can_improve)
_MILP = SearchPart("milp", improve_by_milp, 10, exact_parts_know)


class Step(NamedTuple):
    """A part's turn: a share of the budget left, and at most so many seconds or units.

    ``goes_on``: another one like it follows immediately, as long as this method raises the bound.
    """

    part: SearchPart
    share: float
    at_most: float = inf
    goes_on: str = ""


class SearchPlan(NamedTuple):
    """Steps to make once, then steps to repeat while any of them finds something to do.

    ``before`` comes first of all, and leaves the seeds of the others as they are without it.
    """

    before: tuple[Step, ...] = ()
    once: tuple[Step, ...] = ()
    again: tuple[Step, ...] = ()


MILP_PLAN = SearchPlan(once=(Step(_MILP, 1.0),))
"""The full-horizon model alone: ``method="milp"``."""


def plans(problem: Problem, limits: Limits) -> tuple[SearchPlan, ...]:
    """Return the plan of each thread of a solve: one where it has one thread or limited work.

    The full-horizon model has a turn only if `milp_may_prove`. On the other problems of
    ``benchmarks`` it found none of 82 schedules and none of 52 proofs at 8 units of work. It took
    20 to 30 CPU seconds on some (measured).
    """
    if not problem.is_even:
        part = _RESTRICTED if problem.pairs else _SEARCH
        return (SearchPlan(again=(Step(part, 1.0),)),)
    if problem.pairs:
        alone = Step(_RESTRICTED, 0.2, 5.0)
        proofs = (Step(_EXACT, 0.2, 8.0),) if _is_tight(problem) else ()
        return (SearchPlan(before=(alone,), once=proofs, again=(Step(_PAIRING, 1.0),)),)
    proof = _proof(problem)
    cells = len(problem.stages) * problem.num_microbatches
    if cells <= SMALL and not exact_parts_know(problem):
        return _small_menu_plans(limits, proof)
    if limits.threads == 1 or limits.work_limit is not None:
        before = (Step(_RESTRICTED, 0.5 if problem.has_modes else 0.25, 4.0),)
        once = (Step(_SEARCH, 0.1, 3.0), *proof)
        return (SearchPlan(before=before, once=once, again=(Step(_SEARCH, 0.4, 6.0),)),)
    less: tuple[Step, ...] = (Step(_RESTRICTED, 0.5, 4.0),)
    if cells <= _MOST_CELLS_SOON and proof[0].part is _EXACT:
        soon = Step(_EXACT, 0.55), Step(_BEAM, 0.2, 3.0), Step(_EXACT, 0.8)
        proof, less = (*soon, *proof[1:]), (Step(_RESTRICTED, 0.15, 4.0),)
    return (
        SearchPlan(again=(Step(_SEARCH, 1.0),)),
        SearchPlan(before=less, once=proof, again=(Step(_SEARCH, 1.0),)),
    )


def _is_tight(problem: Problem) -> bool:
    """Whether some device has room for at most p + 1 activations, p devices.

    With more, exact searches met too many states to prove anything (the suite ``pairs``).
    """
    return any(
        problem.room_bytes(device)
        < (len(problem.devices) + 2) * min(problem.stages[s].activation_bytes for s in stages)
        for device, stages in enumerate(problem.stages_of)
        if stages
    )


def _small_menu_plans(limits: Limits, proof: tuple[Step, ...]) -> tuple[SearchPlan, ...]:
    """Return the plans where all cells of a menu may be searched within seconds.

    The first schedule of the local search is usually the best, so restrictions come later.
    """
    early = Step(_EXACT, 0.3, 8.0)
    less = Step(_RESTRICTED, 0.5, 4.0)
    if limits.threads == 1 or limits.work_limit is not None:
        once = (Step(_SEARCH, 0.1, 3.0), early, less, *proof)
        return (SearchPlan(once=once, again=(Step(_SEARCH, 0.6, 6.0), Step(_EXACT, 0.2, 6.0))),)
    return (
        SearchPlan(again=(Step(_SEARCH, 1.0),)),
        SearchPlan(once=(early, less, *proof), again=(Step(_SEARCH, 0.6), Step(_EXACT, 0.4))),
    )


_MOST_CELLS_SOON = 40
"""Cells up to which exact searches come early, next to a local search.

Of the 36 instances of ``benchmarks`` so small they gave 16 bounds, and the beam one schedule."""


_MOST_PROVEN_PAIRS = 1_000
"""Pairs of actions up to which the full-horizon model may prove something in seconds."""


_MOST_CELLS_WITH_MENUS = 32
"""Cells up to which the exact searches are asked where menus say what v1 cannot."""


def milp_may_prove(problem: Problem) -> bool:
    """Whether a small problem has a host that could be full, which no exact search knows of."""
    if not exact_parts_know(problem):
        return False
    most: Counter[str] = Counter()
    for s, stage in enumerate(problem.stages):
        if problem.can_offload(s):
            host = problem.devices[stage.device].host
            most[host] += stage.offload_bytes * problem.num_microbatches
    may_fill = any(
        host.memory_bytes is not None and most[host.name] > host.memory_bytes
        for host in problem.hosts
    )
    return may_fill and num_order_pairs(problem, fifo=False) <= _MOST_PROVEN_PAIRS


def _proof(problem: Problem) -> tuple[Step, ...]:
    """Return the turns of the parts that prove; parts that may prove soon go first.

    The beam comes when the local search has had some seconds: the shorter the horizon, the fewer
    states it has to choose among. If first in, first out is exact, it is one over counts and
    comes as soon as what can be proven quickly is. On large problems it was never seen to find
    anything; there alone, building blocks are annealed. Stretches come when what they would delay
    is proven or will hardly be.
    """
    if not exact_parts_know(problem):
        cells = len(problem.stages) * problem.num_microbatches
        few = (Step(_EXACT, 0.3, 8.0),) if SMALL < cells <= _MOST_CELLS_WITH_MENUS else ()
        return (*few, Step(_STRETCHES, 0.3, 5.0))
    exact = Step(_EXACT, 0.3, 8.0, goes_on=IN_TURN)
    if num_order_pairs(problem, fifo=True) > MOST_PAIRS:
        return (exact, Step(_PERIODIC, 0.2, 15.0))
    if fifo_loses_nothing(problem):
        counts = Step(_EXACT, 0.1, 2.0, goes_on=IN_TURN), Step(_BEAM, 0.6, 12.0)
        return (*counts, exact)
    beam = Step(_BEAM, 0.25, 5.0)
    stretches = Step(_STRETCHES, 0.5, 8.0)
    again = Step(_EXACT, 0.5, 30.0)
    milp = (Step(_MILP, 0.5),) if milp_may_prove(problem) else ()
    return (exact, beam, again, stretches, *milp)


def _finders(problem: Problem, stop: Stop) -> SearchPlan:
    """Return the plan for a restriction: parts that find schedules, and none that only prove.

    A beam's first round alone is more work than most restrictions have, so it needs much time.
    """
    again = (Step(_SEARCH, 1.0),)
    if stop.work is not None or not fifo_can_search(problem):
        return SearchPlan(again=again)
    return SearchPlan(once=(Step(_SEARCH, 0.2), Step(_BEAM, 0.7)), again=again)


_LEAST = 0.02
"""Seconds or units that no part can use any more."""


def improve(
    best: Incumbent, plan: SearchPlan, stop: Stop, *, good_gap: float = OPTIMAL_GAP
) -> None:
    """Follow a plan until its budget is spent, the gap is closed, or the caller stops it.

    The n-th step has the n-th seed from that of ``stop`` on.
    """
    idle = 0
    turns = enumerate(chain(plan.once, cycle(plan.again)))
    for number, step in chain(((0, step) for step in plan.before), turns):
        has_raised, spent = step.part.supports(best.problem), False
        while has_raised:
            if stop.is_over() or best.gap <= good_gap or stop.left < _LEAST:
                return
            turn = stop.turn(
                step.share, step.at_most, steps=step.part.per_unit, seed=stop.seed + number
            )
            bound_ms = best.bound_ms
            with best.clocked(step.part.name):
                step.part.run(best, turn)
            if stop.work is not None:
                best.work = stop.spent
            has_raised = best.bound_ms > bound_ms and best.bound_method == step.goes_on
            spent = spent or turn.spent > 0
        idle = 0 if spent else idle + 1
        if idle > len(plan.before) + len(plan.once) + len(plan.again):
            return


# --- The threads of a solve.
# Compiled search and HiGHS release the interpreter while they run, so threads run side by side.
# At the end of a solve every loop that can take a second raises `Stopped` at its next step, and
# HiGHS ends at its next callback. The solve waits for all of them: a thread that goes on would
# hold up the exit of the interpreter, and to cut a thread inside HiGHS aborts the process.

_TICK_S = 0.02


def run_threads(
    work: Sequence[Callable[[], None]], should_end: Callable[[], bool], end: threading.Event
) -> None:
    """Run every function in a thread of its own until all have returned; stop them at the end.

    No thread is left when this function returns.

    Parameters
    ----------
    work
        Each calls `check_stop` often, which raises `Stopped` in it once ``end`` is set.
    should_end
        Called in the caller's thread, before anything runs and then fifty times a second.
    end
        Set when all are to end.

    Raises
    ------
    Exception
        The first exception that a function raised; the others are stopped.
    """
    faults: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            with stopped_by(end.is_set):
                function()
        except Stopped:
            return
        except BaseException as fault:  # noqa: BLE001 - raised again by the caller's thread
            faults.append(fault)
            end.set()

    threads = [
        threading.Thread(target=run, args=(function,), name=f"solve-{number}")
        for number, function in enumerate(work)
    ]
    if should_end():
        end.set()
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) and not (faults or should_end()):
            next(t for t in threads if t.is_alive() or t is threads[-1]).join(_TICK_S)
    finally:
        end.set()
        for thread in threads:
            thread.join()
    if faults:
        raise faults[0]


# --- Every start the solver has: families as they are, and fitted into the memory limits.

_LARGE = 20_000
"""Compute actions beyond which no time is spent on copies that are unlikely to win."""
_LOST = 3
_RULES_WORK = 2_000_000  # about 0.2 s
_TURNS = {"1f1b": 0, "interleaved": 0, "zb-v": 0, "gis": 0, "gpipe": 2}
"""On a large problem what is made in linear time and short comes first, what is long last."""


def is_large(problem: Problem) -> bool:
    """Whether to make a start takes so long that their order matters."""
    return 3 * len(problem.stages) * problem.num_microbatches > _LARGE


@dataclass(frozen=True, slots=True)
class FamilyStart:
    """Programs of a method, or the reason why it has none.

    ``legal`` is False for programs over a memory limit (they are shown, never returned);
    ``wants`` is the code of the reason why there are none.
    """

    method: str
    programs: Programs | None
    objective_ms: float
    legal: bool
    seconds: float
    reason: str = ""
    wants: NotApplicableReason | None = None

    @property
    def family(self) -> str:
        """The name of the family, without what made its programs fit."""
        return self.method.partition("+")[0].partition(" ")[0]


def all_starts(problem: Problem, methods: Collection[str] | None = None) -> Iterator[FamilyStart]:
    """Yield the programs of every family, then fitted copies of those that exceed memory.

    Copies of short originals come first. Legality and time come from compiled code, which equals
    the reference (tested). Programs of families can be illegal only in memory.

    For a large problem the short and quick families come first, and Serial only if none of them is
    legal. A copy is made only if its original is shorter than the best legal start so far, and if
    no other has the same length. Offload rarely makes a schedule shorter. Copies end after three in
    a row that lose.

    Parameters
    ----------
    problem
        Any problem.
    methods
        Names of families; None for all.
    """
    if problem.has_samples:
        return _sliced_starts(problem, methods)
    if not problem.is_even:
        return _dealt_starts(problem, methods)
    return _menu_starts(problem, methods) if problem.has_modes else _plain_starts(problem, methods)


def _families(problem: Problem) -> tuple[Family, ...]:
    """Return all families in the order in which they are built."""
    if not is_large(problem):
        return FAMILIES
    return tuple(sorted(FAMILIES, key=lambda family: _TURNS.get(family.name, 1)))


def _plain_starts(problem: Problem, methods: Collection[str] | None) -> Iterator[FamilyStart]:
    builder = _StartBuilder(problem)
    over: list[tuple[float, str, Rows]] = []
    best_ms = inf
    for family in _families(problem):
        is_longest = builder.is_large and family.name == "serial" and best_ms < inf
        if not is_longest and (methods is None or family.name in methods):
            start, rows = builder.build(family, problem)
            yield start
            if start.legal:
                best_ms = min(best_ms, start.objective_ms)
            elif rows is not None and not (builder.is_large and start.objective_ms >= best_ms):
                over.append((start.objective_ms, start.method, rows))
            del start, rows  # a large problem's take 200 MB, while the next start is built
    lost, seen = 0, set()
    for objective_ms, method, rows in sorted(over, key=itemgetter(0)):
        if builder.is_large and (objective_ms >= best_ms or lost == _LOST):
            return
        if builder.is_large and objective_ms in seen:
            continue
        seen.add(objective_ms)
        fitted = builder.fit(method, rows)
        if fitted is not None:
            yield fitted
            lost = lost + 1 if fitted.objective_ms >= best_ms else 0
            best_ms = min(best_ms, fitted.objective_ms)


def _menu_starts(problem: Problem, methods: Collection[str] | None) -> Iterator[FamilyStart]:
    """Yield starts of a problem of v2 only: kept, with one mode per stage, of projections.

    For a large problem only the first projection gets time: v1's part of the menu.
    """
    builder = _StartBuilder(problem)
    kept = kept_alone(problem)
    has_any = False
    for family in _families(problem):
        is_serial = family.name == "serial"
        if (methods is not None and family.name not in methods) or (
            is_serial and builder.is_large and has_any
        ):
            continue
        start, rows = builder.build(family, problem if is_serial else kept)
        yield start
        has_any = has_any or start.legal
        if rows is not None and not start.legal:
            fitted = builder.with_modes(family.name, rows)
            if fitted is not None:
                yield fitted
                has_any = has_any or fitted.legal
    for projection in projections(problem)[: 1 if builder.is_large else None]:
        for start in _lifted_starts(projection, methods):
            if start.programs is not None and start.legal and start.method != "serial":
                yield replace(start, method=f"{start.method} {projection.name}")


def _lifted_starts(reduction: Reduction, methods: Collection[str] | None) -> Iterator[FamilyStart]:
    """Yield the starts of a reduction with programs of the original; lengths are its own."""
    for start in all_starts(reduction.problem, methods):
        programs = None if start.programs is None else reduction.lift(start.programs)
        yield replace(start, programs=programs)


def _dealt_starts(problem: Problem, methods: Collection[str] | None) -> Iterator[FamilyStart]:
    """Yield the starts of problems of equal micro-batches with the unequal ones in their places."""
    builder = _StartBuilder(problem)
    if methods is None or "serial" in methods:
        family = next(family for family in FAMILIES if family.name == "serial")
        yield builder.build(family, problem)[0]
    ways = orders(problem)
    for number, stand_in in enumerate(stand_ins(problem)):
        for start in _lifted_starts(stand_in, methods):
            if start.method == "serial":
                continue
            if start.programs is not None:
                yield builder.deal(start, ways)
            elif number == 0:
                yield start


def _sliced_starts(problem: Problem, methods: Collection[str] | None) -> Iterator[FamilyStart]:
    """Yield the families of slices, made to fit, and those of whole samples, cut into slices."""
    builder = _StartBuilder(problem)
    for family in FAMILIES:
        if not family.knows_slices or (methods is not None and family.name not in methods):
            continue
        start, rows = builder.build(family, problem)
        yield start
        if rows is not None and not start.legal:
            fitted = builder.with_modes if problem.has_modes else builder.fit
            if (sliced := fitted(family.name, rows)) is not None:
                yield sliced
    known = {family.name for family in FAMILIES if family.knows_slices}
    for sliced in _lifted_starts(whole_samples(problem), methods):
        if sliced.method not in known:
            yield from [sliced] if sliced.programs is None else builder.cut(sliced)


def rule_starts(problem: Problem, seed: int) -> Iterator[FamilyStart]:
    """Yield what dispatching rules make of unequal micro-batches; it is ours, of no family."""
    if problem.is_even or not rules_can_dispatch(problem):
        return
    began, compiled = time.perf_counter(), CompiledProblem.of(problem)
    found = dispatched(compiled, orders(problem), _RULES_WORK, seed)
    if found is not None:
        seconds, built = time.perf_counter() - began, compiled.decode(found.rows)
        yield FamilyStart(
            "dispatching rules", built, found.objective_ms, legal=True, seconds=seconds
        )


class _StartBuilder:
    """Builds, measures and fits, for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.compiled = CompiledProblem.of(problem)
        self.is_large = is_large(problem)

    def build(self, family: Family, variant: Problem) -> tuple[FamilyStart, Rows | None]:
        """Return a variant's programs of a family, judged on the problem, also as integers."""
        began = time.perf_counter()
        try:
            programs = family.build(variant)
        except NotApplicable as why:
            seconds = time.perf_counter() - began
            return FamilyStart(family.name, None, 0.0, False, seconds, str(why), why.reason), None
        rows = self.compiled.encode(programs)
        if not keeps_uniform_modes(self.compiled, rows.modes):
            # Samples that each fit alone in another mode of the stage.
            fitted = with_uniform_modes(self.compiled, self.compiled.without_transfers(rows))
            if fitted is None:
                reason = "no single mode of a stage with uniform_modes fits all micro-batches"
                wants, seconds = NotApplicableReason.DOES_NOT_FIT, time.perf_counter() - began
                return FamilyStart(family.name, None, 0.0, False, seconds, reason, wants), None
            rows, programs = fitted, self.compiled.decode(fitted)
        return self._measured(family.name, programs, rows, began), rows

    def with_modes(self, method: str, rows: Rows) -> FamilyStart | None:
        """Return the start with one mode per stage so that it fits the devices, if there is one."""
        began = time.perf_counter()
        if not self.compiled.is_compute_only(rows):
            return None
        fitted = with_uniform_modes(self.compiled, rows)
        if fitted is None:
            return None
        return self._measured(f"{method}+modes", self.compiled.decode(fitted), fitted, began)

    def _measured(self, method: str, programs: Programs, rows: Rows, began: float) -> FamilyStart:
        length_ms = self.compiled.objective_ms(rows)
        legal = length_ms < inf and keeps_limits(self.compiled, rows)
        return FamilyStart(method, programs, length_ms, legal, time.perf_counter() - began)

    def deal(self, start: FamilyStart, ways: Sequence[Ints]) -> FamilyStart:
        """Return the best deal of programs made for equal micro-batches, legal ones first."""
        began = time.perf_counter()
        rows = self.compiled.encode(start.programs or ())
        best: tuple[bool, float, Rows] | None = None
        for order in ways:
            tried = self.compiled.deal(rows, order)
            length_ms = self.compiled.objective_ms(tried)
            if best is not None and (best[0] or length_ms == inf) and length_ms >= best[1]:
                continue
            is_legal = length_ms < inf and keeps_limits(self.compiled, tried)
            is_legal = is_legal and keeps_turns(self.compiled, tried)
            if best is None or (is_legal, -length_ms) > (best[0], -best[1]):
                best = is_legal, length_ms, tried
        assert best is not None  # noqa: S101 - there is always the order given
        is_legal, length_ms, found = best
        seconds = start.seconds + time.perf_counter() - began
        return replace(
            start,
            programs=self.compiled.decode(found),
            objective_ms=length_ms,
            legal=is_legal,
            seconds=seconds,
        )

    def cut(self, uncut: FamilyStart) -> Iterator[FamilyStart]:
        """Yield a start of whole samples judged in slices, and with modes so that it fits."""
        began, programs = time.perf_counter(), uncut.programs or ()
        rows = self.compiled.encode(programs)
        start = self._measured(uncut.method, programs, rows, began)
        yield replace(start, seconds=uncut.seconds + start.seconds)
        if self.problem.has_modes and not start.legal:
            fitted = self.with_modes(uncut.method, rows)
            if fitted is not None:
                yield fitted

    def fit(self, method: str, rows: Rows) -> FamilyStart | None:
        """Return the start with what must be offloaded or recomputed, if that can be."""
        began = time.perf_counter()
        if not self.compiled.is_compute_only(rows):
            return None
        fitted = fit(Frame(self.problem, rows))
        if fitted is None:
            return None
        programs = fitted.programs()
        seconds = time.perf_counter() - began
        return FamilyStart(f"{method}+offload", programs, fitted.objective_ms, True, seconds)


# --- Find programs of a problem among those without offload, without recompute, or without both.
# Such programs are as legal for the problem and exactly as long there. A bound of the problem is
# one of each restriction; a bound of a restriction is none of the problem's: it stays in the
# restriction's own `Incumbent`, and says when to stop looking there (docs/solve.md).


def restrictions(problem: Problem) -> tuple[Reduction, ...]:
    """Return the reductions to fewer choices that have a schedule, the strictest first."""
    found = fewer_choices(problem)
    return tuple(less for less in found if feasibility(less.problem).plan is not None)


def improve_by_restrictions(best: Incumbent, stop: Stop, find: Improve) -> None:
    """Look for programs in each restriction that its bound leaves room for.

    Every schedule found there is offered immediately. So, unless the turn ends earlier, ``best``
    ends no longer than any family of these restrictions and any schedule that ``find`` has found
    in one. A problem can still be worse than its restriction solved alone *for the same time*.
    Large problems are skipped.

    Parameters
    ----------
    best
        Receives the improvements; its bound is used, and never changed.
    stop
        For all restrictions together, in equal parts; bounds and families take time, but no work.
    find
        Improves the incumbent of a restriction.
    """
    if best.programs is None or is_large(best.problem):
        return
    searches = [_RestrictedSearch(best, less) for less in restrictions(best.problem)]
    useful = [search for search in searches if search.is_useful(stop)]
    if best.problem.has_modes:
        useful = _promising(useful, stop)
    for number, search in enumerate(useful):
        if stop.is_over():
            break
        if search.inner.programs is None:
            search.start(stop)
        search.run(find, stop, 1.0 / (len(useful) - number))


_FAR_BEHIND, _MOST_OTHERS = 0.05, 3
"""Share by which the starts of a narrower menu may be longer than the shortest schedule.

Menus with longer starts are not searched. The second number is the most menus in addition to v1's.
"""


def _promising(searches: list[_RestrictedSearch], stop: Stop) -> list[_RestrictedSearch]:
    """Return the first menu, and the others with the best starts, the best last.

    The first is v1's menu: without it a large menu could be worse than a small one. The others
    differ in what stages hold when they keep, and starts show which are wrong.
    """
    for search in searches:
        search.start(stop)
    near = [
        search
        for search in searches[1:]
        if search.inner.objective_ms <= search.best.objective_ms * (1 + _FAR_BEHIND)
    ]
    near.sort(key=lambda search: search.inner.objective_ms)
    return near[:_MOST_OTHERS][::-1] + searches[:1]


class _RestrictedSearch:
    """One restriction: its incumbent passes accepted schedules on to that of the problem."""

    def __init__(self, best: Incumbent, less: Reduction) -> None:
        self.best = best
        self.less = less
        self.inner = Incumbent(less.problem, self._hand_on)
        self.inner.offer_bound(best.bound_ms, best.bound_method)

    def _hand_on(self, progress: Progress) -> None:
        if progress.programs is not None:
            self.best.offer(
                self.less.lift(progress.programs),
                f"{progress.method} {self.less.name}",
                expected_ms=progress.objective_ms,
            )

    @property
    def is_settled(self) -> bool:
        """Whether the restriction has no schedule that is better than the best known."""
        return self.inner.bound_ms >= self.best.objective_ms * (1 - OPTIMAL_GAP)

    def is_useful(self, stop: Stop) -> bool:
        """Bound the restriction until it can contain nothing better."""
        for bound in lower_bounds(self.less.problem, should_stop=stop.is_over):
            if self.is_settled:
                return False
            self.inner.offer_bound(bound.ms, bound.method)
        return not self.is_settled

    def start(self, stop: Stop) -> None:
        """Offer the restriction's families."""
        for family_start in all_starts(self.less.problem):
            if family_start.programs is not None and family_start.legal:
                self.inner.offer(
                    family_start.programs,
                    family_start.method,
                    expected_ms=family_start.objective_ms,
                )
                self.inner.keep(family_start.programs, family_start.objective_ms)
            if stop.is_over():
                return

    def run(self, find: Improve, stop: Stop, share: float) -> None:
        """Let ``find`` improve the restriction; keep its best to start from."""
        inner = self.inner
        if inner.programs is None or self.is_settled or stop.is_over():
            return
        # With limited work, a part that stops early would end at another place each time.
        find(
            inner,
            stop.turn(share, threads=1, should_stop=lambda: stop.work is None and self.is_settled),
        )
        self.best.keep(self.less.lift(inner.programs), inner.objective_ms)
