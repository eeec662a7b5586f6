"""Times of every action while a pipeline trains, on one of ``every`` steps.

An `ActionTimer` observes a `PipelineRunner`. On a sampled step it takes a mark before and after
every action and after every copy. On CUDA the marks are events, and the timer waits for them only
at the next sampled step. On all other steps it compares one action and returns.
``benchmarks/RESULTS.md`` has its costs.
"""

from __future__ import annotations

import math
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
from optpipe.schedule import Action, ActionType, input_of, pass_of
from optpipe.simulate import Interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.runtime.measuring.times import Clock, Mark
    from optpipe.runtime.offload import Copies, Fence
    from optpipe.runtime.runner import PipelineRunner
    from optpipe.simulate import Lane

__all__ = ["DEFAULT_EVERY", "ActionTimer", "DeviceTimes", "MeasuredStep", "align"]


# --- One time axis for what several devices measured on clocks of their own.
# Each device reports the wall clock at its zero. Wall clocks of different hosts differ by
# milliseconds, so they are believed only as far as the pipeline's own messages allow: nothing can
# be received before it was sent. A message from a to b bounds the shift between the two clocks on
# one side and one from b to a on the other, as in Cristian's "Probabilistic clock synchronization"
# (Distributed Computing 3, 1989); a training step sends both, activations there and gradients back.


class DeviceTimes(NamedTuple):
    """The actions of one device in one step, in program order, in ms on its own clock.

    ``wall_ms`` is the wall clock when the device's own showed zero.
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
    """Return one step of all devices, given by device, on one axis."""
    shifts = _shifts(times)
    first = min(
        (item.start + shifts[own.device] for own in times for item in own.intervals), default=0.0
    )
    rows = []
    for own in times:
        shift = shifts[own.device] - first
        rows.append(
            tuple(
                replace(item, start=item.start + shift, end=item.end + shift)
                for item in own.intervals
            )
        )
    return MeasuredStep(times[0].step, tuple(rows))


def _shifts(times: Sequence[DeviceTimes]) -> dict[int, float]:
    """Return the shift of each device's times.

    The shifts begin with the wall clocks. A receiver that would be too early is moved later, in as
    many rounds over all messages as there are devices. As with Bellman and Ford's longest paths,
    all messages are then consistent if any shifts make them so. True clocks do, so only errors of
    measurement can prevent it.
    """
    # Small numbers: a wall clock in ms leaves doubles little room for microseconds.
    shifts = {own.device: own.wall_ms - times[0].wall_ms for own in times}
    lags = sorted(_lags(times).items())
    for _ in times:
        for (sender, receiver), lag in lags:
            shifts[receiver] = max(shifts[receiver], shifts[sender] + lag)
    return shifts


def _lags(times: Sequence[DeviceTimes]) -> dict[tuple[int, int], float]:
    """Return, per (sender, receiver), by how much the receiver's clock must at least be ahead."""
    ran = [
        (item.action, item) for own in times for item in own.intervals if item.action is not None
    ]
    producers = {done: item for action, item in ran if (done := pass_of(action)) is not None}
    num_stages = 1 + max((action.stage for action, _ in ran), default=0)
    lags: dict[tuple[int, int], float] = {}
    for action, item in ran:
        needed = input_of(action, num_stages)
        source = producers.get(needed) if needed is not None else None
        if source is not None and source.device != item.device:
            pair = (source.device, item.device)
            lags[pair] = max(lags.get(pair, -math.inf), source.end - item.start)
    return lags


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


OwnStep = tuple["DeviceTimes", list[tuple[int, int, float]]]
"""One rank's sampled step, and its copies as (lane, bytes, ms)."""


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
        self._kept: deque[OwnStep] = deque(maxlen=_KEPT_STEPS)
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
        times = DeviceTimes(pending.step, self._rank, pending.wall_ms, intervals)
        self._kept.append((times, copies))

    def _all_kept(self) -> list[list[OwnStep]]:
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


def _whole_steps(found: list[list[OwnStep]]) -> list[MeasuredStep]:
    """Align the steps that every rank has sampled."""
    by_rank = [{own.step: own for own, _ in kept} for kept in found]
    common = sorted(set.intersection(*(set(steps) for steps in by_rank)))
    return [align([steps[number] for steps in by_rank]) for number in common]


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


def _device_facts(kept: Sequence[OwnStep]) -> DeviceFacts:
    """Return the median speed of both lanes, where copies were made."""
    rates: list[list[float]] = [[], []]
    for _, copies in kept:
        for lane, num_bytes, ms in copies:
            if num_bytes > 0 and ms > 0:
                rates[lane].append(num_bytes / (ms * 1e6))
    down, up = (statistics.median(values) if values else None for values in rates)
    return DeviceFacts(d2h_gb_per_s=down, h2d_gb_per_s=up)
