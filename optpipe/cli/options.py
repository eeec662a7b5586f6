"""Arguments and options that several commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "DEFAULT_URL",
    "ApiKey",
    "Follow",
    "Gap",
    "JobId",
    "Method",
    "Output",
    "ProblemFile",
    "ScheduleFile",
    "Seed",
    "Threads",
    "TimeLimit",
    "Url",
    "WorkLimit",
]

DEFAULT_URL = "http://127.0.0.1:8000"

ProblemFile = Annotated[
    Path,
    typer.Argument(
        metavar="PROBLEM",
        help="Problem file (optpipe/problem/v1, JSON); - is standard input.",
    ),
]
ScheduleFile = Annotated[
    Path, typer.Argument(metavar="SCHEDULE", help="Schedule file, JSON or CSV.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the schedule here: .csv is CSV, else JSON; - is standard output.",
    ),
]
TimeLimit = Annotated[
    float, typer.Option("--time-limit", metavar="S", min=0.01, help="Seconds to search.")
]
WorkLimit = Annotated[
    float | None,
    typer.Option(
        "--work-limit",
        metavar="N",
        help="Units of work, about a second of one core each, counted in iterations: the same "
        "result on every machine, unless --time-limit cuts it short.",
    ),
]
Gap = Annotated[
    float,
    typer.Option(
        metavar="X", help="Stop where proven within this share of the optimum, e.g. 0.01."
    ),
]
Threads = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="From 2 on, search and proofs run side by side."),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of everything random.")]
Method = Annotated[
    str,
    typer.Option(metavar="NAME", help="auto, or a published method, as optpipe compare names it."),
]
Url = Annotated[
    str, typer.Option(envvar="OPTPIPE_URL", metavar="URL", help="Address of the service.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="OPTPIPE_API_KEY",
        metavar="KEY",
        help="What the service asks for, where others can reach it.",
        show_envvar=True,
    ),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id that submit printed.")]
Follow = Annotated[
    bool, typer.Option("--follow", help="Wait for the end, printing every improvement.")
]
