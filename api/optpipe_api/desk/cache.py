"""Never solve twice: what the service has found before that answers a new job, or starts it.

A *hit* is a finished job of the same owner, problem (or model) and method whose answer the new job
would find again: proven, or within the gap that is asked for, or found with at least the same
budget from the same seed. A *near* one solved a problem of the same shape whose numbers differ
little; its programs become the new job's first schedule, where they are legal. A job that is being
solved at the moment is shared (`optpipe_api.store.jobs_sharing`). ``cache: refresh`` takes none of
these: then the answer depends on nothing but the request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from optpipe.errors import OptPipeError
from optpipe_api.desk.near import pack
from optpipe_api.jobs import Cache, JobEvent, JobKind, JobState, Outcome, Start

if TYPE_CHECKING:
    from optpipe_api.desk.readers import Readers
    from optpipe_api.jobs import Job, JobOptions, NewJob
    from optpipe_api.settings import Settings
    from optpipe_api.store import JobStore

__all__ = ["MOST_CELLS", "MOST_TRIED", "Recall", "answers"]

MOST_CELLS = 20_000
"""Cells of all near problems whose programs are tried, together: a second's work, 50 us each."""
MOST_TRIED = 5
"""Near problems whose programs are tried, the newest first."""
_LOOKED_AT = 20
_AUTO = "auto"
_BEST_START = "optpipe_api.desk.near:best_start"


class Recall:
    """Finds what is known about a new job, where the service wants that; for threads."""

    def __init__(self, settings: Settings, store: JobStore, readers: Readers) -> None:
        self._is_wanted = settings.cache
        self._store = store
        self._readers = readers

    def complete(self, new: NewJob, num_cells: int, most_tried: int = MOST_TRIED) -> NewJob:
        """Return the job with its answer, or with a start, or as it is.

        One that comes with a start keeps it, and takes an answer only if it is no worse.
        """
        if new.options.cache == "refresh" or not self._is_wanted:
            return new
        new = replace(new, may_share=True)
        if new.start is not None:
            return self._hit(new) or new
        return self._hit(new) or self._near(new, num_cells, most_tried) or new

    def _hit(self, new: NewJob) -> NewJob | None:
        found = self._store.same(new.problem_hash, kind=new.kind, owner=new.owner, limit=_LOOKED_AT)
        for job in found:
            if answers(job, new.options) and new.is_content_with(job.objective_ms):
                return self._answered(new, job)
        return None

    def _answered(self, new: NewJob, job: Job) -> NewJob | None:
        is_infeasible = job.state is JobState.INFEASIBLE
        stored = self._store.schedule(job.id)
        if stored is None and not is_infeasible:
            return None
        outcome = Outcome(
            event=JobEvent.PROVE_INFEASIBLE if is_infeasible else JobEvent.SUCCEED,
            schedule=None if stored is None else stored.document,
            objective_ms=job.objective_ms,
            bound_ms=job.bound_ms,
            error=job.error,
            method=self._store.made_by(job.id),
        )
        chosen = self._store.problem(job.id) if new.kind is JobKind.PLAN else new.problem
        return replace(
            new, cache=Cache.HIT, source_id=job.id, start=None, finished=outcome, problem=chosen
        )

    def _near(self, new: NewJob, num_cells: int, most_tried: int) -> NewJob | None:
        """Return the job with the best start that near problems give it.

        Plans are cut anew, and other methods than the optimiser make one schedule and no other.
        """
        limit = min(most_tried, MOST_CELLS // max(1, num_cells))
        if new.problem is None or new.options.method != _AUTO or limit == 0:
            return None
        candidates = self._store.alike(new.shape_hash, owner=new.owner, limit=limit)
        known = [(job, *texts) for job in candidates if (texts := self._texts(job)) is not None]
        if not known:
            return None
        body = pack(new.problem, [(problem, schedule) for _, problem, schedule in known])
        try:
            reading = self._readers.ask(_BEST_START, body)
        except OptPipeError as error:
            # It would have been a help; the job does without.
            structlog.get_logger(__name__).warning(str(error), action="cache.near_failed")
            return None
        index = reading.header["index"]
        if index is None:
            return None
        start = Start(
            schedule=reading.documents[0],
            objective_ms=reading.header["objective_ms"],
            bound_ms=reading.header["bound_ms"],
            method=reading.header["method"],
        )
        return replace(new, cache=Cache.NEAR, source_id=known[index][0].id, start=start)

    def _texts(self, job: Job) -> tuple[str, str] | None:
        problem, stored = self._store.problem(job.id), self._store.schedule(job.id)
        return None if problem is None or stored is None else (problem, stored.document)


def answers(job: Job, options: JobOptions) -> bool:
    """Whether a finished job of the same problem and kind answers what is asked with options."""
    had = job.options
    if not had.asks_the_same(options):
        return False
    if job.is_proven or (job.gap is not None and job.gap <= options.gap):
        return True
    return had.covers(options)
