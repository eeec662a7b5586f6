"""Where and when a measurement was made: the head of every ledger row."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
from pathlib import Path

__all__ = ["commit", "stamp"]

# What a measurement writes while it runs is no other program.
RESULTS = ":(top,exclude)benchmarks/results"


def stamp() -> str:
    """Return date, commit (``+`` = with uncommitted changes), processor and cores."""
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return f"{date}, {commit()}, {_processor()}, {os.cpu_count()} cores"


def commit() -> str:
    """Return the short commit, with ``+`` where tracked files other than results changed since."""
    head = _git("rev-parse", "--short", "HEAD") or "no commit"
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", RESULTS)
    return head + ("+" if changes else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
