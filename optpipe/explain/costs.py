"""What a schedule costs, in ms and bytes: the numbers that a difference of schedules compares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from optpipe.action import ActionType
from optpipe.explain.difference import Cost
from optpipe.explain.idle import idle_times
from optpipe.explain.values import IdleCause
from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.simulate import simulate
from optpipe.timeline import bubble_rate

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["record_costs", "schedule_costs"]

_Row = tuple[Literal["ms", "bytes", "share"], float | int | None]


def schedule_costs(problem: Problem, before: Programs, after: Programs) -> tuple[Cost, ...]:
    """Return what two legal schedules of a problem cost.

    Makespan and span, bubble rates of both, the memory peaks of devices and hosts, the bytes moved
    to the hosts, the time spent on RECOMPUTE, and the idle time by cause (as `idle_times`, summed
    over devices; causes that neither has are left out).
    """
    return _joined(_measured(problem, before), _measured(problem, after))


def record_costs(before: Schedule | None, after: Schedule | None) -> tuple[Cost, ...]:
    """Return what two schedules say of themselves; nothing where neither says anything."""
    return _joined(_said(before), _said(after))


def _joined(before: dict[str, _Row], after: dict[str, _Row]) -> tuple[Cost, ...]:
    names = [*before, *(name for name in after if name not in before)]
    return tuple(
        Cost(
            name=name,
            unit=(before.get(name) or after[name])[0],
            before=before[name][1] if name in before else _absent(name),
            after=after[name][1] if name in after else _absent(name),
        )
        for name in names
    )


def _absent(name: str) -> int | None:
    return 0 if name.startswith("idle, ") else None


def _measured(problem: Problem, programs: Programs) -> dict[str, _Row]:
    run = simulate(problem, programs)
    peaks = [device_peak_bytes(problem, device, row) for device, row in enumerate(programs)]
    actions = [action for row in programs for action in row]
    moved = (a.stage for a in actions if a.type is ActionType.OFFLOAD)
    again = (a.stage for a in actions if a.type is ActionType.RECOMPUTE)
    idle = idle_times(problem, programs, run)
    rows = _rows(run.makespan_ms, run.span_ms, peaks, host_peak_bytes(problem, programs))
    rows["bubble of the makespan"] = "share", bubble_rate(problem, run.makespan_ms)
    rows["bubble of the span"] = "share", bubble_rate(problem, run.span_ms)
    rows["offloaded"] = "bytes", sum(problem.stages[s].offload_bytes for s in moved)
    rows["recomputation"] = "ms", sum(problem.stages[s].recompute_ms or 0.0 for s in again)
    for cause in IdleCause:
        total = sum(device.causes.get(cause, 0.0) for device in idle)
        if total:
            rows[f"idle, {cause}"] = "ms", total
    return rows


def _said(schedule: Schedule | None) -> dict[str, _Row]:
    if schedule is None:
        return {}
    peaks = list(schedule.peak_bytes)
    rows = _rows(schedule.makespan_ms, schedule.span_ms, peaks, schedule.host_peak_bytes)
    if schedule.bound_ms is not None:
        rows["proven bound"] = "ms", schedule.bound_ms
    return rows


def _rows(
    makespan_ms: float, span_ms: float, peaks: list[int], host_peaks: dict[str, int]
) -> dict[str, _Row]:
    rows: dict[str, _Row] = {"makespan": ("ms", makespan_ms), "span": ("ms", span_ms)}
    for device, peak in enumerate(peaks):
        rows[f"peak memory of device {device}"] = "bytes", peak
    for host, peak in sorted(host_peaks.items()):
        rows[f"peak memory of host {host}"] = "bytes", peak
    return rows
