"""``optpipe profile``: a problem measured on the real thing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.markup import escape

from optpipe.cli.console import LinkLatency, LinkRate, ProblemOut, stderr, stdout, text_table
from optpipe.cli.files import check_apart, check_writable, write_file
from optpipe.errors import InputError, explain
from optpipe.formats.json import dump_problem
from optpipe.measurements import Given
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table

    from optpipe.measurements import DeviceFacts, LinkFit, MeasuredAction, Measurements, StageFacts
    from optpipe.runtime.measuring import Profile
    from optpipe.runtime.measuring.menus import StageMenu

__all__ = ["measurements_as_json", "profile", "show_measurements"]


_LEAST_WIDTH = 100
_MICROBATCHES_PER_DEVICE = 4
_MOST_MICROBATCHES = 2_000_000

Stages = Annotated[
    str,
    typer.Option(
        "--stages",
        metavar="MODULE:FUNCTION",
        help="Function that returns (stages, sample) or (stages, sample, loss_fn, target).",
    ),
]
SamplesOut = Annotated[
    Path | None,
    typer.Option("--samples-out", metavar="FILE", help="Write every sample here, as JSON."),
]
Microbatch = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Samples per micro-batch, handed to the function."),
]
NumMicrobatches = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=_MOST_MICROBATCHES,
        help="Micro-batches of a step.  [default: 4 per device]",
    ),
]
Placement = Annotated[
    str | None,
    typer.Option(metavar="N,N", help="Device of each stage.  [default: one each, or a loop]"),
]
MemoryBytes = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, max=2**53, help="Memory of each device.  [default: what it has]"
    ),
]
StateCopies = Annotated[
    float,
    typer.Option(
        metavar="X", min=0, max=100, help="Optimizer state in copies of the weights; Adam: 2."
    ),
]


def profile(
    stages: Stages,
    output: ProblemOut = None,
    microbatch: Microbatch = None,
    num_microbatches: NumMicrobatches = None,
    placement: Placement = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cuda or cpu.  [default: cuda if there]")
    ] = None,
    memory_bytes: MemoryBytes = None,
    state_copies: StateCopies = 2.0,
    recompute: Annotated[
        bool, typer.Option(help="Let schedules recompute whole micro-batches.")
    ] = True,
    modes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=64,
            help="Most modes per stage; 0 = keep, offload, recompute, of everything.",
        ),
    ] = 8,
    link_latency_ms: LinkLatency = None,
    link_gb_per_s: LinkRate = None,
    threads: Annotated[
        int, typer.Option(metavar="N", min=1, help="CPU threads, as a rank will have.")
    ] = 1,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Samples per pass.")] = 20,
    warmups: Annotated[int, typer.Option(metavar="N", min=0, help="Rounds before them.")] = 5,
    samples_out: SamplesOut = None,
) -> None:
    """Run stages on this machine and write the problem they make.

    Times, bytes, copies and links are measured, and what groups of modules hold and take to run
    again: of that the menu of each stage is made. One process measures all stages on one device;
    torchrun measures each on its rank, and the links between ranks.

    \b
    Examples:
      optpipe profile --stages my_model:stages --microbatch 4 -o problem.json
      optpipe profile --stages optpipe.runtime.measuring.stages:tiny_gpt
      torchrun --nproc-per-node 4 -m optpipe.cli profile --stages my_model:stages -o problem.json
    """
    check_writable(output)
    check_writable(samples_out)
    check_apart(output, samples_out)
    given = _given(link_latency_ms, link_gb_per_s)
    from optpipe.runtime.measuring import Effort, computing_with, device_named, joined, load_stages
    from optpipe.runtime.measuring import measure as measure_stages

    homes = _homes(placement)
    found, where = load_stages(stages, microbatch), device_named(device)
    with computing_with(threads), joined(where):
        measured = measure_stages(
            found.stages,
            found.sample,
            loss_fn=found.loss_fn,
            target=found.target,
            placement=homes,
            device=where,
            effort=Effort(repeats, warmups),
            state_copies=state_copies,
            memory_bytes=memory_bytes,
            recompute=recompute,
            modes=modes,
            links=given.link_latency_ms is None and given.link_gb_per_s is None,
        )
    if os.environ.get("RANK", "0") != "0":
        return
    count = num_microbatches or _MICROBATCHES_PER_DEVICE * len(measured.measurements.devices)
    # First what was measured: where it makes no problem, it is still there.
    _show(stdout(), measured)
    if samples_out is not None:
        write_file(samples_out, measured.with_reserved(count).model_dump_json(indent=1) + "\n")
        stderr().print(f"samples written to {samples_out}", markup=False)
    problem = measured.problem(count, given)
    if output is not None:
        write_file(output, dump_problem(problem))
        stderr().print(f"problem written to {output}", markup=False)


def _given(link_latency_ms: float | None, link_gb_per_s: float | None) -> Given:
    try:
        return Given(link_latency_ms=link_latency_ms, link_gb_per_s=link_gb_per_s or None)
    except ValidationError as error:
        raise InputError(explain(error, Given)) from None


def _homes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--placement {text}: must be devices with commas between; write e.g. 0,1,1,0"
        ) from None


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
    for shown in (_groups_table(menus), _modes_table(measured)) if menus else ():
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


def _modes_table(measured: Profile) -> Table:
    table = text_table(
        "left by F",
        "offload",
        "stays",
        "again\nms",
        texts=("stage", "mode"),
    )
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
