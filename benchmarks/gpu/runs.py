"""Parts (d), (f), (g): four ranks on one card, and trainers by their own schedules and by ours.

The losses of (d) are those of one process, with equal micro-batches and with unequal ones planned
before each step; those of (g), torchtitan's model and pipeline, of its own 1F1B. NCCL refuses two
ranks on one card and gloo takes no device memory, so what is sent is copied to the host first, and
what is received is copied to the card when somebody waits for it. Not a measure of speed.

Part (f) is Megatron-Core's GPT on one card, by its own schedule and by ours with offload. One
pipeline rank, so nothing is sent; model, data parallelism, loss and gradient buffers are
Megatron's. Layers are its local ones: Transformer Engine is not needed.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from benchmarks.gpu.alone import (
    AHEAD,
    MANY,
    MICROBATCHES,
    SCHEDULE,
    alone,
    forget,
    host_memory,
    in_flight,
)
from optpipe import Device, Problem, Provenance, Stage, evaluate, load_csv, parse_action
from optpipe.problem import Microbatch
from optpipe.runtime import PipelineRunner, executor, follow
from optpipe.runtime.demo import (
    ModelConfig,
    chain,
    make_stages,
    random_tokens,
    step_alone,
    token_loss,
)
from optpipe.runtime.launch import RENDEZVOUS_VARIABLE, launch_ranks, leave_ranks
from optpipe.runtime.measuring.memory import meter_for
from optpipe.runtime.measuring.times import clock_for
from optpipe.runtime.trainers.megatron import forward_backward_func

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe import Program, Schedule


RANKS = 4
STEPS = 3
MOST_SAMPLES = 4
"""Of an unequal micro-batch of (d); they begin at 1."""

REAL = ModelConfig(vocabulary=8192, hidden=512, heads=8, sequence=256, dtype=torch.float32)
TINY = ModelConfig(vocabulary=37, hidden=16, heads=2, sequence=8, dtype=torch.float32)
TOLERANCE = 1e-4
"""Of a loss, relative: single precision, sums in another order."""


def shared_card(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Train a small GPT, with equal micro-batches and with unequal ones."""
    return [row for what in ("equal", "unequal") for row in _started(what, name, tiny=tiny)]


def torchtitan(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Train torchtitan's debug model ten steps by `pipeline_llm`, its own and ours."""
    return _started("torchtitan", name, tiny=tiny)


def _started(what: str, name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Start the ranks, each a process of its own, and return one row."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        arguments = [what, name, "tiny" if tiny else "real", str(result)]
        code = launch_ranks("benchmarks.gpu.runs", arguments, RANKS)
        if code:
            raise RuntimeError(f"a rank ended with exit code {code}; see above")
        return [json.loads(result.read_text())]


def main() -> None:
    """Be one of the ranks; the last one writes what it found."""
    what, name, size, result = sys.argv[1:]
    rank = int(os.environ["RANK"])
    where = f"file://{os.environ[RENDEZVOUS_VARIABLE]}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS)
    try:
        with through_the_host():
            if what == "torchtitan":
                row = _train_titan(torch.device(name))
            else:
                config = TINY if size == "tiny" else REAL
                row = _train(torch.device(name), config, unequal=what == "unequal")
    finally:
        leave_ranks()
    if row is not None:
        Path(result).write_text(json.dumps(row))


def _train(device: torch.device, config: ModelConfig, *, unequal: bool) -> dict[str, Any] | None:
    """Train some steps; the last rank returns what it found."""
    rank, chooser = dist.get_rank(), random.Random(1)
    counts = [[config.microbatch_size] * MICROBATCHES] * STEPS
    if unequal:
        counts = [chooser.choices(range(1, MOST_SAMPLES + 1), k=MICROBATCHES) for _ in counts]
    problems = [_problem(samples) for samples in counts]
    own = make_stages(config, RANKS)[rank].to(device)
    runner = PipelineRunner(
        {rank: own}, _planned(problems[0]), token_loss, problems[0], device=device
    )
    whole = chain(make_stages(config, RANKS)).to(device) if runner.holds_last else None
    trained = [one for one in (own, whole) if one is not None]
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in trained]
    pairs = []
    sized = replace(config, microbatch_size=1)
    with follow(None, runner, replan=_planned) as training:
        for samples, problem in zip(counts, problems, strict=True):
            tokens = random_tokens(sized, sum(samples), seed=0)
            batch, target = (torch.split(one.to(device), samples) for one in tokens)
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = training.step(arg_mbs=batch, target_mbs=target, problem=problem)
            if losses is not None and whole is not None:
                pairs.append((losses.mean().item(), step_alone(whole, batch, target)))
            for optimizer in optimizers:
                optimizer.step()
    runner.close()
    moved: list[int] = [0] * RANKS
    dist.all_gather_object(moved, runner.offloaded_bytes)
    sizes = {size for samples in counts for size in samples}
    return {"samples": f"{min(sizes)} to {max(sizes)}"} | _row(pairs, moved) if pairs else None


def _train_titan(device: torch.device) -> dict[str, Any] | None:
    from tests.runtime.trainers.torchtitan_cases import train_titan

    found = train_titan(_planned(_problem([1] * MICROBATCHES)), 1, device)
    moved: list[int] = [0] * RANKS
    dist.all_gather_object(moved, found.offloaded_bytes)
    pairs = list(zip(found.found, found.wanted, strict=True))
    return _row(pairs, moved) if pairs else None


def _row(pairs: list[tuple[float, float]], moved: list[int]) -> dict[str, Any]:
    worst = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
    return {
        "ranks": RANKS,
        "steps": len(pairs),
        "first loss": pairs[0][0],
        "last loss": pairs[-1][0],
        "largest difference": worst,
        "equal": worst <= TOLERANCE,
        "offloaded MB": sum(moved) / 1e6,
    }


def _problem(samples: Sequence[int]) -> Problem:
    """Return four equal stages whose micro-batches take as much as they have samples."""
    sizes = sorted(set(samples))
    passes, memory = ("forward", "backward_input", "backward_weight"), ("activation", "offload")

    def stage(rank: int, size: int) -> Stage:
        return Stage.model_validate(
            {"device": rank}
            | {f"{name}_ms": size for name in passes}
            | {f"{name}_bytes": size for name in memory}
        )

    return Problem(
        format="optpipe/problem/v2",
        num_microbatches=MICROBATCHES,
        devices=(Device(memory_bytes=1000, d2h_gb_per_s=1, h2d_gb_per_s=1),) * RANKS,
        stages=tuple(stage(rank, sizes[0]) for rank in range(RANKS)),
        other_costs=tuple(tuple(stage(rank, size) for size in sizes[1:]) for rank in range(RANKS)),
        microbatches=tuple(Microbatch(cost=sizes.index(size)) for size in samples),
    )


def _planned(problem: Problem) -> Schedule:
    """Return the schedule of the file; what a step costs does not matter here."""
    programs = load_csv(SCHEDULE.read_text())
    return evaluate(problem, programs, Provenance(method="ada-offload"))


# --- Messages between ranks that share a card.


class _Staged:
    """A message on its way from or into a copy on the host."""

    def __init__(self, work: Any, staged: Tensor, target: Tensor | None = None) -> None:
        self._work, self._staged, self._target = work, staged, target

    def wait(self, *_: Any) -> None:
        """Wait for the message; copy what was received to where it is expected."""
        self._work.wait()
        if self._target is not None:
            self._target.detach().copy_(self._staged)


def staged_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:  # noqa: ARG001 - torch's signature
    """Issue sends and receives; stands in for torch's function of the same shape."""
    return [_issue(one) for one in p2p_ops]


def _issue(one: dist.P2POp) -> Any:
    if one.op is dist.isend:
        return _staged_isend(one.tensor, group=one.group, group_dst=one.group_peer)
    return _staged_irecv(one.tensor, group=one.group, group_src=one.group_peer)


def _staged_isend(tensor: Tensor, **where: Any) -> _Staged:
    staged = tensor.detach().to("cpu", copy=True).contiguous()
    return _Staged(dist.isend(staged, **where), staged)


def _staged_irecv(tensor: Tensor, **where: Any) -> _Staged:
    staged = tensor.new_empty(tensor.shape, device="cpu")
    return _Staged(dist.irecv(staged, **where), staged, tensor)


_STAGED = SimpleNamespace(isend=_staged_isend, irecv=_staged_irecv)


@contextmanager
def through_the_host() -> Iterator[None]:
    """Let torch's pipelines and ours send and receive in this way."""
    send, receive = dist.send, dist.recv

    def staged_send(tensor: Tensor, **where: Any) -> None:
        send(tensor.detach().to("cpu", copy=True), **where)

    def staged_receive(tensor: Tensor, **where: Any) -> None:
        staged = tensor.new_empty(tensor.shape, device="cpu")
        receive(staged, **where)
        tensor.copy_(staged)

    # torch agrees on shapes by plain sends before the first step.
    with (
        mock.patch.object(schedules, "_batch_p2p", staged_p2p),
        mock.patch.object(executor, "dist", _STAGED),
        mock.patch.object(dist, "send", staged_send),
        mock.patch.object(dist, "recv", staged_receive),
    ):
        yield


class _Size(NamedTuple):
    layers: int
    hidden: int
    heads: int
    sequence: int
    words: int


REAL_GPT = _Size(4, 2048, 16, 2048, 8192)
TINY_GPT = _Size(1, 32, 2, 8, 64)


def megatron(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Run twelve micro-batches by Megatron's schedule and three of ours; one row each."""
    size = TINY_GPT if tiny else REAL_GPT
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
            row, gradients = _megatron_row(run, model, size, device, steps=2 if tiny else 5)
            expected = expected or gradients
            pairs = list(zip(gradients, expected, strict=True))
            worst = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)
            rows.append({"schedule": label, **row, "gradients differ by": worst})
        return rows


@contextmanager
def _parallel_state(device: torch.device) -> Iterator[None]:
    """Make this process a Megatron job of one rank, with random states of its own."""
    with ExitStack() as stack:
        if device.type == "cpu":
            from tests.runtime.trainers.megatron_shim import megatron_on_cpu

            stack.enter_context(megatron_on_cpu(1, 1))
        else:
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(1, 1)
            stack.callback(parallel_state.destroy_model_parallel)
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1)
        yield


def _ours(program: Program) -> Any:
    return forward_backward_func(_one_rank_schedule(program))


def _one_rank_schedule(program: Program) -> Schedule:
    """Return a schedule of one rank; what a step costs does not matter here."""
    cost = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1}
    size = {"activation_bytes": 1, "offload_bytes": 1}
    problem = Problem(
        num_microbatches=MANY,
        devices=(Device(memory_bytes=1000, d2h_gb_per_s=1, h2d_gb_per_s=1),),
        stages=(Stage.model_validate({"device": 0, **cost, **size}),),
    )
    return evaluate(problem, (program,), Provenance(method="one rank alone"))


def _megatron_row(
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
    wrapped: nn.Module = DistributedDataParallel(config, settings, model)
    return wrapped


if __name__ == "__main__":
    main()
