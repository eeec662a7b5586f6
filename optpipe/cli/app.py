"""The application: every command, and how errors become exit codes."""

from __future__ import annotations

import errno
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import optpipe
from optpipe.cli.compare import compare
from optpipe.cli.console import BAD_INPUT, FAILURE, INFEASIBLE, print_error
from optpipe.cli.estimate import estimate_problem
from optpipe.cli.explain import diff, explain
from optpipe.cli.plan import plan
from optpipe.cli.plot import export, plot
from optpipe.cli.profile import import_measurements, profile
from optpipe.cli.service import GROUPS, fetch, serve, submit
from optpipe.cli.solve import bound, check, solve
from optpipe.cli.sweep import sweep
from optpipe.cli.tune import tune
from optpipe.errors import InfeasibleProblemError, InputError, OptPipeError
from optpipe.requests import ALIASES, FixedDegrees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["make_app", "run"]


_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Estimate": {
        "tune": tune,
        "estimate": estimate_problem,
        "profile": profile,
        "import": import_measurements,
    },
    "Solve": {"solve": solve, "plan": plan, "sweep": sweep, "compare": compare, "bound": bound},
    "Inspect": {"explain": explain, "diff": diff, "plot": plot, "check": check},
    "Export": {"export": export},
    "Serve": {"serve": serve, "submit": submit, "fetch": fetch},
}


class _ByTopic(TyperGroup):
    """A group whose help lists the commands under headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        longest = max(map(len, self.commands))
        for name in self.list_commands(ctx):
            command = self.commands[name]
            line = (name.ljust(longest), command.get_short_help_str(formatter.width))
            heading = str(getattr(command, "rich_help_panel", None) or "Serve")
            sections.setdefault(heading, []).append(line)
        for heading, lines in sections.items():
            with formatter.section(heading):
                formatter.write_dl(lines)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; add an example to the error of a command without arguments."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            if example := ctx.meta.get(_EXAMPLE):
                error.args = (f"{error}\nfor example: {example}",)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; one with ``--fix`` takes ``--tp 4`` for ``--fix tp=4``."""
        name, command, rest = super().resolve_command(ctx, args)
        known = _flags(command)
        if not rest:
            ctx.meta[_EXAMPLE] = _first_example(getattr(command, "help", None) or "")
        if "--fix" in known:
            rest = list(_with_fixed(rest, known))
        elif "--microbatches" in known and any(one.split("=")[0] == "--gbs" for one in rest):
            raise InputError(
                f"--gbs: {name} takes the micro-batches of one pipeline; give --microbatches, the "
                "global batch divided by micro-batch and data-parallel replicas"
            )
        return name, command, rest


class _OfService(TyperGroup):
    """A group of commands that have the same options, such as ``--url``; the group has none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option that belongs after the command."""
        flag = args[0].partition("=")[0] if args else ""
        if takers := [name for name, one in self.commands.items() if flag in _flags(one)]:
            raise InputError(
                f"{flag}: is an option of {', '.join(takers)}; give it after the command: optpipe "
                f"{self.name} {takers[0]} {flag} ..."
            )
        return super().parse_args(ctx, args)


_EXAMPLE = "optpipe.example"


def _flags(command: Any) -> set[str]:
    return {flag for one in command.params for flag in one.opts}


def _first_example(help_text: str) -> str:
    """Return the first example of a command's help, in one line; empty without one."""
    example = help_text.partition("Examples:\n")[2].replace("\\\n", " ").partition("\n")[0]
    return " ".join(example.split())


def _with_fixed(arguments: list[str], known: set[str]) -> Iterator[str]:
    """Yield the arguments, with a degree that is no option as a value of ``--fix``."""
    degrees = {f"--{name.replace('_', '-')}": name for name in FixedDegrees.model_fields}
    degrees |= {f"--{alias}": name for alias, name in ALIASES.items() if name in degrees.values()}
    left = iter(arguments)
    for one in left:
        flag, equals, value = one.partition("=")
        if flag in degrees and flag not in known:
            yield "--fix"
            yield f"{degrees[flag]}={value if equals else next(left, '')}"
        else:
            yield one


def make_app() -> typer.Typer:
    """Return the command line application."""
    app = typer.Typer(
        name="optpipe",
        cls=_ByTopic,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_optpipe)
    for heading, commands in _COMMANDS.items():
        for name, command in commands.items():
            app.command(name, rich_help_panel=heading)(command)
    for name, (about, commands) in GROUPS.items():
        group = typer.Typer(
            name=name, cls=_OfService, no_args_is_help=True, rich_markup_mode=None, help=about
        )
        for word, command in commands.items():
            group.command(word)(command)
        app.add_typer(group)
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"optpipe {optpipe.__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
]


def _optpipe(version: Version = False) -> None:
    """Pipeline-parallel schedules with activation offloading, chosen by optimisation.

    \b
    A first look:
      optpipe tune --model llama3-8b --gpu h100 --gpus 8 --sequence 8192
      optpipe solve examples/problems/llama3-8b-h100-pp4.json -o schedule.json
      optpipe plot  examples/problems/llama3-8b-h100-pp4.json schedule.json -o schedule.svg

    \b
    Exit codes: 0 done; 1 a failure outside the input, such as a missing package or an
    unreachable service; 2 bad input; 3 proven infeasible; 4 no schedule found, and none
    proven impossible; 130 ended by Ctrl-C. After Ctrl-C, solve, plan and tune print the
    answer that they have, and exit with 0.
    """


_WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}


@cache
def _program() -> Any:
    """Return the parsed application; cached because tests call `run` often."""
    return get_command(make_app())


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; an `OptPipeError` is printed without a stack trace.

    Without ``arguments`` it is its own process and exits without waiting for threads of a solve.
    """
    try:
        _run(arguments)
    except SystemExit as leave:
        # A solve may leave threads, which can take long to reach their next check.
        solves = [thread for thread in threading.enumerate() if thread.name.startswith("solve-")]
        if arguments is None and isinstance(leave.code, int) and solves:
            with suppress(OSError):
                sys.stderr.flush()
            os._exit(leave.code)
        raise


def _run(arguments: Sequence[str] | None) -> None:
    try:
        try:
            _program()(args=arguments, prog_name="optpipe")
        except OptPipeError as error:
            print_error(error)
            if isinstance(error, InfeasibleProblemError):
                sys.exit(INFEASIBLE)
            sys.exit(BAD_INPUT if isinstance(error, InputError) else FAILURE)
        finally:
            # Printed text may still be in a buffer, and a full disk must be reported here.
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        # An error that names a file is not one of the standard output.
        if error.errno not in _WRITE_ERRORS or error.filename is not None:
            raise
        # Python flushes again at its end, and would print a stack trace.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # a closed pipe (| head) is no fault
            reason = f"cannot write the output: {error.strerror}"
            print_error(InputError(f"{reason}; make space, or write to another place"))
        sys.exit(FAILURE)
