"""What the ranks run with the small model: many schedules, faults, and what is left afterwards."""

from __future__ import annotations

import functools
import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from optpipe.runtime import PipelineRunner
from optpipe.runtime.offload import PlainCopies
from tests.runtime.live_bytes import LiveBytes
from tests.runtime.small_model import small_data, small_loss, small_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from optpipe import Problem, Schedule
    from optpipe.runtime.messages import Order
    from optpipe.runtime.offload import Fence

STEPS = 3


class Trained(NamedTuple):
    """One rank's steps against the single-process model; gradients add up over the steps."""

    losses_equal: bool
    worst_difference: float
    largest_gradient: float
    num_gradients: int
    offloaded_bytes: int
    digest: float


def train_small(schedule: Schedule, problem: Problem | None, fault: str = "") -> Trained:
    """Run steps of the pipeline, comparing this rank's part with the reference after each."""
    own, runner = _make(schedule, problem)
    expected_losses, expected = reference(_count(schedule))
    found = Trained(True, 0.0, 0.0, 0, 0, 0.0)
    for step in range(STEPS):
        if step == 1:
            _FAULTS[fault](runner)
        losses = runner.step(*small_data(_count(schedule), seed=step))
        if losses is not None:
            equal = torch.allclose(losses, expected_losses[step], rtol=1e-13, atol=0.0)
            found = found._replace(losses_equal=found.losses_equal and equal)
        found = _compare(found, own, expected[step], len(schedule.placement))
    runner.close()
    return found._replace(offloaded_bytes=runner.offloaded_bytes)


class Turns(NamedTuple):
    """How steps of several runners compare with one process, and the least that one put aside."""

    worst_difference: float
    least_deferred_bytes: int


def take_turns(schedules: Sequence[Schedule]) -> Turns:
    """Run one step of each schedule on the same stages."""
    own, first = _make(schedules[0], None)
    others = [
        PipelineRunner(own, schedule, small_loss, min_offload_bytes=1) for schedule in schedules[1:]
    ]
    count = _count(schedules[0])
    _, expected = reference(count)
    found, deferred = Trained(True, 0.0, 0.0, 0, 0, 0.0), []
    for step, runner in enumerate([first, *others]):
        seen = _Deferred(runner)
        runner.step(*small_data(count, seed=step))
        runner.close()
        found = _compare(found, own, expected[step], len(schedules[0].placement))
        deferred.append(seen.bytes)
    return Turns(found.worst_difference, min(deferred))


class _Deferred:
    """Looks, after every I, at what is put aside for its W."""

    def __init__(self, runner: PipelineRunner) -> None:
        self.bytes = 0
        gradients = runner._passes._gradients
        take = gradients.take

        def watched() -> Callable[[], None]:
            self.bytes += gradients.held_bytes()
            return take()

        gradients.take = watched  # type: ignore[method-assign]


def _make(
    schedule: Schedule, problem: Problem | None
) -> tuple[dict[int, nn.Module], PipelineRunner]:
    modules, rank = small_stages(len(schedule.placement)), dist.get_rank()
    own = {s: modules[s] for s, home in enumerate(schedule.placement) if home == rank}
    return own, PipelineRunner(own, schedule, small_loss, problem, min_offload_bytes=1)


def _count(schedule: Schedule) -> int:
    return 1 + max(action.microbatch for program in schedule.programs for action in program)


@functools.cache
def reference(num_microbatches: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The losses by micro-batch and all gradients, in parameter order, after every step."""
    (model,) = small_stages(1)
    losses, gradients = [], []
    for step in range(STEPS):
        batch, target = small_data(num_microbatches, seed=step)
        made = []
        parts = zip(batch.chunk(num_microbatches), target.chunk(num_microbatches), strict=True)
        for inputs, wanted in parts:
            loss = small_loss(model(inputs), wanted)
            (loss / num_microbatches).backward()
            made.append(loss.detach())
        losses.append(torch.stack(made))
        gradients.append(_gradients([model]))
    return losses, gradients


def _gradients(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return copies of all gradients; a parameter without one is an error."""
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    return [gradient.clone() for gradient in found if gradient is not None]


def _compare(
    found: Trained, own: dict[int, nn.Module], expected: Sequence[Tensor], num_stages: int
) -> Trained:
    per_stage = len(expected) // num_stages
    for index, module in own.items():
        wanted = expected[per_stage * index : per_stage * (index + 1)]
        for parameter, gradient in zip(module.parameters(), wanted, strict=True):
            assert parameter.grad is not None, f"stage {index} got no gradient"
            # NaN is the largest difference of all, but max() would pass over it.
            difference = (parameter.grad - gradient).abs().max().nan_to_num(nan=float("inf"))
            found = found._replace(
                worst_difference=max(found.worst_difference, float(difference)),
                largest_gradient=max(found.largest_gradient, float(gradient.abs().max())),
                num_gradients=found.num_gradients + 1,
                digest=found.digest + float(parameter.grad.sum()),
            )
    return found


class _SlowCopies(PlainCopies):
    """Copies that are made when they are waited for, after a while, the target spoilt before."""

    def __init__(self, seed: int) -> None:
        self._chooser = random.Random(seed)

    def to_host(self, pairs: Any) -> Fence:
        return _Later(pairs, self._chooser.random() / 500)

    def to_device(self, pairs: Any) -> Fence:
        for _, device in pairs:
            device.fill_(255)
        return _Later(pairs, self._chooser.random() / 500)


class _Later:
    def __init__(self, pairs: Any, seconds: float) -> None:
        self._pairs = pairs
        self._seconds = seconds

    def wait(self) -> None:
        time.sleep(self._seconds)
        for source, target in self._pairs:
            target.copy_(source)
        self._pairs = ()


class _RandomDelays:
    """Sleeps before and after actions, differently on every rank and in every step."""

    def __init__(self, seed: int) -> None:
        self._chooser = random.Random(seed)

    def begin(self, action: object) -> None:
        self._sleep()

    def end(self, action: object) -> None:
        self._sleep()

    def _sleep(self) -> None:
        if self._chooser.random() < 0.3:
            time.sleep(self._chooser.random() / 250)


def _delay(runner: PipelineRunner) -> None:
    rank = dist.get_rank()
    runner.offloader.copies = _SlowCopies(seed=rank)
    runner.observe(_RandomDelays(seed=100 + rank))


def _corrupt(runner: PipelineRunner) -> None:
    """Flip the lowest bit of the first byte that comes back from the host, on rank 1."""
    issue = runner.offloader.copies.to_device

    def to_device(pairs: Any) -> Fence:
        for host, _ in pairs:
            host[7] ^= 16
        return issue(pairs)

    if dist.get_rank() == 1:
        runner.offloader.copies.to_device = to_device  # type: ignore[method-assign]


def _swap_receives(runner: PipelineRunner) -> None:
    """Post the first two receives of rank 1 in the other order, behind the preflight's back."""
    if dist.get_rank() == 1:
        assert runner._training is not None
        order = runner._training.runtime.pipeline_order_with_comms[1]
        left, right = (
            index for index, action in enumerate(order) if str(action) in ("1RECV_F0", "1RECV_F1")
        )
        order[left], order[right] = order[right], order[left]


_FAULTS: dict[str, Callable[[PipelineRunner], None]] = {
    "": lambda runner: None,
    "delays": _delay,
    "corrupted host copy": _corrupt,
    "swapped receives": _swap_receives,
}


def orders_of(schedules: Sequence[Schedule]) -> list[tuple[Order, ...]]:
    """Return, for each schedule, what its runtime will do on every rank."""
    found = []
    for schedule in schedules:
        _, runner = _make(schedule, None)
        runner.step(*small_data(_count(schedule), seed=0))
        runner.close()
        assert runner._training is not None
        found.append(runner._training.runtime.orders)
    return found


class Evaluated(NamedTuple):
    """One rank's evaluation beside the single-process model, and what it left."""

    outputs_equal: bool | None
    losses_equal: bool | None
    live_bytes: int
    peak_bytes: int
    gradients_untouched: bool


def evaluate_small(schedule: Schedule, num_samples: int, *, with_target: bool) -> Evaluated:
    """Train a step, evaluate a batch of another size twice, train again."""
    own, runner = _make(schedule, None)
    count = _count(schedule)
    runner.step(*small_data(count, seed=0))
    gradients = _gradients(own.values())
    batch, target = (whole[:num_samples] for whole in small_data(2 * num_samples, seed=9))
    runner.eval(batch, target if with_target else None)
    with LiveBytes() as counter:
        found = runner.eval(batch, target if with_target else None)
        live = counter.live - _bytes(found.outputs) - _bytes(found.losses)
    untouched = all(map(torch.equal, gradients, _gradients(own.values())))
    runner.step(*small_data(count, seed=1))
    runner.close()
    (model,) = small_stages(1)
    with torch.no_grad():
        expected = model(batch)
        parts = zip(expected.chunk(count), target.chunk(count), strict=True)
        losses = torch.stack([small_loss(output, wanted) for output, wanted in parts])
    return Evaluated(
        None if found.outputs is None else torch.allclose(found.outputs, expected, rtol=1e-12),
        None if found.losses is None else torch.allclose(found.losses, losses, rtol=1e-12),
        live,
        counter.peak,
        untouched,
    )


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()
