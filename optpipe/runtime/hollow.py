"""Outputs without their memory: what is left of a tensor that has been sent.

The backward of a stage starts from its outputs, but needs only their place in the autograd graph
and their shapes. A hollow tensor has both, over one element of memory, so that an output's storage
is free as soon as the next stage has it, unless autograd itself saved it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["hollow"]


def hollow(outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return stand-ins for outputs; a backward from them is one from the outputs.

    What needs no gradient is replaced by an empty tensor, which no backward looks at.
    """
    return tuple(_hollow(output) if isinstance(output, Tensor) else output for output in outputs)


def _hollow(output: Tensor) -> Tensor:
    if not output.requires_grad:
        return output.new_empty(0)
    if type(output) is not Tensor:
        # A subclass (DTensor) knows more than shape and memory.
        return output
    return cast("Tensor", _Hollow.apply(output))  # type: ignore[no-untyped-call]


class _Hollow(torch.autograd.Function):
    """The identity for gradients; forward, all elements are one that nobody has written."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return output.new_empty(1).expand(output.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return gradient
