"""``optpipe profile`` and ``optpipe import``: a problem from measurements."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.markup import escape

from optpipe.cli import console as cli
from optpipe.cli.options import RequestBuilder, takes
from optpipe.errors import FieldError, FieldRef, InputError
from optpipe.formats.json import dump_model, dump_problem, read_text
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
from optpipe.planning.overlap import measured_pairs
from optpipe.problem import Problem
from optpipe.requests import ImportRequest, ProfileRequest
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console
    from rich.table import Table

    from optpipe.measurements import LinkFit, MeasuredAction
    from optpipe.runtime.measuring import ModelProfile, Profile, RepeatedLayer
    from optpipe.runtime.measuring.memory import StageMenu

__all__ = ["import_measurements", "profile"]


_MIN_WIDTH = 100
_MICROBATCHES_PER_DEVICE = 4

SamplesOut = Annotated[
    Path | None,
    typer.Option("--samples-out", metavar="FILE", help="Write every sample here, as JSON."),
]


@takes(ProfileRequest)
def profile(
    builder: RequestBuilder[ProfileRequest],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write the problem or model file here."
        ),
    ] = None,
    samples_out: SamplesOut = None,
    as_json: cli.AsJson = False,
) -> None:
    """Measure or trace stages or a model, and write the problem or model.

    Durations, bytes, copies and links are measured. The menu of each stage is made from measured
    bytes and recompute times of groups of modules. One process measures all stages on one device;
    torchrun measures each on its rank, and the links between ranks. With --model, embedding, head
    and each distinct layer are measured, and optpipe plan cuts the model file.

    With the name of a GPU as --device, your stages are traced for that GPU: they run on tensors
    without data, and times come from the work of each operator. No GPU is needed.

    \b
    Examples:
      optpipe profile --stages my_model:stages --microbatch 4 -o problem.json
      optpipe profile --stages my_model:stages --device h100 -o problem.json
      optpipe profile --stages optpipe.runtime.demo:tiny_gpt
      optpipe profile --model my_model:build --device h100 --num-devices 8 -o model.json
      torchrun --nproc-per-node 4 -m optpipe.cli profile --stages my_model:stages -o problem.json
    """
    cli.check_outputs(output, samples_out)
    request = builder.build()
    links = Given(
        link_latency_ms=request.link_latency_ms, link_gb_per_s=request.link_gb_per_s or None
    )
    measured, layers = _measure(request, has_links=links != Given())
    if os.environ.get("RANK", "0") != "0":
        return
    num_devices = request.num_devices or len(measured.measurements.devices)
    count = request.num_microbatches or _MICROBATCHES_PER_DEVICE * num_devices
    # Show and write the measurements first: they are kept even if they make no problem.
    if as_json:
        cli.print_json(_describe(measured, layers))
    else:
        _show(measured)
        if layers is not None:
            _show_layers(layers.layers)
    if samples_out is not None:
        samples = measured.with_reserved(count).model_dump_json(indent=1) + "\n"
        cli.write_output(samples_out, samples, "samples")
    if layers is not None:
        file, kind = dump_model(layers.model(num_devices, count, links)), "model"
    else:
        file, kind = dump_problem(measured.problem(count, links)), "problem"
    if output is not None:
        cli.write_output(output, file, kind)


def _measure(request: ProfileRequest, *, has_links: bool) -> tuple[Profile, ModelProfile | None]:
    """Return the measurements of stages; of a model, also its layers."""
    from optpipe.runtime.measuring import (
        Effort,
        load_function,
        load_model,
        load_stages,
        measure,
        measure_layers,
        select_instruments,
        use_fake_ranks,
        use_process_group,
        use_threads,
    )

    device, instruments = select_instruments(request.device)
    if instruments.known is None and request.ranks > 1:
        raise FieldError(
            FieldRef("ranks", request.ranks),
            f" needs a traced device, and {device} is here; start ranks with torchrun instead, or "
            "name a GPU of the catalogue as --device",
        )
    settings: dict[str, Any] = {
        "device": device,
        "instruments": instruments,
        "effort": Effort(request.repeats, request.warmups),
        "state_copies": request.state_copies,
        "memory_bytes": request.memory_bytes,
        "recompute": request.recompute,
        "modes": request.modes,
        "links": not has_links,
    }
    if request.overlap is not None:
        settings["overlap"] = load_function("--overlap", request.overlap)
    with ExitStack() as contexts:
        contexts.enter_context(use_threads(request.threads))
        if request.ranks > 1:
            contexts.enter_context(use_fake_ranks(request.ranks))
        sizes = {"microbatch": request.microbatch, "sequence": request.sequence}
        if request.model is not None:
            model = load_model(request.model, request.blocks, **sizes)
            contexts.enter_context(use_process_group(device))
            layers = measure_layers(model, num_devices=request.num_devices or 1, **settings)
            return layers.profile, layers
        found = load_stages(request.stages or "", microbatch=request.microbatch)
        contexts.enter_context(use_process_group(device))
        settings |= {"loss_fn": found.loss_fn, "target": found.target}
        return measure(found.stages, found.sample, placement=request.placement, **settings), None


def _describe(measured: Profile, layers: ModelProfile | None) -> dict[str, Any]:
    """Return what `_show` and `_show_layers` print, as JSON; sizes are bytes, rates GB/s."""
    document = _describe_measurements(measured.measurements, measured.measurements.notes)
    document["footprints"] = [
        {
            "received_bytes": result.footprint.received_bytes,
            "weight_gradient_share": result.footprint.split.deferred / total
            if (total := result.footprint.split.total)
            else None,
            "d2h_h2d_gb_per_s": list(result.rate or ()),
        }
        for result in measured.results
    ]
    if layers is not None:
        document["layers"] = [
            {"name": run.name, "repeat": run.repeat, "stage": run.stage} for run in layers.layers
        ]
    return document


def _show_layers(layers: Iterable[RepeatedLayer]) -> None:
    """Print the layers of a model in its order, and the measured stage that each equals."""
    table = cli.text_table("layers", "measured\nas stage", texts=("layer",))
    for run in layers:
        table.add_row(run.name, str(run.repeat), str(run.stage))
    console = cli.stdout()
    console.print()
    console.print(table)


def _show(measured: Profile) -> None:
    console = cli.stdout()
    _show_measurements(console, measured.measurements, measured.measurements.notes)
    table = cli.text_table("stage", "received", "made by W", "D2H, H2D GB/s")
    for index, result in enumerate(measured.results):
        found = result.footprint
        split = found.split
        share = format_share(split.deferred / split.total) if split.total else "nothing"
        rate = "nothing to offload"
        if result.rate is not None:
            rate = f"{result.rate.d2h_gb_per_s:.3g}, {result.rate.h2d_gb_per_s:.3g}"
        table.add_row(str(index), format_bytes(found.received_bytes), share, rate)
    console.print()
    console.print(table)
    menus = [result.menu for result in measured.results if result.menu is not None]
    tables = [_groups_table(menus), _modes_table(measured)] if menus else []
    if measured.pairs:
        pairs = cli.text_table("hidden\nms", texts=("F of", "with"))
        for pair in measured.pairs:
            back = f"{pair.with_} of stage {pair.backward}"
            pairs.add_row(f"stage {pair.forward}", back, format_ms(pair.hidden_ms))
        tables.append(pairs)
    for shown in tables:
        console.print()
        console.print(shown)


def _groups_table(menus: Iterable[StageMenu]) -> Table:
    """Return bytes freed, bytes moved and recompute time of each group of modules."""
    table = cli.text_table(
        "modules", "freed by\nrecomputing", "by\noffload", "again\nms", texts=("stage", "group")
    )
    for index, menu in enumerate(menus):
        for row, one in enumerate(menu.groups):
            sizes = (format_bytes(max(0, one.freed_bytes)), format_bytes(one.offload_bytes))
            label = "" if row else str(index)
            ms = format_ms(one.recompute_ms)
            table.add_row(label, one.name, str(one.num_modules), *sizes, ms)
    return table


def _modes_table(measured: Profile) -> Table:
    table = cli.text_table("left by F", "offload", "stays", "again\nms", texts=("stage", "mode"))
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


# --- The report of measurements: times of each stage, links, sizes and notes.

_ACTIONS: tuple[MeasuredAction, ...] = ("F", "I", "W", "B", "RECOMPUTE")


def _show_measurements(
    console: Console, measurements: Measurements, notes: Iterable[str], missing: str | None = None
) -> None:
    """Print the tables, a line per note, and the facts that a problem still needs."""
    # Files and pipes have 80 columns, where rows would be broken up.
    console.width = max(console.width, _MIN_WIDTH)
    console.print(escape(measurements.source))
    console.print(_measured_times_table(measurements))
    if measurements.links:
        console.print()
        console.print(_links_table(measurements.links))
    for line in _fact_lines(measurements):
        console.print(line, markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", style="dim", markup=False, soft_wrap=True)
    if missing is not None:
        console.print(f"no problem yet: {missing}", markup=False, soft_wrap=True)


def _describe_measurements(
    measurements: Measurements, notes: Iterable[str], missing: str | None = None
) -> dict[str, Any]:
    """Return the report of `_show_measurements` as JSON."""
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
    table = cli.text_table(*numbers, texts=("stage", "action"))
    before = None
    for (stage, action), found in _in_order(measurements):
        times = (found.median_ms, found.p5_ms, found.p95_ms, found.mad_ms)
        label = "" if stage == before else str(stage)
        table.add_row(label, action, str(found.num_samples), *map(format_ms, times))
        before = stage
    return table


def _links_table(links: Iterable[LinkFit]) -> Table:
    table = cli.text_table("messages", "sizes", "latency\nms", "bandwidth\nGB/s", texts=("link",))
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


def _fact_lines(measurements: Measurements) -> Iterator[str]:
    """Yield the sizes of each stage, and the memory and bandwidths of each device."""
    for index, facts in enumerate(measurements.stages):
        sizes = [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(value)}"
            for name, value in facts.known().items()
            if name.endswith("_bytes") and value
        ]
        if sizes:
            yield f"stage {index}: {', '.join(sizes)}"
    for index, device in enumerate(measurements.devices):
        parts = []
        if device.memory_bytes is not None:
            parts.append(f"memory {format_bytes(device.memory_bytes)}")
        if device.d2h_gb_per_s is not None and device.h2d_gb_per_s is not None:
            parts.append(f"to the host {device.d2h_gb_per_s:.4g} GB/s")
            parts.append(f"back {device.h2d_gb_per_s:.4g} GB/s")
        if parts:
            yield f"device {index}: {', '.join(parts)}"


# --- ``optpipe import``: traces, logs and tables.

_PAIRS_NOTE = (
    "Pairs hide the time that their kernels would hide at full speed; the time of an exchange "
    "includes waiting for the other ranks of its group."
)
Read = TypeVar("Read")
Form = Literal["kineto", "megatron", "csv"]
_ONLY_OF: dict[Form, tuple[str, ...]] = {
    "kineto": ("range_pattern", "process", "gpu_time", "pairs"),
    "megatron": ("num_stages", "equal_stages"),
}
_STAGE_SIZES = {
    "activation_bytes", "weight_context_bytes", "offload_bytes", "checkpoint_bytes",
    "static_bytes", "output_bytes",
}  # fmt: skip
_DEVICE_FACTS = {"memory_bytes", "reserved_bytes", "d2h_gb_per_s", "h2d_gb_per_s"}
_OTHER_FACTS = {
    "name", "num_microbatches", "weight_share", "link_latency_ms", "link_gb_per_s",
}  # fmt: skip

Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Traces, one per rank; or one log or table.")
]


@takes(ImportRequest)
def import_measurements(
    builder: RequestBuilder[ImportRequest],
    form: Annotated[Form, typer.Argument(metavar="FORM", help="kineto, megatron or csv.")],
    files: Files,
    output: cli.ProblemOut = None,
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
    times_out: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Write every sample as a table.")
    ] = None,
    as_json: cli.AsJson = False,
) -> None:
    """Make a problem from traces, logs or tables.

    kineto: PyTorch profiler traces, one per rank. megatron: a Megatron-LM log with its timers.
    csv: a table stage, action, time_ms. The report has median and spread of each stage's actions.
    It names missing facts of the problem, which options, --sizes or --base give.

    \b
    Examples:
      optpipe import kineto rank*.json.gz --base problem.json --pairs -o measured.json
      optpipe import megatron train.log --activation-bytes 9.5GiB \\
          --memory-bytes 80GiB -o measured.json
      optpipe import csv times.csv --sizes stages.csv --memory-bytes 80GiB -o measured.json
    """
    # The problem may overwrite --base, which it replaces.
    cli.check_outputs(output, times_out, inputs=[*files, sizes, messages])
    cli.check_outputs(times_out, inputs=[base])
    request = builder.build()
    for owner, names in _ONLY_OF.items():
        for name in names:
            if name in request.model_fields_set and owner != form:
                reason = f" belongs to {owner}, not to {form}; leave it out"
                raise FieldError(FieldRef(name), reason)
    given = Given(
        stages=_read_file(sizes, read_stages_table) if sizes else (),
        stage=StageFacts(**request.model_dump(include=_STAGE_SIZES, exclude_none=True)),
        device=DeviceFacts(**request.model_dump(include=_DEVICE_FACTS, exclude_none=True)),
        **request.model_dump(include=_OTHER_FACTS, exclude_none=True),
    )
    measurements = _read_measurements(form, files, request)
    if messages is not None:
        measurements = measurements.with_transfers(_read_file(messages, read_messages_table))
    if times_out is not None:
        cli.write_file(times_out, dump_times(measurements))
    base_problem = cli.read_problem(base) if base else None
    built, missing = None, None
    try:
        built = _build(measurements, given, base_problem, request.pairs)
    except MeasurementError as error:
        # Only a problem that is written needs all facts.
        if output is not None:
            _show_measurements(cli.stderr(), measurements, measurements.notes)
            raise
        missing = str(error)
    notes = measurements.notes if built is None else built.notes
    if as_json:
        cli.print_json(_describe_measurements(measurements, notes, missing))
    else:
        _show_measurements(cli.stdout(), measurements, notes, missing)
    if built is not None and output is not None:
        cli.write_output(output, dump_problem(built.problem), "problem")


def _read_measurements(form: Form, files: list[Path], request: ImportRequest) -> Measurements:
    """Return the measurements of the files, without the steps of warm-up."""
    warmup_steps = request.warmup_steps
    if form == "kineto":
        found = read_kineto(files, request.range_pattern, request.gpu_time, request.process)
    elif len(files) > 1:
        raise InputError(
            f"{len(files)} files: {form} reads one; name one, the others in runs of their own"
        )
    elif form == "megatron":
        run = MegatronRun(request.num_microbatches, request.num_stages, request.equal_stages)
        found = _read_file(files[0], lambda text: read_megatron(text, run))
    else:
        found = _read_file(files[0], read_times)
        warmup_steps = warmup_steps or 0
    return found.without_warmup(warmup_steps)


def _read_file(path: Path, read: Callable[[str], Read]) -> Read:
    text = read_text(path)
    with cli.name_file(path):
        return read(text)


def _build(
    measurements: Measurements, given: Given, base: Problem | None, pairs: bool
) -> BuiltProblem:
    if not pairs:
        return build_problem(measurements, given, base)
    # The base's pairs may hide more than the measured durations.
    built = build_problem(measurements, given, base.with_pairs(()) if base else None)
    listed = measured_pairs(built.problem, measurements.samples)
    if not listed:
        raise MeasurementError(
            "--pairs: nothing hides: the traces have no exchange with experts (kernels of an "
            "all-to-all), or no computation next to it, or --gpu-time busy leaves it out; leave "
            "--pairs out, or trace a run with experts on several ranks"
        )
    return BuiltProblem(built.problem.with_pairs(listed), (*built.notes, _PAIRS_NOTE))
