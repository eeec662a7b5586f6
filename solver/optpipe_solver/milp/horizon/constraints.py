"""The constraints of the full-horizon model, one function per family, listed in order at the end.

Numbers in docstrings are those of ``docs/milp.md``.

Times are ms, memory is in units of the device's largest item so that coefficients stay near 1.
Where a family is a relaxation of `optpipe.simulate` it says so: the model's optimum is then still a
valid bound, and its solutions are evaluated after lowering.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from optpipe.schedule import Action, ActionType, Pass
from optpipe_solver.milp.highs import at_least, total
from optpipe_solver.milp.horizon.orders import HorizonChoice
from optpipe_solver.milp.horizon.variables import exclusive
from optpipe_solver.milp.horizon.variables import relaxed as _relaxed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_solver.milp.highs import Constraint, Linear, Variable
    from optpipe_solver.milp.horizon.orders import Cell, HorizonItem
    from optpipe_solver.milp.horizon.variables import HorizonVariables

__all__ = [
    "all_constraints",
    "checkpoint_counts_once_kept",
    "fits_device_memory",
    "loads",
]


_BACKWARD = (ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD)
_LAST = (ActionType.BACKWARD_WEIGHT, ActionType.FULL_BACKWARD)


def one_after_another(v: HorizonVariables) -> Iterator[Constraint]:
    """Of two items of a device that both exist, one ends before the other starts. (1)."""
    for row in v.items.by_device:
        for a, b in combinations(row, 2):
            if v.items.implied(a, b) and v.items.implied(b, a):
                continue
            yield from _after(v, a, b)
            yield from _after(v, b, a)
            if a.presence is not None and b.presence is not None:
                yield from _ordered_if_both(v, a, b)


def _after(v: HorizonVariables, a: HorizonItem, b: HorizonItem) -> Iterator[Constraint]:
    order = v.before(a, b)
    if isinstance(order, float) and order == 0.0:
        return
    big = a.latest + a.duration - b.earliest
    if big > 0:
        yield _relaxed(v.start[b] - v.start[a] - a.duration, order, big)


def _ordered_if_both(v: HorizonVariables, a: HorizonItem, b: HorizonItem) -> Iterator[Constraint]:
    """Two optional items: some order where both exist, none where one does not."""
    ab, ba = v.before(a, b), v.before(b, a)
    both = v.present(a) + v.present(b) - 1.0
    yield at_least(ab + ba - both, 0.0)
    for order in (ab, ba):
        for item in (a, b):
            yield at_least(v.present(item) - order, 0.0)


def no_order_with_the_absent(v: HorizonVariables) -> Iterator[Constraint]:
    """An order binary of an optional item is 0 where the item does not exist. (2)."""
    for (a, b), order in v.order.items():
        for item in (a, b):
            if item.presence is not None:
                yield at_least(v.present(item) - order, 0.0)


def never_together(v: HorizonVariables) -> Iterator[Constraint]:
    """Two items of which both orders are excluded do not both exist. (14)."""
    for row in v.items.by_device:
        for a, b in combinations(row, 2):
            neither_way = v.items.implied(a, b) and v.items.implied(b, a)
            if neither_way and not exclusive(a.presence, b.presence):
                yield at_least(1.0 - v.present(a) - v.present(b), 0.0)


def data_arrives(v: HorizonVariables) -> Iterator[Constraint]:
    """A pass starts when the pass it needs has ended and its output has arrived. (3)."""
    last = len(v.problem.stages) - 1
    for item in (item for row in v.items.by_device for item in row):
        stage, kind, j, *_ = item.action
        if kind is ActionType.FORWARD and stage > 0:
            delay = v.problem.boundary_ms[stage - 1][0]
            yield from _follows(v, Pass(False, stage - 1, j), item, delay)
        elif kind in _BACKWARD and stage == last:
            yield from _follows(v, Pass(False, stage, j), item, 0.0)
        elif kind in _BACKWARD:
            delay = v.problem.boundary_ms[stage][1]
            yield from _follows(v, Pass(True, stage + 1, j), item, delay)


def _follows(
    v: HorizonVariables, source: Pass, item: HorizonItem, delay: float
) -> Iterator[Constraint]:
    kinds = _BACKWARD if source.backward else (ActionType.FORWARD,)
    for kind in kinds:
        producer = v.items.of_action.get(Action(source.stage, kind, source.microbatch))
        if producer is None:
            continue
        gap = v.start[item] - v.start[producer] - producer.duration - delay
        big = producer.latest + producer.duration + delay - item.earliest
        exists = v.present(producer) + v.present(item) - 1.0
        yield _relaxed(gap, exists, big)


def shrunk_once(v: HorizonVariables) -> Iterator[Constraint]:
    """A (stage, micro-batch) is kept, offloaded or recomputed: one of the three. (4)."""
    for row in v.items.by_device:
        for item in row:
            stage, kind, j, *_ = item.action
            offload_is_open = v.items.is_open(HorizonChoice.OFFLOADED, (stage, j))
            if kind is ActionType.RECOMPUTE and offload_is_open:
                both = v.chosen(HorizonChoice.OFFLOADED, stage, j) + v.chosen(
                    HorizonChoice.RECOMPUTED, stage, j
                )
                yield at_least(1.0 - both, 0.0)


def transfers_in_turn(v: HorizonVariables) -> Iterator[Constraint]:
    """OFFLOAD starts after its forward, RELOAD after OFFLOAD and its issue, backward after it. (5).

    A RELOAD also starts no earlier than RELEASE, which waits for the OFFLOAD's end.
    """
    for device in range(len(v.problem.devices)):
        for cell in v.items.open_cells(device, ActionType.OFFLOAD):
            forward = v.items.of_action[Action(cell[0], ActionType.FORWARD, cell[1])]
            yield at_least(v.d2h[cell] - v.start[forward] - forward.duration, 0.0)
            yield from _copy_back(v, cell)


def _copy_back(v: HorizonVariables, cell: Cell) -> Iterator[Constraint]:
    stage, j = cell
    reload = v.items.of_action[Action(stage, ActionType.RELOAD, j)]
    chosen = v.chosen(HorizonChoice.OFFLOADED, stage, j)
    away = v.problem.offload_ms(stage)
    yield _relaxed(v.start[reload] - v.d2h[cell] - away, chosen, v.top + away)
    yield _relaxed(v.h2d[cell] - v.start[reload], chosen, v.top)
    back = v.problem.reload_ms(stage)
    for kind in _BACKWARD:
        backward = v.items.of_action.get(Action(stage, kind, j))
        if backward is not None:
            gap = v.start[backward] - v.h2d[cell] - back
            yield _relaxed(gap, chosen + v.present(backward) - 1.0, v.top + back)


def transfers_share_lanes(v: HorizonVariables) -> Iterator[Constraint]:
    """Transfers that share a lane go one after the other. (6).

    Within one device and direction a copy back goes in the order of its issue. Between devices of
    a PCIe group, and between the directions of a half-duplex device, any order is allowed here,
    while the simulator goes by issue time: a relaxation.
    """
    transfers = [
        Action(cell[0], kind, cell[1])
        for device in range(len(v.problem.devices))
        for kind in (ActionType.OFFLOAD, ActionType.RELOAD)
        for cell in v.items.open_cells(device, kind)
    ]
    for x, y in combinations(transfers, 2):
        if not _share_a_lane(v, x, y):
            continue
        both = _happens(v, x) + _happens(v, y) - 2.0
        yield from _transfer_after(v, x, y, both)
        yield from _transfer_after(v, y, x, both)
        if x.type is y.type is ActionType.RELOAD and _device(v, x) == _device(v, y):
            yield from _issued_in_lane_order(v, x, y)


def _share_a_lane(v: HorizonVariables, x: Action, y: Action) -> bool:
    first, second = v.problem.devices[_device(v, x)], v.problem.devices[_device(v, y)]
    if _device(v, x) == _device(v, y):
        if (x.stage, x.microbatch) == (y.stage, y.microbatch):
            return False
        return x.type is y.type or first.half_duplex
    return (
        x.type is y.type
        and first.pcie_group is not None
        and (first.pcie_group == second.pcie_group)
    )


def _transfer_after(
    v: HorizonVariables, x: Action, y: Action, both: Linear
) -> Iterator[Constraint]:
    length = _transfer_ms(v, x)
    gap = v.transfer_start(y) - v.transfer_start(x) - length
    yield _relaxed(gap, v.goes_first(x, y) + both, v.top + length)


def _issued_in_lane_order(v: HorizonVariables, x: Action, y: Action) -> Iterator[Constraint]:
    a, b = v.items.of_action[x], v.items.of_action[y]
    for first, second, goes in ((a, b, v.goes_first(x, y)), (b, a, v.goes_first(y, x))):
        both = v.present(first) + v.present(second) - 1.0
        yield at_least(v.before(first, second) - goes - both + 1.0, 0.0)


def release_waits_for_the_copy(v: HorizonVariables) -> Iterator[Constraint]:
    """An item counts bytes as released only if it starts after their copy has ended. (7)."""
    for (cell, item), released in v.released.items():
        away = v.problem.offload_ms(cell[0])
        copied = v.d2h[cell] + away
        yield at_least(v.chosen(HorizonChoice.OFFLOADED, *cell) - released, 0.0)
        yield at_least(v.present(item) - released, 0.0)
        yield _relaxed(v.start[item] - copied, released, v.top + away)


def fits_host_memory(v: HorizonVariables) -> Iterator[Constraint]:
    """The offloaded bytes of a host's devices, each at its peak, fit the host. (10)."""
    for host in v.problem.hosts:
        if host.memory_bytes is None:
            continue
        peaks = []
        for index, device in enumerate(v.problem.devices):
            cells = v.items.open_cells(index, ActionType.OFFLOAD)
            if device.host != host.name or not cells:
                continue
            peaks.append(v.host_peak(index))
            yield from _host_peak_of(v, cells, index)
        if peaks:
            yield at_least(host.memory_bytes / v.host_unit - total(peaks), 0.0)


def _host_peak_of(v: HorizonVariables, cells: list[Cell], device: int) -> Iterator[Constraint]:
    size = {cell: v.problem.stages[cell[0]].offload_bytes / v.host_unit for cell in cells}
    everything = sum(size.values())
    for cell in cells:
        chosen = v.chosen(HorizonChoice.OFFLOADED, *cell)
        on_host: list[Linear] = [size[cell] * chosen]
        for other in cells:
            if other != cell:
                yield from _on_host_when_issued(v, other, cell)
                on_host.append(size[other] * v.on_host[other, cell])
        excess = v.host_peak(device) - total(on_host) + everything * (1.0 - chosen)
        yield at_least(excess, 0.0)


def _on_host_when_issued(v: HorizonVariables, other: Cell, cell: Cell) -> Iterator[Constraint]:
    """Another copy is there unless it is issued later or its backward has started before."""
    x, y = (Action(c[0], ActionType.OFFLOAD, c[1]) for c in (other, cell))
    gone, there = v.host_pair(other, cell)
    yield from _gone_only_after_backward(v, other, cell, gone)
    both = _happens(v, x) + _happens(v, y) - 2.0
    yield at_least(there - v.goes_first(x, y) - both + gone, 0.0)


def _gone_only_after_backward(
    v: HorizonVariables, other: Cell, cell: Cell, gone: Variable
) -> Iterator[Constraint]:
    """A copy is gone from the host only for transfers issued after its backward."""
    for kind in _BACKWARD:
        backward = v.items.of_action.get(Action(other[0], kind, other[1]))
        if backward is not None:
            gap = v.d2h[cell] - v.start[backward] - backward.duration
            exists = gone + v.present(backward) - 1.0
            yield _relaxed(gap, exists, v.top)


def reloads_have_one_order(v: HorizonVariables) -> Iterator[Constraint]:
    """RELOADs take no time in the program, so their order needs its own transitivity. (11)."""
    for device in range(len(v.problem.devices)):
        row = v.items.by_device[device]
        items = [item for item in row if item.action.type is ActionType.RELOAD]
        for a, b, c in combinations(items, 3):
            yield at_least(2.0 - v.before(a, b) - v.before(b, c) - v.before(c, a), 0.0)
            yield at_least(2.0 - v.before(a, c) - v.before(c, b) - v.before(b, a), 0.0)


def ends_within_length(v: HorizonVariables) -> Iterator[Constraint]:
    """The objective covers every item, and a stage's gradient reduction after its last. (12).

    Several reductions of one device would queue; here each stands alone: a relaxation.
    """
    for device, row in enumerate(v.items.by_device):
        origin: Linear = 0.0
        if v.problem.objective == "span":
            origin = v.first_start[device]
            for item in row:
                if item.action.type is ActionType.FORWARD:
                    yield at_least(v.start[item] - origin, 0.0)
        for item in row:
            if item.action.type in _LAST:
                after = item.duration + v.problem.stages[item.action.stage].grad_sync_ms
                gap = v.length - v.start[item] - after + origin
                yield _relaxed(gap, v.present(item), v.top + after)


def all_constraints(v: HorizonVariables) -> Iterator[Constraint]:
    """Return every constraint of the model, family by family."""
    yield from one_after_another(v)
    yield from never_together(v)
    yield from data_arrives(v)
    yield from shrunk_once(v)
    yield from transfers_in_turn(v)
    yield from transfers_share_lanes(v)
    yield from fits_device_memory(v)
    yield from release_waits_for_the_copy(v)
    yield from checkpoint_counts_once_kept(v)
    yield from fits_host_memory(v)
    yield from reloads_have_one_order(v)
    yield from ends_within_length(v)
    yield from loads(v)
    yield from no_order_with_the_absent(v)


def _happens(v: HorizonVariables, transfer: Action) -> Linear:
    return v.chosen(HorizonChoice.OFFLOADED, transfer.stage, transfer.microbatch)


def _device(v: HorizonVariables, transfer: Action) -> int:
    return v.problem.stages[transfer.stage].device


def _transfer_ms(v: HorizonVariables, transfer: Action) -> float:
    if transfer.type is ActionType.OFFLOAD:
        return v.problem.offload_ms(transfer.stage)
    return v.problem.reload_ms(transfer.stage)


# --- Device memory: a sum over orders, never over times; numbers are those of ``docs/milp.md``.

_LEAST_WEIGHT = 1e-6
"""HiGHS drops coefficients below 1e-9, and those near its tolerance decide nothing."""


def fits_device_memory(v: HorizonVariables) -> Iterator[Constraint]:
    """At every item that takes bytes, what stands before it and itself fit the device. (8)."""
    for device, row in enumerate(v.items.by_device):
        if not v.items.tight[device]:
            continue
        limit = v.problem.room_bytes(device)
        unit = max([1, *(abs(item.delta) for item in row), *(item.extra for item in row)])
        for item in row:
            if item.extra > 0:
                used = _held_before(v, row, item, unit) + _taken_by(v, item, unit)
                yield at_least(limit / unit - used, 0.0)


def _held_before(
    v: HorizonVariables, row: list[HorizonItem], item: HorizonItem, unit: int
) -> Linear:
    terms: list[Linear] = []
    for other in row:
        if other is item or other.delta == 0:
            continue
        terms.append(_weighed(other.delta / unit, v.before(other, item)))
        stage, kind, j, *_ = other.action
        if kind is ActionType.FORWARD and v.items.is_open(HorizonChoice.RECOMPUTED, (stage, j)):
            saved = _checkpoint_saving(v, stage, unit)
            terms.append(_weighed(-saved, _checkpointed(v, other, item)))
    for cell in v.items.open_cells(item.device, ActionType.RELEASE):
        forward = v.items.of_action[Action(cell[0], ActionType.FORWARD, cell[1])]
        if forward is item or v.items.implied(item, forward):
            continue
        moved = v.problem.stages[cell[0]].offload_bytes / unit
        terms.append(_weighed(-moved, v.releases(cell, item)))
    return total(terms)


def _taken_by(v: HorizonVariables, item: HorizonItem, unit: int) -> Linear:
    stage, kind, j, *_ = item.action
    taken = _weighed(item.extra / unit, v.present(item))
    if kind is ActionType.FORWARD and v.items.is_open(HorizonChoice.RECOMPUTED, (stage, j)):
        saved = _checkpoint_saving(v, stage, unit)
        taken = taken + _weighed(-saved, v.chosen(HorizonChoice.RECOMPUTED, stage, j))
    return taken


def _weighed(weight: float, flag: Linear) -> Linear:
    """Return weight x flag, or the least that can be where HiGHS might take the weight for zero.

    So a device with one tiny stage is relaxed, never proven to fail.
    """
    if abs(weight) >= _LEAST_WEIGHT:
        return weight * flag
    return min(weight, 0.0)


def _checkpoint_saving(v: HorizonVariables, s: int, unit: int) -> float:
    stage = v.problem.stages[s]
    return (stage.activation_bytes - (stage.checkpoint_bytes or 0)) / unit


def _checkpointed(v: HorizonVariables, forward: HorizonItem, item: HorizonItem) -> Linear:
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
        yield at_least(v.chosen(HorizonChoice.RECOMPUTED, stage, j) - saved, 0.0)
        yield at_least(v.before(forward, item) - saved, 0.0)


# --- Rows that cut off no schedule but much of the linear relaxation; numbers as in `constraints`.


def loads(v: HorizonVariables) -> Iterator[Constraint]:
    """An item starts after all that stands before it, and the length covers all behind it. (13).

    t_b >= head + sum of d_a y_ab, and L >= t_b + d_b + sum of d_a y_ba + tail, where head is the
    least start of all items of the device and tail the least that follows the end of any; also
    L >= t_b + d_b + tail of b alone. A tail is what the horizon H leaves behind the latest end: a
    schedule of length L < H, shifted by H - L, is one within H and keeps every latest start.
    """
    for row in v.items.by_device:
        compute = [item for item in row if item.duration > 0]
        if not compute:
            continue
        head = min(item.earliest for item in compute)
        for b in compute:
            if b.presence is None:
                before = total([a.duration * v.before(a, b) for a in compute if a is not b])
                yield at_least(v.start[b] - before, head)
        if v.problem.objective == "makespan":
            yield from _behind(v, compute)


def _behind(v: HorizonVariables, row: list[HorizonItem]) -> Iterator[Constraint]:
    tail = min(v.items.tail(item) for item in row)
    for b in row:
        if b.presence is None:
            behind = total([a.duration * v.before(b, a) for a in row if a is not b])
            yield at_least(v.length - v.start[b] - behind, b.duration + tail)
            yield at_least(v.length - v.start[b], b.duration + v.items.tail(b))
