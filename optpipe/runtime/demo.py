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
from optpipe.formats.json import load_problem, load_schedule, read_text
from optpipe.problem import Device, Link, Problem, Stage
from optpipe.runtime.demo_model import (
    RENDEZVOUS_VARIABLE,
    ModelConfig,
    chain,
    make_stages,
    random_tokens,
    token_loss,
)
from optpipe.runtime.measuring import Effort, measure
from optpipe.runtime.runner import PipelineRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from optpipe.schedule import Schedule

__all__ = [
    "Agreement",
    "Gradients",
    "SingleProcess",
    "gather_gradients",
    "main",
    "make_demo_problem",
]


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


# --- Writes the demo's problem: the small transformer of `demo_model`, measured on this CPU.
# ``python -m optpipe.runtime.demo -o examples/problems/tiny-gpt-pp4.json``
#
# Each device holds one stage and has room for its weights, its boundary buffers and one and a half
# activations: 1F1B would hold up to four on the first device. So whoever wants more than one
# micro-batch in flight must offload.

_ROOM_IN_ACTIVATIONS = 1.5
_LATENCY_MS = 0.1
_EFFORT = Effort(repeats=15, warmups=2)


def make_demo_problem(
    config: ModelConfig | None = None, num_stages: int = 4, num_microbatches: int = 8
) -> Problem:
    """Measure the model's stages and return the problem, one device per stage."""
    config = config or ModelConfig()
    torch.set_num_threads(1)
    tokens, target = random_tokens(config, num_microbatches=1, seed=0)
    profile = measure(
        make_stages(config, num_stages),
        tokens,
        loss_fn=token_loss,
        target=target,
        effort=_EFFORT,
        links=False,
    )
    measured = profile.problem(num_microbatches)
    stages = tuple(_offloading_stage(stage) for stage in measured.stages)
    rate = _rounded(min(device.d2h_gb_per_s or 1.0 for device in measured.devices))
    return Problem(
        name=f"tiny-gpt-pp{num_stages}",
        num_microbatches=num_microbatches,
        devices=tuple(
            _device(stages, index, rate, num_microbatches) for index in range(num_stages)
        ),
        stages=stages,
        links=tuple(
            Link.model_validate({"from": index, "to": index + 1, "latency_ms": _LATENCY_MS})
            for index in range(num_stages - 1)
        ),
    )


def _offloading_stage(stage: Stage) -> Stage:
    """Return a stage whose times are rounded, and whose only way to less memory is to offload."""
    return Stage(
        device=stage.device,
        forward_ms=_rounded(stage.forward_ms),
        backward_input_ms=_rounded(stage.backward_input_ms),
        backward_weight_ms=_rounded(stage.backward_weight_ms),
        activation_bytes=stage.activation_bytes,
        weight_context_bytes=stage.weight_context_bytes,
        offload_bytes=stage.offload_bytes,
        static_bytes=stage.static_bytes,
        output_bytes=stage.output_bytes,
    )


def _device(stages: tuple[Stage, ...], index: int, rate: float, num_microbatches: int) -> Device:
    stage = stages[index]
    received = stages[index - 1].output_bytes if index else 0
    boundary = num_microbatches * (received + stage.output_bytes)
    largest = max(stage.activation_bytes, stage.weight_context_bytes)
    room = int(_ROOM_IN_ACTIVATIONS * largest)
    return Device(
        name=f"cpu{index}",
        memory_bytes=stage.static_bytes + boundary + room,
        reserved_bytes=boundary,
        d2h_gb_per_s=rate,
        h2d_gb_per_s=rate,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


# --- The same model in one process: what the demo's pipeline is compared with.

Gradients = dict[int, dict[str, "Tensor"]]
"""Stage -> parameter -> gradient, on the CPU."""

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


class Agreement(NamedTuple):
    """How one step of the pipeline compares with the single process."""

    pipeline_loss: float
    reference_loss: float
    largest_difference: float
    largest_gradient: float
    num_gradients: int
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether loss and all gradients agree, relative to the largest gradient."""
        return (
            abs(self.pipeline_loss - self.reference_loss) <= self.tolerance * self.reference_loss
            and self.largest_difference <= self.tolerance * self.largest_gradient
        )


def _gradients_of(stages: dict[int, nn.Module]) -> Gradients:
    """Return all gradients of some stages; a parameter without one has zeros."""
    return {
        index: {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().cpu()
            for name, p in module.named_parameters()
        }
        for index, module in stages.items()
    }


class SingleProcess:
    """The chained model, trained beside the pipeline by an optimizer of its own."""

    def __init__(self, stages: list[nn.Module], num_microbatches: int) -> None:
        self._stages = stages
        self._model = chain(stages)
        self._num_microbatches = num_microbatches
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)

    def step(self, batch: Tensor, target: Tensor) -> float:
        """Finish the step before, then make the gradients of a batch; return its loss."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        count = self._num_microbatches
        total = 0.0
        for inputs, wanted in zip(batch.chunk(count), target.chunk(count), strict=True):
            loss = token_loss(self._model(inputs), wanted) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    def compare(
        self, pipeline_loss: float, reference_loss: float, pipeline: Gradients
    ) -> Agreement:
        """Compare every gradient of the pipeline with the one just made."""
        own = _gradients_of(dict(enumerate(self._stages)))
        pairs = [
            (pipeline[index][name], gradient)
            for index, named in own.items()
            for name, gradient in named.items()
        ]
        # NaN must not pass for agreement: max() would skip it.
        differences = torch.stack([(theirs - ours).abs().max() for theirs, ours in pairs])
        return Agreement(
            pipeline_loss=pipeline_loss,
            reference_loss=reference_loss,
            largest_difference=float(differences.max()),
            largest_gradient=max(float(ours.abs().max()) for _, ours in pairs),
            num_gradients=len(pairs),
            tolerance=_TOLERANCE[pairs[0][1].dtype],
        )


def gather_gradients(stages: dict[int, nn.Module]) -> Gradients:
    """Return the gradients of all ranks' stages on rank 0, nothing elsewhere."""
    told: list[Gradients | None] | None = None
    if dist.get_rank() == 0:
        told = [None] * dist.get_world_size()
    dist.gather_object(_gradients_of(stages), told)
    return {index: named for part in told or () for index, named in (part or {}).items()}


if __name__ == "__main__":
    sys.exit(main())
