"""What offloading and reloading moved in a trace, and how fast: while everything else ran too."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from optpipe.measurements.range_times import work_inside

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe.measurements.trace_file import Event, Process

__all__ = ["HostCopies", "HostCopy", "copy_in_range", "summarise_copies"]

_DIRECTIONS = {"OFFLOAD": "Memcpy DtoH", "RELOAD": "Memcpy HtoD"}


class HostCopy(NamedTuple):
    """All copies of one OFFLOAD or RELOAD."""

    device: int
    stage: int
    action: str
    num_bytes: int
    gb_per_s: float


class HostCopies(NamedTuple):
    """Medians: bytes per stage, and rates in GB/s per (device, OFFLOAD or RELOAD)."""

    offload_bytes: dict[int, int]
    gb_per_s: dict[tuple[int, str], float]


def copy_in_range(
    process: Process, event: Event, action: str, stage: int, device: int
) -> HostCopy | None:
    """Return what the range of an OFFLOAD or RELOAD copied, or None if nothing is known of it."""
    copies = [
        (work.args["bytes"], work.duration_us)
        for work in work_inside(process, event)
        if work.name.startswith(_DIRECTIONS[action]) and isinstance(work.args.get("bytes"), int)
    ]
    num_bytes = sum(size for size, _ in copies)
    busy_us = sum(time_us for _, time_us in copies)
    if not num_bytes or not busy_us:
        return None
    return HostCopy(device, stage, action, num_bytes, num_bytes / busy_us / 1e3)


def summarise_copies(copies: Iterable[HostCopy]) -> HostCopies:
    """Return the medians of copies."""
    sizes: dict[int, list[int]] = defaultdict(list)
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    for copy in copies:
        rates[copy.device, copy.action].append(copy.gb_per_s)
        if copy.action == "OFFLOAD":
            sizes[copy.stage].append(copy.num_bytes)
    return HostCopies(
        {stage: statistics.median_low(sizes[stage]) for stage in sorted(sizes)},
        {key: round(statistics.median(rates[key]), 3) for key in sorted(rates)},
    )
