"""What the ranks run with torchtitan's own model, parallelism, loss and pipeline."""

from __future__ import annotations

import warnings
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe import Schedule

MICROBATCHES = 8
STEPS = 10
_LENGTH = 8
_WORDS = 2048


@dataclass
class Titan:
    """A rank's ten steps: losses by torchtitan's 1F1B and by ours, and what ours did."""

    wanted: list[float]
    found: list[float]
    evaluated: float | None
    own_evaluation: float | None
    held_stages: int
    offloaded_bytes: int
    deferred_bytes: int


def train_titan(schedule: Schedule, data_parallel: int) -> Titan:
    """Train torchtitan's debug model twice, from the same values, on four ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchtitan.tools.utils as tools

        # Taken at import; "cuda" where there is no accelerator.
        tools.device_type, tools.device_module = "cpu", torch.cpu
        from torchtitan.distributed.pipeline_parallel import pipeline_llm as own

        from optpipe.runtime.trainers.torchtitan import pipeline_llm

        wanted, evaluated, _ = _train(own, data_parallel)
        ours = partial(pipeline_llm, schedule=schedule, min_offload_bytes=1)
        found, own_evaluation, made = _train(ours, data_parallel)
    runner = made.runner
    made.close()
    return Titan(
        wanted,
        found,
        evaluated,
        own_evaluation,
        len(made.parts),
        runner.offloaded_bytes,
        sum(runner.deferred_bytes.values()),
    )


def _train(pipeline: Callable[..., Any], data_parallel: int) -> tuple[list[float], Any, Any]:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec: Any = model_registry("debugmodel")
    for layer in spec.model.layers:
        # Flex attention is compiled, by a compiler that this machine has not.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=4 // data_parallel,
        data_parallel_shard_degree=data_parallel,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=1,
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(parallelism, 4)
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    made, parts, first, last = pipeline(
        model,
        parallel_dims=dims,
        training=TrainingConfig(local_batch_size=MICROBATCHES, seq_len=_LENGTH),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=CrossEntropyLoss(CrossEntropyLoss.Config()),
    )
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_states(buffer_device=torch.device("cpu"))
            _draw(part)
    optimizer = torch.optim.AdamW([one for part in parts for one in part.parameters()], lr=1e-3)
    losses = []
    column = dist.get_rank() % data_parallel
    for step in range(STEPS):
        optimizer.zero_grad()
        found = _run(made.step, _data(step, column), first=first, last=last)
        optimizer.step()
        losses += [] if found is None else [found]
    evaluated = _run(made.eval, _data(STEPS, column), first=first, last=last)
    return losses, evaluated, made


def _data(step: int, column: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + column)
    tokens = torch.randint(_WORDS, (MICROBATCHES, _LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _run(
    call: Callable[..., Any], data: tuple[Tensor, Tensor], *, first: bool, last: bool
) -> float | None:
    """Call as torchtitan's trainer does; torch 2.13's own schedules know whole batches only."""
    tokens, labels = data
    losses: list[Tensor] | None = [] if last else None
    given: dict[str, Any] = {
        "losses": losses,
        "loss_kwargs": {"global_valid_tokens": torch.tensor(float(labels.numel()))},
    }
    if type(call.__self__).__module__.startswith("torch."):  # type: ignore[attr-defined]
        call(*((tokens,) if first else ()), target=labels if last else None, **given)
    else:
        call(
            arg_mbs=[(one,) for one in tokens.chunk(MICROBATCHES)] if first else None,
            kwarg_mbs=[{}] * MICROBATCHES,
            target_mbs=list(labels.chunk(MICROBATCHES)) if last else None,
            return_outputs=False,
            **given,
        )
    return float(torch.stack(losses).sum().detach()) if losses else None


def _draw(part: nn.Module) -> None:
    """Give every parameter values that depend on its name alone."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # Gloo knows no scaled sums.
            module.set_force_sum_reduction_for_comms(True)
    for name, parameter in part.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = 0.05 * torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            whole += 1
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(whole)
