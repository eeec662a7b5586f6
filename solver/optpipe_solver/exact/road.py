"""Some devices of a problem, the rest as waiting times, in whole numbers, for `journey_kernel`."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import floor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.bounds.heads import ANYTIME, heads
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.bounds.tails import tails
from optpipe_solver.bounds.turnover import drain, refill
from optpipe_solver.exact.journey_kernel import MOST_COMING
from optpipe_solver.milp.horizon.grid import grid_ms
from optpipe_solver.milp.horizon.items import fusing_may_pay, memory_binds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from optpipe.problem import Problem, Stage
    from optpipe_solver.bounds.heads import Events
    from optpipe_solver.bounds.relaxation import Relaxed

    Ints = NDArray[np.int64]
    Grid = NDArray[np.int64]
    Flags = NDArray[np.bool_]

__all__ = ["Road", "copies_are_equal", "road_of", "unit_ms"]

_STEPS = 4e8
"""Most units in the horizon: the sum of five times that are no longer fits into 32 bits."""

_ROUNDING = 1e-6
"""Share of a unit that a time in ms may be off."""

_ALL_ROUNDING = 1e-3
"""Share of a unit that the times of a path may be off together."""


class Road(NamedTuple):
    """The kept devices and stages in whole numbers: entries per stage, or per device where said.

    ``moved`` (device) is what one copy carries, in bytes, ``out`` and ``home`` (device) how long it
    takes; 0 bytes = nothing can be offloaded; ``waits`` (device): whether all RELOADs on their way
    are waited for. ``again`` is the time of a RECOMPUTE, -1 where there
    is none. ``workspace`` has a row each for F, I, W, B, RECOMPUTE; ``room`` is per device.
    ``there[s]`` and ``back[s]`` are the least times between the passes of s and those of the next
    kept stage, behind the last one ``there`` to its own backward; ``head`` is that before the
    first. ``rest[q]`` is the least time from the start of the q-th pass of a micro-batch, on its
    way up and down the stages, to the end of the schedule. ``head_f[k, s]`` is the earliest start
    of the k-th F of s, ``last_f[k, s]`` the least time after the end of the k-th last, k from 0;
    ``last_i`` and ``last_w`` those after the pieces ``gradient`` and ``weight`` (see
    `bounds.relaxation`). ``horizon`` is the longest schedule looked for.
    """

    num_microbatches: int
    device: Ints
    forward: Ints
    split_i: Ints
    split_w: Ints
    fused: Ints
    gradient: Ints
    weight: Ints
    again: Ints
    may_fuse: Flags
    may_leave: Flags
    activation: Ints
    context: Ints
    checkpoint: Ints
    workspace: Grid
    room: Ints
    moved: Ints
    out: Ints
    home: Ints
    waits: Flags
    there: Ints
    back: Ints
    head: int
    rest: Ints
    head_f: Grid
    last_f: Grid
    last_i: Grid
    last_w: Grid
    horizon: int


class _Copy(NamedTuple):
    """What one copy of a device carries, in bytes, and its ms each way."""

    moved: int = 0
    out: float = 0.0
    home: float = 0.0


def unit_ms(problem: Problem, horizon_ms: float) -> float:
    """Return the unit of time: a common divisor of all times where 32 bits can count by it."""
    finest = max(1.0, horizon_ms) / _STEPS
    grid = grid_ms(problem)
    return max(grid, finest)


def copies_are_equal(problem: Problem, device: int) -> bool:
    """Whether all that a device can offload has one size, so that copies can be counted."""
    return len({_copy(problem, s) for s in problem.stages_of[device]} - {_Copy()}) <= 1


def road_of(problem: Problem, horizon_ms: float, devices: Sequence[int]) -> Road:
    """Return the road of some devices with every time rounded down to whole units.

    The unit divides all times where there is such a one; else it is so small that rounding hardly
    matters: a schedule within the horizon stays one, as times only shrink. Under span there must be
    one device.
    """
    unit = unit_ms(problem, horizon_ms)
    horizon = floor(horizon_ms / unit + _ALL_ROUNDING)
    units = partial(_units, unit=unit, most=horizon + 1)
    model = relaxed(problem)
    before, after = _clock(problem, model, devices)
    kept = [s for s, stage in enumerate(problem.stages) if stage.device in devices]
    stages = [problem.stages[s] for s in kept]
    index = {device: k for k, device in enumerate(devices)}
    copies = [_device_copy(problem, device) for device in devices]
    head, there, back = _delays(model, kept)
    forward, gradient = units(model.forward[kept]), units(model.gradient[kept])
    there_units, back_units = units(there), units(back)
    last_i = _grid(after.gradient[:, kept], unit)
    return Road(
        num_microbatches=problem.num_microbatches,
        device=_whole(index[s.device] for s in stages),
        forward=forward,
        split_i=units(s.backward_input_ms for s in stages),
        split_w=units(s.backward_weight_ms for s in stages),
        fused=units(s.fused_backward_ms for s in stages),
        gradient=gradient,
        weight=units(model.weight[kept]),
        again=units(_again_ms(problem, s) for s in kept),
        may_fuse=np.array([fusing_may_pay(problem, s) for s in kept]),
        may_leave=np.array([_copy(problem, s).moved > 0 for s in kept]),
        activation=_whole(s.activation_bytes for s in stages),
        context=_whole(s.weight_context_bytes for s in stages),
        checkpoint=_whole(s.checkpoint_bytes or 0 for s in stages),
        workspace=_workspace(stages),
        room=_whole(_room(problem, device) for device in devices),
        moved=_whole(copy.moved for copy in copies),
        out=units(copy.out for copy in copies),
        home=units(copy.home for copy in copies),
        waits=np.array(
            [_waits(problem, device, copy) for device, copy in zip(devices, copies, strict=True)]
        ),
        there=there_units,
        back=back_units,
        head=0 if problem.objective == "span" else int(units([head])[0]),
        rest=_rest(forward, gradient, there_units, back_units, int(last_i[0, 0])),
        head_f=_grid(before.forward[:, kept], unit),
        last_f=_grid(after.forward[:, kept], unit),
        last_i=last_i,
        last_w=_grid(after.weight[:, kept], unit),
        horizon=horizon,
    )


def _clock(problem: Problem, model: Relaxed, devices: Sequence[int]) -> tuple[Events, Events]:
    """Return heads and tails on the clock of the schedule, or under span on that of the device."""
    origin = np.zeros(len(problem.stages))
    if problem.objective == "span":
        origin = np.where(model.device == devices[0], 0.0, ANYTIME)
    return heads(model, refill(model), origin), tails(model, drain(model), origin)


def _room(problem: Problem, device: int) -> int:
    return problem.devices[device].usable_bytes - problem.static_bytes_of(device)


def _copy(problem: Problem, s: int) -> _Copy:
    """Return the copy of a stage; where memory never binds nobody needs any."""
    if not problem.can_offload(s) or not memory_binds(problem, problem.stages[s].device):
        return _Copy()
    return _Copy(problem.stages[s].offload_bytes, problem.offload_ms(s), problem.reload_ms(s))


def _device_copy(problem: Problem, device: int) -> _Copy:
    copies = (_copy(problem, s) for s in problem.stages_of[device])
    return next((copy for copy in copies if copy.moved), _Copy())


def _waits(problem: Problem, device: int, copy: _Copy) -> bool:
    """Whether all RELOADs that can be on their way to a device at once are told apart."""
    return copy.moved > 0 and _room(problem, device) // copy.moved <= MOST_COMING


def _again_ms(problem: Problem, s: int) -> float:
    """Return the time of a RECOMPUTE, -1 where there is none or memory never binds."""
    stage = problem.stages[s]
    if stage.recompute_ms is None or not memory_binds(problem, stage.device):
        return -1.0
    return stage.recompute_ms


def _delays(model: Relaxed, kept: Sequence[int]) -> tuple[float, list[float], list[float]]:
    """Return the ms before the first kept stage, and up and down from each to the next.

    Behind the last one up means all the way to the end of the pipeline and back to it.
    """
    forward = model.forward + model.there
    gradient = model.gradient + np.roll(model.back, 1)
    there, back = [], []
    for s, following in pairwise([*kept, len(model.forward)]):
        there.append(float(model.there[s] + forward[s + 1 : following].sum()))
        back.append(float(model.back[following - 1] + gradient[s + 1 : following].sum()))
    there[-1] += back[-1]
    back[-1] = 0.0
    return float(forward[: kept[0]].sum()), there, back


def _rest(forward: Ints, gradient: Ints, there: Ints, back: Ints, end: int) -> Ints:
    """Return the least time from the start of each pass of a micro-batch to the end of all."""
    down = gradient + np.roll(back, 1)
    down[0] = gradient[0]
    rest = [end]
    for step in (*down, *(forward + there)[::-1]):
        rest.append(rest[-1] + int(step))
    return np.array(rest[::-1], dtype=np.int64)


def _workspace(stages: Sequence[Stage]) -> Grid:
    rows = [
        [s.forward_workspace_bytes for s in stages],
        [s.backward_input_workspace_bytes for s in stages],
        [s.backward_weight_workspace_bytes for s in stages],
        [s.backward_workspace_bytes for s in stages],
        [s.recompute_workspace_bytes for s in stages],
    ]
    return np.array(rows, dtype=np.int64)


def _grid(values: NDArray[np.float64], unit: float) -> Grid:
    most = np.iinfo(np.int32).max
    return _units(np.maximum(0.0, values).ravel(), unit, most).reshape(values.shape)


def _units(values: Iterable[float], unit: float, most: int) -> Ints:
    """Return times in whole units, -1 as it is; none longer than ``most``, which is too long."""
    return _whole(value if value < 0 else min(most, value / unit + _ROUNDING) for value in values)


def _whole(values: Iterable[float]) -> Ints:
    return np.array([int(value) for value in values], dtype=np.int64)
