"""Host memory for offloaded activations: slots that are allocated once and reused.

Page-locking costs milliseconds a call, and the sizes of a stage repeat with every micro-batch and
step: after the first step nothing is allocated any more.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostPool"]


class HostPool:
    """Free slots of host memory, each a one-dimensional byte tensor.

    Whoever gives a slot back has ordered all copies from and to it before the compute issued from
    then on, and copies are ordered behind that compute: so a slot may be reused at once.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[Tensor] = []
        self.allocated_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """Return a slot of at least that many bytes: the smallest free one, or a new one."""
        fitting = [slot for slot in self._free if slot.numel() >= num_bytes]
        if not fitting:
            self.allocated_bytes += num_bytes
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        best = min(fitting, key=Tensor.numel)
        self._free = [slot for slot in self._free if slot is not best]
        return best

    def give_back(self, slot: Tensor) -> None:
        """Make a slot free again."""
        self._free.append(slot)
