"""What timing the actions of a training run costs, by processor time, on one rank.

``python -m benchmarks.timing_overhead [--device cuda]``

A runner's step is measured for comparison; then the timer alone is handed the actions of as many
steps, on which it does all it does in training: marks, and reading them a step later. Printed are
the costs per action and, from them, the share of a step at the default of one sampled step in so
many. Processor time leaves out waiting, of which one rank has none.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe import Provenance, Schedule, evaluate, parse_action
from optpipe.problem import Device, Problem, Stage
from optpipe.runtime import ActionTimer, PipelineRunner
from optpipe.runtime.measuring.times import clock_for
from optpipe.runtime.timing import DEFAULT_EVERY

if TYPE_CHECKING:
    from collections.abc import Callable

_NEVER = 10**9
_ACTION_US = (50, 100, 200, 1000, 10_000)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200, help="steps of each kind")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        try:
            _report(options.microbatches, options.rounds, torch.device(options.device))
        finally:
            dist.destroy_process_group()


def _report(num_microbatches: int, rounds: int, device: torch.device) -> None:
    schedule = _schedule(num_microbatches)
    stage = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device)
    runner = PipelineRunner({0: stage}, schedule, _loss, device=device)
    batch, target = torch.ones(2, 2 * num_microbatches, 8, device=device)
    num_actions = len(schedule.programs[0])
    plain = _median_us(lambda: runner.step(batch, target), rounds) / num_actions
    clock = clock_for(device)
    idle, sampling = (
        _median_us(partial(_observe, ActionTimer(runner, every=every, clock=clock)), rounds)
        / num_actions
        for every in (_NEVER, 1)
    )
    runner.close()
    print(f"{num_actions} actions a step, {plain:.1f} us each without a timer")
    print(f"an action of a step that is not sampled: {idle:.2f} us more")
    print(f"an action of a sampled step:             {sampling:.2f} us more")
    print(f"share of a step, one in {DEFAULT_EVERY} sampled, by the length of its actions:")
    mean_us = idle + (sampling - idle) / DEFAULT_EVERY
    for length in _ACTION_US:
        print(f"{length:8} us   {100 * mean_us / length:6.3f} %")


def _observe(timer: ActionTimer) -> None:
    for action in timer.program:
        timer.begin(action)
        timer.end(action)


def _median_us(run: Callable[[], object], rounds: int) -> float:
    """Return the median processor time of a step in us, the first five left out."""
    taken = []
    for _ in range(rounds + 5):
        start = time.process_time_ns()
        run()
        taken.append((time.process_time_ns() - start) / 1e3)
    return statistics.median(taken[5:])


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _schedule(num_microbatches: int) -> Schedule:
    problem = Problem(
        num_microbatches=num_microbatches,
        devices=(Device(memory_bytes=1000),),
        stages=(
            Stage(
                device=0,
                forward_ms=1,
                backward_input_ms=1,
                backward_weight_ms=1,
                activation_bytes=1,
            ),
        ),
    )
    cells = [f"0{kind}{index}" for index in range(num_microbatches) for kind in "FIW"]
    programs = (tuple(map(parse_action, cells)),)
    return evaluate(problem, programs, Provenance(method="one rank"))


if __name__ == "__main__":
    main()
