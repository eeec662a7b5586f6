"""Times of every action while a pipeline trains, on one of ``every`` steps.

An `ActionTimer` observes a `PipelineRunner`. On a sampled step it takes a mark before and after
every action and after every copy. On CUDA the marks are events, and the timer waits for them only
at the next sampled step. On all other steps it compares one action and returns.
``benchmarks/RESULTS.md`` has its costs.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from optpipe.formats.exports import dump_planned_beside_measured
from optpipe.measurements import DeviceFacts, Measurements, Sample
from optpipe.runtime.measuring.times import clock_for
from optpipe.runtime.preflight import gather
from optpipe.schedule import Action, ActionType
from optpipe.simulate import Interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.runtime.measuring.times import Clock, Mark
    from optpipe.runtime.offload import Copies, Fence
    from optpipe.runtime.runner import PipelineRunner
    from optpipe.simulate import Lane

__all__ = ["DEFAULT_EVERY", "ActionTimer", "MeasuredStep"]


class MeasuredStep(NamedTuple):
    """One step of all devices, in ms from the first start of all; rows by device.

    Times of different hosts are as exact as their wall clocks are synchronised.
    """

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


DEFAULT_EVERY = 50
"""The overhead is below 1% of a step if actions take 20 us or more.

The timer takes 2 us an action on sampled steps and 0.1 us on others (CPU,
``benchmarks/RESULTS.md``).
"""

_KEPT_STEPS = 8
_DOWN, _UP = 0, 1


Taken = tuple["Action", "Mark", "Mark", "Mark", int]
"""An action with the marks of its start and end; a copy's end and bytes where it started one."""


class _Sampled(NamedTuple):
    """A sampled step; the wall clock showed ``wall_ms`` at its origin."""

    step: int
    origin: Mark
    wall_ms: float
    taken: list[Taken]


class _OwnStep(NamedTuple):
    """One rank's sampled step: times from its origin in ms, copies as (lane, bytes, ms)."""

    step: int
    wall_ms: float
    intervals: tuple[Interval, ...]
    copies: list[tuple[int, int, float]]


class ActionTimer:
    """Times the actions of a runner on every N-th step; the first, a warm-up, is never taken.

    All ranks make one, and all call `gather`, `measurements` and `trace` together: like every
    collective operation they wait for each other.

    Parameters
    ----------
    runner
        Whose actions are timed, from its next step on.
    every
        One of this many steps is sampled; the same on all ranks.
    clock
        Takes the times; that of the runner's device if None.

    Raises
    ------
    ValueError
        If ``every`` is below 1.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        *,
        every: int = DEFAULT_EVERY,
        clock: Clock | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every = {every}: must be at least 1; 1 samples every step")
        self._every = every
        self._rank = dist.get_rank(runner.group)
        self._programs = runner.schedule.programs
        self.program = self._programs[self._rank]
        self._runner = runner
        self._plain_copies = runner.offloader.copies
        self._clock = clock if clock is not None else clock_for(runner.device)
        self._step = -1
        self._sampled: _Sampled | None = None
        self._pending: _Sampled | None = None
        self._starts: dict[Action, Mark] = {}
        self._copy: tuple[Mark, int] = (None, 0)
        self._kept: deque[_OwnStep] = deque(maxlen=_KEPT_STEPS)
        runner.offloader.copies = _TimedCopies(self._plain_copies, self)
        self._stop = runner.observe(self)

    def detach(self) -> None:
        """Stop timing; what was measured stays."""
        self._stop()
        self._runner.offloader.copies = self._plain_copies
        self._put_aside()

    def begin(self, action: Action) -> None:
        """Mark an action's start, where this step is sampled."""
        if action == self.program[0].bare:
            self._begin_step()
        if self._sampled is not None:
            self._starts[action] = self._clock.mark()

    def end(self, action: Action) -> None:
        """Mark its end."""
        if self._sampled is not None:
            start = self._starts.pop(action)
            self._sampled.taken.append((action, start, self._clock.mark(), *self._copy))
            self._copy = (None, 0)

    def copied(self, fence: Fence, lane: int, num_bytes: int) -> None:
        """Mark the end of copies that the running action has issued."""
        if self._sampled is not None:
            self._copy = (self._clock.mark_after(fence, lane), num_bytes)

    def gather(self) -> list[MeasuredStep] | None:
        """Return, on rank 0, the sampled steps that are whole, oldest first; None elsewhere."""
        found = self._all_kept()
        return _whole_steps(found) if self._rank == 0 else None

    def measurements(self) -> Measurements | None:
        """Return, on rank 0, the times and bandwidths of all ranks, a value with a JSON form."""
        found = self._all_kept()
        if self._rank != 0:
            return None
        steps = _whole_steps(found)
        last = _last(steps)
        return Measurements(
            source=f"training, {len(steps)} sampled steps up to step {last.step}",
            samples=tuple(sample for step in steps for sample in _samples(step)),
            placement=self._runner.schedule.placement,
            devices=tuple(_device_facts(kept) for kept in found),
        )

    def trace(self, problem: Problem) -> str | None:
        """Return, on rank 0, a Chrome trace of the plan and, below it, of the last sampled step.

        Like `measurements` it raises ValueError if no step has been sampled yet.
        """
        steps = self.gather()
        if steps is None:
            return None
        last = _last(steps)
        label = f"measured, step {last.step}"
        return dump_planned_beside_measured(problem, self._programs, last.rows, label)

    def _begin_step(self) -> None:
        self._put_aside()
        self._step += 1
        if self._step == 0 or self._step % self._every:
            return
        self._resolve()
        origin = self._clock.mark()
        # Waits for the device once, so that wall clock and device clock show the same moment.
        self._clock.ms_between(origin, origin)
        self._sampled = _Sampled(self._step, origin, 1e3 * time.time(), [])

    def _put_aside(self) -> None:
        """Keep a sampled step that was issued to its end: its marks may not have passed yet."""
        sampled, self._sampled = self._sampled, None
        if sampled is not None and len(sampled.taken) == len(self.program):
            self._pending = sampled

    def _resolve(self) -> None:
        """Read the marks of the step put aside, waiting for the last of them."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        intervals, copies = _read(pending, self._clock, self._rank)
        self._kept.append(_OwnStep(pending.step, pending.wall_ms, intervals, copies))

    def _all_kept(self) -> list[list[_OwnStep]]:
        """Return every rank's sampled steps, on every rank; between two steps of the runner."""
        self._put_aside()
        self._resolve()
        return gather(list(self._kept), self._runner.group)


def _read(
    sampled: _Sampled, clock: Clock, device: int
) -> tuple[tuple[Interval, ...], list[tuple[int, int, float]]]:
    """Turn marks into intervals and copies.

    Lanes are first in, first out (docs/specification.md, "Time").
    """
    lane_end = [0.0, 0.0]
    back: dict[tuple[int, int], float] = {}
    intervals, copies = [], []
    for action, start_mark, end_mark, copy_mark, copied_bytes in sampled.taken:
        start = clock.ms_between(sampled.origin, start_mark)
        end = clock.ms_between(sampled.origin, end_mark)
        cell = (action.stage, action.microbatch)
        name: Lane = "compute"
        if action.type.is_transfer and copy_mark is not None:
            lane = _UP if action.type is ActionType.RELOAD else _DOWN
            start, end = max(start, lane_end[lane]), clock.ms_between(sampled.origin, copy_mark)
            lane_end[lane] = end
            name = "d2h"
            if lane == _UP:
                name, back[cell] = "h2d", end
            copies.append((lane, copied_bytes, end - start))
        elif action.type.is_backward:
            # The mark comes before the wait for a reload.
            start = min(end, max(start, back.get(cell, 0.0)))
        intervals.append(Interval(device, name, action, start, end))
    return tuple(intervals), copies


class _TimedCopies:
    """Copy lanes that notify a timer when copies end."""

    def __init__(self, copies: Copies, timer: ActionTimer) -> None:
        self._copies = copies
        self._timer = timer
        self.pinned = copies.pinned

    def to_host(self, pairs: Sequence[Any]) -> Fence:
        """Issue copies to the host."""
        return self._noted(self._copies.to_host(pairs), _DOWN, pairs)

    def to_device(self, pairs: Sequence[Any]) -> Fence:
        """Issue copies back."""
        return self._noted(self._copies.to_device(pairs), _UP, pairs)

    def _noted(self, fence: Fence, lane: int, pairs: Sequence[Any]) -> Fence:
        self._timer.copied(fence, lane, sum(source.numel() for source, _ in pairs))
        return fence


def _whole_steps(found: list[list[_OwnStep]]) -> list[MeasuredStep]:
    """Put the steps that every rank has sampled on one time axis, by the wall clocks."""
    by_rank = [{own.step: own for own in kept} for kept in found]
    whole = []
    for number in sorted(set.intersection(*(set(steps) for steps in by_rank))):
        own_steps = [steps[number] for steps in by_rank]
        # Small numbers: a wall clock in ms leaves doubles little precision for microseconds.
        shifts = [own.wall_ms - own_steps[0].wall_ms for own in own_steps]
        first_ms = min(
            (
                item.start + shift
                for own, shift in zip(own_steps, shifts, strict=True)
                for item in own.intervals
            ),
            default=0.0,
        )
        rows = []
        for own, from_first in zip(own_steps, shifts, strict=True):
            shift = from_first - first_ms
            rows.append(
                tuple(
                    replace(item, start=item.start + shift, end=item.end + shift)
                    for item in own.intervals
                )
            )
        whole.append(MeasuredStep(number, tuple(rows)))
    return whole


def _last(steps: list[MeasuredStep]) -> MeasuredStep:
    if not steps:
        raise ValueError(
            "no step has been sampled yet: the first is a warm-up, and then it is one in `every`; "
            "train on, or make the timer with a smaller every"
        )
    return steps[-1]


def _samples(step: MeasuredStep) -> Iterator[Sample]:
    for row in step.rows:
        for item in row:
            if item.action is not None and item.action.type.is_compute:
                yield Sample(
                    stage=item.action.stage,
                    action=item.action.type.value,
                    time_ms=max(0.0, item.end - item.start),
                    microbatch=item.action.microbatch,
                    step=step.step,
                    rank=item.device,
                )


def _device_facts(kept: Sequence[_OwnStep]) -> DeviceFacts:
    """Return the median speed of both lanes, where copies were made."""
    rates: list[list[float]] = [[], []]
    for own in kept:
        for lane, num_bytes, ms in own.copies:
            if num_bytes > 0 and ms > 0:
                rates[lane].append(num_bytes / (ms * 1e6))
    down, up = (statistics.median(values) if values else None for values in rates)
    return DeviceFacts(d2h_gb_per_s=down, h2d_gb_per_s=up)
