"""What the ranks run to count their memory."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from examples.train_gpt import MixedPrecision
from optpipe import Problem, Schedule
from optpipe.runtime import PipelineRunner, treatments
from optpipe.runtime.demo import ModelConfig, make_stages, random_tokens, token_loss
from optpipe.runtime.messages import BoundaryLevel
from optpipe.schedule import Action
from tests.runtime.live_bytes import LiveBytes, Moment
from tests.runtime.small_model import (
    own_part,
    selectively_checkpointed,
    small_data,
    small_runner,
)

WIDTH = 48
LENGTH = 24
GPT = ModelConfig(sequence=32, dtype=torch.float32)


class Counted(NamedTuple):
    """What one step left and held on one rank, beside what was there before it.

    The slots of messages were: they are no part of ``boundary``.
    """

    moments: list[Moment]
    peak: int
    left: int
    offloaded_bytes: int
    boundary: dict[Action, BoundaryLevel]


class _Checkpointed(nn.Module):
    """Runs a block again in its backward, but for the products of its matrices."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, given: Tensor) -> Any:
        return selectively_checkpointed(self.block, given)


def gpt_stages(kind: str, num_stages: int) -> list[nn.Module]:
    """A small GPT in single precision: plain, under autocast, or selectively checkpointed.

    Under ``autocast around`` the whole step is, not each stage.
    """
    stages = make_stages(GPT, num_stages)
    if kind == "autocast":
        return [MixedPrecision(stage) for stage in stages]
    if kind == "selective":
        return [nn.Sequential(*map(_Checkpointed, stage.children())) for stage in stages]
    return stages


def around(kind: str) -> AbstractContextManager[Any]:
    """What a whole step of that kind is run in."""
    is_around = kind == "autocast around"
    return torch.autocast("cpu", torch.bfloat16) if is_around else nullcontext()


def count_step(
    schedule: Schedule, num_microbatches: int, kind: str = "", problem: Problem | None = None
) -> Counted:
    """Run a step to make gradients and host slots, and count the next one.

    ``kind`` is one of `gpt_stages`; the small model if empty. ``problem`` is what says modes.
    """
    if kind:
        own = own_part(schedule.placement, gpt_stages(kind, len(schedule.placement)))
        runner = PipelineRunner(own, schedule, token_loss, problem, min_offload_bytes=1)
        batch, target = random_tokens(GPT, num_microbatches, 0)
    else:
        _, runner = small_runner(schedule, problem, width=WIDTH)
        batch, target = small_data(num_microbatches, 0, WIDTH, LENGTH)
    return _count_second(runner, partial(runner.step, batch, target), around(kind))


def count_unequal_step(schedule: Schedule, problem: Problem, lengths: Sequence[int]) -> Counted:
    """As `count_step`, of the small model and micro-batches of these lengths."""
    _, runner = small_runner(schedule, problem, width=WIDTH)
    given, wanted = zip(*(small_data(1, 0, WIDTH, length) for length in lengths), strict=True)
    return _count_second(runner, partial(runner.step, arg_mbs=given, target_mbs=wanted))


def _count_second(
    runner: PipelineRunner,
    step: Callable[[], object],
    outside: AbstractContextManager[Any] | None = None,
) -> Counted:
    outside = nullcontext() if outside is None else outside
    # Recomputations are compared in parts that plans do not count. The usual part is larger than
    # a tensor of these small models, of which half precision makes a copy.
    with mock.patch.object(treatments, "_PART_SIZE", 2**7):
        with outside:
            step()
        assert runner._training is not None
        before = runner.offloaded_bytes
        slots = sum(slot.numel() for slot in runner._training.runtime.slots._slots)
        with _no_collector(), LiveBytes() as counter:
            runner.observe(counter)
            with outside:
                step()
    boundary = runner._training.boundary
    runner.close()
    return Counted(
        counter.moments,
        max(moment.peak for moment in counter.moments),
        counter.live,
        runner.offloaded_bytes - before,
        {
            action: BoundaryLevel(level.during - slots, level.after - slots)
            for action, level in boundary.items()
        },
    )


class _no_collector:  # noqa: N801 - reads as the statement it is
    """No garbage collector inside: what only it would free counts as kept."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()
