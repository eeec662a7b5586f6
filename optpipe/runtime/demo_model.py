"""A small real transformer, cut into stages: what the demo and the tests train.

The first stage holds the embeddings, the last one the final norm and the language-model head, so
stages are unequal, as in real models. The single-process reference is the same modules chained.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "RENDEZVOUS_VARIABLE",
    "ModelConfig",
    "chain",
    "join_ranks",
    "launch_ranks",
    "leave_ranks",
    "make_stages",
    "random_tokens",
    "token_loss",
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
        attended: Tensor = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        return attended


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


# --- Starts the ranks of a program on this machine, without torchrun and reachable by nobody else.
# The ranks meet in a file and talk over the loopback interface. When one fails, the others are
# ended after a moment in which they can say why they stopped.

RENDEZVOUS_VARIABLE = "OPTPIPE_RENDEZVOUS_FILE"
"""Environment variable naming the file in which launched ranks meet."""

_GRACE_S = 10.0
_POLL_S = 0.05


def launch_ranks(module: str, arguments: Sequence[str], num_processes: int) -> int:
    """Run ``python -m module arguments`` once per rank; return 0 or the first bad exit code."""
    with tempfile.TemporaryDirectory(prefix="optpipe-ranks-") as folder:
        common = {
            **os.environ,
            "WORLD_SIZE": str(num_processes),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            RENDEZVOUS_VARIABLE: str(Path(folder) / "rendezvous"),
        }
        processes = [
            subprocess.Popen(  # noqa: S603 - this very interpreter
                [sys.executable, "-m", module, *arguments],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(num_processes)
        ]
        try:
            return _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return when all have ended, or some time after the first failure."""
    deadline = float("inf")
    first_failure = 0
    while True:
        codes = [process.poll() for process in processes]
        if not first_failure and any(codes):
            first_failure = next(code for code in codes if code)
            deadline = time.monotonic() + _GRACE_S
        if None not in codes or time.monotonic() > deadline:
            return first_failure
        time.sleep(_POLL_S)


def join_ranks(backend: str, **options: Any) -> None:
    """Meet the other ranks: in the launcher's file, or where torchrun says."""
    if (rendezvous := os.environ.get(RENDEZVOUS_VARIABLE)) is not None:
        options |= {
            "init_method": f"file://{rendezvous}",
            "rank": int(os.environ["RANK"]),
            "world_size": int(os.environ["WORLD_SIZE"]),
        }
    dist.init_process_group(backend, **options)


def leave_ranks() -> None:
    """Part from the other ranks; whatever held a group goes first, so that its threads end here.

    A thread of a gloo group gives back the tensors of its last work. One that does so while the
    interpreter ends aborts the process: 9 of 100 runs of four ranks did, of 26 with this none.
    """
    gc.collect()
    dist.destroy_process_group()
