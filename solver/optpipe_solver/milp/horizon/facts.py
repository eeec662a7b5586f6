"""Items and their context as the arrays that `propagation` works on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import Action, ActionType
from optpipe_solver.milp.horizon.items import Choice
from optpipe_solver.milp.horizon.knowledge import Cells, Facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_solver.milp.horizon.items import Item, Opening
    from optpipe_solver.milp.horizon.orders import HorizonItems

__all__ = ["cells_of", "facts_of"]

_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_COMPUTE = frozenset({_F, _I, _W, _B})
_ROUNDING = 1e-9
"""Deductions need more than this share of the horizon: path sums are rounded."""

Group = list["Item"]


def facts_of(owner: HorizonItems, items: list[Item]) -> Facts:
    """Return the arrays of all items of a model."""
    problem = owner.problem
    device = np.array([item.device for item in items], dtype=np.int64)
    numbers = np.arange(len(problem.devices))
    low = np.searchsorted(device, numbers, side="left").astype(np.int64)
    high = np.searchsorted(device, numbers, side="right").astype(np.int64)
    arcs = list(_arcs(owner, {item.action: item for item in items}))
    ends = [[*_pair(sources), *_pair(targets)] for sources, targets, _ in arcs]
    return Facts(
        duration=np.array([item.duration for item in items], dtype=np.float64),
        certain=np.array([item.presence is None for item in items], dtype=np.bool_),
        device=device,
        low=low,
        high=high,
        arcs=np.array(ends, dtype=np.int64).reshape(-1, 4),
        delay=np.array([delay for _, _, delay in arcs], dtype=np.float64),
        pushes=np.array([_sure(a, b) for a, b, _ in arcs], dtype=np.bool_),
        pulls=np.array([_sure(b, a) for a, b, _ in arcs], dtype=np.bool_),
        extra=np.array([_least_extra(owner, item) for item in items], dtype=np.int64),
        room=np.array([_room(owner, d) for d in range(len(problem.devices))], dtype=np.int64),
        orders=owner.tricks.implied_orders,
        memory=owner.tricks.memory_lag and owner.tricks.implied_orders,
        tolerance=_ROUNDING * max(1e-3, owner.horizon_ms),
    )


def _room(owner: HorizonItems, device: int) -> int:
    """Return the most bytes that the cells with compute items may add to a device."""
    room = owner.problem.devices[device].usable_bytes - owner.context.held_bytes[device]
    for cell in owner.open_cells(device, ActionType.RELEASE):
        if not owner.openings[cell].here & _COMPUTE:
            room += owner.problem.stages[cell[0]].offload_bytes
    return room


def _pair(group: Group) -> list[int]:
    return [*(item.index for item in group), -1][:2]


def _sure(group: Group, other: Group) -> bool:
    """Whether one of a group surely exists where the other group does."""
    if len(group) > 1 or group[0].presence is None:
        return True
    return len(other) == 1 and group[0].presence == other[0].presence


def _least_extra(owner: HorizonItems, item: Item) -> int:
    """Return the least bytes an item takes above those before it."""
    stage, kind, j = item.action
    if kind is _F and owner.is_open(Choice.RECOMPUTED, (stage, j)):
        held = owner.problem.stages[stage]
        return item.extra - (held.activation_bytes - (held.checkpoint_bytes or 0))
    return item.extra


def _arcs(owner: HorizonItems, item_of: dict[Action, Item]) -> Iterator[tuple[Group, Group, float]]:
    """Yield what waits for what: (alternatives before, alternatives behind, ms between)."""

    def group(stage: int, j: int, *kinds: ActionType) -> Group:
        found = (item_of.get(Action(stage, kind, j)) for kind in kinds)
        return [item for item in found if item is not None]

    problem = owner.problem
    last = len(problem.stages) - 1
    for s, j in owner.openings:
        forward, back = group(s, j, _F), group(s, j, _I, _B)
        reload, again = group(s, j, ActionType.RELOAD), group(s, j, ActionType.RECOMPUTE)
        away = problem.offload_ms(s) if owner.has((s, j), ActionType.OFFLOAD) else 0.0
        links: list[tuple[Group, Group, float]] = [
            (forward, back, 0.0),
            (group(s, j, _I), group(s, j, _W), 0.0),
            (forward, reload, away),
            (forward, again, 0.0),
            (reload, back, problem.reload_ms(s) if reload else 0.0),
            (again, back, 0.0),
        ]
        if s < last:
            there, home = problem.boundary_ms[s]
            links.append((forward, group(s + 1, j, _F), there))
            links.append((group(s + 1, j, _I, _B), back, home))
        yield from (link for link in links if link[0] and link[1])


def cells_of(owner: HorizonItems, items: list[Item]) -> Cells:
    """Return the (stage, micro-batch) pairs that have items, by device, as arrays."""
    index_of = {item.action: item.index for item in items}
    openings = sorted(
        (o for o in owner.openings.values() if o.here & _COMPUTE),
        key=lambda o: (owner.problem.stages[o.cell[0]].device, o.cell),
    )
    device = [owner.problem.stages[o.cell[0]].device for o in openings]
    numbers = np.arange(len(owner.problem.devices))
    rows = [_cell(owner, opening, index_of) for opening in openings]
    kept = np.array(rows, dtype=np.int64).reshape(-1, 11)
    return Cells(
        low=np.searchsorted(device, numbers, side="left").astype(np.int64),
        high=np.searchsorted(device, numbers, side="right").astype(np.int64),
        chain=np.ascontiguousarray(kept[:, 0:3]),
        fused=np.ascontiguousarray(kept[:, 3]),
        first=np.ascontiguousarray(kept[:, 4]),
        last=np.ascontiguousarray(kept[:, 5]),
        cost=np.ascontiguousarray(kept[:, 6:10]),
        lot=np.ascontiguousarray(kept[:, 10]),
    )


def _cell(owner: HorizonItems, opening: Opening, index_of: dict[Action, int]) -> list[int]:
    """Return chain (3), fused, first, last, cost (4) and lot of one cell."""
    stage, j = opening.cell
    chain = [index_of.get(Action(stage, kind, j), -1) for kind in (_F, _I, _W)]
    fused = index_of.get(Action(stage, _B, j), -1)
    if fused >= 0 and chain[1] < 0:
        # A B that surely exists stands for I and W at once.
        chain, fused = [chain[0], fused, fused], -1
    there = [k for k in range(3) if chain[k] >= 0]
    lot = stage if owner.fifo and not opening.may_fuse else -1
    return [*chain, fused, there[0], there[-1] + 1, *_costs(owner, opening), lot]


def _costs(owner: HorizonItems, opening: Opening) -> list[int]:
    """Return the least bytes a cell adds in each state, over what is open about it."""
    stage = owner.problem.stages[opening.cell[0]]
    checkpoint = stage.checkpoint_bytes or 0
    makes = checkpoint if opening.is_recomputed else stage.activation_bytes
    context = stage.weight_context_bytes
    gone = stage.offload_bytes if ActionType.RELEASE in opening.here else 0
    if _F in opening.here:
        saved = stage.activation_bytes - checkpoint if opening.may_recompute else 0
        return [0, makes - max(gone, saved), context, 0]
    # The forward is in the prefix: its bytes are counted there.
    if not opening.here & {_I, _B}:
        return [0, 0, 0, -context]
    net = stage.offload_bytes if ActionType.RELOAD in opening.here else 0
    net += stage.activation_bytes - checkpoint if ActionType.RECOMPUTE in opening.here else 0
    net -= gone
    done = net - stage.activation_bytes
    return [0, min(0, -gone, net), done + context, done]
