"""What passes hold only while they run: the workspace bytes of a problem's stage.

A pass peaks at max(before, after) + workspace (DESIGN section 3). On CUDA the allocator knows all
three. On the CPU, storages are counted as operations return them; what one operation allocates
inside itself is not seen there.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from optpipe.runtime.measuring.times import forget_gradients
from optpipe.runtime.offload import DEFAULT_MIN_BYTES, SavedActivations, weak_storage
from optpipe.runtime.torch_names import TorchDispatchMode, tree_leaves
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.multiprocessing.reductions import StorageWeakRef

    from optpipe.runtime.measuring.times import ForwardResult, StageUnderTest

__all__ = [
    "Footprint",
    "Split",
    "StageMemory",
    "Use",
    "measure_footprint",
    "measure_memory",
    "meter_for",
]


class Use(NamedTuple):
    """Bytes on the device before, at the peak of, and after a pass."""

    before: int
    peak: int
    after: int

    @property
    def workspace_bytes(self) -> int:
        """What is held only while the pass runs."""
        return self.peak - max(self.before, self.after)


class StageMemory(NamedTuple):
    """What a stage's passes use; what the stage holds anyway is not counted.

    ``without_graph`` is of an F that will be recomputed, and keeps nothing but what it sends.
    """

    uses: dict[ActionType, Use]
    without_graph: Use

    def workspace_bytes(self, kind: ActionType) -> int:
        """Return what a problem's stage has for a pass.

        A problem has one number for an F that keeps its activations and one that will be
        recomputed. What the latter makes on its way is all on top of its checkpoint, so the number
        is the larger of the two, and a plan that fits stays one that fits.
        """
        own = self.uses[kind].workspace_bytes
        if kind is not ActionType.FORWARD:
            return own
        return max(own, self.without_graph.peak - self.without_graph.before)


def measure_memory(stage: StageUnderTest) -> StageMemory:
    """Run every pass with its memory watched.

    Gradients must exist: they are static, and the first backward would make them.
    """
    received = stage.receive()
    gradients = [p.grad for p in stage.module.parameters() if p.grad is not None]
    meter = meter_for(stage.device, [*_resident(stage, received), *gradients])
    found: dict[ActionType, Use] = {}

    def watched(kind: ActionType, run: Callable[[], Any]) -> Any:
        result, found[kind] = meter.watch(run)
        return result

    forward = partial(stage.forward, received)
    result = watched(ActionType.FORWARD, forward)
    with stage.gradients.collect():
        watched(ActionType.BACKWARD_INPUT, partial(stage.backward, result, _ones(result)))
        make_weight_gradients = stage.gradients.take()
    del result
    watched(ActionType.BACKWARD_WEIGHT, make_weight_gradients)
    result = watched(ActionType.RECOMPUTE, forward)
    watched(ActionType.FULL_BACKWARD, partial(stage.backward, result, _ones(result)))
    del result
    with torch.no_grad():
        _, without_graph = meter.watch(forward)
    return StageMemory(found, without_graph)


def _ones(result: ForwardResult) -> list[Tensor]:
    return [torch.ones_like(root) for root in result.roots]


class _Meter(Protocol):
    """Watches the memory of one device, in bytes."""

    def watch(self, run: Callable[[], Any]) -> tuple[Any, Use]:
        """Return what a function returns, and what memory it used."""


def meter_for(device: torch.device, resident: Iterable[Tensor]) -> _Meter:
    """Return the meter of a device; ``resident`` are tensors there before what is watched."""
    return _CudaMeter(device) if device.type == "cuda" else _StorageMeter(resident)


class _CudaMeter:
    """Asks the caching allocator, whose numbers follow the host's calls and not the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def watch(self, run: Callable[[], Any]) -> tuple[Any, Use]:
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = run()
        peak = torch.cuda.max_memory_allocated(self._device)
        return result, Use(before, peak, torch.cuda.memory_allocated(self._device))


class _StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations return, as long as anybody holds them."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._resident = {weak_storage(tensor) for tensor in resident}
        self._sizes: dict[StorageWeakRef, int] = {}
        self._at_most = 0
        self._peak = 0

    def watch(self, run: Callable[[], Any]) -> tuple[Any, Use]:
        before = self._peak = self._live_bytes()
        with self:
            result = run()
        return result, Use(before, self._peak, self._live_bytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        # Looking for the dead is slow, and needed only where there may be a new peak.
        if self._at_most > self._peak:
            self._peak = max(self._peak, self._live_bytes())
        return result

    def _see(self, tensor: Tensor) -> None:
        known, size = weak_storage(tensor), tensor.untyped_storage().nbytes()
        if known not in self._resident and known not in self._sizes:
            self._sizes[known] = size
            self._at_most += size

    def _live_bytes(self) -> int:
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

    @property
    def is_possible(self) -> bool:
        """Whether W has any work."""
        return self.deferred > 0


class Footprint(NamedTuple):
    """Bytes of one stage.

    Attributes
    ----------
    saved_sizes
        Of every storage that autograd saves, the received input aside.
    offload_sizes
        Of those an OFFLOAD moves: no outputs, and none too small to be worth a copy.
    received_bytes, output_bytes
        Boundary tensors; the batch (of the first stage) and what only the loss sees count 0.
    batch_bytes
        One micro-batch's part of the batch (first stage) and of the target (last stage): it is
        there for the whole step.
    weight_context_bytes
        Held between I and W.
    parameter_bytes, buffer_bytes
        Of the module.
    """

    saved_sizes: tuple[int, ...]
    offload_sizes: tuple[int, ...]
    received_bytes: int
    output_bytes: int
    batch_bytes: int
    weight_context_bytes: int
    parameter_bytes: int
    buffer_bytes: int
    split: Split

    @property
    def offload_bytes(self) -> int:
        """What one OFFLOAD moves."""
        return sum(self.offload_sizes)

    @property
    def activation_bytes(self) -> int:
        """Everything held from F to the backward: what is saved, and the received input.

        An output that is not saved is free once it has been sent; in flight it is a boundary
        buffer, which a device's reserved bytes are for.
        """
        return sum(self.saved_sizes) + self.received_bytes


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
    sizes = tuple(storage.num_bytes for storage in saved.storages())
    saved.keep(result.outputs)
    movable = tuple(storage.num_bytes for storage in saved.storages())
    context_bytes, split = _split_backward(stage, result)
    return Footprint(
        saved_sizes=sizes,
        offload_sizes=tuple(size for size in movable if size >= min_offload_bytes),
        received_bytes=0 if stage.is_first else _bytes(received),
        output_bytes=_bytes(result.outputs),
        batch_bytes=_bytes((stage.inputs if stage.is_first else ()) + _target(stage)),
        weight_context_bytes=context_bytes,
        parameter_bytes=_bytes(stage.module.parameters()),
        buffer_bytes=_bytes(stage.module.buffers()),
        split=split,
    )


def _resident(stage: StageUnderTest, received: Sequence[Tensor]) -> list[Tensor]:
    return [*stage.module.parameters(), *stage.module.buffers(), *received, *_target(stage)]


def _target(stage: StageUnderTest) -> tuple[Tensor, ...]:
    return () if stage.target is None else (stage.target,)


def _split_backward(stage: StageUnderTest, result: ForwardResult) -> tuple[int, Split]:
    """Return the bytes between I and W, and which gradients were made when."""
    with stage.gradients.collect():
        stage.backward(result)
        context_bytes = stage.gradients.held_bytes()
        make_weight_gradients = stage.gradients.take()
    early = {id(p) for p in stage.module.parameters() if p.grad is not None}
    make_weight_gradients()
    made = [p for p in stage.module.parameters() if p.grad is not None]
    deferred = sum(p.numel() for p in made if id(p) not in early)
    return context_bytes, Split(deferred, sum(p.numel() for p in made))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
