"""Request bodies as the values of the service: jobs, batches, estimates.

The functions that read a body run in a `optpipe_api.services.parse_pool`. All of them raise the
errors of `decode_json`, and of the `parse` of their request.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from optpipe.answers import EstimateView, JobOptions, VariantView
from optpipe.check import check
from optpipe.errors import IllegalScheduleError, InputError, ProblemError, RequestError, pointer
from optpipe.planning import TracedModel
from optpipe.problem import Problem
from optpipe.requests import (
    CompareRequest,
    EstimateRequest,
    FollowRequest,
    JobKind,
    ModelOnGpus,
    SolveOptions,
    SolveRequest,
    SweepRequest,
    TuneRequest,
    VariantRequest,
)
from optpipe.sweep import Variation, family_of, memory_of, num_variations, sweep, tighter_ones
from optpipe_api.bodies import MAX_VALUES, decode_json
from optpipe_api.errors import BodyTooLargeError
from optpipe_api.jobs import KINDS, DocumentKind, ItemPlan, NewJob

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from optpipe.model import Model
    from optpipe.requests import SearchOptions
    from optpipe_api.settings import Settings

__all__ = [
    "MAX_BATCH_BYTES",
    "JobRequest",
    "ReadBatch",
    "ReadItem",
    "check_num_items",
    "hash_of",
    "planned_job",
    "read_batch",
    "read_estimate",
    "read_job",
    "read_tune",
    "read_variant",
    "solved_job",
]


_MAX_NAME = 150
JobRequest: TypeAlias = SolveRequest | CompareRequest | TuneRequest | FollowRequest
R = TypeVar("R", bound=ModelOnGpus)


def read_job(
    body: bytes, settings: Settings, methods: Collection[str], request: type[JobRequest]
) -> NewJob:
    """Return the job of a body, without an owner.

    Raises `InputError` if its options or the size of its problem exceed the service's limits.
    """
    # A body with a running schedule has a value for each of its actions.
    max_values = _MAX_VALUES if request is FollowRequest else MAX_VALUES
    wanted = request.parse(decode_json(body, max_values))
    if isinstance(wanted, SolveRequest):
        wanted.options.check_kind(wanted.kind)
    return _new_job(wanted, settings, methods)


def read_tune(
    body: bytes, settings: Settings, methods: Collection[str], trace: str | None
) -> NewJob:
    """Return the job of a tune, without an owner.

    ``trace``: the model's traced costs as JSON text, which then replace its config. Raises as
    `read_job`.
    """
    wanted = TuneRequest.parse(decode_json(body, takes_constants=True))
    return _new_job(_traced(wanted, trace), settings, methods)


def _traced(wanted: R, trace: str | None) -> R:
    return wanted if trace is None else wanted.with_trace(TracedModel.parse(json.loads(trace)))


def _new_job(wanted: JobRequest, settings: Settings, methods: Collection[str]) -> NewJob:
    options = _job_options(
        wanted.options, settings, methods, KINDS[wanted.kind].default_time_limit_s
    )
    job = _READERS[wanted.kind](wanted, options, settings.max_cells)
    return replace(job, kind=wanted.kind, tags=wanted.tags, priority=wanted.priority)


def _job_options(
    options: SearchOptions,
    settings: Settings,
    methods: Collection[str],
    default_s: float | None = None,
) -> JobOptions:
    """Return the options of a job with all defaults.

    ``default_s``: the default time limit; None: that of the settings. Raises `InputError` if the
    options exceed the service's limits, or the method is not in ``methods``.
    """
    if isinstance(options, SolveOptions) and options.method not in methods:
        raise InputError(
            f"options.method = {options.method!r}: must be one of {', '.join(methods)}; choose one "
            "(GET /v1/methods describes them)"
        ).at("/options/method")
    default_s = settings.default_time_limit_s if default_s is None else default_s
    time_limit_s = options.time_limit_s or min(default_s, settings.max_time_limit_s)
    for name, value, limit in (
        ("time_limit_s", time_limit_s, settings.max_time_limit_s),
        ("threads", options.threads, settings.max_threads),
    ):
        if value > limit:
            raise InputError(
                f"options.{name} = {value}: must be <= {limit} on this service "
                f"(OPTPIPE_MAX_{name.upper()}); lower it"
            ).at(f"/options/{name}")
    return JobOptions.of(options, time_limit_s)


def solved_job(
    problem: Problem, options: JobOptions, max_cells: int | None = None, **fields: Any
) -> NewJob:
    """Return the job that solves a problem; ``fields``: other fields of the job.

    Raises `ProblemError` if the problem has more than ``max_cells`` cells; None = no limit.
    """
    _check_cells(problem, len(problem.stages), max_cells)
    return NewJob(
        name=problem.name,
        problem_hash=problem.problem_hash,
        shape_hash=_shape_hash(problem),
        objective=problem.objective,
        options=options,
        documents={DocumentKind.PROBLEM: problem.model_dump_json(by_alias=True)},
        **fields,
    )


def planned_job(model: Model, options: JobOptions, max_cells: int | None = None) -> NewJob:
    """Return the job that plans a model; raises as `solved_job`."""
    data = model.model_dump(mode="json", by_alias=True)
    _check_cells(model, model.num_layers, max_cells)
    return NewJob(
        name=model.name,
        problem_hash=hash_of({**data, "name": ""}),
        objective=model.objective,
        options=options,
        documents={DocumentKind.MODEL: model.model_dump_json(by_alias=True)},
    )


def _tuned_job(request: TuneRequest, options: JobOptions, max_cells: int) -> NewJob:
    """Return the job that tunes a configuration.

    Raises `InputError` if the current configuration, which a tune simulates, has too many cells.
    """
    # Here: bodies of other kinds are read without the solver.
    from optpipe_solver.tune import read_question  # noqa: PLC0415 - heavy

    request = request.complete()
    read = read_question(request)
    question, values = read.question, request.question()
    cut = None if read.current is None else read.current.pipeline
    num_cells = 0 if cut is None else cut.pp * cut.chunks * cut.num_microbatches
    if num_cells > max_cells:
        raise InputError(
            f"current: stages x micro-batches = {num_cells} exceeds {max_cells}, the limit of this "
            "service (OPTPIPE_MAX_CELLS); raise dp or micro_batch, or leave it out"
        ).at("/current")
    counts = read.gpu_counts
    number = f"{counts[0]} to {counts[-1]}" if counts else f"{question.num_gpus}"
    on = f"{number} {'+'.join(kind.name for kind in question.all_kinds)}"
    return NewJob(
        name=f"{question.shape.name[:_MAX_NAME]} on {on}",
        problem_hash=hash_of(values),
        objective="step",
        options=options,
        documents={DocumentKind.QUESTION: json.dumps(values)},
    )


def _followed_job(request: FollowRequest, options: JobOptions, max_cells: int) -> NewJob:
    """Return the job that compares a running schedule with measured times; raises as `solved_job`.

    Raises `IllegalScheduleError` if the running schedule breaks a rule of its problem.
    """
    job = solved_job(request.problem, options, max_cells)
    try:
        check(request.problem, request.schedule.programs)
    except IllegalScheduleError as error:
        raise error.inside("/schedule/programs") from None
    times = {"samples", "devices", "transfers", "source"}
    values = request.model_dump(
        mode="json", by_alias=True, include={"problem", "schedule", "threshold", "step", "step_ms"}
    ) | {
        "measurements": request.measurements.condensed().model_dump(
            mode="json", include=times, exclude_defaults=True
        )
    }
    return replace(
        job,
        problem_hash=hash_of(values),
        shape_hash="",
        documents={DocumentKind.MEASURED: json.dumps(values)},
    )


_READERS: Mapping[JobKind, Callable[[Any, JobOptions, int], NewJob]] = {
    JobKind.SOLVE: lambda request, *limits: solved_job(request.problem, *limits),
    JobKind.PLAN: lambda request, *limits: planned_job(request.model, *limits),
    # Without a schedule, a comparison has no start for jobs of its shape.
    JobKind.COMPARE: lambda request, *limits: replace(
        solved_job(request.problem, *limits), shape_hash=""
    ),
    JobKind.TUNE: _tuned_job,
    JobKind.FOLLOW: _followed_job,
}
"""The job of a request with these options, of at most so many cells, for each kind of job."""


def _check_cells(document: Problem | Model, num_stages: int, max_cells: int | None) -> None:
    num_microbatches = document.num_microbatches
    num_cells = num_stages * num_microbatches
    if max_cells is not None and num_cells > max_cells:
        raise ProblemError(
            f"num_microbatches = {num_microbatches}: stages x num_microbatches = {num_cells} "
            f"exceeds {max_cells}, the limit of this service (OPTPIPE_MAX_CELLS); lower "
            "num_microbatches"
        ).at(f"/{'problem' if isinstance(document, Problem) else 'model'}/num_microbatches")


def _shape_hash(problem: Problem) -> str:
    """Return the hash of all fields that decide whether programs can be legal, except sizes."""
    return hash_of(
        {
            "num_microbatches": problem.num_microbatches,
            "objective": problem.objective,
            "num_devices": len(problem.devices),
            "placement": problem.placement,
            "stages": [
                [problem.can_offload(index), stage.can_recompute, stage.backward_ms is not None]
                + [(mode.offload_bytes > 0, mode.recompute) for mode in stage.modes]
                for index, stage in enumerate(problem.stages)
            ],
        }
    )


def hash_of(data: object) -> str:
    """Return the SHA-256 of a JSON value, in the form of a ``problem_hash``."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


# --- Batches. A small body may describe hundreds of problems.

MAX_BATCH_BYTES = 32 * 1024**2
"""Of the problems of one batch together, as they are stored."""
_MAX_VALUES = 4 * MAX_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadItem:
    """An item of a batch: its job, without an owner, and its plan."""

    job: NewJob
    plan: ItemPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """A batch: its items, and their common fields.

    ``what_if``: the id of the job from which the items follow; empty if the body has the items.
    """

    name: str
    axes: dict[str, list[Any]]
    options: JobOptions
    tags: tuple[str, ...]
    priority: int
    what_if: str
    items: tuple[ReadItem, ...]


def check_num_items(num_items: int, max_items: int) -> None:
    """Refuse a batch of more than ``max_items`` items. Raises `RequestError`."""
    if num_items > max_items:
        raise RequestError(
            f"the batch has {num_items} items, and may have {max_items} "
            "(OPTPIPE_MAX_BATCH_ITEMS); take values out, or send several batches"
        )


def read_batch(body: bytes, settings: Settings, methods: Collection[str]) -> ReadBatch:
    """Return the batch of a body.

    Raises `BodyTooLargeError` if its problems together exceed `MAX_BATCH_BYTES`, and `ProblemError`
    if an item exceeds the service's limit.
    """
    data = decode_json(body, _MAX_VALUES)
    if isinstance(data, dict) and isinstance(data.get("problems"), list):
        check_num_items(len(data["problems"]), settings.max_batch_items)
    batch = SweepRequest.parse(data)
    check_num_items(num_variations(batch.axes), settings.max_batch_items)
    options = _job_options(batch.options, settings, methods)
    if batch.problem is None:
        variations = [Variation(values={}, problem=problem) for problem in batch.problems or ()]
    else:
        try:
            variations = sweep(batch.problem, batch.axes)
        except InputError as error:
            raise error.at("/axes") from None
    jobs: list[NewJob] = []
    num_bytes = 0
    fields: dict[str, Any] = {"tags": batch.tags, "priority": batch.priority}
    for index, variation in enumerate(variations):
        try:
            jobs.append(solved_job(variation.problem, options, settings.max_cells, **fields))
        except ProblemError as error:
            name = variation.problem.name
            place = "/axes" if variation.values else pointer("problems", index)
            raise ProblemError(f"item {index} ({name}): {error}").at(place) from error
        num_bytes += sum(map(len, jobs[-1].documents.values()))
        if num_bytes > MAX_BATCH_BYTES:
            raise BodyTooLargeError(
                f"the first {len(jobs)} of {len(variations)} problems take more than "
                f"{MAX_BATCH_BYTES} bytes together, the limit of this service; send several batches"
            )
    problems = [variation.problem for variation in variations]
    first = batch.problem or next(iter(problems), None)
    return ReadBatch(
        name=batch.name or ("" if first is None else first.name),
        axes=batch.axes,
        options=options,
        what_if=batch.what_if,
        items=tuple(
            ReadItem(
                job=job,
                plan=ItemPlan(
                    values=variation.values,
                    memory_bytes=memory_of(variation.problem),
                    family=family_of(variation.problem),
                    tighter=tighter,
                ),
            )
            for job, variation, tighter in zip(
                jobs, variations, tighter_ones(problems), strict=True
            )
        ),
        **fields,
    )


# --- Problems that a form describes: estimated from a catalogue, varied by a slider.


def read_estimate(body: bytes, trace: str | None = None) -> str:
    """Return the `EstimateView` of a request as JSON text; raises also as `estimate`, `sweep`.

    ``trace``: the model's traced costs as JSON text, which then replace its config.
    """
    wanted = _traced(EstimateRequest.parse(decode_json(body, takes_constants=True)), trace)
    return EstimateView.of(wanted, wanted.estimate()).model_dump_json(by_alias=True)


def read_variant(body: bytes) -> str:
    """Return the `VariantView` of a request as JSON text; raises also as `sweep`."""
    wanted = VariantRequest.parse(decode_json(body))
    return VariantView.of_problem(wanted.problem, wanted.values).model_dump_json(by_alias=True)
