"""The best cut of fused 1F1B and interleaved 1F1B, by an integer program over its longest paths.

The program chooses the number of layers of each stage, within each rank's memory (`best_cut`). It
minimises the longest path of the order, messages included. A path becomes a row when it is longer
than the solution allows. The relaxation takes layers of different kinds in any order. The integer
program keeps the model's order (`_CutProgram._in_order`).

The relaxation's dual solution is a mean of paths and prices of memory. By arithmetic it bounds
every other configuration of the same order (`CutPrices`). A bound of one configuration also holds
for every other one whose numbers are all at least as bad.

Refuted. To decide whether some length is possible gives a better bound than to minimise the length.
Within that length, a linear program's maximum, rounded down, limits the layers of each rank. This
leaves more layers for the others, and so on (`_CutsWithin`). If rounding changes nothing more, a
number's range is halved. Lengths go up from the bound to the best step. For each length, a cut is
found or the length is refuted.

Pairs. The order is Megatron-Core's with pairs. Each pair lasts in full, less the most that either
of its passes can hide (`optpipe.planning.overlap.most_hidden`).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, pairwise
from math import floor, inf
from operator import ge
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.problem import placement_of
from optpipe.schedule import ActionType
from optpipe_solver.budget import Stop
from optpipe_solver.milp.highs import MilpModel, MilpStatus, RowByRow, at_least, total
from optpipe_solver.milp.plan.pattern import (
    HELD,
    NUM_DURATIONS,
    PAIRED_BACK,
    PAIRED_FORWARD,
    kind_number,
    patterns_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from optpipe_solver.arrays import Floats
    from optpipe_solver.milp.highs import Constraint, Linear, MilpOutcome, Variable
    from optpipe_solver.milp.plan.pattern import Boundary, LongestPath, MemoryMoment

__all__ = ["BestCut", "CutNumbers", "CutPrices", "LayerNumbers", "best_cut", "fused_family"]

_ROUNDING = 1e-9
_TOLERANCE = 1e-5
_PATIENCE, _ENOUGH, _COARSE = 8, 2e-3, 0.01
_NO_CUT: tuple[int, ...] = ()
_WHOLE = 1e-4
_MOST_RUNS = 8
_STEPPED, _FOUND, _FIRST_STEP, _TURN = 0.3, 0.4, 0.25, 0.6
_SEPARATED, _MOST_ROWS, _SEEN, _MOST_SOLVED = 8, 1500, 40, 50
_CELLS, _BUILD = 1e6, 10.0
"""Cells of longest paths per unit of work (see `Stop`), and path searches that a build costs."""

_FORWARD, _BACK = kind_number(ActionType.FORWARD), kind_number(ActionType.FULL_BACKWARD)


def fused_family(chunks: int, *, pairs: bool = False) -> str:
    """Return the name of the frameworks' fused order for this number of stages per rank."""
    if pairs:
        return "1f1b-overlap"
    return "1f1b" if chunks == 1 else "interleaved"


class LayerNumbers(NamedTuple):
    """One kind of layer: how many, ms of F and of all passes, bytes, and ms to hide in pairs.

    Bytes are kept per micro-batch, static, and workspaces of F and B. The exchange with experts is
    in ms of F and of all passes. The hidden ms are the maximum that F and B hide.
    """

    number: int
    forward_ms: float
    whole_ms: float
    kept: float
    static: float
    forward_workspace: float
    back_workspace: float
    exchanged_forward_ms: float = 0.0
    exchanged_ms: float = 0.0
    hidden_forward_ms: float = 0.0
    hidden_back_ms: float = 0.0

    @property
    def passes(self) -> tuple[float, float, float, float]:
        """F and the whole backward, in ms, and each without the most that it hides."""
        forward_ms, back_ms = self.forward_ms, self.whole_ms - self.forward_ms
        alone = forward_ms, back_ms
        return (*alone, forward_ms - self.hidden_forward_ms, back_ms - self.hidden_back_ms)

    @property
    def computed(self) -> LayerNumbers:
        """The layer with passes that last as long as they compute."""
        return self._replace(
            forward_ms=self.forward_ms - self.exchanged_forward_ms,
            whole_ms=self.whole_ms - self.exchanged_ms,
        )

    @property
    def exchanged(self) -> LayerNumbers:
        """The layer with passes that last as long as they exchange."""
        return self._replace(forward_ms=self.exchanged_forward_ms, whole_ms=self.exchanged_ms)


class CutNumbers(NamedTuple):
    """The input of the cut program of fused 1F1B; the same for many candidates.

    Parameters
    ----------
    pp, chunks, num_microbatches, links
        Ranks, stages per rank, micro-batches, and delays between the stages (`boundaries`).
    layers
        Each kind of layer except embedding and head, on each rank.
    ends
        Embedding and head.
    rooms
        Bytes of each rank.
    pairs
        Whether F's and B's run in pairs.
    runs
        The layers in model order, as (kind, number of consecutive layers). Empty: in any order.
    """

    pp: int
    chunks: int
    num_microbatches: int
    links: tuple[Boundary, ...]
    layers: tuple[tuple[LayerNumbers, ...], ...]
    ends: tuple[LayerNumbers, LayerNumbers]
    rooms: tuple[float, ...]
    pairs: bool = False
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def placement(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return placement_of("linear" if self.chunks == 1 else "loop", self.pp, self.chunks)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of durations in `passes`."""
        return (_FORWARD, _BACK, PAIRED_FORWARD, PAIRED_BACK)[: 4 if self.pairs else 2]

    def passes(self, part: LayerNumbers) -> tuple[float, ...]:
        """Return the ms of each of ``kinds`` that a layer takes."""
        return part.passes[: len(self.kinds)]

    @property
    def all_passes(self) -> Floats:
        """By stage, kind of layer and kind of duration, in ms."""
        return np.array([[self.passes(one) for one in self.layers[r]] for r in self.placement])

    def is_no_better_than(self, other: CutNumbers) -> bool:
        """Whether each number is at least as bad: no cut is shorter here or fits only here."""
        if (*self[:3], *self[-2:]) != (*other[:3], *other[-2:]) or any(
            a.number != b.number for a, b in zip(self.layers[0], other.layers[0], strict=False)
        ):
            return False
        return bool((self._costs >= other._costs).all())

    @property
    def _costs(self) -> Floats:
        """The numbers whose decrease makes a cut shorter or lets it fit."""
        parts = [part for rank in self.layers for part in rank] + list(self.ends)
        costs = [
            (*self.passes(one), one.kept, one.static, one.forward_workspace, one.back_workspace)
            for one in parts
        ]
        return np.array([*_flat(self.links), *(-room for room in self.rooms), *chain(*costs)])

    def of_layers(self, counts: Floats) -> Floats:
        """Return the ms that one more layer adds to a path, by stage and kind of layer."""
        return np.asarray(np.einsum("ks,stk->st", counts[list(self.kinds)], self.all_passes))

    def durations(self, layers: Floats) -> Floats:
        """Return ms by kind of duration and stage, from layers by stage and kind."""
        found = np.zeros((NUM_DURATIONS + 2 * self.pairs, self.pp * self.chunks))
        found[list(self.kinds)] = np.einsum("st,stk->ks", layers, self.all_passes)
        for stage, end in zip((0, -1), self.ends, strict=True):
            found[list(self.kinds), stage] += self.passes(end)
        return found

    def beside(self, moment: MemoryMoment) -> float:
        """Return the minimum workspace of the pass that runs at a moment, in bytes."""
        ends = {0: self.ends[0], self.pp * self.chunks - 1: self.ends[1]}
        end = ends.get(moment.stage)
        parts = self.layers[self.placement[moment.stage]] if end is None else (end,)
        if moment.kind is ActionType.FORWARD:
            return min(part.forward_workspace for part in parts)
        return min(part.back_workspace for part in parts)

    def room(self, rank: int, moment: MemoryMoment) -> float:
        """Return the bytes that a rank has for layers at a moment."""
        room = self.rooms[rank] * (1 + _ROUNDING) - self.beside(moment)
        last = self.pp * self.chunks - 1
        for stage, count in _held_by_stage(self.placement, rank, moment):
            for end, at in zip(self.ends, (0, last), strict=True):
                room -= (end.static + count * end.kept) if at == stage else 0.0
        return room

    def layer_bytes(self, rank: int, moment: MemoryMoment) -> dict[int, list[float]]:
        """Return the bytes of each kind of layer in each of a rank's stages at a moment."""
        return {
            stage: [part.static + count * part.kept for part in self.layers[rank]]
            for stage, count in _held_by_stage(self.placement, rank, moment)
        }

    def most_layers(self, rank: int, moment: MemoryMoment) -> int:
        """Return the maximum number of layers of a rank at a moment, in any of its stages."""
        each = {s: max(min(need), 1e-9) for s, need in self.layer_bytes(rank, moment).items()}
        ends = (0, self.pp * self.chunks - 1)
        forced = [need for stage, need in each.items() if stage not in ends]
        room = self.room(rank, moment) - sum(forced)
        return len(forced) + max(0, floor(room / min(each.values())))


def _held_by_stage(
    placement: Sequence[int], rank: int, moment: MemoryMoment
) -> Iterator[tuple[int, int]]:
    """Yield each stage of a rank with how many micro-batches it holds at a moment."""
    own = (stage for stage, device in enumerate(placement) if device == rank)
    for stage, counts in zip(own, moment.counts, strict=True):
        yield stage, counts[HELD]


class CutPrices(NamedTuple):
    """The dual solution of a relaxed cut program: a mean of paths, and prices of memory.

    Any such numbers bound every cut of every configuration of the same order, by arithmetic. A
    layer costs what it adds to the mean path and the price of its bytes. This is at least its cost
    in the cheapest stage. Each inner stage has a layer, at its own cost.

    Parameters
    ----------
    counts
        How often (kind, stage) is on the mean path.
    constant_ms, links
        The other ms of that path, and the delays between the stages.
    moments
        Rank, moment, price in ms of a rank's whole memory, and of a layer's place.
    given, least_ms
        The numbers of the solved program, and a lower bound of their cuts.
    """

    counts: Floats
    constant_ms: float
    links: tuple[Boundary, ...]
    moments: tuple[tuple[int, MemoryMoment, float, float], ...]
    given: CutNumbers
    least_ms: float = 0.0

    def bound_ms(self, given: CutNumbers) -> float:
        """Return a lower bound for other numbers of the same order, in ms of the pipeline.

        0 if messages fill a link in the solved program but not here: then they do not queue.
        """
        pairs = zip(_flat(self.links), _flat(given.links), strict=True)
        cheaper = min((here / there for there, here in pairs if there > 0), default=1.0)
        if cheaper <= 0.0:
            return 0.0
        cost = given.of_layers(self.counts)
        found = self.constant_ms * cheaper
        for stage, end in zip((0, -1), given.ends, strict=True):
            found += float(self.counts[list(given.kinds), stage] @ given.passes(end))
        for rank, moment, of_room, of_place in self.moments:
            for stage, needs in given.layer_bytes(rank, moment).items():
                cost[stage] += of_room / given.rooms[rank] * np.array(needs) + of_place
            found -= of_room * given.room(rank, moment) / given.rooms[rank]
            found -= of_place * given.most_layers(rank, moment) if of_place else 0.0
        least = cost.min(axis=0)
        found += float(least @ [part.number for part in given.layers[0]])
        found += float((cost - least)[1:-1].min(axis=1).sum())
        found *= 1 - _TOLERANCE
        return max(found, self.least_ms) if given.is_no_better_than(self.given) else found


def _flat(links: Sequence[Boundary]) -> Iterator[float]:
    return (ms for link in links for way in link for ms in way)


class BestCut(NamedTuple):
    """A lower bound of all cuts into whole layers, in ms of the pipeline, and a good cut.

    The bound is infinite if no cut fits. It need not exceed the ``enough_ms`` of the call.
    ``sizes`` count embedding and head as layers, and are empty if no cut was found in time. If
    layers differ, the cut may not fit, or take longer. ``work`` is in units (see `Stop`).
    ``prices`` is the dual solution of the relaxation, if there is one.
    """

    bound_ms: float
    sizes: tuple[int, ...]
    work: float
    prices: CutPrices | None


def best_cut(
    given: CutNumbers,
    enough_ms: float = inf,
    stop: Stop | None = None,
    *,
    relaxed: bool = False,
    least_ms: float = 0.0,
) -> BestCut:
    """Return the bound of all cuts and a good cut; cached for the same numbers and limits.

    If ``relaxed``, return only the bound of the relaxation, which is quick. ``least_ms``: if above
    0, a known bound, which the call only tries to raise.
    """
    stop = stop or Stop(inf)
    limit = stop.limit_s if stop.work is None else stop.left_work
    kept = _kept((given, enough_ms, limit, stop.work is None, relaxed, least_ms))
    if kept:
        stop.spend(kept[0].work)
        return kept[0]
    before = stop.spent
    program = _CutProgram(given)
    bound_ms, sizes = program.solved(stop, enough_ms, relaxed=relaxed, least_ms=least_ms)
    prices = program.prices
    if prices is not None:
        prices = prices._replace(least_ms=bound_ms)
    found = BestCut(bound_ms, sizes, stop.spent - before, prices)
    if not stop.is_told() and (stop.work is None or stop.left_s() > 0):
        kept.append(found)
    return found


@lru_cache(maxsize=4096)
def _kept(key: tuple[object, ...]) -> list[BestCut]:  # noqa: ARG001 - the cache's key
    """Return the list that caches an answer, empty until there is one."""
    return []


class _CutProgram:
    """Whole layers of each kind per stage; paths of the order are added as rows."""

    def __init__(self, given: CutNumbers) -> None:
        self.given = given
        chunks, m = given.chunks, given.num_microbatches
        name = fused_family(chunks, pairs=given.pairs)
        self.pattern = next(
            patterns_of(
                given.placement, m, given.links, transfers=False, recompute=False, names=(name,)
            )
        )
        self.prices: CutPrices | None = None
        self.stages, kinds = range(len(given.placement)), given.layers[0]
        model = MilpModel("cut")
        self.layers = [
            [model.whole(f"layers_{s}_{t}", 0, kind.number) for t, kind in enumerate(kinds)]
            for s in self.stages
        ]
        sent = sum(_flat(given.links))
        all_ms = max(sum(one.number * one.whole_ms for one in parts) for parts in given.layers)
        all_ms += sum(end.whole_ms for end in given.ends)
        self.length = model.continuous("length", 0.0, m * (all_ms + sent))
        model.minimise(self.length)
        for t, kind in enumerate(kinds):
            model.add(total([row[t] for row in self.layers]) == kind.number)
        for row in self.layers[1:-1]:
            model.add(at_least(total(list(row)), 1.0))
        # A rank's layers in all its stages are whole too. Branching on that number decides most.
        ranks = [[s for s in self.stages if given.placement[s] == r] for r in range(given.pp)]
        self.is_any_order = model.continuous("is_any_order", 0.0, 1.0)
        self.ended = self._in_order(model)
        self.sums = [
            [self._sum(model, f"stage_{s}", [s]) for s in self.stages],
            [
                self._sum(model, f"rank_{r}", own)
                for r, own in enumerate(ranks if chunks > 1 else ())
            ],
        ]
        # Rows of memory, which `_priced` reads: the index of the first row, and the moments.
        self.first = len(model.constraints)
        self.memory_rows: list[tuple[int, list[MemoryMoment]]] = []
        for rank, moments in enumerate(self.pattern.moments):
            fullest = _fullest(moments, given.beside)
            self.memory_rows.append((rank, fullest))
            for moment in fullest:
                model.add(self._fits(rank, moment))
            # The rank's whole layers are fewer than its memory holds in fractions of layers.
            most = min(given.most_layers(rank, one) for one in fullest)
            own = [s for s, device in enumerate(given.placement) if device == rank]
            terms = [-1.0 * one for s in own for one in self.layers[s]]
            model.add(at_least(total(list(terms)), -float(most)))
        self.num_rows = len(model.constraints)
        self.rows = RowByRow(model)
        self.columns = np.array([self.rows.columns_of(row) for row in self.layers])
        self.length_column = self.rows.columns_of([self.length])
        self.kinds, self.all_passes = list(given.kinds), given.all_passes
        self.of_ends = given.durations(np.zeros(self.columns.shape))
        self.paths: list[LongestPath] = []

    def _in_order(self, model: MilpModel) -> list[Variable]:
        """Add rows by which the first stages hold the first layers of the model.

        For each kind, its layers among the first N are between the hulls of their numbers. If whole
        numbers between the hulls may differ from these, and runs are few, return 0-1 variables:
        whether a run, each but the last, has ended by the end of a stage, each but the last. No row
        has an effect while ``is_any_order`` may be 1.
        """
        kinds, runs, found = self.given.layers[0], self.given.runs, []
        if len(runs) < 2:
            return []
        among = _among_first(runs, len(kinds))
        needs_runs = not all(map(_is_between_hulls, among)) and len(runs) <= _MOST_RUNS
        for stage in self.stages[:-1]:
            layers = [
                total([row[t] for row in self.layers[: stage + 1]]) for t in range(len(kinds))
            ]
            number = total(list(layers))
            for part, own, points in zip(kinds[:-1], layers, among, strict=False):
                free = part.number * self.is_any_order
                for slope, constant in _hull(points):
                    model.add(at_least(slope * number - own + free, -constant))
                for slope, constant in _hull(-points):
                    model.add(at_least(slope * number + own + free, -constant))
            found += self._ended(model, stage, layers) if needs_runs else []
        return found

    def _ended(self, model: MilpModel, stage: int, layers: Sequence[Linear]) -> list[Variable]:
        """Add which runs have ended by the end of a stage, from its and earlier layers by kind."""
        runs = self.given.runs
        ended = [model.binary(f"ended_{stage}_{run}") for run in range(len(runs) - 1)]
        for before, after in pairwise(ended):
            model.add(at_least(before - after, 0.0))
        for kind, (part, own) in enumerate(zip(self.given.layers[0], layers, strict=True)):
            free = part.number * self.is_any_order
            which = [run for run, (one, _) in enumerate(runs) if one == kind]
            whole = [runs[run][1] * ended[run] for run in which if run < len(ended)]
            begun = [runs[run][1] * ended[run - 1] for run in which if run]
            if whole:
                model.add(at_least(own + free - total(whole), 0.0))
            first = float(runs[0][1]) if which[0] == 0 else 0.0
            model.add(at_least(total(begun) + free - own, -first))
        return ended

    def _sum(self, model: MilpModel, name: str, stages: Sequence[int]) -> Variable:
        """Return the number of layers of all kinds in some stages, as a variable."""
        parts = [one for s in stages for one in self.layers[s]]
        if len(parts) == 1:
            return parts[0]
        most = sum(kind.number for kind in self.given.layers[0])
        found = model.whole(name, 0, most)
        model.add(total(parts) == found)
        return found

    def _fits(self, rank: int, moment: MemoryMoment) -> Constraint:
        """Return the row that a rank's memory suffices at a moment, in shares of its memory."""
        given = self.given
        whole = given.rooms[rank]
        terms: list[Linear] = [
            -need / whole * one
            for stage, needs in given.layer_bytes(rank, moment).items()
            for need, one in zip(needs, self.layers[stage], strict=True)
        ]
        return at_least(total(terms), -given.room(rank, moment) / whole)

    def _priced(self) -> CutPrices | None:
        """Return the dual solution of the last relaxation; None if it prices no path."""
        prices = np.maximum(0.0, self.rows.prices())
        share = float(prices[self.num_rows :].sum())
        if share <= 0.0:
            return None
        prices /= share
        moments, row = [], self.first
        for rank, fullest in self.memory_rows:
            of_place = float(prices[row + len(fullest)])
            counted = [self.given.most_layers(rank, one) for one in fullest]
            for which, moment in enumerate(fullest):
                place = of_place if which == int(np.argmin(counted)) else 0.0
                if prices[row + which] > 0 or place > 0:
                    moments.append((rank, moment, float(prices[row + which]), place))
            row += len(fullest) + 1
        used = list(zip(self.paths, prices[self.num_rows :], strict=True))
        return CutPrices(
            counts=np.sum([price * path.counts for path, price in used], axis=0),
            constant_ms=float(sum(price * path.constant_ms for path, price in used)),
            links=self.given.links,
            moments=tuple(moments),
            given=self.given,
        )

    def solved(
        self, stop: Stop, enough_ms: float, *, relaxed: bool = False, least_ms: float = 0.0
    ) -> tuple[float, tuple[int, ...]]:
        """Add paths to the relaxation, then to the integer program, while the bound rises.

        ``least_ms``: if above 0, a known bound from which the integer program starts.
        """
        stop.spend(_BUILD * self.cells)
        said_ms, sizes = self._said(stop, enough_ms, 0.0, is_integer=False)
        if said_ms == inf or relaxed:
            return said_ms * (1 - _TOLERANCE), sizes
        if len(self.given.runs) > 1:
            self.rows.bound(self.is_any_order, 0.0, 0.0)
        is_again = least_ms > 0.0
        turn = stop.turn(1.0 if is_again else _STEPPED)
        said_ms, sizes = self._stepped(turn, max(said_ms, least_ms), enough_ms)
        if not sizes and not is_again and said_ms * (1 - _TOLERANCE) < enough_ms:
            turn = stop.turn(_FOUND)
            said_ms, sizes = self._said(turn, enough_ms, said_ms, is_integer=True)
        return said_ms * (1 - _TOLERANCE), sizes

    def _stepped(
        self, stop: Stop, said_ms: float, enough_ms: float
    ) -> tuple[float, tuple[int, ...]]:
        """Raise the bound up to ``enough_ms``, by lengths that are refuted or give a cut.

        Steps double after a refutation. They shrink to a quarter if a turn ends without a result.
        """
        most_ms, sizes, top_ms = enough_ms * (1 + 2 * _TOLERANCE), _NO_CUT, self.length.upBound
        step = _FIRST_STEP
        while said_ms < most_ms < inf and not stop.is_over():
            left_ms = most_ms - said_ms
            is_last = step >= 1.0 or left_ms <= _ENOUGH * most_ms
            if (is_last and sizes) or (step * left_ms < _ENOUGH * most_ms / 4):
                break
            within = _CutsWithin(self, most_ms if is_last else said_ms + step * left_ms)
            if within.is_empty(stop.turn(_TURN)):
                said_ms, step = within.most_ms, min(2 * step, 0.5 if sizes else 1.0)
            elif within.found is not None:
                length_ms = self.paths_of(within.found)[0].length_ms
                most_ms, sizes, step = min(most_ms, length_ms), self._sizes(within.found), 0.5
            else:
                step /= 4
        self.rows.minimise({self.length: 1.0})
        self.rows.bound(self.length, 0.0, top_ms)
        for one in (one for group in (*self.sums, self.ended, *self.layers) for one in group):
            self.rows.bound(one, 0.0, one.upBound)
        return said_ms, sizes

    @property
    def cells(self) -> float:
        return len(self.stages) * self.given.num_microbatches / _CELLS

    def _said(
        self, stop: Stop, enough_ms: float, said_ms: float, *, is_integer: bool
    ) -> tuple[float, tuple[int, ...]]:
        known_ms, centre, sizes, recent = inf, None, _NO_CUT, [-1.0] * _PATIENCE
        while not stop.is_over() and said_ms * (1 - _TOLERANCE) < enough_ms:
            # Far from the best known length, rows raise the bound more than branching does.
            gap = _COARSE if known_ms > said_ms * (1 + 2 * _COARSE) else _ENOUGH / 2
            outcome = self.rows.solve(stop, integer=is_integer, gap=gap)
            if outcome.status is MilpStatus.INFEASIBLE:
                return inf, _NO_CUT
            said_ms = max(said_ms, outcome.bound or 0.0)
            if outcome.values is None:
                break
            if not is_integer and self.paths:
                self.prices = self._priced() or self.prices
            layers = np.array([[outcome.values[one] for one in row] for row in self.layers])
            if centre is not None and not is_integer:
                # Between the program's solution and the best known one, where rows cut off most.
                layers = 0.4 * layers + 0.6 * centre
            paths = self.paths_of(layers)
            stop.spend(self.cells)
            if paths[0].length_ms < known_ms:
                known_ms, centre = paths[0].length_ms, layers
                if is_integer:
                    sizes = self._sizes(layers)
            stalls = 0.0 < said_ms <= recent[0] * (1 + _ENOUGH)
            if known_ms <= said_ms * (1 + _ENOUGH) or (stalls and not is_integer):
                break
            recent = [*recent, said_ms][-_PATIENCE:]
            for path in paths:
                self.add_path(path)
                self.paths.append(path)
        return said_ms, sizes

    @staticmethod
    def _sizes(layers: Floats) -> tuple[int, ...]:
        sizes = [round(number) for number in layers.sum(axis=1)]
        sizes[0] += 1
        sizes[-1] += 1
        return tuple(sizes)

    def paths_of(self, layers: Floats) -> list[LongestPath]:
        """Return the longest paths of layers by stage and kind."""
        durations = self.of_ends.copy()
        durations[self.kinds] += np.einsum("st,stk->ks", layers, self.all_passes)
        return self.pattern.longest_paths(durations)

    def add_path(self, path: LongestPath) -> None:
        """Add the row that the length is at least a path's length."""
        factors = np.einsum("ks,stk->st", path.counts[self.kinds], self.all_passes)
        of_ends = float((path.counts * self.of_ends).sum())
        used = factors != 0.0
        columns = np.append(self.columns[used], self.length_column)
        low = path.constant_ms + of_ends
        self.rows.add_row(columns, np.append(-factors[used], 1.0), low)


class _CutsWithin:
    """The search for a cut that takes at most ``most_ms``.

    A linear program's maximum, rounded down, limits the layers of each rank. The limits of all
    ranks tighten each other until nothing changes. Then the range of a number that is not whole is
    halved, and each half is searched. Numbers of ranks come first, then those of stages, then which
    runs of equal layers have ended, then the layers of each kind.
    """

    def __init__(self, program: _CutProgram, most_ms: float) -> None:
        self.program, self.most_ms, self.rows = program, most_ms, program.rows
        layers = [one for row in program.layers for one in row]
        # With a single kind of layer, its numbers equal the stages' numbers.
        kinds = layers if len(program.given.layers[0]) > 1 else []
        groups = (*reversed(program.sums), program.ended, kinds)
        self.groups = [group for group in groups if group]
        self.bounds = {one: (0.0, float(one.upBound)) for group in self.groups for one in group}
        self.seen: list[Mapping[Variable, float]] = []
        self.found: Floats | None = None
        self.rows.bound(program.length, 0.0, most_ms)
        self._set(self.bounds, is_new=True)

    def is_empty(self, stop: Stop) -> bool:
        """Return True if there is no cut; False if one was ``found``, or the work is used up."""
        if self._is_rounded_away(stop):
            return True
        for _ in range(_MOST_SOLVED):
            outcome, is_exact = self._extreme({self.program.length: 1.0}, stop)
            if outcome.status is MilpStatus.INFEASIBLE:
                return True
            point = outcome.values
            if outcome.status is not MilpStatus.OPTIMAL or point is None or stop.is_over():
                return False
            one = self._least_whole(point)
            if one is not None:
                return self._is_empty_on_both_sides(one, float(floor(point[one])), stop)
            if is_exact:
                self.found = np.round([[point[one] for one in row] for row in self.program.layers])
                return False
        return False

    def _least_whole(self, point: Mapping[Variable, float]) -> Variable | None:
        """Return the variable farthest from a whole number, of the first group that has any."""
        for group in self.groups:
            one = max(group, key=lambda one: abs(point[one] - round(point[one])))
            if abs(point[one] - round(point[one])) > _WHOLE:
                return one
        return None

    def _is_empty_on_both_sides(self, one: Variable, middle: float, stop: Stop) -> bool:
        known = self.bounds
        low, high = known[one]
        for half in ((low, middle), (middle + 1, high)):
            self._set(known | {one: half})
            if not self.is_empty(stop):
                return False
        self._set(known)
        return True

    def _set(self, bounds: dict[Variable, tuple[float, float]], *, is_new: bool = False) -> None:
        for one, pair in bounds.items():
            if is_new or pair != self.bounds[one]:
                self.rows.bound(one, *pair)
        self.bounds = bounds

    def _is_rounded_away(self, stop: Stop) -> bool:
        """Round down the maxima of ranks until nothing changes; return whether no cut is left."""
        before: dict[Variable, tuple[float, float]] = {}
        while before != self.bounds and not stop.is_over():
            before = self.bounds
            for one in self.groups[0]:
                low, high = self.bounds[one]
                if low == high or self._is_reached(one, high):
                    continue
                outcome, _ = self._extreme({one: -1.0}, stop)
                if outcome.status is MilpStatus.INFEASIBLE:
                    return True
                if outcome.status is not MilpStatus.OPTIMAL or outcome.values is None:
                    continue
                most = float(floor(outcome.values[one] + _WHOLE))
                if most < low:
                    return True
                self._set(self.bounds | {one: (low, min(most, high))})
        return False

    def _is_reached(self, one: Variable, high: float) -> bool:
        """Whether a known point is so near the limit that rounding cannot lower it."""
        return any(
            point[one] > high - 1 + _WHOLE
            and all(a - _WHOLE <= point[k] <= b + _WHOLE for k, (a, b) in self.bounds.items())
            for point in self.seen
        )

    def _extreme(self, factors: Mapping[Variable, float], stop: Stop) -> tuple[MilpOutcome, bool]:
        """Minimise, and add the longest paths that exceed the limit.

        Return the outcome, and whether no path exceeds the limit at the end.
        """
        program = self.program
        self.rows.minimise(factors)
        for _ in range(_SEPARATED):
            outcome = self.rows.solve(stop, integer=False)
            if outcome.values is None or outcome.status is not MilpStatus.OPTIMAL:
                break
            values = outcome.values
            layers = np.array([[values[one] for one in row] for row in program.layers])
            paths = program.paths_of(layers)
            stop.spend(program.cells)
            longer = [one for one in paths if one.length_ms > self.most_ms * (1 + _TOLERANCE)]
            if not longer:
                self.seen = [*self.seen[-_SEEN:], {one: values[one] for one in self.bounds}]
                return outcome, True
            self.rows.thin(program.num_rows, _MOST_ROWS)
            for path in longer:
                program.add_path(path)
        return outcome, False


def _among_first(runs: Sequence[tuple[int, int]], num_kinds: int) -> Floats:
    """Return how many of the first 0, 1, 2, ... layers are of each kind, by kind."""
    order = [kind for kind, number in runs for _ in range(number)]
    counts = np.eye(num_kinds)[order].cumsum(axis=0) if order else np.zeros((0, num_kinds))
    return np.vstack([np.zeros(num_kinds), counts]).T


def _hull(points: Floats) -> list[tuple[float, float]]:
    """Return slope and constant of each line of the upper hull of values at 0, 1, 2, ..."""
    corners: list[tuple[int, float]] = []
    for x, y in enumerate(points.tolist()):
        while len(corners) > 1 and _slope(*corners[-2:]) <= _slope(corners[-1], (x, y)):
            corners.pop()
        corners.append((x, y))
    slopes = [(_slope(*pair), pair[0]) for pair in pairwise(corners)]
    return [(slope, y - slope * x) for slope, (x, y) in slopes]


def _slope(first: tuple[int, float], second: tuple[int, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def _is_between_hulls(points: Floats) -> bool:
    """Whether each value is the only whole number between the hulls at its place."""
    at = np.arange(len(points))
    high, low = (
        np.min([slope * at + constant for slope, constant in _hull(side)], axis=0)
        for side in (points, -points)
    )
    return bool(
        (np.floor(high + _WHOLE) <= points).all() and (np.floor(low + _WHOLE) <= -points).all()
    )


def _fullest(
    moments: Sequence[MemoryMoment], beside: Callable[[MemoryMoment], float]
) -> list[MemoryMoment]:
    """Return the moments that no other exceeds, by micro-batches of each stage and workspace."""
    found = {(*(row[HELD] for row in one.counts), beside(one)): one for one in moments}
    kept: list[tuple[float, ...]] = []
    for key in sorted(found, reverse=True):
        if not any(all(map(ge, other, key)) for other in kept):
            kept.append(key)
    return [found[key] for key in kept]
