"""What measured times do to a problem, and when they are a reason to solve again."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, evaluate, load_problem, load_schedule
from optpipe.errors import IllegalScheduleError, RequestError
from optpipe.measurements import DeviceFacts, MeasuredAction, Measurements, Sample, Transfer
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from optpipe_api.deployments import DeploymentRecord, Documents
from optpipe_api.services.deployments import (
    bound_ms,
    check_stages,
    judged,
    largest_change,
    measured_problem,
    times_of,
    under,
)
from optpipe_api.services.submission import condense_report
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
    documents = [condense_report(report) for report in reports]
    return load_problem(measured_problem(text_of(problem), documents))


def text_of(problem: Problem) -> str:
    return problem.model_dump_json(by_alias=True)


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


def test_what_is_kept_of_a_report_does_not_grow_with_its_samples() -> None:
    samples = tuple(Sample(stage=0, action="F", time_ms=ms % 7) for ms in range(5000))
    kept = condense_report(Measurements(source="a test", samples=samples))
    assert len(json.loads(kept)["samples"]) == 1
    assert len(kept) < 300


def test_a_report_of_other_stages_is_refused() -> None:
    registered, second = text_of(uneven()), condense_report(measured({(1, "F"): 1.0}))
    check_stages(registered, second)
    with pytest.raises(RequestError, match="name stage 2, but the deployment has 2"):
        check_stages(registered, condense_report(measured({(2, "F"): 1.0})))


# When it matters


def deployment(planned_ms: float, threshold: float = 0.01) -> DeploymentRecord:
    known: dict[str, Any] = dict.fromkeys(field.name for field in fields(DeploymentRecord))
    known |= {"version": 1, "num_reports": 3, "planned_ms": planned_ms, "threshold": threshold}
    return DeploymentRecord(**known)


def judge(planned: Problem, now: Problem, threshold: float = 0.01):
    programs = serial(planned, 0)
    planned_ms = simulate(planned, programs).makespan_ms
    documents = Documents(problem="", measured=text_of(now), planned=text_of(planned))
    schedule = evaluate(planned, programs, Provenance(method="by hand")).model_dump_json()
    return judged(deployment(planned_ms, threshold), documents, schedule)


def test_a_slowdown_of_everything_is_no_reason() -> None:
    planned = uneven()
    judgement = judge(planned, as_measured(planned, all_times(planned, 1.3)))
    assert judgement.current_ms == pytest.approx(judgement.expected_ms)
    assert (judgement.reason, judgement.problem, judgement.num_reports) == (None, None, 3)


def test_a_busier_busiest_device_is_no_reason_but_the_other_one_is() -> None:
    planned = uneven()
    slow_first = as_measured(planned, measured({(0, "F"): 20.0}))
    assert judge(planned, slow_first).reason is None
    slow_second = as_measured(planned, measured({(1, "F"): 5.0}))
    judgement = judge(planned, slow_second)
    assert judgement.problem == text_of(slow_second)
    assert judgement.reason is not None
    assert judgement.reason.startswith("drift: forward of stage 1 takes 400% longer than planned; ")
    assert "takes 136 ms under the measured times" in judgement.reason


def test_the_threshold_decides_from_where_on() -> None:
    planned = uneven()
    now = as_measured(planned, measured({(1, "F"): 5.0}))
    drift = judge(planned, now).current_ms / judge(planned, now).expected_ms - 1
    assert 0.02 < drift < 0.5
    assert judge(planned, now, drift + 1e-6).reason is None
    assert judge(planned, now, drift - 1e-6).reason is not None


@few(30)
@given(st.lists(st.floats(0.3, 3.0), min_size=2, max_size=2))
def test_what_is_expected_is_never_below_the_bound(factors: list[float]) -> None:
    planned = uneven()
    samples: dict[tuple[int, MeasuredAction], float] = {
        (index, action): factor * ms
        for index, factor in enumerate(factors)
        for action, ms in times_of(planned.stages[index]).items()
    }
    now = as_measured(planned, measured(samples))
    assert judge(planned, now).expected_ms >= bound_ms(now) * (1 - 1e-9)
    assert bound_ms(now) <= simulate(now, serial(now, 4)).makespan_ms * (1 + 1e-9)


def test_the_largest_change_is_named() -> None:
    planned = uneven()
    faster = as_measured(planned, measured({(0, "W"): 6.0, (0, "I"): 10.0, (1, "F"): 1.5}))
    assert (
        largest_change(planned, faster) == "weight backward of stage 0 takes 25% less than planned"
    )


# A schedule under other times


def test_a_schedule_gets_the_numbers_of_other_times_and_loses_its_bound() -> None:
    planned = uneven()
    now = as_measured(planned, measured({(1, "F"): 5.0}))
    given = evaluate(planned, serial(planned, 0), Provenance(method="by hand"), bound_ms=80.0)
    same, _ = under(text_of(planned), given.model_dump_json())
    assert load_schedule(same).bound_ms == 80.0
    found, length_ms = under(text_of(now), given.model_dump_json())
    schedule = load_schedule(found)
    assert (schedule.bound_ms, schedule.problem_hash) == (None, now.problem_hash)
    assert schedule.makespan_ms == length_ms == 136
    assert schedule.programs == given.programs


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    planned = uneven()
    given = evaluate(planned, serial(planned, 0), Provenance(method="by hand"))
    smaller = uneven(devices=[{"memory_bytes": 999}] * 2)
    with pytest.raises(IllegalScheduleError):
        under(text_of(smaller), given.model_dump_json())


def test_drift_is_known_once_judged() -> None:
    known = deployment(100.0)
    assert known.drift is None
    assert replace(known, current_ms=105.0, expected_ms=100.0).drift == pytest.approx(0.05)
