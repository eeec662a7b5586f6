"""What no cut of a configuration, whatever its schedule, can beat, by arithmetic on its layers.

Compute. With F + I + W of all layers B ms and m micro-batches, the p ranks have m B ms to share:
one of them at least m B / p. Layers are whole: rank r holds as many of the commonest kind as time
and memory leave it beside embedding or head, and all of them must be held by somebody.

Filling. A rank computes nothing before the F's of what lies ahead of its first stage, and with
fused backwards nothing after the backwards of that. With one stage per rank in a line, rank r's
loads b satisfy C >= m b_r + a (b_0 + ... + b_(r-1)), where a is 1 with fused backwards, and the
least share of F in a layer else. All p inequalities are tightest when equal, then
C = a B / (1 - (1 - a/m)^p). With several stages per rank only one layer per stage is ahead for
certain: summed over the ranks, C >= m B / p + (p - 1) / 2 x (a times the quickest layer). Of
interleaved 1F1B a linear program over the durations of stages says more (`interleaved_share`).

What follows the pipeline (`StepEstimate.after_ms`) is linear in the parameters that a rank holds,
so that its largest is at least that of a rank with the mean.

Memory. When the last F of a micro-batch ends, nothing of it has come back: a rank then holds that
micro-batch of all its layers, or could have moved it away. 1F1B holds min(m, p - r) micro-batches
on rank r of a line at once; interleaved 1F1B p of every stage of rank r but the first, which has
more, and the last, which may have fewer (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, floor, inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.presets.parameters import Held, static_bytes
from optpipe.presets.step import in_flight, model_parts, pool_bytes, reserved_bytes
from optpipe.problem import placement_of
from optpipe.schedule import ActionType
from optpipe_solver.milp.highs import LinearProgram
from optpipe_solver.milp.plan.pattern import NUM_DURATIONS, kind_number, patterns_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe.presets import Training
    from optpipe.presets.step import StagePart
    from optpipe_solver.arrays import Floats
    from optpipe_solver.tune.space import TuneCandidate, TuneQuestion

__all__ = ["LayerTable", "interleaved_share"]

_ROUNDING = 1e-9
_TOLERANCE = 1e-5
_MOST_ROUNDS, _PATHS, _PATIENCE, _ENOUGH = 200, 4, 8, 2e-3
_MOST_CELLS, _ALIKE = 20_000, 0.005


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
        layers: dict[StagePart, int] = {}
        for layer in model_parts(question.shape, machine, pp=pp):
            layers[layer] = layers.get(layer, 0) + layer.repeat
        self.fused = question.framework == "megatron"
        keeps = question.framework != "any"
        self.parts = [
            _LayerNumbers(
                number,
                layer.times.sums.forward_ms,
                sum(layer.times.sums),
                float(layer.kept.activation_bytes if keeps else 0),
                static_bytes(layer.held, training).total,
            )
            for layer, number in layers.items()
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

    def filled_ms(self, candidate: TuneCandidate) -> float:
        """Return a bound that knows how interleaved 1F1B fills and drains; 0 for other orders."""
        cells = candidate.pp * candidate.chunks * candidate.num_microbatches
        if not self.fused or candidate.chunks == 1 or cells > _MOST_CELLS:
            return 0.0
        main = max(self.parts, key=lambda part: part.number * part.whole_ms)
        share = main.forward_ms / main.whole_ms
        alike = [
            p for p in self.parts if abs(p.forward_ms - share * p.whole_ms) <= _ALIKE * p.whole_ms
        ]
        shares = [part.forward_ms / part.whole_ms for part in alike if part.whole_ms > 0]
        least, most = floor(1e3 * min(shares)) / 1e3, ceil(1e3 * max(shares)) / 1e3
        cut = (candidate.pp, candidate.chunks, candidate.num_microbatches)
        whole = sum(part.number * part.whole_ms for part in alike)
        return whole * interleaved_share(*cut, least, most) + self.after_ms


@lru_cache(maxsize=4096)
def interleaved_share(pp: int, chunks: int, m: int, least: float, most: float) -> float:
    """Return how long interleaved 1F1B takes at least, of what a micro-batch computes in all.

    Over all cuts into stages, layers divided at will: the least longest path is a linear program
    in the stages' durations, whose rows are paths, added where they are longer than it says. What
    it says with some of the rows is a bound.

    Parameters
    ----------
    pp, chunks, m
        Ranks, stages of each, micro-batches.
    least, most
        F's share of F and backward, of all layers.
    """
    placement = placement_of("loop", pp, chunks)
    links = (((0.0, 0.0), (0.0, 0.0)),) * (len(placement) - 1)
    pattern = next(
        patterns_of(placement, m, links, transfers=False, recompute=False, names=("interleaved",))
    )
    forward, back = kind_number(ActionType.FORWARD), kind_number(ActionType.FULL_BACKWARD)
    durations = np.zeros((NUM_DURATIONS, len(placement)))
    whole: Floats = np.full(len(placement), 1.0 / len(placement))
    count = len(placement)
    program = LinearProgram([0.0] * count + [-1.0], [1.0] * count + [float(m + count)])
    program.add_at_most(dict.fromkeys(range(count), -1.0), -1.0)
    said, known, centre, recent = 0.0, inf, whole, [-1.0] * _PATIENCE
    for _ in range(_MOST_ROUNDS):
        # Between what the program says and the best cut known, where rows cut off most.
        whole = 0.3 * whole + 0.7 * centre
        durations[forward], durations[back] = least * whole, (1 - most) * whole
        paths = pattern.longest_paths(durations)
        if paths[0].length_ms < known:
            known, centre = paths[0].length_ms, whole
        stalls = m / pp < said <= recent[0] * (1 + _ENOUGH / 4)
        if known <= said * (1 + _ENOUGH) or stalls:
            break
        recent = [*recent, said][-_PATIENCE:]
        for path in paths[:_PATHS]:
            factors = least * path.counts[forward] + (1 - most) * path.counts[back]
            terms = {int(s): float(factors[s]) for s in np.flatnonzero(factors)}
            program.add_at_most({**terms, count: -1.0}, 0.0)
        *found, said = program.best()
        whole = np.array(found)
    return said * (1 - _TOLERANCE)


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


def _sum(layers: Mapping[StagePart, int]) -> Held:
    held = Held(0)
    for layer, number in layers.items():
        held = held.plus(Held(number * layer.held.common, number * layer.held.experts))
    return held
