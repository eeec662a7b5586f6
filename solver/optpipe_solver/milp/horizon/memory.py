"""Device memory: a sum over orders, never over times; numbers are those of ``docs/milp.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe_solver.milp.highs import at_least, total
from optpipe_solver.milp.horizon.items import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_solver.milp.highs import Constraint, Linear
    from optpipe_solver.milp.horizon.items import Item
    from optpipe_solver.milp.horizon.variables import HorizonVariables

__all__ = ["checkpoint_counts_once_kept", "fits_device_memory"]

_LEAST_WEIGHT = 1e-6
"""HiGHS drops coefficients below 1e-9, and those near its tolerance decide nothing."""


def fits_device_memory(v: HorizonVariables) -> Iterator[Constraint]:
    """At every item that takes bytes, what stands before it and itself fit the device. (8)."""
    for device, row in enumerate(v.items.by_device):
        if not v.items.tight[device]:
            continue
        limit = v.problem.devices[device].usable_bytes - v.items.context.held_bytes[device]
        unit = max([1, *(abs(item.delta) for item in row), *(item.extra for item in row)])
        for item in row:
            if item.extra > 0 and not (v.tricks.few_rows and _must_fit(v, row, item, limit)):
                held = _held_before(v, row, item, unit) + _taken_by(v, item, unit)
                yield at_least(limit / unit - held, 0.0)


def _must_fit(v: HorizonVariables, row: list[Item], item: Item, limit: int) -> bool:
    """Whether the item fits whatever stands before it: all that adds, only what surely frees."""
    most = item.extra
    for other in row:
        if other is item or v.items.implied(item, other):
            continue
        sure = other.presence is None and v.items.implied(other, item)
        if other.delta > 0 or sure:
            most += other.delta
    return most <= limit


def _held_before(v: HorizonVariables, row: list[Item], item: Item, unit: int) -> Linear:
    terms: list[Linear] = []
    for other in row:
        if other is item or other.delta == 0:
            continue
        terms.append(_weighed(other.delta / unit, v.before(other, item)))
        stage, kind, j = other.action
        if kind is ActionType.FORWARD and v.items.is_open(Choice.RECOMPUTED, (stage, j)):
            saved = _checkpoint_saving(v, stage, unit)
            terms.append(_weighed(-saved, _checkpointed(v, other, item)))
    for cell in v.items.open_cells(item.device, ActionType.RELEASE):
        forward = v.item(cell, ActionType.FORWARD)
        if forward is not None and (forward is item or v.items.implied(item, forward)):
            continue
        moved = v.problem.stages[cell[0]].offload_bytes / unit
        terms.append(_weighed(-moved, v.releases(cell, item)))
    return total(terms)


def _taken_by(v: HorizonVariables, item: Item, unit: int) -> Linear:
    stage, kind, j = item.action
    taken = _weighed(item.extra / unit, v.present(item))
    if kind is ActionType.FORWARD and v.items.is_open(Choice.RECOMPUTED, (stage, j)):
        saved = _checkpoint_saving(v, stage, unit)
        taken = taken + _weighed(-saved, v.chosen(Choice.RECOMPUTED, stage, j))
    return taken


def _weighed(weight: float, flag: Linear) -> Linear:
    """Return weight x flag, or the least that can be where HiGHS might take the weight for zero.

    So a device with one tiny stage is relaxed, never proven to fail.
    """
    if abs(weight) >= _LEAST_WEIGHT:
        return weight * flag
    return min(weight, 0.0)


def _checkpoint_saving(v: HorizonVariables, stage: int, unit: int) -> float:
    held = v.problem.stages[stage]
    return (held.activation_bytes - (held.checkpoint_bytes or 0)) / unit


def _checkpointed(v: HorizonVariables, forward: Item, item: Item) -> Linear:
    """Return 1 only where the forward stands before the item and keeps just its checkpoint."""
    key = ((forward.action.stage, forward.action.microbatch), item)
    if key not in v.checkpointed:
        v.checkpointed[key] = v.model.continuous(
            f"checkpointed_{forward.action}_{item.action}", 0.0, 1.0
        )
    return v.checkpointed[key]


def checkpoint_counts_once_kept(v: HorizonVariables) -> Iterator[Constraint]:
    """The saving of a recomputed forward counts only where the forward stands before. (9)."""
    for ((stage, j), item), saved in v.checkpointed.items():
        forward = v.items.of_action[Action(stage, ActionType.FORWARD, j)]
        yield at_least(v.chosen(Choice.RECOMPUTED, stage, j) - saved, 0.0)
        yield at_least(v.before(forward, item) - saved, 0.0)
