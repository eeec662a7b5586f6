"""Split backward: weight gradients of linear layers, put aside during I and made at W.

torch's own I and W walk the autograd graph twice and are wrong or slow in several cases (outputs
that are views, parameters used twice, inputs without requires_grad, checkpointing). Here I is one
ordinary backward in which every `SplitLinear` keeps its input and output gradient instead of
making the weight gradient; W makes them. Whatever is not a plain ``nn.Linear`` does its full
work in I, which is slower to split but never wrong.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from optpipe.runtime.torch_private import has_gradient_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["SplitLinear", "WeightGradients", "split_linears"]


class _Deferred(NamedTuple):
    """What the gradients of one linear layer are made from; shapes (..., in) and (..., out)."""

    weight: Tensor
    bias: Tensor | None
    layer_input: Tensor
    output_gradient: Tensor


class WeightGradients:
    """The weight gradients put aside by the backward that is running.

    One backward runs at a time on a rank, so the layers need not know their micro-batch. On CUDA
    autograd calls from threads of its own while the caller waits.
    """

    def __init__(self) -> None:
        self._deferred: list[_Deferred] = []
        self._collecting = False

    @property
    def collecting(self) -> bool:
        """Whether the running backward is an I, so that weight gradients are put aside."""
        return self._collecting

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Put weight gradients aside until the end of the context."""
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
            self._deferred.clear()

    def defer(self, deferred: _Deferred) -> None:
        """Keep what one layer's gradients are made from."""
        self._deferred.append(deferred)

    def held_bytes(self) -> int:
        """Return the bytes kept for gradients that are put aside, each storage counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for deferred in self._deferred
            for tensor in (deferred.layer_input, deferred.output_gradient)
        }
        return sum(storages.values())

    def take(self) -> Callable[[], None]:
        """Return what makes all gradients put aside so far, and forget them; torch's dw_builder."""
        taken = self._deferred
        if not taken:
            # Of every full backward; torch asks there, too.
            return _nothing
        self._deferred = []

        def run() -> None:
            with torch.no_grad():
                while taken:
                    _accumulate(taken.pop(0))

        return run


def _nothing() -> None:
    """Make no gradients: none has been put aside."""


def split_linears(module: nn.Module, gradients: WeightGradients) -> int:
    """Turn every plain ``nn.Linear`` of a module into a `SplitLinear`, in place.

    The class is changed, nothing else: parameters, names, hooks, ``state_dict`` stay. Subclasses,
    parametrised and compiled layers are left alone.

    Returns
    -------
    int
        How many layers can be split now.
    """
    layers = [layer for layer in module.modules() if type(layer) in (nn.Linear, SplitLinear)]
    for layer in layers:
        layer.__class__ = SplitLinear
        cast("SplitLinear", layer).gradients = gradients
    return len(layers)


class SplitLinear(nn.Linear):
    """A linear layer that can put its weight gradient aside."""

    gradients: WeightGradients

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is nn.Linear's
        """Apply the layer; shapes (..., in) -> (..., out)."""
        if not (torch.is_grad_enabled() and _can_defer(self.weight) and _bias_fits(self.bias)):
            return super().forward(input)
        output = _LinearFunction.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.gradients
        )
        return cast("Tensor", output)


def _can_defer(parameter: Tensor) -> bool:
    """Whether W may add to ``parameter.grad``: a plain leaf that nobody watches."""
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and not has_gradient_hooks(parameter)
    )


def _bias_fits(bias: Tensor | None) -> bool:
    return bias is None or not bias.requires_grad or _can_defer(bias)


class _LinearFunction(torch.autograd.Function):
    """``functional.linear`` whose backward asks `WeightGradients` whether to make or to defer."""

    @staticmethod
    def forward(
        ctx: Any, layer_input: Tensor, weight: Tensor, bias: Tensor | None, sink: WeightGradients
    ) -> Tensor:
        output = functional.linear(layer_input, weight, bias)
        # Under autocast the output's type is the one the product was made in.
        ctx.save_for_backward(layer_input.to(output.dtype), weight)
        # The parameters themselves, whose .grad W adds to: a leaf makes no reference cycle.
        ctx.weight, ctx.bias, ctx.sink = weight, bias, sink
        ctx.input_dtype = layer_input.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer_input, weight = ctx.saved_tensors
        input_gradient = None
        if ctx.needs_input_grad[0]:
            product = output_gradient @ weight.to(output_gradient.dtype)
            input_gradient = product.to(ctx.input_dtype)
        bias = ctx.bias if ctx.needs_input_grad[2] else None
        deferred = _Deferred(ctx.weight, bias, layer_input, output_gradient)
        if ctx.sink.collecting:
            ctx.sink.defer(deferred)
            return input_gradient, None, None, None
        bias_gradient = None if bias is None else _bias_gradient(deferred)
        weight_gradient = _weight_gradient(deferred) if ctx.needs_input_grad[1] else None
        return input_gradient, weight_gradient, bias_gradient, None


def _weight_gradient(deferred: _Deferred) -> Tensor:
    gradient = deferred.output_gradient.reshape(-1, deferred.weight.shape[0])
    rows = deferred.layer_input.reshape(-1, deferred.weight.shape[1])
    return gradient.t() @ rows


def _bias_gradient(deferred: _Deferred) -> Tensor:
    rows = deferred.output_gradient.reshape(-1, deferred.weight.shape[0])
    return rows.sum(0)


def _accumulate(deferred: _Deferred) -> None:
    _add_gradient(deferred.weight, _weight_gradient(deferred))
    if deferred.bias is not None:
        _add_gradient(deferred.bias, _bias_gradient(deferred))


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
