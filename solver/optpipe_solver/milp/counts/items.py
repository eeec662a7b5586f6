"""A problem in whole steps of time and memory: what the model on counts is made of.

All times are rounded down to steps: a schedule stays one, its starts rounded down likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import floor, gcd
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.feasibility import fusing_may_pay, memory_binds, possible_modes
from optpipe_solver.incumbent import grid_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import CellMode, Problem
    from optpipe_solver.arrays import Floats, Ints

__all__ = ["CountMode", "CountProblem", "EventTimes", "StartWindows", "step_ms"]

_ROUNDING = 1e-6
"""Share of a step that a time may be off."""

_FINEST = 2**20
"""A device's room in units of memory, at most: what HiGHS can compare."""


class EventTimes(NamedTuple):
    """Ms of the k-th F, I and W of stage s at ``[k, s]``: `heads` or `tails` of `bounds`."""

    forward: Floats
    gradient: Floats
    weight: Floats


class StartWindows(NamedTuple):
    """Steps in which the k-th start of a kind on a stage lies, both ends included, by k."""

    earliest: Ints
    latest: Ints


class CountMode(NamedTuple):
    """One mode of a stage in steps and units of memory, in the words of `CellMode`.

    ``trip`` is the least from the start of F to the start of the backward; ``fused`` is -1 where no
    B pays. ``out``, ``home`` and ``again`` are -1 where there is no such action. ``by_...`` is what
    an action adds to the memory of its device (negative: gives back), ``while_...`` what exists
    only while it runs, what rises at its end included; both rounded down.
    """

    forward: int
    gradient: int
    fused: int
    weight: int
    out: int
    home: int
    again: int
    trip: int
    moved_bytes: int
    forward_ms: float
    gradient_ms: float
    fused_ms: float
    weight_ms: float
    out_ms: float
    home_ms: float
    again_ms: float
    by_forward: int
    by_out: int
    by_issue: int
    by_again: int
    by_gradient: int
    by_fused: int
    by_weight: int
    while_forward: int
    while_gradient: int
    while_fused: int
    while_weight: int
    while_again: int

    @property
    def moves(self) -> bool:
        """Whether it has transfers."""
        return self.out >= 0

    @property
    def recomputes(self) -> bool:
        """Whether it has a RECOMPUTE."""
        return self.again >= 0


def step_ms(problem: Problem, horizon_ms: float, most_steps: int) -> float:
    """Return the step of time in ms: the common divisor of all times if that gives few steps.

    Else, of steps that are few, one at which rounding down loses least, weighted by how often a
    pass is on the way of all micro-batches.
    """
    grid = grid_ms(problem)
    if grid > 0 and horizon_ms <= grid * most_steps:
        return grid
    times = np.array([time for time in _busy_times(problem) if time > 0])
    if not len(times):
        return horizon_ms / most_steps
    shortest = horizon_ms / most_steps
    parts = np.arange(1, 1 + int(np.max(times) / shortest))
    tried = np.divide.outer(times, parts).ravel()
    tried = np.append(tried[tried >= shortest], shortest) * (1 - 1e-9)
    lost = [(times - step * np.floor(times / step + _ROUNDING)).sum() for step in tried]
    return float(tried[int(np.argmin(np.round(lost, 9)))])


def _busy_times(problem: Problem) -> Iterator[float]:
    for s, stage in enumerate(problem.stages):
        yield from (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
        if fusing_may_pay(problem, s):
            yield stage.fused_backward_ms


@dataclass(frozen=True)
class CountProblem:
    """A problem below a horizon, in steps of ``step`` ms.

    Parameters
    ----------
    problem
        What is to be scheduled.
    step
        In ms, > 0.
    horizon_ms
        Only schedules with at most this objective are looked for.
    before, after
        What starts at the earliest, and what must at least follow each end, on the clock that
        begins with stage 0's first F; under span ``after`` holds on stage 0's device.
    """

    problem: Problem
    step: float
    horizon_ms: float
    before: EventTimes
    after: EventTimes

    def steps(self, ms: float) -> int:
        """Return a time in steps, rounded down."""
        return floor(ms / self.step + _ROUNDING)

    @cached_property
    def length(self) -> int:
        """The horizon in steps."""
        return self.steps(self.horizon_ms)

    @cached_property
    def slack(self) -> int:
        """By how many steps an end may pass the horizon, counted from a start that is no 0."""
        grid = grid_ms(self.problem)
        return 0 if grid > 0 and abs(self.step - grid) <= _ROUNDING * grid else 1

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Per device, the step by which it has ended: of the clock, or of its own under span."""
        if self.problem.objective == "makespan":
            return (self.length,) * len(self.problem.devices)
        home = self.problem.stages[0].device
        ends = []
        for device, held in enumerate(self.problem.stages_of):
            starts = [self._latest_ms(self.after.forward, s, self._forward_ms(s))[0] for s in held]
            first = min((self.steps(min(start, self.horizon_ms)) for start in starts), default=0)
            extra = 0 if device == home else max(0, first) + self.slack
            ends.append(self.length + extra)
        return tuple(ends)

    def _forward_ms(self, s: int) -> float:
        return self.problem.stages[s].forward_ms

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Per device, the unit of memory in bytes."""
        units = []
        for device, held in enumerate(self.problem.stages_of):
            sizes = [size for s in held for mode in self._menu(s) for size in _sizes(mode)]
            unit = gcd(*sizes) or 1
            units.append(max(unit, self.problem.room_bytes(device) // _FINEST))
        return tuple(units)

    def room(self, device: int) -> int:
        """Return the units of memory that a device has for activations."""
        return self.problem.room_bytes(device) // self.units[device]

    @cached_property
    def binds(self) -> tuple[bool, ...]:
        """Per device, whether its memory limits anything."""
        return tuple(memory_binds(self.problem, d) for d in range(len(self.problem.devices)))

    def _menu(self, s: int) -> list[CellMode]:
        """Return the modes that may be of use: where memory never binds, keep alone."""
        menu = self.problem.menus[s]
        if not memory_binds(self.problem, self.problem.stages[s].device):
            return [menu[0]]
        return [menu[number] for number in possible_modes(self.problem)[s]]

    @cached_property
    def modes(self) -> tuple[tuple[CountMode, ...], ...]:
        """The modes of each stage; no two are alike."""
        return tuple(
            tuple(dict.fromkeys(self._mode(s, mode) for mode in self._menu(s)))
            for s in range(len(self.problem.stages))
        )

    def mode_of(self, s: int, number: int) -> int:
        """Return where a mode of a stage's menu stands in `modes`, -1 where it is left out."""
        mode = self.problem.menus[s][number]
        known = self._mode(s, mode) if mode in self._menu(s) else None
        return self.modes[s].index(known) if known is not None else -1

    def _mode(self, s: int, mode: CellMode) -> CountMode:
        stage, unit = self.problem.stages[s], self.units[self.problem.stages[s].device]
        moved = mode.offload_bytes
        out_ms = self.problem.offload_ms(s, moved) if moved else 0.0
        home_ms = self.problem.reload_ms(s, moved) if moved else 0.0
        again_ms = mode.recompute_ms if mode.recompute == "apart" else 0.0
        between = max(self.between[s], out_ms + home_ms + again_ms)
        above = max(mode.inside_bytes, mode.weight_context_bytes - mode.backward_bytes)
        fuses = fusing_may_pay(self.problem, s)
        return CountMode(
            forward=self.steps(stage.forward_ms),
            gradient=self.steps(stage.backward_input_ms + mode.inside_ms),
            fused=self.steps(stage.fused_backward_ms + mode.inside_ms) if fuses else -1,
            weight=self.steps(stage.backward_weight_ms),
            out=self.steps(out_ms) if moved else -1,
            home=self.steps(home_ms) if moved else -1,
            again=self.steps(again_ms) if mode.recompute == "apart" else -1,
            trip=self.steps(stage.forward_ms + between),
            moved_bytes=moved,
            forward_ms=stage.forward_ms,
            gradient_ms=stage.backward_input_ms + mode.inside_ms,
            fused_ms=stage.fused_backward_ms + mode.inside_ms,
            weight_ms=stage.backward_weight_ms,
            out_ms=out_ms,
            home_ms=home_ms,
            again_ms=again_ms,
            by_forward=mode.forward_bytes // unit,
            by_out=-moved // unit,
            by_issue=moved // unit,
            by_again=(mode.backward_bytes - mode.forward_bytes) // unit,
            by_gradient=(mode.weight_context_bytes - mode.backward_bytes) // unit,
            by_fused=-mode.backward_bytes // unit,
            by_weight=-mode.weight_context_bytes // unit,
            while_forward=mode.forward_workspace_bytes // unit,
            while_gradient=(above + mode.backward_input_workspace_bytes) // unit,
            while_fused=(mode.inside_bytes + mode.backward_workspace_bytes) // unit,
            while_weight=mode.backward_weight_workspace_bytes // unit,
            while_again=mode.recompute_workspace_bytes // unit,
        )

    @cached_property
    def between(self) -> tuple[float, ...]:
        """Per stage, the least ms from the end of an F to the start of its backward."""
        stages = self.problem.stages
        gaps = [0.0] * len(stages)
        for s in reversed(range(len(stages) - 1)):
            there, back = self.problem.boundary_ms[s]
            following = stages[s + 1]
            least = min(following.backward_input_ms, following.fused_backward_ms)
            gaps[s] = there + following.forward_ms + gaps[s + 1] + least + back
        return tuple(gaps)

    # --- Windows of starts, stage by stage.

    def forward_windows(self, s: int) -> StartWindows:
        """Return the windows of the F of a stage."""
        return self._windows(s, self.before.forward, self.after.forward, self._forward_ms(s))

    def gradient_windows(self, s: int) -> StartWindows:
        """Return the windows of the I and B of a stage together."""
        return self._windows(s, self.before.gradient, self.after.gradient, self.gradient_ms(s))

    def weight_windows(self, s: int) -> StartWindows:
        """Return the windows of the weight pieces of a stage: its W, and the rest of its B."""
        stage = self.problem.stages[s]
        rest = max(0.0, stage.busy_ms - stage.forward_ms - self.gradient_ms(s))
        return self._windows(s, self.before.weight, self.after.weight, rest)

    def gradient_ms(self, s: int) -> float:
        """Return the least ms from the start of an I or B to the weight piece behind it."""
        stage = self.problem.stages[s]
        return min(stage.backward_input_ms, stage.fused_backward_ms)

    def _latest_ms(self, tails: Floats, s: int, length_ms: float) -> Floats:
        return self.horizon_ms - tails[::-1, s] - length_ms

    def _windows(self, s: int, heads: Floats, tails: Floats, length_ms: float) -> StartWindows:
        end = self.ends[self.problem.stages[s].device] * self.step
        earliest = np.maximum(0.0, heads[:, s])
        latest = np.minimum(end, self._latest_ms(tails, s, length_ms))
        return StartWindows(
            np.floor(earliest / self.step + _ROUNDING).astype(np.int64),
            np.floor(latest / self.step + _ROUNDING).astype(np.int64),
        )


def _sizes(mode: CellMode) -> tuple[int, ...]:
    return (
        mode.forward_bytes,
        mode.offload_bytes,
        mode.backward_bytes,
        mode.inside_bytes,
        mode.weight_context_bytes,
        mode.forward_workspace_bytes,
        mode.backward_input_workspace_bytes,
        mode.backward_weight_workspace_bytes,
        mode.backward_workspace_bytes,
        mode.recompute_workspace_bytes,
    )
