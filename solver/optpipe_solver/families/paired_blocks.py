"""Building blocks executed so that forwards and backwards run in pairs, under the memory limits.

DualPipeV needs 2p + 1 activations of a chunk. Here the order in which one micro-batch after the
other comes to a device is that of a building block (`families.squeeze`), which only says who goes
first; a device that becomes free runs a pair where a licensed F and backward are both there, or
will be before the wait costs more than the pair hides. So one rule thins DualPipeV, pairs what is
beside each other in a V or a loop, and runs alone what has no partner.

A forward is admitted only if what the device holds could still be finished, oldest micro-batch
first (the banker's rule): no order gets stuck for want of memory. One that comes before its turn,
alone or in a pair, must moreover leave room for all that it jumps, each W right behind its I: else
the first chunk's forwards fill what the order keeps for the other's. Ignored: offload, recompute,
gradient reductions, messages that wait for each other; micro-batches go first in, first out.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import product, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import CODES, CompiledProblem, program_of
from optpipe_solver.budget import check_stop
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.squeeze import BuildingBlock, Order, uniform_block, unroll
from optpipe_solver.families.v_shape import candidate_blocks, distance
from optpipe_solver.jit import jitted, lean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Floats, Ints

__all__ = [
    "PairPolicy",
    "PairedSchedule",
    "build_paired_blocks",
]

FORWARD, INPUT, WEIGHT, FULL = 0, 1, 2, 3
"""Kinds as `simulate` numbers them; with order and readiness, 1 is either backward."""

IN_DRAIN, ALWAYS = 1, 2
"""When a backward that runs alone is split into I and W; anything else: never."""

_WAIT = -1
_NOWHERE = 2**40
_SCANNED = 64
"""Places of the order, from the first that has not run, that are looked at."""


# ruff: noqa: PLR0917 - compiled code takes its arguments by position


class PairRules(NamedTuple):
    """What a problem asks; tables by kind (F, I, W, B) and stage, ``hidden`` as in `TimeArrays`."""

    device_of: Ints
    owned: Ints
    num_owned: Ints
    duration: Floats
    delta: Ints
    rises: Ints
    hidden: Floats
    there: Floats
    back: Floats
    limit: Ints


class PairState(NamedTuple):
    """What was done, by [F or backward, stage] or by device; ``split`` queues the W of a stage.

    ``in_flight`` is memory with every W that waits done; ``ready`` when a pass's input arrives.
    """

    done: Ints
    ready: Floats
    split: Ints
    num_split: Ints
    num_weights: Ints
    memory: Ints
    in_flight: Ints
    free_at: Floats
    head: Ints
    programs: Ints
    lengths: Ints
    first: Floats
    last: Floats


class PairPolicy(NamedTuple):
    """How a device fills its time.

    Parameters
    ----------
    wait
        How long it waits for a partner, in shares of what the pair would hide.
    reach
        Places of the order, from the first that has not run, among which pairs are made.
    early
        Whether it runs alone what is later in the order while it waits: 0 never, 1 after a W, 2
        before one.
    patience
        A pass fills a wait of at least this fraction of its duration.
    split
        When a backward that runs alone is split: `IN_DRAIN` or `ALWAYS`.
    """

    wait: float = 1.0
    reach: int = 1_000_000
    early: int = 1
    patience: float = 1.0
    split: int = ALWAYS


@jitted
def squeeze_pairs(
    rules: PairRules, order: Order, policy: PairPolicy
) -> tuple[bool, Ints, Ints, float, float]:
    """Return (whether it got to the end, programs, their lengths, makespan, span)."""
    state = _begin(rules, order.num_microbatches)
    left = 2 * rules.device_of.size * order.num_microbatches
    wakes = [(0.0, 0)]
    for device in range(1, rules.num_owned.size):
        wakes.append((0.0, device))  # noqa: PERF401 - numba types the list by its first item
    clock = 0.0
    while left > 0 or len(wakes) > 0:
        if len(wakes) > 0:
            now, device = heapq.heappop(wakes)
            clock = max(clock, now)
            if state.free_at[device] > now:
                continue
            count = state.lengths[device]
            again = _act(device, now, rules, order, policy, state)
            if again > now:
                heapq.heappush(wakes, (again, device))
            if state.lengths[device] == count:
                continue
        else:
            # Everyone waits for what comes later in its order: the first that can run goes on.
            device = _first_able(rules, order, state, clock)
            count = state.lengths[max(device, 0)]
            if device >= 0:
                _alone(device, clock, rules, order, policy, state, True)
            if device < 0 or state.lengths[device] == count:
                return False, state.programs, state.lengths, np.inf, np.inf
        left -= _tell(device, count, wakes, rules, state)
    done = bool((state.num_weights == state.num_split).all())
    used = state.lengths > 0
    begun = state.first[used].min()
    span = (state.last[used] - state.first[used]).max()
    return done, state.programs, state.lengths, state.last.max() - begun, span


@jitted
def _begin(rules: PairRules, m: int) -> PairState:
    num_stages, num_devices = rules.device_of.size, rules.num_owned.size
    state = PairState(
        np.zeros((2, num_stages), np.int64),
        np.full((2, num_stages, m), np.inf),
        np.zeros((num_stages, m), np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(num_stages, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices),
        np.zeros(num_devices, np.int64),
        np.zeros((num_devices, 3 * m * rules.owned.shape[1]), np.int64),
        np.zeros(num_devices, np.int64),
        np.full(num_devices, np.inf),
        np.zeros(num_devices),
    )
    state.ready[FORWARD, 0, :] = 0.0
    return state


@jitted
def _tell(
    device: int, count: int, wakes: list[tuple[float, int]], rules: PairRules, state: PairState
) -> int:
    """Tell who waits for what a device ran after its first ``count`` actions; return the passes."""
    end, m = state.free_at[device], state.ready.shape[2]
    num_cells, passes = rules.device_of.size * m, 0
    heapq.heappush(wakes, (end, device))
    for at in range(count, state.lengths[device]):
        kind, cell = state.programs[device, at] // num_cells, state.programs[device, at] % num_cells
        if kind != WEIGHT:
            passes += 1
            target, arrival = _announce(kind, cell // m, cell % m, end, rules, state)
            if target >= 0:
                heapq.heappush(wakes, (arrival, target))
    return passes


@lean
def _announce(
    kind: int, stage: int, j: int, end: float, rules: PairRules, state: PairState
) -> tuple[int, float]:
    """Tell the consumer of a pass when its input arrives; return its device (-1: none), when."""
    last = rules.device_of.size - 1
    if kind == FORWARD and stage == last:
        state.ready[INPUT, last, j] = end
        return rules.device_of[last], end
    if kind == FORWARD:
        arrival = end + rules.there[stage]
        state.ready[FORWARD, stage + 1, j] = arrival
        return rules.device_of[stage + 1], arrival
    if stage > 0:
        arrival = end + rules.back[stage - 1]
        state.ready[INPUT, stage - 1, j] = arrival
        return rules.device_of[stage - 1], arrival
    return -1, end


@lean
def _first_able(rules: PairRules, order: Order, state: PairState, now: float) -> int:
    """Return the first device that can run anything now, in whatever order; -1: none."""
    for device in range(rules.num_owned.size):
        if _first_ready(device, now, rules, order, state, True) != _WAIT or (
            _waiting_weight(device, rules, state) >= 0
        ):
            return device
    return -1


@lean
def _act(
    device: int, now: float, rules: PairRules, order: Order, policy: PairPolicy, state: PairState
) -> float:
    """Run what an idle device does now, if anything; return when it is to be asked again, or 0."""
    start = _try_pair(device, now, rules, order, policy, state)
    if start < 0.0:
        return 0.0
    if start < np.inf:
        # It waits for a partner; a W may fill the wait.
        _fill(device, now, start - now, rules, policy, state)
        return start
    return _alone(device, now, rules, order, policy, state, False)


@lean
def _try_pair(
    device: int, now: float, rules: PairRules, order: Order, policy: PairPolicy, state: PairState
) -> float:
    """Run the pair that gains most, if it can start now (-1); else return its start, inf: none."""
    _advance(device, order, state)
    furthest = state.head[device] + policy.reach
    best, begins, sum_of_places = 1e-9, np.inf, 0
    forward, backward, letter = -1, -1, -1
    for at in range(rules.num_owned[device]):
        a = rules.owned[device, at]
        place = _place(FORWARD, a, order, state)
        if place > furthest or not _leaves_room(device, a, rules, order, state):
            continue
        for other in range(rules.num_owned[device]):
            b = rules.owned[device, other]
            places = place + _place(1, b, order, state)
            if places - place > furthest:
                continue
            start = _start(now, a, b, state)
            for fused in range(2):
                gain = _gain(device, a, b, fused, start - now, rules, policy, state)
                if gain > best + 1e-9 or (gain > best - 1e-9 and places < sum_of_places):
                    best, begins, sum_of_places = gain, start, places
                    forward, backward, letter = a, b, fused
    if forward < 0 or begins > now:
        return begins
    _run_pair(device, forward, backward, letter, now, rules, state)
    return -1.0


@lean
def _place(kind: int, stage: int, order: Order, state: PairState) -> int:
    """Return the place in the order of a stage's next pass; beyond all where it will not come."""
    j = state.done[kind, stage]
    if j >= order.num_microbatches or state.ready[kind, stage, j] == np.inf:
        return _NOWHERE
    return int(order.place[2 * stage + kind, j])


@lean
def _start(now: float, a: int, b: int, state: PairState) -> float:
    j, k = state.done[FORWARD, a], state.done[1, b]
    return float(max(now, state.ready[FORWARD, a, j], state.ready[1, b, k]))


@lean
def _gain(
    device: int,
    a: int,
    b: int,
    fused: int,
    wait: float,
    rules: PairRules,
    policy: PairPolicy,
    state: PairState,
) -> float:
    """Return what a pair hides less the wait for it, in ms; 0 where it may not or does not fit."""
    hidden = rules.hidden[fused, a, b]
    if np.isnan(hidden) or wait > policy.wait * hidden:
        return 0.0
    if fused == 0 and rules.hidden[1, a, b] >= hidden:
        return 0.0
    if not _pair_fits(device, a, b, fused, rules, state):
        return 0.0
    return float(hidden - wait)


@lean
def _run_pair(
    device: int, a: int, b: int, fused: int, now: float, rules: PairRules, state: PairState
) -> None:
    m = state.ready.shape[2]
    kind = FULL if fused == 1 else INPUT
    paired = simulate.PAIRED_BACKWARD if fused == 1 else simulate.PAIRED_INPUT
    length = rules.duration[FORWARD, a] + rules.duration[kind, b] - rules.hidden[fused, a, b]
    code = (paired * rules.device_of.size + b) * m + state.done[1, b]
    _note(device, a * m + state.done[FORWARD, a], now, length, state)
    _note(device, code, now, length, state)
    _count(device, FORWARD, a, rules, state)
    _count(device, kind, b, rules, state)


@lean
def _pair_fits(device: int, a: int, b: int, fused: int, rules: PairRules, state: PairState) -> bool:
    kind = FULL if fused == 1 else INPUT
    # What F adds and its workspace, and what the backward has above that.
    most = rules.rises[FORWARD, a] + rules.rises[kind, b]
    if kind == INPUT:
        after = rules.delta[FORWARD, a] + rules.delta[INPUT, b] + rules.rises[WEIGHT, b]
        most = max(most, after)
    return bool(state.memory[device] + most <= rules.limit[device])


@lean
def _note(device: int, code: int, now: float, length: float, state: PairState) -> None:
    state.programs[device, state.lengths[device]] = code
    state.lengths[device] += 1
    state.free_at[device] = now + length
    state.first[device] = min(state.first[device], now)
    state.last[device] = now + length


@lean
def _count(device: int, kind: int, stage: int, rules: PairRules, state: PairState) -> None:
    """Count a pass as done, with its bytes; the W of an I waits from here on."""
    state.memory[device] += rules.delta[kind, stage]
    if kind == FORWARD:
        state.in_flight[device] += rules.delta[FORWARD, stage]
        state.done[FORWARD, stage] += 1
        return
    if kind == WEIGHT:
        state.num_weights[stage] += 1
        return
    if kind == INPUT:
        state.split[stage, state.num_split[stage]] = state.done[1, stage]
        state.num_split[stage] += 1
    state.in_flight[device] -= rules.delta[FORWARD, stage]
    state.done[1, stage] += 1


@lean
def _advance(device: int, order: Order, state: PairState) -> None:
    """Let the head of a device stand on the first pass of its order that has not run."""
    while state.head[device] < order.length[device]:
        at = state.head[device]
        code = order.sequence[device, at]
        if order.place[code, state.done[code % 2, code // 2]] <= at:
            return
        state.head[device] += 1


@lean
def _first_ready(
    device: int, now: float, rules: PairRules, order: Order, state: PairState, any_order: bool
) -> int:
    """Return the first pass in block order that can run now, 2 * stage + kind, or wait."""
    m = order.num_microbatches
    best, found = np.iinfo(np.int64).max, _WAIT
    for at in range(rules.num_owned[device]):
        stage = rules.owned[device, at]
        for kind in range(2):
            j = state.done[kind, stage]
            if j >= m or state.ready[kind, stage, j] > now:
                continue
            place = order.place[2 * stage + kind, j]
            if place >= best:
                continue
            if kind == 1:
                fits = state.memory[device] + rules.rises[FULL, stage] <= rules.limit[device]
            elif any_order:
                fits = _admits(device, stage, rules, state)
            else:
                fits = _leaves_room(device, stage, rules, order, state)
            if fits:
                best, found = place, 2 * stage + kind
    return found


@lean
def _following(device: int, rules: PairRules, order: Order, state: PairState) -> tuple[int, float]:
    """Return the next pass of the order and when its input arrives; wait, inf if it cannot run."""
    _advance(device, order, state)
    if state.head[device] >= order.length[device]:
        return _WAIT, np.inf
    code = order.sequence[device, state.head[device]]
    stage, kind = code // 2, code % 2
    if kind == FORWARD and not _admits(device, stage, rules, state):
        return _WAIT, np.inf
    return code, state.ready[kind, stage, state.done[kind, stage]]


@lean
def _alone(
    device: int,
    now: float,
    rules: PairRules,
    order: Order,
    policy: PairPolicy,
    state: PairState,
    any_order: bool,
) -> float:
    """Run the next pass of the order, or an early one, or a W; return when to ask again, or 0."""
    following, arrives = _following(device, rules, order, state)
    if following == _WAIT or arrives > now:
        gap = arrives - now
        following = _WAIT
        if policy.early > 0 or any_order:
            following = _first_ready(device, now, rules, order, state, any_order)
        if following != _WAIT and not any_order:
            length = rules.duration[FORWARD if following % 2 == 0 else INPUT, following // 2]
            if policy.patience * length > gap:
                following = _WAIT
            elif policy.early < 2 and _fill(device, now, gap, rules, policy, state):
                return 0.0
    if following == _WAIT:
        _fill(device, now, arrives - now, rules, policy, state)
    else:
        _run_alone(device, following // 2, following % 2, now, rules, policy, state)
    return 0.0


@lean
def _run_alone(
    device: int,
    stage: int,
    kind: int,
    now: float,
    rules: PairRules,
    policy: PairPolicy,
    state: PairState,
) -> None:
    """Run a pass, a backward split or not as the policy says; a W where it does not fit."""
    m, done = state.ready.shape[2], kind
    if kind != FORWARD:
        splits = policy.split == ALWAYS or (
            policy.split == IN_DRAIN and _has_no_forward(device, m, rules, state)
        )
        after = rules.delta[INPUT, stage] + rules.rises[WEIGHT, stage]
        most = max(rules.rises[INPUT, stage], after)
        room = rules.limit[device] - state.memory[device]
        done = INPUT if splits and most <= room else FULL
        if rules.rises[done, stage] > room:
            _fill(device, now, np.inf, rules, policy, state)
            return
    code = (done * rules.device_of.size + stage) * m + state.done[kind, stage]
    _note(device, code, now, rules.duration[done, stage], state)
    _count(device, done, stage, rules, state)


@lean
def _has_no_forward(device: int, m: int, rules: PairRules, state: PairState) -> bool:
    for at in range(rules.num_owned[device]):
        if state.done[FORWARD, rules.owned[device, at]] < m:
            return False
    return True


@lean
def _waiting_weight(device: int, rules: PairRules, state: PairState) -> int:
    """Return the stage whose waiting W is of the oldest micro-batch, -1: none waits."""
    oldest, found = np.iinfo(np.int64).max, -1
    for at in range(rules.num_owned[device]):
        stage = rules.owned[device, at]
        if state.num_weights[stage] < state.num_split[stage]:
            j = state.split[stage, state.num_weights[stage]]
            if j < oldest:
                oldest, found = j, stage
    return found


@lean
def _fill(
    device: int,
    now: float,
    gap: float,
    rules: PairRules,
    policy: PairPolicy,
    state: PairState,
) -> bool:
    """Run the oldest W that waits, if the gap is long enough for it."""
    stage = _waiting_weight(device, rules, state)
    if stage < 0 or policy.patience * rules.duration[WEIGHT, stage] > gap:
        return False
    if state.memory[device] + rules.rises[WEIGHT, stage] > rules.limit[device]:
        return False
    m = state.ready.shape[2]
    j = state.split[stage, state.num_weights[stage]]
    code = WEIGHT * rules.device_of.size * m + stage * m + j
    _note(device, code, now, rules.duration[WEIGHT, stage], state)
    _count(device, WEIGHT, stage, rules, state)
    return True


@lean
def _leaves_room(device: int, s: int, rules: PairRules, order: Order, state: PairState) -> bool:
    """Whether F of a stage is admitted, and all passes that it jumps still fit after it."""
    place = order.place[2 * s, state.done[FORWARD, s]]
    if place - state.head[device] > _SCANNED or not _admits(device, s, rules, state):
        return False
    held_bytes = state.in_flight[device] + rules.delta[FORWARD, s]
    for at in range(state.head[device], place):
        code = order.sequence[device, at]
        stage, kind = code // 2, code % 2
        if order.place[code, state.done[kind, stage]] > at:
            continue
        if (
            held_bytes + rules.rises[FORWARD if kind == FORWARD else FULL, stage]
            > rules.limit[device]
        ):
            return False
        held_bytes += rules.delta[FORWARD, stage] * (1 if kind == FORWARD else -1)
    return True


@lean
def _admits(device: int, s: int, rules: PairRules, state: PairState) -> bool:
    """Whether F of a stage fits, and what is in flight then can be finished, oldest first."""
    if state.memory[device] + rules.rises[FORWARD, s] > rules.limit[device]:
        return False
    room = rules.limit[device] - state.in_flight[device] - rules.delta[FORWARD, s]
    first, last, ample = state.ready.shape[2], 0, 0
    for at in range(rules.num_owned[device]):
        stage = rules.owned[device, at]
        first = min(first, state.done[1, stage])
        last = max(last, state.done[FORWARD, stage] + (1 if stage == s else 0))
        ample += rules.rises[FORWARD, stage] + max(0, rules.rises[FULL, stage])
    if room >= ample:
        return True
    for j in range(first, last):
        freed, needed = _to_finish(device, j, s, rules, state)
        if needed > room:
            return False
        room += freed
    return True


@lean
def _to_finish(
    device: int, j: int, admitted: int, rules: PairRules, state: PairState
) -> tuple[int, int]:
    """Return the bytes micro-batch j holds on a device, and the most it adds until it is done."""
    freed, extra, needed = 0, 0, 0
    for at in range(rules.num_owned[device]):
        s = rules.owned[device, at]
        if j >= state.done[FORWARD, s] + (1 if s == admitted else 0):
            needed = max(needed, extra + rules.rises[FORWARD, s])
            extra += rules.delta[FORWARD, s]
        elif j >= state.done[1, s]:
            freed += rules.delta[FORWARD, s]
    for at in range(rules.num_owned[device] - 1, -1, -1):
        s = rules.owned[device, at]
        if j >= state.done[1, s]:
            needed = max(needed, extra + rules.rises[FULL, s])
            extra -= rules.delta[FORWARD, s]
    return freed, needed


# --- From blocks to schedules.


@dataclass(frozen=True, slots=True, eq=False)
class PairedSchedule:
    """A block executed with pairs: integers as `CompiledProblem` has them, and lengths of time."""

    makespan_ms: float
    span_ms: float
    num_microbatches: int
    codes: tuple[Ints, ...]

    def objective_ms(self, objective: str) -> float:
        """Return makespan_ms or span_ms, gradient reductions aside."""
        return self.makespan_ms if objective == "makespan" else self.span_ms

    def programs(self, num_stages: int) -> Programs:
        """Return the programs."""
        decoded = []
        for row in self.codes:
            cells, microbatches = np.divmod(row, self.num_microbatches)
            numbers, stages = np.divmod(cells, num_stages)
            types = map(CODES.__getitem__, numbers.tolist())
            paired = (numbers >= simulate.PAIRED_INPUT).tolist()
            keep = [0] * row.size
            decoded.append(program_of(stages.tolist(), types, microbatches.tolist(), keep, paired))
        return tuple(decoded)


class _PairingSqueezer:
    """Executes blocks with pairs, for one problem under its memory limits."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._rules = _rules_of(CompiledProblem.of(problem))

    def squeeze(
        self, block: BuildingBlock, policy: PairPolicy, num_microbatches: int | None = None
    ) -> PairedSchedule | None:
        """Return the executed block, or None where it gets stuck.

        ``num_microbatches``: fewer than the problem's, for a quick look.
        """
        check_stop()
        m = self._problem.num_microbatches if num_microbatches is None else num_microbatches
        done, rows, lengths, makespan, span = squeeze_pairs(
            self._rules, unroll(self._problem, block, m), policy
        )
        if not done:
            return None
        codes = tuple(row[:length] for row, length in zip(rows, lengths, strict=True))
        return PairedSchedule(float(makespan), float(span), m, codes)


def _rules_of(compiled: CompiledProblem) -> PairRules:
    problem, memory = compiled.problem, compiled.memory
    widest = max(len(stages) for stages in problem.stages_of)
    kinds = [simulate.FORWARD, simulate.BACKWARD_INPUT, simulate.BACKWARD_WEIGHT, FULL]
    m = problem.num_microbatches
    return PairRules(
        device_of=np.array(problem.placement, dtype=np.int64),
        owned=np.array(
            [[*stages, *[0] * (widest - len(stages))] for stages in problem.stages_of],
            dtype=np.int64,
        ),
        num_owned=np.array([len(stages) for stages in problem.stages_of], dtype=np.int64),
        duration=compiled.times.duration.reshape(-1, len(problem.stages), m)[kinds, :, 0].copy(),
        delta=memory.adds[kinds, :, 0].copy(),
        rises=memory.rises[kinds, :, 0].copy(),
        hidden=compiled.times.hidden,
        there=np.array([there for there, _ in problem.boundary_ms], dtype=np.float64),
        back=np.array([back for _, back in problem.boundary_ms], dtype=np.float64),
        limit=memory.limit,
    )


_WORK = 1_500_000
"""Actions executed to look at blocks, and as many again to try policies on the best of them."""

_FEWEST, _FINALISTS = 6, 5

_LOOKS = (
    PairPolicy(wait=0.0),
    PairPolicy(wait=0.0, reach=4),
    PairPolicy(wait=0.0, reach=2, early=2, patience=0.5),
)

_PAIR_POLICIES = tuple(
    PairPolicy(*policy)
    for policy in product((0.0, 0.5), (2, 4, 1_000_000), (2, 1, 0), (0.5, 1.0), (ALWAYS, IN_DRAIN))
)


def build_paired_blocks(problem: Problem) -> Programs:
    """Building blocks whose forwards and backwards run in pairs, at any memory limit.

    Ours, after the building blocks of Qi et al., "Pipeline Parallelism with Controllable Memory",
    NeurIPS 2024 (arXiv 2405.15362), and the pairs of Liu et al. 2024, "DeepSeek-V3 Technical
    Report" (arXiv 2412.19437).

    Rule: a building block says in which order passes come to a device; a device that becomes free
    runs a licensed pair where both are there, and else what is first in the order (see the module).
    Blocks are those of `build_building_blocks`, and blocks whose offsets are those of passes alone,
    of pairs, and halfway between, with periods of 1 to 1.3 times the pairs of a micro-batch: for a
    V DualPipeV's is among them. The best of some ways to fill waits on the best blocks is kept.
    Memory: at most the limit, workspaces included. Bubble: no formula. It ignores offload and
    recompute; micro-batches go first in, first out.

    Raises
    ------
    NotApplicable
        If the problem has no pairs, or nothing fits without offload and recompute.
    """
    if not problem.pairs:
        raise NotApplicable(
            NotApplicableReason.NEEDS_PAIRS,
            "this rule runs forwards and backwards in pairs, but the problem has no pairs",
        )
    squeezer, objective = _PairingSqueezer(problem), problem.objective
    few = min(problem.num_microbatches, 3 * len(problem.devices))
    looks: list[tuple[float, int, BuildingBlock]] = []
    runs = [(block, policy) for block in _paired_candidates(problem) for policy in _LOOKS]
    for block, policy in runs[: _affordable(problem, few)]:
        squeezed = squeezer.squeeze(block, policy, few)
        if squeezed is not None:
            looks.append((squeezed.objective_ms(objective), len(looks), block))
    best: list[BuildingBlock] = []
    for _, _, block in sorted(looks, key=lambda look: look[:2]):
        if all(block is not known for known in best):
            best.append(block)
    policies = (*_LOOKS, *_PAIR_POLICIES)
    runs = [(block, policy) for policy in policies for block in best[:_FINALISTS]]
    affordable = _affordable(problem, problem.num_microbatches)
    tried = (squeezer.squeeze(block, policy) for block, policy in runs[:affordable])
    found = [squeezed for squeezed in tried if squeezed is not None]
    if not found:
        raise NotApplicable(
            NotApplicableReason.DOES_NOT_FIT,
            "no building block with pairs fits the memory limits without offload and recompute",
        )
    return min(found, key=lambda squeezed: squeezed.objective_ms(objective)).programs(
        len(problem.stages)
    )


def _affordable(problem: Problem, num_microbatches: int) -> int:
    return max(_FEWEST, _WORK // (3 * len(problem.stages) * num_microbatches))


def _paired_candidates(problem: Problem) -> list[BuildingBlock]:
    """Return the blocks to try: those of pairs and those of `candidate_blocks` in turn.

    Of each those come first whose memory is closest to the limits.
    """
    pairs = sorted(_of_pairs(problem), key=lambda block: distance(problem, block))
    alternately = zip_longest(pairs, candidate_blocks(problem))
    return [block for both in alternately for block in both if block is not None]


def _of_pairs(problem: Problem) -> Iterator[BuildingBlock]:
    """Yield blocks whose offsets are those of passes alone, of pairs, and halfway between."""
    forward = fmean(stage.forward_ms for stage in problem.stages)
    backward = fmean(stage.backward_input_ms for stage in problem.stages)
    fused = fmean(stage.fused_backward_ms for stage in problem.stages)
    pair = forward + fused - max(pair.hidden_ms for pair in problem.pairs)
    there = fmean(there for there, _ in problem.boundary_ms)
    back = fmean(back for _, back in problem.boundary_ms)
    forwards = [ms + there for ms in (pair, forward, (forward + pair) / 2)]
    backwards = [ms + back for ms in (pair, backward, (backward + pair) / 2)]
    chunks = max(map(len, problem.stages_of))
    for slower in (1.0, 1.15, 1.3):
        for offsets in product(forwards, forwards, backwards, backwards):
            period = max(chunks * pair * slower, 1e-9)
            yield uniform_block(len(problem.stages), offsets, offsets[:3], period)
