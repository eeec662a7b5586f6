"""From the reports of a training run to the problem as measured: other times, the same bytes.

A time is the median over the newest reports, each of which counts with its own median. Where one
way of doing a backward was never measured because the schedule in use does not do it so, its time
grows or shrinks with those of the same stage that were: a stage that computes more slowly does so
in every form. A RECOMPUTE that was not measured goes with F.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from optpipe.measurements import DeviceFacts, Measurements, Sample
from optpipe.problem import Problem
from optpipe_api.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe.measurements import MeasuredAction
    from optpipe.problem import Device, Stage

__all__ = ["check_stages", "condensed", "measured_problem", "times_of"]

_BACKWARDS: tuple[MeasuredAction, ...] = ("I", "W", "B")


def condensed(measurements: Measurements) -> str:
    """Return what is kept of a report, as JSON: one time per stage and action, the medians.

    Raises
    ------
    RequestError
        If nothing was measured.
    """
    if not measurements.samples:
        raise RequestError("actions.samples is empty; report the times of at least one action")
    kept = measurements.condensed()
    # What is said of stages is about their sizes, and those stay.
    wanted = {"source", "samples", "devices", "transfers"}
    return kept.model_dump_json(include=wanted, exclude_defaults=True)


def check_stages(registered: str, report: str) -> None:
    """Refuse a report, as `condensed` leaves it, of stages that a problem does not have.

    Raises
    ------
    RequestError
        With the stage.
    """
    num_stages = len(Problem.model_validate_json(registered).stages)
    told = Measurements.model_validate_json(report)
    last = max(sample.stage for sample in told.samples)
    if last >= num_stages:
        raise RequestError(
            f"actions.samples name stage {last}, but the deployment has {num_stages} stages, "
            "numbered from 0; report to the deployment that runs"
        )


def measured_problem(registered: str, reports: Sequence[str]) -> str:
    """Return a problem with the times of reports, oldest first, as `condensed` leaves them.

    Raises
    ------
    MeasurementError
        If a measured link joins devices that are not there.
    """
    base = Problem.model_validate_json(registered)
    told = [Measurements.model_validate_json(report) for report in reports]
    measured = Measurements(
        source="training",
        samples=tuple(sample for one in told for sample in one.samples),
        placement=base.placement,
        transfers=tuple(transfer for one in told for transfer in one.transfers),
    )
    inferred = tuple(_inferred(measured, base.stages))
    whole = Measurements(
        source=measured.source,
        samples=measured.samples + inferred,
        placement=measured.placement,
        transfers=measured.transfers,
    )
    rates = [one.devices for one in told]
    devices = tuple(
        _with_rates(device, [facts[index] for facts in rates if index < len(facts)])
        for index, device in enumerate(base.devices)
    )
    problem = whole.problem(base=base)
    return problem.model_copy(update={"name": base.name, "devices": devices}).model_dump_json(
        by_alias=True
    )


def times_of(stage: Stage) -> dict[MeasuredAction, float]:
    """Return how long each action of a stage takes, in ms; none that it cannot do."""
    times: dict[MeasuredAction, float] = {
        "F": stage.forward_ms,
        "I": stage.backward_input_ms,
        "W": stage.backward_weight_ms,
    }
    if stage.backward_ms is not None:
        times["B"] = stage.backward_ms
    if stage.recompute_ms is not None:
        times["RECOMPUTE"] = stage.recompute_ms
    return times


def _inferred(measured: Measurements, stages: Sequence[Stage]) -> Iterator[Sample]:
    """Yield times of the actions that were not measured, of stages of which something was."""
    for index, stage in enumerate(stages):
        known = {
            action: found.median_ms
            for (of, action), found in measured.spreads.items()
            if of == index
        }
        for action, planned_ms in times_of(stage).items():
            if known and action not in known:
                like = _BACKWARDS if action in _BACKWARDS else ("F",)
                time_ms = planned_ms * _slowdown(stage, known, like)
                yield Sample(stage=index, action=action, time_ms=time_ms)


def _slowdown(
    stage: Stage, known: dict[MeasuredAction, float], like: Iterable[MeasuredAction]
) -> float:
    """Return how much longer than planned the known ones among some actions take; 1 = unknown."""
    planned = times_of(stage) | {"B": stage.fused_backward_ms}
    found = [action for action in like if action in known]
    planned_ms = sum(planned[action] for action in found)
    return sum(known[action] for action in found) / planned_ms if planned_ms > 0 else 1.0


def _with_rates(device: Device, facts: Sequence[DeviceFacts]) -> Device:
    """Return a device with the median of its measured copy rates.

    Where copies wait for each other - shared uplinks, half duplex - a measured time holds the
    waiting, which the simulator adds by itself: there the rates stay.
    """
    if not device.can_offload or device.half_duplex or device.pcie_group is not None:
        return device
    down = [one.d2h_gb_per_s for one in facts if one.d2h_gb_per_s is not None]
    up = [one.h2d_gb_per_s for one in facts if one.h2d_gb_per_s is not None]
    update = {"d2h_gb_per_s": statistics.median(down)} if down else {}
    return device.model_copy(
        update=update | ({"h2d_gb_per_s": statistics.median(up)} if up else {})
    )
