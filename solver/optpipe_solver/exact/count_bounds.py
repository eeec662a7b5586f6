"""Compiled: how long every schedule through a state of `counts` is at least, and its rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.exact.kernel import input_of_f, input_of_i, length_of, piece_of
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from optpipe_solver.exact.kernel import Desk, Line, State

    Floats = NDArray[np.float64]

__all__ = ["ends_late", "rate_of"]


@lean
def ends_late(line: Line, state: State, desk: Desk, what: tuple[int, int, int]) -> bool:
    """Whether what must follow a pass (stage, kind, start) goes beyond the horizon.

    That is what its device has left to run, and the tail of the k-th last pass of its kind.
    """
    s, kind, start = what
    left, end = line.num_microbatches - 1, start + length_of(line, s, kind)
    if start + desk.left[line.device[s]] > line.horizon:
        return True
    if kind == 0:
        end += line.last_f[left - state.counts[3 * s], s]
    elif kind == 1:
        end += line.last_i[left - state.counts[3 * s + 1], s]
    else:
        end += line.last_w[left - state.counts[3 * s + 2], s]
    return bool(end > line.horizon)


@lean
def rate_of(line: Line, new: State, desk: Desk, what: tuple[int, int, int]) -> float:
    """Return the rate of the state after a pass; -1 = it ends behind the horizon.

    The lower, the more promising. Bounds of the end are: what every device has left to run, and the
    next F, gradient and W of every stage with what must follow them. The rate is the sum of the
    first, that is what idle time has cost so far, and the `_urgency` of the others. The desk is
    that of the state before.
    """
    total = _loads(line, new, desk, what)
    forwards = _forwards(line, new, desk) if total >= 0 else -1.0
    backwards = _backwards(line, new, desk) if forwards >= 0 else -1.0
    return total + forwards + backwards if backwards >= 0 else -1.0


@lean
def _loads(line: Line, new: State, desk: Desk, what: tuple[int, int, int]) -> int:
    """Return the sum of when every device has run all its pieces that have not started; -1 = late.

    Idle time to come is not counted.
    """
    s, kind, _ = what
    total = 0
    for device in range(len(desk.left)):
        end = new.times[1 + device] + desk.left[device]
        if device == line.device[s]:
            end -= piece_of(line, s, kind)
        if end > line.horizon:
            return -1
        total += end
    return int(total)


@lean
def _urgency(urgency: Floats, slot: float) -> float:
    """Return what a bound of the end counts for in the rate: the more, the nearer the horizon."""
    return float(urgency[int(slot)]) if slot < len(urgency) else 0.0


@lean
def _forwards(line: Line, state: State, desk: Desk) -> float:
    """The next F of each stage, and what must follow it; its least end is kept; -1 = late."""
    ends, urgency = desk.ends, 0.0
    for s in range(len(line.forward)):
        f = state.counts[3 * s]
        if f == line.num_microbatches:
            continue
        ready = input_of_f(line, state, s)
        if ready < 0:
            ready = ends[s - 1] + line.there[s - 1]
        ends[s] = max(ready, state.times[1 + line.device[s]]) + line.forward[s]
        least = ends[s] + line.last_f[line.num_microbatches - 1 - f, s]
        if least > line.horizon:
            return -1.0
        urgency += _urgency(line.urgency, line.slots * (line.horizon - least))
    return urgency


@lean
def _backwards(line: Line, state: State, desk: Desk) -> float:
    """The next gradient and W of each stage, and what must follow them; -1 = late."""
    ends, m, behind, urgency = desk.ends, line.num_microbatches, 0, 0.0
    for s in range(len(line.forward) - 1, -1, -1):
        f, b, w = state.counts[3 * s], state.counts[3 * s + 1], state.counts[3 * s + 2]
        free = state.times[1 + line.device[s]]
        if s + 1 < len(line.forward):
            behind += line.back[s]
        if b < m:
            ready = input_of_i(line, state, s)
            if ready < 0:
                ready = max(behind, ends[s]) if f == b else behind
            behind = max(ready, free) + line.gradient[s]
            least = behind + line.last_i[m - 1 - b, s]
            if least > line.horizon:
                return -1.0
            urgency += _urgency(line.urgency, line.slots * (line.horizon - least))
        if w < m:
            least = (free if w < b else behind) + line.weight[s] + line.last_w[m - 1 - w, s]
            if least > line.horizon:
                return -1.0
            urgency += _urgency(line.urgency, line.slots * (line.horizon - least))
    return urgency
