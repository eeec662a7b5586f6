"""OFFLOAD, RELEASE and RELOAD: copy activations to the host and back.

See docs/specification.md, "Actions" and "Memory".

The program alone determines the bytes on the device after each action. OFFLOAD frees nothing.
RELEASE makes compute wait for the copy and drops the device storages. RELOAD allocates the storages
again, and the backward frees them one after another.

A RELOAD allocates each storage separately, in the sizes that the RELEASE freed, so that the
allocator reuses those blocks. A slab for all storages would need fewer allocations, but its memory
stays allocated until the last tensor in it is free. Meanwhile I adds the output gradients that W
needs. Measured on a stage of four transformer blocks (51 storages): I peaks at 1.13 times the bytes
before it, whether kept or reloaded. With two slabs, one for I and one for W, it peaks at 1.59
times, and a plan has one number for both cases.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.errors import OffloadError
from optpipe.runtime.torch_names import (
    detached,
    parts_with_memory,
    storage_identity,
    tensors_of,
    untraced,
    version_of,
    viewed,
)
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optpipe.schedule import Program

__all__ = [
    "DEFAULT_MIN_BYTES",
    "EVERYTHING",
    "REST",
    "Copies",
    "CudaCopies",
    "Fence",
    "HostPool",
    "KeptTensor",
    "Offloader",
    "PlainCopies",
    "SavedActivations",
    "count_slots",
    "host_memory_bytes",
    "is_plain",
    "make_copies",
    "weak_storage",
]


DEFAULT_MIN_BYTES: Final = 1024
"""Smaller storages stay on the device: a separate copy costs more than it saves."""

EVERYTHING: Final = frozenset({"*"})
"""All groups of a stage and `REST`."""

REST: Final = "rest"
"""The tensors that a stage saves outside all groups."""

_ALIGNMENT = 512

Cell = tuple[int, int]
"""(stage, micro-batch)."""


class _State(Enum):
    """The place of a cell's activations."""

    CAPTURED = "on the device"
    LEAVING = "on their way to the host"
    RELEASED = "on the host"
    RETURNING = "on their way back"


class _OffloadedCell:
    """The activations of one cell from its F to its backward."""

    def __init__(self, saved: SavedActivations) -> None:
        self.saved = saved
        self.state = _State.CAPTURED
        self.storages: list[_OffloadedStorage] = []
        self.slot: Tensor
        self.on_host: list[Tensor]
        """One part of the slot for each storage."""
        self.fence: Fence


class Offloader:
    """Moves the activations of the cells that a program offloads.

    Parameters and buffers of ``modules`` and storages below ``min_bytes`` stay on the device.
    ``cells`` are the (stage, micro-batch) pairs that the program offloads, each with the groups
    that move; `EVERYTHING` for all if no groups are given. ``num_slots`` is the maximum number of
    cells of a stage on the host at one time, allocated together. ``pool`` is host memory to use
    instead of a new pool.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        device: torch.device,
        cells: Iterable[Cell] | Mapping[Cell, frozenset[str]],
        *,
        min_bytes: int = DEFAULT_MIN_BYTES,
        num_slots: Mapping[int, int] | None = None,
        pool: HostPool | None = None,
    ) -> None:
        self.modules = modules
        # Listed once: traversing the modules in each F would cost more than copying a small cell.
        self._parts = {stage: list(module.modules()) for stage, module in modules.items()}
        self._device = device
        given = cells if isinstance(cells, Mapping) else dict.fromkeys(cells, EVERYTHING)
        self._cells = dict(given)
        self._min_bytes = min_bytes
        self.pool = HostPool(make_copies(device), num_slots) if pool is None else pool
        self.copies: Copies = self.pool.copies
        self._offloaded: dict[Cell, _OffloadedCell] = {}
        self._resident_of: dict[int, tuple[list[int], dict[int, StorageWeakRef]]] = {}
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0

    @contextmanager
    def capture(
        self, cell: Cell, boundary: Sequence[Tensor] = ()
    ) -> Iterator[SavedActivations | None]:
        """Capture what autograd saves for a cell inside the context, in its F or its loss.

        The tensors in ``boundary``, the stage's inputs, stay on the device.
        """
        if cell not in self._cells:
            yield None
            return
        if cell not in self._offloaded:
            self._offloaded[cell] = _OffloadedCell(self._saved(cell, boundary))
        saved = self._offloaded[cell].saved
        with saved.capture():
            yield saved

    def capture_inputs(self, cell: Cell, tensors: Sequence[Tensor]) -> None:
        """Offload tensors that the caller keeps for a RECOMPUTE, such as a stage's inputs.

        RELEASE empties these tensor objects, and RELOAD fills them again.
        """
        saved = self._saved(cell, ())
        saved.capture_inputs(tensors)
        self._offloaded[cell] = _OffloadedCell(saved)

    def keep(self, cell: Cell, tensors: Sequence[Tensor]) -> None:
        """Keep these tensors, the stage's outputs, on the device."""
        if cell in self._offloaded:
            self._offloaded[cell].saved.keep(tensors)

    def storages(self, cell: Cell) -> list[_OffloadedStorage]:
        """Return the storages of a cell that an OFFLOAD moves or has moved."""
        offloaded = self._offloaded[cell]
        return offloaded.storages or offloaded.saved.storages()

    def offload(self, cell: Cell) -> None:
        """Issue the copies to the host; the device memory stays allocated."""
        offloaded = self._expect(cell, _State.CAPTURED, "OFFLOAD")
        offloaded.storages = offloaded.saved.storages()
        sizes = tuple(storage.num_bytes for storage in offloaded.storages)
        offloaded.slot = self.pool.take(cell[0], sum(map(_aligned, sizes)))
        offloaded.on_host = self.pool.parts_of(offloaded.slot, sizes)
        sources = [storage.bytes_on_device() for storage in offloaded.storages]
        pairs = list(zip(sources, offloaded.on_host, strict=True))
        offloaded.fence = self.copies.to_host(pairs)
        offloaded.state = _State.LEAVING
        self.offloaded_bytes += sum(sizes)

    def release(self, cell: Cell) -> None:
        """Make compute wait for the copies to the host, and free the device memory."""
        offloaded = self._expect(cell, _State.LEAVING, "RELEASE")
        offloaded.fence.wait()
        for storage in offloaded.storages:
            storage.on_device = None
        offloaded.saved.empty_inputs()
        offloaded.state = _State.RELEASED

    def reload(self, cell: Cell) -> None:
        """Allocate device memory and issue the copies back."""
        offloaded = self._expect(cell, _State.RELEASED, "RELOAD")
        # Allocated on the compute stream, which will also free this memory.
        targets = [torch.empty_like(one, device=self._device) for one in offloaded.on_host]
        for storage, target in zip(offloaded.storages, targets, strict=True):
            storage.on_device = target.untyped_storage()
        offloaded.saved.refill_inputs()
        pairs = list(zip(offloaded.on_host, targets, strict=True))
        offloaded.fence = self.copies.to_device(pairs)
        offloaded.state = _State.RETURNING
        self.reloaded_bytes += sum(storage.num_bytes for storage in offloaded.storages)

    def before_backward(self, cell: Cell) -> None:
        """Make compute wait for the reload, and drop all references to the cell.

        Then only the autograd graph references the activations, and frees each after its last use.
        """
        if cell not in self._cells:
            return
        offloaded = self._expect(cell, _State.RETURNING, "the backward")
        offloaded.fence.wait()
        self.pool.give_back(cell[0], offloaded.slot)
        del self._offloaded[cell]

    def reset(self) -> None:
        """Drop the cells of an interrupted step."""
        self._offloaded.clear()

    def _saved(self, cell: Cell, boundary: Sequence[Tensor]) -> SavedActivations:
        stage, microbatch = cell
        label = f"stage {stage}, micro-batch {microbatch}"
        saved = SavedActivations(
            label, self._resident(stage), self._device, self._min_bytes, self._cells[cell]
        )
        saved.keep(boundary)
        return saved

    def _resident(self, stage: int) -> Mapping[int, StorageWeakRef]:
        """Return the storages of a stage's current parameters and buffers.

        The weak references of the previous cell are reused if no storage changed: to create them
        again would cost more than this comparison.
        """
        tensors = [one for part in self._parts[stage] for one in tensors_of(part)]
        if not all(type(one) in _OF_ONE_STORAGE for one in tensors):
            return _storages(tensors)
        identities = [storage_identity(one.untyped_storage()) for one in tensors]
        if self._resident_of.get(stage, (None,))[0] != identities:
            # A storage cannot get a known identity: the weak references reserve them.
            self._resident_of[stage] = identities, _storages(tensors)
        return self._resident_of[stage][1]

    def _expect(self, cell: Cell, state: _State, action: str) -> _OffloadedCell:
        offloaded = self._offloaded.get(cell)
        if offloaded is None or offloaded.state is not state:
            found = "not captured" if offloaded is None else offloaded.state.value
            raise OffloadError(
                f"{action} of stage {cell[0]}, micro-batch {cell[1]}: its activations are {found}, "
                f"but must be {state.value}; check the program's OFFLOAD, RELEASE, RELOAD order"
            )
        return offloaded


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# --- Saved tensors of one (stage, micro-batch), in a form that can leave the device.
# During a forward, ``saved_tensors_hooks`` passes us every tensor that autograd saves. We keep its
# storage and its view of that storage, never the tensor itself: a tensor that references the node
# which saved it would be a reference cycle. Tensors that share a storage share one
# `_OffloadedStorage`. With hooks, autograd does not check for changes in place after the save, so
# `KeptTensor` checks the version counter.


class _OffloadedStorage:
    """A storage that autograd saved; ``on_device`` is None while the bytes are on the host."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.on_device: torch.UntypedStorage | None = storage
        self.num_bytes = storage.nbytes()
        self.device = storage.device
        self.moves = False
        """Whether a group whose activations are offloaded saved this storage."""

    def bytes_on_device(self) -> Tensor:
        """Return the storage's bytes as a one-dimensional tensor."""
        if self.on_device is None:
            raise OffloadError("a copy was issued for a storage that is not on the device")
        view = torch.empty(0, dtype=torch.uint8, device=self.device)
        return view.set_(self.on_device, 0, (self.num_bytes,), (1,))


class KeptTensor(NamedTuple):
    """A saved tensor and its version counter at the time of the save."""

    tensor: Tensor
    num_changes: int

    @classmethod
    def of(cls, tensor: Tensor) -> KeptTensor:
        """Keep a tensor without its autograd graph."""
        return cls(detached(tensor), version_of(tensor))

    def check(self, shape: Sequence[int]) -> None:
        """Raise RuntimeError if the tensor, saved with this shape, was changed in place since."""
        if version_of(self.tensor) != self.num_changes:
            raise RuntimeError(
                f"a tensor of shape {tuple(shape)} that a backward needs was changed in place "
                "after autograd had saved it; change a copy"
            )

    def checked(self) -> Tensor:
        """Return the tensor; raise RuntimeError as `check` does."""
        self.check(self.tensor.shape)
        return self.tensor


class _View(NamedTuple):
    """The position of a saved tensor in its storage.

    ``saved`` has no memory. It shares the version counter of all tensors on the storage.
    """

    storage: _OffloadedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    saved: KeptTensor


class _Shard(NamedTuple):
    """A saved DTensor: the position of this rank's shard, and a function that rebuilds it."""

    view: _View
    whole: Callable[[Tensor], Tensor]


class SavedActivations:
    """The offloadable storages that autograd saved for one (stage, micro-batch).

    These tensors stay on the device:

    * ``resident`` ones (parameters, buffers, boundary tensors), which live longer anyway;
    * storages smaller than ``min_bytes`` and those on other devices;
    * tensors with a layout other than strided. Of a DTensor this rank's shard moves.
    * parameters created during the forward, and their views. FSDP2 gathers weights when a module
      starts. With ``reshard_after_forward`` it frees them after the module's forward, and restores
      them before its backward in the storage that autograd saved.

    ``moved`` names the groups whose saved storages are offloaded, also if other groups save them
    too. ``label`` names the cell in errors.
    """

    def __init__(
        self,
        label: str,
        resident: Iterable[Tensor] | Mapping[int, StorageWeakRef],
        device: torch.device,
        min_bytes: int,
        moved: frozenset[str] = EVERYTHING,
    ) -> None:
        self._label = label
        self._device = device
        self._min_bytes = max(1, min_bytes)
        # By identity, not address: an activation may reuse the address of a freed weight.
        self._resident = resident if isinstance(resident, Mapping) else _storages(resident)
        self._kept: dict[int, StorageWeakRef] = {}
        # Weak: if autograd drops a storage during the forward, it need not go to the host.
        self._storages: dict[int, weakref.ref[_OffloadedStorage]] = {}
        self._moved = moved
        self.needs_groups = moved != EVERYTHING
        """Whether the caller must report, with `within`, which groups' modules run."""
        self._scope: frozenset[str] = frozenset()
        self._captured_inputs: list[tuple[Tensor, _View]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture what autograd saves inside the context."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the storages of these tensors on the device."""
        kept = _storages(tensors)
        self._kept |= kept
        for identity in kept:
            self._storages.pop(identity, None)

    def storages(self) -> list[_OffloadedStorage]:
        """Return the storages to move that autograd still references, in the order of saving."""
        found = (ref() for ref in self._storages.values())
        return [storage for storage in found if storage is not None and storage.moves]

    @contextmanager
    def within(self, names: frozenset[str], given: object) -> Iterator[None]:  # noqa: ARG002
        """Assign what is saved inside to these groups too; ``given`` are their module's inputs."""
        around = self._scope
        self._scope = around | names
        try:
            yield
        finally:
            self._scope = around

    def capture_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Capture tensors that autograd does not save."""
        pairs = [(tensor, self._pack(tensor)) for tensor in tensors]
        self._captured_inputs = [(tensor, view) for tensor, view in pairs if type(view) is _View]

    def empty_inputs(self) -> None:
        """Remove the memory of the tensors from `capture_inputs`."""
        for tensor, _ in self._captured_inputs:
            tensor.data = tensor.new_empty(0)

    def refill_inputs(self) -> None:
        """Restore shape and memory of the tensors from `capture_inputs`."""
        for tensor, view in self._captured_inputs:
            tensor.data = self._unpack(view)

    # Untraced: torch.compile would trace this function, and once more for every storage.
    @untraced
    def _pack(self, tensor: Tensor) -> Tensor | KeptTensor | _View | _Shard:
        if type(tensor) is DTensor:
            return self._pack_shard(tensor)
        if not is_plain(tensor):
            return detached(tensor)
        saved = KeptTensor.of(tensor)
        memory = tensor.untyped_storage()
        identity = storage_identity(memory)
        known = self._storages.get(identity)
        storage = known() if known is not None else None
        if storage is None:
            if not self._can_offload(tensor, identity, memory.nbytes()):
                return saved
            storage = _OffloadedStorage(memory)
            self._storages[identity] = weakref.ref(storage)
        if not storage.moves:
            storage.moves = not self.needs_groups or bool((self._scope or {REST}) & self._moved)
        saved.tensor.data = _empty_tensor_on(tensor.device)
        offset = int(tensor.storage_offset())
        return _View(storage, tensor.dtype, offset, tensor.size(), tensor.stride(), saved)

    def _pack_shard(self, tensor: DTensor) -> Tensor | _Shard:
        if isinstance(viewed(tensor), nn.Parameter):
            return detached(tensor)
        with torch.no_grad():
            packed = self._pack(tensor.to_local())
        if type(packed) is not _View:
            return detached(tensor)
        whole = partial(
            DTensor.from_local,
            device_mesh=tensor.device_mesh,
            placements=tensor.placements,
            run_check=False,
            shape=tensor.size(),
            stride=tensor.stride(),
        )
        return _Shard(packed, whole)

    @untraced
    def _unpack(self, packed: Tensor | KeptTensor | _View | _Shard) -> Tensor:
        if type(packed) is _Shard:
            return packed.whole(self._unpack(packed.view))
        if type(packed) is KeptTensor:
            return packed.checked()
        if type(packed) is not _View:
            return cast("Tensor", packed)
        packed.saved.check(packed.size)
        storage = packed.storage.on_device
        if storage is None:
            raise OffloadError(
                f"{self._label}: the backward reads activations that are on the host; "
                "its RELOAD must come first"
            )
        tensor = torch.empty(0, dtype=packed.dtype, device=storage.device)
        return tensor.set_(storage, packed.offset, packed.size, packed.stride)

    def _is_offloadable(self, tensor: Tensor) -> bool:
        memory = tensor.untyped_storage() if is_plain(tensor) else None
        if memory is None:
            return False
        return self._can_offload(tensor, storage_identity(memory), memory.nbytes())

    def _can_offload(self, tensor: Tensor, identity: int, num_bytes: int) -> bool:
        return (
            identity not in self._resident
            and identity not in self._kept
            and not isinstance(viewed(tensor), nn.Parameter)
            and tensor.device == self._device
            and num_bytes >= self._min_bytes
        )


@cache
def _empty_tensor_on(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is an ordinary strided view of its storage."""
    is_strided = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_strided and not (tensor.is_conj() or tensor.is_neg())


_OF_ONE_STORAGE: Final = (Tensor, nn.Parameter)


def _storages(tensors: Iterable[Tensor]) -> dict[int, StorageWeakRef]:
    parts = (part for tensor in tensors for part in parts_with_memory(tensor))
    return {storage_identity(part.untyped_storage()): weak_storage(part) for part in parts}


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """Return a reference that does not keep a tensor's storage alive."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


# --- Copies between a device and its host, and the fences that wait for them.
# On CUDA each direction has a side stream. A copy starts when all earlier work on the compute
# stream has ended, and a `Fence` makes the compute stream wait for its end. So every reuse of
# memory is ordered: of a device block freed after its OFFLOAD's fence, and of a host slot returned
# after its RELOAD's fence. ``record_stream`` would free a block whenever its copy happens to end,
# and peak memory would depend on timing.

Pair = tuple[Tensor, Tensor]
"""(source, target): two byte tensors of equal length."""


class Fence(Protocol):
    """The end of some copies."""

    def wait(self) -> None:
        """Make all compute issued after this call wait for the copies."""


class Copies(Protocol):
    """The two copy lanes of a device."""

    pinned: bool
    """Whether host memory must be page-locked."""

    def to_host(self, pairs: Sequence[Pair]) -> Fence:
        """Issue copies from the device to the host."""

    def to_device(self, pairs: Sequence[Pair]) -> Fence:
        """Issue copies from the host to the device."""


def make_copies(device: torch.device) -> HostCopies:
    """Return the copy lanes of a device."""
    return CudaCopies(device) if device.type == "cuda" else PlainCopies()


class PlainCopies:
    """Synchronous copies, for devices that share the host's memory; each is its own fence."""

    pinned = False

    def pin(self, memory: Tensor) -> None:
        """Do nothing: device memory is host memory."""

    def unpin(self, memories: Sequence[Tensor]) -> None:
        """Do nothing."""

    def to_host(self, pairs: Sequence[Pair]) -> Fence:
        """Copy synchronously."""
        for source, target in pairs:
            target.copy_(source)
        return self

    def to_device(self, pairs: Sequence[Pair]) -> Fence:
        """Copy synchronously."""
        return PlainCopies.to_host(self, pairs)

    def wait(self) -> None:
        """Return immediately: the copies have ended."""


class CudaCopies:
    """Asynchronous copies on two side streams; ``cuda`` is torch.cuda or a test's replacement."""

    pinned = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._down = cuda.Stream(device)
        self._up = cuda.Stream(device)

    def pin(self, memory: Tensor) -> None:
        """Page-lock memory in place: ``pin_memory`` would round its size up to a power of two."""
        error = self._cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(error):
            raise OffloadError(
                f"CUDA cannot page-lock {memory.numel()} bytes of host memory (error "
                f"{int(error)}); offload fewer micro-batches at a time, or raise the host's limit "
                "on locked memory (ulimit -l)"
            )

    def unpin(self, memories: Sequence[Tensor]) -> None:
        """Wait for all copies and undo `pin`."""
        self._down.synchronize()
        self._up.synchronize()
        for memory in memories:
            self._cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def to_host(self, pairs: Sequence[Pair]) -> Fence:
        """Issue copies on the stream to the host."""
        return self._issue(self._down, pairs)

    def to_device(self, pairs: Sequence[Pair]) -> Fence:
        """Issue copies on the stream to the device."""
        return self._issue(self._up, pairs)

    def _issue(self, stream: Any, pairs: Sequence[Pair]) -> Fence:
        stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            event = stream.record_event()
        return _EventFence(self._cuda, self._device, event)


HostCopies = PlainCopies | CudaCopies


class _EventFence(NamedTuple):
    cuda: Any
    device: torch.device
    event: Any

    def wait(self) -> None:
        """Make the compute stream wait; the host does not wait."""
        self.cuda.current_stream(self.device).wait_event(self.event)


# --- Host memory for offloaded activations: slots that are allocated once and reused.
# Page-locking takes milliseconds per call, and a stage's sizes repeat in each micro-batch and step.
# The program determines how many micro-batches of a stage are on the host at one time, so a stage's
# first OFFLOAD allocates all its slots in one arena.


def count_slots(program: Program) -> dict[int, int]:
    """Return, per stage, the maximum number of micro-batches on the host at one time."""
    on_host: dict[int, set[int]] = {}
    most: dict[int, int] = {}
    for stage, kind, microbatch, *_ in program:
        if kind is ActionType.OFFLOAD:
            on_host.setdefault(stage, set()).add(microbatch)
            most[stage] = max(most.get(stage, 0), len(on_host[stage]))
        elif kind.consumes_reload:
            on_host.get(stage, set()).discard(microbatch)
    return most


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Return the host memory available to this process: the machine's, or its cgroups' limit.

    The smallest limit from the process's cgroup up to the root counts (cgroups v1 and v2). In a
    container that path may be the host's, and only the root is visible.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            limit = top.joinpath(*parts[:depth], file)
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                limits.append(int(text))
    return min(limits)


class HostPool:
    """Free slots of host memory by stage, each a one-dimensional byte tensor.

    A slot can be reused immediately after `give_back`: the caller has ordered its copies before all
    later compute, and new copies start after that compute.

    The first `take` of a stage allocates its ``num_slots`` (default 1) in one arena, which
    ``copies`` page-locks. ``allocated_bytes`` counts all arenas.

    With ``unequal`` micro-batches each slot is an arena of its own. If no free slot is large
    enough, a larger one replaces all free slots of the stage. After some steps all slots are as
    large as the largest micro-batch, and allocation stops.
    """

    def __init__(
        self,
        copies: HostCopies,
        num_slots: Mapping[int, int] | None = None,
        *,
        unequal: bool = False,
    ) -> None:
        self.copies = copies
        self.unequal = unequal
        self._num_slots = {} if unequal else dict(num_slots or {})
        self._free: dict[int, list[Tensor]] = {}
        self._arenas: list[Tensor] = []
        self._parts: dict[tuple[int, tuple[int, ...]], list[Tensor]] = {}
        self.allocated_bytes = 0
        # Not at exit: the process frees all memory then.
        weakref.finalize(self, copies.unpin, self._arenas).atexit = False

    def take(self, stage: int, num_bytes: int) -> Tensor:
        """Return the smallest free slot of at least this size, or a new one."""
        free = self._free.setdefault(stage, [])
        fitting = [slot for slot in free if slot.numel() >= num_bytes]
        if not fitting:
            if self.unequal:
                self._unmap(free)
                free = []
            # A later shortage is an exception, such as a larger micro-batch: allocate one slot.
            fitting = self._allocate(stage, num_bytes, self._num_slots.pop(stage, 1))
            free += fitting
        best = min(fitting, key=Tensor.numel)
        self._free[stage] = [slot for slot in free if slot is not best]
        return best

    def parts_of(self, slot: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
        """Return one part of a slot for each size in bytes; cached, since all cells repeat them."""
        parts = self._parts.get((slot.data_ptr(), sizes))
        if parts is None:
            aligned = list(map(_aligned, sizes))
            whole = torch.split(slot[: sum(aligned)], aligned)
            parts = [part[:size] for part, size in zip(whole, sizes, strict=True)]
            self._parts[slot.data_ptr(), sizes] = parts
        return parts

    def give_back(self, stage: int, slot: Tensor) -> None:
        """Return a slot to the free slots of a stage."""
        self._free.setdefault(stage, []).append(slot)

    def _unmap(self, slots: Sequence[Tensor]) -> None:
        """Free the memory of slots, each of which is an arena of its own."""
        addresses = {slot.data_ptr() for slot in slots}
        arenas = [one for one in self._arenas if one.data_ptr() in addresses]
        if arenas:
            self.copies.unpin(arenas)
        self._arenas[:] = [one for one in self._arenas if one.data_ptr() not in addresses]
        self._parts = {key: one for key, one in self._parts.items() if key[0] not in addresses}
        self.allocated_bytes -= sum(one.numel() for one in arenas)

    def _allocate(self, stage: int, num_bytes: int, count: int) -> list[Tensor]:
        """Allocate an arena and return its slots."""
        total, available = count * num_bytes, host_memory_bytes()
        if self.allocated_bytes + total > available:
            raise OffloadError(
                f"stage {stage} needs {count} slots of {num_bytes} bytes on the host, where this "
                f"rank has {self.allocated_bytes} bytes of {available}; offload fewer "
                "micro-batches at a time"
            )
        if not total:
            return [torch.empty(0, dtype=torch.uint8)]
        arena = torch.frombuffer(mmap.mmap(-1, total), dtype=torch.uint8)
        self.copies.pin(arena)
        self._arenas.append(arena)
        self.allocated_bytes += total
        return list(arena.view(count, num_bytes).unbind(0))
