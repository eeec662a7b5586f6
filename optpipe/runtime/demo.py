"""Trains a small real transformer by a schedule and compares it with the single-process model.

``torchrun --nproc-per-node 4 -m optpipe.runtime.demo --problem P.json --schedule S.json``

With ``--url http://127.0.0.1:8000 --job ID`` instead of ``--schedule``, rank 0 fetches the schedule
from the service. Exit codes: 0 every step agrees, 1 one does not or a rank failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import httpx
import torch
import torch.distributed as dist

from optpipe.errors import InputError, OptPipeError, ServiceError, ServiceUnreachableError
from optpipe.formats.json import load_problem, load_schedule, read_text
from optpipe.runtime.demo_model import (
    ModelConfig,
    chain,
    join_ranks,
    leave_ranks,
    make_stages,
    random_tokens,
    step_alone,
    token_loss,
)
from optpipe.runtime.preflight import gather
from optpipe.runtime.runner import PipelineRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["main"]


_FETCH_TIMEOUT_S = 30.0
_TOLERANCE = 1e-10
"""Of a loss, and of gradients relative to the largest one; the model is in double precision."""

Gradients = dict[int, dict[str, "Tensor"]]
"""Stage -> parameter -> gradient."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank; return its exit code."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    join_ranks("gloo")
    try:
        problem, schedule = _load(options)
        return 0 if _train(problem, schedule, options.steps) else 1
    except InputError as error:
        # The same text on every rank: once is enough.
        return _refuse(error) if dist.get_rank() == 0 else 2
    except OptPipeError as error:
        return _refuse(error)
    finally:
        leave_ranks()


def _refuse(error: OptPipeError) -> int:
    print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
    return 2 if isinstance(error, InputError) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="optpipe.runtime.demo", description=__doc__)
    parser.add_argument("--problem", required=True, help="file of the problem")
    parser.add_argument("--schedule", help="file of its schedule")
    parser.add_argument("--url", help="the service to fetch the schedule from")
    parser.add_argument("--job", help="the job whose schedule is fetched")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: 3)")
    options = parser.parse_args(arguments)
    if (options.schedule is None) == (options.url is None or options.job is None):
        parser.error("give either --schedule FILE, or --url and --job")
    return options


def _load(options: argparse.Namespace) -> tuple[Problem, Schedule]:
    """Return problem and schedule, read or fetched by rank 0 alone, which also refuses them."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            shared = [(read_text(options.problem), _schedule_text(options))]
        except OptPipeError as error:
            shared = [_refuse(error)]
    dist.broadcast_object_list(shared)
    if isinstance(shared[0], int):
        sys.exit(shared[0])
    problem_text, schedule_text = shared[0]
    return load_problem(problem_text), load_schedule(schedule_text)


def _schedule_text(options: argparse.Namespace) -> str:
    if options.schedule is not None:
        return read_text(options.schedule)
    address = f"{options.url.rstrip('/')}/v1/jobs/{options.job}/schedule"
    try:
        answer = httpx.get(
            address, headers={"Accept": "application/json"}, timeout=_FETCH_TIMEOUT_S
        )
    except httpx.TransportError as error:
        raise ServiceUnreachableError(
            f"{address} cannot be reached ({error}); is the service running?"
        ) from None
    if answer.status_code != httpx.codes.OK:
        raise ServiceError(
            f"{address} answered {answer.status_code}, not 200: {answer.text[:300]}; "
            "is the job solved, and the id right?",
            answer.status_code,
        )
    return answer.text


def _train(problem: Problem, schedule: Schedule, steps: int) -> bool:
    """Train; return, on every rank, whether all steps agreed with the single process."""
    rank, config, count = dist.get_rank(), ModelConfig(), problem.num_microbatches
    modules = make_stages(config, len(schedule.placement))
    own = {stage: modules[stage] for stage, home in enumerate(schedule.placement) if home == rank}
    reference = deepcopy(modules)
    runner = PipelineRunner(own, schedule, token_loss, problem)
    optimizers = [
        torch.optim.Adam(chain(part).parameters(), lr=1e-3)
        for part in (list(own.values()), reference)
    ]
    agreed = True
    for step in range(steps):
        batch, target = random_tokens(config, count, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = runner.step(batch, target)
        loss = None if losses is None else float(losses.mean())
        found = gather((loss, _gradients_of(own)), None)
        if rank == 0:
            expected = step_alone(chain(reference), batch.chunk(count), target.chunk(count))
            agreed &= _agrees(step, found, expected, _gradients_of(dict(enumerate(reference))))
        for optimizer in optimizers:
            optimizer.step()
    moved = gather((agreed, runner.offloaded_bytes, runner.reloaded_bytes), None)
    runner.close()
    if rank == 0:
        for number, (_, offloaded, reloaded) in enumerate(moved):
            print(f"rank {number}: {offloaded} bytes offloaded, {reloaded} bytes reloaded")
        if agreed:
            print("the pipeline trains like one process: losses and all gradients agree")
        else:
            print("the pipeline does NOT train like one process; see above", file=sys.stderr)
    return bool(moved[0][0])


def _gradients_of(stages: dict[int, nn.Module]) -> Gradients:
    """Return all gradients of some stages; a parameter without one has zeros."""
    return {
        index: {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).detach()
            for name, p in module.named_parameters()
        }
        for index, module in stages.items()
    }


def _agrees(
    step: int, found: list[tuple[float | None, Gradients]], expected: float, own: Gradients
) -> bool:
    """Print how the ranks' loss and gradients compare with those of one process."""
    loss = next(loss for loss, _ in found if loss is not None)
    theirs = {index: named for _, part in found for index, named in part.items()}
    pairs = [
        (theirs[index][name], gradient)
        for index, named in own.items()
        for name, gradient in named.items()
    ]
    # NaN must not pass for agreement: max() would skip it.
    difference = float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())
    largest = max(float(gradient.abs().max()) for _, gradient in pairs)
    agrees = abs(loss - expected) <= _TOLERANCE * expected and difference <= _TOLERANCE * largest
    print(
        f"step {step + 1}: loss {loss:.12f} pipeline, {expected:.12f} one process; "
        f"{len(pairs)} gradients differ by at most {difference:.1e} (largest {largest:.1e})"
        f"{'' if agrees else '  DISAGREES'}",
        flush=True,
    )
    return agrees


if __name__ == "__main__":
    sys.exit(main())
