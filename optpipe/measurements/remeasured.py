"""The problem of a training run with measured times: other times, the same bytes.

The running schedule may leave some forms of a backward unmeasured. Their times change by the same
factor as the measured backwards of the stage. An unmeasured RECOMPUTE changes with F.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.measurements.to_problem import Measurements, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.measurements.to_problem import DeviceFacts, MeasuredAction
    from optpipe.problem import Device, Problem
    from optpipe.stage import Stage

__all__ = ["measured_problem", "named_times", "times_of"]

_BACKWARDS: tuple[MeasuredAction, ...] = ("I", "W", "B")
_WORDS: dict[MeasuredAction, str] = {
    "F": "forward",
    "I": "input backward",
    "W": "weight backward",
    "B": "backward",
    "RECOMPUTE": "recomputation",
}


def measured_problem(planned: Problem, measurements: Measurements) -> Problem:
    """Return a problem with measured times; sizes, placement and micro-batches stay.

    Raises `MeasurementError` if a measured link joins devices that do not exist.
    """
    samples = measurements.samples + tuple(_infer_samples(measurements, planned.stages))
    times = Measurements(
        source=measurements.source,
        samples=samples,
        placement=planned.placement,
        transfers=measurements.transfers,
    )
    facts = measurements.devices
    devices = tuple(
        _with_rates(device, facts[index]) if index < len(facts) else device
        for index, device in enumerate(planned.devices)
    )
    update = {"name": planned.name, "devices": devices}
    return times.problem(base=planned).model_copy(update=update)


def times_of(stage: Stage) -> dict[MeasuredAction, float]:
    """Return the duration of each action that a stage has, in ms."""
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


def named_times(problem: Problem) -> Iterator[tuple[str, float]]:
    """Yield every duration in ms with its name; the same names whatever the times."""
    for index, stage in enumerate(problem.stages):
        times = times_of(stage) | {"B": stage.fused_backward_ms}
        for action, word in _WORDS.items():
            yield f"{word} of stage {index}", times.get(action, 0.0)
        moved = problem.can_offload(index)
        yield f"offload of stage {index}", problem.offload_ms(index) if moved else 0.0
        yield f"reload of stage {index}", problem.reload_ms(index) if moved else 0.0
    for index, (there, back) in enumerate(problem.boundary_ms):
        yield f"transfer from stage {index} to {index + 1}", there
        yield f"transfer from stage {index + 1} to {index}", back


def _infer_samples(measured: Measurements, stages: Sequence[Stage]) -> Iterator[Sample]:
    """Yield samples of the unmeasured actions of each stage that has measured ones."""
    for index, stage in enumerate(stages):
        known = {
            action: spread.median_ms
            for (of, action), spread in measured.spreads.items()
            if of == index
        }
        planned = times_of(stage) | {"B": stage.fused_backward_ms}
        for action, planned_ms in times_of(stage).items():
            if not known or action in known:
                continue
            group = _BACKWARDS if action in _BACKWARDS else ("F",)
            similar = [one for one in group if one in known]
            similar_ms = sum(planned[one] for one in similar)
            slowdown = sum(known[one] for one in similar) / similar_ms if similar_ms > 0 else 1.0
            yield Sample(stage=index, action=action, time_ms=planned_ms * slowdown)


def _with_rates(device: Device, facts: DeviceFacts) -> Device:
    """Return a device with its measured copy rates.

    The rates do not change where copies wait for each other, because of shared uplinks or half
    duplex. There a measured time includes the wait, which the simulator adds, too.
    """
    if not device.can_offload or device.half_duplex or device.pcie_group is not None:
        return device
    rates = {name: getattr(facts, name) for name in ("d2h_gb_per_s", "h2d_gb_per_s")}
    return device.model_copy(update={k: rate for k, rate in rates.items() if rate is not None})
