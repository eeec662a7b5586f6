"""What the service does about batches: take in, show, compare, cancel, retry."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from optpipe.errors import ProblemError
from optpipe.formats.sweep_table import Row
from optpipe.frontier import Point, frontier, label_of
from optpipe_api.access import Role
from optpipe_api.batches import BatchPlan, Item, NewBatch
from optpipe_api.desk.cache import MOST_CELLS, MOST_TRIED
from optpipe_api.errors import BatchNotFoundError
from optpipe_api.jobs import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.frontier import Line
    from optpipe_api.access import Principal
    from optpipe_api.batches import Batch, ItemPlan
    from optpipe_api.changes import Changes
    from optpipe_api.desk.jobs import JobDesk
    from optpipe_api.desk.sweeps import Swept
    from optpipe_api.jobs import Job, JobOptions, NewJob
    from optpipe_api.settings import Settings
    from optpipe_api.store import Stores

__all__ = ["BatchDesk"]

_MOST_TRIED = 100
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class BatchDesk:
    """Batches as one caller sees them. Coroutines are for the event loop, all else for threads.

    A batch of somebody else does not exist: `BatchNotFoundError`, here and below.
    """

    def __init__(self, settings: Settings, stores: Stores, jobs: JobDesk, changes: Changes) -> None:
        self._settings = settings
        self._store = stores.batches
        self._jobs = jobs
        self._changes = changes

    # Taking in

    def submit(
        self, swept: Swept, options: JobOptions, who: Principal, key: str | None = None
    ) -> Batch:
        """Queue a job for each item, all or none; a repeated key returns the first batch.

        Items that were solved before are answered at once.

        Raises
        ------
        ProblemError
            If an item is larger than this service takes.
        QueueFullError, TooManyJobsError, KeyReusedError
            As `BatchStore.add`.
        """
        plan = BatchPlan(
            axes=swept.axes,
            options=options,
            tags=swept.tags,
            priority=swept.priority,
            items=tuple(plan for _, plan in swept.items),
        )
        new = NewBatch(
            name=swept.name,
            owner=who.name,
            plan=plan,
            request_hash=_request_hash(swept, options),
            idempotency_key=key,
        )
        return self.take(new, self._drafts(swept, options, who))

    def take(self, new: NewBatch, drafts: Sequence[NewJob]) -> Batch:
        """Queue the jobs of a batch, all or none; raises as `submit`."""
        batch, jobs = self._store.add(
            new,
            drafts,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._most_of(new.owner),
        )
        for job in jobs:
            self._jobs.announce(job)
        return batch

    def _drafts(self, swept: Swept, options: JobOptions, who: Principal) -> list[NewJob]:
        most_near = _most_near([intake.num_cells for intake, _ in swept.items])
        drafts = []
        for index, (intake, _) in enumerate(swept.items):
            try:
                draft = self._jobs.draft(
                    intake,
                    options,
                    who,
                    tags=swept.tags,
                    priority=swept.priority,
                    most_near=most_near,
                )
            except ProblemError as error:
                raise ProblemError(f"item {index} ({intake.name}): {error}") from error
            drafts.append(draft)
        return drafts

    def _most_of(self, owner: str) -> int | None:
        return self._settings.max_jobs_per_key if owner else None

    # Showing

    def find(self, batch_id: str, who: Principal) -> Batch:
        """Return a batch as it is now."""
        batch = self._store.get(batch_id)
        if not who.sees(batch.owner):
            raise BatchNotFoundError(batch_id)
        return batch

    def page(self, limit: int, before: int | None, who: Principal) -> list[Batch]:
        """Return batches, newest first; an admin sees everybody's."""
        owner = None if who.role is Role.ADMIN else who.name
        return self._store.page(limit, before, owner=owner)

    def look(self, batch_id: str, who: Principal) -> tuple[Batch, BatchPlan, list[Item]]:
        """Return a batch, what it is about, and its items, in order."""
        batch = self.find(batch_id, who)
        plan = self._store.plan(batch_id)
        items = [
            Item(index=job.batch_index, plan=plan.items[job.batch_index], job=job)
            for job in self._store.jobs(batch_id)
            if job.batch_index is not None
        ]
        return batch, plan, items

    def table(self, batch_id: str, who: Principal) -> list[Row]:
        """Return a row per item, in order; what is not known yet is None."""
        _, _, items = self.look(batch_id, who)
        return [_row(item.plan, item.job) for item in items]

    def frontier(self, batch_id: str, who: Principal) -> tuple[str, list[Line]]:
        """Return the batch's name, and what memory buys as far as it is known."""
        batch, _, items = self.look(batch_id, who)
        return batch.name, frontier(_point(item) for item in items)

    # Changing

    def cancel(self, batch_id: str, who: Principal) -> Batch:
        """Cancel what has not ended: queued items now, running ones very soon."""
        self.find(batch_id, who)
        for job in self._store.cancel(batch_id):
            if job.state is JobState.RUNNING:
                self._jobs.cancel(job.id, who)
            else:
                self._jobs.tell(job)
        return self._store.get(batch_id)

    def retry(self, batch_id: str, who: Principal) -> Batch:
        """Queue failed items again, each with the time it was given, from what it has found.

        Raises
        ------
        QueueFullError, TooManyJobsError
            As `BatchStore.retry`.
        """
        owner = self.find(batch_id, who).owner
        retried = self._store.retry(
            batch_id,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._most_of(owner),
        )
        for job in retried:
            self._jobs.tell(job)
        return self._store.get(batch_id)

    # Following

    async def wait(self, batch: Batch, seconds: float) -> Batch:
        """Return the batch once it is finished, or as it is when the time is up."""
        deadline = time.monotonic() + min(seconds, self._settings.max_wait_s)
        pause_s = _FIRST_PAUSE_S
        while not batch.is_finished and not self._changes.is_closed:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            batch = await run_in_threadpool(self._store.get, batch.id)
        return batch


def _most_near(cells: list[int]) -> int:
    """Return how many near problems each item may try, so that all of them together take seconds.

    A request waits for it; items beyond that start without a schedule, and are solved all the same.
    """
    return min(MOST_TRIED, MOST_CELLS // max(1, sum(cells)), _MOST_TRIED // len(cells))


def _request_hash(swept: Swept, options: JobOptions) -> str:
    data = [
        [intake.problem_hash for intake, _ in swept.items],
        swept.name,
        swept.axes,
        swept.tags,
        swept.priority,
        asdict(options),
    ]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _row(plan: ItemPlan, job: Job) -> Row:
    return Row(
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


def _point(item: Item) -> Point:
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
