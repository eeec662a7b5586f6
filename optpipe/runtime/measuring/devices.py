"""What is known of the devices: memory, and how fast they copy."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from optpipe.measurements import DeviceFacts
from optpipe.runtime.host_pool import host_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.runtime.measuring.bandwidth import Bandwidths
    from optpipe.runtime.measuring.one_stage import StageResult
    from optpipe.runtime.measuring.ranks import MeasuringRanks

__all__ = ["bandwidths_of", "device_facts", "device_name"]


def device_facts(
    ranks: MeasuringRanks,
    homes: Sequence[int],
    results: Sequence[StageResult],
    memory_bytes: int | None,
) -> tuple[DeviceFacts, ...]:
    """Return the facts of every device; each is asked for its own.

    Parameters
    ----------
    memory_bytes
        Of each device; None = the GPU's own, or an equal part of the host's.
    """
    num_devices = 1 + max(homes)
    found = []
    for index in range(num_devices):
        own: dict[str, Any] = ranks.tell(
            index, partial(_own_facts, ranks, num_devices, memory_bytes)
        )
        rates = bandwidths_of(index, homes, results)
        if rates is not None:
            own |= rates.under_compute._asdict()
        found.append(DeviceFacts(**own))
    return tuple(found)


def bandwidths_of(
    device: int, homes: Sequence[int], results: Sequence[StageResult]
) -> Bandwidths | None:
    """Return those of the device's stage that offloads most."""
    own = [result for home, result in zip(homes, results, strict=True) if home == device]
    return max(own, key=lambda result: result.footprint.offload_bytes).bandwidths


def _own_facts(ranks: MeasuringRanks, num_devices: int, memory_bytes: int | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"host": socket.gethostname()} if ranks.are_many else {}
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        taken = total - free - torch.cuda.memory_reserved(ranks.device)
        return facts | {"memory_bytes": memory_bytes or total, "reserved_bytes": max(0, taken)}
    return facts | {"memory_bytes": memory_bytes or host_memory_bytes() // num_devices}


def device_name(device: torch.device) -> str:
    """Return what people call a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
