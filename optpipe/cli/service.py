"""``optpipe serve``, ``submit`` and ``fetch``: the service, and solving through it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import (
    INFEASIBLE,
    NOTHING_FOUND,
    check_writable,
    needs_extra,
    read_problem,
    stderr,
    stdout,
    write_schedule,
)
from optpipe.cli.options import (
    Follow,
    Gap,
    Method,
    Output,
    ProblemFile,
    Seed,
    Threads,
    TimeLimit,
    Url,
    WorkLimit,
)
from optpipe.cli.report import gap_text, number_table, progress_line
from optpipe.plot.terminal import ScheduleView
from optpipe.plot.units import format_ms
from optpipe.schedule import OPTIMAL_GAP

if TYPE_CHECKING:
    from optpipe.client import Client, Job
    from optpipe.problem import Problem

__all__ = ["fetch", "serve", "submit"]

_DEFAULT_URL = "http://127.0.0.1:8000"


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
    url: Url = _DEFAULT_URL,
    follow: Follow = False,
    output: Output = None,
    time_limit: TimeLimit = 60.0,
    threads: Threads = 1,
    seed: Seed = 0,
    method: Method = "auto",
    gap: Gap = OPTIMAL_GAP,
    work_limit: WorkLimit = None,
) -> None:
    """Hand a problem to the service and print the job's id.

    With --follow (or -o, which implies it) wait for the end; exit codes are then those of
    optpipe solve.

    \b
    Examples:
      optpipe submit problem.json
      optpipe submit problem.json --follow -o schedule.json
      optpipe submit problem.json --url http://planner:8000
    """
    from optpipe.client import Client

    problem = read_problem(problem_file)
    check_writable(output)
    with Client(url) as client:
        job = client.submit(
            problem,
            time_limit_s=time_limit,
            work_limit=work_limit,
            threads=threads,
            seed=seed,
            gap=gap,
            method=method,
        )
        stdout().print(job.id, markup=False)
        if follow or output is not None:
            _follow(client, problem, job, output)


def fetch(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Id that submit printed.")],
    output: Output = None,
    url: Url = _DEFAULT_URL,
) -> None:
    """Fetch the best schedule that a job has so far.

    Without -o the schedule is printed as JSON.

    \b
    Examples:
      optpipe fetch JOB -o schedule.json
      optpipe fetch JOB -o schedule.csv
    """
    from optpipe.client import Client
    from optpipe.formats.json_text import dump_schedule

    check_writable(output)
    with Client(url) as client:
        schedule = client.schedule(job_id)
    if output is None:
        stdout().print(dump_schedule(schedule), markup=False, soft_wrap=True, end="")
        return
    write_schedule(schedule, output)
    stderr().print(
        f"{format_ms(schedule.objective_ms)} ms, gap {gap_text(schedule.gap)}, written to {output}",
        markup=False,
    )


def _follow(client: Client, problem: Problem, job: Job, output: Path | None) -> None:
    """Print every improvement, then the schedule; leave as optpipe solve does without one."""
    progress, num_told = stderr(), 0
    for news in client.follow(job):
        job, trace = news, news.trace or ()
        for step in trace[num_told:]:
            line = progress_line(step.seconds, step.method, step.objective_ms, step.bound_ms)
            progress.print(line, markup=False)
        num_told = len(trace)
    if not job.has_schedule:
        reason = job.error.message if job.error is not None else ""
        progress.print(f"{job.state}: {reason}", style="red", soft_wrap=True, markup=False)
        raise typer.Exit(INFEASIBLE if job.state == "infeasible" else NOTHING_FOUND)
    schedule = client.schedule(job)
    if output is not None:
        write_schedule(schedule, output)
        progress.print(f"written to {output}", markup=False)
    title = f"{problem.name} - {schedule.provenance.method}"
    stdout().print(ScheduleView(problem=problem, programs=schedule.programs, title=title))
    stdout().print(number_table(problem, schedule.programs, schedule, None))
