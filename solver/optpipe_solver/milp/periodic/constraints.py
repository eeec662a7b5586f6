"""The constraints of the periodic model, one function per family, listed in order at the end.

Numbers in docstrings are those of ``docs/periodic.md``. Times are in units of which a period has
``turn``, memory is in units of the largest item.
"""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from typing import TYPE_CHECKING

from optpipe.memory import action_workspace
from optpipe.schedule import ActionType
from optpipe_solver.milp.highs import at_least, total
from optpipe_solver.milp.periodic.items import PeriodChoice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_solver.milp.highs import Constraint, Linear, Variable
    from optpipe_solver.milp.periodic.items import PeriodItem
    from optpipe_solver.milp.periodic.variables import PeriodicVariables

__all__ = ["all_constraints"]

_F, _I, _W = ActionType.FORWARD, ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT
_RELEASE, _RELOAD, _RECOMPUTE = ActionType.RELEASE, ActionType.RELOAD, ActionType.RECOMPUTE


def one_after_another(v: PeriodicVariables) -> Iterator[Constraint]:
    """Of two items of a device one ends before the other starts, within one turn. (1)."""
    for row in v.items.by_device:
        for item in row:
            yield at_least(v.turn - v.place[item] - v.length(item), 0.0)
        for a, b in permutations(row, 2):
            order = v.before(a, b)
            if not _never(order):
                gap = v.place[b] - v.place[a] - v.length(a)
                yield at_least(gap + v.turn * (1.0 - order), 0.0)


def everything_before_has_run(v: PeriodicVariables) -> Iterator[Constraint]:
    """An item starts after the sum of what stands before it, and ends as long before the turn does.

    Redundant for integers, strong for the relaxation: (2).
    """
    for row in v.items.by_device:
        whole = sum(v.least_length(item) for item in row)
        for item in row:
            before = v.total_before(item)
            yield at_least(v.place[item] - before, 0.0)
            after = whole - before - v.least_length(item)
            yield at_least(v.turn - v.place[item] - v.length(item) - after, 0.0)
        if row:
            yield at_least(v.turn - total([v.length(item) for item in row]), 0.0)


def data_arrives(v: PeriodicVariables) -> Iterator[Constraint]:
    """A pass starts when its input has arrived, and less than a period later. (3).

    The second loses nothing: whatever waits a period or longer, and all that follows it in its
    micro-batch, may run a period earlier, with the same circles and no more bytes anywhere.
    """
    for hop in v.items.chain():
        wait = v.start(hop.second) - v.start(hop.first) - v.length(hop.first)
        wait -= v.lasting(hop.delay_ms)
        yield at_least(wait, 0.0)
        yield at_least(v.turn - wait, 0.0)
        if hop.first.device == hop.second.device:
            yield _in_order(v, hop.first, hop.second)


def cells_in_order(v: PeriodicVariables) -> Iterator[Constraint]:
    """F, I and W of a (stage, micro-batch), and what is between them, go in this order. (4).

    W follows its I within a period, and RECOMPUTE and RELOAD stand less than a period before it,
    RELEASE less than one after its copy: by the argument of (3).
    """
    for a, b in v.items.inner():
        gap = v.start(b) - v.start(a) - v.length(a)
        yield at_least(gap, 0.0)
        yield _in_order(v, a, b)
        if b.kind is _W or a.kind is _RELOAD:
            yield at_least(v.turn - gap, 0.0)
        if a.kind is _RECOMPUTE:
            # Not chosen it stands behind its F, however long before I that is.
            kept = 1.0 - v.chosen(PeriodChoice.RECOMPUTED, a.cell)
            yield at_least(v.turn - gap + (v.longest + 1) * v.turn * kept, 0.0)


def _in_order(v: PeriodicVariables, a: PeriodItem, b: PeriodItem) -> Constraint:
    return at_least(v.index[b] - v.index[a] + v.before(a, b), 1.0)


def copies_are_alike(v: PeriodicVariables) -> Iterator[Constraint]:
    """The copies of stage 0's forward start one after the other, within one period. (5)."""
    rows = [v.items.of[(0, c), _F] for c in range(v.items.copies)]
    for a, b in pairwise(rows):
        yield at_least(v.start(b) - v.start(a), 0.0)
        yield at_least(v.start(rows[0]) + v.turn - v.start(b), 0.0)


def choices_take_time(v: PeriodicVariables) -> Iterator[Constraint]:
    """What a choice slows is rate x choice, in its four linear inequalities. (6)."""
    for (choice, cell), slowed in list(v.slowed.items()):
        chosen = v.chosen(choice, cell)
        yield at_least(chosen - slowed, 0.0)
        yield at_least(slowed - v.slowest * chosen, 0.0)
        yield at_least(v.rate - slowed, 0.0)
        yield at_least(slowed - v.rate + 1.0 - chosen, 0.0)


def unchosen_stand_together(v: PeriodicVariables) -> Iterator[Constraint]:
    """What is not chosen is two items without anything between them, and so without effect. (7).

    Not recomputed: RECOMPUTE right behind F. Not offloaded: RELOAD right behind RELEASE. Fused: W
    right behind I.
    """
    for cell in v.items.cells():
        of = v.items.of
        if (cell, _RECOMPUTE) in of:
            apart = v.chosen(PeriodChoice.RECOMPUTED, cell)
            yield from _together(v, of[cell, _F], of[cell, _RECOMPUTE], apart)
        if (cell, _RELOAD) in of:
            apart = v.chosen(PeriodChoice.OFFLOADED, cell)
            yield from _together(v, of[cell, _RELEASE], of[cell, _RELOAD], apart)
        if v.items.may(PeriodChoice.FUSED, cell[0]):
            apart = 1.0 - v.chosen(PeriodChoice.FUSED, cell)
            yield from _together(v, of[cell, _I], of[cell, _W], apart)


def _together(
    v: PeriodicVariables, a: PeriodItem, b: PeriodItem, apart: Linear
) -> Iterator[Constraint]:
    yield at_least(v.before(a, b) + apart, 1.0)
    yield at_least(v.longest * apart - v.index[b] + v.index[a], 0.0)
    for other in v.items.by_device[a.device]:
        if other not in (a, b):
            step = v.before(other, b) - v.before(other, a)
            yield at_least(step + apart, 0.0)
            yield at_least(apart - step, 0.0)


def shrunk_once(v: PeriodicVariables) -> Iterator[Constraint]:
    """A (stage, copy) is kept, offloaded or recomputed: one of the three. (8)."""
    for cell in v.items.cells():
        both = v.chosen(PeriodChoice.OFFLOADED, cell) + v.chosen(PeriodChoice.RECOMPUTED, cell)
        if not isinstance(both, float):
            yield at_least(1.0 - both, 0.0)


def fits_device_memory(v: PeriodicVariables) -> Iterator[Constraint]:
    """At every item, what the micro-batches in flight hold, and its own, fit the device. (9).

    Where b stands, ``index[b] - index[a] + before(a, b)`` micro-batches more than at the turn have
    run a; the deltas of a cell sum up to 0, so that only differences of indices within it count.
    """
    problem = v.items.problem
    for device, row in enumerate(v.items.by_device):
        usable = problem.devices[device].usable_bytes - problem.static_bytes_of(device)
        for b in row:
            extra = _extra(v, b)
            if extra is None:
                continue
            held = total([_units(v, a.delta) * _ran(v, a, b) for a in row if a.delta != 0])
            yield at_least(_units(v, usable) - held - extra, 0.0)
            static = _units(v, problem.static_bytes_of(device))
            yield at_least(v.peak - static - held - extra, 0.0)


def _ran(v: PeriodicVariables, a: PeriodItem, b: PeriodItem) -> Linear:
    return -v.index[a] + (0.0 if a is b else v.before(a, b))


def _units(v: PeriodicVariables, num_bytes: int) -> float:
    return num_bytes / v.unit_bytes


def _extra(v: PeriodicVariables, b: PeriodItem) -> Linear | None:
    """Return what b holds above the bytes before it while it runs; None where that is nothing."""
    stage = v.items.problem.stages[b.stage]
    fused = v.chosen(PeriodChoice.FUSED, b.cell)
    taken = max(0, b.delta) + action_workspace(stage, b.kind)
    match b.kind:
        case ActionType.FORWARD if (b.cell, _RECOMPUTE) in v.items.of:
            kept = _units(v, stage.activation_bytes - b.delta)
            return _units(v, taken) + kept * (1.0 - v.chosen(PeriodChoice.RECOMPUTED, b.cell))
        case ActionType.RECOMPUTE:
            return _units(v, b.delta) + _units(v, taken - b.delta) * v.chosen(
                PeriodChoice.RECOMPUTED, b.cell
            )
        case ActionType.BACKWARD_INPUT if not isinstance(fused, float):
            instead = action_workspace(stage, ActionType.FULL_BACKWARD)
            return _units(v, taken) + _units(v, instead - taken) * fused
        case ActionType.BACKWARD_WEIGHT if not isinstance(fused, float):
            grown = max(0, stage.weight_context_bytes - stage.activation_bytes)
            return _units(v, taken) - _units(v, taken + grown) * fused
        case ActionType.RELEASE:
            return None
        case _:
            return _units(v, taken) if taken > 0 else None


def transfers_in_turn(v: PeriodicVariables) -> Iterator[Constraint]:
    """A copy out follows F, RELEASE waits for it; a copy back RELOAD, I waits for it. (10)."""
    problem = v.items.problem
    for cell, out in v.d2h.items():
        of, back = v.items.of, v.h2d[cell]
        forward = of[cell, _F]
        away = v.transfer(cell, problem.offload_ms(cell[0]))
        home = v.transfer(cell, problem.reload_ms(cell[0]))
        yield at_least(out - v.start(forward) - v.length(forward), 0.0)
        yield at_least(v.start(of[cell, _RELEASE]) - out - away, 0.0)
        yield at_least(back - v.start(of[cell, _RELOAD]), 0.0)
        yield at_least(v.start(of[cell, _I]) - back - home, 0.0)


def transfers_share_lanes(v: PeriodicVariables) -> Iterator[Constraint]:
    """Transfers of one lane do not overlap modulo the period, in whatever order. (11).

    Relaxed: the simulator's lanes go by issue. A lane's transfers fit into one period (12).
    """
    for lane in _lanes(v):
        yield at_least(v.turn - total([length for _, _, length in lane]), 0.0)
        for (name, x, length), (other, y, its) in combinations(lane, 2):
            turns = _turns(v, f"turns_{name}_{other}")
            v.apart.append((turns, x, y))
            yield at_least(y - x + v.turn * turns - length, 0.0)
            yield at_least(v.turn * (1.0 - turns) - its - y + x, 0.0)


def _turns(v: PeriodicVariables, name: str) -> Variable:
    most = v.longest + 2
    return v.model.problem.add_variable(name, -most, most, cat="Integer")


_Transfer = tuple[str, "Variable", "Linear"]


def _lanes(v: PeriodicVariables) -> list[list[_Transfer]]:
    """Return what shares a lane: a device's direction, both where half duplex, a group's."""
    problem = v.items.problem
    lanes: dict[tuple[str, ...], list[_Transfer]] = {}
    for cell in v.d2h:
        device = problem.stages[cell[0]].device
        held = problem.devices[device]
        for way, start, ms in (
            ("out", v.d2h[cell], problem.offload_ms(cell[0])),
            ("back", v.h2d[cell], problem.reload_ms(cell[0])),
        ):
            item = (f"{way}_{cell[0]}_{cell[1]}", start, v.transfer(cell, ms))
            own = "both" if held.half_duplex else way
            lanes.setdefault(("device", str(device), own), []).append(item)
            if held.pcie_group is not None:
                lanes.setdefault(("group", held.pcie_group, way), []).append(item)
    return list(lanes.values())


def fits_host_memory(v: PeriodicVariables) -> Iterator[Constraint]:
    """At every OFFLOAD, which stands behind its F, a host holds no more than its limit. (13)."""
    problem = v.items.problem
    for host in problem.hosts:
        if host.memory_bytes is None:
            continue
        peaks: list[Linear] = []
        for device, held in enumerate(problem.devices):
            cells = [cell for cell in v.d2h if problem.stages[cell[0]].device == device]
            if held.host == host.name and cells:
                peak = v.model.continuous(f"host_peak_{device}", 0.0, 1e6)
                peaks.append(peak)
                yield from _host_peak(v, peak, cells)
        if peaks:
            yield at_least(_units(v, host.memory_bytes) - total(peaks), 0.0)


def _host_peak(
    v: PeriodicVariables, peak: Variable, cells: list[tuple[int, int]]
) -> Iterator[Constraint]:
    for at in cells:
        here = v.items.of[at, _F]
        held: list[Linear] = []
        for cell in cells:
            forward, backward = v.items.of[cell, _F], v.items.of[cell, _I]
            most = float(v.longest)
            count = v.model.continuous(f"on_host_{at[0]}_{at[1]}_{cell[0]}_{cell[1]}", 0.0, most)
            away = _ran(v, forward, here) - _ran(v, backward, here)
            away += 1.0 if cell == at else 0.0
            yield at_least(
                count - away + 2 * most * (1.0 - v.chosen(PeriodChoice.OFFLOADED, cell)), 0.0
            )
            held.append(_units(v, v.items.problem.stages[cell[0]].offload_bytes) * count)
        yield at_least(peak - total(held), 0.0)


def idle_items_have_one_order(v: PeriodicVariables) -> Iterator[Constraint]:
    """Three items that may take no time have one order within a turn. (14)."""
    for row in v.items.by_device:
        idle = [item for item in row if v.least_length(item) <= 0.0]
        for trio in combinations(idle, 3):
            for a, b, c in (trio, trio[::-1]):
                yield at_least(2.0 - v.before(a, b) - v.before(b, c) - v.before(c, a), 0.0)


def _never(order: Linear) -> bool:
    return isinstance(order, float) and order == 0.0


def all_constraints(v: PeriodicVariables) -> Iterator[Constraint]:
    """Yield every constraint of the model, family by family."""
    yield from one_after_another(v)
    yield from everything_before_has_run(v)
    yield from data_arrives(v)
    yield from cells_in_order(v)
    yield from copies_are_alike(v)
    yield from unchosen_stand_together(v)
    yield from shrunk_once(v)
    yield from fits_device_memory(v)
    yield from transfers_in_turn(v)
    yield from transfers_share_lanes(v)
    yield from fits_host_memory(v)
    yield from idle_items_have_one_order(v)
    # Last: it speaks of what the others have asked for.
    yield from choices_take_time(v)
