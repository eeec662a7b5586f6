"""A whole server in a process of its own: killed, stopped, started again; with the real solver."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from optpipe import Problem, check_schedule, load_csv
from optpipe.client import Client, Job
from optpipe.errors import InfeasibleProblemError, OptPipeError
from optpipe_api import Settings, main
from tests.api.fleet import children, is_running
from tests.api.live import FAKE, database_in, two_stages, until

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent.parent
SCRIPT = "from optpipe_api import Settings, serve; serve(Settings.load())"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


class Server:
    """A server started as users start it, on a free port."""

    def __init__(self, folder: Path, **settings: object) -> None:
        values = {
            "database_url": f"sqlite:///{folder}/jobs.db",
            "port": 0,
            "solver_processes": 1,
            "lease_s": 1.0,
            "heartbeat_s": 0.2,
        } | settings
        variables = {f"OPTPIPE_{name.upper()}": str(value) for name, value in values.items()}
        path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
        self.log = folder / "server.log"
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT],
                env=os.environ | variables | {"PYTHONPATH": path},
                stderr=log,
                cwd=folder,
            )
        self.client = Client(self._address())
        until(self.client.health)

    def _address(self) -> str:
        def addresses() -> list[str]:
            assert self.process.poll() is None, self.log.read_text("utf-8")
            return ADDRESS.findall(self.log.read_text("utf-8"))

        return until(addresses)[0]

    def end(self, number: signal.Signals) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)

    def children(self) -> list[int]:
        return children(self.process.pid)


@pytest.fixture
def start(tmp_path):
    """Start servers over one database; none outlives its test."""
    servers: list[Server] = []

    def start(**settings: object) -> Server:
        servers.append(Server(tmp_path, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.end(signal.SIGKILL)


@pytest.mark.extended
def test_a_job_outlives_a_killed_server_and_is_finished_once(start) -> None:
    """Its solver process does not; and the next server on the machine need not wait for a lease."""
    first = start(solve_path=FAKE, lease_s=600.0)
    job = first.client.submit(Problem.parse(two_stages("improve:4:0.4")), time_limit_s=20)
    until(lambda: first.client.job(job.id).has_schedule)
    orphans = first.children()
    assert orphans
    first.end(signal.SIGKILL)
    until(lambda: not any(map(is_running, orphans)))
    second = start(solve_path=FAKE, lease_s=600.0)
    *_, last = second.client.follow(job)
    assert (last.state, len(last.trace or ())) == ("succeeded", 5)
    assert [other.id for other in second.client.jobs()] == [job.id]
    assert second.end(signal.SIGINT) == 0


def test_a_stopped_server_ends_cleanly_with_waiting_requests_and_running_jobs(start) -> None:
    server = start(solve_path=FAKE)
    *_, last = server.client.follow(server.client.submit(Problem.parse(two_stages("fails"))))
    assert (last.state, last.error and last.error.code) == ("failed", "solver.failed")
    assert "secret" not in last.model_dump_json()
    problem = Problem.parse(two_stages("improve:4:30"))
    answers: list[Job] = []
    waiting = threading.Thread(
        target=lambda: answers.append(server.client.submit(problem, wait_s=50))
    )
    waiting.start()
    until(lambda: len(list(server.client.jobs())) == 2)
    running = next(server.client.jobs())
    until(lambda: server.client.job(running.id).has_schedule)
    children = server.children()
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    waiting.join()
    assert server.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 30  # of the 50 s that it would wait
    assert [job.state for job in answers] == ["running"]
    assert not any(map(is_running, children))
    log = server.log.read_text("utf-8")
    assert "the job is queued" in log
    assert "secret detail of a stack trace" in log
    assert "Traceback" not in log.partition("the job is failed")[2]


@pytest.mark.extended
def test_the_real_solver_answers_through_server_and_client(start) -> None:
    server = start()
    problem = Problem.parse(two_stages("real"))
    with server.client as client:
        job = client.submit(problem, time_limit_s=2)
        *_, last = client.follow(job)
        assert (last.state, last.error) == ("succeeded", None)
        schedule = client.schedule(job)
        check_schedule(problem, schedule)
        assert load_csv(client.schedule_text(job, "csv")) == schedule.programs
        assert last.objective_ms == schedule.objective_ms

        tight = Problem.parse(two_stages("tight", devices=[{"memory_bytes": 999}] * 2))
        *_, last = client.follow(client.submit(tight, time_limit_s=2))
        assert last.state == "infeasible"
        assert last.error is not None
        assert last.error.needs == {f"devices[{d}].memory_bytes": 1000 for d in range(2)}
        with pytest.raises(InfeasibleProblemError, match="1000"):
            client.schedule(last)
    assert server.end(signal.SIGTERM) == 0


def test_a_server_may_have_a_file_open_for_each_follower() -> None:
    """Where the shell's limit is lower and the system's is not; and no solver is loaded for it."""
    script = """
import resource as r, sys
import optpipe_api, optpipe_api.settings
from optpipe_api.main import raise_file_limit
for hard in (4096, 1500):
    r.setrlimit(r.RLIMIT_NOFILE, (300, hard))
    print(raise_file_limit(1000), r.getrlimit(r.RLIMIT_NOFILE), raise_file_limit(0))
print([name for name in ("optpipe_solver", "numba", "highspy") if name in sys.modules])
"""
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "2000 (2000, 4096) 1000\n1500 (1500, 1500) 1000\n[]\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"OPTPIPE_PORT": "no"}, "port = 'no'"),
        ({"OPTPIPE_DATABASE_URL": "sqlite:////nowhere/jobs.db"}, "there is no folder /nowhere"),
        (
            {"OPTPIPE_ENGINE": "ray", "RAY_ADDRESS": "127.0.0.1:1"},
            "nothing answers at RAY_ADDRESS = 127.0.0.1:1",
        ),
        ({"OPTPIPE_HOST": "192.0.2.1", "OPTPIPE_PORT": "0"}, "optpipe keys create"),
        (
            {"OPTPIPE_PORT": "0", "OTEL_TRACES_EXPORTER": "zipkin"},
            "OTEL_TRACES_EXPORTER = 'zipkin'",
        ),
        (
            {"OPTPIPE_HOST": "192.0.2.1", "OPTPIPE_PORT": "0", "OPTPIPE_REQUIRE_KEYS": "false"},
            "cannot listen on 192.0.2.1",
        ),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch, settings, message: str) -> None:
    monkeypatch.setenv("OPTPIPE_DATABASE_URL", database_in(tmp_path))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with (
        capture_logs() as lines,
        pytest.raises(OptPipeError, match=re.escape(message)),
    ):
        main._serve(Settings.load())
    assert "serve.start" not in [line["action"] for line in lines]


INTERRUPTED = """
import os, signal, sys
from optpipe_api import Settings, main

home, name, number = sys.argv[1:]
owner = main if home == "main" else getattr(main, home)
function = getattr(owner, name)

def interrupt(*args, **options):
    os.kill(os.getpid(), int(number))
    return function(*args, **options)

setattr(owner, name, interrupt)
main.serve(Settings.load())
print("stopped", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (("main", "open_stores"), signal.SIGTERM),
        (("main", "create_app"), signal.SIGINT),
        (("ApiServer", "startup"), signal.SIGINT),
        (("ApiServer", "shutdown"), signal.SIGTERM),
        (("Service", "close"), signal.SIGINT),
    ],
)
def test_a_signal_at_any_time_ends_the_server_without_a_traceback(
    tmp_path: Path, moment: tuple[str, str], number: signal.Signals
) -> None:
    """Also a second one, while the server stops or has stopped."""
    settings = {
        "OPTPIPE_DATABASE_URL": database_in(tmp_path),
        "OPTPIPE_PORT": "0",
        "OPTPIPE_SOLVE_PATH": FAKE,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
    }
    command = [sys.executable, "-c", INTERRUPTED, *moment, str(int(number))]
    with subprocess.Popen(
        command, env=os.environ | settings, stderr=subprocess.PIPE, cwd=tmp_path, text=True
    ) as process:
        assert process.stderr is not None
        log = ""
        for line in process.stderr:
            log += line
            if "OptPipe listens" in line and moment[1] in ("shutdown", "close"):
                process.send_signal(signal.SIGINT)
            if line == "stopped\n":
                process.send_signal(number)
    assert (process.returncode, "Traceback" in log) == (0, False), log
