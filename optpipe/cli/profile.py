"""``optpipe profile`` and ``optpipe import``: a problem of what was measured on the real thing."""

from __future__ import annotations

import json
import math
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from rich.markup import escape

from optpipe.cli.console import (
    AsJson,
    LinkLatency,
    LinkRate,
    ProblemOut,
    check_apart,
    check_writable,
    read_problem,
    stderr,
    stdout,
    text_table,
    write_file,
)
from optpipe.cli.options import OptionsOf, takes
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
from optpipe.requests import ProfileRequest
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rich.console import Console
    from rich.table import Table

    from optpipe.measurements import LinkFit, MeasuredAction
    from optpipe.runtime.measuring import Profile
    from optpipe.runtime.measuring.memory import StageMenu

__all__ = ["Form", "import_measurements", "measurements_as_json", "profile", "show_measurements"]


_LEAST_WIDTH = 100
_MICROBATCHES_PER_DEVICE = 4

SamplesOut = Annotated[
    Path | None,
    typer.Option("--samples-out", metavar="FILE", help="Write every sample here, as JSON."),
]


@takes(ProfileRequest)
def profile(
    given: OptionsOf[ProfileRequest],
    output: ProblemOut = None,
    samples_out: SamplesOut = None,
) -> None:
    """Run stages on this machine and write the problem they make.

    Times, bytes, copies and links are measured, and what groups of modules hold and take to run
    again: of that the menu of each stage is made. One process measures all stages on one device;
    torchrun measures each on its rank, and the links between ranks.

    \b
    Examples:
      optpipe profile --stages my_model:stages --microbatch 4 -o problem.json
      optpipe profile --stages optpipe.runtime.demo:tiny_gpt
      torchrun --nproc-per-node 4 -m optpipe.cli profile --stages my_model:stages -o problem.json
    """
    check_writable(output)
    check_writable(samples_out)
    check_apart(output, samples_out)
    request = given()
    links = _given_links(request)
    from optpipe.runtime.measuring import (
        Effort,
        load_function,
        load_stages,
        select_device,
        use_process_group,
        use_threads,
    )
    from optpipe.runtime.measuring import measure as measure_stages

    runs_pairs = None
    if request.overlap is not None:
        runs_pairs = load_function("--overlap", request.overlap)
    found = load_stages(request.stages, request.microbatch)
    where = select_device(request.device)
    with use_threads(request.threads), use_process_group(where):
        measured = measure_stages(
            found.stages,
            found.sample,
            loss_fn=found.loss_fn,
            target=found.target,
            placement=request.placement,
            device=where,
            effort=Effort(request.repeats, request.warmups),
            state_copies=request.state_copies,
            memory_bytes=request.memory_bytes,
            recompute=request.recompute,
            modes=request.modes,
            links=links.link_latency_ms is None and links.link_gb_per_s is None,
            overlap=runs_pairs,
        )
    if os.environ.get("RANK", "0") != "0":
        return
    num_devices = len(measured.measurements.devices)
    count = request.num_microbatches or _MICROBATCHES_PER_DEVICE * num_devices
    # First what was measured: where it makes no problem, it is still there.
    _show(stdout(), measured)
    if samples_out is not None:
        write_file(samples_out, measured.with_reserved(count).model_dump_json(indent=1) + "\n")
        stderr().print(f"samples written to {samples_out}", markup=False)
    problem = measured.problem(count, links)
    if output is not None:
        write_file(output, dump_problem(problem))
        stderr().print(f"problem written to {output}", markup=False)


def _given_links(request: ProfileRequest) -> Given:
    try:
        return Given(
            link_latency_ms=request.link_latency_ms, link_gb_per_s=request.link_gb_per_s or None
        )
    except ValidationError as error:
        raise InputError(explain(error, Given)) from None


def _show(console: Console, measured: Profile) -> None:
    show_measurements(console, measured.measurements, measured.measurements.notes)
    table = text_table(
        "stage", "received", "made by W", "D2H, H2D GB/s alone", "together", "under compute"
    )
    for index, result in enumerate(measured.results):
        found = result.footprint
        split = found.split
        share = format_share(split.deferred / split.total) if split.total else "nothing"
        rates = [f"{down:.3g}, {up:.3g}" for down, up in result.bandwidths or ()]
        cells = rates or ["nothing to offload", "", ""]
        table.add_row(str(index), format_bytes(found.received_bytes), share, *cells)
    console.print()
    console.print(table)
    menus = [result.menu for result in measured.results if result.menu is not None]
    tables = [_groups_table(menus), _modes_table(measured)] if menus else []
    if measured.pairs:
        tables.append(_pairs_table(measured))
    for shown in tables:
        console.print()
        console.print(shown)


def _groups_table(menus: Iterable[StageMenu]) -> Table:
    """What each group holds less of when it is recomputed, moves when offloaded, and takes."""
    table = text_table(
        "modules", "freed by\nrecomputing", "by\noffload", "again\nms", texts=("stage", "group")
    )
    for index, menu in enumerate(menus):
        for row, one in enumerate(menu.groups):
            sizes = (format_bytes(max(0, one.freed_bytes)), format_bytes(one.offload_bytes))
            label = "" if row else str(index)
            ms = format_ms(one.recompute_ms)
            table.add_row(label, one.name, str(one.num_modules), *sizes, ms)
    return table


def _pairs_table(measured: Profile) -> Table:
    table = text_table("hidden\nms", texts=("F of", "with"))
    for pair in measured.pairs:
        table.add_row(
            f"stage {pair.forward}",
            f"{pair.with_} of stage {pair.backward}",
            format_ms(pair.hidden_ms),
        )
    return table


def _modes_table(measured: Profile) -> Table:
    table = text_table("left by F", "offload", "stays", "again\nms", texts=("stage", "mode"))
    for index, (facts, result) in enumerate(
        zip(measured.measurements.stages, measured.results, strict=True)
    ):
        for row, mode in enumerate(facts.modes or ()):
            left = mode.forward_bytes
            left = result.memory.activation_bytes if left is None else left
            sizes = (left, mode.offload_bytes, left - mode.offload_bytes)
            label, ms = "" if row else str(index), format_ms(mode.recompute_ms or 0.0)
            table.add_row(label, mode.name, *map(format_bytes, sizes), ms)
    return table


# --- How measurements are shown: times of each stage, links, and what to know of them.

_ACTIONS: tuple[MeasuredAction, ...] = ("F", "I", "W", "B", "RECOMPUTE")


def show_measurements(
    console: Console, measurements: Measurements, notes: Iterable[str], missing: str | None = None
) -> None:
    """Print the tables, one line per note, and what a problem still needs."""
    # Narrower, rows would be broken up; files and pipes count as 80 columns.
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(escape(measurements.source))
    console.print(_measured_times_table(measurements))
    if measurements.links:
        console.print()
        console.print(_links_table(measurements.links))
    for line in (*_size_lines(measurements.stages), *_device_lines(measurements.devices)):
        console.print(line, markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", style="dim", markup=False, soft_wrap=True)
    if missing is not None:
        console.print(f"no problem yet: {missing}", markup=False, soft_wrap=True)


def measurements_as_json(
    measurements: Measurements, notes: Iterable[str], missing: str | None = None
) -> dict[str, Any]:
    """Return what `show_measurements` prints, for programs."""
    return {
        "source": measurements.source,
        "times": [
            {"stage": stage, "action": action, **found._asdict()}
            for (stage, action), found in _in_order(measurements)
        ],
        "links": [fit._asdict() for fit in measurements.links],
        "stages": [facts.model_dump(exclude_none=True) for facts in measurements.stages],
        "devices": [facts.model_dump(exclude_none=True) for facts in measurements.devices],
        "notes": list(notes),
        "missing": missing,
    }


def _in_order(measurements: Measurements) -> list[Any]:
    return sorted(
        measurements.spreads.items(), key=lambda item: (item[0][0], _ACTIONS.index(item[0][1]))
    )


def _measured_times_table(measurements: Measurements) -> Table:
    numbers = ("samples", "median\nms", "P5\nms", "P95\nms", "MAD\nms")
    table = text_table(*numbers, texts=("stage", "action"))
    before = None
    for (stage, action), found in _in_order(measurements):
        times = (found.median_ms, found.p5_ms, found.p95_ms, found.mad_ms)
        label = "" if stage == before else str(stage)
        table.add_row(label, action, str(found.num_samples), *map(format_ms, times))
        before = stage
    return table


def _links_table(links: Iterable[LinkFit]) -> Table:
    table = text_table("messages", "sizes", "latency\nms", "bandwidth\nGB/s", texts=("link",))
    for fit in links:
        rate = "-" if fit.bandwidth_gb_per_s is None else f"{fit.bandwidth_gb_per_s:.4g}"
        table.add_row(
            f"{fit.source} -> {fit.target}",
            str(fit.num_transfers),
            str(fit.num_sizes),
            format_ms(fit.latency_ms),
            rate,
        )
    return table


def _size_lines(stages: Iterable[StageFacts]) -> list[str]:
    lines = []
    for index, facts in enumerate(stages):
        sizes = [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(value)}"
            for name, value in facts.known().items()
            if name.endswith("_bytes") and value
        ]
        if sizes:
            lines.append(f"stage {index}: {', '.join(sizes)}")
    return lines


def _device_lines(devices: Iterable[DeviceFacts]) -> list[str]:
    lines = []
    for index, facts in enumerate(devices):
        parts = []
        if facts.memory_bytes is not None:
            parts.append(f"memory {format_bytes(facts.memory_bytes)}")
        if facts.d2h_gb_per_s is not None and facts.h2d_gb_per_s is not None:
            parts.append(f"to the host {facts.d2h_gb_per_s:.4g} GB/s")
            parts.append(f"back {facts.h2d_gb_per_s:.4g} GB/s")
        if parts:
            lines.append(f"device {index}: {', '.join(parts)}")
    return lines


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
    given = _given_sizes(
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


def _given_sizes(
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
    if not pairs:
        return build_problem(measurements, given, base)
    # What those of the base hide need not fit the measured times.
    built = build_problem(measurements, given, base.with_pairs(()) if base else None)
    listed = measured_pairs(built.problem, measurements.samples)
    if not listed:
        raise MeasurementError(
            "--pairs: nothing hides behind anything: the traces hold no exchange with experts "
            "(kernels of an all-to-all), or no computation beside it, or --gpu-time busy leaves "
            "it out; leave --pairs out, or trace a run with experts on several ranks"
        )
    return BuiltProblem(built.problem.with_pairs(listed), (*built.notes, _PAIRS_NOTE))


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
