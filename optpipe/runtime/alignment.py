"""One time axis for what several devices measured on clocks of their own.

Each device says what the wall clock showed at its zero. Wall clocks of different hosts differ by
milliseconds, so they are believed only as far as the pipeline's own messages allow: nothing can be
received before it was sent. A message from a to b bounds the shift between the two clocks on one
side and one from b to a on the other, as in Cristian's "Probabilistic clock synchronization"
(Distributed Computing 3, 1989); a training step sends both, activations there and gradients back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from optpipe.action import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.timeline import Interval

__all__ = ["DeviceTimes", "MeasuredStep", "align"]

Pair = tuple[int, int]


class DeviceTimes(NamedTuple):
    """What one device did in one step, in ms on its own clock.

    Attributes
    ----------
    step
        Number of the step, from 0.
    wall_ms
        The wall clock when the device's own showed zero.
    intervals
        In program order.
    """

    step: int
    device: int
    wall_ms: float
    intervals: tuple[Interval, ...]


class MeasuredStep(NamedTuple):
    """One step of all devices, in ms from the first start of all; rows by device."""

    step: int
    rows: tuple[tuple[Interval, ...], ...]

    @property
    def span_ms(self) -> float:
        """The longest time from a device's first start to its last end."""
        spans = (
            max(item.end for item in row) - min(item.start for item in row)
            for row in self.rows
            if row
        )
        return max(spans, default=0.0)


def align(times: Sequence[DeviceTimes]) -> MeasuredStep:
    """Return one step of all devices on one axis.

    Parameters
    ----------
    times
        Of one step, one per device, by device.
    """
    shifts = _shifts(times)
    first = min(
        (item.start + shifts[own.device] for own in times for item in own.intervals), default=0.0
    )
    rows = tuple(_shifted(own.intervals, shifts[own.device] - first) for own in times)
    return MeasuredStep(times[0].step, rows)


def _shifts(times: Sequence[DeviceTimes]) -> dict[int, float]:
    """Return what is added to each device's times.

    Beginning with the wall clocks, a receiver that would be too early is moved later, with as many
    rounds over all messages as there are devices. As with Bellman and Ford's longest paths, the
    wishes of all messages are then met if any shifts meet them; true clocks do, so only errors of
    measuring the times themselves stand against it.
    """
    # Small numbers: a wall clock in ms leaves doubles little room for microseconds.
    shifts = {own.device: own.wall_ms - times[0].wall_ms for own in times}
    lags = sorted(_lags(times).items())
    for _ in times:
        for (sender, receiver), lag in lags:
            shifts[receiver] = max(shifts[receiver], shifts[sender] + lag)
    return shifts


def _lags(times: Sequence[DeviceTimes]) -> dict[Pair, float]:
    """Return, per (sender, receiver), by how much the receiver's clock must at least be ahead."""
    ran = {
        _key(item.action): item
        for own in times
        for item in own.intervals
        if item.action is not None
    }
    lags: dict[Pair, float] = {}
    for key, item in ran.items():
        sender = _input_of(key)
        made = ran.get(sender) if sender is not None else None
        if made is not None and made.device != item.device:
            pair = (made.device, item.device)
            lags[pair] = max(lags.get(pair, -math.inf), made.end - item.start)
    return lags


def _key(action: Action) -> Action:
    """Return the action with I for a B: both take and send gradients."""
    if action.type is ActionType.FULL_BACKWARD:
        return action._replace(type=ActionType.BACKWARD_INPUT)
    return action


def _input_of(key: Action) -> Action | None:
    """Return the pass that sends what this one needs."""
    if key.type is ActionType.FORWARD:
        return key._replace(stage=key.stage - 1)
    if key.type is ActionType.BACKWARD_INPUT:
        return key._replace(stage=key.stage + 1)
    return None


def _shifted(intervals: Sequence[Interval], shift: float) -> tuple[Interval, ...]:
    return tuple(
        type(item)(item.device, item.lane, item.action, item.start + shift, item.end + shift)
        for item in intervals
    )
