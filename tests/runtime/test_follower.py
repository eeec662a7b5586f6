"""Training by the newest schedule: the same training, whatever comes and whoever is not there."""

import functools
import threading
from typing import Any, cast

import pytest

from optpipe import Problem, Schedule
from optpipe.client import Client
from optpipe.runtime import PipelineRunner, follow
from optpipe.schedule import ActionType
from tests.api.fake_drift_solver import DRIFT
from tests.api.live import make_settings, running
from tests.api.services.test_drift import measured
from tests.runtime import follow_cases, schedules
from tests.runtime.watching import until

pytestmark = pytest.mark.long

# Every schedule runs, one of them twice.
STEPS = 7
MICROBATCHES = 4


@functools.cache
def six_schedules() -> tuple[Problem, list[Schedule]]:
    """A problem and schedules of every kind for it; all keep the micro-batches' order."""
    problem = schedules.make_problem(schedules.V_SHAPE, MICROBATCHES)
    shares: tuple[dict[str, Any], ...] = (
        {},
        {"offload": 0.5},
        {"recompute": 0.5},
        {"offload": 0.4, "recompute": 0.3},
    )
    found = [
        schedules.make_schedule(
            problem,
            schedules.random_programs(problem, 50 + index, in_order=True, **shares[index % 4]),
        )
        for index in range(6)
    ]
    kinds = {action.type for one in found for program in one.programs for action in program}
    assert kinds == set(ActionType)
    assert len({one.program_hash for one in found}) == 6
    return problem, found


def train(ranks, first, later, problem, steps, **options):
    call = functools.partial(follow_cases.train_following, **options)
    return ranks.run(call, first, later, problem, steps, timeout=300)


@pytest.fixture(scope="module")
def stayed(ranks):
    """Train by the first schedule alone, once for all tests."""
    problem, found = six_schedules()
    return train(ranks, found[0], [], problem, STEPS, waits=False)


@pytest.mark.extended
def test_switching_before_every_step_is_the_same_training_to_the_last_bit(ranks, stayed):
    problem, found = six_schedules()
    switched = train(ranks, found[0], found[1:] + found[:1], problem, STEPS)
    for moved, kept in zip(switched, stayed, strict=True):
        assert (moved.losses, moved.digest) == (kept.losses, kept.digest)
        assert moved.version == STEPS
        assert (kept.version, moved.refusals) == (0, [])
        # The first schedule keeps everything, others do not.
        assert (kept.offloaded_bytes, moved.offloaded_bytes > 0) == (0, True)
    assert len(next(one.losses for one in switched if one.losses)) == STEPS


def test_a_version_that_does_not_fit_is_passed_over_and_the_next_one_runs(ranks):
    tight = schedules.make_problem(schedules.V_SHAPE, MICROBATCHES, limit=8 * MICROBATCHES - 1)
    room = schedules.make_problem(schedules.V_SHAPE, MICROBATCHES)
    lean = schedules.make_schedule(tight, _waves(1))
    greedy = schedules.make_schedule(room, _waves(MICROBATCHES))
    outcomes = train(ranks, lean, [greedy, lean], tight, 6)
    for outcome in outcomes:
        assert [refusal.version for refusal in outcome.refusals] == [1, 3, 5]
        assert outcome.version == 6
        assert "to 32 bytes, its limit is 31" in outcome.refusals[0].reason
    stayed = train(ranks, lean, [], tight, 6, waits=False)
    assert [one.digest for one in outcomes] == [one.digest for one in stayed]


def _waves(size):
    """Programs that run so many micro-batches forward, then backward, then the next ones."""
    placement = schedules.V_SHAPE
    rows: list[list[str]] = [[] for _ in range(1 + max(placement))]
    for first in range(0, MICROBATCHES, size):
        wave = range(first, first + size)
        for stage, home in enumerate(placement):
            rows[home] += [f"{stage}F{j}" for j in wave]
        for stage, home in reversed(list(enumerate(placement))):
            rows[home] += [f"{stage}B{j}" for j in wave]
    return schedules.from_text(map(" ".join, rows))


def test_training_goes_on_when_the_service_is_gone(ranks, stayed):
    problem, found = six_schedules()
    source = {"num_offered": 9, "num_answers": 3}
    gone = train(ranks, found[0], found[1:], problem, STEPS, waits=False, source=source)
    assert [one.digest for one in gone] == [one.digest for one in stayed]
    assert len({one.version for one in gone}) == 1
    assert gone[0].version in {1, 2, 3}


def test_nobody_waits_for_a_service_that_is_stuck(ranks, stayed):
    problem, found = six_schedules()
    options = {"version": 1, "sample_every": 2, "report_every": 4, "source": {"is_stuck": True}}
    outcomes = train(ranks, found[0], found[1:], problem, STEPS, waits=False, **options)
    assert [one.version for one in outcomes] == [1] * 4
    assert [one.digest for one in outcomes] == [one.digest for one in stayed]


def test_measured_times_are_reported_with_the_version_they_belong_to(ranks):
    problem, found = six_schedules()
    options = {"version": 7, "sample_every": 2, "report_every": 8, "num_reports": 1}
    outcomes = train(ranks, found[0], [], problem, 9, waits=False, **options)
    (report,) = outcomes[0].reports
    version, step, step_ms, measurements = report
    assert (version, step) == (7, 8)
    assert step_ms > 0
    stages = {sample.stage for sample in measurements.samples}
    assert stages == set(range(len(problem.stages)))
    assert len(measurements.samples) == len(measurements.spreads)
    assert measurements.problem(base=problem).stages[0].forward_ms > 0
    assert [one.version for one in outcomes] == [7] * 4


def test_a_run_that_follows_nothing_reports_nothing(ranks):
    problem, found = six_schedules()
    outcomes = train(ranks, found[0], [], problem, 5, waits=False, sample_every=1, report_every=2)
    assert outcomes[0].reports == []


def test_a_real_service_is_followed_and_then_killed(ranks, tmp_path):
    problem = _busy_first_stage()
    found = []
    settings = make_settings(tmp_path, max_wait_s=0.5, solve_path=DRIFT)
    with running(settings) as (url, _), Client(url) as client:
        deployment = client.deploy(problem)
        version, first = deployment.schedule(wait_s=60)
        call = functools.partial(ranks.run, follow_cases.train_served, timeout=300)
        service = (url, deployment.id)
        training = threading.Thread(
            target=lambda: found.extend(call(service, first, problem, tmp_path))
        )
        training.start()
        deployment.report(version, measured({(1, "F"): 5.0}), step=7, step_ms=9.5)
        until((tmp_path / "switched").exists)
    (tmp_path / "gone").touch()
    training.join()
    assert [one.version for one in found] == [2] * 4
    assert found[0].num_failures > 0
    stayed = train(ranks, first, [], problem, found[0].num_steps, waits=False)
    assert [one.digest for one in found] == [one.digest for one in stayed]


def _busy_first_stage():
    """A problem in which a slower second stage costs time, but makes no device busier than 0."""
    data = schedules.make_problem(schedules.LINEAR, MICROBATCHES).model_dump(by_alias=True)
    for stage, ms in zip(data["stages"], (20, 1, 1, 1), strict=True):
        names = ("forward_ms", "backward_input_ms", "backward_weight_ms", "backward_ms")
        stage.update(dict.fromkeys(names, ms))
    return Problem.parse(data)


@pytest.mark.parametrize("name", ["sample_every", "report_every", "agree_every"])
def test_a_period_of_no_steps_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} = 0: must be at least 1"):
        follow(None, cast("PipelineRunner", None), **cast("dict[str, Any]", {name: 0}))
