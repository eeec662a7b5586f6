"""One stage as the runtime runs it, alone: its inputs arrive, its loss or gradients are made."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.runtime.agreement import describe
from optpipe.runtime.boundary import as_tensors
from optpipe.runtime.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe.runtime.weight_gradients import WeightGradients

__all__ = ["ForwardResult", "StageUnderTest", "forget_gradients", "undisturbed"]


class ForwardResult(NamedTuple):
    """What a forward leaves: what is sent on, and what the backward starts from."""

    outputs: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class StageUnderTest:
    """A stage with one micro-batch's inputs.

    Parameters
    ----------
    index
        Of the stage, in model order, for messages.
    module
        The stage, split by ``gradients`` where it can be.
    inputs
        What arrives from the stage before, or the batch.
    loss
        From the last stage's output to a scalar; None on the others.
    target
        The loss's target: it belongs to the batch, whatever the loss saves of it.
    """

    index: int
    module: nn.Module
    inputs: tuple[Tensor, ...]
    gradients: WeightGradients
    loss: Callable[[Any, Any], Tensor] | None = None
    target: Tensor | None = None

    @property
    def is_first(self) -> bool:
        """Whether the inputs are the batch, of which nobody wants gradients."""
        return self.index == 0

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return self.inputs[0].device

    def receive(self) -> tuple[Tensor, ...]:
        """Return the inputs as they arrive: leaves that collect gradients, but for the batch."""
        return tuple(
            tensor.detach().requires_grad_(not self.is_first and tensor.is_floating_point())
            for tensor in self.inputs
        )

    def forward(self, received: tuple[Tensor, ...]) -> ForwardResult:
        """Run F, the loss included where the stage is the last.

        Raises
        ------
        PreflightError
            If the stage or the loss fails; with sizes and cause.
        """
        try:
            return self._run(received)
        except Exception as error:
            sizes = [tuple(tensor.size()) for tensor in received]
            raise PreflightError(
                f"stage {self.index} cannot run on inputs of size {sizes}: {describe(error)}; "
                "correct the stage, or the sample"
            ) from error

    def _run(self, received: tuple[Tensor, ...]) -> ForwardResult:
        output = self.module(*received)
        if self.loss is not None:
            return ForwardResult((), (self.loss(output, self.target),))
        outputs = as_tensors(output, f"the output of stage {self.index}")
        return ForwardResult(outputs, tuple(out for out in outputs if out.requires_grad))

    def backward(self, result: ForwardResult, gradients: Sequence[Tensor] | None = None) -> None:
        """Run the backward with these output gradients, or with ones.

        Raises
        ------
        InputError
            If no output depends on a parameter or an input that has gradients.
        """
        if not any(root.requires_grad for root in result.roots):
            raise InputError(
                f"no output of stage {self.index} requires a gradient, but its backward is to be "
                "measured; are its parameters frozen, or its output detached?"
            )
        if gradients is None:
            gradients = [torch.ones_like(root) for root in result.roots]
        torch.autograd.backward(result.roots, gradients)


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Give gradients, buffers and random states back as they were; inside, gradients are None."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    forget_gradients(module)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def forget_gradients(module: nn.Module) -> None:
    """Drop the gradients of all parameters."""
    for parameter in module.parameters():
        parameter.grad = None
