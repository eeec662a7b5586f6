"""What the service does, without HTTP: routes call it, it calls the store and the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from optpipe.errors import InfeasibleProblemError, ProblemError
from optpipe_api.engine.comparison import Comparisons
from optpipe_api.engine.local import LocalEngine
from optpipe_api.errors import NoScheduleError
from optpipe_api.jobs import JobState, NewJob
from optpipe_api.methods import load_methods
from optpipe_api.store import open_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from optpipe.problem import Problem
    from optpipe_api.changes import Changes
    from optpipe_api.engine.comparison import CompareOptions
    from optpipe_api.jobs import Job, JobOptions, TracePoint
    from optpipe_api.settings import Settings
    from optpipe_api.store import JobStore

__all__ = ["Service"]

_LOOK_AGAIN_S = 1.0
_IS_GONE_EVERY_S = 0.1


class Service:
    """One server's store and engine. Coroutines are for the event loop, all else for threads.

    ``methods`` are those that jobs may ask for, with a line about each.
    """

    def __init__(
        self, settings: Settings, store: JobStore, changes: Changes, methods: Mapping[str, str]
    ) -> None:
        self.settings = settings
        self.methods = methods
        self._store = store
        self._changes = changes
        self._engine = LocalEngine(store, settings, changes.publish)
        self._comparisons = Comparisons(settings)

    @classmethod
    def open(cls, settings: Settings, changes: Changes) -> Service:
        """Return a service that solves; takes about a second, as it loads the solver's methods."""
        service = cls(settings, open_store(settings.database_url), changes, load_methods())
        service._engine.start()
        return service

    def close(self) -> None:
        """Give running jobs back and let go of everything."""
        self._comparisons.close()
        self._engine.close()
        self._store.close()

    def submit(self, problem: Problem, options: JobOptions, key: str | None) -> Job:
        """Queue a problem; a repeated idempotency key returns the first job.

        Raises
        ------
        ProblemError
            If the problem is larger than this service takes.
        """
        self._check_size(problem)
        new = NewJob(
            name=problem.name,
            problem_hash=problem.problem_hash,
            objective=problem.objective,
            problem=problem.model_dump_json(by_alias=True),
            options=options,
            idempotency_key=key,
        )
        job, is_new = self._store.add(new, max_queued=self.settings.max_queued_jobs)
        if is_new:
            self._engine.wake()
        return job

    async def compare(
        self,
        problem: Problem,
        options: CompareOptions,
        is_gone: Callable[[], Awaitable[bool]],
    ) -> str:
        """Compare every method and return the rows as a text of the form asked for.

        Parameters
        ----------
        is_gone
            Whether the client is; asked often. Its comparison is then stopped.

        Raises
        ------
        ProblemError
            If the problem is larger than this service takes.
        WorldError
            If too many are under way, or the solver fails, or the server is stopping.
        """
        self._check_size(problem)
        text = await run_in_threadpool(problem.model_dump_json, by_alias=True)
        gone = threading.Event()
        work = asyncio.wrap_future(self._comparisons.begin(text, options, gone))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_IS_GONE_EVERY_S)
                if self._changes.is_closed or await is_gone():
                    gone.set()
            return await work
        finally:
            gone.set()

    async def wait(self, job: Job, seconds: float) -> Job:
        """Return the job once it is finished, or as it is when the time is up."""
        deadline = time.monotonic() + min(seconds, self.settings.max_wait_s)
        while not job.state.is_final and not self._changes.is_closed:
            with self._changes.subscribed(job.id) as changed:
                job = await run_in_threadpool(self._store.get, job.id)
                left = deadline - time.monotonic()
                if job.state.is_final or left <= 0:
                    break
                try:
                    await asyncio.wait_for(changed.wait(), min(left, _LOOK_AGAIN_S))
                except TimeoutError:
                    continue
        return job

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: a queued one now, a running one very soon."""
        job = self._store.request_cancel(job_id)
        self._engine.cancel(job_id)
        self._changes.publish(job_id)
        return job

    def job(self, job_id: str) -> tuple[Job, list[TracePoint]]:
        """Return a job and how it came along."""
        job = self._store.get(job_id)
        return job, self._store.trace(job_id)

    def page(self, limit: int, before: int | None) -> list[Job]:
        """Return jobs, newest first."""
        return self._store.page(limit, before)

    def problem(self, job_id: str) -> str:
        """Return a job's problem as JSON text."""
        return self._store.problem(job_id)

    def schedule(self, job_id: str) -> str:
        """Return a job's best schedule so far as JSON text.

        Raises
        ------
        InfeasibleProblemError
            If there is none, proven.
        NoScheduleError
            If there is none, or none yet.
        """
        text = self._store.schedule(job_id)
        if text is not None:
            return text
        job = self._store.get(job_id)
        if job.state is JobState.INFEASIBLE and job.error is not None:
            raise InfeasibleProblemError(job.error.message, job.error.needs)
        raise NoScheduleError(_why_none(job))

    def _check_size(self, problem: Problem) -> None:
        cells = len(problem.stages) * problem.num_microbatches
        if cells > self.settings.max_cells:
            raise ProblemError(
                f"num_microbatches = {problem.num_microbatches}: stages x num_microbatches = "
                f"{cells} exceeds {self.settings.max_cells}, the limit of this service "
                "(OPTPIPE_MAX_CELLS); lower num_microbatches"
            )

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state."""
        return self._store.counts()

    @property
    def is_solving(self) -> bool:
        """Whether the engine takes jobs."""
        return self._engine.is_alive


def _why_none(job: Job) -> str:
    if job.state.is_final:
        why = f": {job.error.message}" if job.error is not None else ""
        return f"job {job.id} has {job.state.value} without a schedule{why}; submit it again"
    return f"job {job.id} is {job.state.value} and has no schedule yet; ask again later"
