"""Which lanes there are, and how much of the time each is occupied.

A lane is what one thing at a time can occupy: the compute lane of a device, each direction of its
transfers, its gradient reductions; and what is shared: both directions of a half-duplex device, one
direction of a PCIe group.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from optpipe.action import ActionType
from optpipe.explain.values import LaneUse

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.explain.values import LaneKind
    from optpipe.problem import Problem
    from optpipe.simulate import Simulation

__all__ = ["Lane", "lane_uses", "lanes_of"]

_DIGITS = 9
"""Of shares that are told apart: sums of the same durations in another order differ by rounding."""

_DIRECTIONS: dict[ActionType, LaneKind] = {ActionType.OFFLOAD: "d2h", ActionType.RELOAD: "h2d"}


class Lane(NamedTuple):
    """A lane: what it is for, and its device, or the PCIe group that shares it."""

    kind: LaneKind
    device: int
    group: str = ""


def lanes_of(problem: Problem, device: int, kind: ActionType) -> tuple[Lane, ...]:
    """Return every lane that an action of this type occupies while it runs; none for RELEASE."""
    if kind is ActionType.RELEASE:
        return ()
    if not kind.is_transfer:
        return (Lane("compute", device),)
    held = problem.devices[device]
    lanes = [Lane(_DIRECTIONS[kind], device)]
    if held.half_duplex:
        lanes.append(Lane("both ways", device))
    if held.pcie_group is not None:
        lanes.append(Lane(_DIRECTIONS[kind], -1, held.pcie_group))
    return tuple(lanes)


def lane_uses(problem: Problem, programs: Programs, run: Simulation) -> tuple[LaneUse, ...]:
    """Return all compute lanes and every other lane that is used, the most occupied first.

    ``busy_ms`` is the sum of the durations of what runs on the lane, RECOMPUTE included; ``share``
    is busy_ms / length, length = the problem's objective, and at most 1. That is so under span as
    well: a device uses its own lanes between its first start and its last end, and every transfer
    lies between 0F and 0B, or 0I, of its micro-batch, so within those of the device of stage 0.
    Ties stand in the order of devices.
    """
    busy: dict[Lane, float] = defaultdict(float)
    for device, program in enumerate(programs):
        if program:
            busy[Lane("compute", device)] += 0.0
        known = {kind: lanes_of(problem, device, kind) for kind in ActionType}
        for action, at in zip(program, run.times[device], strict=True):
            for lane in known[action.type]:
                busy[lane] += at.end - at.start
    for sync in run.grad_syncs:
        busy[Lane("grad sync", sync.device)] += sync.end - sync.start
    length = run.objective_ms(problem.objective)
    uses = [_use(problem, lane, ms, length) for lane, ms in busy.items()]
    return tuple(sorted(uses, key=lambda use: (-round(use.share, _DIGITS), use.devices)))


def _use(problem: Problem, lane: Lane, busy_ms: float, length_ms: float) -> LaneUse:
    devices: tuple[int, ...] = (lane.device,)
    if lane.group:
        devices = tuple(
            index for index, held in enumerate(problem.devices) if held.pcie_group == lane.group
        )
    share = busy_ms / length_ms if length_ms > 0 else 0.0
    return LaneUse(
        lane=lane.kind, devices=devices, group=lane.group or None, busy_ms=busy_ms, share=share
    )
