"""``optpipe jobs``: list the jobs of a service, cancel one, give it more time."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Column, Table

from optpipe.cli.console import stderr, stdout
from optpipe.cli.options import DEFAULT_URL, ApiKey, JobId, Url
from optpipe.cli.report import gap_text
from optpipe.plot.units import format_ms

if TYPE_CHECKING:
    from optpipe.client import Job

__all__ = ["make_jobs_app"]

_ID_WIDTH = 32


def make_jobs_app() -> typer.Typer:
    """Return the group of commands."""
    app = typer.Typer(
        name="jobs",
        no_args_is_help=True,
        rich_markup_mode=None,
        help="List the jobs of a service, cancel them, give them more time.\n\n\b\nExamples:\n"
        "  optpipe jobs list --state running\n"
        "  optpipe jobs cancel JOB\n"
        "  optpipe jobs resume JOB --time-limit 60",
    )
    app.command("list")(show)
    app.command("cancel")(cancel)
    app.command("resume")(resume)
    return app


def show(
    state: Annotated[
        Literal["queued", "running", "succeeded", "infeasible", "failed", "cancelled"] | None,
        typer.Option(help="Only those in this state."),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="TAG", help="Only those with this tag.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="The newest so many.")] = 20,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """List jobs, newest first.

    \b
    Examples:
      optpipe jobs list
      optpipe jobs list --state queued --tag nightly
    """
    from optpipe.client import Client

    # An id that is cut is no id.
    job_id = Column("job", no_wrap=True, min_width=_ID_WIDTH)
    table = Table(job_id, "state", "name", "made", "objective", "gap", box=None, pad_edge=False)
    with Client(url, api_key=api_key) as client:
        for job in islice(client.jobs(state=state, tag=tag), limit):
            table.add_row(*_cells(job))
    stdout().print(table)


def cancel(job_id: JobId, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Stop a job and keep its best schedule; a finished one stays as it is.

    \b
    Example:
      optpipe jobs cancel JOB
    """
    from optpipe.client import Client

    with Client(url, api_key=api_key) as client:
        _say(client.cancel(job_id))


def resume(
    job_id: JobId,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="S", min=0.01, help="Seconds to add.")
    ],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Give a finished job more time, from where it stands.

    \b
    Example:
      optpipe jobs resume JOB --time-limit 60
    """
    from optpipe.client import Client

    with Client(url, api_key=api_key) as client:
        _say(client.resume(job_id, time_limit))


def _cells(job: Job) -> tuple[str, ...]:
    objective = "" if job.objective_ms is None else f"{format_ms(job.objective_ms)} ms"
    gap = "" if job.gap is None else gap_text(job.gap)
    made = job.created_at.strftime("%Y-%m-%d %H:%M")
    return job.id, job.state, job.name, made, objective, gap


def _say(job: Job) -> None:
    stopping = ", stopping" if job.cancel_requested and not job.is_finished else ""
    stderr().print(f"job {job.id}: {job.state}{stopping}", markup=False)
