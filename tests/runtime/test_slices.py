"""Slices of a sequence: keys, values and their gradients go from slice to slice."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from optpipe import Problem
from optpipe.runtime import PipelineRunner, slices
from optpipe.runtime.demo import ModelConfig, chain, make_stages, random_tokens, token_loss
from optpipe.schedule import Action, ActionType
from optpipe_solver.families.classic import build_seq1f1b, build_slimpipe
from tests.runtime import schedules
from tests.runtime.live_bytes import LiveBytes
from tests.runtime.watching import gradients_apart, refusal

CONFIG = ModelConfig(blocks=8, sequence=16)
SLICES, SAMPLES = 4, 3


class _Core(nn.Module):
    """Attention of a slice to all before it and to itself, masked."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = slices.past(key, value)
        own, seen = query.size(-2), keys.size(-2)
        mask = torch.ones(own, seen, dtype=torch.bool).tril(seen - own)
        attended: Tensor = functional.scaled_dot_product_attention(query, keys, values, mask)
        return attended


class _Embedding(nn.Module):
    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.token: Any = whole.token
        self.position: Any = whole.position

    def forward(self, tokens: Tensor) -> Tensor:
        start = slices.number() * tokens.size(1)
        embedded: Tensor = self.token(tokens) + self.position[start : start + tokens.size(1)]
        return embedded


def sliced_stages(num_stages: int) -> list[nn.Module]:
    stages: list[Any] = list(make_stages(CONFIG, num_stages))
    for stage in stages:
        for part in stage.modules():
            if hasattr(part, "core_attention"):
                part.core_attention = _Core()
    stages[0][0] = _Embedding(stages[0][0])
    return stages


def problem_of(placement: tuple[int, ...]) -> Problem:
    plain = schedules.make_problem(placement, SLICES * SAMPLES)
    cut = [{"sample": j // SLICES} for j in range(plain.num_microbatches)]
    return plain.model_copy(update={"format": "optpipe/problem/v2", "microbatches": cut})


def train(schedule, problem) -> tuple[float, float]:
    """Two steps in slices beside whole sequences in one process: the largest differences."""
    rank, placement = dist.get_rank(), schedule.placement
    stages = sliced_stages(len(placement))
    alone = chain([copy.deepcopy(stage) for stage in stages])
    own = {s: stages[s] for s, home in enumerate(placement) if home == rank}
    runner = PipelineRunner(own, schedule, loss_fn=token_loss, problem=problem)
    lost = 0.0
    for seed in range(2):
        tokens, target = random_tokens(CONFIG, SAMPLES, seed)
        cut = [
            [piece for sample in whole.chunk(SAMPLES) for piece in sample.chunk(SLICES, dim=1)]
            for whole in (tokens, target)
        ]
        losses = runner.step(arg_mbs=cut[0], target_mbs=cut[1])
        loss = token_loss(alone(tokens), target)
        loss.backward()
        seen = runner.eval(arg_mbs=cut[0], target_mbs=cut[1]).losses
        if losses is not None and seen is not None:
            lost = max(lost, float((seen - losses).abs().max()))
            lost = max(lost, float((losses.mean() - loss).abs()))
    runner.close()
    apart = [gradients_apart(one, alone.get_submodule(str(s))) for s, one in own.items()]
    return max(apart), lost


def split(programs):
    """The programs with I in place of B, and all W's at the end."""
    rows = []
    for row in programs:
        actions: list[Action] = []
        for a in row:
            is_b = a.type is ActionType.FULL_BACKWARD
            actions.append(a._replace(type=ActionType.BACKWARD_INPUT) if is_b else a)
        inputs = [a for a in actions if a.type is ActionType.BACKWARD_INPUT]
        rows.append((*actions, *(a._replace(type=ActionType.BACKWARD_WEIGHT) for a in inputs)))
    return tuple(rows)


@pytest.mark.parametrize(
    ("placement", "build", "is_split"),
    [
        (schedules.LINEAR, build_seq1f1b, True),
        (schedules.LOOP, build_slimpipe, False),
    ],
)
def test_slices_train_like_whole_sequences(ranks, placement, build, is_split):
    problem = problem_of(placement)
    programs = split(build(problem)) if is_split else build(problem)
    schedule = schedules.make_schedule(problem, programs)
    for gradients, losses in ranks.run(train, schedule, problem):
        assert gradients < 1e-12
        assert losses < 1e-12


def test_what_is_not_kept_is_refused(ranks):
    problem = problem_of(schedules.LINEAR)
    rows = tuple(
        tuple(
            cell
            for a in row
            for cell in (
                (a._replace(type=ActionType.RECOMPUTE), a) if a.type.value == "B" else (a,)
            )
        )
        for row in build_seq1f1b(problem)
    )
    schedule = schedules.make_schedule(problem, rows)
    for text in ranks.run(refusal, partial(train, schedule, problem)):
        assert text.startswith("PreflightError")
        assert "this runtime only keeps slices" in text


Join = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def linear(mixed: Tensor, join: Join) -> Tensor:
    """Attention that saves keys and values, and else nothing that grows with them."""
    query, key, value = (mixed[..., at : at + 6] for at in (0, 6, 12))
    keys, values = join(key, value, 1)
    return (query * (keys * values).sum(1, keepdim=True)).square().sum()


def with_heads_last(mixed: Tensor, join: Join) -> Tensor:
    """Attention whose keys, of one sample, have the strides of an image's channels."""
    parts = (one.unflatten(-1, (3, 2)).permute(0, 3, 1, 2) for one in mixed.chunk(3, dim=-1))
    query, key, value = parts
    keys, values = join(key, value, 2)
    return functional.scaled_dot_product_attention(query, keys, values).square().sum()


def doubled(mixed: Tensor, join: Join) -> Tensor:
    """Changes in place what was joined, which is its own to change."""

    def join_doubled(key: Tensor, value: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        keys, values = join(key, value, dim)
        return keys.mul_(2), values

    return linear(mixed, join_doubled)


def at_positions(mixed: Tensor, join: Join) -> Tensor:
    return linear(mixed + slices.number(), join)


def compiled(mixed: Tensor, join: Join) -> Tensor:
    found: Tensor = torch.compile(at_positions, backend="eager")(mixed, join)
    return found


def attend_in(
    count: int, attend: Callable[[Tensor, Join], Tensor], *, joins: bool = True
) -> tuple[int, Tensor]:
    """A sequence in so many slices: live bytes before its backwards, and a weight's gradient.

    Without ``joins`` autograd keeps one graph of all slices.
    """
    torch.manual_seed(0)
    layer = nn.Linear(6, 18).double()
    states = slices.SliceStates([tuple(range(count))])
    outputs: list[Tensor] = []
    earlier: list[tuple[Tensor, Tensor]] = []

    def chained(key: Tensor, value: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        earlier.append((key, value))
        keys, values = (torch.cat(one, dim) for one in zip(*earlier, strict=True))
        return keys, values

    pieces = torch.randn(1, 32, 6, dtype=torch.float64).chunk(count, dim=1)
    with LiveBytes() as counter:
        for number, piece in enumerate(pieces):
            with states.forward(number):
                outputs.append(attend(layer(piece), slices.past if joins else chained))
        live = counter.live
    for output in reversed(outputs) if joins else [torch.stack(outputs).sum()]:
        output.backward()
    assert layer.weight.grad is not None
    return live, layer.weight.grad


def test_keys_and_values_are_kept_once_however_many_slices_read_them() -> None:
    whole = attend_in(1, linear)[0]
    for count in (2, 8):
        assert attend_in(count, linear)[0] < 1.1 * whole


@pytest.mark.parametrize("attend", [linear, with_heads_last, doubled, compiled])
def test_what_is_joined_again_is_what_was_joined(attend: Callable[[Tensor, Join], Tensor]) -> None:
    plain = at_positions if attend is compiled else attend
    expected = attend_in(4, plain, joins=False)[1]
    assert (attend_in(4, attend)[1] - expected).abs().max() < 1e-12


def test_what_a_backward_cannot_have_again_is_refused() -> None:
    def forgets_keys(mixed: Tensor, join: Join) -> Tensor:
        key = mixed * 1
        found = join(key, mixed, 1)[0].square().sum()
        key.detach().zero_()
        return found

    def forgets_another(mixed: Tensor, join: Join) -> Tensor:
        powers = mixed.exp()
        found = linear(powers * 1, join)
        powers.mul_(2)
        return found

    def checkpointed(mixed: Tensor, join: Join) -> Tensor:
        found: Tensor = checkpoint(linear, mixed, join, use_reentrant=True)
        return found

    def positioned(mixed: Tensor, join: Join) -> Tensor:
        turned = checkpoint(lambda one: (one + slices.number()).sin(), mixed, use_reentrant=False)
        return linear(turned, join)

    for attend, words in (
        (forgets_keys, r"changed in place after slices\.past"),
        (forgets_another, "changed in place after autograd had saved it"),
        (checkpointed, r"slices\.past is called in a backward"),
        (positioned, r"slices\.number is called in a backward"),
    ):
        with pytest.raises(RuntimeError, match=words):
            attend_in(4, attend)


def test_a_step_that_broke_off_leaves_other_models_alone() -> None:
    states = slices.SliceStates([(0, 1)])
    with pytest.raises(ValueError, match="broken"), states.forward(0):
        raise ValueError("broken")
    key, value = torch.ones(2, 3), torch.ones(2, 3)
    assert slices.past(key, value) == (key, value)
    assert slices.number() == 0


def test_inference_needs_nothing_again() -> None:
    states = slices.SliceStates([(0, 1)])
    with torch.inference_mode():
        for number in range(2):
            with states.forward(number):
                keys, _ = slices.past(torch.ones(2, 3), torch.ones(2, 3), dim=0)
    assert len(keys) == 4
