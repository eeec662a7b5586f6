"""What the ranks run beside others: torch's own runtime on our CSV, FSDP2's shards, autocast."""

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    Pipe,
    PipelineStage,
    Schedule1F1B,
    SplitPoint,
    pipeline,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
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
from optpipe import Problem, Schedule
from optpipe.errors import PreflightError
from optpipe.runtime import PipelineRunner, follow, passes
from optpipe.runtime.demo import make_stages, random_tokens
from optpipe.runtime.measuring import Effort, measure
from optpipe.runtime.measuring.times import Clock, ping_pong
from optpipe.runtime.passes import deferred_bytes
from optpipe.runtime.preflight import check_wrappers, made_on, num_microbatches_of
from optpipe.runtime.torch_names import backends, default_store
from optpipe.runtime.trainers import Tie, split, ties_of
from optpipe.schedule import Action
from tests.runtime.cases import CONFIG
from tests.runtime.schedules import make_problem, make_schedule, one_f_one_b
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
from tests.runtime.trainers.language_model import NUM_BLOCKS, WORDS, language_model, tokens
from tests.runtime.trainers.language_model import token_loss as token_loss_of_words
from tests.runtime.trainers.torchtitan_cases import shim_torchtitan
from tests.runtime.watching import counted, gradient_of, gradients_apart, refusal, sent_by


def train_by_torch(text: str, placement: Sequence[int], num_microbatches: int) -> Trained:
    """Run a step of torch's own runtime, as torchtitan does, by a CSV."""
    stages = torch_stages(placement)
    own = {stage.stage_index: stage.submod for stage in stages}
    runtime = _PipelineScheduleRuntime(list(stages), num_microbatches, loss_fn=small_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(text)
        runtime._load_csv(str(path))
    batch, target = small_data(num_microbatches, seed=0)
    losses: list[Tensor] = []
    is_last = len(placement) - 1 in own
    runtime.step(*((batch,) if 0 in own else ()), target=target if is_last else None, losses=losses)
    expected_losses, expected = reference(num_microbatches)
    found = Trained()
    if is_last:
        equal = torch.allclose(torch.stack(losses), expected_losses[0], rtol=0, atol=1e-13)
        found.losses_equal = equal
    modules = small_stages(len(placement))
    found.compare(own, [own.get(s, one) for s, one in enumerate(modules)], expected[0])
    return found


class _Skipping(nn.Module):
    """A layer in each of four stages, and an embedding that the first and the third read."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, given: Tensor) -> Tensor:
        state: Tensor = self.token(given)
        first = state
        for index, layer in enumerate(self.layers):
            state = layer(state + first if index == 3 else state)
        return state


def _traced(model: nn.Module, num_stages: int, blocks: str = "blocks", size: int = 1) -> Pipe:
    """Return a model as torch cuts it; all stages but the first begin with a block."""
    cuts = {f"{blocks}.{size * stage}": SplitPoint.BEGINNING for stage in range(1, num_stages)}
    return pipeline(model, (tokens(SAMPLES, 0)[0],), split_spec=cuts)


def _made_by_torch(kind: str, placement: Sequence[int]) -> tuple[Any, Sequence[Tie]]:
    """Return this rank's stages of the language model as users of torch have them, and its ties."""
    num_stages, rank, device = len(placement), dist.get_rank(), torch.device("cpu")
    own = [stage for stage, home in enumerate(placement) if home == rank]
    if kind == "PipelineStage":
        modules = split(language_model(), [NUM_BLOCKS // num_stages] * num_stages, check=False)
        stages = [PipelineStage(modules[stage], stage, num_stages, device) for stage in own]
        return stages, ties_of(modules)
    pipe = _traced(language_model(), num_stages, size=NUM_BLOCKS // num_stages)
    if kind == "Pipe":
        return pipe, ()
    ties = [Tie(((0, "token.weight"), (num_stages - 1, "head.weight")))]
    if kind == "build_stage":
        return {stage: pipe.build_stage(stage, device) for stage in own}, ties
    return {stage: pipe.get_stage_module(stage) for stage in own}, ties


def train_made_by_torch(schedule: Schedule, problem: Problem, kind: str) -> Trained:
    """Train two steps of the language model, and compare gradients with the whole model's."""
    count = num_microbatches_of(schedule)
    given, ties = _made_by_torch(kind, schedule.placement)
    runner = PipelineRunner(
        given, schedule, token_loss_of_words, problem, ties=ties, min_offload_bytes=1
    )
    found, seen = Trained(promised_bytes=sum(runner.deferred_bytes.values())), Deferred(runner)
    whole = language_model()
    for step in range(2):
        data = tokens(SAMPLES * count, step)
        losses = runner.step(data[0], target=data[1])
        expected = step_alone(whole, data, count, token_loss_of_words)
        if losses is not None:
            found.losses_equal &= torch.allclose(losses, expected, rtol=0, atol=1e-13)
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    for module in runner._spec.stages.values():
        for name, parameter in module.named_parameters():
            # A traced stage also has copies of tied weights that it does not use.
            if parameter.grad is not None:
                apart = float((parameter.grad - gradient_of(wanted[name])).abs().max())
                found.worst_difference = max(found.worst_difference, apart)
                found.num_gradients += 1
    runner.close()
    found.deferred_bytes, found.offloaded_bytes = seen.bytes, runner.offloaded_bytes
    return found


def refused_made_by_torch(schedule: Schedule) -> list[str]:
    """Return how stages of torch's are refused that do not fit the schedule or this runtime."""
    rank, cpu, four = dist.get_rank(), torch.device("cpu"), len(schedule.placement)
    layer = nn.Linear(WIDTH, WIDTH)
    alone = [dist.new_group([one]) for one in range(four)]
    convolution = nn.Sequential(*(nn.Conv1d(SAMPLES, SAMPLES, 1) for _ in range(four))).double()
    convolved = pipeline(
        convolution,
        (torch.ones(SAMPLES, 3, dtype=torch.float64),),
        split_spec={str(stage): SplitPoint.BEGINNING for stage in range(1, four)},
    )
    given: list[Any] = [
        {rank: PipelineStage(layer, (rank + 1) % four, four, cpu)},
        [PipelineStage(layer, rank, four + 1, cpu)],
        [PipelineStage(layer, rank, four, torch.device("meta"))],
        [PipelineStage(layer, rank, four, cpu, group=alone[rank])],
        [PipelineStage(layer, rank, four, cpu, dw_builder=lambda: lambda: None)],
        _traced(language_model(), four - 2, size=2),
        skipping := _traced(_Skipping(), four, "layers"),
        [skipping.build_stage(rank, cpu)],
        convolved,
    ]
    found = [
        refusal(lambda: PipelineRunner(one, schedule, small_loss))  # noqa: B023
        for one in given
    ]
    dist.destroy_process_group(alone[rank])
    return found


class _Sequences(nn.Module):
    """A layer of which positions come first, then samples; all samples share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, state: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        changed: Tensor = state + torch.tanh(self.layer(state) + bias) * mask.unsqueeze(-1)
        return changed


class Alike(NamedTuple):
    """Whether a step gave what one of torch's own schedules gave, and what it was."""

    outputs: bool
    losses: bool
    gradients: float
    later: bool
    """Whether a step that is not asked for outputs returns its losses."""


def step_as_torch_does(schedule: Schedule, problem: Problem) -> Alike:
    """Run the same batch by a schedule of torch's and by ours, in the same words."""
    rank, count, length = dist.get_rank(), num_microbatches_of(schedule), 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        ours = [_Sequences() for _ in schedule.placement][rank]
        batch, wanted = torch.rand(2, length, 2 * count, WIDTH, dtype=torch.float64)
        mask = torch.rand(length, 2 * count, dtype=torch.float64)
        bias = torch.rand(length, 1, WIDTH, dtype=torch.float64)
        weight = torch.rand(length, 1, 1, dtype=torch.float64)
    theirs = copy.deepcopy(ours)

    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return ((output - target[0]).square() * target[1]).mean()

    device = torch.device("cpu")
    torchs = Schedule1F1B(
        PipelineStage(theirs, rank, len(schedule.placement), device),
        count,
        lambda output, target: loss(output, (target.transpose(0, 1), weight)),
        kwargs_chunk_spec={"mask": TensorChunkSpec(1), "bias": _Replicate()},  # type: ignore[dict-item]
        output_merge_spec=TensorChunkSpec(1),  # type: ignore[arg-type]
        args_chunk_spec=(TensorChunkSpec(1),),
    )
    runner = PipelineRunner(
        [PipelineStage(ours, rank, len(schedule.placement), device)],
        schedule,
        loss,
        problem,
        kwargs_chunk_spec={"mask": TensorChunkSpec(1), "bias": None},
        target_chunk_spec=[1, None],
        output_merge_spec=TensorChunkSpec(1),
        min_offload_bytes=1,
        args_chunk_spec=(TensorChunkSpec(1),),
    )
    args = (batch,) if rank == 0 else ()
    their_losses, our_losses = list[Tensor](), [torch.zeros(())]
    their_outputs, our_outputs = (
        one.step(*args, target=target, mask=mask, bias=bias, losses=losses, return_outputs=True)
        for one, target, losses in (
            (torchs, wanted.transpose(0, 1), their_losses),
            (runner, [wanted, weight], our_losses),
        )
    )
    gradients = gradients_apart(ours, theirs)
    again: list[Tensor] = []
    later = runner.step(*args, target=(wanted, weight), mask=mask, bias=bias, losses=again)
    runner.close()
    if not runner.holds_last:
        assert their_outputs is our_outputs is later is None
        assert len(our_losses) == 1
        return Alike(True, True, gradients, True)
    assert not our_outputs.requires_grad
    return Alike(
        torch.equal(our_outputs, their_outputs),
        len(our_losses) == count and all(map(torch.equal, our_losses, their_losses)),
        gradients,
        torch.equal(later, torch.stack(again)) and torch.equal(later, torch.stack(our_losses)),
    )


def train_on_mesh(
    schedule: Schedule, num_microbatches: int, way: str, model: str = "small"
) -> Trained:
    """Run two steps on two pipeline ranks, each of whose stages two ranks share in some way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "others"))
    # Tensor-parallel ranks get the same data, others their part.
    num_columns = 1 if way == "tensor parallel" else 2
    column = mesh["others"].get_local_rank() % num_columns
    modules = MODELS[model].stages(len(schedule.placement))
    own = own_part(schedule.placement, modules, mesh["pipeline"].get_local_rank())
    shared = {index: _WAYS[way](module, mesh["others"]) for index, module in own.items()}
    group = mesh["pipeline"].get_group()
    runner = PipelineRunner(shared, schedule, small_loss, group=group, min_offload_bytes=1)
    found, seen = Trained(promised_bytes=sum(runner.deferred_bytes.values())), Deferred(runner)
    for step in range(2):
        data = small_data(num_microbatches, seed=_seed(step, column))
        losses = runner.step(*data)
        if losses is not None:
            expected = step_alone(MODELS[model].stages(1)[0], data, num_microbatches)
            equal = torch.allclose(losses, expected, rtol=0, atol=1e-13)
            found.losses_equal = found.losses_equal and equal
    runner.close()
    found.deferred_bytes, found.offloaded_bytes = seen.bytes, runner.offloaded_bytes
    (whole,) = MODELS[model].stages(1)
    for step in range(2):
        for column in range(num_columns):
            step_alone(whole, small_data(num_microbatches, _seed(step, column)), num_microbatches)
    wanted = [gradient_of(parameter) / num_columns for parameter in whole.parameters()]
    found.compare(own, modules, wanted)
    whole_norm = torch.stack([one.norm() for one in wanted]).norm()
    norm = runner.clip_grad_norm_(float(whole_norm) / 2)
    torch.testing.assert_close(norm, whole_norm, rtol=1e-12, atol=0)
    clipped = Trained()
    clipped.compare(own, modules, [one / 2 for one in wanted])
    # torch adds 1e-6 to the norm that it divides by.
    assert clipped.worst_difference < 1e-5 * clipped.largest_gradient
    if way == "tensor parallel":
        for module in own.values():
            module.compile()
            assert deferred_bytes(module) == 0, "a compiler sees no DTensors at run time"
    return found


def train_tied_on_mesh(
    schedule: Schedule, num_microbatches: int, way: str, *, find_unused: bool
) -> tuple[str, float]:
    """Run two steps of stages with a tied weight, in DDP; two pipeline ranks times two others.

    Return how it was refused, if it was, and the largest relative difference of a gradient.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "others"))
    row, column = mesh["pipeline"].get_local_rank(), mesh["others"].get_local_rank()
    count = len(schedule.placement)
    last = count - 1
    sample = tokens(1, seed=0)[0]
    stages = split(language_model(), [NUM_BLOCKS // count] * count, sample=sample)
    ties = ties_of(stages)
    if way not in ("tied, then wrapped", "wrapped, then frozen"):
        stages[last] = copy.deepcopy(stages[last])
    own: dict[int, Any] = dict(own_part(schedule.placement, stages, row))
    shared: dict[int, nn.Module] = {
        index: _replicated(module, mesh["others"], find_unused=find_unused)
        for index, module in own.items()
        if way != "wrapped in part" or index != last
    }
    if way in ("wrapped, then tied by hand", "wrapped in part") and {0, last} <= own.keys():
        own[last].head.weight = own[0].token.weight
    if way == "wrapped, then frozen" and last in own:
        own[last].norm.bias.requires_grad_(False)
    group = mesh["pipeline"].get_group()
    given = () if way == "wrapped, then tied by hand" else ties
    runner = PipelineRunner(
        own | shared, schedule, token_loss_of_words, group=group, ties=given, min_offload_bytes=1
    )
    whole, worst = language_model(), 0.0
    for step in range(2):
        data = [tokens(2 * num_microbatches, seed=_seed(step, each)) for each in range(2)]
        batch, target = data[column]
        if text := refusal(lambda: runner.step(batch, target=target)):  # noqa: B023
            return text, worst
        for one in data:
            step_alone(whole, one, num_microbatches, token_loss_of_words)
        wanted = dict(whole.named_parameters(remove_duplicate=False))
        for module in own.values():
            for name, parameter in module.named_parameters():
                expected = gradient_of(wanted[name]) / 2
                apart = (gradient_of(parameter) - expected).norm() / expected.norm()
                worst = max(worst, float(apart))
    runner.close()
    return "", worst


def _replicated(module: Any, mesh: DeviceMesh, *, find_unused: bool) -> nn.Module:
    return DistributedDataParallel(
        module, process_group=mesh.get_group(), find_unused_parameters=find_unused
    )


def _sharded(module: Any, mesh: DeviceMesh, *, reshard: bool) -> nn.Module:
    """``reshard`` says whether weights are sharded again after every forward."""
    # As torchtitan shards the head of a model: a layer by itself.
    for part in (module.blocks[0].narrow, *module.blocks, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    return module  # type: ignore[no-any-return]


def _tensor_parallel(module: Any, mesh: DeviceMesh) -> nn.Module:
    for block in module.blocks:
        parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    return module  # type: ignore[no-any-return]


_WAYS: dict[str, Callable[[Any, DeviceMesh], nn.Module]] = {
    "DDP": partial(_replicated, find_unused=False),
    "DDP that looks for what is unused": partial(_replicated, find_unused=True),
    "FSDP2": partial(_sharded, reshard=False),
    "FSDP2, resharded": partial(_sharded, reshard=True),
    "tensor parallel": _tensor_parallel,
}


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
        state = self.leave(torch.tanh(self.enter(state)))
        state = state + self.narrow(torch.tanh(self.wide(self.norm(state)))) * float(table.sum())
        if not self.last:
            return state, table
        return state.full_tensor() if isinstance(state, DTensor) else state


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
        found = [SpreadStage(first=not s, last=s == count - 1).double() for s in range(count)]
        return list[torch.nn.Module](found)

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
    seen, sent = Deferred(runner), list[int]()
    found, model = Trained(), _Chain(*wholes)
    watch_releases(runner.offloader, found)

    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        size = (2, SAMPLES * num_microbatches, 3, WIDTH)
        batch, target = torch.randn(size, dtype=torch.float64, generator=generator)
        expected = step_alone(model, (batch, target), num_microbatches)
        with counted(dist, "isend") as posted:
            losses = runner.step(batch, target)
        sent += [one.numel() for one in sent_by(posted)]
        evaluated = runner.eval(batch, target).losses
        for ours in (losses, evaluated):
            equal = ours is None or torch.allclose(ours, expected, rtol=0, atol=1e-13)
            found.losses_equal = found.losses_equal and equal
    found.compare(own, modules, [gradient_of(parameter) for parameter in model.parameters()])
    runner.close()
    return Spread(found, seen.bytes, runner.offloaded_bytes, sent, output_bytes)


class _Chain(torch.nn.Sequential):
    def forward(self, state: Any) -> Any:
        for stage in self:
            state = stage(*state) if isinstance(state, tuple) else stage(state)
        return state


def train_gathered_in_bf16(
    schedules: Sequence[Schedule], num_microbatches: int
) -> tuple[float, int, int]:
    """Train by schedules blocks with experts whose weights FSDP2 gathers in bf16.

    Return the worst relative difference from the gradients of the first schedule, and of the last
    how many bytes of gradients were promised to W's, and how many of experts' were made there.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    row, group = mesh["pipeline"].get_local_rank(), mesh["pipeline"].get_group()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    gradients: list[list[Tensor]] = []
    width, promised, num_at_w = 8, 0, 0
    for schedule in schedules:
        modules = [module.float() for module in small_stages(len(schedule.placement), width)]
        own = own_part(schedule.placement, modules, row)
        for module in own.values():
            for block in module.blocks:  # type: ignore[union-attr]
                block.wide = torch.nn.Sequential(_Experts(width), block.wide)
                fully_shard(block, mesh=mesh["data"], mp_policy=policy)
            fully_shard(module, mesh=mesh["data"], mp_policy=policy)
        runner = PipelineRunner(own, schedule, small_loss, group=group, min_offload_bytes=1)
        with counted(passes._GroupedDeferred, "make") as made_at_w:
            runner.step(*small_data(num_microbatches, seed=0, width=width))
        promised = sum(runner.deferred_bytes.values())
        num_at_w += made_at_w.call_count
        runner.close()
        parameters = [p for module in own.values() for p in module.parameters()]
        assert all(isinstance(p.grad, DTensor) for p in parameters)
        gradients.append([p.grad.full_tensor() for p in parameters])  # type: ignore[union-attr]
    wanted, *others = gradients
    pairs = [pair for found in others for pair in zip(found, wanted, strict=True)]
    worst = max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
    return worst, promised, num_at_w


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
        output: Tensor = self.grouped(tokens[order], chosen.bincount(minlength=2))
        return torch.zeros_like(output).index_copy(0, order, output).view_as(given)


def _seed(step: int, column: int) -> int:
    return 10 * step + column


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
            total.add_(gradient_of(parameter))
    names = dict(zip((name for name, _ in model.named_parameters()), sums, strict=True))
    pairs = [
        (gradient_of(parameter), names[f"{index}.{name}"])
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


def refused_wrappers() -> list[str]:
    """What is said of a stage whose part alone is data-parallel, and of a static graph."""

    def layers() -> nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def said(stage: nn.Module) -> str:
        try:
            check_wrappers({3: stage})
        except PreflightError as error:
            return str(error)
        return "not refused"

    whole, inner = layers(), layers()
    for part in (*whole, whole, inner):
        fully_shard(part)
    check_wrappers({0: whole, 1: DistributedDataParallel(layers())})
    parts = DistributedDataParallel(layers()), inner
    static = DistributedDataParallel(layers(), static_graph=True)
    return [*(said(torch.nn.Sequential(part)) for part in parts), said(static)]


def train_in_unnamed_groups() -> int:
    """Be alone in groups with and without a backend's name."""
    for name in (None, "cpu:gloo"):
        named: dict[str, Any] = {"backend": name} if name else {}
        dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1, **named)
        assert backends(None)["cpu"] == "gloo"
        problem = make_problem((0,), 2)
        schedule = make_schedule(problem, one_f_one_b(1, 2))
        runner = PipelineRunner(dict(enumerate(small_stages(1))), schedule, small_loss)
        losses = runner.step(*small_data(2, seed=0))
        assert losses is not None
        assert losses.shape == (2,)
        with follow(None, runner) as training:
            assert training._group is None
        runner.close()
        assert made_on(0, lambda: 7, torch.device("cpu"), None) == (7, [])
        cpu, clock = torch.device("cpu"), cast("Clock", None)
        assert ping_pong({}, clock=clock, device=cpu, group=None, repeats=1) == ()
        dist.destroy_process_group()
    return 0
