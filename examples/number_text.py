"""Text to train on: sums in words, endlessly many and the same for a seed.

A model must learn to spell, to read both numbers, and to add: its loss falls fast at first and
slowly afterwards, as on real text. The alphabet is small, so that the model can be, too.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

__all__ = ["ALPHABET", "in_words", "make_batch", "sums_in_words"]

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"),
    *("seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz"


def in_words(number: int) -> str:
    """Return a number from 0 to 199 in words."""
    if number < 20:
        return _SMALL[number]
    if number == 100:
        return "hundred"
    if number > 100:
        return f"hundred {in_words(number - 100)}"
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f" {_SMALL[ones]}" if ones else "")


def sums_in_words(num_characters: int, seed: int) -> str:
    """Return so many characters of lines like ``twenty one plus five is twenty six``."""
    chooser = random.Random(seed)
    text = ""
    while len(text) < num_characters:
        left, right = chooser.randrange(100), chooser.randrange(100)
        text += f"{in_words(left)} plus {in_words(right)} is {in_words(left + right)}\n"
    return text[:num_characters]


def make_batch(num_samples: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens and each one's successor, both of shape (num_samples, length)."""
    text = sums_in_words(num_samples * (length + 1), seed)
    codes = {letter: code for code, letter in enumerate(ALPHABET)}
    tokens = torch.tensor([codes[letter] for letter in text]).view(num_samples, length + 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
