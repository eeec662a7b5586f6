"""What a lane may lose before the step is longer: tried with the simulator, lane by lane."""

from __future__ import annotations

import pytest
from hypothesis import event, example, given

from optpipe import Problem, simulate
from optpipe.explain import explain
from optpipe.explain.slack import lane_slacks
from optpipe.explain.values import LaneSlack
from optpipe.schedule import ActionType, Programs
from tests.building import UNIT, offloadable, one_f_one_b, problem, programs, stage
from tests.strategies import Case, cases

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
    _LINE,
    m=3,
    links=[{"from": 0, "to": 1, "bandwidth_gb_per_s": 1.0}],
    format="optpipe/problem/v2",
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
    told = explain(given, rows)
    assert told.length_ms == 15
    factors = {(one.lane, one.devices): one.factor for one in told.slacks}
    assert factors == {
        ("compute", (0,)): 1,
        ("grad sync", (0,)): 1,
        ("compute", (1,)): 1,
        ("grad sync", (1,)): pytest.approx(7 / 4),
    }
    assert [one.text for one in told.sentences if one.topic == "slack"] == [
        "compute of gpu0 and gpu1: whatever gets slower there makes the step longer",
        "gradient reduction of gpu0: whatever gets slower there makes the step longer",
        "gradient reduction of gpu1: may take 75 % longer before the step does",
    ]
    assert lane_slacks(given, rows, simulate(given, rows), most=1) == ()
