"""A schedule as columns of numbers: one bar per action, one memory curve per device.

Shared by the image files and the interactive chart; knows nothing of colours, pixels or libraries
that draw. A hundred thousand actions are nine arrays, not a hundred thousand objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import ActionType
from optpipe.memory import memory_walk
from optpipe.simulate import simulate
from optpipe.timeline import timeline_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.timeline import Interval, Lane

__all__ = ["KINDS", "LANES", "NO_MICROBATCH", "Bars", "Curve", "Drawing", "drawing_of"]

LANES: tuple[Lane, ...] = ("compute", "d2h", "h2d", "grad_sync")
"""What the column `Bars.lane` counts in."""

KINDS: tuple[ActionType | None, ...] = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
    ActionType.RECOMPUTE,
    ActionType.OFFLOAD,
    ActionType.RELOAD,
    None,
)
"""What the column `Bars.kind` counts in; None is a gradient reduction. RELEASE occupies nothing."""

NO_MICROBATCH = -1
"""In the columns `Bars.stage` and `Bars.microbatch`: a gradient reduction has neither."""

_LANE_CODE = {lane: code for code, lane in enumerate(LANES)}
_KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bars:
    """Equally long columns, a row per bar: device by device, each in program order.

    Attributes
    ----------
    device, stage, microbatch
        Which one; int32. A gradient reduction has `NO_MICROBATCH` for stage and micro-batch.
    lane, kind
        Places in `LANES` and `KINDS`; int8.
    start, end
        ms from the first start of all; float64.
    before, after
        Bytes that the device holds before and after the action, in program order, static bytes
        included and workspaces not; int64.
    """

    device: NDArray[np.int32]
    lane: NDArray[np.int8]
    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """The memory of one device: ``held[i]`` bytes from ``moments[i]`` ms on.

    Moments do not decrease. The first is 0; the last `held` lasts to the end.
    """

    moments: NDArray[np.float64]
    held: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawing:
    """Everything about one schedule that a picture shows; lengths in ms."""

    bars: Bars
    memory: tuple[Curve, ...]
    makespan_ms: float
    span_ms: float


def drawing_of(problem: Problem, programs: Programs) -> Drawing:
    """Simulate legal programs and return them as columns.

    Raises
    ------
    IllegalScheduleError
        If the programs get stuck.
    """
    timeline = timeline_of(problem, programs, simulate(problem, programs))
    curves = tuple(_curve(points) for points in timeline.memory)
    rows = [row for device in timeline.intervals for row in device]
    around = [
        _held_around(problem, device, programs, intervals, curves[device])
        for device, intervals in enumerate(timeline.intervals)
    ]
    held = np.concatenate([*around, np.empty((0, 2), np.int64)])
    return Drawing(
        bars=_bars(rows, held),
        memory=curves,
        makespan_ms=timeline.makespan_ms,
        span_ms=timeline.span_ms,
    )


def _bars(rows: Sequence[Interval], held: NDArray[np.int64]) -> Bars:
    actions = [row.action for row in rows]
    return Bars(
        device=np.array([row.device for row in rows], np.int32),
        lane=np.array([_LANE_CODE[row.lane] for row in rows], np.int8),
        kind=np.array([_KIND_CODE[act.type if act else None] for act in actions], np.int8),
        stage=np.array([act.stage if act else NO_MICROBATCH for act in actions], np.int32),
        microbatch=np.array(
            [act.microbatch if act else NO_MICROBATCH for act in actions], np.int32
        ),
        start=np.array([row.start for row in rows], np.float64),
        end=np.array([row.end for row in rows], np.float64),
        before=held[:, 0],
        after=held[:, 1],
    )


def _curve(points: Sequence[tuple[float, int]]) -> Curve:
    return Curve(
        moments=np.array([moment for moment, _ in points], np.float64),
        held=np.array([held for _, held in points], np.int64),
    )


def _held_around(
    problem: Problem,
    device: int,
    programs: Programs,
    intervals: Sequence[Interval],
    curve: Curve,
) -> NDArray[np.int64]:
    """Return bytes before and after each interval: by the walk; a reduction's by the clock."""
    program = programs[device]
    steps = memory_walk(problem, device, program)
    pairs = [
        (step.before, step.after)
        for action, step in zip(program, steps, strict=True)
        if action.type is not ActionType.RELEASE
    ]
    for sync in intervals[len(pairs) :]:
        now = int(curve.held[np.searchsorted(curve.moments, sync.start, side="right") - 1])
        pairs.append((now, now))
    return np.array(pairs, np.int64).reshape(-1, 2)
