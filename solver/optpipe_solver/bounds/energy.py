"""Bytes x time: what micro-batches must hold, against what the devices have (docs/bounds.md).

Recomputing saves bytes x time for compute time, offloading saves it for transfer time. Fractional
knapsacks over compute time and over bytes moved limit how much the cheapest choice saves within a
time T. If that is not enough, T is too short. Bisection finds the smallest T not refuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from optpipe_solver.budget import check_stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe.problem import CellMode, Problem, Stage
    from optpipe_solver.bounds.relaxation import Paths

__all__ = ["energy_ms"]

_STEPS = 60


@dataclass(frozen=True, slots=True)
class _Saving:
    """Savings of one micro-batch on a stage (bytes x ms), price of each (ms or bytes), and counts.

    ``least`` of the ``most`` micro-batches must be treated so.
    """

    saved: float
    price: float
    most: int
    least: int


@dataclass(frozen=True, slots=True)
class _Ramps:
    """Room that cannot be filled: ``free`` bytes at first, none after ``up`` ms; ``down`` likewise.

    ``both`` means that no schedule is so short that they could overlap.
    """

    free: float
    up: float
    down: float
    both: bool

    def lost(self, length: float) -> float:
        """Return the bytes x ms lost in ``length`` ms."""
        first, last = (_triangle(self.free, ramp, length) for ramp in (self.up, self.down))
        return first + last if self.both else max(first, last)


def _triangle(height: float, ramp: float, length: float) -> float:
    """Area up to ``length`` below a line that falls from ``height`` at 0 to 0 at ``ramp``."""
    if ramp <= length:
        return height * ramp / 2
    return height * length * (1 - length / (2 * ramp))


@dataclass(frozen=True, slots=True)
class _Demand:
    """One device: bytes x ms it needs if all is kept, and its capacity and choices.

    ``outside`` is the time in ms before its first start and after its last end.
    """

    device: int
    outside: float
    busy: float
    energy: float
    room: float
    ramps: _Ramps
    recompute: tuple[_Saving, ...]
    offload: tuple[_Saving, ...]


def energy_ms(paths: Paths, *, makespan: bool) -> float:
    """Return the greatest bound of single devices and, under makespan, of PCIe groups."""
    problem = paths.problem
    demands = _demands(paths, makespan)
    sharing: dict[str, list[_Demand]] = {}
    for demand in demands if makespan else []:
        group = problem.devices[demand.device].pcie_group
        if group is not None:
            sharing.setdefault(group, []).append(demand)
    together = [[demand] for demand in demands] + list(sharing.values())
    return max(_least_time(_is_possible(problem, members)) for members in together)


def _demands(paths: Paths, makespan: bool) -> list[_Demand]:
    problem = paths.problem
    return [
        _demand(paths, device, stages, makespan)
        for device, stages in enumerate(problem.stages_of)
        if stages
    ]


def _demand(paths: Paths, device: int, indices: Sequence[int], makespan: bool) -> _Demand:
    problem = paths.problem
    stages = [problem.stages[s] for s in indices]
    m = problem.num_microbatches
    room = problem.room_bytes(device)
    busy = m * sum(paths.busy[s] for s in indices)
    head = min(paths.head_f[s] for s in indices) if makespan else 0.0
    savings = [_Savings(paths, s) for s in indices]
    return _Demand(
        device=device,
        outside=head + min(stage.grad_sync_ms for stage in stages),
        busy=busy,
        energy=m * sum(one.kept for one in savings),
        room=room,
        ramps=_ramps(paths, indices, busy),
        recompute=tuple(choice for one in savings for choice in _hull(one.by_time, m, one.forced)),
        offload=tuple(choice for one in savings for choice in _hull(one.by_bytes, m, one.forced)),
    )


class _Savings:
    """Savings by the modes of a stage; ``kept`` is the bytes x ms of a cell that keeps all.

    ``by_time`` lists pairs (ms recomputed, saved by that), ``by_bytes`` pairs (bytes moved, saved
    by that), one per other mode. A mode that does both is split, so that the two are chosen
    independently. ``forced`` means that no cell can keep all.
    """

    def __init__(self, paths: Paths, s: int) -> None:
        problem, stage, menu = paths.problem, paths.problem.stages[s], paths.menus[s]
        self.between = stage.forward_ms + paths.between[s]
        self.stage = stage
        keep = problem.menus[s][0]
        self.kept = self._least(keep, 0, 0.0)
        self.forced = keep not in menu
        self.by_time: list[tuple[float, float]] = []
        self.by_bytes: list[tuple[float, float]] = []
        for mode in menu:
            moved = mode.offload_bytes
            if mode == keep:
                continue
            there = self._least(mode, 0, 0.0)
            away = there
            if moved:
                trip = stage.forward_ms + problem.offload_ms(s, moved) + problem.reload_ms(s, moved)
                away = self._least(mode, moved, trip)
            self.by_time.append((mode.recompute_ms, max(0.0, self.kept - there)))
            self.by_bytes.append((float(moved), max(0.0, there - away)))

    def _least(self, mode: CellMode, moved: int, there: float) -> float:
        """Return the minimum bytes x ms of a cell; of these ``moved`` bytes are there that long."""
        stage, between = self.stage, self.between
        context = mode.weight_context_bytes * stage.backward_weight_ms
        rest = mode.forward_bytes - moved
        more = mode.backward_bytes - mode.forward_bytes
        again = mode.recompute_ms if mode.recompute == "apart" else 0.0
        inside, extra = mode.inside_ms, mode.inside_bytes
        found = []
        for backward, after in ((stage.backward_input_ms, context), (stage.fused_backward_ms, 0)):
            work = backward + inside
            found.append(
                rest * (between + work)
                + moved * (there + again + work)
                + more * (again + work)
                + extra * work
                + after
            )
        return min(found)


def _hull(choices: Sequence[tuple[float, float]], most: int, forced: bool) -> Iterator[_Saving]:
    """Yield the steps of the upper hull of (price, saved): the best ones first, each once a cell.

    If ``forced``, every cell must make the first step, which leads to the minimum price.
    """
    if not choices:
        return
    price, saved = 0.0, 0.0
    if forced:
        price = min(one for one, _ in choices)
        saved = max(gain for one, gain in choices if one == price)
        yield _Saving(saved, price, most, most)
    while True:
        steps = [
            (one - price, gain - saved) for one, gain in choices if gain > saved and one >= price
        ]
        if not steps:
            return
        step = max(steps, key=lambda step: (_ratio(step[1], step[0]), step[0]))
        price, saved = price + step[0], saved + step[1]
        yield _Saving(step[1], step[0], most, 0)


def _ramps(paths: Paths, indices: Sequence[int], busy: float) -> _Ramps:
    stages = [paths.problem.stages[s] for s in indices]
    room = paths.problem.room_bytes(stages[0].device)
    sizes = [_most_held(paths, s) for s in indices]
    grow = max(
        _ratio(max(size), paths.problem.stages[s].forward_ms - paths.hidden[s])
        for s, size in zip(indices, sizes, strict=True)
    )
    shrink = max(_shrink(stage, *size) for size, stage in zip(sizes, stages, strict=True))
    free = max(0.0, room - max(map(max, sizes)))
    up, down = _ratio(free, grow), _ratio(free, shrink)
    return _Ramps(free, up, down, both=up + down <= busy)


def _most_held(paths: Paths, s: int) -> tuple[int, int]:
    """Return the maximum bytes of a cell in any mode until the end of its I, and after that."""
    menu = paths.problem.menus[s]
    inside = max(mode.backward_bytes + mode.inside_bytes for mode in menu)
    return inside, max(mode.weight_context_bytes for mode in menu)


def _shrink(stage: Stage, held_bytes: int, context: int) -> float:
    """Bytes per ms at which work on one micro-batch of a stage can at most free its bytes."""
    backward = stage.busy_ms - stage.forward_ms
    weight = backward - min(stage.backward_input_ms, stage.fused_backward_ms)
    return max(_ratio(held_bytes, backward), _ratio(context, weight))


def _ratio(amount: float, by: float) -> float:
    if amount == 0:
        return 0.0
    return amount / by if by > 0 else inf


def _is_possible(problem: Problem, members: Sequence[_Demand]) -> Callable[[float], bool]:
    """Return the question whether a time in ms is not refuted for devices that share lanes."""

    def is_possible(length: float) -> bool:
        out = home = 0.0
        for demand in members:
            bytes_moved = _least_moved(demand, length - demand.outside)
            if bytes_moved == 0:
                continue
            device = problem.devices[demand.device]
            if bytes_moved == inf or device.d2h_gb_per_s is None or device.h2d_gb_per_s is None:
                return False
            away = bytes_moved / (device.d2h_gb_per_s * 1e6)
            back = bytes_moved / (device.h2d_gb_per_s * 1e6)
            own = away + back if device.half_duplex else max(away, back)
            if own > length - demand.outside:
                return False
            out, home = out + away, home + back
        window = length - min(demand.outside for demand in members)
        return max(out, home) <= window

    return is_possible


def _least_moved(demand: _Demand, length: float) -> float:
    """Bytes that must be offloaded if all is done in ``length`` ms; inf: it cannot be."""
    spare = length - demand.busy - sum(c.least * c.price for c in demand.recompute)
    if spare < 0:
        return inf
    missing = demand.energy - (demand.room * length - demand.ramps.lost(length))
    missing -= sum(c.least * c.saved for c in (*demand.recompute, *demand.offload))
    missing -= _most_saved(demand.recompute, spare)
    moved = sum(c.least * c.price for c in demand.offload)
    for choice in sorted(demand.offload, key=lambda c: -_ratio(c.saved, c.price)):
        if missing <= 0:
            return moved
        number = choice.most - choice.least
        if choice.saved > 0:
            number_needed = min(float(number), missing / choice.saved)
            moved += number_needed * choice.price
            missing -= number_needed * choice.saved
    return moved if missing <= 1e-9 * demand.energy else inf


def _most_saved(choices: Sequence[_Saving], spare: float) -> float:
    """Bytes x ms that recomputing within ``spare`` ms can save."""
    saved = 0.0
    for choice in sorted(choices, key=lambda c: -_ratio(c.saved, c.price)):
        number = float(choice.most - choice.least)
        if choice.price > 0:
            number = min(number, spare / choice.price)
        saved += number * choice.saved
        spare -= number * choice.price
    return saved


def _least_time(is_possible: Callable[[float], bool]) -> float:
    """Return a time that is refuted, so close below the first that is not; 0 where none is."""
    if is_possible(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not is_possible(high):
        low, high = high, 2 * high
        if high > 1e18:
            return 0.0
    for _ in range(_STEPS):
        check_stop()
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low
