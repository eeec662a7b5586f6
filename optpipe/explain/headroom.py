"""How much memory devices and hosts have left."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from optpipe.explain.values import DeviceMemory, HostMemory
from optpipe.memory import host_peak_bytes, memory_walk

if TYPE_CHECKING:
    from optpipe.action import Program, Programs
    from optpipe.problem import Problem

Peaks: TypeAlias = list[list[int]]

__all__ = ["device_memories", "host_memories", "program_peaks", "tightest_device"]


def program_peaks(problem: Problem, programs: Programs) -> Peaks:
    """Return, per device, the most that is held at each of its actions, in bytes."""
    return [
        [step.peak for step in memory_walk(problem, device, program)]
        for device, program in enumerate(programs)
    ]


def device_memories(
    problem: Problem, programs: Programs, peaks: Peaks | None = None
) -> tuple[DeviceMemory, ...]:
    """Return, per device, the peak of its program and what it may hold at most.

    ``peaks`` are what `program_peaks` returns, from a caller who has them.
    """
    known = peaks or program_peaks(problem, programs)
    return tuple(
        _device_memory(problem, device, program, known[device])
        for device, program in enumerate(programs)
    )


def _device_memory(
    problem: Problem, device: int, program: Program, peaks: list[int]
) -> DeviceMemory:
    static = problem.static_bytes_of(device)
    peak = max(peaks, default=static)
    return DeviceMemory(
        device=device,
        static_bytes=static,
        peak_bytes=peak,
        limit_bytes=problem.devices[device].usable_bytes,
        fullest_at=program[peaks.index(peak)] if program else None,
    )


def host_memories(problem: Problem, programs: Programs) -> tuple[HostMemory, ...]:
    """Return, per host, the sum of its devices' peaks of offloaded bytes, and its limit."""
    peaks = host_peak_bytes(problem, programs)
    return tuple(
        HostMemory(host=host.name, peak_bytes=peaks[host.name], limit_bytes=host.memory_bytes)
        for host in problem.hosts
    )


def tightest_device(problem: Problem, programs: Programs) -> int:
    """Return the device with a program and the least headroom; of equals the first."""
    memories = [held for held in device_memories(problem, programs) if programs[held.device]]
    return min(memories, key=lambda held: held.headroom_bytes).device
