"""The Zero Bubble greedy on arrays, compiled: one run of it per call.

Stages are 0 .. S - 1 in model order, each alone on its device; times in ms, sizes in bytes. The
clock here only steers and ranks; it is exactly that of `optpipe.simulate`, which a test holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.jit import jitted, lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.arrays import Floats, Ints

__all__ = ["FORWARD", "INPUT", "WEIGHT", "GreedyRun", "StageLine", "plan_line"]

FORWARD, INPUT, WEIGHT = 0, 1, 2
_TINY = 1e-9


class StageLine(NamedTuple):
    """A line of stages; every array has one entry per stage.

    Parameters
    ----------
    duration
        Of F, I and W: shape (3, S).
    there, back
        From F(s) to F(s+1), and from I(s+1) to I(s).
    held, context
        Bytes from F to I, and from I to W.
    workspace
        Of F, I and W: shape (3, S).
    limit
        Bytes that all of it may fill.
    num_microbatches
        m.
    """

    duration: Floats
    there: Floats
    back: Floats
    held: Ints
    context: Ints
    workspace: Ints
    limit: Ints
    num_microbatches: int


class GreedyRun(NamedTuple):
    """The state of one run, and in the end its result.

    ``kinds[s, :filled[s]]`` is the program of stage s: the k-th action of a kind is that of
    micro-batch k. ``first`` and ``free`` are when it starts and ends.
    """

    kinds: NDArray[np.int8]
    filled: Ints
    done: Ints
    end: Floats
    first: Floats
    free: Floats
    idle: Floats
    memory: Ints


@jitted
def plan_line(line: StageLine, one_more: bool, small_gaps: int, patient: bool) -> GreedyRun:
    """Return the programs of one setting of the hyper-parameters.

    Parameters
    ----------
    line
        Every stage must have room for one micro-batch.
    one_more
        Whether the warm-up ends with a forward that delays the first I rather than with a gap.
    small_gaps
        Whether a W longer than the gap is put into it: 0 = never, 1 = where the stage would
        otherwise become the one with most idle time, 2 = always.
    patient
        Whether an F that would delay a known I goes behind it; else only one that arrives later.
    """
    num_stages, m = line.held.size, line.num_microbatches
    plan = GreedyRun(
        kinds=np.empty((num_stages, 3 * m), dtype=np.int8),
        filled=np.zeros(num_stages, dtype=np.int64),
        done=np.zeros((3, num_stages), dtype=np.int64),
        end=np.empty((2, num_stages, m)),
        first=np.zeros(num_stages),
        free=np.zeros(num_stages),
        idle=np.zeros(num_stages),
        memory=np.zeros(num_stages, dtype=np.int64),
    )
    _play(line, plan, _warmup_counts(line, one_more), small_gaps, patient)
    return plan


@lean
def _play(line: StageLine, plan: GreedyRun, warmup: Ints, small_gaps: int, patient: bool) -> None:
    """Run everything: the warm-up, turns of F and I with W between, and the W that remain."""
    num_stages, m = line.held.size, line.num_microbatches
    for s in range(num_stages):
        for _ in range(warmup[s]):
            _put(line, plan, s, FORWARD, _forward_ready(line, plan, s))
    while plan.done[INPUT, 0] < m:  # its I is the last of every micro-batch
        for s in range(num_stages - 1, -1, -1):
            f, i = plan.done[FORWARD, s], plan.done[INPUT, s]
            has_forward = f < m and (s == 0 or plan.done[FORWARD, s - 1] > f)
            has_input = i < f and (s == num_stages - 1 or plan.done[INPUT, s + 1] > i)
            if has_forward or has_input:
                _turn(line, plan, s, has_forward, has_input, small_gaps, patient)
    for s in range(num_stages):
        while plan.done[WEIGHT, s] < m:
            _put(line, plan, s, WEIGHT, 0.0)


@jitted
def _warmup_counts(line: StageLine, one_more: bool) -> Ints:
    """Return how many forwards each stage runs before its first I.

    As many as end before that I arrives, and memory admits here and on every stage before; the
    arrivals follow from the last stage to the first.
    """
    num_stages, m = line.held.size, line.num_microbatches
    ends = np.empty((num_stages, m))
    cap = np.empty(num_stages, dtype=np.int64)
    for s in range(num_stages):
        most = m if s == 0 else cap[s - 1]
        cap[s] = 1
        while cap[s] < most and _holds(line, s, cap[s] + 1):
            cap[s] += 1
        for j in range(cap[s]):
            free = ends[s, j - 1] if j > 0 else 0.0
            if s > 0:
                free = max(free, ends[s - 1, j] + line.there[s - 1])
            ends[s, j] = free + line.duration[FORWARD, s]
    counts = np.empty(num_stages, dtype=np.int64)
    arrival = ends[num_stages - 1, 0]
    for s in range(num_stages - 1, -1, -1):
        k = 1
        while k < cap[s] and ends[s, k] <= arrival + _TINY:
            k += 1
        if one_more and k < cap[s] and ends[s, k] - line.duration[FORWARD, s] < arrival - _TINY:
            k += 1
        counts[s] = k
        if s > 0:
            start = max(arrival, ends[s, k - 1])
            arrival = start + line.duration[INPUT, s] + line.back[s - 1]
    return counts


@lean
def _turn(  # noqa: PLR0917 - compiled code takes its arguments by position
    line: StageLine,
    plan: GreedyRun,
    s: int,
    has_forward: bool,
    has_input: bool,
    small_gaps: int,
    patient: bool,
) -> None:
    """Give a stage its next F and I, as far as their inputs exist: the alternation of 1F1B."""
    last = line.held.size - 1
    f, i = plan.done[FORWARD, s], plan.done[INPUT, s]
    arrival = np.inf
    if has_input:
        arrival = plan.end[FORWARD, s, i] if s == last else plan.end[INPUT, s + 1, i] + line.back[s]
    if has_forward and _holds(line, s, f + 1 - i):
        ready = _forward_ready(line, plan, s)
        lasts = max(ready, plan.free[s]) + line.duration[FORWARD, s] if patient else ready
        if lasts <= max(arrival, plan.free[s]) + _TINY:
            _fill(line, plan, s, ready, small_gaps)
            _make_room(line, plan, s, FORWARD)
            _put(line, plan, s, FORWARD, ready)
    if has_input:
        _fill(line, plan, s, arrival, small_gaps)
        _make_room(line, plan, s, INPUT)
        _put(line, plan, s, INPUT, arrival)


@lean
def _forward_ready(line: StageLine, plan: GreedyRun, s: int) -> float:
    if s == 0:
        return 0.0
    ready: float = plan.end[FORWARD, s - 1, plan.done[FORWARD, s]] + line.there[s - 1]
    return ready


@lean
def _fill(line: StageLine, plan: GreedyRun, s: int, until: float, small_gaps: int) -> None:
    """Run weight gradients in the gap before the next action."""
    while plan.done[WEIGHT, s] < plan.done[INPUT, s]:
        gap = until - plan.free[s]
        if gap <= _TINY:
            return
        if gap < line.duration[WEIGHT, s] - _TINY and (
            small_gaps == 0 or (small_gaps == 1 and plan.idle[s] + gap <= _most_idle(plan) + _TINY)
        ):
            return
        _put(line, plan, s, WEIGHT, 0.0)


@lean
def _most_idle(plan: GreedyRun) -> float:
    most: float = plan.idle[0]
    for s in range(1, plan.idle.size):
        most = max(most, plan.idle[s])
    return most


@lean
def _make_room(line: StageLine, plan: GreedyRun, s: int, kind: int) -> None:
    """Run weight gradients until an F or I fits, and behind it any W."""
    while plan.done[WEIGHT, s] < plan.done[INPUT, s] or kind == INPUT:
        grown = line.held[s] if kind == FORWARD else line.context[s] - line.held[s]
        now = plan.memory[s]
        own = now + max(0, grown) + line.workspace[kind, s]
        behind = now + grown + line.workspace[WEIGHT, s]
        if max(own, behind) <= line.limit[s] or plan.done[WEIGHT, s] == plan.done[INPUT, s]:
            return
        _put(line, plan, s, WEIGHT, 0.0)


@lean
def _holds(line: StageLine, s: int, in_flight: int) -> bool:
    """Whether, no W waiting, a stage has room for so many micro-batches and for finishing one."""
    grown = line.context[s] - line.held[s]
    finishing = max(max(0, grown) + line.workspace[INPUT, s], grown + line.workspace[WEIGHT, s])
    most = max(finishing, line.workspace[FORWARD, s])
    fits: bool = in_flight * line.held[s] + most <= line.limit[s]
    return fits


@lean
def _put(line: StageLine, plan: GreedyRun, s: int, kind: int, ready: float) -> None:
    start = max(plan.free[s], ready)
    if plan.filled[s] == 0:
        plan.first[s] = start
    else:
        plan.idle[s] += start - plan.free[s]
    plan.free[s] = start + line.duration[kind, s]
    if kind == FORWARD:
        plan.memory[s] += line.held[s]
    elif kind == INPUT:
        plan.memory[s] += line.context[s] - line.held[s]
    else:
        plan.memory[s] -= line.context[s]
    if kind != WEIGHT:
        plan.end[kind, s, plan.done[kind, s]] = plan.free[s]
    plan.kinds[s, plan.filled[s]] = kind
    plan.filled[s] += 1
    plan.done[kind, s] += 1
