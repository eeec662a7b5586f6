"""What the ranks run to be refused or to fail, and stages that draw random numbers."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from optpipe import Problem, Schedule
from optpipe.runtime import PipelineRunner, demo, groups, offload
from optpipe.runtime.demo import ModelConfig, make_stages, random_tokens, token_loss
from optpipe.runtime.launch import join_ranks
from optpipe.runtime.preflight import num_microbatches_of
from optpipe.runtime.watch import Cause, CauseStore, DeviceMarks
from tests.runtime import schedules
from tests.runtime.watching import gradient_of, refusal

CONFIG = ModelConfig(vocabulary=37, hidden=16, heads=2, blocks=8, sequence=6)


def refused(
    schedules: list[Schedule],
    problem: Problem | None = None,
    shift: int = 0,
    samples: dict[int, int] | None = None,
) -> str:
    """Return how a pipeline that cannot start is refused on this rank; "" = it was not.

    Parameters
    ----------
    schedules
        One per rank, so that ranks can disagree.
    shift
        By how much the modules given are off.
    samples
        Rank -> number of samples of its batch and target.
    """
    rank = dist.get_rank()
    schedule = schedules[rank]
    modules = make_stages(CONFIG, len(schedule.placement))
    own = {
        (s + shift) % len(modules): modules[(s + shift) % len(modules)]
        for s, home in enumerate(schedule.placement)
        if home == rank
    }

    def start() -> None:
        runner = PipelineRunner(own, schedule, token_loss, problem)
        batch, target = random_tokens(CONFIG, 8, seed=0)
        size = (samples or {}).get(rank, len(batch))
        runner.step(batch[:size], target[:size])

    return refusal(start)


class Noisy(nn.Module):
    """Dropout, and buffers that a forward changes, in place and by another one."""

    seen: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, given: Tensor, *, scale: float | Tensor = 1.0) -> Tensor:
        self.seen.add_(given.detach().abs().mean())
        self.calls = self.calls + 1
        normed: Tensor = self.dropout(self.norm(given))
        output: Tensor = given + self.linear(normed * scale) * self.seen.clone() / self.calls
        return output


class _RunningLoss(nn.Module):
    """A squared error over what is usual so far: every call counts."""

    usual: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usual", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        error = functional.mse_loss(output, target)
        self.usual = 0.9 * self.usual + 0.1 * error.detach()
        return error / self.usual


def train_noisy(schedule: Schedule, seed: int = 0) -> list[Tensor]:
    """Return this rank's buffers and gradients after two steps of noisy stages."""
    torch.manual_seed(1)
    modules = [Noisy().double() for _ in schedule.placement]
    batch, target = torch.randn(2, 4 * num_microbatches_of(schedule), 6, dtype=torch.float64)
    rank = dist.get_rank()
    torch.manual_seed(100 * seed + rank)
    runner = PipelineRunner({rank: modules[rank]}, schedule, _RunningLoss())
    for _ in range(2):
        runner.step(batch, target)
    gradients = [one.grad for one in modules[rank].parameters() if one.grad is not None]
    return [*modules[rank].buffers(), *gradients]


# --- Stages that do something else when they run again.


class Unlike(nn.Module):
    """A linear layer with a fault, which ``is_on`` or not; in inputs above ``threshold`` it shows.

    ``random`` and ``generator`` draw numbers that torch does not put back; in ``masked`` ones some
    are infinite, too. ``buffer`` and ``table`` are written into, a buffer through its ``data``, and
    a buffer is ``replaced``. An ``encoder`` in ``eval()`` runs another kernel
    without a graph, which returns zeros for padding. An ``lstm``, too, runs another kernel, which
    differs by rounding.
    """

    buffer: Tensor
    table: Tensor

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.is_on, self.above = fault, True, 0.0
        self.linear = nn.Linear(8, 8)
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("buffer", torch.ones(1))
        self.register_buffer("table", torch.ones(1 << 14))
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1).eval()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, given: Tensor) -> Tensor:
        scale = self.buffer.clone() * self.table[0].clone()
        output: Tensor = self.linear(given) * scale
        if not self.is_on or given.abs().amax() < self.above:
            return output
        match self.fault:
            case "random":
                output = output * (1 + random.random())
            case "masked":
                is_masked = torch.arange(8) == 7
                output = (output * (1 + random.random())).masked_fill(is_masked, -torch.inf)
            case "generator":
                kept = torch.rand(output.shape, generator=self.generator) < 0.8
                output = output * kept
            case "buffer" | "table":
                self.get_buffer(self.fault).mul_(1.5)
            case "data":
                self.buffer.data.mul_(1.5)
            case "replaced":
                self.buffer = self.buffer * 1.5
            case "encoder":
                padding = torch.zeros(given.shape[:2], dtype=torch.bool)
                padding[:, -1] = True
                output = self.encoder(output, src_key_padding_mask=padding)
            case "lstm":
                output = self.lstm(output)[0]
        return output


class Again(NamedTuple):
    """What each step was refused with, and how far its gradients are from those of kept stages."""

    refusals: list[str]
    differences: list[float]


def run_again(
    schedule: Schedule,
    problem: Problem,
    fault: str,
    on: Sequence[bool],
    *,
    dtype: torch.dtype = torch.float64,
    renews: bool = False,
    second_only: bool = False,
) -> Again | None:
    """Train two stages on rank 0 alone, with a fault that is on or off in each step.

    Where it ``renews``, the runner takes its schedule anew before each step. ``second_only``: the
    fault is on in the second micro-batch only. Gradients add up over the steps.
    """
    group = dist.new_group([0])
    if dist.get_rank() > 0:
        return None
    kept = schedules.make_schedule(
        schedules.make_problem((0, 0), 2), schedules.from_text([KEPT_ON_ONE_RANK])
    )
    found = Again([], [])
    runners: list[tuple[PipelineRunner, dict[int, nn.Module]]] = []
    for one, its_problem in ((kept, None), (schedule, problem)):
        torch.manual_seed(0)
        stages: dict[int, nn.Module] = {
            index: nn.Sequential(Unlike(fault if index else "")).to(dtype) for index in range(2)
        }
        for stage in stages.values():
            groups(stage, {"all": ["0"]})
        runner = PipelineRunner(stages, one, functional.mse_loss, its_problem, group=group)
        runners.append((runner, stages))
    for is_on in on:
        batch, target = torch.randn(2, 4, 3, 8, dtype=dtype)
        batch[2:] *= 1e4 if second_only else 1
        for runner, stages in runners:
            faulty: Any = stages[1].get_submodule("0")
            faulty.is_on, faulty.above = is_on, 100.0 if second_only else 0.0
            if renews and runner.problem is not None:
                runner.use(schedule)
            text = refusal(partial(runner.step, batch, target))
        found.refusals.append(text)
        if text:
            break
        both = [one.parameters() for _, stages in runners for one in stages.values()]
        pairs = zip(chain(*both[:2]), chain(*both[2:]), strict=True)
        found.differences.append(
            max(
                float((gradient_of(a) - gradient_of(b)).abs().max())
                for a, b in pairs
                if a.grad is not None
            )
        )
    for runner, _ in runners:
        runner.close()
    return found


KEPT_ON_ONE_RANK = "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"


def recompute_unlike_on_rank_1() -> int:
    """Be a rank of two, of which rank 1 recomputes with other random numbers in its second step."""
    join_ranks("gloo")
    rank = dist.get_rank()
    rows = ["0F0 0F1 0B0 0B1", "1F0 1RECOMPUTE0 1B0 1F1 1RECOMPUTE1 1B1"]
    problem = schedules.make_problem((0, 1), 2)
    schedule = schedules.make_schedule(problem, schedules.from_text(rows))
    module = Unlike("random")
    module.is_on = False
    runner = PipelineRunner({rank: module}, schedule, functional.mse_loss, hang_timeout_s=2)
    batch, target = torch.randn(2, 4, 3, 8)
    runner.step(batch, target)
    module.is_on = rank == 1
    for _ in range(2):
        # Rank 0 has left the step before rank 1 ends it.
        if text := refusal(lambda: runner.step(batch, target)):
            print(f"rank {rank}: {text}", flush=True)
            return 10 + rank
    return 0


def refused_stage(schedule: Schedule, trouble: str) -> str:
    """Return how a bad stage 2 is refused on this rank."""
    rank = dist.get_rank()
    module = make_stages(CONFIG, 4)[rank]
    if rank == 2:
        module.register_forward_hook(_TROUBLES[trouble])
    mesh = _mesh_of_all() if trouble == "distributes over the pipeline" else None
    runner = PipelineRunner({rank: module}, schedule, token_loss, mesh=mesh)
    return refusal(lambda: runner.step(*random_tokens(CONFIG, 4, seed=0)))


def refused_split(schedule: Schedule, problem: Problem | None) -> str:
    """Return how a pipeline is refused whose stage 2 makes all its gradients at I."""
    rank = dist.get_rank()
    module = make_stages(CONFIG, 4)[rank]
    if rank == 2:
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient)
    data = random_tokens(CONFIG, num_microbatches_of(schedule), seed=0)
    return refusal(
        lambda: PipelineRunner({rank: module}, schedule, token_loss, problem).step(*data)
    )


def _raise(*_: Any) -> None:
    raise ValueError("no such layer")


def _transpose(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.transpose(0, 1)


def _mesh_of_all() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(4)), _init_backend=False)


def _distribute(placement: Placement, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return DTensor.from_local(output, _mesh_of_all(), [placement], run_check=False)


_TROUBLES: dict[str, Callable[..., Any]] = {
    "raises": _raise,
    "transposes": _transpose,
    "distributes": partial(_distribute, Replicate()),
    "distributes over the pipeline": partial(_distribute, Replicate()),
    "distributes in stripes": partial(_distribute, _StridedShard(0, split_factor=2)),
}


def fail_and_live_on() -> int:
    """Be a rank of two, of which rank 1 fails in its second step and does not end."""
    join_ranks("gloo")
    return _train_until_one_fails(1, _raise, lives_on_s=60)


def fail_at(rank: int, fault: str, copies: int, port: int) -> int:
    """Be one of several ranks, of which one fails in its second step; return an exit code.

    They train so many copies of a model, whose gradients are reduced in a stage's last backward.
    """
    own, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=own, world_size=world
    )

    def fail(*_: Any) -> None:
        print(f"fault at {time.time()}", flush=True)
        _FAULTS[fault]()

    return _train_until_one_fails(rank, fail, copies=copies)


_FAULTS: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "hang": lambda: time.sleep(600),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def _train_until_one_fails(
    failing: int, fail: Callable[..., object], lives_on_s: float = 0, copies: int = 1
) -> int:
    rank, size = dist.get_rank(), dist.get_world_size() // copies
    problem = schedules.make_problem(range(size), 4)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(size, 4))
    module = make_stages(CONFIG, size)[rank % size]
    group = None
    if copies > 1:
        mesh = init_device_mesh("cpu", (copies, size), mesh_dim_names=("data", "pipeline"))
        module = DistributedDataParallel(module, process_group=mesh["data"].get_group())
        group = mesh["pipeline"].get_group()
    runner = PipelineRunner(
        {rank % size: module}, schedule, token_loss, problem, group=group, hang_timeout_s=2
    )
    batch, target = random_tokens(CONFIG, 4, seed=0)
    runner.step(batch, target)
    if rank == failing:
        module.register_forward_hook(fail)
    try:
        runner.step(batch, target)
    except Exception as error:  # noqa: BLE001 - printed for the test
        notes = getattr(error, "__notes__", [])
        print(f"rank {rank}: {type(error).__name__}: {error} {notes}", flush=True)
        time.sleep(lives_on_s)
    return 10 + rank


class _WrongCopies(offload.PlainCopies):
    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> offload.Fence:
        for host, _ in pairs:
            host[-8:] = 0
        return super().to_device(pairs)


def demo_with_wrong_copies(arguments: list[str]) -> int:
    """Be a rank of the demo on a machine whose copies from the host are wrong."""
    offload.PlainCopies = _WrongCopies  # type: ignore[misc]
    return demo.main(arguments)


class _LateCuda:
    """A device that gets to an event some time after the host."""

    def __init__(self) -> None:
        self.comes_at = 0.0

    def Event(self, enable_timing: bool) -> _LateCuda:  # noqa: N802 - torch's name
        return _LateCuda()

    def elapsed_time(self, later: _LateCuda) -> float:
        return 1e3 * (later.comes_at - self.comes_at)

    def current_stream(self, _device: torch.device) -> None:
        """All is one stream."""

    def record(self, _stream: None) -> None:
        self.comes_at = time.monotonic() + 0.3

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.comes_at - time.monotonic()))


def forget_a_runner(schedule: Schedule) -> list[str]:
    """Let a runner go that nobody closed while its thread asks the store; who lives on."""
    rank = dist.get_rank()
    modules = make_stages(CONFIG, dist.get_world_size())
    asking, read = threading.Event(), CauseStore.read

    def slowly(store: CauseStore) -> Any:
        asking.set()
        time.sleep(0.5)
        return read(store)

    with mock.patch.object(CauseStore, "read", slowly):
        runner: PipelineRunner | None
        runner = PipelineRunner({rank: modules[rank]}, schedule, token_loss)
        assert asking.wait(30)
        runner = None  # noqa: F841 - the last reference
        gc.collect()
        return [one.name for one in threading.enumerate() if one.name == "optpipe-watch"]


def end_with_the_device(schedule: Schedule) -> tuple[float, str, int]:
    """Return how long a step takes on a late device, how one ends during which others failed, and
    how many threads of it are left."""
    rank, modules = dist.get_rank(), make_stages(CONFIG, 4)
    runner = PipelineRunner({rank: modules[rank]}, schedule, token_loss)
    runner._activity.marks = DeviceMarks(torch.device("cpu"), _LateCuda())
    batch, target = random_tokens(CONFIG, 4, seed=0)
    runner.step(batch, target)
    began = time.monotonic()
    runner.step(batch, target)
    seconds = time.monotonic() - began
    dist.barrier()
    runner._watch._store.claim(Cause(9, "rank 9: boom"))
    words = refusal(lambda: runner.step(batch, target))
    runner.close()
    left = [thread for thread in threading.enumerate() if thread is runner._watch._thread]
    return seconds, words, len(left)
