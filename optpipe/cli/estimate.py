"""``optpipe estimate``: a problem from the names of a model and an accelerator, unmeasured."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.answers import EstimateView
from optpipe.cli import console as cli
from optpipe.cli.options import RequestBuilder, flags_of, takes
from optpipe.cli.tracing import read_trace, trace_model
from optpipe.errors import InputError
from optpipe.formats.exports import megatron_layout
from optpipe.formats.json import dump_model, dump_problem, parse_json, read_text
from optpipe.planning import GPUS, MODELS, total_parameters
from optpipe.problem import placement_of
from optpipe.requests import EstimateRequest
from optpipe.simulate import link_loads
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table

    from optpipe.planning import Estimate, StepEstimate
    from optpipe.problem import Problem

__all__ = ["estimate_problem", "read_config"]


_MIN_WIDTH = 130
_MIN_SHARE = 0.005
_SHOWN_STAGES = 64


def read_config(path: str) -> dict[str, Any]:
    """Return the request's fields of a Hugging Face config.json.

    The model is named after the file, or after the folder of a config.json. Raises `InputError` if
    the file is no JSON object.
    """
    file = Path(path)
    name = file.absolute().parent.name if file.name == "config.json" else file.stem
    with cli.name_file(file):
        config = parse_json(read_text(file), takes_constants=True)
    if not isinstance(config, dict):
        raise InputError(f"{path}: config: must be a JSON object; give a model's config.json")
    return {"config": config, "name": name[:80]}


def _read_lengths(path: str) -> dict[str, Any]:
    """Return the request's fields of a file with a length, or lengths, for each micro-batch."""
    with cli.name_file(Path(path)):
        found = parse_json(read_text(Path(path)))
    listed = found if isinstance(found, list) else []
    batches = [one if isinstance(one, list) else [one] for one in listed]
    if not batches or not all(type(n) is int for one in batches for n in one):
        raise InputError(
            f"{path}: must be a list with an entry for each micro-batch: its length in tokens, or "
            "a list of lengths, e.g. [8192, [6000, 2000]]; correct it"
        )
    return {"lengths": batches}


@takes(
    EstimateRequest,
    without=["name", "values"],
    readers={"config": read_config, "trace": read_trace, "lengths": _read_lengths},
)
def estimate_problem(
    builder: RequestBuilder[EstimateRequest],
    output: Annotated[
        Path | None, cli.output_option("Write the problem here; - is standard output.")
    ] = None,
    model_json: Annotated[
        bool,
        typer.Option("--model-json", help="Write the uncut layers for optpipe plan instead."),
    ] = False,
    as_json: cli.AsJson = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="Print every model and accelerator, with sources.")
    ] = False,
) -> None:
    """Estimate a problem from a model and an accelerator.

    Durations, bytes and bandwidths are computed from sizes and data sheets, by formulas with
    sources; nothing is measured. A config.json without a formula is traced: the code of its layers
    in transformers runs on tensors without data. The cut makes the slowest stage as fast as
    possible, including embedding and head.

    \b
    Examples:
      optpipe estimate --model llama3-70b --gpu h100 --pp 8 --tp 8 \\
          --sequence 8192 --microbatches 64 -o problem.json
      optpipe estimate --model llama3-8b --gpu h100 -o - | optpipe solve - --plot picture.svg
      optpipe estimate --config config.json --gpu a100 --pp 4 -o problem.json
      optpipe estimate --config config.json --from trace --gpu h100:64 --pp 8 --zero 3
      optpipe estimate --model qwen3-235b-a22b --gpu h100:256 --tp 2 --pp 8 --chunks 4 --ep 32 \\
          --precision fp8 --ep-overlap --layout even --microbatches 128
      optpipe estimate --model llama3-70b --gpu h100:32 --gpu a100:32 --tp 8 --pp 8
      optpipe estimate --model llama3-8b --gpu h100:8 --pp 1 --zero 3 --measured-step-s 9.1
      optpipe estimate --model llama3-8b --gpu h100 --pp 8 --lengths batch.json -o problem.json
      optpipe estimate --model llama3-70b --gpu h100:8 --tp 2 --pp 4 --lora-rank 16
      optpipe estimate --model llama3-8b --gpu h100 --model-json -o model.json
      optpipe estimate --list
    """
    if list_all:
        _show_catalogue(cli.stdout())
        return
    cli.check_outputs(output, inputs=builder.files)
    request = builder.build()
    if model_json and (request.slices > 1 or request.lengths):
        name = "--lengths" if request.lengths else f"--slices {request.slices}"
        raise InputError(
            f"{name} and --model-json: a model's layers are of whole, equal micro-batches; leave "
            "one out"
        )
    request = trace_model(request)
    found = request.estimate()
    if as_json:
        cli.print_json(EstimateView.of(request, found).model_dump(mode="json", by_alias=True))
    else:
        _show(cli.result_console(output), request, found)
    if output is not None and model_json:
        cli.write_output(output, dump_model(found.model), "model")
    elif output is not None:
        cli.write_output(output, dump_problem(found.problem), "problem")


def _show(console: Console, request: EstimateRequest, found: Estimate) -> None:
    console.width = max(console.width, _MIN_WIDTH)
    shape = request.shape
    parameters = total_parameters(shape) / 1e9
    titles = " and ".join(kind.hardware.title for kind in request.gpus)
    console.print(
        f"{shape.name}: {parameters:.2f} billion parameters, on {titles}; compute at "
        f"{format_share(found.mfu)} of peak",
        markup=False,
    )
    if request.model is None:
        kind = "a formula" if shape.trace is None else "a trace"
        console.print(f"costs from {kind} ({shape.source})", markup=False, soft_wrap=True)
    if lora := request.lora_settings:
        console.print(f"LoRA: {lora}; all other weights are frozen", markup=False)
    for text in (*_step_lines(found), _spent_line(found.step)):
        console.print(text, markup=False, soft_wrap=True)
    _print_rows(console, _stage_table(found), len(found.sizes), "stages")
    _print_rows(console, _memory_table(found.step), len(found.step.memory), "devices")
    if any(stage.modes for stage in found.problem.stages):
        console.print(_menu_table(found.problem))
    if found.problem.num_costs > 1:
        console.print(_costs_line(found.problem), markup=False, soft_wrap=True)
    if found.problem.pairs:
        console.print(_pairs_line(found.problem), markup=False, soft_wrap=True)
    p = len(found.problem.devices)
    is_loop = found.placement == placement_of("loop", p, len(found.sizes) // p)
    if is_loop and found.costs_from == "formula":  # Megatron-Core has no other layers
        layout = megatron_layout(found.problem)
        console.print(f"Megatron-Core: {layout}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(note.text(flags_of(EstimateRequest)), style="dim", markup=False)
    busy_ms = found.problem.busy_ms
    bound_by = [
        f"{load}, longer than the {busy_ms:,.1f} ms that the busiest device computes: the link "
        "bounds the step; cut or place the model otherwise"
        for load in link_loads(found.problem)
        if load.busy_ms > busy_ms
    ]
    cli.warn("links", bound_by)


def _print_rows(console: Console, table: Table, number: int, kind: str) -> None:
    """Print a table of stages or devices, and how many it leaves out."""
    console.print(table)
    if number > _SHOWN_STAGES:
        console.print(f"and {number - _SHOWN_STAGES} more {kind}")


def _pairs_line(problem: Problem) -> str:
    """Return the number of pairs, and the duration of the pair that hides the most."""
    most = max(problem.pairs, key=lambda pair: pair.hidden_ms)
    stage = problem.stages[most.backward]
    back = stage.fused_backward_ms if most.with_ == "B" else stage.backward_input_ms
    alone = problem.stages[most.forward].forward_ms + back
    return (
        f"pairs: {len(problem.pairs)}; together F of stage {most.forward} and {most.with_} of "
        f"stage {most.backward} take {alone - most.hidden_ms:,.2f} ms instead of {alone:,.2f}"
    )


def _step_lines(found: Estimate) -> Iterator[str]:
    """Yield the duration of a step, and its interval."""
    step, error = found.step, found.error
    interleaved = "interleaved " if len(found.sizes) > len(found.problem.devices) else ""
    yield (
        f"a step with {interleaved}1F1B: {step.step_ms / 1e3:.3f} s, "
        f"{step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU on {step.num_gpus} GPUs, "
        f"model FLOPs at {format_share(step.mfu)} of the bf16 peak"
    )
    if found.byte_factor != 1:
        yield (
            f"calibrated: activations and buffers are {found.byte_factor:.4g} times the formulas', "
            f"with a peak of {step.peak.allocated / 2**30:.2f} GiB; --byte-factor "
            f"{found.byte_factor:.4g} carries that to other configurations"
        )
    if found.factor != 1:
        yield (
            f"calibrated: every time is {found.factor:.4g} times the formulas'; --time-factor "
            f"{found.factor:.4g} carries that to other configurations"
        )
    if error is not None:
        yield f"accuracy: {error.text(step.step_ms)}"
    elif found.factor == 1:
        runs = "no published run of such accelerators was compared"
        if found.costs_from == "trace":
            runs = "too few published runs of such traced models and accelerators were compared"
        yield f"accuracy: not known; {runs}"


def _spent_line(step: StepEstimate) -> str:
    """Return the shares of the slowest rank's step, largest first."""
    parts = {
        **step.spent._asdict(),
        "idle": step.idle_ms,
        "gradient reduction": step.reduction_ms,
        "weight gathering": step.gather_ms,
        "optimizer": step.optimizer_ms,
    }
    shares = sorted(((ms / step.step_ms, name) for name, ms in parts.items()), reverse=True)
    return "of it: " + ", ".join(
        f"{name} {format_share(share)}" for share, name in shares if share >= _MIN_SHARE
    )


def _memory_table(step: StepEstimate) -> Table:
    table = cli.text_table("device", *step.peak._asdict(), "sum")
    for rank, memory in enumerate(step.memory[:_SHOWN_STAGES]):
        cells = (format_bytes(round(value)) for value in (*memory, memory.total))
        table.add_row(f"gpu{rank}", *cells)
    return table


def _stage_table(found: Estimate) -> Table:
    table = cli.text_table("stage", "device", "layers", "F ms", "I ms", "W ms", "activation",
                           "to W", "offloadable", "static", "usable")  # fmt: skip
    for index, stage in enumerate(islice(found.problem.stages, _SHOWN_STAGES)):
        device = found.problem.devices[stage.device]
        times = (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
        offloadable = max(mode.offload_bytes for mode in found.problem.menus[index])
        sizes = (stage.activation_bytes, stage.weight_context_bytes, offloadable,
                 stage.static_bytes, device.usable_bytes)  # fmt: skip
        cells = (*map(format_ms, times), *map(format_bytes, sizes))
        table.add_row(str(index), device.name, str(stage.layers), *cells)
    return table


def _menu_table(problem: Problem) -> Table:
    """Return the menu of the middle stage; others differ by embedding and head."""
    index = len(problem.stages) // 2
    table = cli.text_table("left by F", "offload", "stays", "in backward", "again ms",
                       texts=("stage", "mode"))  # fmt: skip
    for row, mode in enumerate(problem.menus[index]):
        sizes = (mode.forward_bytes, mode.offload_bytes, mode.least_bytes,
                 mode.backward_bytes + mode.inside_bytes)  # fmt: skip
        label, ms = "" if row else str(index), format_ms(mode.recompute_ms)
        table.add_row(label, mode.name, *map(format_bytes, sizes), ms)
    return table


def _show_catalogue(console: Console) -> None:
    console.width = max(console.width, _MIN_WIDTH)
    models = cli.text_table("parameters", "layers", "hidden", texts=("model",))
    models.add_column("source", overflow="fold")
    for shape in MODELS.values():
        parameters = f"{total_parameters(shape) / 1e9:.2f} B"
        sizes = (str(shape.num_layers), str(shape.hidden))
        models.add_row(shape.name, parameters, *sizes, shape.source)
    console.print(models)
    for hardware in GPUS.values():
        console.print(f"\n{hardware.name}: {hardware.title}", style="bold", markup=False)
        facts = cli.text_table("", texts=("",))
        facts.show_header = False
        facts.add_column("", overflow="fold")
        for name, fact in hardware.facts:
            facts.add_row(name, f"{fact.value:,.10g}", fact.source)
        console.print(facts)


def _costs_line(problem: Problem) -> str:
    """Return the number of micro-batches of each cost, and the duration of F, I and W together."""
    many = Counter(problem.cost_of)
    counts = ", ".join(
        f"{many[cost]} of {format_ms(sum(stage.busy_ms for stage in problem.stages_by_cost[cost]))}"
        for cost in range(problem.num_costs)
    )
    return (
        f"unequal micro-batches: {counts}; the step and the stages above are those of the one in "
        "the middle"
    )
