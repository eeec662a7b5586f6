"""``optpipe estimate``: a problem from a model's name and an accelerator's, nothing measured."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from optpipe.cli.console import (
    check_apart,
    check_writable,
    in_file,
    results,
    say_written,
    stdout,
    text_table,
    warn,
    write_file,
)
from optpipe.errors import InputError
from optpipe.formats.exports import megatron_layout
from optpipe.formats.json import dump_model, dump_problem, parse_json, read_text
from optpipe.presets import (
    GPUS,
    MODELS,
    AskedError,
    Training,
    estimate,
    find_gpus,
    find_model,
    shape_from_config,
    total_parameters,
)
from optpipe.presets.shape import PRECISIONS, RECOMPUTABLE, Field, flag
from optpipe.problem import placement_of
from optpipe.simulate import link_loads
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table

    from optpipe.presets import Estimate, Hardware, ModelShape, StepEstimate
    from optpipe.presets.accelerators import Accelerators
    from optpipe.presets.shape import Dispatch, Dispatcher, Precision
    from optpipe.presets.step import Layout
    from optpipe.problem import Problem

__all__ = ["asked_shape", "estimate_problem", "memory_of", "named_as_flags"]


_LEAST_WIDTH = 130
_LEAST_SHARE = 0.005
_SHOWN_STAGES = 64


def _degree(text: str) -> Any:
    return typer.Option(metavar="N", min=1, help=text)


# --- Options that `optpipe tune` has too.

ConfigOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Instead of --model: a Hugging Face config.json."),
]
PrecisionOption = Annotated[
    str,
    typer.Option(metavar="NAME", help=f"Of the layers' products: {', '.join(PRECISIONS)}."),
]
FlashOption = Annotated[
    bool, typer.Option("--flash/--no-flash", help="Flash attention, or stored scores.")
]
CudaGraphs = Annotated[
    bool, typer.Option("--cuda-graphs", help="The host's launches are captured.")
]
EpOverlap = Annotated[
    bool,
    typer.Option("--ep-overlap", help="Tokens travel to experts while others compute."),
]
DispatcherOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="alltoall: a copy per expert; deduplicated: one per rank (DeepEP, HybridEP).",
    ),
]
DispatchOption = Annotated[
    str, typer.Option(metavar="bf16|fp8", help="Precision of tokens on the way to experts.")
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="KIND[:GBIT]",
        help="Between nodes: infiniband, ethernet or tcp, and Gbit/s per GPU.",
    ),
]
Oversubscription = Annotated[
    float, typer.Option(metavar="X", help="Divides what the network leaves between nodes.")
]
MemoryGb = Annotated[
    float | None,
    typer.Option(metavar="GB", help="Memory per device (1e9 bytes), instead of all it has."),
]


def estimate_problem(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model of the catalogue: see --list.")
    ] = None,
    config: ConfigOption = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:N]",
            help="Accelerator of the catalogue (see --list), and how many; several: of each a part "
            "of the pipeline.",
        ),
    ] = None,
    pp: Annotated[int, _degree("Devices of the pipeline.")] = 4,
    tp: Annotated[int, _degree("Tensor-parallel degree.")] = 1,
    cp: Annotated[int, _degree("Context-parallel degree.")] = 1,
    ep: Annotated[int, _degree("Expert-parallel degree; with --etp it divides tp x cp x dp.")] = 1,
    etp: Annotated[int, _degree("Tensor-parallel degree of the experts.")] = 1,
    dp: Annotated[
        int | None, _degree("Data-parallel degree; 1, or what the number of GPUs leaves.")
    ] = None,
    micro_batch: Annotated[int, _degree("Sequences per micro-batch.")] = 1,
    sequence: Annotated[int, _degree("Tokens per sequence.")] = 4096,
    microbatches: Annotated[int, _degree("Micro-batches per step.")] = 16,
    chunks: Annotated[int, _degree("Stages per device.")] = 1,
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="linear, loop or v; default linear, with several chunks loop."
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="balanced: the slowest stage fastest; even: as frameworks cut."
        ),
    ] = "balanced",
    precision: PrecisionOption = "bf16",
    zero: Annotated[
        int,
        typer.Option(
            metavar="0|1|2|3",
            help="Spread over --dp: nothing, optimizer, gradients too, weights too (FSDP).",
        ),
    ] = 1,
    flash: FlashOption = True,
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Whether --tp also splits norms and the residual stream.",
        ),
    ] = True,
    lean: Annotated[
        bool,
        typer.Option("--lean", help="Norm and activation-function outputs are made again in I."),
    ] = False,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="LIST", help=f"Modules made again, with commas: {', '.join(RECOMPUTABLE)}."
        ),
    ] = "",
    cuda_graphs: CudaGraphs = False,
    ep_overlap: EpOverlap = False,
    dispatcher: DispatcherOption = "alltoall",
    dispatch: DispatchOption = "bf16",
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap/--no-overlap", help="Whether collectives go beside compute where they can."
        ),
    ] = True,
    offloaded_layers: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Layers whose activations stay in host memory."),
    ] = 0,
    network: Network = None,
    oversubscription: Oversubscription = 1.0,
    measured_step_s: Annotated[
        float | None,
        typer.Option(metavar="S", help="What a step of this takes: calibrates every time."),
    ] = None,
    time_factor: Annotated[
        float | None,
        typer.Option(metavar="X", help="Multiplies every time: another configuration's factor."),
    ] = None,
    mfu: Annotated[
        float | None,
        typer.Option(metavar="X", help="Share (0-1) of peak that F, I and W reach together."),
    ] = None,
    pcie_efficiency: Annotated[
        float | None, typer.Option(metavar="X", help="Share (0-1) of PCIe that copies reach.")
    ] = None,
    memory_gb: MemoryGb = None,
    modes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Most modes per stage, e.g. 8; 0 = keep, offload, recompute as v1 has them.",
        ),
    ] = 0,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs", help="Forwards and backwards may run together, experts' exchange hidden."
        ),
    ] = False,
    slices: Annotated[
        int, _degree("Slices of each sequence, each a micro-batch of the problem.")
    ] = 1,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Unequal micro-batches: a JSON list with a length in tokens for each, or a list "
            "of the lengths of the sequences packed into it.",
        ),
    ] = None,
    costs: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="With --lengths: most kinds of micro-batches, rounded up."
        ),
    ] = 8,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the problem here; - is standard output."
        ),
    ] = None,
    model_json: Annotated[
        bool,
        typer.Option("--model-json", help="Write the layers, uncut, for optpipe plan instead."),
    ] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="Print every model and accelerator, with sources.")
    ] = False,
) -> None:
    """Estimate a problem from a model and an accelerator.

    Times, bytes and rates follow from sizes and data sheets, by formulas with sources; nothing is
    measured. Layers are cut so that the slowest stage is as fast as can be, embedding and head
    counted.

    \b
    Examples:
      optpipe estimate --model llama3-70b --gpu h100 --pp 8 --tp 8 \\
          --sequence 8192 --microbatches 64 -o problem.json
      optpipe estimate --model llama3-8b --gpu h100 -o - | optpipe solve - --plot picture.svg
      optpipe estimate --config config.json --gpu a100 --pp 4 -o problem.json
      optpipe estimate --model qwen3-235b-a22b --gpu h100:256 --tp 2 --pp 8 --chunks 4 --ep 32 \\
          --precision fp8 --ep-overlap --layout even --microbatches 128
      optpipe estimate --model llama3-70b --gpu h100:32 --gpu a100:32 --tp 8 --pp 8
      optpipe estimate --model llama3-8b --gpu h100:8 --pp 1 --zero 3 --measured-step-s 9.1
      optpipe estimate --model llama3-8b --gpu h100 --pp 8 --lengths batch.json -o problem.json
      optpipe estimate --model llama3-8b --gpu h100 --model-json -o model.json
      optpipe estimate --list
    """
    if list_all:
        _show_catalogue(stdout())
        return
    check_writable(output)
    check_apart(output, inputs=[config, lengths])
    if slices > 1 and model_json:
        raise InputError(
            f"--slices {slices} and --model-json: a model's layers are of whole sequences; leave "
            "one out"
        )
    packed = _lengths_in(lengths, context, model_json=model_json)
    microbatches = len(packed) or microbatches
    with named_as_flags():
        shape = asked_shape(model, config)
        kinds = find_gpus(gpu or [], network, oversubscription)
        replicas = _replicas(kinds, dp, tp * cp * pp)
        training = Training(
            micro_batch=micro_batch, sequence=sequence, tp=tp, cp=cp, ep=ep, etp=etp, dp=replicas,
            zero=zero, precision=cast("Precision", precision), flash=flash, lean=lean,
            sequence_parallel=sequence_parallel, cuda_graphs=cuda_graphs, ep_overlap=ep_overlap,
            recompute=frozenset(filter(None, map(str.strip, recompute.split(",")))),
            dispatcher=cast("Dispatcher", dispatcher), dispatch=cast("Dispatch", dispatch),
            overlap=overlap, offloaded_layers=offloaded_layers,
        )  # fmt: skip
        found = estimate(
            shape,
            _pipeline_ranks(kinds, training.ranks),
            training,
            pp=pp,
            num_microbatches=microbatches,
            chunks=chunks,
            placement=placement or ("linear" if chunks == 1 else "loop"),
            layout=cast("Layout", layout),
            pcie_efficiency=pcie_efficiency,
            mfu=mfu,
            time_factor=time_factor,
            measured_step_s=measured_step_s,
            memory_bytes=memory_of(memory_gb),
            modes=modes,
            pairs=pairs,
            slices=slices,
            lengths=packed,
            costs=costs,
        )
    _show(results(output), shape, kinds, found)
    if output is not None:
        write_file(output, dump_model(found.model) if model_json else dump_problem(found.problem))
        say_written(output, "model" if model_json else "problem")


_SAID_BY_LENGTHS = ("sequence", "micro_batch", "microbatches")


def _lengths_in(path: Path | None, context: typer.Context, *, model_json: bool) -> list[list[int]]:
    """Return the lengths of a file, a list for each micro-batch; none where there is no file."""

    def is_given(name: str) -> bool:
        return "commandline" in str(context.get_parameter_source(name)).lower()

    if path is None:
        if is_given("costs"):
            raise InputError(
                "--costs: says how unequal micro-batches are grouped; add --lengths FILE"
            )
        return []
    for name in filter(is_given, _SAID_BY_LENGTHS):
        raise InputError(
            f"{flag(Field(name))} and --lengths: the file says it; leave one of them out"
        )
    if model_json:
        raise InputError(
            "--lengths and --model-json: a model has one kind of micro-batch; leave one out"
        )
    try:
        return _batches(parse_json(read_text(path)))
    except InputError as error:
        raise in_file(path, error) from None


def _batches(found: Any) -> list[list[int]]:
    """Return the lists of a document that has a length, or a list of them, per micro-batch."""
    listed = found if isinstance(found, list) else []
    batches = [one if isinstance(one, list) else [one] for one in listed]
    if not batches or not all(type(n) is int for one in batches for n in one):
        raise InputError(
            "must be a list with an entry for each micro-batch: its length in tokens, or a list of "
            "lengths, e.g. [8192, [6000, 2000]]; correct it"
        )
    return batches


@contextmanager
def named_as_flags() -> Iterator[None]:
    """Say in errors ``--tp`` for what Python and HTTP call ``tp``."""
    try:
        yield
    except AskedError as error:
        raise InputError(error.sentence.text(flag)) from None


def asked_shape(model: str | None, config: Path | None) -> ModelShape:
    """Return the model that --model or --config names; raises `InputError` without one."""
    if model is not None and config is None:
        return find_model(model)
    if config is None or model is not None:
        raise InputError(
            "give either --model NAME or --config FILE; optpipe estimate --list shows names"
        )
    try:
        shape = shape_from_config(read_text(config))
    except InputError as error:
        raise in_file(config, error) from None
    path = config.absolute()
    name = path.parent.name if path.name == "config.json" else path.stem
    return replace(shape, name=name[:80] or "config")


def _replicas(kinds: list[Accelerators], dp: int | None, of_one: int) -> int:
    """Return the data-parallel degree: as said, or as the number of GPUs leaves."""
    counts = [kind.number for kind in kinds if kind.number is not None]
    if not counts:
        return dp or 1
    total = sum(counts)
    if dp is None and total % of_one == 0:
        return total // of_one
    if dp is None or dp * of_one != total:
        raise InputError(
            f"{total} GPUs are not tp x cp x pp = {of_one}" + (f" x dp = {dp}" if dp else "")
            + (" replicas" if dp else ", nor a multiple") + "; change --gpu or the degrees"
        )  # fmt: skip
    return dp


def _pipeline_ranks(kinds: list[Accelerators], stage: int) -> Hardware | list[Hardware]:
    """Return the accelerator, or with several kinds that of each pipeline rank."""
    if len(kinds) == 1:
        return kinds[0].hardware
    ranks: list[Hardware] = []
    for kind in kinds:
        count = kind.number or 0
        if count % stage:
            raise InputError(
                f"--gpu {kind.hardware.name}:{count}: is no multiple of the {stage} GPUs that "
                f"share a stage (tp x cp x dp), so a stage would stand on two kinds; change it"
            )
        ranks += [kind.hardware] * (count // stage)
    return ranks


def memory_of(gigabytes: float | None) -> int | None:
    """Return --memory-gb in bytes; raises `InputError` where it is out of range."""
    if gigabytes is None:
        return None
    if not 0 < gigabytes < 1e6:
        raise InputError(f"--memory-gb {gigabytes}: must be above 0 and below 1000000; correct it")
    return round(gigabytes * 1e9)


def _show(console: Console, shape: ModelShape, kinds: list[Accelerators], found: Estimate) -> None:
    console.width = max(console.width, _LEAST_WIDTH)
    parameters = total_parameters(shape) / 1e9
    titles = " and ".join(kind.hardware.title for kind in kinds)
    console.print(
        f"{shape.name}: {parameters:.2f} billion parameters, on {titles}; compute at "
        f"{format_share(found.mfu)} of peak",
        markup=False,
    )
    for text in (*_step_lines(found), _spent_line(found.step)):
        console.print(text, markup=False, soft_wrap=True)
    console.print(_stage_table(found))
    if len(found.sizes) > _SHOWN_STAGES:
        console.print(f"and {len(found.sizes) - _SHOWN_STAGES} more stages")
    console.print(_memory_table(found.step))
    if any(stage.modes for stage in found.problem.stages):
        console.print(_menu_table(found.problem))
    if found.problem.num_costs > 1:
        console.print(_costs_line(found.problem), markup=False, soft_wrap=True)
    if found.problem.pairs:
        console.print(_pairs_line(found.problem), markup=False, soft_wrap=True)
    p = len(found.problem.devices)
    if found.placement == placement_of("loop", p, len(found.sizes) // p):
        layout = megatron_layout(found.problem)
        console.print(f"Megatron-Core: {layout}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(note.text(flag), style="dim", markup=False)
    busy_ms = found.problem.busy_ms
    bound_by = [
        f"{load}, longer than the {busy_ms:,.1f} ms that the busiest device computes: the link "
        "bounds the step; cut or place the model otherwise"
        for load in link_loads(found.problem)
        if load.busy_ms > busy_ms
    ]
    warn("links", bound_by)


def _pairs_line(problem: Problem) -> str:
    """Say how many pairs are listed, and the most that one hides of the two passes' time."""
    most = max(problem.pairs, key=lambda pair: pair.hidden_ms)
    stage = problem.stages[most.backward]
    back = stage.fused_backward_ms if most.with_ == "B" else stage.backward_input_ms
    alone = problem.stages[most.forward].forward_ms + back
    return (
        f"pairs: {len(problem.pairs)}; together F of stage {most.forward} and {most.with_} of "
        f"stage {most.backward} take {alone - most.hidden_ms:,.2f} ms instead of {alone:,.2f}"
    )


def _step_lines(found: Estimate) -> Iterator[str]:
    """Yield what a step takes, and how far such estimates were from published runs."""
    step, error = found.step, found.error
    interleaved = "interleaved " if len(found.sizes) > len(found.problem.devices) else ""
    yield (
        f"a step with {interleaved}1F1B: {step.step_ms / 1e3:.3f} s, "
        f"{step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU on {step.num_gpus} GPUs, "
        f"model FLOPs at {format_share(step.mfu)} of the bf16 peak"
    )
    if found.factor != 1:
        yield (
            f"calibrated: every time is {found.factor:.4g} times the formulas'; --time-factor "
            f"{found.factor:.4g} carries that to other configurations"
        )
    elif error is None:
        yield "accuracy: not known; no published run of such accelerators was compared"
    else:
        yield (
            f"accuracy: published runs of this class were met within {format_share(error.median)} "
            f"(median of {error.num_rows}, the worst {format_share(error.worst)}; "
            "python -m benchmarks.scoreboard)"
        )


def _spent_line(step: StepEstimate) -> str:
    """Return where the time of the rank that decides goes, largest first."""
    parts = {
        **step.spent._asdict(),
        "idle": step.idle_ms,
        "gradient reduction": step.reduction_ms,
        "weight gathering": step.gather_ms,
        "optimizer": step.optimizer_ms,
    }
    shares = sorted(((ms / step.step_ms, name) for name, ms in parts.items()), reverse=True)
    return "of it: " + ", ".join(
        f"{name} {format_share(share)}" for share, name in shares if share >= _LEAST_SHARE
    )


def _memory_table(step: StepEstimate) -> Table:
    kinds = step.peak._asdict()
    table = text_table("device", *kinds, "sum")
    for rank, memory in enumerate(step.memory[:_SHOWN_STAGES]):
        cells = (format_bytes(round(value)) for value in (*memory, memory.total))
        table.add_row(f"gpu{rank}", *cells)
    return table


def _stage_table(found: Estimate) -> Table:
    table = text_table("stage", "device", "layers", "F ms", "I ms", "W ms", "activation", "to W",
                       "offloadable", "static", "usable")  # fmt: skip
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
    """Return the menu of the middle stage: those of other stages differ by embedding and head."""
    index = len(problem.stages) // 2
    table = text_table("left by F", "offload", "stays", "in backward", "again ms",
                       texts=("stage", "mode"))  # fmt: skip
    for row, mode in enumerate(problem.menus[index]):
        sizes = (mode.forward_bytes, mode.offload_bytes, mode.least_bytes,
                 mode.backward_bytes + mode.inside_bytes)  # fmt: skip
        label, ms = "" if row else str(index), format_ms(mode.recompute_ms)
        table.add_row(label, mode.name, *map(format_bytes, sizes), ms)
    return table


def _show_catalogue(console: Console) -> None:
    console.width = max(console.width, _LEAST_WIDTH)
    models = text_table("parameters", "layers", "hidden", texts=("model",))
    models.add_column("source", overflow="fold")
    for shape in MODELS.values():
        parameters = f"{total_parameters(shape) / 1e9:.2f} B"
        sizes = (str(shape.num_layers), str(shape.hidden))
        models.add_row(shape.name, parameters, *sizes, shape.source)
    console.print(models)
    for hardware in GPUS.values():
        console.print(f"\n{hardware.name}: {hardware.title}", style="bold", markup=False)
        facts = text_table("", texts=("",))
        facts.show_header = False
        facts.add_column("", overflow="fold")
        for name, fact in hardware.facts:
            facts.add_row(name, f"{fact.value:,.10g}", fact.source)
        console.print(facts)


def _costs_line(problem: Problem) -> str:
    """Say how many micro-batches have each cost, and what F, I and W of one take together."""
    many = Counter(problem.cost_of)
    counts = ", ".join(
        f"{many[cost]} of {format_ms(sum(stage.under(cost).busy_ms for stage in problem.stages))}"
        for cost in range(problem.num_costs)
    )
    return (
        f"unequal micro-batches: {counts}; the step and the stages above are those of the one in "
        "the middle"
    )
