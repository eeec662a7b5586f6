"""What the ranks run: torch's own schedule runtime under torch's profiler, with known times."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.profiler import ProfilerActivity, profile

WIDTH, MICROBATCH = 8, 2


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0] * 1.0, None


class SleepyStage(nn.Module):
    """A linear layer that takes at least so long in each direction."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, value: Tensor) -> Tensor:
        slept = _Sleep.apply(self.linear(value), self.seconds)
        assert isinstance(slept, Tensor)
        return slept


def record(folder: str, rows: Sequence[Sequence[str]], seconds: Sequence[float], steps: int) -> str:
    """Run steps of the programs and return the path of this rank's trace."""
    rank = dist.get_rank()
    stage = PipelineStage(SleepyStage(seconds[rank]), rank, len(rows), torch.device("cpu"))
    num_microbatches = sum("F" in cell for cell in rows[0])
    runtime = _PipelineScheduleRuntime(
        [stage], num_microbatches, loss_fn=lambda output, target: ((output - target) ** 2).sum()
    )
    runtime._prepare_schedule_with_comms(
        {index: [_Action.from_str(cell) for cell in row] for index, row in enumerate(rows)}
    )
    batch = torch.ones(num_microbatches * MICROBATCH, WIDTH)
    path = f"{folder}/rank{rank}.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(steps):
            if rank == 0:
                runtime.step(batch)
            else:
                runtime.step(target=batch, losses=[])
    recorded.export_chrome_trace(path)
    return path
