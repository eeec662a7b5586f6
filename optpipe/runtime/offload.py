"""OFFLOAD, RELEASE and RELOAD: activations go to the host and come back (DESIGN section 3).

What is on the device at any place of a program depends on the program alone: OFFLOAD changes
nothing, RELEASE makes compute wait for the copy and drops the device storages, RELOAD allocates
them again, and the backward frees them as it goes.

A RELOAD allocates every storage on its own, of the very sizes that the RELEASE gave back, so that
the device's allocator has them at hand. One slab for all of them, or one for what I frees and one
for what W frees, would be fewer allocations, but stays whole until its last tensor is free, while I
adds the output gradients that W needs. Of a stage of four transformer blocks (51 storages) an I
peaks at 1.13 times what lay there before it, kept or reloaded; with two slabs it is 1.59 times, and
a plan has one number for both. So the peak depends on the program alone because all storages are
allocated and freed by one stream, in the program's order, and not because they are few.
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
    copy_all,
    detached,
    dtensor_of,
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
    "HostCopies",
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
"""Storages below this stay on the device: a copy of their own costs more than they weigh."""

EVERYTHING: Final = frozenset({"*"})
"""Stands for all groups of a stage and what none makes."""

REST: Final = "rest"
"""What a stage saves outside all groups."""

_ALIGNMENT = 512

Cell = tuple[int, int]
"""(stage, micro-batch)."""


class _State(Enum):
    """Where the activations of a cell are."""

    CAPTURED = "on the device"
    LEAVING = "on their way to the host"
    RELEASED = "on the host"
    RETURNING = "on their way back"


class _OffloadedCell:
    """The activations of one cell between its F and its backward."""

    def __init__(self, saved: SavedActivations) -> None:
        self.saved = saved
        self.state = _State.CAPTURED
        self.storages: list[_OffloadedStorage] = []
        self.slot: Tensor
        self.on_host: list[Tensor]
        """The bytes of every storage in the slot."""
        self.fence: Fence


class Offloader:
    """Moves the activations of the cells that a program offloads.

    Parameters
    ----------
    modules
        The stages of this rank; their parameters and buffers stay where they are.
    cells
        The (stage, micro-batch) pairs that the program offloads; others are not touched. Of each
        the groups that move, where not `EVERYTHING` does.
    min_bytes
        Storages below this stay on the device.
    num_slots
        Stage -> how many of its cells are on the host at once; their memory is allocated together.
    pool
        Of the host memory, in place of one of its own.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        device: torch.device,
        cells: Iterable[Cell] | Mapping[Cell, frozenset[str]],
        *,
        min_bytes: int = DEFAULT_MIN_BYTES,
        copies: HostCopies | None = None,
        num_slots: Mapping[int, int] | None = None,
        pool: HostPool | None = None,
    ) -> None:
        self.modules = modules
        # Walked once: in each F a walk would cost more than the copies of a small cell.
        self._parts = {stage: list(module.modules()) for stage, module in modules.items()}
        self._device = device
        given = cells if isinstance(cells, Mapping) else dict.fromkeys(cells, EVERYTHING)
        self._cells = dict(given)
        self._min_bytes = min_bytes
        if pool is None:
            pool = HostPool(copies if copies is not None else make_copies(device), num_slots)
        self.pool = pool
        self.copies: Copies = pool.copies
        self._offloaded: dict[Cell, _OffloadedCell] = {}
        self._resident_of: dict[int, tuple[list[int], dict[int, StorageWeakRef]]] = {}
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0

    def holds(self, cell: Cell) -> bool:
        """Whether this cell is offloaded."""
        return cell in self._cells

    @contextmanager
    def capture(
        self, cell: Cell, boundary: Sequence[Tensor] = ()
    ) -> Iterator[SavedActivations | None]:
        """Take over what autograd saves for a cell inside the context (its F, its loss).

        ``boundary``, the stage's inputs, stays.
        """
        if cell not in self._cells:
            yield None
            return
        if cell not in self._offloaded:
            self._offloaded[cell] = _OffloadedCell(self._saved(cell, boundary))
        saved = self._offloaded[cell].saved
        with saved.capture():
            yield saved

    def take_in(self, cell: Cell, tensors: Sequence[Tensor]) -> None:
        """Take over tensors that somebody keeps for a RECOMPUTE, a stage's inputs.

        They stay where they are held, without memory while the host has it.
        """
        saved = self._saved(cell, ())
        saved.take_in(tensors)
        self._offloaded[cell] = _OffloadedCell(saved)

    def keep(self, cell: Cell, tensors: Sequence[Tensor]) -> None:
        """Leave these tensors, the stage's outputs, on the device."""
        if cell in self._offloaded:
            self._offloaded[cell].saved.keep(tensors)

    def storages(self, cell: Cell) -> list[_OffloadedStorage]:
        """Return the storages of a cell that can go, or have gone, to the host."""
        offloaded = self._offloaded[cell]
        return offloaded.storages or offloaded.saved.storages()

    def offload(self, cell: Cell) -> None:
        """Issue the copies to the host; the device memory stays taken."""
        offloaded = self._expect(cell, _State.CAPTURED, "OFFLOAD")
        offloaded.storages = offloaded.saved.storages()
        sizes = tuple(storage.num_bytes for storage in offloaded.storages)
        offloaded.slot = self.pool.take(cell[0], sum(map(_aligned, sizes)))
        offloaded.on_host = self.pool.parts_of(offloaded.slot, sizes)
        sources = [storage.bytes_on_device() for storage in offloaded.storages]
        pairs = list(zip(sources, offloaded.on_host, strict=True))
        offloaded.fence = self.copies.to_host(pairs)
        offloaded.state = _State.LEAVING
        self.offloaded_bytes += sum(storage.num_bytes for storage in offloaded.storages)

    def release(self, cell: Cell) -> None:
        """Make compute wait for the copies, and give the device memory back."""
        offloaded = self._expect(cell, _State.LEAVING, "RELEASE")
        offloaded.fence.wait()
        for storage in offloaded.storages:
            storage.on_device = None
        offloaded.saved.hollow_out()
        offloaded.state = _State.RELEASED

    def reload(self, cell: Cell) -> None:
        """Take device memory and issue the copies back."""
        offloaded = self._expect(cell, _State.RELEASED, "RELOAD")
        # Allocated here, on the compute stream, by which they will also be freed.
        targets = [torch.empty_like(one, device=self._device) for one in offloaded.on_host]
        for storage, target in zip(offloaded.storages, targets, strict=True):
            storage.on_device = target.untyped_storage()
        offloaded.saved.fill_again()
        pairs = list(zip(offloaded.on_host, targets, strict=True))
        offloaded.fence = self.copies.to_device(pairs)
        offloaded.state = _State.RETURNING
        self.reloaded_bytes += sum(storage.num_bytes for storage in offloaded.storages)

    def before_backward(self, cell: Cell) -> None:
        """Make compute wait for a reload that is under way, and let go of the cell.

        From here on only the autograd graph holds the activations, and frees them as it goes.
        """
        if cell not in self._cells:
            return
        offloaded = self._expect(cell, _State.RETURNING, "the backward")
        offloaded.fence.wait()
        self.pool.give_back(cell[0], offloaded.slot)
        del self._offloaded[cell]

    def reset(self) -> None:
        """Forget what an interrupted step left behind."""
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
        """Return the storages of a stage's parameters and buffers as they are now.

        Those of the cell before, where none has changed: a reference to each costs more.
        """
        tensors = [one for part in self._parts[stage] for one in tensors_of(part)]
        if not all(type(one) in _OF_ONE_STORAGE for one in tensors):
            return _storages(tensors)
        found = [storage_identity(one.untyped_storage()) for one in tensors]
        if self._resident_of.get(stage, (None,))[0] != found:
            # What is known keeps its identities from being another storage's.
            self._resident_of[stage] = found, _storages(tensors)
        return self._resident_of[stage][1]

    def _expect(self, cell: Cell, state: _State, what: str) -> _OffloadedCell:
        offloaded = self._offloaded.get(cell)
        if offloaded is None or offloaded.state is not state:
            found = "not captured" if offloaded is None else offloaded.state.value
            raise OffloadError(
                f"{what} of stage {cell[0]}, micro-batch {cell[1]}: its activations are {found}, "
                f"but must be {state.value}; check the program's OFFLOAD, RELEASE, RELOAD order"
            )
        return offloaded


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# --- What autograd saves for one (stage, micro-batch), held in a form that can leave the device.
# While a stage runs forward, ``saved_tensors_hooks`` hands us every tensor autograd wants to keep.
# We keep its storage and how to see the tensor in it, never the tensor: a tensor that knows the
# node which saved it would be a reference cycle. One storage seen by several tensors is one
# `_OffloadedStorage`. Nor would autograd see any more what is changed in place after it was saved:
# it compares how often a tensor was changed only where no hooks are.


class _OffloadedStorage:
    """One storage that autograd needs again; ``on_device`` is None while the host holds it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.on_device: torch.UntypedStorage | None = storage
        self.num_bytes = storage.nbytes()
        self.device = storage.device
        self.moves = False
        """Whether a group that is offloaded has saved it."""

    def bytes_on_device(self) -> Tensor:
        """Return its bytes as a one-dimensional tensor."""
        if self.on_device is None:
            raise OffloadError("a copy was issued for a storage that is not on the device")
        view = torch.empty(0, dtype=torch.uint8, device=self.device)
        return view.set_(self.on_device, 0, (self.num_bytes,), (1,))


class KeptTensor(NamedTuple):
    """What autograd saved, and how often it, or what shares its memory, was changed before."""

    tensor: Tensor
    num_changes: int

    @classmethod
    def of(cls, tensor: Tensor) -> KeptTensor:
        """Keep a tensor, its graph aside."""
        return cls(detached(tensor), version_of(tensor))

    def check(self, shape: Sequence[int]) -> None:
        """Raise RuntimeError if it was changed in place since; of this shape, as it was saved."""
        if version_of(self.tensor) != self.num_changes:
            raise RuntimeError(
                f"a tensor of shape {tuple(shape)} that a backward needs was changed in place "
                "after autograd had saved it; change a copy"
            )

    def again(self) -> Tensor:
        """Return the tensor; RuntimeError as `check`."""
        self.check(self.tensor.shape)
        return self.tensor


class _View(NamedTuple):
    """How to see a saved tensor in its storage.

    ``saved`` has no memory: it counts changes together with all that share the storage's.
    """

    storage: _OffloadedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    saved: KeptTensor


class _Shard(NamedTuple):
    """A saved DTensor: how to see this rank's shard, and what makes it whole."""

    view: _View
    whole: Callable[[Tensor], Tensor]


class SavedActivations:
    """The offloadable storages autograd saved for one (stage, micro-batch), named by ``label``.

    Left alone are the storages of ``resident`` tensors (parameters, buffers and boundary tensors,
    which live longer anyway), those below ``min_bytes``, those of other devices, and tensors that
    are more than strided memory; of a DTensor this rank's shard moves. Also every parameter that is
    made meanwhile, and its views: FSDP2 gathers weights when a module begins, and with
    ``reshard_after_forward`` takes their memory away at its end and gives it back before the
    module's backward, in the storage that autograd saved.

    ``moved`` are the groups of modules that are offloaded; what others save, too, moves with them.
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
        # By identity: the address of a weight that is freed meanwhile may be an activation's next.
        self._resident = resident if isinstance(resident, Mapping) else _storages(resident)
        self._kept: dict[int, StorageWeakRef] = {}
        # Weak: what autograd lets go of during the forward need not go to the host.
        self._storages: dict[int, weakref.ref[_OffloadedStorage]] = {}
        self._moved = moved
        self._moves_all = moved == EVERYTHING
        self._scope: frozenset[str] = frozenset()
        self._taken_in: list[tuple[Tensor, _View]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Take over what autograd saves inside the context."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors on the device after all."""
        kept = _storages(tensors)
        self._kept |= kept
        for identity in kept:
            self._storages.pop(identity, None)

    def storages(self) -> list[_OffloadedStorage]:
        """Return what moves of what autograd still holds, in the order in which it was saved."""
        found = (ref() for ref in self._storages.values())
        return [storage for storage in found if storage is not None and storage.moves]

    @property
    def tells_groups(self) -> bool:
        """Whether it must hear which groups' modules run."""
        return not self._moves_all

    @contextmanager
    def within(self, names: frozenset[str], given: object) -> Iterator[None]:  # noqa: ARG002
        """Count what is saved inside to these groups, too; ``given`` is what their module takes."""
        around = self._scope
        self._scope = around | names
        try:
            yield
        finally:
            self._scope = around

    def take_in(self, tensors: Iterable[Tensor]) -> None:
        """Hold tensors that nobody saves."""
        pairs = [(tensor, self._pack(tensor)) for tensor in tensors]
        self._taken_in = [(tensor, view) for tensor, view in pairs if isinstance(view, _View)]

    def hollow_out(self) -> None:
        """Take the memory from the tensors that were taken in."""
        for tensor, _ in self._taken_in:
            tensor.data = tensor.new_empty(0)

    def fill_again(self) -> None:
        """Give them shape and memory again, that of the storages they lay in."""
        for tensor, view in self._taken_in:
            tensor.data = self._unpack(view)

    def _moves_here(self) -> bool:
        return bool(self._scope & self._moved) or (not self._scope and REST in self._moved)

    # Compiled code would trace what it calls, and once more for every storage.
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
            if not self._may_leave(tensor, identity, memory.nbytes()):
                return saved
            storage = _OffloadedStorage(memory)
            self._storages[identity] = weakref.ref(storage)
        if not storage.moves:
            storage.moves = self._moves_all or self._moves_here()
        saved.tensor.data = _nothing_on(tensor.device)
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
            dtensor_of,
            mesh=tensor.device_mesh,
            placements=tensor.placements,
            size=tensor.size(),
            stride=tensor.stride(),
        )
        return _Shard(packed, whole)

    @untraced
    def _unpack(self, packed: Tensor | KeptTensor | _View | _Shard) -> Tensor:
        if type(packed) is _Shard:
            return packed.whole(self._unpack(packed.view))
        if type(packed) is KeptTensor:
            return packed.again()
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
        return self._may_leave(tensor, storage_identity(memory), memory.nbytes())

    def _may_leave(self, tensor: Tensor, identity: int, num_bytes: int) -> bool:
        return (
            identity not in self._resident
            and identity not in self._kept
            and not isinstance(viewed(tensor), nn.Parameter)
            and tensor.device == self._device
            and num_bytes >= self._min_bytes
        )


@cache
def _nothing_on(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its memory, seen through a stride, and nothing more."""
    is_strided = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_strided and not (tensor.is_conj() or tensor.is_neg())


_OF_ONE_STORAGE: Final = (Tensor, nn.Parameter)


def _storages(tensors: Iterable[Tensor]) -> dict[int, StorageWeakRef]:
    parts = (part for tensor in tensors for part in parts_with_memory(tensor))
    return {storage_identity(part.untyped_storage()): weak_storage(part) for part in parts}


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """Return a reference that does not keep a tensor's memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


# --- Copies between a device and its host, and what it takes to wait for them.
# On CUDA a copy runs on a side stream, one per direction: it starts when everything issued before
# it on the compute stream has ended, and a `Fence` makes the compute stream wait for its end. That
# gives every reuse of memory its edge: a device block freed after the fence of its OFFLOAD, and a
# host slot given back after the fence of its RELOAD, are reused by work that is ordered behind the
# compute stream. ``record_stream`` would free blocks when a copy happens to have ended, and peak
# memory would depend on timing.

Pair = tuple[Tensor, Tensor]
"""(from, to): two byte tensors of one length."""


class Fence(Protocol):
    """The end of some copies."""

    def wait(self) -> None:
        """Make compute that is issued from now on wait for that end."""


class Copies(Protocol):
    """The two copy lanes of a device."""

    pinned: bool
    """Whether host memory must be page-locked."""

    def to_host(self, pairs: Sequence[Pair]) -> Fence:
        """Issue copies from the device to the host."""

    def to_device(self, pairs: Sequence[Pair]) -> Fence:
        """Issue copies from the host to the device."""


class HostCopies(Copies, Protocol):
    """Copy lanes that also see to the host memory at their other end."""

    def pin(self, memory: Tensor) -> None:
        """Page-lock host memory, if it must be."""

    def unpin(self, memories: Sequence[Tensor]) -> None:
        """Wait for all copies and undo `pin`."""


def make_copies(device: torch.device) -> HostCopies:
    """Return the copy lanes of a device."""
    return CudaCopies(device) if device.type == "cuda" else PlainCopies()


class PlainCopies:
    """Copies that have ended when they return; for devices that share the host's memory."""

    pinned = False

    def pin(self, memory: Tensor) -> None:
        """Do nothing: the device is the host."""

    def unpin(self, memories: Sequence[Tensor]) -> None:
        """Do nothing."""

    def to_host(self, pairs: Sequence[Pair]) -> Fence:
        """Copy now."""
        if pairs:
            sources, targets = map(list, zip(*pairs, strict=True))
            copy_all(targets, sources)
        return self

    def to_device(self, pairs: Sequence[Pair]) -> Fence:
        """Copy now."""
        return PlainCopies.to_host(self, pairs)

    def wait(self) -> None:
        """Return at once: be the fence of copies that have ended."""


class CudaCopies:
    """Asynchronous copies on two side streams; ``cuda`` is the module that makes them."""

    pinned = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._down = cuda.Stream(device)
        self._up = cuda.Stream(device)

    def pin(self, memory: Tensor) -> None:
        """Page-lock what ``pin_memory`` would round up to a power of two."""
        error = self._cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(error):
            raise OffloadError(
                f"CUDA refuses to page-lock {memory.numel()} bytes of host memory (error "
                f"{int(error)}); offload fewer micro-batches at once, or raise what the host allows"
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
        return _EventFence(lambda: self._cuda.current_stream(self._device), event)


class _EventFence:
    def __init__(self, compute: Callable[[], Any], event: Any) -> None:
        self._compute = compute
        self._event = event

    def wait(self) -> None:
        """Make the compute stream wait; the host goes on."""
        self._compute().wait_event(self._event)


# --- Host memory for offloaded activations: slots that are allocated once and reused.
# Page-locking costs milliseconds a call, and the sizes of a stage repeat with every micro-batch and
# step. How many micro-batches of a stage are on the host at once is known from the program: the
# first OFFLOAD of a stage allocates all its slots in one arena, and after it nothing is allocated
# any more.


def count_slots(program: Program) -> dict[int, int]:
    """Return, per stage, the most micro-batches that a program has on the host at once."""
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
    """Return the bytes of memory this process may use: the host's, or its control groups' limit.

    The smallest limit on the way from its group to the top counts (version 1 and 2). In a container
    the group's path may be the host's, of which only the top can be seen.
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
    """Free slots of host memory, each a one-dimensional byte tensor, by stage.

    Whoever gives a slot back has ordered all copies from and to it before the compute issued from
    then on, and copies are ordered behind that compute: so a slot may be reused at once.
    ``num_slots`` of a stage, 1 where it is not named, are allocated at its first `take`, in an
    arena that ``copies`` page-lock, as large as that and not, as torch's pinned memory, the next
    power of two. ``allocated_bytes`` are those of all arenas.

    Of ``unequal`` micro-batches each slot is an arena by itself, and those that are free and too
    small are given up for a larger one: there are never more than are in use at once, and after
    some steps they are as large as the largest, and nothing is allocated any more.
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
        # Not at the process's end, which frees everything.
        weakref.finalize(self, copies.unpin, self._arenas).atexit = False

    def take(self, stage: int, num_bytes: int) -> Tensor:
        """Return a slot of at least that many bytes: the smallest free one, or a new one."""
        free = self._free.setdefault(stage, [])
        fitting = [slot for slot in free if slot.numel() >= num_bytes]
        if not fitting:
            if self.unequal:
                self._give_up(free)
                free = []
            # Later needs are exceptions (a larger micro-batch), not worth an arena.
            fitting = self._allocate(stage, num_bytes, self._num_slots.pop(stage, 1))
            free += fitting
        best = min(fitting, key=Tensor.numel)
        self._free[stage] = [slot for slot in free if slot is not best]
        return best

    def parts_of(self, slot: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
        """Return parts of a slot of so many bytes each, made once: they repeat with every cell."""
        known = self._parts.get((slot.data_ptr(), sizes))
        if known is None:
            aligned = list(map(_aligned, sizes))
            rooms = torch.split(slot[: sum(aligned)], aligned)
            known = [room[:size] for room, size in zip(rooms, sizes, strict=True)]
            self._parts[slot.data_ptr(), sizes] = known
        return known

    def give_back(self, stage: int, slot: Tensor) -> None:
        """Make a slot free again."""
        self._free.setdefault(stage, []).append(slot)

    def _give_up(self, slots: Sequence[Tensor]) -> None:
        """Give the memory of slots back that are arenas by themselves."""
        gone = {slot.data_ptr() for slot in slots}
        arenas = [one for one in self._arenas if one.data_ptr() in gone]
        if arenas:
            self.copies.unpin(arenas)
        self._arenas[:] = [one for one in self._arenas if one.data_ptr() not in gone]
        self._parts = {key: one for key, one in self._parts.items() if key[0] not in gone}
        self.allocated_bytes -= sum(one.numel() for one in arenas)

    def _allocate(self, stage: int, num_bytes: int, count: int) -> list[Tensor]:
        """Return the slots of a new arena."""
        total, available = count * num_bytes, host_memory_bytes()
        if self.allocated_bytes + total > available:
            raise OffloadError(
                f"stage {stage} needs {count} slots of {num_bytes} bytes on the host, this rank "
                f"holds {self.allocated_bytes} there and the host has {available}; offload fewer "
                "micro-batches at once"
            )
        if not total:
            return [torch.empty(0, dtype=torch.uint8)]
        arena = torch.frombuffer(mmap.mmap(-1, total), dtype=torch.uint8)
        self.copies.pin(arena)
        self._arenas.append(arena)
        self.allocated_bytes += total
        return list(arena.view(count, num_bytes).unbind(0))
