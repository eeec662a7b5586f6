"""What all commands share: consoles, exit codes, Ctrl-C, and extras that may be missing."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

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
# Unicode has pictures of the first and of DEL; of the others there are none.
_SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}

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
    """On a terminal, shows control characters instead of obeying them: names may be anybody's.

    Files and pipes get what is: JSON stays the JSON it was.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as text; here, so that tables know how wide it will be."""
        return super().render_str(self._shown(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Give the pieces of anything that is printed; not those that rich itself commands."""
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else self._shown(segment.text)
            yield Segment(shown, segment.style, segment.control)

    def _shown(self, text: str) -> str:
        return text.translate(_SHOWN) if self.is_terminal else text


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
