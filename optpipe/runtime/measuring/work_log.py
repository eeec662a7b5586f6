"""Logs of a traced model: operators that run, storages that are saved, shards of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optpipe.runtime.measuring.operators import OperatorLog, is_causal, tensors_in
from optpipe.runtime.offload import weak_storage
from optpipe.runtime.torch_names import parts_with_memory, storage_identity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe.planning.costs import PassCost

__all__ = ["SavedStorages", "WorkLog", "count_elements", "shards_of", "storages_of"]


class WorkLog(OperatorLog):  # type: ignore[no-untyped-call]
    """Operators; products that a narrow precision makes narrow are ``narrow_flops``.

    Those read a narrow weight, or read no weight and return a tensor of the shape of a narrow one:
    its gradient.

    Attributes
    ----------
    products, scores
        FLOPs of all products but those of adapters and attention's, and those of attention as if
        each query saw as many keys as the last one.
    """

    def __init__(
        self, narrow: Iterable[Tensor], adapters: Iterable[Tensor], weights: Iterable[Tensor]
    ) -> None:
        super().__init__()
        matrices = shards_of(narrow)
        self._weights = {_home(one) for one in shards_of(weights)}
        self._narrow = {_home(one) for one in matrices}
        self._shapes = {tuple(one.shape) for one in matrices}
        self._shapes |= {tuple(one.mT.shape) for one in matrices}
        self._adapters = {_home(one) for one in adapters}
        self.products = self.scores = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.work)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.work) == before:
            return result
        cost = self.work[-1].cost
        if func is torch.ops.optpipe.leaf.default:
            self.scores += args[-1]
        elif cost.attention_flops:
            # Torch's kernels do half where they are causal.
            self.scores += cost.attention_flops * (2 if is_causal(func, args, kwargs or {}) else 1)
        elif cost.matmul_flops:
            self._narrow_product(cost, tensors_in(args), result)
            return result
        self.products += cost.matmul_flops
        return result

    def _narrow_product(self, cost: PassCost, factors: list[Tensor], result: Any) -> None:
        homes = [_home(one) for one in factors]
        if not self._adapters.isdisjoint(homes):
            return
        self.products += cost.matmul_flops
        if self._narrow.isdisjoint(homes) and not (
            self._weights.isdisjoint(homes) and tuple(result.shape) in self._shapes
        ):
            return
        others = [
            one.numel()
            for one, home in zip(factors, homes, strict=True)
            if home not in self._narrow and one.dim() > 1
        ]
        narrow = cost._replace(
            matmul_flops=0.0,
            narrow_flops=cost.matmul_flops,
            cast_elements=float(others[0]) if len(others) == 1 else 0.0,
        )
        self.work[-1] = self.work[-1]._replace(cost=narrow)


def shards_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return what this rank has of tensors; of plain ones, themselves."""
    return [part for one in tensors for part in parts_with_memory(one.detach())]


def count_elements(parameter: Tensor) -> int:
    """Return how many elements of a parameter this rank has."""
    return sum(part.numel() for part in shards_of([parameter]))


def _home(tensor: Tensor) -> int:
    return storage_identity(tensor.untyped_storage())


class SavedStorages:
    """Storages that autograd saves, each once, without those ``outside``."""

    def __init__(self, outside: frozenset[Any] = frozenset()) -> None:
        self._outside = outside
        # Weak references, so that a backward can free what it has read.
        self._sizes: dict[Any, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a tensor; a hook of `torch.autograd.graph.saved_tensors_hooks`."""
        self.add(tensor)
        return tensor

    def add(self, tensor: Tensor) -> None:
        """Note a tensor."""
        for part in parts_with_memory(tensor):
            storage = weak_storage(part)
            if storage not in self._outside:
                self._sizes[storage] = part.untyped_storage().nbytes()

    def merge(self, *others: SavedStorages) -> None:
        """Note what others have noted."""
        for one in others:
            self._sizes |= one._sizes  # noqa: SLF001 - of the same class

    def count(self, least: int = 0) -> int:
        """Return the bytes of storages of at least a minimum size."""
        return sum(size for size in self._sizes.values() if size >= least)


def storages_of(tensors: Iterable[Tensor]) -> frozenset[Any]:
    """Return references to the storages of tensors, or of this rank's shards of them."""
    return frozenset(weak_storage(part) for one in tensors for part in parts_with_memory(one))
