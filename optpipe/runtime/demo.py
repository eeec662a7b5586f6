"""Trains a small transformer by a schedule, and compares it with the model in one process.

``torchrun --nproc-per-node 4 -m optpipe.runtime.demo --problem P.json --schedule S.json``

The first stage holds the embeddings, and the last stage the final norm and the language-model head.
So stages are unequal, as in real models. Exit codes: 0 every step agrees, 1 a step does not agree
or a rank failed, 2 invalid input.
"""

from __future__ import annotations

import argparse
import sys
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from optpipe.errors import InputError, OptPipeError
from optpipe.formats.json import load_problem, load_schedule, read_text
from optpipe.runtime.launch import join_ranks, leave_ranks
from optpipe.runtime.preflight import gather
from optpipe.runtime.runner import PipelineRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = [
    "ModelConfig",
    "chain",
    "main",
    "make_stages",
    "random_tokens",
    "step_alone",
    "tiny_gpt",
    "token_loss",
    "whole_gpt",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model; ``microbatch_size`` and ``sequence`` are those of its data."""

    vocabulary: int = 211
    hidden: int = 32
    heads: int = 4
    blocks: int = 8
    sequence: int = 16
    microbatch_size: int = 2
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64


def make_stages(config: ModelConfig, num_stages: int, seed: int = 0) -> list[nn.Module]:
    """Return the model cut into stages with equal numbers of blocks, the same for equal seeds."""
    if config.blocks % num_stages:
        raise ValueError(
            f"{config.blocks} blocks do not divide into {num_stages} stages; change one of them"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [_Block(config) for _ in range(config.blocks)]
        parts: list[list[nn.Module]] = [
            list(blocks[first : first + config.blocks // num_stages])
            for first in range(0, config.blocks, config.blocks // num_stages)
        ]
        parts[0].insert(0, _Embedding(config))
        parts[-1].append(_Head(config))
    return [nn.Sequential(*part).to(config.dtype) for part in parts]


def chain(stages: list[nn.Module]) -> nn.Module:
    """Return the model of all stages in one process; it shares their parameters."""
    return nn.Sequential(*stages)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy; logits have one dimension more, the vocabulary."""
    loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    return loss


def step_alone(model: nn.Module, batch: Sequence[Tensor], target: Sequence[Tensor]) -> float:
    """Add a batch's gradients to a whole model's, in one process; return the mean loss."""
    total = 0.0
    for given, expected in zip(batch, target, strict=True):
        loss = token_loss(model(given), expected) / len(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def random_tokens(config: ModelConfig, num_microbatches: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a batch and its target (each token's successor), of shape (samples, sequence)."""
    generator = torch.Generator().manual_seed(seed)
    samples = config.microbatch_size * num_microbatches
    size = (samples, config.sequence + 1)
    tokens = torch.randint(config.vocabulary, size, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def tiny_gpt(microbatch: int = 2) -> tuple[list[nn.Module], Tensor, Callable[..., Tensor], Tensor]:
    """Return four stages of two blocks each and a micro-batch, as ``--stages`` takes them."""
    config = ModelConfig(microbatch_size=microbatch)
    tokens, target = random_tokens(config, num_microbatches=1, seed=0)
    return make_stages(config, num_stages=4), tokens, token_loss, target


def whole_gpt(
    microbatch: int = 2, sequence: int = 16
) -> tuple[nn.Module, Tensor, Callable[..., Tensor], Tensor]:
    """Return the model of `tiny_gpt` uncut, and a micro-batch, as ``--model`` takes them."""
    config = ModelConfig(microbatch_size=microbatch, sequence=sequence)
    tokens, target = random_tokens(config, num_microbatches=1, seed=0)
    return _Model(config), tokens, token_loss, target


class _Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        (stage,) = make_stages(config, num_stages=1)
        embedding, *blocks, head = stage.children()
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:
        activations = self.embedding(tokens)
        for block in self.blocks:
            activations = block(activations)
        logits: Tensor = self.head(activations)
        return logits


class _Embedding(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.hidden)
        self.position = nn.Parameter(0.02 * torch.randn(config.sequence, config.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens)
        return embedded + self.position


class _CoreAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.core_attention = _CoreAttention()
        self.projection = nn.Linear(config.hidden, config.hidden)

    def forward(self, normed: Tensor) -> Tensor:
        samples, length, hidden = normed.shape
        mixed = self.qkv(normed).view(samples, length, 3, self.heads, hidden // self.heads)
        attended = self.core_attention(*mixed.permute(2, 0, 3, 1, 4))
        projected: Tensor = self.projection(attended.transpose(1, 2).reshape(normed.shape))
        return projected


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = _Attention(config)
        self.dropout = nn.Dropout(config.dropout)
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.GELU(),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, activations: Tensor) -> Tensor:
        activations = activations + self.dropout(self.attention(self.attention_norm(activations)))
        added: Tensor = self.dropout(self.mlp(activations))
        return activations + added


class _Head(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, activations: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(activations))
        return logits


# --- Training.

_TOLERANCE = 1e-10
"""Of a loss, and of gradients relative to the largest one; the model is in double precision."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank; return its exit code."""
    parser = argparse.ArgumentParser(prog="optpipe.runtime.demo", description=__doc__)
    parser.add_argument("--problem", required=True, help="file of the problem")
    parser.add_argument("--schedule", required=True, help="file of its schedule")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: 3)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    join_ranks("gloo")
    try:
        problem = load_problem(read_text(options.problem))
        schedule = load_schedule(read_text(options.schedule))
        return 0 if _train(problem, schedule, options.steps) else 1
    except OptPipeError as error:
        is_input = isinstance(error, InputError)
        if dist.get_rank() == 0 or not is_input:
            # An error of the input is the same on all ranks.
            print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 2 if is_input else 1
    finally:
        leave_ranks()


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
        found = gather((loss, {stage: _gradients_of(one) for stage, one in own.items()}), None)
        if rank == 0:
            expected = step_alone(chain(reference), batch.chunk(count), target.chunk(count))
            (loss,) = (loss for loss, _ in found if loss is not None)
            gradients = {stage: one for _, named in found for stage, one in named.items()}
            pairs = [
                (ours, theirs)
                for stage, module in enumerate(reference)
                for ours, theirs in zip(gradients[stage], _gradients_of(module), strict=True)
            ]
            agreed &= _agrees(step, loss, expected, pairs)
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


def _gradients_of(module: nn.Module) -> list[Tensor]:
    """Return all gradients of a stage; a parameter without one has zeros."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]


def _agrees(step: int, loss: float, expected: float, pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Print how the ranks' loss and gradients compare with those of one process."""
    # max() of Python would skip NaN, which is no agreement.
    difference = float(torch.stack([(ours - theirs).abs().max() for ours, theirs in pairs]).max())
    largest = max(float(theirs.abs().max()) for _, theirs in pairs)
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
