"""``optpipe tune``: which configuration is fastest, how much is won, and what no other can beat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from optpipe.cli.console import (
    AsJson,
    Output,
    check_apart,
    check_schedule_file,
    check_writable,
    needs_extra,
    nothing_found,
    read_input,
    results,
    say_written,
    searching,
    stderr,
    stdout,
    text_table,
    write_file,
    write_schedule,
)
from optpipe.cli.estimate import read_config
from optpipe.cli.options import OptionsOf, takes
from optpipe.errors import InputError
from optpipe.formats.json import dump_problem
from optpipe.presets import train_command
from optpipe.presets.configuration import PASTED_FILES
from optpipe.presets.megatron import check_arguments_have
from optpipe.presets.torchtitan import titan_model
from optpipe.requests import CurrentRun, FixedDegrees, TuneRequest
from optpipe.units import format_ms

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.console import Console
    from rich.table import Table

    from optpipe.presets import Configuration, ModelShape
    from optpipe_solver.tune import TuneResult, TuneRow

__all__ = ["tune"]

_GIB = 2.0**30
_SHOWN_ROWS = 11
_LEAST_WIDTH = 120
_YAML = {".yaml", ".yml"}
_LISTS = ("recompute", "layers")
_DEGREES = tuple(name for name in CurrentRun.model_fields if name not in _LISTS)


# --- Options that are read here: what is run today, and what is fixed.


def _read_current(text: str) -> dict[str, Any]:
    """Return the fields of a request that ``--current`` gives.

    It is a file of Megatron or torchtitan, or degrees such as ``tp=4,pp=8``; ``recompute=a+b``
    names modules, ``layers=10+11`` gives those of each stage.
    """
    if not text.strip():
        raise InputError(
            "--current '': must be NAME=NUMBER,... or a file; give one, or leave it out"
        )
    path = Path(text)
    if "=" not in text or path.is_file():
        is_torchtitan = path.suffix in {".py", ".toml"}
        form = {"current_format": "torchtitan"} if is_torchtitan else {}
        return {"current_file": read_input(path), **form}
    lists: dict[str, list[str]] = {}
    degrees = []
    for part in map(str.strip, text.split(",")):
        name, _, values = part.partition("=")
        if name in _LISTS:
            lists[name] = lists.get(name, []) + [one for one in values.split("+") if one]
        else:
            degrees.append(part)
    layers = lists.get("layers", [])
    if not all(number.isascii() and number.isdigit() for number in layers):
        raise InputError(
            f"--current layers={'+'.join(layers)}: must be numbers with +, one for each stage; "
            "correct it"
        )
    run: dict[str, Any] = _numbers("--current", degrees, _DEGREES)
    if layers:
        run["layers"] = list(map(int, layers))
    return {"current": run | ({"recompute": lists["recompute"]} if "recompute" in lists else {})}


def _read_fixed(texts: list[str]) -> dict[str, Any]:
    parts = [part for text in texts for part in text.split(",")]
    return {"fixed": _numbers("--fix", parts, FixedDegrees.model_fields)}


def _numbers(option: str, parts: list[str], names: Collection[str]) -> dict[str, int]:
    """Return ``tp=4`` and ``pp=8`` as numbers by name."""
    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, parts)):
        name, _, number = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in names or not (number.isascii() and number.strip().isdigit()):
            raise InputError(
                f"{option} {part}: must be NAME=NUMBER with a name of {', '.join(names)}"
                f"{' (or recompute, layers)' if option == '--current' else ''}; correct it"
            )
        if name in found:
            raise InputError(f"{option}: {name} is given twice; give it once")
        found[name] = int(number)
    return found


@takes(
    TuneRequest,
    without=["name", "current_file", "current_format", "cache", "tags", "priority"],
    defaults={"time_limit_s": 120.0},
    readers={"config": read_config, "current": _read_current, "fixed": _read_fixed},
)
def tune(
    given: OptionsOf[TuneRequest],
    output: Output = None,
    problem_out: Annotated[
        Path | None,
        typer.Option("--problem-out", metavar="FILE", help="Write the winner's problem."),
    ] = None,
    paste: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write what the framework takes: arguments, or .yaml; torchtitan: .py.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest configuration of a training run.

    Degrees of parallelism, micro-batch, stages, cut, recomputation and schedule are searched
    together, on estimated times. Each configuration has a bound over all its cuts and schedules:
    what is left when the time is over says how much faster any can be.

    \b
    Examples:
      optpipe tune --model llama3-70b --gpu h100 --gpus 64 --global-batch 128 --sequence 8192 \\
          --precision fp8 --framework megatron --current tp=4,pp=8,chunks=5,micro_batch=1 \\
          --paste arguments.sh
      optpipe tune --model deepseek-v3 --gpu gb200 --gpus 256 --global-batch 4096 --cuda-graphs \\
          --precision mxfp8 --dispatcher deduplicated --framework megatron
      optpipe tune --config config.json --gpu h100 --gpus 16 --fix tp=2 -o schedule.json \\
          --problem-out problem.json
    """
    check_schedule_file(output)
    check_writable(problem_out)
    check_writable(paste)
    check_apart(output, problem_out, paste, inputs=given.files)
    request = given()
    options, framework = request.options, request.framework
    with needs_extra("solver"):
        from optpipe_solver.tune import read_question
        from optpipe_solver.tune import tune as search

        request = request.complete()
        _check_pastable(request.shape, framework, paste)
        read = read_question(request)
        today = read.current
        with searching("tuning") as controls:
            result = search(
                read.question,
                current=today,
                time_limit_s=options.time_limit_s or 0.0,
                work_limit=options.work_limit,
                gap=options.gap,
                threads=options.threads,
                seed=options.seed,
                on_progress=lambda text: stderr().print(text, markup=False),
                should_stop=controls["should_stop"],
            )
    if result.best is None:
        proven = result.counts.do_not_fit == result.counts.total
        state, none = (
            ("infeasible", "nothing") if proven else ("unknown", "no schedule was found that")
        )
        raise nothing_found(state, f"{none} fits: {result.certificate}")
    if as_json:
        stdout().out(json.dumps(result.as_json(), indent=2), highlight=False)
    else:
        _show(results(output), result, today, paste)
    _write(result.best, output, problem_out)
    if paste is not None:
        write_file(paste, _pasted(result.best, framework, paste))
        say_written(paste, "configuration")


# --- What is shown.


def _show(
    console: Console, result: TuneResult, today: Configuration | None, paste: Path | None
) -> None:
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(_headline(result, today), markup=False)
    for sentence in result.notes:
        console.print(f"{sentence[0].upper()}{sentence[1:]}.", markup=False)
    console.print()
    console.print(_rows(result))
    console.print()
    console.print(_pareto(result))
    console.print()
    console.print(f"{result.certificate} ({_ended(result)}).", markup=False)
    console.print()
    _say_command(console, result, paste)


_ENDS = {
    "time_limit": "the time limit ended it",
    "work_limit": "the work limit ended it",
    "cancelled": "cancelled",
}


def _ended(result: TuneResult) -> str:
    """Return the seconds, and what ended the search where that was not its proof."""
    return ", ".join(filter(None, (f"{result.seconds:.0f} s", _ENDS.get(result.stopped_by or ""))))


def _headline(result: TuneResult, today: Configuration | None) -> str:
    """Return the gain, or why there is none, and how far such estimates are off."""
    best, error, said = result.best, result.error, result.verdict
    if result.current is None and best is not None:
        why = "--current says what you would win"
        if today is not None:
            why = "what you run is too large to simulate"
        said = f"{format_ms(best.step_ms)} ms per step; {why}"
    band = (
        "Estimates of this kind were compared with no published run"
        if error is None
        else f"Estimates of this kind are {error.median:.0%} off in the median, at worst "
        f"{error.worst:.0%} ({error.num_rows} published runs)"
    )
    return f"{said[0].upper()}{said[1:]}. {band}."


def _rows(result: TuneResult) -> Table:
    """Return what is run today, the winner, and the next ones."""
    table = text_table(
        "step ms", "gain", "tokens/s/GPU", "bf16 MFU", "GiB", texts=("configuration",)
    )
    table.add_column("schedule")
    shown = list(result.rows[:_SHOWN_ROWS])
    if result.current is not None:
        shown = [result.current, *(row for row in shown if row is not result.current)]
    for row in shown:
        today = row is result.current
        gain = ""
        if result.current is not None and result.gain is not None and not today:
            gain = f"{1 - row.step_ms / result.current.step_ms:+.1%}"
        label = f"today: {row.label}" if today else row.label
        style = "bold" if row is result.best else ""
        table.add_row(
            label, format_ms(row.step_ms), gain, f"{row.tokens_per_s_per_gpu:,.0f}",
            f"{row.mfu:.1%}", f"{max(row.peak_bytes) / _GIB:.1f}", escape(row.method), style=style,
        )  # fmt: skip
    return table


def _pareto(result: TuneResult) -> Table:
    """Return what time less memory costs."""
    table = text_table("GiB", "step ms", texts=())
    table.title = "less memory costs time"
    table.title_justify = "left"
    table.add_column("configuration")
    for row in result.pareto:
        gib = f"{max(row.peak_bytes) / _GIB:.1f}"
        table.add_row(gib, format_ms(row.step_ms), row.label)
    return table


def _say_command(console: Console, result: TuneResult, paste: Path | None) -> None:
    """Say what trains by the best, on lines of its own that can be copied."""
    framework = result.question.framework
    where = "To train by it, on every host"
    if paste is None and framework in PASTED_FILES:
        where += f" (--paste {PASTED_FILES[framework]} writes what it takes)"
    console.print(f"{where}:", markup=False)
    if result.best is not None:
        file = None if paste is None else str(paste)
        command = train_command(result.best.configuration, framework, file)
        console.print(command, markup=False, highlight=False, soft_wrap=True)


def _check_pastable(shape: ModelShape, framework: str, path: Path | None) -> None:
    """Refuse before the search what no configuration of a model could be written as."""
    if path is None:
        return
    if framework == "any":
        raise InputError(
            "--paste writes for --framework megatron or torchtitan; say which, or write what "
            "our runtime takes, by -o and --problem-out"
        )
    if framework == "torchtitan":
        titan_model(shape)
    elif path.suffix not in _YAML:
        check_arguments_have(shape)


def _pasted(best: TuneRow, framework: str, path: Path) -> str:
    """Return the winner as its framework takes it; a schedule of its own goes as a CSV beside."""
    from optpipe_solver.tune.document import needs_csv, paste

    if framework == "megatron":
        return paste(best, "yaml" if path.suffix in _YAML else "arguments")
    csv = path.with_suffix(".csv")
    if needs_csv(best):
        write_file(csv, paste(best, "csv"))
        say_written(csv, "schedule")
    return paste(best, "python", csv=str(csv.absolute()))


def _write(best: TuneRow, output: Path | None, problem_out: Path | None) -> None:
    if problem_out is not None:
        write_file(problem_out, dump_problem(best.problem))
        say_written(problem_out, "problem")
    if output is not None:
        from optpipe.evaluate import evaluate
        from optpipe.schedule import Provenance

        schedule = evaluate(best.problem, best.programs, Provenance(method=best.method))
        write_schedule(schedule, output)
        say_written(output, "schedule")
