"""The kinds of jobs: what each is asked, and what it answers.

A kind is a row of `KINDS`, a task of `optpipe_api.engine.tasks`, and a reader of
`optpipe_api.services.submission`. Nothing else distinguishes kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

from optpipe.requests import CompareRequest, JobKind, Request, SolveRequest, TuneRequest
from optpipe_api.jobs import DocumentKind

__all__ = ["KINDS", "Kind"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of job.

    Parameters
    ----------
    request
        What its HTTP body must be.
    question
        The document that its task reads.
    answers
        The documents that the job gets. An equal job is answered with them.
    default_time_limit_s
        Seconds if the request gives none; None: the default of the service.
    """

    request: type[Request]
    question: DocumentKind
    answers: tuple[DocumentKind, ...]
    default_time_limit_s: float | None = None

    def has(self, kind: DocumentKind) -> bool:
        """Return whether jobs of this kind have, or will have, documents of that kind."""
        return kind is self.question or kind in self.answers


KINDS = {
    JobKind.SOLVE: Kind(
        request=SolveRequest,
        question=DocumentKind.PROBLEM,
        answers=(DocumentKind.SCHEDULE,),
    ),
    JobKind.PLAN: Kind(
        request=SolveRequest,
        question=DocumentKind.MODEL,
        answers=(DocumentKind.SCHEDULE, DocumentKind.PROBLEM),
    ),
    JobKind.COMPARE: Kind(
        request=CompareRequest,
        question=DocumentKind.PROBLEM,
        answers=(DocumentKind.COMPARISON,),
        default_time_limit_s=20.0,
    ),
    JobKind.TUNE: Kind(
        request=TuneRequest,
        question=DocumentKind.QUESTION,
        answers=(
            *(DocumentKind.SCHEDULE, DocumentKind.PROBLEM),
            *(DocumentKind.TUNED, DocumentKind.CHECKPOINT),
        ),
        default_time_limit_s=120.0,
    ),
}
