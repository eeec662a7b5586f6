"""One attempt at a job: its process is told, heard and watched, and its words are stored."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import structlog

from optpipe_api.engine.messages import Message
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.jobs import JobError, JobEvent, Outcome, TracePoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_api.engine.process import SolverProcess
    from optpipe_api.jobs import Claim, Job
    from optpipe_api.settings import Settings
    from optpipe_api.store.contract import JobStore

__all__ = ["Attempt"]

_TICK_S = 0.05
_LEAST_TIME_S = 1.0
_ASK_AGAIN_S = 0.5


class Attempt:
    """Solves one claimed job in one process, as far as it gets.

    `run` returns when the job is finished, given back, or lost to someone else; the process is
    then to be stopped, and ``left`` is the job as it was left. Only `cancel` may be called from
    another thread.
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
        self.left: Job | None = None
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

    def run(self, closing: threading.Event, opening: Sequence[Message]) -> None:
        """Solve until the end, or until the server closes.

        Parameters
        ----------
        opening
            What the process has said so far: that it is ready, or why it is not.
        """
        self._closing = closing
        for message in opening:
            self._hear(message)
        while not self._done:
            messages = self._process.receive(_TICK_S)
            if messages is None:
                self._give_back(self._process.how_it_died())
                return
            for message in messages:
                self._hear(message)
            if not self._done:
                self._watch(closing)

    def _watch(self, closing: threading.Event) -> None:
        now = time.monotonic()
        if closing.is_set():
            self._give_back(None)
            return
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._settings.heartbeat_s
            self._keep(self._told(self._store.heartbeat, self._lease, self._settings.lease_s))
        if self._cancelled.is_set() and self._stop_at is None:
            self._stop_at = now + self._settings.stop_grace_s
            self._process.send(Message("stop"))
        if self._stop_at is not None and now >= self._stop_at:
            self._finish(Outcome(event=JobEvent.CANCEL))
        elif now >= self._overtime_at:
            self._finish(self._overtime())

    def _hear(self, message: Message) -> None:
        if self._done:
            return
        match message.kind:
            case "ready":
                self._tell()
            case "progress":
                self._record(message)
            case "result":
                self._finish(self._outcome(message))
            case _:
                error = JobError(code=message.header["code"], message=message.header["message"])
                self._finish(Outcome(event=JobEvent.FAIL, error=error))

    def _tell(self) -> None:
        claim = self._claim
        header = {"options": asdict(self._options), "has_start": claim.start is not None}
        if claim.model is not None:
            self._process.send(Message("plan", header, claim.model))
        else:
            self._process.send(Message("job", header, claim.problem or ""))
        if claim.start is not None:
            chosen = "" if claim.model is None else claim.problem or ""
            self._process.send(Message("start", {}, claim.start, chosen))

    def _record(self, message: Message) -> None:
        header = message.header
        point = TracePoint(
            seconds=self._claim.job.spent_s + header["seconds"],
            method=header["method"],
            objective_ms=header["objective_ms"],
            bound_ms=header["bound_ms"],
        )
        better = {"schedule": message.document or None, "problem": message.problem or None}
        lease_s = self._settings.lease_s
        self._keep(self._told(self._store.record, self._lease, point, lease_s, **better))
        self._on_change(self._lease.job_id)

    def _keep(self, job: Job | None) -> None:
        if job is None:
            self._log("job.lost", "another server has taken the job over, or it has ended")
            self._done = True
            return
        self._job = job
        if job.cancel_requested:
            self._cancelled.set()

    def _outcome(self, message: Message) -> Outcome:
        header = message.header
        if header["status"] == "infeasible":
            error = JobError(
                code="problem.infeasible", message=header["message"], needs=header["needs"]
            )
            return Outcome(event=JobEvent.PROVE_INFEASIBLE, error=error)
        if header["status"] == "unknown" and not self._job.has_schedule:
            return self._nothing_found(header["message"])
        stopped_early = self._cancelled.is_set() and header["status"] != "optimal"
        return Outcome(
            event=JobEvent.CANCEL if stopped_early else JobEvent.SUCCEED,
            schedule=message.document or None,
            objective_ms=header["objective_ms"],
            bound_ms=header["bound_ms"],
            method=header.get("method") or "",
            problem=message.problem or None,
        )

    def _nothing_found(self, why: str) -> Outcome:
        if self._cancelled.is_set():
            return Outcome(event=JobEvent.CANCEL)
        limit = self._job.options.time_limit_s
        message = why or f"no schedule was found in {limit} s, and none was ruled out; allow more"
        return Outcome(
            event=JobEvent.FAIL, error=JobError(code="solver.nothing_found", message=message)
        )

    def _overtime(self) -> Outcome:
        if self._job.has_schedule:
            return Outcome(event=JobEvent.SUCCEED)
        message = (
            f"the solver was stopped {self._settings.overtime_s} s after its time limit of "
            f"{self._options.time_limit_s} s without a schedule; submit a smaller problem or "
            "allow more time"
        )
        return Outcome(event=JobEvent.FAIL, error=JobError(code="solver.overtime", message=message))

    def _finish(self, outcome: Outcome) -> None:
        self._end(self._told(self._store.finish, self._lease, outcome))

    def _give_back(self, death: str | None) -> None:
        most = self._settings.max_attempts
        job = self._told(self._store.requeue, self._lease, death=death, max_attempts=most)
        if death is not None:
            self._log("job.died", death)
        self._end(job)

    def _told(
        self, tell: Callable[..., Job | None], *arguments: object, **named: object
    ) -> Job | None:
        """Tell the store something, again and again while it does not answer.

        What a search has found in an hour must not be lost with a second of the database. Should
        another server take the job over meanwhile, the store says so when it answers.

        Raises
        ------
        StoreUnavailableError
            If the server closes, or the solve should have been over long ago.
        """
        while True:
            try:
                return tell(*arguments, **named)
            except StoreUnavailableError as error:
                if self._closing.is_set() or time.monotonic() >= self._overtime_at:
                    raise
                self._log("job.store_unavailable", f"{error}; it is asked again")
                self._closing.wait(_ASK_AGAIN_S)

    def _end(self, job: Job | None) -> None:
        self._done = True
        self.left = job
        state = "lost" if job is None else job.state.value
        self._log("job.state", f"the job is {state}")
        self._on_change(self._lease.job_id)

    def _log(self, action: str, sentence: str) -> None:
        structlog.get_logger(__name__).info(
            sentence, action=action, job=self._lease.job_id, attempt=self._lease.attempt
        )
