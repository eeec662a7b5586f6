"""``optpipe plan``: cut, placement and schedule of a model, searched together."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from optpipe.cli import console as cli
from optpipe.cli.estimate import read_config
from optpipe.cli.options import RequestBuilder, flags_of, takes
from optpipe.cli.tracing import read_trace, trace_model
from optpipe.errors import InputError
from optpipe.formats.json import dump_problem, load_model
from optpipe.requests import CHOSEN_BY_PLAN, EstimateAndPlan, PlanOptions
from optpipe.units import format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from optpipe.model import Model
    from optpipe_solver.plan import PlanResult, PlanRow

__all__ = ["plan"]


_SHOWN_ROWS, _SHOWN_DEVICES, _DRAWN_LAYERS = 12, 64, 48

ModelFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Model file (optpipe/model/v1, JSON); - is standard input. Without one, --model, "
        "--config or --trace says what is planned.",
    ),
]
ProblemOut = Annotated[
    Path | None,
    typer.Option("--problem-out", metavar="FILE", help="Write the problem of the cut."),
]


@takes(
    EstimateAndPlan,
    # The search chooses the cut, and a model's layers are of whole, equal micro-batches.
    without=["name", "values", *CHOSEN_BY_PLAN],
    defaults={"time_limit_s": 60.0, "threads": 2},
    readers={"config": read_config, "trace": read_trace},
)
def plan(
    builder: RequestBuilder[EstimateAndPlan],
    model_file: ModelFile = None,
    output: cli.Output = None,
    problem_out: ProblemOut = None,
    as_json: cli.AsJson = False,
) -> None:
    """Cut a model into stages, place them, and schedule them.

    Cut, placement and schedule are searched together. The plan is never worse than the best for an
    even cut in the order of the devices. Ctrl-C stops and keeps the best. The schedule belongs to
    the problem that --problem-out writes. Exit codes are those of `optpipe solve`.

    \b
    Examples:
      optpipe plan model.json
      optpipe plan model.json -o schedule.json --problem-out problem.json
      optpipe plan model.json --chunks 1,2 --placements linear,v --time-limit 120
      optpipe plan --config config.json --gpu h100:64 --pp 8 --microbatches 64
    """
    began_s = time.monotonic()
    cli.check_schedule_name(output)
    cli.check_outputs(output, problem_out, inputs=[model_file, *builder.files])
    model, options = _read_model(builder, model_file)
    with cli.needs_extra("solver"), cli.searching("planning") as search:
        from optpipe_solver.plan import plan as plan_model

        tried = options.model_dump(include={"chunks", "placements"}, exclude_none=True)
        result = plan_model(
            model,
            time_limit_s=cli.remaining_s(options.time_limit_s, began_s),
            work_limit=options.work_limit,
            threads=options.threads,
            seed=options.seed,
            **tried,
            **search,
        )
    if result.problem is not None and problem_out is not None:
        cli.write_output(problem_out, dump_problem(result.problem), "problem")
    if result.schedule is not None and output is not None:
        cli.write_schedule(result.schedule, output, "schedule")
    if as_json:
        cli.print_json(result.as_json())
    elif result.schedule is not None:
        _show(cli.result_console(output), model, result)
    if result.schedule is None:
        raise cli.nothing_found(result.status, result.message)


def _read_model(
    builder: RequestBuilder[EstimateAndPlan], path: Path | None
) -> tuple[Model, PlanOptions]:
    """Return the model of a file, or the estimated one. Raises `InputError`."""
    others = builder.values.keys() - {"options"}
    if path is None and not others:
        raise InputError(
            "MODEL is missing: give a model file, or --model, --config or --trace with --gpu"
        )
    if path is None:
        request = trace_model(builder.build())
        return request.estimate().model, request.options
    if others:
        flag = flags_of(EstimateAndPlan)(min(others), None)
        raise InputError(
            f"{path} and {flag}: a model file has the durations and bytes of its layers; leave "
            "one of them out"
        )
    given = builder.values.get("options", {})
    options = RequestBuilder(PlanOptions, given, []).build()
    with cli.name_file(path):
        return load_model(cli.read_input(path)), options


def _show(console: Console, model: Model, result: PlanResult) -> None:
    chosen = result.chosen
    if chosen is None or result.schedule is None:
        return
    rows = result.rows[:_SHOWN_ROWS]
    shown = rows if result.even in rows else (*rows, result.even)
    console.print(_candidate_table(result, shown))
    others = Counter(row.fate.value for row in result.rows if row not in shown)
    if others:
        parts = "; ".join(f"{number} {fate}" for fate, number in sorted(others.items()))
        console.print(f"and {others.total()} more cuts: {parts}", style="dim", markup=False)
    console.print()
    console.print(_cut_table(model, chosen))
    console.print()
    console.print(_summary(result, result.schedule.objective, chosen))
    console.print(f"the bound holds for {result.searched}", style="dim", markup=False)


def _candidate_table(result: PlanResult, shown: Sequence[PlanRow]) -> Table:
    texts = ("placement", "layers per stage")
    table = cli.text_table("bound\nms", "quick\nms", "best\nms", texts=texts)
    table.add_column("outcome")
    for row in shown:
        label = f"{row.label} (even)" if row.is_even else row.label
        sizes = " ".join(map(str, row.sizes))
        times = (_ms(value) for value in (row.bound_ms, row.quick_ms, row.final_ms))
        style = "bold" if row is result.chosen else ""
        table.add_row(label, sizes, *times, row.fate.value, style=style)
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else format_ms(value)


def _cut_table(model: Model, chosen: PlanRow) -> Table:
    """Return a row per device with the layers it holds, in model order."""
    owners = [
        (stage, device)
        for stage, (device, size) in enumerate(zip(chosen.placement, chosen.sizes, strict=True))
        for _ in range(size)
    ]
    step = -(-len(owners) // _DRAWN_LAYERS)
    layers = "layers" if step == 1 else f"layers, {step} to a block"
    table = cli.text_table(texts=("device",))
    table.add_column(layers, no_wrap=True)
    table.add_column("stages: layers")
    for index, device in enumerate(model.devices[:_SHOWN_DEVICES]):
        bar = "".join(
            "█" if any(owner == index for _, owner in owners[at : at + step]) else "·"
            for at in range(0, len(owners), step)
        )
        stage_sizes = ", ".join(
            f"{stage}: {chosen.sizes[stage]}"
            for stage, owner in enumerate(chosen.placement)
            if owner == index
        )
        kind = f" {device.type}" if device.type is not None else ""
        table.add_row(escape(f"{device.name}{kind}"), bar, stage_sizes or "none")
    return table


def _summary(result: PlanResult, objective: str, chosen: PlanRow) -> Table:
    table = cli.text_table("", texts=("",))
    table.show_header = False
    table.add_column("")
    even, gain = result.even, escape(result.even.note)
    if even.final_ms and chosen.final_ms is not None:
        gain = f"the plan is {format_share(1 - chosen.final_ms / even.final_ms)} shorter"
    even_text = "does not fit" if even.final_ms is None else f"{_ms(even.final_ms)} ms"
    table.add_row(objective, f"{_ms(chosen.final_ms)} ms", f"by {chosen.method}")
    table.add_row("even linear cut", even_text, gain)
    table.add_row(
        "bound of the set", f"{_ms(result.bound_ms)} ms", f"gap {cli.gap_text(result.gap)}"
    )
    return table
