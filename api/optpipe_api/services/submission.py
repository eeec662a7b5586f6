"""What requests say, made into the service's own values: where bodies are read.

The functions that take a body run in a `optpipe_api.services.parse_pool`, and return what the
service keeps, answers or passes on. All raise as `decode_json` and as the `parse` of the request
that they read.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from optpipe.answers import EstimateView, JobOptions, VariantView
from optpipe.errors import InputError, ProblemError, RequestError, pointer
from optpipe.measurements import DeviceFacts, Measurements, Sample
from optpipe.presets import total_parameters
from optpipe.problem import Problem
from optpipe.requests import (
    CompareRequest,
    DeployRequest,
    EstimateRequest,
    JobKind,
    ReportRequest,
    SolveOptions,
    SolveRequest,
    SweepRequest,
    TuneRequest,
    VariantRequest,
)
from optpipe.sweep import Variation, family_of, memory_of, num_variations, sweep, tighter_ones
from optpipe_api.bodies import MAX_VALUES, decode_json
from optpipe_api.deployments import NewDeployment, Report
from optpipe_api.errors import BodyTooLargeError
from optpipe_api.jobs import KINDS, DocumentKind, ItemPlan, NewJob

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from optpipe.measurements import MeasuredAction
    from optpipe.model import Model
    from optpipe.presets import PipelineCut
    from optpipe.problem import Device, Stage
    from optpipe.requests import SearchOptions
    from optpipe_api.settings import Settings

__all__ = [
    "MOST_BYTES",
    "JobRequest",
    "ReadBatch",
    "ReadItem",
    "check_stages",
    "condensed",
    "hash_of",
    "job_options",
    "measured_problem",
    "planned_job",
    "read_batch",
    "read_estimate",
    "read_job",
    "read_registration",
    "read_report",
    "read_variant",
    "refuse_many",
    "solved_job",
    "times_of",
    "tuned_job",
    "useful_axes",
]


_MOST_NAME = 150
JobRequest: TypeAlias = SolveRequest | CompareRequest | TuneRequest


def job_options(
    options: SearchOptions,
    settings: Settings,
    methods: Collection[str] | None = None,
    *,
    default_s: float | None = None,
) -> JobOptions:
    """Return the options of a job, defaults filled in.

    Raises `InputError` if they exceed the limits of this service, or the method does not exist.

    Parameters
    ----------
    methods
        Those that exist; None where the request names none.
    default_s
        Seconds where the request gives no time limit; None: the default of the settings.
    """
    if methods is not None and isinstance(options, SolveOptions) and options.method not in methods:
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


def read_job(
    body: bytes, settings: Settings, methods: Collection[str], request: type[JobRequest]
) -> NewJob:
    """Return the job that a body asks for; it has no owner yet.

    Raises `InputError` also if its options, or its problem's size, exceed the limits of this
    service.
    """
    values = decode_json(body, takes_constants=request is TuneRequest)
    wanted = request.parse(values)
    kind = wanted.kind
    if isinstance(wanted, SolveRequest):
        wanted.options.check_kind(kind)
    default_s = KINDS[kind].default_time_limit_s
    options = job_options(wanted.options, settings, methods, default_s=default_s)
    if isinstance(wanted, TuneRequest):
        job = tuned_job(wanted, options, settings.max_cells)
    elif isinstance(wanted, SolveRequest) and wanted.model is not None:
        job = planned_job(wanted.model, options, settings.max_cells)
    elif wanted.problem is not None:
        job = solved_job(wanted.problem, options, settings.max_cells)
    else:
        raise ValueError("a request to solve has a problem or a model")
    shape_hash = job.shape_hash if kind is JobKind.SOLVE else ""
    return replace(
        job, kind=kind, shape_hash=shape_hash, tags=wanted.tags, priority=wanted.priority
    )


def solved_job(
    problem: Problem, options: JobOptions, max_cells: int | None = None, **choices: Any
) -> NewJob:
    """Return the job that solves a problem; ``choices`` are other fields of it.

    Raises `ProblemError` if the problem has more than ``max_cells`` cells; None = no limit.
    """
    num_cells = _checked_cells(problem, len(problem.stages), max_cells)
    return NewJob(
        name=problem.name,
        problem_hash=problem.problem_hash,
        shape_hash=_shape_hash(problem),
        objective=problem.objective,
        options=options,
        documents={DocumentKind.PROBLEM: problem.model_dump_json(by_alias=True)},
        num_cells=num_cells,
        **choices,
    )


def planned_job(
    model: Model, options: JobOptions, max_cells: int | None = None, **choices: Any
) -> NewJob:
    """Return the job that plans a model; raises as `solved_job`."""
    data = model.model_dump(mode="json", by_alias=True)
    num_cells = _checked_cells(model, model.num_layers, max_cells)
    return NewJob(
        name=model.name,
        problem_hash=hash_of({**data, "name": ""}),
        objective=model.objective,
        options=options,
        documents={DocumentKind.MODEL: model.model_dump_json(by_alias=True)},
        num_cells=num_cells,
        **choices,
    )


def _checked_cells(document: Problem | Model, num_stages: int, max_cells: int | None) -> int:
    num_microbatches = document.num_microbatches
    num_cells = num_stages * num_microbatches
    if max_cells is not None and num_cells > max_cells:
        raise ProblemError(
            f"num_microbatches = {num_microbatches}: stages x num_microbatches = {num_cells} "
            f"exceeds {max_cells}, the limit of this service (OPTPIPE_MAX_CELLS); lower "
            "num_microbatches"
        ).at(f"/{'problem' if isinstance(document, Problem) else 'model'}/num_microbatches")
    return num_cells


def _shape_hash(problem: Problem) -> str:
    """Return the hash of what decides whether programs can be legal at all, sizes aside."""
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
    """Return the SHA-256 of a JSON-like value, in the form of all hashes of ours."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def tuned_job(request: TuneRequest, options: JobOptions, max_cells: int) -> NewJob:
    """Return the job that tunes a configuration; raises as `solved_job`."""
    # Here: parts of the service that never tune need not wait for the solver.
    from optpipe_solver.tune import read_question  # noqa: PLC0415 - heavy

    request = request.complete()
    read = read_question(request)
    question, values = read.question, request.question()
    if read.current is not None:
        _check_current(read.current.pipeline, max_cells)
    on = f"{question.num_gpus} {'+'.join(one.name for one in question.all_kinds)}"
    return NewJob(
        name=f"{question.shape.name[:_MOST_NAME]} on {on}",
        problem_hash=hash_of(values),
        objective="step",
        options=options,
        documents={DocumentKind.QUESTION: json.dumps(values)},
    )


def _check_current(cut: PipelineCut, max_cells: int) -> None:
    """Refuse to simulate what is run today where no problem may be as large."""
    num_cells = cut.pp * cut.chunks * cut.num_microbatches
    if num_cells > max_cells:
        raise InputError(
            f"current: stages x micro-batches = {num_cells} exceeds {max_cells}, the limit of this "
            "service (OPTPIPE_MAX_CELLS); raise dp or micro_batch, or leave it out"
        ).at("/current")


# --- Batches. A small body may ask for hundreds of problems.

MOST_BYTES = 32 * 1024**2
"""Of the problems of one batch together, as they are stored."""
_MOST_VALUES = 4 * MAX_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadItem:
    """An item: the job that solves it, which has no owner yet, and what tables say of it."""

    job: NewJob
    plan: ItemPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """A batch, read: its items, and what they have in common.

    ``what_if`` is the job that the items are made of, which the body only names; else empty.
    """

    name: str
    axes: dict[str, list[Any]]
    options: JobOptions
    tags: tuple[str, ...]
    priority: int
    what_if: str
    items: tuple[ReadItem, ...]


def refuse_many(num_items: int, max_items: int) -> None:
    """Refuse a batch of more than ``max_items`` items. Raises `RequestError`."""
    if num_items > max_items:
        raise RequestError(
            f"the batch has {num_items} items, and may have {max_items} "
            "(OPTPIPE_MAX_BATCH_ITEMS); take values out, or send several batches"
        )


def read_batch(body: bytes, settings: Settings, methods: Collection[str]) -> ReadBatch:
    """Return what the body of a batch asks for.

    Raises `BodyTooLargeError` if its problems together are too large; `ProblemError` if an item is
    larger than this service takes.
    """
    limit = settings.max_batch_items
    data = decode_json(body, _MOST_VALUES)
    if isinstance(data, dict) and isinstance(data.get("problems"), list):
        refuse_many(len(data["problems"]), limit)
    batch = SweepRequest.parse(data)
    refuse_many(num_variations(batch.axes), limit)
    options = job_options(batch.options, settings, methods)
    variations = _variations(batch)
    choices: dict[str, Any] = {"tags": batch.tags, "priority": batch.priority}
    drafts = _drafts(variations, options, settings.max_cells, choices)
    tighter = tighter_ones([variation.problem for variation in variations])
    return ReadBatch(
        name=batch.name or _name_of(batch),
        axes=batch.axes,
        options=options,
        what_if=batch.what_if,
        items=tuple(
            ReadItem(job=job, plan=_plan(variation, others))
            for job, variation, others in zip(drafts, variations, tighter, strict=True)
        ),
        **choices,
    )


def _name_of(batch: SweepRequest) -> str:
    """Return the name of the problem, or of the first one; empty where they are yet to be made."""
    first = batch.problem or next(iter(batch.problems or ()), None)
    return "" if first is None else first.name


def _variations(batch: SweepRequest) -> list[Variation]:
    if batch.problem is not None:
        try:
            return sweep(batch.problem, batch.axes)
        except InputError as error:
            raise error.at("/axes") from None
    return [Variation(values={}, problem=problem) for problem in batch.problems or ()]


def _drafts(
    variations: Sequence[Variation], options: JobOptions, max_cells: int, choices: dict[str, Any]
) -> list[NewJob]:
    drafts: list[NewJob] = []
    num_bytes = 0
    for index, variation in enumerate(variations):
        try:
            drafts.append(solved_job(variation.problem, options, max_cells, **choices))
        except ProblemError as error:
            name = variation.problem.name
            place = "/axes" if variation.values else pointer("problems", index)
            raise ProblemError(f"item {index} ({name}): {error}").at(place) from error
        num_bytes += sum(map(len, drafts[-1].documents.values()))
        if num_bytes > MOST_BYTES:
            raise BodyTooLargeError(
                f"the first {len(drafts)} of {len(variations)} problems take more than "
                f"{MOST_BYTES} bytes together, the limit of this service; send several batches"
            )
    return drafts


def _plan(variation: Variation, tighter: tuple[int, ...]) -> ItemPlan:
    return ItemPlan(
        values=variation.values,
        memory_bytes=memory_of(variation.problem),
        family=family_of(variation.problem),
        tighter=tighter,
    )


# --- What training runs send.


def read_registration(body: bytes, settings: Settings, methods: Collection[str]) -> NewDeployment:
    """Return the deployment that a registration asks for; it has no owner and no key yet.

    Raises `InputError` also where its options, or its problem's size, go beyond what this service
    allows, and where its micro-batches differ: measured times do not say of which they are.
    """
    wanted = DeployRequest.parse(decode_json(body))
    if wanted.problem.num_costs > 1:
        raise InputError(
            f"problem: has micro-batches of {wanted.problem.num_costs} costs, and a deployment's "
            "reports do not say of which their times are; register equal micro-batches, or plan "
            "each batch (optpipe_solver.replan)"
        ).at("/problem/stages")
    job = solved_job(
        wanted.problem, job_options(wanted.options, settings, methods), settings.max_cells
    )
    how = {"job": asdict(job.options), "threshold": wanted.threshold}
    return NewDeployment(
        name=wanted.name or job.name,
        problem=job.documents[DocumentKind.PROBLEM],
        options=job.options,
        threshold=wanted.threshold,
        request_hash=hash_of([job.problem_hash, wanted.name, how]),
    )


def read_report(body: bytes) -> Report:
    """Return what the body of a report says, its times condensed."""
    report = ReportRequest.parse(decode_json(body))
    return Report(
        document=condensed(report.actions),
        version=report.version,
        step=report.step,
        step_ms=report.step_ms,
    )


# --- Problems that a form describes: estimated from a catalogue, varied by a slider.

_ALWAYS = ("num_microbatches", "memory_scale", "memory_gb", "objective")


def read_estimate(body: bytes) -> str:
    """Return the `EstimateView` of a request as JSON text.

    Raises `OptPipeError` also as `estimate` and `sweep`.
    """
    wanted = EstimateRequest.parse(decode_json(body, takes_constants=True))
    found = wanted.estimate()
    view = EstimateView(
        **_view_fields(_vary(found.problem, wanted.values)),
        parameters=total_parameters(wanted.shape),
        mfu=found.mfu,
        step_ms=found.step.step_ms,
        tokens_per_s_per_gpu=found.step.tokens_per_s_per_gpu,
        time_factor=found.factor,
        median_error=None if found.error is None else found.error.median,
        sizes=list(found.sizes),
        notes=list(map(str, found.notes)),
    )
    return view.model_dump_json(by_alias=True)


def read_variant(body: bytes) -> str:
    """Return the `VariantView` of a request as JSON text; raises also as `sweep`."""
    wanted = VariantRequest.parse(decode_json(body))
    view = VariantView(**_view_fields(_vary(wanted.problem, wanted.values)))
    return view.model_dump_json(by_alias=True)


def useful_axes(problem: Problem) -> list[str]:
    """Return the named axes of `optpipe.sweep` that can change this problem."""
    has_bus = any(device.d2h_gb_per_s is not None for device in problem.devices)
    has_limit = any(link.bandwidth_gb_per_s is not None for link in problem.links)
    found = {
        "pcie_scale": has_bus,
        "link_scale": has_limit,
        "latency_ms": bool(problem.links),
        "placement": len(problem.stages) > len(problem.devices),
        "offload": problem.may_offload,
        "recompute": problem.may_recompute,
    }
    return [*_ALWAYS, *(name for name, is_useful in found.items() if is_useful)]


def _vary(problem: Problem, values: Mapping[str, Any]) -> Problem:
    if not values:
        return problem
    try:
        (variation,) = sweep(problem, {name: [value] for name, value in values.items()})
    except InputError as error:
        raise error.at("/values") from None
    return variation.problem


def _view_fields(problem: Problem) -> dict[str, Any]:
    return {
        "problem": problem,
        "problem_hash": problem.problem_hash,
        "axes": useful_axes(problem),
        "usable_bytes": [device.usable_bytes for device in problem.devices],
        "static_bytes": [problem.static_bytes_of(index) for index in range(len(problem.devices))],
    }


# --- From the reports of a training run to the problem as measured: other times, the same bytes.
# A time is the median over the newest reports, each of which counts with its own median. Where one
# way of doing a backward was never measured because the schedule in use does not do it so, its time
# grows or shrinks with those of the same stage that were: a stage that computes more slowly does so
# in every form. A RECOMPUTE that was not measured goes with F.

_BACKWARDS: tuple[MeasuredAction, ...] = ("I", "W", "B")


def condensed(measurements: Measurements) -> str:
    """Return what is kept of a report, as JSON: one time per stage and action, the medians.

    Raises `RequestError` if nothing was measured.
    """
    if not measurements.samples:
        raise RequestError("actions.samples is empty; report the times of at least one action")
    kept = measurements.condensed()
    # What is said of stages is about their sizes, and those stay.
    wanted = {"source", "samples", "devices", "transfers"}
    return kept.model_dump_json(include=wanted, exclude_defaults=True)


def check_stages(registered: str, report: str) -> None:
    """Refuse a report, as `condensed` leaves it, of stages that a problem does not have.

    Raises `RequestError` with the stage.
    """
    num_stages = len(Problem.model_validate_json(registered).stages)
    last = max(sample.stage for sample in Measurements.model_validate_json(report).samples)
    if last >= num_stages:
        raise RequestError(
            f"actions.samples name stage {last}, but the deployment has {num_stages} stages, "
            "numbered from 0; report to the deployment that runs"
        ).at("/actions/samples")


def measured_problem(registered: str, reports: Sequence[str]) -> str:
    """Return a problem with the times of reports, oldest first, as `condensed` leaves them.

    Raises `MeasurementError` if a measured link joins devices that are not there.
    """
    base = Problem.model_validate_json(registered)
    reported = [Measurements.model_validate_json(report) for report in reports]
    measured = Measurements(
        source="training",
        samples=tuple(sample for one in reported for sample in one.samples),
        placement=base.placement,
        transfers=tuple(transfer for one in reported for transfer in one.transfers),
    )
    inferred = tuple(_inferred(measured, base.stages))
    whole = Measurements(
        source=measured.source,
        samples=measured.samples + inferred,
        placement=measured.placement,
        transfers=measured.transfers,
    )
    rates = [one.devices for one in reported]
    devices = tuple(
        _with_rates(device, [facts[index] for facts in rates if index < len(facts)])
        for index, device in enumerate(base.devices)
    )
    problem = whole.problem(base=base)
    return problem.model_copy(update={"name": base.name, "devices": devices}).model_dump_json(
        by_alias=True
    )


def times_of(stage: Stage) -> dict[MeasuredAction, float]:
    """Return how long each action of a stage takes, in ms; none that it cannot do."""
    times: dict[MeasuredAction, float] = {
        "F": stage.forward_ms,
        "I": stage.backward_input_ms,
        "W": stage.backward_weight_ms,
    }
    if stage.backward_ms is not None:
        times["B"] = stage.backward_ms
    if stage.recompute_ms is not None:
        times["RECOMPUTE"] = stage.recompute_ms
    return times


def _inferred(measured: Measurements, stages: Sequence[Stage]) -> Iterator[Sample]:
    """Yield times of the actions that were not measured, of stages of which something was."""
    for index, stage in enumerate(stages):
        known = {
            action: found.median_ms
            for (of, action), found in measured.spreads.items()
            if of == index
        }
        for action, planned_ms in times_of(stage).items():
            if known and action not in known:
                like = _BACKWARDS if action in _BACKWARDS else ("F",)
                time_ms = planned_ms * _slowdown(stage, known, like)
                yield Sample(stage=index, action=action, time_ms=time_ms)


def _slowdown(
    stage: Stage, known: dict[MeasuredAction, float], like: Iterable[MeasuredAction]
) -> float:
    """Return how much longer than planned the known ones among some actions take; 1 = unknown."""
    planned = times_of(stage) | {"B": stage.fused_backward_ms}
    found = [action for action in like if action in known]
    planned_ms = sum(planned[action] for action in found)
    return sum(known[action] for action in found) / planned_ms if planned_ms > 0 else 1.0


def _with_rates(device: Device, facts: Sequence[DeviceFacts]) -> Device:
    """Return a device with the median of its measured copy rates.

    Where copies wait for each other - shared uplinks, half duplex - a measured time holds the
    waiting, which the simulator adds by itself: there the rates stay.
    """
    if not device.can_offload or device.half_duplex or device.pcie_group is not None:
        return device
    down = [one.d2h_gb_per_s for one in facts if one.d2h_gb_per_s is not None]
    up = [one.h2d_gb_per_s for one in facts if one.h2d_gb_per_s is not None]
    update = {"d2h_gb_per_s": statistics.median(down)} if down else {}
    return device.model_copy(
        update=update | ({"h2d_gb_per_s": statistics.median(up)} if up else {})
    )
