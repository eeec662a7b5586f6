"""What the service does about batches: take in, show, compare, cancel, retry.

A what-if is a batch whose items are made of a job. To change its problem and to simulate a start
under it takes seconds where both are large, so it happens where large request bodies are read
(`optpipe_api.services.parse_pool`).
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


_MOST_TRIED = 100


class BatchService:
    """Batches as one caller sees them. Coroutines are for the event loop, all else for threads.

    A batch of somebody else does not exist: `BatchNotFoundError`, here and below.
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

    # Taking in

    async def ask(self, swept: ReadBatch, who: Principal) -> ReadBatch:
        """Return a what-if with its items: a changed problem and a start for each question.

        That the problem as it is gets as much more time shows what is gained by searching, and not
        by a change; where the job is proven optimal there is nothing to show.

        Raises `StateConflictError` if the job goes on, or has ended without a schedule;
        `InfeasibleProblemError` if it is proven that there is none; `TooLargeToDrawError` if the
        schedule is too large; `TooManyBodiesError` as `ParsePool.run`; `RequestError` if a batch
        may not have so many items.
        """
        job, problem, schedule = await run_in_threadpool(self._subject, swept.what_if, who)
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

    def _subject(self, job_id: str, who: Principal) -> tuple[JobRecord, str, str]:
        """Return an ended job, its problem and its best schedule, as JSON texts."""
        job = self._jobs.find(job_id, who)
        if not job.state.is_final:
            raise StateConflictError(
                f"job {job.id} is {job.state.value}: what more would buy is asked of an ended "
                "job's best schedule; wait for its end, or cancel it first"
            )
        # Of an infeasible one `solution` says why, and what is too small.
        if not job.has_schedule and job.state is not JobState.INFEASIBLE:
            raise StateConflictError(
                f"job {job.id} has {job.state.value} without a schedule: what more would buy is "
                "measured against one; resume it, or submit its problem again"
            )
        problem, stored = solution(self._jobs, job_id, who)
        return job, problem, stored.document

    def submit(self, swept: ReadBatch, who: Principal, key: str | None = None) -> BatchRecord:
        """Queue a job for each item, all or none; a repeated key returns the first batch.

        Items that were solved before are answered at once.

        Raises `QueueFullError`, `TooManyJobsError`, `TooManyKeptError`, `KeyReusedError` as
        `BatchStore.add`; `RequestError` if the priority is beyond what this role may give.
        """
        check_priority(swept.priority, who)
        plan = BatchPlan(
            axes=swept.axes,
            options=swept.options,
            tags=swept.tags,
            priority=swept.priority,
            items=tuple(item.plan for item in swept.items),
        )
        new = NewBatch(
            name=swept.name,
            owner=who.name,
            plan=plan,
            request_hash=_request_hash(swept),
            idempotency_key=key,
        )
        most_near = _most_near([item.job.num_cells for item in swept.items])
        drafts = [
            self._jobs.cache.complete(replace(item.job, owner=who.name), most_near)
            for item in swept.items
        ]
        batch, jobs = self._store.add(
            new,
            drafts,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._most_of(new.owner),
            max_kept=self._settings.max_kept_jobs_per_key if new.owner else None,
        )
        for job in jobs:
            self._jobs.publish_new(job)
        return batch

    def _most_of(self, owner: str) -> int | None:
        return self._settings.max_jobs_per_key if owner else None

    # Showing

    def find(self, batch_id: str, who: Principal) -> BatchRecord:
        batch = self._store.get(batch_id)
        if not who.sees(batch.owner):
            raise BatchNotFoundError(batch_id)
        return batch

    def page(self, limit: int, after: str | None, who: Principal) -> list[BatchRecord]:
        """Return batches, newest first, from the one ``after``; an admin sees everybody's."""
        owner = None if who.role is Role.ADMIN else who.name
        before = None if after is None else self.find(after, who).position
        return self._store.page(limit, before, owner=owner)

    def look(self, batch_id: str, who: Principal) -> tuple[BatchRecord, BatchPlan, list[BatchItem]]:
        """Return a batch, what it is about, and its items, in order."""
        batch = self.find(batch_id, who)
        plan = self._store.plan(batch_id)
        items = [
            BatchItem(index=job.batch_index, plan=plan.items[job.batch_index], job=job)
            for job in self._store.jobs(batch_id)
            if job.batch_index is not None
        ]
        return batch, plan, items

    def table(self, batch_id: str, who: Principal) -> list[SweepRow]:
        """Return a row per item, in order; what is not known yet is None."""
        _, _, items = self.look(batch_id, who)
        return [_row(item.plan, item.job) for item in items]

    def frontier(self, batch_id: str, who: Principal) -> tuple[str, list[FrontierLine]]:
        """Return the batch's name, and what memory buys as far as it is known."""
        batch, _, items = self.look(batch_id, who)
        return batch.name, frontier(_point(item) for item in items)

    # Changing

    def cancel(self, batch_id: str, who: Principal) -> BatchRecord:
        """Cancel what has not ended: queued items now, running ones very soon."""
        self.find(batch_id, who)
        for job in self._store.cancel(batch_id):
            if job.state is JobState.RUNNING:
                # One that has ended meanwhile may be deleted already.
                with suppress(JobNotFoundError):
                    self._jobs.cancel(job.id, who)
            else:
                self._jobs.publish(job)
        return self._store.get(batch_id)

    def retry(self, batch_id: str, who: Principal) -> BatchRecord:
        """Queue failed items again, each with the time it was given, from what it has found.

        Raises `QueueFullError`, `TooManyJobsError` as `BatchStore.retry`.
        """
        owner = self.find(batch_id, who).owner
        retried = self._store.retry(
            batch_id, max_queued=self._settings.max_queued_jobs, max_of_owner=self._most_of(owner)
        )
        for job in retried:
            self._jobs.publish(job)
        return self._store.get(batch_id)

    def delete(self, batch_id: str, who: Principal) -> None:
        """Forget an ended batch and its jobs; raises `StateConflictError` if one goes on."""
        self.find(batch_id, who)
        self._store.delete(batch_id)
        self._changes.publish(batch_id)

    # Following

    async def check(self, batch_id: str, who: Principal) -> None:
        """Raise `BatchNotFoundError` unless the batch is there and of this caller.

        One query for all who ask at the same time.
        """
        now = await self._watch.standing(batch_id)
        if now is None or not who.sees(now.owner):
            raise BatchNotFoundError(batch_id)

    async def wait(self, batch_id: str, seconds: float) -> None:
        """Return when the batch is finished or deleted, or the time is up."""
        most_s = min(seconds, self._settings.max_wait_s)
        if most_s > 0:
            await self._watch.until(batch_id, lambda now: now.is_finished, most_s)


def _most_near(cells: list[int]) -> int:
    """Return how many near problems each item may try, so that all of them together take seconds.

    A request waits for it; items beyond that start without a schedule, and are solved all the same.
    """
    return min(MAX_NEAR_JOBS, MAX_NEAR_CELLS // max(1, sum(cells)), _MOST_TRIED // len(cells))


def _request_hash(swept: ReadBatch) -> str:
    # The items of a what-if follow from the job, and change when a better schedule is found.
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
    """Return the questions about a schedule as items, whose jobs are named by their words.

    ``is_proven``: whether more searching finds nothing better.
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
        # That it is legal is a theorem; to check it would take as long again.
        run=simulate(problem, question.start),
    )
    # The job itself would answer it as it is, and nothing would be searched.
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
    """Return a name for people, no longer than names may be."""
    word = word[:_MAX_NAME]
    room = _MAX_NAME - len(word) - 2
    return f"{name[:room]}: {word}" if name and room > 0 else word
