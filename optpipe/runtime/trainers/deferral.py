"""Weight gradients put aside for W by layers that are no plain ``nn.Linear``: Megatron-Core's.

`ColumnParallelLinear` and `RowParallelLinear` call a product of their own, here replaced on each
layer by one that asks `WeightGradients` whether to make the weight's gradient or to put it aside.
What W makes goes through autograd, so that hooks hear of it: Megatron's data parallelism adds
gradients to ``main_grad`` and reduces them in hooks that nobody can see.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from optpipe.runtime.passes import WeightGradients

__all__ = ["join_parallel_linears", "split_parallel_linears"]


def split_parallel_linears(model: nn.Module, gradients: WeightGradients) -> int:
    """Let Megatron's parallel layers put weight gradients aside, in place; return how many can.

    Left alone, and made in I, are those with sequence parallelism, whose W would gather its input
    once more, and with gradient accumulation fused into the product.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    split = 0
    for layer in model.modules():
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            continue
        weight = layer.weight
        if (
            layer.sequence_parallel
            or layer.gradient_accumulation_fusion
            or (weight is not None and not weight.requires_grad)
        ):
            continue
        plain = type(layer)._forward_impl.__get__(layer)  # noqa: SLF001 - the seam Megatron has
        layer._forward_impl = partial(_product, plain, gradients)  # noqa: SLF001
        layer.gradients = gradients
        layer.split_parameters = [] if weight is None else [weight]
        split += 1
    return split


def join_parallel_linears(model: nn.Module) -> None:
    """Undo `split_parallel_linears`."""
    for layer in model.modules():
        if "split_parameters" in layer.__dict__:
            for name in ("_forward_impl", "gradients", "split_parameters"):
                del layer.__dict__[name]


def _product(
    plain: Any,
    gradients: WeightGradients,
    input: Tensor,  # noqa: A002 - the name is Megatron's
    weight: Tensor,
    *,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    tp_group: Any,
    **others: Any,
) -> Tensor:
    if not torch.is_grad_enabled() or not weight.requires_grad or torch.is_autocast_enabled():
        return plain(  # type: ignore[no-any-return]
            input, weight, bias=bias, allreduce_dgrad=allreduce_dgrad, tp_group=tp_group, **others
        )
    # To autograd the parameters are not there: Megatron's hooks would be called without a gradient.
    anchor = torch.empty(0, requires_grad=True)
    return _ParallelProduct.apply(  # type: ignore[no-untyped-call,no-any-return]
        input, anchor, (weight, bias), tp_group if allreduce_dgrad else None, gradients
    )


class _ParallelProduct(torch.autograd.Function):
    """The product of a parallel layer; shapes (..., in) -> (..., out), of this rank's part."""

    @staticmethod
    def forward(
        ctx: Any,
        layer_input: Tensor,
        _anchor: Tensor,
        parameters: tuple[Tensor, Tensor | None],
        *others: Any,
    ) -> Tensor:
        weight, bias = parameters
        ctx.save_for_backward(layer_input, weight)
        # The parameters themselves, to whose hooks W speaks.
        ctx.weight, ctx.bias = weight, bias
        ctx.group, ctx.sink = others
        output = torch.matmul(layer_input, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer_input, weight = ctx.saved_tensors
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = output_gradient.matmul(weight)
            if ctx.group is not None:
                dist.all_reduce(input_gradient, group=ctx.group)
        bias = ctx.bias if ctx.bias is not None and ctx.bias.requires_grad else None
        deferred = _Deferral(ctx.weight, bias, layer_input.detach(), output_gradient)
        if ctx.sink.collecting:
            ctx.sink.deferred.append(deferred)
        else:
            deferred.make()
        return input_gradient, None, None, None, None


class _Deferral(NamedTuple):
    """What the gradients of one parallel layer are made from."""

    weight: Tensor
    bias: Tensor | None
    layer_input: Tensor
    output_gradient: Tensor

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What is kept until W."""
        return self.layer_input, self.output_gradient

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Return those of weight and bias."""
        rows = self.output_gradient.reshape(-1, self.weight.shape[0])
        inputs = self.layer_input.reshape(-1, self.weight.shape[1])
        return rows.t().matmul(inputs), None if self.bias is None else rows.sum(dim=0)

    def make(self) -> None:
        """Make them, and hand them to autograd, whose hooks take them from there."""
        with torch.no_grad():
            made = self.gradients()
        parameters = [one for one in (self.weight, self.bias) if one is not None]
        with torch.enable_grad():
            seen = [one.view_as(one) for one in parameters]
        torch.autograd.backward(seen, [one for one in made if one is not None])
