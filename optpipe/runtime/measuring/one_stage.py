"""Measures one stage: bytes, times, and how fast its activations are copied."""

from __future__ import annotations

import math
import statistics
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from optpipe.errors import InputError
from optpipe.runtime.measuring.memory import (
    Footprint,
    StageMemory,
    measure_footprint,
    measure_memory,
)
from optpipe.runtime.measuring.times import Durations, time_passes, undisturbed
from optpipe.runtime.offload import make_copies
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from optpipe.runtime.measuring.times import Clock, Mark, StageUnderTest
    from optpipe.runtime.offload import Copies, Fence

__all__ = [
    "Bandwidths",
    "Effort",
    "Rate",
    "StageResult",
    "measure_bandwidths",
    "measure_one",
    "moved_to",
]


# --- How fast activations go to the host and come back: alone, both ways together, and under
# compute. The copies are those of an OFFLOAD and a RELOAD of the stage: as many, as large, on the
# same lanes. On the CPU a copy has ended when it was issued: both directions and compute take
# turns, and what "under compute" adds is that the caches are cold.

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


class Effort(NamedTuple):
    """How often things are run: warm-ups are dropped, repeats are kept."""

    repeats: int = 20
    warmups: int = 5


class StageResult(NamedTuple):
    """All numbers of one stage; ``bandwidths`` is None where nothing can be offloaded."""

    footprint: Footprint
    memory: StageMemory
    durations: Durations
    bandwidths: Bandwidths | None


def measure_one(
    stage: StageUnderTest, clock: Clock, effort: Effort, min_offload_bytes: int
) -> tuple[StageResult, tuple[Tensor, ...]]:
    """Return a stage's numbers and what it sends on; the module is left as it was."""
    with undisturbed(stage.module, stage.device):
        footprint = measure_footprint(stage, min_offload_bytes)
        memory = measure_memory(stage)
        durations = time_passes(
            stage,
            clock,
            repeats=effort.repeats,
            warmups=effort.warmups,
            can_split=footprint.split.is_possible,
        )
        bandwidths = _bandwidths(stage, clock, effort, footprint, durations)
        outputs = tuple(output.detach() for output in stage.forward(stage.receive()).outputs)
    return StageResult(footprint, memory, durations, bandwidths), outputs


def _bandwidths(
    stage: StageUnderTest, clock: Clock, effort: Effort, footprint: Footprint, durations: Durations
) -> Bandwidths | None:
    if not footprint.offload_sizes:
        return None
    passes = (ActionType.FORWARD, ActionType.FULL_BACKWARD)
    return measure_bandwidths(
        make_copies(stage.device),
        clock,
        footprint.offload_sizes,
        stage.device,
        compute=lambda: stage.backward(stage.forward(stage.receive())),
        compute_ms=sum(statistics.median(durations[kind]) for kind in passes),
        repeats=effort.repeats,
    )


@contextmanager
def moved_to(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Hold a module on a device inside the context, and where it was afterwards.

    Raises
    ------
    InputError
        If it lies on several devices, or has no values yet.
    """
    homes = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if homes <= {device}:
        yield
        return
    if len(homes) > 1 or any(home.type == "meta" for home in homes):
        raise InputError(
            f"a stage's tensors are on {', '.join(sorted(map(str, homes)))}: they must lie "
            "together, and have values; put the module on the CPU or on one GPU"
        )
    module.to(device)
    try:
        yield
    finally:
        module.to(homes.pop())
