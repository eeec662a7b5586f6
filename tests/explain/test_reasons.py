"""Idle time by cause: what ended each wait, and sums that are exact."""

import math
from itertools import pairwise

from hypothesis import given

from optpipe.explain.reasons import idle_times
from optpipe.explain.values import IdleCause
from optpipe.simulate import make_timeline, simulate
from tests.building import offloadable, problem, programs, stage
from tests.explain.inexact import inexact_cases
from tests.strategies import Case, cases


def causes(made, rows) -> list[dict[IdleCause, float]]:
    return [device.causes for device in idle_times(made, rows, simulate(made, rows))]


def test_warm_up_cool_down_and_the_way_back() -> None:
    made = problem(
        [stage(0, f=2, i=3, w=1), stage(1, f=4, i=5, w=1)],
        links=[{"from": 0, "to": 1, "latency_ms": 0.5}],
    )
    assert causes(made, programs("0F0 0I0 0W0", "1F0 1I0 1W0")) == [
        {IdleCause.BACKWARD: 9.5, IdleCause.LINK: 0.5},
        {IdleCause.WARM_UP: 2.5, IdleCause.COOL_DOWN: 3.5},
    ]


def test_a_forward_that_comes_late() -> None:
    made = problem([stage(0, f=5), stage(1)], m=2)
    rows = programs("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    assert causes(made, rows)[1] == {
        IdleCause.WARM_UP: 5, IdleCause.FORWARD: 4, IdleCause.COOL_DOWN: 2
    }  # fmt: skip


def test_a_release_a_reload_and_a_gradient_reduction() -> None:
    made = problem([offloadable(f=1, i=1, w=2, grad_sync_ms=3)], m=2)
    rows = programs("0F0 0OFFLOAD0 0F1 0RELEASE0 0I1 0W1 0RELOAD0 0I0 0W0")
    assert causes(made, rows) == [
        {IdleCause.RELOAD: 10, IdleCause.RELEASE: 9, IdleCause.GRAD_SYNC: 3}
    ]


def test_under_span_a_late_start_costs_nothing() -> None:
    made = problem([stage(0, f=2), stage(1, f=4)], objective="span")
    rows = programs("0F0 0B0", "1F0 1B0")
    assert causes(made, rows) == [{IdleCause.BACKWARD: 6}, {IdleCause.COOL_DOWN: 4}]


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
