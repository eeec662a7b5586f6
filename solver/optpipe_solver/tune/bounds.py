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
added where they are longer than it says. Layers of different kinds are taken for alike, each as
quick and as small as the least of them.

What follows the pipeline (`StepEstimate.after_ms`) is linear in the parameters that a rank holds,
so that its largest is at least that of a rank with the mean.

Kinds. Where ranks have different accelerators, work is counted in ms of the first, and one rank's
takes at least s_r times as long, s_r the least ratio over the layers. Then the ranks share m B by
their speeds 1/s_r. Filling asks for the most work u_r / s_r in all under C >= m u_r + a (u_0 + ...
+ u_(r-1)): any prices y_r >= 0 with m y_r + a (y_(r+1) + ...) >= 1/s_r bound it by C times their
sum, and those made from the last rank on are small. Packing has every rank's own times and room,
the cut F and backward of each rank's kind, at least. Links are the slowest kind's, as in estimates.

Pairs. A forward and a backward together take at least what both compute, and at least what both
exchange. So with every pass as long as it computes, or all as long as they exchange where that is
more, any schedule with pairs becomes one without, no longer and with no more memory
(`optpipe_solver.bounds.pairs`): load and filling hold of those. The cut program has Megatron-Core's
order with pairs, whose passes outside of pairs last in full.

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

from optpipe.presets.parameters import Held, static_bytes
from optpipe.presets.step import in_flight, model_parts, pool_bytes, reserved_bytes
from optpipe.problem import placement_of
from optpipe.schedule import ActionType
from optpipe_solver.budget import Stop
from optpipe_solver.milp.highs import MilpModel, MilpStatus, RowByRow, at_least, total
from optpipe_solver.milp.plan.pattern import (
    HELD,
    PAIRED_BACK,
    PAIRED_FORWARD,
    PAIRED_PATTERN,
    kind_number,
    paired_pattern,
    patterns_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from optpipe.presets import Hardware, Machine, ModelShape, PipelineCut, Training
    from optpipe.presets.step import StagePart
    from optpipe_solver.arrays import Floats
    from optpipe_solver.milp.highs import Constraint, Linear, Variable
    from optpipe_solver.milp.plan.pattern import Boundary, LongestPath, MemoryMoment
    from optpipe_solver.tune.space import TuneCandidate, TuneQuestion

__all__ = ["BestCut", "CutNumbers", "LayerTable", "best_cut", "fused_family"]

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
        return PAIRED_PATTERN
    return "1f1b" if chunks == 1 else "interleaved"


class _LayerNumbers(NamedTuple):
    """One kind of layer: how many, ms of F and of everything, bytes, and what may hide in pairs.

    Bytes by micro-batch, at rest, and beside while F and B run; ms of exchange with experts in F
    and in all.
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

    @property
    def passes(self) -> tuple[float, float]:
        """F and the whole backward, in ms."""
        return self.forward_ms, self.whole_ms - self.forward_ms

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
        layers: dict[tuple[tuple[StagePart, ...], ...], int] = {}
        for same in zip(
            *(_sliced_parts(question.shape, one, cuts, pp) for one in machines.values()),
            strict=True,
        ):
            layers[same] = layers.get(same, 0) + same[0][0].repeat
        keeps = question.framework != "any"
        self.whole_parts_on = {
            hardware: [
                _numbers_of(number, sliced, training, keeps=keeps)
                for sliced, number in zip(column, layers.values(), strict=True)
            ]
            for hardware, column in zip(machines, zip(*layers, strict=True), strict=True)
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
        whole_parts = self.whole_parts_on[self.ranks[0]]
        layers = whole_parts[1:-1]
        if not any(part.whole_ms > 0 for part in layers):
            return None
        rates: dict[Hardware, tuple[float, ...]] = {}
        for hardware, parts in self.whole_parts_on.items():
            slow, shares = _slower(layers, parts[1:-1]), _shares(parts[1:-1])
            rates[hardware] = (slow * min(shares), slow * (1 - max(shares)))
            if self.pairs:
                rates[hardware] += tuple(
                    min(
                        one.computed.passes[which] / first.whole_ms
                        for first, one in zip(layers, parts[1:-1], strict=True)
                        if first.whole_ms > 0
                    )
                    for which in (0, 1)
                )
        return CutNumbers(
            pp=cut.pp,
            chunks=cut.chunks,
            num_microbatches=cut.num_microbatches,
            links=tuple(links),
            number=sum(part.number for part in layers),
            whole_ms=sum(part.number * part.whole_ms for part in layers),
            longest_ms=max(part.whole_ms for part in layers),
            rates=tuple(rates[one] for one in self.ranks),
            layer=_least_of(layers),
            ends=(whole_parts[0], self.whole_parts_on[self.ranks[-1]][-1]),
            rooms=tuple(room + self.workspace for room in self.rooms),
            pairs=self.pairs,
        )


class CutNumbers(NamedTuple):
    """What decides the best cut of fused 1F1B; the same for many candidates.

    Parameters
    ----------
    pp, chunks, num_microbatches, links
        Ranks, stages of each, micro-batches, and what lies between the stages (`boundaries`).
    number, whole_ms
        Layers beside embedding and head, and what all of them compute of a micro-batch.
    layer, longest_ms
        A layer at least, and the most ms of one.
    rates
        What F and the backward take at least of a ms of it, on each rank; of pairs, too, what they
        compute of it.
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
    number: int
    whole_ms: float
    layer: _LayerNumbers
    longest_ms: float
    rates: tuple[tuple[float, ...], ...]
    ends: tuple[_LayerNumbers, _LayerNumbers]
    rooms: tuple[float, ...]
    pairs: bool = False


class BestCut(NamedTuple):
    """What no cut into whole layers undercuts, in ms of the pipeline, and a good cut.

    The bound is infinite where no cut fits, and need not be more than what was enough; the cut,
    embedding and head counted as layers, is empty where none was found in time, and may not fit or
    be longer where layers differ. ``work`` is what it took, in units (see `Stop`).
    """

    bound_ms: float
    sizes: tuple[int, ...]
    work: float


def best_cut(given: CutNumbers, enough_ms: float = inf, stop: Stop | None = None) -> BestCut:
    """Return the bound of all cuts and a good one, found once for the same numbers and limits."""
    stop = stop or Stop(inf)
    limit = stop.limit_s if stop.work is None else stop.left_work
    kept = _kept(given, enough_ms, limit, stop.work is None)
    if kept:
        stop.spend(kept[0].work)
        return kept[0]
    before = stop.spent
    bound_ms, sizes = _CutProgram(given).solved(stop, enough_ms)
    found = BestCut(bound_ms, sizes, stop.spent - before)
    if not stop.is_told() and (stop.work is None or stop.left_s() > 0):
        kept.append(found)
    return found


@lru_cache(maxsize=4096)
def _kept(
    given: CutNumbers,  # noqa: ARG001 - what is found is kept by
    enough_ms: float,  # noqa: ARG001
    limit: float,  # noqa: ARG001
    is_timed: bool,  # noqa: ARG001
) -> list[BestCut]:
    """Return where an answer is kept, empty before it is there."""
    return []


class _CutProgram:
    """Whole layers per stage, and how long they compute; paths of the order are added as rows."""

    def __init__(self, given: CutNumbers) -> None:
        self.given = given
        pp, chunks, m = given.pp, given.chunks, given.num_microbatches
        self.placement = placement_of("linear" if chunks == 1 else "loop", pp, chunks)
        self.pattern = (
            paired_pattern(self.placement, m, given.links)
            if given.pairs
            else next(
                patterns_of(
                    self.placement,
                    m,
                    given.links,
                    transfers=False,
                    recompute=False,
                    names=(fused_family(chunks),),
                )
            )
        )
        self.stages, last = range(pp * chunks), pp * chunks - 1
        self.of_ends = np.zeros((self.pattern.num_durations, len(self.stages)))
        kinds = (_FORWARD, _BACK, PAIRED_FORWARD, PAIRED_BACK)[: 4 if given.pairs else 2]
        for stage, end in zip((0, last), given.ends, strict=True):
            for kind, ms in zip(kinds, (*end.passes, *end.computed.passes), strict=False):
                self.of_ends[kind, stage] = ms
        rates = [given.rates[device] for device in self.placement]
        self.rates = dict(zip(kinds, np.array(rates).T, strict=True))
        model = MilpModel("cut")
        self.layers = [
            model.whole(f"layers_{s}", int(s not in {0, last}), given.number) for s in self.stages
        ]
        self.work = [model.continuous(f"work_{s}", 0.0, given.whole_ms) for s in self.stages]
        sent = sum(sum(way) for link in given.links for way in link)
        slowest = max(1.0, *(sum(rates[:2]) for rates in given.rates))
        most_ms = m * (slowest * given.whole_ms + float(self.of_ends.sum()) + sent)
        self.length = model.continuous("length", 0.0, most_ms)
        model.minimise(self.length)
        model.add(total(list(self.layers)) == given.number)
        model.add(total(list(self.work)) == given.whole_ms)
        for layers, work in zip(self.layers, self.work, strict=True):
            model.add(at_least(work - given.layer.whole_ms * layers, 0.0))
            model.add(at_least(given.longest_ms * layers - work, 0.0))
        for rank, moments in enumerate(self.pattern.moments):
            own = [s for s, device in enumerate(self.placement) if device == rank]
            most = given.number
            for counts, beside in _fullest(moments, self._beside):
                held = dict(zip(own, counts, strict=True))
                model.add(self._fits(held, beside, given.rooms[rank]))
                most = min(most, self._most(held, beside, given.rooms[rank]))
            # Whole layers are fewer than what is left of a layer's room everywhere would hold.
            model.add(at_least(total([-self.layers[stage] for stage in own]), -float(most)))
        self.rows = RowByRow(model)

    def _beside(self, moment: MemoryMoment) -> float:
        """Return the workspace of what runs at a moment, at least, in bytes."""
        ends = {0: self.given.ends[0], self.stages[-1]: self.given.ends[1]}
        part = ends.get(moment.stage, self.given.layer)
        is_forward = moment.kind is ActionType.FORWARD
        return part.forward_workspace if is_forward else part.back_workspace

    def _fits(self, counts: Mapping[int, int], beside: float, whole: float) -> Constraint:
        """Return that a rank fits while its stages hold so many micro-batches, in shares."""
        given = self.given
        room = whole * (1 + _ROUNDING) - beside
        terms: list[Linear] = []
        for stage, count in counts.items():
            layer = given.layer
            terms.append(-(layer.static + count * layer.kept) / whole * self.layers[stage])
            for end, at in zip(given.ends, (0, self.stages[-1]), strict=True):
                room -= (end.static + count * end.kept) if at == stage else 0.0
        return at_least(total(terms), -room / whole)

    def _most(self, counts: Mapping[int, int], beside: float, whole: float) -> int:
        """Return how many layers a rank has at most then, whichever of its stages has them."""
        given, ends = self.given, (0, self.stages[-1])
        room = whole * (1 + _ROUNDING) - beside
        each = [max(given.layer.static + n * given.layer.kept, 1e-9) for n in counts.values()]
        for stage, count in counts.items():
            for end, at in zip(given.ends, ends, strict=True):
                room -= (end.static + count * end.kept) if at == stage else 0.0
        forced = [need for stage, need in zip(counts, each, strict=True) if stage not in ends]
        return len(forced) + max(0, floor((room - sum(forced)) / min(each)))

    def solved(self, stop: Stop, enough_ms: float) -> tuple[float, tuple[int, ...]]:
        """Add paths to the relaxation, then to the program itself, while that says more."""
        said_ms, sizes = 0.0, _NO_CUT
        cells = len(self.stages) * self.given.num_microbatches / _CELLS
        stop.spend(_BUILD * cells)
        for is_integer in (False, True):
            known_ms, centre, recent = inf, None, [-1.0] * _PATIENCE
            while not stop.is_over() and said_ms * (1 - _TOLERANCE) < enough_ms:
                # Far from the best known, rows say more than branching does.
                gap = _COARSE if known_ms > said_ms * (1 + 2 * _COARSE) else _ENOUGH / 2
                outcome = self.rows.solve(stop, integer=is_integer, gap=gap)
                if outcome.status is MilpStatus.INFEASIBLE:
                    return inf, _NO_CUT
                said_ms = max(said_ms, outcome.bound or 0.0)
                if outcome.values is None:
                    break
                work = np.array([outcome.values[one] for one in self.work])
                if centre is not None and not is_integer:
                    # Between what the program says and the best known, where rows cut off most.
                    work = 0.4 * work + 0.6 * centre
                paths = self.pattern.longest_paths(self._durations(work))
                stop.spend(cells)
                if paths[0].length_ms < known_ms:
                    known_ms, centre = paths[0].length_ms, work
                    if is_integer:
                        sizes = self._sizes(outcome.values)
                stalls = 0.0 < said_ms <= recent[0] * (1 + _ENOUGH)
                if known_ms <= said_ms * (1 + _ENOUGH) or (stalls and not is_integer):
                    break
                recent = [*recent, said_ms][-_PATIENCE:]
                for path in paths:
                    self.rows.add(self._no_shorter(path))
        return said_ms * (1 - _TOLERANCE), sizes

    def _durations(self, work: Floats) -> Floats:
        durations = self.of_ends.copy()
        for kind, rates in self.rates.items():
            durations[kind] += rates * work
        return durations

    def _sizes(self, values: Mapping[Variable, float]) -> tuple[int, ...]:
        sizes = [round(values[one]) for one in self.layers]
        sizes[0] += 1
        sizes[-1] += 1
        return tuple(sizes)

    def _no_shorter(self, path: LongestPath) -> Constraint:
        """Return that the length is at least that of a path."""
        factors = sum(rates * path.counts[kind] for kind, rates in self.rates.items())
        terms: list[Linear] = [self.length]
        terms += [-float(factors[s]) * self.work[s] for s in np.flatnonzero(factors)]
        return at_least(total(terms), path.constant_ms + float((path.counts * self.of_ends).sum()))


def _fullest(
    moments: Sequence[MemoryMoment], beside: Callable[[MemoryMoment], float]
) -> list[tuple[tuple[int, ...], float]]:
    """Return micro-batches by stage and bytes beside of the moments that no other exceeds."""
    found = {(*(row[HELD] for row in moment.counts), beside(moment)) for moment in moments}
    kept: list[tuple[float, ...]] = []
    for one in sorted(found, reverse=True):
        if not any(all(map(ge, other, one)) for other in kept):
            kept.append(one)
    return [(tuple(map(int, one[:-1])), one[-1]) for one in kept]


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
    number: int, sliced: Sequence[StagePart], training: Training, *, keeps: bool
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


def _least_of(layers: Sequence[_LayerNumbers]) -> _LayerNumbers:
    """Return a layer that takes and holds no more than any of them."""
    return _LayerNumbers(*(min(column) for column in zip(*layers, strict=True)))
