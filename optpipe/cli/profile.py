"""``optpipe profile``: a problem measured on the real thing."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.markup import escape
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from optpipe.cli.console import INFEASIBLE, INTERRUPTED, NOTHING_FOUND, stderr, stdout
from optpipe.cli.files import check_apart, check_writable, write_file
from optpipe.cli.report import gap_text, progress_line
from optpipe.errors import InputError, explain
from optpipe.formats.json import dump_problem
from optpipe.measurements import Given
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console
    from rich.progress import Task

    from optpipe.client import Client, Job
    from optpipe.measurements import DeviceFacts, LinkFit, MeasuredAction, Measurements, StageFacts
    from optpipe.runtime.measuring import Profile

__all__ = ["follow_job", "measurements_as_json", "profile", "show_measurements"]


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


# --- Following a job of the service in the terminal: a bar of its time, and what is known by now.

_BAR_WIDTH = 24


def follow_job(client: Client, job: Job) -> Job:
    """Print every improvement of a job until it ends; return it as it ended, with a schedule.

    On a terminal a bar shows how much of the time limit is spent, the objective, the bound and the
    gap. Ctrl-C ends the following, not the job.

    Raises
    ------
    typer.Exit
        Without a schedule, as optpipe solve leaves; or by Ctrl-C, with 130.
    """
    progress = stderr()
    try:
        with _bar(progress, job) as shown:
            for news in client.follow(job):
                job = news
                shown.show(job)
    except KeyboardInterrupt:
        progress.print(
            f"job {job.id} goes on; later: optpipe fetch {job.id}, or optpipe jobs cancel {job.id}",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    if not job.has_schedule:
        reason = job.error.message if job.error is not None else ""
        progress.print(f"{job.state}: {reason}", style="red", soft_wrap=True, markup=False)
        raise typer.Exit(INFEASIBLE if job.state == "infeasible" else NOTHING_FOUND)
    return job


class _Lines:
    """Prints each improvement once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_told = 0
        self._best_ms: float | None = None

    def show(self, job: Job) -> None:
        trace = job.trace or ()
        for step in trace[self._num_told :]:
            # A step that raised the bound says nothing of the schedule that stands.
            self._best_ms = self._best_ms if step.objective_ms is None else step.objective_ms
            line = progress_line(step.seconds, step.method, self._best_ms, step.bound_ms)
            self._console.print(line, markup=False)
        self._num_told = len(trace)


class _Bar(_Lines):
    """The same above a line that moves."""

    def __init__(self, progress: Progress, job: Job) -> None:
        super().__init__(progress.console)
        self._progress = progress
        limit_s = job.options.time_limit_s
        self._task = progress.add_task(job.state, total=limit_s, start=False, known=_known(job))

    def show(self, job: Job) -> None:
        super().show(job)
        if job.state == "running":
            self._progress.start_task(self._task)
        self._progress.update(self._task, description=job.state, known=_known(job))


class _TimeBar(ProgressColumn):
    """How much of the time limit is spent, by this machine's clock."""

    # Drawn anew each time, though the task itself does not change.
    max_refresh = None

    def render(self, task: Task) -> ProgressBar:
        """Draw it; empty while the job waits."""
        total = task.total or 1.0
        return ProgressBar(total=total, completed=min(task.elapsed or 0.0, total), width=_BAR_WIDTH)


@contextmanager
def _bar(console: Console, job: Job) -> Iterator[_Lines]:
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        _TimeBar(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[known]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, job)


def _known(job: Job) -> str:
    """Return the objective, the bound and the gap, as far as they are known."""
    parts = [] if job.objective_ms is None else [f"{format_ms(job.objective_ms)} ms"]
    if job.bound_ms is not None:
        parts.append(f"bound {format_ms(job.bound_ms)} ms")
    if job.gap is not None:
        parts.append(f"gap {gap_text(job.gap)}")
    return ", ".join(parts) or "no schedule yet"


# --- How measurements are shown: times of each stage, links, and what to know of them.

_LEAST_REPORT_WIDTH = 100
_ACTIONS = ("F", "I", "W", "B", "RECOMPUTE")


def show_measurements(
    console: Console,
    measurements: Measurements,
    notes: Iterable[str],
    missing: str | None = None,
) -> None:
    """Print the tables, one line per note, and what a problem still needs."""
    # Narrower, rows would be broken up; files and pipes count as 80 columns.
    console.width = max(console.width, _LEAST_REPORT_WIDTH)
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
    table = _report_table(
        "stage", "action", "samples", "median\nms", "P5\nms", "P95\nms", "MAD\nms"
    )
    before = None
    for (stage, action), found in _in_order(measurements):
        times = (found.median_ms, found.p5_ms, found.p95_ms, found.mad_ms)
        label = "" if stage == before else str(stage)
        table.add_row(label, action, str(found.num_samples), *map(format_ms, times))
        before = stage
    return table


def _links_table(links: Iterable[LinkFit]) -> Table:
    table = _report_table("link", "", "messages", "sizes", "latency\nms", "bandwidth\nGB/s")
    for fit in links:
        rate = "-" if fit.bandwidth_gb_per_s is None else f"{fit.bandwidth_gb_per_s:.4g}"
        table.add_row(
            f"{fit.source} -> {fit.target}",
            "",
            str(fit.num_transfers),
            str(fit.num_sizes),
            format_ms(fit.latency_ms),
            rate,
        )
    return table


def _report_table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index > 1 else "left", no_wrap=True)
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
