"""Never solve twice: what the service has found before that answers a new job, or starts it.

A *hit* is a finished job of the same owner, problem (or model) and method whose answer the new job
would find again: proven, or within the gap that is asked for, or found with at least the same
budget from the same seed. A *near* one solved a problem of the same shape whose numbers differ
little; its programs become the new job's first schedule, where they are legal. ``cache: refresh``
takes neither: then the answer depends on nothing but the request.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from optpipe.check import find_violations
from optpipe.errors import OptPipeError
from optpipe.evaluate import evaluate
from optpipe.formats.json import load_problem, load_schedule
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from optpipe.wire import Cache, JobKind, JobState
from optpipe_api.jobs import AttemptOutcome, JobEvent, JobStart

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from optpipe.wire import JobOptions
    from optpipe_api.jobs import JobRecord, NewJob
    from optpipe_api.services.parse_pool import ParsePool
    from optpipe_api.settings import Settings
    from optpipe_api.store import JobStore

__all__ = ["MOST_CELLS", "MOST_TRIED", "TOLERANCE", "JobCache", "answers", "best_start", "is_near"]


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
        found = self._store.same(new.problem_hash, kind=new.kind, owner=new.owner, limit=_LOOKED_AT)
        for job in found:
            if answers(job, new.options) and new.is_content_with(job.objective_ms):
                return self._answered(new, job)
        return None

    def _answered(self, new: NewJob, job: JobRecord) -> NewJob | None:
        is_infeasible = job.state is JobState.INFEASIBLE
        stored = self._store.schedule(job.id)
        if stored is None and not is_infeasible:
            return None
        outcome = AttemptOutcome(
            event=JobEvent.PROVE_INFEASIBLE if is_infeasible else JobEvent.SUCCEED,
            schedule=None if stored is None else stored.document,
            objective_ms=job.objective_ms,
            bound_ms=job.bound_ms,
            error=job.error,
            method=self._store.made_by(job.id),
            tuned=self._store.tuned(job.id),
            checkpoint=self._store.checkpoint(job.id),
        )
        chosen = self._store.problem(job.id) if new.problem is None else new.problem
        return replace(
            new, cache=Cache.HIT, source_id=job.id, start=None, finished=outcome, problem=chosen
        )

    def _near(self, new: NewJob, most_tried: int) -> NewJob | None:
        """Return the job with the best start that near problems give it.

        Plans are cut anew, and other methods than the optimiser make one schedule and no other.
        """
        limit = min(most_tried, MOST_CELLS // max(1, new.num_cells))
        if new.problem is None or new.options.method != _AUTO or limit == 0:
            return None
        candidates = self._store.alike(new.shape_hash, owner=new.owner, limit=limit)
        known = [(job, *texts) for job in candidates if (texts := self._texts(job)) is not None]
        if not known:
            return None
        others = [text for _, problem, schedule in known for text in (problem, schedule)]
        try:
            best = self._pool.run_from_thread(best_start, new.problem, *others)
        except OptPipeError as error:
            # It would have been a help; the job does without.
            structlog.get_logger(__name__).warning(str(error), action="cache.near_failed")
            return None
        if best is None:
            return None
        index, start = best
        return replace(new, cache=Cache.NEAR, source_id=known[index][0].id, start=start)

    def _texts(self, job: JobRecord) -> tuple[str, str] | None:
        problem, stored = self._store.problem(job.id), self._store.schedule(job.id)
        return None if problem is None or stored is None else (problem, stored.document)


def answers(job: JobRecord, options: JobOptions) -> bool:
    """Whether a finished job of the same problem and kind answers what is asked with options.

    What is proven says nothing of schedules under noise.
    """
    had = job.options
    if not had.asks_the_same(options):
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
