"""The search over cuts: gather by bound, evaluate quickly, move cut points, halve, solve the last.

A candidate counts as refuted only if its lower bound exceeds a known schedule. Candidates dropped
because a short search found them slower are reported as such.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import ModelError
from optpipe.model import fuse
from optpipe.units import ShortRepr
from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.bounds import lower_bound
from optpipe_solver.budget import Progress, Stop
from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.feasibility import feasibility
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.local_search.pairing import improve_by_pairing
from optpipe_solver.local_search.search import improve_by_local_search
from optpipe_solver.milp.plan import (
    PAIRED_PATTERNS,
    PATTERNS,
    boundaries,
    layer_kinds,
    patterns_of,
    plan_pattern,
)
from optpipe_solver.milp.plan.cut_problem import cuts_with_a_layer_moved
from optpipe_solver.plan.cuts import any_cut_bound, best_cuts, even_cut
from optpipe_solver.plan.lines import PlacementLine, RunTable, natural_order
from optpipe_solver.portfolio import all_starts
from optpipe_solver.solve import solve
from optpipe_solver.uniform_modes import in_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optpipe.model import Model
    from optpipe.problem import Problem, Stage
    from optpipe.schedule import Programs
    from optpipe_solver.arrays.encoding import Rows
    from optpipe_solver.milp.plan import Pattern
    from optpipe_solver.plan.lines import Lines

__all__ = [
    "CutCandidate",
    "Fate",
    "HandPlan",
    "PlanRow",
    "PlanSearch",
    "cut_of",
    "evaluate_quickly",
    "hand_cuts",
    "hand_plans",
    "search",
]


_PATTERNS, _GATHER, _EVALUATE, _MOVE, _HALVE = 0.3, 0.2, 0.25, 0.25, 0.35
"""Shares of the time left at its start that a phase may take; the rest solves the finalists."""

_EVEN = 0.1
"""Share of the time for the families of the even cut, if one of them fits by then."""

_PATTERN_TURN = 0.34
"""Share of the time left for patterns that a single pattern may take."""

_MOST_KINDS, _MOST_PATTERN_CELLS = 12, 20_000
"""Maximum numbers of runs of equal layers, and of cells, for the plan MILP.

Each run has variables in each stage. The MILP computes longest paths often, and through more cells
each takes too long.
"""

_EXPLORE = 0.6
"""While more than this share is left, the first three phases are repeated for lines not yet cut."""

_SEARCH_SHARE, _SEARCH_MOST_S = 0.005, 0.5
"""Local search per candidate in the quick evaluation, as a share of the time and in seconds."""

_LINE_TURN = 0.25
"""Share of the time left for gathering that a single line may take."""

_CUTS_PER_LINE, _CENTRES, _TRIED_NEIGHBOURS = 3, 3, 12
_SEMIFINALISTS, _FINALISTS = 8, 2

_FAMILY_CELLS, _BOUND_CELLS, _HAND_CELLS, _SIMULATED = 2e4, 3e4, 5e4, 1e7
_SOLVE_CELLS = 150
"""Amounts per unit of work (see `Stop`).

Cells of families, of bounded cuts and of plans by hand; simulated actions; cells of a full solve.
"""


class PlanSearch:
    """All candidates of a model, and the best of them.

    Parameters
    ----------
    model
        The model to cut.
    lines
        The allowed placements of its stages.
    stop
        The limit; threads and seed are those of the final solves, the seed also that of the local
        searches.
    on_progress
        Called with every improvement of the best schedule over all candidates.
    """

    def __init__(
        self,
        model: Model,
        lines: Lines,
        stop: Stop,
        *,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.model, self.lines, self.stop = model, lines.lines, stop
        self.threads, self.seed, self.on_progress = stop.threads, stop.seed, on_progress
        self.candidates: dict[tuple[tuple[int, ...], tuple[int, ...]], CutCandidate] = {}
        self.best: CutCandidate | None = None
        self.told_ms = math.inf
        self.turn = stop
        shorter = model.without_pairs()
        self.line_bounds = {line: any_cut_bound(shorter, line.order) for line in self.lines}
        self.pending = sorted(self.lines, key=lambda line: self.line_bounds[line])
        self.num_cut_lines = 0
        self.table = RunTable(shorter)
        order = natural_order(model)
        naive = PlacementLine("linear", 1, order)
        self.even = self._add(naive, even_cut(model.num_layers, len(order)), is_even=True)

    def run(self) -> None:
        """Search until the time is over or no candidate can be better."""
        self._evaluate(self.even, self.stop.turn(_EVEN))
        self.turn = self.stop
        self._try_by_hand()
        self._plan_patterns(self.stop.turn(_PATTERNS))
        while not self.is_finished:
            self._gather(self.stop.turn(_GATHER))
            self._evaluate_all(self.stop.turn(_EVALUATE))
            self._move(self.stop.turn(_MOVE))
            is_late = self.stop.left <= _EXPLORE * self.stop.limit
            if is_late or self.stop.is_over() or not self.pending:
                break
        self._halve(self.stop.turn(_HALVE))
        self._solve_finalists()
        self._pair_the_best()

    def adopt(self, problem: Problem, programs: Programs) -> None:
        """Begin with an earlier search's schedule, if its problem is a cut of one of the lines."""
        sizes = cut_of(self.model, problem)
        lines = (self.even.line, *self.lines)
        line = next((known for known in lines if known.placement == problem.placement), None)
        if sizes is not None and line is not None:
            candidate = self._add(line, sizes)
            candidate.best.offer(programs, "given start")
            self._tell(candidate)

    @property
    def objective_ms(self) -> float:
        """The best objective over all candidates; inf if there is none."""
        return math.inf if self.best is None else self.best.objective_ms

    @property
    def bound_ms(self) -> float:
        """A lower bound for the schedules of all cuts of the searched lines and the even cut."""
        return min(*self.line_bounds.values(), self.even.bound_ms, self.objective_ms)

    @property
    def is_finished(self) -> bool:
        """Whether the best known is proven the best of the set."""
        return self.bound_ms >= self.objective_ms * (1 - 1e-9)

    @property
    def nothing_fits(self) -> bool:
        """Whether every cut of every line searched is proven to exceed some device."""
        fits = any(bound < math.inf for bound in self.line_bounds.values())
        return bool(self.even.misfit) and not fits

    def _add(
        self, line: PlacementLine, sizes: tuple[int, ...], *, is_even: bool = False
    ) -> CutCandidate:
        key = (line.placement, sizes)
        if key not in self.candidates:
            self.turn.spend(len(sizes) * self.model.num_microbatches / _BOUND_CELLS)
            work = None if self.stop.work is None else self.stop.spent
            self.candidates[key] = CutCandidate(self.model, line, sizes, is_even=is_even, work=work)
        return self.candidates[key]

    def _note_work(self, candidate: CutCandidate) -> None:
        """If work is limited, label the candidate's next trace entries with the work so far."""
        if self.stop.work is not None:
            candidate.best.work = self.stop.spent

    def _try_by_hand(self) -> None:
        """Offer the plans that people write by hand, so that no result is worse than them."""
        for line in self.lines:
            cells = len(line.placement) * self.model.num_microbatches
            if line.free or cells > _MOST_PATTERN_CELLS:
                continue
            for plan in hand_plans(self.model, line.placement):
                length_ms = math.inf if plan.objective_ms is None else plan.objective_ms
                programs = plan.programs() if length_ms < self.objective_ms else None
                if programs is not None:
                    candidate = self._add(line, plan.sizes)
                    candidate.best.offer(programs, f"{plan.family} with {plan.mode}")
                    self._tell(candidate)
                self.stop.spend(cells / _HAND_CELLS)
                if self.stop.is_over():
                    return

    def _plan_patterns(self, phase: Stop) -> None:
        """Let the plan MILP choose cut and modes for each pattern of the plain lines."""
        if len(layer_kinds(self.model)) > _MOST_KINDS:
            return
        for line in self.pending[:]:
            cells = len(line.placement) * self.model.num_microbatches
            if line.free or cells > _MOST_PATTERN_CELLS:
                continue
            cuts = hand_cuts(self.model, len(line.placement))
            self.turn = phase
            for pattern in self._patterns(line):
                if phase.is_over() or self.line_bounds[line] >= self.objective_ms:
                    break
                phase.spend(cells / _HAND_CELLS)
                found = plan_pattern(self.model, pattern, phase.turn(_PATTERN_TURN), cuts)
                if isinstance(found, float):
                    continue
                candidate = self._add(line, found.sizes)
                candidate.best.offer(found.programs, f"plan-milp {found.pattern}")
                self._tell(candidate)

    def _patterns(self, line: PlacementLine) -> list[Pattern]:
        """Return the patterns of a line, with places for its layers' menus; pairs first."""
        menus = [mode for stage in self.model.stages_on[0] for mode in stage.menu]
        found = patterns_of(
            line.placement,
            self.model.num_microbatches,
            boundaries(self.model, line.placement),
            transfers=any(mode.offload_bytes for mode in menus),
            recompute=any(mode.recompute == "apart" for mode in menus),
            names=(*(PAIRED_PATTERNS if self.model.has_pairs else ()), *PATTERNS),
        )
        return sorted(found, key=lambda pattern: not pattern.has_pairs)

    def _gather(self, phase: Stop) -> None:
        """Add the best cuts of every line, and raise the lines' bounds."""
        while self.pending and not phase.is_over() and not self.is_finished:
            line = self.pending.pop(0)
            if self.line_bounds[line] >= self.objective_ms:
                continue
            self.turn = turn = phase.turn(_LINE_TURN)
            cuts = best_cuts(self.table, line, cap_ms=self.objective_ms, stop=turn)
            self.num_cut_lines += 1
            self.line_bounds[line] = cuts.bound_ms
            if not cuts.sizes and cuts.bound_ms < self.objective_ms:
                self._add(line, even_cut(self.model.num_layers, len(line.placement)))
            for sizes in cuts.sizes[:_CUTS_PER_LINE]:
                self._descend(self._add(line, sizes), turn)

    def _descend(self, centre: CutCandidate, turn: Stop) -> None:
        """Move one layer at a time while the lower bound decreases; it includes memory."""
        while not turn.is_over():
            near = self._neighbours(centre, turn)
            best = min(near, key=_by_bound, default=centre)
            if best.bound_ms >= centre.bound_ms:
                return
            centre = best

    def _neighbours(self, centre: CutCandidate, turn: Stop) -> list[CutCandidate]:
        """Return the cuts with one layer moved, until the time is over."""
        near = []
        for sizes in cuts_with_a_layer_moved(centre.sizes, range(len(centre.sizes))):
            if turn.is_over():  # a bound of many stages takes a tenth of a second
                break
            near.append(self._add(centre.line, sizes))
        return near

    def _evaluate_all(self, phase: Stop) -> None:
        """Evaluate the few best cuts of each line by bound."""
        self.turn = phase
        tried: Counter[PlacementLine] = Counter()
        for candidate in sorted(self.candidates.values(), key=_by_bound):
            if phase.is_over() and self.best is not None:
                return
            if tried[candidate.line] < _CUTS_PER_LINE:
                self._evaluate(candidate, phase)
            tried[candidate.line] += 1

    def _evaluate(
        self, candidate: CutCandidate, phase: Stop, parent: CutCandidate | None = None
    ) -> None:
        """Evaluate a candidate quickly, unless done or its bound shows that it cannot be best."""
        if candidate.quick_ms is not None or not self._is_open(candidate):
            return
        programs = None if parent is None else parent.best.programs
        self._note_work(candidate)
        evaluate_quickly(
            candidate,
            relatives=() if programs is None else (programs,),
            search_s=min(_SEARCH_SHARE * self.stop.limit, _SEARCH_MOST_S),
            stop=phase,
        )
        self._tell(candidate)

    def _is_open(self, candidate: CutCandidate) -> bool:
        return not candidate.misfit and not candidate.cannot_beat(self.objective_ms)

    def _tell(self, candidate: CutCandidate) -> None:
        """Make a candidate the best if it is, and report; the best one may have improved."""
        known_ms = self.told_ms if candidate is self.best else self.objective_ms
        if candidate.objective_ms >= known_ms:
            return
        self.best, self.told_ms = candidate, candidate.objective_ms
        if self.on_progress is not None:
            method = f"{candidate.name} {candidate.best.method}"
            now, best = self.stop.seconds(), candidate.best
            found = (best.objective_ms, self.bound_ms, best.programs, candidate.problem)
            self.on_progress(Progress(now, method, *found))

    def _ranked(self) -> list[CutCandidate]:
        known = [
            candidate
            for candidate in self.candidates.values()
            if candidate.best.programs is not None
        ]
        return sorted(known, key=lambda candidate: (candidate.objective_ms, candidate.bound_ms))

    def _move(self, phase: Stop) -> None:
        """Move cut points of the best candidates of different lines while that helps."""
        self.turn = phase
        centres = self._ranked()[:_CENTRES]
        while centres and not phase.is_over() and not self.is_finished:
            best = centre = centres.pop(0)
            near = [one for one in self._neighbours(centre, phase) if one.quick_ms is None]
            for candidate in sorted(near, key=_by_bound)[:_TRIED_NEIGHBOURS]:
                if phase.is_over():
                    break
                self._evaluate(candidate, phase, centre)
                if candidate.objective_ms < best.objective_ms:
                    best = candidate
            if best is not centre:
                centres.append(best)

    def _halve(self, phase: Stop) -> None:
        """Search the best ones longer and longer, half as many each time; the even cut stays."""
        pool = self._ranked()[:_SEMIFINALISTS]
        while len(pool) > _FINALISTS and not phase.is_over() and not self.is_finished:
            rounds = math.ceil(math.log2(len(pool) / _FINALISTS))
            entered = [*pool, *({self.even} - set(pool))]
            share = phase.left / rounds / len(entered)
            for candidate in filter(self._is_open, entered):
                self._note_work(candidate)
                search(candidate, phase, share, self.seed + rounds)
                self._tell(candidate)
            pool = sorted(pool, key=lambda one: one.objective_ms)
            pool = pool[: max(_FINALISTS, len(pool) // 2)]

    def _solve_finalists(self) -> None:
        """Solve the best two with everything, sharing the time; then others, if any is left."""
        for number in range(len(self.candidates)):
            waiting = next(self._unsolved(), None)
            if waiting is None or self.stop.is_over() or self.is_finished:
                return
            self._solve(waiting, self.stop.left / max(1, _FINALISTS - number))

    def _pair_the_best(self) -> None:
        """Try the published schedules in pairs on the cut that won, however little time is left."""
        best = self.best
        if best is not None and best.problem.pairs and not best.is_solved:
            for start in all_starts(best.problem, PAIRED_PATTERNS):
                if start.programs is not None and start.legal:
                    best.best.offer(start.programs, start.method)
            self._tell(best)

    def _unsolved(self) -> Iterator[CutCandidate]:
        """Yield who may still win or improve: the best known first, then those never evaluated."""
        unevaluated = [one for one in self.candidates.values() if one.best.programs is None]
        for candidate in [*self._ranked(), *sorted(unevaluated, key=_by_bound)]:
            done = candidate.is_solved or candidate.best.is_optimal
            if not done and (candidate is self.best or self._is_open(candidate)):
                yield candidate

    def _solve(self, candidate: CutCandidate, share: float) -> None:
        is_timed = self.stop.work is None
        self._note_work(candidate)
        if not is_timed:
            share -= len(candidate.sizes) * self.model.num_microbatches / _SOLVE_CELLS
            if share <= 0:
                candidate.is_solved = True
                return
        result = solve(
            candidate.problem,
            time_limit_s=max(share if is_timed else self.stop.left_s(), 0.01),
            work_limit=None if is_timed else share,
            threads=self.threads if is_timed else 1,
            seed=self.seed,
            start=candidate.best.programs,
            start_method=candidate.best.method,
            on_progress=partial(self._hear, candidate),
            should_stop=self.stop.is_told,
        )
        candidate.is_solved = True
        self.stop.spend(share + len(candidate.sizes) * self.model.num_microbatches / _SOLVE_CELLS)
        if result.schedule is not None:
            candidate.best.offer(result.schedule.programs, result.schedule.provenance.method)
            if result.bound_ms is not None:
                candidate.bound_ms = max(candidate.bound_ms, result.bound_ms)
                candidate.best.offer_bound(result.bound_ms, "solve")
        self._tell(candidate)

    def _hear(self, candidate: CutCandidate, news: Progress) -> None:
        """Offer a solve's programs to its candidate as soon as they are found."""
        if news.programs is not None and candidate.best.offer(news.programs, news.method):
            self._tell(candidate)


def _by_bound(candidate: CutCandidate) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    return (candidate.bound_ms, candidate.line.placement, candidate.sizes)


# --- One cut on one line during the search, and its row in the result.

_ROUNDING = 1e-9


class Fate(StrEnum):
    """The outcome of a candidate."""

    CHOSEN = "chosen"
    SOLVED = "solved fully, slower"
    SLOWER = "slower in a short search"
    PROVEN = "bound above the chosen one (proven)"
    NO_MEMORY = "does not fit (proven)"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanRow(ShortRepr):
    """The report of a candidate; times in ms, None if there is none.

    ``quick_ms`` is the best family with a short search, ``final_ms`` the best known at the end.
    """

    label: str
    chunks: int
    placement: tuple[int, ...]
    sizes: tuple[int, ...]
    is_even: bool
    bound_ms: float | None
    quick_ms: float | None
    final_ms: float | None
    method: str
    fate: Fate
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        data = {name: getattr(self, name) for name in self.__slots__}
        return data | {"placement": list(self.placement), "sizes": list(self.sizes)}


class CutCandidate:
    """A cut on a line with its problem, its bound and the best programs known for it.

    Parameters
    ----------
    model, line, sizes
        The inputs of the candidate's problem.
    is_even
        Whether this is the naive cut that all others are compared with.
    work
        Units done so far, if work is limited; they label the bound in the trace.
    """

    def __init__(
        self,
        model: Model,
        line: PlacementLine,
        sizes: tuple[int, ...],
        *,
        is_even: bool = False,
        work: float | None = None,
    ) -> None:
        self.line, self.sizes, self.is_even = line, sizes, is_even
        self.problem: Problem = model.problem(line.placement, sizes)
        feasible = feasibility(self.problem)
        self.misfit, self.needs = feasible.message, feasible.needs
        self.bound_ms = math.inf if self.misfit else lower_bound(self.problem).ms
        self.best = Incumbent(self.problem)
        self.best.work = work
        if not self.misfit:
            self.best.offer_bound(self.bound_ms, "bounds")
        self.quick_ms: float | None = None
        self.is_solved = False

    @property
    def objective_ms(self) -> float:
        """The best known objective; inf if there is none."""
        return self.best.objective_ms

    @property
    def name(self) -> str:
        """Label and sizes, for progress lines."""
        return f"{self.line.label} [{' '.join(map(str, self.sizes))}]"

    def cannot_beat(self, objective_ms: float) -> bool:
        """Whether the candidate's bound proves that it is no faster than ``objective_ms``."""
        return self.bound_ms >= objective_ms * (1 - _ROUNDING)

    def row(self, chosen: CutCandidate | None) -> PlanRow:
        """Return the candidate's row of the report."""
        known = self.best.programs is not None
        return PlanRow(
            label=self.line.label,
            chunks=self.line.chunks,
            placement=self.line.placement,
            sizes=self.sizes,
            is_even=self.is_even,
            bound_ms=None if self.misfit else self.bound_ms,
            quick_ms=self.quick_ms,
            final_ms=self.objective_ms if known else None,
            method=self.best.method,
            fate=self._fate(chosen),
            note=self.misfit,
        )

    def _fate(self, chosen: CutCandidate | None) -> Fate:
        if self is chosen:
            return Fate.CHOSEN
        if self.misfit:
            return Fate.NO_MEMORY
        if chosen is not None and self.cannot_beat(chosen.objective_ms):
            return Fate.PROVEN
        if self.is_solved:
            return Fate.SOLVED
        return Fate.NOT_TRIED if self.best.programs is None else Fate.SLOWER


# --- Quick evaluation of a candidate: cheap families, programs of relatives, a short search.

_SLOW = frozenset({"greedy"})
_SLOW_FROM_CELLS = 300
"""Families slower than all others together, and the size from which they are left out."""


def evaluate_quickly(
    candidate: CutCandidate,
    *,
    relatives: Iterable[Programs] = (),
    search_s: float,
    stop: Stop,
) -> None:
    """Find programs for a candidate and its ``quick_ms``, unless nothing fits.

    Parameters
    ----------
    candidate
        Any.
    relatives
        Programs of cuts with the same placement. They are programs of this one too, and often fit
        its memory. If one fits, families are left out.
    search_s
        Maximum seconds, or units of work, of local search.
    stop
        The limit; checked between families once programs are known.
    """
    best, problem = candidate.best, candidate.problem
    known = [best.offer(programs, "neighbour") for programs in relatives]
    if not any(known) or problem.pairs:
        cells = len(problem.stages) * problem.num_microbatches
        is_small = cells < _SLOW_FROM_CELLS
        names = [one.name for one in FAMILIES if is_small or one.name not in _SLOW]
        for start in all_starts(problem, names):
            stop.spend(cells / _FAMILY_CELLS)
            if start.programs is not None and start.legal:
                best.offer(start.programs, start.method)
            if best.programs is not None and stop.is_over():
                break
    search(candidate, stop, search_s, stop.seed)
    if best.programs is not None:
        candidate.quick_ms = best.objective_ms


def search(candidate: CutCandidate, stop: Stop, share: float, seed: int) -> None:
    """Improve a candidate's programs by local search, for some seconds or units of work."""
    share = min(share, stop.left)
    if share <= 0 or stop.is_over():
        return
    work = None if stop.work is None else max(1, int(share * _SIMULATED))
    seconds = share if work is None else stop.left_s()
    turn = Stop(seconds, work=work, seed=seed, should_stop=stop.is_told)
    improve = improve_by_pairing if candidate.problem.pairs else improve_by_local_search
    improve(candidate.best, turn)
    # Spend the full share even if the search ended early with a proven optimum.
    stop.spend(share)


# --- Plans by hand: an even cut, or one layer less at both ends, and one mode for all stages.
# The schedules are those of the frameworks: 1F1B on a line, interleaved 1F1B on a loop.
# Embedding and head are single layers at either end that differ from their neighbours. They go with
# the first and the last stage, and do not count as layers. A mode is one of the model's menu.


_HAND_FAMILIES = tuple(family for family in FAMILIES if family.name in ("1f1b", "interleaved"))


class HandPlan(NamedTuple):
    """A plan by rule: how the model is cut, the mode of every stage, and the schedule.

    ``rows`` and ``objective_ms`` are None if the plan does not fit.
    """

    cut: str
    mode: str
    family: str
    sizes: tuple[int, ...]
    compiled: CompiledProblem
    rows: Rows | None
    objective_ms: float | None

    def programs(self) -> Programs | None:
        """Return the programs, if it fits."""
        return None if self.rows is None else self.compiled.decode(self.rows)


def hand_cuts(model: Model, num_stages: int) -> dict[tuple[int, ...], str]:
    """Return the cuts with a layer in every stage, and their names.

    If the layers do not divide evenly, stages after the first take the rest.
    """
    kinds = layer_kinds(model)
    alone = [len(kinds) > 1 and kinds[at].length == 1 for at in (0, -1)]
    body = model.num_layers - sum(alone)
    found: dict[tuple[int, ...], str] = {}
    for less, name in ((0, "even"), (1, "one layer less at both ends")):
        first, *others = even_cut(body + 2 * less, num_stages)
        if others and first > others[-1]:
            others[others.index(others[-1])] += 1
            first -= 1
        sizes = [first, *others]
        for end, is_alone in zip((0, -1), alone, strict=True):
            sizes[end] += is_alone - less
        if min(sizes) > 0:
            cut = tuple(sizes)
            found[cut] = f"{found[cut]}, {name}" if cut in found else name
    return found


def hand_plans(model: Model, placement: Sequence[int]) -> Iterator[HandPlan]:
    """Yield every plan by rule for a placement, whether it fits or not.

    Transfers are placed where memory allows. There are no plans for a placement that neither 1F1B
    nor interleaved 1F1B supports.
    """
    for sizes, cut in hand_cuts(model, len(placement)).items():
        problem = model.problem(placement, sizes)
        compiled = CompiledProblem.of(problem)
        for family in _HAND_FAMILIES:
            try:
                rows = compiled.encode(family.build(problem))
            except NotApplicable:
                continue
            for mode, numbers in _modes_for_all(problem).items():
                fitted = in_modes(compiled, rows, numbers)
                length_ms = None if fitted is None else compiled.objective_ms(fitted)
                yield HandPlan(cut, mode, family.name, sizes, compiled, fitted, length_ms)


def _modes_for_all(problem: Problem) -> dict[str, list[int]]:
    """Return the numbers of the modes that every stage can use; stages without a menu keep."""
    menus = [[mode.name for mode in menu] for menu in problem.menus]
    longest = max(menus, key=len)
    found = {}
    for name in longest:
        if all(name in menu or len(menu) == 1 for menu in menus):
            numbers = [menu.index(name) if name in menu else 0 for menu in menus]
            if all(problem.can_use(s, number) for s, number in enumerate(numbers)):
                found[name] = numbers
    return found


# --- An earlier plan as the start of a search: the cut of the model that makes its problem.


def cut_of(model: Model, problem: Problem) -> tuple[int, ...] | None:
    """Return the layers of each stage; None if the problem is no cut of the model.

    If a layer has neither time nor bytes, several cuts make the same stages. Each stage then counts
    its minimum number of layers, so that some such cuts are not recognised.
    """
    sizes = []
    first = 0
    for stage in problem.stages:
        size = _run_length(model, stage, first)
        if size is None:
            return None
        sizes.append(size)
        first += size
    try:
        same = model.problem(problem.placement, sizes).problem_hash == problem.problem_hash
    except ModelError:
        return None
    return tuple(sizes) if same else None


def _run_length(model: Model, stage: Stage, first: int) -> int | None:
    """Return the minimum number of layers from ``first`` on that make the stage, or None."""
    if not 0 <= stage.device < len(model.devices):
        return None
    run: Stage | None = None
    for size, layer in enumerate(model.stages_on[stage.device][first:], start=1):
        run = layer if run is None else fuse(run, layer)
        if run == stage:
            return size
    return None
