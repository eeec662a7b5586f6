"""What the ranks run beside others: torch's own runtime on our CSV, FSDP2's shards, autocast."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor

from examples.gpt_model import MixedPrecision, token_loss
from optpipe.runtime import PipelineRunner
from optpipe.runtime.demo_model import make_stages, random_tokens
from optpipe.runtime.torch_names import default_store
from tests.runtime.cases import CONFIG
from tests.runtime.small_cases import reference
from tests.runtime.small_model import (
    SAMPLES,
    WIDTH,
    own_part,
    small_data,
    small_loss,
    small_runner,
    small_stages,
    step_alone,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from optpipe import Schedule
    from optpipe.schedule import Action

CPU = torch.device("cpu")
LENGTH = 3


class Compared(NamedTuple):
    """One rank's step beside the model in one process; differences are absolute."""

    losses_difference: float
    worst_difference: float
    largest_gradient: float
    num_gradients: int


class Sharded(NamedTuple):
    """The same with sharded stages, and what one step moved, beside the same with whole ones."""

    compared: Compared
    offloaded_bytes: int
    offloaded_bytes_whole: int


def train_by_torch(text: str, placement: Sequence[int], num_microbatches: int) -> Compared:
    """Run a step of torch's own runtime, as torchtitan does, by a CSV."""
    rank = dist.get_rank()
    modules = small_stages(len(placement))
    own = {index: modules[index] for index, home in enumerate(placement) if home == rank}
    stages = [_torch_stage(module, index, len(placement)) for index, module in own.items()]
    made = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=small_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(text)
        made._load_csv(str(path))
    batch, target = small_data(num_microbatches, seed=0)
    losses: list[Tensor] = []
    given = (batch,) if 0 in own else ()
    is_last = len(placement) - 1 in own
    made.step(*given, target=target if is_last else None, losses=losses)
    expected_losses, expected = reference(num_microbatches)
    found = torch.stack(losses).detach() if is_last else expected_losses[0]
    wanted = _by_stage(expected[0], len(placement))
    return _compared(
        (found - expected_losses[0]).abs().max(),
        [
            (_whole(parameter.grad), gradient)
            for index, module in own.items()
            for parameter, gradient in zip(module.parameters(), wanted[index], strict=True)
        ],
    )


def _torch_stage(module: nn.Module, index: int, num_stages: int) -> Any:
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    state = torch.zeros(SAMPLES, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True), tokens
    return PipelineStage(
        module,
        index,
        num_stages,
        CPU,
        input_args=state if index else (tokens,),
        output_args=state if index < num_stages - 1 else state[:1],
    )


def train_sharded(
    schedule: Schedule, num_microbatches: int, steps: int, *, reshard: bool
) -> Sharded:
    """Run steps on two pipeline ranks, each of whose stages two data-parallel ranks share.

    Parameters
    ----------
    reshard
        Whether weights are sharded again after every forward.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    row, column = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    group = mesh["pipeline"].get_group()
    own, whole = (
        {s: one for s, one in enumerate(small_stages(len(schedule.placement)))
         if schedule.placement[s] == row}
        for _ in range(2)
    )  # fmt: skip
    for module in own.values():
        _shard(module, mesh["data"], reshard=reshard)
    runner = PipelineRunner(own, schedule, small_loss, group=group, min_offload_bytes=1)
    worst, moved = 0.0, 0
    for step in range(steps):
        before = runner.offloaded_bytes
        losses = runner.step(*small_data(num_microbatches, seed=_seed(step, column)))
        moved = runner.offloaded_bytes - before
        if losses is not None:
            expected = _losses(num_microbatches, _seed(step, column))
            worst = max(worst, float((losses - expected).abs().max()))
    runner.close()
    plain = PipelineRunner(whole, schedule, small_loss, group=group, min_offload_bytes=1)
    plain.step(*small_data(num_microbatches, seed=0))
    plain.close()
    wanted = _by_stage(_mean_gradients(num_microbatches, steps), len(schedule.placement))
    pairs = [
        (_whole(parameter.grad), gradient)
        for index, module in own.items()
        for parameter, gradient in zip(module.parameters(), wanted[index], strict=True)
    ]
    return Sharded(_compared(torch.tensor(worst), pairs), moved, plain.offloaded_bytes)


def _shard(module: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())


def _seed(step: int, column: int) -> int:
    return 10 * step + column


def _losses(num_microbatches: int, seed: int) -> Tensor:
    (model,) = small_stages(1)
    return step_alone(model, small_data(num_microbatches, seed=seed), num_microbatches)


def _mean_gradients(num_microbatches: int, steps: int) -> list[Tensor]:
    """The gradients of both data-parallel columns' batches, averaged, added up over the steps."""
    (model,) = small_stages(1)
    for step in range(steps):
        for column in range(2):
            data = small_data(num_microbatches, seed=_seed(step, column))
            step_alone(model, data, num_microbatches)
    return [_whole(parameter.grad) / 2 for parameter in model.parameters()]


class Mixed(NamedTuple):
    """One rank's bf16 step beside sums, in double precision, of each micro-batch's gradients."""

    losses_equal: bool
    worst_difference: float
    all_single: bool
    offloaded_bytes: int


def train_mixed(schedule: Schedule, num_microbatches: int) -> Mixed:
    """Run a step that multiplies in bf16 on parameters in single precision."""
    config = replace(CONFIG, dtype=torch.float32)
    num_stages = len(schedule.placement)
    own = own_part(schedule, [MixedPrecision(part) for part in make_stages(config, num_stages)])
    runner = PipelineRunner(own, schedule, token_loss, min_offload_bytes=1)
    batch, target = random_tokens(config, num_microbatches, seed=0)
    losses = runner.step(batch, target)
    runner.close()
    model = torch.nn.Sequential(*map(MixedPrecision, make_stages(config, num_stages)))
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    expected = []
    parts = zip(batch.chunk(num_microbatches), target.chunk(num_microbatches), strict=True)
    for inputs, wanted in parts:
        model.zero_grad()
        loss = token_loss(model(inputs), wanted)
        (loss / num_microbatches).backward()
        expected.append(loss.detach())
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total.add_(_whole(parameter.grad))
    names = dict(zip((name for name, _ in model.named_parameters()), sums, strict=True))
    pairs = [
        (_whole(parameter.grad), names[f"{index}.{name}"])
        for index, module in own.items()
        for name, parameter in module.named_parameters()
    ]
    return Mixed(
        losses is None or torch.equal(losses, torch.stack(expected)),
        max(float((ours - wanted).norm() / wanted.norm()) for ours, wanted in pairs),
        all(ours.dtype is torch.float32 for ours, _ in pairs),
        runner.offloaded_bytes,
    )


def go_on_without_rank_zero(schedule: Schedule, num_microbatches: int) -> bool:
    """Hold rank 0 in its last action until all others have left the step; whether they could."""
    rank, store = dist.get_rank(), default_store()
    _, runner = small_runner(schedule)
    runner.step(*small_data(num_microbatches, seed=0))
    if rank == 0:
        runner.observe(_Holds(schedule.programs[0][-1], ["left 1", "left 2", "left 3"]))
    runner.step(*small_data(num_microbatches, seed=1))
    store.set(f"left {rank}", "")
    runner.close()
    dist.barrier()
    store.delete_key(f"left {rank}")
    return True


class _Holds:
    """Waits for keys before an action; raises when they do not come."""

    def __init__(self, action: Action, keys: list[str]) -> None:
        self._action, self._keys = action, keys

    def begin(self, action: Action) -> None:
        if action == self._action:
            default_store().wait(self._keys, timedelta(seconds=20))

    def end(self, action: Action) -> None:
        """Nothing is noted."""


def _by_stage(gradients: Sequence[Tensor], num_stages: int) -> list[Sequence[Tensor]]:
    size = len(gradients) // num_stages
    return [gradients[size * index : size * (index + 1)] for index in range(num_stages)]


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "a parameter got no gradient"
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _compared(losses_difference: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Compared:
    # NaN must not pass for agreement: max() would skip it.
    return Compared(
        float(losses_difference.nan_to_num(nan=float("inf"))),
        max(float((a - b).abs().max().nan_to_num(nan=float("inf"))) for a, b in pairs),
        max(float(b.abs().max()) for _, b in pairs),
        len(pairs),
    )
