"""What a submission says, as text: read once, stored and solved without being read again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from optpipe_api.bodies import decode_json
from optpipe_api.comparison_schemas import CompareOptionsBody, Comparison
from optpipe_api.desk.readers import Reading
from optpipe_api.jobs import JobKind
from optpipe_api.schemas import Submission, SubmissionOptions

if TYPE_CHECKING:
    from optpipe.model import Model
    from optpipe.problem import Problem
    from optpipe_api.desk.readers import Readers

__all__ = [
    "Intake",
    "Submitted",
    "digest_comparison",
    "digest_submission",
    "intake_from",
    "intake_of",
    "intake_of_model",
    "read_comparison",
    "read_submission",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A problem or a model, checked; ``document`` is its canonical JSON, defaults filled in.

    Parameters
    ----------
    problem_hash
        Of the problem, or of the model.
    shape_hash
        Equal for problems whose programs may suit each other; empty for a model.
    num_cells
        Stages x micro-batches; layers x micro-batches of a model.
    """

    kind: JobKind
    document: str
    name: str
    problem_hash: str
    shape_hash: str
    objective: str
    num_microbatches: int
    num_cells: int

    def header(self) -> dict[str, Any]:
        """Return all but the document, as JSON can say it; `intake_from` puts both together."""
        return {name: value for name, value in asdict(self).items() if name != "document"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A submission, read: what is to be done, and how."""

    intake: Intake
    options: SubmissionOptions
    tags: tuple[str, ...]
    priority: int


async def read_submission(readers: Readers, body: bytes) -> Submitted:
    """Return what the body of a submission says.

    Raises
    ------
    OptPipeError
        As `Readers.read` and `Submission.parse`.
    """
    reading = await readers.read("optpipe_api.desk.intake:digest_submission", body)
    header = reading.header
    return Submitted(
        intake=intake_from(header["intake"], reading.documents[0]),
        options=SubmissionOptions.model_validate(header["options"]),
        tags=tuple(header["tags"]),
        priority=header["priority"],
    )


def digest_submission(body: bytes) -> Reading:
    """Return a submission as `Readers` pass it on.

    Raises
    ------
    OptPipeError
        As `decode_json` and `Submission.parse`.
    """
    submission = Submission.parse(decode_json(body))
    intake = _intake(submission)
    header = {
        "intake": intake.header(),
        # What was left out stays left out: a plan may not say what only a solve has.
        "options": submission.options.model_dump(mode="json", exclude_unset=True),
        "tags": submission.tags,
        "priority": submission.priority,
    }
    return Reading(header, (intake.document,))


async def read_comparison(readers: Readers, body: bytes) -> tuple[Intake, CompareOptionsBody]:
    """Return what the body of a comparison says: the problem, and how to compare.

    Raises
    ------
    OptPipeError
        As `Readers.read` and `Comparison.parse`.
    """
    reading = await readers.read("optpipe_api.desk.intake:digest_comparison", body)
    options = CompareOptionsBody.model_validate(reading.header["options"])
    return intake_from(reading.header["intake"], reading.documents[0]), options


def digest_comparison(body: bytes) -> Reading:
    """Return a comparison as `Readers` pass it on.

    Raises
    ------
    OptPipeError
        As `decode_json` and `Comparison.parse`.
    """
    comparison = Comparison.parse(decode_json(body))
    intake = intake_of(comparison.problem)
    options = comparison.options.model_dump(mode="json")
    return Reading({"intake": intake.header(), "options": options}, (intake.document,))


def _intake(submission: Submission) -> Intake:
    if submission.model is not None:
        return intake_of_model(submission.model)
    if submission.problem is not None:
        return intake_of(submission.problem)
    raise ValueError("a submission has a problem or a model")


def intake_from(header: dict[str, Any], document: str) -> Intake:
    """Return the intake of a header and its document."""
    return Intake(**{**header, "kind": JobKind(header["kind"])}, document=document)


def intake_of(problem: Problem) -> Intake:
    """Return what a problem says."""
    return Intake(
        kind=JobKind.SOLVE,
        document=problem.model_dump_json(by_alias=True),
        name=problem.name,
        problem_hash=problem.problem_hash,
        shape_hash=_shape_hash(problem),
        objective=problem.objective,
        num_microbatches=problem.num_microbatches,
        num_cells=len(problem.stages) * problem.num_microbatches,
    )


def intake_of_model(model: Model) -> Intake:
    """Return what a model says."""
    data = model.model_dump(mode="json", by_alias=True)
    return Intake(
        kind=JobKind.PLAN,
        document=model.model_dump_json(by_alias=True),
        name=model.name,
        problem_hash=_hash_of({**data, "name": ""}),
        shape_hash="",
        objective=model.objective,
        num_microbatches=model.num_microbatches,
        num_cells=model.num_layers * model.num_microbatches,
    )


def _shape_hash(problem: Problem) -> str:
    """Return the hash of what decides whether programs can be legal at all, sizes aside."""
    return _hash_of(
        {
            "num_microbatches": problem.num_microbatches,
            "objective": problem.objective,
            "num_devices": len(problem.devices),
            "placement": problem.placement,
            "stages": [
                [problem.can_offload(index), stage.can_recompute, stage.backward_ms is not None]
                for index, stage in enumerate(problem.stages)
            ],
        }
    )


def _hash_of(data: object) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
