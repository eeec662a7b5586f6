"""List scheduling of F, I, W (or B) under byte limits, compiled, and the greedy made of it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.families.common import NotApplicable, NotApplicableReason, fusing_pays
from optpipe_solver.families.squeeze import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    GreedyRules,
    GreedyState,
    announce,
    begin,
    encoded,
    execute,
    fits,
    has_all,
    rules_in_bytes,
)
from optpipe_solver.jit import jitted, lean
from optpipe_solver.offload_fit.fit import Frame, fit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Ints
    from optpipe_solver.arrays.encoding import Rows
    from optpipe_solver.offload_fit.fit import Fit

__all__ = ["ListPolicy", "build_greedy", "greedy_candidates", "list_schedule", "schedule"]


_WAIT = -1


@jitted
def schedule(rules: GreedyRules, most: Ints, patience: float, m: int) -> tuple[bool, Ints, Ints]:
    """Return (whether it got to the end, programs, their lengths) for m micro-batches.

    ``most[s]`` is how many micro-batches stage s may have between F and I.
    """
    num_stages, num_devices = rules.device_of.size, rules.num_held.size
    state = begin(rules, m)
    wakes = [(0.0, 0)]
    for device in range(1, num_devices):
        wakes.append((0.0, device))  # noqa: PERF401 - numba types the list by its first item
    while len(wakes) > 0:
        now, device = heapq.heappop(wakes)
        if state.free_at[device] > now:
            continue
        choice = _choose(device, now, rules, most, state, patience)
        if choice != _WAIT:
            kind, stage = choice // num_stages, choice % num_stages
            end = execute(kind, stage, now, rules, state)
            heapq.heappush(wakes, (end, device))
            target, arrival = announce(kind, stage, end, rules, state)
            if target >= 0:
                heapq.heappush(wakes, (arrival, target))
    return has_all(rules, state), state.programs, state.lengths


@lean
def _choose(  # noqa: PLR0917 - compiled code takes its arguments by position
    device: int, now: float, rules: GreedyRules, most: Ints, state: GreedyState, patience: float
) -> int:
    """Return what an idle device does now, kind and stage in one number, or wait."""
    num_stages, m = rules.device_of.size, state.ready.shape[2]
    later = np.inf
    for at in range(rules.num_held[device]):
        s = rules.held[device, at]
        j = state.done[BACKWARD, s]
        if j < m and state.memory[device] + rules.finish[BACKWARD, s] <= rules.limit[device]:
            ready = state.ready[BACKWARD, s, j]
            if ready <= now:
                return int(BACKWARD * num_stages + s)
            later = min(later, ready)
    for at in range(rules.num_held[device] - 1, -1, -1):
        s = rules.held[device, at]
        j = state.done[FORWARD, s]
        if j < m and state.ready[FORWARD, s, j] < np.inf and _admits(device, s, rules, most, state):
            ready = state.ready[FORWARD, s, j]
            if ready <= now:
                return int(FORWARD * num_stages + s)
            later = min(later, ready)
    return _filling_weight(device, later - now, rules, state, patience)


@lean
def _filling_weight(
    device: int, wait: float, rules: GreedyRules, state: GreedyState, patience: float
) -> int:
    """Return the oldest waiting W if the wait is long enough for the patience, else wait."""
    oldest, stage = state.ready.shape[2], -1
    for at in range(rules.num_held[device]):
        s = rules.held[device, at]
        j = state.done[WEIGHT, s]
        if rules.split == 1 and j < state.done[BACKWARD, s] and j <= oldest:
            oldest, stage = j, s
    if stage < 0 or wait < patience * rules.duration[WEIGHT, stage]:
        return _WAIT
    return int(WEIGHT * rules.device_of.size + stage)


@lean
def _admits(device: int, s: int, rules: GreedyRules, most: Ints, state: GreedyState) -> bool:
    if not fits(device, FORWARD, s, rules, state):
        return False
    if state.done[FORWARD, s] - state.done[BACKWARD, s] >= most[s]:
        return False
    return _is_safe(device, s, rules, state)


@lean
def _is_safe(device: int, admitted: int, rules: GreedyRules, state: GreedyState) -> bool:
    """Banker's rule: what is in flight can be finished, oldest first, after this forward."""
    room = rules.limit[device] - state.memory[device] - rules.delta[FORWARD, admitted]
    first, last, ample = state.ready.shape[2], 0, 0
    for at in range(rules.num_held[device]):
        s = rules.held[device, at]
        first = min(first, state.done[WEIGHT if rules.split == 1 else BACKWARD, s])
        last = max(last, state.done[FORWARD, s] + (1 if s == admitted else 0))
        ample += rules.peak[FORWARD, s] + max(0, rules.finish[BACKWARD, s])
    if room >= ample:
        return True
    for j in range(first, last):
        held, needed = _to_finish(device, j, admitted, rules, state)
        if needed > room:
            return False
        room += held
        if rules.num_held[device] == 1 and held > 0:
            return True
    return True


@lean
def _to_finish(
    device: int, j: int, admitted: int, rules: GreedyRules, state: GreedyState
) -> tuple[int, int]:
    """Return the bytes micro-batch j holds on a device, and the most it adds until it is done."""
    held, extra, needed = 0, 0, 0
    for at in range(rules.num_held[device]):
        s = rules.held[device, at]
        if j >= state.done[FORWARD, s] + (1 if s == admitted else 0):
            needed = max(needed, extra + rules.peak[FORWARD, s])
            extra += rules.delta[FORWARD, s]
        elif j >= state.done[BACKWARD, s]:
            held += rules.delta[FORWARD, s]
        elif rules.split == 1 and j >= state.done[WEIGHT, s]:
            held -= rules.delta[WEIGHT, s]
    for at in range(rules.num_held[device] - 1, -1, -1):
        s = rules.held[device, at]
        if j >= state.done[BACKWARD, s]:
            needed = max(needed, extra + rules.finish[BACKWARD, s])
            extra -= rules.delta[FORWARD, s]
    return held, needed


# --- List scheduling of F, I, W (or B) under byte limits: the engine of the greedy families.
# A device that becomes free takes, of what is ready, an input gradient first, then a forward if
# memory admits it, and fills idle time with weight gradients. Micro-batches go first in, first out
# through every stage.
#
# Memory-limited scheduling can deadlock when a device holds several stages: forwards of its first
# fill the memory its last needs. A forward is therefore admitted only if the device could still
# finish what it holds one micro-batch after the other, oldest first (the banker's rule).


@dataclass(frozen=True, slots=True)
class ListPolicy:
    """The choices of one run.

    Parameters
    ----------
    limits
        Per device, the bytes that activations may fill (static and reserved bytes excluded).
    patience
        A weight gradient is started only if the next known arrival is at least this fraction of
        its duration away: 0 = at once, 1 = only where it delays nothing known.
    fused
        Whether the backward is B instead of I and W.
    in_flight
        Most micro-batches between F and I on a stage, as a multiple of the stages still ahead of
        it (1 = 1F1B's); inf = memory alone decides.
    """

    limits: tuple[int, ...]
    patience: float = 1.0
    fused: bool = False
    in_flight: float = inf


def list_schedule(problem: Problem, policy: ListPolicy) -> Rows | None:
    """Return compute programs within the policy's limits, or None where they get stuck.

    They are integers, as `CompiledProblem.encode` makes them.
    """
    num_stages, m = len(problem.stages), problem.num_microbatches
    rules = rules_in_bytes(problem, fused=policy.fused)
    rules = rules._replace(limit=np.array(policy.limits, dtype=np.int64))
    done, rows, lengths = schedule(
        rules, _most_in_flight(policy, num_stages, m), policy.patience, m
    )
    if not done:
        return None
    codes = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return encoded(problem, codes, fused=policy.fused)


def _most_in_flight(policy: ListPolicy, num_stages: int, m: int) -> Ints:
    """Return how many micro-batches each stage may have between F and I."""
    if policy.in_flight == inf:
        return np.full(num_stages, m)
    ahead = np.arange(num_stages, 0, -1)
    return np.maximum(1, (policy.in_flight * ahead).astype(np.int64))


_VIRTUAL = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, inf)
_WORK = 800_000
_FEWEST = 4
_MAX_POLICIES = 60
_FIT_TRIES = 2


def build_greedy(problem: Problem) -> Programs:
    """The Zero Bubble greedy under any memory limit, with offload where nothing else fits.

    After Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1.

    Rule: list scheduling (`list_schedule`) over a small grid of policies - how eagerly weight
    gradients fill idle time, how many micro-batches a stage keeps in flight, fused or split
    backward - each first under the memory limit itself, then under larger, virtual limits whose
    excess `fit` offloads or recomputes. The best simulated schedule wins. Memory: at most
    the limit. Bubble: no formula, what the simulation says of the best. What it ignores: it never
    looks ahead, and micro-batches go first in, first out.

    Raises
    ------
    NotApplicable
        If none of them fits.
    """
    best = min(greedy_candidates(problem), key=attrgetter("objective_ms"), default=None)
    if best is None:
        raise NotApplicable(
            NotApplicableReason.DOES_NOT_FIT,
            "no policy of the greedy finds a schedule within the memory limits",
        )
    return best.programs()


def greedy_candidates(problem: Problem) -> Iterator[Fit]:
    """Yield schedules within the limits, one per policy that works; large problems try fewer.

    A policy that gets stuck does not count as tried.
    """
    scheduled = (list_schedule(problem, policy) for policy in _policies(problem))
    tried = max(_FEWEST, min(_MAX_POLICIES, _WORK // _num_actions(problem)))
    for rows in islice(filter(None, scheduled), tried):
        fitted = fit(Frame(problem, rows), _FIT_TRIES)
        if fitted is not None:
            yield fitted


def _num_actions(problem: Problem) -> int:
    return 3 * len(problem.stages) * problem.num_microbatches


def _policies(problem: Problem) -> Iterator[ListPolicy]:
    room = [problem.room_bytes(device) for device in range(len(problem.devices))]
    may_shrink = any(
        problem.can_offload(s) or stage.can_recompute for s, stage in enumerate(problem.stages)
    )
    fused = (False, True) if fusing_pays(problem) else (False,)
    for in_flight in (inf, 1.0, 2.0, 1.5):
        for factor in _VIRTUAL if may_shrink else (1.0,):
            limits = tuple(2**60 if factor == inf else int(factor * size) for size in room)
            for fuse in fused:
                for patience in (1.0,) if fuse else (1.0, 0.0, 0.5):
                    yield ListPolicy(limits, patience, fuse, in_flight)
