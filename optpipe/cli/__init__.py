"""The command line: the outermost layer, which composes everything and imports it lazily.

``optpipe --help`` is the reference. Exit codes: 0 done, 1 the world is not as needed (an extra is
missing, nobody answers), 2 bad input, 3 proven infeasible, 4 nothing found and nothing proven,
130 ended by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from optpipe.cli.compare import compare
from optpipe.cli.console import BAD_INPUT, INFEASIBLE, WORLD, print_error
from optpipe.cli.estimate import estimate_problem
from optpipe.cli.explain import diff, explain
from optpipe.cli.plan import plan
from optpipe.cli.plot import export, plot
from optpipe.cli.profile import import_measurements, profile
from optpipe.cli.service import fetch, make_jobs_app, make_keys_app, serve, submit
from optpipe.cli.solve import bound, check, solve
from optpipe.cli.sweep import sweep
from optpipe.cli.tune import tune
from optpipe.errors import InfeasibleProblemError, InputError, OptPipeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main", "make_app"]


_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Ask": {
        "tune": tune,
        "estimate": estimate_problem,
        "profile": profile,
        "import": import_measurements,
    },
    "Solve": {"solve": solve, "plan": plan, "sweep": sweep, "compare": compare, "bound": bound},
    "Look": {"explain": explain, "diff": diff, "plot": plot, "check": check},
    "Run": {"export": export},
    "Serve": {"serve": serve, "submit": submit, "fetch": fetch},
}
_GROUPS_UNDER = "Serve"


class _ByTopic(TyperGroup):
    """Help with commands under headings, in the order in which they are added."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section per heading."""
        headings: dict[str, list[tuple[str, str]]] = {}
        longest = max(map(len, self.commands))
        for name in self.list_commands(ctx):
            command = self.commands[name]
            heading = getattr(command, "rich_help_panel", None) or _GROUPS_UNDER
            line = (name.ljust(longest), command.get_short_help_str(formatter.width))
            headings.setdefault(str(heading), []).append(line)
        for heading, lines in headings.items():
            with formatter.section(heading):
                formatter.write_dl(lines)


def make_app() -> typer.Typer:
    """Return the command line application."""
    app = typer.Typer(
        name="optpipe",
        cls=_ByTopic,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_about)
    for heading, commands in _COMMANDS.items():
        for name, command in commands.items():
            app.command(name, rich_help_panel=heading)(command)
    for group in (make_jobs_app(), make_keys_app()):
        app.add_typer(group, rich_help_panel=_GROUPS_UNDER)
    return app


@cache
def _program() -> Any:
    """Return what parses a command line: made once, for who calls `main` often."""
    return get_command(make_app())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code; no OptPipeError shows a stack trace.

    As a process of its own (no ``arguments``) it does not wait for what a solve has left behind.
    """
    try:
        try:
            _program()(args=arguments, prog_name="optpipe")
        except OptPipeError as error:
            print_error(error)
            if isinstance(error, InfeasibleProblemError):
                sys.exit(INFEASIBLE)
            sys.exit(BAD_INPUT if isinstance(error, InputError) else WORLD)
    except SystemExit as leave:
        if arguments is None and isinstance(leave.code, int):
            _leave_at_once(leave.code)
        raise


def _leave_at_once(code: int) -> None:
    """Leave while threads of a solve are on their way to their next look, which can take long."""
    left = [thread for thread in threading.enumerate() if thread.name.startswith("solve-")]
    if left:
        for stream in (sys.stdout, sys.stderr):
            # A closed pipe (| head) is no reason to stay.
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def _about() -> None:
    """Pipeline-parallel schedules with activation offloading, chosen by optimisation.

    \b
    A first look:
      optpipe tune --model llama3-8b --gpu h100 --gpus 8 --sequence 8192
      optpipe solve examples/problems/llama3-8b-h100-pp4.json -o schedule.json
      optpipe plot  examples/problems/llama3-8b-h100-pp4.json schedule.json -o schedule.svg
    """
