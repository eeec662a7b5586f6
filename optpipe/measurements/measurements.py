"""All that one measuring gave, as one value."""

from __future__ import annotations

import statistics
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from optpipe.measurements.build import build_problem
from optpipe.measurements.links import LinkFit, fit_links
from optpipe.measurements.spread import Spread, spread
from optpipe.measurements.values import (
    DeviceFacts,
    MeasuredAction,
    MeasurementError,
    Sample,
    StageFacts,
    Transfer,
)
from optpipe.problem import Count, Index

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe.measurements.given import Given
    from optpipe.problem import Problem

__all__ = ["Measurements"]


class Measurements(BaseModel):
    """Samples of times, sizes, devices and transfers, and how they came about.

    Parameters
    ----------
    source
        What was read or run, for people: "2 Kineto traces", say. It becomes the problem's name.
    num_microbatches
        Of the run, where it says so.
    samples
        Runs of actions, in any order.
    placement
        Device of each stage; empty where unknown: then stage s is on device s.
    stages
        What is known of each stage besides times, by stage.
    devices
        What is known of each device, by device.
    transfers
        Messages between devices.
    notes
        Whole sentences about how to read the numbers: assumptions, and what is missing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    source: str = Field(min_length=1)
    num_microbatches: Count | None = None
    samples: tuple[Sample, ...] = ()
    placement: tuple[Index, ...] = ()
    stages: tuple[StageFacts, ...] = ()
    devices: tuple[DeviceFacts, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def spreads(self) -> dict[tuple[int, MeasuredAction], Spread]:
        """Median and spread of every measured (stage, action), in their order."""
        times: dict[tuple[int, MeasuredAction], list[float]] = defaultdict(list)
        for sample in self.samples:
            times[sample.stage, sample.action].append(sample.time_ms)
        return {key: spread(times[key]) for key in sorted(times)}

    @cached_property
    def links(self) -> tuple[LinkFit, ...]:
        """Latency and bandwidth of each pair of devices that exchanged messages."""
        return fit_links(self.transfers)

    @property
    def seen_microbatches(self) -> int | None:
        """One more than the largest micro-batch seen, or None where samples do not say theirs."""
        known = [one.microbatch for one in self.samples if one.microbatch is not None]
        return 1 + max(known) if known else None

    def without_warmup(self, num_steps: int | None = None) -> Measurements:
        """Return the measurements without the first steps of each rank.

        Parameters
        ----------
        num_steps
            How many; None leaves out one wherever a rank measured at least two.

        Raises
        ------
        MeasurementError
            If nothing would be left of a rank.
        """
        first: dict[int | None, list[int]] = {}
        for rank in {sample.rank for sample in self.samples}:
            steps = {s.step for s in self.samples if s.rank == rank and s.step is not None}
            first[rank] = _warmup(sorted(steps), num_steps, rank)
        kept = tuple(s for s in self.samples if s.step is None or s.step not in first[s.rank])
        left_out = len(self.samples) - len(kept)
        if not left_out:
            return self
        note = f"{left_out} samples of the first steps are left out as warm-up."
        return self._replaced(samples=kept, notes=(*self.notes, note))

    def with_transfers(self, transfers: Iterable[Transfer]) -> Measurements:
        """Return the measurements with more messages."""
        return self._replaced(transfers=(*self.transfers, *transfers))

    def condensed(self) -> Measurements:
        """Return the medians alone: a sample for each stage and action, a message for each size.

        They make the same problem as all of them, and take little room on their way to a service.
        """
        messages: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for one in self.transfers:
            messages[one.source, one.target, one.num_bytes].append(one.time_ms)
        return self._replaced(
            samples=tuple(
                Sample(stage=stage, action=action, time_ms=found.median_ms)
                for (stage, action), found in self.spreads.items()
            ),
            transfers=tuple(
                Transfer(source=a, target=b, num_bytes=size, time_ms=statistics.median(found))
                for (a, b, size), found in sorted(messages.items())
            ),
        )

    def _replaced(self, **update: Any) -> Measurements:
        # pydantic's own copy would take the cached medians along.
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **update})

    def problem(self, given: Given | None = None, base: Problem | None = None) -> Problem:
        """Return the problem these measurements describe; see `build_problem`.

        Raises
        ------
        MeasurementError
            If a stage, a time or a size that a problem needs is missing.
        """
        return build_problem(self, given, base).problem


def _warmup(steps: list[int], num_steps: int | None, rank: int | None) -> list[int]:
    if num_steps is None:
        return steps[:1] if len(steps) > 1 else []
    if steps and num_steps >= len(steps):
        of_rank = "" if rank is None else f"rank {rank}: "
        raise MeasurementError(
            f"{of_rank}{len(steps)} steps were measured and {num_steps} are to be left out as "
            "warm-up; leave out fewer, or measure more"
        )
    return steps[:num_steps]
