"""Measures one stage: bytes, times, and how fast its activations are copied."""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from optpipe.action import ActionType
from optpipe.errors import InputError
from optpipe.runtime.copies import make_copies
from optpipe.runtime.measuring.bandwidth import Bandwidths, measure_bandwidths
from optpipe.runtime.measuring.durations import Durations, time_passes
from optpipe.runtime.measuring.footprint import Footprint, measure_footprint
from optpipe.runtime.measuring.under_test import undisturbed
from optpipe.runtime.measuring.workspace import Memory, measure_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor, nn

    from optpipe.runtime.measuring.clock import Clock
    from optpipe.runtime.measuring.under_test import StageUnderTest

__all__ = ["Effort", "StageResult", "measure_one", "moved_to"]


class Effort(NamedTuple):
    """How often things are run: warm-ups are dropped, repeats are kept."""

    repeats: int = 20
    warmups: int = 5


class StageResult(NamedTuple):
    """All numbers of one stage; ``bandwidths`` is None where nothing can be offloaded."""

    footprint: Footprint
    memory: Memory
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
