"""What the ranks run with inputs of all kinds: by keyword, in lists, in dicts, in other shapes."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from optpipe import Problem, Schedule
from optpipe.runtime import PipelineRunner
from optpipe.runtime.preflight import num_microbatches_of
from tests.runtime.small_model import WIDTH, own_part
from tests.runtime.watching import counted, gradients_apart, refusal, sent_by


class _Keyed(nn.Module):
    """Hands on a dict: a state, the integers it began with, a mask, a table, and nothing.

    The mask is of booleans, the table of floats that require no gradient.
    """

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.first, self.last = first, last
        self.required: set[bool] = set()

    def forward(
        self,
        tokens: Tensor,
        state: Tensor | None = None,
        keep: Tensor | None = None,
        table: Tensor | None = None,
        *,
        positions: Tensor,
        factor: float = 1.0,
    ) -> dict[str, Any]:
        if state is None or keep is None or table is None:
            state, keep = tokens.double().unsqueeze(-1).expand(-1, -1, WIDTH), tokens > 3
            table = state.cos()
        self.required.add(table.requires_grad)
        added = torch.tanh(self.layer(state * table + positions.unsqueeze(-1).cos()))
        state = state + factor * added * keep.unsqueeze(-1)
        if self.last:
            return {"state": state, "num": 1}
        return {"tokens": tokens, "state": state, "keep": keep, "table": table, "cache": None}


class _Opening(_Keyed):
    """The first stage, which alone names a shift."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, shift: int = 0, **given: Any
    ) -> dict[str, Any]:
        return super().forward(tokens + shift, **given)


def _stages(num_stages: int) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        opening: nn.Module = _Opening(first=True, last=False)
        rest = [_Keyed(first=False, last=s == num_stages - 1) for s in range(1, num_stages)]
    return [opening, *rest]


def _loss(output: dict[str, Any], target: dict[str, Tensor], *, power: int) -> Tensor:
    apart: Tensor = output["state"] - target["wanted"]
    return (apart.abs() ** power * target["weight"]).mean()


@dataclass
class Keyed:
    """A rank's steps beside one process: the largest differences, None where nothing is known."""

    gradients: float = 0.0
    losses: float | None = None
    outputs: float | None = None
    refusals: tuple[str, ...] = ()
    restored: bool = False
    num_sent: int = 0
    """Elements, in the first step."""
    required: set[bool] = field(default_factory=set)
    """Whether the table that stages were given required a gradient."""


class _Data(NamedTuple):
    tokens: Tensor
    positions: Tensor
    target: dict[str, Tensor]


def _data(num_samples: int, length: int, seed: int) -> _Data:
    generator = torch.Generator().manual_seed(seed)
    size = (num_samples, length)
    tokens, positions = torch.randint(9, (2, *size), generator=generator)
    wanted, weight = torch.rand(2, *size, WIDTH, dtype=torch.float64, generator=generator)
    return _Data(tokens, positions, {"wanted": wanted, "weight": weight})


def train_keyed(schedule: Schedule) -> Keyed:
    """Train and evaluate batches whole, in lists and of another length, by turns."""
    count, rank = num_microbatches_of(schedule), dist.get_rank()
    modules = _stages(len(schedule.placement))
    own = own_part(schedule.placement, modules)
    whole = copy.deepcopy(modules)
    kinds = [type(one) for stage in own.values() for one in stage.modules()]
    runner = PipelineRunner(own, schedule, _loss, min_offload_bytes=1)
    found = Keyed(losses=0.0 if runner.holds_last else None)
    for step, length in enumerate((3, 3, 5, 3, 5)):
        data = _data(2 * count, length, step)
        given: dict[str, Any] = {"bucket": length, "loss_kwargs": {"power": 3}}
        if rank == 0:
            given |= {"shift": 2}
        if step == 1:
            pieces = [data.tokens.chunk(count), data.positions.chunk(count)]
            given |= {
                "arg_mbs": pieces[0],
                "kwarg_mbs": [
                    {"positions": one, "factor": 1.5} | ({"shift": 2} if rank == 0 else {})
                    for one in pieces[1]
                ],
                "target_mbs": [
                    {key: value.chunk(count)[j] for key, value in data.target.items()}
                    for j in range(count)
                ],
            }
            given.pop("shift", None)
            losses = runner.step(**given)
        else:
            given |= {"positions": data.positions, "factor": 1.5}
            with counted(dist, "isend") as posted:
                losses = runner.step(data.tokens, target=data.target, **given)
            if step == 0:
                found.num_sent = sum(one.numel() for one in sent_by(posted))
        expected = _step_alone(whole, data, count)
        if losses is not None and found.losses is not None:
            found.losses = max(found.losses, float((losses - expected).abs().max()))
    found.required = set().union(*(cast("_Keyed", stage).required for stage in own.values()))
    found.gradients = max(gradients_apart(one, whole[s]) for s, one in own.items())
    found.outputs = _evaluate(runner, whole, count)
    found.refusals = tuple(map(refusal, _bad_calls(runner, count)))
    runner.close()
    found.restored = kinds == [type(one) for stage in own.values() for one in stage.modules()]
    return found


def _evaluate(runner: PipelineRunner, whole: Sequence[nn.Module], count: int) -> float | None:
    data = _data(2 * count, 3, 9)
    found = runner.eval(data.tokens, target=None, positions=data.positions)
    if found.outputs is None:
        return None
    output: Any = {"tokens": data.tokens}
    for module in whole:
        output = module(**_sent(output), positions=data.positions)
    assert found.outputs["num"] == [1] * count
    return float((found.outputs["state"] - output["state"]).abs().max())


def _step_alone(whole: Sequence[nn.Module], data: _Data, count: int) -> Tensor:
    losses = []
    for j in range(count):
        output: Any = {"tokens": data.tokens.chunk(count)[j], "shift": 2}
        for module in whole:
            output = module(**_sent(output), positions=data.positions.chunk(count)[j], factor=1.5)
        target = {key: value.chunk(count)[j] for key, value in data.target.items()}
        losses.append(_loss(output, target, power=3))
        (losses[-1] / count).backward()
    return torch.stack(losses).detach()


def _sent(output: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in output.items() if value is not None}


def _bad_calls(runner: PipelineRunner, count: int) -> list[Callable[[], object]]:
    """Calls that every rank refuses, before anything is sent."""
    data = _data(2 * count, 3, 9)
    same: dict[str, Any] = {"positions": data.positions, "target": data.target}
    return [
        lambda: runner.step(data.tokens, **same, colour=1, bucket="colour"),
        lambda: runner.step(data.tokens, **same, kwarg_mbs=[{}] * count, bucket="twice"),
        lambda: runner.step(data.tokens, target=data.target, kwarg_mbs=[{}], bucket="short"),
        lambda: runner.step(
            data.tokens,
            target=data.target,
            kwarg_mbs=[{"positions": data.positions[: 1 + j % 2]} for j in range(count)],
            bucket="uneven",
        ),
        lambda: runner.step(
            data.tokens, target=data.target, positions=data.positions[:3], bucket="three"
        ),
        lambda: runner.step(
            data.tokens, target=data.target, positions=data.positions[:2], bucket="two"
        ),
        lambda: runner.step(kwarg_mbs=None, arg_mbs=[{}] * count, **same, bucket="unknown"),
        lambda: runner.step(data.tokens, data.tokens, data.tokens),
        lambda: runner.step(_spread(data.tokens), **same, bucket="spread"),
        lambda: runner.step(
            data.tokens, target=data.target, positions=_spread(data.positions), bucket="spread"
        ),
        lambda: runner.step(
            data.tokens,
            target={key: _spread(value) for key, value in data.target.items()},
            positions=data.positions,
            bucket="spread",
        ),
    ]


def _spread(tensor: Tensor) -> Tensor:
    return DTensor.from_local(tensor, init_device_mesh("cpu", (4,)), [Replicate()])


class _Losing(nn.Module):
    """Returns the loss itself, from what it is given by keyword alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, given: Tensor, labels: Tensor | None = None) -> Tensor:
        found: Tensor = self.layer(given)
        return found if labels is None else (found - labels).square().mean()


class Lost(NamedTuple):
    """Losses beside those of one process, and the stages whose gradients were said to be done."""

    difference: float | None
    evaluated: float | None
    done: list[int]


def train_to_a_loss(schedule: Schedule) -> Lost:
    """Train stages of which the last makes the loss, and the first has no positional input."""
    count, rank = num_microbatches_of(schedule), dist.get_rank()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        modules = [_Losing() for _ in schedule.placement]
        given, labels = torch.rand(2, 2 * count, 3, dtype=torch.float64)
    done: list[int] = []
    runner = PipelineRunner(
        own_part(schedule.placement, modules), schedule, None, gradients_done=done.append
    )
    keywords = {"given": given} if rank == 0 else {"labels": labels} if rank == 3 else {}
    losses = runner.step(**keywords)
    evaluated = runner.eval(**keywords)
    runner.close()
    if losses is None or evaluated.losses is None:
        return Lost(None, None, done)
    expected = []
    for one, wanted in zip(given.chunk(count), labels.chunk(count), strict=True):
        state = one
        for module in modules[:-1]:
            state = module(state)
        expected.append(modules[-1](state, wanted).detach())
    whole = torch.stack(expected)
    return Lost(
        float((losses - whole).abs().max()), float((evaluated.losses - whole).abs().max()), done
    )


class _Masked(nn.Module):
    """A layer behind which a mask, given by keyword, says what changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, state: Tensor, mask: Tensor) -> Tensor:
        changed: Tensor = state + torch.tanh(self.layer(state)) * mask
        return changed


def train_with_one_mask(schedule: Schedule, problem: Problem) -> float:
    """Give one tensor to all micro-batches; return how far gradients are from one process's."""
    count, rank = num_microbatches_of(schedule), dist.get_rank()
    torch.manual_seed(2)
    modules = [_Masked() for _ in schedule.placement]
    whole = copy.deepcopy(modules)
    batch, target, mask = torch.rand(3, 2 * count, WIDTH, dtype=torch.float64)
    mask = mask[:2].clone()
    kept = mask.data_ptr()
    runner = PipelineRunner(
        {rank: modules[rank]}, schedule, nn.functional.mse_loss, problem, min_offload_bytes=1
    )
    runner.step(batch, target=target, kwarg_mbs=[{"mask": mask}] * count)
    runner.close()
    assert mask.data_ptr() == kept
    for state, wanted in zip(batch.chunk(count), target.chunk(count), strict=True):
        output = state
        for module in whole:
            output = module(output, mask)
        (nn.functional.mse_loss(output, wanted) / count).backward()
    return gradients_apart(modules[rank], whole[rank])


class _Biased(nn.Module):
    """A layer whose heads get a bias each, and whose samples get a factor each, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(
        self, state: Tensor, bias: Tensor, more: dict[str, list[Tensor]] | None = None
    ) -> Tensor:
        added = torch.tanh(self.layer(state) + bias)
        if more is not None:
            by_sample, by_position = more["tables"]
            added = added * by_sample * by_position
        return state + added


def train_with_shared(schedule: Schedule, nested: bool) -> float:
    """Give tensors that all micro-batches share; return how far gradients are from one process's.

    The bias has as many entries in dimension 0 as there are micro-batches. ``nested`` adds a dict
    of a list of a factor by sample, which is cut, and one by position, which is not.
    """
    count, rank = num_microbatches_of(schedule), dist.get_rank()
    torch.manual_seed(2)
    modules = [_Biased() for _ in schedule.placement]
    whole = copy.deepcopy(modules)
    batch, target = torch.rand(2, 2 * count, count, WIDTH, dtype=torch.float64)
    bias = torch.rand(count, 1, dtype=torch.float64)
    by_sample = torch.rand(2 * count, 1, 1, dtype=torch.float64)
    by_position = torch.rand(WIDTH, dtype=torch.float64)
    given: dict[str, Any] = {"bias": bias}
    if nested:
        given["more"] = {"tables": [by_sample, by_position]}
    runner = PipelineRunner({rank: modules[rank]}, schedule, nn.functional.mse_loss)
    # The second step's sizes are those that the first one's ranks agreed on.
    for _ in range(2):
        runner.step(batch, target=target, **given)
    runner.close()
    for _ in range(2):
        output = batch
        for module in whole:
            output = module(output, **given)
        nn.functional.mse_loss(output, target).backward()
    return gradients_apart(modules[rank], whole[rank])
