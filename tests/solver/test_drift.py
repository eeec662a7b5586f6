"""What measured times do to a problem, and when they are a reason to solve again."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, evaluate
from optpipe.errors import OptPipeError
from optpipe.measurements import (
    DeviceFacts,
    MeasuredAction,
    Measurements,
    Sample,
    Transfer,
    measured_problem,
    times_of,
)
from optpipe.requests import FollowRequest
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from optpipe_solver.drift import bound_ms, find_drift, largest_change
from tests.api.live import two_stages
from tests.api.serial import serial
from tests.strategies import few, problems

SMALL = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1, "backward_ms": 1}


def uneven(**changes: Any) -> Problem:
    """Two devices, the second with little work: what it does costs time, but no bound."""
    data = two_stages()
    data["stages"][1] |= SMALL
    return Problem.parse(data | changes)


def measured(samples: dict[tuple[int, MeasuredAction], float], **facts: Any) -> Measurements:
    return Measurements(
        source="a test",
        samples=tuple(
            Sample(stage=stage, action=action, time_ms=ms)
            for (stage, action), ms in samples.items()
        ),
        **facts,
    )


def all_times(problem: Problem, factor: float = 1.0) -> Measurements:
    return measured(
        {
            (index, action): factor * ms
            for index, stage in enumerate(problem.stages)
            for action, ms in times_of(stage).items()
        }
    )


def as_measured(problem: Problem, *reports: Measurements) -> Problem:
    return measured_problem(problem, Measurements.medians_of(reports))


# What is measured


@given(problems())
def test_measuring_what_was_registered_changes_nothing(problem: Problem) -> None:
    rounded = as_measured(problem, all_times(problem))
    again = as_measured(rounded, all_times(rounded))
    assert again.problem_hash == rounded.problem_hash
    assert again.name == problem.name
    for stage, found in zip(problem.stages, rounded.stages, strict=True):
        assert times_of(found) == pytest.approx(times_of(stage), abs=1e-6)


@given(problems(), st.floats(0.5, 2.0))
def test_times_change_and_bytes_never(problem: Problem, factor: float) -> None:
    found = as_measured(problem, all_times(problem, factor))
    for before, after in zip(problem.stages, found.stages, strict=True):
        sizes = {name for name in type(before).model_fields if not name.endswith("_ms")}
        assert before.model_dump(include=sizes) == after.model_dump(include=sizes)
    assert found.devices == problem.devices
    assert found.num_microbatches == problem.num_microbatches


def test_a_time_is_the_median_over_reports_of_medians() -> None:
    def report(*times: float) -> Measurements:
        samples = tuple(Sample(stage=0, action="F", time_ms=ms) for ms in times)
        return Measurements(source="a test", samples=samples)

    found = as_measured(uneven(), report(10, 10, 500), report(12), report(11, 11, 11, 11, 99))
    assert found.stages[0].forward_ms == 11


def test_a_backward_that_was_not_run_goes_with_the_one_that_was() -> None:
    split = as_measured(uneven(), measured({(0, "I"): 15.0, (0, "W"): 12.0}))
    assert (split.stages[0].backward_ms, split.stages[0].forward_ms) == (13.5, 10)
    fused = as_measured(uneven(), measured({(0, "B"): 18.0}))
    assert times_of(fused.stages[0]) == {"F": 10, "I": 20, "W": 16, "B": 18}
    assert fused.stages[1] == uneven().stages[1]


def test_a_recomputation_that_was_not_run_goes_with_the_forward() -> None:
    data = two_stages()
    data["stages"][0] |= {"recompute_ms": 12, "checkpoint_bytes": 10}
    found = as_measured(Problem.parse(data), measured({(0, "F"): 5.0}))
    assert found.stages[0].recompute_ms == 6


def test_copies_and_messages_are_times_too() -> None:
    data = two_stages(
        devices=[{"memory_bytes": 4000, "d2h_gb_per_s": 20, "h2d_gb_per_s": 20}] * 2,
        links=[{"from": 0, "to": 1, "latency_ms": 0.1}],
    )
    problem = Problem.parse(data)
    facts = (DeviceFacts(d2h_gb_per_s=11.0, h2d_gb_per_s=12.0), DeviceFacts())
    sent = (Transfer(source=0, target=1, num_bytes=1000, time_ms=0.5),)
    found = as_measured(problem, measured({(0, "F"): 10.0}, devices=facts, transfers=sent))
    assert (found.devices[0].d2h_gb_per_s, found.devices[0].h2d_gb_per_s) == (11, 12)
    assert found.devices[1] == problem.devices[1]
    assert found.links[0].transfer_ms(1000) == 0.5


def test_rates_stay_where_copies_wait_for_each_other() -> None:
    shared = {"memory_bytes": 4000, "d2h_gb_per_s": 20, "h2d_gb_per_s": 20, "pcie_group": "a"}
    problem = Problem.parse(two_stages(devices=[shared, shared]))
    facts = (DeviceFacts(d2h_gb_per_s=9.0, h2d_gb_per_s=9.0),) * 2
    found = as_measured(problem, measured({(0, "F"): 10.0}, devices=facts))
    assert found.devices == problem.devices


def test_copy_rates_are_medians_over_reports() -> None:
    def report(rate: float | None) -> Measurements:
        return measured({(0, "F"): 1.0}, devices=(DeviceFacts(d2h_gb_per_s=rate),))

    reports = [report(9.0), report(None), report(2.0), report(8.0)]
    (facts,) = Measurements.medians_of([*reports, measured({(0, "F"): 1.0})]).devices
    assert (facts.d2h_gb_per_s, facts.h2d_gb_per_s) == (8.0, None)


# When it matters


def drift_of(planned: Problem, times: Measurements, threshold: float = 0.01):
    schedule = evaluate(planned, serial(planned, 0), Provenance(method="by hand"))
    request = FollowRequest(
        problem=planned, schedule=schedule, measurements=times, threshold=threshold, step=7
    )
    found, problem = find_drift(request)
    assert problem == as_measured(planned, times)
    return found


def test_a_slowdown_of_everything_is_no_reason() -> None:
    found = drift_of(uneven(), all_times(uneven(), 1.3))
    assert found.current_ms == pytest.approx(found.expected_ms)
    assert (found.is_solved, found.step) == (False, 7)
    assert found.reason.startswith(
        "the running schedule takes 156 ms under the measured times, at "
    )
    assert "1.00% (the threshold) more than the 156 ms" in found.reason


def test_a_busier_busiest_device_is_no_reason_but_the_other_one_is() -> None:
    assert not drift_of(uneven(), measured({(0, "F"): 20.0})).is_solved
    found = drift_of(uneven(), measured({(1, "F"): 5.0}))
    assert found.is_solved
    assert found.reason.startswith("forward of stage 1 takes 400% longer than planned; ")
    assert "takes 136 ms under the measured times" in found.reason
    assert found.reason.endswith(": solved again")


def test_the_threshold_decides_from_where_on() -> None:
    times = measured({(1, "F"): 5.0})
    drift = drift_of(uneven(), times).drift
    assert 0.02 < drift < 0.5
    assert not drift_of(uneven(), times, drift + 1e-6).is_solved
    assert drift_of(uneven(), times, drift - 1e-6).is_solved


@few(30)
@given(st.lists(st.floats(0.3, 3.0), min_size=2, max_size=2))
def test_what_is_expected_is_never_below_the_bound(factors: list[float]) -> None:
    planned = uneven()
    samples: dict[tuple[int, MeasuredAction], float] = {
        (index, action): factor * ms
        for index, factor in enumerate(factors)
        for action, ms in times_of(planned.stages[index]).items()
    }
    times = measured(samples)
    now = as_measured(planned, times)
    assert drift_of(planned, times).expected_ms >= bound_ms(now) * (1 - 1e-9)
    assert bound_ms(now) <= simulate(now, serial(now, 4)).makespan_ms * (1 + 1e-9)


def test_the_largest_change_is_named() -> None:
    planned = uneven()
    faster = as_measured(planned, measured({(0, "W"): 6.0, (0, "I"): 10.0, (1, "F"): 1.5}))
    assert (
        largest_change(planned, faster) == "weight backward of stage 0 takes 25% less than planned"
    )


# What is refused


def two_costs() -> dict[str, Any]:
    """The same two stages, and micro-batches of two lengths."""
    kind = {"forward_ms": 10, "backward_input_ms": 10, "backward_weight_ms": 8}
    kinds = [kind | {"activation_bytes": 100}, kind | {"activation_bytes": 200}]
    stages = [{"device": s, "costs": kinds} for s in range(2)]
    micro = [{"cost": j % 2} for j in range(4)]
    return two_stages(format="optpipe/problem/v2", stages=stages, microbatches=micro)


def in_slices() -> dict[str, Any]:
    """The same two stages, and micro-batches that are halves of two samples."""
    micro = [{"sample": j // 2} for j in range(4)]
    return two_stages(format="optpipe/problem/v2", microbatches=micro)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measurements": {"source": "x"}}, "measurements.samples is empty; measure the times"),
        (
            {"measurements": measured({(2, "F"): 1.0}).model_dump(exclude_defaults=True)},
            "measurements.samples name stage 2, but the problem has 2 stages",
        ),
        ({"problem": two_costs()}, "problem: has micro-batches of 2 costs"),
        ({"problem": in_slices()}, "problem: has samples or a given order"),
        ({"problem": in_slices() | {"microbatches": None, "order": "given"}}, "has samples or a g"),
        ({"threshold": 1}, "threshold = 1"),
        ({"schedule": {}}, "problem_hash: is missing"),
    ],
)
def test_a_request_whose_parts_do_not_fit_is_refused(changes, message) -> None:
    (body,) = FollowRequest.model_json_schema()["examples"]
    FollowRequest.parse(body)
    with pytest.raises(OptPipeError, match=message):
        FollowRequest.parse(body | changes)
