"""The reference of the command line: what ``--help`` prints, command by command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from docs.generators.writing import fenced, write_text
from optpipe.cli import make_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["all_commands", "options_of", "write_commands"]

_WIDTH = 96


def write_commands(into: Path) -> None:
    """Write the page ``commands.md``."""
    write_text(into / "commands.md", _page())


def all_commands() -> Iterator[tuple[str, Any]]:
    """Yield each command's full name, with the context that prints its help."""
    yield from _below(typer.main.get_command(make_app()), "optpipe", None)


def options_of(context: Any) -> set[str]:
    """Return every spelling of a command's options."""
    parameters = context.command.params
    return {name for one in parameters for name in (*one.opts, *one.secondary_opts)} | {"--help"}


def _below(command: Any, name: str, parent: Any) -> Iterator[tuple[str, Any]]:
    """Walk the tree; typer's classes of commands are its own, hence `Any`."""
    context = command.make_context(
        name,
        [],
        parent,
        resilient_parsing=True,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
    )
    yield context.command_path, context
    for inner in getattr(command, "commands", {}):
        child = command.get_command(context, inner)
        if not child.hidden:
            yield from _below(child, inner, context)


def _page() -> str:
    parts = ["# Command line\n\nWhat `--help` prints, of every command.\n"]
    for name, context in all_commands():
        parts.append(f"\n## {name}\n\n{fenced(_help_of(context), 'text')}")
    return "".join(parts)


def _help_of(context: Any) -> str:
    return "\n".join(line.rstrip() for line in context.command.get_help(context).splitlines())
