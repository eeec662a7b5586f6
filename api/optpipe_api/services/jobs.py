"""What the service does about jobs: take in, show, follow, cancel, resume; and never solve twice.

What was found before answers a new job, or starts it. A *hit* is a finished job of the same owner,
problem (or model) and method whose answer the new job would find again: proven, or within the gap
that is asked for, or found with at least the same budget from the same seed. A *near* one solved a
problem of the same shape whose numbers differ little; its programs become the new job's first
schedule, where they are legal. ``cache: refresh`` takes neither: then the answer depends on nothing
but the request.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog
from starlette.concurrency import run_in_threadpool

from optpipe.answers import Cache, JobState
from optpipe.check import find_violations
from optpipe.errors import InfeasibleProblemError, InputError, OptPipeError, RequestError
from optpipe.evaluate import evaluate
from optpipe.formats.json import load_problem, load_schedule
from optpipe.requests import JobKind
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from optpipe_api.access import Role
from optpipe_api.engine.engine import NO_OBSERVER, EngineObserver
from optpipe_api.errors import JobNotFoundError, NoModelError, ScheduleNotFoundError
from optpipe_api.jobs import (
    KINDS,
    MAX_SHARED_PRIORITY,
    AttemptOutcome,
    DocumentKind,
    JobEvent,
    JobStart,
)
from optpipe_api.services.events import Followers, Watch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping

    from optpipe.answers import JobOptions
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from optpipe_api.access import Principal
    from optpipe_api.engine.engine import SlotEngine
    from optpipe_api.jobs import (
        HistoryEntry,
        JobRecord,
        NewJob,
        StoredSchedule,
        TracePoint,
        Waiting,
    )
    from optpipe_api.services.events import Changes
    from optpipe_api.services.parse_pool import ParsePool
    from optpipe_api.settings import Settings
    from optpipe_api.store import JobStore

__all__ = [
    "MOST_CELLS",
    "MOST_TRIED",
    "TOLERANCE",
    "JobCache",
    "JobService",
    "answers",
    "best_start",
    "check_priority",
    "is_near",
]


MOST_CELLS = 20_000
"""Cells of all near problems whose programs are tried, together: a second's work, 50 us each."""
MOST_TRIED = 5
"""Near problems whose programs are tried, the newest first."""
_LOOKED_AT = 20
_AUTO = "auto"


class JobCache:
    """Finds what is known about a new job, where the service wants that; for threads."""

    def __init__(self, settings: Settings, store: JobStore, pool: ParsePool) -> None:
        self._is_wanted = settings.cache
        self._store = store
        self._pool = pool

    def complete(self, new: NewJob, most_tried: int = MOST_TRIED) -> NewJob:
        """Return the job with its answer, or with a start, or as it is.

        One that comes with a start keeps it, and takes an answer only if it is no worse.
        """
        is_found_anew = new.options.cache == "refresh" or new.kind is JobKind.COMPARE
        if is_found_anew or not self._is_wanted:
            return new
        if new.start is not None:
            return self._hit(new) or new
        return self._hit(new) or self._near(new, most_tried) or new

    def _hit(self, new: NewJob) -> NewJob | None:
        """Return the job with the newest known answer; None where no answer is known."""
        found = self._store.same(new.problem_hash, kind=new.kind, owner=new.owner, limit=_LOOKED_AT)
        for job in found:
            if answers(job, new.options) and new.is_content_with(job.objective_ms):
                answered = self._answered(new, job)
                if answered is not None:
                    return answered
        return None

    def _answered(self, new: NewJob, job: JobRecord) -> NewJob | None:
        """Return the new job with the answer of a finished one.

        None where the finished job has no schedule to give, or was deleted or resumed since it was
        looked up: its documents then belong to no answer, or to another one.
        """
        is_infeasible = job.state is JobState.INFEASIBLE
        try:
            texts = self._store.documents(job.id, *KINDS[job.kind].answers)
            if DocumentKind.SCHEDULE not in texts and not is_infeasible:
                return None
            outcome = AttemptOutcome(
                event=JobEvent.PROVE_INFEASIBLE if is_infeasible else JobEvent.SUCCEED,
                documents=texts,
                objective_ms=job.objective_ms,
                bound_ms=job.bound_ms,
                error=job.error,
                method=self._store.made_by(job.id),
            )
            if self._store.get(job.id) != job:
                return None
        except JobNotFoundError:
            return None
        return replace(new, cache=Cache.HIT, source_id=job.id, start=None, finished=outcome)

    def _near(self, new: NewJob, most_tried: int) -> NewJob | None:
        """Return the job with the best start that near problems give it.

        Plans are cut anew, and other methods than the optimiser make one schedule and no other.
        """
        limit = min(most_tried, MOST_CELLS // max(1, new.num_cells))
        problem = new.documents.get(DocumentKind.PROBLEM)
        if problem is None or new.options.method != _AUTO or limit == 0:
            return None
        candidates = self._store.alike(new.shape_hash, owner=new.owner, limit=limit)
        known = [(job, *texts) for job in candidates if (texts := self._texts(job)) is not None]
        if not known:
            return None
        others = [text for _, *texts in known for text in texts]
        try:
            best = self._pool.run_from_thread(best_start, problem, *others)
        except OptPipeError as error:
            # It would have been a help; the job does without.
            structlog.get_logger(__name__).warning(str(error), action="cache.near_failed")
            return None
        if best is None:
            return None
        index, start = best
        return replace(new, cache=Cache.NEAR, source_id=known[index][0].id, start=start)

    def _texts(self, job: JobRecord) -> tuple[str, str] | None:
        """Return a job's problem and schedule; None where it has none, or was deleted since."""
        try:
            stored = self._store.schedule(job.id, with_problem=True)
        except JobNotFoundError:
            return None
        if stored is None or stored.problem is None:
            return None
        return stored.problem, stored.document


def answers(job: JobRecord, options: JobOptions) -> bool:
    """Whether a finished job of the same problem and kind answers what is asked with options.

    What is proven says nothing of schedules under noise.
    """
    had = job.options
    if not had.has_same_task(options):
        return False
    if options.robust is not None and job.state is not JobState.INFEASIBLE:
        return had.covers(options)
    if job.is_proven or (job.gap is not None and job.gap <= options.gap):
        return True
    return had.covers(options)


# --- Programs of near problems: which are legal here too, and which of them is the best.
# Two problems are near when they have the same shape and no time and no size of one differs from
# the other's by more than a quarter. What comes of it is never trusted: programs are checked and
# simulated under the new problem, as if somebody had sent them.

TOLERANCE = 0.25
"""Largest relative difference of a time or a size, to the larger of the two."""

_SIZES = ("_ms", "_bytes", "_gb_per_s")


def is_near(problem: Any, other: Any) -> bool:
    """Whether two problems of one shape, JSON-like, differ by no more than `TOLERANCE`.

    Names do not matter; which device a link joins does.
    """
    if isinstance(problem, dict) and isinstance(other, dict):
        return problem.keys() == other.keys() and all(
            _is_near_field(name, problem[name], other[name]) for name in problem
        )
    if isinstance(problem, list) and isinstance(other, list):
        return len(problem) == len(other) and all(map(is_near, problem, other))
    return True


def _is_near_field(name: str, value: Any, other: Any) -> bool:
    if name.endswith(_SIZES):
        if value is None or other is None:
            return value is other
        return bool(abs(value - other) <= TOLERANCE * max(abs(value), abs(other)))
    if name in ("from", "to", "half_duplex"):
        return bool(value == other)
    return is_near(value, other)


def best_start(text: str, *others: str) -> tuple[int, JobStart] | None:
    """Return the shortest legal schedule that near problems' programs make, and whose it is.

    A bound holds for the same problem only.

    ``text``: the problem, as JSON text. ``others``: those that may be near, each followed by its
    schedule; the index counts these pairs.
    """
    problem, fields = load_problem(text), json.loads(text)
    found = [
        (schedule.objective_ms, index, schedule)
        for index, (other, known) in enumerate(zip(others[::2], others[1::2], strict=True))
        if is_near(fields, json.loads(other))
        and (schedule := _transferred(problem, load_schedule(known))) is not None
    ]
    if not found:
        return None
    objective_ms, index, schedule = min(found, key=lambda item: item[:2])
    return index, JobStart(
        schedule=schedule.model_dump_json(by_alias=True),
        objective_ms=objective_ms,
        bound_ms=schedule.bound_ms,
        method=schedule.provenance.method,
    )


def _transferred(problem: Problem, known: Schedule) -> Schedule | None:
    """Return the schedule that known programs are here; None where they are illegal."""
    is_same = known.problem_hash == problem.problem_hash
    if find_violations(problem, known.programs):
        return None
    return evaluate(
        problem,
        known.programs,
        Provenance(method=known.provenance.method, seed=known.provenance.seed),
        bound_ms=known.bound_ms if is_same else None,
        stopped_by="cancelled",
        run=simulate(problem, known.programs),
    )


_PLACES_FRESH_S, _PLACES_NEW_S = 1.0, 0.1


class JobService:
    """Jobs as one caller sees them. Coroutines are for the event loop, all else for threads.

    A job of somebody else does not exist: `JobNotFoundError`, here and below.
    """

    def __init__(
        self,
        settings: Settings,
        store: JobStore,
        engine: SlotEngine,
        changes: Changes,
        *,
        cache: JobCache,
        observer: EngineObserver = NO_OBSERVER,
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._settings = settings
        self._store = store
        self._engine = engine
        self._changes = changes
        self._watch = Watch(store, changes)
        self._followers = Followers(store, changes, self._watch)
        self._counting = threading.Lock()
        self._places: dict[str, Waiting] = {}
        self._counted_at = float("-inf")

    # Taking in

    def submit(self, new: NewJob, who: Principal, key: str | None = None) -> JobRecord:
        """Queue a job, or answer it at once; a repeated key returns the first job.

        Raises `QueueFullError`, `TooManyJobsError`, `TooManyKeptError`, `KeyReusedError` as
        `JobStore.add`; `RequestError` if the priority is beyond what this role may give.
        """
        check_priority(new.priority, who)
        return self.add(self.draft(replace(new, owner=who.name, idempotency_key=key)))

    def draft(self, new: NewJob, most_near: int = MOST_TRIED) -> NewJob:
        """Return a job with what is known about it already: its answer, or a start.

        ``most_near``: how many near problems' programs are tried at most; 0 where time is short.
        """
        return self._cache.complete(new, most_near)

    def add(self, new: NewJob) -> JobRecord:
        """Keep a job, or return the one that its key made before; raises as `submit`."""
        job, is_new = self._store.add(
            new,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._settings.max_jobs_per_key if new.owner else None,
            max_kept=self._settings.max_kept_jobs_per_key if new.owner else None,
        )
        if is_new:
            self.announce(job)
        return job

    def announce(self, job: JobRecord) -> None:
        """Tell engine, followers and observer of a job that was added."""
        self._observer.accepted(job)
        self.tell(job)

    def tell(self, job: JobRecord) -> None:
        """Tell engine and followers of a job that waits in the queue, or has ended."""
        if not job.state.is_final:
            self._engine.wake()
        self._publish(job)

    # Showing

    def find(self, job_id: str, who: Principal) -> JobRecord:
        job = self._store.get(job_id)
        if not who.sees(job.owner):
            raise JobNotFoundError(job_id)
        return job

    def job(self, job_id: str, who: Principal) -> tuple[JobRecord, list[TracePoint]]:
        """Return a job and how it came along."""
        job = self.find(job_id, who)
        return job, self._store.trace(job_id)

    def page(
        self,
        limit: int,
        after: str | None,
        who: Principal,
        *,
        state: JobState | None = None,
        tag: str | None = None,
        batch_id: str | None = None,
    ) -> list[JobRecord]:
        """Return jobs, newest first, from the one ``after``; an admin sees everybody's.

        Raises `JobNotFoundError` if there is none of that id, or it is somebody else's.
        """
        owner = None if who.role is Role.ADMIN else who.name
        before = None if after is None else self.find(after, who).position
        return self._store.page(limit, before, owner=owner, state=state, tag=tag, batch_id=batch_id)

    def document(self, job_id: str, kind: DocumentKind, who: Principal) -> str:
        """Return a document of a job as JSON text; a plan's problem is the best one so far.

        Raises `NoModelError` if the job was given a problem instead of a model, and
        `ScheduleNotFoundError` if it has no such document (yet).
        """
        (text,) = self.documents(job_id, who, kind)
        return text

    def documents(self, job_id: str, who: Principal, *kinds: DocumentKind) -> tuple[str, ...]:
        """Return documents of a job in this order, all of one moment; raises as `document`."""
        job = self.find(job_id, who)
        texts = self._store.documents(job_id, *kinds)
        for kind in kinds:
            if kind not in texts:
                raise _missing(job, kind)
        return tuple(texts[kind] for kind in kinds)

    def schedule(
        self, job_id: str, who: Principal, *, with_problem: bool = False
    ) -> StoredSchedule:
        """Return a job's best schedule so far; ``with_problem``: and the problem that it solves.

        Raises `InfeasibleProblemError` if there is none, proven; `ScheduleNotFoundError` if there
        is none, or none yet.
        """
        stored = self._store.schedule(job_id, with_problem=with_problem)
        if stored is not None and who.sees(stored.owner):
            return stored
        job = self.find(job_id, who)
        if job.state is JobState.INFEASIBLE and job.error is not None:
            raise InfeasibleProblemError(job.error.message, job.error.needs)
        raise _missing(job)

    def waiting(self, shown: Iterable[JobRecord]) -> Mapping[str, Waiting]:
        """Return the places of the queued jobs among those that are shown.

        Counted at most once a second for all who ask, or where one is new to it.
        """
        wanted = {job.id for job in shown if job.state is JobState.QUEUED}
        with self._counting:
            age_s = time.monotonic() - self._counted_at
            is_known = wanted <= self._places.keys()
            if wanted and age_s > (_PLACES_FRESH_S if is_known else _PLACES_NEW_S):
                slots = self._settings.solver_processes
                self._places = self._store.queue(slots, self._settings.most_running)
                self._counted_at = time.monotonic()
            return {one: self._places[one] for one in wanted & self._places.keys()}

    # Changing

    def delete(self, job_id: str, who: Principal) -> None:
        """Forget an ended job with all that is kept of it; raises as `JobStore.delete`."""
        self.find(job_id, who)
        self._store.delete(job_id)

    def cancel(self, job_id: str, who: Principal) -> JobRecord:
        """Cancel a job: a queued one now, a running one very soon."""
        self.find(job_id, who)
        job = self._store.request_cancel(job_id)
        self._engine.cancel(job_id)
        self._publish(job)
        return job

    def resume(self, job_id: str, seconds: float, who: Principal) -> JobRecord:
        """Give a finished job more time, from where it stands.

        Raises `StateConflictError`, `InputError`, `QueueFullError`, `TooManyJobsError` as
        `JobStore.resume`.
        """
        self.find(job_id, who)
        settings = self._settings
        job = self._store.resume(
            job_id,
            seconds,
            max_time_limit_s=settings.max_time_limit_s,
            max_queued=settings.max_queued_jobs,
            max_of_owner=settings.max_jobs_per_key if who.name else None,
        )
        self.tell(job)
        return job

    # Following

    async def wait(self, job: JobRecord, seconds: float) -> JobRecord:
        """Return the job once it is finished, or as it is when the time is up.

        A job that is deleted meanwhile is returned as it was given.
        """
        if job.state.is_final or seconds <= 0:
            return job
        await self._watch.until(job.id, lambda now: now.state.is_final, self._at_most(seconds))
        try:
            return await run_in_threadpool(self._store.get, job.id)
        except JobNotFoundError:
            return job

    async def wait_schedule(
        self, job_id: str, known_number: int, seconds: float, who: Principal
    ) -> StoredSchedule | None:
        """Return the best schedule once it is another than the known one.

        None where it is still that one when the time is up or the job has ended.

        ``known_number``: number of the schedule that the caller has; 0 = none. Raises
        `InfeasibleProblemError`, `ScheduleNotFoundError` as `schedule`.
        """
        job = await run_in_threadpool(self.find, job_id, who)
        if not (job.state.is_final or job.num_schedules != known_number):
            await self._watch.until(
                job_id,
                lambda now: now.state.is_final or now.num_schedules != known_number,
                self._at_most(seconds),
            )
            job = await run_in_threadpool(self.find, job_id, who)
        if job.num_schedules == known_number and job.has_schedule:
            return None
        return await run_in_threadpool(self.schedule, job_id, who)

    async def events(
        self, job_id: str, after: int, who: Principal
    ) -> AsyncGenerator[HistoryEntry, None] | None:
        """Return the entries of a job's history above a number, as they come.

        They end with the last entry of a finished job, or when the server stops. None where there
        are none, now and later.
        """
        now = await self._watch.standing(job_id)
        if now is None or not who.sees(now.owner):
            raise JobNotFoundError(job_id)
        if now.state.is_final and now.last_entry <= after:
            return None
        return self._followers.entries(job_id, after)

    def _publish(self, job: JobRecord) -> None:
        for changed_id in job.changed_ids:
            self._changes.publish(changed_id)

    def _at_most(self, seconds: float) -> float:
        return min(seconds, self._settings.max_wait_s)


def check_priority(priority: int, who: Principal) -> None:
    """Refuse a priority that goes before other owners' jobs; that is for admins.

    Raises `RequestError` if it is beyond what this role may give.
    """
    if priority > MAX_SHARED_PRIORITY and who.role is not Role.ADMIN:
        raise RequestError(
            f"priority = {priority}: the key {who.name!r} has role {who.role.value}, and may "
            f"give {MAX_SHARED_PRIORITY} at most; lower it, or let an admin submit the job"
        ).at("/priority")


_NOUNS = {
    DocumentKind.COMPARISON: "comparison",
    DocumentKind.TUNED: "configuration",
    DocumentKind.CHECKPOINT: "configuration",
    DocumentKind.QUESTION: "configuration",
}


def _missing(job: JobRecord, kind: DocumentKind = DocumentKind.SCHEDULE) -> InputError:
    """Return the error that says why a job has no such document, or none yet."""
    if kind is DocumentKind.MODEL:
        return NoModelError(job.id)
    noun = _NOUNS.get(kind, "schedule")
    if not KINDS[job.kind].has(kind):
        if job.kind is JobKind.COMPARE:
            return ScheduleNotFoundError(
                f"job {job.id} compares methods and has no {noun} of its own; "
                f"GET /v1/jobs/{job.id}/comparison has its rows"
            )
        path = "/v1/compare" if kind is DocumentKind.COMPARISON else "/v1/tunes"
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
