"""A schedule against the clock: lanes, bubbles and memory curves, for people and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from optpipe.action import Action, ActionType
from optpipe.memory import memory_walk
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.simulate import Simulation

__all__ = ["Interval", "Lane", "Timeline", "bubble_rate", "make_timeline", "timeline_of"]

Lane = Literal["compute", "d2h", "h2d", "grad_sync"]
_LANES: dict[ActionType, Lane] = {ActionType.OFFLOAD: "d2h", ActionType.RELOAD: "h2d"}


@dataclass(frozen=True, slots=True)
class Interval:
    """One action on one lane, in ms; ``action`` is None for a gradient reduction."""

    device: int
    lane: Lane
    action: Action | None
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happens when.

    Attributes
    ----------
    intervals
        Per device, in program order; RELEASE, which occupies nothing, is left out.
    bubbles
        Per device, the (start, end) in ms between its first start and its last end during which
        its compute lane is idle.
    memory
        Per device, (time in ms, bytes held from then on), in program order at equal times; static
        bytes included, workspaces not. The first point is (0, static bytes).
    """

    intervals: tuple[tuple[Interval, ...], ...]
    bubbles: tuple[tuple[tuple[float, float], ...], ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]
    makespan_ms: float
    span_ms: float
    makespan_bubble_rate: float
    span_bubble_rate: float


def bubble_rate(problem: Problem, length_ms: float) -> float:
    """Return 1 - busy / length, busy = compute time of the busiest device; 0 for length 0."""
    return 1.0 - problem.busy_ms / length_ms if length_ms > 0 else 0.0


def make_timeline(
    problem: Problem, programs: Programs, durations: Mapping[Action, float] | None = None
) -> Timeline:
    """Simulate legal programs and return their timeline (arguments as `simulate`)."""
    return timeline_of(problem, programs, simulate(problem, programs, durations))


def timeline_of(problem: Problem, programs: Programs, run: Simulation) -> Timeline:
    """Return the timeline of a simulation of these very programs."""
    intervals: list[tuple[Interval, ...]] = []
    for device, (program, row) in enumerate(zip(programs, run.times, strict=True)):
        held = [
            Interval(device, _LANES.get(action.type, "compute"), action, at.start, at.end)
            for action, at in zip(program, row, strict=True)
            if action.type is not ActionType.RELEASE
        ]
        held += [
            Interval(device, "grad_sync", None, sync.start, sync.end)
            for sync in run.grad_syncs
            if sync.device == device
        ]
        intervals.append(tuple(held))
    return Timeline(
        intervals=tuple(intervals),
        bubbles=tuple(_idle(row) for row in intervals),
        memory=tuple(
            _memory_curve(problem, device, programs, run) for device in range(len(programs))
        ),
        makespan_ms=run.makespan_ms,
        span_ms=run.span_ms,
        makespan_bubble_rate=bubble_rate(problem, run.makespan_ms),
        span_bubble_rate=bubble_rate(problem, run.span_ms),
    )


def _idle(row: tuple[Interval, ...]) -> tuple[tuple[float, float], ...]:
    compute = [interval for interval in row if interval.lane == "compute"]
    return tuple(
        (left.end, right.start) for left, right in pairwise(compute) if right.start > left.end
    )


def _memory_curve(
    problem: Problem, device: int, programs: Programs, run: Simulation
) -> tuple[tuple[float, int], ...]:
    curve = [(0.0, problem.static_bytes_of(device))]
    steps = memory_walk(problem, device, programs[device])
    for action, step, at in zip(programs[device], steps, run.times[device], strict=True):
        if step.after == step.before:
            continue
        if action.type is ActionType.RELOAD:
            moment = at.issue
        else:
            moment = at.start if step.taken_at_start else at.end
        curve.append((moment, step.after))
    return tuple(curve)
