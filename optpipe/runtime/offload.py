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

from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from optpipe.runtime.copies import Copies, Fence, make_copies
from optpipe.runtime.errors import OffloadError
from optpipe.runtime.host_pool import HostPool
from optpipe.runtime.saved import Parcel, SavedActivations, bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["DEFAULT_MIN_BYTES", "Offloader"]

DEFAULT_MIN_BYTES: Final = 1024
"""Storages below this stay on the device: a copy of their own costs more than they weigh."""

_ALIGNMENT = 512

Cell = tuple[int, int]
"""(stage, micro-batch)."""


class _State(Enum):
    """Where the activations of a cell are."""

    CAPTURED = "on the device"
    LEAVING = "on their way to the host"
    RELEASED = "on the host"
    RETURNING = "on their way back"


class _Cargo:
    """The activations of one cell between its F and its backward."""

    def __init__(self, saved: SavedActivations) -> None:
        self.saved = saved
        self.state = _State.CAPTURED
        self.parcels: list[Parcel] = []
        self.slot: Tensor | None = None
        self.fence: Fence | None = None


class Offloader:
    """Moves the activations of the cells that a program offloads.

    Parameters
    ----------
    modules
        The stages of this rank; their parameters and buffers stay where they are.
    device
        Where they run.
    cells
        The (stage, micro-batch) pairs that the program offloads; others are not touched.
    min_bytes
        Storages below this stay on the device.
    copies
        The copy lanes; those of the device by default.
    num_slots
        Stage -> how many of its cells are on the host at once; their memory is allocated together.

    Attributes
    ----------
    offloaded_bytes, reloaded_bytes
        Moved since the beginning.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        device: torch.device,
        cells: Iterable[Cell],
        *,
        min_bytes: int = DEFAULT_MIN_BYTES,
        copies: Copies | None = None,
        num_slots: Mapping[int, int] | None = None,
    ) -> None:
        self._modules = modules
        self._device = device
        self._cells = frozenset(cells)
        self._min_bytes = min_bytes
        self.copies = copies if copies is not None else make_copies(device)
        self.pool = HostPool(pinned=self.copies.pinned, num_slots=num_slots)
        self._cargo: dict[Cell, _Cargo] = {}
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0

    def holds(self, cell: Cell) -> bool:
        """Whether this cell is offloaded."""
        return cell in self._cells

    @contextmanager
    def capture(self, cell: Cell, boundary: Sequence[Tensor] = ()) -> Iterator[None]:
        """Take over what autograd saves for a cell inside the context (its F, its loss).

        Parameters
        ----------
        boundary
            The stage's inputs, which stay.
        """
        if cell not in self._cells:
            yield
            return
        if cell not in self._cargo:
            self._cargo[cell] = _Cargo(self._saved(cell, boundary))
        with self._cargo[cell].saved.capture():
            yield

    def keep(self, cell: Cell, tensors: Sequence[Tensor]) -> None:
        """Leave these tensors, the stage's outputs, on the device."""
        if cell in self._cargo:
            self._cargo[cell].saved.keep(tensors)

    def parcels(self, cell: Cell) -> list[Parcel]:
        """Return the storages of a cell that can go, or have gone, to the host."""
        cargo = self._cargo[cell]
        return cargo.parcels or cargo.saved.parcels()

    def offload(self, cell: Cell) -> None:
        """Issue the copies to the host; the device memory stays taken."""
        cargo = self._expect(cell, _State.CAPTURED, "OFFLOAD")
        cargo.parcels = cargo.saved.parcels()
        cargo.slot = self.pool.take(cell[0], _slot_bytes(cargo.parcels))
        cargo.fence = self.copies.to_host(
            [(_device_bytes(parcel), part) for parcel, part in _parts(cargo)]
        )
        cargo.state = _State.LEAVING
        self.offloaded_bytes += _total(cargo.parcels)

    def release(self, cell: Cell) -> None:
        """Make compute wait for the copies, and give the device memory back."""
        cargo = self._expect(cell, _State.LEAVING, "RELEASE")
        _wait(cargo)
        for parcel in cargo.parcels:
            parcel.storage = None
        cargo.state = _State.RELEASED

    def reload(self, cell: Cell) -> None:
        """Take device memory and issue the copies back."""
        cargo = self._expect(cell, _State.RELEASED, "RELOAD")
        for parcel in cargo.parcels:
            # Allocated here, on the compute stream, by which it will also be freed.
            parcel.storage = _new_storage(parcel)
        cargo.fence = self.copies.to_device(
            [(part, _device_bytes(parcel)) for parcel, part in _parts(cargo)]
        )
        cargo.state = _State.RETURNING
        self.reloaded_bytes += _total(cargo.parcels)

    def before_backward(self, cell: Cell) -> None:
        """Make compute wait for a reload that is under way, and let go of the cell.

        From here on only the autograd graph holds the activations, and frees them as it goes.
        """
        if cell not in self._cells:
            return
        cargo = self._expect(cell, _State.RETURNING, "the backward")
        _wait(cargo)
        if cargo.slot is not None:
            self.pool.give_back(cell[0], cargo.slot)
        del self._cargo[cell]

    def reset(self) -> None:
        """Forget what an interrupted step left behind."""
        self._cargo.clear()

    def _saved(self, cell: Cell, boundary: Sequence[Tensor]) -> SavedActivations:
        stage, microbatch = cell
        module = self._modules[stage]
        resident = [*module.parameters(), *module.buffers(), *boundary]
        label = f"stage {stage}, micro-batch {microbatch}"
        return SavedActivations(label, resident, self._device, self._min_bytes)

    def _expect(self, cell: Cell, state: _State, what: str) -> _Cargo:
        cargo = self._cargo.get(cell)
        if cargo is None or cargo.state is not state:
            found = "not captured" if cargo is None else cargo.state.value
            raise OffloadError(
                f"{what} of stage {cell[0]}, micro-batch {cell[1]}: its activations are {found}, "
                f"but must be {state.value}; check the program's OFFLOAD, RELEASE, RELOAD order"
            )
        return cargo


def _wait(cargo: _Cargo) -> None:
    if cargo.fence is not None:
        cargo.fence.wait()
        cargo.fence = None


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _slot_bytes(parcels: Sequence[Parcel]) -> int:
    return sum(_aligned(parcel.num_bytes) for parcel in parcels)


def _total(parcels: Sequence[Parcel]) -> int:
    return sum(parcel.num_bytes for parcel in parcels)


def _parts(cargo: _Cargo) -> Iterator[tuple[Parcel, Tensor]]:
    """Pair every parcel with its bytes in the host slot."""
    if cargo.slot is None:
        return
    start = 0
    for parcel in cargo.parcels:
        yield parcel, cargo.slot[start : start + parcel.num_bytes]
        start += _aligned(parcel.num_bytes)


def _new_storage(parcel: Parcel) -> torch.UntypedStorage:
    data = torch.empty(parcel.num_bytes, dtype=torch.uint8, device=parcel.device)
    return data.untyped_storage()


def _device_bytes(parcel: Parcel) -> Tensor:
    if parcel.storage is None:
        raise OffloadError("a copy was issued for a storage that is not on the device")
    return bytes_of(parcel.storage, parcel.num_bytes)
