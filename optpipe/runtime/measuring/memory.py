"""What one micro-batch takes of a device at a stage: the bytes of a problem's stage.

A micro-batch runs alone, held and let go of as the runtime does it, and what is live is read: from
the allocator on CUDA, from counted storages on the CPU; what one operation allocates inside itself
is not seen there. A plan adds these numbers up, so two micro-batches at once are counted beside
them, and what their backwards leave.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe.runtime.measuring.times import ForwardResult, forget_gradients
from optpipe.runtime.offload import DEFAULT_MIN_BYTES, Offloader, SavedActivations, weak_storage
from optpipe.runtime.passes import Passes
from optpipe.runtime.torch_names import TorchDispatchMode, parts_with_memory, tree_leaves
from optpipe.runtime.torch_schedule import hollow
from optpipe.runtime.treatments import Treatment
from optpipe.runtime.watch import Activity
from optpipe.schedule import ActionType
from optpipe.units import format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.multiprocessing.reductions import StorageWeakRef

    from optpipe.runtime.measuring.times import StageUnderTest

__all__ = [
    "Footprint",
    "InsideMemory",
    "Split",
    "StageMemory",
    "measure_footprint",
    "measure_inside",
    "measure_memory",
    "meter_for",
]

_TOLERANCE = 0.03
"""By which what is live may differ from what a plan counts, as a share."""


class StageMemory(NamedTuple):
    """Bytes that are live because of one micro-batch; DESIGN section 3 has their meaning.

    Attributes
    ----------
    activation_bytes
        From F to the backward: what autograd saves, the received input, and what else goes with
        the backward, such as the cache of selective checkpointing.
    checkpoint_bytes
        From an F to its RECOMPUTE: the received input, the buffers that the F changes.
    weight_context_bytes
        From I to W.
    workspaces
        Of each pass; boundary tensors that it takes and makes are none.
    without_graph_bytes
        The workspace of an F that will be recomputed.
    """

    activation_bytes: int
    checkpoint_bytes: int
    weight_context_bytes: int
    workspaces: dict[ActionType, int]
    without_graph_bytes: int


def measure_memory(stage: StageUnderTest, saved_bytes: int) -> StageMemory:
    """Count what a stage's passes hold; gradients must exist, they are static.

    ``saved_bytes`` is what autograd's hooks count for one micro-batch.

    Raises
    ------
    InputError
        If less is live than that, or several micro-batches do not hold what a plan adds up for
        them, each within 3 %.
    """
    cell = (stage.index, 0)
    passes = Passes(
        Offloader({stage.index: stage.module}, stage.device, ()),
        stage.gradients,
        {cell: Treatment(apart=True)},
        stage.index if stage.loss is not None else -1,
        stage.device,
        activity=Activity(),
    )
    without_graph = partial(passes.forward, *cell, ())
    with without_graph():
        # The first of its kind looks which buffers change.
        stage.forward(stage.receive())
    passes.reset()
    gradients = [p.grad for p in stage.module.parameters() if p.grad is not None]
    resident = [*_resident(stage, stage.inputs), *gradients]
    with _no_collector(), meter_for(stage.device, resident) as meter:
        levels = _levels(stage, meter, saved_bytes)
        held = levels.held
        again = _Alone(stage, meter)
        with without_graph():
            bare = again.forward() - again.sent_bytes
        checkpoint = meter.live_bytes()
        with passes.recompute(*cell):
            once_more = again.forward()
        again.backward()
    return StageMemory(
        activation_bytes=held,
        checkpoint_bytes=checkpoint,
        weight_context_bytes=levels.context,
        workspaces={
            ActionType.FORWARD: max(0, levels.forward - held),
            ActionType.BACKWARD_INPUT: max(0, levels.split - max(held, levels.context)),
            ActionType.BACKWARD_WEIGHT: max(0, levels.weight - levels.context),
            ActionType.RECOMPUTE: max(0, once_more - held),
            ActionType.FULL_BACKWARD: max(0, levels.fused - held),
        },
        without_graph_bytes=max(0, bare - checkpoint),
    )


class InsideMemory(NamedTuple):
    """Bytes of a micro-batch of which groups run again inside the backward; a mode's fields."""

    forward_bytes: int
    inside_bytes: int
    weight_context_bytes: int
    forward_workspace_bytes: int
    backward_input_workspace_bytes: int
    backward_weight_workspace_bytes: int
    backward_workspace_bytes: int


def measure_inside(
    stage: StageUnderTest, kept: StageMemory, running: Callable[[], AbstractContextManager[None]]
) -> InsideMemory:
    """Count what passes hold whose F's run in such contexts; gradients must exist.

    ``kept`` is what they hold otherwise. inside_bytes are what both I and B need beyond that; what
    one of them needs more is its workspace.

    Raises
    ------
    InputError
        As `measure_memory`.
    """
    gradients = [p.grad for p in stage.module.parameters() if p.grad is not None]
    resident = [*_resident(stage, stage.inputs), *gradients]
    with _no_collector(), meter_for(stage.device, resident) as meter:
        found = _levels(stage, meter, 0, running)
    held = min(found.held, kept.activation_bytes)
    own = (
        found.split - kept.workspaces[ActionType.BACKWARD_INPUT],
        found.fused - kept.workspaces[ActionType.FULL_BACKWARD],
    )
    inside = max(0, min(own) - held)
    return InsideMemory(
        forward_bytes=held,
        inside_bytes=inside,
        weight_context_bytes=found.context,
        forward_workspace_bytes=max(0, found.forward - held),
        backward_input_workspace_bytes=max(0, found.split - max(held + inside, found.context)),
        backward_weight_workspace_bytes=max(0, found.weight - found.context),
        backward_workspace_bytes=max(0, found.fused - held - inside),
    )


class _Levels(NamedTuple):
    """Bytes that are live after F and after I, and the peaks of F, I, W and B."""

    held: int
    context: int
    forward: int
    split: int
    weight: int
    fused: int


def _levels(
    stage: StageUnderTest,
    meter: _Meter,
    saved_bytes: int,
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> _Levels:
    """Run F, I and W, then two micro-batches at once, and see that they add up."""
    alone = _Alone(stage, meter, running)
    forward = alone.forward() - alone.sent_bytes
    held = meter.live_bytes()
    with stage.gradients.collect():
        split = alone.backward()
        make_weight_gradients = stage.gradients.take()
    context = meter.live_bytes()
    weight = meter.watch(make_weight_gradients)[1]
    del make_weight_gradients
    left = meter.live_bytes()
    pair = _Alone(stage, meter, running), _Alone(stage, meter, running)
    for one in pair:
        one.forward()
    held_by_two = meter.live_bytes()
    fused = [one.backward() for one in pair][-1]
    left = max(left, meter.live_bytes())
    _check(stage.index, held, _Beside(saved_bytes, held_by_two, left))
    return _Levels(held, context, forward, split, weight, fused)


class _Alone:
    """One micro-batch at a stage, of which is held what the runtime holds."""

    def __init__(
        self,
        stage: StageUnderTest,
        meter: _Meter,
        running: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._stage = stage
        self._running = running
        self._meter = meter
        self._received = stage.receive()
        self._result = ForwardResult((), ())
        self.sent_bytes = 0

    def forward(self) -> int:
        """Run F and let go of the outputs; return the peak, in bytes."""
        with self._running():
            result, peak = self._meter.watch(partial(self._stage.forward, self._received))
        self.sent_bytes = _bytes(result.outputs)
        # A loss is no output, and stays as it is.
        roots = result.roots if self._stage.loss is not None else hollow(result.roots)
        self._result = ForwardResult((), roots)
        return peak

    def backward(self) -> int:
        """Run I or B and let go of everything; return the peak without boundary tensors."""
        roots, taken = self._result.roots, 0
        gradients = [torch.ones(root.shape, dtype=root.dtype, device=root.device) for root in roots]
        if self._stage.loss is None:
            taken = _bytes(gradients)
        else:
            # As the runtime divides by the number of micro-batches.
            self._result = ForwardResult((), tuple(root / 2 for root in roots))
        run = partial(self._stage.backward, self._result, gradients)
        _, peak = self._meter.watch(run)
        made = _bytes(one.grad for one in self._received if one.grad is not None)
        self._received, self._result = (), ForwardResult((), ())
        return peak - taken - made


class _Beside(NamedTuple):
    """Bytes to hold against what one micro-batch holds after its F."""

    saved: int
    held_by_two: int
    left: int


def _check(stage: int, held: int, beside: _Beside) -> None:
    """Refuse a stage whose bytes do not add up."""
    rule = f"a plan must be right within {format_share(_TOLERANCE)}"
    if beside.saved - held > _TOLERANCE * held:
        raise InputError(
            f"stage {stage}: autograd saves {beside.saved} bytes in an F, but only {held} are live "
            f"after it: {rule}; measure on the device that will train, or without torch.compile"
        )
    if abs(beside.held_by_two - 2 * held) > _TOLERANCE * 2 * held:
        raise InputError(
            f"stage {stage} holds {held} bytes after the F of one micro-batch and "
            f"{beside.held_by_two} after two, but {rule} when it adds them up; let the module keep "
            "no tensor of a forward for the next one"
        )
    if beside.left > _TOLERANCE * held:
        raise InputError(
            f"stage {stage} still holds {beside.left} bytes after a backward, of {held} after its "
            f"F, which count as free: {rule}; let the module keep no tensor of a forward"
        )


@contextmanager
def _no_collector() -> Iterator[None]:
    """Let nothing be freed by the garbage collector, which comes when it likes."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Meter(Protocol):
    """Watches the memory of one device inside a context, in bytes over those at its beginning."""

    def __enter__(self) -> Any:
        """Begin at 0."""

    def __exit__(self, kind: object, error: object, trace: object, /) -> Any:
        """End."""

    def live_bytes(self) -> int:
        """Return what is live."""

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """Return what a function returns, and the peak while it runs."""


def meter_for(device: torch.device, resident: Iterable[Tensor]) -> _Meter:
    """Return the meter of a device; ``resident`` are tensors there before what is watched."""
    return _CudaMeter(device) if device.type == "cuda" else _StorageMeter(resident)


class _CudaMeter:
    """Asks the caching allocator, whose numbers follow the host's calls and not the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def __enter__(self) -> Self:
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        """End."""

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int]:
        torch.cuda.reset_peak_memory_stats(self._device)
        result = run()
        return result, torch.cuda.max_memory_allocated(self._device) - self._before


class _StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations return, as long as anybody holds them."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parts = (part for tensor in resident for part in parts_with_memory(tensor))
        self._resident = {weak_storage(part) for part in parts}
        self._sizes: dict[StorageWeakRef, int] = {}
        self._at_most = 0
        self._peak = 0

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int]:
        self._peak = self.live_bytes()
        result = run()
        return result, self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        # Looking for the dead is slow, and needed only where there may be a new peak.
        if self._at_most > self._peak:
            self._peak = max(self._peak, self.live_bytes())
        return result

    def _see(self, tensor: Tensor) -> None:
        for part in parts_with_memory(tensor):
            self._see_part(part)

    def _see_part(self, tensor: Tensor) -> None:
        known, size = weak_storage(tensor), tensor.untyped_storage().nbytes()
        if known not in self._resident and known not in self._sizes:
            self._sizes[known] = size
            self._at_most += size

    def live_bytes(self) -> int:
        live = (ref for ref in self._sizes if not ref.expired())  # type: ignore[no-untyped-call]
        self._sizes = {ref: self._sizes[ref] for ref in live}
        self._at_most = sum(self._sizes.values())
        return self._at_most


# --- What a stage holds for one micro-batch, counted where the offloader counts: by storage.
# `optpipe.runtime.offload` is asked, with the rules it has for OFFLOAD: parameters, buffers and
# boundary tensors are no activations, a storage seen by several tensors counts once, and what a
# custom autograd function keeps outside ``save_for_backward`` is not seen.


class Split(NamedTuple):
    """Parameter elements whose gradients W makes, and those that get one at all."""

    deferred: int
    total: int


class Footprint(NamedTuple):
    """Bytes of one stage.

    Attributes
    ----------
    held_bytes
        Of the storages that autograd saves, and of the received input.
    offload_sizes
        Of those an OFFLOAD moves: no outputs, and none too small to be worth a copy.
    received_bytes, output_bytes
        Boundary tensors; the batch (of the first stage) and what only the loss sees count 0.
    batch_bytes
        One micro-batch's part of the batch (first stage) and of the target (last stage): it is
        there for the whole step.
    parameter_bytes, buffer_bytes
        Of the module.
    """

    held_bytes: int
    offload_sizes: tuple[int, ...]
    received_bytes: int
    output_bytes: int
    batch_bytes: int
    parameter_bytes: int
    buffer_bytes: int
    split: Split

    @property
    def offload_bytes(self) -> int:
        """What one OFFLOAD moves."""
        return sum(self.offload_sizes)


def measure_footprint(
    stage: StageUnderTest, min_offload_bytes: int = DEFAULT_MIN_BYTES
) -> Footprint:
    """Run F, I and W once and count; gradients are dropped before."""
    forget_gradients(stage.module)
    received = stage.receive()
    saved = SavedActivations(
        f"stage {stage.index}", _resident(stage, received), stage.device, min_bytes=1
    )
    with saved.capture():
        result = stage.forward(received)
    held_bytes = sum(storage.num_bytes for storage in saved.storages())
    received_bytes = 0 if stage.is_first else _bytes(received)
    saved.keep(result.outputs)
    movable = tuple(storage.num_bytes for storage in saved.storages())
    return Footprint(
        held_bytes=held_bytes + received_bytes,
        offload_sizes=tuple(size for size in movable if size >= min_offload_bytes),
        received_bytes=received_bytes,
        output_bytes=_bytes(result.outputs),
        batch_bytes=_bytes((stage.inputs if stage.is_first else ()) + _target(stage)),
        parameter_bytes=_bytes(stage.module.parameters()),
        buffer_bytes=_bytes(stage.module.buffers()),
        split=_split_of(stage, result),
    )


def _resident(stage: StageUnderTest, received: Sequence[Tensor]) -> list[Tensor]:
    return [*stage.module.parameters(), *stage.module.buffers(), *received, *_target(stage)]


def _target(stage: StageUnderTest) -> tuple[Tensor, ...]:
    return () if stage.target is None else (stage.target,)


def _split_of(stage: StageUnderTest, result: ForwardResult) -> Split:
    """Return which gradients an I and a W make."""
    with stage.gradients.collect():
        stage.backward(result)
        make_weight_gradients = stage.gradients.take()
    early = {id(p) for p in stage.module.parameters() if p.grad is not None}
    make_weight_gradients()
    made = [p for p in stage.module.parameters() if p.grad is not None]
    deferred = sum(p.numel() for p in made if id(p) not in early)
    return Split(deferred, sum(p.numel() for p in made))


def _bytes(tensors: Iterable[Tensor]) -> int:
    parts = (part for tensor in tensors for part in parts_with_memory(tensor))
    return sum(part.numel() * part.element_size() for part in parts)
