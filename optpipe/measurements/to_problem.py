"""Measurements (samples of times, transfers and sizes), and the problem made of them.

Each reader (of a trace, a log or a table) and the runtime itself fill a `Measurements`;
`optpipe.measurements.to_problem` alone makes a `Problem` of it. Times are ms, sizes bytes,
bandwidths GB/s (1e9), as in a problem. A value that was not measured is None, never 0.

Without a base, an error lists the sizes and limits that were neither measured nor given.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from functools import cached_property
from itertools import combinations, groupby, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import Field

from optpipe.errors import MeasurementError, ProblemError
from optpipe.problem import (
    Bandwidth,
    Bytes,
    Count,
    Flag,
    FrozenValue,
    Index,
    Milliseconds,
    Mode,
    Name,
    Objective,
    Problem,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from optpipe.problem import LicensedPair, Stage

__all__ = [
    "BuiltProblem",
    "DeviceFacts",
    "Given",
    "LinkFit",
    "MeasuredAction",
    "MeasurementError",
    "Measurements",
    "Sample",
    "StageFacts",
    "TimeSpread",
    "Transfer",
    "build_problem",
    "fit_links",
    "spread",
    "stage_times",
]


MeasuredAction = Literal["F", "I", "W", "B", "RECOMPUTE"]
"""The actions that have a duration of their own."""

MOST_STAGES = 65_536
"""Maximum of a problem; larger numbers are not stages, and no list is made that long."""

_StageIndex = Annotated[Index, Field(lt=MOST_STAGES)]
_DeviceIndex = Annotated[Index, Field(lt=4096)]


class Sample(FrozenValue):
    """One run of one action.

    Parameters
    ----------
    stage, action
        What ran; stages are numbered in model order from 0.
    time_ms
        How long it kept the device's compute lane busy.
    microbatch, step, rank
        Which of the runs it was, where that is known. Steps are numbered from 0.
    lanes_ms
        What it computed and exchanged with experts in turn, in ms, beginning with computing: two
        entries more for each exchange. Empty if it exchanged nothing, or that is not known.
    """

    stage: _StageIndex
    action: MeasuredAction
    time_ms: Milliseconds
    microbatch: Index | None = None
    step: Index | None = None
    rank: Index | None = None
    lanes_ms: tuple[Milliseconds, ...] = ()


class Transfer(FrozenValue):
    """One message from one device to another, alone on the link; ``time_ms`` without waiting."""

    source: Index
    target: Index
    num_bytes: Annotated[Bytes, Field(gt=0)]
    time_ms: Milliseconds


class _PartlyKnown(FrozenValue):
    """Fields of which each may be unknown (None)."""

    def or_else(self, general: Self) -> Self:
        """Return these facts, each unknown one replaced by the general one."""
        return type(self)(**(general.known() | self.known()))

    def known(self) -> dict[str, Any]:
        """Return the facts that are known, by field."""
        return {name: value for name, value in self if value is not None}


class StageFacts(_PartlyKnown):
    """Known facts of a stage other than its times; fields as in `optpipe.problem.Stage`.

    ``modes``, if given, define what is offloaded and recomputed, with the times of that.
    """

    device: _DeviceIndex | None = None
    activation_bytes: Bytes | None = None
    weight_context_bytes: Bytes | None = None
    offload_bytes: Bytes | None = None
    checkpoint_bytes: Bytes | None = None
    static_bytes: Bytes | None = None
    output_bytes: Bytes | None = None
    grad_sync_ms: Milliseconds | None = None
    forward_workspace_bytes: Bytes | None = None
    backward_input_workspace_bytes: Bytes | None = None
    backward_weight_workspace_bytes: Bytes | None = None
    backward_workspace_bytes: Bytes | None = None
    recompute_workspace_bytes: Bytes | None = None
    modes: tuple[Mode, ...] | None = None


class DeviceFacts(_PartlyKnown):
    """Known facts of a device; fields as in `optpipe.problem.Device`."""

    name: Name | None = None
    memory_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    d2h_gb_per_s: Bandwidth | None = None
    h2d_gb_per_s: Bandwidth | None = None
    pcie_group: Name | None = None
    half_duplex: Flag | None = None
    host: Name | None = None


# --- The facts that the user gives: they take precedence over measured ones.


class Given(FrozenValue):
    """Facts of stages and devices, which precede measured ones, and of links, which do not.

    Parameters
    ----------
    name, num_microbatches, objective
        Of the problem. By default the name is the source of the times, and the number of
        micro-batches is the measured one.
    stages
        Facts of single stages, from stage 0 on; they precede ``stage``.
    stage, device
        Facts of every stage or device.
    link_latency_ms, link_gb_per_s
        Of every link between neighbouring stages that was not measured.
    weight_share
        Share (0-1) of a fused backward that W takes, if I and W were not measured separately.
    """

    name: Name | None = None
    num_microbatches: Count | None = None
    objective: Objective | None = None
    stages: tuple[StageFacts, ...] = ()
    stage: StageFacts = StageFacts()
    device: DeviceFacts = DeviceFacts()
    link_latency_ms: Milliseconds | None = None
    link_gb_per_s: Bandwidth | None = None
    weight_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None

    def sizes(self) -> tuple[str, ...]:
        """Return the fields that a base problem would contradict."""
        links = {"link_latency_ms": self.link_latency_ms, "link_gb_per_s": self.link_gb_per_s}
        named = [name for name, value in links.items() if value is not None]
        of_stages = [name for facts in (*self.stages, self.stage) for name in facts.known()]
        return tuple(dict.fromkeys((*of_stages, *self.device.known(), *named)))


# --- Medians and spread of repeated measurements.

_DIGITS = 6
"""Times are kept to the nanosecond: no clock used here is more precise."""


class TimeSpread(NamedTuple):
    """The distribution of repeated times of one action, in ms.

    ``mad_ms`` is the median distance from the median, which a few outliers do not move.
    """

    num_samples: int
    median_ms: float
    p5_ms: float
    p95_ms: float
    mad_ms: float


def spread(times_ms: Sequence[float]) -> TimeSpread:
    """Return the number, median, 5th and 95th percentile and median absolute deviation."""
    ordered = sorted(times_ms)
    median = statistics.median(ordered)
    # Linear between neighbours; a single time is all its quantiles.
    several = ordered if len(ordered) > 1 else 2 * ordered
    cuts = statistics.quantiles(several, n=20, method="inclusive")
    deviation = statistics.median(abs(time - median) for time in ordered)
    return TimeSpread(
        num_samples=len(ordered),
        median_ms=round(median, _DIGITS),
        p5_ms=round(cuts[0], _DIGITS),
        p95_ms=round(cuts[-1], _DIGITS),
        mad_ms=round(deviation, _DIGITS),
    )


# --- Latency and bandwidth of links, fitted to timed messages.


class LinkFit(NamedTuple):
    """A directed link: time = latency + bytes / bandwidth, and what it was fitted to.

    ``bandwidth_gb_per_s`` is None where longer messages took no longer.
    """

    source: int
    target: int
    latency_ms: float
    bandwidth_gb_per_s: float | None
    num_transfers: int
    num_sizes: int


def fit_links(transfers: Iterable[Transfer]) -> tuple[LinkFit, ...]:
    """Return one fit per directed pair of devices, in order of the pairs.

    Each message size counts once, with the median of its times. Slope and intercept are the medians
    over all pairs of sizes (Theil 1950, Sen 1968), so that one outlier moves neither. With a single
    size the whole time counts as bandwidth, because latency cannot be separated.
    """
    times: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in transfers:
        times[one.source, one.target][one.num_bytes].append(one.time_ms)
    fits = []
    for source, target in sorted(times):
        by_size = times[source, target]
        points = [(size, statistics.median(by_size[size])) for size in sorted(by_size)]
        latency_ms, ms_per_byte = _line(points)
        bandwidth = 1e-6 / ms_per_byte if ms_per_byte > 0 else None
        num_transfers = sum(map(len, by_size.values()))
        fits.append(LinkFit(source, target, latency_ms, bandwidth, num_transfers, len(points)))
    return tuple(fits)


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Return (latency in ms, ms per byte), neither negative."""
    if len(points) == 1:
        (size, time_ms) = points[0]
        return 0.0, time_ms / size
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2)]
    slope = max(0.0, statistics.median(slopes))
    latency = statistics.median(time_ms - slope * size for size, time_ms in points)
    if latency >= 0:
        return round(latency, 6), slope
    return 0.0, statistics.median(time_ms / size for size, time_ms in points)


# --- From measurements to a problem.


Value = TypeVar("Value")


def _from_scratch(
    measurements: Measurements, given: Given, times: Sequence[_StageTimes]
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a problem, and sentences about its assumptions."""
    if len(given.stages) > len(times):
        raise MeasurementError(
            f"{len(given.stages)} stages are described, but times of {len(times)} were measured; "
            "add their times, or leave the others out"
        )
    stages = [
        _at(given.stages, index, StageFacts())
        .or_else(given.stage)
        .or_else(_at(measurements.stages, index, StageFacts()))
        for index in range(len(times))
    ]
    placement = [
        _at(measurements.placement, index, index) if stage.device is None else stage.device
        for index, stage in enumerate(stages)
    ]
    devices = [
        given.device.or_else(_at(measurements.devices, index, DeviceFacts()))
        for index in range(1 + max(placement))
    ]
    num_microbatches = (
        given.num_microbatches or measurements.num_microbatches or measurements.seen_microbatches
    )
    gaps = []
    if num_microbatches is None:
        gaps.append("num_microbatches: the samples do not name their micro-batches; give it")
    if bare := [index for index, stage in enumerate(stages) if stage.activation_bytes is None]:
        gaps.append(
            f"activation_bytes of stage {_listed(bare)}: what is held from F to the backward, the "
            "received input included; give it for all stages or in a table"
        )
    if bare := [index for index, device in enumerate(devices) if device.memory_bytes is None]:
        gaps.append(f"memory_bytes of device {_listed(bare)}: its whole memory; give it")
    if gaps:
        raise MeasurementError("\n".join(["not measured, and a problem needs it:", *gaps]))
    links: list[dict[str, Any]] = []
    if given.link_latency_ms is not None or given.link_gb_per_s is not None:
        latency, rate = given.link_latency_ms or 0.0, given.link_gb_per_s
        links = [
            {"from": a, "to": b, "latency_ms": latency, "bandwidth_gb_per_s": rate}
            for a, b in _neighbours(placement)
        ]
    fields = {
        "format": f"optpipe/problem/v{2 if any(stage.modes for stage in stages) else 1}",
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
    notes = [*_assumed_sizes(stages, devices), *_assumed_times(stages, times)]
    neighbours = _neighbours(placement)
    free = [f"{a} -> {b}" for a, b in neighbours if not {(a, b), (b, a)} & known_links]
    if free:
        notes.append(f"Links {', '.join(free)} were not measured and count as free.")
    return fields, notes


def _listed(numbers: Iterable[int]) -> str:
    """Return whole numbers with runs drawn together: 0-3, 7."""
    keyed = groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0])
    runs = [[number for _, number in run] for _, run in keyed]
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)


def _at(values: Sequence[Value], index: int, default: Value) -> Value:
    return values[index] if index < len(values) else default


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
        bare = [
            index
            for index, stage in enumerate(stages)
            if getattr(stage, field) is None and not (field == "offload_bytes" and stage.modes)
        ]
        if field == "output_bytes" and bare == [len(stages) - 1]:
            continue
        if bare:
            yield f"{field} of stage {_listed(bare)} is unknown and {meaning}."
    if any(stage.offload_bytes for stage in stages):
        bare = [index for index, device in enumerate(devices) if device.d2h_gb_per_s is None]
        if bare:
            yield f"d2h_gb_per_s of device {_listed(bare)} is unknown: nothing is offloaded there."


def _assumed_times(stages: Sequence[StageFacts], times: Sequence[_StageTimes]) -> Iterator[str]:
    pairs = [
        (stage.checkpoint_bytes is not None, one.recompute_ms is not None and not stage.modes)
        for stage, one in zip(stages, times, strict=True)
    ]
    if again := [index for index, pair in enumerate(pairs) if pair == (True, False)]:
        yield f"RECOMPUTE of stage {_listed(again)} was not measured and takes the time of F."
    if lost := [index for index, pair in enumerate(pairs) if pair == (False, True)]:
        yield (
            f"RECOMPUTE of stage {_listed(lost)} was measured, but checkpoint_bytes is unknown: "
            "nothing is recomputed."
        )


# --- All that one measuring gave, as one value.


class Measurements(FrozenValue):
    """Samples of times, sizes, devices and transfers, and their source.

    Parameters
    ----------
    source
        The source of the data in words, e.g. "2 Kineto traces". It becomes the problem's name.
    num_microbatches
        Of the run, if it is known.
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

    source: str = Field(min_length=1)
    num_microbatches: Count | None = None
    samples: tuple[Sample, ...] = ()
    placement: tuple[_DeviceIndex, ...] = ()
    stages: tuple[StageFacts, ...] = ()
    devices: tuple[DeviceFacts, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def spreads(self) -> dict[tuple[int, MeasuredAction], TimeSpread]:
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
        """One more than the largest micro-batch seen, or None if samples do not have one."""
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
            number = min(1, len(steps) - 1) if num_steps is None else num_steps
            if steps and number >= len(steps):
                of_rank = "" if rank is None else f"rank {rank}: "
                raise MeasurementError(
                    f"{of_rank}{len(steps)} steps were measured and {number} are to be left out "
                    "as warm-up; leave out fewer, or measure more"
                )
            first[rank] = sorted(steps)[:number] if steps else []
        kept = tuple(s for s in self.samples if s.step is None or s.step not in first[s.rank])
        left_out = len(self.samples) - len(kept)
        if not left_out:
            return self
        note = f"{left_out} samples of the first steps are left out as warm-up."
        return self.replaced(samples=kept, notes=(*self.notes, note))

    def with_transfers(self, transfers: Iterable[Transfer]) -> Measurements:
        """Return the measurements with more messages."""
        return self.replaced(transfers=(*self.transfers, *transfers))

    def condensed(self) -> Measurements:
        """Return the medians alone: a sample for each stage and action, a message for each size.

        They make the same problem as all of them, and take little room on their way to a service.
        """
        messages: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for one in self.transfers:
            messages[one.source, one.target, one.num_bytes].append(one.time_ms)
        return self.replaced(
            samples=tuple(
                Sample(stage=stage, action=action, time_ms=found.median_ms)
                for (stage, action), found in self.spreads.items()
            ),
            transfers=tuple(
                Transfer(source=a, target=b, num_bytes=size, time_ms=statistics.median(found))
                for (a, b, size), found in sorted(messages.items())
            ),
        )

    @classmethod
    def medians_of(cls, reports: Sequence[Measurements]) -> Measurements:
        """Return the medians over reports of one run, each of which counts with its own medians.

        Times, messages and copy rates are medians. All else is that of the last report.
        """
        each = [report.condensed() for report in reports]
        num_devices = max(len(one.devices) for one in each)
        devices = []
        for index in range(num_devices):
            facts = [one.devices[index] for one in each if index < len(one.devices)]
            update = {}
            for name in ("d2h_gb_per_s", "h2d_gb_per_s"):
                rates = [rate for one in facts if (rate := getattr(one, name)) is not None]
                if rates:
                    update[name] = statistics.median(rates)
            devices.append(facts[-1].model_copy(update=update))
        together = each[-1].replaced(
            samples=tuple(sample for one in each for sample in one.samples),
            transfers=tuple(transfer for one in each for transfer in one.transfers),
            devices=tuple(devices),
        )
        return together.condensed()

    def replaced(self, **update: Any) -> Measurements:
        """Return the measurements with other fields."""
        # pydantic's own copy would take the cached medians along.
        fields = {name: getattr(self, name) for name in Measurements.model_fields}
        return Measurements(**(fields | update))

    def problem(self, given: Given | None = None, base: Problem | None = None) -> Problem:
        """Return the problem these measurements describe; see `build_problem`.

        Raises
        ------
        MeasurementError
            If a stage, a time or a size that a problem needs is missing.
        """
        return build_problem(self, given, base).problem


# --- The problem that measurements describe, with the user's facts if nothing was measured.

_NAME_CHARS = 200


class BuiltProblem(NamedTuple):
    """A problem, and sentences about its values that were not measured."""

    problem: Problem
    notes: tuple[str, ...]


def build_problem(
    measurements: Measurements, given: Given | None = None, base: Problem | None = None
) -> BuiltProblem:
    """Return the problem that measurements describe.

    Times are medians. With a base problem only its times are replaced: sizes, devices and links
    stay, measured links aside. Without one, what is given of a stage or device counts, then what
    was measured of it.

    Raises
    ------
    MeasurementError
        If something a problem needs is missing; one line per thing. Or if sizes are given that the
        base problem has.
    """
    given = given or Given()
    if base is not None and base.num_costs > 1:
        raise MeasurementError(
            f"the base problem has micro-batches of {base.num_costs} costs, and measured times do "
            "not say of which they are; give a base with equal micro-batches"
        )
    _check_stages(measurements, base)
    num_stages = len(base.stages) if base else 1 + max(measurements.spreads)[0]
    times = [
        stage_times(
            index, measurements.spreads, given.weight_share, base.stages[index] if base else None
        )
        for index in range(num_stages)
    ]
    fields, notes = (
        _from_scratch(measurements, given, times) if base is None else _replaced(base, given, times)
    )
    before = f"{base.name}, " if base is not None and base.name else ""
    name = given.name or f"{before}times from {measurements.source}"
    fields["name"] = (
        name if given.name or len(name) <= _NAME_CHARS else name[: _NAME_CHARS - 3] + "..."
    )
    if given.objective is not None:
        fields["objective"] = given.objective
    by_pair = {(link["from"], link["to"]): link for link in fields["links"]}
    device_in = _device_in(base, measurements.placement) if base else {}
    for fit in measurements.links:
        source, target = (device_in.get(end, end) for end in (fit.source, fit.target))
        by_pair[source, target] = {
            "from": source,
            "to": target,
            "latency_ms": fit.latency_ms,
            "bandwidth_gb_per_s": fit.bandwidth_gb_per_s,
        }
    fields["links"] = [by_pair[pair] for pair in sorted(by_pair)]
    try:
        problem = Problem.parse(fields)
    except ProblemError as error:
        raise MeasurementError(f"the measurements make no problem:\n{error}") from None
    said = {one.note: None for one in times if one.note}  # each once, in order of stages
    own = [
        f"Stage {_listed(index for index, one in enumerate(times) if one.note == note)}: {note}"
        for note in said
    ]
    single = [f"{fit.source} -> {fit.target}" for fit in measurements.links if fit.num_sizes == 1]
    if single:
        own.append(
            f"Messages of one size only were measured on links {', '.join(single)}: "
            "their latency is part of the bandwidth."
        )
    return BuiltProblem(problem, (*measurements.notes, *own, *notes))


def _device_in(base: Problem, placement: Sequence[int]) -> dict[int, int]:
    """Return the base problem's device for each device that was measured."""
    found: dict[int, int] = {}
    for stage, (measured, device) in enumerate(zip(placement, base.placement, strict=False)):
        if found.setdefault(measured, device) != device:
            first = placement.index(measured)
            raise MeasurementError(
                f"stages {first} and {stage} ran on one device, but the base problem has them on "
                f"devices {found[measured]} and {device}; name the problem that was run"
            )
    return found


def _check_stages(measurements: Measurements, base: Problem | None) -> None:
    measured = sorted({stage for stage, _ in measurements.spreads})
    if not measured:
        raise MeasurementError(
            f"{measurements.source}: no action was measured; measure at least F and B of each stage"
        )
    if base is not None and measured[-1] >= len(base.stages):
        raise MeasurementError(
            f"stage {measured[-1]} was measured, but the base problem has {len(base.stages)} "
            "stages, numbered from 0; name the problem that was run"
        )
    gaps = sorted(set(range(measured[-1] + 1)) - set(measured))
    if base is None and gaps:
        raise MeasurementError(
            f"stages {_listed(measured)} were measured, but not {_listed(gaps)}; "
            "add the measurements of the ranks that hold them"
        )


def _replaced(
    base: Problem, given: Given, times: Sequence[_StageTimes]
) -> tuple[dict[str, Any], list[str]]:
    if given.sizes():
        raise MeasurementError(
            f"{', '.join(given.sizes())}: given beside a base problem, which has its own; "
            "change the base problem, or leave it out"
        )
    fields, notes = base.model_dump(by_alias=True), []
    fields["stages"] = [
        stage | one.fields(stage["checkpoint_bytes"]) | one.menu(stage.get("modes", ()))
        for stage, one in zip(fields["stages"], times, strict=True)
    ]
    if base.pairs:
        fields["pairs"] = [
            pair.model_dump(by_alias=True) | {"hidden_ms": _hidden_ms(pair, times)}
            for pair in base.pairs
        ]
        notes.append("What pairs hide is the base problem's, or the shorter pass: not measured.")
    if given.num_microbatches is not None:
        fields["num_microbatches"] = given.num_microbatches
    return fields, notes


def _hidden_ms(pair: LicensedPair, times: Sequence[_StageTimes]) -> float:
    """Return what a pair of the base problem hides, of passes as they were measured.

    More than the shorter of the two cannot be hidden, however little was missing before.
    """
    of = times[pair.backward]
    backward_ms = of.backward_input_ms
    if pair.with_ == "B":
        fused_ms = of.backward_ms
        backward_ms = backward_ms + of.backward_weight_ms if fused_ms is None else fused_ms
    return min(pair.hidden_ms, times[pair.forward].forward_ms, backward_ms)


# --- The times of one stage of a problem, from the medians of what was measured.


class _StageTimes(NamedTuple):
    """Durations in ms; ``note`` lists the assumptions about the stage, or is empty."""

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    backward_ms: float | None
    recompute_ms: float | None
    note: str = ""

    def fields(self, checkpoint_bytes: int | None) -> dict[str, float | None]:
        """Return the fields of a problem's stage that keeps so many bytes for a RECOMPUTE.

        A RECOMPUTE is a forward again, and takes its time where it was not measured.
        """
        again = self.forward_ms if self.recompute_ms is None else self.recompute_ms
        return {
            "forward_ms": self.forward_ms,
            "backward_input_ms": self.backward_input_ms,
            "backward_weight_ms": self.backward_weight_ms,
            "backward_ms": self.backward_ms,
            "recompute_ms": None if checkpoint_bytes is None else again,
        }

    def menu(self, modes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a menu, if there is one, whose RECOMPUTE takes as long as was measured."""
        if not modes or self.recompute_ms is None:
            return {}
        return {
            "modes": [
                {**one, "recompute_ms": self.recompute_ms} if one["recompute"] == "apart" else one
                for one in modes
            ]
        }


def stage_times(
    stage: int,
    spreads: Mapping[tuple[int, MeasuredAction], TimeSpread],
    weight_share: float | None,
    base: Stage | None = None,
) -> _StageTimes:
    """Return the times of a stage.

    Measured I and W are used as they are, and B, too, if it was measured. If only B was measured,
    it is divided into I and W by ``weight_share``, else as in the base problem. Else all of it is I
    and W takes nothing, as in the runtime for modules whose backward cannot be split.

    Raises
    ------
    MeasurementError
        If F, or both I + W and B, are neither measured nor in a base problem.
    """
    medians = {action: one.median_ms for (of, action), one in spreads.items() if of == stage}
    forward = medians.get("F", base.forward_ms if base else None)
    if forward is None:
        raise MeasurementError(_missing(stage, medians, "F"))
    backward_input, backward_weight, fused, note = _backward(stage, medians, weight_share, base)
    recompute = medians.get("RECOMPUTE", base.recompute_ms if base else None)
    if "F" not in medians:
        note = f"{note} F was not measured; the base problem's time is kept.".strip()
    if (
        "RECOMPUTE" not in medians
        and base is not None
        and (base.can_recompute or any(mode.recompute == "apart" for mode in base.modes))
    ):
        note = f"{note} RECOMPUTE was not measured; the base problem's time is kept.".strip()
    return _StageTimes(forward, backward_input, backward_weight, fused, recompute, note)


def _backward(
    stage: int,
    medians: Mapping[MeasuredAction, float],
    weight_share: float | None,
    base: Stage | None,
) -> tuple[float, float, float | None, str]:
    fused = medians.get("B")
    if "I" in medians and "W" in medians:
        return medians["I"], medians["W"], fused, ""
    if fused is not None:
        split = base.backward_input_ms + base.backward_weight_ms if base else 0.0
        if weight_share is not None:
            share, note = (
                weight_share,
                f"only B was measured; W is taken as {weight_share:g} of it.",
            )
        elif base is not None and split > 0:
            share = base.backward_weight_ms / split
            note = "only B was measured; it is split as in the base."
        else:
            share, note = (
                0.0,
                (
                    "only B was measured; all of it counts as I and W as nothing. "
                    "Give weight_share, or measure I and W, where the backward can be split."
                ),
            )
        weight = round(share * fused, 6)
        return round(fused - weight, 6), weight, fused, note
    if base is not None:
        return (
            medians.get("I", base.backward_input_ms),
            medians.get("W", base.backward_weight_ms),
            base.backward_ms,
            "neither B nor I and W were measured; the base problem's times are kept.",
        )
    raise MeasurementError(_missing(stage, medians, "I and W, or B"))


def _missing(stage: int, medians: Mapping[MeasuredAction, float], wanted: str) -> str:
    found = ", ".join(sorted(medians)) or "nothing"
    return (
        f"stage {stage}: {found} was measured, but a problem needs {wanted}; "
        "measure it, or name a base problem that has its times"
    )
