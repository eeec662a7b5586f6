"""What travels over HTTP about what-ifs: how to search for answers, and the answers."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from optpipe_api.job_views import JobFault, moment
from optpipe_api.jobs import JobOptions, JobState
from optpipe_api.schemas import Priority, SearchOptions, StrictBody, parsed

if TYPE_CHECKING:
    from optpipe_api.batches import Item
    from optpipe_api.settings import Settings
    from optpipe_api.what_ifs import Asking, WhatIfs

__all__ = ["AnswerView", "UnaskedView", "WhatIfBody", "WhatIfsView"]

_DEFAULT_TIME_LIMIT_S = 20.0
_JOB_ID, _ITEM_ID = "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b", "5b4a3f2e1d0c9b8a7f6e5d4c3b2a1f0e"
_BEFORE_MS, _AFTER_MS = 1185.1, 1091.6
_ANSWER_EXAMPLE: dict[str, Any] = {
    "name": "faster-pcie",
    "question": "20 % more PCIe bandwidth, both directions",
    "job_id": _ITEM_ID,
    "state": "succeeded",
    "sentence": "20 % more PCIe bandwidth, both directions: 1,185.1 -> 1,091.6 ms, 7.9 % less; "
    "no schedule gains more than 8.5 % (proven)",
    "before_ms": _BEFORE_MS,
    "microbatches_before": 8,
    "after_ms": _AFTER_MS,
    "microbatches_after": 8,
    "bound_ms": 1084.4,
    "gain": 0.0789,
    "most_gain": 0.085,
    "buys_nothing": False,
    "is_never_worse": True,
    "error": None,
}


class WhatIfBody(StrictBody):
    """How to search for each answer."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"options": {"time_limit_s": 20}}]})

    options: SearchOptions = Field(
        default=SearchOptions(),
        description=f"Of every question; {_DEFAULT_TIME_LIMIT_S:g} s each where nothing is said.",
    )
    priority: Priority = 0

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the request a JSON-like object describes.

        Raises
        ------
        RequestError
            If it breaks a rule.
        """
        return parsed(cls, data, {})

    def within(self, settings: Settings) -> JobOptions:
        """Return the options of every item, defaults filled in.

        Raises
        ------
        InputError
            If they go beyond what this service allows.
        """
        asked = self.options
        return JobOptions(
            time_limit_s=asked.checked_time_limit_s(settings, _DEFAULT_TIME_LIMIT_S),
            threads=asked.threads,
            seed=asked.seed,
        )


class AnswerView(BaseModel):
    """One question and what its job has found; times in ms, gains as shares of the time before.

    ``sentence`` says it in words once the search has ended. Numbers are those of the best schedule
    so far, per micro-batch where their number differs; ``most_gain`` is what no schedule can
    exceed, proven. ``is_never_worse`` is whether a loss is impossible.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_ANSWER_EXAMPLE]})

    name: str
    question: str
    job_id: str = Field(description="Of the job that solves the changed problem.")
    state: JobState
    sentence: str | None
    before_ms: float
    microbatches_before: int
    after_ms: float | None
    microbatches_after: int
    bound_ms: float | None
    gain: float | None
    most_gain: float | None
    buys_nothing: bool | None = Field(description="Proven: nothing can be gained.")
    is_never_worse: bool
    error: JobFault | None

    @classmethod
    def of(cls, asking: Asking, item: Item) -> Self:
        """Return the view of an item's answer."""
        job, error = item.job, item.job.error
        question = asking.asked[item.index]
        answer = asking.answer(item.index, job)
        told: dict[str, Any] = {} if answer is None else answer.as_json()
        if not job.state.is_final:
            told.pop("sentence", None)
        return cls(
            name=question.name,
            question=question.text,
            job_id=job.id,
            state=job.state,
            before_ms=asking.before_ms,
            microbatches_before=asking.num_before,
            microbatches_after=question.num_microbatches,
            is_never_worse=question.is_never_worse,
            error=None if error is None else JobFault(**asdict(error)),
            **{name: told.get(name) for name in _FOUND},
        )


_FOUND = ("sentence", "after_ms", "bound_ms", "gain", "most_gain", "buys_nothing")


class UnaskedView(BaseModel):
    """A question that has no meaning for this problem, and why."""

    name: str
    question: str
    reason: str
    sentence: str


class WhatIfsView(BaseModel):
    """What was asked last about a job.

    ``schedule_number`` is the schedule that the answers are measured against; ``is_current`` says
    whether the job still has none better.
    """

    job_id: str
    batch_id: str = Field(
        description="The questions are its items: cancel, retry, list them there."
    )
    is_finished: bool
    created_at: datetime
    options: dict[str, Any]
    schedule_number: int
    is_current: bool
    before_ms: float
    microbatches_before: int
    answers: list[AnswerView]
    unasked: list[UnaskedView]

    @classmethod
    def of(cls, found: WhatIfs) -> Self:
        """Return the view of what was asked."""
        asking, options = found.asking, found.options
        return cls(
            job_id=asking.job_id,
            batch_id=found.batch.id,
            is_finished=found.batch.is_finished,
            created_at=moment(found.batch.created_at),
            options={name: getattr(options, name) for name in SearchOptions.model_fields},
            schedule_number=asking.schedule_number,
            is_current=found.is_current,
            before_ms=asking.before_ms,
            microbatches_before=asking.num_before,
            answers=[AnswerView.of(asking, item) for item in found.items],
            unasked=[
                UnaskedView(**one.as_json(), sentence=one.sentence()) for one in asking.unasked
            ],
        )
