"""Capture, split and recompute the passes of this rank."""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
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
    has_accumulator_hooks,
    has_gradient_hooks,
    is_grouped_product,
    is_transformed,
    note_accumulator_hooks,
    parts_with_memory,
    running_accumulators,
    sharded_in_forward,
    storage_identity,
    takes_grouped_products,
    tree_leaves,
    types_when_gathered,
    versions_of,
    viewed,
)
from optpipe.runtime.treatments import ChangingBuffers, GroupCalls, OutputChecks, compiled_parts
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
    "class_forwards",
    "deferred_bytes",
    "save_random_state",
    "split_linears",
    "treat_as_plain",
    "unsplit_linears",
]


_PLAIN = nullcontext()


class ActionObserver(Protocol):
    """Observes a rank's actions; F includes the loss, and waiting for inputs is not included."""

    def begin(self, action: Action) -> None:
        """Take note before an action; on CUDA the device may not have reached it yet."""

    def end(self, action: Action) -> None:
        """Take note after an action."""


def save_random_state(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context that brings back the present random state of the CPU and of a GPU.

    After the context, the state from before it is restored.
    """
    gpus = [device] if device.type == "cuda" else []
    cpu_state, *gpu_states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]

    @contextmanager
    def restore() -> Iterator[None]:
        with torch.random.fork_rng(devices=gpus):
            torch.set_rng_state(cpu_state)
            for state in gpu_states:
                torch.cuda.set_rng_state(state, device)
            yield

    return restore


class Passes:
    """Captures, splits and recomputes the passes of a rank, and runs its other actions.

    ``treatments`` are those of the (stage, micro-batch) pairs that are not simply kept. The F of a
    pair recomputed apart keeps its inputs, and the earlier values of the buffers that it changes. A
    recomputation restores the random state of ``device`` and of the CPU. The loss follows the F of
    ``last_stage``. ``activity`` receives every action.
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
        """Its ``action`` is the last one of a thread: the passes of a pair may have their own."""
        self.observers: list[ActionObserver] = []
        self._activity = activity
        self._offloader = offloader
        self.gradients = gradients
        self._treatments = treatments
        self._checks = OutputChecks()
        self._groups = {
            stage: GroupCalls(offloader.modules[stage], self._checks)
            for stage in {cell[0] for cell, one in treatments.items() if one.needs_groups}
        }
        self._last_stage = last_stage
        self._device = device
        self._random_states: dict[Cell, Callable[[], AbstractContextManager[None]]] = {}
        self._buffers = {
            index: ChangingBuffers(module) for index, module in offloader.modules.items()
        }

    def forward(
        self, stage: int, microbatch: int, inputs: Sequence[Tensor], given: Sequence[Tensor] = ()
    ) -> AbstractContextManager[object]:
        """Run an F in its mode: captured if it is offloaded, without a graph if recomputed apart.

        ``inputs`` come from the stage before. ``given`` come from the caller and are not offloaded.
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
        self._random_states[cell] = save_random_state(self._device)
        taken = [*inputs, *given]
        versions = versions_of(taken)
        with self._buffers[stage].recorded(microbatch), torch.no_grad():
            yield
        if versions != versions_of(taken):
            raise PreflightError(
                f"stage {stage} changes an input in place, but micro-batch {microbatch} is "
                "recomputed: its second forward would read the changed values; change a "
                "copy (.clone()), or solve a problem in which this stage is not recomputed"
            )
        if treatment.moved:
            self._offloader.capture_inputs(cell, inputs)

    @contextmanager
    def _treated(
        self, cell: Cell, treatment: Treatment, inputs: Sequence[Tensor]
    ) -> Iterator[None]:
        with self._offloader.capture(cell, inputs) as saved:
            calls = self._groups[cell[0]] if treatment.needs_groups else None
            with _PLAIN if calls is None else calls.running(treatment.again, saved, cell):
                yield

    def is_recomputed(self, stage: int, microbatch: int) -> bool:
        """Whether a RECOMPUTE, instead of the F, builds the autograd graph of a cell."""
        treatment = self._treatments.get((stage, microbatch))
        return treatment is not None and treatment.apart

    def see_outputs(self, stage: int, microbatch: int, outputs: Sequence[Any]) -> None:
        """Record the outputs of a cell's F and then of its RECOMPUTE, if it has one.

        `check_recomputed` compares them at the end of the step.
        """
        if self.is_recomputed(stage, microbatch):
            label = f"the RECOMPUTE of stage {stage}, micro-batch {microbatch},"
            self._checks.add((stage, microbatch), label, outputs)

    def check_recomputed(self, rank: int) -> None:
        """Refuse a step in which a recomputation returned other outputs than its F.

        Call it after each step, before anything uses the gradients.
        """
        self._checks.check(rank)
        for calls in self._groups.values():
            calls.end_step()

    def _captures(self, stage: int, microbatch: int) -> bool:
        """Whether the tensors that autograd saves for this cell are offloaded."""
        treatment = self._treatments.get((stage, microbatch))
        return treatment is not None and bool(treatment.moved) and not treatment.apart

    def forward_done(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """End an F and keep its outputs on the device: the plan does not offload them."""
        if self._captures(stage, microbatch):
            self._offloader.keep((stage, microbatch), outputs)
        self.end()

    def loss(
        self, stage: int, microbatch: int, given: Sequence[Tensor]
    ) -> AbstractContextManager[object]:
        """Capture what the loss saves, except ``given``, such as the target."""
        torch.clear_autocast_cache()  # as in `end`: the stage's forward has ended
        cell = (stage, microbatch)
        if not self._captures(stage, microbatch):
            return _PLAIN
        self._offloader.keep(cell, given)
        return self._offloader.capture(cell)

    def backward(self, stage: int, microbatch: int, *, split: bool) -> AbstractContextManager[None]:
        """Run an I, which defers weight gradients, or a B."""
        kind = ActionType.BACKWARD_INPUT if split else ActionType.FULL_BACKWARD
        self._begin(Action(stage, kind, microbatch))
        if self._captures(stage, microbatch):
            self._offloader.before_backward((stage, microbatch))
        return self.gradients.collect() if split else _PLAIN

    @contextmanager
    def weight(self, stage: int, microbatch: int) -> Iterator[None]:
        """Run a W."""
        self._begin(Action(stage, ActionType.BACKWARD_WEIGHT, microbatch))
        yield
        self.end()

    @contextmanager
    def recompute(self, stage: int, microbatch: int) -> Iterator[None]:
        """Run a forward again, with the random numbers and the buffers of its F."""
        self._begin(Action(stage, ActionType.RECOMPUTE, microbatch))
        if self._treatments[stage, microbatch].moved:
            self._offloader.before_backward((stage, microbatch))
        restore_random_state = self._random_states.pop((stage, microbatch))
        with restore_random_state(), self._buffers[stage].restored(microbatch):
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
        """Drop the state of an interrupted step."""
        self._offloader.reset()
        self.gradients.reset()
        self._random_states.clear()
        self._checks.reset()
        for buffers in self._buffers.values():
            buffers.reset()
        for calls in self._groups.values():
            calls.reset()

    def _begin(self, action: Action) -> None:
        self._running.action = action
        self._activity.begin(action)
        for observer in self.observers:
            observer.begin(action)

    def end(self) -> None:
        """End the current action; call it after its inputs were dropped."""
        # With an autocast around the whole step, the cache would keep copies that no plan counts.
        torch.clear_autocast_cache()
        for observer in self.observers:
            observer.end(self._running.action)
        self._activity.end()


# --- Split backward: an I defers the weight gradients of linear layers, and W computes them.
# torch's own I and W traverse the autograd graph twice. They are wrong or slow in several cases:
# outputs that are views, parameters used twice, inputs without requires_grad, checkpointing. Here I
# is one ordinary backward in which every `SplitLinear` keeps its input and output gradient, and W
# computes the weight gradient from them. So do experts with grouped products, and modules that
# delay their weight gradients themselves. All other modules do their full work in I: slower, but
# correct.


class _Deferred(NamedTuple):
    """The deferred gradients of a linear layer; tensors of shape (..., in) and (..., out).

    Each product conjugates the factor that is not a gradient: torch defines gradients of complex
    numbers so. `conj` returns a real tensor unchanged.
    """

    weight: Tensor
    bias: Tensor | None
    layer_input: Tensor
    output_gradient: Tensor

    def weight_gradient(self) -> Tensor:
        """Return the gradient of the weight."""
        gradient = self.output_gradient.reshape(-1, self.weight.shape[0])
        return gradient.t() @ self.layer_input.reshape(-1, self.weight.shape[1]).conj()

    def bias_gradient(self) -> Tensor:
        """Return the gradient of the bias."""
        return self.output_gradient.reshape(-1, self.weight.shape[0]).sum(0)

    def make(self) -> None:
        """Compute the gradients and add them to ``.grad``."""
        with torch.no_grad():
            _add_gradient(self.weight, self.weight_gradient())
            if self.bias is not None:
                _add_gradient(self.bias, self.bias_gradient())


_AUTOGRAD = frozenset({"torch.autograd", "torch._tensor", "torch.overrides"})
"""Python modules of the functions that run a backward."""

_REENTRANT_CHECKPOINTS = frozenset(
    {
        "torch.utils.checkpoint",
        "megatron.core.tensor_parallel.random",
        "transformer_engine.pytorch.distributed",
    }
)
"""Python modules that run a backward inside a backward, and do not read a ``.grad``."""


class WeightGradients:
    """The weight gradients deferred by the current backward.

    A rank runs one backward at a time, so the layers need not know their micro-batch. On CUDA
    autograd calls from its own threads while the caller waits.
    """

    def __init__(self) -> None:
        self.collecting = False
        """Whether the current backward is an I, which defers weight gradients."""
        self._deferred: list[tuple[Callable[[], None], Sequence[Tensor], tuple[int, ...]]] = []
        self.num_runners = 0
        """Number of runners of the stages whose layers defer gradients here."""
        self.delaying: list[Any] = []
        """Modules that delay gradients in their own stores, in an I and in a B."""
        self._runs_stage = False

    def run_backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None] | None
    ) -> None:
        """Run a stage's backward; a backward nested in it computes its own weight gradients."""
        self._runs_stage = True
        try:
            torch.autograd.backward(roots, gradients)
        finally:
            self._runs_stage = False

    @property
    def defers(self) -> bool:
        """Whether the backward in this thread defers its weight gradients."""
        return self.collecting and not self.is_nested()

    def is_nested(self) -> bool:
        """Whether this thread runs a backward nested in the stage's backward.

        The code that started it may read ``.grad`` afterwards; a reentrant checkpoint does not. The
        Python stack shows the callers of autograd, with torch function modes possibly in between.
        """
        if not self._runs_stage:
            return False
        frame, module, callers, seeks_caller = inspect.currentframe(), "", list[str](), False
        while frame is not None and frame.f_code is not WeightGradients.run_backward.__code__:
            inner, module = module, frame.f_globals.get("__name__", "")
            if module == "torch.autograd" and inner != "torch.overrides":
                callers.append(module)
                seeks_caller = True
            elif seeks_caller and not (
                module in _AUTOGRAD or frame.f_code.co_name == "__torch_function__"
            ):
                callers[-1] = module
                seeks_caller = False
            frame = frame.f_back
        if frame is not None and callers:
            # This is the stage's own backward. On CUDA another thread called it.
            callers.pop()
        return not _REENTRANT_CHECKPOINTS.issuperset(callers)

    def may_defer(self, accumulators: Iterable[Any]) -> bool:
        """Return whether W computes the gradients of some parameters, given their autograd nodes.

        W computes only gradients that the stage's backward would add to ``.grad``. A custom
        function or a hook may run `torch.autograd.grad` inside an I: autograd returns those.
        """
        return self.defers and all(map(adds_to_grad, accumulators))

    def put_aside(self, make: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        """Call ``make`` in W; the tensors that it needs must not change until then."""
        self._deferred.append((make, tensors, versions_of(tensors)))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Defer weight gradients until the end of the context."""
        self.collecting = True
        try:
            yield
        finally:
            self.collecting = False
            self.reset()

    def reset(self) -> None:
        """Drop the deferred gradients, such as those of a failed backward."""
        self._empty_stores()
        self._deferred.clear()

    def _empty_stores(self) -> None:
        for module in self.delaying:
            queue = module.wgrad_store.context
            if items := [queue.get() for _ in range(queue.qsize())]:
                leaves = tree_leaves([item[0] for item in items])
                tensors = [one for one in leaves if isinstance(one, Tensor)]
                self.put_aside(partial(_make_delayed, module, items), tensors)

    def pending_bytes(self) -> int:
        """Return the bytes kept for deferred gradients, each storage counted once."""
        self._empty_stores()
        storages = {
            storage_identity(part.untyped_storage()): part.untyped_storage().nbytes()
            for _, tensors, _ in self._deferred
            for tensor in tensors
            for part in parts_with_memory(tensor)
        }
        return sum(storages.values())

    def take(self) -> Callable[[], None]:
        """Return the function that computes all deferred gradients, like torch's dw_builder.

        A full backward needs it too: modules with their own stores delay gradients there as well.
        """
        self._empty_stores()
        taken, self._deferred = self._deferred, []

        def run() -> None:
            while taken:
                make, tensors, versions = taken.pop(0)
                if versions_of(tensors) != versions:
                    raise RuntimeError(
                        "the input or the output's gradient of a linear layer was changed in place "
                        "between its I and its W, which needs the original values (a backward or a "
                        "hook may have written into the gradient it received); change a copy, or "
                        "solve a problem in which no backward is split"
                    )
                del tensors  # `make` may free some of them early
                make()

        return run


def cannot_return_gradients(what: str, fix: str) -> PreflightError:
    """Return the error for a backward that requests gradients which can only go to ``.grad``."""
    return PreflightError(
        f"torch.autograd.grad, or backward(inputs=...), runs through {what}, whose weight gradient "
        f"can only be added to .grad; {fix}, or call backward() without inputs"
    )


def split_linears(module: nn.Module, gradients: WeightGradients) -> int:
    """Make every plain ``nn.Linear`` of a module a `SplitLinear`, in place; return the count.

    Only the class changes: parameters, names, hooks and ``state_dict`` stay. Subclasses,
    parametrised layers and layers with their own ``forward`` are skipped. Experts with grouped
    products become `SplitExperts`. Modules that delay their weight gradients stay as they are.
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
    """Undo `split_linears`, in place; a pending backward of the present graph stays correct."""
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
    """Return the bytes of weight gradient, in this rank's shards, that W computes of a split stage.

    0 = the stage cannot be split: I would be the whole backward. `measure` and the runner use this.
    """
    compiled = compiled_parts(module)
    sharded = sharded_in_forward(module)
    deferred = {
        parameter
        for layer in _linears(module)
        if _runs_class_forward(layer)
        and _defers(layer)
        and not (layer in compiled and layer.weight in sharded)
        for parameter in layer.parameters()
        if parameter.requires_grad
    }
    gathered = types_when_gathered(module)
    for part in module.modules():
        if part not in compiled:
            deferred |= set(_grouped_weights(part, gathered))
        if _delays(part):
            deferred |= set(_delayed_parameters(part))
        # Layers of frameworks that optpipe.runtime.trainers has split.
        deferred |= set(getattr(part, "split_parameters", ()))
    return sum(shard.nbytes for one in deferred for shard in parts_with_memory(one))


def _linears(module: nn.Module) -> list[nn.Linear]:
    found = [
        layer
        for layer in module.modules()
        if isinstance(layer, SplitLinear)
        or (_split_class_of(type(layer)) is not None and _runs_class_forward(layer))
    ]
    return cast("list[nn.Linear]", found)


_CLASS_FORWARD = "optpipe_class_forward"
"""Attribute that a layer's own ``forward`` has if it calls the ``forward`` of the layer's class."""


@contextmanager
def class_forwards(layers: Iterable[nn.Linear]) -> Iterator[None]:
    """Make a framework that replaces the forwards of layers wrap those of the layers' classes.

    `split_linears` can then split these layers, because it changes their classes. Layers that
    already have a forward of their own stay as they are.
    """
    plain = [layer for layer in layers if "forward" not in vars(layer)]
    late = {layer: partial(_run_class_forward, layer) for layer in plain}
    for layer, forward in late.items():
        layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in late.items():
            now = vars(layer).get("forward")
            if now is forward:
                del layer.forward
            elif now is not None:
                with suppress(AttributeError):  # a bound method: the layer is not split
                    setattr(now, _CLASS_FORWARD, True)


def _run_class_forward(layer: nn.Linear, *args: Any, **named: Any) -> Any:
    """Run the ``forward`` of the class that a layer has by then."""
    return type(layer).forward(layer, *args, **named)


def _runs_class_forward(layer: nn.Module) -> bool:
    own = vars(layer).get("forward")
    return own is None or hasattr(own, _CLASS_FORWARD)


def _split_class_of(kind: type[nn.Module]) -> type[SplitLinear] | None:
    """Return the split class of a layer class that is plain, or was before `fully_shard`."""
    kind = cast("type[nn.Linear]", kind)
    if FSDPModule in kind.__bases__ and kind.__mro__[2] in _split_class:
        treat_as_plain(kind)
    return _split_class.get(kind)


def treat_as_plain(kind: type[nn.Linear]) -> None:
    """Let `split_linears` split a framework's subclass that keeps ``nn.Linear``'s forward."""
    if kind.forward is not nn.Linear.forward:
        raise PreflightError(
            f"{kind.__name__} has its own forward, which may do more than a product; only "
            "subclasses that keep nn.Linear's forward can be split"
        )
    if kind not in _split_class:
        _split_class[kind] = type(f"Split{kind.__name__}", (SplitLinear, kind), {})


class SplitLinear(nn.Linear):
    """A linear layer that can defer its weight gradient."""

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
"""Layer class -> its split class."""


def _defers(layer: nn.Linear) -> bool:
    """Whether W may compute the gradients of a layer."""
    bias: Tensor | None = layer.bias
    return _can_defer(layer.weight) and (bias is None or not bias.requires_grad or _can_defer(bias))


def _can_defer(parameter: Tensor) -> bool:
    """Whether W may add to ``parameter.grad``: it is a leaf of a known type without hooks."""
    return (
        type(parameter) in (nn.Parameter, DTensor)
        and parameter.requires_grad
        and not has_gradient_hooks(parameter)
        and not has_accumulator_hooks(parameter)
        # Megatron-Core's data parallelism reads gradients in hooks that cannot be detected.
        and not hasattr(parameter, "main_grad")
    )


class _LinearFunction(torch.autograd.Function):
    """``functional.linear`` whose backward lets `WeightGradients` defer the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, layer_input: Tensor, weight: Tensor, bias: Tensor | None, sink: WeightGradients
    ) -> Tensor:
        output = functional.linear(layer_input, weight, bias)
        # For three-dimensional inputs `linear` returns a view. Autograd refuses operations in place
        # on a view that a custom function returns.
        if viewed(output) is not output:
            output = alias_no_view(output)
        # Under autocast the product was computed in the output's type.
        ctx.save_for_backward(layer_input.to(output.dtype), weight)
        # W adds to the .grad of the parameters themselves. A leaf causes no reference cycle.
        ctx.weight, ctx.bias, ctx.sink = weight, bias, sink
        ctx.input_dtype = layer_input.dtype
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer_input, weight = ctx.saved_tensors
        input_gradient = _input_gradient(ctx, weight, output_gradient)
        bias = ctx.bias if ctx.needs_input_grad[2] else None
        if not torch.is_grad_enabled():
            # Detached: its autograd graph would keep the stage's input until W.
            deferred = _Deferred(ctx.weight, bias, layer_input.detach(), output_gradient)
            # The nodes of weight and bias; the sink has none.
            accumulators = [node for node, _ in ctx.next_functions[1:] if node is not None]
            if ctx.sink.may_defer(accumulators):
                ctx.sink.put_aside(deferred.make, (deferred.layer_input, output_gradient))
                return input_gradient, None, None, None
        else:
            # With create_graph=True, the gradients are differentiated again.
            if layer_input.dtype != ctx.input_dtype:
                raise PreflightError(
                    "create_graph=True differentiates a linear layer under autocast, which cast "
                    f"its input from {ctx.input_dtype} to {layer_input.dtype}; a split stage "
                    "cannot differentiate that cast twice: run this layer with "
                    "autocast(enabled=False)"
                )
            deferred = _Deferred(ctx.weight, bias, layer_input, output_gradient)
        weight_gradient = deferred.weight_gradient() if ctx.needs_input_grad[1] else None
        bias_gradient = None if bias is None else deferred.bias_gradient()
        return input_gradient, weight_gradient, bias_gradient, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Tensor:
        del ctx
        raise PreflightError(
            "torch.autograd.forward_ad runs through a linear layer of a split stage, which has no "
            "forward-mode derivative there; use torch.func.jvp"
        )


def _input_gradient(ctx: Any, weight: Tensor, output_gradient: Tensor) -> Tensor | None:
    if not ctx.needs_input_grad[0]:
        return None
    product = output_gradient @ weight.to(output_gradient.dtype).conj()
    return product.to(ctx.input_dtype)


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    # FSDP2 may want gradients in its reduction's type (since torch 2.15).
    gradient = gradient.to(parameter.grad_dtype or parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


# --- Experts whose products are grouped: one call for all experts, weights of (experts, ., .).


class SplitExperts(nn.Module):
    """A module of experts that can defer the gradients of its stacked weights."""

    gradients: WeightGradients

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the experts as the original class does."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with _GroupedProducts(_grouped_weights(self), self.gradients):
            return super().forward(*args, **kwargs)


def _grouped_weights(
    module: nn.Module, gathered: Mapping[Tensor, torch.dtype] = MappingProxyType({})
) -> list[nn.Parameter]:
    """Return the weights of a module of experts that enter grouped products unchanged.

    These are the weights of transformers' experts with ``experts_implementation="grouped_mm"``, and
    of torchtitan's experts in bf16. torchtitan casts other types, and their gradients pass through
    the cast. ``gathered`` maps the sharded weights that FSDP2 gathers for the forward to their
    type.
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
"""Dimensions of a stacked weight: the experts, and the two of each expert's matrix."""


class _GroupedProducts(TorchFunctionMode):
    """Lets `WeightGradients` defer the gradients of some weights' grouped products."""

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

    ``factor`` is the weight or its transpose. No expert takes the rows after the last end.
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
            ctx.sink.put_aside(deferred.make, (deferred.layer_input, rows))
            return input_gradient, None, None, None, None
        weight_gradient = deferred.gradient()
        weight_gradient = weight_gradient.transpose(-2, -1) if is_transposed else weight_gradient
        return input_gradient, weight_gradient, None, None, None


class _GroupedDeferred(NamedTuple):
    """The deferred gradient of a stacked weight of experts."""

    weight: nn.Parameter
    is_transposed: bool
    layer_input: Tensor
    output_gradient: Tensor
    ends: Tensor

    def gradient(self) -> Tensor:
        """Return the gradient in the weight's layout."""
        left, right = self.layer_input, self.output_gradient
        if self.is_transposed:
            left, right = right, left
        return functional.grouped_mm(left.t(), right, offs=self.ends)

    def make(self) -> None:
        """Compute the gradient and add it to ``.grad``."""
        with torch.no_grad():
            _add_gradient(self.weight, self.gradient())


# --- Modules that delay their weight gradients themselves, such as Transformer Engine's with
# ``delay_wgrad_compute=True`` (2.3 and later). Every backward, an I or a B, appends a product's
# tensors to the module's queue, ``wgrad_store.context``. Each ``backward_dw()`` computes the
# gradient of the oldest entry. The queue does not know micro-batches, so we empty it after every
# backward and refill it for the W: W's may come in any order. ``backward_dw()`` overwrites
# ``weight.grad``, and sets ``bias.grad`` only if it is None. So we save earlier gradients and add
# them afterwards.


def _delays(module: Any) -> bool:
    store = getattr(module, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def _delaying(module: nn.Module) -> list[Any]:
    return [one for one in module.modules() if _delays(one)]


def _delayed_parameters(module: Any) -> list[nn.Parameter]:
    """Return the parameters whose gradients W computes: the marked ones, or else all matrices.

    Older versions of Transformer Engine mark none.
    """
    own = [one for one in module.parameters(recurse=False) if one.requires_grad]
    marked = [one for one in own if getattr(one, "skip_backward_post_hook", False)]
    return [one for one in marked or own if one.dim() > 1 or (marked and not _is_fp8(module))]


def _is_fp8(module: Any) -> bool:
    """Whether the last forward was in FP8: its backward computes the gradients of biases."""
    return bool(getattr(module, "fp8", False))


def check_delaying(stages: Mapping[int, nn.Module]) -> None:
    """Refuse modules that delay weight gradients in a way that the runtime cannot complete."""
    for index, stage in sorted(stages.items()):
        for name, part in stage.named_modules():
            if why := _not_delayed_because(part):
                raise PreflightError(
                    f"{name or 'the module'} of stage {index}, a {type(part).__name__}, delays its "
                    f"weight gradients until backward_dw() is called, but {why}"
                )


def _not_delayed_because(part: Any) -> str:
    """Return why the runtime cannot complete a module's delayed gradients, and the fix; or ""."""
    own = [one for one in part.parameters(recurse=False) if one.requires_grad]
    if "backward_dw" in part.__dict__:
        return (
            "it runs as a CUDA graph, which appends nothing to a queue; capture it without "
            "delay_wgrad_compute"
        )
    if not _delays(part):
        needs = getattr(part, "need_backward_dw", None)
        if needs is None or not needs():
            return ""
        return "it has no wgrad_store, whose queue separates micro-batches; turn the delay off"
    queue = getattr(part.wgrad_store, "context", None)
    if not all(hasattr(queue, method) for method in ("get", "put", "qsize")):
        return (
            f"its wgrad_store.context is a {type(queue).__name__} instead of a queue; turn "
            "delay_wgrad_compute off"
        )
    if any(type(one) is not nn.Parameter for one in own):
        return (
            "its parameters are sharded (DTensors), and backward_dw() would write whole gradients; "
            "create it without delay_wgrad_compute"
        )
    delayed = _delayed_parameters(part)
    if any(map(has_gradient_hooks, own)) or any(map(has_accumulator_hooks, delayed)):
        return "a parameter has a gradient hook, which backward_dw() skips; turn the delay off"
    reductions = getattr(part, "wgrad_accumulation_and_reduce_hooks", ())
    if any(hasattr(one, "main_grad") for one in own) and not reductions:
        return (
            "its gradients are added to main_grad by hooks that backward_dw() does not call; set "
            "delay_wgrad_compute in Megatron's DistributedDataParallelConfig too"
        )
    return ""


def _check_nested_backwards(module: Any, _given: Any, output: Any) -> None:
    """Refuse a backward nested in a stage's backward, through a module that delays its gradients.

    The module queues the gradient in any case, and W would add it to ``.grad``.
    """
    tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
    computed = [one for one in tensors if one.grad_fn is not None]
    if not computed:
        return
    accumulators = [accumulator_of(parameter) for parameter in _delayed_parameters(module)]

    def check(_gradient: Tensor) -> None:
        if module.gradients.is_nested() or not all(map(adds_to_grad, accumulators)):
            raise PreflightError(
                "a hook or a custom function runs a backward inside a stage's backward, through a "
                f"{type(module).__name__} that delays its weight gradients. They would be added to "
                ".grad too late; create the module without delay_wgrad_compute"
            )

    computed[0].register_hook(check)  # type: ignore[no-untyped-call]


def _make_delayed(module: Any, items: list[Any]) -> None:
    """Let a module compute the gradients of queue entries, and add them to ``.grad``."""
    queue = module.wgrad_store.context
    own = [
        one
        for one in module.parameters(recurse=False)
        if one.requires_grad and (one.dim() > 1 or not _is_fp8(module))
    ]
    for item in items:
        queue.put(item)
    items.clear()
    while left := queue.qsize():
        before = [one.grad for one in own]
        for one in own:
            one.grad = None
        with torch.no_grad():
            module.backward_dw()
            gradients = [one.grad for one in own]
            if all(gradient is None for gradient in gradients) and not any(
                hasattr(one, "main_grad") for one in own
            ):
                raise PreflightError(
                    f"backward_dw() of a {type(module).__name__} made no gradient of its "
                    "parameters, perhaps because a weight is split; turn delay_wgrad_compute "
                    "off"
                )
            for one, gradient, old in zip(own, gradients, before, strict=True):
                one.grad = old
                if gradient is not None:
                    _add_gradient(one, gradient)
        if queue.qsize() >= left:
            raise PreflightError(
                f"backward_dw() of a {type(module).__name__} left all {left} products in its "
                "wgrad_store; turn delay_wgrad_compute off"
            )


# --- Linear layers under torch.compile. The compiler traces one backward for I and B, and fixes the
# gradients that it returns. So the traced backward returns none for weights. It calls an operator
# with an effect, which the compiler neither removes nor traces. At run time this operator defers
# them in an I, and adds them to ``.grad`` in a B. It refuses a `torch.autograd.grad` for them.
# Autograd still sees the parameters, without a gradient, so DDP's hooks run. The operator copies
# its tensors, because the compiler reuses their memory.

_split_layers: WeakSet[SplitLinear] = WeakSet()
_layer_at: WeakValueDictionary[tuple[tuple[int, int], ...], SplitLinear] = WeakValueDictionary()
"""Addresses of weight and bias at the last lookup -> the layer."""


class _CompiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer_input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # As in `_LinearFunction`, but always: the compiler cannot trace the check for views.
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
            "a gradient hook was registered on a linear layer after the block around it was "
            "compiled, and would not be called; register hooks before the first step"
        )
    trained_bias = layer.bias if bias is not None and layer.bias.requires_grad else None
    parameters = [layer.weight] if trained_bias is None else [layer.weight, trained_bias]
    known = running_accumulators()
    accumulators = [known[parameter] for parameter in parameters]
    if not all(map(adds_to_grad, accumulators)):
        if any(adds_to_grad(one, or_returns=True) for one in accumulators):
            raise cannot_return_gradients(
                "a linear layer in a compiled block", "do not compile this block"
            )
        return
    deferred = _Deferred(layer.weight, trained_bias, layer_input.clone(), output_gradient.clone())
    if layer.gradients.defers:
        layer.gradients.put_aside(deferred.make, deferred[2:])
    else:
        deferred.make()


def _layer_of(weight: Tensor, bias: Tensor | None) -> SplitLinear:
    """Return the layer of these parameters: a compiled graph has only the tensors."""
    places = _places(weight, bias)
    layer = _layer_at.get(places)
    if layer is None or _places(layer.weight, layer.bias) != places:
        layer = next(one for one in _split_layers if _places(one.weight, one.bias) == places)
        _layer_at[places] = layer
    return layer


def _places(weight: Tensor, bias: Tensor | None) -> tuple[tuple[int, int], ...]:
    """Return the storage of each parameter, and where in it the parameter begins."""
    given = (weight,) if bias is None else (weight, bias)
    return tuple(
        (storage_identity(one.untyped_storage()), int(one.storage_offset())) for one in given
    )
