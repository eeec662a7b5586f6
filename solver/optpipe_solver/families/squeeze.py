"""Passes executed one after the other under byte limits, and the squeeze: compiled, on integers.

The first half is what a problem asks of any such executor (`GreedyRules`, `GreedyState`); the
squeeze executes a repeated building block as soon as possible.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.schedule import ActionType
from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import KINDS, Rows, durations_of, memory_of, program_of
from optpipe_solver.budget import check_stop
from optpipe_solver.jit import jitted, lean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Floats, Ints

__all__ = [
    "BACKWARD",
    "FORWARD",
    "WEIGHT",
    "BuildingBlock",
    "Early",
    "GreedyRules",
    "GreedyState",
    "Order",
    "SqueezePolicy",
    "Squeezed",
    "Squeezer",
    "announce",
    "begin",
    "encoded",
    "execute",
    "fits",
    "has_all",
    "rules_in_bytes",
    "rules_of",
    "squeeze",
    "squeezed_v",
    "uniform_block",
]


def rules_in_bytes(problem: Problem, *, fused: bool) -> GreedyRules:
    """Return the rules under the devices' limits, workspaces included; ``fused``: B for I and W."""
    memory, kinds = memory_of(problem), _kinds(fused=fused)
    return rules_of(
        problem, memory.delta[kinds], memory.workspace[kinds], memory.limit, fused=fused
    )


def rules_of(
    problem: Problem, delta: Ints, workspace: Ints, limit: Ints, *, fused: bool
) -> GreedyRules:
    """Return the rules for what each pass adds, its workspace, and a limit per device."""
    widest = max(len(stages) for stages in problem.stages_of)
    peak = np.maximum(delta, 0) + workspace
    finish = peak[:WEIGHT].copy()
    if not fused:
        finish[BACKWARD] = np.maximum(finish[BACKWARD], delta[BACKWARD] + peak[WEIGHT])
    return GreedyRules(
        device_of=np.array(problem.placement, dtype=np.int64),
        owned=np.array(
            [[*stages, *[0] * (widest - len(stages))] for stages in problem.stages_of],
            dtype=np.int64,
        ),
        num_owned=np.array([len(stages) for stages in problem.stages_of], dtype=np.int64),
        duration=durations_of(problem)[_kinds(fused=fused)],
        delta=delta,
        peak=peak,
        finish=finish,
        there=np.array([there for there, _ in problem.boundary_ms], dtype=np.float64),
        back=np.array([back for _, back in problem.boundary_ms], dtype=np.float64),
        limit=limit,
        split=0 if fused else 1,
    )


def _kinds(*, fused: bool) -> list[int]:
    """Return F, I (or B) and W as `simulate` numbers them."""
    backward = simulate.FULL_BACKWARD if fused else simulate.BACKWARD_INPUT
    return [simulate.FORWARD, backward, simulate.BACKWARD_WEIGHT]


# --- Programs as `CompiledProblem` has them: B is a kind of its own there.


def encoded(problem: Problem, codes: Sequence[Ints], *, fused: bool) -> Rows:
    """Return the programs of all devices, with room for a round trip per cell.

    ``fused``: their second kind stands for B, not for I.
    """
    m = problem.num_microbatches
    num_cells = len(problem.stages) * m
    widest = max(len(stages) for stages in problem.stages_of)
    actions = np.zeros((len(codes), len(KINDS) * m * widest), dtype=np.int64)
    for device, row in enumerate(codes):
        actions[device, : row.size] = row
    if fused:
        is_backward = actions // num_cells == simulate.BACKWARD_INPUT
        actions[is_backward] += (simulate.FULL_BACKWARD - simulate.BACKWARD_INPUT) * num_cells
    lengths = np.array([row.size for row in codes], dtype=np.int64)
    return Rows(actions, lengths, np.zeros(num_cells, dtype=np.int64))


# --- Passes executed one after the other, compiled: the state of a schedule that is being built.
# `squeeze` and `list_scheduling` choose what a device does next; this does it. An action is one
# integer, ``(kind * num_stages + stage) * m + microbatch``, kinds F, I (or B) and W.

FORWARD, BACKWARD, WEIGHT = 0, 1, 2


class GreedyRules(NamedTuple):
    """What a problem asks; ``[kind, stage]`` tables hold F, I (or B) and W.

    ``delta`` is what a pass adds to its device's memory for good, ``peak`` the most it holds above
    what was there before, ``finish`` the same with its W right behind it. ``split`` is 0 where the
    backward is fused and there is no W. Device d holds ``owned[d, :num_owned[d]]``.
    """

    device_of: Ints
    owned: Ints
    num_owned: Ints
    duration: Floats
    delta: Ints
    peak: Ints
    finish: Ints
    there: Floats
    back: Floats
    limit: Ints
    split: int


class GreedyState(NamedTuple):
    """What was done: programs, and what depends on them, by (kind, stage) or by device.

    ``in_flight`` is memory with every W right behind its I; ``ready`` when a pass's input arrives.
    """

    done: Ints
    ready: Floats
    memory: Ints
    in_flight: Ints
    free_at: Floats
    head: Ints
    programs: Ints
    lengths: Ints
    first: Floats
    last: Floats


@jitted
def begin(rules: GreedyRules, m: int) -> GreedyState:
    """Return the state before the first of m micro-batches."""
    num_stages, num_devices = rules.device_of.size, rules.num_owned.size
    state = GreedyState(
        np.zeros((3, num_stages), np.int64),
        np.full((2, num_stages, m), np.inf),
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


@lean
def has_all(rules: GreedyRules, state: GreedyState) -> bool:
    """Whether every pass of every micro-batch was executed."""
    m = state.ready.shape[2]
    for kind in range(2 + rules.split):
        for stage in range(rules.device_of.size):
            if state.done[kind, stage] < m:
                return False
    return True


@lean
def fits(device: int, kind: int, stage: int, rules: GreedyRules, state: GreedyState) -> bool:
    """Whether a device has room for a pass now."""
    return bool(state.memory[device] + rules.peak[kind, stage] <= rules.limit[device])


@lean
def execute(kind: int, stage: int, now: float, rules: GreedyRules, state: GreedyState) -> float:
    """Append the pass to its device's program; return when it ends."""
    device = rules.device_of[stage]
    m = state.ready.shape[2]
    state.programs[device, state.lengths[device]] = (
        kind * rules.device_of.size + stage
    ) * m + state.done[kind, stage]
    state.lengths[device] += 1
    state.done[kind, stage] += 1
    state.memory[device] += rules.delta[kind, stage]
    if kind == FORWARD:
        state.in_flight[device] += rules.delta[FORWARD, stage]
    elif kind == BACKWARD:
        state.in_flight[device] -= rules.delta[FORWARD, stage]
    end = now + rules.duration[kind, stage]
    state.free_at[device] = end
    state.first[device] = min(state.first[device], now)
    state.last[device] = end
    return float(end)


@lean
def announce(
    kind: int, stage: int, end: float, rules: GreedyRules, state: GreedyState
) -> tuple[int, float]:
    """Tell the consumer of a pass when its input arrives; return its device (-1: none), when."""
    last = rules.device_of.size - 1
    j = state.done[kind, stage] - 1
    if kind == FORWARD and stage == last:
        state.ready[BACKWARD, last, j] = end
        return rules.device_of[last], end
    if kind == FORWARD:
        arrival = end + rules.there[stage]
        state.ready[FORWARD, stage + 1, j] = arrival
        return rules.device_of[stage + 1], arrival
    if kind == BACKWARD and stage > 0:
        arrival = end + rules.back[stage - 1]
        state.ready[BACKWARD, stage - 1, j] = arrival
        return rules.device_of[stage - 1], arrival
    return -1, end


_WAIT, _STUCK = -1, -2


class Order(NamedTuple):
    """The unrolled block: ``sequence[d]`` lists F and I of device d as ``2 * stage + kind``.

    ``place[code, j]`` is the index in it of the code's j-th occurrence, i.e. of micro-batch j.
    """

    sequence: Ints
    length: Ints
    place: Ints
    num_microbatches: int


@jitted
def squeeze(
    rules: GreedyRules, order: Order, early: int, patience: float
) -> tuple[bool, Ints, Ints, float, float]:
    """Return (whether it got to the end, programs, their lengths, makespan, span).

    Actions are ``(kind * num_stages + stage) * m + microbatch``.
    """
    num_stages, num_devices = rules.device_of.size, rules.num_owned.size
    state = begin(rules, order.num_microbatches)
    wakes = [(0.0, 0)]
    for device in range(1, num_devices):
        wakes.append((0.0, device))  # noqa: PERF401 - numba types the list by its first item
    while len(wakes) > 0:
        now, device = heapq.heappop(wakes)
        if state.free_at[device] > now:
            continue
        choice = _choose(device, now, rules, order, state, early, patience)
        if choice == _STUCK:
            return False, state.programs, state.lengths, np.inf, np.inf
        if choice != _WAIT:
            kind, stage = choice // num_stages, choice % num_stages
            end = execute(kind, stage, now, rules, state)
            heapq.heappush(wakes, (end, device))
            target, arrival = announce(kind, stage, end, rules, state)
            if target >= 0:
                heapq.heappush(wakes, (arrival, target))
    begun, span = np.inf, 0.0
    for device in range(num_devices):
        if state.lengths[device] > 0:
            begun = min(begun, state.first[device])
            span = max(span, state.last[device] - state.first[device])
    makespan = state.last.max() - begun
    return has_all(rules, state), state.programs, state.lengths, makespan, span


@lean
def _choose(
    device: int,
    now: float,
    rules: GreedyRules,
    order: Order,
    state: GreedyState,
    early: int,
    patience: float,
) -> int:
    """Return what an idle device does now: kind and stage in one number, or wait, or stuck."""
    if patience < 0.0:
        urgent = _oldest_weight(device, rules, state)
        if urgent >= 0:
            return urgent
    following = _next_in_order(device, order, state)
    if following < 0:
        return _oldest_weight(device, rules, state)
    stage, kind = following // 2, following % 2
    gap = state.ready[kind, stage, state.done[kind, stage]] - now
    if gap <= 0.0:
        if fits(device, kind, stage, rules, state):
            return kind * rules.device_of.size + stage
        urgent = _oldest_weight(device, rules, state)
        return urgent if urgent >= 0 else _STUCK
    choice = _WAIT
    if early == 2:
        choice = _early(device, now, gap, rules, order, state, patience)
    if choice == _WAIT:
        choice = _filling_weight(device, gap, rules, state, patience)
    if choice == _WAIT and early == 1:
        choice = _early(device, now, gap, rules, order, state, patience)
    return choice


@lean
def _next_in_order(device: int, order: Order, state: GreedyState) -> int:
    """Return the code of the device's first F or I in block order that has not run; -1: none."""
    while state.head[device] < order.length[device]:
        at = state.head[device]
        code = order.sequence[device, at]
        if order.place[code, state.done[code % 2, code // 2]] == at:
            return int(code)
        state.head[device] += 1
    return -1


@lean
def _oldest_weight(device: int, rules: GreedyRules, state: GreedyState) -> int:
    """Return the waiting W of the oldest micro-batch that memory admits, or wait."""
    return _filling_weight(device, np.inf, rules, state, 0.0)


@lean
def _filling_weight(
    device: int, gap: float, rules: GreedyRules, state: GreedyState, patience: float
) -> int:
    """Return the waiting W of the oldest micro-batch for which the gap is long enough."""
    best, choice = np.inf, _WAIT
    if rules.split == 0:
        return choice
    for at in range(rules.num_owned[device]):
        stage = rules.owned[device, at]
        oldest = state.done[WEIGHT, stage]
        if (
            oldest < state.done[BACKWARD, stage]
            and oldest < best
            and patience * rules.duration[WEIGHT, stage] <= gap
            and fits(device, WEIGHT, stage, rules, state)
        ):
            best, choice = oldest, WEIGHT * rules.device_of.size + stage
    return choice


@lean
def _early(
    device: int,
    now: float,
    gap: float,
    rules: GreedyRules,
    order: Order,
    state: GreedyState,
    patience: float,
) -> int:
    """Return the first F or I in block order that can run now without blocking those before it."""
    best, choice = order.sequence.shape[1], _WAIT
    for at in range(rules.num_owned[device]):
        stage = rules.owned[device, at]
        for kind in range(2):
            j = state.done[kind, stage]
            if j >= order.num_microbatches or state.ready[kind, stage, j] > now:
                continue
            place = order.place[2 * stage + kind, j]
            if (
                place < best
                and patience * rules.duration[kind, stage] <= gap
                and fits(device, kind, stage, rules, state)
                and _leaves_room(device, kind, stage, place, rules, order, state)
            ):
                best, choice = place, kind * rules.device_of.size + stage
    return choice


@lean
def _leaves_room(
    device: int,
    kind: int,
    stage: int,
    place: int,
    rules: GreedyRules,
    order: Order,
    state: GreedyState,
) -> bool:
    """Whether all passes before ``place`` still fit after this one, each W right behind its I."""
    if kind == BACKWARD:
        return True
    held_bytes = state.in_flight[device] + rules.delta[FORWARD, stage]
    for at in range(state.head[device], place):
        code = order.sequence[device, at]
        before, which = code // 2, code % 2
        if order.place[code, state.done[which, before]] > at:
            continue
        if held_bytes + rules.finish[which, before] > rules.limit[device]:
            return False
        held_bytes += (
            rules.delta[FORWARD, before] if which == FORWARD else -rules.delta[FORWARD, before]
        )
    return True


# --- From a building block to programs: repeat, squeeze, reorder, place the weight gradients.
# Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (arXiv 2405.15362),
# sections 3 and 4 and its appendix on squeezing and reordering.
#
# A *building block* says when one micro-batch runs F and I on every stage; micro-batch j does the
# same j periods later. Between neighbouring stages the offset is the same all over one half of the
# model (first half forwards, second half forwards, second half backwards, first half backwards),
# and a gap stands at each of the three turns. From the block only the *order* of F and I on a
# device is taken, so that it need not be free of collisions. Memory: at equal times a stage holds
# ceil(lifespan / period) activations, lifespan = from its F to its W.
#
# *Squeeze*: run that order with the problem's real times, everything as soon as possible.
# *Reorder*: a device whose next pass has not arrived may run a later F or I of its order if memory
# still admits all those it jumps (each W right behind its I), so that it never gets stuck: the
# earliest pass of the block order that has not run is always ready, and fits. *W* fills waits, or
# runs when a pass that is ready does not fit.
#
# Ignored: offload, recompute, gradient reductions; FIFO order of micro-batches in every stage.


@dataclass(frozen=True, slots=True, eq=False)
class BuildingBlock:
    """When one micro-batch runs F and I, by stage, and after how long the next one does the same.

    Nothing may run before what it depends on; the unit of time is free.
    """

    forward: Floats
    backward: Floats
    period: float


def uniform_block(
    num_stages: int, offsets: Sequence[float], gaps: Sequence[float], period: float
) -> BuildingBlock:
    """Return the block with the same offsets all over each half of the model.

    Parameters
    ----------
    num_stages
        The first half is stages 0 to num_stages // 2 - 1.
    offsets
        Time from a pass to the next on its way: F in the first half, F in the second, I in the
        second, I in the first.
    gaps
        The same at the turns: F into the second half, last F to first I, I into the first half.
    period
        Time from one micro-batch to the next.
    """
    half = num_stages // 2
    rest = num_stages - half
    there = [offsets[0]] * (half - 1) + [gaps[0]] * (half > 0) + [offsets[1]] * (rest - 1)
    back = [offsets[2]] * (rest - 1) + [gaps[2]] * (half > 0) + [offsets[3]] * (half - 1)
    times = np.cumsum([0.0, *there, gaps[1], *back])
    return BuildingBlock(times[:num_stages], times[num_stages:][::-1], period)


class Early(IntEnum):
    """Whether a waiting device may run a later F or I of its order, and before or after a W."""

    NEVER = 0
    AFTER_WEIGHT = 1
    BEFORE_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class SqueezePolicy:
    """How waits are filled.

    ``patience``: a pass fills a wait of at least this fraction of its duration (1 = it delays
    nothing known, 0 = any). Negative: every W runs at once, which needs the least memory.
    """

    early: Early = Early.AFTER_WEIGHT
    patience: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Squeezed:
    """A squeezed block: encoded programs and their lengths of time (gradient reductions aside)."""

    makespan_ms: float
    span_ms: float
    num_microbatches: int
    fused: bool
    codes: tuple[Ints, ...]

    def objective_ms(self, objective: str) -> float:
        """Return makespan_ms or span_ms."""
        return self.makespan_ms if objective == "makespan" else self.span_ms

    def programs(self, num_stages: int) -> Programs:
        """Return the programs."""
        backward = ActionType.FULL_BACKWARD if self.fused else ActionType.BACKWARD_INPUT
        kinds = (ActionType.FORWARD, backward, ActionType.BACKWARD_WEIGHT)
        decoded = []
        for row in self.codes:
            cells, microbatches = np.divmod(row, self.num_microbatches)
            numbers, stages = np.divmod(cells, num_stages)
            types = map(kinds.__getitem__, numbers.tolist())
            decoded.append(program_of(stages.tolist(), types, microbatches.tolist()))
        return tuple(decoded)


class Squeezer:
    """Squeezes blocks for one problem under one kind of memory limit."""

    def __init__(self, problem: Problem, rules: GreedyRules) -> None:
        self._problem = problem
        self._rules = rules

    @classmethod
    def in_bytes(cls, problem: Problem, *, fused: bool) -> Squeezer:
        """Keep the memory limits of the devices, workspaces included; ``fused``: B for I and W."""
        return cls(problem, rules_in_bytes(problem, fused=fused))

    @classmethod
    def in_activations(cls, problem: Problem, most: int) -> Squeezer:
        """Keep at most so many activations of one stage on a device, each from its F to its W."""
        ones = np.ones(len(problem.stages), dtype=np.int64)
        delta = np.array([ones, 0 * ones, -ones])
        room = np.full(len(problem.devices), most, dtype=np.int64)
        return cls(problem, rules_of(problem, delta, 0 * delta, room, fused=False))

    def squeeze(
        self, block: BuildingBlock, policy: SqueezePolicy, num_microbatches: int | None = None
    ) -> Squeezed | None:
        """Return the squeezed block, or None where its order does not fit in memory.

        ``num_microbatches``: fewer than the problem's, for a quick look.
        """
        check_stop()
        m = self._problem.num_microbatches if num_microbatches is None else num_microbatches
        done, rows, lengths, makespan, span = squeeze(
            self._rules, unroll(self._problem, block, m), int(policy.early), policy.patience
        )
        if not done:
            return None
        codes = tuple(row[:length] for row, length in zip(rows, lengths, strict=True))
        return Squeezed(float(makespan), float(span), m, not self._rules.split, codes)


def squeezed_v(
    problem: Problem, *, offsets: Sequence[float], gaps: Sequence[float], most: int
) -> Programs:
    """Return the programs of a published V block: times in passes, repeated every 6 of them.

    ``most`` is the memory of a device in micro-batches of its two stages. The orders of ZB-V,
    V-Half and V-Min need no more, whatever the times (tested), so that the squeeze never fails.
    """
    num_stages = len(problem.stages)
    block = uniform_block(num_stages, offsets, gaps, period=6)
    squeezed = Squeezer.in_activations(problem, 2 * most).squeeze(block, SqueezePolicy())
    if squeezed is None:
        raise AssertionError(f"a V block on {num_stages // 2} devices needs more than {most}")
    return squeezed.programs(num_stages)


def unroll(problem: Problem, block: BuildingBlock, m: int) -> Order:
    """Return the order of F and I on every device: by time in the block, then along the chain."""
    widest = max(len(stages) for stages in problem.stages_of)
    sequence = np.zeros((len(problem.devices), 2 * m * widest), dtype=np.int64)
    length = np.array([2 * m * len(stages) for stages in problem.stages_of], dtype=np.int64)
    # One more than m, and beyond every index: the next micro-batch of a code that is all done.
    place = np.full((2 * len(problem.stages), m + 1), np.iinfo(np.int64).max)
    repeats = np.arange(m) * block.period
    for device, stages in enumerate(problem.stages_of):
        if not stages:
            continue
        there = np.array(stages)
        back = there[::-1]
        codes = np.concatenate([2 * there + FORWARD, 2 * back + BACKWARD])
        times = np.concatenate([block.forward[there], block.backward[back]])
        order = np.argsort((times[:, None] + repeats).ravel(), kind="stable")
        sequence[device, : order.size] = codes.repeat(m)[order]
        index = np.empty_like(order)
        index[order] = np.arange(order.size)
        place[codes, :m] = index.reshape(-1, m)
    return Order(sequence, length, place, m)
