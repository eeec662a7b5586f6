"""Anneal a cut and its modes: swap two stages, move a layer, change the modes of both.

With several stages per device, dozens of paths are longest together, and no single step from a
local optimum is shorter. Most choices are too long because of a path that was recently the longest.
A pool of such paths rejects them in less than a microsecond, without the graph.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.jit import below, jitted, seeded, unit
from optpipe_solver.milp.plan.cut_problem import TOLERANCE, excess
from optpipe_solver.milp.plan.pattern import heads_of, traced
from optpipe_solver.milp.plan.variables import PlanChoice, as_counts, durations_of

if TYPE_CHECKING:
    from optpipe_solver.arrays import Flags, Floats, Ints
    from optpipe_solver.budget import Stop
    from optpipe_solver.jit import Draw
    from optpipe_solver.milp.plan.cut_problem import CutProblem, PlanMemory
    from optpipe_solver.milp.plan.pattern import PatternGraph

__all__ = ["walked"]

_HEAT = 2e-3
"""Temperature at the start of an annealing, as a share of the first length."""

_SWAPS, _MOVES, _MODES = 0.1, 0.6, 0.3
"""Probability that a step swaps two stages, moves a layer between them, changes each mode."""

_POOL = 64
"""Number of paths kept that were the longest of a tried choice."""

_STEPS, _ENOUGH = 500, 4000
"""Steps between two checks of the limit, and steps of an annealing per stage and mode."""

_NODES, _TRIES = 1e8, 1e6
"""Graph nodes evaluated, and steps, per unit of work (see `Stop`)."""


class _Walk(NamedTuple):
    """The current, tried and best choice of an annealing, and its pool of paths; mutable arrays.

    ``sizes``, ``modes`` and ``lengths`` have a row for the current, the tried and the best choice.
    ``layers`` and ``chosen`` are the tried choice, as in `excess`. ``durations`` are those of the
    current and the tried choice, by stage and kind. ``differs`` marks the stages in which these two
    differ. Paths of the pool have counts by stage and kind, and ``path_ms`` in the current choice.
    """

    sizes: Ints
    modes: Ints
    lengths: Floats
    layers: Floats
    chosen: Floats
    durations: Floats
    differs: Flags
    path_counts: Floats
    path_ms: Floats
    next_path: Ints
    table: Floats
    usable: Flags
    device: Ints
    runs: Ints
    draw: Draw


def walked(
    problem: CutProblem, start: tuple[float, PlanChoice], stop: Stop, *, most: int = 2**31
) -> tuple[float, PlanChoice]:
    """Return the best choice of at most ``most`` annealings, and its length in ms.

    The first annealing begins with ``start``, which fits; each later one begins with the best
    choice so far. An annealing cools faster if less time is left than it needs.
    """
    pattern, tables, memory = problem.pattern, problem.tables, problem.memory
    length_ms, choice = start
    num_stages, num_modes = len(choice.sizes), len(tables.names)
    layers, chosen = as_counts(tables, choice)
    stages, modes = range(num_stages), range(num_modes)
    walk = _Walk(
        sizes=np.array([choice.sizes] * 3),
        modes=np.array([choice.modes] * 3),
        lengths=np.full(3, length_ms),
        layers=layers.astype(np.float64),
        chosen=chosen,
        durations=np.array([durations_of(tables, choice).T] * 2),
        differs=np.zeros(num_stages, dtype=np.bool_),
        path_counts=np.zeros((_POOL, num_stages, tables.durations.shape[0])),
        path_ms=np.full(_POOL, -np.inf),
        next_path=np.zeros(2, dtype=np.int64),
        table=tables.durations,
        usable=np.array([[tables.may_use(s, k) for k in modes] for s in stages]),
        device=np.array(tables.placement),
        runs=np.cumsum([0, *(kind.length for kind in tables.kinds)]),
        draw=seeded(stop.seed),
    )
    rounds = _ENOUGH * num_stages * num_modes // _STEPS
    for number in range(most * rounds if num_stages > 1 else 0):
        if stop.is_over():
            break
        if number % rounds == 0:
            _begin_again(walk)
        left = min(stop.left / stop.limit, 1 - number % rounds / rounds)
        looked = _some_steps(walk, memory, pattern.graph, _HEAT * length_ms * left**2, _STEPS)
        stop.spend(_STEPS / _TRIES + looked * pattern.graph.kind.size / _NODES)
    best = PlanChoice(tuple(map(int, walk.sizes[2])), tuple(map(int, walk.modes[2])))
    return float(walk.lengths[2]), best


@jitted
def _some_steps(
    walk: _Walk, memory: PlanMemory, graph: PatternGraph, heat_ms: float, count: int
) -> int:
    """Try ``count`` steps; return how often the graph was evaluated."""
    looked = 0
    for _ in range(count):
        _step(walk)
        longest = walk.lengths[0] - heat_ms * log(1.0 - unit(walk.draw))
        if not walk.differs.any():
            continue
        if not _is_known_to_be_longer(walk, longest) and _fits(walk, memory):
            looked += 1
            heads, best = heads_of(graph.sources, graph.lags, _lasts(walk, graph))
            last = int(np.argmax(heads))
            if heads[last] <= longest:
                _take(walk, heads[last])
                continue
            _remember(walk, graph, last, best)
        walk.sizes[1], walk.modes[1] = walk.sizes[0], walk.modes[0]
        _fill(walk)
    return looked


@jitted
def _step(walk: _Walk) -> None:
    """Swap two stages of the tried choice, move a layer, change modes, or all of these."""
    sizes, modes, draw = walk.sizes[1], walk.modes[1], walk.draw
    giver = below(draw, sizes.size)
    taker = (giver + 1 + below(draw, sizes.size - 1)) % sizes.size
    if unit(draw) < _SWAPS:
        sizes[giver], sizes[taker] = sizes[taker], sizes[giver]
        modes[giver], modes[taker] = modes[taker], modes[giver]
    if sizes[giver] > 1 and unit(draw) < _MOVES:
        sizes[giver] -= 1
        sizes[taker] += 1
    for s in (giver, taker):
        k = below(draw, walk.usable.shape[1])
        if unit(draw) < _MODES and walk.usable[s, k]:
            modes[s] = k
    _fill(walk)


@jitted
def _fill(walk: _Walk) -> None:
    """Write the layers and times of the tried choice, and the stages in which they differ."""
    begin = was = 0
    for s in range(walk.differs.size):
        k, end, was_end = walk.modes[1, s], begin + walk.sizes[1, s], was + walk.sizes[0, s]
        is_other = k != walk.modes[0, s]
        if is_other or begin != was or end != was_end or walk.differs[s]:
            walk.layers[s] = 0.0
            walk.chosen[s] = 0.0
            walk.chosen[s, k] = 1.0
            walk.durations[1, s] = 0.0
            for t in range(walk.layers.shape[1]):
                low, high = walk.runs[t], walk.runs[t + 1]
                num_layers = max(0, min(end, high) - max(begin, low))
                is_other = is_other or num_layers != max(0, min(was_end, high) - max(was, low))
                walk.layers[s, t, k] = num_layers
                if num_layers > 0:
                    for kind in range(walk.table.shape[0]):
                        walk.durations[1, s, kind] += num_layers * walk.table[kind, s, t, k]
            walk.differs[s] = is_other
        begin, was = end, was_end


@jitted
def _is_known_to_be_longer(walk: _Walk, longest: float) -> bool:
    """Whether a path of the pool is longer; the last such path is checked first."""
    for number in range(walk.path_ms.size):
        path = (walk.next_path[1] + number) % walk.path_ms.size
        if walk.path_ms[path] + _added(walk, path) > longest:
            walk.next_path[1] = path
            return True
    return False


@jitted
def _added(walk: _Walk, path: int) -> float:
    """Return by how much a path of the pool is longer in the tried choice."""
    added = 0.0
    for s in range(walk.differs.size):
        if walk.differs[s]:
            for kind in range(walk.table.shape[0]):
                more = walk.durations[1, s, kind] - walk.durations[0, s, kind]
                added += walk.path_counts[path, s, kind] * more
    return added


@jitted
def _fits(walk: _Walk, memory: PlanMemory) -> bool:
    """Whether the tried choice fits all devices, as the current choice does."""
    for device in range(memory.limits.size):
        own = walk.device == device
        if walk.differs[own].any():
            found = excess(memory, walk.layers, walk.chosen, device)
            if found.size and found.max() > TOLERANCE:
                return False
    return True


@jitted
def _lasts(walk: _Walk, graph: PatternGraph) -> Floats:
    length = graph.fixed_ms.copy()
    for node in range(length.size):
        length[node] += graph.lasts[node] * walk.durations[1, graph.stage[node], graph.kind[node]]
    return length


@jitted
def _take(walk: _Walk, length_ms: float) -> None:
    """Make the tried choice the current one."""
    for path in range(walk.path_ms.size):
        walk.path_ms[path] += _added(walk, path)
    walk.sizes[0], walk.modes[0], walk.lengths[0] = walk.sizes[1], walk.modes[1], length_ms
    walk.durations[0] = walk.durations[1]
    walk.differs[:] = False
    if length_ms < walk.lengths[2]:
        walk.sizes[2], walk.modes[2], walk.lengths[2] = walk.sizes[1], walk.modes[1], length_ms


@jitted
def _begin_again(walk: _Walk) -> None:
    """Make the best choice the current one."""
    walk.sizes[1], walk.modes[1] = walk.sizes[2], walk.modes[2]
    _fill(walk)
    _take(walk, walk.lengths[2])


@jitted
def _remember(walk: _Walk, graph: PatternGraph, last: int, best: Ints) -> None:
    """Replace the oldest path of the pool with the longest path."""
    path = walk.next_path[0]
    counts = np.zeros(walk.durations[1].T.shape, dtype=np.int64)
    constant_ms = traced(last, best, np.full(best.size, -1), graph, counts)
    walk.path_counts[path] = counts.T
    walk.path_ms[path] = constant_ms + (walk.path_counts[path] * walk.durations[0]).sum()
    walk.next_path[1] = path
    walk.next_path[0] = (path + 1) % walk.path_ms.size
