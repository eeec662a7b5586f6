"""``optpipe serve``, ``submit`` and ``fetch``: the service, and solving through it."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from optpipe.cli.console import (
    DEFAULT_URL,
    INTERRUPTED,
    ApiKey,
    Follow,
    JobId,
    Output,
    ProblemFile,
    Url,
    check_apart,
    check_schedule_file,
    check_writable,
    gap_text,
    needs_extra,
    nothing_found,
    progress_line,
    read_problem,
    results,
    say_written,
    show_schedule,
    stderr,
    stdout,
    write_file,
    write_schedule,
)
from optpipe.cli.options import OptionsOf, takes
from optpipe.requests import ResumeRequest, SolveRequest
from optpipe.units import format_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console
    from rich.progress import Task

    from optpipe.client import Client, Job
    from optpipe.problem import Problem
    from optpipe_api.store import KeyStore

__all__ = ["fetch", "make_jobs_app", "make_keys_app", "serve", "submit"]


def serve(
    host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Where to listen.  [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=65535, help="0 = a free one.  [default: 8000]"),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where jobs are kept.  [default: sqlite:///optpipe.db]"),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Speak HTTPS, with this certificate.")
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Private key of the certificate.")
    ] = None,
) -> None:
    """Run the service until Ctrl-C.

    Jobs come over HTTP and are solved in processes of their own.

    On any address but loopback, requests need an API key: optpipe keys create makes one.

    Every setting can also come from the environment: OPTPIPE_HOST, OPTPIPE_PORT, ...

    \b
    Examples:
      optpipe serve
      optpipe serve --host 0.0.0.0 --port 9000 --database-url sqlite:////var/lib/optpipe/jobs.db
    """
    with needs_extra("server"):
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
    without=["chunks", "placements", "cache", "objective"],
    defaults={"time_limit_s": 60.0},
)
def submit(
    given: OptionsOf[SolveRequest],
    problem_file: ProblemFile,
    url: Url = DEFAULT_URL,
    follow: Follow = False,
    output: Output = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Solve again what was solved before.")
    ] = False,
    api_key: ApiKey = None,
) -> None:
    """Hand a problem to the service and print the job's id.

    With --follow (or -o, which implies it) wait for the end; exit codes are then those of
    optpipe solve. Ctrl-C ends the waiting, not the job.

    \b
    Examples:
      optpipe submit problem.json
      optpipe submit problem.json --follow -o schedule.json
      optpipe submit problem.json --url http://planner:8000 --tag nightly
      optpipe submit problem.json --robust P90 --stragglers 0.2
    """
    from optpipe.client import Client

    problem = read_problem(problem_file)
    request = given(problem=problem)
    check_schedule_file(output)
    check_apart(output, inputs=[problem_file])
    with Client(url, api_key=api_key) as client:
        job = client.submit(
            problem,
            tags=request.tags or None,
            priority=request.priority or None,
            cache="refresh" if refresh else None,
            **request.options.model_dump(exclude_unset=True),
        )
        results(output).print(job.id, markup=False)
        if follow or output is not None:
            _show(client, problem, _follow_job(client, job), output)


def fetch(
    job_id: JobId,
    output: Output = None,
    form: Annotated[
        Literal["json", "csv", "trace", "svg"] | None,
        typer.Option(
            "--format", help="trace is Chrome's, svg a picture.  [default: by the suffix of -o]"
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Fetch the best schedule that a job has so far.

    Without -o it is printed.

    \b
    Examples:
      optpipe fetch JOB -o schedule.json
      optpipe fetch JOB -o schedule.svg
      optpipe fetch JOB --format trace -o trace.json
    """
    from optpipe.client import Client
    from optpipe.formats.json import dump_schedule

    chosen = form or _form_of(output)
    check_schedule_file(output) if chosen == "json" else check_writable(output)
    with Client(url, api_key=api_key) as client:
        if chosen != "json":
            _hand_out(client.schedule_text(job_id, chosen), output)
            return
        schedule = client.schedule(job_id)
    _hand_out(dump_schedule(schedule), output)
    if output is not None:
        stderr().print(
            f"{format_ms(schedule.objective_ms)} ms, gap {gap_text(schedule.gap)}", markup=False
        )


def _form_of(output: Path | None) -> Literal["json", "csv", "svg"]:
    match output.suffix.lower() if output is not None else "":
        case ".csv":
            return "csv"
        case ".svg":
            return "svg"
    return "json"


def _hand_out(text: str, output: Path | None) -> None:
    if output is None:
        stdout().out(text, highlight=False, end="" if text.endswith("\n") else "\n")
        return
    write_file(output, text)
    say_written(output)


def _show(client: Client, problem: Problem, job: Job, output: Path | None) -> None:
    """Write and draw the schedule of a job."""
    schedule = client.schedule(job)
    if output is not None:
        write_schedule(schedule, output)
        say_written(output)
    show_schedule(results(output), problem, schedule, None)


# --- Following a job of the service in the terminal: a bar of its time, and what is known by now.

_BAR_WIDTH = 24


def _follow_job(client: Client, job: Job) -> Job:
    """Print every improvement of a job until it ends; return it as it ended, with a schedule.

    On a terminal a bar shows how much of the time limit is spent, the objective, the bound and the
    gap. Ctrl-C ends the following, not the job. Raises `typer.Exit`: without a schedule, as optpipe
    solve leaves; or by Ctrl-C, with 130.
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
        raise nothing_found(job.state, reason)
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


# --- ``optpipe jobs``: list the jobs of a service, cancel one, give it more time.

_ID_WIDTH = 32


def make_jobs_app() -> typer.Typer:
    """Return the commands that list, cancel and resume jobs."""
    return _group(
        "jobs",
        "List the jobs of a service, cancel them, give them more time.\n\n\b\nExamples:\n"
        "  optpipe jobs list --state running\n"
        "  optpipe jobs cancel JOB\n"
        "  optpipe jobs resume JOB --time-limit 60",
        {"list": show, "cancel": cancel, "resume": resume},
    )


def _group(name: str, about: str, commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    app = typer.Typer(name=name, no_args_is_help=True, rich_markup_mode=None, help=about)
    for word, command in commands.items():
        app.command(word)(command)
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


@takes(ResumeRequest)
def resume(
    given: OptionsOf[ResumeRequest],
    job_id: JobId,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Give a finished job more time, from where it stands.

    \b
    Example:
      optpipe jobs resume JOB --time-limit 60
    """
    from optpipe.client import Client

    request = given()
    with Client(url, api_key=api_key) as client:
        _say(client.resume(job_id, request.time_limit_s))


def _cells(job: Job) -> tuple[str, ...]:
    objective = "" if job.objective_ms is None else f"{format_ms(job.objective_ms)} ms"
    gap = "" if job.gap is None else gap_text(job.gap)
    created = job.created_at.strftime("%Y-%m-%d %H:%M")
    return job.id, job.state, job.name, created, objective, gap


def _say(job: Job) -> None:
    stopping = ", stopping" if job.cancel_requested and not job.is_finished else ""
    stderr().print(f"job {job.id}: {job.state}{stopping}", markup=False)


# --- ``optpipe keys``: make, list and revoke the API keys of a service, in its database.

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The service's database.  [default: OPTPIPE_DATABASE_URL, or sqlite:///optpipe.db]",
    ),
]


def make_keys_app() -> typer.Typer:
    """Return the commands that make, list and revoke keys."""
    return _group(
        "keys",
        "Make, list and revoke the API keys of a service.\n\n\b\nExamples:\n"
        "  optpipe keys create --name ci --role submit\n"
        "  optpipe keys list\n"
        "  optpipe keys revoke ci",
        {"create": create, "list": list_keys, "revoke": revoke},
    )


def create(
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Of the key; it owns what the key makes.")
    ],
    role: Annotated[
        Literal["read", "submit", "admin"],
        typer.Option(
            help="read sees what its name owns, submit also makes and changes it, admin sees and "
            "changes everything."
        ),
    ] = "submit",
    database_url: DatabaseUrl = None,
) -> None:
    """Make a key and print it: this once, as only its hash is kept.

    A revoked name may be given again; that renews the key.

    \b
    Examples:
      optpipe keys create --name ci
      optpipe keys create --name ops --role admin --database-url postgresql://optpipe@db/optpipe
    """
    with _store(database_url) as keys:
        from optpipe_api.access import Role

        key, text = keys.create(name, Role(role))
    stdout().print(text, markup=False, soft_wrap=True)
    stderr().print(
        f"key {key.name!r} with role {key.role}; it is shown this once, so keep it", markup=False
    )


def list_keys(database_url: DatabaseUrl = None) -> None:
    """List the keys: names, roles, ids, never the keys.

    \b
    Example:
      optpipe keys list
    """
    with _store(database_url, must_exist=True) as keys:
        found = keys.all()
    table = Table("name", "role", "id", "made", "revoked", box=None, pad_edge=False)
    for key in found:
        revoked = "" if key.revoked_at is None else _time(key.revoked_at)
        table.add_row(key.name, key.role.value, key.id, _time(key.created_at), revoked)
    stdout().print(table)


def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the key.")],
    database_url: DatabaseUrl = None,
) -> None:
    """Make a key worthless; servers notice within 5 s. What it made stays.

    \b
    Example:
      optpipe keys revoke ci
    """
    with _store(database_url, must_exist=True) as keys:
        key = keys.revoke(name)
    stderr().print(f"key {key.name!r} is revoked", markup=False)


@contextmanager
def _store(database_url: str | None, *, must_exist: bool = False) -> Iterator[KeyStore]:
    with needs_extra("server"):
        from optpipe_api import Settings
        from optpipe_api.store import open_stores

        url = Settings.load(database_url=database_url).database_url
        stores = open_stores(url, must_exist=must_exist)
        try:
            yield stores.keys
        finally:
            stores.close()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
