"""Trains a small GPT by a schedule: measured, planned by the service, and run by all ranks.

``torchrun --nproc-per-node 4 examples/train_gpt.py --url http://127.0.0.1:8000``

Each rank holds one stage. Without ``--url`` the schedule is solved here, or read from the file
``--schedule``. With a GPU per rank the stages are there and NCCL carries what goes between them,
else all is on the CPU over gloo. ``--check`` trains the same model in one process beside it.

The text is sums, endlessly many and the same for a seed. A model must learn the form, to read both
numbers, and to add: its loss falls fast at first and slowly afterwards, as on real text. The
alphabet is small, so that the model can be, too.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from optpipe import OptPipeError, Problem, Schedule, dump_schedule, load_schedule
from optpipe.client import Client
from optpipe.runtime import PipelineRunner, measure
from optpipe.runtime.demo import ModelConfig, make_stages
from optpipe.runtime.preflight import num_microbatches_of

sys.path.insert(0, str(Path(__file__).parents[1]))


LEARNING_RATE = 3e-3
LARGEST_NORM = 1.0
"""To which gradients are clipped."""

TOLERANCES = {False: 1e-10, True: 5e-3}  # of a checked loss: in double precision, and in bf16


def main() -> int:
    """Join the other ranks, plan, train; return the exit code."""
    options = parse()
    device = join()
    try:
        return 0 if train(options, device) else 1
    except OptPipeError as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="the service that solves; default: solved here")
    parser.add_argument("--schedule", type=Path, help="a schedule file: nothing is planned")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--microbatches", type=int, default=8, help="per step (default: 8)")
    parser.add_argument("--samples", type=int, default=4, help="per micro-batch (default: 4)")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=64, help="characters of a sample")
    parser.add_argument("--activations", type=float, help="plan for room for only so many")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of solving")
    parser.add_argument("--bf16", action="store_true", help="multiply in bf16")
    parser.add_argument("--check", action="store_true", help="compare with a single process")
    return parser.parse_args()


def join() -> torch.device:
    """Meet the other ranks; return where this one computes."""
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def build(options: argparse.Namespace) -> list[nn.Module]:
    """Return a stage per rank; in a checked run in double precision, where rounding is small."""
    dtype = torch.float64 if options.check and not options.bf16 else torch.float32
    config = ModelConfig(
        vocabulary=len(ALPHABET), hidden=options.hidden, sequence=options.sequence, dtype=dtype
    )
    return build_stages(config, dist.get_world_size(), bf16=options.bf16)


def plan(options: argparse.Namespace, device: torch.device) -> tuple[Problem | None, Schedule]:
    """Return a schedule and, where it was made here, the problem that it solves."""
    if options.schedule is not None:
        return None, load_schedule(options.schedule.read_text())
    batch, target = make_batch(options.samples, options.sequence, seed=0)
    stages = build(options)
    profile = measure(stages, batch, loss_fn=token_loss, target=target, device=device)
    problem = profile.problem(options.microbatches)
    if options.activations is not None:
        problem = with_room(problem, options.activations)
    answer = [("", "") if dist.get_rank() else solve(problem, options)]
    dist.broadcast_object_list(answer, device=device)
    schedule, fault = answer[0]
    if fault:
        raise OptPipeError(fault)
    return problem, load_schedule(schedule)


def with_room(problem: Problem, activations: float) -> Problem:
    """Return the problem with memory for only so many activations per device.

    Less than there is, so that a rehearsal has to offload or recompute.
    """
    devices = []
    for stage, device in zip(problem.stages, problem.devices, strict=True):
        largest = max(stage.activation_bytes, stage.weight_context_bytes)
        workspace = max(stage.forward_workspace_bytes, stage.backward_input_workspace_bytes)
        memory = device.reserved_bytes + stage.static_bytes + workspace + int(activations * largest)
        devices.append(device.model_copy(update={"memory_bytes": memory}))
    return problem.model_copy(update={"devices": tuple(devices)})


def solve(problem: Problem, options: argparse.Namespace) -> tuple[str, str]:
    """Return the best schedule found in time, as JSON, or why there is none."""
    try:
        if options.url is not None:
            with Client(options.url) as client:
                *_, job = client.follow(client.submit(problem, time_limit_s=options.time_limit))
                return dump_schedule(client.schedule(job)), ""
        from optpipe_solver.solve import solve as solve_here

        result = solve_here(problem, time_limit_s=options.time_limit)
    except OptPipeError as error:
        return "", str(error)
    if result.schedule is None:
        return "", f"no schedule: {result.message}; give more --activations or time"
    return dump_schedule(result.schedule), ""


def train(options: argparse.Namespace, device: torch.device) -> bool:
    """Train; return whether every step agreed with the single process, if there is one."""
    problem, schedule = plan(options, device)
    rank, count = dist.get_rank(), num_microbatches_of(schedule)
    stage = build(options)[rank].to(device)
    runner = PipelineRunner({rank: stage}, schedule, token_loss, problem, device=device)
    optimizer = torch.optim.AdamW(stage.parameters(), LEARNING_RATE)
    reference, seconds = None, []
    if options.check and runner.holds_last:
        whole = [part.to(device) for part in build(options)]
        reference = UnsplitTraining(whole, LEARNING_RATE, TOLERANCES[options.bf16])
    for step in range(options.steps):
        batch, target = make_batch(count * options.samples, options.sequence, seed=step)
        batch, target = batch.to(device), target.to(device)
        start = time.perf_counter()
        optimizer.zero_grad()
        losses = runner.step(batch, target)
        norm = runner.clip_grad_norm_(LARGEST_NORM)  # ends what the `span` objective promises
        optimizer.step()
        if losses is not None:
            text = f"step {step + 1}: loss {losses.mean():.10f}, gradient norm {norm:.4f}"
            seconds.append(time.perf_counter() - start)
            text += reference.compare(losses, batch, target) if reference is not None else ""
            if step % 10 == 0 or step + 1 == options.steps or "DISAGREES" in text:
                print(text, flush=True)
    runner.close()
    print(f"rank {rank}: {runner.offloaded_bytes} bytes offloaded", flush=True)
    if seconds:
        took_ms = 1e3 * statistics.median(seconds)
        print(f"a step took {took_ms:.1f} ms (median), planned: {schedule.makespan_ms:.1f} ms")
    return reference is None or reference.agreed_always()


class MixedPrecision(nn.Module):
    """A stage that multiplies in bf16; parameters, gradients and what it sends stay as they are."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, received: Tensor) -> Tensor:
        """Run the stage; shapes as its own."""
        with torch.autocast(received.device.type, torch.bfloat16):
            sent: Tensor = self.stage(received)
        return sent


def build_stages(config: ModelConfig, num_stages: int, *, bf16: bool) -> list[nn.Module]:
    """Return all stages, on the CPU; the same for the same sizes, on every rank."""
    stages = make_stages(config, num_stages)
    return [MixedPrecision(stage) for stage in stages] if bf16 else stages


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy, made in at least single precision."""
    wide = logits.float() if logits.dtype is torch.bfloat16 else logits
    return functional.cross_entropy(wide.flatten(0, 1), target.flatten())


class UnsplitTraining:
    """The same model, data and optimizer without a pipeline.

    Parameters
    ----------
    tolerance
        By how much a loss may differ, relative.
    """

    def __init__(self, stages: list[nn.Module], learning_rate: float, tolerance: float) -> None:
        self._model = nn.Sequential(*stages)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), learning_rate)
        self._tolerance = tolerance
        self._agreed = True

    def compare(self, losses: Tensor, batch: Tensor, target: Tensor) -> str:
        """Train the step that gave these losses, by micro-batch; return what to tell of it."""
        found, expected = losses.mean().item(), self.step(batch, target, len(losses))
        agrees = abs(found - expected) <= self._tolerance * expected
        self._agreed = self._agreed and agrees
        return f", one process {expected:.10f}{'' if agrees else '  DISAGREES'}"

    def agreed_always(self) -> bool:
        """Say and return whether every step's loss was the pipeline's."""
        print(f"the loss curve {'equals' if self._agreed else 'is NOT'} that of one process")
        return self._agreed

    def step(self, batch: Tensor, target: Tensor, num_microbatches: int) -> float:
        """Train a step; return its loss."""
        self._optimizer.zero_grad()
        total = 0.0
        parts = zip(batch.chunk(num_microbatches), target.chunk(num_microbatches), strict=True)
        for inputs, wanted in parts:
            loss = token_loss(self._model(inputs), wanted) / num_microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        nn.utils.clip_grad_norm_(self._model.parameters(), LARGEST_NORM)
        self._optimizer.step()
        return total


# --- The text.

ALPHABET = "\n 0123456789+="


def sums(num_characters: int, seed: int) -> str:
    """Return so many characters of lines like ``21 + 5 = 26``."""
    chooser = random.Random(seed)
    text = ""
    while len(text) < num_characters:
        left, right = chooser.randrange(100), chooser.randrange(100)
        text += f"{left} + {right} = {left + right}\n"
    return text[:num_characters]


def make_batch(num_samples: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens and each one's successor, both of shape (num_samples, length)."""
    text = sums(num_samples * (length + 1), seed)
    tokens = torch.tensor([ALPHABET.index(letter) for letter in text])
    tokens = tokens.view(num_samples, length + 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


if __name__ == "__main__":
    sys.exit(main())
