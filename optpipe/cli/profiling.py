"""``optpipe profile``: a problem measured on the real thing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError
from rich.table import Table

from optpipe.cli.console import stderr, stdout
from optpipe.cli.writing import check_apart, check_writable, write_file
from optpipe.errors import InputError
from optpipe.formats.json_text import dump_problem
from optpipe.measurements import Given
from optpipe.plot.units import format_bytes, format_ms, format_share
from optpipe.validation import explain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from optpipe.measurements import MeasuredAction
    from optpipe.runtime.measuring import Profile

__all__ = ["profile"]

_LEAST_WIDTH = 130
_MICROBATCHES_PER_DEVICE = 4
_MOST_MICROBATCHES = 2_000_000
_PASSES: tuple[MeasuredAction, ...] = ("F", "I", "W", "B", "RECOMPUTE")

Stages = Annotated[
    str,
    typer.Option(
        "--stages",
        metavar="MODULE:FUNCTION",
        help="Function that returns (stages, sample) or (stages, sample, loss_fn, target).",
    ),
]
ProblemOut = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the problem here.")
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
    link_latency_ms: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Of every link, if not measured.")
    ] = None,
    link_gb_per_s: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Of every link, if not measured.")
    ] = None,
    threads: Annotated[
        int, typer.Option(metavar="N", min=1, help="CPU threads, as a rank will have.")
    ] = 1,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Samples per pass.")] = 20,
    warmups: Annotated[int, typer.Option(metavar="N", min=0, help="Rounds before them.")] = 5,
    samples_out: SamplesOut = None,
) -> None:
    """Run stages on this machine and write the problem they make.

    Times, bytes, copies and links are measured. One process measures all stages on one device;
    torchrun measures each on its rank, and the links between ranks.

    \b
    Examples:
      optpipe profile --stages my_model:stages --microbatch 4 -o problem.json
      optpipe profile --stages optpipe.runtime.measuring.demo_stages:tiny_gpt
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
    # Narrower, columns would be broken up; files and pipes count as 80 columns.
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(_times_table(measured))
    console.print()
    console.print(_bytes_table(measured))
    console.print()
    console.print(_copies_table(measured))
    for line in _links(measured):
        console.print(line, markup=False)
    for note in measured.measurements.notes:
        console.print(note, style="dim", markup=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _times_table(measured: Profile) -> Table:
    """Return the passes: median, and how far samples lie from it (median absolute deviation)."""
    table = _table("stage", "device", *(f"{name} ms" for name in _PASSES), "samples", "made by W")
    spreads = measured.measurements.spreads
    rows = zip(measured.measurements.placement, measured.results, strict=True)
    for index, (home, result) in enumerate(rows):
        own = [spreads[index, name] for name in _PASSES]
        cells = (f"{one.median_ms:.3g} ±{one.mad_ms:.2g}" for one in own)
        split = result.footprint.split
        share = format_share(split.deferred / split.total) if split.total else "nothing"
        table.add_row(str(index), str(home), *cells, str(own[0].num_samples), share)
    return table


def _bytes_table(measured: Profile) -> Table:
    table = _table(
        "stage",
        "activation",
        "offloadable",
        "received",
        "sent",
        "between I and W",
        "static",
        "extra in F",
        "in I",
    )
    rows = zip(measured.results, measured.measurements.stages, strict=True)
    for index, (result, facts) in enumerate(rows):
        found = result.footprint
        sizes = (
            found.activation_bytes,
            found.offload_bytes,
            found.received_bytes,
            found.output_bytes,
            found.weight_context_bytes,
            facts.static_bytes or 0,
            facts.forward_workspace_bytes or 0,
            facts.backward_input_workspace_bytes or 0,
        )
        table.add_row(str(index), *map(format_bytes, sizes))
    return table


def _copies_table(measured: Profile) -> Table:
    table = _table("stage", "D2H, H2D GB/s alone", "together", "under compute")
    for index, result in enumerate(measured.results):
        if result.bandwidths is None:
            table.add_row(str(index), "nothing to offload", "", "")
            continue
        rates = (f"{down:.3g}, {up:.3g}" for down, up in result.bandwidths)
        table.add_row(str(index), *rates)
    return table


def _links(measured: Profile) -> Iterator[str]:
    for link in measured.measurements.links:
        rate = link.bandwidth_gb_per_s
        speed = "longer messages take no longer" if rate is None else f"{rate:.3g} GB/s"
        yield f"link {link.source} - {link.target}: {format_ms(link.latency_ms)} ms, {speed}"
