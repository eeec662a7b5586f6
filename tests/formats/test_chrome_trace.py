"""A trace file obeys the Trace Event Format and tells the simulated times."""

import json
from itertools import pairwise
from typing import Any

import pytest

from optpipe import Problem, load_csv, simulate
from optpipe.formats.exports import dump_chrome_trace
from tests import building

METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


@pytest.fixture
def problem() -> Problem:
    """Offload, a gradient reduction, and times that are no whole microseconds."""
    device = {"memory_bytes": 16, "d2h_gb_per_s": 7e-6, "h2d_gb_per_s": 7e-6}
    sizes = {"activation_bytes": 6, "offload_bytes": 6}
    stage = building.stage(0, 1 / 3, 0.1 + 0.2, 1 / 7, grad_sync_ms=0.7, **sizes)
    return building.problem([stage], [device], m=3, name="odd")


@pytest.fixture
def programs():
    """One device whose micro-batch 0 goes to the host and comes back."""
    return load_csv("0F0,0OFFLOAD0,0RELEASE0,0F1,0F2,0I1,0W1,0I2,0W2,0RELOAD0,0B0\n")


@pytest.fixture
def events(problem, programs):
    """The events of its trace, read back from the text."""
    return json.loads(dump_chrome_trace(problem, programs))["traceEvents"]


def test_every_event_has_the_fields_its_phase_demands(events) -> None:
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                assert isinstance(event["cat"], str)
            case "C":
                assert all(isinstance(value, int) for value in event["args"].values())
            case "M":
                assert list(event["args"]) == [METADATA[event["name"]]]
            case other:
                pytest.fail(f"phase {other!r} is none that we write")


def test_events_of_one_thread_never_overlap_even_after_rounding(events) -> None:
    lanes: dict[int, list[dict[str, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append(event)
    for lane in lanes.values():
        lane.sort(key=lambda event: event["ts"])
        for left, right in pairwise(lane):
            assert round((left["ts"] + left["dur"]) * 1000) <= round(right["ts"] * 1000)


def test_a_schedule_without_transfers_has_no_empty_lanes(problem) -> None:
    compute_only = load_csv("0F0,0B0,0F1,0B1,0F2,0B2\n")
    events = json.loads(dump_chrome_trace(problem, compute_only))["traceEvents"]
    named = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert named == ["compute", "gradient reduction"]
    (reduction,) = [event for event in events if event["name"] == "gradient reduction"]
    assert reduction["dur"] == pytest.approx(700)


def test_the_memory_counter_reaches_the_peak_of_the_walk(events) -> None:
    levels = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert max(levels) == 12
    assert levels[0] == 0
    assert levels[-1] == 0


def test_messages_that_queue_stand_in_a_process_of_their_link() -> None:
    link = {"from": 0, "to": 1, "bandwidth_gb_per_s": 1.0}
    sized = [building.stage(0, output_bytes=5 * building.UNIT), building.stage(1)]
    given = building.problem(sized, m=2, links=[link], format="optpipe/problem/v2")
    found = json.loads(dump_chrome_trace(given, building.one_f_one_b(2, 2)))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    sent = [e for e in found if e.get("cat") == "message" and not e["args"]["backward"]]
    assert [names[e["pid"]] for e in sent] == ["link 0 -> 1"] * 2
    assert [(e["ts"], e["dur"], e["args"]["waited_ms"]) for e in sent] == [
        (1000, 5000, 0), (6000, 5000, 4),
    ]  # fmt: skip


def test_arrows_lead_from_each_pass_to_the_pass_of_another_device_that_needs_it() -> None:
    """Perfetto binds an end of an arrow to the slice that is open at its time."""
    given = building.problem([building.stage(0), building.stage(1)], m=2)
    events = json.loads(dump_chrome_trace(given, building.one_f_one_b(2, 2)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]

    def slice_at(end: dict[str, Any]) -> str:
        """The slice that is open then, the later one where two meet."""
        found = [
            one
            for one in slices
            if one["pid"] == end["pid"]
            and one["tid"] == end["tid"]
            and one["ts"] <= end["ts"] <= one["ts"] + one["dur"]
        ]
        return str(max(found, key=lambda one: one["ts"])["name"])

    ends = {kind: [event for event in events if event["ph"] == kind] for kind in "sf"}
    assert [event["id"] for event in ends["s"]] == [event["id"] for event in ends["f"]]
    assert len({event["id"] for event in ends["s"]}) == len(ends["s"])
    assert all(event["bp"] == "e" for event in ends["f"])
    arrows = {(slice_at(s), slice_at(f)) for s, f in zip(ends["s"], ends["f"], strict=True)}
    assert arrows == {("0F0", "1F0"), ("0F1", "1F1"), ("1B0", "0B0"), ("1B1", "0B1")}


def test_every_action_that_takes_time_is_there_at_its_simulated_time(
    problem, programs, events
) -> None:
    run = simulate(problem, programs)
    drawn = {event["name"]: event for event in events if event["ph"] == "X"}
    for action, at in zip(programs[0], run.times[0], strict=True):
        if action.type == "RELEASE":
            assert str(action) not in drawn
            continue
        assert drawn[str(action)]["ts"] == pytest.approx(at.start * 1e3, abs=1e-3)
        assert drawn[str(action)]["dur"] == pytest.approx((at.end - at.start) * 1e3, abs=2e-3)
    assert drawn["gradient reduction"]["dur"] == pytest.approx(700)
