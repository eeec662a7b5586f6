"""``optpipe estimate``: a problem from a model's name and an accelerator's, nothing measured."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from optpipe.cli.console import stdout, text_table
from optpipe.cli.files import check_apart, check_writable, in_file, results, say_written, write_file
from optpipe.cli.report import warn
from optpipe.errors import InputError
from optpipe.formats.json import dump_model, dump_problem, read_text
from optpipe.formats.megatron import megatron_layout
from optpipe.presets import (
    GPUS,
    MODELS,
    AskedError,
    Training,
    estimate,
    find_gpu,
    find_model,
    shape_from_config,
    total_parameters,
)
from optpipe.presets.shape import flag
from optpipe.problem import placement_of
from optpipe.simulate import link_loads
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table

    from optpipe.presets import Estimate, Hardware, ModelShape
    from optpipe.presets.shape import Precision

__all__ = ["estimate_problem"]


_LEAST_WIDTH = 110
_SHOWN_STAGES = 64


def _degree(text: str) -> Any:
    return typer.Option(metavar="N", min=1, help=text)


def estimate_problem(
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model of the catalogue: see --list.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead of --model: a Hugging Face config.json."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Accelerator of the catalogue: see --list."),
    ] = None,
    pp: Annotated[int, _degree("Devices of the pipeline.")] = 4,
    tp: Annotated[int, _degree("Tensor-parallel degree.")] = 1,
    cp: Annotated[int, _degree("Context-parallel degree.")] = 1,
    ep: Annotated[int, _degree("Expert-parallel degree; divides --dp.")] = 1,
    dp: Annotated[int, _degree("Data-parallel degree.")] = 1,
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
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="bf16, fp16, fp8 or fp32.")
    ] = "bf16",
    zero: Annotated[
        int,
        typer.Option(metavar="0|1|2", help="Spread over --dp: nothing, optimizer, gradients too."),
    ] = 1,
    flash: Annotated[
        bool, typer.Option("--flash/--no-flash", help="Flash attention, or stored scores.")
    ] = True,
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
    mfu: Annotated[
        float | None,
        typer.Option(metavar="X", help="Share (0-1) of peak that F, I and W reach together."),
    ] = None,
    pcie_efficiency: Annotated[
        float | None, typer.Option(metavar="X", help="Share (0-1) of PCIe that copies reach.")
    ] = None,
    memory_gb: Annotated[
        float | None,
        typer.Option(metavar="GB", help="Memory per device (1e9 bytes), instead of all it has."),
    ] = None,
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
      optpipe estimate --model llama3-8b --gpu h100 --model-json -o model.json
      optpipe estimate --list
    """
    if list_all:
        _show_catalogue(stdout())
        return
    check_writable(output)
    check_apart(output, inputs=[config])
    with _named_as_flags():
        shape = _shape(model, config)
        if not gpu:
            raise InputError(f"--gpu is missing; give one of {', '.join(GPUS)}")
        if len(gpu) > 1:
            raise InputError(
                f"--gpu {' --gpu '.join(gpu)}: an estimate is for one kind of accelerator; give "
                "one, or write a model file with devices of several types for optpipe plan"
            )
        hardware = find_gpu(gpu[0])
        training = Training(
            micro_batch=micro_batch, sequence=sequence, tp=tp, cp=cp, ep=ep, dp=dp, zero=zero,
            precision=cast("Precision", precision), flash=flash, lean=lean,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        found = estimate(
            shape,
            hardware,
            training,
            pp=pp,
            num_microbatches=microbatches,
            chunks=chunks,
            placement=placement or ("linear" if chunks == 1 else "loop"),
            efficiency=hardware.efficiency.with_pcie(pcie_efficiency),
            mfu=mfu,
            memory_bytes=_memory(memory_gb),
        )
    _show(results(output), shape, hardware, found)
    if output is not None:
        write_file(output, dump_model(found.model) if model_json else dump_problem(found.problem))
        say_written(output, "model" if model_json else "problem")


@contextmanager
def _named_as_flags() -> Iterator[None]:
    """Say in errors ``--tp`` for what Python and HTTP call ``tp``."""
    try:
        yield
    except AskedError as error:
        raise InputError(error.sentence.told(flag)) from None


def _shape(model: str | None, config: Path | None) -> ModelShape:
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
    return replace(shape, name=config.absolute().parent.name[:80] or "config")


def _memory(gigabytes: float | None) -> int | None:
    if gigabytes is None:
        return None
    if not 0 < gigabytes < 1e6:
        raise InputError(f"--memory-gb {gigabytes}: must be above 0 and below 1000000; correct it")
    return round(gigabytes * 1e9)


def _show(console: Console, shape: ModelShape, hardware: Hardware, found: Estimate) -> None:
    console.width = max(console.width, _LEAST_WIDTH)
    parameters = total_parameters(shape) / 1e9
    console.print(
        f"{shape.name}: {parameters:.2f} billion parameters, on {hardware.title}; compute at "
        f"{format_share(found.mfu)} of peak",
        markup=False,
    )
    console.print(_stage_table(found))
    if len(found.sizes) > _SHOWN_STAGES:
        console.print(f"and {len(found.sizes) - _SHOWN_STAGES} more stages")
    p = len(found.problem.devices)
    if found.placement == placement_of("loop", p, len(found.sizes) // p):
        layout = megatron_layout(found.problem)
        console.print(f"Megatron-Core: {layout}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(note.told(flag), style="dim", markup=False)
    busy_ms = found.problem.busy_ms
    bound_by = [
        f"{load}, longer than the {busy_ms:,.1f} ms that the busiest device computes: the link "
        "bounds the step; cut or place the model otherwise"
        for load in link_loads(found.problem)
        if load.busy_ms > busy_ms
    ]
    warn("links", bound_by)


def _stage_table(found: Estimate) -> Table:
    table = text_table("stage", "device", "layers", "F ms", "I ms", "W ms", "activation", "to W",
                       "offloadable", "static", "usable")  # fmt: skip
    for index, stage in enumerate(islice(found.problem.stages, _SHOWN_STAGES)):
        device = found.problem.devices[stage.device]
        times = (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
        sizes = (stage.activation_bytes, stage.weight_context_bytes, stage.offload_bytes,
                 stage.static_bytes, device.usable_bytes)  # fmt: skip
        cells = (*map(format_ms, times), *map(format_bytes, sizes))
        table.add_row(str(index), device.name, str(stage.layers), *cells)
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
