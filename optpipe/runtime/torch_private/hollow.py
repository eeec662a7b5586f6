"""Outputs without their memory: what is left of a tensor that has been sent.

The backward of a stage starts from its outputs, but needs only their place in the autograd graph
and their shapes. A hollow tensor has both, over one element of memory, so that an output's storage
is free as soon as the next stage has it, unless autograd itself saved it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from optpipe.runtime.torch_private.names import alias_no_view

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
    # An alias, since the graph may hold the output itself as what another operation has read.
    alias = alias_no_view(output)
    alias.data = output.new_empty_strided(output.shape, (0,) * output.dim())
    return alias
