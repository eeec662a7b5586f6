"""Nothing is lost: servers and solver processes are killed, and every job ends once, as it should.

Servers die by SIGKILL before, within and after every write to the store, and at random moments;
solver processes too. Clients try again with their Idempotency-Keys.
"""

import json
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest

from optpipe import Problem, Provenance, Schedule, evaluate
from optpipe.answers import EventKind, JobOptions, JobState
from optpipe_api.jobs import AttemptOutcome, HistoryEntry, JobEvent, JobRecord
from optpipe_api.services.submission import solved_job
from optpipe_api.store import JobStore, open_stores
from tests.api.errands import Errand, Errands, Ledger, run
from tests.api.fleet import Caller, Fleet
from tests.api.live import FAKE
from tests.api.mortal import MOMENTS
from tests.api.serial import serial

pytestmark = pytest.mark.long

WRITES = (
    *("add.miss", "note_near", "add.hit", "claim", "heartbeat", "record.incumbent", "record.bound"),
    *("finish.succeed", "finish.prove_infeasible", "finish.fail", "finish.cancel"),
    *("requeue.death", "requeue.stop", "expire", "resume"),
    *("request_cancel.queued", "request_cancel.running"),
)
POINTS = [f"{write}.{moment}" for write in WRITES for moment in MOMENTS]
# Each write once, at each moment a third of them: the rest is in the long run.
FEW_POINTS = [f"{write}.{MOMENTS[index % 3]}" for index, write in enumerate(WRITES)]
NUM_SUBMISSIONS = 200
NUM_CLIENTS = 4
NUM_KILLS = 25
MOST_ANSWERS = 15
PATIENCE_S = 300.0
SETTINGS = {
    "host": "127.0.0.1",
    "solve_path": FAKE,
    "solver_processes": 2,
    "max_attempts": 1000,
    "max_queued_jobs": 1000,
    "lease_s": 15.0,
    "heartbeat_s": 0.3,
    "poll_s": 0.1,
}
AFTER = {
    JobState.QUEUED: {JobState.RUNNING, JobState.CANCELLED},
    JobState.RUNNING: set(JobState) - {JobState.RUNNING},
}
ENDS = {
    "never": (JobState.INFEASIBLE, "problem.infeasible"),
    "nothing": (JobState.FAILED, "solver.nothing_found"),
    "fails": (JobState.FAILED, "solver.failed"),
}


class Trial:
    """Clients at work while servers die; the seed decides what they want."""

    def __init__(self, folder: Path, fleet: Fleet, seed: int, num_errands: int | None) -> None:
        self._fleet = fleet
        self._seed = seed
        self._faults: list[BaseException] = []
        self.is_enough = threading.Event()
        self.ledger = Ledger()
        self.errands = Errands(seed, str(folder), self.ledger, num_errands)

    def run(self, store: JobStore, disturb: Callable[[], None]) -> None:
        clients = [
            threading.Thread(target=self._work, args=(index,)) for index in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        self._tend_while(lambda: any(client.is_alive() for client in clients), disturb)
        self._tend_while(lambda: _num_unfinished(store) > 0, lambda: None)

    def _tend_while(self, condition: Callable[[], bool], disturb: Callable[[], None]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while condition():
            self._fleet.tend()
            disturb()
            if self._faults:
                raise self._faults[0]
            assert time.monotonic() < deadline, self._fleet.log()
            time.sleep(0.05)

    def _work(self, index: int) -> None:
        with closing(Caller(self._fleet, self._seed + index)) as call:
            try:
                while (errand := self._next()) is not None:
                    run(errand, call, self.ledger)
            except BaseException as fault:  # noqa: BLE001 - raised by the thread that waits
                self._faults.append(fault)

    def _next(self) -> Errand | None:
        return None if self.is_enough.is_set() or self._faults else self.errands.take()


class Reaper:
    """Kills a server after so many answers, and now and then a solver process, so many times."""

    def __init__(self, fleet: Fleet, seed: int, num_kills: int) -> None:
        self._fleet = fleet
        self._choice = random.Random(seed)
        self._due = {port: self._choice.randint(1, MOST_ANSWERS) for port in fleet.ports}
        self.num_left = num_kills

    def __call__(self) -> None:
        for port in self._fleet.ports:
            if self.num_left and self._fleet.answers[port] >= self._due[port]:
                if self._choice.random() < 0.5:
                    self._fleet.kill_solver(self._choice)
                    time.sleep(self._choice.random() * 0.1)
                self._fleet.kill(port)
                self._due[port] = self._choice.randint(1, MOST_ANSWERS)
                self.num_left -= 1


def best(problem: Problem, num_fused: int) -> Schedule:
    """Return the schedule that the fake solver ends with after so many improvements."""
    return evaluate(problem, serial(problem, num_fused), Provenance(method="best"), bound_ms=1.0)


def _num_unfinished(store: JobStore) -> int:
    counts = store.counts()
    return counts[JobState.QUEUED] + counts[JobState.RUNNING]


def check(store: JobStore, ledger: Ledger, num_errands: int) -> None:
    jobs = {job.id: job for job in _all_jobs(store)}
    assert jobs.keys() == ledger.errands.keys()
    assert len(jobs) == num_errands
    for job_id, errand in ledger.errands.items():
        history = store.history(job_id, limit=10_000)
        check_life(jobs[job_id], errand, history)
        check_best(store, jobs[job_id], history)
        check_end(jobs[job_id], errand)
        assert (jobs[job_id].objective_ms or 0) <= ledger.best_seen[job_id]
        if job_id in ledger.ends_seen:
            assert ledger.ends_seen[job_id] == (jobs[job_id].state, jobs[job_id].objective_ms)


def _all_jobs(store: JobStore) -> list[JobRecord]:
    found: list[JobRecord] = []
    while page := store.page(100, found[-1].position if found else None):
        found += page
    return found


def check_life(job: JobRecord, errand: Errand, history: list[HistoryEntry]) -> None:
    """It ended once, and once more each time that it was resumed, by legal steps alone."""
    assert [entry.number for entry in history] == sorted({entry.number for entry in history})
    states = [JobState(entry.text or "") for entry in history if entry.kind is EventKind.STATE]
    assert history[-1].is_final
    assert states[-1] is job.state
    num_resumed = sum((entry.text or "").startswith("resumed with") for entry in history)
    assert sum(state.is_final for state in states) == 1 + num_resumed
    assert (num_resumed > 0) == (errand.kind == "resume")
    for before, after in pairwise(states):
        assert after in AFTER.get(before, {JobState.QUEUED}), states


def check_best(store: JobStore, job: JobRecord, history: list[HistoryEntry]) -> None:
    """It has the best of all incumbents that were ever written down, and the best bound."""
    incumbents = [entry for entry in history if entry.kind is EventKind.INCUMBENT]
    lengths = [entry.objective_ms for entry in incumbents if entry.objective_ms is not None]
    assert lengths == sorted(set(lengths), reverse=True)
    assert job.objective_ms == (lengths[-1] if lengths else None)
    bounds = [entry.bound_ms for entry in history if entry.bound_ms is not None]
    assert job.bound_ms == (max(bounds) if bounds else None)
    stored = store.schedule(job.id)
    found = None if stored is None else json.loads(stored.document)["makespan_ms"]
    assert found == job.objective_ms


def check_end(job: JobRecord, errand: Errand) -> None:
    """It ended as its script says; a cancellation may have come too late."""
    state, code = ENDS.get(errand.kind, (JobState.SUCCEEDED, None))
    if job.state is JobState.CANCELLED and errand.kind.startswith("cancel"):
        return
    assert (job.state, job.error and job.error.code) == (state, code)
    if errand.num_rounds and state is JobState.SUCCEEDED:
        problem = Problem.parse(errand.body["problem"])
        assert job.objective_ms is not None
        assert job.objective_ms <= best(problem, errand.num_rounds).objective_ms


@pytest.mark.parametrize(
    "harm",
    [
        "DELETE FROM jobs",
        "DELETE FROM documents WHERE kind = 'schedule'",
        "UPDATE jobs SET state = 'running'",
        "UPDATE jobs SET state = 'failed'",
        "UPDATE jobs SET objective_ms = objective_ms + 1",
        "UPDATE jobs SET bound_ms = NULL",
        "UPDATE events SET text = 'cancelled' WHERE text = 'queued'",
        "DELETE FROM events WHERE text = 'running'",
        "INSERT INTO events (position, kind, at, text) VALUES (1, 'state', 0, 'succeeded')",
    ],
)
def test_the_check_would_notice(tmp_path, harm: str) -> None:
    errand = Errands(0, str(tmp_path), Ledger(), limit=1).take()
    assert errand is not None
    ledger = Ledger()
    with closing(open_stores(f"sqlite:///{tmp_path}/jobs.db")) as stores:
        ledger.accepted(_solved(stores.jobs, errand), errand)
        check(stores.jobs, ledger, 1)
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
            assert connection.execute(harm).rowcount == 1
            connection.commit()
        with pytest.raises(AssertionError):
            check(stores.jobs, ledger, 1)


def _solved(store: JobStore, errand: Errand) -> str:
    problem = Problem.parse(errand.body["problem"])
    store.add(solved_job(problem, JobOptions(time_limit_s=1.0)), max_queued=1)
    claim = store.claim("worker", 10.0)
    assert claim is not None
    schedule = best(problem, errand.num_rounds)
    outcome = AttemptOutcome(
        event=JobEvent.SUCCEED,
        documents={"schedule": schedule.model_dump_json(by_alias=True)},
        objective_ms=schedule.objective_ms,
        bound_ms=1.0,
        method="fused",
    )
    job = store.finish(claim.lease, outcome)
    assert job is not None
    return job.id


POSTGRES = (pytest.mark.postgres, pytest.mark.extended)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=POSTGRES)])
def database(request, tmp_path) -> tuple[str, int]:
    """A URL, and how many servers are on it: one on a file."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db", 1
    return request.getfixturevalue("postgres_url"), 2


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize(
    "points",
    [
        pytest.param(FEW_POINTS, id="each write"),
        pytest.param(POINTS, id="every point", marks=pytest.mark.extended),
    ],
)
def test_servers_may_die_where_they_write(
    tmp_path, database: tuple[str, int], points: list[str]
) -> None:
    url, num_servers = database
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_stores(url))).jobs
        settings = {**SETTINGS, "database_url": url, "solver_processes": 1}
        fleet = stack.enter_context(closing(Fleet(tmp_path, num_servers, settings, points)))
        trial = Trial(tmp_path, fleet, seed=1, num_errands=None)
        choice = random.Random(1)

        def disturb() -> None:
            left = fleet.points_left()
            stops = {point for point in left if point.startswith("requeue.stop")}
            if not left:
                trial.is_enough.set()
            elif left == stops:
                # Only a job that outlasts the server's goodbye is given back.
                trial.errands.pause_s = 1.0
            port = choice.choice(fleet.ports)
            # It runs when its process is ready, and not before. A job counts as running until the
            # lease of a dead server has expired, and only a server that lives sees that.
            is_due = stops and fleet.answers[port] > 2 and store.counts()[JobState.RUNNING] > 0
            if is_due and choice.random() < 0.2:
                fleet.kill(port, signal.SIGTERM)

        trial.run(store, disturb)
        assert fleet.points_left() == set()
        assert fleet.num_lives > len(points) / num_servers
        check(store, trial.ledger, trial.errands.num_made)


@pytest.mark.extended
@pytest.mark.timeout(2 * PATIENCE_S)
def test_servers_and_solvers_may_die_at_any_moment(tmp_path, database: tuple[str, int]) -> None:
    url, num_servers = database
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_stores(url))).jobs
        settings = {**SETTINGS, "database_url": url}
        fleet = stack.enter_context(
            closing(Fleet(tmp_path, num_servers, settings, [], processes=True))
        )
        trial = Trial(tmp_path, fleet, seed=2, num_errands=NUM_SUBMISSIONS)
        reaper = Reaper(fleet, seed=2, num_kills=NUM_KILLS)
        trial.run(store, reaper)
        assert reaper.num_left == 0
        assert fleet.num_lives >= NUM_KILLS
        check(store, trial.ledger, NUM_SUBMISSIONS)
