"""What the service does about what-ifs: make the questions, take them in, show the answers.

To change a problem and to simulate a start under it takes seconds where both are large, so it
happens where large request bodies are read (`optpipe_api.desk.readers`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from optpipe.errors import InputError
from optpipe.evaluate import evaluate
from optpipe.explain.questions import Question, Unasked, questions
from optpipe.formats.json_text import load_problem, load_schedule
from optpipe.frontier import family_of, memory_of
from optpipe.problem import MAX_CELLS
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from optpipe_api.batches import BatchPlan, ItemPlan, NewBatch
from optpipe_api.desk.forms import solution
from optpipe_api.desk.intake import intake_from, intake_of
from optpipe_api.desk.readers import Reading
from optpipe_api.errors import (
    BodyTooHeavyError,
    ConflictError,
    NoWhatIfsError,
    TooLargeToDrawError,
)
from optpipe_api.jobs import JobState, Start
from optpipe_api.what_ifs import Asked, Asking, WhatIfs

if TYPE_CHECKING:
    from optpipe.schedule import Schedule
    from optpipe_api.access import Principal
    from optpipe_api.batches import Batch
    from optpipe_api.desk.batches import BatchDesk
    from optpipe_api.desk.intake import Intake
    from optpipe_api.desk.jobs import JobDesk
    from optpipe_api.desk.readers import Readers
    from optpipe_api.jobs import Job, JobOptions, NewJob
    from optpipe_api.settings import Settings
    from optpipe_api.store import Stores

__all__ = ["Begun", "Subject", "TooLargeToAskError", "WhatIfDesk", "digest", "pack"]

_TAG = "what-if"
_AXIS = "what_if"
_AUTO = "auto"
_MAX_NAME = 200
_DIGEST = "optpipe_api.desk.what_ifs:digest"


class TooLargeToAskError(TooLargeToDrawError):
    """The schedule is too large for questions about it to be made here."""

    def __init__(self) -> None:
        InputError.__init__(
            self,
            "the schedule is too large: to change its problem and simulate it anew takes more time "
            "or memory than this service spends on that; fetch problem and schedule, and run "
            "optpipe explain --what-if",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A job that can be asked about, with its problem and its best schedule as JSON texts."""

    job: Job
    problem: str
    schedule: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An item before it is a job: its changed problem, and the schedule to start from."""

    intake: Intake
    start: Start
    plan: ItemPlan


class WhatIfDesk:
    """What-ifs as one caller sees them. Coroutines are for the event loop, all else for threads."""

    def __init__(
        self,
        settings: Settings,
        stores: Stores,
        jobs: JobDesk,
        batches: BatchDesk,
        readers: Readers,
    ) -> None:
        self._settings = settings
        self._store = stores.batches
        self._jobs = jobs
        self._batches = batches
        self._readers = readers

    # Asking

    async def ask(
        self,
        job_id: str,
        options: JobOptions,
        who: Principal,
        key: str | None = None,
        *,
        priority: int = 0,
    ) -> Batch:
        """Queue a job for each question about a job; a repeated key returns the first batch.

        They belong to whoever owns the job, so that he sees them.

        Raises
        ------
        ConflictError
            If the job goes on, has no schedule, or is not the optimiser's.
        InfeasibleProblemError
            If it is proven that there is none.
        TooLargeToAskError
            If the schedule is too large.
        QueueFullError, TooManyJobsError, KeyReusedError, TooManyBodiesError
            As `BatchStore.add` and `Readers.read`.
        """
        subject = await run_in_threadpool(self._subject, job_id, who)
        max_cells = min(MAX_CELLS, self._settings.max_cells)
        body = await run_in_threadpool(pack, subject.problem, subject.schedule, max_cells)
        try:
            reading = await self._readers.read(_DIGEST, body, is_heavy=True)
        except BodyTooHeavyError:
            raise TooLargeToAskError from None
        return await run_in_threadpool(
            self._take, subject, reading, who, key=key, options=options, priority=priority
        )

    def _subject(self, job_id: str, who: Principal) -> Subject:
        job = self._jobs.find(job_id, who)
        _refuse_early(job)
        if job.state is not JobState.INFEASIBLE:
            _refuse_pointless(job)
        # Of an infeasible one it says why, and what is too small.
        problem, stored = solution(self._jobs, job_id, who)
        return Subject(job=job, problem=problem, schedule=stored.document, number=stored.number)

    def _take(
        self,
        subject: Subject,
        reading: Reading,
        who: Principal,
        *,
        key: str | None,
        options: JobOptions,
        priority: int,
    ) -> Batch:
        job = subject.job
        asking = _asking(subject, reading.header)
        items = _begun(reading)
        plan = BatchPlan(
            axes={_AXIS: [question.name for question in asking.asked]},
            options=options,
            tags=(_TAG,),
            priority=priority,
            items=tuple(item.plan for item in items),
            asking=asking,
        )
        new = NewBatch(
            name=_named(job.name, "what if"),
            owner=job.owner,
            plan=plan,
            request_hash=_request_hash(job.id, options, priority),
            idempotency_key=key,
        )
        owner = replace(who, name=job.owner)
        return self._batches.take(new, [self._draft(item, plan, owner, job) for item in items])

    def _draft(self, item: Begun, plan: BatchPlan, owner: Principal, job: Job) -> NewJob:
        intake = replace(item.intake, name=_named(job.name, item.plan.values[_AXIS]))
        return self._jobs.draft(
            intake,
            plan.options,
            owner,
            tags=plan.tags,
            priority=plan.priority,
            start=item.start,
            source_id=job.id,
        )

    # Showing

    def look(self, job_id: str, who: Principal) -> WhatIfs:
        """Return what was asked last about a job, and its items as they are now.

        Raises
        ------
        NoWhatIfsError
            If nobody has asked.
        """
        job = self._jobs.find(job_id, who)
        newest = self._store.newest_about(job.id)
        if newest is None:
            raise NoWhatIfsError(job.id)
        batch, plan, items = self._batches.look(newest.id, who)
        if plan.asking is None:
            raise NoWhatIfsError(job.id)
        return WhatIfs(
            asking=plan.asking,
            batch=batch,
            options=plan.options,
            items=tuple(items),
            is_current=not plan.asking.is_beaten_by(job),
        )


def pack(problem: str, schedule: str, max_cells: int) -> bytes:
    """Return what `digest` reads."""
    return json.dumps([problem, schedule, max_cells]).encode()


def digest(body: bytes) -> Reading:
    """Return the questions about a schedule, and a problem and a start for each."""
    problem_text, schedule_text, max_cells = json.loads(body)
    problem, known = load_problem(problem_text), load_schedule(schedule_text)
    asked: list[dict[str, Any]] = []
    unasked: list[dict[str, Any]] = []
    documents: list[str] = []
    for question in questions(problem, known.programs, max_cells=max_cells):
        if isinstance(question, Unasked):
            unasked.append(asdict(question))
            continue
        header, texts = _digested(question, known)
        asked.append(header)
        documents += texts
    header = {
        "before_ms": known.objective_ms,
        "num_before": problem.num_microbatches,
        "asked": asked,
        "unasked": unasked,
    }
    return Reading(header, tuple(documents))


def _digested(question: Question, known: Schedule) -> tuple[dict[str, Any], tuple[str, str]]:
    problem = question.problem
    intake = intake_of(problem)
    made_by = known.provenance
    start = evaluate(
        problem,
        question.start,
        Provenance(method=made_by.method, seed=made_by.seed),
        stopped_by="cancelled",
        # That it is legal is a theorem; to check it would take as long again.
        run=simulate(problem, question.start),
    )
    plan = ItemPlan(
        values={_AXIS: question.name}, memory_bytes=memory_of(problem), family=family_of(problem)
    )
    header = {
        "question": {
            "name": question.name,
            "text": question.text,
            "num_microbatches": problem.num_microbatches,
            "is_never_worse": question.is_never_worse,
        },
        "intake": intake.header(),
        "plan": asdict(plan),
        "start": {"objective_ms": start.objective_ms, "method": made_by.method},
    }
    return header, (intake.document, start.model_dump_json(by_alias=True))


def _asking(subject: Subject, header: dict[str, Any]) -> Asking:
    return Asking(
        job_id=subject.job.id,
        schedule_number=subject.number,
        before_ms=header["before_ms"],
        num_before=header["num_before"],
        asked=tuple(Asked(**item["question"]) for item in header["asked"]),
        unasked=tuple(Unasked(**item) for item in header["unasked"]),
    )


def _begun(reading: Reading) -> list[Begun]:
    texts = reading.documents
    return [
        Begun(
            intake=intake_from(item["intake"], problem),
            start=Start(schedule=schedule, **item["start"]),
            plan=ItemPlan(**item["plan"]),
        )
        for item, problem, schedule in zip(
            reading.header["asked"], texts[::2], texts[1::2], strict=True
        )
    ]


def _refuse_early(job: Job) -> None:
    if not job.state.is_final:
        raise ConflictError(
            f"job {job.id} is {job.state.value}: what more would buy is asked of a finished job's "
            "best schedule; wait for its end, or cancel it first"
        )


def _refuse_pointless(job: Job) -> None:
    if not job.has_schedule:
        raise ConflictError(
            f"job {job.id} has {job.state.value} without a schedule: what more would buy is "
            "measured against one; resume it, or submit its problem again"
        )
    if job.options.method != _AUTO:
        raise ConflictError(
            f"job {job.id} was solved by method {job.options.method}: beside the optimiser's "
            "schedules nobody could tell what is gained by more memory and what by optimising; "
            "submit its problem with method auto, and ask there"
        )


def _named(name: str, word: str) -> str:
    """Return a name for people, no longer than names may be."""
    return f"{name[: _MAX_NAME - len(word) - 2]}: {word}" if name else word


def _request_hash(job_id: str, options: JobOptions, priority: int) -> str:
    text = json.dumps([job_id, asdict(options), priority], sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
