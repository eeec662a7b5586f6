"""Memory limits asked of programs that are integers: devices and hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.improve.compiled import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from optpipe_solver.improve.compiled.problem import CompiledProblem, Rows

__all__ = ["is_compute_only", "keeps_limits", "within_devices", "within_hosts"]


def keeps_limits(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether legal programs keep the limits of all devices and hosts."""
    return within_devices(compiled, rows) and within_hosts(compiled, rows)


def within_devices(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether legal programs keep the limits of all devices."""
    times, memory = compiled.times, compiled.memory
    again = np.zeros(times.num_cells, dtype=np.bool_)
    for codes in _programs(rows):
        again[codes[codes // times.num_cells == kernel.RECOMPUTE] % times.num_cells] = True
    return all(
        kernel.device_fits(device, codes, codes.size, times, memory, again)
        for device, codes in enumerate(_programs(rows))
    )


def within_hosts(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether legal programs keep the limits of all hosts."""
    times, memory = compiled.times, compiled.memory
    if all(host.memory_bytes is None for host in compiled.problem.hosts):
        return True
    away = np.zeros(times.num_cells, dtype=np.bool_)
    peaks = np.zeros(memory.host_limit.size, dtype=np.int64)
    for host, codes in zip(memory.host_of, _programs(rows), strict=True):
        peaks[host] += kernel.host_peak(codes, codes.size, times, memory, away)
    return bool((peaks <= memory.host_limit).all())


def is_compute_only(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether programs hold F, I, W and B alone."""
    first = kernel.OFFLOAD * compiled.times.num_cells
    return all(codes.size == 0 or int(codes.max()) < first for codes in _programs(rows))


def _programs(rows: Rows) -> Iterator[NDArray[np.int64]]:
    for row, length in zip(rows.actions, rows.lengths, strict=True):
        yield row[:length]
