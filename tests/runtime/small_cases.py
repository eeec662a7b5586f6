"""What the ranks run beside one process: many schedules, faults, and what is left afterwards."""

import copy
import functools
import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from optpipe import Problem, Schedule
from optpipe.runtime import PipelineRunner, overlap
from optpipe.runtime.demo import chain, make_stages, random_tokens, token_loss
from optpipe.runtime.executor import Executor
from optpipe.runtime.messages import Order
from optpipe.runtime.offload import Cell, Offloader
from optpipe.runtime.overlap import PairedPass, exchange, interleave
from optpipe.runtime.preflight import num_microbatches_of
from optpipe.schedule import Action, ActionType
from tests.runtime.cases import CONFIG
from tests.runtime.delaying import DelayingLinear
from tests.runtime.live_bytes import LiveBytes
from tests.runtime.schedules import make_problem, make_schedule, random_programs
from tests.runtime.small_model import (
    WIDTH,
    own_part,
    selectively_checkpointed,
    small_data,
    small_loss,
    small_runner,
    small_stages,
    step_alone,
)
from tests.runtime.watching import counted, refusal

STEPS = 3


class Model(NamedTuple):
    """What is trained: stages by their number, data by micro-batches and seed, and the loss."""

    stages: Callable[[int], list[nn.Module]]
    data: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def compiled_stages(num_stages: int) -> list[nn.Module]:
    """The small model, all of whose blocks are compiled, but for the reference of one stage."""
    stages = small_stages(num_stages)
    for stage in stages if num_stages > 1 else ():
        for block in stage.blocks:  # type: ignore[union-attr]
            block.compile(backend="aot_eager", fullgraph=True)
    return stages


def delaying_stages(num_stages: int) -> list[nn.Module]:
    """The small model with layers that delay weight gradients, one called twice, one in FP8.

    But for the reference of one stage, which delays nothing.
    """
    return changed_stages(functools.partial(_with_delay, delays=num_stages > 1), num_stages)


def _with_delay(block: Any, *, delays: bool) -> nn.Module:
    block.wide = DelayingLinear(block.wide, delay_wgrad_compute=delays, marks=False)
    block.narrow = DelayingLinear(block.narrow, delay_wgrad_compute=delays, fp8=True)

    def forward(state: tuple[Tensor, Tensor]) -> Any:
        activations, tokens = state
        normed = block.norm(activations + block.token(tokens))
        inner = block.wide(normed) + block.wide(normed / 2)
        return activations + block.narrow(torch.tanh(inner)), tokens

    block.forward = forward
    return block  # type: ignore[no-any-return]


# --- The small model, changed as users change theirs.


class _Adapted(nn.Module):
    """A frozen layer beside one of low rank, which is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False).double()
        self.up = nn.Linear(2, base.out_features, bias=False).double()

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = self.base(given) + self.up(self.down(given))
        return output


class _Dropping(nn.Module):
    """A block behind dropout, whose seed is the tokens'."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, state: tuple[Tensor, Tensor]) -> Any:
        activations, tokens = state
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(tokens.sum()))
            return self.block((functional.dropout(activations, 0.3), tokens))


def _with_adapters(block: Any) -> nn.Module:
    block.requires_grad_(False)
    block.wide, block.narrow = _Adapted(block.wide), _Adapted(block.narrow)
    return block  # type: ignore[no-any-return]


def _with_experts(block: Any) -> nn.Module:
    block.wide = nn.Sequential(ExpertBlock(2, None).double(), block.wide)
    return block  # type: ignore[no-any-return]


def _with_unused(block: Any) -> nn.Module:
    block.spare = nn.Linear(WIDTH, WIDTH).double()
    for parameter in block.spare.parameters():
        parameter.unused = True
    return block  # type: ignore[no-any-return]


class _Differentiates(nn.Module):
    """A block that adds the gradient of its energy, by functions that transform its layers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.energy = nn.Linear(WIDTH, 1).double()

    def forward(self, state: tuple[Tensor, Tensor]) -> Any:
        activations, tokens = self.block(state)
        with torch.enable_grad():
            given = activations if activations.requires_grad else activations.requires_grad_()
            energy = torch.tanh(torch.func.vmap(self.energy)(given)).sum()
            (force,) = torch.autograd.grad(energy, given, create_graph=True)
        return activations + force, tokens


class _SendsMore(nn.Module):
    """A stage that sends an output which the next stage does not use."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *given: Tensor) -> Any:
        output = self.stage(*given[:2])
        return output if self.stage.last else (*output, self.stage.blocks[-1].spare(output[0]))


def _stages_that_send_more(num_stages: int) -> list[nn.Module]:
    return [_SendsMore(one) for one in changed_stages(_with_unused, num_stages)]


def _selectively_checkpointed(block: Any, *, hooks_see: bool) -> nn.Module:
    """Products are kept, the rest is made again in the backward."""
    whole = block.forward

    def forward(state: tuple[Tensor, Tensor]) -> Any:
        # Tensors inside of tuples are kept where no hook sees them.
        return selectively_checkpointed(lambda *flat: whole(flat), *state, hooks_see=hooks_see)

    block.forward = forward
    return block  # type: ignore[no-any-return]


def changed_stages(change: Callable[[Any], nn.Module], num_stages: int) -> list[nn.Module]:
    """The small model with every block changed, equal for every number of stages."""
    stages: list[Any] = list(small_stages(num_stages))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for stage in stages:
            stage.blocks = nn.ModuleList(map(change, stage.blocks))
    return stages


CHANGES: dict[str, Callable[[Any], nn.Module]] = {
    "selective checkpointing": functools.partial(_selectively_checkpointed, hooks_see=False),
    "selective checkpointing that hooks see": functools.partial(
        _selectively_checkpointed, hooks_see=True
    ),
    "adapters of low rank beside frozen layers": _with_adapters,
    "parameters that nothing uses": _with_unused,
    "experts": _with_experts,
    "dropout": _Dropping,
    "gradients in the forward": _Differentiates,
}

MODELS = {
    **{
        name: Model(functools.partial(changed_stages, change), small_data, small_loss)
        for name, change in CHANGES.items()
    },
    "an output that no stage uses": Model(_stages_that_send_more, small_data, small_loss),
    "delaying": Model(delaying_stages, small_data, small_loss),
    "small": Model(small_stages, small_data, small_loss),
    "compiled": Model(compiled_stages, small_data, small_loss),
    "transformer": Model(
        functools.partial(make_stages, CONFIG), functools.partial(random_tokens, CONFIG), token_loss
    ),
}


@dataclass
class Trained:
    """One rank's steps against the single-process model; gradients add up over the steps."""

    losses_equal: bool = True
    worst_difference: float = 0.0
    largest_gradient: float = 0.0
    num_gradients: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    deferred_bytes: int = 0
    promised_bytes: int = 0
    live_bytes_after_release: int = 0
    released_bytes: int = 0

    def compare(
        self, own: dict[int, nn.Module], modules: Sequence[nn.Module], expected: Sequence[Tensor]
    ) -> None:
        """Take in the gradients of a rank's stages, beside those of all of them."""
        wanted = iter(expected)
        for index, module in enumerate(modules):
            trained = [one for one in module.parameters() if _is_trained(one)]
            pairs = [(parameter, next(wanted)) for parameter in trained]
            assert not any(
                one.grad is not None for one in module.parameters() if not _is_trained(one)
            )
            for parameter, gradient in pairs if index in own else ():
                assert parameter.grad is not None, f"stage {index} got no gradient"
                found = parameter.grad
                found = found.full_tensor() if isinstance(found, DTensor) else found
                # NaN is the largest difference of all, but max() would pass over it.
                difference = (found - gradient).abs().max().nan_to_num(nan=float("inf"))
                self.worst_difference = max(self.worst_difference, float(difference))
                largest = float(gradient.abs().max())
                self.largest_gradient = max(self.largest_gradient, largest)
                self.num_gradients += 1


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and not hasattr(parameter, "unused")


def train(
    schedule: Schedule,
    problem: Problem | None,
    change: Callable[[PipelineRunner], None] | None = None,
    model: str = "small",
    steps: int = STEPS,
) -> Trained:
    """Run steps of the pipeline, comparing this rank's part with the reference after each."""
    stages, data, loss_fn = MODELS[model]
    modules = stages(len(schedule.placement))
    own = own_part(schedule.placement, modules)
    runner = PipelineRunner(own, schedule, loss_fn, problem, min_offload_bytes=1)
    count = num_microbatches_of(schedule)
    expected_losses, expected = reference(count, model)
    found = Trained(promised_bytes=sum(runner.deferred_bytes.values()))
    seen = Deferred(runner)
    if change is not None:
        change(runner)
    watch_releases(runner.offloader, found)
    for step in range(steps):
        losses = runner.step(*data(count, step))
        if losses is not None:
            equal = torch.allclose(losses, expected_losses[step], rtol=1e-13, atol=0.0)
            found.losses_equal = found.losses_equal and equal
        found.compare(own, modules, expected[step])
    runner.close()
    found.deferred_bytes = seen.bytes
    found.offloaded_bytes = runner.offloaded_bytes
    found.reloaded_bytes = runner.reloaded_bytes
    return found


@functools.cache
def reference(
    num_microbatches: int, model: str = "small"
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The losses by micro-batch and all gradients, in parameter order, after every step."""
    stages, data, loss_fn = MODELS[model]
    whole = chain(stages(1))
    losses, gradients = [], []
    for step in range(STEPS):
        losses.append(step_alone(whole, data(num_microbatches, step), num_microbatches, loss_fn))
        gradients.append(_gradients([whole]))
    return losses, gradients


def watch_releases(offloader: Offloader, found: Trained) -> None:
    """Look, from outside, at the storages a cell had on the device when they should be gone."""
    release = offloader.release

    def watched(cell: Cell) -> None:
        before = [
            (StorageWeakRef(storage.on_device), storage.num_bytes)
            for storage in offloader.storages(cell)
        ]
        release(cell)
        found.live_bytes_after_release += sum(size for ref, size in before if not ref.expired())
        found.released_bytes += sum(size for _, size in before)

    offloader.release = watched  # type: ignore[method-assign]


class Turns(NamedTuple):
    """How steps of several runners compare with one process, and the least that one put aside."""

    worst_difference: float
    least_deferred_bytes: int


def take_turns(schedules: Sequence[Schedule]) -> Turns:
    """Run one step of each schedule on the same stages."""
    own, first = small_runner(schedules[0])
    others = [
        PipelineRunner(own, schedule, small_loss, min_offload_bytes=1) for schedule in schedules[1:]
    ]
    count = num_microbatches_of(schedules[0])
    modules = small_stages(len(schedules[0].placement))
    _, expected = reference(count)
    found, deferred = Trained(), []
    for step, runner in enumerate([first, *others]):
        seen = Deferred(runner)
        runner.step(*small_data(count, seed=step))
        runner.close()
        found.compare(own, [own.get(s, one) for s, one in enumerate(modules)], expected[step])
        deferred.append(seen.bytes)
    return Turns(found.worst_difference, min(deferred))


def count_executors(schedule: Schedule) -> tuple[int, int]:
    """Count the executors, which hold a group, before and after the runner is closed."""
    _, runner = small_runner(schedule)
    runner.step(*small_data(num_microbatches_of(schedule), seed=0))
    counts = []
    for end in (lambda: None, runner.close):
        end()
        gc.collect()
        counts.append(sum(type(one) is Executor for one in gc.get_objects()))
    return counts[0], counts[1]


def profile_steps(schedule: Schedule, folder: str, steps: int) -> Path:
    """Return the file of torch's profiler in which this rank's steps are."""
    _, runner = small_runner(schedule)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            runner.step(*small_data(num_microbatches_of(schedule), seed=0))
    runner.close()
    path = Path(folder, f"rank{dist.get_rank()}.json")
    recorded.export_chrome_trace(str(path))
    return path


class Deferred:
    """Looks, after every I, at what is put aside for its W."""

    def __init__(self, runner: PipelineRunner) -> None:
        self.bytes = 0
        gradients = runner._passes.gradients
        take = gradients.take

        def watched() -> Callable[[], None]:
            self.bytes += gradients.pending_bytes()
            return take()

        gradients.take = watched  # type: ignore[method-assign]


def _gradients(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return copies of all gradients; a parameter without one is an error."""
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    return [gradient.clone() for gradient in found if gradient is not None]


class _RandomDelays:
    """Sleeps before and after actions, differently on every rank and in every step."""

    def __init__(self, seed: int) -> None:
        self._chooser = random.Random(seed)

    def begin(self, action: object) -> None:
        self._sleep()

    def end(self, action: object) -> None:
        self._sleep()

    def _sleep(self) -> None:
        if self._chooser.random() < 0.3:
            time.sleep(self._chooser.random() / 250)


def delay(runner: PipelineRunner) -> None:
    runner.observe(_RandomDelays(seed=100 + dist.get_rank()))


class _Interrupts:
    """Ends a step by Ctrl-C before an action, and counts the actions."""

    def __init__(self) -> None:
        self.num_seen, self.before = 0, -1

    def begin(self, action: object) -> None:
        if self.num_seen == self.before:
            raise KeyboardInterrupt
        self.num_seen += 1

    def end(self, action: object) -> None:
        """Nothing is noted."""


def train_after_ctrl_c() -> int:
    """Be a pipeline alone, interrupted before each action in turn; the next step is as ever."""
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    problem = make_problem((0, 0), 3)
    programs = random_programs(problem, 7, offload=0.5, recompute=0.3, in_order=True)
    own, runner = small_runner(make_schedule(problem, programs), problem)
    parameters = [one for module in own.values() for one in module.parameters()]
    seen, others = _Interrupts(), _Interrupts()
    stop = runner.observe(seen)
    runner.observe(others)

    def train() -> list[Tensor]:
        for one in parameters:
            one.grad = None
        runner.step(*small_data(3, seed=0))
        return [one.grad for one in parameters if one.grad is not None]

    expected = train()
    count = seen.num_seen
    assert count == others.num_seen == len(programs[0])
    for before in range(count):
        seen.num_seen, seen.before = 0, before
        try:
            train()
        except KeyboardInterrupt:
            seen.before = -1
        assert seen.before == -1
        assert all(map(torch.equal, train(), expected))
    stop()
    others.num_seen = seen.num_seen = 0
    train()
    assert (seen.num_seen, others.num_seen) == (0, count)
    runner.close()
    dist.destroy_process_group()
    return 0


def compiled_with_metrics() -> int:
    """Be a pipeline alone, of a compiled stage, whose loss returns metrics beside the loss."""
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    (stage,) = small_stages(1)
    problem = make_problem((0,), 2)
    schedule = make_schedule(problem, random_programs(problem, 1))

    def measured(output: Tensor, target: Tensor) -> Any:
        return small_loss(output, target), {"error": 1.0}

    compiled: Any = torch.compile(stage, backend="eager")
    runner = PipelineRunner({0: compiled}, schedule, measured)
    state = {key: torch.zeros_like(value) for key, value in stage.state_dict().items()}
    assert runner.state_dict().keys() == state.keys()
    runner.load_state_dict(state)
    assert not any(value.any() for value in stage.state_dict().values())
    text = refusal(lambda: runner.step(*small_data(2, seed=0)))
    assert " is a tuple, but a tensor is needed" in text, text
    runner.close()
    dist.destroy_process_group()
    return 0


def orders_of(schedules: Sequence[Schedule]) -> list[tuple[Order, ...]]:
    """Return, for each schedule, what its runtime will do on every rank."""
    found = []
    for schedule in schedules:
        _, runner = small_runner(schedule)
        runner.step(*small_data(num_microbatches_of(schedule), seed=0))
        assert runner._training is not None
        found.append(runner._training.runtime.orders)
        runner.close()
    return found


class Evaluated(NamedTuple):
    """One rank's evaluation beside the single-process model, and what it left."""

    outputs_equal: bool | None
    losses_equal: bool | None
    live_bytes: int
    peak_bytes: int
    gradients_untouched: bool


def evaluate_small(schedule: Schedule, num_samples: int, *, with_target: bool) -> Evaluated:
    """Train a step, evaluate a batch of another size twice, train again."""
    own, runner = small_runner(schedule)
    count = num_microbatches_of(schedule)
    runner.step(*small_data(count, seed=0))
    gradients = _gradients(own.values())
    batch, target = (whole[:num_samples] for whole in small_data(2 * num_samples, seed=9))
    runner.eval(batch, target if with_target else None)
    with LiveBytes() as counter:
        found = runner.eval(batch, target if with_target else None)
        live = counter.live - _bytes(found.outputs) - _bytes(found.losses)
    untouched = all(map(torch.equal, gradients, _gradients(own.values())))
    runner.step(*small_data(count, seed=1))
    runner.close()
    (model,) = small_stages(1)
    with torch.no_grad():
        expected = model(batch)
        parts = zip(expected.chunk(count), target.chunk(count), strict=True)
        losses = torch.stack([small_loss(output, wanted) for output, wanted in parts])
    return Evaluated(
        None if found.outputs is None else torch.allclose(found.outputs, expected, rtol=1e-12),
        None if found.losses is None else torch.allclose(found.losses, losses, rtol=1e-12),
        live,
        counter.peak,
        untouched,
    )


class _Slowed:
    """Makes each action last longer, and notes for how long passes and other actions last."""

    def __init__(self) -> None:
        self.began_s, self.passes_ms, self.others_ms = 0.0, 0.0, 0.0

    def begin(self, action: Action) -> None:
        self.began_s = time.monotonic()
        time.sleep(0.02)

    def end(self, action: Action) -> None:
        ms = 1e3 * (time.monotonic() - self.began_s)
        if action.type.is_compute and action.type is not ActionType.RECOMPUTE:
            self.passes_ms += ms
        else:
            self.others_ms += ms


class Logged(NamedTuple):
    """What an example of the documentation logged in its steps, and what is known of the last."""

    steps: list[dict[str, Any]]
    offloaded_bytes: int
    passes_ms: float
    others_ms: float


def run_logging(schedule: Schedule, problem: Problem, code: str) -> Logged:
    """Train by an example of the documentation, with writers that look like those it asks for."""
    steps: dict[int, dict[str, Any]] = defaultdict(dict)

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            assert log_dir == f"runs/rank{dist.get_rank()}"

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            steps[global_step][tag] = scalar_value

    class Run:
        def log(self, data: dict[str, Any], step: int) -> None:
            steps[step] = data

    def init(*, project: str, group: str, name: str) -> Run:
        return Run()

    modules: dict[str, Any] = {
        "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=SummaryWriter),
        "wandb": SimpleNamespace(init=init),
    }
    own, runner = small_runner(schedule, problem)
    parameters = [one for module in own.values() for one in module.parameters()]
    slowed = _Slowed()

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        yield small_data(problem.num_microbatches, 0)
        runner.observe(slowed)
        yield small_data(problem.num_microbatches, 1)

    given = {
        "runner": runner,
        "rank": dist.get_rank(),
        "data": data(),
        "optimizer": torch.optim.SGD(parameters, 0.1),
    }
    with mock.patch.dict("sys.modules", modules):
        exec(code, given)
    runner.close()
    found = [steps[step] for step in sorted(steps)]
    return Logged(found, runner.offloaded_bytes, slowed.passes_ms, slowed.others_ms)


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def train_bound(schedule: Schedule, problem: Problem, bound_rank: int) -> tuple[Trained, set[str]]:
    """Train where one rank gave a device to its group; return the groups of its messages, too.

    The first and the last rank are in one group more than the others, as where they share tied
    embeddings.
    """
    default = dist.distributed_c10d._get_default_group()
    ends = dist.new_group([0, dist.get_world_size() - 1])
    if dist.get_rank() == bound_rank:
        default.bound_device_id = torch.device("cpu", 0)
    try:
        with counted(dist, "isend") as posted:
            trained = train(schedule, problem)
        assert (default.bound_device_id is not None) == (dist.get_rank() == bound_rank)
    finally:
        default.bound_device_id = None
    groups: set[str] = {
        (call.kwargs["group"] or default).group_name for call in posted.call_args_list
    }
    if ends != dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(ends)
    return trained, groups - {default.group_name}


# --- Pairs: experts on two ranks, whose exchanges hide behind the other pass of a pair.


class ExpertBlock(nn.Module):
    """Attention, dispatch to experts, experts, combine.

    Without a group all experts are here, and one without tokens is not called.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_experts))
        self.group = group

    def forward(self, state: Tensor) -> Tensor:
        mixed: Tensor = self.attention(state, state, state, need_weights=False)[0]
        state = state + mixed
        rows = state.flatten(0, 1)
        share, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        by_expert = self._by_experts(rows[order], chosen.bincount(minlength=len(self.experts)))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        weighed: Tensor = share[:, None] * by_expert[back]
        return state + weighed.view_as(state)

    def _by_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        own = list(self.experts)
        if self.group is None:
            pairs = zip(own, rows.split(counts.tolist()), strict=True)
            return torch.cat([torch.tanh(one(part)) for one, part in pairs if len(part)])
        size, rank = self.group.size(), self.group.rank()
        each = len(own) // size
        here = torch.empty(size, each, dtype=torch.int64)
        dist.all_to_all_single(here, counts.view(size, each), group=self.group)
        sent, received = counts.view(size, each).sum(1).tolist(), here.sum(1).tolist()
        parts = exchange(rows, sent, received, self.group).split(here.flatten().tolist())
        outputs = [
            torch.tanh(own[rank * each + index % each](part)) for index, part in enumerate(parts)
        ]
        return exchange(torch.cat(outputs), received, sent, self.group)


class Paired(NamedTuple):
    """Worst difference from one process, pairs run, and who posted exchanges within pairs."""

    worst_difference: float
    num_pairs: int
    sides: list[str]


class _PairWatcher:
    """Runs pairs, and notes who hands over."""

    def __init__(self, executor: str) -> None:
        self.executor = executor
        self.num_pairs = 0
        self.sides: list[str] = []

    def __call__(self, forward: PairedPass, backward: PairedPass) -> None:
        assert (forward.action.type.value, backward.action.type.value) == ("F", "B")
        self.num_pairs += 1
        with counted(overlap._Turns, "hand_over") as handed_over:
            if self.executor == "interleave":
                interleave(forward, backward)
            else:
                backward.run()
                forward.run()
        self.sides += ["FB"[call.args[1]] for call in handed_over.call_args_list]


def train_paired(schedule: Schedule, executor: str) -> Paired:
    """Train expert blocks on two pipeline ranks times two expert ranks."""
    count, rank = num_microbatches_of(schedule), dist.get_rank()
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    experts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage, column = divmod(rank, 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        whole = [
            nn.Sequential(ExpertBlock(4, None), ExpertBlock(4, None)).double() for _ in range(2)
        ]
        batches, targets = torch.rand(2, 2, 2 * count, 3, WIDTH, dtype=torch.float64)
    own = copy.deepcopy(whole[stage])
    for block in own:
        cast("ExpertBlock", block).group = experts[stage]
    runner = PipelineRunner({stage: own}, schedule, small_loss, group=pipelines[column])
    watcher = _PairWatcher(executor)
    runner.on_overlap(watcher)
    for _ in range(2):
        runner.step(batches[column], targets[column])
    runner.close()
    for batch, target in zip(batches, targets, strict=True):
        for given, wanted in zip(batch.chunk(count), target.chunk(count), strict=True):
            (small_loss(whole[1](whole[0](given)), wanted) * 2 / count).backward()
    worst = 0.0
    for ours, theirs in zip(own.parameters(), whole[stage].parameters(), strict=True):
        found = torch.zeros_like(ours) if ours.grad is None else ours.grad.clone()
        # A part of the batch each, and all of the own experts.
        dist.all_reduce(found, group=experts[stage])
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        worst = max(worst, float((found - wanted).abs().max()))
    for group in (*pipelines, *experts):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return Paired(worst, watcher.num_pairs, watcher.sides)
