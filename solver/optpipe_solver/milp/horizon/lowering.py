"""From a solution of the full-horizon model to programs.

Only orders and choices are read, never times: HiGHS's tolerances times a large big-M let times
overlap slightly. The caller checks and simulates the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe_solver.milp.highs import value_of
from optpipe_solver.milp.horizon.items import Choice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.action import Program, Programs
    from optpipe_solver.milp.highs import Linear, Variable
    from optpipe_solver.milp.horizon.context import Cell
    from optpipe_solver.milp.horizon.items import Item
    from optpipe_solver.milp.horizon.variables import HorizonVariables

    Values = Mapping[Variable, float]

__all__ = ["lower"]


def lower(v: HorizonVariables, values: Values) -> Programs:
    """Return the programs that a solution stands for, what is fixed around it included."""
    devices = range(len(v.problem.devices))
    context = v.items.context
    if context.window is None:
        return tuple(_program(v, values, device) for device in devices)
    return tuple(
        (*context.prefix[device], *_program(v, values, device), *context.suffix[device])
        for device in devices
    )


def _program(v: HorizonVariables, values: Values, device: int) -> Program:
    order = _ordered(v, values, device)
    position = {item: at for at, item in enumerate(order)}
    before: dict[int, list[Action]] = {}
    for cell in _away(v, values, device, ActionType.RELEASE):
        at = _release_position(v, values, cell, position)
        before.setdefault(at, []).append(Action(cell[0], ActionType.RELEASE, cell[1]))
    behind = _offloads(v, values, _away(v, values, device, ActionType.OFFLOAD), position)
    program: list[Action] = [*behind.get(-1, [])]
    for at, item in enumerate(order):
        program += before.get(at, [])
        program.append(item.action)
        program += behind.get(at, [])
    return (*program, *before.get(len(order), []))


def _away(v: HorizonVariables, values: Values, device: int, kind: ActionType) -> list[Cell]:
    """Return the cells with an OFFLOAD or RELEASE here, in the order of their copies out."""
    cells = [
        cell
        for cell in v.items.open_cells(device, kind)
        if _is_one(v.chosen(Choice.OFFLOADED, *cell), values)
    ]
    # A copy that started in the prefix comes before every copy that starts here.
    return sorted(cells, key=lambda c: values.get(v.d2h[c], 0.0) if c in v.d2h else -1.0)


def _ordered(v: HorizonVariables, values: Values, device: int) -> list[Item]:
    """Return the device's existing items in order: by how many others stand before each."""
    there = [item for item in v.items.by_device[device] if _is_one(v.present(item), values)]
    rank = {
        item: sum(_is_one(v.before(other, item), values) for other in there if other is not item)
        for item in there
    }
    # PuLP hands no variable on that stands in no constraint: its start is free.
    return sorted(there, key=lambda item: (rank[item], values.get(v.start[item], item.earliest)))


def _release_position(
    v: HorizonVariables, values: Values, cell: Cell, position: dict[Item, int]
) -> int:
    """Return the first item that counts the cell's bytes as released: its RELOAD at the latest.

    At the window's end where the RELOAD comes behind that.
    """
    reload = v.item(cell, ActionType.RELOAD)
    at = len(position) if reload is None else position[reload]
    for (other, item), released in v.released.items():
        if other == cell and item in position and _is_one(released, values):
            at = min(at, position[item])
    return at


def _offloads(
    v: HorizonVariables, values: Values, cells: list[Cell], position: dict[Item, int]
) -> dict[int, list[Action]]:
    """Issue every OFFLOAD as early as its forward, the lane's order and host memory allow."""
    behind: dict[int, list[Action]] = {}
    at = -1
    for cell in cells:
        forward = v.item(cell, ActionType.FORWARD)
        if forward is not None:
            at = max(at, position[forward])
        for (other, later), gone in v.host_after.items():
            if later == cell and other in cells and _is_one(gone, values):
                at = max(at, _backward_position(v, other, position))
        behind.setdefault(at, []).append(Action(cell[0], ActionType.OFFLOAD, cell[1]))
    return behind


def _backward_position(v: HorizonVariables, cell: Cell, position: dict[Item, int]) -> int:
    for kind in (ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD):
        item = v.item(cell, kind)
        if item is not None and item in position:
            return position[item]
    return 0


def _is_one(expression: Linear, values: Values) -> bool:
    return value_of(expression, values) > 0.5
