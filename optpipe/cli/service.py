"""``optpipe serve``, ``submit``, ``fetch``, ``jobs`` and ``keys``: the service and its clients."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Column, Table

from optpipe.cli import console as cli
from optpipe.cli.options import RequestBuilder, takes
from optpipe.formats.json import dump_schedule
from optpipe.requests import ResumeRequest, SolveRequest
from optpipe.units import format_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.client import Client, Job
    from optpipe_api.access import ApiKey as KeyRecord
    from optpipe_api.store import KeyStore

__all__ = ["GROUPS", "fetch", "serve", "submit"]


def serve(
    host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Host to listen on.  [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=cli.number_parser(int, 0, 65535),
            help="Port; 0 is any free port.  [default: 8000]",
        ),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Database of the jobs.  [default: sqlite:///optpipe.db]"),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Certificate; enables HTTPS.")
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Private key of the certificate.")
    ] = None,
) -> None:
    """Run the service until Ctrl-C.

    Jobs come over HTTP, and each is solved in its own process. On any address but loopback,
    requests need an API key: optpipe keys create makes one. Every setting can also come from the
    environment: OPTPIPE_HOST, OPTPIPE_PORT, ...

    \b
    Examples:
      optpipe serve
      optpipe serve --host 0.0.0.0 --port 9000 --database-url sqlite:////var/lib/optpipe/jobs.db
    """
    with cli.needs_extra("server"):
        from optpipe_api import Settings
        from optpipe_api import serve as run_server

        run_server(
            Settings.load(
                host=host,
                port=port,
                database_url=database_url,
                ssl_certfile=ssl_certfile,
                ssl_keyfile=ssl_keyfile,
            )
        )


@takes(
    SolveRequest,
    without=[f"options.{name}" for name in ("chunks", "placements", "cache", "objective")],
    defaults={"time_limit_s": 60.0},
)
def submit(
    builder: RequestBuilder[SolveRequest],
    problem_file: cli.ProblemFile,
    url: cli.Url = cli.DEFAULT_URL,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for the end and print every improvement.")
    ] = False,
    output: cli.Output = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Solve again, without an earlier result.")
    ] = False,
    api_key: cli.ApiKey = None,
) -> None:
    """Submit a problem to the service and print the job's id.

    With --follow, or -o, which implies it, wait for the end; exit codes are then those of optpipe
    solve. Ctrl-C ends the waiting, not the job.

    \b
    Examples:
      optpipe submit problem.json
      optpipe submit problem.json --follow -o schedule.json
      optpipe submit problem.json --url http://planner:8000 --tag nightly
      optpipe submit problem.json --robust P90 --stragglers 0.2
    """
    problem = cli.read_problem(problem_file)
    request = builder.build(problem=problem)
    cli.check_schedule_name(output)
    cli.check_outputs(output, inputs=[problem_file])
    with cli.connect(url, api_key) as client:
        job = client.submit(
            problem,
            tags=request.tags or None,
            priority=request.priority or None,
            cache="refresh" if refresh else None,
            **request.options.model_dump(exclude_unset=True),
        )
        console = cli.result_console(output)
        console.print(job.id, markup=False)
        if not follow and output is None:
            return
        schedule = client.schedule(_follow_job(client, job))
        if output is not None:
            cli.write_schedule(schedule, output)
        cli.show_schedule(console, problem, schedule, None)


Format = Literal["json", "csv", "trace", "svg"]
_FORMAT_OF: dict[str, Format] = {".csv": "csv", ".svg": "svg"}


def fetch(
    job_id: cli.JobId,
    output: cli.Output = None,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="trace is a Chrome trace, svg a picture.  [default: by the suffix of -o]",
        ),
    ] = None,
    url: cli.Url = cli.DEFAULT_URL,
    api_key: cli.ApiKey = None,
) -> None:
    """Fetch the best schedule of a job so far.

    Without -o the schedule is printed.

    \b
    Examples:
      optpipe fetch JOB -o schedule.json
      optpipe fetch JOB -o schedule.svg
      optpipe fetch JOB --format trace -o trace.json
    """
    suffix = "" if output is None else output.suffix.lower()
    chosen: Format = form or _FORMAT_OF.get(suffix, "json")
    if chosen == "json":
        cli.check_schedule_name(output)
    cli.check_outputs(output)
    summary = ""
    with cli.connect(url, api_key) as client:
        if chosen == "json":
            schedule = client.schedule(job_id)
            text = dump_schedule(schedule)
            summary = f"{format_ms(schedule.objective_ms)} ms, gap {cli.gap_text(schedule.gap)}"
        else:
            text = client.schedule_text(job_id, chosen)
    if output is None:
        cli.stdout().out(text, highlight=False, end="" if text.endswith("\n") else "\n")
        return
    cli.write_output(output, text)
    if summary:
        cli.stderr().print(summary, markup=False)


def _follow_job(client: Client, job: Job) -> Job:
    """Print every improvement of a job until it ends; return the ended job, with a schedule.

    Raises `typer.Exit`: without a schedule with the exit code of optpipe solve; on Ctrl-C with 130.
    """
    console = cli.stderr()
    num_printed, best_ms = 0, None
    try:
        with console.status(job.state) as status:
            for news in client.follow(job):
                job, trace = news, news.trace or ()
                for step in trace[num_printed:]:
                    # A step that raised only the bound has no objective; the schedule remains.
                    best_ms = best_ms if step.objective_ms is None else step.objective_ms
                    line = cli.progress_line(step.seconds, step.method, best_ms, step.bound_ms)
                    console.print(line, markup=False)
                num_printed = len(trace)
                gap = "" if job.gap is None else f", gap {cli.gap_text(job.gap)}"
                status.update(f"{job.state}{gap}")
    except KeyboardInterrupt:
        console.print(
            f"job {job.id} continues; next: optpipe fetch {job.id}, or "
            f"optpipe jobs cancel {job.id}",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(cli.INTERRUPTED) from None
    if not job.has_schedule:
        raise cli.nothing_found(job.state, "" if job.error is None else job.error.message)
    return job


# --- ``optpipe jobs``: list, cancel and resume the jobs of a service.

_ID_WIDTH = 32
_TIME_FORMAT = "%Y-%m-%d %H:%M"


def list_jobs(
    state: Annotated[
        Literal["queued", "running", "succeeded", "infeasible", "failed", "cancelled"] | None,
        typer.Option(help="Only jobs in this state."),
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Only jobs with this tag.")] = None,
    limit: Annotated[
        int,
        typer.Option(metavar="N", parser=cli.number_parser(int, 1), help="Maximum number of jobs."),
    ] = 20,
    url: cli.Url = cli.DEFAULT_URL,
    api_key: cli.ApiKey = None,
    as_json: cli.AsJson = False,
) -> None:
    """List jobs, newest first.

    \b
    Examples:
      optpipe jobs list
      optpipe jobs list --state queued --tag nightly
      optpipe jobs list --json
    """
    with cli.connect(url, api_key) as client:
        jobs = list(islice(client.jobs(state=state, tag=tag), limit))
    if as_json:
        cli.print_json([job.model_dump(mode="json", by_alias=True) for job in jobs])
        return
    job_id = Column("job", no_wrap=True, min_width=_ID_WIDTH)
    table = Table(job_id, "state", "name", "made", "objective", "gap", box=None, pad_edge=False)
    for job in jobs:
        objective = "" if job.objective_ms is None else f"{format_ms(job.objective_ms)} ms"
        gap = "" if job.gap is None else cli.gap_text(job.gap)
        created = job.created_at.strftime(_TIME_FORMAT)
        table.add_row(job.id, job.state, job.name, created, objective, gap)
    cli.stdout().print(table)


def cancel(job_id: cli.JobId, url: cli.Url = cli.DEFAULT_URL, api_key: cli.ApiKey = None) -> None:
    """Stop a job and keep its best schedule; a finished job does not change.

    \b
    Example:
      optpipe jobs cancel JOB
    """
    with cli.connect(url, api_key) as client:
        _print_state(client.cancel(job_id))


@takes(ResumeRequest)
def resume(
    builder: RequestBuilder[ResumeRequest],
    job_id: cli.JobId,
    url: cli.Url = cli.DEFAULT_URL,
    api_key: cli.ApiKey = None,
) -> None:
    """Continue a finished job with more time.

    \b
    Example:
      optpipe jobs resume JOB --time-limit 60
    """
    request = builder.build()
    with cli.connect(url, api_key) as client:
        _print_state(client.resume(job_id, request.time_limit_s))


def _print_state(job: Job) -> None:
    stopping = ", stopping" if job.cancel_requested and not job.is_finished else ""
    cli.stderr().print(f"job {job.id}: {job.state}{stopping}", markup=False)


# --- ``optpipe keys``: the API keys of a service, in its database.

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Database of the service.  [default: OPTPIPE_DATABASE_URL, or sqlite:///optpipe.db]",
    ),
]
Days = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        parser=cli.number_parser(float, 0),
        help="Days until the key expires.  [default: never]",
    ),
]


def create_key(
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the key, which owns the key's jobs.")
    ],
    role: Annotated[
        Literal["read", "submit", "admin"],
        typer.Option(
            help="read sees the jobs of its name, submit also makes and changes them, admin sees "
            "and changes everything."
        ),
    ] = "submit",
    days: Days = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a key and print it once; only its hash is stored.

    The name of a revoked or expired key can be used again.

    \b
    Examples:
      optpipe keys create --name ci
      optpipe keys create --name ops --role admin --database-url postgresql://optpipe@db/optpipe
    """
    with _open_keys(database_url) as keys:
        from optpipe_api.access import Role

        key, text = keys.create(name, Role(role), _expiry(days))
    _print_key(key, text)


def rotate_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")],
    overlap_hours: Annotated[
        float,
        typer.Option(
            metavar="X",
            parser=cli.number_parser(float, 0),
            help="Hours in which the old key still works.",
        ),
    ] = 24.0,
    days: Days = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make the next key of a name and print it once; the old key works on for a while.

    \b
    Example:
      optpipe keys rotate ci --overlap-hours 48
    """
    with _open_keys(database_url, must_exist=True) as keys:
        key, text = keys.rotate(name, overlap_hours * 3600, _expiry(days))
    _print_key(key, text)


def _expiry(days: float | None) -> float | None:
    return None if days is None else time.time() + days * 86_400


def _print_key(key: KeyRecord, text: str) -> None:
    cli.stdout().print(text, markup=False, soft_wrap=True)
    cli.stderr().print(
        f"key {key.name!r} with role {key.role}; it is shown only now, so keep it", markup=False
    )


def list_keys(database_url: DatabaseUrl = None, as_json: cli.AsJson = False) -> None:
    """List names, roles and ids of the keys, never the keys themselves.

    \b
    Examples:
      optpipe keys list
      optpipe keys list --json
    """
    with _open_keys(database_url, must_exist=True) as keys:
        found = keys.all()
    if as_json:
        names = ("created_at", "revoked_at", "expires_at")
        cli.print_json(
            [
                {"name": key.name, "role": key.role.value, "id": key.id}
                | {name: _utc(getattr(key, name), "%Y-%m-%dT%H:%M:%SZ") for name in names}
                for key in found
            ]
        )
        return
    table = Table("name", "role", "id", "made", "revoked", "expires", box=None, pad_edge=False)
    for key in found:
        times = (key.created_at, key.revoked_at, key.expires_at)
        shown = [_utc(seconds, _TIME_FORMAT) or "" for seconds in times]
        table.add_row(key.name, key.role.value, key.id, *shown)
    cli.stdout().print(table)


def _utc(seconds: float | None, form: str) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime(form)


def revoke_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")],
    database_url: DatabaseUrl = None,
) -> None:
    """Revoke a key and cancel its jobs; servers refuse it within 5 s. Its ended jobs remain.

    \b
    Example:
      optpipe keys revoke ci
    """
    with _open_keys(database_url, must_exist=True) as keys:
        key, num_jobs = keys.revoke(name)
    cli.stderr().print(f"key {key.name!r} is revoked, {num_jobs} jobs are cancelled", markup=False)


@contextmanager
def _open_keys(database_url: str | None, *, must_exist: bool = False) -> Iterator[KeyStore]:
    with cli.needs_extra("server"):
        from optpipe_api import Settings
        from optpipe_api.store import open_stores

        url = Settings.load(database_url=database_url).database_url
        stores = open_stores(url, must_exist=must_exist)
        try:
            yield stores.keys
        finally:
            stores.close()


GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "jobs": (
        "List, cancel and resume the jobs of a service.\n\n\b\nExamples:\n"
        "  optpipe jobs list --state running\n"
        "  optpipe jobs cancel JOB\n"
        "  optpipe jobs resume JOB --time-limit 60",
        {"list": list_jobs, "cancel": cancel, "resume": resume},
    ),
    "keys": (
        "Make, list and revoke the API keys of a service.\n\n\b\nExamples:\n"
        "  optpipe keys create --name ci --role submit\n"
        "  optpipe keys list\n"
        "  optpipe keys rotate ci\n"
        "  optpipe keys revoke ci",
        {"create": create_key, "list": list_keys, "rotate": rotate_key, "revoke": revoke_key},
    ),
}
"""Group of commands -> its help, and its commands."""
