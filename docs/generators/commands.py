"""The reference of the command line: what ``--help`` prints, command by command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import typer

from docs.generators.writing import fenced, write_text
from optpipe.cli import make_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["all_commands", "write_commands"]

_WIDTH = 96


def write_commands(into: Path) -> None:
    """Write the page ``commands.md``."""
    write_text(into / "commands.md", _page())


def all_commands() -> Iterator[tuple[str, click.Context]]:
    """Yield each command's full name, with the context that prints its help."""
    root = typer.main.get_command(make_app())
    yield from _below(root, click.Context(root, info_name="optpipe", **_layout()))


def _below(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Context]]:
    yield context.command_path, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                inner = click.Context(child, info_name=name, parent=context, **_layout())
                yield from _below(child, inner)


def _layout() -> dict[str, int]:
    return {"terminal_width": _WIDTH, "max_content_width": _WIDTH}


def _page() -> str:
    parts = ["# Command line\n\nWhat `--help` prints, of every command.\n"]
    for name, context in all_commands():
        parts.append(f"\n## {name}\n\n{fenced(_help_of(context), 'text')}")
    return "".join(parts)


def _help_of(context: click.Context) -> str:
    return "\n".join(line.rstrip() for line in context.command.get_help(context).splitlines())
