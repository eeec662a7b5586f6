"""A problem without a base: every size and limit is measured, given, or asked for."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from optpipe.measurements.values import DeviceFacts, MeasurementError, StageFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe.measurements.given import Given
    from optpipe.measurements.measurements import Measurements
    from optpipe.measurements.stage_times import StageTimes

__all__ = ["from_scratch", "listed"]


def from_scratch(
    measurements: Measurements, given: Given, times: Sequence[StageTimes]
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a problem, and sentences about what stands on assumptions.

    Raises
    ------
    MeasurementError
        If a size or number without a default is neither measured nor given; a line for each.
    """
    if len(given.stages) > len(times):
        raise MeasurementError(
            f"{len(given.stages)} stages are described, but times of {len(times)} were measured; "
            "add their times, or leave the others out"
        )
    stages = [_stage_facts(measurements, given, index) for index in range(len(times))]
    placement = [_device_of(measurements, stage, index) for index, stage in enumerate(stages)]
    devices = [
        given.device.or_else(_device_facts(measurements, index))
        for index in range(1 + max(placement))
    ]
    num_microbatches = (
        given.num_microbatches or measurements.num_microbatches or measurements.seen_microbatches
    )
    gaps = list(_gaps(num_microbatches, stages, devices))
    if gaps:
        raise MeasurementError("\n".join(["not measured, and a problem needs it:", *gaps]))
    links = _given_links(given, placement)
    fields = {
        "num_microbatches": num_microbatches,
        "devices": [device.known() for device in devices],
        "stages": [
            stage.known() | {"device": device} | one.fields(stage.checkpoint_bytes)
            for stage, device, one in zip(stages, placement, times, strict=True)
        ],
        "links": links,
    }
    known_links = {(link["from"], link["to"]) for link in links}
    known_links |= {(fit.source, fit.target) for fit in measurements.links}
    notes = [
        *_assumed_sizes(stages, devices),
        *_assumed_times(stages, times),
        *_free_links(placement, known_links),
    ]
    return fields, notes


def listed(numbers: Iterable[int]) -> str:
    """Return whole numbers with runs drawn together: 0-3, 7."""
    keyed = groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0])
    runs = [[number for _, number in run] for _, run in keyed]
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)


def _stage_facts(measurements: Measurements, given: Given, index: int) -> StageFacts:
    described, measured = (
        facts[index] if index < len(facts) else StageFacts()
        for facts in (given.stages, measurements.stages)
    )
    return described.or_else(given.stage).or_else(measured)


def _device_of(measurements: Measurements, stage: StageFacts, index: int) -> int:
    if stage.device is not None:
        return stage.device
    placement = measurements.placement
    return placement[index] if index < len(placement) else index


def _device_facts(measurements: Measurements, index: int) -> DeviceFacts:
    known = measurements.devices
    return known[index] if index < len(known) else DeviceFacts()


def _gaps(
    num_microbatches: int | None, stages: Sequence[StageFacts], devices: Sequence[DeviceFacts]
) -> Iterator[str]:
    if num_microbatches is None:
        yield "num_microbatches: the samples do not name their micro-batches; give it"
    bare = [index for index, stage in enumerate(stages) if stage.activation_bytes is None]
    if bare:
        yield (
            f"activation_bytes of stage {listed(bare)}: what is held from F to the backward, the "
            "received input included; give it for all stages or in a table"
        )
    unlimited = [index for index, device in enumerate(devices) if device.memory_bytes is None]
    if unlimited:
        yield f"memory_bytes of device {listed(unlimited)}: its whole memory; give it"


def _given_links(given: Given, placement: Sequence[int]) -> list[dict[str, Any]]:
    if given.link_latency_ms is None and given.link_gb_per_s is None:
        return []
    return [
        {
            "from": a,
            "to": b,
            "latency_ms": given.link_latency_ms or 0.0,
            "bandwidth_gb_per_s": given.link_gb_per_s,
        }
        for a, b in _neighbours(placement)
    ]


def _neighbours(placement: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of devices between which tensors travel, both directions."""
    there = {pair for pair in pairwise(placement) if pair[0] != pair[1]}
    return sorted(there | {(b, a) for a, b in there})


def _assumed_sizes(stages: Sequence[StageFacts], devices: Sequence[DeviceFacts]) -> Iterator[str]:
    meanings = {
        "static_bytes": "counts as 0: memory_bytes must then be what weights leave over",
        "weight_context_bytes": "counts as activation_bytes: I frees nothing",
        "offload_bytes": "counts as 0: nothing can be offloaded",
    }
    if len(stages) > 1:
        meanings["output_bytes"] = "counts as 0: transfers take a link's latency only"
    for field, meaning in meanings.items():
        bare = [index for index, stage in enumerate(stages) if getattr(stage, field) is None]
        if field == "output_bytes" and bare == [len(stages) - 1]:
            continue
        if bare:
            yield f"{field} of stage {listed(bare)} is unknown and {meaning}."
    if any(stage.offload_bytes for stage in stages):
        bare = [index for index, device in enumerate(devices) if device.d2h_gb_per_s is None]
        if bare:
            yield f"d2h_gb_per_s of device {listed(bare)} is unknown: nothing is offloaded there."


def _assumed_times(stages: Sequence[StageFacts], times: Sequence[StageTimes]) -> Iterator[str]:
    again = [
        index
        for index, (stage, one) in enumerate(zip(stages, times, strict=True))
        if stage.checkpoint_bytes is not None and one.recompute_ms is None
    ]
    if again:
        yield f"RECOMPUTE of stage {listed(again)} was not measured and takes the time of F."
    lost = [
        index
        for index, (stage, one) in enumerate(zip(stages, times, strict=True))
        if stage.checkpoint_bytes is None and one.recompute_ms is not None
    ]
    if lost:
        yield (
            f"RECOMPUTE of stage {listed(lost)} was measured, but checkpoint_bytes is unknown: "
            "nothing is recomputed."
        )


def _free_links(placement: Sequence[int], known: set[tuple[int, int]]) -> Iterator[str]:
    free = [
        f"{a} -> {b}"
        for a, b in _neighbours(placement)
        if (a, b) not in known and (b, a) not in known
    ]
    if free:
        yield f"Links {', '.join(free)} were not measured and count as free."
