"""What the ranks run beside others: torch's own runtime on our CSV, FSDP2's shards, autocast."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from examples.train_gpt import MixedPrecision, token_loss
from optpipe import Schedule
from optpipe.errors import PreflightError
from optpipe.runtime import PipelineRunner, passes
from optpipe.runtime.demo_model import make_stages, random_tokens
from optpipe.runtime.measuring import Effort, measure
from optpipe.runtime.passes import deferred_bytes
from optpipe.runtime.preflight import check_wrappers
from optpipe.runtime.torch_names import default_store
from optpipe.schedule import Action
from tests.runtime.cases import CONFIG
from tests.runtime.small_cases import MODELS, Deferred, Trained, reference, watch_releases
from tests.runtime.small_model import (
    SAMPLES,
    WIDTH,
    own_part,
    small_data,
    small_loss,
    small_runner,
    small_stages,
    step_alone,
    torch_stages,
)
from tests.runtime.trainers.torchtitan_cases import shim_torchtitan


class Sharded(NamedTuple):
    """One rank's steps with sharded stages, and what one moved, beside the same with whole ones."""

    compared: Trained
    offloaded_bytes: int
    offloaded_bytes_whole: int


def train_by_torch(text: str, placement: Sequence[int], num_microbatches: int) -> Trained:
    """Run a step of torch's own runtime, as torchtitan does, by a CSV."""
    stages = torch_stages(placement)
    own = {stage.stage_index: stage.submod for stage in stages}
    made = _PipelineScheduleRuntime(list(stages), num_microbatches, loss_fn=small_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(text)
        made._load_csv(str(path))
    batch, target = small_data(num_microbatches, seed=0)
    losses: list[Tensor] = []
    is_last = len(placement) - 1 in own
    made.step(*((batch,) if 0 in own else ()), target=target if is_last else None, losses=losses)
    expected_losses, expected = reference(num_microbatches)
    found = Trained()
    if is_last:
        equal = torch.allclose(torch.stack(losses), expected_losses[0], rtol=0, atol=1e-13)
        found.losses_equal = equal
    modules = small_stages(len(placement))
    found.compare(own, [own.get(s, one) for s, one in enumerate(modules)], expected[0])
    return found


def train_sharded(
    schedule: Schedule, num_microbatches: int, steps: int, *, reshard: bool
) -> Sharded:
    """Run steps on two pipeline ranks, each of whose stages two data-parallel ranks share.

    ``reshard`` says whether weights are sharded again after every forward.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    row, column = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    group = mesh["pipeline"].get_group()
    modules, wholes = (small_stages(len(schedule.placement)) for _ in range(2))
    own, whole = (own_part(schedule.placement, part, row) for part in (modules, wholes))
    for module in own.values():
        _shard(module, mesh["data"], reshard=reshard)
    runner = PipelineRunner(own, schedule, small_loss, group=group, min_offload_bytes=1)
    found, moved = _run(runner, num_microbatches, steps, column)
    plain = PipelineRunner(whole, schedule, small_loss, group=group, min_offload_bytes=1)
    plain.step(*small_data(num_microbatches, seed=0))
    plain.close()
    halves = [2 * count for count in runner.deferred_bytes.values()]
    assert halves == list(plain.deferred_bytes.values()), "a sharded layer makes its gradient in I"
    found.compare(own, modules, _mean_gradients(num_microbatches, steps))
    return Sharded(found, moved, plain.offloaded_bytes)


def _run(
    runner: PipelineRunner, num_microbatches: int, steps: int, column: int, model: str = "small"
) -> tuple[Trained, int]:
    """Run a data-parallel column's steps; their losses compared, the bytes that the last moved."""
    found, moved = Trained(), 0
    for step in range(steps):
        before = runner.offloaded_bytes
        data = small_data(num_microbatches, seed=_seed(step, column))
        losses = runner.step(*data)
        moved = runner.offloaded_bytes - before
        if losses is not None:
            expected = step_alone(MODELS[model].stages(1)[0], data, num_microbatches)
            equal = torch.allclose(losses, expected, rtol=0, atol=1e-13)
            found.losses_equal = found.losses_equal and equal
    runner.close()
    return found, moved


def train_replicas(
    schedule: Schedule, num_microbatches: int, steps: int, *, find_unused: bool, model: str
) -> Trained:
    """Run steps on two pipeline ranks, each of whose stages DDP repeats on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    row, column = mesh["pipeline"].get_local_rank(), mesh["data"].get_local_rank()
    modules = MODELS[model].stages(len(schedule.placement))
    own: dict[int, nn.Module] = {
        index: DistributedDataParallel(
            module, process_group=mesh["data"].get_group(), find_unused_parameters=find_unused
        )
        for index, module in own_part(schedule.placement, modules, row).items()
    }
    group = mesh["pipeline"].get_group()
    runner = PipelineRunner(own, schedule, small_loss, group=group, min_offload_bytes=1)
    found, _ = _run(runner, num_microbatches, steps, column, model)
    found.compare(own, modules, _mean_gradients(num_microbatches, steps, model))
    return found


class TensorParallel(NamedTuple):
    """One rank's steps, the bytes whose gradients it promised to W, and what it put aside."""

    compared: Trained
    promised_bytes: dict[int, int]
    deferred_bytes: int
    offloaded_bytes: int


def train_tensor_parallel(schedule: Schedule, num_microbatches: int) -> TensorParallel:
    """Run two steps on two pipeline ranks, each of whose linear layers two ranks share."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    modules = small_stages(len(schedule.placement))
    own = own_part(schedule.placement, modules, mesh["pipeline"].get_local_rank())
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    for module in own.values():
        for block in module.blocks:  # type: ignore[union-attr]
            parallelize_module(block, mesh["tensor"], plan)
    group = mesh["pipeline"].get_group()
    runner = PipelineRunner(own, schedule, small_loss, group=group, min_offload_bytes=1)
    seen = Deferred(runner)
    found, moved = _run(runner, num_microbatches, 2, column=0)
    (model,) = small_stages(1)
    for step in range(2):
        step_alone(model, small_data(num_microbatches, _seed(step, 0)), num_microbatches)
    found.compare(own, modules, [_whole(parameter.grad) for parameter in model.parameters()])
    promised = runner.deferred_bytes
    for module in own.values():
        module.compile()
        assert deferred_bytes(module) == 0, "a compiler sees no DTensors at run time"
    return TensorParallel(found, promised, seen.bytes, moved)


class SpreadStage(torch.nn.Module):
    """Takes and returns, on a mesh, its activations as a DTensor, beside a plain table.

    Of what it receives the gradient is Partial where that was replicated: a product is its only
    use.
    """

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.leave = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.last = first, last
        self.mesh: DeviceMesh | None = None
        self.layout: Placement = Replicate()

    def spread(self, mesh: DeviceMesh, layout: Placement) -> None:
        self.mesh, self.layout = mesh, layout
        into = ColwiseParallel(input_layouts=layout, use_local_output=False)
        out = RowwiseParallel(output_layouts=layout, use_local_output=False)
        parallelize_module(self, mesh, {"enter": into, "leave": out, "wide": into, "narrow": out})
        if layout.is_shard():
            parallelize_module(self.norm, mesh, SequenceParallel())
        else:
            distribute_module(self.norm, mesh)

    def forward(self, state: Tensor, *tables: Tensor) -> Any:
        if self.first and self.mesh is not None:
            whole = DTensor.from_local(state, self.mesh, [Replicate()])
            state = whole.redistribute(placements=[self.layout])
        assert isinstance(state, DTensor) == (self.mesh is not None)
        (table,) = tables or (torch.arange(1.0, 4.0, dtype=torch.float64),)
        made = self.leave(torch.tanh(self.enter(state)))
        made = made + self.narrow(torch.tanh(self.wide(self.norm(made)))) * float(table.sum())
        if not self.last:
            return made, table
        return made.full_tensor() if isinstance(made, DTensor) else made


_MANY = 32
"""Samples of the micro-batch that is measured."""


class Spread(NamedTuple):
    """A rank's steps with DTensors between stages, and the elements of each tensor it sent.

    ``output_bytes`` are those measured of each stage.
    """

    compared: Trained
    deferred_bytes: int
    offloaded_bytes: int
    sent: list[int]
    output_bytes: list[int]


def train_spread(schedule: Schedule, num_microbatches: int, layout: Placement) -> Spread:
    """Run two steps and an evaluation on two pipeline ranks times two tensor-parallel ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    count = len(schedule.placement)

    def stages() -> list[nn.Module]:
        torch.manual_seed(4)
        made = [SpreadStage(first=not s, last=s == count - 1).double() for s in range(count)]
        return list[torch.nn.Module](made)

    with torch.random.fork_rng(devices=[]):
        modules, wholes = stages(), stages()
    own = own_part(schedule.placement, modules, mesh["pipeline"].get_local_rank())
    for module in own.values():
        module.spread(mesh["tensor"], layout)  # type: ignore[operator]
    group = mesh["pipeline"].get_group()
    given, target = torch.randn(2, _MANY, 3, WIDTH, dtype=torch.float64)
    profile = measure(
        modules,
        given,
        loss_fn=small_loss,
        target=target,
        placement=schedule.placement,
        effort=Effort(repeats=1, warmups=0),
        group=group,
        links=False,
        memory_bytes=2**40,
    )
    output_bytes = [stage.output_bytes for stage in profile.problem(num_microbatches).stages]
    runner = PipelineRunner(own, schedule, small_loss, group=group, min_offload_bytes=1)
    seen, sent, batch_p2p = Deferred(runner), list[int](), torch_schedules._batch_p2p
    found, model = Trained(), _Chain(*wholes)
    watch_releases(runner.offloader, found)

    def noted(operations: Any, desc: str | None = None) -> Any:
        sent.extend(one.tensor.numel() for one in operations if one.op is dist.isend)
        return batch_p2p(operations, desc)

    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        size = (2, SAMPLES * num_microbatches, 3, WIDTH)
        batch, target = torch.randn(size, dtype=torch.float64, generator=generator)
        expected = step_alone(model, (batch, target), num_microbatches)
        with mock.patch.object(torch_schedules, "_batch_p2p", noted):
            losses = runner.step(batch, target)
        evaluated = runner.eval(batch, target).losses
        for ours in (losses, evaluated):
            equal = ours is None or torch.allclose(ours, expected, rtol=0, atol=1e-13)
            found.losses_equal = found.losses_equal and equal
    found.compare(own, modules, [_whole(parameter.grad) for parameter in model.parameters()])
    runner.close()
    return Spread(found, seen.bytes, runner.offloaded_bytes, sent, output_bytes)


class _Chain(torch.nn.Sequential):
    def forward(self, state: Any) -> Any:
        for stage in self:
            state = stage(*state) if isinstance(state, tuple) else stage(state)
        return state


def train_sharded_bf16(schedules: Sequence[Schedule], num_microbatches: int) -> float:
    """Train by schedules; return the worst relative difference from the gradients of the first."""
    return _train_gathered_in_bf16(schedules, num_microbatches, experts=False)[0]


def train_sharded_experts(
    schedules: Sequence[Schedule], num_microbatches: int
) -> tuple[float, int, int]:
    """The same with torchtitan's experts; beside it what the last promised, and made at its W's."""
    made: list[Tensor] = []
    make = passes._GroupedDeferred.make

    def noted(deferred: Any) -> None:
        made.append(deferred.weight)
        make(deferred)

    with mock.patch.object(passes._GroupedDeferred, "make", noted):
        worst, promised = _train_gathered_in_bf16(schedules, num_microbatches, experts=True)
    return worst, promised, len(made)


def _train_gathered_in_bf16(
    schedules: Sequence[Schedule], num_microbatches: int, *, experts: bool
) -> tuple[float, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    row = mesh["pipeline"].get_local_rank()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    gradients: list[list[Tensor]] = []
    promised = 0
    width = 8 if experts else WIDTH
    for schedule in schedules:
        modules = [module.float() for module in small_stages(len(schedule.placement), width)]
        own = own_part(schedule.placement, modules, row)
        for module in own.values():
            for block in module.blocks:  # type: ignore[union-attr]
                if experts:
                    block.wide = torch.nn.Sequential(_Experts(width), block.wide)
                fully_shard(block, mesh=mesh["data"], mp_policy=policy)
            fully_shard(module, mesh=mesh["data"], mp_policy=policy)
        runner = PipelineRunner(
            own, schedule, small_loss, group=mesh["pipeline"].get_group(), min_offload_bytes=1
        )
        runner.step(*small_data(num_microbatches, seed=0, width=width))
        promised = sum(runner.deferred_bytes.values())
        runner.close()
        parameters = [p for module in own.values() for p in module.parameters()]
        assert all(isinstance(p.grad, DTensor) for p in parameters)
        gradients.append([p.grad.full_tensor() for p in parameters])  # type: ignore[union-attr]
    wanted, *others = gradients
    pairs = [pair for found in others for pair in zip(found, wanted, strict=True)]
    worst = max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
    return worst, promised


class _Experts(torch.nn.Module):
    """Two of torchtitan's grouped experts; each token goes to one of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shim_torchtitan()
        from torchtitan.models.common.moe import GroupedExperts

        config = GroupedExperts.Config(dim=width, hidden_dim=2 * width, num_experts=2)
        self.grouped: Any = config.build()
        generator = torch.Generator().manual_seed(5)
        for weight in self.grouped.parameters():
            weight.data = torch.randn(weight.shape, generator=generator)

    def forward(self, given: Tensor) -> Tensor:
        tokens = given.flatten(0, -2)
        chosen = torch.arange(len(tokens)) % 2
        order = chosen.argsort(stable=True)
        made: Tensor = self.grouped(tokens[order], chosen.bincount(minlength=2))
        return torch.zeros_like(made).index_copy(0, order, made).view_as(given)


def _shard(module: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
    for index, block in enumerate(module.blocks):  # type: ignore[arg-type]
        if index == 0:
            # As torchtitan shards the head of a model: a layer by itself.
            fully_shard(block.narrow, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())


def _seed(step: int, column: int) -> int:
    return 10 * step + column


def _mean_gradients(num_microbatches: int, steps: int, name: str = "small") -> list[Tensor]:
    """The gradients of both data-parallel columns' batches, averaged, added up over the steps."""
    (model,) = MODELS[name].stages(1)
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
    own = own_part(
        schedule.placement, [MixedPrecision(part) for part in make_stages(config, num_stages)]
    )
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


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "a parameter got no gradient"
    return gradient


def refused_wrappers() -> list[str]:
    """What is said of stages of which only a part is data-parallel."""

    def layers() -> nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def wrapped(part: nn.Module) -> str:
        try:
            check_wrappers({3: torch.nn.Sequential(part)})
        except PreflightError as error:
            return str(error)
        return "not refused"

    whole, inner = layers(), layers()
    for part in (*whole, whole, inner):
        fully_shard(part)
    check_wrappers({0: whole, 1: DistributedDataParallel(layers())})
    return [wrapped(DistributedDataParallel(layers())), wrapped(inner)]
