"""The problem that measurements describe, with what people say where nothing was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import ProblemError
from optpipe.measurements.from_scratch import from_scratch, listed
from optpipe.measurements.given import Given
from optpipe.measurements.stage_times import StageTimes, stage_times
from optpipe.measurements.values import MeasurementError
from optpipe.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.measurements.measurements import Measurements

__all__ = ["BuiltProblem", "build_problem"]

_NAME_CHARS = 200


class BuiltProblem(NamedTuple):
    """A problem, and sentences that say what in it is not measured."""

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
    _check_stages(measurements, base)
    num_stages = len(base.stages) if base else _num_stages(measurements)
    times = [
        stage_times(
            index, measurements.spreads, given.weight_share, base.stages[index] if base else None
        )
        for index in range(num_stages)
    ]
    fields, notes = (
        from_scratch(measurements, given, times) if base is None else _replaced(base, given, times)
    )
    fields["name"] = given.name or _name(measurements, base)
    if given.objective is not None:
        fields["objective"] = given.objective
    fields["links"] = _with_measured_links(fields["links"], measurements, base)
    try:
        problem = Problem.parse(fields)
    except ProblemError as error:
        raise MeasurementError(f"the measurements make no problem:\n{error}") from None
    own = [*_time_notes(times), *_link_notes(measurements)]
    return BuiltProblem(problem, (*measurements.notes, *own, *notes))


def _with_measured_links(
    links: Sequence[dict[str, Any]], measurements: Measurements, base: Problem | None
) -> list[dict[str, Any]]:
    by_pair = {(link["from"], link["to"]): link for link in links}
    device_in = _device_in(base, measurements.placement) if base else {}
    for fit in measurements.links:
        pair = device_in.get(fit.source, fit.source), device_in.get(fit.target, fit.target)
        by_pair[pair] = fit.as_link() | {"from": pair[0], "to": pair[1]}
    return [by_pair[pair] for pair in sorted(by_pair)]


def _time_notes(times: Sequence[StageTimes]) -> list[str]:
    said = {one.note: None for one in times if one.note}  # each once, in order of stages
    return [
        f"Stage {listed(index for index, one in enumerate(times) if one.note == note)}: {note}"
        for note in said
    ]


def _link_notes(measurements: Measurements) -> list[str]:
    single = [f"{fit.source} -> {fit.target}" for fit in measurements.links if fit.num_sizes == 1]
    if not single:
        return []
    return [
        f"Messages of one size only were measured on links {', '.join(single)}: "
        "their latency is part of the bandwidth."
    ]


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
            f"stages {listed(measured)} were measured, but not {listed(gaps)}; "
            "add the measurements of the ranks that hold them"
        )


def _num_stages(measurements: Measurements) -> int:
    return 1 + max(stage for stage, _ in measurements.spreads)


def _name(measurements: Measurements, base: Problem | None) -> str:
    before = f"{base.name}, " if base is not None and base.name else ""
    name = f"{before}times from {measurements.source}"
    return name if len(name) <= _NAME_CHARS else name[: _NAME_CHARS - 3] + "..."


def _replaced(
    base: Problem, given: Given, times: Sequence[StageTimes]
) -> tuple[dict[str, Any], list[str]]:
    if given.sizes():
        raise MeasurementError(
            f"{', '.join(given.sizes())}: given beside a base problem, which has its own; "
            "change the base problem, or leave it out"
        )
    fields = base.model_dump(by_alias=True)
    fields["stages"] = [
        stage | one.fields(stage["checkpoint_bytes"])
        for stage, one in zip(fields["stages"], times, strict=True)
    ]
    if given.num_microbatches is not None:
        fields["num_microbatches"] = given.num_microbatches
    return fields, []
