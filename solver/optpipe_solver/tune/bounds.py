"""What no cut of a configuration, whatever its schedule, can beat, by arithmetic on its layers.

Compute. With F + I + W of all layers B ms and m micro-batches, the p ranks have m B ms to share:
one of them at least m B / p. Layers are whole: rank r holds as many of the commonest kind as time
and memory leave it beside embedding or head, and all of them must be held by somebody.

Filling. A rank computes nothing before the F's of what lies ahead of its first stage, and with
fused backwards nothing after the backwards of that. With one stage per rank in a line, rank r's
loads b satisfy C >= m b_r + a (b_0 + ... + b_(r-1)), where a is 1 with fused backwards, and the
least share of F in a layer else. All p inequalities are tightest when equal, then
C = a B / (1 - (1 - a/m)^p). With several stages per rank only one layer per stage is ahead for
certain: summed over the ranks, C >= m B / p + (p - 1) / 2 x (a times the quickest layer).

Cut. Of 1F1B and interleaved 1F1B an integer program says more (`best_cut`): how many layers each
stage has, within each rank's memory, against the longest paths of the order, messages included,
added where they are longer than it says, layers of different kinds in any order. What its
relaxation rests on, a mean of paths and prices of memory, bounds by arithmetic every other
configuration of the same order (`CutPrices`).

What follows the pipeline (`StepEstimate.after_ms`) is linear in the parameters that a rank holds,
so that its largest is at least that of a rank with the mean.

Kinds. Where ranks have different accelerators, work is counted in ms of the first, and one rank's
takes at least s_r times as long, s_r the least ratio over the layers. Then the ranks share m B by
their speeds 1/s_r. Filling asks for the most work u_r / s_r in all under C >= m u_r + a (u_0 + ...
+ u_(r-1)): any prices y_r >= 0 with m y_r + a (y_(r+1) + ...) >= 1/s_r bound it by C times their
sum, and those made from the last rank on are small. Packing has every rank's own times and room,
and the cut. Links are the slowest kind's, as in estimates.

Pairs. A forward and a backward together take at least what both compute, and at least what both
exchange. So with every pass as long as it computes, or all as long as they exchange where that is
more, any schedule with pairs becomes one without, no longer and with no more memory
(`optpipe_solver.bounds.pairs`): load and filling hold of those. The cut program has Megatron-Core's
order with pairs, each of which lasts in full but for the most that either of its passes can hide
(`optpipe.presets.overlap.most_hidden`).

Slices. A rank has all slices' work of a micro-batch to do, but before its first F only the F's of
a first slice, the shortest, are ahead: a is their least share of all of it.

Memory. When the last F of a micro-batch ends, nothing of it has come back: a rank then holds that
micro-batch of all its layers, or could have moved it away. 1F1B holds min(m, p - r) micro-batches
on rank r of a line at once; interleaved 1F1B p of every stage of rank r but the first, which has
more, and the last, which may have fewer (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import floor, inf
from operator import ge, mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.presets.overlap import model_phases, most_hidden
from optpipe.presets.parameters import Held, static_bytes
from optpipe.presets.step import in_flight, model_parts, pool_bytes, reserved_bytes
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

    from optpipe.presets import Hardware, Machine, ModelShape, PipelineCut, Training
    from optpipe.presets.step import StagePart
    from optpipe_solver.arrays import Floats
    from optpipe_solver.milp.highs import Constraint, Linear
    from optpipe_solver.milp.plan.pattern import Boundary, LongestPath, MemoryMoment
    from optpipe_solver.tune.space import TuneCandidate, TuneQuestion

__all__ = ["BestCut", "CutNumbers", "CutPrices", "LayerTable", "best_cut", "fused_family"]

_ROUNDING = 1e-9
_TOLERANCE = 1e-5
_PATIENCE, _ENOUGH, _COARSE = 8, 2e-3, 0.01
_NO_CUT: tuple[int, ...] = ()
_MOST_CELLS = 70_000
_CELLS, _BUILD = 1e6, 10.0
"""Cells of longest paths that are a unit of work (see `Stop`), and how many are as much as one."""

_FORWARD, _BACK = kind_number(ActionType.FORWARD), kind_number(ActionType.FULL_BACKWARD)


def fused_family(chunks: int, *, pairs: bool = False) -> str:
    """Return the fused order that frameworks have for so many stages of each rank."""
    if pairs:
        return "1f1b-overlap"
    return "1f1b" if chunks == 1 else "interleaved"


class _LayerNumbers(NamedTuple):
    """One kind of layer: how many, ms of F and of everything, bytes, and what may hide in pairs.

    Bytes by micro-batch, at rest, and beside while F and B run; ms of exchange with experts in F
    and in all; the most ms that F and B hide.
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
    def computed(self) -> _LayerNumbers:
        """With passes that last as long as they compute."""
        return self._replace(
            forward_ms=self.forward_ms - self.exchanged_forward_ms,
            whole_ms=self.whole_ms - self.exchanged_ms,
        )

    @property
    def exchanged(self) -> _LayerNumbers:
        """With passes that last as long as they exchange."""
        return self._replace(forward_ms=self.exchanged_forward_ms, whole_ms=self.exchanged_ms)


class LayerTable:
    """The layers of a configuration as its bounds see them, for any number of chunks.

    Parameters
    ----------
    question, training, pp, kinds
        What is bounded, over all cuts and all schedules that the framework has. ``kinds`` as in
        `TuneCandidate`.
    pairs, slices
        As in `TuneCandidate`.
    """

    def __init__(
        self,
        question: TuneQuestion,
        training: Training,
        pp: int,
        kinds: tuple[Hardware, ...] = (),
        *,
        pairs: bool = False,
        slices: int = 1,
    ) -> None:
        self.pp, self.ranks, self.pairs = pp, question.ranks(kinds, pp), pairs
        self.fused = question.framework == "megatron"
        cuts = [replace(training, slices=slices, slice_index=index) for index in range(slices)]
        machines = {one: question.machine(cuts[0], one) for one in dict.fromkeys(self.ranks)}
        hidden_on = [
            most_hidden(model_phases(question.shape, one, pp) if pairs else ())
            for one in machines.values()
        ]
        hidden: dict[tuple[tuple[StagePart, ...], ...], tuple[tuple[float, float], ...]] = {}
        layers: dict[tuple[tuple[StagePart, ...], ...], int] = {}
        for same in zip(
            *(_sliced_parts(question.shape, one, cuts, pp) for one in machines.values()),
            strict=True,
        ):
            at = sum(layers.values())
            hidden[same] = tuple(one[at] if pairs else (0.0, 0.0) for one in hidden_on)
            layers[same] = layers.get(same, 0) + same[0][0].repeat
        keeps = question.framework != "any"
        self.whole_parts_on = {
            hardware: [
                _numbers_of(number, same[which], training, hidden[same][which], keeps=keeps)
                for same, number in layers.items()
            ]
            for which, hardware in enumerate(machines)
        }
        self.parts_on = self.whole_parts_on
        if pairs:
            self.parts_on = max(
                ({k: [one.computed for one in v] for k, v in self.parts_on.items()},
                 {k: [one.exchanged for one in v] for k, v in self.parts_on.items()}),
                key=lambda on: _whole_ms(on[self.ranks[0]]),
            )  # fmt: skip
        self.parts = self.parts_on[self.ranks[0]]
        self.whole_ms = _whole_ms(self.parts)
        self.slow = [_slower(self.parts, self.parts_on[one]) for one in self.ranks]
        self.share = 1.0
        if not self.fused:
            self.share = min(min(_shares(parts)) for parts in self.parts_on.values())
        self.workspace = min(
            max(part.forward_workspace, part.back_workspace) for part in self.parts
        )
        pool = pool_bytes(question.shape, machines[self.ranks[0]], pp)
        room_of = {
            one: usable - reserved_bytes(one, usable) - pool - self.workspace
            for one in machines
            for usable in (question.usable_bytes_of(one),)
        }
        self.rooms = [room_of[one] for one in self.ranks]
        self.after_ms = _after_ms(_sum(layers), list(machines.values()), is_pipelined=pp > 1) / pp

    def quick_ms(self, candidate: TuneCandidate) -> float:
        """Return a first bound of a step in ms; infinite where not even the mean rank fits."""
        need = sum(part.number * (part.static + part.kept) for part in self.parts)
        if need > sum(self.rooms) * (1 + _ROUNDING):
            return inf
        m = candidate.num_microbatches
        if candidate.chunks == 1:
            pipeline = self.whole_ms / _most_work(self.slow, self.share, m)
        else:
            quickest = {k: min(p.whole_ms for p in parts) for k, parts in self.parts_on.items()}
            speeds = [1 / slow for slow in self.slow]
            ahead = accumulate((quickest[one] for one in self.ranks[:-1]), initial=0.0)
            filled = sum(map(mul, speeds, ahead))
            pipeline = (m * self.whole_ms + self.share * filled) / sum(speeds)
        whole = sum(
            same[0].number * min(part.whole_ms for part in same)
            for same in zip(*self.parts_on.values(), strict=True)
        )
        return max(pipeline, whole if self.fused else 0.0) + self.after_ms

    def packed_ms(self, candidate: TuneCandidate) -> float:
        """Return a bound of a step with whole layers; infinite where no cut fits."""
        m = candidate.num_microbatches
        ms = _Packing(self, candidate).least_ms()
        return max(m * ms + self.after_ms, self.quick_ms(candidate))

    def cut_numbers(self, cut: PipelineCut, links: Sequence[Boundary]) -> CutNumbers | None:
        """Return what decides the best cut; None for other orders, one stage, or too many cells.

        ``links`` are what lies between the stages, see `boundaries`.
        """
        cells = cut.pp * cut.chunks * cut.num_microbatches
        if not self.fused or len(links) == 0 or cells > _MOST_CELLS:
            return None
        layers = {one: tuple(parts[1:-1]) for one, parts in self.whole_parts_on.items()}
        if not any(part.whole_ms > 0 for part in layers[self.ranks[0]]):
            return None
        return CutNumbers(
            pp=cut.pp,
            chunks=cut.chunks,
            num_microbatches=cut.num_microbatches,
            links=tuple(links),
            layers=tuple(layers[one] for one in self.ranks),
            ends=(
                self.whole_parts_on[self.ranks[0]][0],
                self.whole_parts_on[self.ranks[-1]][-1],
            ),
            rooms=tuple(room + self.workspace for room in self.rooms),
            pairs=self.pairs,
        )


class CutNumbers(NamedTuple):
    """What decides the best cut of fused 1F1B; the same for many candidates.

    Parameters
    ----------
    pp, chunks, num_microbatches, links
        Ranks, stages of each, micro-batches, and what lies between the stages (`boundaries`).
    layers
        Each kind of layer but embedding and head, on each rank.
    ends
        Embedding and head.
    rooms
        Bytes of each rank.
    pairs
        Whether F's and B's run in pairs.
    """

    pp: int
    chunks: int
    num_microbatches: int
    links: tuple[Boundary, ...]
    layers: tuple[tuple[_LayerNumbers, ...], ...]
    ends: tuple[_LayerNumbers, _LayerNumbers]
    rooms: tuple[float, ...]
    pairs: bool = False

    @property
    def placement(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return placement_of("linear" if self.chunks == 1 else "loop", self.pp, self.chunks)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of durations that `passes` are of."""
        return (_FORWARD, _BACK, PAIRED_FORWARD, PAIRED_BACK)[: 4 if self.pairs else 2]

    def passes(self, part: _LayerNumbers) -> tuple[float, ...]:
        """Return the ms of each of ``kinds`` that a layer takes."""
        return part.passes[: len(self.kinds)]

    @property
    def _all_passes(self) -> Floats:
        """By stage, kind of layer and kind of duration, in ms."""
        return np.array([[self.passes(one) for one in self.layers[r]] for r in self.placement])

    def of_layers(self, counts: Floats) -> Floats:
        """Return by stage and kind of layer how much longer one makes a path."""
        return np.asarray(np.einsum("ks,stk->st", counts[list(self.kinds)], self._all_passes))

    def durations(self, layers: Floats) -> Floats:
        """Return what stages take, by kind of duration and stage, from layers by stage and kind."""
        found = np.zeros((NUM_DURATIONS + 2 * self.pairs, self.pp * self.chunks))
        found[list(self.kinds)] = np.einsum("st,stk->ks", layers, self._all_passes)
        for stage, end in zip((0, -1), self.ends, strict=True):
            found[list(self.kinds), stage] += self.passes(end)
        return found

    def beside(self, moment: MemoryMoment) -> float:
        """Return the workspace of what runs at a moment, at least, in bytes."""
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
        """Return how many layers a rank has at most then, whichever of its stages has them."""
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
    """What a relaxed cut program rests on: a mean of paths, and what memory costs.

    Any such numbers bound every cut of every configuration of the same order, by arithmetic: a
    layer in a stage costs what it adds to the mean path and the price of its bytes, so at least
    what it costs in its cheapest stage; and each inner stage has a layer, at its own cost.

    Parameters
    ----------
    counts
        How often (kind, stage) is on the mean path.
    constant_ms, links
        What else it takes, with what lies between the stages.
    moments
        Rank, moment, price in ms of a rank's whole memory, and of a layer's place.
    """

    counts: Floats
    constant_ms: float
    links: tuple[Boundary, ...]
    moments: tuple[tuple[int, MemoryMoment, float, float], ...]

    def bound_ms(self, given: CutNumbers) -> float:
        """Return what no cut of other numbers of the same order undercuts, in ms of the pipeline.

        0 where messages fill a link there and do not here: then they wait for none.
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
        return found * (1 - _TOLERANCE)


def _flat(links: Sequence[Boundary]) -> Iterator[float]:
    return (ms for link in links for way in link for ms in way)


class BestCut(NamedTuple):
    """What no cut into whole layers undercuts, in ms of the pipeline, and a good cut.

    The bound is infinite where no cut fits, and need not be more than what was enough; the cut,
    embedding and head counted as layers, is empty where none was found in time, and may not fit or
    be longer where layers differ. ``work`` is what it took, in units (see `Stop`); ``prices`` what
    the relaxation rests on, where it has a solution.
    """

    bound_ms: float
    sizes: tuple[int, ...]
    work: float
    prices: CutPrices | None


def best_cut(
    given: CutNumbers, enough_ms: float = inf, stop: Stop | None = None, *, relaxed: bool = False
) -> BestCut:
    """Return the bound of all cuts and a good one, found once for the same numbers and limits.

    The bound alone, and quickly, with layers in parts, where it is ``relaxed``.
    """
    stop = stop or Stop(inf)
    limit = stop.limit_s if stop.work is None else stop.left_work
    kept = _kept(given, enough_ms, limit, stop.work is None, relaxed)
    if kept:
        stop.spend(kept[0].work)
        return kept[0]
    before = stop.spent
    program = _CutProgram(given)
    bound_ms, sizes = program.solved(stop, enough_ms, relaxed=relaxed)
    found = BestCut(bound_ms, sizes, stop.spent - before, program.prices)
    if not stop.is_told() and (stop.work is None or stop.left_s() > 0):
        kept.append(found)
    return found


@lru_cache(maxsize=4096)
def _kept(
    given: CutNumbers,  # noqa: ARG001 - what is found is kept by
    enough_ms: float,  # noqa: ARG001
    limit: float,  # noqa: ARG001
    is_timed: bool,  # noqa: ARG001
    relaxed: bool,  # noqa: ARG001
) -> list[BestCut]:
    """Return where an answer is kept, empty before it is there."""
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
        # What a rank has in all its stages is whole too: branching on that decides most.
        ranks = [[s for s in self.stages if given.placement[s] == r] for r in range(given.pp)]
        number = sum(kind.number for kind in kinds)
        for rank, own in enumerate(ranks if chunks > 1 else ()):
            held = model.whole(f"rank_{rank}", 0, number)
            model.add(total([one for s in own for one in self.layers[s]]) == held)
        # Rows of memory, to which `_priced` comes back: where they begin, and which they are.
        self.first = len(model.constraints)
        self.held: list[tuple[int, list[MemoryMoment]]] = []
        for rank, moments in enumerate(self.pattern.moments):
            fullest = _fullest(moments, given.beside)
            self.held.append((rank, fullest))
            for moment in fullest:
                model.add(self._fits(rank, moment))
            # Whole layers are fewer than what is left of a layer's room everywhere would hold.
            most = min(given.most_layers(rank, one) for one in fullest)
            own = [s for s, device in enumerate(given.placement) if device == rank]
            held = [-1.0 * one for s in own for one in self.layers[s]]
            model.add(at_least(total(list(held)), -float(most)))
        self.num_rows = len(model.constraints)
        self.rows = RowByRow(model)
        self.paths: list[LongestPath] = []

    def _fits(self, rank: int, moment: MemoryMoment) -> Constraint:
        """Return that a rank fits at a moment, in shares of its memory."""
        given = self.given
        whole = given.rooms[rank]
        terms: list[Linear] = [
            -need / whole * one
            for stage, needs in given.layer_bytes(rank, moment).items()
            for need, one in zip(needs, self.layers[stage], strict=True)
        ]
        return at_least(total(terms), -given.room(rank, moment) / whole)

    def _priced(self) -> CutPrices | None:
        """Return what the relaxation that was solved last rests on; None where on no path."""
        prices = np.maximum(0.0, self.rows.prices())
        share = float(prices[self.num_rows :].sum())
        if share <= 0.0:
            return None
        prices /= share
        moments, row = [], self.first
        for rank, fullest in self.held:
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
        )

    def solved(
        self, stop: Stop, enough_ms: float, *, relaxed: bool = False
    ) -> tuple[float, tuple[int, ...]]:
        """Add paths to the relaxation, then to the program itself, while that says more."""
        stop.spend(_BUILD * self._cells)
        said_ms, sizes = self._said(stop, enough_ms, 0.0, is_integer=False)
        if said_ms < inf and not relaxed:
            said_ms, sizes = self._said(stop, enough_ms, said_ms, is_integer=True)
        return said_ms * (1 - _TOLERANCE), sizes

    @property
    def _cells(self) -> float:
        return len(self.stages) * self.given.num_microbatches / _CELLS

    def _said(
        self, stop: Stop, enough_ms: float, said_ms: float, *, is_integer: bool
    ) -> tuple[float, tuple[int, ...]]:
        known_ms, centre, sizes, recent = inf, None, _NO_CUT, [-1.0] * _PATIENCE
        while not stop.is_over() and said_ms * (1 - _TOLERANCE) < enough_ms:
            # Far from the best known, rows say more than branching does.
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
                # Between what the program says and the best known, where rows cut off most.
                layers = 0.4 * layers + 0.6 * centre
            paths = self.pattern.longest_paths(self.given.durations(layers))
            stop.spend(self._cells)
            if paths[0].length_ms < known_ms:
                known_ms, centre = paths[0].length_ms, layers
                if is_integer:
                    sizes = self._sizes(layers)
            stalls = 0.0 < said_ms <= recent[0] * (1 + _ENOUGH)
            if known_ms <= said_ms * (1 + _ENOUGH) or (stalls and not is_integer):
                break
            recent = [*recent, said_ms][-_PATIENCE:]
            for path in paths:
                self.rows.add(self._no_shorter(path))
                self.paths.append(path)
        return said_ms, sizes

    @staticmethod
    def _sizes(layers: Floats) -> tuple[int, ...]:
        sizes = [round(number) for number in layers.sum(axis=1)]
        sizes[0] += 1
        sizes[-1] += 1
        return tuple(sizes)

    def _no_shorter(self, path: LongestPath) -> Constraint:
        """Return that the length is at least that of a path."""
        given, counts = self.given, np.asarray(path.counts, dtype=np.float64)
        factors = given.of_layers(counts)
        terms: list[Linear] = [self.length]
        terms += [-float(factors[s, t]) * self.layers[s][t] for s, t in np.argwhere(factors)]
        return at_least(total(terms), path.length_of(self.given.durations(np.zeros(factors.shape))))


def _fullest(
    moments: Sequence[MemoryMoment], beside: Callable[[MemoryMoment], float]
) -> list[MemoryMoment]:
    """Return the moments that no other exceeds, by micro-batches of each stage and bytes beside."""
    found = {(*(row[HELD] for row in one.counts), beside(one)): one for one in moments}
    kept: list[tuple[float, ...]] = []
    for key in sorted(found, reverse=True):
        if not any(all(map(ge, other, key)) for other in kept):
            kept.append(key)
    return [found[key] for key in kept]


class _Packing:
    """Layers dealt out whole to ranks; embedding to the first, head to any.

    They are the kind that takes longest in all, the others left out, or all, each taken for the
    least of them. How many a rank has in which of its stages is free, but each stage has one.
    """

    def __init__(self, table: LayerTable, candidate: TuneCandidate) -> None:
        self.table, self.pp = table, table.pp
        kinds = {one: parts[1:-1] for one, parts in table.parts_on.items()}
        dealt = dict(zip(kinds, _dealt(list(kinds.values())), strict=True))
        self.layers = [dealt[one] for one in table.ranks]
        self.firsts = [table.parts_on[one][0] for one in table.ranks]
        self.lasts = [table.parts_on[one][-1] for one in table.ranks]
        self.number = self.layers[0].number
        self.is_all = self.number == sum(part.number for part in table.parts[1:-1])
        self.held = [self._counts(rank, candidate) for rank in range(self.pp)]

    def _counts(self, rank: int, candidate: TuneCandidate) -> tuple[int, ...]:
        """Return how many micro-batches each stage of a rank holds at once, at least."""
        if self.table.fused:
            return in_flight(rank, candidate.cut())
        return (1,) * candidate.chunks

    def least_ms(self) -> float:
        """Return what the busiest rank computes of a micro-batch at least."""
        if min(layer.whole_ms for layer in self.layers) <= 0:
            return 0.0
        alike = dict.fromkeys(zip(self.layers, self.firsts, self.lasts, strict=True))
        values = sorted(
            {
                n * layer.whole_ms + end
                for layer, first, last in alike
                for n in range(self.number + 1)
                for end in (0.0, first.whole_ms, last.whole_ms, first.whole_ms + last.whole_ms)
            }
        )
        if not self._fits(values[-1]):
            return inf
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(values[middle]) else (middle + 1, high)
        return values[low]

    def _fits(self, ms: float) -> bool:
        """Whether all layers find a rank that computes no longer than this."""
        both = self._most(0, (self.firsts[0], self.lasts[0]), ms)
        if self.pp == 1:
            return both >= self.number
        plain = [max(0, self._most(rank, (), ms)) for rank in range(self.pp)]
        total, found = sum(plain), -1
        if both >= 0:
            found = total - plain[0] + both
        begins = self._most(0, (self.firsts[0],), ms)
        for rank in range(1, self.pp) if begins >= 0 else ():
            ends = self._most(rank, (self.lasts[rank],), ms)
            if ends >= 0:
                found = max(found, total - plain[0] - plain[rank] + begins + ends)
        return found >= self.number

    def _most(self, rank: int, ends: Sequence[_LayerNumbers], ms: float) -> int:
        """Return how many layers a rank can have beside these ends; -1: not even those."""
        counts, layer = sorted(self.held[rank]), self.layers[rank]
        least = counts[0]
        time_left = ms * (1 + _ROUNDING) - sum(end.whole_ms for end in ends)
        room = self.table.rooms[rank] - sum(end.static + least * end.kept for end in ends)
        if room < 0 or time_left < 0:
            return -1
        # Each stage has a layer, or an end, which may stand where most is held.
        forced = counts[1 : len(counts) - len(ends)] if self.is_all else []
        room -= layer.kept * sum(count - least for count in forced)
        each = max(layer.static + least * layer.kept, 1e-9)
        return max(0, floor(min(time_left / layer.whole_ms, room / each)))


def _dealt(tables: Sequence[Sequence[_LayerNumbers]]) -> list[_LayerNumbers]:
    """Return what is dealt out: a kind and how many, or all layers as the least of each number.

    On each kind of accelerator; chosen by the first.
    """
    equal: dict[tuple[tuple[float, ...], ...], int] = {}
    for same in zip(*tables, strict=True):
        numbers = tuple(part[1:] for part in same)
        equal[numbers] = equal.get(numbers, 0) + same[0].number
    least = tuple(
        tuple(min(column) for column in zip(*some, strict=True))
        for some in zip(*equal, strict=True)
    )
    equal[least] = max(equal.get(least, 0), sum(part.number for part in tables[0]))
    found = [[_LayerNumbers(count, *one) for one in numbers] for numbers, count in equal.items()]
    return max(found, key=lambda parts: parts[0].number * parts[0].whole_ms)


def _sliced_parts(
    shape: ModelShape, machine: Machine, cuts: Sequence[Training], pp: int
) -> Iterator[tuple[StagePart, ...]]:
    """Yield each kind of layer as all slices have it."""
    ranks = (machine._replace(training=cut) for cut in cuts)
    return zip(*(model_parts(shape, one, pp=pp) for one in ranks), strict=True)


def _numbers_of(
    number: int,
    sliced: Sequence[StagePart],
    training: Training,
    hidden: tuple[float, float],
    *,
    keeps: bool,
) -> _LayerNumbers:
    """Return a layer, all its slices together but F: the shortest of a slice."""
    forwards = [part.times.sums.forward_ms for part in sliced]
    first = sliced[0]
    exchanged = (0.0, 0.0)
    if first.layers.transformer:
        both = [(part.times.forward.experts, part.times.backward_input.experts) for part in sliced]
        exchanged = (min(both)[0], sum(map(sum, both)))
    return _LayerNumbers(
        number,
        min(forwards),
        sum(sum(part.times.sums) for part in sliced),
        float(first.kept.activation_bytes if keeps else 0),
        static_bytes(first.held, training).total,
        float(min(part.forward_workspace_bytes for part in sliced)),
        float(min(part.backward_workspace_bytes for part in sliced)),
        *exchanged,
        *hidden,
    )


def _whole_ms(parts: Sequence[_LayerNumbers]) -> float:
    return sum(part.number * part.whole_ms for part in parts)


def _slower(first: Sequence[_LayerNumbers], other: Sequence[_LayerNumbers]) -> float:
    """Return how many times as long other layers take as the first ones, at least."""
    ratios = [b.whole_ms / a.whole_ms for a, b in zip(first, other, strict=True) if a.whole_ms > 0]
    return min(ratios)


def _shares(parts: Sequence[_LayerNumbers]) -> list[float]:
    """Return F's share of each layer that takes time."""
    return [part.forward_ms / part.whole_ms for part in parts if part.whole_ms > 0]


def _most_work(slow: Sequence[float], share: float, m: int) -> float:
    """Return how much work of a micro-batch ranks do at most per ms of a step; see *Filling*."""
    if len(set(slow)) == 1:
        return (1.0 - (1.0 - share / m) ** len(slow)) / (share * slow[0])
    prices = 0.0
    for one in reversed(slow):
        prices += max(0.0, (1 / one - share * prices) / m)
    return prices


def _after_ms(held: Held, machines: Sequence[Machine], *, is_pipelined: bool) -> float:
    """Return what follows the pipeline on the ranks together, at least, each parameter's least."""
    found = 0.0
    for part in (held,) if len(machines) == 1 else (Held(held.common), Held(0, held.experts)):
        found += min(one.optimizer_ms(part) for one in machines)
        for name in ("reduction", "gathering"):
            found += min(
                getattr(one, name)(part, is_pipelined=is_pipelined).unhidden_ms for one in machines
            )
    return found


def _sum(layers: Mapping[tuple[tuple[StagePart, ...], ...], int]) -> Held:
    held = Held(0)
    for ((layer, *_), *_), number in layers.items():
        held = held.plus(Held(number * layer.held.common, number * layer.held.experts))
    return held
