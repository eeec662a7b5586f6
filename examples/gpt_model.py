"""What `train_gpt.py` trains: a GPT, cut into stages and whole in one process, and its text.

The text is sums, endlessly many and the same for a seed. A model must learn the form, to read both
numbers, and to add: its loss falls fast at first and slowly afterwards, as on real text. The
alphabet is small, so that the model can be, too.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

from optpipe.runtime.demo_model import ModelConfig, make_stages

__all__ = ["ALPHABET", "LARGEST_NORM", "MixedPrecision", "UnsplitTraining", "build_stages",
           "make_batch", "sums", "token_loss"]  # fmt: skip

LARGEST_NORM = 1.0
"""To which gradients are clipped."""


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
