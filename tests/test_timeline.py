"""Timelines: lanes, bubbles and memory curves, by hand."""

from __future__ import annotations

from hypothesis import given

from optpipe import Timeline, make_timeline, parse_action
from optpipe.timeline import Interval, bubble_rate
from tests.building import everything_at_once, offloadable, problem, programs, stage
from tests.strategies import Case, cases

MB = 1_000_000


def one_round_trip() -> Timeline:
    made = problem([offloadable(f=1, i=1, w=2, static_bytes=5, grad_sync_ms=3)], m=2)
    return make_timeline(made, programs("0F0 0OFFLOAD0 0F1 0RELEASE0 0I1 0W1 0RELOAD0 0I0 0W0"))


def test_every_action_is_on_its_lane_and_a_release_on_none() -> None:
    (row,) = one_round_trip().intervals
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


def test_bubbles_are_where_the_compute_lane_is_idle() -> None:
    timeline = one_round_trip()
    assert timeline.bubbles == (((2, 11), (14, 24)),)
    assert (timeline.makespan_ms, timeline.span_ms) == (30, 30)
    assert timeline.makespan_bubble_rate == timeline.span_bubble_rate == 1 - 8 / 30


def test_the_memory_curve_steps_where_the_walk_says() -> None:
    (curve,) = one_round_trip().memory
    # I keeps everything for W here (weight_context_bytes defaults to activation_bytes).
    assert curve == (
        (0, 5), (0, 10 * MB + 5), (1, 20 * MB + 5), (11, 10 * MB + 5), (14, 5), (14, 10 * MB + 5),
        (27, 5),
    )  # fmt: skip


def test_rates_say_which_length_they_are_about() -> None:
    timeline = make_timeline(
        problem([stage(0), stage(1, w=4)]), programs("0F0 0I0 0W0", "1F0 1I0 1W0")
    )
    assert timeline.makespan_bubble_rate == 1 - 6 / 7
    assert timeline.span_bubble_rate == 0
    assert timeline.bubbles == (((1, 3),), ())


def test_a_problem_without_any_time_has_no_bubbles() -> None:
    made = problem([stage(0, 0, 0, 0)])
    assert bubble_rate(made, 0.0) == 0
    assert make_timeline(made, programs("0F0 0B0")).makespan_bubble_rate == 0


def test_given_durations_are_used() -> None:
    rows = programs("0F0 0B0")
    timeline = make_timeline(problem([stage()]), rows, {parse_action("0F0"): 7.0})
    assert timeline.intervals[0][0] == Interval(0, "compute", rows[0][0], 0, 7)


def test_every_feature_at_once_shows_every_lane() -> None:
    timeline = make_timeline(*everything_at_once())
    lanes = {item.lane for row in timeline.intervals for item in row}
    assert lanes == {"compute", "d2h", "h2d", "grad_sync"}


@given(cases())
def test_work_and_bubbles_fill_the_compute_lane(case: Case) -> None:
    timeline = make_timeline(*case)
    for row, bubbles in zip(timeline.intervals, timeline.bubbles, strict=True):
        lane = [item for item in row if item.lane == "compute"]
        if lane:
            worked = sum(item.end - item.start for item in lane)
            idle = sum(end - start for start, end in bubbles)
            assert worked + idle == lane[-1].end - lane[0].start


@given(cases())
def test_memory_starts_with_the_static_bytes_and_returns_to_them(case: Case) -> None:
    for device, curve in enumerate(make_timeline(*case).memory):
        static = case.problem.static_bytes_of(device)
        assert curve[0] == (0, static)
        assert curve[-1][1] == static
