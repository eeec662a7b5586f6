"""A comparison whose every step a test decides: the problem's name is its script.

``hang:FILE`` writes its process id to a file and never ends, whatever it is told. ``waits:FILE``
makes the file and ends when it is stopped. Anything else
answers at once with one row that holds the options it was given.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from optpipe.problem import Problem
from optpipe_solver.compare import AS_GIVEN, ComparisonRow, Workload
from tests.api.serial import serial


def compare(
    problem: Problem,
    *,
    time_limit_s: float,
    threads: int,
    seed: int,
    workload: Workload,
    should_stop: Any,
) -> list[ComparisonRow]:
    word, _, argument = problem.name.partition(":")
    if word == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(argument).write_text(str(os.getpid()), encoding="utf-8")
        while True:
            time.sleep(1.0)
    if word == "waits":
        Path(argument).touch()
        while not should_stop():
            time.sleep(0.05)
    if word == "fails":
        raise ZeroDivisionError("secret detail of a stack trace")
    if word == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return [
        ComparisonRow(
            method=f"limit={time_limit_s:g} threads={threads} seed={seed}",
            placement=AS_GIVEN,
            problem=problem,
            programs=serial(problem, 0),
            seconds=0.5,
            makespan_ms=84.0,
            tokens_per_s=workload.tokens_per_microbatch,
            mfu=workload.flops_per_microbatch,
        )
    ]
