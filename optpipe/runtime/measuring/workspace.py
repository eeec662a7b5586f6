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
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.action import ActionType
from optpipe.runtime.torch_private import TorchDispatchMode, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optpipe.runtime.measuring.under_test import ForwardResult, StageUnderTest

__all__ = ["Memory", "Meter", "Use", "measure_memory", "meter_for"]


class Use(NamedTuple):
    """Bytes on the device before, at the peak of, and after a pass."""

    before: int
    peak: int
    after: int

    @property
    def workspace_bytes(self) -> int:
        """What is held only while the pass runs."""
        return self.peak - max(self.before, self.after)


class Memory(NamedTuple):
    """What a stage's passes use; what the stage holds anyway is not counted.

    Attributes
    ----------
    uses
        By pass, run one after another.
    without_graph
        Of an F that will be recomputed, and keeps nothing but what it sends.
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


def measure_memory(stage: StageUnderTest) -> Memory:
    """Run every pass with its memory watched.

    Gradients must exist: they are static, and the first backward would make them.
    """
    received = stage.receive()
    resident = [*stage.module.parameters(), *stage.module.buffers(), *received]
    resident += [p.grad for p in stage.module.parameters() if p.grad is not None]
    resident += [] if stage.target is None else [stage.target]
    meter = meter_for(stage.device, resident)
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
    return Memory(found, without_graph)


def _ones(result: ForwardResult) -> list[Tensor]:
    return [torch.ones_like(root) for root in result.roots]


class Meter(Protocol):
    """Watches the memory of one device, in bytes."""

    def watch(self, run: Callable[[], Any]) -> tuple[Any, Use]:
        """Return what a function returns, and what memory it used."""


def meter_for(device: torch.device, resident: Iterable[Tensor]) -> Meter:
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
        self._resident = {_weak(tensor) for tensor in resident}
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
        known, size = _weak(tensor), tensor.untyped_storage().nbytes()
        if known not in self._resident and known not in self._sizes:
            self._sizes[known] = size
            self._at_most += size

    def _live_bytes(self) -> int:
        self._sizes = {ref: size for ref, size in self._sizes.items() if not _is_gone(ref)}
        self._at_most = sum(self._sizes.values())
        return self._at_most


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_gone(ref: StorageWeakRef) -> bool:
    return bool(ref.expired())  # type: ignore[no-untyped-call]
