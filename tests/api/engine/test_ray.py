"""The engine on a real Ray: the same jobs and comparisons, and what happens when actors die."""

import importlib.util
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from optpipe import Problem, load_schedule
from optpipe.answers import JobState
from optpipe.errors import MissingExtraError, install_command
from optpipe_api import Settings
from optpipe_api.engine.engine import open_solvers
from optpipe_api.engine.processes import MachineState, Message, SolverProcess, Solvers
from tests.api.bench import Bench
from tests.api.fleet import is_running
from tests.api.live import connected, make_settings, two_stages, until
from tests.api.routes.test_tunes import end_of

pytestmark = [pytest.mark.extended, pytest.mark.long]

ROOT = Path(__file__).parents[3]
NUM_CPUS = 3
OPTIONS = {
    "time_limit_s": 30.0,
    "work_limit": None,
    "threads": 1,
    "seed": 0,
    "gap": 0.0,
    "method": "auto",
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start one Ray of three cores for all tests; its workers can import the tests' fakes."""
    with pytest.MonkeyPatch.context() as patch:
        # And the packages of this checkout, wherever those of the environment are.
        roots = (ROOT, ROOT / "solver", ROOT / "api")
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, roots)))
        # Reachable from this machine only; a token would be kept in the home folder.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture
def solvers(tmp_path) -> Iterator[Solvers]:
    with closing(open_solvers(make_settings(tmp_path, engine="ray"))) as solvers:
        yield solvers


@pytest.fixture
def bench(tmp_path, solvers) -> Iterator[Bench]:
    with closing(Bench(tmp_path, solvers, lease_s=10.0)) as bench:
        yield bench


@pytest.fixture
def process(solvers) -> Iterator[SolverProcess]:
    """Start a process on the cluster and wait until it is ready."""
    process = solvers.start()
    assert heard(process).kind == "ready"
    yield process
    process.stop()


def heard(process: SolverProcess) -> Message:
    message = until(lambda: process.receive(0.1))
    assert message is not None
    return message


def has_ended(process: SolverProcess) -> bool:
    try:
        process.receive(0.1)
    except EOFError:
        return True
    return False


def tell(process: SolverProcess, name: str) -> None:
    problem = Problem.parse(two_stages(name)).model_dump_json(by_alias=True)
    header = {"kind": "solve", "options": OPTIONS, "near": []}
    process.send(Message("job", header, {"problem": problem}))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])


@contextmanager
def full_but_for(num_cpus: int) -> Iterator[None]:
    """Take all other cores of the cluster."""

    class Guest:
        def is_here(self) -> bool:
            return True

    guests: Any = ray.remote(Guest)
    taken = [guests.options(num_cpus=1).remote() for _ in range(NUM_CPUS - num_cpus)]
    assert all(ray.get([guest.is_here.remote() for guest in taken]))
    yield
    for guest in taken:
        ray.kill(guest)


def test_jobs_batches_and_comparisons_run_on_the_cluster(tmp_path) -> None:
    settings = make_settings(tmp_path, engine="ray", solver_processes=1, lease_s=10.0)
    with connected(settings) as http:
        job_id = http.post("/v1/jobs", json={"problem": two_stages("improve:3:0.1")}).json()["id"]
        sweep = {"problem": two_stages(), "axes": {"num_microbatches": [2, 3]}}
        batch = http.post("/v1/batches", json=sweep).json()
        body = {"problem": two_stages(), "options": {"time_limit_s": 5}}
        compared = http.post("/v1/compare", json=body).headers["location"]
        until(lambda: http.get(compared).json()["finished_at"])
        rows = http.get(f"{compared}/comparison")
        assert "limit=5 threads=1 seed=0" in rows.text
        job = until(lambda: (job := http.get(f"/v1/jobs/{job_id}").json())["finished_at"] and job)
        assert job["state"] == "succeeded"
        schedule = http.get(f"/v1/jobs/{job_id}/schedule").json()
        assert schedule["makespan_ms"] == job["objective_ms"]
        path = f"/v1/batches/{batch['id']}"
        until(lambda: http.get(path).json()["is_finished"])
        items = http.get(path).json()["items"]
        assert [item["state"] for item in items] == ["succeeded", "succeeded"]


def test_every_incumbent_comes_and_a_cancelled_job_keeps_its_best(bench: Bench) -> None:
    job_id = bench.submit("improve:3:0.2")
    assert bench.end(job_id).state is JobState.SUCCEEDED
    assert [point.method for point in bench.store.trace(job_id)[1]] == [
        f"fake-{n}" for n in range(4)
    ]
    deaf = bench.submit("stubborn")
    bench.until(deaf, lambda job: job.has_schedule)
    bench.cancel(deaf)
    job = bench.end(deaf)
    assert (job.state, job.has_schedule) == (JobState.CANCELLED, True)


def test_a_dead_actor_is_a_death_of_the_attempt_and_loses_nothing(bench: Bench, tmp_path) -> None:
    job_id = bench.submit(f"noted:{tmp_path}/pid:improve:4:0.5")
    bench.until(job_id, lambda job: job.has_schedule)
    solver = int((tmp_path / "pid").read_text("utf-8"))
    os.kill(parent_of(solver), signal.SIGKILL)
    job = bench.end(job_id)
    assert (job.state, job.attempt, job.deaths) == (JobState.SUCCEEDED, 2, 1)
    methods = [point.method for point in bench.store.trace(job_id)[1]]
    assert len(methods) == len(set(methods)) == 5  # it started from where the first had come
    logs = [entry.text or "" for entry in bench.store.history(job_id) if entry.kind == "log"]
    assert any("its Ray actor died" in log for log in logs)
    until(lambda: not is_running(solver))


def test_a_dead_solver_process_is_told_of_as_on_one_machine(process: SolverProcess) -> None:
    assert (process.machine, process.is_alive) == (MachineState.GIVEN, True)
    tell(process, "dies:9:/dev/null")
    assert heard(process).kind == "progress"
    until(lambda: has_ended(process))
    assert not process.is_alive
    assert process.describe_exit() == "its solver process was ended by SIGKILL"


def test_an_actor_that_dies_idle_costs_no_attempt(tmp_path, solvers: Solvers) -> None:
    started: list[SolverProcess] = []

    class Noted:
        is_reachable = True
        wait = staticmethod(solvers.wait)

        def start(self) -> SolverProcess:
            started.append(solvers.start())
            return started[-1]

        def close(self) -> None:
            raise AssertionError

    with closing(Bench(tmp_path, Noted())) as bench:
        until(lambda: started and started[0].machine is MachineState.GIVEN)
        actor: Any = vars(started[0])["_actor"]
        ray.kill(actor)
        until(lambda: len(started) == 2)
        job = bench.end(bench.submit(""))
    assert (job.state, job.attempt, job.deaths) == (JobState.SUCCEEDED, 1, 0)


def test_a_job_waits_in_the_queue_while_the_cluster_is_full(tmp_path) -> None:
    settings = make_settings(tmp_path, engine="ray", ray_num_cpus=NUM_CPUS)
    with ExitStack() as guests, closing(open_solvers(settings)) as solvers:
        guests.enter_context(full_but_for(NUM_CPUS - 1))
        with closing(Bench(tmp_path, solvers)) as bench:
            job_id = bench.submit("")
            time.sleep(1.0)
            assert bench.store.get(job_id).state is JobState.QUEUED
            guests.close()
            assert bench.end(job_id).attempt == 1


def test_what_a_client_sent_is_not_unpickled(process: SolverProcess, tmp_path) -> None:
    pickled = f"cos\nsystem\n(S'touch {tmp_path}/harm'\ntR."
    tell(process, pickled)
    schedule = load_schedule(heard(process).documents["schedule"])
    assert schedule.problem_hash == Problem.parse(two_stages(pickled)).problem_hash
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("num_cpus", "limits", "where"),
    [
        (NUM_CPUS, {}, "3 tasks of the Ray cluster at a time"),
        (1, {}, "3 processes of one node at a time, as no core of the cluster is free"),
        (
            NUM_CPUS,
            {"solver_memory_bytes": 64 * 1024**3},
            "3 processes of one node at a time, as OPTPIPE_SOLVER_MEMORY_BYTES leaves no room for "
            "what Ray maps",
        ),
    ],
)
def test_candidates_of_a_tune_are_tasks_of_the_cluster_where_it_has_room(
    tmp_path, num_cpus: int, limits: dict[str, int], where: str
) -> None:
    """And find, for the same work, what one process alone finds."""
    options = {"time_limit_s": 300, "work_limit": 2.0, "cache": "refresh"}
    body = {
        "model": "llama3-8b",
        "gpu": "h100",
        "num_gpus": 8,
        "global_batch": 16,
        "fixed": {"tp": 2, "cp": 1, "pp": 4},
        "framework": "megatron",
    }
    settings = make_settings(
        tmp_path, engine="ray", solver_processes=1, max_threads=4, max_time_limit_s=300.0,
        lease_s=60.0, overtime_s=600.0, tune_path=Settings.model_fields["tune_path"].default,
        **limits,
    )  # fmt: skip
    answers = []
    with full_but_for(num_cpus), connected(settings) as http:
        for threads in (1, 3):
            question = {**body, "options": {**options, "threads": threads}}
            path = http.post("/v1/tunes", json=question).headers["location"]
            job = end_of(http, path)
            assert job["state"] == "succeeded", job["error"]
            answer = http.get(f"{path}/configuration")
            assert answer.status_code == 200, answer.text
            answers.append(answer.json() | {"seconds": 0.0})
            events = http.get(f"{path}/events").text
            assert (f"candidates: {where}" in events) == (threads > 1), events
    assert answers[0] == answers[1]


def test_without_ray_the_pip_command_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("ray"))):
        open_solvers(make_settings(tmp_path, engine="ray"))
