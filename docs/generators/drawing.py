"""Figures by the command line: every picture comes with the commands that draw it."""

from __future__ import annotations

import io
import shlex
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from docs.generators.writing import write_bytes
from optpipe import dump_problem
from optpipe.cli import main

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe import Problem

__all__ = ["Figure", "draw", "run_command"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Files with problems, and the ``optpipe`` commands that make ``NAME.svg`` of them."""

    name: str
    problems: Mapping[str, Problem] = field(repr=False)
    commands: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """The file that the last command writes."""
        return f"{self.name}.svg"


def draw(figure: Figure, into: Path) -> None:
    """Run a figure's commands in a folder of their own and keep the picture.

    Raises
    ------
    RuntimeError
        If a command fails, or none of them writes the picture.
    """
    with tempfile.TemporaryDirectory(prefix="optpipe-docs-") as folder, chdir(folder):
        for name, problem in figure.problems.items():
            Path(name).write_text(dump_problem(problem), encoding="utf-8")
        said = [run_command(command) for command in figure.commands]
        if not Path(figure.file_name).exists():
            raise RuntimeError(f"{figure.name}: no command wrote {figure.file_name}: {said}")
        write_bytes(into / figure.file_name, Path(figure.file_name).read_bytes())


def run_command(command: str) -> str:
    """Run an ``optpipe ...`` command in this process; return what it printed.

    Raises
    ------
    RuntimeError
        If it leaves with another code than 0.
    """
    program, *arguments = shlex.split(command)
    said = io.StringIO()
    code: object = 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    if program != "optpipe" or code not in {0, None}:
        raise RuntimeError(f"{command} left with {code}:\n{said.getvalue()}")
    return said.getvalue()
