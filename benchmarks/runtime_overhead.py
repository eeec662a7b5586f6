"""What an action costs beside torch's own schedule runtime: four ranks, tiny modules, one run.

``python -m benchmarks.runtime_overhead [--steps N] [--microbatches M]``

The programs are torch's own, of its public schedules: interleaved 1F1B with fused backwards, and
the zero-bubble V with split ones. Each is run by torch alone and by `PipelineRunner`, in turns of
a few steps, so that both meet the same noise. Counted is the processor time of the thread that
runs the steps, in which waiting for other ranks costs nothing: per rank and action, modules and
posting of messages included; the median over the turns. Where backwards are split torch walks the
graph twice and ours once, so the first line is the comparison of the runtimes. The target is at
most 1.3 times torch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from optpipe import Provenance, Schedule, evaluate, parse_action
from optpipe.problem import Device, Problem, Stage
from optpipe.runtime import PipelineRunner
from optpipe.runtime.demo_model import RENDEZVOUS_VARIABLE, launch_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 4
STAGES = 2 * RANKS
WIDTH = 8
TURN = 5
"""Steps of one side before it is the other's turn."""

LOOP = tuple(index % RANKS for index in range(STAGES))
V = (*range(RANKS), *reversed(range(RANKS)))


class Pair(NamedTuple):
    """One schedule, to be run by torch and by us."""

    name: str
    schedule_class: Any
    placement: tuple[int, ...]


PAIRS = (
    Pair("interleaved 1F1B, fused", ScheduleInterleaved1F1B, LOOP),
    Pair("zero-bubble V, split", ScheduleZBVZeroBubble, V),
)


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each side")
    parser.add_argument("--microbatches", type=int, default=16)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return launch_ranks("benchmarks.runtime_overhead", sys.argv[1:], RANKS)
    torch.set_num_threads(1)
    rank, store = int(os.environ["RANK"]), os.environ[RENDEZVOUS_VARIABLE]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        _report(options.microbatches, options.steps)
    finally:
        dist.destroy_process_group()
    return 0


def _report(num_microbatches: int, steps: int) -> None:
    first = dist.get_rank() == 0
    if first:
        print("| schedule | actions per rank | torch, us/action | ours, us/action | ratio |")
        print("|---|--:|--:|--:|--:|")
    for pair in PAIRS:
        made, theirs = _torch_side(pair, num_microbatches)
        schedule, ours = _our_side(pair, made, num_microbatches)
        count = len(schedule.programs[dist.get_rank()])
        costs = _in_turns([theirs, ours], steps)
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, [cost / count for cost in costs])
        if first:
            torch_us, our_us = (statistics.mean(column) for column in zip(*everyone, strict=True))
            ratio = our_us / torch_us
            print(f"| {pair.name} | {count} | {torch_us:.1f} | {our_us:.1f} | {ratio:.2f} |")


def _in_turns(sides: list[Callable[[], object]], steps: int) -> list[float]:
    """Return the median microseconds of processor time of a step of each side."""
    costs: list[list[float]] = [[] for _ in sides]
    for turn in range(max(2, steps // TURN) + 1):
        for side, found in zip(sides, costs, strict=True):
            dist.barrier()
            start = time.thread_time()
            for _ in range(TURN):
                side()
            if turn:
                found.append((time.thread_time() - start) / TURN * 1e6)
    return [statistics.median(found) for found in costs]


def _modules(pair: Pair) -> dict[int, nn.Module]:
    torch.manual_seed(0)
    return {
        index: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        for index, home in enumerate(pair.placement)
        if home == dist.get_rank()
    }


def _torch_side(pair: Pair, num_microbatches: int) -> tuple[Any, Callable[[], object]]:
    example = torch.zeros(2, WIDTH, requires_grad=True)
    stages = [
        PipelineStage(module, index, STAGES, torch.device("cpu"), (example,), (example,))
        for index, module in _modules(pair).items()
    ]
    made = pair.schedule_class(stages, num_microbatches, _loss)
    batch, target = torch.ones(2, 2 * num_microbatches, WIDTH)
    last = pair.placement[-1] == dist.get_rank()
    given = (batch,) if dist.get_rank() == 0 else ()
    return made, lambda: made.step(*given, target=target if last else None, losses=[])


def _our_side(
    pair: Pair, made: Any, num_microbatches: int
) -> tuple[Schedule, Callable[[], object]]:
    rows = tuple(
        tuple(parse_action(str(action)) for action in made.pipeline_order[rank] if action)
        for rank in range(RANKS)
    )
    problem = _problem(pair.placement, num_microbatches)
    schedule = evaluate(problem, rows, Provenance(method="torch"))
    runner = PipelineRunner(_modules(pair), schedule, _loss, problem)
    batch, target = torch.ones(2, 2 * num_microbatches, WIDTH)
    return schedule, lambda: runner.step(batch, target)


def _problem(placement: tuple[int, ...], num_microbatches: int) -> Problem:
    one = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1, "activation_bytes": 1}
    return Problem(
        num_microbatches=num_microbatches,
        devices=(Device(memory_bytes=10**6),) * RANKS,
        stages=tuple(Stage.model_validate({"device": home, **one}) for home in placement),
    )


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


if __name__ == "__main__":
    sys.exit(main())
