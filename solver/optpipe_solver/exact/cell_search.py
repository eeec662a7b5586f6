"""The search over cells: any menu, shared lanes and span, few devices at a time, in any order.

A state is how far each micro-batch is; per cell between F and backward its mode and phase, and when
its last copy or RECOMPUTE ends; how many W wait; the clock; when compute and copy lanes are free;
under span when each device began. Layers count steps: every cell has as many, whatever its mode.
docs/exact.md says what is relaxed and left out, and why no schedule is missed.
"""

from __future__ import annotations

from functools import partial
from math import floor
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.bounds.heads_tails import ANYTIME, drain, heads, refill, tails
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.exact.cell_kernel import (
    CELL_BITS,
    MODES_BITS,
    PLACE_BITS,
    CellProblem,
    expand_cells,
    make_cell_layer,
    make_cell_loads,
    make_cell_state,
)
from optpipe_solver.exact.general_search import delays, unit_ms
from optpipe_solver.exact.layers import HorizonAnswer, LayeredOutcome
from optpipe_solver.feasibility import (
    fusing_may_pay,
    memory_binds,
    possible_modes,
    refuse_unless,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optpipe.problem import CellMode, Device, Problem
    from optpipe_solver.arrays import Floats, Ints

__all__ = ["cells_can_search", "search_cells"]

_SLICE = 100
"""States that are expanded between two looks at whether to stop."""

_MOST_STAGES = (63 - PLACE_BITS) // CELL_BITS
"""Codes have 64 bits."""

_MOST_CELLS = 32
_ROUNDING = 1e-6
"""Share of a unit that a time in ms may be off."""

_ANY_TAIL = -(1 << 40)
"""Units: of an action that may end at any time, as the clock is not its device's."""

_ALL_ROUNDING = 1e-3
"""Share of a unit that the times of a path may be off together."""


def _menus(problem: Problem, kept: Sequence[int]) -> list[list[CellMode]]:
    """Return the modes that may be of use: where memory never binds, keep alone."""
    possible = possible_modes(problem)
    return [
        _undominated([problem.menus[s][number] for number in possible[s]])
        if memory_binds(problem, problem.stages[s].device)
        else [problem.menus[s][0]]
        for s in kept
    ]


def _undominated(menu: list[CellMode]) -> list[CellMode]:
    """Leave out each mode that another could replace in any schedule, at the same times."""
    kept: list[CellMode] = []
    for number, mode in enumerate(menu):
        others = (*kept, *menu[number + 1 :])
        if not any(_dominates(other, mode) for other in others):
            kept.append(mode)
    return kept


def _dominates(one: CellMode, other: CellMode) -> bool:
    """Whether a mode asks for no action, time or byte that the other does not ask for then.

    Bytes of the other are the least there are between F and backward where it alone moves any.
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


def cells_can_search(problem: Problem, devices: Sequence[int]) -> bool:
    """Whether cells are few enough, micro-batches are equal, and no pass may pair."""
    kept = [s for device in devices for s in problem.stages_of[device]]
    return (
        not problem.pairs
        and problem.is_even
        and 1 <= len(kept) <= _MOST_STAGES
        and len(kept) * problem.num_microbatches <= _MOST_CELLS
        and all(len(menu) <= 2**MODES_BITS for menu in _menus(problem, kept))
    )


def search_cells(
    problem: Problem,
    devices: Sequence[int],
    horizon_ms: float,
    *,
    most_states: int,
    most_in_layer: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> LayeredOutcome:
    """Ask whether some devices can be through within ``horizon_ms``, the others being no obstacle.

    As `general_search.search_general`.
    """
    refuse_unless(
        cells_can_search(problem, devices),
        "search_cells",
        problem,
        f"at most {_MOST_CELLS} cells of 1 to {_MOST_STAGES} stages, equal micro-batches in a free "
        f"order, no pairs, and at most {2**MODES_BITS} modes a stage",
    )
    model = _problem_of(problem, horizon_ms, devices)
    m, num_stages, num_modes = problem.num_microbatches, *model.held_bytes.shape
    num_times = 1 + 2 * len(model.room) + 1 + max(map(int, _lanes(model)))
    size = m, num_stages, num_modes, num_times
    layers = [make_cell_layer(most_in_layer, *size) for _ in range(5)]
    layers[0].cells[0, :, 0] = model.head
    layers[0].alive[0] = True
    layers[0].size[0] = 1
    work = make_cell_state(*size), make_cell_loads(num_stages), make_cell_loads(num_stages)
    met = 1
    for _ in range(m * num_stages * (3 + model.steps)):
        at = 0
        while at < layers[0].size[0]:
            at = expand_cells(model, tuple(layers), work, at, _SLICE)  # type: ignore[arg-type]
            if at < 0 or met > most_states or should_stop():
                return LayeredOutcome(HorizonAnswer.UNKNOWN, met)
        layers[0].first[:] = -1
        layers[0].size[0] = 0
        layers = [*layers[1:], layers[0]]
        met += int(layers[0].size[0])
        if all(layer.size[0] == 0 for layer in layers):
            return LayeredOutcome(HorizonAnswer.NONE, met)
    last = layers[0]
    ends = last.end[: int(last.size[0])][last.alive[: int(last.size[0])]]
    found_ms = int(ends.min()) * unit_ms(problem, horizon_ms)
    return LayeredOutcome(HorizonAnswer.FOUND, met, found_ms=found_ms)


def _lanes(model: CellProblem) -> Ints:
    return np.concatenate([model.lane_out, model.lane_home, model.group_out, model.group_home])


def _problem_of(problem: Problem, horizon_ms: float, devices: Sequence[int]) -> CellProblem:
    """Return some devices of a problem with every time rounded down to whole units."""
    unit = unit_ms(problem, horizon_ms)
    horizon = floor(horizon_ms / unit + _ALL_ROUNDING)
    units = partial(_units, unit=unit, most=horizon + 1)
    model = relaxed(problem)
    is_span = problem.objective == "span"
    begin = end = np.zeros(len(problem.stages))
    if is_span:
        end = np.where(model.device == problem.stages[0].device, 0.0, ANYTIME)
    before, after = heads(model, refill(model), begin), tails(model, drain(model), end)
    kept = [s for s, stage in enumerate(problem.stages) if stage.device in devices]
    index = {device: number for number, device in enumerate(devices)}
    menus = _menus(problem, kept)
    width = max(map(len, menus))

    def table(value: Callable[[int, CellMode], float]) -> list[list[float]]:
        rows = [[value(s, mode) for mode in menu] for s, menu in zip(kept, menus, strict=True)]
        return [row + [0] * (width - len(row)) for row in rows]

    def times(value: Callable[[int, CellMode], float]) -> Ints:
        return np.array([units(row) for row in table(value)])

    def sizes(value: Callable[[int, CellMode], float]) -> Ints:
        return np.array(table(value), dtype=np.int64)

    def apart_ms(mode: CellMode) -> float:
        return mode.recompute_ms if mode.recompute == "apart" else -1.0

    stages = problem.stages
    fuses = [fusing_may_pay(problem, s) for s in range(len(stages))]
    lanes = _device_lanes([problem.devices[device] for device in devices])

    def earliest(rows: Floats) -> Ints:
        return np.array([units(row) for row in np.maximum(0.0, rows[:, kept])])

    def following(rows: Floats) -> Ints:
        """Return tails; of what stage 0's device need not wait for under span, none."""
        return np.where(rows[:, kept] < 0, _ANY_TAIL, earliest(rows))

    last_i = following(after.gradient)
    head, up_ms, down_ms = delays(model, kept)
    up, down = units(up_ms), units(down_ms)
    forward, least_i = units(model.forward[kept]), units(model.gradient[kept])
    return CellProblem(
        num_microbatches=problem.num_microbatches,
        device=np.array([index[stages[s].device] for s in kept], dtype=np.int64),
        number=np.array([len(menu) for menu in menus], dtype=np.int64),
        forward=forward,
        weight=units(stages[s].backward_weight_ms for s in kept),
        gradient=times(lambda s, mode: stages[s].backward_input_ms + mode.inside_ms),
        fused=times(
            lambda s, mode: stages[s].fused_backward_ms + mode.inside_ms if fuses[s] else -1.0
        ),
        inside=times(lambda _, mode: mode.inside_ms),
        again=times(lambda _, mode: apart_ms(mode)),
        extra=units(
            min(mode.inside_ms + max(0.0, apart_ms(mode)) for mode in menu) for menu in menus
        ),
        moved=sizes(lambda _, mode: mode.offload_bytes),
        out=times(lambda s, mode: _copy_ms(problem.offload_ms, s, mode)),
        home=times(lambda s, mode: _copy_ms(problem.reload_ms, s, mode)),
        held_bytes=sizes(lambda _, mode: mode.forward_bytes),
        there=sizes(lambda _, mode: mode.backward_bytes),
        context=sizes(lambda _, mode: mode.weight_context_bytes),
        need_f=sizes(lambda _, mode: mode.forward_bytes + mode.forward_workspace_bytes),
        need_i=sizes(
            lambda _, mode: (
                max(mode.inside_bytes, mode.weight_context_bytes - mode.backward_bytes)
                + mode.backward_input_workspace_bytes
            )
        ),
        need_w=sizes(lambda _, mode: mode.backward_weight_workspace_bytes),
        need_b=sizes(lambda _, mode: mode.inside_bytes + mode.backward_workspace_bytes),
        need_again=sizes(
            lambda _, mode: (
                mode.backward_bytes - mode.forward_bytes + mode.recompute_workspace_bytes
            )
        ),
        least_i=least_i,
        least_w=units(model.weight[kept]),
        up=up,
        down=down,
        head=int(units([head])[0]),
        room=np.array([problem.room_bytes(device) for device in devices], dtype=np.int64),
        lane_out=lanes[0],
        lane_home=lanes[1],
        group_out=lanes[2],
        group_home=lanes[3],
        issued=np.array([not _shares(problem.devices[device]) for device in devices]),
        rest=_rest(forward, least_i, up, down, int(last_i[0, 0])),
        head_f=earliest(before.forward),
        last_f=following(after.forward),
        last_i=last_i,
        last_w=following(after.weight),
        home_device=index.get(stages[0].device, len(devices)) if is_span else -1,
        steps=max(
            2 * (mode.offload_bytes > 0) + (mode.recompute == "apart")
            for menu in menus
            for mode in menu
        ),
        horizon=horizon,
    )


def _units(values: Iterable[float] | Floats, *, unit: float, most: int) -> Ints:
    """Return times in whole units, -1 as it is; none longer than ``most``, which is too long."""
    whole = [-1 if ms < 0 else min(most, floor(ms / unit + _ROUNDING)) for ms in values]
    return np.array(whole, dtype=np.int64)


def _copy_ms(copy: Callable[[int, int], float], s: int, mode: CellMode) -> float:
    return copy(s, mode.offload_bytes) if mode.offload_bytes else 0.0


def _shares(device: Device) -> bool:
    """Whether copies of a device may wait for others than those of its direction."""
    return device.half_duplex or device.pcie_group is not None


def _device_lanes(devices: Sequence[Device]) -> tuple[Ints, Ints, Ints, Ints]:
    """Return each device's lanes out and home, and those of its group or -1."""
    number: dict[tuple[object, ...], int] = {}

    def lane(*name: object) -> int:
        return number.setdefault(name, len(number))

    rows = []
    for d, device in enumerate(devices):
        out, home = ("both", "both") if device.half_duplex else ("out", "home")
        group = device.pcie_group
        rows.append(
            (
                lane(d, out),
                lane(d, home),
                -1 if group is None else lane("group", group, "out"),
                -1 if group is None else lane("group", group, "home"),
            )
        )
    out_lanes, home_lanes, out_groups, home_groups = np.array(rows, dtype=np.int64).T.copy()
    return out_lanes, home_lanes, out_groups, home_groups


def _rest(forward: Ints, gradient: Ints, up: Ints, down: Ints, end: int) -> Ints:
    """Return the least time from the start of each pass of a micro-batch to the end of all."""
    backwards = gradient.copy()
    backwards[1:] += down[:-1]
    rest = [end]
    for step in (*backwards, *(forward + up)[::-1]):
        rest.append(rest[-1] + int(step))
    return np.array(rest[::-1], dtype=np.int64)
