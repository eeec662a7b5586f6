"""One rank of a pipeline on its own: a transformer stage whose neighbours are stand-ins.

What the stage receives lies ready, as if it had just arrived; behind its output stands a loss
whose gradient is a given tensor, as if that had arrived. So the product's own runner executes one
rank's program at full speed, without three more cards.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe import Provenance, evaluate, parse_action
from optpipe.memory import device_peak_bytes
from optpipe.runtime import PipelineRunner, measure
from optpipe.runtime.demo_model import ModelConfig, make_stages
from optpipe.runtime.measuring.memory import meter_for
from optpipe.runtime.measuring.times import clock_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe import Problem, Program
    from optpipe.runtime.measuring import Effort

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A middle stage and one micro-batch of it."""

    hidden: int
    sequence: int
    samples: int = 1
    blocks: int = 4
    dtype: str = "bf16"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the boundary tensors."""
        return self.samples, self.sequence, self.hidden

    def config(self) -> ModelConfig:
        """Return the model that the stage's blocks are part of."""
        return ModelConfig(
            vocabulary=8,
            hidden=self.hidden,
            heads=max(1, self.hidden // 128),
            blocks=self.blocks,
            sequence=self.sequence,
            microbatch_size=self.samples,
            dtype=DTYPES[self.dtype],
        )


class Middle(nn.Module):
    """Blocks between two stages: gradients of what they receive are made, as if to be sent."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, received: Tensor) -> Tensor:
        """Run the blocks; shapes (samples, sequence, hidden)."""
        sent: Tensor = self.blocks(received.detach().requires_grad_())
        return sent


class _Arrives(torch.autograd.Function):
    """A scalar whose gradient is what the next stage would send; it costs nothing."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


def stand_in(output: Tensor, gradient: Tensor) -> Tensor:
    """Return the loss that stands for the next stage."""
    loss: Tensor = _Arrives.apply(output, gradient)  # type: ignore[no-untyped-call]
    return loss


@contextmanager
def alone(name: str) -> Iterator[torch.device]:
    """Be a group of one rank on the device of this name."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{Path(folder) / 'rendezvous'}"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        try:
            yield device
        finally:
            dist.destroy_process_group()


def make_stage(sizes: Sizes, device: torch.device) -> Middle:
    """Return a middle stage, made on its device."""
    with torch.device(device):
        (whole,) = make_stages(sizes.config(), 1)
    return Middle(nn.Sequential(*list(whole.children())[1:-1]))


def problem_of(
    stage: Middle,
    sizes: Sizes,
    device: torch.device,
    *,
    num_microbatches: int,
    effort: Effort,
    memory_bytes: int | None = None,
) -> Problem:
    """Return the problem of this rank alone, as measured."""
    received, gradient = torch.randn(2, *sizes.shape, dtype=DTYPES[sizes.dtype], device=device)
    profile = measure(
        [stage],
        received,
        loss_fn=stand_in,
        target=gradient,
        device=device,
        effort=effort,
        memory_bytes=memory_bytes,
        links=False,
    )
    return profile.problem(num_microbatches)


def in_flight(num_microbatches: int, ahead: int, *, offload: bool) -> Program:
    """Return 1F1B's program of a rank that runs so many micro-batches ahead, backwards split.

    With ``offload`` every one of them waits on the host: copies go out under the next forward or
    backward and come back under the backward before their own. At most three are on the device.

    Parameters
    ----------
    ahead
        At least 3, and below ``num_microbatches``.
    """
    cells: list[str] = []
    for slot in range(num_microbatches + ahead):
        done = slot - ahead
        if done >= 0:
            later = done + 1 if done else 0
            back = range(later, min(done + 2, num_microbatches))
            cells += [f"0RELOAD{j}" for j in back if offload] + [f"0I{done}", f"0W{done}"]
        if slot < num_microbatches:
            cells += [f"0F{slot}"]
            cells += [f"0RELEASE{slot - 1}"] if offload and slot else []
            cells += [f"0OFFLOAD{slot}"] if offload else []
        elif slot == num_microbatches and offload:
            cells += [f"0RELEASE{slot - 1}"]
    return tuple(map(parse_action, cells))


class Ran(NamedTuple):
    """Steps of a program: milliseconds and bytes, planned beside measured."""

    planned_ms: float
    measured_ms: float
    planned_bytes: int
    measured_bytes: int
    offloaded_bytes: int


def run_program(
    stage: Middle,
    sizes: Sizes,
    problem: Problem,
    program: Program,
    *,
    device: torch.device,
    steps: int,
) -> Ran:
    """Run a program; bytes are those on top of weights, gradients and batch.

    Raises
    ------
    IllegalScheduleError
        If the plan does not fit the device of the problem.
    """
    schedule = evaluate(problem, (program,), Provenance(method="one rank alone"))
    runner = PipelineRunner({0: stage}, schedule, stand_in, problem, device=device)
    whole = (problem.num_microbatches * sizes.samples, *sizes.shape[1:])
    batch, target = torch.randn(2, *whole, dtype=DTYPES[sizes.dtype], device=device)
    for _ in range(2):
        runner.step(batch, target)
    before, clock, times = runner.offloaded_bytes, clock_for(device), []
    for _ in range(steps):
        start = clock.mark()
        runner.step(batch, target)
        times.append(clock.ms_between(start, clock.mark()))
    moved = (runner.offloaded_bytes - before) // steps
    gradients = [p.grad for p in stage.parameters() if p.grad is not None]
    there = [batch, target, *stage.parameters(), *gradients, *_host_memory(runner)]
    gc.collect()
    meter = meter_for(device, there)
    _, use = meter.watch(lambda: runner.step(batch, target))
    runner.close()
    planned = device_peak_bytes(problem, 0, program) - problem.static_bytes_of(0)
    return Ran(
        schedule.makespan_ms, statistics.median(times), planned, use.peak - use.before, moved
    )


def _host_memory(runner: PipelineRunner) -> list[Tensor]:
    """Return what lies on the host, which a CPU that plays the card must not count."""
    if runner.offloaded_bytes == 0:
        return []
    pool = runner.offloader.pool
    slot = pool.take(0, 1)
    pool.give_back(0, slot)
    return [slot]


def forget(device: torch.device) -> None:
    """Give a card's memory back before other sizes are tried on it."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
