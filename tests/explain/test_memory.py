"""Why each offload and recomputation was chosen, held against programs without them."""

import math

from hypothesis import given

from optpipe import ActionType, Problem, Programs
from optpipe.explain.memory import device_memories, host_memories, stage_reliefs, tightest_device
from optpipe.explain.reasons import lane_uses
from optpipe.explain.values import Necessity, Relief, StageRelief
from optpipe.memory import device_peak_bytes, host_peak_bytes, memory_walk, modes_of
from optpipe.simulate import simulate
from tests.building import bus, everything_at_once, offloadable, problem, programs, stage
from tests.strategies import Case, cases

_OF_MODE = (ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD, ActionType.RECOMPUTE)


def without(rows: Programs, *taken: tuple[StageRelief, Relief]) -> Programs:
    """The programs without some offloads and recomputations."""
    kept = {(group.stage, relief.microbatch) for group, relief in taken}
    return tuple(
        tuple(
            action.bare if action.cell in kept else action
            for action in row
            if action.cell not in kept or action.type not in _OF_MODE
        )
        for row in rows
    )


def pairs(posed: Problem, rows: Programs) -> list[tuple[StageRelief, Relief]]:
    groups = stage_reliefs(posed, rows, [modes_of(posed, row) for row in rows])
    return [(group, relief) for group in groups for relief in group.reliefs]


def peak_over(posed: Problem, rows: Programs, device: int) -> int:
    limit = posed.devices[device].usable_bytes
    return device_peak_bytes(posed, device, rows[device]) - limit


@given(cases(menus=True, tight=True))
def test_what_is_needed_exceeds_the_limit_when_taken_out_and_nothing_else_does(case: Case) -> None:
    """Every cell that is not kept is judged, once."""
    used = {cell for row in case.programs
            for cell, mode in modes_of(case.problem, row).items() if mode}  # fmt: skip
    judged = [(group.stage, relief.microbatch) for group, relief in pairs(*case)]
    assert sorted(judged) == sorted(used)
    for group, relief in pairs(*case):
        rows = without(case.programs, (group, relief))
        is_over = peak_over(case.problem, rows, group.device) > 0
        assert is_over == (relief.verdict is Necessity.NEEDED)


@given(cases(menus=True, tight=True))
def test_all_that_is_unneeded_can_be_taken_out_together_and_no_more(case: Case) -> None:
    found = pairs(*case)
    spare = [pair for pair in found if pair[1].verdict is Necessity.UNNEEDED]
    rows = without(case.programs, *spare)
    assert all(peak_over(case.problem, rows, d) <= 0 for d in range(len(rows)))
    for pair in found:
        if pair[1].verdict is Necessity.INTERCHANGEABLE:
            fewer = without(case.programs, *spare, pair)
            assert peak_over(case.problem, fewer, pair[0].device) > 0


@given(cases(menus=True, tight=True))
def test_the_excess_is_that_of_the_action_that_is_named(case: Case) -> None:
    for group, relief in pairs(*case):
        for taken, verdict in (([relief], relief), (group.reliefs, group)):
            if verdict.exceeds_at is None:
                continue
            rows = without(case.programs, *((group, item) for item in taken))
            row = rows[group.device]
            steps = memory_walk(case.problem, group.device, row)
            limit = case.problem.devices[group.device].usable_bytes
            at = [action.bare for action in row].index(verdict.exceeds_at.bare)
            assert steps[at].peak - limit == verdict.excess_bytes


# How much of each lane is used, shared ones included.


def test_lanes_of_a_shared_bus_and_of_a_half_duplex_device() -> None:
    devices = [bus(pcie_group="g"), bus(pcie_group="g", half_duplex=True)]
    posed = problem([offloadable(0, f=1), offloadable(1, f=0)], devices)
    rows = programs("0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0B0", "1F0 1OFFLOAD0 1RELEASE0 1RELOAD0 1B0")
    run = simulate(posed, rows)
    used = {(use.lane, use.devices, use.group): use.busy_ms for use in lane_uses(posed, rows, run)}
    assert used == {
        ("compute", (0,), None): 3,
        ("compute", (1,), None): 2,
        ("d2h", (0,), None): 10,
        ("d2h", (1,), None): 10,
        ("h2d", (0,), None): 10,
        ("h2d", (1,), None): 10,
        ("both ways", (1,), None): 20,
        ("d2h", (0, 1), "g"): 20,
        ("h2d", (0, 1), "g"): 20,
    }
    first = lane_uses(posed, rows, run)[0]
    assert (first.busy_ms, first.share) == (20, 20 / run.makespan_ms)


def test_every_group_has_the_devices_of_its_own_bus() -> None:
    devices = [bus(pcie_group="g"), bus(pcie_group="h"), bus(pcie_group="h")]
    posed = problem([offloadable(0), offloadable(1), offloadable(2)], devices)
    way = "{0}F0 {0}OFFLOAD0 {0}RELEASE0 {0}RELOAD0 {0}B0"
    rows = programs(*(way.format(device) for device in range(3)))
    uses = lane_uses(posed, rows, simulate(posed, rows))
    assert {(use.group, use.devices) for use in uses if use.group} == {("g", (0,)), ("h", (1, 2))}


def test_gradient_reductions_and_recomputation_count_as_busy() -> None:
    posed = problem([stage(0, 1, 1, 1, recompute_ms=5, checkpoint_bytes=1, grad_sync_ms=4)])
    rows = programs("0F0 0RECOMPUTE0 0I0 0W0")
    assert [(use.lane, use.share) for use in lane_uses(posed, rows, simulate(posed, rows))] == [
        ("compute", 8 / 12),
        ("grad sync", 4 / 12),
    ]


@given(cases(menus=True))
def test_no_lane_is_used_for_longer_than_there_is_time(case: Case) -> None:
    run = simulate(*case)
    uses = lane_uses(*case, run)
    assert all(0 <= use.share <= 1 + 1e-9 for use in uses)
    assert [round(use.share, 9) for use in uses] == sorted(
        (round(use.share, 9) for use in uses), reverse=True
    )
    compute = [use for use in uses if use.lane == "compute"]
    assert sorted(use.devices for use in compute) == [
        (device,) for device, row in enumerate(case.programs) if row
    ]


@given(cases(menus=True, tight=True))
def test_memory_is_that_of_the_walk_and_the_fullest_action_reaches_it(case: Case) -> None:
    for memory in device_memories(*case):
        row = case.programs[memory.device]
        assert memory.peak_bytes == device_peak_bytes(case.problem, memory.device, row)
        assert memory.headroom_bytes == 0 or not row
        if memory.fullest_at is not None:
            before = row[: row.index(memory.fullest_at)]
            if before and not any(a.type == "RECOMPUTE" for a in row):
                assert device_peak_bytes(case.problem, memory.device, before) < memory.peak_bytes


def test_a_device_without_a_program_is_never_the_tightest() -> None:
    """It has nothing to do, so more memory on it buys nothing, however little it has."""
    posed = problem([stage(1)], [bus(memory_bytes=1), bus(memory_bytes=1000)])
    assert tightest_device(posed, programs("", "0F0 0B0")) == 1


def test_the_tightest_device_has_the_least_left() -> None:
    posed, rows = everything_at_once()
    assert posed.devices[tightest_device(posed, rows)].name == "gpu1"
    (first, second) = host_memories(posed, rows)
    assert (first.host, first.limit_bytes) == ("host0", 40_000_000)
    assert (second.host, second.peak_bytes, second.limit_bytes) == ("other", 0, None)
    assert first.peak_bytes == host_peak_bytes(posed, rows)["host0"]
    assert math.isfinite(first.peak_bytes)
