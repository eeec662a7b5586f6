"""Starts the ranks of a program on this machine, without torchrun and reachable by nobody else.

The ranks meet in a file and talk over the loopback interface. When one fails, the others are ended
after a moment in which they can say why they stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RENDEZVOUS_VARIABLE", "launch_ranks"]

RENDEZVOUS_VARIABLE = "OPTPIPE_RENDEZVOUS_FILE"
"""Environment variable naming the file in which launched ranks meet."""

_GRACE_S = 10.0
_POLL_S = 0.05


def launch_ranks(module: str, arguments: Sequence[str], num_processes: int) -> int:
    """Run ``python -m module arguments`` once per rank; return 0 or the first bad exit code."""
    with tempfile.TemporaryDirectory(prefix="optpipe-ranks-") as folder:
        processes = [
            subprocess.Popen(  # noqa: S603 - this very interpreter
                [sys.executable, "-m", module, *arguments],
                env=_environment(rank, num_processes, Path(folder) / "rendezvous"),
            )
            for rank in range(num_processes)
        ]
        try:
            return _wait(processes)
        finally:
            _end(processes)


def _environment(rank: int, num_processes: int, rendezvous: Path) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        RENDEZVOUS_VARIABLE: str(rendezvous),
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return when all have ended, or some time after the first failure."""
    deadline = None
    first_failure = 0
    while True:
        codes = [process.poll() for process in processes]
        first_failure = first_failure or next((code for code in codes if code), 0)
        if None not in codes:
            return first_failure
        if first_failure and deadline is None:
            deadline = time.monotonic() + _GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return first_failure
        time.sleep(_POLL_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
