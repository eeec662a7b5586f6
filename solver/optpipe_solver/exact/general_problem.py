"""Some devices of a problem, the rest as waiting times, in whole numbers, for `general_kernel`."""

from __future__ import annotations

from functools import partial
from itertools import chain, pairwise
from math import floor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.bounds.heads_tails import (
    ANYTIME,
    Events,
    drain,
    heads_beside,
    nothing_known,
    refill,
    tails,
)
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.exact.general_kernel import (
    FORWARD,
    FUSED,
    GRADIENT,
    KINDS,
    MOST_COMING,
    RECOMPUTE,
    RELOAD,
    WEIGHT,
    GeneralProblem,
)
from optpipe_solver.exact.layers import whole
from optpipe_solver.feasibility import fusing_may_pay, memory_binds, possible_modes
from optpipe_solver.incumbent import grid_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optpipe.problem import CellMode, Device, Problem
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.bounds.relaxation import Relaxed

__all__ = ["copies_are_equal", "general_problem_of", "unit_ms", "useful_menus"]


_STEPS = 4e8
"""Most units in the horizon: the sum of five times that are no longer fits into 32 bits."""

_ROUNDING = 1e-6
"""Share of a unit that a time in ms may be off."""

_ALL_ROUNDING = 1e-3
"""Share of a unit that the times of a path may be off together."""

_ANY_TAIL = -(1 << 40)
"""Units: of an event that may end at any time, as the clock is not its device's."""


class _Copy(NamedTuple):
    """The bytes of one copy of a device, and its ms each way."""

    moved: int = 0
    out: float = 0.0
    home: float = 0.0


def unit_ms(problem: Problem, horizon_ms: float) -> float:
    """Return the unit of time: a common divisor of all times where 32 bits can count by it."""
    finest = max(1.0, horizon_ms) / _STEPS
    grid = grid_ms(problem)
    return max(grid, finest)


def copies_are_equal(problem: Problem, device: int) -> bool:
    """Whether all that a device can offload has one size, so that copies can be counted."""
    return len({_copy(problem, s) for s in problem.stages_of[device]} - {_Copy()}) <= 1


def general_problem_of(
    problem: Problem,
    horizon_ms: float,
    devices: Sequence[int],
    known: Events | None = None,
    *,
    by_cell: bool = False,
) -> GeneralProblem:
    """Return the problem of some devices with every time rounded down to whole units.

    If a unit divides all times, it is used. Otherwise the unit is so small that rounding hardly
    matters: a schedule within the horizon stays one, as times only shrink. Under span the problem
    must have one device, unless copies are known by cell.
    """
    unit = unit_ms(problem, horizon_ms)
    horizon = floor(horizon_ms / unit + _ALL_ROUNDING)
    units = partial(_units, unit=unit, most=horizon + 1)
    model = relaxed(problem)
    is_span = problem.objective == "span"
    before, after = _clock(problem, model, devices, known, by_cell=by_cell)
    kept = [s for s, stage in enumerate(problem.stages) if stage.device in devices]
    stages = [problem.stages[s] for s in kept]
    index = {device: k for k, device in enumerate(devices)}
    home_device = index.get(problem.stages[0].device, len(devices))
    copies = [_device_copy(problem, device) for device in devices]
    head, there, back = _delays(model, kept)
    forward, gradient = units(model.forward[kept]), units(model.gradient[kept])
    there_units, back_units = units(there), units(back)
    last_i = _grid(after.gradient[:, kept], unit)
    licensed = {(pair.backward, pair.with_) for pair in problem.pairs}
    menus = useful_menus(problem, kept) if by_cell else [_counted_menu(problem, s) for s in kept]
    width = max(map(len, menus))

    def table(value: Callable[[int, CellMode], float], missing: float = 0.0) -> list[list[float]]:
        return [
            [
                missing if mode is None else value(s, mode)
                for mode in [*menu, *[None] * (width - len(menu))]
            ]
            for s, menu in zip(kept, menus, strict=True)
        ]

    def times(value: Callable[[int, CellMode], float], missing: float = 0.0) -> Ints:
        return np.array([units(row) for row in table(value, missing)])

    def sizes(value: Callable[[int, CellMode], float]) -> Ints:
        return np.array(table(value), dtype=np.int64)

    split_i = times(lambda s, mode: problem.stages[s].backward_input_ms + mode.inside_ms)
    context, context_of, needs = _contexts(menus, width)
    for s, menu in enumerate(menus):
        for k, mode in enumerate(menu):
            if mode:
                needs[_NEEDS, s, k] = _needs(mode)
    lanes, num_lanes = _lanes([problem.devices[device] for device in devices], by_cell=by_cell)
    paired = 1 + len(devices) + num_lanes
    inputs = paired + len(devices)
    ends = inputs + problem.num_microbatches
    begins = ends + problem.num_microbatches * len(kept) * by_cell
    return GeneralProblem(
        num_microbatches=problem.num_microbatches,
        by_cell=by_cell,
        has_modes=by_cell or any(mode is not None for menu in menus for mode in menu[1:]),
        device=whole(index[s.device] for s in stages),
        is_open=np.array(table(lambda _s, _mode: 1.0)) > 0,
        forward=forward,
        hidden=whole(s.forward_ms / unit + _ROUNDING for s in stages) - forward,
        pairs_i=np.array([(s, "I") in licensed for s in kept]),
        pairs_b=np.array([(s, "B") in licensed for s in kept]),
        may_fuse=np.array([fusing_may_pay(problem, s) or (s, "B") in licensed for s in kept]),
        split_i=split_i,
        split_w=units(s.backward_weight_ms for s in stages),
        fused=times(lambda s, mode: problem.stages[s].fused_backward_ms + mode.inside_ms),
        shortest_i=units(
            min(problem.stages[s].backward_input_ms + mode.inside_ms for mode in menu if mode)
            for s, menu in zip(kept, menus, strict=True)
        ),
        gradient=gradient,
        weight=units(model.weight[kept]),
        inside=times(lambda _, mode: mode.inside_ms),
        again=times(lambda _, mode: _apart_ms(mode), -1.0),
        extra=units(
            min(mode.inside_ms + max(0.0, _apart_ms(mode)) for mode in menu if mode)
            for menu in menus
        ),
        forward_bytes=sizes(lambda _, mode: mode.forward_bytes),
        backward_bytes=sizes(lambda _, mode: mode.backward_bytes),
        context=context,
        context_of=context_of,
        needs=needs,
        same_as=_same_as(menus, context_of, width),
        moved=sizes(lambda _, mode: mode.offload_bytes),
        out=times(lambda s, mode: _copy_ms(problem.offload_ms, s, mode)),
        home=times(lambda s, mode: _copy_ms(problem.reload_ms, s, mode)),
        room=whole(problem.room_bytes(device) for device in devices),
        lane_out=lanes[0],
        lane_home=lanes[1],
        group_out=lanes[2],
        group_home=lanes[3],
        issued=np.array([not (by_cell and _shares(problem.devices[d])) for d in devices]),
        one_moved=whole(copy.moved for copy in copies),
        one_out=units(copy.out for copy in copies),
        one_home=units(copy.home for copy in copies),
        waits=np.array(
            [_waits(problem, device, copy) for device, copy in zip(devices, copies, strict=True)]
        ),
        there=there_units,
        back=back_units,
        head=0 if is_span and not by_cell else int(units([head])[0]),
        rest=_rest(forward, gradient, there_units, back_units, int(last_i[0, 0])),
        head_f=_grid(before.forward[:, kept], unit),
        head_i=_grid(before.gradient[:, kept], unit),
        last_f=_grid(after.forward[:, kept], unit),
        last_i=last_i,
        last_w=_grid(after.weight[:, kept], unit),
        home_device=home_device if is_span and by_cell else -1,
        steps=max(map(_num_extra_events, chain(*menus))) if by_cell else 1,
        paired=paired,
        inputs=inputs,
        ends=ends,
        begins=begins,
        num_times=begins + len(devices) * (is_span and by_cell),
        horizon=horizon,
    )


def _clock(
    problem: Problem,
    model: Relaxed,
    devices: Sequence[int],
    known: Events | None,
    *,
    by_cell: bool,
) -> tuple[Events, Events]:
    """Return heads and tails on the clock of the schedule, or under span on that of one device.

    By cell that is the device of stage 0: the clock starts with it, and others may end later.
    """
    begin = end = np.zeros(len(problem.stages))
    if problem.objective == "span":
        first = problem.stages[0].device if by_cell else devices[0]
        end = np.where(model.device == first, 0.0, ANYTIME)
        begin = begin if by_cell else end
    before = heads_beside(model, refill(model), begin, known or nothing_known(model))
    after = tails(model, drain(model), end)
    if not by_cell:
        after = Events(*(np.maximum(0.0, rows) for rows in after))
    return Events(*(np.maximum(0.0, rows) for rows in before)), after


def useful_menus(problem: Problem, kept: Sequence[int]) -> list[list[CellMode | None]]:
    """Return the modes that may be of use: where memory never binds, keep alone."""
    possible = possible_modes(problem)
    return [
        [*_undominated([problem.menus[s][number] for number in possible[s]])]
        if memory_binds(problem, problem.stages[s].device)
        else [problem.menus[s][0]]
        for s in kept
    ]


def _counted_menu(problem: Problem, s: int) -> list[CellMode | None]:
    """Return keep, offload and recompute, None where a stage has no such mode or needs none."""
    keep, *others = problem.menus[s]
    if not memory_binds(problem, problem.stages[s].device):
        return [keep, None, None]
    can_move = problem.can_offload(s)
    send = next((mode for mode in others if mode.offload_bytes and can_move), None)
    return [keep, send, next((mode for mode in others if mode.recompute), None)]


def _undominated(menu: list[CellMode]) -> list[CellMode]:
    """Leave out each mode that another could replace in any schedule, at the same times."""
    kept: list[CellMode] = []
    for number, mode in enumerate(menu):
        others = (*kept, *menu[number + 1 :])
        if not any(_dominates(other, mode) for other in others):
            kept.append(mode)
    return kept


def _dominates(one: CellMode, other: CellMode) -> bool:
    """Whether a mode needs no action, time or byte that the other does not need then.

    If only the other mode moves bytes, its bytes count as the minimum between F and backward.
    """
    if one.recompute == "apart" and other.recompute != "apart":
        return False
    if one.offload_bytes > other.offload_bytes:
        return False
    moves = one.offload_bytes > 0 or other.offload_bytes == 0
    is_no_larger = one.forward_bytes <= (other.forward_bytes if moves else other.least_bytes)
    return is_no_larger and all(a <= b for a, b in zip(_costs(one), _costs(other), strict=True))


def _costs(mode: CellMode) -> tuple[float, ...]:
    apart = mode.recompute == "apart"
    return (
        mode.least_bytes,
        mode.backward_bytes,
        mode.backward_bytes - mode.forward_bytes + mode.recompute_workspace_bytes if apart else 0,
        mode.recompute_ms if apart else 0.0,
        mode.inside_ms,
        mode.inside_bytes,
        mode.weight_context_bytes,
        mode.forward_workspace_bytes,
        mode.backward_input_workspace_bytes,
        mode.backward_weight_workspace_bytes,
        mode.backward_workspace_bytes,
    )


_NEEDS = [FORWARD, GRADIENT, FUSED, RELOAD, RECOMPUTE]


def _needs(mode: CellMode) -> tuple[int, ...]:
    """Return the bytes that each of `_NEEDS` needs above those held before it."""
    more = mode.weight_context_bytes - mode.backward_bytes
    return (
        mode.forward_bytes + mode.forward_workspace_bytes,
        max(mode.inside_bytes, more) + mode.backward_input_workspace_bytes,
        mode.inside_bytes + mode.backward_workspace_bytes,
        mode.offload_bytes,
        mode.backward_bytes - mode.forward_bytes + mode.recompute_workspace_bytes,
    )


def _contexts(menus: Sequence[Sequence[CellMode | None]], width: int) -> tuple[Ints, Ints, Ints]:
    """Return ``context[s, c]``, the class c of each ``[s, k]``, and ``needs`` with those of W."""
    classes: list[dict[tuple[int, int], int]] = [{} for _ in menus]
    class_of = np.zeros((len(menus), width), dtype=np.int64)
    for s, menu in enumerate(menus):
        for k, mode in enumerate(menu):
            if mode:
                one = mode.weight_context_bytes, mode.backward_weight_workspace_bytes
                class_of[s, k] = classes[s].setdefault(one, len(classes[s]))
    context = np.zeros((len(menus), max(map(len, classes))), dtype=np.int64)
    needs = np.zeros((KINDS, len(menus), width), dtype=np.int64)
    for s, found in enumerate(classes):
        for (held_bytes, workspace), c in found.items():
            context[s, c], needs[WEIGHT, s, c] = held_bytes, workspace
    return context, class_of, needs


def _same_as(menus: Sequence[Sequence[CellMode | None]], context_of: Ints, width: int) -> Ints:
    """Return per stage and mode the first one that equals it from when all is there."""
    first = np.zeros((len(menus), width), dtype=np.int64)
    for s, menu in enumerate(menus):
        found: dict[tuple[object, ...], int] = {}
        for k, mode in enumerate(menu):
            if mode:
                rest = mode.backward_bytes, mode.inside_ms, context_of[s, k], *_needs(mode)[1:3]
                first[s, k] = found.setdefault(rest, k)
    return first


def _num_extra_events(mode: CellMode | None) -> int:
    """Return how many events a mode has in addition to passes, by cell."""
    return 0 if mode is None else 2 * (mode.offload_bytes > 0) + (mode.recompute == "apart")


def _copy_ms(copy: Callable[[int, int], float], s: int, mode: CellMode) -> float:
    return copy(s, mode.offload_bytes) if mode.offload_bytes else 0.0


def _apart_ms(mode: CellMode) -> float:
    return mode.recompute_ms if mode.recompute == "apart" else -1.0


def _shares(device: Device) -> bool:
    """Whether copies of a device may wait for others than those of its direction."""
    return device.half_duplex or device.pcie_group is not None


def _lanes(devices: Sequence[Device], *, by_cell: bool) -> tuple[list[Ints], int]:
    """Return the places of each device's lanes out and home and of its group's, and how many.

    Counted copies share no lane: a half-duplex device is relaxed to two.
    """
    number: dict[tuple[object, ...], int] = {}
    rows = []
    for d, device in enumerate(devices):
        both = by_cell and device.half_duplex
        names: list[tuple[object, ...]] = [(d, "both") if both else (d, "out")]
        names.append((d, "both") if both else (d, "home"))
        if by_cell and device.pcie_group is not None:
            names += [("group", device.pcie_group, way) for way in ("out", "home")]
        places = [1 + len(devices) + number.setdefault(name, len(number)) for name in names]
        rows.append([*places, *[-1] * (4 - len(places))])
    return [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)], len(number)


def _copy(problem: Problem, s: int) -> _Copy:
    """Return the copy of a stage; none is needed where memory never binds."""
    if not problem.can_offload(s) or not memory_binds(problem, problem.stages[s].device):
        return _Copy()
    return _Copy(problem.stages[s].offload_bytes, problem.offload_ms(s), problem.reload_ms(s))


def _device_copy(problem: Problem, device: int) -> _Copy:
    copies = (_copy(problem, s) for s in problem.stages_of[device])
    return next((copy for copy in copies if copy.moved), _Copy())


def _waits(problem: Problem, device: int, copy: _Copy) -> bool:
    """Whether all RELOADs that can be on their way to a device together are told apart."""
    return copy.moved > 0 and problem.room_bytes(device) // copy.moved <= MOST_COMING


def _delays(model: Relaxed, kept: Sequence[int]) -> tuple[float, list[float], list[float]]:
    """Return the ms before the first kept stage, and up and down from each to the next.

    For the last one, up means all the way to the end of the pipeline and back to it.
    """
    forward = model.forward + model.there
    gradient = model.gradient + np.roll(model.back, 1)
    there, back = [], []
    for s, following in pairwise([*kept, len(model.forward)]):
        there.append(float(model.there[s] + forward[s + 1 : following].sum()))
        back.append(float(model.back[following - 1] + gradient[s + 1 : following].sum()))
    there[-1] += back[-1]
    back[-1] = 0.0
    return float(forward[: kept[0]].sum()), there, back


def _rest(forward: Ints, gradient: Ints, there: Ints, back: Ints, end: int) -> Ints:
    """Return the minimum time from the start of each pass of a micro-batch to the end of all."""
    down = gradient + np.roll(back, 1)
    down[0] = gradient[0]
    rest = [end]
    for step in (*down, *(forward + there)[::-1]):
        rest.append(rest[-1] + int(step))
    return np.array(rest[::-1], dtype=np.int64)


def _grid(values: Floats, unit: float) -> Ints:
    """Return times in whole units, `_ANY_TAIL` where there is no lower bound."""
    most = np.iinfo(np.int32).max
    grid = _units(np.maximum(0.0, values).ravel(), unit, most).reshape(values.shape)
    return np.where(values < 0, _ANY_TAIL, grid)


def _units(values: Iterable[float], unit: float, most: int) -> Ints:
    """Return times in whole units, -1 as it is; none longer than ``most``, which is too long."""
    return whole(value if value < 0 else min(most, value / unit + _ROUNDING) for value in values)
