"""What an action costs beside torch's own schedule runtime: four ranks, tiny modules, one run.

``python -m benchmarks.runtime_overhead [--steps N] [--microbatches M] [--predict]``

The programs are torch's own, of its public schedules: interleaved 1F1B with fused backwards, and
the zero-bubble V with split ones. Each is run by torch alone and by `PipelineRunner`, in turns of
a few steps, so that both meet the same noise. Counted is the processor time of the thread that
runs the steps, in which waiting for other ranks costs nothing: per rank and action, modules and
posting of messages included; the median over the turns. Where backwards are split torch walks the
graph twice and ours once, so the first line is the comparison of the runtimes. The target is at
most 1.15 times torch. The third line is Megatron-Core's own 1F1B beside the same program by ours,
with the GPT of its tests. Last comes what OFFLOAD, RELEASE and RELOAD of a cell cost for each
storage, on rank 0 alone; the target is 20 us.

``--predict`` asks instead whether what Megatron's timers measured predicts the steps that they
measured: a GPT of 8 layers on two ranks, one for each core of a small machine, trained by our 1F1B
under Megatron-Core's timers; `optpipe import megatron` reads them, and the problem's simulated step
stands beside the run's (timer ``forward-backward``). The target is 10% on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from functools import partial
from importlib.util import find_spec
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
from optpipe.runtime.launch import RENDEZVOUS_VARIABLE, launch_ranks
from optpipe.runtime.offload import Offloader

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
    parser.add_argument("--predict", action="store_true", help="of steps under Megatron's timers")
    options = parser.parse_args()
    num_ranks = 2 if options.predict else RANKS
    if "RANK" not in os.environ:
        return launch_ranks("benchmarks.runtime_overhead", sys.argv[1:], num_ranks)
    torch.set_num_threads(1)
    rank, store = int(os.environ["RANK"]), os.environ[RENDEZVOUS_VARIABLE]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        if options.predict:
            _report_prediction(options.steps)
            return 0
        _report(options.microbatches, options.steps)
        _report_megatron(options.steps)
        if rank == 0:
            print(f"\noffload: {_offload_us():.1f} us per storage")
    finally:
        dist.destroy_process_group()
    return 0


def _report(num_microbatches: int, steps: int) -> None:
    first = dist.get_rank() == 0
    if first:
        print("| schedule | actions per rank | torch, us/action | ours, us/action | ratio |")
        print("|---|--:|--:|--:|--:|")
    for pair in PAIRS:
        torch_schedule, theirs = _torch_side(pair, num_microbatches)
        schedule, ours = _our_side(pair, torch_schedule, num_microbatches)
        count = len(schedule.programs[dist.get_rank()])
        _print_row(pair.name, count, _in_turns([theirs, ours], steps))


def _print_row(name: str, count: int, costs: list[float]) -> None:
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, [cost / count for cost in costs])
    if dist.get_rank() == 0:
        their_us, our_us = (statistics.mean(column) for column in zip(*everyone, strict=True))
        print(f"| {name} | {count} | {their_us:.1f} | {our_us:.1f} | {our_us / their_us:.2f} |")


def _report_megatron(steps: int) -> None:
    """Add a row of Megatron-Core's own 1F1B; nothing where it is not installed."""
    if find_spec("megatron") is None:
        return
    from optpipe.runtime.trainers.megatron import forward_backward_func
    from tests.runtime import schedules
    from tests.runtime.trainers import megatron_cases as cases
    from tests.runtime.trainers.megatron_shim import megatron_on_cpu

    problem = schedules.make_problem(schedules.LINEAR, cases.MICROBATCHES)
    programs = schedules.one_f_one_b(RANKS, cases.MICROBATCHES)
    ours = forward_backward_func(schedules.make_schedule(problem, programs))
    job = cases.Job(RANKS)
    with megatron_on_cpu(RANKS, 1):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        models = cases.models_of(job)
        own, batch = get_forward_backward_func(), partial(cases.arguments_of, models, job, 0)
        costs = _in_turns([lambda: own(**batch()), lambda: ours(**batch())], steps)
        ours.close()
    _print_row("Megatron-Core's 1F1B", len(programs[0]), costs)


def _report_prediction(steps: int) -> None:
    """Print the step that Megatron's timers of a run lead to, and the run's own."""
    from optpipe.measurements import MegatronRun, read_megatron
    from optpipe.simulate import simulate
    from tests.runtime import schedules
    from tests.runtime.trainers import megatron_cases as cases

    base = schedules.make_problem((0, 1), cases.MICROBATCHES)
    programs = schedules.one_f_one_b(2, cases.MICROBATCHES)
    job = cases.Job(2, width=256, length=128)
    schedule = schedules.make_schedule(base, programs)
    found: list[Any] = [None] * 2
    dist.all_gather_object(found, cases.timed_by_megatron(schedule, job, steps + 1))
    if dist.get_rank() != 0:
        return
    printed = next(text for text, _ in found if text)
    run = MegatronRun(num_microbatches=cases.MICROBATCHES, num_stages=2)
    # The first step builds the pipeline.
    measured = read_megatron(printed, run).without_warmup(1)
    took_ms = [max(both) for both in list(zip(*(times for _, times in found), strict=True))[1:]]
    for (stage, action), spread in sorted(measured.spreads.items()):
        print(f"stage {stage}, {action}: {spread.median_ms:.2f} ms")
    simulated = simulate(measured.problem(base=base), programs).makespan_ms
    median = statistics.median(took_ms)
    print(
        f"simulated {simulated:.1f} ms, run {median:.1f} ms (median of {steps} steps, "
        f"{min(took_ms):.1f} to {max(took_ms):.1f}): {simulated / median - 1:+.1%}"
    )


def _offload_us() -> float:
    """Return the processor time of a cell's way to the host and back, for each storage."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(32)]
    stage, cell = nn.Sequential(*layers), (0, 0)
    given = torch.randn(32, 16, requires_grad=True)
    offloader = Offloader({0: stage}, torch.device("cpu"), [cell], min_bytes=1)
    count = 0

    def kept() -> None:
        stage(given).sum().backward()

    def moved() -> None:
        nonlocal count
        with offloader.capture(cell, [given]):
            output = stage(given)
        offloader.keep(cell, [output])
        offloader.offload(cell)
        count = len(offloader.storages(cell))
        offloader.release(cell)
        offloader.reload(cell)
        offloader.before_backward(cell)
        output.sum().backward()

    times: list[list[float]] = [[], []]
    for _ in range(40):
        for side, found in zip((kept, moved), times, strict=True):
            start = time.thread_time()
            for _ in range(20):
                side()
            found.append((time.thread_time() - start) / 20 * 1e6)
    return (min(times[1]) - min(times[0])) / count


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
    torch_schedule = pair.schedule_class(stages, num_microbatches, _loss)
    batch, target = torch.ones(2, 2 * num_microbatches, WIDTH)
    last = pair.placement[-1] == dist.get_rank()
    given = (batch,) if dist.get_rank() == 0 else ()
    return torch_schedule, lambda: torch_schedule.step(
        *given, target=target if last else None, losses=[]
    )


def _our_side(
    pair: Pair, torch_schedule: Any, num_microbatches: int
) -> tuple[Schedule, Callable[[], object]]:
    rows = tuple(
        tuple(parse_action(str(action)) for action in torch_schedule.pipeline_order[rank] if action)
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
