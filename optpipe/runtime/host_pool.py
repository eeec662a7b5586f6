"""Host memory for offloaded activations: slots that are allocated once and reused.

Page-locking costs milliseconds a call, and the sizes of a stage repeat with every micro-batch and
step. How many micro-batches of a stage are on the host at once is known from the program: the first
OFFLOAD of a stage allocates all its slots in one arena, and after it nothing is allocated any more.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optpipe.action import ActionType
from optpipe.runtime.errors import OffloadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.action import Program

__all__ = ["HostPool", "count_slots", "host_memory_bytes"]


def count_slots(program: Program) -> dict[int, int]:
    """Return, per stage, the most micro-batches that a program has on the host at once."""
    held: dict[int, set[int]] = {}
    most: dict[int, int] = {}
    for stage, kind, microbatch in program:
        if kind is ActionType.OFFLOAD:
            held.setdefault(stage, set()).add(microbatch)
            most[stage] = max(most.get(stage, 0), len(held[stage]))
        elif kind.is_backward:
            held.get(stage, set()).discard(microbatch)
    return most


def host_memory_bytes() -> int:
    """Return the bytes of memory this host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class HostPool:
    """Free slots of host memory, each a one-dimensional byte tensor, by stage.

    Whoever gives a slot back has ordered all copies from and to it before the compute issued from
    then on, and copies are ordered behind that compute: so a slot may be reused at once.

    Parameters
    ----------
    num_slots
        Stage -> how many slots to allocate at its first `take`; 1 where a stage is not named.

    Attributes
    ----------
    allocated_bytes
        Of all arenas.
    """

    def __init__(self, *, pinned: bool, num_slots: Mapping[int, int] | None = None) -> None:
        self._pinned = pinned
        self._num_slots = dict(num_slots or {})
        self._free: dict[int, list[Tensor]] = {}
        self.allocated_bytes = 0

    def take(self, stage: int, num_bytes: int) -> Tensor:
        """Return a slot of at least that many bytes: the smallest free one, or a new one.

        Raises
        ------
        OffloadError
            If the slots of the stage are more than the host's memory.
        """
        free = self._free.setdefault(stage, [])
        fitting = [slot for slot in free if slot.numel() >= num_bytes]
        if not fitting:
            # Later needs are exceptions (a larger micro-batch), not worth an arena.
            fitting = self._allocate(stage, num_bytes, self._num_slots.pop(stage, 1))
            free += fitting
        best = min(fitting, key=Tensor.numel)
        self._free[stage] = [slot for slot in free if slot is not best]
        return best

    def give_back(self, stage: int, slot: Tensor) -> None:
        """Make a slot free again."""
        self._free.setdefault(stage, []).append(slot)

    def _allocate(self, stage: int, num_bytes: int, count: int) -> list[Tensor]:
        """Return the slots of a new arena."""
        total, available = count * num_bytes, host_memory_bytes()
        if self.allocated_bytes + total > available:
            raise OffloadError(
                f"stage {stage} needs {count} slots of {num_bytes} bytes on the host, this rank "
                f"holds {self.allocated_bytes} there and the host has {available}; offload fewer "
                "micro-batches at once"
            )
        self.allocated_bytes += total
        arena = torch.empty(total, dtype=torch.uint8, pin_memory=self._pinned)
        return list(arena.view(count, num_bytes).unbind(0)) if total else [arena]
