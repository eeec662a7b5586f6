"""Trains a small real transformer by a schedule and compares it with the single-process model.

``torchrun --nproc-per-node 4 -m optpipe.runtime.demo --problem P.json --schedule S.json``

With ``--url http://127.0.0.1:8000 --job ID`` instead of ``--schedule``, rank 0 fetches the schedule
from the service. Exit codes: 0 every step agrees, 1 one does not or a rank failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import torch
import torch.distributed as dist

from optpipe.errors import InputError, OptPipeError, ServiceError, ServiceUnreachableError
from optpipe.formats.json_text import load_problem, load_schedule, read_text
from optpipe.runtime.demo_model import ModelConfig, make_stages, random_tokens, token_loss
from optpipe.runtime.launch import RENDEZVOUS_VARIABLE
from optpipe.runtime.reference import SingleProcess, gather_gradients
from optpipe.runtime.runner import PipelineRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from optpipe.problem import Problem
    from optpipe.runtime.reference import Agreement, Gradients
    from optpipe.schedule import Schedule

__all__ = ["main"]

_FETCH_TIMEOUT_S = 30.0


class _Plan(NamedTuple):
    problem: Problem
    schedule: Schedule


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank; return its exit code."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    _join()
    try:
        return 0 if _train(_load(options), options.steps) else 1
    except _RefusedError as error:
        return error.code
    except InputError as error:
        # The same text on every rank: once is enough.
        return _refuse(error) if dist.get_rank() == 0 else _exit_code(error)
    except OptPipeError as error:
        return _refuse(error)
    finally:
        dist.destroy_process_group()


class _RefusedError(Exception):
    """Rank 0 could not load problem and schedule, and has said so."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _refuse(error: OptPipeError) -> int:
    print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
    return _exit_code(error)


def _exit_code(error: OptPipeError) -> int:
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


def _join() -> None:
    """Meet the other ranks: in the launcher's file, or where torchrun says."""
    rendezvous = os.environ.get(RENDEZVOUS_VARIABLE)
    if rendezvous is None:
        dist.init_process_group("gloo")
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def _load(options: argparse.Namespace) -> _Plan:
    """Return problem and schedule, read or fetched by rank 0 alone."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [(read_text(options.problem), _schedule_text(options))]
        except OptPipeError as error:
            told = [_refuse(error)]
    dist.broadcast_object_list(told)
    if isinstance(told[0], int):
        raise _RefusedError(told[0])
    problem_text, schedule_text = told[0]
    return _Plan(load_problem(problem_text), load_schedule(schedule_text))


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


def _train(plan: _Plan, steps: int) -> bool:
    """Train; return, on every rank, whether all steps agreed with the single process."""
    rank, schedule = dist.get_rank(), plan.schedule
    config, count = ModelConfig(), plan.problem.num_microbatches
    modules = make_stages(config, len(schedule.placement))
    own = {stage: modules[stage] for stage, home in enumerate(schedule.placement) if home == rank}
    reference = SingleProcess(deepcopy(modules), count) if rank == 0 else None
    runner = PipelineRunner(own, schedule, token_loss, plan.problem)
    optimizer = torch.optim.Adam([p for m in own.values() for p in m.parameters()], lr=1e-3)
    agreements = []
    for step in range(steps):
        optimizer.zero_grad()
        batch, target = random_tokens(config, count, seed=step)
        losses = runner.step(batch, target)
        pipeline_loss, gradients = _gather(losses, own)
        if reference is not None:
            reference_loss = reference.step(batch, target)
            agreement = reference.compare(pipeline_loss, reference_loss, gradients)
            print(_line(step, agreement), flush=True)
            agreements.append(agreement.holds)
        optimizer.step()
    _report_traffic(runner)
    return _verdict(all(agreements))


def _gather(losses: Tensor | None, own: dict[int, nn.Module]) -> tuple[float, Gradients]:
    """Return, on rank 0, the batch's loss and the gradients of all stages."""
    mine = None if losses is None else float(losses.mean())
    told: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return next(loss for loss in told if loss is not None), gather_gradients(own)


def _line(step: int, agreement: Agreement) -> str:
    verdict = "" if agreement.holds else "  DISAGREES"
    return (
        f"step {step + 1}: loss {agreement.pipeline_loss:.12f} pipeline, "
        f"{agreement.reference_loss:.12f} one process; {agreement.num_gradients} gradients differ "
        f"by at most {agreement.largest_difference:.1e} (largest {agreement.largest_gradient:.1e})"
        f"{verdict}"
    )


def _report_traffic(runner: PipelineRunner) -> None:
    told: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(told, (runner.offloaded_bytes, runner.reloaded_bytes))
    if dist.get_rank() == 0:
        for rank, (offloaded, reloaded) in enumerate(told):
            print(f"rank {rank}: {offloaded} bytes offloaded, {reloaded} bytes reloaded")


def _verdict(agreed: bool) -> bool:
    told = [agreed]
    dist.broadcast_object_list(told)
    if dist.get_rank() == 0:
        if told[0]:
            print("the pipeline trains like one process: losses and all gradients agree")
        else:
            print("the pipeline does NOT train like one process; see above", file=sys.stderr)
    return told[0]


if __name__ == "__main__":
    sys.exit(main())
