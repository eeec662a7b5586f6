"""A model of small layers in float64: its passes cost little, so many schedules can be run.

Two tensors cross every boundary: activations, and the integers they were made from, which have no
gradient.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from optpipe import Problem, Schedule
from optpipe.runtime import PipelineRunner

NUM_BLOCKS = 8
SAMPLES = 2
"""Per micro-batch."""

WIDTH = 6
_TOKENS = 11


HOOKS_SEE_SELECTIVE = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
"""Whether this torch can hand what selective checkpointing keeps to hooks: 2.15 and newer can."""

needs_hooked_checkpoints = pytest.mark.skipif(
    not HOOKS_SEE_SELECTIVE,
    reason="this torch cannot hand what selective checkpointing keeps to hooks",
)

needs_torch_2_13 = pytest.mark.skipif(
    torch.__version__.startswith("2.12."),
    reason="torch 2.12 itself sends no integers between stages, and its linear layers take no "
    "unevenly sharded DTensor",
)

_PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]


def selectively_checkpointed(
    run: Callable[..., Any], *given: Tensor, hooks_see: bool = HOOKS_SEE_SELECTIVE
) -> Any:
    """Run a part of a stage whose backward runs it again, but for the products of matrices."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _PRODUCTS)
    # A torch that leaves the choice and is given none warns.
    choice: dict[str, Any] = {}
    if HOOKS_SEE_SELECTIVE:
        choice["respect_saved_tensors_hooks"] = hooks_see
    return checkpoint(run, *given, use_reentrant=False, context_fn=contexts, **choice)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(_TOKENS, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        activations, tokens = state
        normed = self.norm(activations + self.token(tokens))
        return activations + self.narrow(torch.tanh(self.wide(normed))), tokens


class SmallStage(nn.Module):
    """Some blocks; the first stage starts with zeros, the last one gives activations alone."""

    def __init__(self, blocks: Sequence[_Block], *, first: bool, last: bool) -> None:
        super().__init__()
        self.width = blocks[0].norm.normalized_shape[0]
        self.blocks = nn.ModuleList(blocks)
        self.first = first
        self.last = last

    def forward(self, *given: Tensor) -> Any:
        state = (self._start(given[0]), given[0]) if self.first else (given[0], given[1])
        for block in self.blocks:
            state = block(state)
        return state[0] if self.last else state

    def _start(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, self.width, dtype=torch.float64, device=tokens.device)


def small_stages(num_stages: int, width: int = WIDTH) -> list[nn.Module]:
    """The same model for every number of stages; its parameters in order are the same, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        blocks = [_Block(width).double() for _ in range(NUM_BLOCKS)]
    size = NUM_BLOCKS // num_stages
    return [
        SmallStage(
            blocks[size * index : size * (index + 1)],
            first=index == 0,
            last=index + 1 == num_stages,
        )
        for index in range(num_stages)
    ]


def small_data(
    num_microbatches: int, seed: int, width: int = WIDTH, length: int = 3
) -> tuple[Tensor, Tensor]:
    """A batch of tokens and what should come of them."""
    generator = torch.Generator().manual_seed(seed)
    size = (SAMPLES * num_microbatches, length)
    tokens = torch.randint(_TOKENS, size, generator=generator)
    return tokens, torch.randn(*size, width, dtype=torch.float64, generator=generator)


def small_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def own_part(
    placement: Sequence[int], modules: Sequence[nn.Module], rank: int | None = None
) -> dict[int, nn.Module]:
    """The stages of a rank, of this one by default, by index."""
    rank = dist.get_rank() if rank is None else rank
    return {s: modules[s] for s, home in enumerate(placement) if home == rank}


def torch_stages(
    placement: Sequence[int], width: int = WIDTH, length: int = 3
) -> list[PipelineStage]:
    """This rank's stages as torch's own."""
    num_stages = len(placement)
    tokens = torch.zeros(SAMPLES, length, dtype=torch.int64)
    state = torch.zeros(SAMPLES, length, width, dtype=torch.float64, requires_grad=True), tokens
    return [
        PipelineStage(
            module,
            index,
            num_stages,
            torch.device("cpu"),
            input_args=state if index else (tokens,),
            output_args=state if index < num_stages - 1 else state[:1],
        )
        for index, module in own_part(placement, small_stages(num_stages, width)).items()
    ]


def small_runner(
    schedule: Schedule, problem: Problem | None = None, width: int = WIDTH
) -> tuple[dict[int, nn.Module], PipelineRunner]:
    """This rank's stages, and what runs them."""
    own = own_part(schedule.placement, small_stages(len(schedule.placement), width))
    return own, PipelineRunner(own, schedule, small_loss, problem, min_offload_bytes=1)


def step_alone(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    num_microbatches: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = small_loss,
) -> Tensor:
    """Add up a batch's gradients in one process; the losses by micro-batch."""
    losses = []
    parts = (whole.chunk(num_microbatches) for whole in data)
    for inputs, wanted in zip(*parts, strict=True):
        loss = loss_fn(model(inputs), wanted)
        (loss / num_microbatches).backward()
        losses.append(loss.detach())
    return torch.stack(losses)
