"""Jobs as callers see them: submit, show, follow, cancel, resume; and the cache of answers.

The cache answers a new job from a finished job of the same owner. Such a *hit* has the same problem
(or model) and method, and an answer that the new job would find again. The answer is proven, or is
within the requested gap, or was found from the same seed with at least the same budget. A solver
process gives other jobs a start from a near job (`optpipe_api.engine.near`). A job with
``cache: refresh`` uses neither, so its answer depends on its request alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from optpipe.answers import Cache, JobState
from optpipe.errors import InfeasibleProblemError, InputError, RequestError
from optpipe_api.access import Role
from optpipe_api.engine.engine import NO_OBSERVER, EngineObserver
from optpipe_api.errors import JobNotFoundError, NoModelError, ScheduleNotFoundError
from optpipe_api.jobs import (
    KINDS,
    MAX_SHARED_PRIORITY,
    AttemptOutcome,
    DocumentKind,
    JobEvent,
    TracePoint,
)
from optpipe_api.services.events import Followers, Watch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from optpipe.answers import JobOptions
    from optpipe_api.access import Principal
    from optpipe_api.engine.engine import SlotEngine
    from optpipe_api.jobs import AuditEntry, HistoryEntry, JobRecord, NewJob, StoredSchedule
    from optpipe_api.services.events import Changes
    from optpipe_api.settings import Settings
    from optpipe_api.store import JobStore

__all__ = [
    "JobService",
    "check_priority",
    "complete_from_cache",
    "is_reusable",
]


_MAX_SAME = 20


def complete_from_cache(new: NewJob, store: JobStore) -> NewJob:
    """Return the job with the newest answer of a hit, or unchanged.

    A job that has a start keeps it, unless there is an answer that is no worse.
    """
    has_schedule = DocumentKind.SCHEDULE in KINDS[new.kind].answers
    if not has_schedule or new.options.cache == "refresh":
        return new
    found = store.answer(
        new.problem_hash,
        *KINDS[new.kind].answers,
        kind=new.kind,
        owner=new.owner,
        limit=_MAX_SAME,
        accepts=lambda job: (
            is_reusable(job, new.options) and new.accepts_objective(job.objective_ms)
        ),
    )
    if found is None:
        return new
    job, documents, method = found
    is_infeasible = job.state is JobState.INFEASIBLE
    outcome = AttemptOutcome(
        event=JobEvent.PROVE_INFEASIBLE if is_infeasible else JobEvent.SUCCEED,
        documents=documents,
        objective_ms=job.objective_ms,
        bound_ms=job.bound_ms,
        error=job.error,
        method=method,
    )
    return replace(new, cache=Cache.HIT, source_id=job.id, start=None, finished=outcome)


def is_reusable(job: JobRecord, options: JobOptions) -> bool:
    """Return whether a finished job answers an equal job with other options.

    A proof concerns schedules without noise only.
    """
    if not job.options.has_same_task(options):
        return False
    is_noisy = options.robust is not None and job.state is not JobState.INFEASIBLE
    is_close = job.gap is not None and job.gap <= options.gap
    return (not is_noisy and (job.is_proven or is_close)) or job.options.covers(options)


class JobService:
    """Jobs as one caller sees them. Coroutines are for the event loop, other methods for threads.

    Methods raise `JobNotFoundError` if the caller may not see the job.
    """

    def __init__(
        self,
        settings: Settings,
        store: JobStore,
        engine: SlotEngine,
        changes: Changes,
        observer: EngineObserver = NO_OBSERVER,
    ) -> None:
        self._observer = observer
        self._settings = settings
        self._store = store
        self._engine = engine
        self._changes = changes
        self._watch = Watch(store, changes)
        self._followers = Followers(store, changes, self._watch)

    # Submitting

    def submit(
        self, new: NewJob, caller: Principal, key: str | None = None
    ) -> tuple[JobRecord, list[TracePoint] | None]:
        """Queue a job, or store it with its known answer; a repeated key returns the first job.

        Returns the job and the trace of a new job; None if the job is not new.

        Raises `QueueFullError`, `TooManyJobsError`, `TooManyKeptError`, `KeyReusedError` as
        `JobStore.add`; `RequestError` if the priority is not allowed for the caller's role.
        """
        check_priority(new.priority, caller)
        new = self.complete(replace(new, owner=caller.name, idempotency_key=key))
        job, is_new = self._store.add(
            new,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._settings.max_jobs_per_key if new.owner else None,
            max_kept=self._settings.max_kept_jobs_per_key if new.owner else None,
        )
        if not is_new:
            return job, None
        self.publish_new(job)
        answer = new.finished
        if answer is None or not job.has_schedule:
            return job, []
        numbers = {"objective_ms": job.objective_ms, "bound_ms": job.bound_ms}
        return job, [TracePoint(seconds=0.0, method=answer.method, **numbers)]

    def complete(self, new: NewJob) -> NewJob:
        """Return a new job with its answer as `complete_from_cache`, if the service has a cache."""
        return complete_from_cache(new, self._store) if self._settings.cache else new

    def publish_new(self, job: JobRecord) -> None:
        """Publish a stored job to engine, followers and observer."""
        self._observer.accepted(job)
        self.publish(job)

    def publish(self, job: JobRecord) -> None:
        """Publish a change of a job to followers, and to the engine if the job is queued."""
        if job.state is JobState.QUEUED:
            self._engine.wake()
        for changed_id in job.changed_ids:
            self._changes.publish(changed_id)

    # Showing

    def find(self, job_id: str, caller: Principal) -> JobRecord:
        job = self._store.get(job_id)
        if not caller.sees(job.owner):
            raise JobNotFoundError(job_id)
        return job

    def job(self, job_id: str, caller: Principal) -> tuple[JobRecord, list[TracePoint]]:
        """Return a job and its improvements so far."""
        job, trace = self._store.trace(job_id)
        if not caller.sees(job.owner):
            raise JobNotFoundError(job_id)
        return job, trace

    def page(
        self,
        limit: int,
        before: int | None,
        caller: Principal,
        *,
        owner: str | None = None,
        state: JobState | None = None,
        tag: str | None = None,
        batch_id: str | None = None,
    ) -> list[JobRecord]:
        """Return jobs at positions below ``before``, newest first; an admin sees all owners' jobs.

        Others see none of another owner.
        """
        if caller.role is not Role.ADMIN:
            if owner not in (None, caller.name):
                return []
            owner = caller.name
        return self._store.page(limit, before, owner=owner, state=state, tag=tag, batch_id=batch_id)

    def document(self, job_id: str, kind: DocumentKind, caller: Principal) -> str:
        """Return a document of a job as JSON text; a plan's problem is the best one so far.

        Raises `NoModelError` if the job solves a problem instead of a model, and
        `ScheduleNotFoundError` if it has no such document (yet).
        """
        (text,) = self.documents(job_id, caller, kind)
        return text

    def documents(self, job_id: str, caller: Principal, *kinds: DocumentKind) -> tuple[str, ...]:
        """Return documents of a job in this order, all of one moment; raises as `document`."""
        job = self.find(job_id, caller)
        texts = self._store.documents(job_id, *kinds)
        for kind in kinds:
            if kind not in texts:
                raise _missing_document(job, kind)
        return tuple(texts[kind] for kind in kinds)

    def schedule(
        self, job_id: str, caller: Principal, *, with_problem: bool = False
    ) -> StoredSchedule:
        """Return a job's best schedule so far; ``with_problem``: with the problem that it solves.

        Raises `InfeasibleProblemError` if the job is proven infeasible, and
        `ScheduleNotFoundError` if it has no schedule (yet).
        """
        stored = self._store.schedule(job_id, with_problem=with_problem)
        if stored is not None and caller.sees(stored.owner):
            return stored
        job = self.find(job_id, caller)
        if job.state is JobState.INFEASIBLE and job.error is not None:
            raise InfeasibleProblemError(job.error.message, job.error.needs)
        raise _missing_document(job, DocumentKind.SCHEDULE)

    def places(self, shown: Iterable[JobRecord]) -> dict[str, int]:
        """Return the places of the owners' queued jobs in their own queues, by id."""
        owners = {job.owner for job in shown if job.state is JobState.QUEUED}
        return {job_id: at for owner in owners for job_id, at in self._store.places(owner).items()}

    # Changing

    def delete(self, job_id: str, caller: Principal) -> None:
        """Delete an ended job and all its documents; raises as `JobStore.delete`."""
        self.find(job_id, caller)
        self._store.delete(job_id, caller.name)

    def cancel(self, job_id: str, caller: Principal) -> JobRecord:
        """Cancel a queued job, or request the end of a running job."""
        self.find(job_id, caller)
        job = self._store.request_cancel(job_id, caller.name)
        self.stop(job)
        return job

    def stop(self, job: JobRecord) -> None:
        """Publish the stored cancellation of a job, and stop its attempt at this server."""
        self._engine.cancel(job.id)
        self.publish(job)

    def cancel_owner(self, owner: str, caller: Principal) -> int:
        """Cancel all unfinished jobs of an owner; return how many there were.

        Raises `ForbiddenError` unless the caller is an admin or the owner.
        """
        if owner != caller.name:
            caller.require(Role.ADMIN)
        jobs = self._store.cancel_owner(owner, caller.name)
        for job in jobs:
            self.stop(job)
        return len(jobs)

    def audit(
        self,
        limit: int,
        before: int | None,
        caller: Principal,
        *,
        subject: str | None = None,
        actor: str | None = None,
    ) -> list[AuditEntry]:
        """Return entries of the audit log as `JobStore.audit`, for admins only.

        Raises `ForbiddenError`.
        """
        caller.require(Role.ADMIN)
        return self._store.audit(limit, before, subject=subject, actor=actor)

    def resume(self, job_id: str, seconds: float, caller: Principal) -> JobRecord:
        """Queue a finished job again with more time; it continues from its best schedule.

        Raises `StateConflictError`, `InputError`, `QueueFullError`, `TooManyJobsError` as
        `JobStore.resume`.
        """
        self.find(job_id, caller)
        settings = self._settings
        job = self._store.resume(
            job_id,
            seconds,
            actor=caller.name,
            max_time_limit_s=settings.max_time_limit_s,
            max_queued=settings.max_queued_jobs,
            max_of_owner=settings.max_jobs_per_key if caller.name else None,
        )
        self.publish(job)
        return job

    # Following

    async def wait(self, job: JobRecord, seconds: float) -> JobRecord:
        """Return the job once it is finished, or as it is after the timeout.

        A job that is deleted meanwhile is returned unchanged.
        """
        if job.state.is_final or seconds <= 0:
            return job
        timeout_s = min(seconds, self._settings.max_wait_s)
        await self._watch.until(job.id, lambda now: now.state.is_final, timeout_s)
        try:
            return await run_in_threadpool(self._store.get, job.id)
        except JobNotFoundError:
            return job

    async def wait_schedule(
        self, job_id: str, known_number: int, seconds: float, caller: Principal
    ) -> StoredSchedule | None:
        """Return the best schedule once it differs from the known one.

        None if it does not differ at the timeout, or at the end of the job.

        ``known_number``: number of the schedule that the caller has; 0 = none. Raises
        `InfeasibleProblemError`, `ScheduleNotFoundError` as `schedule`.
        """
        job = await run_in_threadpool(self.find, job_id, caller)
        if not (job.state.is_final or job.num_schedules != known_number):
            await self._watch.until(
                job_id,
                lambda now: now.state.is_final or now.num_schedules != known_number,
                min(seconds, self._settings.max_wait_s),
            )
            job = await run_in_threadpool(self.find, job_id, caller)
        if job.num_schedules == known_number and job.has_schedule:
            return None
        return await run_in_threadpool(self.schedule, job_id, caller)

    async def events(
        self, job_id: str, after: int, caller: Principal
    ) -> AsyncGenerator[HistoryEntry, None] | None:
        """Return the entries of a job's history above a number, each as it is stored.

        They end with the last entry of a finished job, or when the server stops. None if there
        are none and can be none.
        """
        now = await self._watch.standing(job_id)
        if now is None or not caller.sees(now.owner):
            raise JobNotFoundError(job_id)
        if now.state.is_final and now.last_entry <= after:
            return None
        return self._followers.entries(job_id, after)


def check_priority(priority: int, caller: Principal) -> None:
    """Refuse a priority above `MAX_SHARED_PRIORITY`, unless the caller is an admin.

    Raises `RequestError`.
    """
    if priority > MAX_SHARED_PRIORITY and caller.role is not Role.ADMIN:
        raise RequestError(
            f"priority = {priority}: the key {caller.name!r} has role {caller.role.value}, and may "
            f"give {MAX_SHARED_PRIORITY} at most; lower it, or let an admin submit the job"
        ).at("/priority")


_TUNE = ("configuration", "/v1/tunes")
_NOUNS = {
    DocumentKind.COMPARISON: ("comparison", "/v1/compare"),
    DocumentKind.TUNED: _TUNE,
    DocumentKind.CHECKPOINT: _TUNE,
    DocumentKind.QUESTION: _TUNE,
    DocumentKind.DRIFT: ("drift", "/v1/follow"),
    DocumentKind.MEASURED: ("drift", "/v1/follow"),
}
"""The noun for each kind of document in errors, and the path of the request that creates it."""


def _missing_document(job: JobRecord, kind: DocumentKind) -> InputError:
    """Return the error that explains why a job has no such document, or none yet."""
    if kind is DocumentKind.MODEL:
        return NoModelError(job.id)
    noun, path = _NOUNS.get(kind, ("schedule", "/v1/jobs"))
    if kind not in KINDS[job.kind].documents:
        if DocumentKind.COMPARISON in KINDS[job.kind].answers:
            return ScheduleNotFoundError(
                f"job {job.id} compares methods and has no {noun} of its own; "
                f"GET /v1/jobs/{job.id}/comparison has its rows"
            )
        return ScheduleNotFoundError(
            f"job {job.id} is a {job.kind.value} and has no {noun}; POST {path} makes one"
        )
    if job.state.is_final:
        why = f": {job.error.message}" if job.error is not None else ""
        return ScheduleNotFoundError(
            f"job {job.id} has {job.state.value} without a {noun}{why}; submit it again"
        )
    return ScheduleNotFoundError(
        f"job {job.id} is {job.state.value} and has no {noun} yet; ask again later"
    )
