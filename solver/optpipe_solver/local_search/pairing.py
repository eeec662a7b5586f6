"""Annealing on programs with pairs, in addition to the moves of `moves`.

A program stays a row of integers. The backward of a pair has a kind of its own and comes right
after its F (`optpipe_solver.arrays.encoding`). A step does one of these, mostly from a longest
path:

* pair two neighbours, or part them;
* move an action or a pair;
* bring a backward to a forward that it may run with, which swaps partners;
* split or fuse a backward.

Actions of one cell never pass each other, so every order rule of one program holds on. A cyclic
wait is infinitely long. Modes and copies stay as they are.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.arrays.simulate import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    PAIRED_BACKWARD,
    PAIRED_INPUT,
)
from optpipe_solver.feasibility import refuse_unless
from optpipe_solver.jit import below, lean, seeded, unit
from optpipe_solver.local_search.board import copy

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.arrays.simulate import MemoryArrays, SimulationScratch, TimeArrays
    from optpipe_solver.budget import Stop
    from optpipe_solver.incumbent import Incumbent
    from optpipe_solver.jit import Draw

__all__ = ["improve_by_pairing", "pairing_can_improve"]


_COOLINGS = (0.1, 0.4, 0.2, 1.0)
"""Start temperatures of coolings, in mean durations of a pass; all fall to `_COLD`."""

_COLD, _PER_ACTION, _MOST_STEPS, _SLICE = 0.01, 4_000, 3_000_000, 5_000
"""Final temperature; steps of one cooling, per action and at most; steps between two checks."""

_CRITICAL = 0.8
"""Share of the steps that begin on a longest path: no other step makes a schedule shorter."""

_REACH, _END_WEIGHT = 10, 0.05
"""Maximum places that a step moves an action; weight of the mean end of a device in the cost."""


class _Chain(NamedTuple):
    """Programs of one chain: as they are, the best so far, and a row to put back.

    ``values`` are the cost and the objective of the best, both in ms. ``path[:num_on_path[0]]`` are
    device and place of the actions of a longest path. ``at`` has by pass its place in its program.
    ``by_span``: whether the span counts, else the makespan.
    """

    times: TimeArrays
    memory: MemoryArrays
    work: SimulationScratch
    modes: Ints
    by_span: bool

    rows: Ints
    lengths: Ints
    best_rows: Ints
    best_lengths: Ints
    saved: Ints
    values: Floats
    path: Ints
    num_on_path: Ints
    at: Ints


def pairing_can_improve(problem: Problem) -> bool:
    """Whether some passes may pair, and the moves know the micro-batches: they are equal."""
    return bool(problem.pairs) and problem.is_even


def improve_by_pairing(best: Incumbent, stop: Stop) -> None:
    """Anneal from the best schedule and its runners-up until the turn is over; work is steps."""
    rule = "equal micro-batches in a free order, and pairs"
    refuse_unless(pairing_can_improve(best.problem), "improve_by_pairing", best.problem, rule)
    if best.programs is None:
        return
    compiled = CompiledProblem.of(best.problem)
    draw = seeded(stop.seed)
    starts = (best.programs, *best.runners_up())
    done, cooling = 0.0, 0
    while not (best.is_optimal or stop.is_told() or stop.left_s() <= 0 or done >= stop.left_work):
        # Every second cooling goes on from the best, the others from each start in turn.
        others = cooling // 2 % len(starts)
        start = best.programs if cooling % 2 == 0 else starts[others]
        hot = _COOLINGS[cooling % len(_COOLINGS)]
        done += _cool(best, compiled, start or starts[0], hot, stop, draw, stop.left_work - done)
        cooling += 1
    stop.spend(done)


def _cool(
    best: Incumbent,
    compiled: CompiledProblem,
    start: Programs,
    hot: float,
    stop: Stop,
    draw: Draw,
    most: float,
) -> float:
    """Cool once from a start, offer what is better, and return the steps made."""
    problem, rows = compiled.problem, compiled.encode(start)
    times = compiled.times._replace(duration=compiled.durations(rows))
    chain = _Chain(
        times=times,
        memory=compiled.memory,
        work=simulate.workspace_for(times, rows.lengths.size),
        modes=rows.modes,
        by_span=problem.objective == "span",
        rows=rows.actions,
        lengths=rows.lengths,
        best_rows=rows.actions.copy(),
        best_lengths=rows.lengths.copy(),
        saved=np.zeros(rows.actions.shape[1], dtype=np.int64),
        values=np.array([inf, inf]),
        path=np.zeros((rows.actions.size, 2), dtype=np.int64),
        num_on_path=np.zeros(1, dtype=np.int64),
        at=np.zeros(2 * times.num_cells, dtype=np.int64),
    )
    mean_ms = float(np.mean([stage.busy_ms / 2 for stage in problem.stages])) or 1.0
    total = min(_MOST_STEPS, _PER_ACTION * int(rows.lengths.sum()))
    done = 0
    while done < total and done < most and not (stop.is_told() or stop.left_s() <= 0):
        steps = int(min(_SLICE, total - done, most - done))
        anneal_pairs(
            chain,
            draw,
            hot * mean_ms * (_COLD / hot) ** (done / total),
            hot * mean_ms * (_COLD / hot) ** ((done + steps) / total),
            steps,
        )
        done += steps
    if chain.values[1] < best.objective_ms:
        found = rows._replace(actions=chain.best_rows, lengths=chain.best_lengths)
        best.offer(compiled.decode(found), "pairing")
    return float(done)


# --- Compiled.
# ruff: noqa: PLR0917 - compiled code takes its arguments by position


@lean
def anneal_pairs(chain: _Chain, draw: Draw, hot: float, cold: float, steps: int) -> None:
    """Make so many steps, temperatures in ms falling from ``hot`` to ``cold``."""
    rows, lengths, times, limit = chain.rows, chain.lengths, chain.times, chain.memory.limit
    if chain.values[0] == np.inf:
        _measure(chain)
        _find_path(chain)
    factor = (cold / hot) ** (1.0 / steps)
    warm = hot
    for _ in range(steps):
        warm *= factor
        device = below(draw, lengths.size)
        place = -1
        if chain.num_on_path[0] > 0 and unit(draw) < _CRITICAL:
            at = below(draw, chain.num_on_path[0])
            device, place = chain.path[at, 0], chain.path[at, 1]
        if lengths[device] < 2:
            continue
        count = lengths[device]
        if place < 0:
            place = below(draw, count)
        copy(chain.saved, rows[device], count)
        if not _step(rows[device], lengths, device, place, times, draw):
            copy(rows[device], chain.saved, count)
            lengths[device] = count
            continue
        if _peak(chain, device) <= limit[device]:
            before = chain.values[0]
            chance = before - warm * np.log(1.0 - unit(draw))
            cost = _measure(chain)
            if cost <= chance:
                _find_path(chain)
                continue
            chain.values[0] = before
        copy(rows[device], chain.saved, count)
        lengths[device] = count


@lean
def _measure(chain: _Chain) -> float:
    """Return the cost of the programs in ms, inf where stuck; keep them if they are the best."""
    makespan, span, mean = simulate.length(chain.rows, chain.lengths, chain.times, chain.work)
    objective = span if chain.by_span else makespan
    cost = objective + _END_WEIGHT * mean
    chain.values[0] = cost
    if objective < chain.values[1] - 1e-9:
        chain.values[1] = objective
        for device in range(chain.lengths.size):
            copy(chain.best_rows[device], chain.rows[device], chain.lengths[device])
            chain.best_lengths[device] = chain.lengths[device]
    return cost


@lean
def _find_path(chain: _Chain) -> None:
    """Write down a longest path of the programs that were measured last, from its end back."""
    rows, lengths, times, work = chain.rows, chain.lengths, chain.times, chain.work
    cells = times.num_cells
    device = 0
    for other in range(lengths.size):
        for place in range(lengths[other]):
            kind, cell = rows[other, place] // cells, rows[other, place] % cells
            if kind == FORWARD:
                chain.at[cell] = place
            elif kind in (BACKWARD_INPUT, FULL_BACKWARD, PAIRED_INPUT, PAIRED_BACKWARD):
                chain.at[cells + cell] = place
        if work.clock[other] > work.clock[device]:
            device = other
    place, now, count = lengths[device] - 1, work.clock[device], 0
    while place >= 0 and count < chain.path.shape[0] - 1:
        if place + 1 < lengths[device] and rows[device, place + 1] >= PAIRED_INPUT * cells:
            place += 1
        code = rows[device, place]
        kind = code // cells
        first = place
        if kind >= PAIRED_INPUT:
            first = place - 1
            length = simulate.pair_ms(rows[device, first], code, times)
        else:
            length = times.duration[code]
        for at in range(first, place + 1):
            chain.path[count, 0], chain.path[count, 1] = device, at
            count += 1
        now -= length
        device, place = _before(device, first, place, now, chain)
    chain.num_on_path[0] = count


@lean
def _before(device: int, first: int, place: int, now: float, chain: _Chain) -> tuple[int, int]:
    """Return device and place of whose end the actions from ``first`` to ``place`` waited for."""
    times, cells, m = chain.times, chain.times.num_cells, chain.times.num_microbatches
    for at in range(first, place + 1):
        code = chain.rows[device, at]
        kind, cell = code // cells, code % cells
        if kind >= PAIRED_INPUT:
            kind = BACKWARD_INPUT
        if kind not in (FORWARD, BACKWARD_INPUT, FULL_BACKWARD):
            continue
        source, transit = simulate.input_of(kind, cell, cell // m, times)
        if source >= 0 and chain.work.end[source] + transit >= now - 1e-6:
            other = times.device_of[source % cells // m]
            if other != device or transit > 0.0:
                return other, chain.at[source]
    return device, first - 1


@lean
def _step(row: Ints, lengths: Ints, device: int, place: int, times: TimeArrays, draw: Draw) -> bool:
    """Change a row at random around a place; False: it may be broken, and is to be put back."""
    count, cells = lengths[device], times.num_cells
    chosen = unit(draw)
    if chosen < 0.2:
        return _toggle(row, count, place, times)
    if chosen < 0.55:
        if row[place] >= PAIRED_INPUT * cells:
            place -= 1
        return _move(row, count, place, place + below(draw, 2 * _REACH + 1) - _REACH, cells)
    if chosen < 0.9:
        return _marry(row, count, place, place + below(draw, 2 * _REACH + 1) - _REACH, times)
    return _split_or_fuse(row, lengths, device, place, times, below(draw, 2 * _REACH))


@lean
def _may_pair(forward: int, backward: int, times: TimeArrays) -> bool:
    cells, m = times.num_cells, times.num_microbatches
    kind = backward // cells
    if forward >= cells or kind not in (BACKWARD_INPUT, FULL_BACKWARD):
        return False
    cell = backward % cells
    hidden = times.hidden[int(kind == FULL_BACKWARD), forward // m, cell // m]
    return cell != forward and not np.isnan(hidden)


@lean
def _paired(backward: int, cells: int) -> int:
    """Return an I or B as the second of a pair."""
    if backward // cells == BACKWARD_INPUT:
        return backward + (PAIRED_INPUT - BACKWARD_INPUT) * cells
    return backward + (PAIRED_BACKWARD - FULL_BACKWARD) * cells


@lean
def _parted(backward: int, cells: int) -> int:
    """Return the second of a pair as an I or B that runs alone."""
    if backward // cells == PAIRED_INPUT:
        return backward - (PAIRED_INPUT - BACKWARD_INPUT) * cells
    return backward - (PAIRED_BACKWARD - FULL_BACKWARD) * cells


@lean
def _toggle(row: Ints, count: int, place: int, times: TimeArrays) -> bool:
    """Pair two neighbours, or part them."""
    cells = times.num_cells
    if row[place] >= PAIRED_INPUT * cells:
        row[place] = _parted(row[place], cells)
        return True
    if place + 1 >= count or not _may_pair(row[place], row[place + 1], times):
        return False
    row[place + 1] = _paired(row[place + 1], cells)
    return True


@lean
def _move(row: Ints, count: int, place: int, target: int, cells: int) -> bool:
    """Move an action, or a pair, to ``target``."""
    size = 2 if place + 1 < count and row[place + 1] >= PAIRED_INPUT * cells else 1
    target = min(max(target, 0), count - size)
    if target == place:
        return False
    for _ in range(abs(target - place)):
        if not _pass_one(row, place, size, target > place, cells):
            return False
        place += 1 if target > place else -1
    # Not into the middle of a pair.
    after = place + size
    return not (after < count and row[after] >= PAIRED_INPUT * cells) and (
        row[place] < PAIRED_INPUT * cells
    )


@lean
def _pass_one(row: Ints, place: int, size: int, later: bool, cells: int) -> bool:
    """Swap a block and the action next to it, unless they are of one cell."""
    other = row[place + size] if later else row[place - 1]
    for at in range(place, place + size):
        if row[at] % cells == other % cells:
            return False
    if later:
        for at in range(place + size, place, -1):
            row[at] = row[at - 1]
        row[place] = other
    else:
        for at in range(place - 1, place + size - 1):
            row[at] = row[at + 1]
        row[place + size - 1] = other
    return True


@lean
def _marry(row: Ints, count: int, place: int, other: int, times: TimeArrays) -> bool:
    """Bring a backward next to an F that it may run with, and pair them; part old pairs first."""
    cells = times.num_cells
    if row[place] >= cells or not 0 <= other < count or other == place:
        return False
    if place + 1 < count and row[place + 1] >= PAIRED_INPUT * cells:
        row[place + 1] = _parted(row[place + 1], cells)
    if row[other] >= PAIRED_INPUT * cells:
        row[other] = _parted(row[other], cells)
    if not _may_pair(row[place], row[other], times):
        return False
    place = _bring(row, place, other, cells)
    if place < 0:
        return False
    other = place + 1
    row[other] = _paired(row[other], cells)
    after = other + 1
    return not (after < count and row[after] >= PAIRED_INPUT * cells)


@lean
def _bring(row: Ints, place: int, other: int, cells: int) -> int:
    """Move the action at ``other`` right after the one at ``place``.

    Returns the new place of the latter, -1 if an action of the same cell is in the way.
    """
    while other > place + 1:
        if not _pass_one(row, other, 1, False, cells):
            return -1
        other -= 1
    while other < place:
        if not _pass_one(row, other, 1, True, cells):
            return -1
        other += 1
        if other == place:
            # They changed places: the one in front is the one that was brought.
            return place - 1
    return place


@lean
def _split_or_fuse(
    row: Ints, lengths: Ints, device: int, place: int, times: TimeArrays, late: int
) -> bool:
    """Make I and W of a B, the W a little later, or a B of an I whose W comes later."""
    count, cells = lengths[device], times.num_cells
    kind, cell = row[place] // cells, row[place] % cells
    if kind == FULL_BACKWARD:
        if count >= row.size:
            return False
        target = min(count, place + 1 + late)
        if target < count and row[target] >= PAIRED_INPUT * cells:
            target += 1
        for at in range(count, target, -1):
            row[at] = row[at - 1]
        row[target] = BACKWARD_WEIGHT * cells + cell
        row[place] = BACKWARD_INPUT * cells + cell
        lengths[device] = count + 1
        return True
    if kind != BACKWARD_INPUT:
        return False
    weight = BACKWARD_WEIGHT * cells + cell
    for at in range(place + 1, count):
        if row[at] == weight:
            for behind in range(at, count - 1):
                row[behind] = row[behind + 1]
            row[place] = FULL_BACKWARD * cells + cell
            lengths[device] = count - 1
            return True
    return False


@lean
def _peak(chain: _Chain, device: int) -> int:
    """Return the most bytes that a program holds above what is static."""
    times, memory, row = chain.times, chain.memory, chain.rows[device]
    cells, m = times.num_cells, times.num_microbatches
    held_bytes, peak, above = 0, 0, 0
    for at in range(chain.lengths[device]):
        kind, cell = row[at] // cells, row[at] % cells
        mode = chain.modes[cell]
        added = memory.adds[kind, cell // m, mode]
        rises = memory.rises[kind, cell // m, mode]
        most = held_bytes + rises + (above if kind >= PAIRED_INPUT else 0)
        peak = max(peak, most)
        held_bytes += added
        # Of the F of a pair its workspace is still there.
        above = rises - added if kind == FORWARD else 0
    return peak
