"""Counts the bytes of live storages from outside: what a device's allocator would report."""

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optpipe.schedule import Action


class Moment(NamedTuple):
    """Live bytes around one action."""

    action: str
    before: int
    peak: int
    after: int


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations make inside the context, until they are freed.

    Also a runner's observer: it notes what is live around every action.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.moments: list[Moment] = []
        self._known: set[int] = set()
        self._before = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {_storage_of(leaf) for leaf in tree_leaves((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage_of(leaf) not in given:
                self._count(leaf.untyped_storage())
        return result

    def begin(self, action: Action) -> None:
        self._before = self.peak = self.live

    def end(self, action: Action) -> None:
        self.moments.append(Moment(str(action), self._before, self.peak, self.live))

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._known:
            return
        size = storage.nbytes()
        self._known.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, address, size).atexit = False

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size


def _storage_of(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        value = value.untyped_storage()
    return value._cdata if isinstance(value, torch.UntypedStorage) else None
