"""What a problem asks of passes executed one after the other, as arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import KINDS, Rows, durations_of, memory_of
from optpipe_solver.jit import jitted, lean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.problem import Problem
    from optpipe_solver.arrays import Floats, Ints

__all__ = [
    "BACKWARD",
    "FORWARD",
    "WEIGHT",
    "GreedyRules",
    "GreedyState",
    "announce",
    "begin",
    "encoded",
    "execute",
    "fits",
    "has_all",
    "rules_in_bytes",
    "rules_of",
]


def rules_in_bytes(problem: Problem, *, fused: bool) -> GreedyRules:
    """Return the rules under the devices' limits, workspaces included; ``fused``: B for I and W."""
    memory, kinds = memory_of(problem), _kinds(fused=fused)
    return rules_of(
        problem, memory.delta[kinds], memory.workspace[kinds], memory.limit, fused=fused
    )


def rules_of(
    problem: Problem,
    delta: Ints,
    workspace: Ints,
    limit: Ints,
    *,
    fused: bool,
) -> GreedyRules:
    """Return the rules for what each pass adds, its workspace, and a limit per device."""
    widest = max(len(held) for held in problem.stages_of)
    peak = np.maximum(delta, 0) + workspace
    finish = peak[:WEIGHT].copy()
    if not fused:
        finish[BACKWARD] = np.maximum(finish[BACKWARD], delta[BACKWARD] + peak[WEIGHT])
    return GreedyRules(
        device_of=np.array(problem.placement, dtype=np.int64),
        held=np.array(
            [[*held, *[0] * (widest - len(held))] for held in problem.stages_of], dtype=np.int64
        ),
        num_held=np.array([len(held) for held in problem.stages_of], dtype=np.int64),
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
    widest = max(len(held) for held in problem.stages_of)
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
    backward is fused and there is no W. Device d holds ``held[d, :num_held[d]]``.
    """

    device_of: Ints
    held: Ints
    num_held: Ints
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
    num_stages, num_devices = rules.device_of.size, rules.num_held.size
    state = GreedyState(
        np.zeros((3, num_stages), np.int64),
        np.full((2, num_stages, m), np.inf),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices),
        np.zeros(num_devices, np.int64),
        np.zeros((num_devices, 3 * m * rules.held.shape[1]), np.int64),
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
