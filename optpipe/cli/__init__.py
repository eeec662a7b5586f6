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
from typing import TYPE_CHECKING

import typer

from optpipe.cli.compare import compare
from optpipe.cli.console import BAD_INPUT, INFEASIBLE, WORLD, print_error
from optpipe.cli.estimate import estimate_problem
from optpipe.cli.explain import diff, explain
from optpipe.cli.importing import import_measurements
from optpipe.cli.plan import plan
from optpipe.cli.plot import export, plot
from optpipe.cli.profile import profile
from optpipe.cli.service import fetch, make_jobs_app, make_keys_app, serve, submit
from optpipe.cli.solve import bound, check, solve
from optpipe.cli.sweep import sweep
from optpipe.cli.tune import tune
from optpipe.errors import InfeasibleProblemError, InputError, OptPipeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "make_app"]


_COMMANDS = (tune, solve, check, bound, compare, sweep, plan, plot, explain, diff, profile, serve,
             submit, fetch, export)  # fmt: skip


def make_app() -> typer.Typer:
    """Return the command line application."""
    app = typer.Typer(
        name="optpipe",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_about)
    for command in _COMMANDS:
        app.command()(command)
    app.command("import")(import_measurements)
    app.command("estimate")(estimate_problem)
    app.add_typer(make_jobs_app())
    app.add_typer(make_keys_app())
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code; no OptPipeError shows a stack trace.

    As a process of its own (no ``arguments``) it does not wait for what a solve has left behind.
    """
    try:
        try:
            make_app()(args=arguments, prog_name="optpipe")
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
      optpipe solve examples/problems/llama3-8b-h100-pp4.json -o schedule.json
      optpipe plot  examples/problems/llama3-8b-h100-pp4.json schedule.json -o schedule.svg
    """
