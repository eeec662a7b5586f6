"""How fast activations go to the host and come back: alone, both ways together, and under compute.

The copies are those of an OFFLOAD and a RELOAD of the stage: as many, as large, on the same lanes.
On the CPU a copy has ended when it was issued: both directions and compute take turns, and what
"under compute" adds is that the caches are cold.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from optpipe.runtime.copies import Copies, Fence
    from optpipe.runtime.measuring.clock import Clock, Mark

__all__ = ["Bandwidths", "Rate", "measure_bandwidths"]

_DOWN, _UP = 0, 1
_CUDA_BYTES = 256 * 2**20
"""On CUDA that much is copied at once, so that the host's issuing is hidden."""


class Rate(NamedTuple):
    """GB/s (1e9) to the host and back."""

    d2h_gb_per_s: float
    h2d_gb_per_s: float


class Bandwidths(NamedTuple):
    """Medians; ``under_compute`` is with both directions busy, as DESIGN section 3 wants them."""

    alone: Rate
    together: Rate
    under_compute: Rate


def measure_bandwidths(
    copies: Copies,
    clock: Clock,
    sizes: Sequence[int],
    device: torch.device,
    *,
    compute: Callable[[], None],
    compute_ms: float,
    repeats: int,
) -> Bandwidths:
    """Copy buffers of some sizes to the host and back.

    Parameters
    ----------
    sizes
        In bytes; at least one.
    compute
        Some passes of the stage that take about ``compute_ms``.
    repeats
        Copies that the medians are taken of; one more comes before them.
    """
    lanes = _Lanes(copies, clock, sizes, device)
    alone = [_median_gb_per_s(lanes, [lane], repeats)[0] for lane in (_DOWN, _UP)]
    together = _median_gb_per_s(lanes, [_DOWN, _UP], repeats)
    slowest_ms = lanes.num_bytes / (min(*alone, *together) * 1e6)
    passes = math.ceil(slowest_ms / compute_ms) if copies.pinned and compute_ms > 0 else 0
    busy = _median_gb_per_s(lanes, [_DOWN, _UP], repeats, _Compute(compute, passes))
    return Bandwidths(Rate(*alone), Rate(*together), Rate(*busy))


class _Compute(NamedTuple):
    """What runs before the copies, and how often again beside them where they run beside it."""

    run: Callable[[], None]
    passes: int


_NO_COMPUTE = _Compute(lambda: None, 0)


class _Lanes:
    """Both copy lanes with buffers of their own, as two different cells have them."""

    def __init__(
        self, copies: Copies, clock: Clock, sizes: Sequence[int], device: torch.device
    ) -> None:
        self._copies = copies
        self._clock = clock
        rounds = max(1, round(_CUDA_BYTES / sum(sizes))) if copies.pinned else 1
        self.num_bytes = sum(sizes) * rounds
        self._rounds = rounds
        self._pairs = [
            [(_bytes(size, device), _host_bytes(size, pinned=copies.pinned)) for size in sizes]
            for _ in (_DOWN, _UP)
        ]

    def issue(self, lane: int) -> tuple[Mark, Mark]:
        """Start a lane's copies; return the moments of their start and end."""
        start = self._clock.mark()
        for _ in range(self._rounds - 1):
            self._start(lane)
        fence = self._start(lane)
        return start, self._clock.mark_after(fence, lane)

    def ms_between(self, start: Mark, end: Mark) -> float:
        """Return what a lane's copies took."""
        return self._clock.ms_between(start, end)

    def _start(self, lane: int) -> Fence:
        pairs = self._pairs[lane]
        if lane == _DOWN:
            return self._copies.to_host(pairs)
        return self._copies.to_device([(host, device) for device, host in pairs])


def _median_gb_per_s(
    lanes: _Lanes, used: Sequence[int], repeats: int, compute: _Compute = _NO_COMPUTE
) -> list[float]:
    samples = [_copy_ms(lanes, used, compute) for _ in range(repeats + 1)][1:]
    medians = [statistics.median(values) for values in zip(*samples, strict=True)]
    return [lanes.num_bytes / (max(ms, 1e-6) * 1e6) for ms in medians]


def _copy_ms(lanes: _Lanes, used: Sequence[int], compute: _Compute) -> list[float]:
    compute.run()
    marks = [lanes.issue(lane) for lane in used]
    for _ in range(compute.passes):
        compute.run()
    return [lanes.ms_between(start, end) for start, end in marks]


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _host_bytes(size: int, *, pinned: bool) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
