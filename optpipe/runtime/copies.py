"""Copies between a device and its host, and what it takes to wait for them.

On CUDA a copy runs on a side stream, one per direction: it starts when everything issued before it
on the compute stream has ended, and a `Fence` makes the compute stream wait for its end. That
gives every reuse of memory its edge: a device block freed after the fence of its OFFLOAD, and a
host slot given back after the fence of its RELOAD, are reused by work that is ordered behind the
compute stream. ``record_stream`` would free blocks when a copy happens to have ended, and peak
memory would depend on timing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Copies", "CudaCopies", "Fence", "PlainCopies", "make_copies"]

Pair = tuple[Tensor, Tensor]
"""(from, to): two byte tensors of one length."""


class Fence(Protocol):
    """The end of some copies."""

    def wait(self) -> None:
        """Make compute that is issued from now on wait for that end."""


class Copies(Protocol):
    """The two copy lanes of a device."""

    pinned: bool
    """Whether host memory must be page-locked."""

    def to_host(self, pairs: Sequence[Pair]) -> Fence:
        """Issue copies from the device to the host."""

    def to_device(self, pairs: Sequence[Pair]) -> Fence:
        """Issue copies from the host to the device."""


def make_copies(device: torch.device) -> Copies:
    """Return the copy lanes of a device."""
    return CudaCopies(device) if device.type == "cuda" else PlainCopies()


class _Done:
    def wait(self) -> None:
        """Return at once: the copy ended before it was returned."""


class PlainCopies:
    """Copies that have ended when they return; for devices that share the host's memory."""

    pinned = False

    def to_host(self, pairs: Sequence[Pair]) -> Fence:
        """Copy now."""
        return _copy_now(pairs)

    def to_device(self, pairs: Sequence[Pair]) -> Fence:
        """Copy now."""
        return _copy_now(pairs)


def _copy_now(pairs: Sequence[Pair]) -> Fence:
    for source, target in pairs:
        target.copy_(source)
    return _Done()


class CudaCopies:
    """Asynchronous copies on two side streams."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, pairs: Sequence[Pair]) -> Fence:
        """Issue copies on the stream to the host."""
        return self._issue(self._down, pairs)

    def to_device(self, pairs: Sequence[Pair]) -> Fence:
        """Issue copies on the stream to the device."""
        return self._issue(self._up, pairs)

    def _issue(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> Fence:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            event = stream.record_event()
        return _EventFence(event, self._device)


class _EventFence:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Make the compute stream wait; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._event)
