"""What the ranks run to be refused, and dropout."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from optpipe.runtime import PipelineRunner, demo, offload, torch_schedule
from optpipe.runtime.demo_model import (
    ModelConfig,
    join_ranks,
    make_stages,
    random_tokens,
    token_loss,
)
from optpipe.runtime.messages import Receive
from optpipe.runtime.preflight import num_microbatches_of
from tests.runtime import schedules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from optpipe import Problem, Schedule
    from optpipe.runtime.messages import Order

CONFIG = ModelConfig(vocabulary=37, hidden=16, heads=2, blocks=8, sequence=6)


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

    def start() -> None:
        runner = PipelineRunner(own, schedule, token_loss, problem)
        batch, target = random_tokens(CONFIG, 8, seed=0)
        size = (samples or {}).get(rank, len(batch))
        runner.step(batch[:size], target[:size])

    return _refusal(start)


def _refusal(start: Callable[[], object]) -> str:
    try:
        start()
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
    runner.step(*random_tokens(config, num_microbatches_of(schedule), seed=0))
    gradients = [parameter.grad for parameter in modules[rank].parameters()]
    return [float(gradient.abs().sum()) for gradient in gradients if gradient is not None]


def refused_stage(schedule: Schedule, trouble: str) -> str:
    """Return how a bad stage 2 is refused on this rank."""
    rank = dist.get_rank()
    module = make_stages(CONFIG, 4)[rank]
    if rank == 2:
        module.register_forward_hook(_TROUBLES[trouble])
    runner = PipelineRunner({rank: module}, schedule, token_loss)
    return _refusal(lambda: runner.step(*random_tokens(CONFIG, 4, seed=0)))


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
    text = _refusal(lambda: runner.step(*random_tokens(CONFIG, 4, seed=0)))
    setattr(torch_schedule, name, translate)
    return text


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


def fail_in_the_second_step(*, stays: bool) -> int:
    """Be a rank of two, of which rank 1 fails and, if it stays, lives on; return an exit code."""
    join_ranks("gloo")
    rank = dist.get_rank()
    problem = schedules.make_problem((0, 1), 4)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(2, 4))
    module = make_stages(CONFIG, 2)[rank]
    runner = PipelineRunner({rank: module}, schedule, token_loss, problem)
    batch, target = random_tokens(CONFIG, 4, seed=0)
    runner.step(batch, target)
    if rank == 1:
        module.register_forward_hook(_raise)
    try:
        runner.step(batch, target)
    except Exception as error:  # noqa: BLE001 - printed for the test
        notes = getattr(error, "__notes__", [])
        print(f"rank {rank}: {type(error).__name__}: {error} {notes}", flush=True)
        time.sleep(60 if stays else 0)
    return 10 + rank


class _WrongCopies(offload.PlainCopies):
    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> offload.Fence:
        for host, _ in pairs:
            host[-8:] = 0
        return super().to_device(pairs)


def demo_with_wrong_copies(arguments: list[str]) -> int:
    """Be a rank of the demo on a machine whose copies from the host are wrong."""
    offload.PlainCopies = _WrongCopies  # type: ignore[misc]
    return demo.main(arguments)
