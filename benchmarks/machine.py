"""Where and when a measurement was made: the head of every ledger row."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
from pathlib import Path

__all__ = ["stamp"]


def stamp() -> str:
    """Return date, commit (``+`` = with uncommitted changes), processor and cores."""
    commit = _git("rev-parse", "--short", "HEAD") or "no commit"
    dirty = "+" if _git("status", "--porcelain", "--untracked-files=no") else ""
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return f"{date}, {commit}{dirty}, {_processor()}, {os.cpu_count()} cores"


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
