"""What the passes of a stage take: every sample, in milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from optpipe.action import ActionType

if TYPE_CHECKING:
    from optpipe.runtime.measuring.clock import Clock, Mark
    from optpipe.runtime.measuring.under_test import ForwardResult, StageUnderTest

__all__ = ["Durations", "time_passes"]

Durations = dict[ActionType, tuple[float, ...]]
"""Pass -> its samples in ms, in the order in which they were taken."""


class _Interval(NamedTuple):
    kind: ActionType
    start: Mark
    end: Mark


def time_passes(
    stage: StageUnderTest, clock: Clock, *, repeats: int, warmups: int, can_split: bool
) -> Durations:
    """Run F, I, W, then F, RECOMPUTE, B, again and again, and return what each took.

    Gradients add up from repeat to repeat, as they do over micro-batches.

    Parameters
    ----------
    repeats, warmups
        Rounds that are kept, and rounds before them that are not.
    can_split
        Whether W has any work; where it has none, I is the whole backward and W takes 0.
    """
    rounds = [_run(stage, clock) for _ in range(warmups + repeats)][warmups:]
    samples: dict[ActionType, list[float]] = {}
    for intervals in rounds:
        for kind, start, end in intervals:
            samples.setdefault(kind, []).append(clock.ms_between(start, end))
    if not can_split:
        samples[ActionType.BACKWARD_WEIGHT] = [0.0] * repeats
    return {kind: tuple(values) for kind, values in samples.items()}


def _run(stage: StageUnderTest, clock: Clock) -> list[_Interval]:
    """Take the marks of one round; they are read later, so that no pass waits for another's end."""
    split, result = _forward(stage, clock)
    start = clock.mark()
    with stage.gradients.collect():
        stage.backward(result)
        end = clock.mark()
        make_weight_gradients = stage.gradients.take()
    weight_start = clock.mark()
    make_weight_gradients()
    weight_end = clock.mark()
    again, result = _recompute(stage, clock)
    full_start = clock.mark()
    stage.backward(result)
    return [
        split,
        _Interval(ActionType.BACKWARD_INPUT, start, end),
        _Interval(ActionType.BACKWARD_WEIGHT, weight_start, weight_end),
        again,
        _Interval(ActionType.FULL_BACKWARD, full_start, clock.mark()),
    ]


def _forward(stage: StageUnderTest, clock: Clock) -> tuple[_Interval, ForwardResult]:
    received = stage.receive()
    start = clock.mark()
    result = stage.forward(received)
    return _Interval(ActionType.FORWARD, start, clock.mark()), result


def _recompute(stage: StageUnderTest, clock: Clock) -> tuple[_Interval, ForwardResult]:
    """Run a forward with the random states put back, as a RECOMPUTE does."""
    devices = [stage.device] if stage.device.type == "cuda" else []
    states = [torch.cuda.get_rng_state(device) for device in devices]
    host_state = torch.get_rng_state()
    received = stage.receive()
    start = clock.mark()
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(host_state)
        for device, state in zip(devices, states, strict=True):
            torch.cuda.set_rng_state(state, device)
        result = stage.forward(received)
    return _Interval(ActionType.RECOMPUTE, start, clock.mark()), result
