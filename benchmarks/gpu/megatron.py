"""Part (f): Megatron-Core's GPT on one card, by its own schedule and by ours with offload.

One pipeline rank, so nothing is sent; model, data parallelism, loss and gradient buffers are
Megatron's. Layers are its local ones: Transformer Engine is not needed.
"""

from __future__ import annotations

import gc
import statistics
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu.alone import AHEAD, MANY, alone, forget, host_memory, in_flight
from optpipe import Device, Problem, Provenance, Stage, evaluate, parse_action
from optpipe.runtime.measuring.memory import meter_for
from optpipe.runtime.measuring.times import clock_for
from optpipe.runtime.trainers.megatron import forward_backward_func

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe import Program, Schedule


class _Size(NamedTuple):
    layers: int
    hidden: int
    heads: int
    sequence: int
    words: int


REAL = _Size(4, 2048, 16, 2048, 8192)
TINY = _Size(1, 32, 2, 8, 64)


def megatron(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Run twelve micro-batches by Megatron's schedule and three of ours; one row each."""
    size = TINY if tiny else REAL
    with ExitStack() as stack:
        device = stack.enter_context(alone(name))
        stack.enter_context(_parallel_state(device))
        from megatron.core.pipeline_parallel import get_forward_backward_func

        fused = tuple(parse_action(f"0{kind}{j}") for j in range(MANY) for kind in "FB")
        cases: dict[str, Callable[..., Any]] = {
            "Megatron's own": get_forward_backward_func(),
            "ours, the same order": _ours(fused),
            "ours, 8 ahead, kept": _ours(in_flight(MANY, AHEAD, offload=False)),
            "ours, 8 ahead, offloaded": _ours(in_flight(MANY, AHEAD, offload=True)),
        }
        model = _model(size, device)
        rows: list[dict[str, Any]] = []
        expected: list[Tensor] = []
        for label, run in cases.items():
            row, gradients = _row(run, model, size, device, steps=2 if tiny else 5)
            expected = expected or gradients
            pairs = list(zip(gradients, expected, strict=True))
            worst = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)
            rows.append({"schedule": label, **row, "gradients differ by": worst})
        return rows


def _parallel_state(device: torch.device) -> Any:
    """Return a context in which this process is a Megatron job of one rank."""
    if device.type == "cpu":
        from tests.runtime.trainers.megatron_shim import megatron_on_cpu

        return megatron_on_cpu(1, 1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    stack = ExitStack()
    parallel_state.initialize_model_parallel(1, 1)
    stack.callback(parallel_state.destroy_model_parallel)
    model_parallel_cuda_manual_seed(1)
    return stack


def _ours(program: Program) -> Any:
    return forward_backward_func(_schedule(program))


def _schedule(program: Program) -> Schedule:
    """Return a schedule of one rank; what a step costs does not matter here."""
    cost = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1}
    size = {"activation_bytes": 1, "offload_bytes": 1}
    problem = Problem(
        num_microbatches=MANY,
        devices=(Device(memory_bytes=1000, d2h_gb_per_s=1, h2d_gb_per_s=1),),
        stages=(Stage.model_validate({"device": 0, **cost, **size}),),
    )
    return evaluate(problem, (program,), Provenance(method="one rank alone"))


def _row(
    run: Any, model: Any, size: _Size, device: torch.device, *, steps: int
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return a schedule's row and the gradients that it made."""
    given = {
        "forward_step_func": partial(_forward_step, size=size, device=device),
        "model": model,
        "num_microbatches": MANY,
        "seq_length": size.sequence,
        "micro_batch_size": 1,
    }

    def step() -> float:
        model.zero_grad_buffer()
        found = run(data_iterator=_data(size), **given)
        return statistics.mean(float(one["lm loss"]) for one in found)

    step()
    clock, times = clock_for(device), []
    for _ in range(steps):
        start = clock.mark()
        loss = step()
        times.append(clock.ms_between(start, clock.mark()))
    runner = getattr(run, "runner", None)
    summed = [one.main_grad for one in model.parameters()]
    resident = [*model.parameters(), *summed, *host_memory(runner)]
    forget(device)
    gc.collect()
    with meter_for(device, resident) as meter:
        _, peak = meter.watch(step)
    gradients = [one.clone() for one in summed]
    row = {
        "ms": statistics.median(times),
        "peak MB": peak / 1e6,
        "offloaded MB": 0 if runner is None else runner.offloaded_bytes / (steps + 2) / 1e6,
        "loss": loss,
    }
    if runner is not None:
        run.close()
    return row, gradients


def _data(size: _Size) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(MANY):
        yield torch.randint(size.words, (1, size.sequence + 1), generator=generator)


def _forward_step(
    items: Any, model: nn.Module, *, size: _Size, device: torch.device
) -> tuple[Tensor, Any]:
    tokens = next(items).to(device)
    positions = torch.arange(size.sequence, device=device)[None]
    mask = torch.ones(1, 1, size.sequence, size.sequence, dtype=torch.bool, device=device).triu(1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()), _loss


def _loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mean = losses.float().mean()
    return mean, {"lm loss": mean.detach().clone()}


def _model(size: _Size, device: torch.device) -> nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        ffn_hidden_size=4 * size.hidden,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    torch.manual_seed(0)
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=size.words,
        max_sequence_length=size.sequence,
        share_embeddings_and_output_weights=False,
    )
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = Float16Module(config, model.to(device))
    made: nn.Module = DistributedDataParallel(config, settings, model)
    return made
