"""The local engine with real processes: incumbents, cancellation, deaths, limits, shutdown.

The name of a lease's owner: who can see that it is gone, and who cannot.

Messages between server and solver process.

What a solver process tells the server on its way, without the process.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Programs, load_schedule
from optpipe.answers import JobState
from optpipe_api.engine import engine
from optpipe_api.engine.engine import SlotEngine, is_gone, new_owner
from optpipe_api.engine.processes import LocalSolvers, Message, SolverChild, decode, encode
from optpipe_api.engine.tasks import ProgressReporter
from optpipe_api.errors import StoreUnavailableError
from optpipe_solver import Progress
from tests.api.bench import PATIENCE_S, Bench
from tests.api.instant import InstantSolvers
from tests.api.live import make_settings, until
from tests.building import problem, programs, stage

pytestmark = pytest.mark.long

# Half a second is promised; what is not stopped goes on for a minute, and the machine may be busy.
SOON_S = 15.0


@pytest.fixture
def open_bench(tmp_path):
    """Benches over one database, all closed in the end: a forgotten engine would never end."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(closing(Bench(tmp_path, **settings)))


@pytest.fixture
def bench(open_bench):
    return open_bench()


@pytest.fixture
def threads(request, tmp_path):
    """A bench whose solvers are threads, for what does not depend on processes."""
    solvers = InstantSolvers(make_settings(tmp_path))
    with closing(Bench(tmp_path, solvers, **getattr(request, "param", {}))) as bench:
        yield bench


def test_the_process_of_a_fake_imports_nothing_of_the_solver() -> None:
    """Half a second of processor time, in each of some hundred processes of these tests."""
    code = (
        "import sys, optpipe_api.engine.worker as _, tests.api.fake_solver as _\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [
        name for name in done.stdout.split() if name.startswith(("optpipe_solver", "numba"))
    ]


def test_a_process_has_loaded_every_kernel_before_it_takes_a_job(tmp_path) -> None:
    """Its first job would load them within its time limit. An actor of Ray runs the same process.

    The kernels themselves were compiled before, at the latest by this process.
    """
    paths = {f"{kind}_path": f"optpipe_solver:{kind}" for kind in ("solve", "plan")}
    settings = make_settings(tmp_path, **paths, compare_path="tests.api.loading_solver:compare")
    process = LocalSolvers(settings).start()
    try:
        assert [message.kind for message in _messages(process, "ready")] == ["ready"]
        options = {"time_limit_s": 20.0, "threads": 1, "seed": 0, "workload": None}
        text = problem([stage(0), stage(1)], m=4).model_dump_json(by_alias=True)
        header = {"kind": "compare", "options": options}
        process.send(Message("job", header, {"problem": text}))
        *_, result = _messages(process, "result")
        assert '"0 kernels loaded"' in result.documents["comparison"]
    finally:
        process.stop()


def _messages(process: SolverChild, last: str) -> Iterator[Message]:
    """Yield the messages of a process until one of a kind has come."""
    while (message := process.receive(PATIENCE_S)) is not None:
        yield message
        if message.kind in (last, "error"):
            return


def test_every_incumbent_is_stored_and_told_as_it_comes(threads: Bench) -> None:
    bench = threads
    job_id = bench.submit("improve:4:0.2")
    first = bench.until(job_id, lambda job: job.has_schedule)
    assert not first.state.is_final
    assert bench.schedule(job_id).objective_ms <= first.objective_ms
    bench.end(job_id)
    trace = bench.store.trace(job_id)[1]
    found = [point.objective_ms for point in trace if point.objective_ms is not None]
    assert len(found) == 5
    assert found == sorted(found, reverse=True)
    # Claimed, five incumbents, the end; the last change is told after the store has it.
    until(lambda: bench.changes.count(job_id) >= 7)


def test_a_deaf_solver_is_killed_within_half_a_second_and_its_best_is_kept(bench: Bench) -> None:
    job_id = bench.submit("stubborn")
    bench.until(job_id, lambda job: job.has_schedule)
    pid = bench.solver_pid
    bench.cancel(job_id)
    began = time.monotonic()
    job = bench.end(job_id)
    assert time.monotonic() - began < SOON_S
    assert (job.state, job.has_schedule) == (JobState.CANCELLED, True)
    while bench.engine._attempts:
        time.sleep(0.01)
    assert_gone(pid)


def test_a_job_is_cancelled_at_once_while_its_process_still_starts(open_bench, monkeypatch) -> None:
    monkeypatch.setenv("SLOW_IMPORT_S", "60")
    bench = open_bench(solve_path="tests.api.slow_solver:solve")
    job_id = bench.submit("")
    time.sleep(0.5)
    bench.cancel(job_id)
    began = time.monotonic()
    assert bench.end(job_id).state is JobState.CANCELLED
    assert time.monotonic() - began < SOON_S


# What a process does before it is ready is not the job's fault


def test_a_start_of_any_length_neither_fails_a_job_nor_costs_it_time(
    open_bench, monkeypatch
) -> None:
    """Two seconds, of one that the job has and half a one that it may overrun."""
    monkeypatch.setenv("SLOW_IMPORT_S", "2")
    bench = open_bench(solve_path="tests.api.slow_solver:solve", overtime_s=0.5)
    job = bench.end(bench.submit("", time_limit_s=1.0))
    assert (job.state, job.attempt, job.deaths) == (JobState.SUCCEEDED, 1, 0)
    assert job.started_at > job.created_at + 1.5
    assert job.spent_s < job.started_at - job.created_at


def test_a_job_is_not_taken_before_a_process_can_solve_it(open_bench, monkeypatch) -> None:
    """Another server that is ready gets it, although it came later."""
    monkeypatch.setenv("SLOW_IMPORT_S", "600")
    open_bench(solve_path="tests.api.slow_solver:solve")
    ready = open_bench()
    assert ready.end(ready.submit("")).state is JobState.SUCCEEDED


def test_a_process_that_does_not_start_now_and_then_fails_no_job(
    open_bench, tmp_path, monkeypatch
) -> None:
    """It is started again, and the job has been waiting in the queue."""
    monkeypatch.setenv("FRAIL_TRIES", str(tmp_path / "tries"))
    bench = open_bench(solve_path="tests.api.slow_solver:solve")
    job = bench.end(bench.submit(""))
    assert (job.state, job.attempt, job.deaths) == (JobState.SUCCEEDED, 1, 0)
    assert (tmp_path / "tries").read_bytes() == b".."


class Noted(LocalSolvers):
    """Remembers what it has started."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.started: list[Any] = []

    def start(self) -> Any:
        self.started.append(super().start())
        return self.started[-1]


def test_a_process_that_dies_while_it_waits_costs_no_job_an_attempt(tmp_path) -> None:
    """The next one is there when a job comes."""
    solvers = Noted(make_settings(tmp_path))
    with closing(Bench(tmp_path, solvers)) as bench:
        bench.end(bench.submit(""))
        for process in list(solvers.started):
            os.kill(int(process.name), signal.SIGKILL)
            while process.is_alive:
                time.sleep(0.01)
        job = bench.end(bench.submit(""))
        assert (job.state, job.attempt, job.deaths) == (JobState.SUCCEEDED, 1, 0)


def test_a_closing_server_gives_a_job_back_though_others_write_longer_than_a_writer_waits(
    tmp_path, monkeypatch
) -> None:
    bench = Bench(tmp_path)
    with closing(bench.stores):
        job_id = bench.submit("improve:1:60")
        bench.until(job_id, lambda job: job.has_schedule)
        requeue = bench.store.requeue
        refused: list[Any] = []

        def refuse_once(*given: Any, **named: Any) -> Any:
            if not refused:
                refused.append(given)
                raise StoreUnavailableError("others have been writing to it for 10 s")
            return requeue(*given, **named)

        monkeypatch.setattr(bench.store, "requeue", refuse_once)
        bench.engine.close()
        assert refused
        assert bench.store.get(job_id).state is JobState.QUEUED


def test_a_process_serves_one_job_after_the_other(tmp_path) -> None:
    """Ended early, infeasible or solved; not where it failed or listens to nobody.

    What the process that starts it has held is not its own.
    """
    ballast = b"1" * (600 * 1024**2)
    allowed = 1024**3
    settings = make_settings(tmp_path, solver_processes=1, solver_memory_bytes=allowed)
    solvers = Noted(settings)
    assert len(ballast) > allowed // 2
    with closing(Bench(tmp_path, solvers)) as bench:
        for name in ("", "improve:2:0.01", "nothing", ""):
            bench.end(bench.submit(name))
        slow = bench.submit("improve:1:60")
        bench.until(slow, lambda job: job.has_schedule)
        bench.cancel(slow)
        assert bench.end(slow).state is JobState.CANCELLED
        # Its last word counts: incumbents are by fake-0, fake-1.
        assert bench.schedule(slow).provenance.method == "fake"
        # A stop that came late is not the next job's.
        assert bench.end(bench.submit("improve:2:0.01")).state is JobState.SUCCEEDED
        assert len(solvers.started) == 1
        bench.end(bench.submit("fails"))
        bench.end(bench.submit(""))
        assert len(solvers.started) == 2


def test_a_server_that_stood_still_keeps_its_jobs(open_bench) -> None:
    """Their leases have run out meanwhile; it renews them before it takes any back."""
    bench = open_bench(heartbeat_s=1.0)
    bench.engine.close()
    engine = SlotEngine(
        bench.store, bench.settings, bench.changes.append, LocalSolvers(bench.settings)
    )
    job_id = bench.submit("")
    lease = bench.store.claim(engine._owner, 0.0).lease
    engine._checked_at -= 3600
    renewal = threading.Timer(0.2, bench.store.heartbeat, ([lease], 60.0))
    renewal.start()
    engine._expire_leases()
    renewal.join()
    job = bench.store.get(job_id)
    assert (job.state, job.deaths) == (JobState.RUNNING, 0)
    bench.store.heartbeat([lease], 0.0)
    engine._expire_leases()
    assert bench.store.get(job_id).deaths == 1
    engine.close()


def test_a_cancellation_that_only_the_store_heard_of_arrives(threads: Bench) -> None:
    bench = threads
    job_id = bench.submit("improve:1:60")
    bench.until(job_id, lambda job: job.has_schedule)
    bench.store.request_cancel(job_id)
    assert bench.end(job_id).state is JobState.CANCELLED


def test_a_killed_solver_process_loses_nothing(bench: Bench) -> None:
    job_id = bench.submit("improve:4:0.3")
    before = bench.until(job_id, lambda job: job.objective_ms is not None)
    os.kill(bench.solver_pid, signal.SIGKILL)
    again = bench.until(job_id, lambda job: job.attempt == 2)
    assert again.objective_ms <= before.objective_ms
    job = bench.end(job_id)
    assert (job.state, job.deaths) == (JobState.SUCCEEDED, 1)
    methods = [point.method for point in bench.store.trace(job_id)[1]]
    assert len(methods) == len(set(methods)) == 5  # nothing was found twice: it started from there


def test_a_job_that_kills_its_solver_is_given_up_but_keeps_its_best(bench: Bench, tmp_path) -> None:
    job = bench.end(bench.submit(f"dies:99:{tmp_path}/attempts"))
    assert (job.state, job.attempt, job.has_schedule) == (JobState.FAILED, 3, True)
    assert "after 3 attempts" in job.error.message
    assert "SIGKILL" in job.error.message


def test_memory_that_jobs_before_it_left_is_not_held_against_a_job(tmp_path) -> None:
    """It begins anew in a process of which nobody had any, and fails there if it must."""
    solvers = Noted(make_settings(tmp_path, solver_memory_bytes=4 * 1024**3))
    with closing(Bench(tmp_path, solvers)) as bench:
        bench.end(bench.submit(""))
        job = bench.end(bench.submit("eats"))
        assert (job.error.code, job.attempt, job.deaths) == ("solver.memory", 2, 1)
        assert str(4 * 1024**3) in job.error.message
        assert len(solvers.started) >= 2


def test_a_solver_far_over_its_time_is_stopped_and_its_best_counts(tmp_path) -> None:
    solvers = InstantSolvers(make_settings(tmp_path))
    with closing(Bench(tmp_path, solvers, overtime_s=0.5)) as bench:
        job = bench.end(bench.submit("improve:1:60", time_limit_s=1.0))
        assert (job.state, job.has_schedule) == (JobState.SUCCEEDED, True)


def test_shutdown_gives_running_jobs_back_with_their_incumbents(open_bench) -> None:
    first = open_bench()
    job_id = first.submit("improve:4:0.4")
    first.until(job_id, lambda job: job.has_schedule)
    pid = first.solver_pid
    first.close()
    assert_gone(pid)
    second = open_bench()
    job = second.end(job_id)
    assert (job.state, job.attempt, job.deaths) == (JobState.SUCCEEDED, 2, 0)
    assert len(second.store.trace(job_id)[1]) == 5


def test_shutdown_ends_a_process_that_reads_nothing(open_bench) -> None:
    """A stopped process: the problem of its next job is larger than the buffer to it."""
    bench = open_bench()
    bench.end(bench.submit(""))
    (slot,) = bench.engine._slots
    deadline = time.monotonic() + 60
    while not slot.is_ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(int(slot.process.name), signal.SIGSTOP)
    job_id = bench.submit("", devices=[{"name": "n" * 100, "memory_bytes": 10**6}] * 2000)
    bench.until(job_id, lambda job: job.state is JobState.RUNNING)
    began = time.monotonic()
    bench.close()
    assert time.monotonic() - began < 30
    assert bench.store.get(job_id).state is JobState.QUEUED


@pytest.mark.extended
def test_a_missing_solver_fails_the_job_and_the_engine_lives_on(open_bench) -> None:
    bench = open_bench(solve_path="no_such_module:solve")
    for _ in range(2):
        job = bench.end(bench.submit(""))
        assert (job.state, job.error.code) == (JobState.FAILED, "solver.failed")
    assert bench.engine.is_alive
    assert not bench.engine.can_solve


def assert_gone(pid: int) -> None:
    """A process that was killed is there until it is waited for, on a busy machine for seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


@pytest.mark.parametrize("threads", [{"cache": True}], indirect=True)
def test_a_database_that_is_gone_for_a_moment_costs_no_attempt(threads, monkeypatch) -> None:
    """Whatever the solver says meanwhile is told again, and the job is solved in one go.

    A search that finds no near schedule because of that starts without one.
    """
    bench = threads
    store, missed = bench.store, []

    def absent(name: str) -> None:
        method, number = getattr(store, name), 0

        def asked(*arguments: Any, **named: Any) -> Any:
            nonlocal number
            number += 1
            if number % 3:
                missed.append(name)
                raise StoreUnavailableError("it is being restarted")
            return method(*arguments, **named)

        monkeypatch.setattr(store, name, asked)

    for name in ("near", "heartbeat", "record", "finish"):
        absent(name)
    monkeypatch.setattr(engine, "_RETRY_S", 0.01)
    job = bench.end(bench.submit("improve:3:0.1"))
    assert (job.state, job.attempt, job.deaths) == (JobState.SUCCEEDED, 1, 0)
    assert len(store.trace(job.id)[1]) == 4
    assert set(missed) == {"near", "heartbeat", "record", "finish"}


def test_names_are_unique_and_fit_the_column() -> None:
    names = {new_owner() for _ in range(100)}
    assert len(names) == 100
    assert max(map(len, names)) <= 64


def test_a_process_is_gone_once_it_has_ended() -> None:
    """Also before anybody has waited for it; another of its number, begun later, is not it."""
    mine = new_owner()
    assert not is_gone(mine)
    assert is_gone(_renamed(mine, started=int(mine.split("-")[2]) - 1))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        theirs = _renamed(mine, pid=child.pid, started=start_of(child.pid))
        assert not is_gone(theirs)
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(theirs)
    assert is_gone(theirs)


def test_a_process_that_is_there_but_not_ours_to_look_at_is_not_gone(monkeypatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    mine = _renamed(new_owner(), started=1)
    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(engine, "_process_stat", lambda pid: None)
    assert not is_gone(mine)


@pytest.mark.parametrize(
    "name", ["", "worker", "0" * 32, "-1-2-3", "elsewhere-999999-1-0", f"{'0' * 16}-999999-1-00"]
)
def test_of_other_machines_and_unknown_names_nothing_is_said(name: str) -> None:
    assert not is_gone(name)


def test_where_the_system_says_nothing_nobody_is_gone(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(engine, "_PROC", tmp_path)
    assert not is_gone(new_owner())
    assert not is_gone(_renamed(new_owner(), pid=2**22))


def start_of(pid: int) -> int:
    stat = engine._process_stat(pid)
    assert stat is not None
    return stat[1]


def _renamed(name: str, *, pid: int | None = None, started: int | None = None) -> str:
    where, own_pid, own_start, rest = name.split("-")
    return f"{where}-{pid or own_pid}-{started or own_start}-{rest}"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
MESSAGES = st.builds(
    Message,
    st.sampled_from(["job", "progress", "result"]),
    st.dictionaries(st.sampled_from(["seconds", "method"]), st.text() | st.none() | st.integers()),
    st.dictionaries(st.sampled_from(["schedule", "problem"]), TEXTS),
)


@given(MESSAGES)
def test_a_message_comes_back_from_its_text_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


FULL = programs("0F0 0F1 0I0 0W0 0I1 0W1")
LEAN = programs("0F0 0I0 0W0 0F1 0I1 0W1")


class Heard:
    """A channel that remembers."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def schedules(self) -> list[Programs]:
        return [load_schedule(message.documents["schedule"]).programs for message in self.messages]


def test_a_schedule_as_long_and_better_is_told_and_the_same_one_is_not() -> None:
    """Less memory at the same length is news of the schedule, a near start's own is none."""
    given = problem([stage(0, layers={"transformer": 1})], m=2)
    heard = Heard()
    reporter = ProgressReporter(cast("Any", heard), 0, given)
    reporter.report_start(given, FULL, "near problem")
    for number, found in enumerate((FULL, LEAN)):
        reporter(Progress(float(number), "made", 6.0, None, found))
    assert heard.schedules == [FULL, LEAN]
