"""A schedule for the batch of this step, within a tenth of a second: `replan`.

With packed sequences every batch is a problem of its own. `replan` builds start schedules in two
ways:

* it list schedules the micro-batches with some hundred dispatching rules
  (`optpipe_solver.local_search.dispatching`), in several searches;
* it assigns the micro-batches, in several orders, to the positions of 1F1B and of zero-bubble
  schedules of equal micro-batches.

It anneals the best of them briefly, because annealing seldom leaves the basin that it starts in.
It then anneals the best further. The total is a fixed number of simulated actions.

The caller may name batches of the run (``like``); the first call learns from them. It runs long
searches for rules for each. Later calls try the rules that are best on all named batches, and their
searches begin with the best of these. Rules make no copies to the host, which may pay off. So the
first call also solves problems of equal micro-batches (`stand_ins`) and the named batches. It
solves them under tighter limits, too, because other batches need more memory. Later calls assign
the micro-batches to the positions of these schedules: the longest to the longest, or by number if
the order is given. If a result exceeds memory, some of it is offloaded. If that makes copies, only
1F1B is tried as well. These results are mostly shorter than those of rules, and annealing gets the
time of the rules. Nothing depends on clocks or on earlier calls: all ranks get the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import inf
from operator import itemgetter, lt
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from optpipe.errors import InputError
from optpipe.problem import Microbatch, Problem
from optpipe.schedule import Provenance, Schedule
from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import (
    CompiledProblem,
    device_peaks,
    keeps_limits,
    keeps_turns,
    numbered_menus,
    within_hosts,
)
from optpipe_solver.bounds import work_bound
from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.families.classic import build_serial
from optpipe_solver.feasibility import refuse_unless
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.jit import seeded
from optpipe_solver.last_steps import with_free_share
from optpipe_solver.local_search.annealing import (
    anneal,
    best_rows,
    course_of,
    make_fit,
    table_for,
)
from optpipe_solver.local_search.board import MoveShares
from optpipe_solver.local_search.dispatching import CELL_WORK, dispatched
from optpipe_solver.portfolio import all_starts
from optpipe_solver.reductions import longest_first, orders, stand_ins
from optpipe_solver.solve import record, solve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe_solver.arrays import Ints
    from optpipe_solver.arrays.encoding import Rows
    from optpipe_solver.local_search.board import Table
    from optpipe_solver.local_search.dispatching import DispatchingRule

__all__ = ["replan"]


_Start: TypeAlias = "tuple[str, float, Rows]"
"""Method, objective in ms, programs."""

_PLAIN = ("1f1b", "interleaved")
"""Families that are never better than the answer."""

_QUICK = ("zb-h1", "zb-greedy", "gis", "zb-v")
"""Families built for the mean micro-batch, or the largest, within milliseconds."""

_WORK = 1_300_000
"""Actions simulated: about 50 ms of one core."""

_RULES_SHARE, _SEARCHES, _LEAST_SEARCH = 0.5, 3, 200
"""Share of the work for dispatching rules (about a third of the time), number of searches, and
minimum work of each, per cell. Annealing gets the rest."""

_LEARN_SEARCHES, _LEARN_WORK, _MOST_LEARNED, _STUCK = 8, 16_000_000, 16, 2.0
"""Searches for rules per batch of the run, actions of each, and maximum number of rules kept: those
closest to the best of each batch. A rule that gets stuck counts as ``_STUCK`` times as long."""

_DEALT_SHARE = 0.75
"""Share of the work for annealing if no rule is tried; the total time is about the same."""

_SHORT_SHARE = 0.04
"""Share of the work for annealing each start, before the best is annealed further."""

_SHAPE_WORK, _MOST_STARTS = 1.0, 3
"""Units of work for equal micro-batches of a shape, and number of families kept for each."""

_LIKE_WORK, _SHARES = 4.0, (1.0, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Units of work for a batch of the run, under each of these shares of its memory."""

_MOST_FITTED, _MOST_OVER, _MOST_DEALS = 16, 1.12, 3
"""Deals that are examined, by what factor one may exceed a device's memory, number annealed."""

_MOST_SHAPES, _MOST_BATCHES, _NO_LIMIT_S = 16, 128, 600.0
"""Cached shapes and batches; a limit of seconds that never applies, because work is limited."""

_HOT, _COLD = 0.05, 0.005
"""Temperatures at the beginning and the end, as fractions of a mean pass."""

_MOVES = MoveShares(on_path=1.0, relabels=0.05, modes=0.5, waves=0.0, backwards=0.05)
_IN_DEALS = _MOVES._replace(relabels=0.0)
"""Shares of moves that pay off in so short a search: all on a critical path, few relabellings.

Deals are ordered by length, so they get no relabellings.
"""


def replan(
    problem: Problem,
    *,
    like: Problem | Sequence[Problem] | None = None,
    work: int = _WORK,
    seed: int = 0,
) -> Schedule:
    """Return a good schedule quickly; the same for the same problem, seed and work.

    It is never longer than legal 1F1B, or interleaved 1F1B, in the given order. ``solve_seconds``
    of the answer is 0, so that all ranks get the same. Call it once before training, because the
    first call of a process loads compiled code (`optpipe_solver.warm_up` compiles it, once per
    installation). The first call with ``like`` solves each and searches rules, half a minute.

    Parameters
    ----------
    problem
        The batch.
    like
        A batch of the run, or several, of as many micro-batches and the same stages, whose modes do
        the same by position: worth naming where memory is short or lengths differ much, a dozen. A
        later call takes half a millisecond for each; 128 at most.
    work
        How many actions may be simulated; about 0.05 us of one core each.
    seed
        Of the search.

    Raises
    ------
    InputError
        If micro-batches name samples, passes may pair, nothing fits the memory, or ``like`` is
        of another form, or of costs whose modes do other things.
    """
    is_known = not (problem.has_samples or problem.pairs)
    refuse_unless(is_known, "replan", problem, "problems without samples and pairs")
    run = _TrainingRun.of((like,) if isinstance(like, Problem) else tuple(like or ()))
    _check_alike(problem, run)
    compiled, known = CompiledProblem.of(problem), _known_of(run)
    first = _like_these(compiled, known)
    if any(compiled.cells_with(simulate.OFFLOAD, rows).any() for *_, rows in first):
        anneals, shares = _DEALT_SHARE, _IN_DEALS
        others = list(_usual(compiled, ()))
    else:
        anneals, shares = 1 - _RULES_SHARE, _MOVES
        others = [*first, *_usual(compiled, _QUICK)]
        first = list(_ruled(compiled, known.rules, round(_RULES_SHARE * work), seed))
        equal = known.equal
        if not (equal or first or others):
            equal = _equal(_shape_of(problem))
        others += _deals(compiled, equal, orders(problem))
    starts = first + sorted(others, key=itemgetter(1))[:1]
    (start_method, start_ms, _), found = _annealed(
        compiled, starts or [_serial(compiled)], round(anneals * work), seed, shares,
        short=round(_SHORT_SHARE * work),
    )  # fmt: skip
    best, bound = Incumbent(problem, compiled=compiled), work_bound(problem)
    best.offer(compiled.decode(found), "local-search")
    best.offer_bound(bound.ms, bound.method)
    provenance = Provenance(
        method=best.method if best.objective_ms < start_ms else start_method,
        start_method=start_method,
        start_objective_ms=start_ms,
        bound_method=best.bound_method,
        seed=seed,
        solve_seconds=0.0,
    )
    return record(best, provenance, "work_limit")


@dataclass(frozen=True)
class _TrainingRun:
    """Batches of a run, each once; equal if their problem hashes are equal, for use in caches."""

    hashes: tuple[str, ...]
    batches: tuple[Problem, ...] = field(compare=False)

    @classmethod
    def of(cls, named: Sequence[Problem]) -> _TrainingRun:
        if len(named) > _MOST_BATCHES:
            raise InputError(f"like: has {len(named)} batches; name {_MOST_BATCHES} at most")
        each = {one.problem_hash: one for one in named}
        return cls(tuple(each), tuple(each.values()))


def _check_alike(problem: Problem, run: _TrainingRun) -> None:
    """Refuse batches of another form."""
    for like in run.batches:
        if like.has_samples or like.pairs:
            raise InputError(
                "like: has samples or pairs, which replan does not know; leave them out"
            )
        if like.num_microbatches != problem.num_microbatches:
            raise InputError(
                f"like: has {like.num_microbatches} micro-batches, the problem "
                f"{problem.num_microbatches}; name a batch of as many"
            )
    forms = _forms(problem) if run.batches else []
    for like, others in zip(run.batches, _forms_of(run), strict=True):
        if like.placement != problem.placement or others != forms:
            raise InputError(
                "like: its stages stand elsewhere, or their modes, by number, offload and "
                "recompute otherwise than the problem's; name a batch of this run"
            )
    if any(len(kinds) > 1 for kinds in forms):
        raise InputError(
            "like: the modes of a stage's costs do not do the same by position, so a place says "
            "nothing of what becomes of another micro-batch in it; leave like out"
        )


_Forms: TypeAlias = "list[set[tuple[tuple[int, bool, str | None], ...]]]"


def _forms(problem: Problem) -> _Forms:
    """Return, per stage, the kinds of modes in its menus, by number, without times and bytes."""
    forms = [
        tuple((k, mode.offload_bytes > 0, mode.recompute) for k, mode in enumerate(menu) if mode)
        for menu in numbered_menus(problem)
    ]
    num_stages = len(problem.stages)
    return [set(forms[s::num_stages]) for s in range(num_stages)]


@lru_cache(maxsize=_MOST_SHAPES)
def _forms_of(run: _TrainingRun) -> list[_Forms]:
    return [_forms(like) for like in run.batches]


# --- What is known of a run, and of a shape: made once.


class _KnownOfRun(NamedTuple):
    """Results of the first call with some batches.

    ``solved``: each batch's order by length, and its programs. ``rules``: dispatching rules, best
    first, with ranks by length. ``equal``: programs of equal micro-batches like the first batch's.
    """

    solved: tuple[tuple[Ints, tuple[Rows, ...]], ...] = ()
    rules: tuple[DispatchingRule, ...] = ()
    equal: tuple[tuple[str, Rows], ...] = ()


@lru_cache(maxsize=_MOST_SHAPES)
def _known_of(run: _TrainingRun) -> _KnownOfRun:
    if not run.batches:
        return _KnownOfRun()
    named = [_plain(one) for one in run.batches]
    solved = tuple(map(_solved, named))
    return _KnownOfRun(solved, _learned(named), _equal(_shape_of(named[0])))


def _shape_of(problem: Problem) -> Problem:
    """Return the batch of a shape, without name and context: every cost as often as any other."""
    m = problem.num_microbatches
    plain = _plain(problem)
    if problem.num_costs == 1 or m < problem.num_costs:
        return plain
    costs = [j % problem.num_costs for j in range(m)]
    return plain.model_copy(update={"microbatches": tuple(Microbatch(cost=cost) for cost in costs)})


def _plain(problem: Problem) -> Problem:
    """Return the problem without name and context: hashable, and equal if the hashes are equal."""
    return problem.model_copy(update={"name": "", "context": None})


@lru_cache(maxsize=_MOST_BATCHES)
def _solved(like: Problem) -> tuple[Ints, tuple[Rows, ...]]:
    """Return a batch's order by length, and its programs under its limits and tighter ones."""
    compiled, found = CompiledProblem.of(like), []
    for share in _SHARES if like.num_costs > 1 else ():
        tighter = with_free_share(like, share)
        schedule = solve(tighter, time_limit_s=_NO_LIMIT_S, work_limit=_LIKE_WORK).schedule
        if schedule is not None:
            found.append(compiled.encode(schedule.programs))
    return longest_first(like), tuple(found)


def _in_places(known: Ints, batch: Ints) -> Ints:
    """Return the order that puts the k-th of a batch into the position of the k-th known."""
    order = np.empty_like(known)
    order[known] = batch
    return order


@lru_cache(maxsize=_MOST_SHAPES)
def _equal(shape: Problem) -> tuple[tuple[str, Rows], ...]:
    """Return programs of the problems of equal micro-batches that replace a batch (`stand_ins`).

    For each: the best families, and the result of a solve with limited work.
    """
    found: list[tuple[str, Rows]] = []
    compiled = CompiledProblem.of(shape)
    for equal in stand_ins(shape):
        starts = [one for one in all_starts(equal.problem) if one.programs and one.legal]
        starts.sort(key=lambda one: one.objective_ms)
        ranked = [(one.method, one.programs or ()) for one in starts[:_MOST_STARTS]]
        result = solve(equal.problem, time_limit_s=_NO_LIMIT_S, work_limit=_SHAPE_WORK)
        if result.schedule is not None:
            ranked.insert(0, ("equal micro-batches", result.schedule.programs))
        found += [(method, compiled.encode(equal.lift(programs))) for method, programs in ranked]
    return tuple(found)


def _serial(compiled: CompiledProblem) -> _Start:
    try:
        rows = compiled.encode(build_serial(compiled.problem))
    except NotApplicable as why:
        raise InputError(f"{why}; give more memory, or smaller micro-batches") from None
    return "serial", compiled.objective_ms(rows), rows


def _ruled(
    compiled: CompiledProblem, rules: Sequence[DispatchingRule], work: int, seed: int
) -> Iterator[_Start]:
    """Yield the best schedule of each search of dispatching rules, if any.

    First try as many learned rules as a third of the work allows. All searches then begin with the
    best of these.
    """
    problem, cells = compiled.problem, compiled.times.num_cells
    ways, tried = orders(problem), rules[: max(1, work // (3 * CELL_WORK * cells))]
    known: list[DispatchingRule] = []
    if tried:
        work -= len(tried) * CELL_WORK * cells
        best = dispatched(compiled, ways, 0, seed, _ranked(tried, problem))
        known = [] if best is None else [best.rule]
    searches = max(1, min(_SEARCHES, work // (_LEAST_SEARCH * cells)))
    for number in range(searches):
        draws = seed * _SEARCHES + number
        found = dispatched(compiled, ways, work // searches, draws, known)
        if found is not None:
            yield "dispatching rules", found.objective_ms, found.rows


def _learned(named: Sequence[Problem]) -> tuple[DispatchingRule, ...]:
    """Return the rules that are best on average of all batches, from those that are best for one.

    Of rules with equal lengths on all batches, return only one. Ranks are by length.
    """
    rules = [rule for like in named for rule in _searched(like)]
    lengths, behind = np.full((len(named), len(rules)), inf), np.zeros(len(rules))
    for row, like in zip(lengths, named, strict=True):
        compiled, ways = CompiledProblem.of(like), orders(like)
        for at, rule in enumerate(_ranked(rules, like)):
            found = dispatched(compiled, ways, 0, 0, [rule])
            row[at] = inf if found is None else found.objective_ms
        if (least_ms := row.min(initial=inf)) < inf:
            behind += np.minimum(row / least_ms, _STUCK)
    best_first = np.argsort(behind, kind="stable")
    distinct = {tuple(lengths[:, at]): rules[at] for at in reversed(best_first)}
    return tuple(islice(reversed(distinct.values()), _MOST_LEARNED))


@lru_cache(maxsize=_MOST_BATCHES)
def _searched(like: Problem) -> list[DispatchingRule]:
    """Return the rules that long searches for a batch find; ranks by length, the longest first."""
    compiled, longest = CompiledProblem.of(like), longest_first(like)
    searches = (
        dispatched(compiled, orders(like), _LEARN_WORK, number) for number in range(_LEARN_SEARCHES)
    )
    rules = [found.rule for found in searches if found is not None]
    return [rule._replace(rank=rule.rank[longest]) for rule in rules]


def _ranked(rules: Sequence[DispatchingRule], problem: Problem) -> list[DispatchingRule]:
    """Return learned rules with the ranks of a batch: by length, or by a given order."""
    given = np.arange(problem.num_microbatches)
    if problem.order == "given":
        return [rule._replace(rank=given) for rule in rules]
    longest = longest_first(problem)
    return [rule._replace(rank=_in_places(longest, rule.rank)) for rule in rules]


def _usual(compiled: CompiledProblem, quick: Iterable[str]) -> Iterator[_Start]:
    """Yield 1F1B, and ``quick`` families for equal micro-batches, in the best of some orders."""
    problem = compiled.problem
    families = [(name, problem.least) for name in _PLAIN]
    families += [(name, equal.problem) for name in quick for equal in stand_ins(problem)]
    family_of = {family.name: family for family in FAMILIES}
    built = []
    for name, equal in families:
        try:
            built.append((name, compiled.encode(family_of[name].build(equal))))
        except NotApplicable:
            continue
    yield from _deals(compiled, built, orders(problem))


def _like_these(compiled: CompiledProblem, known: _KnownOfRun) -> list[_Start]:
    """Return the best deals into the positions of solved batches.

    If any copy to the host, return some that are made to fit; if none can, the shortest legal one.
    """
    free, longest = compiled.problem.order == "free", longest_first(compiled.problem)
    deals = [
        compiled.deal(rows, _in_places(places, longest) if free else np.arange(longest.size))
        for places, programs in known.solved
        for rows in programs
    ]
    deals = [rows for rows in deals if keeps_turns(compiled, rows)]
    found = list(islice(_made_to_fit(compiled, deals), _MOST_DEALS))
    best = None if found else _shortest(compiled, deals)
    return found if best is None else [("batch of the run", *best)]


def _made_to_fit(compiled: CompiledProblem, deals: Sequence[Rows]) -> Iterator[_Start]:
    """Yield deals that copy, made to fit; first those that were the shortest before fitting.

    The length before fitting predicts the result of annealing better than the length after it.
    """
    if not any(compiled.cells_with(simulate.OFFLOAD, rows).any() for rows in deals):
        return
    most = [_MOST_OVER * device.usable_bytes for device in compiled.problem.devices]
    table, draw = None, seeded(0)
    lengths = sorted((compiled.objective_ms(rows), at) for at, rows in enumerate(deals))
    for length_ms, at in lengths[:_MOST_FITTED]:
        if length_ms == inf or not all(map(lt, device_peaks(compiled, deals[at]), most)):
            continue
        table = table_for(compiled, deals[at], like=table)
        fitted_ms, rows = make_fit(table, draw), best_rows(table)
        if fitted_ms < inf and within_hosts(compiled, rows):
            yield "batch of the run", fitted_ms, rows


def _deals(
    compiled: CompiledProblem, built: Iterable[tuple[str, Rows]], ways: Sequence[Ints]
) -> Iterator[_Start]:
    """Yield the best legal deal of each given schedule."""
    for method, rows in built:
        best = _shortest(compiled, [compiled.deal(rows, order) for order in ways])
        if best is not None:
            yield method, *best


def _shortest(compiled: CompiledProblem, deals: Sequence[Rows]) -> tuple[float, Rows] | None:
    """Return the shortest legal one, with its objective in ms."""
    lengths = [compiled.objective_ms(one) for one in deals]
    for at in sorted(range(len(deals)), key=lengths.__getitem__):
        one = deals[at]
        if lengths[at] < inf and keeps_limits(compiled, one) and keeps_turns(compiled, one):
            return lengths[at], one
    return None


def _annealed(
    compiled: CompiledProblem,
    starts: Sequence[_Start],
    work: int,
    seed: int,
    shares: MoveShares,
    *,
    short: int,
) -> tuple[_Start, Rows]:
    """Anneal each start for ``short`` actions, then the best for the work left; return it."""
    table, cooled = None, []
    for start in starts:
        table = table_for(compiled, start[2], like=table)
        objective_ms = _cool(table, start[1], max(1, short), seed, shares)
        cooled.append((objective_ms, start, best_rows(table)))
    objective_ms, start, rows = min(cooled, key=itemgetter(0))
    table = table_for(compiled, rows, like=table)
    _cool(table, objective_ms, max(1, work - short * len(starts)), seed, shares)
    return start, best_rows(table)


def _cool(table: Table, start_ms: float, work: int, seed: int, shares: MoveShares) -> float:
    """Anneal a table's programs; return the objective of its best in ms."""
    table = table._replace(rules=table.rules._replace(shares=shares))
    course, scale_ms = course_of(table, start_ms), table.rules.mean_pass_ms
    draw = seeded(seed)
    anneal(table, course, _HOT * scale_ms, _COLD * scale_ms, work, work, draw)
    return float(course.values[2])
