"""Idle time by cause, and the slack of every lane: exact, however the problem is made."""

import math
from itertools import pairwise

import pytest
from hypothesis import event, example, given

from optpipe import Problem
from optpipe.explain import explain
from optpipe.explain.reasons import idle_times, lane_slacks
from optpipe.explain.values import IdleCause, LaneSlack
from optpipe.schedule import ActionType, Programs
from optpipe.simulate import make_timeline, simulate
from tests.building import UNIT, offloadable, one_f_one_b, problem, programs, stage
from tests.strategies import Case, cases, inexact_cases


def causes(posed, rows) -> list[dict[IdleCause, float]]:
    return [device.causes for device in idle_times(posed, rows, simulate(posed, rows))]


def test_warm_up_cool_down_and_the_way_back() -> None:
    posed = problem(
        [stage(0, f=2, i=3, w=1), stage(1, f=4, i=5, w=1)],
        links=[{"from": 0, "to": 1, "latency_ms": 0.5}],
    )
    assert causes(posed, programs("0F0 0I0 0W0", "1F0 1I0 1W0")) == [
        {IdleCause.BACKWARD: 9.5, IdleCause.LINK: 0.5},
        {IdleCause.WARM_UP: 2.5, IdleCause.COOL_DOWN: 3.5},
    ]


def test_a_forward_that_comes_late() -> None:
    posed = problem([stage(0, f=5), stage(1)], m=2)
    rows = programs("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    assert causes(posed, rows)[1] == {
        IdleCause.WARM_UP: 5, IdleCause.FORWARD: 4, IdleCause.COOL_DOWN: 2
    }  # fmt: skip


def test_a_release_a_reload_and_a_gradient_reduction() -> None:
    posed = problem([offloadable(f=1, i=1, w=2, grad_sync_ms=3)], m=2)
    rows = programs("0F0 0OFFLOAD0 0F1 0RELEASE0 0I1 0W1 0RELOAD0 0I0 0W0")
    assert causes(posed, rows) == [
        {IdleCause.RELOAD: 10, IdleCause.RELEASE: 9, IdleCause.GRAD_SYNC: 3}
    ]


def test_under_span_a_late_start_costs_nothing() -> None:
    posed = problem([stage(0, f=2), stage(1, f=4)], objective="span")
    rows = programs("0F0 0B0", "1F0 1B0")
    assert causes(posed, rows) == [{IdleCause.BACKWARD: 6}, {IdleCause.COOL_DOWN: 4}]


@given(cases(menus=True) | inexact_cases())
def test_causes_sum_to_the_idle_time_of_each_device(case: Case) -> None:
    run = simulate(*case)
    length = run.objective_ms(case.problem.objective)
    found = idle_times(*case, run)
    assert [item.device for item in found] == [d for d, row in enumerate(case.programs) if row]
    for item in found:
        assert all(ms > 0 for ms in item.causes.values())
        total = math.fsum(item.causes.values())
        assert math.isclose(total, item.idle_ms, rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(item.idle_ms + item.busy_ms, length, rel_tol=1e-9, abs_tol=1e-9)


@given(cases(menus=True))
def test_waits_between_actions_are_the_bubbles_of_the_timeline(case: Case) -> None:
    timeline = make_timeline(*case)
    outer = {IdleCause.WARM_UP, IdleCause.COOL_DOWN, IdleCause.GRAD_SYNC}
    for item in idle_times(*case, simulate(*case)):
        waits = math.fsum(ms for cause, ms in item.causes.items() if cause not in outer)
        lane = [one for one in timeline.intervals[item.device] if one.lane == "compute"]
        bubbles = math.fsum(after.start - before.end for before, after in pairwise(lane))
        assert math.isclose(waits, bubbles, rel_tol=1e-9, abs_tol=1e-9)


_KINDS = {"d2h": [ActionType.OFFLOAD], "h2d": [ActionType.RELOAD]}
_KINDS["compute"] = [kind for kind in ActionType if not kind.is_transfer]


def slower(given: Problem, rows: Programs, slack: LaneSlack, factor: float) -> float:
    """Simulate with all on one lane taking ``factor`` times as long."""
    first = slack.devices[0]
    changed, durations = given, {}
    if slack.lane == "link":
        links = [
            link.model_copy(update={"bandwidth_gb_per_s": (link.bandwidth_gb_per_s or 0) / factor})
            if (link.source, link.target) == slack.devices
            else link
            for link in given.links
        ]
        changed = given.model_copy(update={"links": tuple(links)})
    elif slack.lane == "grad sync":
        stages = [
            one.model_copy(update={"grad_sync_ms": one.grad_sync_ms * factor})
            if one.device == first
            else one
            for one in given.stages
        ]
        changed = given.model_copy(update={"stages": tuple(stages)})
    else:
        times = simulate(given, rows).times[first]
        durations = {
            action: factor * (at.end - at.start)
            for action, at in zip(rows[first], times, strict=True)
            if action.type in _KINDS[slack.lane] and action.type is not ActionType.RELEASE
        }
    return simulate(changed, rows, durations).objective_ms(given.objective)


_LINE = [stage(0, output_bytes=5 * UNIT), stage(1)]
_QUEUED = problem(
    _LINE, m=3, links=[{"from": 0, "to": 1, "bandwidth_gb_per_s": 1.0}], format="optpipe/problem/v2"
)
_GPIPE = programs("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
_COPIED = problem([offloadable()], m=2)
_AWAY = programs("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELEASE0 0RELEASE1 0RELOAD0 0RELOAD1 0B0 0B1")


@example(Case(_QUEUED, _GPIPE))
@example(Case(_COPIED, _AWAY))
@given(cases(menus=True))
def test_a_lane_may_lose_just_that(case: Case) -> None:
    """At its factor the step is as long as before, a little beyond it is longer."""
    run = simulate(case.problem, case.programs)
    length = run.objective_ms(case.problem.objective)
    shared = any(d.half_duplex or d.pcie_group is not None for d in case.problem.devices)
    for slack in lane_slacks(case.problem, case.programs, run):
        event(f"{slack.lane}: {'some' if slack.factor > 1 + 1e-9 else 'none'}")
        if slack.lane in {"both ways", "d2h", "h2d"} and shared:
            # Who comes first on a shared lane may change; the factor is that of this order.
            continue
        assert slower(case.problem, case.programs, slack, slack.factor) <= length * (1 + 1e-8)
        assert slower(case.problem, case.programs, slack, slack.factor * 1.01) > length


def test_it_is_told_least_first() -> None:
    """Two stages, one micro-batch; the reduction of 4 ms on device 1 starts at 8 of 15 ms."""
    given = problem([stage(0, 2, 3, 1, grad_sync_ms=4), stage(1, 2, 3, 1, grad_sync_ms=4)], m=1)
    rows = one_f_one_b(2, 1, "IW")
    explanation = explain(given, rows)
    assert explanation.length_ms == 15
    factors = {(one.lane, one.devices): one.factor for one in explanation.slacks}
    assert factors == {
        ("compute", (0,)): 1,
        ("grad sync", (0,)): 1,
        ("compute", (1,)): 1,
        ("grad sync", (1,)): pytest.approx(7 / 4),
    }
    assert [one.text for one in explanation.sentences if one.topic == "slack"] == [
        "compute of gpu0 and gpu1: whatever gets slower there makes the step longer",
        "gradient reduction of gpu0: whatever gets slower there makes the step longer",
        "gradient reduction of gpu1: may take 75% longer before the step does",
    ]
    assert lane_slacks(given, rows, simulate(given, rows), most=1) == ()
