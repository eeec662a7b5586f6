"""Lower bounds for every cut and schedule of a configuration, by arithmetic on its layers.

Compute. F + I + W of all layers take B ms. The p ranks share m B ms for m micro-batches, so one
rank computes at least m B / p. Layers are whole. Time and memory, less those of embedding or head,
limit how many layers of the commonest kind rank r holds. The ranks together hold all layers.

Filling. A rank computes nothing before the F's of the layers ahead of its first stage. With fused
backwards it computes nothing after the backwards of those layers. With one stage per rank in a
line, rank r's loads b satisfy C >= m b_r + a (b_0 + ... + b_(r-1)). Here a is 1 with fused
backwards, otherwise the minimum share of F in a layer. All p inequalities are tightest when equal:
C = a B / (1 - (1 - a/m)^p).

With several stages per rank, only the embedding and one layer per inner stage are ahead for
certain. The ranks' mean gives C >= m B / p + a times the mean work ahead. Rank by rank the
bound is higher for whole layers. If 16 ranks share 126 layers and none has more than 8, at least 14
ranks have 8. One of these ranks has the work of at least 13 stages ahead of it.

Cut. For 1F1B and interleaved 1F1B an integer program gives a higher bound
(`optpipe_solver.tune.cut`). `LayerTable.cut_numbers` returns its input.

After. The time after the pipeline (`StepEstimate.after_ms`) is linear in a rank's parameters. The
largest such time is at least that of a rank with the mean number of parameters.

Kinds. With different accelerators, work is counted in ms of the first. Work on rank r takes at
least s_r times as long, where s_r is the minimum ratio over the layers. The ranks then share m B by
their speeds 1/s_r. Filling maximises the sum of u_r / s_r under C >= m u_r + a (u_0 + ... +
u_(r-1)). Take any prices y_r >= 0 with m y_r + a (y_(r+1) + ...) >= 1/s_r. That sum is at most C
times the sum of the prices. Prices computed from the last rank on are small. Packing and the cut
use each rank's own times and memory. Links are the slowest kind's, as in estimates.

Pairs. A forward and a backward together take at least what both compute, and at least what both
exchange. Let every pass last as long as it computes, or as long as it exchanges if all passes
together exchange longer. Any schedule with pairs then becomes a schedule without pairs that is no
longer and needs no more memory (`optpipe_solver.bounds.bound`). Load and filling hold for those.

Slices. A rank computes all slices of a micro-batch. Before its first F, only the F's of a first
slice, the shortest, are ahead. So a is their minimum share of the work of all slices.

Memory. When the last F of a micro-batch ends, none of its backwards has begun. A rank then holds
that micro-batch of all its layers, or could have moved it away. On rank r of a line, 1F1B holds
min(m, p - r) micro-batches at the same time. Interleaved 1F1B holds p of every stage of rank r,
more of the first stage, and possibly fewer of the last. Source: Narayanan et al. 2021, arXiv
2104.04473, section 2.2.
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
    """The layer numbers that the bounds of a configuration use, for any number of chunks.

    Parameters
    ----------
    question, training, pp, kinds
        The configuration to bound, over all cuts and all schedules that the framework has.
        ``kinds`` as in `TuneCandidate`.
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
        kinds_of_layer, self.runs = _kinds_of_layer(
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
                one.numbers[which]._replace(static=total)
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
        # The minimum ratio of a rank's times to the first rank's, over the layers.
        self.slow = [
            min(
                part.whole_ms / first.whole_ms
                for first, part in zip(self.parts, self.parts_on[one], strict=True)
                if first.whole_ms > 0
            )
            for one in self.ranks
        ]
        every = [part for parts in self.parts_on.values() for part in parts if part.whole_ms > 0]
        self.share = 1.0 if self.fused else min(one.forward_ms / one.whole_ms for one in every)
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
        parameters = RankParameters(0)
        for kind in kinds_of_layer:
            parameters = parameters.plus(kind.parameters.times(kind.numbers[0].number))
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
        """Return a bound of a step with whole layers; infinite if no cut fits."""
        m = candidate.num_microbatches
        ms = _Packing(self, candidate).least_ms()
        return max(m * ms + self.after_ms, self.quick_ms(candidate))

    def cut_numbers(self, cut: PipelineCut, links: Sequence[Boundary]) -> CutNumbers | None:
        """Return the input of `best_cut`; None for other orders, one stage, or too many cells.

        ``links`` are the delays between the stages, see `boundaries`.
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
            runs=self.runs,
        )


def tables(question: TuneQuestion) -> Iterator[tuple[LayerTable, Iterator[TuneCandidate]]]:
    """Yield a table for each set of degrees, with the candidates that differ in chunks alone."""
    for (training, pp, kinds, pairs, slices), alike in groupby(
        candidates(question),
        key=lambda one: (one.training, one.pp, one.kinds, one.pairs, one.slices),
    ):
        yield LayerTable(question, training, pp, kinds, pairs=pairs, slices=slices), alike


class _Packing:
    """An assignment of whole layers to ranks; the embedding on the first, the head on the last.

    The layers are those of the kind with the longest total time, without the others. Or they are
    all layers, each with the minimum of every number. A rank divides its layers freely among its
    stages, but each stage has one.
    """

    def __init__(self, table: LayerTable, candidate: TuneCandidate) -> None:
        self.table, self.pp = table, table.pp
        kinds = {one: parts[1:-1] for one, parts in table.parts_on.items()}
        dealt = dict(zip(kinds, _dealt(list(kinds.values())), strict=True))
        self.layers = [dealt[one] for one in table.ranks]
        self.firsts = [table.parts_on[one][0] for one in table.ranks]
        self.lasts = [table.parts_on[one][-1] for one in table.ranks]
        self.number = self.layers[0].number
        # A V, which only other orders have, ends on the first rank.
        can_be_v = candidate.chunks > 1 and not table.fused
        self.last_ranks = {0, self.pp - 1} if can_be_v else {self.pp - 1}
        self.is_all = self.number == sum(part.number for part in table.parts[1:-1])
        # The minimum number of micro-batches that each stage of a rank holds together.
        self.counts: list[tuple[int, ...]] = [(1,) * candidate.chunks] * self.pp
        if table.fused:
            self.counts = [in_flight(rank, candidate.cut()) for rank in range(self.pp)]
        m = candidate.num_microbatches
        self.ahead_ms = [table.share * ahead_ms / m for ahead_ms in table.ahead_ms]

    def least_ms(self) -> float:
        """Return the minimum ms per micro-batch that the busiest rank computes and waits."""
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
        """Whether the ranks hold all layers within this time, less the time ahead of each."""
        left_ms = [within_ms - ahead for ahead in ahead_ms or (0.0,) * self.pp]
        plain = [max(0, self._most(rank, (), left_ms[rank])) for rank in range(self.pp)]
        begins = self._most(0, (self.firsts[0],), left_ms[0])
        found = -1
        for rank in self.last_ranks:
            of_ends = (self.firsts[0],) * (rank == 0) + (self.lasts[rank],)
            ends = self._most(rank, of_ends, left_ms[rank])
            if ends >= 0 and rank == 0:
                found = max(found, ends + sum(plain[1:]))
            elif ends >= 0 and begins >= 0:
                found = max(found, begins + ends + sum(plain[1:]) - plain[rank])
        return found >= self.number

    def _most(self, rank: int, ends: Sequence[LayerNumbers], ms: float) -> int:
        """Return the layers a rank can have in addition to these ends.

        -1 if the ends, with a layer in each other stage, exceed it.
        """
        counts, layer = sorted(self.counts[rank]), self.layers[rank]
        least = counts[0]
        time_left = ms * (1 + _ROUNDING) - sum(end.whole_ms for end in ends)
        room = self.table.rooms[rank] - sum(end.static + least * end.kept for end in ends)
        if room < 0 or time_left < 0:
            return -1
        # Each stage has a layer or an end. The end may be in the stage that holds most.
        forced = counts[1 : len(counts) - len(ends)] if self.is_all else []
        room -= layer.kept * sum(count - least for count in forced)
        each = max(layer.static + least * layer.kept, 1e-9)
        most = max(0, floor(min(time_left / layer.whole_ms, room / each)))
        return -1 if self.is_all and most < len(counts) - len(ends) else most


def _dealt(tables: Sequence[Sequence[LayerNumbers]]) -> list[LayerNumbers]:
    """Return the layers to assign: one kind, or all layers with the minimum of each number.

    One entry per kind of accelerator. The first accelerator's times decide.
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

    All accelerators have the same parameters. The numbers contain no static bytes, because replicas
    change those.
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
) -> tuple[tuple[_KindOfLayer, ...], tuple[tuple[int, int], ...]]:
    """Return each kind of layer once, embedding first and head last, and the runs of the others.

    A run is a kind, counted without the embedding, and the number of its consecutive layers.

    ``machines`` have `Training.of_layers`. Of the pipeline, the result depends only on whether the
    head has a matrix of its own (``is_tied``). Most configurations of a question share the result.
    """
    pp = 1 if is_tied else 2
    phases = [model_phases(shape, one, pp) if pairs else () for one in machines]
    hidden_on = [most_hidden(layers) for layers in phases]
    hidden: dict[tuple[tuple[LayerProfile, ...], ...], tuple[tuple[float, float], ...]] = {}
    numbers: dict[tuple[tuple[LayerProfile, ...], ...], int] = {}
    runs: list[tuple[int, int]] = []
    at = 0
    cut_on = [
        [one._replace(training=_slice_of(one.training, slices, k)) for k in range(slices)]
        for one in machines
    ]
    # Each kind of layer, on each accelerator, with one profile per slice.
    parts_on = [
        zip(*(profile_layers(shape, one, pp=pp) for one in cuts), strict=True) for cuts in cut_on
    ]
    for same in zip(*parts_on, strict=True):
        repeat = same[0][0].repeat
        hidden[same] = tuple(one[at] if pairs else (0.0, 0.0) for one in hidden_on)
        numbers[same] = numbers.get(same, 0) + repeat
        kind = list(numbers).index(same) - 1
        before = runs.pop()[1] if runs and runs[-1][0] == kind else 0
        runs.append((kind, before + repeat))
        at += repeat
    kinds = tuple(
        _KindOfLayer(
            same[0][0].parameters,
            tuple(
                _numbers_of(number, sliced, one, keeps=keeps)
                for sliced, one in zip(same, hidden[same], strict=True)
            ),
        )
        for same, number in numbers.items()
    )
    return kinds, tuple(runs[1:-1])


def _slice_of(training: Training, slices: int, index: int) -> Training:
    if (training.slices, training.slice_index) == (slices, index):
        return training
    return replace(training, slices=slices, slice_index=index)


def _numbers_of(
    number: int, sliced: Sequence[LayerProfile], hidden: tuple[float, float], *, keeps: bool
) -> LayerNumbers:
    """Return a layer's numbers over all slices, except F, the shortest slice's; no static bytes."""
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


def _most_work(slow: Sequence[float], share: float, m: int) -> float:
    """Return the maximum work of a micro-batch that ranks do per ms of a step; see *Filling*."""
    if len(set(slow)) == 1:
        return (1.0 - (1.0 - share / m) ** len(slow)) / (share * slow[0])
    prices = 0.0
    for one in reversed(slow):
        prices += max(0.0, (1 / one - share * prices) / m)
    return prices


def _after_ms(
    parameters: RankParameters, machines: Sequence[Machine], *, is_pipelined: bool
) -> float:
    """Return a lower bound of the ms after the pipeline, summed over the ranks."""
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
