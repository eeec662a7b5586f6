"""What all commands share: consoles, exit codes, Ctrl-C, and extras that may be missing."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from optpipe.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import ConsoleOptions, RenderableType

    from optpipe.errors import OptPipeError

__all__ = [
    "BAD_INPUT",
    "INFEASIBLE",
    "INTERRUPTED",
    "NOTHING_FOUND",
    "PIPE",
    "WORLD",
    "interruptible",
    "needs_extra",
    "print_error",
    "stderr",
    "stdout",
]

WORLD, BAD_INPUT, INFEASIBLE, NOTHING_FOUND = 1, 2, 3, 4
INTERRUPTED = 130
_SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)
PIPE = Path("-")
"""Instead of a file's name: standard input, or standard output."""

_PACKAGES = {
    "solver": {"pulp", "highspy", "scipy", "numba"},
    "server": {
        "alembic",
        "fastapi",
        "fastapi_offline",
        "prometheus_client",
        "pydantic_settings",
        "sqlalchemy",
        "starlette",
        "structlog",
        "uvicorn",
    },
}
_PACKAGES["server"] |= _PACKAGES["solver"]


class _Console(Console):
    """Shows control characters instead of obeying them: names come from other people's files."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(segment.text.translate(_SHOWN), segment.style)


def stdout() -> Console:
    """Return the console for results."""
    return _Console(highlight=False)


def stderr() -> Console:
    """Return the console for progress and errors."""
    return _Console(stderr=True, highlight=False)


def print_error(error: OptPipeError) -> None:
    """Print what went wrong, with marked cells of a grid in red."""
    text = Text(str(error))
    text.highlight_regex(r">>[^<]+<<", "bold red")
    console = stderr()
    console.print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn the absence of an extra's package into the pip command that installs it.

    Raises
    ------
    MissingExtraError
        If a package of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES[extra]:
            raise
        raise MissingExtraError(
            f"this command needs {package}, which is not installed; "
            f"run: pip install 'optpipe[{extra}]'"
        ) from None


@contextmanager
def interruptible() -> Iterator[Event]:
    """Let a first Ctrl-C ask for the best so far, and a second one end the program."""
    stop = Event()

    def ask(_number: int, _frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
