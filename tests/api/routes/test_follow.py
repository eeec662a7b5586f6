"""Running schedules that are compared with measured times, over HTTP and with the client."""

from collections.abc import Iterator
from typing import Any

import pytest

from optpipe import Problem, Schedule, check, evaluate
from optpipe.answers import Drift
from optpipe.client import Client, NoScheduleError, NotFoundError, RequestRefusedError, TrainingRun
from optpipe.errors import InfeasibleProblemError, InputError, ProblemError
from optpipe.measurements import MeasuredAction, Measurements, times_of
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from tests.api.fake_drift_solver import DRIFT
from tests.api.live import connected, make_settings, running, two_stages, until
from tests.api.routes.test_plan_jobs import four_layers
from tests.api.serial import serial
from tests.solver.test_drift import SMALL, all_times, measured, two_costs, uneven

SLOW = measured({(1, "F"): 5.0})
"""The second stage takes longer, which makes no device busier than the first one."""


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A server whose solver finds better schedules for a problem whose second stage is slower."""
    settings = make_settings(
        tmp_path_factory.mktemp("drift"), max_cells=1000, solve_path=DRIFT, follow_path=DRIFT
    )
    with running(settings) as (url, _):
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as opened:
        yield opened


def begin(client: Client, problem: Problem | None = None, **options: Any) -> TrainingRun:
    """A training run that has its first schedule."""
    run = client.training_run(client.submit(problem or uneven(), tags=["run-7"]), **options)
    run.schedule(wait_s=60)
    return run


def answered(run: TrainingRun) -> Schedule | None:
    """What the run switches to once the job that searches has ended."""
    found = None
    while run._search is not None:
        found = run.next_schedule(wait_s=5) or found
    return found


def length(problem: Problem, schedule: Schedule) -> float:
    return simulate(problem, schedule.programs).makespan_ms


def test_a_run_begins_with_the_schedule_of_its_job(client) -> None:
    job = client.submit(uneven(), tags=["run-7"])
    run = client.training_run(job)
    first = run.next_schedule(wait_s=60)
    assert (first, run.problem) == (client.schedule(job), client.problem(job))
    assert (run.job_id, run.tags) == (job.id, ("run-7",))
    assert answered(run) is None
    assert run.next_schedule() is None


def test_drift_is_solved_and_the_run_switches(client) -> None:
    run = begin(client)
    first = run.schedule()
    assert answered(run) is None
    run.report(first, SLOW, step=400, step_ms=140.0)
    found = answered(run)
    assert found is not None
    check(uneven(), found.programs)
    job = client.job(run.job_id)
    assert (job.kind, job.state, job.tags) == ("follow", "succeeded", ("run-7",))
    now = client.problem(job)
    assert run.problem == now
    assert (now.stages[1].forward_ms, now.problem_hash) == (5, found.problem_hash)
    assert found == client.schedule(job)
    assert length(now, found) == found.makespan_ms < length(now, first) * 0.99
    drift = client.drift(job)
    assert (drift.is_solved, drift.step, drift.step_ms) == (True, 400, 140.0)
    assert drift.current_ms == length(now, first)
    assert drift.reason.startswith("forward of stage 1 takes 400% longer than planned; ")
    logged = [one.text for one in client.events(job) if one.kind == "log"]
    assert drift.reason in logged
    # Under the same times the new schedule stays.
    run.report(found, SLOW)
    assert answered(run) is None
    again = client.drift(run.comparison_id)
    assert (again.is_solved, again.drift) == (False, 0.0)
    assert client.schedule(run.comparison_id).programs == found.programs
    history = [one.id for one in client.jobs(tag="run-7")]
    assert history[:2] == [run.comparison_id, job.id]
    assert run.job_id == job.id


def test_times_without_drift_are_not_solved_and_the_job_says_so(client) -> None:
    run = begin(client)
    first = run.schedule()
    answered(run)
    run.report(first, all_times(uneven(), 1.3))
    assert answered(run) is None
    job = client.job(run.comparison_id)
    assert (job.kind, job.state, job.num_schedules) == ("follow", "succeeded", 1)
    assert client.drift(job).reason.endswith(": not solved again")
    assert client.schedule(job).programs == first.programs
    # The next report is compared with the times that the schedule was made for.
    assert client.problem(job) == run.problem == uneven()
    begun = run.job_id
    run.report(first, all_times(uneven(), 1.4))
    assert answered(run) is None
    ids = [one.id for one in client.jobs(tag="run-7")]
    assert ids[:2] == [run.comparison_id, begun]
    assert job.id not in ids


def test_drift_counts_from_the_nearest_solved_times(client) -> None:
    """A search found nothing better for slow times; then the old times return."""
    problem = uneven(name="drift:15")
    run = begin(client, problem)
    first = run.schedule()
    answered(run)
    begun = run.job_id

    def report(samples: dict[tuple[int, MeasuredAction], float]) -> Drift:
        for _ in range(5):
            run.report(first, measured(samples))
            assert answered(run) is None
        drift: Drift = client.drift(run.comparison_id)
        return drift

    run.report(first, measured({(1, "F"): 14.0}))
    assert answered(run) is None
    solved = run.job_id
    assert client.drift(solved).is_solved
    again = report({(1, "F"): 14.1})
    assert (again.is_solved, run.job_id) == (False, solved)
    assert abs(again.drift) < 0.01
    back = report({(1, "F"): 1.0})
    assert (back.is_solved, back.drift) == (False, 0.0)
    assert (run.problem, run.job_id) == (problem, begun)
    for _ in range(3):
        run.report(first, measured({(1, "F"): 5.0}))
        assert answered(run) is None
    other = client.drift(run.job_id)
    assert (other.planned_ms, other.is_solved) == (first.makespan_ms, True)


def test_a_stopped_run_resumes_with_the_job_id(client) -> None:
    run = begin(client)
    answered(run)
    run.report(run.schedule(), SLOW)
    found = answered(run)
    resumed = client.training_run(run.job_id)
    assert resumed.schedule() == found
    assert (resumed.problem, resumed.tags) == (run.problem, ("run-7",))
    answered(resumed)
    resumed.report(found, SLOW)
    assert answered(resumed) is None
    assert not client.drift(resumed.comparison_id).is_solved
    assert resumed.job_id == run.job_id


def test_a_gain_below_the_threshold_is_no_switch(client) -> None:
    run = begin(client, threshold=0.5)
    first = run.schedule()
    answered(run)
    run.report(first, measured({(1, "F"): 30.0}))
    assert answered(run) is None
    drift = client.drift(run.comparison_id)
    assert (drift.threshold, client.schedule(run.comparison_id).programs) == (0.5, first.programs)


def test_a_worse_schedule_is_no_switch(client) -> None:
    """The solver finds its usual schedule, which is worse than the running one."""
    problem = uneven()
    job = client.submit(problem)
    run = client.training_run(job)
    run.schedule(wait_s=60)
    answered(run)
    better = evaluate(problem, serial(problem, 4), Provenance(method="by hand"))
    run.report(better, measured({(1, "F"): 1.9, (1, "B"): 9.0}))
    assert answered(run) is None
    drift = client.drift(run.job_id)
    assert drift.is_solved
    assert client.schedule(run.job_id).programs == better.programs
    assert client.job(run.job_id).objective_ms == drift.current_ms


def test_reports_while_a_job_searches_wait_and_count_in_the_comparison(tmp_path) -> None:
    """Better schedules of a job that runs are compared under the newest measured times."""
    data = two_stages("improve:3:0.5")
    data["stages"][1] |= SMALL
    with running(make_settings(tmp_path)) as (url, _), Client(url) as client:
        run = begin(client, Problem.parse(data))
        # A fused backward takes longer than I and W together: each improvement is worse.
        run.report(run.schedule(), measured({(0, "I"): 1.0, (0, "W"): 1.0, (0, "B"): 9.0}))
        assert answered(run) is None
        assert len(list(client.jobs())) == 1


def test_better_schedules_of_a_running_job_come_with_pauses(tmp_path) -> None:
    with running(make_settings(tmp_path)) as (url, _), Client(url) as client:
        run = begin(client, Problem.parse(two_stages("improve:3:0.3")))
        first = run.schedule()
        found = []
        while run._search is not None:
            found += [one for one in [run.next_schedule(wait_s=5)] if one is not None]
        # The first switch is at once. The end of the job comes within the pause after it.
        lengths = [one.makespan_ms for one in [first, *found]]
        assert len(found) == 2
        assert lengths == sorted(lengths, reverse=True)
        assert found[-1] == client.schedule(run.job_id)


def test_a_worker_that_dies_goes_on_from_the_running_schedule(tmp_path) -> None:
    """The second attempt has the schedule that the first one stored."""
    log = tmp_path / "attempts"
    problem = uneven(name=f"dies:2:{log}")
    running_schedule = evaluate(problem, serial(problem, 0), Provenance(method="by hand"))
    with running(make_settings(tmp_path)) as (url, _), Client(url) as client:
        job = client.submit_follow(problem, running_schedule, SLOW)
        schedule = client.result(job)
        assert log.read_text().splitlines() == ["with start", "with start"]
        assert client.job(job).attempt == 2
        assert schedule.makespan_ms < client.drift(job).current_ms


@pytest.mark.extended
def test_a_device_that_is_30_percent_slower_gets_a_better_schedule_from_the_solver(tmp_path):
    stages = [
        {
            "device": device,
            "forward_ms": ms,
            "backward_input_ms": ms,
            "backward_weight_ms": 0.8 * ms,
            "backward_ms": 1.9 * ms,
            "activation_bytes": 1000,
            "weight_context_bytes": 500,
        }
        for device, ms in enumerate((12.0, 8.0, 9.0, 9.0))
    ]
    devices = [{"memory_bytes": 5000}] * 4
    problem = Problem.parse(two_stages(num_microbatches=8, devices=devices, stages=stages))
    real = dict.fromkeys(("solve_path", "follow_path"), "optpipe_solver:solve")
    settings = make_settings(tmp_path, lease_s=60.0, overtime_s=600.0, **real)
    with running(settings) as (url, _), Client(url) as client:
        run = client.training_run(client.submit(problem, work_limit=1.0))
        run.schedule(wait_s=300)
        answered(run)
        slow = times_of(problem.stages[2])
        run.report(run.schedule(), measured({(2, one): 1.3 * ms for one, ms in slow.items()}))
        found = answered(run)
        drift = client.drift(run.job_id)
        assert drift.is_solved
        assert found is not None
        assert found.makespan_ms < drift.current_ms * 0.95


def test_what_cannot_begin_says_why(client) -> None:
    tight = uneven(devices=[{"memory_bytes": 10}, {"memory_bytes": 10}])
    with pytest.raises(InfeasibleProblemError):
        client.training_run(client.submit(tight)).schedule(wait_s=60)
    with pytest.raises(NotFoundError):
        client.training_run("0" * 32).schedule()
    with pytest.raises(InputError, match="has micro-batches with costs"):
        client.training_run(client.submit(Problem.parse(two_costs()))).schedule(wait_s=60)
    with pytest.raises(NoScheduleError, match=r"is a solve and has no drift; POST /v1/follow"):
        client.drift(client.submit(uneven()))


def test_a_plan_is_followed_after_its_end(tmp_path) -> None:
    with connected(make_settings(tmp_path)) as http, Client(str(http.base_url)) as client:
        job_id = http.post("/v1/jobs", json={"model": four_layers("improve:1:2")}).json()["id"]
        with pytest.raises(InputError, match="is a plan, whose schedules are for different"):
            client.training_run(job_id).schedule(wait_s=60)
        client.result(job_id)
        run = client.training_run(job_id)
        assert run.schedule() == client.schedule(job_id)


def test_a_deleted_job_is_reported_once_and_the_run_goes_on(client) -> None:
    run = begin(client)
    first = run.schedule()
    until(lambda: client.job(run.job_id).is_finished)
    client.delete(run.job_id)
    with pytest.raises(NotFoundError):
        run.next_schedule()
    assert run.next_schedule() is None
    run.report(first, SLOW)
    assert answered(run) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 600}, "num_microbatches"),
        ({"num_microbatches": 3}, "0F3"),
        ({"devices": [{"memory_bytes": 999}] * 2}, "its limit is 999"),
    ],
)
def test_a_running_schedule_that_is_illegal_is_refused(client, changes, message) -> None:
    running_schedule = evaluate(uneven(), serial(uneven(), 0), Provenance(method="by hand"))
    with pytest.raises((ProblemError, RequestRefusedError), match=message):
        client.submit_follow(uneven(**changes), running_schedule, SLOW)


def test_stored_times_do_not_grow_with_samples(client) -> None:
    samples = tuple(
        sample.model_copy(update={"time_ms": float(ms % 7)})
        for ms in range(5000)
        for sample in SLOW.samples
    )
    running_schedule = evaluate(uneven(), serial(uneven(), 0), Provenance(method="by hand"))
    job = client.submit_follow(
        uneven(), running_schedule, Measurements(source="x", samples=samples)
    )
    assert client.result(job) is not None
    same = client.submit_follow(uneven(), running_schedule, measured({(1, "F"): 3.0}))
    assert same.problem_hash != job.problem_hash
