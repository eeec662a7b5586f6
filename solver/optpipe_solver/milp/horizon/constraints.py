"""The variables and constraints of the full-horizon model; numbers are those of ``docs/milp.md``.

======================  ======================================================================
``start[item]``         ms, within the item's window
``choice[...]``         1 = (stage, micro-batch) is fused / offloaded / recomputed
``before(a, b)``        1 = both exist and a is before b in their device's program
``released[x, item]``   1 = the RELEASE of x is before the item
``d2h[x]``, ``h2d[x]``  ms, start of the transfer itself
``host_after[x, y]``    1 = x's backward is before y's OFFLOAD
``on_host[x, y]``       1 = x is on the host when y's OFFLOAD is issued
``lane[x, y]``          1 = transfer x goes before transfer y on a lane they share
``length``              ms, the objective
======================  ======================================================================

The model creates a binary when a constraint needs it, and only once. Times are ms. Memory is in
units of the device's largest item, so that coefficients stay near 1. A constraint that relaxes
`optpipe.simulate` is marked as a relaxation. The model's optimum is then still a valid bound, and
its solutions are simulated after lowering.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from optpipe.schedule import Action, ActionType, Pass
from optpipe_solver.milp.highs import at_least, total
from optpipe_solver.milp.horizon.items import HorizonChoice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem
    from optpipe_solver.milp.highs import Constraint, Linear, MilpModel, Variable
    from optpipe_solver.milp.horizon.items import Cell, HorizonItem, HorizonItems, Presence

__all__ = ["HorizonVariables", "all_constraints"]


_BACKWARD = (ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD)
_LAST = (ActionType.BACKWARD_WEIGHT, ActionType.FULL_BACKWARD)
_EXCLUSIVE = (
    {HorizonChoice.FUSED, HorizonChoice.SPLIT},
    {HorizonChoice.OFFLOADED, HorizonChoice.RECOMPUTED},
)
_LEAST_WEIGHT = 1e-6
"""HiGHS drops coefficients below 1e-9, and those near its tolerance decide nothing."""


class HorizonVariables:
    """All variables of one model, by their meaning."""

    def __init__(self, problem: Problem, items: HorizonItems, model: MilpModel) -> None:
        self.model = model
        self.problem = problem
        self.items = items
        self.start = {
            item: model.continuous(f"start_{item.action}", item.earliest, item.latest)
            for row in items.by_device
            for item in row
        }
        self.choice: dict[tuple[HorizonChoice, int, int], Variable] = {}
        self.order: dict[tuple[HorizonItem, HorizonItem], Variable] = {}
        self.released: dict[tuple[Cell, HorizonItem], Variable] = {}
        self.lane: dict[tuple[Action, Action], Variable] = {}
        self.host_peaks: dict[int, Variable] = {}
        self.host_after: dict[tuple[Cell, Cell], Variable] = {}
        self.on_host: dict[tuple[Cell, Cell], Variable] = {}
        self.checkpointed: dict[tuple[Cell, HorizonItem], Variable] = {}
        # In bytes, coefficients would range from 1 to 1e10. HiGHS treats those below 1e-9 of the
        # largest as zero, and then proved wrong results.
        self.host_unit = float(max(1, *(stage.offload_bytes for stage in problem.stages)))
        self.top = 2 * items.horizon_ms
        self.d2h = self._transfers(ActionType.OFFLOAD)
        self.h2d = self._transfers(ActionType.RELOAD)
        self.length = model.continuous("length", 0.0, self.top)
        self.first_start = [
            model.continuous(f"first_{d}", 0.0, items.horizon_ms)
            for d in range(len(problem.devices))
        ]

    def _transfers(self, kind: ActionType) -> dict[Cell, Variable]:
        return {
            cell: self.model.continuous(f"{kind.value}_{_name(cell)}", 0.0, self.top)
            for device in range(len(self.problem.devices))
            for cell in self.items.open_cells(device, kind)
        }

    def chosen(self, choice: HorizonChoice, stage: int, microbatch: int) -> Linear:
        """Return the binary of a choice (SPLIT is the complement of FUSED), 1 if it is made."""
        if not self.items.is_open(choice, (stage, microbatch)):
            return 1.0
        if choice is HorizonChoice.SPLIT:
            return 1.0 - self.chosen(HorizonChoice.FUSED, stage, microbatch)
        key = (choice, stage, microbatch)
        if key not in self.choice:
            self.choice[key] = self.model.binary(f"{choice.value}_{stage}_{microbatch}")
        return self.choice[key]

    def present(self, item: HorizonItem) -> Linear:
        """Return 1 if the item exists."""
        return 1.0 if item.presence is None else self.chosen(*item.presence)

    def before(self, a: HorizonItem, b: HorizonItem) -> Linear:
        """Return 1 exactly if both items exist and a is before b."""
        if _is_exclusive(a.presence, b.presence) or self.items.implied(b, a):
            return 0.0
        if self.items.implied(a, b):
            if a.presence is None:
                return self.present(b)
            if b.presence is None or a.presence == b.presence:
                return self.present(a)
        if (b, a) in self.order and (a.presence is None or b.presence is None):
            return self.present(a if b.presence is None else b) - self.order[b, a]
        return self.order.setdefault((a, b), self.model.binary(f"order_{a.action}_{b.action}"))

    def releases(self, cell: Cell, item: HorizonItem) -> Variable:
        """Return 1 only if the RELEASE of a cell is before an item."""
        key = (cell, item)
        if key not in self.released:
            self.released[key] = self.model.binary(f"released_{_name(cell)}_{item.action}")
        return self.released[key]

    def goes_first(self, x: Action, y: Action) -> Linear:
        """Return 1 if transfer x goes before y (meaningful if both happen)."""
        if (y, x) in self.lane:
            return 1.0 - self.lane[y, x]
        return self.lane.setdefault((x, y), self.model.binary(f"lane_{x}_{y}"))

    def transfer_start(self, transfer: Action) -> Variable:
        """Return the start of an OFFLOAD or RELOAD on its lane."""
        table = self.d2h if transfer.type is ActionType.OFFLOAD else self.h2d
        return table[transfer.stage, transfer.microbatch]

    def backwards(self, cell: Cell) -> list[HorizonItem]:
        """Return the I and the B that a cell may have."""
        found = (self.items.of_action.get(Action(cell[0], kind, cell[1])) for kind in _BACKWARD)
        return [item for item in found if item is not None]


def _name(cell: Cell) -> str:
    return f"{cell[0]}_{cell[1]}"


def _is_exclusive(a: Presence | None, b: Presence | None) -> bool:
    """Whether two items never exist together."""
    if a is None or b is None or (a.stage, a.microbatch) != (b.stage, b.microbatch):
        return False
    return {a.choice, b.choice} in _EXCLUSIVE


def all_constraints(v: HorizonVariables) -> Iterator[Constraint]:
    """Yield every constraint of the model, family by family."""
    yield from one_after_another(v)
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


def _relaxed(gap: Linear, holds: Linear, big: float) -> Constraint:
    """Return gap >= 0 if ``holds`` is 1, and no constraint if it is 0 (big-M)."""
    return at_least(gap + max(0.0, big) * (1.0 - holds), 0.0)


def one_after_another(v: HorizonVariables) -> Iterator[Constraint]:
    """Of two items of a device that both exist, one ends before the other starts. (1).

    If both orders of two items are excluded, the two do not both exist.
    """
    for row in v.items.by_device:
        for a, b in combinations(row, 2):
            if _is_exclusive(a.presence, b.presence):
                continue
            if v.items.implied(a, b) and v.items.implied(b, a):
                yield at_least(1.0 - v.present(a) - v.present(b), 0.0)
                continue
            for first, second in ((a, b), (b, a)):
                order = v.before(first, second)
                big = first.latest + first.duration - second.earliest
                if big > 0 and not (isinstance(order, float) and order == 0.0):
                    gap = v.start[second] - v.start[first] - first.duration
                    yield _relaxed(gap, order, big)
            if a.presence is not None and b.presence is not None:
                both = v.present(a) + v.present(b) - 1.0
                yield at_least(v.before(a, b) + v.before(b, a) - both, 0.0)


def no_order_with_the_absent(v: HorizonVariables) -> Iterator[Constraint]:
    """An order binary of an optional item is 0 if the item does not exist. (2)."""
    for (a, b), order in v.order.items():
        for item in (a, b):
            if item.presence is not None:
                yield at_least(v.present(item) - order, 0.0)


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
    cell = (source.stage, source.microbatch)
    forward = v.items.of_action[Action(cell[0], ActionType.FORWARD, cell[1])]
    for producer in v.backwards(cell) if source.backward else [forward]:
        gap = v.start[item] - v.start[producer] - producer.duration - delay
        big = producer.latest + producer.duration + delay - item.earliest
        yield _relaxed(gap, v.present(producer) + v.present(item) - 1.0, big)


def shrunk_once(v: HorizonVariables) -> Iterator[Constraint]:
    """A (stage, micro-batch) is either kept, offloaded or recomputed. (4)."""
    choices = (HorizonChoice.OFFLOADED, HorizonChoice.RECOMPUTED)
    for cell in v.d2h:
        if v.items.is_open(HorizonChoice.RECOMPUTED, cell):
            yield at_least(1.0 - total([v.chosen(choice, *cell) for choice in choices]), 0.0)


def transfers_in_turn(v: HorizonVariables) -> Iterator[Constraint]:
    """OFFLOAD starts after its forward, RELOAD after OFFLOAD and its issue, backward after it. (5).

    A RELOAD also starts no earlier than RELEASE, which waits for the OFFLOAD's end.
    """
    for cell in v.d2h:
        stage, j = cell
        forward = v.items.of_action[Action(stage, ActionType.FORWARD, j)]
        yield at_least(v.d2h[cell] - v.start[forward] - forward.duration, 0.0)
        reload = v.items.of_action[Action(stage, ActionType.RELOAD, j)]
        chosen = v.chosen(HorizonChoice.OFFLOADED, stage, j)
        away, back = v.problem.offload_ms(stage), v.problem.reload_ms(stage)
        yield _relaxed(v.start[reload] - v.d2h[cell] - away, chosen, v.top + away)
        yield _relaxed(v.h2d[cell] - v.start[reload], chosen, v.top)
        for backward in v.backwards(cell):
            gap = v.start[backward] - v.h2d[cell] - back
            yield _relaxed(gap, chosen + v.present(backward) - 1.0, v.top + back)


def transfers_share_lanes(v: HorizonVariables) -> Iterator[Constraint]:
    """Transfers that share a lane go one after the other. (6).

    Within one device and direction, RELOADs go in the order of their issue. Between devices of a
    PCIe group, and between the directions of a half-duplex device, any order is allowed. This is a
    relaxation: the simulator goes by issue time.
    """
    transfers = [Action(s, ActionType.OFFLOAD, j) for s, j in v.d2h]
    transfers += [Action(s, ActionType.RELOAD, j) for s, j in v.h2d]
    for x, y in combinations(transfers, 2):
        if not _share_a_lane(v, x, y):
            continue
        both = _happens(v, x) + _happens(v, y) - 2.0
        is_in_order = x.type is y.type is ActionType.RELOAD and _device(v, x) == _device(v, y)
        for first, second in ((x, y), (y, x)):
            length = _transfer_ms(v, first)
            gap = v.transfer_start(second) - v.transfer_start(first) - length
            goes = v.goes_first(first, second)
            yield _relaxed(gap, goes + both, v.top + length)
            if is_in_order:
                a, b = v.items.of_action[first], v.items.of_action[second]
                exist = v.present(a) + v.present(b) - 1.0
                yield at_least(v.before(a, b) - goes - exist + 1.0, 0.0)


def _share_a_lane(v: HorizonVariables, x: Action, y: Action) -> bool:
    first, second = v.problem.devices[_device(v, x)], v.problem.devices[_device(v, y)]
    if _device(v, x) == _device(v, y):
        is_one_cell = (x.stage, x.microbatch) == (y.stage, y.microbatch)
        return not is_one_cell and (x.type is y.type or first.half_duplex)
    is_shared = first.pcie_group is not None and first.pcie_group == second.pcie_group
    return is_shared and x.type is y.type


def _happens(v: HorizonVariables, transfer: Action) -> Linear:
    return v.chosen(HorizonChoice.OFFLOADED, transfer.stage, transfer.microbatch)


def _device(v: HorizonVariables, transfer: Action) -> int:
    return v.problem.stages[transfer.stage].device


def _transfer_ms(v: HorizonVariables, transfer: Action) -> float:
    if transfer.type is ActionType.OFFLOAD:
        return v.problem.offload_ms(transfer.stage)
    return v.problem.reload_ms(transfer.stage)


def release_waits_for_the_copy(v: HorizonVariables) -> Iterator[Constraint]:
    """An item counts bytes as released only if it starts after their copy has ended. (7)."""
    for (cell, item), released in v.released.items():
        away = v.problem.offload_ms(cell[0])
        yield at_least(v.chosen(HorizonChoice.OFFLOADED, *cell) - released, 0.0)
        yield at_least(v.present(item) - released, 0.0)
        yield _relaxed(v.start[item] - v.d2h[cell] - away, released, v.top + away)


def fits_device_memory(v: HorizonVariables) -> Iterator[Constraint]:
    """At every item that takes bytes, the item and those before it fit the device. (8).

    The constraint is a sum over orders, never over times.
    """
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
        if _may_checkpoint(v, other):
            saved = _checkpoint_saving(v, other, unit)
            terms.append(_weighed(-saved, _checkpointed(v, other, item)))
    for cell in v.items.open_cells(item.device, ActionType.RELEASE):
        forward = v.items.of_action[Action(cell[0], ActionType.FORWARD, cell[1])]
        if forward is item or v.items.implied(item, forward):
            continue
        moved = v.problem.stages[cell[0]].offload_bytes / unit
        terms.append(_weighed(-moved, v.releases(cell, item)))
    return total(terms)


def _taken_by(v: HorizonVariables, item: HorizonItem, unit: int) -> Linear:
    taken = _weighed(item.extra / unit, v.present(item))
    if _may_checkpoint(v, item):
        again = v.chosen(HorizonChoice.RECOMPUTED, item.action.stage, item.action.microbatch)
        taken = taken + _weighed(-_checkpoint_saving(v, item, unit), again)
    return taken


def _may_checkpoint(v: HorizonVariables, item: HorizonItem) -> bool:
    stage, kind, j, *_ = item.action
    return kind is ActionType.FORWARD and v.items.is_open(HorizonChoice.RECOMPUTED, (stage, j))


def _weighed(weight: float, flag: Linear) -> Linear:
    """Return weight x flag, or its minimum if HiGHS might treat the weight as zero.

    A device with one tiny stage is thus relaxed, and never proven infeasible by mistake.
    """
    return weight * flag if abs(weight) >= _LEAST_WEIGHT else min(weight, 0.0)


def _checkpoint_saving(v: HorizonVariables, forward: HorizonItem, unit: int) -> float:
    stage = v.problem.stages[forward.action.stage]
    return (stage.activation_bytes - (stage.checkpoint_bytes or 0)) / unit


def _checkpointed(v: HorizonVariables, forward: HorizonItem, item: HorizonItem) -> Linear:
    """Return 1 only if the forward is before the item and keeps only its checkpoint."""
    key = ((forward.action.stage, forward.action.microbatch), item)
    if key not in v.checkpointed:
        name = f"checkpointed_{forward.action}_{item.action}"
        v.checkpointed[key] = v.model.continuous(name, 0.0, 1.0)
    return v.checkpointed[key]


def checkpoint_counts_once_kept(v: HorizonVariables) -> Iterator[Constraint]:
    """The saving of a recomputed forward counts only if the forward is before the item. (9)."""
    for ((stage, j), item), saved in v.checkpointed.items():
        forward = v.items.of_action[Action(stage, ActionType.FORWARD, j)]
        yield at_least(v.chosen(HorizonChoice.RECOMPUTED, stage, j) - saved, 0.0)
        yield at_least(v.before(forward, item) - saved, 0.0)


def fits_host_memory(v: HorizonVariables) -> Iterator[Constraint]:
    """The offloaded bytes of a host's devices, each at its peak, fit the host. (10)."""
    for host in v.problem.hosts:
        if host.memory_bytes is None:
            continue
        for index, device in enumerate(v.problem.devices):
            cells = v.items.open_cells(index, ActionType.OFFLOAD)
            if device.host == host.name and cells:
                yield from _host_peak_of(v, cells, index)
        peaks = [
            peak for index, peak in v.host_peaks.items()
            if v.problem.devices[index].host == host.name
        ]  # fmt: skip
        if peaks:
            yield at_least(host.memory_bytes / v.host_unit - total(peaks), 0.0)


def _host_peak_of(v: HorizonVariables, cells: list[Cell], device: int) -> Iterator[Constraint]:
    """The device's peak covers the bytes on the host at each OFFLOAD.

    Another copy is on the host unless it is issued later or its backward has ended before.
    """
    size = {cell: v.problem.stages[cell[0]].offload_bytes / v.host_unit for cell in cells}
    everything = sum(size.values())
    peak = v.model.continuous(f"host_peak_{device}", 0.0, everything)
    v.host_peaks[device] = peak
    for cell in cells:
        chosen = v.chosen(HorizonChoice.OFFLOADED, *cell)
        on_host: list[Linear] = [size[cell] * chosen]
        for other in cells:
            if other == cell:
                continue
            key, name = (other, cell), f"{_name(other)}_{_name(cell)}"
            gone = v.host_after[key] = v.model.binary(f"host_gone_{name}")
            there = v.on_host[key] = v.model.continuous(f"on_host_{name}", 0.0, 1.0)
            for backward in v.backwards(other):
                gap = v.d2h[cell] - v.start[backward] - backward.duration
                yield _relaxed(gap, gone + v.present(backward) - 1.0, v.top)
            x, y = (Action(c[0], ActionType.OFFLOAD, c[1]) for c in key)
            both = _happens(v, x) + _happens(v, y) - 2.0
            yield at_least(there - v.goes_first(x, y) - both + gone, 0.0)
            on_host.append(size[other] * there)
        yield at_least(peak - total(on_host) + everything * (1.0 - chosen), 0.0)


def reloads_have_one_order(v: HorizonVariables) -> Iterator[Constraint]:
    """RELOADs take no time in the program, so their order needs transitivity rows. (11)."""
    for row in v.items.by_device:
        items = [item for item in row if item.action.type is ActionType.RELOAD]
        for a, b, c in combinations(items, 3):
            yield at_least(2.0 - v.before(a, b) - v.before(b, c) - v.before(c, a), 0.0)
            yield at_least(2.0 - v.before(a, c) - v.before(c, b) - v.before(b, a), 0.0)


def ends_within_length(v: HorizonVariables) -> Iterator[Constraint]:
    """The objective covers every item, and a stage's gradient reduction after its last. (12).

    In the simulator, several reductions of one device queue. Here they do not: a relaxation.
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


def loads(v: HorizonVariables) -> Iterator[Constraint]:
    """An item starts after all items before it, and the length covers all items after it. (13).

    t_b >= head + sum of d_a y_ab, and L >= t_b + d_b + sum of d_a y_ba + tail.
    Head is the earliest start of any item of the device, and tail the minimum tail of its items.
    Also L >= t_b + d_b + tail of b alone. An item's tail is the time between its latest end and
    the horizon H. This is valid: a schedule of length L < H, shifted by H - L, lies within H and
    keeps every latest start.
    """
    for row in v.items.by_device:
        compute = [item for item in row if item.duration > 0]
        head = min((item.earliest for item in compute), default=0.0)
        tail = min((v.items.tail(item) for item in compute), default=0.0)
        for b in (item for item in compute if item.presence is None):
            others = [item for item in compute if item is not b]
            before = total([a.duration * v.before(a, b) for a in others])
            yield at_least(v.start[b] - before, head)
            if v.problem.objective == "makespan":
                behind = total([a.duration * v.before(b, a) for a in others])
                yield at_least(v.length - v.start[b] - behind, b.duration + tail)
                yield at_least(v.length - v.start[b], b.duration + v.items.tail(b))
