"""Bytes x time: what micro-batches must hold, against what the devices have (docs/bounds.md).

Whoever recomputes saves bytes x time for compute time, whoever offloads for transfer time. For a
time T the cheapest choice saves at most what the fractional knapsacks over compute time and over
bytes moved save; if that is not enough, T is too short. Bisection finds the least T not refuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from optpipe_solver.feasibility import least_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe.problem import Problem, Stage
    from optpipe_solver.bounds.relaxation import Paths

__all__ = ["energy_ms"]

_STEPS = 60


@dataclass(frozen=True, slots=True)
class _Saving:
    """What one micro-batch on a stage saves (bytes x ms) at which price (ms or bytes), how often.

    ``least`` of the ``most`` micro-batches must be treated so.
    """

    saved: float
    price: float
    most: int
    least: int


@dataclass(frozen=True, slots=True)
class _Ramps:
    """Room that cannot be filled: ``free`` bytes at first, none after ``up`` ms; ``down`` likewise.

    ``both`` tells that no schedule is so short that they could overlap.
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
        _demand(paths, device, held, makespan)
        for device, held in enumerate(problem.stages_of)
        if held
    ]


def _demand(paths: Paths, device: int, held: Sequence[int], makespan: bool) -> _Demand:
    problem = paths.problem
    stages = [problem.stages[s] for s in held]
    m = problem.num_microbatches
    room = problem.room_bytes(device)
    busy = m * sum(stage.busy_ms for stage in stages)
    head = min(paths.head_f[s] for s in held) if makespan else 0.0
    energies = [_Energies(paths, s) for s in held]
    least = [least_bytes(problem.stages[s], can_offload=problem.can_offload(s))[0] for s in held]
    cannot_keep = [_cannot_keep(stages, least, at, room) for at in range(len(held))]
    return _Demand(
        device=device,
        outside=head + min(stage.grad_sync_ms for stage in stages),
        busy=busy,
        energy=m * sum(one.kept for one in energies),
        room=room,
        ramps=_ramps(stages, room, busy),
        recompute=tuple(
            _Saving(
                max(0.0, one.kept - one.recomputed),
                stage.recompute_ms or 0.0,
                m,
                m if full and not one.can_offload else 0,
            )
            for one, stage, full in zip(energies, stages, cannot_keep, strict=True)
            if stage.can_recompute
        ),
        offload=tuple(
            _Saving(
                max(0.0, one.kept - one.offloaded),
                stage.offload_bytes,
                m,
                m if full and not stage.can_recompute else 0,
            )
            for one, stage, full in zip(energies, stages, cannot_keep, strict=True)
            if one.can_offload
        ),
    )


class _Energies:
    """Least bytes x ms of one micro-batch on a stage, by mode; the less of split and fused."""

    def __init__(self, paths: Paths, s: int) -> None:
        problem, stage = paths.problem, paths.problem.stages[s]
        between = stage.forward_ms + paths.between[s]
        split = stage.backward_input_ms
        context = stage.weight_context_bytes * stage.backward_weight_ms
        fused = stage.fused_backward_ms
        full, kept = stage.activation_bytes, stage.checkpoint_bytes or 0
        self.can_offload = problem.can_offload(s)
        self.kept = min(full * (between + split) + context, full * (between + fused))
        again = stage.recompute_ms or 0.0
        self.recomputed = min(
            kept * (between + split) + (full - kept) * (again + split) + context,
            kept * (between + fused) + (full - kept) * (again + fused),
        )
        self.offloaded = self.kept
        if self.can_offload:
            moved = stage.offload_bytes
            away = stage.forward_ms + problem.offload_ms(s) + problem.reload_ms(s)
            self.offloaded = min(
                (full - moved) * (between + split) + moved * (away + split) + context,
                (full - moved) * (between + fused) + moved * (away + fused),
            )


def _cannot_keep(stages: Sequence[Stage], least: Sequence[int], at: int, room: float) -> bool:
    """Whether keeping a micro-batch on one stage leaves no room for it on a later one."""
    before = sum(least[:at]) + stages[at].activation_bytes
    for later in range(at + 1, len(stages)):
        if before + stages[later].activation_bytes > room:
            return True
        before += least[later]
    return False


def _ramps(stages: Sequence[Stage], room: float, busy: float) -> _Ramps:
    most = [max(stage.activation_bytes, stage.weight_context_bytes) for stage in stages]
    grow = max(_ratio(size, stage.forward_ms) for size, stage in zip(most, stages, strict=True))
    shrink = max(_shrink(stage) for stage in stages)
    free = max(0.0, room - max(most))
    up, down = _ratio(free, grow), _ratio(free, shrink)
    return _Ramps(free, up, down, both=up + down <= busy)


def _shrink(stage: Stage) -> float:
    """Bytes per ms at which work on one micro-batch of a stage can at most free its bytes."""
    backward = stage.busy_ms - stage.forward_ms
    weight = backward - min(stage.backward_input_ms, stage.fused_backward_ms)
    return max(_ratio(stage.activation_bytes, backward), _ratio(stage.weight_context_bytes, weight))


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
            held = problem.devices[demand.device]
            if bytes_moved == inf or held.d2h_gb_per_s is None or held.h2d_gb_per_s is None:
                return False
            away = bytes_moved / (held.d2h_gb_per_s * 1e6)
            back = bytes_moved / (held.h2d_gb_per_s * 1e6)
            own = away + back if held.half_duplex else max(away, back)
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
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low
