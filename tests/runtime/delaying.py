"""A twin of Transformer Engine's linear layer with ``delay_wgrad_compute``, which wants a GPU.

Written after what its sources do (`pytorch/module/base.py` and `_common.py`, from 2.3 on): a queue
per module, the oldest entry of which a `backward_dw` takes; it *overwrites* the weight's
gradient, writes that of the bias only where there is none, and calls the hooks of whoever takes
them. In FP8 the backward makes the bias's gradient, and the queue's entry none.
"""

import queue
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class WeightGradStore:
    """The queue, and whether it is used."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.context: Any = queue.Queue() if enabled else None

    def delay_wgrad_compute(self) -> bool:
        return self.enabled


class DelayingLinear(nn.Module):
    """A linear layer with the parameters of another; ``fp8`` makes its bias's gradient early."""

    def __init__(
        self, base: nn.Linear, *, delay_wgrad_compute: bool, fp8: bool = False, marks: bool = True
    ) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.use_bias = base.bias is not None
        self.wgrad_store = WeightGradStore(enabled=delay_wgrad_compute)
        self.fp8 = fp8
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        if marks and delay_wgrad_compute:
            for parameter in self.parameters():
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def need_backward_dw(self) -> bool:
        return self.wgrad_store.delay_wgrad_compute()

    def forward(self, given: Tensor) -> Tensor:
        how = self.wgrad_store, self.fp8
        return Product.apply(given, self.weight, self.bias, how)  # type: ignore[no-any-return]

    def backward_dw(self) -> None:
        if not self.need_backward_dw():
            return
        tensors, make = self.wgrad_store.context.get_nowait()
        of_weight, of_bias = make(*tensors)
        self.weight.grad = of_weight
        if self.use_bias and self.bias.grad is None:
            self.bias.grad = of_bias.to(self.bias.dtype)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


def _weight_gradient(given: Tensor, gradient: Tensor, *, with_bias: bool) -> Any:
    rows = gradient.reshape(-1, gradient.shape[-1])
    return rows.t() @ given, rows.sum(0) if with_bias else None


class Product(torch.autograd.Function):
    """(input, weight, bias, (store, is in FP8)) to the output."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Tensor:
        # Made in here, so that what waits does not hold the graph, and with it the stage's input.
        ctx.save_for_backward(given.detach().reshape(-1, given.shape[-1]), weight)
        ctx.store, ctx.fp8 = how
        ctx.has_bias = bias is not None
        return nn.functional.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given, weight = ctx.saved_tensors
        make = partial(_weight_gradient, with_bias=ctx.has_bias and not ctx.fp8)
        rows = gradient.reshape(-1, gradient.shape[-1])
        early = rows.sum(0) if ctx.has_bias and ctx.fp8 else None
        back = gradient @ weight if ctx.needs_input_grad[0] else None
        if ctx.store.delay_wgrad_compute():
            ctx.store.context.put([[given, gradient], make])
            return back, None, early, None
        of_weight, late = make(given, gradient)
        return back, of_weight, early if ctx.fp8 else late, None
