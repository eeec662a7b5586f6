"""What this rank does around each pass: capture, split, recompute."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from optpipe.runtime.torch_names import has_gradient_hooks
from optpipe.schedule import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from optpipe.runtime.offload import Cell, Offloader

__all__ = [
    "ActionObserver",
    "Passes",
    "SplitLinear",
    "WeightGradients",
    "split_linears",
]


_PLAIN = nullcontext()


class ActionObserver(Protocol):
    """Whoever wants to see a rank's actions; F includes the loss, waiting for inputs is outside."""

    def begin(self, action: Action) -> None:
        """Look at what stands before an action; on CUDA the device may be far behind."""

    def end(self, action: Action) -> None:
        """Look at what an action has left."""


class Passes:
    """What happens around the passes torch runs, and the actions it does not know.

    Parameters
    ----------
    recomputed
        The (stage, micro-batch) pairs whose F keeps only its inputs.
    last_stage
        Index of the stage behind whose F the loss comes.
    device
        Whose random state a recomputation restores, beside the CPU's.

    Attributes
    ----------
    running
        The action begun last: where an error comes from.
    """

    def __init__(
        self,
        offloader: Offloader,
        gradients: WeightGradients,
        recomputed: frozenset[Cell],
        last_stage: int,
        device: torch.device,
    ) -> None:
        self.running: Action | None = None
        self.observer: ActionObserver | None = None
        self._offloader = offloader
        self._gradients = gradients
        self._recomputed = recomputed
        self._last_stage = last_stage
        self._devices = [device] if device.type == "cuda" else []
        self._random_states: dict[Cell, list[Tensor]] = {}

    def forward(
        self, stage: int, microbatch: int, inputs: Sequence[Tensor]
    ) -> AbstractContextManager[None]:
        """Run an F: captured if it will be offloaded, without a graph if it will be recomputed."""
        self._begin(Action(stage, ActionType.FORWARD, microbatch))
        cell = (stage, microbatch)
        if cell in self._recomputed:
            self._random_states[cell] = self._random_state()
            return torch.no_grad()
        return self._offloader.capture(cell, inputs) if self._offloader.holds(cell) else _PLAIN

    def forward_done(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Leave what is sent on the device: it is no part of what the cell's plan offloads."""
        self._offloader.keep((stage, microbatch), outputs)
        self.end()

    def loss(self, stage: int, microbatch: int, target: Any) -> AbstractContextManager[None]:
        """Capture what the loss saves, like the rest of the last stage, but for the target."""
        cell = (stage, microbatch)
        if not self._offloader.holds(cell):
            return _PLAIN
        if isinstance(target, Tensor):
            self._offloader.keep(cell, [target])
        return self._offloader.capture(cell)

    def backward(self, stage: int, microbatch: int, *, split: bool) -> AbstractContextManager[None]:
        """Run an I, with weight gradients put aside, or a B."""
        kind = ActionType.BACKWARD_INPUT if split else ActionType.FULL_BACKWARD
        self._begin(Action(stage, kind, microbatch))
        self._offloader.before_backward((stage, microbatch))
        return self._gradients.collect() if split else _PLAIN

    def weight_runner(self) -> Callable[[], None]:
        """Return what makes the weight gradients put aside by the I just run."""
        return self._gradients.take()

    @contextmanager
    def weight(self, stage: int, microbatch: int) -> Iterator[None]:
        """Run a W."""
        self._begin(Action(stage, ActionType.BACKWARD_WEIGHT, microbatch))
        yield
        self.end()

    @contextmanager
    def recompute(self, stage: int, microbatch: int) -> Iterator[None]:
        """Run a forward again with the random numbers of its F."""
        self._begin(Action(stage, ActionType.RECOMPUTE, microbatch))
        state = self._random_states.pop((stage, microbatch))
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(state[0])
            for device, device_state in zip(self._devices, state[1:], strict=True):
                torch.cuda.set_rng_state(device_state, device)
            yield
        if stage != self._last_stage:
            self.end()

    def transfer(self, action: Action) -> None:
        """Run an OFFLOAD, RELEASE or RELOAD."""
        self._begin(action)
        move = {
            ActionType.OFFLOAD: self._offloader.offload,
            ActionType.RELEASE: self._offloader.release,
            ActionType.RELOAD: self._offloader.reload,
        }
        move[action.type]((action.stage, action.microbatch))
        self.end()

    def reset(self) -> None:
        """Forget what an interrupted step left behind."""
        self._offloader.reset()
        self._random_states.clear()

    def _begin(self, action: Action) -> None:
        self.running = action
        if self.observer is not None:
            self.observer.begin(action)

    def end(self) -> None:
        """See that the running action is complete, and what it was given dropped."""
        if self.observer is not None and self.running is not None:
            self.observer.end(self.running)

    def _random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]


# --- Split backward: weight gradients of linear layers, put aside during I and made at W.
# torch's own I and W walk the autograd graph twice and are wrong or slow in several cases (outputs
# that are views, parameters used twice, inputs without requires_grad, checkpointing). Here I is one
# ordinary backward in which every `SplitLinear` keeps its input and output gradient instead of
# making the weight gradient; W makes them. Whatever is not a plain ``nn.Linear`` does its full
# work in I, which is slower to split but never wrong.


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
        self.collecting = False
        """Whether the running backward is an I, so that weight gradients are put aside."""
        self.deferred: list[_Deferred] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Put weight gradients aside until the end of the context."""
        self.collecting = True
        try:
            yield
        finally:
            self.collecting = False
            self.deferred.clear()

    def held_bytes(self) -> int:
        """Return the bytes kept for gradients that are put aside, each storage counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for deferred in self.deferred
            for tensor in (deferred.layer_input, deferred.output_gradient)
        }
        return sum(storages.values())

    def take(self) -> Callable[[], None]:
        """Return what makes all gradients put aside so far, and forget them; torch's dw_builder."""
        taken = self.deferred
        if not taken:
            # Of every full backward; torch asks there, too.
            return _nothing
        self.deferred = []

        def run() -> None:
            with torch.no_grad():
                while taken:
                    deferred = taken.pop(0)
                    _add_gradient(deferred.weight, _weight_gradient(deferred))
                    if deferred.bias is not None:
                        _add_gradient(deferred.bias, _bias_gradient(deferred))

        return run


def _nothing() -> None:
    """Make no gradients: none has been put aside."""


def split_linears(module: nn.Module, gradients: WeightGradients) -> int:
    """Turn every plain ``nn.Linear`` of a module into a `SplitLinear`, in place; return how many.

    The class is changed, nothing else: parameters, names, hooks, ``state_dict`` stay. Subclasses,
    parametrised and compiled layers are left alone.
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
            ctx.sink.deferred.append(deferred)
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


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
