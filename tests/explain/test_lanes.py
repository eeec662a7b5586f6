"""How much of each lane is used, shared ones included."""

from __future__ import annotations

import math

from hypothesis import given

from optpipe.explain.headroom import device_memories, host_memories, tightest_device
from optpipe.explain.lanes import lane_uses
from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.simulate import simulate
from tests.building import bus, everything_at_once, offloadable, problem, programs, stage
from tests.strategies import Case, cases


def test_lanes_of_a_shared_bus_and_of_a_half_duplex_device() -> None:
    devices = [bus(pcie_group="g"), bus(pcie_group="g", half_duplex=True)]
    made = problem([offloadable(0, f=1), offloadable(1, f=0)], devices)
    rows = programs("0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0B0", "1F0 1OFFLOAD0 1RELEASE0 1RELOAD0 1B0")
    run = simulate(made, rows)
    used = {(use.lane, use.devices, use.group): use.busy_ms for use in lane_uses(made, rows, run)}
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
    first = lane_uses(made, rows, run)[0]
    assert (first.busy_ms, first.share) == (20, 20 / run.makespan_ms)


def test_every_group_has_the_devices_of_its_own_bus() -> None:
    """Two groups: a lane names the devices that share it and no others."""
    devices = [bus(pcie_group="g"), bus(pcie_group="h"), bus(pcie_group="h")]
    made = problem([offloadable(0), offloadable(1), offloadable(2)], devices)
    way = "{0}F0 {0}OFFLOAD0 {0}RELEASE0 {0}RELOAD0 {0}B0"
    rows = programs(*(way.format(device) for device in range(3)))
    uses = lane_uses(made, rows, simulate(made, rows))
    assert {(use.group, use.devices) for use in uses if use.group} == {("g", (0,)), ("h", (1, 2))}


def test_gradient_reductions_and_recomputation_count_as_busy() -> None:
    made = problem([stage(0, 1, 1, 1, recompute_ms=5, checkpoint_bytes=1, grad_sync_ms=4)])
    rows = programs("0F0 0RECOMPUTE0 0I0 0W0")
    assert [(use.lane, use.share) for use in lane_uses(made, rows, simulate(made, rows))] == [
        ("compute", 8 / 12),
        ("grad sync", 4 / 12),
    ]


@given(cases())
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


@given(cases(tight=True))
def test_memory_is_that_of_the_walk_and_the_fullest_action_reaches_it(case: Case) -> None:
    for held in device_memories(*case):
        row = case.programs[held.device]
        assert held.peak_bytes == device_peak_bytes(case.problem, held.device, row)
        assert held.headroom_bytes == 0 or not row
        if held.fullest_at is not None:
            before = row[: row.index(held.fullest_at)]
            if before and not any(a.type == "RECOMPUTE" for a in row):
                assert device_peak_bytes(case.problem, held.device, before) < held.peak_bytes


def test_a_device_without_a_program_is_never_the_tightest() -> None:
    """It has nothing to do, so more memory on it buys nothing, however little it has."""
    made = problem([stage(1)], [bus(memory_bytes=1), bus(memory_bytes=1000)])
    assert tightest_device(made, programs("", "0F0 0B0")) == 1


def test_the_tightest_device_has_the_least_left() -> None:
    made, rows = everything_at_once()
    assert made.devices[tightest_device(made, rows)].name == "gpu1"
    (first, second) = host_memories(made, rows)
    assert (first.host, first.limit_bytes) == ("host0", 40_000_000)
    assert (second.host, second.peak_bytes, second.limit_bytes) == ("other", 0, None)
    assert first.peak_bytes == host_peak_bytes(made, rows)["host0"]
    assert math.isfinite(first.peak_bytes)
