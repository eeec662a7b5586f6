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

What follows the pipeline (`StepEstimate.after_ms`) is linear in the parameters that a rank holds,
so that its largest is at least that of a rank with the mean.

Memory. When the last F of a micro-batch ends, nothing of it has come back: a rank then holds that
micro-batch of all its layers, or could have moved it away. 1F1B holds min(m, p - r) micro-batches
on rank r of a line at once; interleaved 1F1B p of every stage of rank r but the first, which has
more, and the last, which may have fewer (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from math import floor, inf
from typing import TYPE_CHECKING, NamedTuple

from optpipe.presets.parameters import Held, static_bytes
from optpipe.presets.step import in_flight, model_parts, pool_bytes, reserved_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.presets import Training
    from optpipe.presets.step import StagePart
    from optpipe_solver.tune.space import TuneCandidate, TuneQuestion

__all__ = ["LayerTable"]

_ROUNDING = 1e-9


class _LayerNumbers(NamedTuple):
    """One kind of layer: how many, ms of F and of everything, bytes by micro-batch and at rest."""

    number: int
    forward_ms: float
    whole_ms: float
    kept: float
    static: float


class LayerTable:
    """The layers of a configuration as its bounds see them, for any number of chunks.

    Parameters
    ----------
    question, training, pp
        What is bounded, over all cuts and all schedules that the framework has.
    """

    def __init__(self, question: TuneQuestion, training: Training, pp: int) -> None:
        self.question, self.pp = question, pp
        machine = question.machine(training)
        layers = model_parts(question.shape, machine, pp=pp)
        self.fused = question.framework == "megatron"
        keeps = question.framework != "any"
        self.parts = [
            _LayerNumbers(
                layer.repeat,
                layer.times.sums.forward_ms,
                sum(layer.times.sums),
                float(layer.kept.activation_bytes if keeps else 0),
                static_bytes(layer.held, training).total,
            )
            for layer in layers
        ]
        self.whole_ms = sum(part.number * part.whole_ms for part in self.parts)
        self.share = 1.0
        if not self.fused:
            self.share = min(p.forward_ms / p.whole_ms for p in self.parts if p.whole_ms > 0)
        workspace = min(
            max(layer.forward_workspace_bytes, layer.backward_workspace_bytes) for layer in layers
        )
        reserved = reserved_bytes(question.hardware, question.device_bytes)
        pool = pool_bytes(question.shape, machine, pp)
        self.room = question.device_bytes - reserved - pool - workspace
        held = _sum(layers)
        is_pipelined = pp > 1
        self.after_ms = machine.optimizer_ms(held) / pp
        for exchange in (machine.reduction, machine.gathering):
            self.after_ms += exchange(held, is_pipelined=is_pipelined).unhidden_ms / pp

    def quick_ms(self, candidate: TuneCandidate) -> float:
        """Return a first bound of a step in ms; infinite where not even the mean rank fits."""
        need = sum(part.number * (part.static + part.kept) for part in self.parts)
        if need > self.pp * self.room * (1 + _ROUNDING):
            return inf
        pp, m = candidate.pp, candidate.num_microbatches
        if candidate.chunks == 1:
            pipeline = self.whole_ms * self.share / (1.0 - (1.0 - self.share / m) ** pp)
        else:
            quickest = min(part.whole_ms for part in self.parts)
            pipeline = m * self.whole_ms / pp + self.share * quickest * (pp - 1) / 2
        return max(pipeline, self.whole_ms if self.fused else 0.0) + self.after_ms

    def packed_ms(self, candidate: TuneCandidate) -> float:
        """Return a bound of a step with whole layers; infinite where no cut fits."""
        m = candidate.num_microbatches
        ms = _Packing(self, candidate).least_ms()
        return max(m * ms + self.after_ms, self.quick_ms(candidate))


class _Packing:
    """Layers dealt out whole to ranks; embedding to the first, head to any.

    They are the kind that takes longest in all, the others left out, or all, each taken for the
    least of them. How many a rank has in which of its stages is free, but each stage has one.
    """

    def __init__(self, table: LayerTable, candidate: TuneCandidate) -> None:
        self.table, self.pp = table, table.pp
        self.first, self.last = table.parts[0], table.parts[-1]
        self.layer = _dealt(table.parts[1:-1])
        self.is_all = self.layer.number == sum(part.number for part in table.parts[1:-1])
        self.held = [self._counts(rank, candidate) for rank in range(self.pp)]

    def _counts(self, rank: int, candidate: TuneCandidate) -> tuple[int, ...]:
        """Return how many micro-batches each stage of a rank holds at once, at least."""
        if self.table.fused:
            return in_flight(rank, candidate.cut())
        return (1,) * candidate.chunks

    def least_ms(self) -> float:
        """Return what the busiest rank computes of a micro-batch at least."""
        each = self.layer.whole_ms
        if each <= 0:
            return 0.0
        begin, end = self.first.whole_ms, self.last.whole_ms
        ends = (0.0, begin, end, begin + end)
        values = sorted({n * each + end for n in range(self.layer.number + 1) for end in ends})
        if not self._fits(values[-1]):
            return inf
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(values[middle]) else (middle + 1, high)
        return values[low]

    def _fits(self, ms: float) -> bool:
        """Whether all layers find a rank that computes no longer than this."""
        both = self._most(0, (self.first, self.last), ms)
        if self.pp == 1:
            return both >= self.layer.number
        plain = [max(0, self._most(rank, (), ms)) for rank in range(self.pp)]
        total, found = sum(plain), -1
        if both >= 0:
            found = total - plain[0] + both
        begins = self._most(0, (self.first,), ms)
        for rank in range(1, self.pp) if begins >= 0 else ():
            ends = self._most(rank, (self.last,), ms)
            if ends >= 0:
                found = max(found, total - plain[0] - plain[rank] + begins + ends)
        return found >= self.layer.number

    def _most(self, rank: int, ends: Sequence[_LayerNumbers], ms: float) -> int:
        """Return how many layers a rank can have beside these ends; -1: not even those."""
        counts = sorted(self.held[rank])
        least = counts[0]
        time_left = ms * (1 + _ROUNDING) - sum(end.whole_ms for end in ends)
        room = self.table.room - sum(end.static + least * end.kept for end in ends)
        if room < 0 or time_left < 0:
            return -1
        # Each stage has a layer, or an end, which may stand where most is held.
        forced = counts[1 : len(counts) - len(ends)] if self.is_all else []
        room -= self.layer.kept * sum(count - least for count in forced)
        each = max(self.layer.static + least * self.layer.kept, 1e-9)
        return max(0, floor(min(time_left / self.layer.whole_ms, room / each)))


def _dealt(kinds: Sequence[_LayerNumbers]) -> _LayerNumbers:
    """Return what is dealt out: a kind and how many, or all layers as the least of each number."""
    equal: dict[tuple[float, ...], int] = {}
    for part in kinds:
        equal[part[1:]] = equal.get(part[1:], 0) + part.number
    least = tuple(min(column) for column in zip(*equal, strict=True))
    equal[least] = max(equal.get(least, 0), sum(part.number for part in kinds))
    found = (_LayerNumbers(count, *numbers) for numbers, count in equal.items())
    return max(found, key=lambda part: part.number * part.whole_ms)


def _sum(layers: Sequence[StagePart]) -> Held:
    held = Held(0)
    for layer in layers:
        held = held.plus(Held(layer.repeat * layer.held.common, layer.repeat * layer.held.experts))
    return held
