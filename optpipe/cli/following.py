"""Following a job of the service in the terminal: a bar of its time, and what is known by now."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar

from optpipe.cli.console import INFEASIBLE, INTERRUPTED, NOTHING_FOUND, stderr
from optpipe.cli.report import gap_text, progress_line
from optpipe.plot.units import format_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.progress import Task

    from optpipe.client import Client, Job

__all__ = ["follow_job"]

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
        limit_s = job.options.get("time_limit_s")
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
