"""How long something took on a device: events on CUDA, the processor's clock elsewhere.

A mark stands behind everything issued before it on the compute lane; on CUDA it is an event that
the stream passes when it gets there, so that taking it costs the host about a microsecond and
makes nobody wait. Only `Clock.ms_between` waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from optpipe.runtime.copies import Fence

__all__ = ["Clock", "CpuClock", "CudaClock", "Mark", "clock_for"]

Mark = Any
"""A moment on one clock; only that clock can read it."""


class Clock(Protocol):
    """Takes moments on a device and says what lies between them."""

    def mark(self) -> Mark:
        """Return the moment at which all compute issued so far ends."""

    def mark_after(self, fence: Fence, lane: int) -> Mark:
        """Return the moment at which a copy ends, without making compute wait for it.

        Parameters
        ----------
        lane
            0 for copies to the host, 1 for those to the device: each lane ends in its own order.
        """

    def ms_between(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds from one moment to a later one, waiting until it has passed."""


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


class CpuClock:
    """For devices on which work has ended when its call returns."""

    def mark(self) -> Mark:
        """Return the processor's monotonic clock in nanoseconds."""
        return time.perf_counter_ns()

    def mark_after(self, fence: Fence, lane: int) -> Mark:  # noqa: ARG002 - both lanes are this one
        """Wait for the copy and return the time."""
        fence.wait()
        return self.mark()

    def ms_between(self, start: Mark, end: Mark) -> float:
        """Return the difference of two times."""
        return float(end - start) / 1e6


class CudaClock:
    """Events on the compute stream, and on one probe stream per copy lane."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._probes = [
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        ]

    def mark(self) -> Mark:
        """Record an event on the compute stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark_after(self, fence: Fence, lane: int) -> Mark:
        """Record an event on the lane's probe stream, which waits in the place of compute."""
        with torch.cuda.stream(self._probes[lane]):
            fence.wait()
            return self.mark()

    def ms_between(self, start: Mark, end: Mark) -> float:
        """Wait for the later event and return the device's own difference."""
        end.synchronize()
        return float(start.elapsed_time(end))
