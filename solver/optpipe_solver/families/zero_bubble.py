"""The automatic Zero Bubble scheduler: ZB-1p, ZB-2p, and other memory limits.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1.

Rule: the warm-up of a stage is as many forwards as fit into memory and end before its first I
arrives. The stage then alternates F and I. W fills gaps that it fits into, and runs early if memory
requires it. All remaining W run at the end. Hyper-parameters: all combinations are tried, and the
best simulated schedule is kept. The warm-up may have one more F although it delays the first I. W
fills gaps shorter than itself always, never, or if the stage would otherwise become the one with
the most idle time. An F that would delay an I may run after it.

The paper alternates strictly. With little memory, a stage then waits for an F that its own I must
first make possible. Here an F never makes a stage wait while an I is ready: below p activations
(and down to one) the schedule only gets slower.

Memory: at most the limit, in bytes, workspaces included. ZB-1p is the limit of p activations (as
much as 1F1B's first stage, but on every stage), ZB-2p of 2p. Bubble at equal times: that of ZB-H1
at p, and close to zero from 2p - 1 on. It ignores the fused backward, offload and recompute, and
micro-batches go first in, first out.

One run of the rule is compiled (`plan_line`): stages are 0 .. S - 1 in model order, each alone on
its device. Its clock only steers and ranks; tests check that it equals `optpipe.simulate` exactly.
"""

from __future__ import annotations

from itertools import count, islice, product
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.schedule import Action, ActionType
from optpipe_solver.arrays.encoding import KINDS, CompiledProblem
from optpipe_solver.budget import check_stop
from optpipe_solver.families.common import (
    NotApplicable,
    NotApplicableReason,
    one_stage_per_device,
    programs_by_device,
)
from optpipe_solver.jit import jitted, lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.problem import Problem, Stage
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.arrays.simulate import MemoryArrays, TimeArrays

__all__ = [
    "FORWARD",
    "INPUT",
    "WEIGHT",
    "GreedyRun",
    "build_zb_1p",
    "build_zb_2p",
    "build_zb_h1",
    "build_zb_h2",
    "build_zero_bubble_greedy",
    "plan_line",
]


FORWARD, INPUT, WEIGHT = 0, 1, 2
_TINY = 1e-9


class GreedyRun(NamedTuple):
    """The state of one run, and in the end its result.

    ``kinds[s, :filled[s]]`` is the program of stage s: the k-th action of a kind is that of
    micro-batch k. It starts at ``first`` and ends at ``free``; ``memory`` are the bytes held.
    """

    times: TimeArrays
    bytes: MemoryArrays
    kinds: NDArray[np.int8]
    filled: Ints
    done: Ints
    end: Floats
    first: Floats
    free: Floats
    idle: Floats
    memory: Ints


@jitted
def plan_line(
    times: TimeArrays, memory: MemoryArrays, one_more: bool, small_gaps: int, patient: bool
) -> GreedyRun:
    """Return the programs of one setting of the hyper-parameters.

    Parameters
    ----------
    times, memory
        A problem with one stage per device; ``memory.limit`` is by stage, and every stage must
        have room for one micro-batch.
    one_more
        Whether the warm-up ends with a forward that delays the first I rather than with a gap.
    small_gaps
        Whether a W longer than the gap is put into it: 0 = never, 1 = if the stage would otherwise
        become the one with the most idle time, 2 = always.
    patient
        Whether an F that would delay a known I runs after it; else only an F that arrives later.
    """
    num_stages, m = times.num_stages, times.num_microbatches
    plan = GreedyRun(
        times=times,
        bytes=memory,
        kinds=np.empty((num_stages, 3 * m), dtype=np.int8),
        filled=np.zeros(num_stages, dtype=np.int64),
        done=np.zeros((3, num_stages), dtype=np.int64),
        end=np.empty((2, num_stages, m)),
        first=np.zeros(num_stages),
        free=np.zeros(num_stages),
        idle=np.zeros(num_stages),
        memory=np.zeros(num_stages, dtype=np.int64),
    )
    _play(plan, _warmup_counts(times, memory, one_more), small_gaps, patient)
    return plan


@lean
def _play(plan: GreedyRun, warmup: Ints, small_gaps: int, patient: bool) -> None:
    """Run everything: the warm-up, turns of F and I with W between, and the W that remain."""
    num_stages, m = plan.times.num_stages, plan.times.num_microbatches
    for s in range(num_stages):
        for _ in range(warmup[s]):
            _put(plan, s, FORWARD, _forward_ready(plan, s))
    while plan.done[INPUT, 0] < m:  # its I is the last of every micro-batch
        for s in range(num_stages - 1, -1, -1):
            f, i = plan.done[FORWARD, s], plan.done[INPUT, s]
            has_forward = f < m and (s == 0 or plan.done[FORWARD, s - 1] > f)
            has_input = i < f and (s == num_stages - 1 or plan.done[INPUT, s + 1] > i)
            if has_forward or has_input:
                _turn(plan, s, has_forward, has_input, small_gaps, patient)
    for s in range(num_stages):
        while plan.done[WEIGHT, s] < m:
            _put(plan, s, WEIGHT, 0.0)


@jitted
def _warmup_counts(times: TimeArrays, memory: MemoryArrays, one_more: bool) -> Ints:
    """Return how many forwards each stage runs before its first I.

    These are as many as end before that I arrives and fit into memory, here and on every earlier
    stage. The arrivals are computed from the last stage to the first.
    """
    num_stages, m = times.num_stages, times.num_microbatches
    ends = np.empty((num_stages, m))
    cap = np.empty(num_stages, dtype=np.int64)
    for s in range(num_stages):
        most = m if s == 0 else cap[s - 1]
        cap[s] = 1
        while cap[s] < most and _holds(memory, s, cap[s] + 1):
            cap[s] += 1
        for j in range(cap[s]):
            free = ends[s, j - 1] if j > 0 else 0.0
            if s > 0:
                free = max(free, ends[s - 1, j] + times.there[s - 1])
            ends[s, j] = free + times.mode_ms[FORWARD, s, 0]
    counts = np.empty(num_stages, dtype=np.int64)
    arrival = ends[num_stages - 1, 0]
    for s in range(num_stages - 1, -1, -1):
        k = 1
        while k < cap[s] and ends[s, k] <= arrival + _TINY:
            k += 1
        if one_more and k < cap[s] and ends[s, k] - times.mode_ms[FORWARD, s, 0] < arrival - _TINY:
            k += 1
        counts[s] = k
        if s > 0:
            start = max(arrival, ends[s, k - 1])
            arrival = start + times.mode_ms[INPUT, s, 0] + times.back[s - 1]
    return counts


@lean
def _turn(  # noqa: PLR0917 - compiled code takes its arguments by position
    plan: GreedyRun,
    s: int,
    has_forward: bool,
    has_input: bool,
    small_gaps: int,
    patient: bool,
) -> None:
    """Give a stage its next F and I, as far as their inputs exist: the alternation of 1F1B."""
    last = plan.times.num_stages - 1
    f, i = plan.done[FORWARD, s], plan.done[INPUT, s]
    arrival = np.inf
    if has_input:
        arrival = (
            plan.end[FORWARD, s, i] if s == last else plan.end[INPUT, s + 1, i] + plan.times.back[s]
        )
    if has_forward and _holds(plan.bytes, s, f + 1 - i):
        ready = _forward_ready(plan, s)
        lasts = max(ready, plan.free[s]) + plan.times.mode_ms[FORWARD, s, 0] if patient else ready
        if lasts <= max(arrival, plan.free[s]) + _TINY:
            _fill(plan, s, ready, small_gaps)
            _make_room(plan, s, FORWARD)
            _put(plan, s, FORWARD, ready)
    if has_input:
        _fill(plan, s, arrival, small_gaps)
        _make_room(plan, s, INPUT)
        _put(plan, s, INPUT, arrival)


@lean
def _forward_ready(plan: GreedyRun, s: int) -> float:
    if s == 0:
        return 0.0
    ready: float = plan.end[FORWARD, s - 1, plan.done[FORWARD, s]] + plan.times.there[s - 1]
    return ready


@lean
def _fill(plan: GreedyRun, s: int, until: float, small_gaps: int) -> None:
    """Run weight gradients in the gap before the next action."""
    while plan.done[WEIGHT, s] < plan.done[INPUT, s]:
        gap = until - plan.free[s]
        if gap <= _TINY:
            return
        if gap < plan.times.mode_ms[WEIGHT, s, 0] - _TINY and (
            small_gaps == 0 or (small_gaps == 1 and plan.idle[s] + gap <= _most_idle(plan) + _TINY)
        ):
            return
        _put(plan, s, WEIGHT, 0.0)


@lean
def _most_idle(plan: GreedyRun) -> float:
    most: float = plan.idle[0]
    for s in range(1, plan.idle.size):
        most = max(most, plan.idle[s])
    return most


@lean
def _make_room(plan: GreedyRun, s: int, kind: int) -> None:
    """Run weight gradients until an F or I fits, and any W after it."""
    memory = plan.bytes
    while plan.done[WEIGHT, s] < plan.done[INPUT, s] or kind == INPUT:
        behind = memory.adds[kind, s, 0] + memory.rises[WEIGHT, s, 0]
        needs = plan.memory[s] + max(memory.rises[kind, s, 0], behind)
        if needs <= memory.limit[s] or plan.done[WEIGHT, s] == plan.done[INPUT, s]:
            return
        _put(plan, s, WEIGHT, 0.0)


@lean
def _holds(memory: MemoryArrays, s: int, in_flight: int) -> bool:
    """Whether, if no W waits, so many micro-batches fit into a stage, and one can be finished."""
    finishing = max(
        memory.rises[INPUT, s, 0], memory.adds[INPUT, s, 0] + memory.rises[WEIGHT, s, 0]
    )
    activation = memory.adds[FORWARD, s, 0]
    most = max(finishing, memory.rises[FORWARD, s, 0] - activation)
    fits: bool = in_flight * activation + most <= memory.limit[s]
    return fits


@lean
def _put(plan: GreedyRun, s: int, kind: int, ready: float) -> None:
    start = max(plan.free[s], ready)
    if plan.filled[s] == 0:
        plan.first[s] = start
    else:
        plan.idle[s] += start - plan.free[s]
    plan.free[s] = start + plan.times.mode_ms[kind, s, 0]
    plan.memory[s] += plan.bytes.adds[kind, s, 0]
    if kind != WEIGHT:
        plan.end[kind, s, plan.done[kind, s]] = plan.free[s]
    plan.kinds[s, plan.filled[s]] = kind
    plan.filled[s] += 1
    plan.done[kind, s] += 1


_TYPES = KINDS[: WEIGHT + 1]
_WORK = 800_000
_UNLIMITED = 2**60  # sums of it and a few activations (2**53 at most) are still 64-bit integers


def build_zero_bubble_greedy(problem: Problem) -> Programs:
    """Return the best of the greedy's schedules within the memory limits.

    Raises
    ------
    NotApplicable
        If a device holds several stages, or has no room for one micro-batch.
    """
    one_stage_per_device(problem)
    limits = [problem.room_bytes(stage.device) for stage in problem.stages]
    for index, (stage, limit) in enumerate(zip(problem.stages, limits, strict=True)):
        if stage.activation_bytes + _beside(stage) > limit:
            raise NotApplicable(
                NotApplicableReason.DOES_NOT_FIT,
                f"stage {index} needs {stage.activation_bytes + _beside(stage)} bytes for one "
                f"micro-batch without offload and recompute, but device {stage.device} has room "
                f"for {limit}",
            )
    return _best(problem, limits)


def build_zb_1p(problem: Problem) -> Programs:
    """Return ZB-1p's programs: p activations on every stage, whatever the memory limits are.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    return _with_activations(problem, len(problem.stages))


def build_zb_2p(problem: Problem) -> Programs:
    """Return ZB-2p's programs: 2p activations on every stage, whatever the memory limits are.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    return _with_activations(problem, 2 * len(problem.stages))


def _with_activations(problem: Problem, number: int) -> Programs:
    one_stage_per_device(problem)
    return _best(
        problem, [number * stage.activation_bytes + _beside(stage) for stage in problem.stages]
    )


def _beside(stage: Stage) -> int:
    """Return the bytes a stage needs in addition to its activations to run any one action."""
    growth = stage.weight_context_bytes - stage.activation_bytes
    return max(
        stage.forward_workspace_bytes,
        max(0, growth) + stage.backward_input_workspace_bytes,
        growth + stage.backward_weight_workspace_bytes,
    )


def _best(problem: Problem, limits: list[int]) -> Programs:
    compiled = CompiledProblem.of(problem)
    bounded = np.array([min(limit, _UNLIMITED) for limit in limits], dtype=np.int64)
    memory = compiled.memory._replace(limit=bounded)
    syncs = np.array([stage.grad_sync_ms for stage in problem.stages])
    # The most successful hyper-parameters come first; large problems try fewer.
    settings = product((False, True), (1, 2, 0), (True, False))
    size = 3 * len(problem.stages) * problem.num_microbatches
    best, best_ms = None, inf
    for setting in islice(settings, max(2, min(12, _WORK // size))):
        check_stop()
        plan = plan_line(compiled.times, memory, *setting)
        ends = plan.free + syncs
        span_ms, makespan_ms = (ends - plan.first).max(), ends.max() - plan.first.min()
        objective_ms = span_ms if problem.objective == "span" else makespan_ms
        if objective_ms < best_ms:
            best, best_ms = plan, objective_ms
    assert best is not None  # noqa: S101 - every setting ends
    by_stage: list[list[Action]] = []
    for stage, (kinds, filled) in enumerate(zip(best.kinds, best.filled, strict=True)):
        microbatch_of = [count(), count(), count()]
        by_stage.append(
            [Action(stage, _TYPES[kind], next(microbatch_of[kind])) for kind in kinds[:filled]]
        )
    return programs_by_device(problem, by_stage)


def build_zb_h1(problem: Problem) -> Programs:
    """ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1).

    Rule: forwards and input gradients run in 1F1B's order. Stage s runs its W as soon as more than
    s of them wait. So in-flight forwards (S - s) and waiting W (s) together never exceed S. The
    rest fills the drain, one W after each I. Memory: S micro-batches on every stage (min with m),
    as 1F1B's first stage. Bubble at equal times: (S - 1)(F + I - W). It ignores memory limits,
    offload and recompute.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    return _handcrafted(problem, 1)


def build_zb_h2(problem: Problem) -> Programs:
    """ZB-H2: the handcrafted zero-bubble schedule.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2 and figure 3 (bottom).

    Rule: as ZB-H1 with all counts doubled. Stage s of S first runs 2(S - 1 - s) + 1 forwards, which
    fill the wait for its first input gradient. It then alternates I and F. A weight gradient lags
    2s micro-batches, so that the tail becomes a parallelogram: the devices end as staggered as they
    began. Memory: stage s holds at most 2(S - s) - 1 micro-batches between F and I, and 2s between
    I and W. The sum never exceeds the 2S - 1 of the first stage (min with m). Bubble (span) at
    equal times and m >= 2S - 1: zero. The paper states (S - 1)(F + I - 2W) for its profiled times.
    It ignores memory limits, unequal stages (the counts do not change with times), offload and
    recompute.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    return _handcrafted(problem, 2)


def _handcrafted(problem: Problem, times: int) -> Programs:
    """Return ZB-H1's programs with ``times`` as many forwards ahead and W delayed."""
    one_stage_per_device(problem)
    last, m = len(problem.stages) - 1, problem.num_microbatches
    by_stage = [_stage_program(s, times * (last - s), times * s, m) for s in range(last + 1)]
    return programs_by_device(problem, by_stage)


def _stage_program(stage: int, ahead: int, lag: int, m: int) -> list[Action]:
    """Return ``ahead`` forwards, then I and F in turn; W run ``lag`` micro-batches after I."""
    ahead = min(ahead, m)
    program = [Action(stage, ActionType.FORWARD, j) for j in range(ahead)]
    done_w = 0
    for j in range(m):
        draining = ahead + j >= m
        if not draining:
            program.append(Action(stage, ActionType.FORWARD, ahead + j))
        program.append(Action(stage, ActionType.BACKWARD_INPUT, j))
        if draining or j + 1 - done_w > lag:
            program.append(Action(stage, ActionType.BACKWARD_WEIGHT, done_w))
            done_w += 1
    return program + [Action(stage, ActionType.BACKWARD_WEIGHT, j) for j in range(done_w, m)]
