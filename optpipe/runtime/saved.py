"""What autograd saves for one (stage, micro-batch), held in a form that can leave the device.

While a stage runs forward, ``saved_tensors_hooks`` hands us every tensor autograd wants to keep. We
keep its storage and how to see the tensor in it, never the tensor: a tensor that knows the node
which saved it would be a reference cycle. One storage seen by several tensors is one `Parcel`.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.runtime.errors import OffloadError
from optpipe.runtime.torch_private import parts_with_memory, storage_identity, viewed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Parcel", "SavedActivations", "bytes_of"]


class Parcel:
    """One storage that autograd needs again; ``storage`` is None while the host holds it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.num_bytes = storage.nbytes()
        self.device = storage.device


class _View(NamedTuple):
    """How to see a saved tensor in its parcel."""

    parcel: Parcel
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class SavedActivations:
    """The offloadable storages autograd saved for one (stage, micro-batch).

    Left alone are the storages of ``resident`` tensors (parameters, buffers and boundary tensors,
    which live longer anyway), those below ``min_bytes``, those of other devices, and tensors that
    are more than strided memory. Also every parameter that is made meanwhile, and its views: FSDP2
    gathers weights when a module begins, and with ``reshard_after_forward`` takes their memory away
    at its end and gives it back before the module's backward, in the storage that autograd saved.

    Parameters
    ----------
    label
        For messages, for example ``stage 2, micro-batch 0``.
    """

    def __init__(
        self, label: str, resident: Iterable[Tensor], device: torch.device, min_bytes: int
    ) -> None:
        self._label = label
        self._device = device
        self._min_bytes = max(1, min_bytes)
        # By identity: the address of a weight that is freed meanwhile may be an activation's next.
        self._resident = _storages(resident)
        # Weak: what autograd lets go of during the forward need not go to the host.
        self._parcels: dict[int, weakref.ref[Parcel]] = {}

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Take over what autograd saves inside the context."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors on the device after all."""
        storages = _storages(tensors)
        self._resident |= storages
        for identity in storages:
            self._parcels.pop(identity, None)

    def parcels(self) -> list[Parcel]:
        """Return what autograd still holds, in the order in which it was saved."""
        return [parcel for ref in self._parcels.values() if (parcel := ref()) is not None]

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        if not self._is_offloadable(tensor):
            return tensor.detach()
        identity = storage_identity(tensor)
        known = self._parcels.get(identity)
        parcel = known() if known is not None else None
        if parcel is None:
            parcel = Parcel(tensor.untyped_storage())
            self._parcels[identity] = weakref.ref(parcel)
        return _View(
            parcel, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        )

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        storage = packed.parcel.storage
        if storage is None:
            raise OffloadError(
                f"{self._label}: the backward reads activations that are on the host; "
                "its RELOAD must come first"
            )
        tensor = torch.empty(0, dtype=packed.dtype, device=storage.device)
        return tensor.set_(storage, packed.offset, packed.size, packed.stride)

    def _is_offloadable(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and not isinstance(viewed(tensor), nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device == self._device
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= self._min_bytes
            and storage_identity(tensor) not in self._resident
        )


def bytes_of(storage: torch.UntypedStorage, num_bytes: int) -> Tensor:
    """Return the first bytes of a storage as a one-dimensional tensor."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (num_bytes,), (1,))


def _storages(tensors: Iterable[Tensor]) -> dict[int, StorageWeakRef]:
    parts = (part for tensor in tensors for part in parts_with_memory(tensor))
    return {storage_identity(part): _weak(part) for part in parts}


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
