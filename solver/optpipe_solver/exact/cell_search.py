"""The search over cells: small problems with any menu, all devices at once, in any order.

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
from optpipe_solver.exact.general_search import unit_ms
from optpipe_solver.exact.layers import HorizonAnswer
from optpipe_solver.feasibility import fusing_may_pay, memory_binds, possible_modes
from optpipe_solver.incumbent import Goal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optpipe.problem import CellMode, Problem
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.budget import Stop
    from optpipe_solver.exact.cell_kernel import CellLayer
    from optpipe_solver.incumbent import Incumbent

__all__ = ["cells_can_search", "improve_by_cells", "search_cells"]

_METHOD = "cell-search"
_SLICE = 100
"""States that are expanded between two looks at whether to stop."""

_MOST_IN_LAYER = (4_000, 32_000, 256_000)
"""States in one layer, at most: a few hundred bytes each, and there are five layers."""

_MOST_STAGES = (63 - PLACE_BITS) // CELL_BITS
_MOST_CELLS = 32
_HALVINGS = 4
_ROUNDING = 1e-6


def _menus(problem: Problem) -> list[list[CellMode]]:
    """Return the modes that may be of use: where memory never binds, keep alone."""
    return [
        [menu[number] for number in numbers] if memory_binds(problem, stage.device) else [menu[0]]
        for stage, menu, numbers in zip(
            problem.stages, problem.menus, possible_modes(problem), strict=True
        )
    ]


def cells_can_search(problem: Problem) -> bool:
    """Whether a problem is small enough, and no pass may pair."""
    return (
        not problem.pairs
        and len(problem.stages) <= _MOST_STAGES
        and len(problem.stages) * problem.num_microbatches <= _MOST_CELLS
        and all(len(menu) <= 2**MODES_BITS for menu in _menus(problem))
    )


def search_cells(
    problem: Problem,
    horizon_ms: float,
    *,
    most_in_layer: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[HorizonAnswer, int]:
    """Ask whether all devices can be through within ``horizon_ms``; return how many states too.

    ``NONE`` proves that no schedule is that short. Unknown if one layer has more than
    ``most_in_layer`` states, or if told to stop.
    """
    model = _problem_of(problem, horizon_ms)
    m, num_stages, num_modes = problem.num_microbatches, *model.made.shape
    num_times = 1 + 2 * len(model.room) + 1 + int(max(_lanes(model)))
    size = m, num_stages, num_modes, num_times
    layers = [make_cell_layer(most_in_layer, *size) for _ in range(5)]
    layers[0].alive[0] = True
    layers[0].size[0] = 1
    work = make_cell_state(*size), make_cell_loads(num_stages), make_cell_loads(num_stages)
    met = 1
    for _ in range(m * num_stages * (3 + model.steps)):
        at = 0
        while at < layers[0].size[0]:
            at = expand_cells(model, tuple(layers), work, at, _SLICE)  # type: ignore[arg-type]
            if at < 0 or should_stop():
                return HorizonAnswer.UNKNOWN, met
        met += int(layers[0].size[0])
        if all(layer.size[0] == 0 for layer in layers[1:]):
            return HorizonAnswer.NONE, met
        _empty(layers[0])
        layers = [*layers[1:], layers[0]]
    return HorizonAnswer.FOUND, met


def _empty(layer: CellLayer) -> None:
    layer.first[:] = -1
    layer.size[0] = 0


def _lanes(model: CellProblem) -> Ints:
    return np.concatenate([model.lane_out, model.lane_home, model.group_out, model.group_home])


def _problem_of(problem: Problem, horizon_ms: float) -> CellProblem:
    """Return a problem with every time rounded down to whole units."""
    unit = unit_ms(problem, horizon_ms)
    horizon = floor(horizon_ms / unit + 1e-3)
    units = partial(_units, unit=unit, most=horizon + 1)
    model = relaxed(problem)
    is_span = problem.objective == "span"
    begin = end = np.zeros(len(problem.stages))
    if is_span:
        end = np.where(model.device == problem.stages[0].device, 0.0, ANYTIME)
    before, after = heads(model, refill(model), begin), tails(model, drain(model), end)
    menus = _menus(problem)
    width = max(map(len, menus))

    def table(value: Callable[[int, CellMode], float]) -> list[list[float]]:
        rows = [[value(s, mode) for mode in menu] for s, menu in enumerate(menus)]
        return [row + [0] * (width - len(row)) for row in rows]

    def times(value: Callable[[int, CellMode], float]) -> Ints:
        return np.array([units(row) for row in table(value)])

    def sizes(value: Callable[[int, CellMode], float]) -> Ints:
        return np.array(table(value), dtype=np.int64)

    def apart_ms(mode: CellMode) -> float:
        return mode.recompute_ms if mode.recompute == "apart" else -1.0

    stages = problem.stages
    fuses = [fusing_may_pay(problem, s) for s in range(len(stages))]
    lanes = _device_lanes(problem)
    last_i = np.array([units(row) for row in np.maximum(0.0, after.gradient)])
    up, down = (units(pair[way] for pair in problem.boundary_ms) for way in (0, 1))
    forward, least_i = units(model.forward), units(model.gradient)
    return CellProblem(
        num_microbatches=problem.num_microbatches,
        device=np.array(problem.placement, dtype=np.int64),
        number=np.array([len(menu) for menu in menus], dtype=np.int64),
        forward=forward,
        weight=units(stage.backward_weight_ms for stage in stages),
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
        made=sizes(lambda _, mode: mode.forward_bytes),
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
        least_w=units(model.weight),
        up=up,
        down=down,
        room=np.array([problem.room_bytes(d) for d in range(len(problem.devices))], dtype=np.int64),
        lane_out=lanes[0],
        lane_home=lanes[1],
        group_out=lanes[2],
        group_home=lanes[3],
        issued=np.array([not (d.half_duplex or d.pcie_group) for d in problem.devices]),
        rest=_rest(forward, least_i, up, down, int(last_i[0, 0])),
        head_f=np.array([units(row) for row in np.maximum(0.0, before.forward)]),
        last_f=np.array([units(row) for row in np.maximum(0.0, after.forward)]),
        last_i=last_i,
        last_w=np.array([units(row) for row in np.maximum(0.0, after.weight)]),
        home_device=stages[0].device if is_span else -1,
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


def _device_lanes(problem: Problem) -> tuple[Ints, Ints, Ints, Ints]:
    """Return each device's lanes out and home, and those of its group or -1."""
    number: dict[tuple[object, ...], int] = {}

    def lane(*name: object) -> int:
        return number.setdefault(name, len(number))

    rows = []
    for d, device in enumerate(problem.devices):
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


def improve_by_cells(best: Incumbent, stop: Stop) -> None:
    """Raise the bound below the best schedule known; work is counted in states met.

    Nothing here is random: where work is limited the run is a function of problem and start.
    """
    if best.programs is not None and cells_can_search(best.problem):
        for most in _MOST_IN_LAYER:
            if _settles(best, stop, most):
                break
    if not stop.spent:
        stop.spend(1)


def _settles(best: Incumbent, stop: Stop, most_in_layer: int) -> bool:
    """Ask just below the best schedule, then in halves between that and the bound; True = enough.

    It is not where a layer was full.
    """
    goal = Goal.of(best.problem, best.objective_ms)
    high_ms = horizon_ms = goal.horizon_ms
    is_enough = True
    for _ in range(1 + _HALVINGS):
        if best.is_optimal or stop.is_over() or not best.bound_ms < horizon_ms <= high_ms:
            break
        answer, met = search_cells(
            best.problem, horizon_ms, most_in_layer=most_in_layer, should_stop=stop.is_over
        )
        stop.spend(met)
        if answer is HorizonAnswer.NONE:
            best.offer_bound(min(goal.proven(horizon_ms), best.objective_ms), _METHOD)
        else:
            high_ms = horizon_ms
            is_enough &= answer is HorizonAnswer.FOUND
        horizon_ms = goal.between(best.bound_ms, high_ms)
    return is_enough
