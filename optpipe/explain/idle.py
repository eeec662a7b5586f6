"""Idle time of compute lanes, by cause."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from optpipe.action import ActionType
from optpipe.explain.reasons import Reasons, Spot, Why
from optpipe.explain.values import DeviceIdle, IdleCause

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.simulate import Simulation

__all__ = ["idle_times"]

_NOISE = 1e-12


def idle_times(
    problem: Problem, programs: Programs, run: Simulation, reasons: Reasons | None = None
) -> tuple[DeviceIdle, ...]:
    """Return, for each device with a program, what its compute lane waited for.

    The clock of a device is the whole makespan; where the objective is the span, one span from its
    own first start on. Idle is what of it no compute action fills: length - busy. All of a wait
    between two actions is put down to what ended it, the reason of the later one's start:

    * FORWARD, BACKWARD: the other stage's pass had not ended; LINK: it had, and its output was on
      the way. One wait can have both parts.
    * RELOAD, RELEASE: the transfer had not ended (its own wait for a lane included).
    * WARM_UP: before the first action; under span there is none.
    * GRAD_SYNC: after the last action, until the device's own gradient reductions end.
    * COOL_DOWN: after that.

    ``reasons`` are those of this very simulation, from a caller who has them.
    """
    known = reasons or Reasons(problem, programs, run)
    return tuple(
        _idle(problem, run, known, device) for device, program in enumerate(programs) if program
    )


def _idle(problem: Problem, run: Simulation, reasons: Reasons, device: int) -> DeviceIdle:
    cells = reasons.compute_cells(device)
    times = [run.times[device][cell] for cell in cells]
    first, last = times[0].start, times[-1].end
    begin = 0.0 if problem.objective == "makespan" else first
    length = run.objective_ms(problem.objective)
    synced = max([last, *(sync.end for sync in run.grad_syncs if sync.device == device)])
    causes: dict[IdleCause, float] = defaultdict(float)
    causes[IdleCause.WARM_UP] = first - begin
    for cell, at in zip(cells[1:], times[1:], strict=True):
        if at.start > at.issue:
            for cause, ms in _waits(reasons, Spot(device, cell)).items():
                causes[cause] += ms
    causes[IdleCause.GRAD_SYNC] = synced - last
    causes[IdleCause.COOL_DOWN] = begin + length - synced
    busy = sum(at.end - at.start for at in times)
    return DeviceIdle(
        device=device,
        busy_ms=busy,
        idle_ms=max(0.0, length - busy),
        causes={cause: causes[cause] for cause in IdleCause if causes[cause] > _NOISE * length},
    )


def _waits(reasons: Reasons, spot: Spot) -> dict[IdleCause, float]:
    """Return the parts of the wait before an action, in ms."""
    at, action, reason = reasons.times(spot), reasons.action(spot), reasons.of(spot)
    if reason is None:
        raise AssertionError(f"{action} waits for nothing")
    if reason.why is Why.TRANSFER:
        is_release = action.type is ActionType.RELEASE
        return {IdleCause.RELEASE if is_release else IdleCause.RELOAD: at.start - at.issue}
    made = max(at.issue, reasons.times(reason.spot).end)
    is_forward = action.type is ActionType.FORWARD
    return {
        IdleCause.FORWARD if is_forward else IdleCause.BACKWARD: made - at.issue,
        IdleCause.LINK: at.start - made,
    }
