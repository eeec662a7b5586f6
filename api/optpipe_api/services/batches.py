"""Batches as callers see them: submit, show, compare, cancel, retry.

A what-if is a batch whose items follow from a job. To change a large problem and to simulate a
start of it takes seconds, so processes do that (`optpipe_api.services.parse_pool`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from optpipe.answers import Cache, JobState
from optpipe.evaluate import evaluate
from optpipe.explain.what_if import AS_IT_IS, WhatIfQuestion, as_it_is, questions
from optpipe.formats.json import load_problem, load_schedule
from optpipe.formats.tables import SweepRow
from optpipe.problem import MAX_CELLS
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from optpipe.sweep import Point, family_of, frontier, label_of, memory_of, tighter_ones
from optpipe_api.access import Role
from optpipe_api.errors import (
    BatchNotFoundError,
    BodyTooHeavyError,
    JobNotFoundError,
    StateConflictError,
    TooLargeToDrawError,
)
from optpipe_api.jobs import BatchItem, BatchPlan, DocumentKind, ItemPlan, JobStart, NewBatch
from optpipe_api.services.events import Watch
from optpipe_api.services.jobs import MAX_NEAR_CELLS, MAX_NEAR_JOBS, check_priority
from optpipe_api.services.render import solution
from optpipe_api.services.submission import ReadItem, check_num_items, hash_of, solved_job

if TYPE_CHECKING:
    from optpipe.answers import JobOptions
    from optpipe.schedule import Schedule
    from optpipe.sweep import FrontierLine
    from optpipe_api.access import Principal
    from optpipe_api.jobs import BatchRecord, JobRecord
    from optpipe_api.services.events import Changes
    from optpipe_api.services.jobs import JobService
    from optpipe_api.services.parse_pool import ParsePool
    from optpipe_api.services.submission import ReadBatch
    from optpipe_api.settings import Settings
    from optpipe_api.store import Stores

__all__ = ["BatchService", "make_items"]


_AXIS = "question"
_MAX_NAME = 200


_MAX_NEAR_TOTAL = 100


class BatchService:
    """Batches as one caller sees them. Coroutines are for the event loop, others for threads.

    Methods raise `BatchNotFoundError` if the caller may not see the batch.
    """

    def __init__(
        self,
        settings: Settings,
        stores: Stores,
        jobs: JobService,
        changes: Changes,
        pool: ParsePool,
    ) -> None:
        self._settings = settings
        self._store = stores.batches
        self._jobs = jobs
        self._changes = changes
        self._watch = Watch(stores.batches, changes)
        self._pool = pool

    # Submitting

    async def ask(self, swept: ReadBatch, caller: Principal) -> ReadBatch:
        """Return a what-if with its items: a changed problem and a start for each question.

        One item is the unchanged problem with as much more time, unless the job is proven optimal.
        It separates the gain of more search from the gain of a change.

        Raises `StateConflictError` if the job has not ended, or has no schedule;
        `InfeasibleProblemError` if it is proven infeasible; `TooLargeToDrawError` if the schedule
        is too large. Raises `TooManyBodiesError` as `ParsePool.run`, and `RequestError` if there
        are too many items.
        """
        job, problem, schedule = await run_in_threadpool(self._subject, swept.what_if, caller)
        max_cells = min(MAX_CELLS, self._settings.max_cells)
        try:
            variants = await self._pool.run(
                make_items,
                problem,
                schedule,
                max_cells,
                swept.options,
                job.is_proven,
                is_heavy=True,
            )
        except BodyTooHeavyError:
            raise TooLargeToDrawError(
                "the schedule is too large: to change its problem and simulate it anew takes more "
                "time or memory than this service spends on that; fetch problem and schedule, and "
                "run optpipe explain --what-if"
            ) from None
        check_num_items(len(variants), self._settings.max_batch_items)
        items = tuple(
            replace(
                item,
                job=replace(
                    item.job,
                    name=_named(job.name, item.job.name),
                    tags=swept.tags,
                    priority=swept.priority,
                    source_id=job.id,
                ),
            )
            for item in variants
        )
        return replace(
            swept,
            name=swept.name or _named(job.name, "what if"),
            axes={_AXIS: [item.plan.values[_AXIS] for item in items]},
            items=items,
        )

    def _subject(self, job_id: str, caller: Principal) -> tuple[JobRecord, str, str]:
        """Return an ended job, its problem and its best schedule, as JSON texts."""
        job = self._jobs.find(job_id, caller)
        if not job.state.is_final:
            raise StateConflictError(
                f"job {job.id} is {job.state.value}: a what-if needs the best schedule of an ended "
                "job; wait for its end, or cancel it first"
            )
        # For an infeasible job, `solution` raises the reason.
        if not job.has_schedule and job.state is not JobState.INFEASIBLE:
            raise StateConflictError(
                f"job {job.id} has {job.state.value} without a schedule: a what-if compares with a "
                "schedule; resume it, or submit its problem again"
            )
        problem, stored = solution(self._jobs, job_id, caller)
        return job, problem, stored.document

    def submit(self, swept: ReadBatch, caller: Principal, key: str | None = None) -> BatchRecord:
        """Queue a job for each item, all or none; a repeated key returns the first batch.

        Items that were solved before get their known answers.

        Raises `QueueFullError`, `TooManyJobsError`, `TooManyKeptError`, `KeyReusedError` as
        `BatchStore.add`; `RequestError` if the priority is not allowed for the caller's role.
        """
        check_priority(swept.priority, caller)
        plan = BatchPlan(
            axes=swept.axes,
            options=swept.options,
            tags=swept.tags,
            priority=swept.priority,
            items=tuple(item.plan for item in swept.items),
        )
        new = NewBatch(
            name=swept.name,
            owner=caller.name,
            plan=plan,
            request_hash=_request_hash(swept),
            idempotency_key=key,
        )
        max_near = _max_near([item.job.num_cells for item in swept.items])
        drafts = [
            self._jobs.cache.complete(replace(item.job, owner=caller.name), max_near)
            for item in swept.items
        ]
        batch, jobs = self._store.add(
            new,
            drafts,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._max_jobs(new.owner),
            max_kept=self._settings.max_kept_jobs_per_key if new.owner else None,
        )
        for job in jobs:
            self._jobs.publish_new(job)
        return batch

    def _max_jobs(self, owner: str) -> int | None:
        return self._settings.max_jobs_per_key if owner else None

    # Showing

    def find(self, batch_id: str, caller: Principal) -> BatchRecord:
        batch = self._store.get(batch_id)
        if not caller.sees(batch.owner):
            raise BatchNotFoundError(batch_id)
        return batch

    def page(self, limit: int, after: str | None, caller: Principal) -> list[BatchRecord]:
        """Return batches older than the one ``after``, newest first; an admin sees all."""
        owner = None if caller.role is Role.ADMIN else caller.name
        before = None if after is None else self.find(after, caller).position
        return self._store.page(limit, before, owner=owner)

    def look(
        self, batch_id: str, caller: Principal
    ) -> tuple[BatchRecord, BatchPlan, list[BatchItem]]:
        """Return a batch, its plan, and its items in order."""
        batch = self.find(batch_id, caller)
        plan = self._store.plan(batch_id)
        items = [
            BatchItem(index=job.batch_index, plan=plan.items[job.batch_index], job=job)
            for job in self._store.jobs(batch_id)
            if job.batch_index is not None
        ]
        return batch, plan, items

    def table(self, batch_id: str, caller: Principal) -> list[SweepRow]:
        """Return a row per item, in order; unknown values are None."""
        _, _, items = self.look(batch_id, caller)
        return [_row(item.plan, item.job) for item in items]

    def frontier(self, batch_id: str, caller: Principal) -> tuple[str, list[FrontierLine]]:
        """Return the batch's name, and its frontier of memory and objective so far."""
        batch, _, items = self.look(batch_id, caller)
        return batch.name, frontier(_point(item) for item in items)

    # Changing

    def cancel(self, batch_id: str, caller: Principal) -> BatchRecord:
        """Cancel the queued items, and request the end of the running ones."""
        self.find(batch_id, caller)
        for job in self._store.cancel(batch_id):
            if job.state is JobState.RUNNING:
                # A job that has ended meanwhile may be deleted already.
                with suppress(JobNotFoundError):
                    self._jobs.cancel(job.id, caller)
            else:
                self._jobs.publish(job)
        return self._store.get(batch_id)

    def retry(self, batch_id: str, caller: Principal) -> BatchRecord:
        """Queue failed items again, each with its time limit and from its best schedule.

        Raises `QueueFullError`, `TooManyJobsError` as `BatchStore.retry`.
        """
        owner = self.find(batch_id, caller).owner
        retried = self._store.retry(
            batch_id, max_queued=self._settings.max_queued_jobs, max_of_owner=self._max_jobs(owner)
        )
        for job in retried:
            self._jobs.publish(job)
        return self._store.get(batch_id)

    def delete(self, batch_id: str, caller: Principal) -> None:
        """Delete an ended batch; raises `StateConflictError` if a job of it has not ended."""
        self.find(batch_id, caller)
        self._store.delete(batch_id)
        self._changes.publish(batch_id)

    # Following

    async def check(self, batch_id: str, caller: Principal) -> None:
        """Raise `BatchNotFoundError` unless the caller may see the batch.

        Calls at the same time share one query.
        """
        now = await self._watch.standing(batch_id)
        if now is None or not caller.sees(now.owner):
            raise BatchNotFoundError(batch_id)

    async def wait(self, batch_id: str, seconds: float) -> None:
        """Wait until the batch is finished or deleted, or until the timeout."""
        timeout_s = min(seconds, self._settings.max_wait_s)
        if timeout_s > 0:
            await self._watch.until(batch_id, lambda now: now.is_finished, timeout_s)


def _max_near(cells: list[int]) -> int:
    """Return the number of near jobs that each item may try, so that all items take only seconds.

    The request waits for them. Items without a start are solved all the same.
    """
    return min(MAX_NEAR_JOBS, MAX_NEAR_CELLS // max(1, sum(cells)), _MAX_NEAR_TOTAL // len(cells))


def _request_hash(swept: ReadBatch) -> str:
    # The items of a what-if follow from the job, and change with its best schedule.
    items = [item.job.problem_hash for item in swept.items]
    data = [
        swept.what_if or items,
        swept.name,
        {} if swept.what_if else swept.axes,
        swept.tags,
        swept.priority,
        asdict(swept.options),
    ]
    return hash_of(data)


def _row(plan: ItemPlan, job: JobRecord) -> SweepRow:
    return SweepRow(
        index=job.batch_index or 0,
        values=plan.values,
        name=job.name,
        state=job.state.value,
        objective_ms=job.objective_ms,
        bound_ms=job.bound_ms,
        gap=job.gap,
        memory_bytes=max(plan.memory_bytes),
        seconds=job.spent_s if job.state.is_final else None,
        problem_hash=job.problem_hash,
        job_id=job.id,
        message=None if job.error is None else job.error.message,
    )


def _point(item: BatchItem) -> Point:
    job = item.job
    return Point(
        index=item.index,
        family=item.plan.family,
        label=label_of(item.plan.values, job.name),
        memory_bytes=item.plan.memory_bytes,
        objective_ms=job.objective_ms,
        bound_ms=job.bound_ms,
        is_infeasible=job.state is JobState.INFEASIBLE,
    )


# --- The items of a what-if: a changed problem and a start for each question about a job.


def make_items(
    problem_text: str, schedule_text: str, max_cells: int, options: JobOptions, is_proven: bool
) -> tuple[ReadItem, ...]:
    """Return the questions about a schedule as items, whose jobs have the questions as names.

    ``is_proven``: whether the schedule is proven optimal.
    """
    problem, known = load_problem(problem_text), load_schedule(schedule_text)
    variants = [] if is_proven else [as_it_is(problem, known.programs)]
    variants += [
        question
        for question in questions(problem, known.programs, max_cells=max_cells)
        if isinstance(question, WhatIfQuestion)
    ]
    tighter = tighter_ones([question.problem for question in variants])
    return tuple(
        _item(question, others, known, options)
        for question, others in zip(variants, tighter, strict=True)
    )


def _item(
    question: WhatIfQuestion, tighter: tuple[int, ...], known: Schedule, options: JobOptions
) -> ReadItem:
    problem = question.problem
    made_by = known.provenance
    start = evaluate(
        problem,
        question.start,
        Provenance(method=made_by.method, seed=made_by.seed),
        stopped_by="cancelled",
        # It is legal by construction; a check would double the time.
        run=simulate(problem, question.start),
    )
    # Without this, the job itself would be the answer from the cache.
    is_searched_anew = question.name == AS_IT_IS
    job = solved_job(
        problem,
        replace(options, cache="refresh") if is_searched_anew else options,
        cache=Cache.NEAR,
        start=JobStart(
            documents={DocumentKind.SCHEDULE: start.model_dump_json(by_alias=True)},
            objective_ms=start.objective_ms,
            method=made_by.method,
        ),
        is_start_required=True,
    )
    plan = ItemPlan(
        values={_AXIS: question.name, "num_microbatches": problem.num_microbatches},
        memory_bytes=memory_of(problem),
        family=family_of(problem),
        tighter=tighter,
    )
    return ReadItem(job=replace(job, name=question.text), plan=plan)


def _named(name: str, word: str) -> str:
    """Return "name: word", cut to the maximum length of a name."""
    word = word[:_MAX_NAME]
    length = _MAX_NAME - len(word) - 2
    return f"{name[:length]}: {word}" if name and length > 0 else word
