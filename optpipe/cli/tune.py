"""``optpipe tune``: which configuration is fastest, how much is won, and what no other can beat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from optpipe.cli.console import (
    AsJson,
    Output,
    Seed,
    Threads,
    WorkLimit,
    check_apart,
    check_schedule_file,
    check_writable,
    in_file,
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
from optpipe.cli.estimate import (
    ConfigOption,
    CudaGraphs,
    DispatcherOption,
    DispatchOption,
    EpOverlap,
    FlashOption,
    MemoryGb,
    Network,
    Oversubscription,
    PrecisionOption,
    asked_shape,
    memory_of,
    named_as_flags,
)
from optpipe.errors import InputError
from optpipe.formats.json import dump_problem
from optpipe.presets import Configuration, Training, find_gpus, train_command
from optpipe.presets.configuration import PASTED_FILES
from optpipe.presets.megatron import check_arguments_have
from optpipe.presets.torchtitan import titan_model
from optpipe.units import format_ms

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from optpipe.presets.shape import Dispatch, Dispatcher, ModelShape, Precision
    from optpipe_solver.tune import Framework, TuneQuestion, TuneResult, TuneRow

__all__ = ["tune"]

_GIB = 2.0**30
_SHOWN_ROWS = 11
_LEAST_WIDTH = 120
_YAML = {".yaml", ".yml"}
_DEGREES = ("tp", "cp", "pp", "chunks", "ep", "etp", "dp", "micro_batch", "zero")
_FIXABLE = (*_DEGREES, "pairs", "slices")


def tune(
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model of the catalogue: estimate --list.")
    ] = None,
    config: ConfigOption = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:N]",
            help="Accelerator of the catalogue (estimate --list), and how many; several: of each a "
            "part of the pipeline.",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many there are; 8 by default.")
    ] = None,
    global_batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Sequences of a step, over all replicas.")
    ] = 128,
    sequence: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each.")] = 4096,
    framework: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Whose schedules may be answered: megatron, torchtitan, or any (our runtime's).",
        ),
    ] = "any",
    current: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FLAGS",
            help="What you run today: Megatron arguments or YAML, a torchtitan config, or e.g. "
            "tp=4,pp=8,chunks=5,micro_batch=1. The gain is over it.",
        ),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N", help=f"What is not searched; several: {', '.join(_FIXABLE)}."
        ),
    ] = None,
    precision: PrecisionOption = "bf16",
    flash: FlashOption = True,
    cuda_graphs: CudaGraphs = False,
    ep_overlap: EpOverlap = False,
    dispatcher: DispatcherOption = "alltoall",
    dispatch: DispatchOption = "bf16",
    network: Network = None,
    oversubscription: Oversubscription = 1.0,
    memory_gb: MemoryGb = None,
    headroom: Annotated[
        float,
        typer.Option(
            metavar="X", help="Share (0-1) of it that answers leave free: estimates are 5 % off."
        ),
    ] = 0.05,
    measured_step_s: Annotated[
        float | None,
        typer.Option(metavar="S", help="What a step of --current takes: calibrates every time."),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="S", min=0.01, help="Seconds to search.")
    ] = 120.0,
    work_limit: WorkLimit = None,
    threads: Threads = 1,
    seed: Seed = 0,
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
    read = _file_of(current)
    check_apart(output, problem_out, paste, inputs=[config, read])
    with named_as_flags():
        shape = asked_shape(model, config)
        given_gpus = find_gpus(gpu or [], network, oversubscription)
        kinds = tuple((one.hardware, one.number) for one in given_gpus if one.number is not None)
        num_gpus = sum(number for _, number in kinds) or gpus or 8
        if gpus not in {None, num_gpus}:
            raise InputError(f"--gpus {gpus}: but --gpu says {num_gpus}; give one of them")
        common = Training(
            sequence=sequence, precision=cast("Precision", precision), flash=flash,
            cuda_graphs=cuda_graphs, ep_overlap=ep_overlap,
            dispatcher=cast("Dispatcher", dispatcher), dispatch=cast("Dispatch", dispatch),
        )  # fmt: skip
        with needs_extra("solver"):
            from optpipe_solver.tune import TuneQuestion
            from optpipe_solver.tune import tune as search
            from optpipe_solver.tune.document import calibrated

            question = TuneQuestion(
                shape=shape,
                hardware=given_gpus[0].hardware,
                num_gpus=num_gpus,
                kinds=kinds if len(kinds) > 1 else (),
                global_batch=global_batch,
                training=common,
                framework=cast("Framework", framework),
                fixed=_numbers("--fix", ",".join(fix or []), _FIXABLE),
                memory_bytes=memory_of(memory_gb),
                headroom=headroom,
            )
            _check_pastable(shape, framework, paste)
            today = None
            if read is not None:
                today = _read_today(question, read)
            elif current is not None:
                today = _today(question, current)
            if measured_step_s is not None:
                if today is None:
                    raise InputError(
                        "--measured-step-s says what a step of --current takes; give both"
                    )
                question = calibrated(question, today, measured_step_s)
            with searching("tuning") as given:
                result = search(
                    question,
                    current=today,
                    time_limit_s=time_limit,
                    work_limit=work_limit,
                    threads=threads,
                    seed=seed,
                    on_progress=lambda text: stderr().print(text, markup=False),
                    should_stop=given["should_stop"],
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


# --- What is run today.


def _file_of(current: str | None) -> Path | None:
    """Return the file that --current names, if it names one: degrees have ``=``, as paths may."""
    if current is None:
        return None
    if not current.strip():
        raise InputError(
            "--current '': must be NAME=NUMBER,... or a file; give one, or leave it out"
        )
    path = Path(current)
    return path if "=" not in current or path.is_file() else None


def _numbers(option: str, text: str, names: tuple[str, ...] = _DEGREES) -> dict[str, Any]:
    """Return ``tp=4,pp=8`` as numbers by name."""
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, number = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in names or not (number.isascii() and number.strip().isdigit()):
            raise InputError(
                f"{option} {part}: must be NAME=NUMBER with a name of {', '.join(names)}"
                f"{' (or recompute, layers)' if option == '--current' else ''}; correct it"
            )
        if name in found:
            raise InputError(f"{option}: {name} is said twice; give it once")
        found[name] = int(number)
    return found


def _today(question: TuneQuestion, text: str) -> Configuration:
    """Return what is run today, from ``tp=4,pp=8,...``.

    ``recompute=a+b`` names modules, ``layers=10+11`` says those of each stage.
    """
    from optpipe_solver.tune.document import current_configuration

    lists: dict[str, list[str]] = {"recompute": [], "layers": []}
    degrees = []
    for part in map(str.strip, text.split(",")):
        name, _, values = part.partition("=")
        if name in lists:
            lists[name] += filter(None, values.split("+"))
        else:
            degrees.append(part)
    for layers in lists["layers"]:
        if not (layers.isascii() and layers.isdigit()):
            raise InputError(
                f"--current layers={'+'.join(lists['layers'])}: must be numbers with +, one for "
                "each stage; correct it"
            )
    settings = _numbers("--current", ",".join(degrees))
    settings |= {"recompute": lists["recompute"], "layers": list(map(int, lists["layers"]))}
    try:
        return current_configuration(question, settings)
    except InputError as error:
        raise InputError(f"--current {text}: {error}") from None


def _read_today(question: TuneQuestion, path: Path) -> Configuration:
    """Return what is run today, from a file of Megatron or torchtitan."""
    from optpipe_solver.tune.document import read_current

    text = read_input(path)
    is_torchtitan = path.suffix in {".py", ".toml"} or question.framework == "torchtitan"
    try:
        return read_current(question, text, is_torchtitan=is_torchtitan)
    except InputError as error:
        raise in_file(path, error) from None


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
