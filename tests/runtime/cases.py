"""What the ranks run: a pipeline step beside the same model in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.runtime import PipelineRunner, torch_schedule
from optpipe.runtime.demo_model import ModelConfig, chain, make_stages, random_tokens, token_loss
from optpipe.runtime.messages import Receive

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from optpipe import Problem, Schedule
    from optpipe.runtime.messages import Order
    from optpipe.runtime.offload import Cell, Offloader

CONFIG = ModelConfig(vocabulary=37, hidden=16, heads=2, blocks=8, sequence=6)


class Outcome(NamedTuple):
    """One rank's comparison with the single-process model, over all steps."""

    losses_equal: bool
    worst_difference: float
    num_gradients: int
    smallest_gradient: float
    offloaded_bytes: int
    reloaded_bytes: int
    live_bytes_after_release: int
    released_bytes: int


def train(schedule: Schedule, problem: Problem | None, steps: int = 2, fault: str = "") -> Outcome:
    """Run steps of the pipeline, comparing this rank's part with the reference."""
    modules = make_stages(CONFIG, len(schedule.placement))
    reference = make_stages(CONFIG, len(schedule.placement))
    rank = dist.get_rank()
    own = {s: modules[s] for s, home in enumerate(schedule.placement) if home == rank}
    runner = PipelineRunner(own, schedule, token_loss, problem, min_offload_bytes=1)
    if fault:
        _FAULTS[fault](runner.offloader)
    watch = ReleaseWatch(runner.offloader)
    count = _num_microbatches(schedule)
    found = Outcome(True, 0.0, 0, float("inf"), 0, 0, 0, 0)
    for step in range(steps):
        batch, target = random_tokens(CONFIG, count, seed=step)
        losses = runner.step(batch, target)
        expected = reference_step(reference, batch, target, count)
        if losses is not None:
            found = found._replace(
                losses_equal=found.losses_equal and torch.allclose(losses, expected, rtol=1e-13)
            )
        found = _compare(found, own, reference)
    return found._replace(
        offloaded_bytes=runner.offloaded_bytes,
        reloaded_bytes=runner.reloaded_bytes,
        live_bytes_after_release=watch.live_bytes,
        released_bytes=watch.released_bytes,
    )


def reference_step(stages: list[nn.Module], batch: Tensor, target: Tensor, count: int) -> Tensor:
    """Add up the gradients of the chained model; return the losses by micro-batch."""
    model = chain(stages)
    losses = []
    for inputs, wanted in zip(batch.chunk(count), target.chunk(count), strict=True):
        loss = token_loss(model(inputs), wanted)
        (loss / count).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def _num_microbatches(schedule: Schedule) -> int:
    return 1 + max(action.microbatch for program in schedule.programs for action in program)


def _compare(found: Outcome, own: dict[int, nn.Module], reference: list[nn.Module]) -> Outcome:
    """Compare gradients, which add up over the steps."""
    for index, module in own.items():
        expected = dict(reference[index].named_parameters())
        for name, parameter in module.named_parameters():
            gradient, wanted = parameter.grad, expected[name].grad
            assert gradient is not None, f"{name} of stage {index} got no gradient"
            assert wanted is not None
            # NaN is the largest difference of all, but max() would pass over it.
            difference = (gradient - wanted).abs().max().nan_to_num(nan=float("inf"))
            found = found._replace(
                worst_difference=max(found.worst_difference, float(difference)),
                num_gradients=found.num_gradients + 1,
                smallest_gradient=min(found.smallest_gradient, float(wanted.abs().max())),
            )
    return found


class ReleaseWatch:
    """Looks, from outside, at the storages a cell had on the device when they should be gone."""

    def __init__(self, offloader: Offloader) -> None:
        self.live_bytes = 0
        self.released_bytes = 0
        self._offloader = offloader
        self._release = offloader.release
        offloader.release = self.release  # type: ignore[method-assign]

    def release(self, cell: Cell) -> None:
        before = [
            (StorageWeakRef(storage.on_device), storage.num_bytes)
            for storage in self._offloader.storages(cell)
        ]
        self._release(cell)
        self.live_bytes += sum(size for storage, size in before if not storage.expired())
        self.released_bytes += sum(size for _, size in before)


def _corrupt_host_copies(offloader: Offloader) -> None:
    issue = offloader.copies.to_device

    def to_device(pairs: Any) -> Any:
        for host, _ in pairs:
            host[: host.numel() // 2] = 0
        return issue(pairs)

    offloader.copies.to_device = to_device  # type: ignore[method-assign]


def _leak_what_is_released(offloader: Offloader) -> None:
    """Never let go of what is released: the leak that `ReleaseWatch` must see."""
    kept: list[Any] = []
    release = offloader.release

    def leaky(cell: Cell) -> None:
        kept.extend(storage.on_device for storage in offloader.storages(cell))
        release(cell)

    offloader.release = leaky  # type: ignore[method-assign]


class _LateCopies:
    """Copies as late as their fences allow: what an edge does not hold back reads too early."""

    pinned = False

    def to_host(self, pairs: Any) -> _LateFence:
        return _LateFence(pairs)

    def to_device(self, pairs: Any) -> _LateFence:
        for _, device in pairs:
            device.fill_(255)
        return _LateFence(pairs)


class _LateFence:
    def __init__(self, pairs: Any) -> None:
        self._pairs = pairs

    def wait(self) -> None:
        for source, target in self._pairs:
            target.copy_(source)
        self._pairs = ()


def _copy_late(offloader: Offloader) -> None:
    offloader.copies = _LateCopies()


_FAULTS: dict[str, Callable[[Offloader], None]] = {
    "copy late": _copy_late,
    "corrupt host copies": _corrupt_host_copies,
    "leak what is released": _leak_what_is_released,
}


def refused(
    schedules: list[Schedule],
    problem: Problem | None = None,
    shift: int = 0,
    samples: dict[int, int] | None = None,
) -> str:
    """Return how a pipeline that cannot start is refused on this rank; "" = it was not.

    Parameters
    ----------
    schedules
        One per rank, so that ranks can disagree.
    shift
        By how much the modules given are off.
    samples
        Rank -> number of samples of its batch and target.
    """
    rank = dist.get_rank()
    schedule = schedules[rank]
    modules = make_stages(CONFIG, len(schedule.placement))
    own = {
        (s + shift) % len(modules): modules[(s + shift) % len(modules)]
        for s, home in enumerate(schedule.placement)
        if home == rank
    }
    try:
        runner = PipelineRunner(own, schedule, token_loss, problem)
        batch, target = random_tokens(CONFIG, 8, seed=0)
        size = (samples or {}).get(rank, len(batch))
        runner.step(batch[:size], target[:size])
    except Exception as error:  # noqa: BLE001 - compared by the test
        return f"{type(error).__name__}: {error}"
    return ""


def dropout_gradients(schedule: Schedule, seed: int = 0) -> list[float]:
    """Return this rank's gradient sums of a model with dropout."""
    config = replace(CONFIG, dropout=0.5)
    modules = make_stages(config, len(schedule.placement))
    rank = dist.get_rank()
    torch.manual_seed(100 * seed + rank)
    runner = PipelineRunner({rank: modules[rank]}, schedule, token_loss)
    runner.step(*random_tokens(config, _num_microbatches(schedule), seed=0))
    gradients = [parameter.grad for parameter in modules[rank].parameters()]
    return [float(gradient.abs().sum()) for gradient in gradients if gradient is not None]


def refused_stage(schedule: Schedule, trouble: str) -> str:
    """Return how a bad stage 2 is refused on this rank."""
    rank = dist.get_rank()
    module = make_stages(CONFIG, 4)[rank]
    if rank == 2:
        module.register_forward_hook(_TROUBLES[trouble])
    try:
        runner = PipelineRunner({rank: module}, schedule, token_loss)
        runner.step(*random_tokens(CONFIG, 4, seed=0))
    except Exception as error:  # noqa: BLE001 - compared by the test
        return f"{type(error).__name__}: {error}"
    return ""


def _raise(*_: Any) -> None:
    raise ValueError("no such layer")


def _transpose(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.transpose(0, 1)


_TROUBLES: dict[str, Callable[..., Any]] = {"raises": _raise, "transposes": _transpose}


def refused_orders(schedule: Schedule) -> str:
    """Return how a pipeline is refused whose rank 2 sees two receives swapped."""
    rank, modules = dist.get_rank(), make_stages(CONFIG, 4)
    runner = PipelineRunner({rank: modules[rank]}, schedule, token_loss)
    translate = torch_schedule.order_of
    name = "order_of"
    if rank == 2:
        setattr(torch_schedule, name, lambda actions: _swapped(translate(actions)))
    try:
        runner.step(*random_tokens(CONFIG, 4, seed=0))
    except Exception as error:  # noqa: BLE001 - compared by the test
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(torch_schedule, name, translate)
    return ""


def _swapped(order: Order) -> Order:
    """Swap the first two receives where the first is of stage 1's output."""
    changed = list(order)
    found = [index for index, step in enumerate(order) if _is_forward_receive(step)][:2]
    if len(found) == 2:
        left, right = found
        changed[left], changed[right] = changed[right], changed[left]
    return tuple(changed)


def _is_forward_receive(step: object) -> bool:
    return isinstance(step, Receive) and not step.message.backward and step.message.stage == 1
