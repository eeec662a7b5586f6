"""The engine: it claims jobs from the store, and runs each in a solver process under a lease."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import secrets
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from optpipe.answers import JobState
from optpipe.errors import MissingExtraError, install_command
from optpipe_api.engine.near import MAX_NEAR_JOBS
from optpipe_api.engine.processes import LocalSolvers, MachineState, Message
from optpipe_api.errors import SolverFailedError, StoreUnavailableError
from optpipe_api.jobs import (
    KINDS,
    MAX_SHARED_PRIORITY,
    AttemptOutcome,
    DocumentKind,
    JobError,
    JobEvent,
    TracePoint,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_api.engine.processes import SolverProcess, Solvers
    from optpipe_api.jobs import Claim, JobRecord, Lease
    from optpipe_api.settings import Settings
    from optpipe_api.store.jobs import JobStore

__all__ = [
    "NO_OBSERVER",
    "Attempt",
    "EngineObserver",
    "SlotEngine",
    "is_gone",
    "new_owner",
    "open_solvers",
]


_MIN_TIME_S = 1.0
_RETRY_S = 0.5
_AUTO = "auto"


class Attempt:
    """Runs one claimed job in one solver process.

    The caller calls `advance` with each message of the process, and when ``due_at`` has passed; it
    calls `die` when the process has ended. ``is_done`` says that the job has ended, was queued
    again, or belongs to another lease. Then ``job_after`` is the job, or None if the lease is lost.
    ``has_result`` says whether the process has finished its work; if not, the caller must stop it.
    One thread at a time may use it. Any thread may call `cancel`, `give_back`, `lose`, `lease` and
    ``due_at``.
    """

    def __init__(
        self,
        claim: Claim,
        process: SolverProcess,
        store: JobStore,
        settings: Settings,
        *,
        on_change: Callable[[str], None],
        closing: threading.Event,
    ) -> None:
        self._claim = claim
        self._lease = claim.lease
        self._process = process
        self._store = store
        self._settings = settings
        self._on_change = on_change
        self._closing = closing
        self._job = claim.job
        self.is_done = False
        self._began = time.monotonic()
        self.job_after: JobRecord | None = None
        self.has_result = False
        self._cancelled = threading.Event()
        self._is_returned = threading.Event()
        self._stop_at: float | None = None
        self._busy_since: float | None = None
        self._is_lost = threading.Event()
        options = claim.job.options
        # A job that died just before its end still needs time to return its incumbent.
        time_limit_s = max(_MIN_TIME_S, options.time_limit_s - claim.job.spent_s)
        self._options = replace(options, time_limit_s=time_limit_s)
        self._overtime_at = self._began + time_limit_s + settings.overtime_s

    @property
    def job_id(self) -> str:
        return self._lease.job_id

    @property
    def owner(self) -> str:
        """The owner of the job."""
        return self._claim.job.owner

    @property
    def priority(self) -> int:
        """The priority of the job."""
        return self._claim.job.priority

    @property
    def keeps_schedule(self) -> bool:
        """Whether the job's next attempt starts from the best schedule of this one."""
        return DocumentKind.SCHEDULE in KINDS[self._claim.job.kind].answers

    @property
    def seconds(self) -> float:
        """Seconds since the attempt began."""
        return time.monotonic() - self._began

    def cancel(self) -> None:
        """Request an early end; the job keeps its best schedule."""
        self._cancelled.set()

    def give_back(self) -> None:
        """Request that the job is queued again, with its best schedule and the time it has left."""
        self._is_returned.set()

    def lose(self) -> None:
        """Stop without a write: the lease is lost."""
        self._is_lost.set()

    @property
    def lease(self) -> Lease | None:
        """The lease to renew; None if `advance` has not returned for too long."""
        since = self._busy_since
        is_stuck = since is not None and time.monotonic() - since > self._settings.lease_s
        return None if is_stuck else self._lease

    @property
    def due_at(self) -> float:
        """The time of `time.monotonic` when `advance` is due even without a message."""
        requests = (self._closing, self._is_returned, self._is_lost)
        is_cancelled = self._cancelled.is_set() and self._stop_at is None
        if is_cancelled or any(one.is_set() for one in requests):
            return 0.0
        return self._overtime_at if self._stop_at is None else min(self._stop_at, self._overtime_at)

    def advance(self, message: Message | None) -> None:
        """Handle a message of the process, then a cancellation or timeout that is due."""
        self._busy_since = time.monotonic()
        if message is not None:
            self._handle(message)
        if not self.is_done:
            self._check_clock()
        self._busy_since = None

    def die(self) -> None:
        """Queue the job again, because its process has ended; fail it after too many deaths."""
        self._give_back(self._process.describe_exit())

    def _check_clock(self) -> None:
        """Pass on a cancellation, and enforce timeouts, each when it is due."""
        now = time.monotonic()
        if self._closing.is_set() or self._is_returned.is_set():
            self._give_back(None)
            return
        if self._is_lost.is_set():
            self._lose()
            return
        if self._cancelled.is_set() and self._stop_at is None:
            self._stop_at = now + self._settings.stop_grace_s
            self._process.send(Message("stop"))
        if self._stop_at is not None and now >= self._stop_at:
            self._finish(AttemptOutcome(event=JobEvent.CANCEL))
        elif now >= self._overtime_at:
            message = (
                f"the solver was stopped {self._settings.overtime_s} s after its time limit of "
                f"{self._options.time_limit_s} s without a schedule; submit a smaller problem or "
                "allow more time"
            )
            has_schedule = self._job.has_schedule
            success = AttemptOutcome(event=JobEvent.SUCCEED)
            self._finish(success if has_schedule else _failure("solver.overtime", message))

    def _handle(self, message: Message) -> None:
        header, documents = message.header, message.documents
        match message.kind:
            case "ready":
                claim = self._claim
                near = self._find_near()
                job_header = {
                    "kind": claim.job.kind.value,
                    "options": asdict(self._options),
                    "near": list(near),
                }
                documents = dict(claim.documents)
                for job_id, texts in near.items():
                    documents |= {f"{kind} of {job_id}": text for kind, text in texts.items()}
                self._process.send(Message("job", job_header, documents))
            case "near":
                self._renew(self._store.note_near, header["job_id"])
            case "progress":
                point = TracePoint(
                    seconds=self._claim.job.spent_s + header["seconds"],
                    method=header["method"],
                    objective_ms=header["objective_ms"],
                    bound_ms=header["bound_ms"],
                )
                self._renew(self._store.record, point, documents=documents)
                self._on_change(self._lease.job_id)
            case "log":
                self._renew(self._store.tell, header["text"])
                self._on_change(self._lease.job_id)
            case "result":
                self.has_result = True
                self._finish(self._outcome(message))
            case _:
                self._finish(_failure(header["code"], header["message"]))

    def _find_near(self) -> dict[str, dict[str, str]]:
        """Return problem and schedule of near jobs, by id, if the job may start from them.

        Only the optimiser of a problem takes a start: other methods have exactly one schedule.
        """
        job = self._claim.job
        is_wanted = self._settings.cache and self._options.cache != "refresh"
        has_start = DocumentKind.SCHEDULE in self._claim.documents
        if not is_wanted or has_start or not job.shape_hash or self._options.method != _AUTO:
            return {}
        try:
            return self._store.near(job.shape_hash, owner=job.owner, limit=MAX_NEAR_JOBS)
        except StoreUnavailableError as error:
            self._log("job.store_unavailable", f"{error}; the search starts without a near job")
            return {}

    def _renew(
        self, write: Callable[..., JobRecord | None], *values: object, **named: object
    ) -> None:
        """Write to the store, and renew the lease by that; stop if the lease is lost."""
        job = self._retry(write, *values, lease_s=self._settings.lease_s, **named)
        if job is None:
            self._lose()
            return
        self._job = job
        if job.cancel_requested:
            self._cancelled.set()

    def _lose(self) -> None:
        self._log("job.lost", "another server has taken the job over, or it has ended")
        self.is_done = True

    def _outcome(self, message: Message) -> AttemptOutcome:
        """Return the outcome of a result message."""
        header, documents = message.header, message.documents
        if header["status"] == "infeasible":
            error = JobError(
                code="problem.infeasible", message=header["message"], needs=header["needs"]
            )
            return AttemptOutcome(event=JobEvent.PROVE_INFEASIBLE, error=error, documents=documents)
        is_cancelled = self._cancelled.is_set()
        if header["status"] == "unknown" and not self._job.has_schedule:
            if is_cancelled:
                return AttemptOutcome(event=JobEvent.CANCEL)
            limit_s = self._job.options.time_limit_s
            default = (
                f"no schedule was found in {limit_s} s, nor proven impossible; allow more time"
            )
            return _failure("solver.nothing_found", header["message"] or default)
        is_cut_short = is_cancelled and header["status"] != "optimal"
        return AttemptOutcome(
            event=JobEvent.CANCEL if is_cut_short else JobEvent.SUCCEED,
            documents=documents,
            objective_ms=header["objective_ms"],
            bound_ms=header["bound_ms"],
            method=header.get("method") or "",
        )

    def _finish(self, outcome: AttemptOutcome) -> None:
        self._end(self._retry(self._store.finish, outcome))

    def _give_back(self, death: str | None) -> None:
        """Queue the job again; ``death``: what ended the process, None = the server closes."""
        max_attempts = self._settings.max_attempts
        job = self._retry(self._store.requeue, death=death, max_attempts=max_attempts)
        if death is not None:
            self._log("job.died", death)
        self._end(job)

    def _retry(
        self, write: Callable[..., JobRecord | None], *values: object, **named: object
    ) -> JobRecord | None:
        """Write to the store under the lease, and retry while the database does not answer.

        A result of an hour must not be lost in a second without a database. If another server
        takes the job meanwhile, the write returns None. A server that closes tries once more: all
        of its slots write then, and one of them may have waited too long for the others.

        Raises `StoreUnavailableError` if the server closes, or the attempt is over its time limit.
        """
        is_last = False
        while True:
            try:
                return write(self._lease, *values, **named)
            except StoreUnavailableError as error:
                if is_last or time.monotonic() >= self._overtime_at:
                    raise
                is_last = self._closing.is_set()
                self._log("job.store_unavailable", f"{error}; the write is retried")
                self._closing.wait(_RETRY_S)

    def _end(self, job: JobRecord | None) -> None:
        self.is_done = True
        self.job_after = job
        state = "lost" if job is None else job.state.value
        self._log("job.state", f"the job is {state}")
        for changed_id in (self._lease.job_id,) if job is None else job.changed_ids:
            self._on_change(changed_id)

    def _log(self, action: str, sentence: str) -> None:
        _log().info(sentence, action=action, job=self._lease.job_id, attempt=self._lease.attempt)


def _failure(code: str, message: str) -> AttemptOutcome:
    return AttemptOutcome(event=JobEvent.FAIL, error=JobError(code=code, message=message))


# --- The observer of jobs: the metrics of the service.


class EngineObserver:
    """Gets a call when a job is accepted, started or ended; this base class ignores all of them.

    Threads of the engine and of requests call it. It must neither block nor raise.
    """

    def accepted(self, job: JobRecord) -> None:
        """Note a new job, which may have ended already."""

    def started(self, job: JobRecord) -> None:
        """Note that an attempt at a job begins."""

    def ended(self, job: JobRecord, seconds: float) -> None:
        """Note the end of an attempt after so many seconds, and the job at that time."""


NO_OBSERVER = EngineObserver()


# --- The engine: a fixed number of slots, each of which runs one job at a time.
# A slot is a solver process, on this machine or on a cluster. One thread waits for the messages of
# all processes. It gives a slot with a message, or with something due, to one of a few worker
# threads, which run the next step of the slot. So the number of threads does not grow with the
# number of slots. A slot claims a job only when its process is ready. The start of a process takes
# a second, or minutes if the search has to be compiled. Meanwhile the job waits in the queue, where
# another server may claim it, and neither its time nor its attempts count. The process is kept for
# the next job.

_PAUSE_S = 1.0
"""Before a retry after a failure that may be temporary."""
_LONG_PAUSE_S = 10.0
_MAX_WORKERS = 12
_MAX_WAIT_S = 1.0
_PATIENCE_S = 5.0
_DELETE_EVERY_S, _DAY_S = 3600.0, 86_400.0
_NUM_DELETED_AT_ONCE = 200


@dataclass(eq=False)
class _Slot:
    """The state of a slot. Its thread is a worker while it ``is_busy``, else the waiting thread.

    ``is_new``: whether the process has not been ready yet. ``is_ready``: whether it waits for a
    job. ``is_faulty``: whether its last step failed, so that it needs another process.
    ``num_failed``: its starts in a row that failed. ``start_at``: the earliest next start.
    """

    process: SolverProcess | None = None
    attempt: Attempt | None = None
    is_busy: bool = False
    is_new: bool = True
    is_ready: bool = False
    is_faulty: bool = False
    num_failed: int = 0
    start_at: float = 0.0


class SlotEngine:
    """Claims jobs from a store and solves them.

    ``on_change``: called on the engine's threads with the id of each job that changed, and with the
    batch of each job that ended. ``solvers``: starts the solver processes and waits for them.
    ``observer``: gets the begin and the end of every attempt.
    """

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        on_change: Callable[[str], None],
        solvers: Solvers,
        observer: EngineObserver = NO_OBSERVER,
    ) -> None:
        self._store = store
        self._settings = settings
        self._on_change = on_change
        self._solvers = solvers
        self._observer = observer
        # A new name: leases of an earlier process of this server are not valid here.
        self._owner = new_owner()
        self._closing = threading.Event()
        self._new_jobs = threading.Event()
        self._new_jobs.set()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._is_claiming = False
        self._wants_jobs = False
        self._claim_at = 0.0
        self._waited_at = time.monotonic()
        self._attempts: dict[str, Attempt] = {}
        self._entitled: set[str] = set()
        self._checked_at = time.time()
        self._slots = [_Slot() for _ in range(settings.solver_processes)]
        self._workers = self._open_workers()
        steps: dict[str, tuple[Callable[[], None], float]] = {
            "slots": (self._serve_slots, _PAUSE_S),
            "leases": (self._expire_leases, _PAUSE_S),
            "borrowed": (self._return_borrowed, _PAUSE_S),
            "heartbeats": (self._renew_leases, _PAUSE_S),
            "retention": (self._delete_old, _LONG_PAUSE_S),
        }
        self._threads = [
            threading.Thread(target=self._repeat, args=(name, *step), name=name)
            for name, step in steps.items()
        ]

    def _open_workers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(_MAX_WORKERS, len(self._slots)), thread_name_prefix="slot")

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Let an idle slot claim a job that was queued."""
        self._new_jobs.set()
        # Each interruption takes the interpreter from the thread that answers requests.
        if self._wants_jobs:
            self._interrupt_wait()

    def cancel(self, job_id: str) -> None:
        """Stop an attempt of this engine, after the cancellation was stored."""
        attempt = self._attempts.get(job_id)
        if attempt is not None:
            attempt.cancel()
            self._interrupt_wait()

    def close(self) -> None:
        """Queue running jobs again with their incumbents; stop all processes and threads."""
        self._closing.set()
        self._interrupt_wait()
        *threads, deleting = self._threads
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        # A step that sends to a process that reads nothing ends with the process.
        ending = threading.Timer(_PATIENCE_S, self._end_busy_processes)
        ending.start()
        self._workers.shutdown()
        ending.cancel()
        # All jobs first: their leases are not renewed any more, and to stop a process takes time.
        with self._open_workers() as workers:
            for step in (self._handle_news, self._drop):
                list(workers.map(self._run, self._slots, [step] * len(self._slots)))
        # Last: a deletion that waits for the database must not let leases expire.
        if deleting.ident is not None:
            deleting.join()
        self._wake.close()
        self._waker.close()

    def _end_busy_processes(self) -> None:
        for slot in self._slots:
            if slot.is_busy and slot.process is not None:
                slot.process.stop()

    @property
    def is_alive(self) -> bool:
        """Whether every thread runs."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def can_solve(self) -> bool:
        """Whether every thread runs, and the processes of at least one slot start."""
        return self.is_alive and not all(self._is_broken(slot) for slot in self._slots)

    def _is_broken(self, slot: _Slot) -> bool:
        return slot.num_failed >= self._settings.max_attempts

    def _repeat(self, name: str, step: Callable[[], None], pause_s: float) -> None:
        """Repeat a step until the engine closes; after an error it pauses."""
        while not self._closing.is_set():
            try:
                step()
            except Exception as error:  # noqa: BLE001 - a thread that ends is lost
                _report(error, name)
                self._closing.wait(pause_s)

    # The waiting thread

    def _interrupt_wait(self) -> None:
        # A full buffer or a closed socket: the thread wakes anyway, or has ended.
        with suppress(OSError):
            self._waker.send(b"\0")

    def _serve_slots(self) -> None:
        """Begin every step that is due, then wait until a process has a message or one is due."""
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        self._waited_at = now = time.monotonic()
        self._wants_jobs = False
        next_at = now + _MAX_WAIT_S
        waiting: list[_Slot] = []
        for slot in self._slots:
            if slot.is_busy:
                continue
            step, due_at = self._next_step(slot)
            if step is not None and due_at <= now:
                self._begin_step(slot, step)
                continue
            next_at = min(next_at, due_at)
            if slot.process is not None:
                waiting.append(slot)
        processes = [slot.process for slot in waiting]
        timeout_s = max(0.0, next_at - time.monotonic())
        found = {id(one) for one in self._solvers.wait(processes, self._wake, timeout_s)}
        for slot in waiting:
            if id(slot.process) in found:
                self._begin_step(slot, self._handle_news)

    def _next_step(self, slot: _Slot) -> tuple[Callable[[_Slot], None] | None, float]:
        """Return what a slot has to do without a message, and when."""
        if slot.is_faulty:
            return self._drop, 0.0
        if slot.attempt is not None:
            return self._handle_news, slot.attempt.due_at
        if slot.process is None:
            step, due_at, wants_job = self._start, slot.start_at, self._is_broken(slot)
        else:
            step, due_at = self._take_job, self._claim_at
            wants_job = slot.is_ready and not self._is_claiming
            if not wants_job:
                return None, math.inf
        if wants_job:
            # Before the look for new jobs, so that `wake` cannot come in between.
            self._wants_jobs = True
            due_at = 0.0 if self._new_jobs.is_set() else due_at
        return step, due_at

    def _begin_step(self, slot: _Slot, step: Callable[[_Slot], None]) -> None:
        slot.is_busy = True
        if step == self._take_job:
            self._is_claiming = True
        self._workers.submit(self._run, slot, step)

    # The steps of a slot, on worker threads

    def _run(self, slot: _Slot, step: Callable[[_Slot], None]) -> None:
        """Run a step of a slot; if it fails, the slot gets another process after a pause."""
        try:
            step(slot)
        except Exception as error:  # noqa: BLE001 - the slot would be lost until the next restart
            _report(error)
            slot.is_faulty = slot.process is not None
            slot.start_at = time.monotonic() + _PAUSE_S
        slot.is_busy = False
        self._interrupt_wait()

    def _start(self, slot: _Slot) -> None:
        slot.is_new, slot.is_ready = True, False
        slot.process = self._solvers.start()

    def _handle_news(self, slot: _Slot) -> None:
        """Handle the next message of a slot's process, its end, or what is due."""
        process, attempt = slot.process, slot.attempt
        if process is None:
            return
        try:
            message = process.receive(0)
        except EOFError:
            self._end(slot, process)
            return
        if attempt is not None:
            attempt.advance(message)
            if attempt.is_done:
                self._end_attempt(slot, process)
        elif message is None:
            return
        elif message.kind == "ready":
            slot.num_failed, slot.is_new, slot.is_ready = 0, False, True
        elif message.kind == "retired":
            self._drop(slot)
        else:
            self._report_failed_start(slot, process, message)

    def _end(self, slot: _Slot, process: SolverProcess) -> None:
        """Handle the end of a process: during a job, before its first job, or while it waits."""
        if slot.attempt is not None:
            slot.attempt.die()
            self._end_attempt(slot, process)
        elif slot.is_new and process.machine is not MachineState.LOST:
            self._report_failed_start(slot, process, None)
        else:
            _log().warning(process.describe_exit(), action="engine.no_process")
            self._drop(slot, _PAUSE_S)

    def _take_job(self, slot: _Slot) -> None:
        """Claim the next job for a slot whose process is ready."""
        try:
            claim = self._claim()
        except StoreUnavailableError as error:
            _report(error)
            claim = None
        finally:
            self._is_claiming = False
        process = slot.process
        if claim is None or process is None:
            return
        if process.is_alive:
            self._begin_attempt(slot, process, claim, Message("ready"))
        else:
            # The process died after the last look, and not because of this job.
            self._store.requeue(claim.lease)

    def _begin_attempt(
        self, slot: _Slot, process: SolverProcess, claim: Claim, opening: Message | None
    ) -> None:
        """Begin an attempt with the first message of its process; None if it has ended."""
        job_id = claim.lease.job_id
        attempt = slot.attempt = self._attempts[job_id] = Attempt(
            claim,
            process,
            self._store,
            self._settings,
            on_change=self._on_change,
            closing=self._closing,
        )
        slot.is_ready = False
        _log().info(
            "an attempt begins",
            action="job.attempt",
            job=job_id,
            attempt=claim.lease.attempt,
            process=process.name,
        )
        self._on_change(job_id)
        self._observer.started(claim.job)
        if opening is None:
            attempt.die()
        else:
            attempt.advance(opening)
        if attempt.is_done:
            self._end_attempt(slot, process)

    def _end_attempt(self, slot: _Slot, process: SolverProcess) -> None:
        """Keep the process of an attempt for the next job, or stop it."""
        attempt = slot.attempt
        self._forget_attempt(slot)
        if attempt is None or not (attempt.has_result and process.is_reusable):
            self._drop(slot)

    def _forget_attempt(self, slot: _Slot) -> None:
        attempt, slot.attempt = slot.attempt, None
        if attempt is None:
            return
        job = attempt.job_after
        if job is not None:
            self._observer.ended(job, attempt.seconds)
            if job.state is JobState.QUEUED:
                self._new_jobs.set()
        if self._attempts.get(attempt.job_id) is attempt:
            del self._attempts[attempt.job_id]

    def _drop(self, slot: _Slot, pause_s: float = 0.0) -> None:
        """Stop the process of a slot; the next one starts after a pause."""
        process, slot.process = slot.process, None
        slot.is_faulty = slot.is_ready = False
        slot.start_at = max(slot.start_at, time.monotonic() + pause_s)
        self._forget_attempt(slot)
        if process is not None:
            process.stop()

    def _report_failed_start(
        self, slot: _Slot, process: SolverProcess, opening: Message | None
    ) -> None:
        """Log that a process did not start; after too many failures, fail a queued job with it."""
        slot.num_failed += 1
        why = process.describe_exit() if opening is None else opening.header.get("message", "")
        _log().warning(f"a solver process did not start: {why}", action="engine.no_start")
        if not self._is_broken(slot):
            self._drop(slot, _PAUSE_S)
            return
        claim = self._claim()
        if claim is None:
            self._drop(slot, _LONG_PAUSE_S)
        else:
            self._begin_attempt(slot, process, claim, opening)

    def _claim(self) -> Claim | None:
        """Return the next job; after a look without one, the next look is after ``poll_s``."""
        settings = self._settings
        self._new_jobs.clear()
        self._claim_at = time.monotonic() + settings.poll_s
        claim = self._store.claim(self._owner, settings.lease_s, settings.max_running)
        if claim is not None:
            self._new_jobs.set()
        return claim

    # Leases

    def _renew_leases(self) -> None:
        """Renew the leases of all attempts in one transaction, then wait until the next time."""
        running = {}
        is_stuck = time.monotonic() - self._waited_at > _MAX_WAIT_S + self._settings.lease_s
        for attempt in [] if is_stuck else list(self._attempts.values()):
            lease = attempt.lease
            if lease is not None:
                running[lease] = attempt
        if running:
            is_cancelled = self._store.heartbeat(list(running), self._settings.lease_s)
            for lease, attempt in running.items():
                if lease not in is_cancelled:
                    attempt.lose()
                elif is_cancelled[lease]:
                    attempt.cancel()
            self._interrupt_wait()
        self._closing.wait(self._settings.heartbeat_s)

    def _return_borrowed(self) -> None:
        """Queue a borrowed job again if another key waits for its slot; wait for the next look.

        A job is borrowed if its key runs more than ``max_running``. Its best schedule is kept; a
        job that would lose its work stays, and so does one whose priority precedes all turns. Of
        several, the one of the lowest priority goes back, the newest of equal ones. The other key
        must have waited since the last look: an idle slot of any server serves it sooner.
        """
        attempts = list(self._attempts.values())
        num_running = Counter(attempt.owner for attempt in attempts if attempt.owner)
        limit = self._settings.max_running
        borrowed = [
            one
            for one in attempts
            if num_running[one.owner] > limit
            and one.keeps_schedule
            and one.priority <= MAX_SHARED_PRIORITY
        ]
        num_slots = sum(not self._is_broken(slot) for slot in self._slots)
        seen, self._entitled = self._entitled, set()
        if borrowed and len(attempts) >= num_slots:
            self._entitled = self._store.entitled(self._owner, limit)
            if seen & self._entitled:
                min(borrowed, key=lambda one: (one.priority, one.seconds)).give_back()
                self._interrupt_wait()
        self._closing.wait(self._settings.poll_s)

    def _expire_leases(self) -> None:
        """Queue the jobs again whose lease has run out, then wait until the next check."""
        settings = self._settings
        if time.time() - self._checked_at > settings.heartbeat_s + settings.lease_s / 2:
            # This server itself was suspended, so the leases of its own attempts have run out too.
            # Let the attempts renew them first.
            self._closing.wait(settings.heartbeat_s)
        for job in self._store.expire(settings.max_attempts, is_gone):
            _log().info(
                f"the job's server stopped answering; the job is {job.state.value}",
                action="job.expired",
                job=job.id,
            )
            for changed_id in job.changed_ids:
                self._on_change(changed_id)
            self.wake()
        self._checked_at = time.time()
        self._closing.wait(settings.heartbeat_s)

    # Retention

    def _delete_old(self) -> None:
        """Delete what ended more than ``retention_days`` ago, then wait for an hour.

        Every server does this, and finds only what no other server has deleted. The transactions
        are small for the sake of other writers.
        """
        days = self._settings.retention_days
        before = time.time() - days * _DAY_S
        num_deleted, num_found = 0, _NUM_DELETED_AT_ONCE if days else 0
        while num_found == _NUM_DELETED_AT_ONCE and not self._closing.is_set():
            num_found = self._store.delete_finished(before, _NUM_DELETED_AT_ONCE)
            num_deleted += num_found
        if num_deleted:
            _log().info(
                f"deleted what ended more than {days:g} days ago",
                action="retention.deleted",
                jobs=num_deleted,
            )
        self._closing.wait(_DELETE_EVERY_S)


# --- The owner of a lease: a name from which other processes can see that this process has ended.
# The leases of a killed server run out only after ``lease_s``. A server on the same machine need
# not wait so long: the owner's name identifies the process, and the machine knows whether it runs.
# After another boot, or from another machine or container, only the lease decides.

_PROC = Path("/proc")


def new_owner() -> str:
    """Return a new name, ``<namespace>-<pid>-<start time>-<random>``, of up to 64 characters."""
    _, start = _process_stat(os.getpid()) or ("", 0)
    return f"{_namespace()}-{os.getpid()}-{start}-{secrets.token_hex(4)}"


def is_gone(owner: str) -> bool:
    """Return whether the process of this name has certainly ended; False if that is unknown."""
    namespace, pid, start, *_ = [*owner.split("-", 3), "", "", ""]
    if not (namespace and namespace == _namespace() and pid.isdecimal() and start.isdecimal()):
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    stat = _process_stat(int(pid))
    if stat is None:
        return False
    state, start_now = stat
    # A zombie has ended. A process of another start time has the same number by chance.
    return state in ("Z", "X") or int(start) not in (0, start_now)


def _namespace() -> str:
    """Return a name of one boot and one PID namespace; empty if the system does not have it.

    Containers on one machine share a boot id, and each numbers its processes from 1.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text("utf-8").strip()
        namespace = (_PROC / "self/ns/pid").readlink()
    except OSError:
        return ""
    text = f"{socket.gethostname()} {boot} {namespace}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _process_stat(pid: int) -> tuple[str, int] | None:
    """Return a process's state letter, and its start in clock ticks since the boot.

    None if proc_pid_stat(5) cannot be read.
    """
    try:
        text = (_PROC / f"{pid}/stat").read_text("utf-8")
    except OSError:
        return None
    # The second field, a name in parentheses, may contain anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


# --- The solver processes that a server uses: its own children, or processes of a Ray cluster.


def open_solvers(settings: Settings) -> Solvers:
    """Return the source of solver processes, connected to the cluster if the settings name Ray.

    Raises `MissingExtraError` if Ray is required and not installed, and `WorldError` if the
    cluster does not answer.
    """
    if settings.engine == "local":
        return LocalSolvers(settings)
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            f"OPTPIPE_ENGINE=ray needs Ray, which is not installed; {install_command('ray')}"
        )
    # Here: importing Ray takes a second and half a gigabyte of address space.
    from optpipe_api.engine.ray import RaySolvers  # noqa: PLC0415

    return RaySolvers(settings)


def _report(error: Exception, step: str = "slots") -> None:
    """Log what a step raised, with its traceback if it is a fault of the engine."""
    if isinstance(error, StoreUnavailableError | SolverFailedError):
        _log().warning(str(error), action=f"engine.{error.code}", step=step)
    else:
        _log().error("a fault of the engine", action="engine.fault", step=step, exc_info=error)


def _log() -> structlog.stdlib.BoundLogger:
    log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
    return log
