"""Cutting the layers into the stages of one line, by dynamic programming (docs/plan.md).

The measure of a cut is its *load bound*, the maximum over the devices of a sum. The sum contains
the earliest start of the first stage (0 under span), all work, and the shortest gradient reduction.
In state (k, j), k stages hold the first j layers. Its *labels* contain the values that the
remaining stages depend on. A label that is nowhere smaller than another is dropped: each of its
completions has one of the other label that is no worse.

If a device gets several stages, a beam keeps the most promising labels. A beam that was full proves
nothing. The search looks for cuts under a cap, which rises until there is one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.planning.step import balanced_cut
from optpipe_solver.budget import Stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.model import Model
    from optpipe_solver.plan.lines import LayerRun, PlacementLine, RunTable

__all__ = [
    "Cuts",
    "any_cut_bound",
    "best_cuts",
    "even_cut",
    "load_weights",
    "roomiest_cut",
    "weighted_work",
]


_MOST_BEAM, _BEAM_STATES = 16, 8000
_LABELS = 1e5
"""Labels created per unit of work (see `Stop`)."""
_CAPS = (1.01, 1.03, 1.1, 1.3, 2.0, 4.0, math.inf)


@dataclass(frozen=True, slots=True)
class Cuts:
    """The best cuts of a line by load bound, best first, and a lower bound of all its cuts.

    ``bound_ms``: no schedule of any cut of the line that fits the devices is faster; inf if no cut
    fits.
    """

    sizes: tuple[tuple[int, ...], ...]
    bound_ms: float


class _Open(NamedTuple):
    """A device that has some stages: ms and bytes so far."""

    head: float
    load: float
    sync: float
    static: int
    held_bytes: int


_UNTOUCHED = _Open(math.inf, 0.0, math.inf, 0, 0)


class _Label(NamedTuple):
    key: float
    closed: float
    head: float
    open: tuple[tuple[int, _Open], ...]
    sizes: tuple[int, ...]


def even_cut(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return equal numbers of layers per stage; the first stages take the remainder."""
    share, over = divmod(num_layers, num_stages)
    return tuple(share + (stage < over) for stage in range(num_stages))


def best_cuts(
    table: RunTable,
    line: PlacementLine,
    *,
    cap_ms: float = math.inf,
    beam: int | None = None,
    stop: Stop | None = None,
) -> Cuts:
    """Return the cuts of a line with the smallest load bound.

    Parameters
    ----------
    table
        The runs of the model.
    line
        The placement.
    cap_ms
        Cuts whose load bound exceeds it are left out.
    beam
        Labels kept per state if devices hold several stages, at least 1; by default fewer with
        more states.
    stop
        Ends the search, which then returns the bound proven so far; labels count as its work.
    """
    stop = stop or Stop(math.inf)
    if beam is None:
        beam = max(2, min(_MOST_BEAM, _BEAM_STATES // (len(line.placement) * table.num_layers)))
    proven = floor = any_cut_bound(table.model, line.order)
    for factor in _CAPS if floor > 0 else (math.inf,):
        cap = min(cap_ms, floor * factor) if floor > 0 else cap_ms
        sweep = _Sweep(table, line, cap, beam, stop)
        labels = sweep.run()
        if not sweep.lost:
            best = labels[0].closed if labels else math.inf
            proven = max(proven, min(best, cap) if sweep.capped else best)
        if labels or sweep.stopped or cap >= cap_ms or proven == math.inf:
            break
    return Cuts(tuple(label.sizes for label in labels), proven)


class _Sweep:
    def __init__(
        self,
        table: RunTable,
        line: PlacementLine,
        cap_ms: float,
        beam: int,
        stop: Stop,
    ) -> None:
        self.table = table
        self.model: Model = table.model
        self.placement = line.placement
        self.cap_ms, self.beam, self.stop = cap_ms, beam, stop
        self.capped = self.lost = self.stopped = False
        self.weights = dict(zip(line.order, load_weights(self.model, line.order), strict=True))
        work = weighted_work(self.model, line.order)
        self.left = [math.fsum(work[end:]) for end in range(len(work) + 1)]

    def run(self) -> list[_Label]:
        """Return the labels of complete cuts, best first."""
        states: dict[int, list[_Label]] = {0: [_Label(0.0, 0.0, 0.0, (), ())]}
        for k in range(len(self.placement)):
            grown: dict[int, list[_Label]] = {}
            for start in sorted(states):
                num_made = 0
                if self.stop.is_over():
                    self.lost = self.stopped = True
                    return []
                for label in states[start]:
                    for end, longer in self._extensions(label, k, start):
                        grown.setdefault(end, []).append(longer)
                        num_made += 1
                self.stop.spend(num_made / _LABELS)
            states = {end: self._undominated(labels) for end, labels in grown.items()}
        return states.get(self.model.num_layers, [])

    def _extensions(self, label: _Label, k: int, start: int) -> Iterator[tuple[int, _Label]]:
        """Yield the label with stage k added, for each end that fits; needs grow with the end."""
        after = len(self.placement) - k - 1
        most = self.model.num_layers - after
        for end in range(most if after == 0 else start + 1, most + 1):
            run = self.table.run(self.placement[k], start, end)
            longer = self._longer(label, k, run, end)
            if longer is None:
                return
            if self._has_room(longer, k, end):
                yield end, longer._replace(sizes=(*label.sizes, end - start))
            else:
                self.capped = True

    def _longer(self, label: _Label, k: int, run: LayerRun, end: int) -> _Label | None:
        device = self.placement[k]
        known = dict(label.open)
        before = known.pop(device, _UNTOUCHED)
        room = self.model.devices[device].usable_bytes - before.static - run.static_bytes
        # Earlier stages hold bytes until this one's I ends. Its W may wait until these are free.
        if max(run.needed_bytes, before.held_bytes + run.nested_bytes) > room:
            return None
        now = _Open(
            head=min(before.head, label.head),
            load=before.load + run.busy_ms,
            sync=min(before.sync, run.sync_ms),
            static=before.static + run.static_bytes,
            held_bytes=before.held_bytes + run.held_bytes,
        )
        closed = label.closed
        if device in self.placement[k + 1 :]:
            known[device] = now
        else:
            closed = max(closed, self._value(now) + now.sync)
        waiting = tuple(sorted(known.items()))
        if max(closed, self._value(now)) > self.cap_ms:
            self.capped = True
            return None
        key = max([closed, *(self._projected(k, *item) for item in waiting)])
        return _Label(key, closed, self._next_head(label.head, k, run, end), waiting, ())

    def _has_room(self, label: _Label, k: int, end: int) -> bool:
        """Whether the remaining work fits below the cap, by a bound with weighted sums."""
        if math.isinf(self.cap_ms):
            return True
        cap = self.cap_ms
        room = math.fsum(self.weights[d] * (cap - self._value(so_far)) for d, so_far in label.open)
        ahead = set(self.placement[k + 1 :]) - {device for device, _ in label.open}
        fresh = _UNTOUCHED._replace(head=label.head)
        room += math.fsum(self.weights[d] for d in sorted(ahead)) * (cap - self._value(fresh))
        return room * (1 + 1e-9) >= self.model.num_microbatches * self.left[end]

    def _value(self, so_far: _Open) -> float:
        head = so_far.head if self.model.objective == "makespan" else 0.0
        return head + self.model.num_microbatches * so_far.load

    def _projected(self, k: int, device: int, so_far: _Open) -> float:
        """Estimate the device's value as if all its stages were like those it has."""
        counts = Counter(self.placement[: k + 1])
        times = self.placement.count(device) / counts[device]
        return self._value(so_far._replace(load=so_far.load * times))

    def _next_head(self, head: float, k: int, run: LayerRun, end: int) -> float:
        if k + 1 == len(self.placement):
            return 0.0
        sent = self.table.output_bytes[end - 1]
        there = self.model.transfer_ms(self.placement[k], self.placement[k + 1], sent)
        return head + run.forward_ms + there

    def _undominated(self, labels: list[_Label]) -> list[_Label]:
        kept: list[_Label] = []
        for label in sorted(labels):
            if any(_dominates(other, label) for other in kept):
                continue
            if len(kept) >= self.beam and label.open:
                self.lost = True
                break
            kept.append(label)
        return kept


def _dominates(one: _Label, other: _Label) -> bool:
    if one.closed > other.closed or one.head > other.head:
        return False
    pairs = zip(one.open, other.open, strict=True)
    return all(a <= b for (_, x), (_, y) in pairs for a, b in zip(x, y, strict=True))


def roomiest_cut(table: RunTable, line: PlacementLine) -> tuple[int, ...]:
    """Return the cut of a linear line with the most free bytes on its fullest device."""
    n, usable = table.num_layers, [table.model.devices[d].usable_bytes for d in line.order]
    used = np.full((len(line.order), n + 1, n + 1), np.inf)
    for k, device in enumerate(line.order):
        for start in range(n):
            for end in range(start + 1, n + 1):
                run = table.run(device, start, end)
                used[k, end, start] = run.static_bytes + run.needed_bytes + max(usable) - usable[k]
    return balanced_cut(list(used))[0]


# --- Lower bounds for every cut and placement of a model.


def load_weights(model: Model, devices: Sequence[int]) -> list[float]:
    """Return a weight per device, inverse to its time for the whole model; their sum is 1.

    All 0 if the model takes no time on some device.
    """
    totals = [sum(stage.busy_ms for stage in model.stages_on[device]) for device in devices]
    if min(totals) <= 0:
        return [0.0] * len(totals)
    inverse = [1 / total for total in totals]
    return [value / sum(inverse) for value in inverse]


def weighted_work(model: Model, devices: Sequence[int]) -> list[float]:
    """Return, per layer, the minimum over the devices of weight x compute time in ms."""
    weights = load_weights(model, devices)
    busy = [[stage.busy_ms for stage in model.stages_on[device]] for device in devices]
    return [
        min(weight * ms for weight, ms in zip(weights, column, strict=True))
        for column in zip(*busy, strict=True)
    ]


def any_cut_bound(model: Model, devices: Sequence[int]) -> float:
    """Return a lower bound in ms for schedules of any cut and any placement on these devices.

    Load. Let t(l, d) be the compute time of one micro-batch in layer l on device d, and y(d) >= 0
    weights that sum to 1. The busiest device is at least as busy as the weighted mean of all. In
    the mean, layer l costs at least min over d of y(d) t(l, d), on any device. A stage's minimum
    compute time is at least the sum of its layers' minima. Any weights are valid. Weights inverse
    to the devices' times for the whole model make this tight for devices that differ by a factor.

    Path. One micro-batch goes forward and backward through all layers, one after the other.

    Both hold for makespan. Under span, the load holds for every device and the path for the device
    of layer 0.
    """
    path = [
        [
            stage.forward_ms + min(stage.backward_input_ms, stage.fused_backward_ms)
            for stage in model.stages_on[device]
        ]
        for device in devices
    ]
    one_by_one = float(sum(min(column) for column in zip(*path, strict=True)))
    return max(model.num_microbatches * sum(weighted_work(model, devices)), one_by_one)
