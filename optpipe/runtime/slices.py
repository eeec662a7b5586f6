"""Slices of a sequence: keys and values go from slice to slice, their gradients come back.

A model that trains in slices asks two things where it attends: `number`, which slice of its sample
is running, for positions, and `past`, for the keys and values of all slices so far. Outside of a
runner of slices there is one slice, the whole sequence, and `past` gives back what it was given: so
the same model trains whole.

Between slices tensors are detached. Each slice hands on its keys and values as leaves of autograd;
the backwards of later slices, which come first, leave gradients there, and the slice's own backward
adds them to its own (`_HandedOn`). What `past` returns is joined anew for every slice: a module
whose attention saves it holds it once per slice.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["SliceStates", "number", "past"]


class _Running(NamedTuple):
    """The F that runs: its stage's states, its sample, and its number there."""

    states: SliceStates
    sample: int
    number: int


_running: list[_Running] = []


def number() -> int:
    """Return which slice of its sample the running F is of, from 0; 0 where nothing is cut."""
    return _running[-1].number if _running else 0


def past(key: Tensor, value: Tensor, dim: int = -2) -> tuple[Tensor, Tensor]:
    """Return keys and values of all slices of the sample so far, this one's last.

    To be called once in each attention of a stage, in the same order for every slice.

    Parameters
    ----------
    key, value
        Of this slice.
    dim
        Their dimension of positions.
    """
    if not _running:
        return key, value
    states, sample, _ = _running[-1]
    keys, values = states.join(sample, (key, value), dim)
    return keys, values


class SliceStates:
    """What the slices of each sample have handed on in one stage, in one step.

    ``samples`` are the micro-batches of each sample, in order.
    """

    def __init__(self, samples: Sequence[Sequence[int]]) -> None:
        self._place = {j: (s, k) for s, sample in enumerate(samples) for k, j in enumerate(sample)}
        self._sizes = [len(sample) for sample in samples]
        self._handed: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}
        self._calls = 0

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Let `number` and `past` speak of a micro-batch while its F runs."""
        sample, at = self._place[microbatch]
        self._calls = 0
        _running.append(_Running(self, sample, at))
        try:
            yield
        finally:
            _running.pop()
        if at + 1 == self._sizes[sample]:
            for call in range(self._calls):
                self._handed.pop((sample, call), None)

    def clear(self) -> None:
        """Forget everything of the step."""
        self._handed.clear()

    def join(self, sample: int, own: tuple[Tensor, ...], dim: int) -> tuple[Tensor, ...]:
        """Return what earlier slices have handed on in this call with a slice's own behind it."""
        handed = self._handed.setdefault((sample, self._calls), [])
        self._calls += 1
        leaves = tuple(one.detach().requires_grad_(one.requires_grad) for one in own)
        joined = tuple(
            torch.cat([*(earlier[at] for earlier in handed), _handed_on(one, leaf)], dim)
            for at, (one, leaf) in enumerate(zip(own, leaves, strict=True))
        )
        handed.append(leaves)
        return joined


def _handed_on(own: Tensor, leaf: Tensor) -> Tensor:
    if not own.requires_grad:
        return own
    result: Tensor = _HandedOn.apply(own, leaf)  # type: ignore[no-untyped-call]
    return result


class _HandedOn(torch.autograd.Function):
    """A slice's own keys or values; its backward adds what later slices left at their leaf."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        later, ctx.leaf.grad = ctx.leaf.grad, None
        return gradient if later is None else gradient + later, None
