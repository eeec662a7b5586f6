"""What no cut of a configuration, whatever its schedule, can beat, by arithmetic on its layers.

Compute. With F + I + W of all layers B ms and m micro-batches, the p ranks have m B ms to share:
one of them at least m B / p. Layers are whole: rank r holds as many of the commonest kind as time
and memory leave it beside embedding or head, and all of them must be held by somebody.

Filling. A rank computes nothing before the F's of what lies ahead of its first stage, and with
fused backwards nothing after the backwards of that. With one stage per rank in a line, rank r's
loads b satisfy C >= m b_r + a (b_0 + ... + b_(r-1)), where a is 1 with fused backwards, and the
least share of F in a layer else. All p inequalities are tightest when equal, then
C = a B / (1 - (1 - a/m)^p). With several stages per rank only one layer per stage is ahead for
certain, the embedding in the first: of the ranks' mean, C >= m B / p + a times the mean of what is
ahead. Rank by rank it says more of whole layers: of 16 ranks that share 126 all but one have 8 of
them, so that one of these has what 13 stages or more do ahead of it.

Cut. Of 1F1B and interleaved 1F1B an integer program says more (`optpipe_solver.tune.cut`), of which
`LayerTable.cut_numbers` are the numbers.

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
(`optpipe_solver.bounds.bound`): load and filling hold of those.

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
from itertools import accumulate, groupby
from math import floor, inf
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from optpipe.planning.layer_profile import profile_layers
from optpipe.planning.overlap import model_phases, most_hidden
from optpipe.planning.parameters import RankParameters, static_bytes
from optpipe.planning.step import in_flight, pool_bytes, reserved_bytes
from optpipe_solver.tune.cut import CutNumbers, LayerNumbers
from optpipe_solver.tune.space import candidates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.planning import Hardware, Machine, ModelShape, PipelineCut, Training
    from optpipe.planning.layer_profile import LayerProfile
    from optpipe_solver.milp.plan.pattern import Boundary
    from optpipe_solver.tune.space import TuneCandidate, TuneQuestion

__all__ = ["LayerTable", "tables"]

_ROUNDING = 1e-9
_MOST_CELLS = 70_000
_HALVINGS = 20


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
        cut = _slice_of(training, slices, 0)
        machines = {one: question.machine(cut, one) for one in dict.fromkeys(self.ranks)}
        kinds_of_layer = _kinds_of_layer(
            question.shape,
            tuple(question.machine(training.of_layers, one) for one in machines),
            is_tied=question.shape.tied and pp == 1,
            keeps=question.framework != "any",
            pairs=pairs,
            slices=slices,
        )
        static = [static_bytes(one.parameters, training).total for one in kinds_of_layer]
        self.whole_parts_on = {
            hardware: [
                one.numbers[which].with_static(total)
                for one, total in zip(kinds_of_layer, static, strict=True)
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
            one: question.usable_bytes_of(one) - reserved_bytes(one) - pool - self.workspace
            for one in machines
        }
        self.rooms = [room_of[one] for one in self.ranks]
        firsts = [self.parts_on[one][0].whole_ms for one in self.ranks[:1]]
        inner = (min(p.whole_ms for p in self.parts_on[one][1:-1]) for one in self.ranks[1:-1])
        # The embedding in the first stage, a layer in each of the others before a rank's own.
        self.ahead_ms = [0.0, *accumulate((*firsts, *inner))][:pp]
        parameters = _sum(kinds_of_layer)
        self.after_ms = _after_ms(parameters, list(machines.values()), is_pipelined=pp > 1) / pp

    @property
    def missing_bytes(self) -> float:
        """A lower bound of the memory that the mean rank lacks; negative if it has enough."""
        need = sum(part.number * (part.static + part.kept) for part in self.parts)
        return (need - sum(self.rooms) * (1 + _ROUNDING)) / len(self.rooms)

    def quick_ms(self, candidate: TuneCandidate) -> float:
        """Return a first bound of a step in ms; infinite where not even the mean rank fits."""
        if self.missing_bytes > 0:
            return inf
        m = candidate.num_microbatches
        if candidate.chunks == 1:
            pipeline = self.whole_ms / _most_work(self.slow, self.share, m)
        else:
            speeds = [1 / slow for slow in self.slow]
            filled = sum(map(mul, speeds, self.ahead_ms))
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


def tables(question: TuneQuestion) -> Iterator[tuple[LayerTable, Iterator[TuneCandidate]]]:
    """Yield a table for each set of degrees, with the candidates that differ in chunks alone."""
    for (training, pp, kinds, pairs, slices), alike in groupby(
        candidates(question),
        key=lambda one: (one.training, one.pp, one.kinds, one.pairs, one.slices),
    ):
        yield LayerTable(question, training, pp, kinds, pairs=pairs, slices=slices), alike


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
        self.counts = [self._counts(rank, candidate) for rank in range(self.pp)]
        m = candidate.num_microbatches
        self.ahead_ms = [table.share * ahead_ms / m for ahead_ms in table.ahead_ms]

    def _counts(self, rank: int, candidate: TuneCandidate) -> tuple[int, ...]:
        """Return how many micro-batches each stage of a rank holds at once, at least."""
        if self.table.fused:
            return in_flight(rank, candidate.cut())
        return (1,) * candidate.chunks

    def least_ms(self) -> float:
        """Return the least that a rank which computes longest takes, and waits, by micro-batch."""
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
        least_ms, most_ms = values[low], values[low] + self.ahead_ms[-1]
        if self._fits(least_ms, self.ahead_ms):
            return least_ms
        for _ in range(_HALVINGS):
            middle_ms = (least_ms + most_ms) / 2
            if self._fits(middle_ms, self.ahead_ms):
                most_ms = middle_ms
            else:
                least_ms = middle_ms
        return least_ms

    def _fits(self, within_ms: float, ahead_ms: Sequence[float] = ()) -> bool:
        """Whether all layers find a rank that computes no longer than this, what is ahead apart."""
        left_ms = [within_ms - ahead for ahead in ahead_ms or (0.0,) * self.pp]
        both = self._most(0, (self.firsts[0], self.lasts[0]), left_ms[0])
        if self.pp == 1:
            return both >= self.number
        plain = [max(0, self._most(rank, (), left_ms[rank])) for rank in range(self.pp)]
        total, found = sum(plain), -1
        if both >= 0:
            found = total - plain[0] + both
        begins = self._most(0, (self.firsts[0],), left_ms[0])
        for rank in range(1, self.pp) if begins >= 0 else ():
            ends = self._most(rank, (self.lasts[rank],), left_ms[rank])
            if ends >= 0:
                found = max(found, total - plain[0] - plain[rank] + begins + ends)
        return found >= self.number

    def _most(self, rank: int, ends: Sequence[LayerNumbers], ms: float) -> int:
        """Return how many layers a rank can have beside these ends; -1: not even those."""
        counts, layer = sorted(self.counts[rank]), self.layers[rank]
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


def _dealt(tables: Sequence[Sequence[LayerNumbers]]) -> list[LayerNumbers]:
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
    found = [[LayerNumbers(count, *one) for one in numbers] for numbers, count in equal.items()]
    return max(found, key=lambda parts: parts[0].number * parts[0].whole_ms)


class _KindOfLayer(NamedTuple):
    """A kind of layer: its parameters on a rank, and its numbers on each kind of accelerator.

    On all the same parameters, and nothing at rest among the numbers: that is what replicas change.
    """

    parameters: RankParameters
    numbers: tuple[LayerNumbers, ...]


@lru_cache(maxsize=8192)
def _kinds_of_layer(
    shape: ModelShape,
    machines: tuple[Machine, ...],
    *,
    is_tied: bool,
    keeps: bool,
    pairs: bool,
    slices: int,
) -> tuple[_KindOfLayer, ...]:
    """Return each kind of layer in model order, what is equal once, embedding and head at the ends.

    ``machines`` have `Training.of_layers`, and of the pipeline only counts whether the head has a
    matrix of its own (``is_tied``): so that most configurations of a question share this.
    """
    pp = 1 if is_tied else 2
    phases = [model_phases(shape, one, pp) if pairs else () for one in machines]
    hidden_on = [most_hidden(layers) for layers in phases]
    hidden: dict[tuple[tuple[LayerProfile, ...], ...], tuple[tuple[float, float], ...]] = {}
    numbers: dict[tuple[tuple[LayerProfile, ...], ...], int] = {}
    at = 0
    for same in zip(*(_sliced_parts(shape, one, slices, pp) for one in machines), strict=True):
        repeat = same[0][0].repeat
        hidden[same] = tuple(one[at] if pairs else (0.0, 0.0) for one in hidden_on)
        numbers[same] = numbers.get(same, 0) + repeat
        at += repeat
    return tuple(
        _KindOfLayer(
            same[0][0].parameters,
            tuple(
                _numbers_of(number, sliced, one, keeps=keeps)
                for sliced, one in zip(same, hidden[same], strict=True)
            ),
        )
        for same, number in numbers.items()
    )


def _slice_of(training: Training, slices: int, index: int) -> Training:
    if (training.slices, training.slice_index) == (slices, index):
        return training
    return replace(training, slices=slices, slice_index=index)


def _sliced_parts(
    shape: ModelShape, machine: Machine, slices: int, pp: int
) -> Iterator[tuple[LayerProfile, ...]]:
    """Yield each kind of layer as all slices have it."""
    cuts = (_slice_of(machine.training, slices, index) for index in range(slices))
    ranks = (machine._replace(training=cut) for cut in cuts)
    return zip(*(profile_layers(shape, one, pp=pp) for one in ranks), strict=True)


def _numbers_of(
    number: int, sliced: Sequence[LayerProfile], hidden: tuple[float, float], *, keeps: bool
) -> LayerNumbers:
    """Return a layer, all its slices together but F: the shortest of a slice; nothing at rest."""
    forwards = [part.times.sums.forward_ms for part in sliced]
    first = sliced[0]
    exchanged = (0.0, 0.0)
    if first.layers.transformer:
        both = [(part.times.forward.experts, part.times.backward_input.experts) for part in sliced]
        exchanged = (min(both)[0], sum(map(sum, both)))
    return LayerNumbers(
        number,
        min(forwards),
        sum(sum(part.times.sums) for part in sliced),
        float(first.kept.activation_bytes if keeps else 0),
        0.0,
        float(min(part.forward_workspace_bytes for part in sliced)),
        float(min(part.backward_workspace_bytes for part in sliced)),
        *exchanged,
        *hidden,
    )


def _whole_ms(parts: Sequence[LayerNumbers]) -> float:
    return sum(part.number * part.whole_ms for part in parts)


def _slower(first: Sequence[LayerNumbers], other: Sequence[LayerNumbers]) -> float:
    """Return how many times as long other layers take as the first ones, at least."""
    ratios = [b.whole_ms / a.whole_ms for a, b in zip(first, other, strict=True) if a.whole_ms > 0]
    return min(ratios)


def _shares(parts: Sequence[LayerNumbers]) -> list[float]:
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


def _after_ms(
    parameters: RankParameters, machines: Sequence[Machine], *, is_pipelined: bool
) -> float:
    """Return what follows the pipeline on the ranks together, at least, each parameter's least."""
    found = 0.0
    for part in (
        (parameters,)
        if len(machines) == 1
        else (
            parameters._replace(experts=0, expert_work=0),
            RankParameters(0, parameters.experts, expert_work=parameters.expert_work),
        )
    ):
        found += min(one.optimizer_ms(part) for one in machines)
        for name in ("reduction", "gathering"):
            found += min(
                getattr(one, name)(part, is_pipelined=is_pipelined).unhidden_ms for one in machines
            )
    return found


def _sum(kinds: Sequence[_KindOfLayer]) -> RankParameters:
    parameters = RankParameters(0)
    for one in kinds:
        number = one.numbers[0].number
        parameters = parameters.plus(one.parameters.times(number))
    return parameters
