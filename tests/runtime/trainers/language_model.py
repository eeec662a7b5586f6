"""A small language model with a list of blocks and a head tied to its embedding, in float64."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS = 19
WIDTH = 8
NUM_BLOCKS = 8


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state: Tensor) -> Tensor:
        added: Tensor = self.narrow(torch.tanh(self.wide(self.norm(state))))
        return state + added


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, and a head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(_Mixer() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.token(tokens)
        for block in self.blocks:
            state = block(state)
        logits: Tensor = self.head(self.norm(state))
        return logits


def language_model() -> LanguageModel:
    """The same model each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        return LanguageModel().double()


def tokens(num_samples: int, seed: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """Tokens and their successors."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(WORDS, (num_samples, length + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def token_loss(logits: Tensor, target: Tensor, scale: Any = 1.0) -> Tensor:
    loss: Tensor = scale * functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    return loss
