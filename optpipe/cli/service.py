"""``optpipe serve``, ``submit`` and ``fetch``: the service, and solving through it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optpipe.cli.console import needs_extra, stderr, stdout
from optpipe.cli.following import follow_job
from optpipe.cli.options import (
    DEFAULT_URL,
    ApiKey,
    Follow,
    Gap,
    JobId,
    Method,
    Output,
    ProblemFile,
    Seed,
    Threads,
    TimeLimit,
    Url,
    WorkLimit,
)
from optpipe.cli.reading import read_problem
from optpipe.cli.report import gap_text, number_table
from optpipe.cli.writing import (
    check_apart,
    check_schedule_file,
    check_writable,
    results,
    say_written,
    write_file,
    write_schedule,
)
from optpipe.plot.terminal import ScheduleView
from optpipe.plot.units import format_ms
from optpipe.schedule import OPTIMAL_GAP

if TYPE_CHECKING:
    from optpipe.client import Client, Job
    from optpipe.problem import Problem

__all__ = ["fetch", "serve", "submit"]


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


def submit(
    problem_file: ProblemFile,
    url: Url = DEFAULT_URL,
    follow: Follow = False,
    output: Output = None,
    time_limit: TimeLimit = 60.0,
    threads: Threads = 1,
    seed: Seed = 0,
    method: Method = "auto",
    gap: Gap = OPTIMAL_GAP,
    work_limit: WorkLimit = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="TAG", help="To find the job by; may be given several times."),
    ] = None,
    priority: Annotated[
        int, typer.Option(metavar="N", min=-100, max=100, help="Higher ones are taken first.")
    ] = 0,
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
    """
    from optpipe.client import Client

    problem = read_problem(problem_file)
    check_schedule_file(output)
    check_apart(output, inputs=[problem_file])
    with Client(url, api_key=api_key) as client:
        job = client.submit(
            problem,
            time_limit_s=time_limit,
            work_limit=work_limit,
            threads=threads,
            seed=seed,
            gap=gap,
            method=method,
            cache="refresh" if refresh else None,
            tags=tag or None,
            priority=priority or None,
        )
        results(output).print(job.id, markup=False)
        if follow or output is not None:
            _show(client, problem, follow_job(client, job), output)


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
    from optpipe.formats.json_text import dump_schedule

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
    title = f"{problem.name} - {schedule.provenance.method}"
    console = results(output)
    console.print(ScheduleView(problem=problem, programs=schedule.programs, title=title))
    console.print(number_table(problem, schedule.programs, schedule, None))
