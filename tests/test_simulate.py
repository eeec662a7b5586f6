"""Time (docs/specification.md, "Time"): a ticking clock agrees; finer points by hand."""

from typing import Any

import pytest
from hypothesis import given

from optpipe import IllegalScheduleError, Problem, Programs, make_timeline, parse_action, simulate
from optpipe.simulate import bubble_rate, idle_shares
from tests.building import UNIT, bus, offloadable, one_f_one_b, problem, programs, stage
from tests.oracle import Ticking
from tests.strategies import Case, cases


def spans(posed: Problem, rows: Programs) -> dict[str, tuple[float, float]]:
    """Start and end of every action, by its text."""
    run = simulate(posed, rows)
    return {
        str(action): (at.start, at.end)
        for row, lane in zip(rows, run.times, strict=True)
        for action, at in zip(row, lane, strict=True)
    }


def test_a_reload_is_issued_at_a_compute_boundary_even_if_its_lane_was_free_before() -> None:
    posed = problem([offloadable(f=4)], m=2)
    rows = programs("0F0 0OFFLOAD0 0RELEASE0 0F1 0RELOAD0 0B1 0B0")
    got = spans(posed, rows)
    assert [got["0RELEASE0"], got["0F1"]] == [(14, 14), (14, 18)]
    assert [got["0RELOAD0"], got["0B1"]] == [(18, 28), (18, 20)]
    assert simulate(posed, rows).times[0][4].issue == 18


def neighbours(forward_ms: float, group: str | None) -> dict[str, tuple[float, float]]:
    """Three devices in reverse stage order, each offloading right after its forward."""
    stages = [offloadable(device, forward_ms) for device in (2, 1, 0)]
    rows = [f"{s}F0 {s}OFFLOAD0 {s}RELEASE0 {s}RELOAD0 {s}B0" for s in (2, 1, 0)]
    return spans(problem(stages, [bus(pcie_group=group)] * 3), programs(*rows))


def test_devices_of_a_pcie_group_take_turns_by_issue_time_then_by_device_index() -> None:
    """Each direction for itself; without a group they do not wait for each other."""
    got = neighbours(1, "uplink")
    assert [got[f"{s}OFFLOAD0"] for s in (0, 1, 2)] == [(1, 11), (11, 21), (21, 31)]
    # Stage 2 is on device 0, which reloads while device 1 offloads.
    got = neighbours(0, "uplink")
    assert [got[f"{s}OFFLOAD0"] for s in (2, 1, 0)] == [(0, 10), (10, 20), (20, 30)]
    assert got["2RELOAD0"] == (10, 20)
    got = neighbours(0, None)
    assert {got[f"{s}OFFLOAD0"] for s in (0, 1, 2)} == {(0, 10)}


def test_a_later_issue_goes_first_where_the_earlier_one_cannot_start_yet() -> None:
    # Device 0 is half-duplex and busy reloading; device 1 takes the shared direction meanwhile.
    devices = [bus(pcie_group="x", half_duplex=True, h2d_gb_per_s=0.5), bus(pcie_group="x")]
    posed = problem([offloadable(0), offloadable(1)], devices, m=2)
    rows = programs(
        "0F0 0OFFLOAD0 0RELEASE0 0F1 0RELOAD0 0OFFLOAD1 0RELEASE1 0RELOAD1 0B0 0B1",
        "1F0 1F1 1OFFLOAD1 1RELEASE1 1RELOAD1 1B0 1B1",
    )
    got = spans(posed, rows)
    assert got["0RELOAD0"] == (12, 32)
    assert got["1OFFLOAD1"] == (13, 23)
    assert got["0OFFLOAD1"] == (32, 42)


def test_every_device_has_an_idle_share_and_the_busiest_the_least() -> None:
    """Their mean is the bubble."""
    posed = problem([stage(0, 1, 1, 1), stage(1, 2, 2, 2)], m=2)
    assert idle_shares(posed, 24.0) == (0.75, 0.5)
    assert bubble_rate(posed, 24.0) == 0.625
    assert idle_shares(posed, 0.0) == (0.0, 0.0)


def test_given_durations_replace_those_of_the_problem() -> None:
    posed = problem([offloadable()])
    rows = programs("0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0B0")
    durations = {parse_action("0OFFLOAD0"): 2.0, parse_action("0B0"): 0.5}
    run = simulate(posed, rows, durations)
    assert [at.end for at in run.times[0]] == [1, 3, 3, 13, 13.5]
    assert make_timeline(posed, rows, durations).makespan_ms == 13.5


def test_programs_that_get_stuck_are_illegal() -> None:
    with pytest.raises(IllegalScheduleError, match=r"wait\.cyclic"):
        simulate(problem([stage(0), stage(0)]), programs("0F0 0B0 1F0 1B0"))


def ticking(posed: Problem, rows: Programs) -> tuple[Ticking, tuple[float, float]]:
    clock = Ticking(posed, rows)
    return clock, clock.run()


@given(cases(menus=True, pairs=True))
def test_simulation_agrees_with_a_clock_that_ticks(case: Case) -> None:
    run = simulate(*case)
    clock, lengths = ticking(*case)
    for row, lane in zip(case.programs, run.times, strict=True):
        for action, at in zip(row, lane, strict=True):
            assert (at.start, at.end) == (clock.starts[action.bare], clock.ends[action.bare]), (
                action
            )
    assert (run.makespan_ms, run.span_ms) == lengths


# Timelines: lanes, bubbles and memory curves, by hand.


def test_actions_are_on_their_lanes_and_memory_steps_where_the_walk_says() -> None:
    posed = problem([offloadable(f=1, i=1, w=2, static_bytes=5, grad_sync_ms=3)], m=2)
    rows = programs("0F0 0OFFLOAD0 0F1 0RELEASE0 0I1 0W1 0RELOAD0 0I0 0W0")
    timeline = make_timeline(posed, rows)
    (row,) = timeline.intervals
    named = [(item.lane, item.action and str(item.action), item.start, item.end) for item in row]
    assert named == [
        ("compute", "0F0", 0, 1),
        ("d2h", "0OFFLOAD0", 1, 11),
        ("compute", "0F1", 1, 2),
        ("compute", "0I1", 11, 12),
        ("compute", "0W1", 12, 14),
        ("h2d", "0RELOAD0", 14, 24),
        ("compute", "0I0", 24, 25),
        ("compute", "0W0", 25, 27),
        ("grad_sync", None, 27, 30),
    ]
    (curve,) = timeline.memory
    # I keeps everything for W here (weight_context_bytes defaults to activation_bytes).
    assert curve == (
        (0, 5), (0, 10 * UNIT + 5), (1, 20 * UNIT + 5), (11, 10 * UNIT + 5), (14, 5),
        (14, 10 * UNIT + 5), (27, 5),
    )  # fmt: skip


@given(cases(menus=True))
def test_memory_starts_with_the_static_bytes_and_returns_to_them(case: Case) -> None:
    for device, curve in enumerate(make_timeline(*case).memory):
        static = case.problem.static_bytes_of(device)
        assert curve[0] == (0, static)
        assert curve[-1][1] == static


# --- Links of v2 are lanes: one message at a time, in the order of the sender's program.


def lanes(stages: list[dict[str, Any]], m: int, links: list[Any]) -> Problem:
    return problem(stages, m=m, links=links, format="optpipe/problem/v2")


def test_a_message_departs_when_its_producer_has_ended_and_the_one_before_has_left() -> None:
    links = [{"from": 0, "to": 1, "latency_ms": 3, "bandwidth_gb_per_s": 0.5},
             {"from": 1, "to": 0, "latency_ms": 4}]  # fmt: skip
    posed = lanes([stage(0, output_bytes=2 * UNIT), stage(1)], 2, links)
    rows = programs("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    got = spans(posed, rows)
    # 4 ms on the link, then 3 ms of latency: the second leaves at 5 + 4. Back there is no lane.
    assert [got["0F1"], got["1F0"], got["1F1"]] == [(1, 2), (8, 9), (12, 13)]
    assert [got["1B0"], got["1B1"], got["0B0"], got["0B1"]] == [
        (13, 15), (15, 17), (19, 21), (21, 23),
    ]  # fmt: skip
    sent = simulate(posed, rows).messages
    assert [(at.ready, at.depart, at.left) for at in sent] == [(1, 1, 5), (2, 5, 9)]


def test_v2_that_v1_can_say_is_v1_and_v1_never_queues() -> None:
    link = {"from": 0, "to": 1, "bandwidth_gb_per_s": 1.0}
    stages = [stage(0, output_bytes=5 * UNIT), stage(1)]
    old, new = problem(stages, m=4, links=[link]), lanes(stages, 4, [link])
    rows = one_f_one_b(2, 4)
    assert old.problem_hash != new.problem_hash
    assert simulate(old, rows).makespan_ms < simulate(new, rows).makespan_ms
    free = lanes(
        [stage(0, output_bytes=5 * UNIT), stage(1)], 4, [link | {"bandwidth_gb_per_s": None}]
    )
    plain = problem(stages, m=4, links=[link | {"bandwidth_gb_per_s": None}])
    assert (free.format, free.problem_hash) == ("optpipe/problem/v1", plain.problem_hash)
