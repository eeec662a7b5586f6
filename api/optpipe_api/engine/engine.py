"""One attempt at a job: its process is told, heard and watched, and its words are stored."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from optpipe.errors import MissingExtraError
from optpipe_api.engine.processes import LocalSolvers, MachineState, Message
from optpipe_api.errors import SolverFailedError, StoreUnavailableError
from optpipe_api.jobs import AttemptOutcome, JobError, JobEvent, TracePoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_api.engine.processes import SolverProcess, Solvers
    from optpipe_api.jobs import Claim, JobRecord
    from optpipe_api.settings import Settings
    from optpipe_api.store.jobs import JobStore

__all__ = [
    "PAUSE_S",
    "SILENT",
    "Attempt",
    "EngineObserver",
    "Slot",
    "SlotEngine",
    "is_gone",
    "new_owner",
    "open_solvers",
]


_TICK_S = 0.05
_LEAST_TIME_S = 1.0
_ASK_AGAIN_S = 0.5


class Attempt:
    """Solves one claimed job in one process, as far as it gets.

    `run` returns when the job is finished, given back, or lost to someone else; ``left`` is then
    the job as it was left, and ``has_result`` says whether the process has ended its work: one
    that has not is to be stopped. Only `cancel` may be called from another thread.
    """

    def __init__(
        self,
        claim: Claim,
        process: SolverProcess,
        store: JobStore,
        settings: Settings,
        on_change: Callable[[str], None],
    ) -> None:
        self._claim = claim
        self._lease = claim.lease
        self._process = process
        self._store = store
        self._settings = settings
        self._on_change = on_change
        self._job = claim.job
        self._closing = threading.Event()
        self._done = False
        self._began = time.monotonic()
        self.left: JobRecord | None = None
        self.has_result = False
        self._cancelled = threading.Event()
        self._stop_at: float | None = None
        # At once: a cancellation between the claim and now was told to nobody.
        self._heartbeat_at = 0.0
        options = claim.job.options
        # A job that died just before its end still needs a moment to hand its incumbent in.
        time_limit_s = max(_LEAST_TIME_S, options.time_limit_s - claim.job.spent_s)
        self._options = replace(options, time_limit_s=time_limit_s)
        # The process is ready: how long it took to start is not the solver's fault.
        self._overtime_at = self._began + time_limit_s + settings.overtime_s

    @property
    def seconds(self) -> float:
        """How long ago the attempt began."""
        return time.monotonic() - self._began

    def cancel(self) -> None:
        """Ask for an early end; the best schedule is kept."""
        self._cancelled.set()

    def run(self, closing: threading.Event, opening: Message | None) -> None:
        """Solve until the end, or until the server closes.

        ``opening``: what the process has said so far: that it is ready, or why it is not; None =
        nothing.
        """
        self._closing = closing
        message = opening
        while True:
            if message is not None:
                self._hear(message)
            if not self._done:
                self._watch(closing)
            if self._done:
                return
            try:
                message = self._process.receive(_TICK_S)
            except EOFError:
                self._give_back(self._process.how_it_died())
                return

    def _watch(self, closing: threading.Event) -> None:
        now = time.monotonic()
        if closing.is_set():
            self._give_back(None)
            return
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._settings.heartbeat_s
            self._keep(self._ask_store(self._store.heartbeat, self._lease, self._settings.lease_s))
        if self._cancelled.is_set() and self._stop_at is None:
            self._stop_at = now + self._settings.stop_grace_s
            self._process.send(Message("stop"))
        if self._stop_at is not None and now >= self._stop_at:
            self._finish(AttemptOutcome(event=JobEvent.CANCEL))
        elif now >= self._overtime_at:
            self._finish(self._overtime())

    def _hear(self, message: Message) -> None:
        match message.kind:
            case "ready":
                self._send_job()
            case "progress":
                self._record(message)
            case "said":
                text, lease_s = message.header["text"], self._settings.lease_s
                self._keep(self._ask_store(self._store.tell, self._lease, text, lease_s))
                self._on_change(self._lease.job_id)
            case "result":
                self.has_result = True
                self._finish(self._outcome(message))
            case _:
                error = JobError(code=message.header["code"], message=message.header["message"])
                self._finish(AttemptOutcome(event=JobEvent.FAIL, error=error))

    def _send_job(self) -> None:
        claim = self._claim
        header = {
            "kind": claim.job.kind.value,
            "options": asdict(self._options),
            "is_carried": claim.is_carried,
        }
        self._process.send(Message("job", header, dict(claim.documents)))

    def _record(self, message: Message) -> None:
        header = message.header
        point = TracePoint(
            seconds=self._claim.job.spent_s + header["seconds"],
            method=header["method"],
            objective_ms=header["objective_ms"],
            bound_ms=header["bound_ms"],
        )
        lease_s, documents = self._settings.lease_s, message.documents
        self._keep(self._ask_store(self._store.record, self._lease, point, lease_s, documents))
        self._on_change(self._lease.job_id)

    def _keep(self, job: JobRecord | None) -> None:
        if job is None:
            self._log("job.lost", "another server has taken the job over, or it has ended")
            self._done = True
            return
        self._job = job
        if job.cancel_requested:
            self._cancelled.set()

    def _outcome(self, message: Message) -> AttemptOutcome:
        header = message.header
        if header["status"] == "infeasible":
            error = JobError(
                code="problem.infeasible", message=header["message"], needs=header["needs"]
            )
            return AttemptOutcome(
                event=JobEvent.PROVE_INFEASIBLE, error=error, documents=message.documents
            )
        if header["status"] == "unknown" and not self._job.has_schedule:
            return self._nothing_found(header["message"])
        stopped_early = self._cancelled.is_set() and header["status"] != "optimal"
        return AttemptOutcome(
            event=JobEvent.CANCEL if stopped_early else JobEvent.SUCCEED,
            documents=message.documents,
            objective_ms=header["objective_ms"],
            bound_ms=header["bound_ms"],
            method=header.get("method") or "",
        )

    def _nothing_found(self, why: str) -> AttemptOutcome:
        if self._cancelled.is_set():
            return AttemptOutcome(event=JobEvent.CANCEL)
        limit = self._job.options.time_limit_s
        message = why or f"no schedule was found in {limit} s, and none was ruled out; allow more"
        return AttemptOutcome(
            event=JobEvent.FAIL, error=JobError(code="solver.nothing_found", message=message)
        )

    def _overtime(self) -> AttemptOutcome:
        if self._job.has_schedule:
            return AttemptOutcome(event=JobEvent.SUCCEED)
        message = (
            f"the solver was stopped {self._settings.overtime_s} s after its time limit of "
            f"{self._options.time_limit_s} s without a schedule; submit a smaller problem or "
            "allow more time"
        )
        return AttemptOutcome(
            event=JobEvent.FAIL, error=JobError(code="solver.overtime", message=message)
        )

    def _finish(self, outcome: AttemptOutcome) -> None:
        self._end(self._ask_store(self._store.finish, self._lease, outcome))

    def _give_back(self, death: str | None) -> None:
        most = self._settings.max_attempts
        job = self._ask_store(self._store.requeue, self._lease, death=death, max_attempts=most)
        if death is not None:
            self._log("job.died", death)
        self._end(job)

    def _ask_store(
        self, tell: Callable[..., JobRecord | None], *arguments: object, **named: object
    ) -> JobRecord | None:
        """Tell the store something, again and again while it does not answer.

        What a search has found in an hour must not be lost with a second of the database. Should
        another server take the job over meanwhile, the store says so when it answers.

        Raises `StoreUnavailableError` if the server closes, or the solve should have been over long
        ago.
        """
        while True:
            try:
                return tell(*arguments, **named)
            except StoreUnavailableError as error:
                if self._closing.is_set() or time.monotonic() >= self._overtime_at:
                    raise
                self._log("job.store_unavailable", f"{error}; it is asked again")
                self._closing.wait(_ASK_AGAIN_S)

    def _end(self, job: JobRecord | None) -> None:
        self._done = True
        self.left = job
        state = "lost" if job is None else job.state.value
        self._log("job.state", f"the job is {state}")
        for changed_id in (self._lease.job_id,) if job is None else job.changed_ids:
            self._on_change(changed_id)

    def _log(self, action: str, sentence: str) -> None:
        _log().info(sentence, action=action, job=self._lease.job_id, attempt=self._lease.attempt)


# --- Who wants to know how jobs fare: measured at the service's edge, told from within.


class EngineObserver:
    """Is told by threads of the engine and of requests, and must neither block nor raise.

    This one wants to know nothing.
    """

    def accepted(self, job: JobRecord) -> None:
        """A job was taken in; it may be finished already."""

    def started(self, job: JobRecord) -> None:
        """An attempt at a job begins."""

    def ended(self, job: JobRecord, seconds: float) -> None:
        """An attempt ended after so long, and left the job in this state."""


SILENT = EngineObserver()
"""For engines that nobody watches."""


# --- The engine: a fixed number of slots, each solving one job at a time in a process it keeps.
# A slot is a thread that claims jobs from the store; the thread waits while the process works. The
# process is started, its imports done, before a job comes, and serves one job after the other.
# Where it runs, on this machine or on a cluster, the slot does not know.


class SlotEngine:
    """Takes jobs from a store and solves them.

    ``on_change``: called from the engine's threads with the id of each job that changed, and of
    the batch of each job that ended.
    ``start_process``: starts a solver process, see `Solvers.start`. ``observer``: is told of every
    attempt's begin and end.
    """

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        on_change: Callable[[str], None],
        start_process: Callable[[], SolverProcess],
        observer: EngineObserver = SILENT,
    ) -> None:
        self._store = store
        self._observer = observer
        self._settings = settings
        self._on_change = on_change
        # Leases of an earlier life of this server are not ours.
        self._owner = new_owner()
        self._closing = threading.Event()
        self._work = threading.Semaphore(0)
        self._attempts: dict[str, Attempt] = {}
        self._looked_at = time.time()
        self._slots = [
            Slot(
                store,
                settings,
                self._owner,
                start_process=start_process,
                closing=self._closing,
                work=self._work,
                solve=self._solve,
            )
            for _ in range(settings.solver_processes)
        ]
        self._threads = [
            threading.Thread(target=self._outlive, args=(slot.serve,), name=f"slot-{index}")
            for index, slot in enumerate(self._slots)
        ]
        self._threads.append(
            threading.Thread(target=self._outlive, args=(self._expire,), name="leases")
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Say that a job was queued."""
        self._work.release()

    def cancel(self, job_id: str) -> None:
        """Stop an attempt that runs here; the store knows already that this is wanted."""
        attempt = self._attempts.get(job_id)
        if attempt is not None:
            attempt.cancel()

    def close(self) -> None:
        """Give running jobs back with their incumbents, stop all processes and threads."""
        self._closing.set()
        for _ in self._threads:
            self._work.release()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for slot in self._slots:
            slot.close()

    @property
    def is_alive(self) -> bool:
        """Whether every thread runs."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def is_able(self) -> bool:
        """Whether every thread runs, and solver processes start: those of one slot at least."""
        return self.is_alive and not all(slot.is_broken for slot in self._slots)

    def _outlive(self, step: Callable[[], None]) -> None:
        """Repeat a step until the engine closes, whatever happens in it."""
        while not self._closing.is_set():
            try:
                step()
            except (StoreUnavailableError, SolverFailedError) as error:
                _log().warning(str(error), action=f"engine.{error.code}")
                self._closing.wait(PAUSE_S)
            except Exception:  # noqa: BLE001 - a slot that ends is lost until the next restart
                _log().exception("a fault of the engine", action="engine.fault")
                self._closing.wait(PAUSE_S)

    def _solve(self, claim: Claim, process: SolverProcess, opening: Message | None) -> bool:
        """Return whether the process has ended its work, and may get more."""
        job_id = claim.lease.job_id
        attempt = Attempt(claim, process, self._store, self._settings, self._on_change)
        self._attempts[job_id] = attempt
        _log().info(
            "an attempt begins",
            action="job.attempt",
            job=job_id,
            attempt=claim.lease.attempt,
            process=process.name,
        )
        self._on_change(job_id)
        self._observer.started(claim.job)
        try:
            attempt.run(self._closing, opening)
        finally:
            if attempt.left is not None:
                self._observer.ended(attempt.left, attempt.seconds)
            if self._attempts.get(job_id) is attempt:
                del self._attempts[job_id]
        return attempt.has_result

    def _expire(self) -> None:
        settings = self._settings
        if time.time() - self._looked_at > settings.heartbeat_s + settings.lease_s / 2:
            # This server itself stood still, as a machine that slept does, and the leases of its
            # own attempts have run out as well: these are renewed first.
            self._closing.wait(settings.heartbeat_s)
        self._take_back()
        self._looked_at = time.time()
        self._closing.wait(settings.heartbeat_s)

    def _take_back(self) -> None:
        for job in self._store.expire(self._settings.max_attempts, is_gone):
            _log().info(
                f"the job's server stopped answering; the job is {job.state.value}",
                action="job.expired",
                job=job.id,
            )
            for changed_id in job.changed_ids:
                self._on_change(changed_id)
            self.wake()


# --- One slot of the engine: a process is started, gets ready, waits for a job, and solves it.
# A job is taken only by a process that is ready. To start one takes a second, or minutes where the
# search has to be compiled or the machine is busy: meanwhile the job waits in the queue, where any
# other server may take it, and neither its time nor its attempts are counted.

PAUSE_S = 1.0
"""Between two tries of what may work a moment later."""

_LONG_PAUSE_S = 10.0
_SLOT_TICK_S = 0.1


class Slot:
    """Solves one job at a time, in a process that is kept as long as it does well.

    ``owner``: in whose name jobs are claimed. ``closing``: set when the engine closes. ``work``:
    released when a job may have come. ``solve``: solves a claimed job in a process, which has said
    this so far.
    """

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        owner: str,
        *,
        start_process: Callable[[], SolverProcess],
        closing: threading.Event,
        work: threading.Semaphore,
        solve: Callable[[Claim, SolverProcess, Message | None], bool],
    ) -> None:
        self._store = store
        self._settings = settings
        self._owner = owner
        self._start_process = start_process
        self._closing = closing
        self._work = work
        self._solve = solve
        self._num_failed = 0
        self._kept: SolverProcess | None = None

    @property
    def is_broken(self) -> bool:
        """Whether no process of it has started, however often it was tried."""
        return self._num_failed >= self._settings.max_attempts

    def serve(self) -> None:
        """Solve one job in the process that is there, or a new one, unless the engine closes."""
        process, is_new = self._kept or self._start_process(), self._kept is None
        self._kept = None
        is_good = False
        try:
            try:
                opening = self._opening(process)
            except EOFError:
                if is_new:
                    self._serve_failed(process, None)
                return
            if opening is None or opening.kind == "retired":
                return
            if opening.kind == "ready":
                self._num_failed = 0
                is_good = self._serve_ready(process, opening)
            else:
                self._serve_failed(process, opening)
        finally:
            if is_good and process.is_kept:
                self._kept = process
            else:
                process.stop()

    def close(self) -> None:
        """Stop the process that waits; for when nobody serves any more."""
        if self._kept is not None:
            self._kept.stop()

    def _opening(self, process: SolverProcess) -> Message | None:
        """Return what a process says first, however long that takes.

        None when the engine closes, or the process has no machine to start on.

        Raises `EOFError` if it ended without a word.
        """
        while not self._closing.is_set():
            try:
                message = process.receive(_SLOT_TICK_S)
            except EOFError:
                if process.place is not MachineState.LOST:
                    raise
                message = None
            if process.place is MachineState.LOST:
                self._tell_lost(process)
                return None
            if message is not None:
                return message
        return None

    def _serve_ready(self, process: SolverProcess, opening: Message) -> bool:
        """Solve a job; return whether the process may get another."""
        claim = self._next_claim(process)
        if claim is None:
            return False
        if process.is_alive:
            return self._solve(claim, process, opening)
        # It died between two looks, and not of this job.
        self._store.requeue(claim.lease)
        return False

    def _next_claim(self, process: SolverProcess) -> Claim | None:
        """Wait for a job; None when the engine closes, or the process ends before one comes."""
        while not self._closing.is_set():
            if not process.is_alive:
                self._tell_lost(process)
                return None
            claim = self._claim()
            if claim is not None:
                return claim
            self._work.acquire(timeout=self._settings.poll_s)
        return None

    def _claim(self) -> Claim | None:
        settings = self._settings
        return self._store.claim(self._owner, settings.lease_s, settings.most_running)

    def _serve_failed(self, process: SolverProcess, opening: Message | None) -> None:
        """Try again where that may help; else let a job say what is wrong, if one waits."""
        self._num_failed += 1
        why = process.how_it_died() if opening is None else opening.header.get("message", "")
        _log().warning(f"a solver process did not start: {why}", action="engine.no_start")
        if not self.is_broken:
            self._closing.wait(PAUSE_S)
            return
        claim = self._claim()
        if claim is not None:
            self._solve(claim, process, opening)
        else:
            self._work.acquire(timeout=_LONG_PAUSE_S)

    def _tell_lost(self, process: SolverProcess) -> None:
        _log().warning(process.how_it_died(), action="engine.no_process")
        self._closing.wait(PAUSE_S)


# --- Whose a lease is: a name of this process that tells others on its machine when it is gone.
# A server that was killed leaves its jobs under leases that run out only after ``lease_s``. Where
# it comes back on the same machine, it need not wait: the name of the old owner says which process
# that was, and the machine knows that there is no such process any more. From another machine,
# another boot or another container nothing can be seen, and the lease decides.

_PROC = Path("/proc")


def new_owner() -> str:
    """Return a new name, ``<where>-<pid>-<start time>-<random>``, of at most 64 characters."""
    pid = os.getpid()
    return f"{_where()}-{pid}-{_started(pid) or 0}-{secrets.token_hex(4)}"


def is_gone(owner: str) -> bool:
    """Whether the process of this name has certainly ended; False where that cannot be seen."""
    where, _, rest = owner.partition("-")
    pid, _, rest = rest.partition("-")
    started, _, _ = rest.partition("-")
    if not (where and where == _where() and pid.isdecimal() and started.isdecimal()):
        return False
    if not _exists(int(pid)):
        return True
    now = _started(int(pid))
    # Another process has its number by now. None: it is there, but not ours to look at.
    return now is not None and int(started) not in (0, now)


def _where() -> str:
    """Return a name of all processes that see each other: one boot, one PID namespace.

    Containers on one machine have one boot id, and each counts its processes from 1. Empty where
    the system does not say.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text("utf-8").strip()
        namespace = (_PROC / "self/ns/pid").readlink()
    except OSError:
        return ""
    text = f"{socket.gethostname()} {boot} {namespace}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] in ("Z", "X")


def _started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None where it is not told."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of proc_pid_stat(5) from the third on: the second may hold anything."""
    try:
        return (_PROC / f"{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return None


# --- Which solver processes a server uses: its own children, or processes of a Ray cluster.


def open_solvers(settings: Settings) -> Solvers:
    """Return what starts solver processes, connected to the cluster where there is one.

    Raises `MissingExtraError` if Ray is wanted and not installed; `WorldError` if the cluster
    cannot be reached.
    """
    if settings.engine == "local":
        return LocalSolvers(settings)
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            "OPTPIPE_ENGINE=ray needs Ray, which is not installed; pip install 'optpipe[ray]'"
        )
    # Here: importing Ray takes a second and half a gigabyte of address space.
    from optpipe_api.engine.ray import RaySolvers  # noqa: PLC0415

    return RaySolvers(settings)


def _log() -> structlog.stdlib.BoundLogger:
    log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
    return log
