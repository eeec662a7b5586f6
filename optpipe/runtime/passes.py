"""What this rank does around each pass: capture, split, recompute."""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from optpipe.errors import PreflightError
from optpipe.runtime.torch_names import (
    accumulator_of,
    adds_to_grad,
    alias_no_view,
    effect,
    has_gradient_hooks,
    is_compiled,
    is_grouped_product,
    is_transformed,
    makes_gradient,
    note_accumulator_hooks,
    parts_with_memory,
    running_accumulators,
    sharded_in_forward,
    takes_grouped_products,
    tree_leaves,
    types_when_gathered,
    versions_of,
    viewed,
)
from optpipe.runtime.treatments import ChangingBuffers, GroupCalls, OutputChecks
from optpipe.schedule import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from optpipe.runtime.offload import Cell, Offloader
    from optpipe.runtime.treatments import Treatment
    from optpipe.runtime.watch import Activity

__all__ = [
    "ActionObserver",
    "Passes",
    "SplitLinear",
    "WeightGradients",
    "cannot_return_gradients",
    "check_delaying",
    "deferred_bytes",
    "split_linears",
    "treat_as_plain",
    "unsplit_linears",
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
    offloader
        Of the stages of this rank, whose buffers a RECOMPUTE leaves alone.
    treatments
        What is done to the (stage, micro-batch) pairs that are not just kept. The F of one that is
        recomputed apart keeps only its inputs, and what buffers it changes held before.
    last_stage
        Index of the stage behind whose F the loss comes.
    device
        Whose random state a recomputation restores, beside the CPU's.
    activity
        Is told of every action.

    Attributes
    ----------
    running
        The action begun last, by this thread: the two of a pair may have one each.
    """

    def __init__(
        self,
        offloader: Offloader,
        gradients: WeightGradients,
        treatments: Mapping[Cell, Treatment],
        last_stage: int,
        device: torch.device,
        *,
        activity: Activity,
    ) -> None:
        self._running = threading.local()
        self.observers: list[ActionObserver] = []
        self._activity = activity
        self._offloader = offloader
        self._gradients = gradients
        self._treatments = treatments
        self._checks = OutputChecks()
        self._groups = {
            stage: GroupCalls(offloader.modules[stage], self._checks)
            for stage in {cell[0] for cell, one in treatments.items() if one.tells_groups}
        }
        self._last_stage = last_stage
        self._devices = [device] if device.type == "cuda" else []
        self._random_states: dict[Cell, list[Tensor]] = {}
        self._buffers = {
            index: ChangingBuffers(module) for index, module in offloader.modules.items()
        }

    @property
    def running(self) -> Action | None:
        """See above."""
        return getattr(self._running, "action", None)

    def forward(
        self, stage: int, microbatch: int, inputs: Sequence[Tensor], given: Sequence[Tensor] = ()
    ) -> AbstractContextManager[object]:
        """Run an F as its mode says: captured if it will be offloaded, without a graph if apart.

        ``inputs`` are those that cross into the stage; ``given`` are the caller's, and stay.
        """
        self._begin(Action(stage, ActionType.FORWARD, microbatch))
        treatment = self._treatments.get((stage, microbatch))
        if treatment is None:
            return _PLAIN
        if treatment.apart:
            return self._without_graph((stage, microbatch), treatment, inputs, given)
        return self._treated((stage, microbatch), treatment, [*inputs, *given])

    @contextmanager
    def _without_graph(
        self, cell: Cell, treatment: Treatment, inputs: Sequence[Tensor], given: Sequence[Tensor]
    ) -> Iterator[None]:
        stage, microbatch = cell
        self._random_states[cell] = self._random_state()
        taken = [*inputs, *given]
        versions = versions_of(taken)
        with self._buffers[stage].noted(microbatch), torch.no_grad():
            yield
        if versions != versions_of(taken):
            raise PreflightError(
                f"stage {stage} changes an input in place, but micro-batch {microbatch} is "
                "recomputed: its second forward would read what the first one left; change a "
                "copy (.clone()), or solve a problem in which this stage is not recomputed"
            )
        if treatment.moved:
            self._offloader.take_in(cell, inputs)

    @contextmanager
    def _treated(
        self, cell: Cell, treatment: Treatment, inputs: Sequence[Tensor]
    ) -> Iterator[None]:
        with self._offloader.capture(cell, inputs) as saved:
            if not treatment.tells_groups:
                yield
                return
            with self._groups[cell[0]].running(treatment.again, saved, cell):
                yield

    def is_recomputed(self, stage: int, microbatch: int) -> bool:
        """Whether a RECOMPUTE, and not the F, makes the autograd graph of a cell."""
        treatment = self._treatments.get((stage, microbatch))
        return treatment is not None and treatment.apart

    def see_outputs(self, stage: int, microbatch: int, outputs: Sequence[Any]) -> None:
        """Compare what a RECOMPUTE returned with what its F returned; call it after both.

        `check_recomputed` says at the end of the step whether they are equal.
        """
        if self.is_recomputed(stage, microbatch):
            what = f"the RECOMPUTE of stage {stage}, micro-batch {microbatch},"
            self._checks.see((stage, microbatch), what, outputs)

    def check_recomputed(self, rank: int) -> None:
        """Refuse a step in which something returned other outputs when it ran again.

        Call it after each step, before anything uses the gradients.
        """
        self._checks.check(rank)
        for calls in self._groups.values():
            calls.end_step()

    def _captures(self, stage: int, microbatch: int) -> bool:
        """Whether what autograd saves for this cell is offloaded, and not its input."""
        treatment = self._treatments.get((stage, microbatch))
        return treatment is not None and bool(treatment.moved) and not treatment.apart

    def forward_done(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Leave what is sent on the device: it is no part of what the cell's plan offloads."""
        if self._captures(stage, microbatch):
            self._offloader.keep((stage, microbatch), outputs)
        self.end()

    def loss(
        self, stage: int, microbatch: int, given: Sequence[Tensor]
    ) -> AbstractContextManager[object]:
        """Capture what the loss saves, like the rest of the last stage, but for what it is given.

        That is the target, and whatever else the caller keeps.
        """
        torch.clear_autocast_cache()  # as in `end`; the stage's forward is over
        cell = (stage, microbatch)
        if not self._captures(stage, microbatch):
            return _PLAIN
        self._offloader.keep(cell, given)
        return self._offloader.capture(cell)

    def backward(self, stage: int, microbatch: int, *, split: bool) -> AbstractContextManager[None]:
        """Run an I, with weight gradients put aside, or a B."""
        kind = ActionType.BACKWARD_INPUT if split else ActionType.FULL_BACKWARD
        self._begin(Action(stage, kind, microbatch))
        if self._captures(stage, microbatch):
            self._offloader.before_backward((stage, microbatch))
        return self._gradients.collect() if split else _PLAIN

    def run_backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None] | None
    ) -> None:
        """Run the backward of the running I or B, from the stage's outputs."""
        self._gradients.run_backward(roots, gradients)

    @property
    def delays_gradients(self) -> bool:
        """Whether some module puts weight gradients aside in every backward."""
        return bool(self._gradients.delaying)

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
        """Run a forward again with the random numbers and the buffers of its F."""
        self._begin(Action(stage, ActionType.RECOMPUTE, microbatch))
        if self._treatments[stage, microbatch].moved:
            self._offloader.before_backward((stage, microbatch))
        state = self._random_states.pop((stage, microbatch))
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(state[0])
            for device, device_state in zip(self._devices, state[1:], strict=True):
                torch.cuda.set_rng_state(device_state, device)
            with self._buffers[stage].put_back(microbatch):
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
        self._gradients.forget()
        self._random_states.clear()
        self._checks.forget()
        for buffers in self._buffers.values():
            buffers.forget()
        for calls in self._groups.values():
            calls.forget()

    def _begin(self, action: Action) -> None:
        self._running.action = action
        self._activity.begin(action)
        for observer in self.observers:
            observer.begin(action)

    def end(self) -> None:
        """See that the running action is complete, and what it was given dropped."""
        # An autocast around the whole step would keep copies of weights that no plan counts.
        torch.clear_autocast_cache()
        if self.running is not None:
            for observer in self.observers:
                observer.end(self.running)
        self._activity.end()

    def _random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]


# --- Split backward: weight gradients of linear layers, put aside during I and made at W.
# torch's own I and W walk the autograd graph twice and are wrong or slow in several cases (outputs
# that are views, parameters used twice, inputs without requires_grad, checkpointing). Here I is one
# ordinary backward in which every `SplitLinear` keeps its input and output gradient instead of
# making the weight gradient; W makes them. So do experts whose products are grouped, and modules
# that delay their weight gradients by themselves. Whatever is none of these, nor a plain
# ``nn.Linear``, does its full work in I, which is slower to split but never wrong.


class Deferral(Protocol):
    """Gradients put aside: what they are made from, and how."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What is kept until then."""

    def make(self) -> None:
        """Make the gradients and add them to the parameters'."""


class _Deferred(NamedTuple):
    """What the gradients of one linear layer are made from; shapes (..., in) and (..., out)."""

    weight: Tensor
    bias: Tensor | None
    layer_input: Tensor
    output_gradient: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `Deferral`."""
        return self.layer_input, self.output_gradient

    def make(self) -> None:
        """Make the gradients and add them to ``.grad``."""
        with torch.no_grad():
            _add_gradient(self.weight, _weight_gradient(self))
            if self.bias is not None:
                _add_gradient(self.bias, _bias_gradient(self))


_AUTOGRAD = frozenset({"torch.autograd", "torch._tensor", "torch.overrides"})
"""Modules of the functions that run a backward."""

_REENTRANT_CHECKPOINTS = frozenset(
    {
        "torch.utils.checkpoint",
        "megatron.core.tensor_parallel.random",
        "transformer_engine.pytorch.distributed",
    }
)
"""Modules that run a backward inside a backward, and read no parameter's ``.grad``."""


class WeightGradients:
    """The weight gradients put aside by the backward that is running.

    One backward runs at a time on a rank, so the layers need not know their micro-batch. On CUDA
    autograd calls from threads of its own while the caller waits.
    """

    def __init__(self) -> None:
        self.collecting = False
        """Whether the running backward is an I, so that weight gradients are put aside."""
        self._deferred: list[tuple[Deferral, tuple[int, ...]]] = []
        self.num_runners = 0
        """Of the stages whose layers put gradients aside here."""
        self.delaying: list[Any] = []
        """Modules that put gradients aside in stores of their own, whatever the backward."""
        self._runs_stage = False

    def run_backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None] | None
    ) -> None:
        """Run a stage's backward; a backward inside it makes its own weight gradients."""
        self._runs_stage = True
        try:
            torch.autograd.backward(roots, gradients)
        finally:
            self._runs_stage = False

    @property
    def defers(self) -> bool:
        """Whether the backward that runs in this thread puts its weight gradients aside."""
        return self.collecting and not self.runs_inside()

    def runs_inside(self) -> bool:
        """Whether this thread runs a backward that code inside the stage's backward started.

        Such code may read ``.grad`` afterwards; a reentrant checkpoint does not. The stack tells
        the callers of autograd. Modes of torch functions may be between them and autograd.
        """
        if not self._runs_stage:
            return False
        frame, module, callers, seeks = inspect.currentframe(), "", list[str](), False
        while frame is not None and frame.f_code is not WeightGradients.run_backward.__code__:
            inner, module = module, frame.f_globals.get("__name__", "")
            if module == "torch.autograd" and inner != "torch.overrides":
                callers.append(module)
                seeks = True
            elif seeks and not (
                module in _AUTOGRAD or frame.f_code.co_name == "__torch_function__"
            ):
                callers[-1] = module
                seeks = False
            frame = frame.f_back
        if frame is not None and callers:
            # The stage's own backward. On CUDA another thread called it.
            callers.pop()
        return not _REENTRANT_CHECKPOINTS.issuperset(callers)

    def may_defer(self, accumulators: Iterable[Any]) -> bool:
        """Return whether W makes the gradients of some parameters, given their autograd nodes.

        W makes only gradients that the stage's backward would add to ``.grad``. A custom function
        or a hook may run `torch.autograd.grad` inside an I. Autograd returns those gradients.
        """
        return self.defers and all(map(adds_to_grad, accumulators))

    def put_aside(self, deferral: Deferral) -> None:
        """Make these in W; what they are made from must be then as it is now."""
        self._deferred.append((deferral, versions_of(deferral.tensors)))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Put weight gradients aside until the end of the context."""
        self.collecting = True
        try:
            yield
        finally:
            self.collecting = False
            self.forget()

    def forget(self) -> None:
        """Drop what a backward that failed has put aside."""
        self._empty_stores()
        self._deferred.clear()

    def _empty_stores(self) -> None:
        for module in self.delaying:
            if items := _taken_from(module.wgrad_store.context):
                self.put_aside(_StoredDeferral(module, items))

    def held_bytes(self) -> int:
        """Return the bytes kept for gradients that are put aside, each storage counted once."""
        self._empty_stores()
        storages = {
            part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
            for deferral, _ in self._deferred
            for tensor in deferral.tensors
            for part in parts_with_memory(tensor)
        }
        return sum(storages.values())

    def take(self) -> Callable[[], None]:
        """Return what makes all gradients put aside so far, and forget them; torch's dw_builder.

        Also behind a full backward: modules with stores of their own put theirs aside there, too.
        """
        self._empty_stores()
        taken = self._deferred
        if not taken:
            # Of nearly every full backward.
            return _nothing
        self._deferred = []

        def run() -> None:
            while taken:
                deferral, versions = taken.pop(0)
                if versions_of(deferral.tensors) != versions:
                    raise RuntimeError(
                        "the input or the output's gradient of a linear layer was changed in place "
                        "between its I and its W, which needs them as they were (a backward or a "
                        "hook that writes into the gradient it is given does that); change a copy, "
                        "or solve a problem in which no backward is split"
                    )
                deferral.make()

        return run


def cannot_return_gradients(what: str, fix: str) -> PreflightError:
    """Return the error for a backward that asks for gradients which can only go to ``.grad``."""
    return PreflightError(
        f"torch.autograd.grad, or backward(inputs=...), runs through {what}, whose weight gradient "
        f"can only be added to .grad; {fix}, or call backward() without inputs"
    )


def _nothing() -> None:
    """Make no gradients: none has been put aside."""


def split_linears(module: nn.Module, gradients: WeightGradients) -> int:
    """Turn every plain ``nn.Linear`` of a module into a `SplitLinear`, in place; return how many.

    The class is changed, nothing else: parameters, names, hooks, ``state_dict`` stay. Subclasses,
    parametrised layers and those with a ``forward`` of their own are left alone. Experts with
    grouped products become `SplitExperts`. Modules that delay their weight gradients by themselves
    stay as they are.
    """
    note_accumulator_hooks(module.parameters())
    layers = _linears(module)
    for layer in layers:
        layer.__class__ = _split_class_of(type(layer)) or type(layer)
        cast("SplitLinear", layer).gradients = gradients
        _split_layers.add(cast("SplitLinear", layer))
    gathered = types_when_gathered(module)
    experts = [one for one in module.modules() if _grouped_weights(one, gathered)]
    for one in experts:
        if not isinstance(one, SplitExperts):
            kind = type(one)
            one.__class__ = type(f"Split{kind.__name__}", (SplitExperts, kind), {})
        cast("SplitExperts", one).gradients = gradients
    delaying = _delaying(module)
    for one in delaying:
        if "gradients" not in one.__dict__:
            one.nested_check = one.register_forward_hook(_check_nested_backwards)
        one.gradients = gradients
        if one not in gradients.delaying:
            gradients.delaying.append(one)
    return len(layers) + len(experts) + len(delaying)


def unsplit_linears(module: nn.Module) -> None:
    """Undo `split_linears`, in place; a graph that is still to run backward stays right."""
    plain = {split: plain for plain, split in _split_class.items()}
    for layer in _linears(module):
        if isinstance(layer, SplitLinear):
            cast("nn.Linear", layer).__class__ = plain[type(layer)]
            _split_layers.discard(layer)
            del layer.__dict__["gradients"]
    for one in module.modules():
        if isinstance(one, SplitExperts):
            one.__class__ = type(one).__bases__[1]
            del one.__dict__["gradients"]
    for one in _delaying(module):
        if sink := one.__dict__.pop("gradients", None):
            sink.delaying.remove(one)
            one.__dict__.pop("nested_check").remove()


def deferred_bytes(module: nn.Module) -> int:
    """Return the bytes of weight gradient, in this rank's shards, that W makes of a split stage.

    0 = it cannot be split: I would be the whole backward. Both `measure` and the runner ask this.
    """
    compiled = {one for part in module.modules() if is_compiled(part) for one in part.modules()}
    sharded = sharded_in_forward(module)
    waiting = {
        parameter: sum(part.nbytes for part in parts_with_memory(parameter))
        for layer in _linears(module)
        if "forward" not in vars(layer)
        and _defers(layer)
        and not (layer in compiled and layer.weight in sharded)
        for parameter in layer.parameters()
        if parameter.requires_grad
    }
    gathered = types_when_gathered(module)
    for part in module.modules():
        for weight in () if part in compiled else _grouped_weights(part, gathered):
            waiting[weight] = sum(shard.nbytes for shard in parts_with_memory(weight))
        if _delays(part):
            waiting |= {weight: weight.nbytes for weight in _delayed_parameters(part)}
        # Layers of frameworks, which optpipe.runtime.trainers has split.
        for parameter in getattr(part, "split_parameters", ()):
            waiting[parameter] = parameter.nbytes
    return sum(waiting.values())


def _linears(module: nn.Module) -> list[nn.Linear]:
    found = [
        layer
        for layer in module.modules()
        if isinstance(layer, SplitLinear)
        or (_split_class_of(type(layer)) is not None and "forward" not in vars(layer))
    ]
    return cast("list[nn.Linear]", found)


def _split_class_of(kind: type[nn.Module]) -> type[SplitLinear] | None:
    """Return what a layer of this class becomes, if it is plain, or was before `fully_shard`."""
    if kind not in _split_class and FSDPModule in kind.__bases__:
        plain = kind.__mro__[2]
        if plain in _split_class:
            _add_split_class(cast("type[nn.Linear]", kind))
    return _split_class.get(cast("type[nn.Linear]", kind))


def _add_split_class(kind: type[nn.Linear]) -> None:
    _split_class[kind] = type(f"Split{kind.__name__}", (SplitLinear, kind), {})


def treat_as_plain(kind: type[nn.Linear]) -> None:
    """Let layers of a framework's subclass be split, whose forward is ``nn.Linear``'s own."""
    if kind.forward is not nn.Linear.forward:
        raise PreflightError(
            f"{kind.__name__} has a forward of its own, which may do more than a product; only "
            "subclasses that leave nn.Linear's forward as it is can be split"
        )
    if kind not in _split_class:
        _add_split_class(kind)


class SplitLinear(nn.Linear):
    """A linear layer that can put its weight gradient aside."""

    gradients: WeightGradients

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is nn.Linear's
        """Apply the layer; shapes (..., in) -> (..., out)."""
        if not (torch.is_grad_enabled() and _defers(self)) or is_transformed(input):
            return super().forward(input)
        if not torch.compiler.is_compiling():
            output = _LinearFunction.apply(  # type: ignore[no-untyped-call]
                input, self.weight, self.bias, self.gradients
            )
        elif isinstance(self.weight, DTensor):
            output = super().forward(input)
        else:
            output = _CompiledLinear.apply(  # type: ignore[no-untyped-call]
                input, self.weight, self.bias
            )
        return cast("Tensor", output)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _split_layers.add(self)


_split_class: dict[type[nn.Linear], type[SplitLinear]] = {nn.Linear: SplitLinear}
"""What a plain layer becomes, by what it is."""


def _defers(layer: nn.Linear) -> bool:
    """Whether W may make the gradients of a layer."""
    bias: Tensor | None = layer.bias
    return _can_defer(layer.weight) and (bias is None or not bias.requires_grad or _can_defer(bias))


def _can_defer(parameter: Tensor) -> bool:
    """Whether W may add to ``parameter.grad``: a leaf of a known kind that nobody watches."""
    return (
        type(parameter) in (nn.Parameter, DTensor)
        and parameter.requires_grad
        and not has_gradient_hooks(parameter)
        # Megatron-Core's data parallelism takes gradients in hooks that cannot be seen.
        and not hasattr(parameter, "main_grad")
    )


class _LinearFunction(torch.autograd.Function):
    """``functional.linear`` whose backward asks `WeightGradients` whether to make or to defer."""

    @staticmethod
    def forward(
        ctx: Any, layer_input: Tensor, weight: Tensor, bias: Tensor | None, sink: WeightGradients
    ) -> Tensor:
        output = functional.linear(layer_input, weight, bias)
        # For inputs of three dimensions `linear` returns a view. Autograd refuses operations in
        # place on a view that a custom function returns.
        if viewed(output) is not output:
            output = alias_no_view(output)
        # Under autocast the output's type is the one the product was made in.
        ctx.save_for_backward(layer_input.to(output.dtype), weight)
        # The parameters themselves, whose .grad W adds to: a leaf makes no reference cycle.
        ctx.weight, ctx.bias, ctx.sink = weight, bias, sink
        ctx.input_dtype = layer_input.dtype
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer_input, weight = ctx.saved_tensors
        input_gradient = _input_gradient(ctx, weight, output_gradient)
        bias = ctx.bias if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled():
            # With create_graph=True, gradients are part of the forward, and have gradients.
            if layer_input.dtype != ctx.input_dtype:
                raise PreflightError(
                    "create_graph=True differentiates a linear layer under autocast, which cast "
                    f"its input from {ctx.input_dtype} to {layer_input.dtype}; a split stage "
                    "cannot differentiate that cast twice: run this layer with "
                    "autocast(enabled=False)"
                )
            product = _Deferred(ctx.weight, bias, layer_input, output_gradient)
            weight_gradient = _weight_gradient(product) if ctx.needs_input_grad[1] else None
            bias_gradient = None if bias is None else _bias_gradient(product)
            return input_gradient, weight_gradient, bias_gradient, None
        # Without its place in the graph, which would hold the stage's input until W.
        deferred = _Deferred(ctx.weight, bias, layer_input.detach(), output_gradient)
        # The nodes of weight and bias; the sink has none.
        accumulators = [node for node, _ in ctx.next_functions[1:] if node is not None]
        if ctx.sink.may_defer(accumulators):
            ctx.sink.put_aside(deferred)
            return input_gradient, None, None, None
        bias_gradient = None if bias is None else _bias_gradient(deferred)
        weight_gradient = _weight_gradient(deferred) if ctx.needs_input_grad[1] else None
        return input_gradient, weight_gradient, bias_gradient, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Tensor:
        del ctx
        raise PreflightError(
            "torch.autograd.forward_ad runs through a linear layer of a split stage, which has no "
            "forward-mode derivative there; use torch.func.jvp"
        )


# Each product conjugates the factor that is not a gradient, because torch defines gradients of
# complex numbers so. `conj` returns a real tensor as it is.


def _input_gradient(ctx: Any, weight: Tensor, output_gradient: Tensor) -> Tensor | None:
    if not ctx.needs_input_grad[0]:
        return None
    product = output_gradient @ weight.to(output_gradient.dtype).conj()
    return product.to(ctx.input_dtype)


def _weight_gradient(deferred: _Deferred) -> Tensor:
    gradient = deferred.output_gradient.reshape(-1, deferred.weight.shape[0])
    rows = deferred.layer_input.reshape(-1, deferred.weight.shape[1])
    return gradient.t() @ rows.conj()


def _bias_gradient(deferred: _Deferred) -> Tensor:
    rows = deferred.output_gradient.reshape(-1, deferred.weight.shape[0])
    return rows.sum(0)


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    # FSDP2 may ask for gradients in the type of its reduction (since torch 2.15).
    gradient = gradient.to(parameter.grad_dtype or parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


# --- Experts whose products are grouped: one call for all experts, weights of (experts, ., .).


class SplitExperts(nn.Module):
    """A module of experts that can put the gradients of its stacked weights aside."""

    gradients: WeightGradients

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the experts as their own class does."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with _GroupedProducts(_grouped_weights(self), self.gradients):
            return super().forward(*args, **kwargs)


def _grouped_weights(
    module: nn.Module, gathered: Mapping[Tensor, torch.dtype] = MappingProxyType({})
) -> list[nn.Parameter]:
    """Return the weights of a module of experts that enter grouped products as they are.

    Of transformers' experts with ``experts_implementation="grouped_mm"``, and of torchtitan's in
    bf16: it casts others, and their gradients go through the cast. ``gathered`` are the sharded
    ones that FSDP2 gathers whole for the forward, and of which type.
    """
    own = module.parameters(recurse=False)
    stacked = [one for one in own if one.dim() == _STACKED and _can_defer(one)
               and (type(one) is nn.Parameter or one in gathered)]  # fmt: skip
    if getattr(getattr(module, "config", None), "_experts_implementation", "") == "grouped_mm":
        return [one for one in stacked if takes_grouped_products(one)]
    seam = getattr(type(module), "_grouped_mm", None)
    if seam is None or not seam.__module__.startswith("torchtitan.models."):
        return []
    return [one for one in stacked if gathered.get(one, one.dtype) == torch.bfloat16]


_STACKED = 3
"""Dimensions of a weight: experts, and those of each one's matrix."""


class _GroupedProducts(TorchFunctionMode):
    """Makes grouped products with some weights ask `WeightGradients`."""

    def __init__(self, weights: list[nn.Parameter], gradients: WeightGradients) -> None:
        super().__init__()
        self._weights = weights
        self._gradients = gradients

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        given = {key: value for key, value in (kwargs or {}).items() if value is not None}
        if is_grouped_product(func) and set(given) == {"offs"}:
            layer_input, factor = args
            for weight in self._weights:
                if factor is weight or viewed(factor) is weight:
                    return _GroupedFunction.apply(  # type: ignore[no-untyped-call]
                        layer_input, factor, weight, given["offs"], self._gradients
                    )
        return func(*args, **(kwargs or {}))


class _GroupedFunction(torch.autograd.Function):
    """Shapes (rows, in), (experts, in, out) -> (rows, out); ``ends`` of each expert's rows.

    ``factor`` is the weight, or its transpose. Rows behind the last end are nobody's.
    """

    @staticmethod
    def forward(ctx: Any, layer_input: Tensor, factor: Tensor, *others: Any) -> Tensor:
        ctx.save_for_backward(layer_input, factor)
        ctx.weight, ctx.ends, ctx.sink = others
        return functional.grouped_mm(layer_input, factor, offs=ctx.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer_input, factor = ctx.saved_tensors
        rows = output_gradient.contiguous()
        input_gradient = None
        if ctx.needs_input_grad[0]:
            back = factor.transpose(-2, -1)
            input_gradient = functional.grouped_mm(rows, back, offs=ctx.ends)
        is_transposed = factor.stride() != ctx.weight.stride()
        deferred = _GroupedDeferred(ctx.weight, is_transposed, layer_input.detach(), rows, ctx.ends)
        accumulator, _ = ctx.next_functions[2]
        if ctx.sink.may_defer([accumulator]):
            ctx.sink.put_aside(deferred)
            return input_gradient, None, None, None, None
        weight_gradient = deferred.gradient()
        weight_gradient = weight_gradient.transpose(-2, -1) if is_transposed else weight_gradient
        return input_gradient, weight_gradient, None, None, None


class _GroupedDeferred(NamedTuple):
    """What the gradient of a weight of experts is made from."""

    weight: nn.Parameter
    is_transposed: bool
    layer_input: Tensor
    output_gradient: Tensor
    ends: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `Deferral`."""
        return self.layer_input, self.output_gradient

    def gradient(self) -> Tensor:
        """Return it, as the weight lies."""
        left, right = self.layer_input, self.output_gradient
        if self.is_transposed:
            left, right = right, left
        return functional.grouped_mm(left.t(), right, offs=self.ends)

    def make(self) -> None:
        """Make it and add it to ``.grad``."""
        with torch.no_grad():
            _add_gradient(self.weight, self.gradient())


# --- Modules that delay their weight gradients by themselves, as Transformer Engine's do that were
# made with ``delay_wgrad_compute=True`` (2.3 and later). Every backward, an I or a B, puts what a
# product needs into the module's queue, ``wgrad_store.context``, and each ``backward_dw()`` makes
# the gradient of what lies there longest. That queue knows no micro-batches, so it is emptied
# behind every backward, and what it held is put back for its W: W's may come in any order. A
# ``backward_dw()`` writes ``weight.grad`` anew, and ``bias.grad`` only where it is None, so what is
# there already is put aside and added.


def _delays(module: Any) -> bool:
    store = getattr(module, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def _delaying(module: nn.Module) -> list[Any]:
    return [one for one in module.modules() if _delays(one)]


def _delayed_parameters(module: Any) -> list[nn.Parameter]:
    """Return those of which W makes the gradients: as marked, or in older versions all matrices."""
    own = [one for one in module.parameters(recurse=False) if one.requires_grad]
    marked = [one for one in own if getattr(one, "skip_backward_post_hook", False)]
    return [one for one in marked or own if one.dim() > 1 or (marked and not _is_fp8(module))]


def _is_fp8(module: Any) -> bool:
    """Whether its last forward was in FP8, whose backward makes the gradients of biases."""
    return bool(getattr(module, "fp8", False))


def check_delaying(stages: Mapping[int, nn.Module]) -> None:
    """Refuse modules that delay weight gradients which would not be made, or that nobody takes."""
    for index, stage in sorted(stages.items()):
        for name, part in stage.named_modules():
            if why := _not_delayed_because(part):
                raise PreflightError(
                    f"{name or 'the module'} of stage {index}, a {type(part).__name__}, delays its "
                    f"weight gradients until backward_dw() is called, but {why}"
                )


def _not_delayed_because(part: Any) -> str:
    """Return what is in the way of a module's delayed weight gradients, and what to do; or ""."""
    own = [one for one in part.parameters(recurse=False) if one.requires_grad]
    if "backward_dw" in part.__dict__:
        return (
            "it runs as a CUDA graph, which puts nothing into a queue; graph it without "
            "delay_wgrad_compute"
        )
    if not _delays(part):
        needs = getattr(part, "need_backward_dw", None)
        if needs is None or not needs():
            return ""
        return "it has no wgrad_store, whose queue says for which micro-batch; turn the delay off"
    queue = getattr(part.wgrad_store, "context", None)
    if not all(hasattr(queue, method) for method in ("get", "put", "qsize")):
        return (
            f"its wgrad_store.context is a {type(queue).__name__} and no queue of what waits; turn "
            "delay_wgrad_compute off"
        )
    if any(type(one) is not nn.Parameter for one in own):
        return (
            "its parameters are sharded (DTensors), and backward_dw() would write whole gradients; "
            "make it without delay_wgrad_compute"
        )
    if any(has_gradient_hooks(one) for one in own):
        return "a parameter has a gradient hook, which that does not call; turn the delay off"
    takers = getattr(part, "wgrad_accumulation_and_reduce_hooks", ())
    if any(hasattr(one, "main_grad") for one in own) and not takers:
        return (
            "its gradients are added to main_grad by hooks that backward_dw() does not call; set "
            "delay_wgrad_compute in Megatron's DistributedDataParallelConfig, too"
        )
    return ""


def _check_nested_backwards(module: Any, _given: Any, output: Any) -> None:
    """Refuse a backward inside a backward through a module that delays its weight gradients.

    The module's backward fills its queue in any case, and W would add that gradient to ``.grad``.
    """
    tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
    computed = [one for one in tensors if one.grad_fn is not None]
    if not computed:
        return
    accumulators = [accumulator_of(parameter) for parameter in _delayed_parameters(module)]

    def check(_gradient: Tensor) -> None:
        if module.gradients.runs_inside() or not all(map(adds_to_grad, accumulators)):
            raise PreflightError(
                "a hook or a custom function runs a backward inside a stage's backward, through a "
                f"{type(module).__name__} that delays its weight gradients. They would be added to "
                ".grad too late; make the module without delay_wgrad_compute"
            )

    computed[0].register_hook(check)  # type: ignore[no-untyped-call]


def _taken_from(queue: Any) -> list[Any]:
    return [queue.get() for _ in range(queue.qsize())]


class _StoredDeferral(NamedTuple):
    """What a module put into its queue in one backward, an entry a product: tensors, and how."""

    module: Any
    items: list[Any]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `Deferral`."""
        leaves = tree_leaves([item[0] for item in self.items])
        return tuple(one for one in leaves if isinstance(one, Tensor))

    def make(self) -> None:
        """Let the module make them, as often as it takes, and add them up."""
        queue = self.module.wgrad_store.context
        for item in self.items:
            queue.put(item)
        self.items.clear()
        while left := queue.qsize():
            self._make_next()
            if queue.qsize() >= left:
                raise PreflightError(
                    f"backward_dw() of a {type(self.module).__name__} left {left} products in its "
                    "wgrad_store, as before; turn delay_wgrad_compute off"
                )

    def _make_next(self) -> None:
        own = [
            one
            for one in self.module.parameters(recurse=False)
            if one.requires_grad and (one.dim() > 1 or not _is_fp8(self.module))
        ]
        before = [one.grad for one in own]
        for one in own:
            one.grad = None
        with torch.no_grad():
            self.module.backward_dw()
            gradients = [one.grad for one in own]
            if all(gradient is None for gradient in gradients) and not any(
                hasattr(one, "main_grad") for one in own
            ):
                raise PreflightError(
                    f"backward_dw() of a {type(self.module).__name__} made no gradient of its "
                    "parameters, as where a weight is several; turn delay_wgrad_compute off"
                )
            for one, gradient, old in zip(own, gradients, before, strict=True):
                one.grad = old
                if gradient is not None:
                    _add_gradient(one, gradient)


# --- Linear layers under torch.compile. What a compiled backward returns is settled when it is
# traced, with I and B alike. So it returns no weight gradients, and calls an operator with an
# effect, which the compiler neither drops nor looks into, and which asks at run time: in an I it
# defers, else it adds to ``.grad``. A `torch.autograd.grad` that asks for them is refused. To
# autograd the parameters are there, without a gradient: DDP hears of them. Tensors are copied,
# because the compiler reuses their memory.

_split_layers: WeakSet[SplitLinear] = WeakSet()
_layer_at: WeakValueDictionary[tuple[int, int], SplitLinear] = WeakValueDictionary()
"""Where weight and bias lay when a layer was last looked for -> the layer."""


class _CompiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer_input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # As in `_LinearFunction`, but always: the compiler cannot trace the check for a view.
        output = alias_no_view(functional.linear(layer_input, weight, bias))
        ctx.save_for_backward(layer_input.to(output.dtype), weight, bias)
        ctx.input_dtype = layer_input.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, None, None]:
        layer_input, weight, bias = ctx.saved_tensors
        _compiled_gradients(weight, bias, layer_input, output_gradient)
        return _input_gradient(ctx, weight, output_gradient), None, None


@effect("optpipe::linear_weight_gradients")
def _compiled_gradients(
    weight: Tensor, bias: Tensor | None, layer_input: Tensor, output_gradient: Tensor
) -> None:
    layer = _layer_of(weight, bias)
    if not _defers(layer):
        raise PreflightError(
            "a gradient hook was put on a linear layer after the block around it was compiled, "
            "and would not be called; register hooks before the first step"
        )
    trained_bias = layer.bias if bias is not None and layer.bias.requires_grad else None
    parameters = [layer.weight] if trained_bias is None else [layer.weight, trained_bias]
    known = running_accumulators()
    accumulators = [known[parameter] for parameter in parameters]
    if not all(map(adds_to_grad, accumulators)):
        if any(map(makes_gradient, accumulators)):
            raise cannot_return_gradients(
                "a linear layer in a compiled block", "do not compile this block"
            )
        return
    deferred = _Deferred(layer.weight, trained_bias, layer_input.clone(), output_gradient.clone())
    if layer.gradients.defers:
        layer.gradients.put_aside(deferred)
    else:
        deferred.make()


def _layer_of(weight: Tensor, bias: Tensor | None) -> SplitLinear:
    """Return the layer whose parameters these are: a compiled graph knows tensors alone."""
    place = _place(weight, bias)
    layer = _layer_at.get(place)
    if layer is None or _place(layer.weight, layer.bias) != place:
        layer = next(one for one in _split_layers if _place(one.weight, one.bias) == place)
        _layer_at[place] = layer
    return layer


def _place(weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    return weight.data_ptr(), 0 if bias is None else bias.data_ptr()
