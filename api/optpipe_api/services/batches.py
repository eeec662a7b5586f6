"""Batches: submit, show, follow, cancel and retry them.

A what-if is a batch whose items are changes of a job's problem. Changes of a large problem and
simulations of its schedule take seconds, so `optpipe_api.services.parse_pool` runs them in a
process.
"""

from __future__ import annotations

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
from optpipe.sweep import (
    Point,
    best_sources,
    carried_message,
    family_of,
    frontier,
    label_of,
    memory_of,
    tighter_ones,
)
from optpipe_api.access import Role
from optpipe_api.errors import (
    BatchNotFoundError,
    BodyTooHeavyError,
    StateConflictError,
    TooLargeToDrawError,
)
from optpipe_api.jobs import BatchItem, BatchPlan, DocumentKind, ItemPlan, JobStart, NewBatch
from optpipe_api.services.events import Watch
from optpipe_api.services.jobs import check_priority
from optpipe_api.services.render import solution
from optpipe_api.services.submission import ReadItem, check_num_items, hash_of, solved_job

if TYPE_CHECKING:
    from optpipe.answers import JobOptions
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
_MAX_NAME_CHARS = 200


class BatchService:
    """The batches of one caller. Coroutines are for the event loop, other methods for threads.

    Methods with an id raise `BatchNotFoundError` if there is no such batch, or if the caller may
    not see it.
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

    # Submission

    async def add_what_ifs(self, batch: ReadBatch, caller: Principal) -> ReadBatch:
        """Return a what-if with its items: a changed problem and a start for each question.

        One item is the problem without a change. Its result is the gain of more search time alone.
        It is left out if the job is proven optimal.

        Raises `StateConflictError` if the job has not ended, or has ended without a schedule.
        Raises `InfeasibleProblemError` if it is proven infeasible, and `TooLargeToDrawError` if the
        changes take too much time or memory. Raises `TooManyBodiesError` as `ParsePool.run`, and
        `RequestError` if there are more items than a batch may have.
        """
        job, problem, schedule = await run_in_threadpool(
            self._load_ended_job, batch.what_if, caller
        )
        max_cells = min(MAX_CELLS, self._settings.max_cells)
        try:
            items = await self._pool.run(
                make_items,
                problem,
                schedule,
                max_cells,
                batch.options,
                job.is_proven,
                caller=caller,
                is_heavy=True,
                is_read=False,
            )
        except BodyTooHeavyError:
            raise TooLargeToDrawError(
                "the schedule is too large: to change its problem and simulate it anew takes more "
                "time or memory than this service spends on that; fetch problem and schedule, and "
                "run optpipe explain --what-if"
            ) from None
        check_num_items(len(items), self._settings.max_batch_items)
        named_items = tuple(
            replace(
                item,
                job=replace(
                    item.job,
                    name=_prefixed_name(job.name, item.job.name),
                    tags=batch.tags,
                    priority=batch.priority,
                    source_id=job.id,
                ),
            )
            for item in items
        )
        return replace(
            batch,
            name=batch.name or _prefixed_name(job.name, "what if"),
            axes={_AXIS: [item.plan.values[_AXIS] for item in items]},
            items=named_items,
        )

    def _load_ended_job(self, job_id: str, caller: Principal) -> tuple[JobRecord, str, str]:
        """Return an ended job, its problem and its best schedule; the last two as JSON texts."""
        job = self._jobs.find(job_id, caller)
        if not job.state.is_final:
            raise StateConflictError(
                f"job {job.id} is {job.state.value}: what more would buy is asked of an ended "
                "job's best schedule; wait for its end, or cancel it first"
            )
        # For an infeasible job, `solution` raises an error that names the memory it needs.
        if not job.has_schedule and job.state is not JobState.INFEASIBLE:
            raise StateConflictError(
                f"job {job.id} has {job.state.value} without a schedule: what more would buy is "
                "measured against one; resume it, or submit its problem again"
            )
        problem, stored = solution(self._jobs, job_id, caller)
        return job, problem, stored.document

    def submit(self, batch: ReadBatch, caller: Principal, key: str | None = None) -> BatchRecord:
        """Queue a job for every item, or for none; a repeated key returns the first batch.

        The jobs of items that an earlier job solved have ended when this returns.

        Raises `QueueFullError`, `TooManyJobsError`, `TooManyKeptError`, `KeyReusedError` as
        `BatchStore.add`; `RequestError` if the role of the caller does not allow the priority.
        """
        check_priority(batch.priority, caller)
        plan = BatchPlan(
            axes=batch.axes,
            options=batch.options,
            tags=batch.tags,
            priority=batch.priority,
            items=tuple(item.plan for item in batch.items),
        )
        # The items and axes of a what-if follow from the job, and change with its best schedule.
        subject = batch.what_if or [item.job.problem_hash for item in batch.items]
        axes = {} if batch.what_if else batch.axes
        request = [subject, batch.name, axes, batch.tags, batch.priority, asdict(batch.options)]
        new = NewBatch(
            name=batch.name,
            owner=caller.name,
            plan=plan,
            request_hash=hash_of(request),
            idempotency_key=key,
        )
        drafts = [self._jobs.complete(replace(item.job, owner=caller.name)) for item in batch.items]
        record, jobs = self._store.add(
            new,
            drafts,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._settings.max_jobs_per_key if new.owner else None,
            max_kept=self._settings.max_kept_jobs_per_key if new.owner else None,
        )
        for job in jobs:
            self._jobs.publish_new(job)
        return record

    # Results

    def find(self, batch_id: str, caller: Principal) -> BatchRecord:
        batch = self._store.get(batch_id)
        if not caller.sees(batch.owner):
            raise BatchNotFoundError(batch_id)
        return batch

    def page(self, limit: int, before: int | None, caller: Principal) -> list[BatchRecord]:
        """Return up to ``limit`` batches, newest first, at positions below ``before``.

        An admin sees the batches of all keys.
        """
        owner = None if caller.role is Role.ADMIN else caller.name
        return self._store.page(limit, before, owner=owner)

    def load(
        self, batch_id: str, caller: Principal
    ) -> tuple[BatchRecord, BatchPlan, list[BatchItem]]:
        """Return a batch, its plan, and its items in order.

        An item whose tighter items have a shorter schedule has that schedule as its source. Under
        noise no schedule is carried over: there the best schedule is not the shortest.
        """
        batch = self.find(batch_id, caller)
        plan = self._store.plan(batch_id)
        jobs = {
            job.batch_index: job
            for job in self._store.jobs(batch_id)
            if job.batch_index is not None
        }
        found = [
            jobs[index].objective_ms if index in jobs else None for index in range(len(plan.items))
        ]
        tighter = [item.tighter if plan.options.robust is None else () for item in plan.items]
        sources = best_sources(found, tighter)
        items = [
            BatchItem(index=index, plan=plan.items[index], job=job, source=jobs[sources[index]])
            for index, job in jobs.items()
        ]
        return batch, plan, items

    def table(self, batch_id: str, caller: Principal) -> list[SweepRow]:
        """Return a row per item, in order; unknown values are None."""
        _, _, items = self.load(batch_id, caller)
        rows = []
        for item in items:
            job, source = item.job, item.source
            message = None if job.error is None else job.error.message
            if source is not job:
                message = carried_message(f"job {source.id} ({source.name})", message)
            rows.append(
                SweepRow(
                    index=item.index,
                    values=item.plan.values,
                    name=job.name,
                    state=job.state.value,
                    objective_ms=source.objective_ms,
                    bound_ms=job.bound_ms,
                    gap=item.gap,
                    memory_bytes=max(item.plan.memory_bytes),
                    seconds=job.spent_s if job.state.is_final else None,
                    problem_hash=job.problem_hash,
                    job_id=job.id,
                    message=message,
                )
            )
        return rows

    def frontier(self, batch_id: str, caller: Principal) -> tuple[str, list[FrontierLine]]:
        """Return the name of a batch, and the frontier of its results so far."""
        batch, _, items = self.load(batch_id, caller)
        points = [
            Point(
                index=item.index,
                family=item.plan.family,
                label=label_of(item.plan.values, item.job.name),
                memory_bytes=item.plan.memory_bytes,
                objective_ms=item.job.objective_ms,
                bound_ms=item.job.bound_ms,
                is_infeasible=item.job.state is JobState.INFEASIBLE,
            )
            for item in items
        ]
        return batch.name, frontier(points)

    # Changes

    def cancel(self, batch_id: str, caller: Principal) -> BatchRecord:
        """Cancel queued items now, and stop running ones as soon as they notice."""
        self.find(batch_id, caller)
        for job in self._store.cancel(batch_id, caller.name):
            self._jobs.stop(job)
        return self._store.get(batch_id)

    def retry(self, batch_id: str, caller: Principal) -> BatchRecord:
        """Queue failed items again with their original time limit, from their best schedules.

        Raises `QueueFullError`, `TooManyJobsError` as `BatchStore.retry`.
        """
        owner = self.find(batch_id, caller).owner
        retried = self._store.retry(
            batch_id,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._settings.max_jobs_per_key if owner else None,
            actor=caller.name,
        )
        for job in retried:
            self._jobs.publish(job)
        return self._store.get(batch_id)

    def delete(self, batch_id: str, caller: Principal) -> None:
        """Delete an ended batch and its jobs; raises `StateConflictError` if one has not ended."""
        self.find(batch_id, caller)
        self._store.delete(batch_id, caller.name)
        self._changes.publish(batch_id)

    # Waiting

    async def check(self, batch_id: str, caller: Principal) -> None:
        """Raise `BatchNotFoundError` if there is no such batch for the caller.

        Simultaneous calls share a query.
        """
        standing = await self._watch.standing(batch_id)
        if standing is None or not caller.sees(standing.owner):
            raise BatchNotFoundError(batch_id)

    async def wait(self, batch_id: str, seconds: float) -> None:
        """Return when the batch has ended or is deleted, or after this time."""
        timeout_s = min(seconds, self._settings.max_wait_s)
        if timeout_s > 0:
            await self._watch.until(batch_id, lambda standing: standing.is_finished, timeout_s)


# --- The items of a what-if.


def make_items(
    problem_text: str, schedule_text: str, max_cells: int, options: JobOptions, is_proven: bool
) -> tuple[ReadItem, ...]:
    """Return an item for each question about a schedule; its job has the name of the question.

    Parameters
    ----------
    is_proven
        Whether the schedule is proven optimal. The unchanged problem is then left out.
    """
    problem, known = load_problem(problem_text), load_schedule(schedule_text)
    variants = [] if is_proven else [as_it_is(problem, known.programs)]
    variants += [
        question
        for question in questions(problem, known.programs, max_cells=max_cells)
        if isinstance(question, WhatIfQuestion)
    ]
    tighter = tighter_ones([question.problem for question in variants])
    items = []
    for question, others in zip(variants, tighter, strict=True):
        changed, origin = question.problem, known.provenance
        start = evaluate(
            changed,
            question.start,
            Provenance(method=origin.method, seed=origin.seed),
            stopped_by="cancelled",
            # The start is feasible by a theorem. A check would double the time.
            run=simulate(changed, question.start),
        )
        # The cache would answer the unchanged problem with the job itself, without a search.
        is_unchanged = question.name == AS_IT_IS
        job = solved_job(
            changed,
            replace(options, cache="refresh") if is_unchanged else options,
            cache=Cache.NEAR,
            start=JobStart(
                documents={DocumentKind.SCHEDULE: start.model_dump_json(by_alias=True)},
                objective_ms=start.objective_ms,
                method=origin.method,
            ),
            is_start_required=True,
        )
        plan = ItemPlan(
            values={_AXIS: question.name, "num_microbatches": changed.num_microbatches},
            memory_bytes=memory_of(changed),
            family=family_of(changed),
            tighter=others,
        )
        items.append(ReadItem(job=replace(job, name=question.text), plan=plan))
    return tuple(items)


def _prefixed_name(prefix: str, name: str) -> str:
    """Return ``prefix: name``, cut to the maximum length of names."""
    name = name[:_MAX_NAME_CHARS]
    num_left = _MAX_NAME_CHARS - len(name) - 2
    return f"{prefix[:num_left]}: {name}" if prefix and num_left > 0 else name
