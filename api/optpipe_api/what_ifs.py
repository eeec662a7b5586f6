"""What-ifs of a job: questions about changed problems, each an item of one batch.

The batch's items are solved like any others, each from the best schedule that the job had when it
was asked; what they reach is read from their jobs. Kept with the batch is what the jobs do not
know: the questions, and the length that the answers are measured against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from optpipe.explain.answers import Answer
from optpipe.explain.questions import Unasked

if TYPE_CHECKING:
    from optpipe_api.batches import Batch, Item
    from optpipe_api.jobs import Job, JobOptions

__all__ = ["Asked", "Asking", "WhatIfs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question; ``num_microbatches`` of its changed problem, the rest as in `Question`."""

    name: str
    text: str
    num_microbatches: int
    is_never_worse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What was asked about a job, and of which of its schedules.

    Parameters
    ----------
    job_id, schedule_number
        The job, and the number of its best schedule when it was asked.
    before_ms, num_before
        The objective of that schedule, and its number of micro-batches.
    asked
        A question for each item of the batch, in order.
    unasked
        Those that have no meaning for this problem.
    """

    job_id: str
    schedule_number: int
    before_ms: float
    num_before: int
    asked: tuple[Asked, ...]
    unasked: tuple[Unasked, ...]

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Self:
        """Return what `dataclasses.asdict` made JSON of."""
        return cls(
            **{
                **said,
                "asked": tuple(Asked(**one) for one in said["asked"]),
                "unasked": tuple(Unasked(**one) for one in said["unasked"]),
            }
        )

    def is_beaten_by(self, job: Job) -> bool:
        """Whether the job that was asked about has a better schedule now."""
        return job.objective_ms is not None and job.objective_ms < self.before_ms

    def answer(self, index: int, job: Job) -> Answer | None:
        """Return what the job of an item says so far; None where it has no schedule (yet)."""
        if job.objective_ms is None:
            return None
        question = self.asked[index]
        return Answer(
            name=question.name,
            text=question.text,
            before_ms=self.before_ms,
            num_before=self.num_before,
            after_ms=job.objective_ms,
            num_after=question.num_microbatches,
            bound_ms=job.bound_ms,
            is_never_worse=question.is_never_worse,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfs:
    """What was asked last about a job, and its items as they are now.

    ``options`` are those of every item; ``is_current``: no better schedule of the job was found
    since.
    """

    asking: Asking
    batch: Batch
    options: JobOptions
    items: tuple[Item, ...]
    is_current: bool
