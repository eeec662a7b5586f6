"""The steps of a deployment one by one: what is published when, killed servers, two servers."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from optpipe import Problem, evaluate, load_problem, load_schedule
from optpipe.answers import JobOptions, JobState
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from optpipe_api.deployments import DeploymentRecord, NewDeployment, Report
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.jobs import AttemptOutcome, Claim, JobEvent, TracePoint
from optpipe_api.services.deployments import PUBLISH_EVERY_S, Steps, measured_problem
from optpipe_api.services.submission import condense_report, solved_job
from optpipe_api.store import Stores, open_stores
from tests.api.live import Clock
from tests.api.serial import serial
from tests.api.services.test_drift import measured as report_of
from tests.api.services.test_drift import uneven
from tests.api.store.test_jobs import document_text, together


class Bench:
    """A server's steps on a database, without a server: tests decide what jobs find, and when."""

    def __init__(self, stores: Stores, clock: Clock) -> None:
        self.stores, self.clock = stores, clock
        self.news: list[str] = []
        self.dies_after_adding = False
        self.max_queued = 100
        self.claim: Claim | None = None
        self.steps = Steps(stores.deployments, stores.jobs, self._submit, self.news.append, clock)

    def _submit(self, known: DeploymentRecord, problem: Problem, start: Any) -> Any:
        new = replace(
            solved_job(problem, known.options),
            idempotency_key=f"{known.id}/{known.num_solves}",
            deployment_id=known.id,
            start=start,
        )
        job, _ = self.stores.jobs.add(new, max_queued=self.max_queued)
        if self.dies_after_adding:
            raise KeyboardInterrupt
        return job

    def register(self, threshold: float = 0.01) -> DeploymentRecord:
        new = NewDeployment(
            name="run",
            problem=uneven().model_dump_json(by_alias=True),
            options=JobOptions(time_limit_s=1.0),
            threshold=threshold,
            request_hash="",
        )
        return self.stores.deployments.add(new, max_queued=100)[0]

    def now(self, known: DeploymentRecord) -> DeploymentRecord:
        return self.stores.deployments.get(known.id)

    def take(self, known: DeploymentRecord) -> DeploymentRecord:
        self.steps.take(known.id)
        return self.now(known)

    def find(self, num_fused: int, *, ends: bool = False) -> None:
        """Let the running job find a schedule; it claims the next one where none runs."""
        if self.claim is None:
            self.claim = self.stores.jobs.claim("worker", 1000.0)
        assert self.claim is not None
        problem = load_problem(self.claim.documents["problem"])
        schedule = evaluate(problem, serial(problem, num_fused), Provenance(method="fake"))
        point = TracePoint(seconds=0.1, method="fake", objective_ms=schedule.objective_ms)
        self.stores.jobs.record(
            self.claim.lease,
            point,
            1000.0,
            documents={"schedule": schedule.model_dump_json(by_alias=True)},
        )
        if ends:
            self.end()

    def end(self, event: JobEvent = JobEvent.SUCCEED) -> None:
        if self.claim is None:
            self.claim = self.stores.jobs.claim("worker", 1000.0)
        assert self.claim is not None
        self.stores.jobs.finish(self.claim.lease, AttemptOutcome(event=event))
        self.claim = None

    def report(self, known: DeploymentRecord, *, second_forward_ms: float) -> None:
        document = condense_report(report_of({(1, "F"): second_forward_ms}))
        report = Report(version=1, document=document)
        self.stores.deployments.report(known.id, report, measured_problem)

    def reasons(self, known: DeploymentRecord) -> list[str]:
        return [one.reason for one in self.stores.deployments.versions(known.id)]


@pytest.fixture
def bench(tmp_path, clock) -> Iterator[Bench]:
    with closing(open_stores(f"sqlite:///{tmp_path}/jobs.db", clock)) as stores:
        yield Bench(stores, clock)


def test_the_first_schedule_is_a_version_at_once_and_others_after_a_while(bench, clock) -> None:
    known = bench.take(bench.register())
    assert (known.job_id is None, known.version) == (False, 0)
    bench.find(0)
    assert bench.take(known).version == 1
    bench.find(1)
    assert bench.take(known).version == 1
    clock.now += PUBLISH_EVERY_S
    assert bench.take(known).version == 2
    bench.find(2, ends=True)
    settled = bench.take(known)
    assert (settled.version, settled.job_id, settled.error) == (3, None, None)
    assert bench.news == [known.id] * 3
    first, second, third = bench.reasons(known)
    assert first == "registered"
    assert second == "improved: 111 ms instead of 120 ms, 7.5% shorter"
    assert third.startswith("improved: 102 ms instead of 111 ms")


def test_a_gain_below_the_threshold_is_no_version(bench, clock) -> None:
    known = bench.take(bench.register(threshold=0.1))
    bench.find(0)
    bench.take(known)
    clock.now += PUBLISH_EVERY_S
    bench.find(1)
    assert bench.take(known).version == 1
    bench.find(2, ends=True)
    assert bench.take(known).version == 2
    assert bench.reasons(known)[1] == "improved: 102 ms instead of 120 ms, 15.0% shorter"


def test_nor_is_it_one_when_the_job_ends(bench) -> None:
    known = bench.take(bench.register(threshold=0.1))
    bench.find(0)
    bench.take(known)
    bench.find(1, ends=True)
    settled = bench.take(known)
    assert (settled.version, settled.job_id, settled.job_reason) == (1, None, None)


def test_a_solve_that_finds_nothing_better_under_the_measured_times_publishes_nothing(bench):
    known = bench.take(bench.register())
    bench.find(0, ends=True)
    bench.take(known)
    bench.report(known, second_forward_ms=5.0)
    known = bench.take(known)
    assert known.job_reason is not None
    assert (known.num_solves, known.num_judged) == (2, 1)
    bench.find(0, ends=True)
    settled = bench.take(known)
    assert (settled.version, settled.job_id) == (1, None)
    bench.report(known, second_forward_ms=5.0)
    again = bench.take(known)
    assert (again.job_id, again.drift, again.num_judged) == (None, 0.0, 2)


def test_the_solve_of_drift_starts_from_the_schedule_in_use(bench) -> None:
    known = bench.take(bench.register())
    bench.find(1, ends=True)
    bench.take(known)
    bench.report(known, second_forward_ms=5.0)
    known = bench.take(known)
    job = bench.stores.jobs.get(known.job_id or "")
    stored = bench.stores.jobs.schedule(job.id)
    in_use = bench.stores.deployments.schedule(known.id)
    programs = load_schedule(in_use[1]).programs
    assert load_schedule(stored.document).programs == programs
    assert (job.state, job.num_schedules) == (JobState.QUEUED, 1)
    measured = load_problem(document_text(bench.stores.jobs, job.id, "problem") or "")
    assert job.objective_ms == simulate(measured, programs).makespan_ms
    assert bench.stores.jobs.trace(job.id)[1][0].method == "version 1 of the deployment"


def test_what_is_published_is_better_under_the_times_that_came_meanwhile(bench) -> None:
    known = bench.take(bench.register())
    bench.find(0)
    bench.take(known)
    bench.report(known, second_forward_ms=7.0)
    bench.find(4, ends=True)
    settled = bench.take(known)
    newest = load_problem(bench.stores.deployments.documents(known.id).newest)
    number, text = bench.stores.deployments.schedule(known.id)
    assert (number, load_schedule(text).problem_hash) == (2, newest.problem_hash)
    assert bench.reasons(known)[1].endswith("under the measured times, 25.0% shorter")
    assert settled.num_judged == 1


def test_a_job_that_died_without_a_schedule_leaves_a_failed_deployment(bench) -> None:
    known = bench.take(bench.register())
    bench.end(JobEvent.FAIL)
    failed = bench.take(known)
    assert (failed.version, failed.job_id, failed.error.code) == (0, None, "job.failed")
    assert bench.stores.deployments.pending() == []


def test_a_full_queue_is_waited_for(bench) -> None:
    bench.max_queued = 0
    known = bench.take(bench.register())
    assert (known.job_id, known.job_reason) == (None, "registered")
    bench.max_queued = 1
    assert bench.take(known).job_id is not None


def test_a_server_killed_between_adding_a_job_and_noting_it_adds_no_second_one(bench) -> None:
    known = bench.register()
    bench.dies_after_adding = True
    with pytest.raises(KeyboardInterrupt):
        bench.take(known)
    assert bench.now(known).job_id is None
    bench.dies_after_adding = False
    assert bench.take(known).job_id is not None
    assert len(bench.stores.jobs.page(10)) == 1


@pytest.mark.parametrize("method", ["start", "publish", "settle", "judge", "saw"])
def test_a_server_killed_at_any_step_leaves_it_to_the_next(bench, monkeypatch, method) -> None:
    reached: list[str] = []
    store = bench.stores.deployments
    real = getattr(store, method)

    def killed(*arguments: Any) -> Any:
        if not reached:
            reached.append(method)
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(store, method, killed)

    def take() -> None:
        try:
            bench.steps.take(known.id)
        except KeyboardInterrupt:
            bench.steps.take(known.id)

    known = bench.register()
    take()
    bench.find(0)
    take()
    bench.find(0, ends=True)
    take()
    bench.report(known, second_forward_ms=5.0)
    take()
    bench.find(4, ends=True)
    take()
    assert reached == [method]
    settled = bench.now(known)
    assert (settled.version, settled.job_id, settled.num_judged) == (2, None, 1)
    assert len(bench.stores.jobs.page(10)) == 2


def test_a_fault_of_one_deployment_keeps_no_other_waiting(bench, monkeypatch) -> None:
    broken, whole = bench.register(), bench.register()
    documents = bench.stores.deployments.documents

    def fail(deployment_id: str) -> Any:
        if deployment_id == broken.id:
            raise ZeroDivisionError
        return documents(deployment_id)

    monkeypatch.setattr(bench.stores.deployments, "documents", fail)
    bench.steps.take_all()
    assert (bench.now(broken).job_id, bench.now(whole).job_id is None) == (None, False)


def test_a_store_that_does_not_answer_ends_the_round(bench, monkeypatch) -> None:
    bench.register()
    monkeypatch.setattr(bench.steps, "take", Mock(side_effect=StoreUnavailableError("gone")))
    with pytest.raises(StoreUnavailableError):
        bench.steps.take_all()


def test_two_servers_take_each_step_once(tmp_path, clock) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    with closing(open_stores(url, clock)) as one, closing(open_stores(url, clock)) as other:
        benches = [Bench(one, clock), Bench(other, clock)]
        known = benches[0].register()

        def both() -> None:
            together([each.steps.take_all for each in benches])

        both()
        benches[0].find(0, ends=True)
        both()
        benches[0].report(known, second_forward_ms=5.0)
        both()
        benches[0].find(4, ends=True)
        both()
        assert [one.version for one in one.deployments.versions(known.id)] == [1, 2]
        assert len(one.jobs.page(10)) == 2
        assert sorted(benches[0].news + benches[1].news) == [known.id] * 2
