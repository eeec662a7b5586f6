"""``optpipe tune``: the fastest training configuration, its gain, and a bound over all others."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from optpipe.cli import console as cli
from optpipe.cli.estimate import read_config
from optpipe.cli.options import RequestBuilder, takes
from optpipe.cli.tracing import read_trace, trace_model
from optpipe.errors import InputError
from optpipe.evaluate import evaluate
from optpipe.formats.json import dump_problem
from optpipe.planning import benchmark_script, train_command
from optpipe.planning.configuration import PASTED_FILES, has_pasted_file
from optpipe.planning.frameworks.megatron import check_arguments_have
from optpipe.planning.frameworks.torchtitan import titan_model
from optpipe.requests import ALIASES, CurrentRun, FixedDegrees, TuneRequest
from optpipe.schedule import Provenance
from optpipe.units import format_ms

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.console import Console
    from rich.table import Table

    from optpipe.planning import ModelShape
    from optpipe_solver.tune import TuneResult, TuneRow

__all__ = ["tune"]

_GIB = 2.0**30
_SHOWN_ROWS = 11
_NUM_MEASURED = 3
_MIN_WIDTH = 140
_LEAST_GAIN = 0.001
"""Share of the step time; switches that change less are in the JSON only."""
_YAML = {".yaml", ".yml"}
_LISTS = ("recompute", "layers")
_DEGREES = tuple(name for name in CurrentRun.model_fields if name not in _LISTS)


# --- Readers of --gpus, --current and --fix.


def _read_gpus(text: str) -> dict[str, Any]:
    """Return the request's field of ``--gpus``: a number, several numbers, or ``auto``."""
    if text.strip() == "auto":
        return {"gpu_counts": "auto"}
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InputError(f"--gpus {text}: must be numbers with commas between, or auto; correct it")
    numbers = list(map(int, parts))
    return {"num_gpus": numbers[0]} if len(numbers) == 1 else {"gpu_counts": numbers}


def _read_current(text: str) -> dict[str, Any]:
    """Return the request's fields of ``--current``.

    The text names a file of Megatron or torchtitan, or has degrees such as ``tp=4,pp=8``. Lists are
    written ``recompute=a+b`` (modules) and ``layers=10+11`` (of each stage).
    """
    if not text.strip():
        raise InputError(
            "--current '': must be NAME=NUMBER,... or a file; give one, or leave it out"
        )
    path = Path(text)
    if "=" not in text and text != "-" and not os.path.exists(text):  # noqa: PTH110 - False for a long text
        raise InputError(
            f"--current {text}: is no file here, and no NAME=NUMBER,... such as tp=4,pp=8; "
            "correct it"
        )
    if "=" not in text or path.is_file():
        is_torchtitan = path.suffix in {".py", ".toml"}
        form = {"current_format": "torchtitan"} if is_torchtitan else {}
        return {"current_file": cli.read_input(path), **form}
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
    run: dict[str, Any] = {**lists, **_parse_degrees("--current", degrees, _DEGREES)}
    if layers:
        run["layers"] = list(map(int, layers))
    return {"current": run}


def _read_fixed(texts: list[str]) -> dict[str, Any]:
    parts = [part for text in texts for part in text.split(",")]
    return {"fixed": _parse_degrees("--fix", parts, FixedDegrees.model_fields)}


def _parse_degrees(option: str, parts: list[str], names: Collection[str]) -> dict[str, int]:
    """Return name -> number of parts such as ``tp=4``. Raises `InputError`."""
    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, parts)):
        name, _, number = part.partition("=")
        name = name.strip().replace("-", "_")
        name = ALIASES.get(name, name)
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
    without=[
        *("name", "gpu_counts", "current_file", "current_format", "options.cache"),
        *("tags", "priority"),
    ],
    defaults={"time_limit_s": 120.0},
    readers={
        "config": read_config,
        "trace": read_trace,
        "num_gpus": _read_gpus,
        "current": _read_current,
        "fixed": _read_fixed,
    },
)
def tune(
    builder: RequestBuilder[TuneRequest],
    output: cli.Output = None,
    problem_out: Annotated[
        Path | None,
        typer.Option(
            "--problem-out", metavar="FILE", help="Write the best configuration's problem."
        ),
    ] = None,
    paste: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the configuration for the framework: Megatron arguments or .yaml, "
            "torchtitan .py.",
        ),
    ] = None,
    paste_benchmark: Annotated[
        Path | None,
        typer.Option(
            "--paste-benchmark",
            metavar="FILE",
            help="Write a bash script that measures the three fastest configurations in "
            "Megatron-LM.",
        ),
    ] = None,
    as_json: cli.AsJson = False,
) -> None:
    """Find the fastest configuration of a training run.

    Degrees of parallelism, micro-batch, stages, cut, recomputation and schedule are searched
    together, on estimated durations. Each configuration has a bound over all its cuts and
    schedules. After the search, the bounds limit how much faster any configuration can be. A
    degree is fixed by `--fix tp=4`, or in short `--tp 4`.

    \b
    Examples:
      optpipe tune --model llama3-8b --gpu h100 --gpus 8 --sequence 8192
      optpipe tune --model llama3-70b --gpu h100 --gpus 64 --global-batch 128 --sequence 8192 \\
          --precision fp8 --framework megatron --current tp=4,pp=8,chunks=5,micro_batch=1 \\
          --paste arguments.sh
      optpipe tune --model deepseek-v3 --gpu gb200 --gpus 256 --global-batch 4096 --cuda-graphs \\
          --precision mxfp8 --dispatcher deduplicated --framework megatron
      optpipe tune --config config.json --gpu h100 --gpus 16 --fix tp=2 -o schedule.json \\
          --problem-out problem.json
      optpipe tune --config config.json --from trace --gpu h100 --gpus 64 --framework huggingface
    """
    began_s = time.monotonic()
    cli.check_schedule_name(output)
    cli.check_outputs(output, problem_out, paste, paste_benchmark, inputs=builder.files)
    request = trace_model(builder.build())
    options, framework = request.options, request.framework
    with cli.needs_extra("solver"):
        from optpipe_solver.tune import read_question, tune_counts
        from optpipe_solver.tune import tune as search

        _check_pastable(request.complete().shape, request, paste, paste_benchmark)
        read = read_question(request)
        with cli.searching("tuning") as controls:
            limits: dict[str, Any] = {
                "time_limit_s": cli.remaining_s(options.time_limit_s, began_s),
                "work_limit": options.work_limit,
                "gap": options.gap,
                "threads": options.threads,
                "seed": options.seed,
                "on_progress": lambda text: cli.stderr().print(text, markup=False),
                "should_stop": controls["should_stop"],
            }
            if read.gpu_counts:
                counts, is_auto = read.gpu_counts, read.is_auto
                result = tune_counts(read.question, counts, search, from_first=is_auto, **limits)
            else:
                result = search(read.question, current=read.current, **limits)
    best = result.best
    if best is None:
        if as_json:
            cli.print_json(result.as_json())
        raise _why_nothing(result)
    try:
        # Before the report: a closed pipe (| head) must not cost the files.
        if problem_out is not None:
            cli.write_output(problem_out, dump_problem(best.problem), "problem")
        if output is not None:
            schedule = evaluate(best.problem, best.programs, Provenance(method=best.method))
            cli.write_schedule(schedule, output, "schedule")
        if paste is not None:
            cli.write_output(paste, _paste(best, framework, paste), "configuration")
        if paste_benchmark is not None:
            script = _benchmark_script(result, request)
            cli.write_output(paste_benchmark, script, "benchmark script")
    finally:
        # A file that cannot be written must not cost the report.
        if as_json:
            cli.print_json(result.as_json())
        else:
            _show(cli.result_console(output), result, options.time_limit_s or 0.0, paste)


def _why_nothing(result: TuneResult) -> Exception:
    """Return the error of a search without a schedule that fits."""
    from optpipe_solver.tune import shortage

    if result.scaling:
        return cli.nothing_found("infeasible", result.verdict)
    if result.counts.do_not_fit == result.counts.total:
        reason = f"nothing fits: {result.certificate}; {shortage(result.question)}"
        return cli.nothing_found("infeasible", reason)
    reason = f"no schedule was found that fits: {result.certificate}"
    return cli.nothing_found("unknown", reason)


# --- The report.


def _show(console: Console, result: TuneResult, limit_s: float, paste: Path | None) -> None:
    console.width = max(console.width, _MIN_WIDTH)
    console.print(_headline(result), markup=False)
    if result.changes:
        console.print(f"Change {', '.join(result.changes)}.", markup=False)
    for sentence in result.notes:
        console.print(f"{sentence[0].upper()}{sentence[1:]}.", markup=False)
    console.print()
    if result.scaling:
        console.print(_scaling(result))
        console.print()
    console.print(_rows(result))
    if len(result.rows[:_SHOWN_ROWS]) > result.counts.solved:
        console.print(_comparison(result.counts.solved), markup=False)
    console.print()
    console.print(_pareto(result))
    _print_switches(console, result)
    console.print()
    console.print(f"{result.certificate} ({_end(result, limit_s)}).", markup=False)
    console.print()
    _print_command(console, result, paste)


def _comparison(num_solved: int) -> str:
    """Return a sentence about rows of configurations that were not solved."""
    solved = "1 was" if num_solved == 1 else f"{num_solved:,} were"
    return (
        f"Rows of configurations that were not solved ({solved}) are simulated with the "
        "framework's best published schedule, for comparison."
    )


_ENDS = {
    "time_limit": ", the time limit ended it",
    "work_limit": ", the work limit ended it",
    "cancelled": ", cancelled",
}
_LATE_S = 2.0


def _end(result: TuneResult, limit_s: float) -> str:
    """Return the seconds of the search, what ended it, and why it ended after its time limit."""
    said = f"{result.seconds:.0f} s{_ENDS.get(result.stopped_by or '', '')}"
    if result.stopped_by != "time_limit" or result.seconds <= limit_s + _LATE_S:
        return said
    if result.first_s > limit_s / 2:
        return f"{said}; bounds and first schedules took {result.first_s:.0f} s"
    return f"{said}; the last simulations took longer"


def _headline(result: TuneResult) -> str:
    """Return the gain, or why there is none, and the error of such estimates."""
    best, error, verdict = result.best, result.error, result.verdict
    band = ""
    if error is None:
        band = " Estimates of this kind were compared with too few published runs, or none."
    elif best is not None:
        band = f" Step of the best: {error.text(best.step_ms)}."
    return f"{verdict[0].upper()}{verdict[1:]}.{band}"


def _rows(result: TuneResult) -> Table:
    """Return a table of the current configuration, the best one, and the next ones."""
    price = result.question.price_per_gpu_hour
    costs = [] if price is None else ["cost/M tokens"]
    numbers = ("step ms", "gain", "tokens/s/GPU", *costs, "TFLOP/s/GPU", "bf16 MFU", "GiB")
    table = cli.text_table(*numbers, texts=("configuration",))
    table.add_column("schedule")
    shown = list(result.rows[:_SHOWN_ROWS])
    if result.current is not None:
        shown = [result.current, *(row for row in shown if row is not result.current)]
    for row in shown:
        is_current = row is result.current
        gain = ""
        if result.current is not None and result.gain is not None and not is_current:
            gain = f"{1 - row.step_ms / result.current.step_ms:+.1%}"
        label = f"today: {row.label}" if is_current else row.label
        style = "bold" if row is result.best else ""
        cost = [] if price is None else [f"{row.cost_per_million_tokens(price):.4g}"]
        table.add_row(
            label, format_ms(row.step_ms), gain, f"{row.tokens_per_s_per_gpu:,.0f}", *cost,
            f"{row.tflops_per_gpu:,.0f}", f"{row.mfu:.1%}",
            f"{max(row.peak_bytes) / _GIB:.1f}", escape(row.method), style=style,
        )  # fmt: skip
    return table


def _scaling(result: TuneResult) -> Table:
    """Return a table of the fastest configuration on each number of GPUs."""
    has_price = result.question.price_per_gpu_hour is not None
    costs = ["cost/M tokens"] if has_price else []
    numbers = ("GPUs", "step ms", "gap", "tokens/s/GPU", "M tokens/GPU-hour", *costs)
    table = cli.text_table(*numbers, texts=())
    table.title = "numbers of GPUs (estimated, the fastest configuration found on each)"
    table.title_justify = "left"
    table.add_column("configuration")
    for row in result.scaling:
        if row.step_ms is None:
            empty = [""] * (len(numbers) - 1)
            table.add_row(str(row.num_gpus), *empty, row.reason)
            continue
        cost = [f"{row.cost_per_million_tokens:.4g}"] if has_price else []
        table.add_row(
            str(row.num_gpus), format_ms(row.step_ms), f"{row.gap:.1%}",
            f"{row.tokens_per_s_per_gpu:,.0f}", f"{(row.tokens_per_gpu_hour or 0) / 1e6:.3g}",
            *cost, row.label, style="bold" if row.label == result.rows[0].label else "",
        )  # fmt: skip
    return table


def _pareto(result: TuneResult) -> Table:
    """Return a table of the fastest configurations for less memory."""
    table = cli.text_table("GiB", "step ms", texts=())
    table.title = "less memory costs time"
    table.title_justify = "left"
    table.add_column("configuration")
    for row in result.pareto:
        gib = f"{max(row.peak_bytes) / _GIB:.1f}"
        table.add_row(gib, format_ms(row.step_ms), row.label)
    return table


def _print_switches(console: Console, result: TuneResult) -> None:
    """Print the gain of each switch that the search left off, if it changes the step time."""
    titles = {"best": "the fastest configuration", "current": "today's configuration"}
    printed: list[list[str]] = []
    for row, title in titles.items():
        of_row = [one for one in result.switches if one.row == row]
        lines = [str(one) for one in of_row if abs(one.gain) >= _LEAST_GAIN]
        if not lines or lines in printed:
            continue
        printed.append(lines)
        console.print()
        console.print(
            f"Switches that are off, each alone in {title} (simulated; run tune with the option "
            "to search the other settings too):"
        )
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _print_command(console: Console, result: TuneResult, paste: Path | None) -> None:
    """Print the command that trains with the best configuration, on its own line."""
    framework = result.question.framework
    where = "To train by it, on every host"
    if paste is None and has_pasted_file(result.question.shape, framework):
        where += f" (--paste {PASTED_FILES[framework]} writes what it takes)"
    console.print(f"{where}:", markup=False)
    if result.best is not None:
        file = None if paste is None else str(paste)
        command = train_command(result.best.configuration, framework, file)
        console.print(command, markup=False, highlight=False, soft_wrap=True)


def _benchmark_script(result: TuneResult, request: TuneRequest) -> str:
    """Return the script that measures the fastest rows, and repeats the request's options."""
    rows = result.rows[:_NUM_MEASURED]
    options = {"--framework": "megatron", "--gpus": str(result.question.num_gpus)}
    given = {"--model": request.model, "--network": request.network}
    options |= {flag: value for flag, value in given.items() if value is not None}
    if request.memory_bytes is not None:
        options["--memory-gb"] = f"{request.memory_bytes / 1e9:.10g}"
    options["--headroom"] = f"{request.headroom:g}"
    for name in ("oversubscription", "dispatch"):  # a script of Megatron-LM does not have them
        if name in request.model_fields_set:
            options[f"--{name}"] = str(getattr(request, name))
    if "expert_imbalance" in request.model_fields_set:
        options["--expert-imbalance"] = ",".join(f"{load:g}" for load in request.expert_imbalance)
    words = [word for option in options.items() for word in option]
    for kind in request.gpu.split(","):
        words += ["--gpu", kind]
    times = [row.step_ms for row in rows]
    return benchmark_script([row.configuration for row in rows], times, words)


def _check_pastable(
    shape: ModelShape, request: TuneRequest, path: Path | None, benchmark: Path | None
) -> None:
    """Refuse, before the search, a file in which no configuration of the model can be written."""
    framework = request.framework
    if benchmark is not None and framework != "megatron":
        raise InputError(
            f"--paste-benchmark with --framework {framework}: the script runs Megatron-LM; "
            "choose --framework megatron"
        )
    if benchmark is not None:
        check_arguments_have(shape)
        if request.lora_rank is not None or request.packed_lengths:
            raise InputError(
                "--paste-benchmark with --lora-rank or --packed-lengths: pretrain_gpt.py of "
                "Megatron-LM has neither adapters nor packed lengths; leave them out"
            )
    if path is None:
        return
    if not has_pasted_file(shape, framework):
        raise InputError(
            "--paste writes for --framework megatron or torchtitan, and for models with a formula; "
            "choose such, or write schedule and problem for the optpipe runtime with -o and "
            "--problem-out"
        )
    if framework == "torchtitan":
        titan_model(shape)
    elif path.suffix not in _YAML:
        check_arguments_have(shape)


def _paste(best: TuneRow, framework: str, path: Path) -> str:
    """Return the configuration as its framework's text; write its schedule to a CSV next to it."""
    from optpipe_solver.tune.document import needs_csv, paste

    if framework == "megatron":
        return paste(best, "yaml" if path.suffix in _YAML else "arguments")
    csv = path.with_suffix(".csv")
    if needs_csv(best):
        cli.write_output(csv, paste(best, "csv"), "schedule")
    return paste(best, "python", csv=csv.name)
