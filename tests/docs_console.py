"""Runs the ``console`` blocks of a page, and compares what they print with what the page says.

A block has commands after ``$ `` and, below each, what it prints. Spaces may differ, and numbers
too unless the command is one of `EXACT`, the line begins with `EXACT_LINES`, or, where the page
shows a proof, with `EXACT_IF_PROVEN`. A line ``...`` is
any lines, ``...`` in a line anything. Long searches are shortened.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Step", "blocks", "make_workplace", "mismatch", "run_shell", "run_step", "steps"]

ROOT = Path(__file__).parent.parent
EXACT = ("optpipe estimate", "optpipe bound", "optpipe import")
"""Commands without a search: they print the same numbers on every machine."""
EXACT_LINES = ("today: ", "1f1b ", "peak memory gpu0 ...")
"""Begin of the lines of a search whose numbers do not depend on what it finds."""
EXACT_IF_PROVEN = ("makespan ", "bubble of the ")
"""Begin of the lines whose numbers follow from an optimal objective."""
PROOF = "(optimal)"
PROGRAMS = {"optpipe": "optpipe.cli", "torchrun": "torch.distributed.run", "python": None}


@dataclass(frozen=True)
class Step:
    """A command, and the lines that the page shows below it."""

    command: str
    shown: tuple[str, ...]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def steps(text: str) -> list[Step]:
    """The commands of a page in their order."""
    found: list[Step] = []
    for block in blocks(text, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = part.replace("\\\n", " ").rstrip("\n").split("\n")
            found.append(Step(command, tuple(shown)))
    return found


def make_workplace(folder: Path, *problems: str) -> Path:
    """A folder with programs to call and problems to solve; other files are reached by link."""
    scripts = folder / "bin"
    scripts.mkdir()
    for name, module in PROGRAMS.items():
        call = sys.executable if module is None else f"{sys.executable} -m {module}"
        (scripts / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        (scripts / name).chmod(0o755)
    for problem in problems:
        (folder / problem).symlink_to(ROOT / "examples" / "problems" / problem)
    return folder


def run_step(step: Step, folder: Path, seconds: int = 2) -> str:
    """Run a command with its search shortened; returns what it printed, errors last.

    Where the page shows a proof, which ends a search before its time, a busy machine gets ten
    times as long as the page says.
    """
    has_proof = any(PROOF in line or "; proven" in line for line in step.shown)
    limit = r"\g<1>\g<2>0" if has_proof else rf"\g<1>{seconds}"
    command = re.sub(r"(--time-limit )(\d+)", limit, step.command)
    if any(line.startswith("infeasible: ") for line in step.shown):
        command = f"{command} || [ $? = 3 ]"
    return run_shell(command, folder)


def run_shell(command: str, folder: Path, **variables: str) -> str:
    """Run a command line in a workplace; returns what it printed, errors last."""
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "solver", "api")),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        **variables,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def mismatch(step: Step, printed: str) -> str | None:
    """The first shown line that was not printed, in the order shown; None if all were."""
    rest = printed.splitlines()
    is_proven = any(PROOF in line for line in step.shown)
    for line in step.shown:
        if line.strip() in {"", "..."}:
            continue
        is_exact = step.command.startswith(EXACT) or line.startswith(EXACT_LINES)
        is_exact |= is_proven and line.startswith(EXACT_IF_PROVEN)
        shape = _words if is_exact else _shape
        pattern = ".*".join(re.escape(part) for part in shape(line).split("..."))
        place = next((at for at, one in enumerate(rest) if re.fullmatch(pattern, shape(one))), None)
        if place is None:
            return line
        rest = rest[place + 1 :]
    return None


def _shape(line: str) -> str:
    """A line with every number as ``#`` and single spaces."""
    numbers = re.sub(r"(?<![A-Za-z0-9_])-?\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "#", line)
    return _words(numbers)


def _words(line: str) -> str:
    return " ".join(line.split())
