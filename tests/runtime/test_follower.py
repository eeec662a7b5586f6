"""Training by the best schedule known: the same training, whatever comes and whatever fails."""

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
        assert moved.num_switches == STEPS
        assert (kept.num_switches, moved.refusals) == (0, [])
        # The first schedule keeps everything, others do not.
        assert (kept.offloaded_bytes, moved.offloaded_bytes > 0) == (0, True)
    assert len(next(one.losses for one in switched if one.losses)) == STEPS


def test_a_schedule_that_does_not_fit_is_refused_and_the_next_one_runs(ranks):
    tight = schedules.make_problem(schedules.V_SHAPE, MICROBATCHES, limit=8 * MICROBATCHES - 1)
    room = schedules.make_problem(schedules.V_SHAPE, MICROBATCHES)
    lean = schedules.make_schedule(tight, _waves(1))
    greedy = schedules.make_schedule(room, _waves(MICROBATCHES))
    outcomes = train(ranks, lean, [greedy, lean], tight, 6)
    for outcome in outcomes:
        assert [refusal.step for refusal in outcome.refusals] == [0, 2, 4]
        assert outcome.num_switches == 3
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


def test_nobody_waits_for_a_service_that_is_stuck(ranks, stayed):
    problem, found = six_schedules()
    options = {"sample_every": 2, "report_every": 4, "is_stuck": True}
    outcomes = train(ranks, found[0], found[1:], problem, STEPS, waits=False, **options)
    assert [one.num_switches for one in outcomes] == [0] * 4
    assert [one.digest for one in outcomes] == [one.digest for one in stayed]


def test_measured_times_are_reported_with_the_schedule_that_ran(ranks):
    problem, found = six_schedules()
    options = {"sample_every": 2, "report_every": 8, "num_reports": 1}
    outcomes = train(ranks, found[0], [], problem, 9, waits=False, **options)
    (report,) = outcomes[0].reports
    program_hash, step, step_ms, measurements = report
    assert (program_hash, step) == (found[0].program_hash, 8)
    assert step_ms > 0
    stages = {sample.stage for sample in measurements.samples}
    assert stages == set(range(len(problem.stages)))
    assert len(measurements.samples) == len(measurements.spreads)
    assert measurements.problem(base=problem).stages[0].forward_ms > 0


def serve(ranks, folder, url, job_id, **options):
    """Train by a real service that is told that stage 1 takes 30% longer than planned."""
    call = functools.partial(follow_cases.train_served, slow_ms=1.3 * SECOND_MS, **options)
    return ranks.run(call, url, job_id, timeout=300)


def test_a_slower_device_gets_a_better_schedule_and_a_killed_service_is_missed(ranks, tmp_path):
    problem = _busy_first_stage()
    found: list[follow_cases.Served] = []
    settings = make_settings(tmp_path, max_wait_s=0.5, solve_path=DRIFT, follow_path=DRIFT)
    with running(settings) as (url, _), Client(url) as client:
        job = client.submit(problem, tags=["run"])
        first = client.result(job)
        options = {"steps": 10, "gone": tmp_path / "gone"}
        training = threading.Thread(
            target=lambda: found.extend(serve(ranks, tmp_path, url, job.id, **options))
        )
        training.start()
        until((tmp_path / "switched").exists)
        *_, followed, known = client.jobs(tag="run")
        better, drift = client.schedule(followed), client.drift(followed)
        assert (known.id, followed.kind) == (job.id, "follow")
    (tmp_path / "gone").touch()
    training.join()
    assert [one.num_switches for one in found] == [1] * 4
    assert found[0].num_failures > 0
    assert {one.program_hash for one in found} == {better.program_hash}
    assert better.objective_ms < drift.current_ms * 0.99
    assert "of stage 1 takes 30% longer than planned" in drift.reason
    stayed = train(ranks, first, [], problem, found[0].num_steps, waits=False)
    assert [one.digest for one in found] == [one.digest for one in stayed]


def test_a_killed_run_resumes_with_the_id_of_its_job(ranks, tmp_path):
    settings = make_settings(tmp_path, max_wait_s=0.5, solve_path=DRIFT, follow_path=DRIFT)
    with running(settings) as (url, _), Client(url) as client:
        job = client.submit(_busy_first_stage(), tags=["run"])
        killed = serve(ranks, tmp_path, url, job.id, steps=1)
        job_id = killed[0].job_id
        assert (client.job(job_id).kind, job_id == job.id) == ("follow", False)
        better = client.schedule(job_id)
        # The resumed run begins with the better schedule, and its times are those planned now.
        call = functools.partial(follow_cases.train_resumed, slow_ms=1.3 * SECOND_MS)
        resumed = ranks.run(call, url, job_id, timeout=300)
        assert {one.program_hash for one in resumed} == {better.program_hash}
        assert {one.num_switches for one in resumed} == {0}
        assert resumed[0].job_id == job_id
        drift = client.drift(resumed[0].comparison_id or "")
        assert (drift.drift, drift.is_solved) == (0.0, False)


SECOND_MS = 14.0


def _busy_first_stage() -> Problem:
    """A problem in which a slower second stage costs time, but makes no device busier than 0."""
    data = schedules.make_problem(schedules.LINEAR, MICROBATCHES).model_dump(by_alias=True)
    data["name"] = "drift:15"
    for stage, ms in zip(data["stages"], (20, *[SECOND_MS] * 3), strict=True):
        names = ("forward_ms", "backward_input_ms", "backward_weight_ms", "backward_ms")
        stage.update(dict.fromkeys(names, ms))
    return Problem.parse(data)


@pytest.mark.parametrize("name", ["sample_every", "report_every"])
def test_a_period_of_no_steps_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} = 0: must be at least 1"):
        follow(None, cast("PipelineRunner", None), **cast("dict[str, Any]", {name: 0}))
