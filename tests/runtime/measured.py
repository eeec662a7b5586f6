"""Stages of known size and clocks that count, for tests of measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from optpipe import Problem, Schedule
from optpipe.measurements import Measurements
from optpipe.runtime import ActionTimer, PreflightError, overlap
from optpipe.runtime.measuring import Effort, instruments_of, measure
from optpipe.runtime.measuring.times import Instruments
from optpipe.runtime.offload import PlainCopies
from tests.runtime.small_model import small_data, small_runner
from tests.runtime.watching import counted


class _Multiplications(TorchDispatchMode):
    """Counts them; torch's own counter has hooks on modules, whose cycles keep activations."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result) // 2
        return result


def with_clock(clock: Any) -> Instruments:
    """Return what measures the CPU, with another clock."""
    return replace(instruments_of(torch.device("cpu")), clock=clock)


class WorkClock:
    """A clock on which one multiplication takes one millisecond, and all else nothing."""

    def __init__(self) -> None:
        self.counter = _Multiplications()

    def mark(self) -> int:
        return self.counter.total

    def mark_after(self, fence: Any, lane: int) -> int:
        fence.wait()
        return self.mark()

    def ms_between(self, start: int, end: int) -> float:
        return float(end - start)


class TurnClock:
    """A clock that only its owner moves, in ms."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def mark_after(self, fence: Any, lane: int) -> float:
        fence.wait()
        return self.now

    def ms_between(self, start: float, end: float) -> float:
        return end - start


class PacedCopies(PlainCopies):
    """Copies that take their time on a `TurnClock`: GB/s to the host and back."""

    def __init__(self, clock: TurnClock, down: float, up: float) -> None:
        self.clock, self.down, self.up = clock, down, up
        self.copied: list[int] = []

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> PacedCopies:
        return self._copy(pairs, self.down)

    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> PacedCopies:
        return self._copy(pairs, self.up)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], rate: float) -> PacedCopies:
        for source, target in pairs:
            assert source.numel() == target.numel()
            self.copied.append(source.numel())
            self.clock.now += source.numel() / (rate * 1e6)
        return self

    def wait(self) -> None:
        """Copies have ended when they return."""


def perceptron(width: int, inner: int) -> nn.Sequential:
    """Two linear layers without biases around a ReLU, which saves what the second one reads."""
    return nn.Sequential(
        nn.Linear(width, inner, bias=False), nn.ReLU(), nn.Linear(inner, width, bias=False)
    )


class Thrice(nn.Module):
    """Makes a tensor three times as large, and keeps its sum alone."""

    def forward(self, given: Tensor) -> Tensor:
        return given.repeat(3, 1, 1).sum(0)


class Doubled(nn.Module):
    """Applies an autograd function to what a scale, its only parameter, makes of a tensor."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, given: Tensor) -> Any:
        return self.function.apply(given + self.scale)


def deep(width: int, layers: int) -> nn.Sequential:
    """A row of equal linear layers."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def three_perceptrons(microbatch: int = 64):
    """Stages for the command line, with the loss and its target."""
    stages = [perceptron(8, 16) for _ in range(3)]
    return stages, torch.ones(microbatch, 8), mean_square, torch.zeros(microbatch, 8)


def measure_perceptrons(placement: tuple[int, ...], broken_rank: int | None = None) -> Any:
    """Measure on all ranks, one perceptron per stage; a broken rank's first stage does not fit."""
    stages = [perceptron(8, 16) for _ in placement]
    if broken_rank is not None:
        stages[placement.index(broken_rank)] = perceptron(9, 16)
    try:
        return measure(
            stages, torch.ones(64, 8), placement=placement, effort=Effort(repeats=2, warmups=1)
        )
    except PreflightError as error:
        return str(error)


def convolutions():
    """Stages of which nothing can be split, without a loss."""
    return [nn.Conv1d(3, 4, 3), nn.Conv1d(4, 5, 3)], torch.ones(2, 3, 10)


def misfits():
    """The second stage does not take what the first gives."""
    return [nn.Linear(3, 3), nn.Linear(4, 3)], torch.zeros(2, 3)


def a_number() -> int:
    return 3


def no_modules():
    return ["stage"], torch.zeros(1)


def no_list():
    return 2, torch.zeros(1)


def needs_an_argument(width: int) -> int:
    return width


def time_training(
    schedule: Schedule, problem: Problem, every: int | None, num_steps: int
) -> tuple[Any, Measurements | None, str | None, list[float]]:
    """Train the small model with a timer; return what it gathered, and this rank's losses.

    ``every`` None: without a timer.
    """
    _, runner = small_runner(schedule, problem)
    timer = None if every is None else ActionTimer(runner, every=every)
    losses: list[float] = []
    for step in range(num_steps):
        found = runner.step(*small_data(problem.num_microbatches, seed=step))
        losses += [] if found is None else found.tolist()
    steps = measurements = trace = None
    if timer is not None:
        steps = timer.gather()
        measurements, trace = timer.measurements(), timer.trace(problem)
        timer.detach()
        runner.step(*small_data(problem.num_microbatches, seed=0))
        assert timer.gather() == steps
    runner.close()
    return steps, measurements, trace, losses


class _Swapping(nn.Module):
    """Halves of what is computed change places between two ranks, there and back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner = perceptron(6, 900)
        self.group = group

    def forward(self, state: Tensor) -> Tensor:
        there = overlap.exchange(self.inner(state), (1, 1), (1, 1), self.group)
        return overlap.exchange(there.tanh(), (1, 1), (1, 1), self.group)


def measure_pairs() -> tuple[int, int]:
    """Measure a stage of two ranks, twice side by side; count the exchanges within pairs."""
    experts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([rank]) for rank in range(4)]
    rank = dist.get_rank()
    with counted(overlap._Turns, "hand_over") as handed_over:
        profile = measure(
            [_Swapping(experts[rank // 2])], torch.rand(2, 6), group=alone[rank],
            effort=Effort(2, 1), links=False, overlap=overlap.interleave,
        )  # fmt: skip
    for group in (experts[rank // 2], alone[rank]):
        dist.destroy_process_group(group)
    return len(handed_over.call_args_list), len(profile.pairs)


class Mixed(nn.Module):
    """A model of blocks of these widths."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.lead = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(perceptron(8, width) for width in widths)
        self.head = nn.Linear(8, 4)

    def forward(self, given: Tensor) -> Tensor:
        found = self.lead(given)
        for block in self.blocks:
            found = block(found)
        result: Tensor = self.head(found)
        return result


def hundred_layers() -> tuple[nn.Module, Tensor]:
    """Return a model of a hundred equal layers, and a sample."""
    return Mixed([16] * 100), torch.ones(5, 8)
