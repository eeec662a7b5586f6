"""What messages between devices take: ping-pong between ranks, or copies on the one there is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from optpipe.measurements import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from optpipe.runtime.measuring.clock import Clock

__all__ = ["local_copies", "message_sizes", "ping_pong"]

_SHORT_BYTES = 1024
_LONG_BYTES = 2**28
_WARMUPS = 2

Pair = tuple[int, int]
"""(lower, higher) device."""


def message_sizes(boundary_bytes: int) -> tuple[int, ...]:
    """Return the sizes that are sent: a short one for the latency, the boundary's, and larger.

    The larger ones, up to 16 times the boundary where that is not more than 256 MiB, tell the
    bandwidth of links on which the boundary's own is as fast as a short message.
    """
    most = max(boundary_bytes, _LONG_BYTES)
    sizes = {_SHORT_BYTES, *(min(most, factor * boundary_bytes) for factor in (1, 4, 16))}
    return tuple(sorted(size for size in sizes if size > 0))


def local_copies(
    sizes_of: Mapping[Pair, Sequence[int]], clock: Clock, device: torch.device, repeats: int
) -> tuple[Transfer, ...]:
    """Copy on one device in place of messages between devices that are not there.

    Parameters
    ----------
    sizes_of
        Per pair of devices, the bytes of its messages.
    repeats
        Messages per size that are kept; two more come before them.
    """
    times: dict[int, list[float]] = {}
    for size in sorted({size for sizes in sizes_of.values() for size in sizes}):
        source, target = _buffer(size, device), _buffer(size, device)
        times[size] = _timed(clock, partial(target.copy_, source), repeats)
    return tuple(
        Transfer(source=a, target=b, num_bytes=size, time_ms=ms)
        for (a, b), sizes in sorted(sizes_of.items())
        for size in sizes
        for ms in times[size]
    )


def ping_pong(
    sizes_of: Mapping[Pair, Sequence[int]],
    clock: Clock,
    device: torch.device,
    group: ProcessGroup | None,
    repeats: int,
) -> tuple[Transfer, ...]:
    """Send messages to and fro between pairs of ranks, one pair at a time.

    A message's time is half of its round trip. All ranks call this together and get all times.

    Parameters
    ----------
    sizes_of
        Per pair of ranks, the bytes of its messages; the same on all ranks.
    device
        Where messages start and end; over gloo the host's memory is used.
    repeats
        Round trips per size that are kept; two more come before them.
    """
    if dist.get_backend(group) != dist.Backend.NCCL:
        device = torch.device("cpu")
    own: list[Transfer] = []
    for pair, sizes in sorted(sizes_of.items()):
        dist.barrier(group)
        if dist.get_rank(group) in pair:
            for size in sizes:
                ends = _Ends(*pair, _buffer(size, device), group)
                own += ends.play(clock, repeats)
    told: list[list[Transfer]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(told, own, group=group)
    return tuple(one for part in told for one in part)


class _Ends(NamedTuple):
    """Two ranks, and what they send to and fro."""

    first: int
    second: int
    buffer: Tensor
    group: ProcessGroup | None

    def play(self, clock: Clock, repeats: int) -> list[Transfer]:
        """Return the transfers, timed by the first rank; none on the second."""
        if dist.get_rank(self.group) == self.second:
            for _ in range(repeats + _WARMUPS):
                self._receive(self.first)
                self._send(self.first)
            return []
        return [
            Transfer(
                source=self.first,
                target=self.second,
                num_bytes=self.buffer.numel(),
                time_ms=ms / 2,
            )
            for ms in _timed(clock, self._there_and_back, repeats)
        ]

    def _there_and_back(self) -> None:
        self._send(self.second)
        self._receive(self.second)

    def _send(self, to: int) -> None:
        dist.send(self.buffer, group=self.group, group_dst=to)

    def _receive(self, origin: int) -> None:
        dist.recv(self.buffer, group=self.group, group_src=origin)


def _timed(clock: Clock, run: Callable[[], object], repeats: int) -> list[float]:
    marks = []
    for _ in range(repeats + _WARMUPS):
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    return [clock.ms_between(start, end) for start, end in marks[_WARMUPS:]]


def _buffer(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
