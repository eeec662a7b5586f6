"""``optpipe import``: measurements a team already has, as a problem."""

from __future__ import annotations

import json
import math
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from optpipe.cli.console import AsJson, LinkLatency, LinkRate, ProblemOut, stderr, stdout
from optpipe.cli.files import check_apart, check_writable, read_problem, write_file
from optpipe.cli.profile import measurements_as_json, show_measurements
from optpipe.errors import InputError, explain
from optpipe.formats.json import dump_problem, read_text
from optpipe.measurements import (
    BuiltProblem,
    DeviceFacts,
    Given,
    MeasurementError,
    Measurements,
    MegatronRun,
    StageFacts,
    build_problem,
    dump_times,
    read_kineto,
    read_megatron,
    read_messages_table,
    read_stages_table,
    read_times,
)
from optpipe.presets.overlap import measured_pairs
from optpipe.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Form", "import_measurements"]

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e\d+)?) ?(?P<unit>[a-zA-Z]*)")


_PAIRS_NOTE = (
    "Pairs hide what their kernels would at full speed, both run together; the time of an exchange "
    "includes waiting for the other ranks of its group."
)
Read = TypeVar("Read")


class Form(StrEnum):
    """What kind of files are read."""

    KINETO = "kineto"
    MEGATRON = "megatron"
    CSV = "csv"


class _GpuClock(StrEnum):
    """Which time of a range on a GPU."""

    SPAN = "span"
    BUSY = "busy"


def _size_option(help_text: str) -> Any:
    return typer.Option(metavar="SIZE", help=help_text)


Size = str | None
Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Traces, one per rank; or one log or table.")
]


def import_measurements(
    form: Annotated[Form, typer.Argument(metavar="FORM", help="kineto, megatron or csv.")],
    files: Files,
    output: ProblemOut = None,
    base: Annotated[
        Path | None, typer.Option(metavar="PROBLEM", help="Replace only the times of this problem.")
    ] = None,
    sizes: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Bytes of each stage: stage, activation_bytes, ..."),
    ] = None,
    messages: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Timed messages: from, to, bytes, time_ms.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Name of the problem.")] = None,
    num_microbatches: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Micro-batches per step.")
    ] = None,
    activation_bytes: Annotated[Size, _size_option("Of every stage; e.g. 9.5GiB.")] = None,
    weight_context_bytes: Annotated[Size, _size_option("Of every stage, from I to W.")] = None,
    offload_bytes: Annotated[Size, _size_option("Of every stage: what may be offloaded.")] = None,
    checkpoint_bytes: Annotated[Size, _size_option("Of every stage; allows recompute.")] = None,
    static_bytes: Annotated[Size, _size_option("Of every stage: weights, optimizer.")] = None,
    output_bytes: Annotated[Size, _size_option("Sent from each stage to the next.")] = None,
    memory_bytes: Annotated[Size, _size_option("Of every device, all of it.")] = None,
    reserved_bytes: Annotated[Size, _size_option("Of every device: context, NCCL, ...")] = None,
    d2h_gb_per_s: Annotated[float | None, typer.Option(metavar="X", help="To the host.")] = None,
    h2d_gb_per_s: Annotated[float | None, typer.Option(metavar="X", help="And back.")] = None,
    link_latency_ms: LinkLatency = None,
    link_gb_per_s: LinkRate = None,
    weight_share: Annotated[
        float | None,
        typer.Option(metavar="X", help="Share (0-1) of B that W takes where only B was measured."),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="First steps left out; default 1 of several, of tables none."
        ),
    ] = None,
    range_pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="PATTERN",
            help="kineto: names of your ranges, ACTION=REGEX or a REGEX with the groups stage, "
            "action, microbatch; repeatable. Without: those of torch's schedules.",
        ),
    ] = None,
    process: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="kineto: only processes with this in their name."),
    ] = None,
    gpu_time: Annotated[
        _GpuClock | None,
        typer.Option(
            metavar="NAME",
            help="kineto: span (first kernel to last, the default) or busy (kernels alone).",
        ),
    ] = None,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="kineto: forwards and backwards may run together, as far as one's exchange with "
            "experts (all-to-all) hides behind the other.",
        ),
    ] = False,
    num_stages: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="megatron: stages, if the log does not say."),
    ] = None,
    equal_stages: Annotated[
        bool,
        typer.Option("--equal-stages", help="megatron: times of all ranks count for each stage."),
    ] = False,
    times_out: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Write every sample as a table.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a problem of traces, logs or tables.

    kineto: PyTorch profiler traces, one per rank. megatron: a Megatron-LM log with its timers.
    csv: a table stage, action, time_ms. Prints median and spread of each stage's actions. What a
    problem needs and was not measured is named, and given by options, --sizes or --base.

    \b
    Examples:
      optpipe import kineto rank*.json.gz --base problem.json --pairs -o measured.json
      optpipe import megatron train.log --activation-bytes 9.5GiB \\
          --memory-bytes 80GiB -o measured.json
      optpipe import csv times.csv --sizes stages.csv --memory-bytes 80GiB -o measured.json
    """
    for path in (output, times_out):
        check_writable(path)
    # The problem may take the place of --base, which is what it replaces.
    check_apart(output, times_out, inputs=[*files, sizes, messages])
    check_apart(times_out, inputs=[base])
    kineto = {
        "--range": range_pattern, "--process": process, "--gpu-time": gpu_time, "--pairs": pairs,
    }  # fmt: skip
    megatron = {"--num-stages": num_stages, "--equal-stages": equal_stages}
    for own, options in ((Form.KINETO, kineto), (Form.MEGATRON, megatron)):
        for option, value in options.items():
            if value and own is not form:
                raise InputError(f"{option} belongs to {own}, not to {form}; leave it out")
    given = _given(
        fields={"name": name, "num_microbatches": num_microbatches, "weight_share": weight_share,
                "link_latency_ms": link_latency_ms, "link_gb_per_s": link_gb_per_s},
        stage={"activation_bytes": activation_bytes, "weight_context_bytes": weight_context_bytes,
               "offload_bytes": offload_bytes, "checkpoint_bytes": checkpoint_bytes,
               "static_bytes": static_bytes, "output_bytes": output_bytes},
        device={"memory_bytes": memory_bytes, "reserved_bytes": reserved_bytes},
        rates={"d2h_gb_per_s": d2h_gb_per_s, "h2d_gb_per_s": h2d_gb_per_s},
        stages=_from_file(sizes, read_stages_table) if sizes else (),
    )  # fmt: skip
    steps = 0 if form is Form.CSV and warmup_steps is None else warmup_steps
    if form is Form.KINETO:
        clock = gpu_time or _GpuClock.SPAN
        found = read_kineto(files, tuple(range_pattern or ()), clock.value, process or "")
    elif len(files) > 1:
        raise InputError(
            f"{len(files)} files: {form} reads one; name one, the others in runs of their own"
        )
    elif form is Form.MEGATRON:
        run = MegatronRun(num_microbatches, num_stages, equal_stages)
        found = _from_file(files[0], lambda text: read_megatron(text, run))
    else:
        found = _from_file(files[0], read_times)
    measurements = found.without_warmup(steps)
    if messages is not None:
        measurements = measurements.with_transfers(_from_file(messages, read_messages_table))
    if times_out is not None:
        write_file(times_out, dump_times(measurements))
    based = read_problem(base) if base else None
    _finish(measurements, lambda: _built(measurements, given, based, pairs), output, as_json)


def _given(
    *,
    fields: Mapping[str, object],
    stage: Mapping[str, Size],
    device: Mapping[str, Size],
    rates: Mapping[str, float | None],
    stages: tuple[StageFacts, ...],
) -> Given:
    known = {name: value for name, value in fields.items() if value is not None}
    try:
        return Given(
            stages=stages,
            stage=StageFacts(**_sizes(stage)),
            device=DeviceFacts(**_sizes(device), **rates),
            **known,
        )
    except ValidationError as error:
        raise InputError(explain(error, Given)) from None


def _sizes(texts: Mapping[str, Size]) -> dict[str, Any]:
    return {name: _num_bytes(name, text) for name, text in texts.items() if text is not None}


def _num_bytes(name: str, text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(found["unit"].lower()) if found is not None else None
    if found is None or factor is None:
        raise InputError(
            f"--{name.replace('_', '-')} {text!r}: must be a size; write bytes, or a number and "
            "one of KB, MB, GB, KiB, MiB, GiB"
        )
    num_bytes = float(found["number"]) * factor
    if num_bytes == math.inf:
        raise InputError(f"--{name.replace('_', '-')} {text!r}: is no finite size; correct it")
    return round(num_bytes)


def _from_file(path: Path, read: Callable[[str], Read]) -> Read:
    text = read_text(path)
    try:
        return read(text)
    except MeasurementError as error:
        raise MeasurementError(f"{path}: {error}") from None


def _built(
    measurements: Measurements, given: Given, base: Problem | None, pairs: bool
) -> BuiltProblem:
    built = build_problem(measurements, given, base)
    if not pairs:
        return built
    listed = measured_pairs(built.problem, measurements.samples)
    if not listed:
        raise MeasurementError(
            "--pairs: nothing hides behind anything: the traces hold no exchange with experts "
            "(kernels of an all-to-all), or no computation beside it, or --gpu-time busy leaves "
            "it out; leave --pairs out, or trace a run with experts on several ranks"
        )
    fields = built.problem.model_dump(by_alias=True) | {
        "format": "optpipe/problem/v2",
        "pairs": [pair.model_dump(by_alias=True) for pair in listed],
    }
    return BuiltProblem(Problem.parse(fields), (*built.notes, _PAIRS_NOTE))


def _finish(
    measurements: Measurements,
    build: Callable[[], BuiltProblem],
    output: Path | None,
    as_json: bool,
) -> None:
    """Show the measurements, and write the problem; only who wants it written needs all of it."""
    built: BuiltProblem | None = None
    missing: MeasurementError | None = None
    try:
        built = build()
    except MeasurementError as error:
        missing = error
    if missing is not None and output is not None:
        show_measurements(stderr(), measurements, measurements.notes)
        raise missing
    notes = built.notes if built is not None else measurements.notes
    if as_json:
        report = measurements_as_json(measurements, notes, str(missing) if missing else None)
        stdout().out(json.dumps(report, indent=2), highlight=False)
    else:
        show_measurements(stdout(), measurements, notes, str(missing) if missing else None)
    if built is not None and output is not None:
        write_file(output, dump_problem(built.problem))
        stderr().print(f"problem written to {output}", markup=False)
