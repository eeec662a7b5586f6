"""List scheduling of a batch of unequal micro-batches: dispatching rules, and a search over them.

Devices run in the order of time. One that is free takes a backward that is there, else a forward
that its memory and the rule's depth admit, else a W that fits the time until something arrives. A
rule says in which order micro-batches are preferred, how deep the pipeline is filled, how long a
wait a W is worth, whether backwards are fused, and which mode each stage has, among those that move
nothing to the host. The search draws rules, then changes the best a little at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import KINDS, Rows
from optpipe_solver.jit import lean
from optpipe_solver.local_search import moves
from optpipe_solver.local_search.board import copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.arrays.encoding import CompiledProblem
    from optpipe_solver.arrays.simulate import MemoryArrays, SimulationScratch, TimeArrays
    from optpipe_solver.local_search.moves import Draw

__all__ = ["dispatched"]


_F, _I, _W, _B = range(4)
_DEPTH, _PATIENCE, _FUSED = range(3)
_RANDOM = 4
"""One in so many tries changes the rule's numbers, the others its order."""

_USUAL = (1.5, 0.5, 0.0)
"""The rule that is tried first."""

_CELL_WORK = 7
"""What a cell costs in a schedule, in actions simulated."""


class _Line(NamedTuple):
    """What is scheduled. By device: the stages it ``holds``, last first, -1 behind them.

    ``base`` is how many cells of a device are between F and backward where nothing waits. ``later``
    has by row the bytes that F's of later stages add on the same device, all kept. ``given`` flags
    an order that all stages keep. ``modes[s, :num_modes[s]]`` are those that a stage may have,
    ``mode`` those it has; ``times.duration`` follows them.
    """

    times: TimeArrays
    memory: MemoryArrays
    holds: Ints
    base: Floats
    later: Ints
    given: bool
    modes: Ints
    num_modes: Ints
    mode: Ints


class _Yard(NamedTuple):
    """A schedule while it is made.

    ``waiting[kind, s, :sizes[kind, s]]`` are the micro-batches whose F, I or W could be next on a
    stage, ``ready`` has by kind and cell when F or I may start. ``flying[d, :num_flying[d]]`` are
    cells between F and backward.
    """

    waiting: Ints
    sizes: Ints
    ready: Floats
    flying: Ints
    num_flying: Ints
    held: Ints
    wake: Floats
    free: Floats
    link_free: Floats
    actions: Ints
    counts: Ints


class _Best(NamedTuple):
    """The best so far, and the rule that is tried; ``length`` is one number."""

    rank: Ints
    rule: Floats
    tried_rank: Ints
    tried_rule: Floats
    mode: Ints
    actions: Ints
    counts: Ints
    length: Floats


@lean
def _dispatch(line: _Line, yard: _Yard, rank: Ints, rule: Floats) -> bool:
    """Make the schedule of a rule; False where it gets stuck for want of memory."""
    times = line.times
    cells, m = times.num_cells, times.num_microbatches
    yard.sizes[:] = 0
    yard.num_flying[:] = 0
    yard.held[:] = 0
    yard.wake[:] = np.inf
    yard.free[:] = 0.0
    yard.link_free[:] = 0.0
    yard.counts[:] = 0
    for j in range(m):
        yard.waiting[_F, 0, j] = j
        yard.ready[_F, j] = 0.0
    yard.sizes[_F, 0] = m
    yard.wake[times.device_of[0]] = 0.0
    left = cells
    while left > 0:
        device, now = -1, np.inf
        for other in range(yard.wake.size):
            if yard.wake[other] < now:
                device, now = other, yard.wake[other]
        if device < 0:
            return False
        code = _choose(line, yard, rank, rule, device, now)
        if code < 0:
            continue
        _execute(line, yard, device, code, now)
        if code >= _W * cells or (code >= _I * cells and rule[_FUSED] > 0.0):
            left -= 1
    return True


@lean
def _choose(  # noqa: PLR0917 - compiled code takes its arguments by position
    line: _Line, yard: _Yard, rank: Ints, rule: Floats, device: int, now: float
) -> int:
    """Return what a free device does now, -1 for nothing; then it wakes when something arrives."""
    back = _B if rule[_FUSED] > 0.0 else _I
    found, later = _backward(line, yard, rank, device, back, now)
    if found >= 0:
        return found
    if yard.num_flying[device] < max(1.0, rule[_DEPTH] * line.base[device]):
        found, arrival = _forward(line, yard, rank, device, back, now)
        if found >= 0:
            return found
        later = min(later, arrival)
    return _weight(line, yard, rule, device, now, later)


@lean
def _backward(  # noqa: PLR0917 - compiled code takes its arguments by position
    line: _Line, yard: _Yard, rank: Ints, device: int, back: int, now: float
) -> tuple[int, float]:
    """Return the backward to run now, -1 for none, and when the next one that fits arrives (ms)."""
    cells, m = line.times.num_cells, line.times.num_microbatches
    room = line.memory.limit[device] - yard.held[device]
    best, found, later = m, -1, np.inf
    for at in range(line.holds.shape[1]):
        s = line.holds[device, at]
        if s < 0 or found >= 0:
            break
        for i in range(yard.sizes[_I, s]):
            j = yard.waiting[_I, s, i]
            cell = s * m + j
            if _back_rise(line, cell, back) > room:
                continue
            if yard.ready[_I, cell] > now:
                later = min(later, yard.ready[_I, cell])
            elif rank[j] < best:
                best, found = rank[j], back * cells + cell
    return found, later


@lean
def _forward(  # noqa: PLR0917 - compiled code takes its arguments by position
    line: _Line, yard: _Yard, rank: Ints, device: int, back: int, now: float
) -> tuple[int, float]:
    """Return the forward to run now, -1 for none, and when the next one that fits arrives (ms)."""
    m = line.times.num_microbatches
    best, found, later = m, -1, np.inf
    for at in range(line.holds.shape[1]):
        s = line.holds[device, at]
        if s < 0 or found >= 0:
            break
        for i in range(yard.sizes[_F, s]):
            j = yard.waiting[_F, s, i]
            cell = s * m + j
            is_behind = rank[j] >= best or (line.given and not _is_next(yard, s, j))
            if is_behind or not _admits(line, yard, device, cell, back):
                continue
            if yard.ready[_F, cell] > now:
                later = min(later, yard.ready[_F, cell])
            else:
                best, found = rank[j], cell
    return found, later


@lean
def _is_next(yard: _Yard, s: int, j: int) -> bool:
    """Whether no earlier micro-batch waits: all of a stage arrive in their order."""
    for i in range(yard.sizes[_F, s]):  # noqa: SIM110 - numba knows no generators
        if yard.waiting[_F, s, i] < j:
            return False
    return True


@lean
def _weight(  # noqa: PLR0917 - compiled code takes its arguments by position
    line: _Line, yard: _Yard, rule: Floats, device: int, now: float, later: float
) -> int:
    """Return the longest W that is worth the wait, -1 where there is none."""
    times = line.times
    cells, m = times.num_cells, times.num_microbatches
    longest, found = -1.0, -1
    for at in range(line.holds.shape[1]):
        s = line.holds[device, at]
        if s < 0:
            break
        for i in range(yard.sizes[_W, s]):
            code = _W * cells + s * m + yard.waiting[_W, s, i]
            ms = times.duration[code]
            if ms > longest and rule[_PATIENCE] * ms <= later - now:
                longest, found = ms, code
    if found < 0:
        yard.wake[device] = later
    return found


@lean
def _admits(line: _Line, yard: _Yard, device: int, cell: int, back: int) -> bool:
    """Whether an F fits, and each backward of what is then in flight; one of them to its end."""
    times, memory, m = line.times, line.memory, line.times.num_microbatches
    row, mode = times.row[cell], line.mode[cell // m]
    room = memory.limit[device] - yard.held[device]
    if memory.rises[_F, row, mode] > room:
        return False
    rise, least = _back_rise(line, cell, back), line.later[row]
    for i in range(yard.num_flying[device]):
        other = yard.flying[device, i]
        rise = max(rise, _back_rise(line, other, back))
        least = min(least, line.later[times.row[other]])
    return least + rise <= room - memory.adds[_F, row, mode]


@lean
def _back_rise(line: _Line, cell: int, back: int) -> int:
    """Return the most bytes above what is held while a backward, or what it needs again, runs."""
    times, memory = line.times, line.memory
    row, mode = times.row[cell], line.mode[cell // times.num_microbatches]
    rise = memory.rises[back, row, mode]
    if memory.again[row, mode]:
        again = simulate.RECOMPUTE
        rise = max(memory.rises[again, row, mode], memory.adds[again, row, mode] + rise)
    return int(rise)


@lean
def _execute(line: _Line, yard: _Yard, device: int, code: int, now: float) -> None:
    times, memory = line.times, line.memory
    cells, m = times.num_cells, times.num_microbatches
    kind = code // cells
    cell = code - kind * cells
    s, j = cell // m, cell % m
    row, mode = times.row[cell], line.mode[s]
    end = now + times.duration[code]
    if kind in (_I, _B) and memory.again[row, mode]:
        again = simulate.RECOMPUTE
        end += times.duration[again * cells + cell]
        yard.actions[device, yard.counts[device]] = again * cells + cell
        yard.counts[device] += 1
        yard.held[device] += memory.adds[again, row, mode]
    yard.actions[device, yard.counts[device]] = code
    yard.counts[device] += 1
    yard.free[device] = end
    yard.wake[device] = end
    yard.held[device] += memory.adds[kind, row, mode]
    if kind == _W:
        _take(yard, _W, s, j)
        return
    lane, fill = simulate.lane_of(kind, cell, times)
    if lane >= 0:
        end = max(end, yard.link_free[lane])
        yard.link_free[lane] = end + fill
    if kind == _F:
        _take(yard, _F, s, j)
        yard.flying[device, yard.num_flying[device]] = cell
        yard.num_flying[device] += 1
        if s == times.num_stages - 1:
            _put(line, yard, _I, s, j, end)
        else:
            _put(line, yard, _F, s + 1, j, end + times.there[row])
        return
    _take(yard, _I, s, j)
    _land(yard, device, cell)
    if kind == _I:
        yard.waiting[_W, s, yard.sizes[_W, s]] = j
        yard.sizes[_W, s] += 1
    if s > 0:
        _put(line, yard, _I, s - 1, j, end + times.back[times.row[cell - m]])


@lean
def _take(yard: _Yard, kind: int, s: int, j: int) -> None:
    size = yard.sizes[kind, s] - 1
    for i in range(size + 1):
        if yard.waiting[kind, s, i] == j:
            yard.waiting[kind, s, i] = yard.waiting[kind, s, size]
            break
    yard.sizes[kind, s] = size


@lean
def _land(yard: _Yard, device: int, cell: int) -> None:
    size = yard.num_flying[device] - 1
    for i in range(size + 1):
        if yard.flying[device, i] == cell:
            yard.flying[device, i] = yard.flying[device, size]
            break
    yard.num_flying[device] = size


@lean
def _put(  # noqa: PLR0917 - compiled code takes its arguments by position
    line: _Line, yard: _Yard, kind: int, s: int, j: int, arrival: float
) -> None:
    """Note that an F or I may start; wake its device then, or when it is free."""
    times = line.times
    yard.waiting[kind, s, yard.sizes[kind, s]] = j
    yard.sizes[kind, s] += 1
    yard.ready[kind, s * times.num_microbatches + j] = arrival
    device = times.device_of[s]
    yard.wake[device] = min(yard.wake[device], max(arrival, yard.free[device]))


# --- The search: rules drawn, then the best one changed.


@lean
def _search(  # noqa: PLR0917 - compiled code takes its arguments by position
    line: _Line,
    yard: _Yard,
    best: _Best,
    ranks: Ints,
    work: SimulationScratch,
    by_span: bool,
    drawn: int,
    tries: int,
    draw: Draw,
) -> None:
    """Try ``drawn`` rules at random, then ``tries`` changes of the best."""
    m = line.times.num_microbatches
    for number in range(drawn + tries):
        if number < drawn:
            copy(best.tried_rank, ranks[number % ranks.shape[0]], m)
            if number > 0:
                _draw_rule(best.tried_rule, draw)
                _draw_modes(line, draw)
        else:
            copy(best.tried_rank, best.rank, m)
            copy(best.tried_rule, best.rule, best.rule.size)
            copy(line.mode, best.mode, best.mode.size)
            if line.given or moves.below(draw, _RANDOM) == 0:
                _draw_rule(best.tried_rule, draw)
            else:
                _reorder(best.tried_rank, moves.below(draw, m), moves.below(draw, m), draw)
            if moves.below(draw, 2) == 0:
                s = moves.below(draw, line.mode.size)
                line.mode[s] = line.modes[s, moves.below(draw, line.num_modes[s])]
        _settle_durations(line)
        if not _dispatch(line, yard, best.tried_rank, best.tried_rule):
            continue
        makespan, span, _ = simulate.length(yard.actions, yard.counts, line.times, work)
        length = span if by_span else makespan
        if length <= best.length[0]:
            best.length[0] = length
            copy(best.rank, best.tried_rank, m)
            copy(best.rule, best.tried_rule, best.rule.size)
            copy(best.mode, line.mode, line.mode.size)
            for device in range(yard.counts.size):
                best.counts[device] = yard.counts[device]
                copy(best.actions[device], yard.actions[device], yard.counts[device])


@lean
def _draw_rule(rule: Floats, draw: Draw) -> None:
    rule[_DEPTH] = 0.8 + 2.2 * moves.unit(draw) ** 2
    rule[_PATIENCE] = moves.unit(draw)
    rule[_FUSED] = 1.0 if moves.below(draw, 4) == 0 else 0.0


@lean
def _draw_modes(line: _Line, draw: Draw) -> None:
    """Draw a mode for every stage: keep in all, one position of all menus, or one each."""
    way = moves.below(draw, 3)
    position = moves.below(draw, line.modes.shape[1])
    for s in range(line.mode.size):
        if way == 2:
            position = moves.below(draw, line.num_modes[s])
        line.mode[s] = line.modes[s, 0 if way == 0 else min(position, line.num_modes[s] - 1)]


@lean
def _settle_durations(line: _Line) -> None:
    times = line.times
    cells, m = times.num_cells, times.num_microbatches
    for kind in range(times.mode_ms.shape[0]):
        for cell in range(cells):
            ms = times.mode_ms[kind, times.row[cell], line.mode[cell // m]]
            times.duration[kind * cells + cell] = ms


@lean
def _reorder(rank: Ints, one: int, other: int, draw: Draw) -> None:
    """Exchange two micro-batches, or move one behind or before the other."""
    if moves.below(draw, 2) == 0:
        rank[one], rank[other] = rank[other], rank[one]
        return
    low, high = rank[one], rank[other]
    for j in range(rank.size):
        if low < rank[j] <= high:
            rank[j] -= 1
        elif high <= rank[j] < low:
            rank[j] += 1
    rank[one] = high


def dispatched(
    compiled: CompiledProblem, orders: Sequence[Ints], work: int, seed: int
) -> tuple[float, Rows] | None:
    """Return the best schedule found and its objective in ms; None where every rule gets stuck.

    Parameters
    ----------
    compiled
        The problem; it has neither pairs nor samples.
    orders
        Orders of micro-batches to begin with.
    work
        About how many actions may be simulated, about 0.1 us of one core each; one schedule is
        made whatever it is.
    seed
        Of the draws.
    """
    problem, times = compiled.problem, compiled.times
    cells, m, num_devices = times.num_cells, times.num_microbatches, len(problem.devices)
    line = _line(compiled)
    yard = _Yard(
        waiting=np.zeros((3, times.num_stages, m), dtype=np.int64),
        sizes=np.zeros((3, times.num_stages), dtype=np.int64),
        ready=np.zeros((2, cells)),
        flying=np.zeros((num_devices, cells), dtype=np.int64),
        num_flying=np.zeros(num_devices, dtype=np.int64),
        held=np.zeros(num_devices, dtype=np.int64),
        wake=np.zeros(num_devices),
        free=np.zeros(num_devices),
        link_free=np.zeros(max(1, times.num_links)),
        actions=np.zeros((num_devices, line.holds.shape[1] * m * len(KINDS)), dtype=np.int64),
        counts=np.zeros(num_devices, dtype=np.int64),
    )
    best = _Best(
        rank=np.arange(m),
        rule=np.zeros(3),
        tried_rank=np.arange(m),
        tried_rule=np.array(_USUAL),
        mode=np.zeros_like(line.mode),
        actions=np.zeros_like(yard.actions),
        counts=np.zeros_like(yard.counts),
        length=np.full(1, np.inf),
    )
    ranks = np.array([np.argsort(order) for order in orders])
    count = max(1, work // (_CELL_WORK * cells))
    drawn = max(min(len(orders), count), count // 3)
    scratch, by_span = simulate.workspace_for(times, num_devices), problem.objective == "span"
    _search(line, yard, best, ranks, scratch, by_span, drawn, count - drawn, moves.seeded(seed))
    if best.length[0] == np.inf:
        return None
    return float(best.length[0]), Rows(best.actions, best.counts, np.repeat(best.mode, m))


def _line(compiled: CompiledProblem) -> _Line:
    problem, memory = compiled.problem, compiled.memory
    times = compiled.times._replace(duration=compiled.times.duration.copy())
    num_stages, num_rows = times.num_stages, memory.adds.shape[1]
    holds = np.full((len(problem.devices), max(map(len, problem.stages_of))), -1, dtype=np.int64)
    later = np.zeros(num_rows, dtype=np.int64)
    base = np.zeros(len(problem.devices))
    mean_ms = times.duration.reshape(len(KINDS), num_stages, -1).mean(axis=2)
    busy_ms = mean_ms[[_F, _I, _W]].sum(axis=0)
    slowest_ms = max(busy_ms[list(held)].sum() for held in problem.stages_of)
    return_ms = np.cumsum((mean_ms[_F] + mean_ms[_I])[::-1])[::-1]
    for device, held in enumerate(problem.stages_of):
        last_first = sorted(held, reverse=True)
        holds[device, : len(held)] = last_first
        base[device] = return_ms[last_first].sum() / max(slowest_ms, 1e-9)
        for s in held:
            rows = np.arange(s, num_rows, num_stages)
            for other in (one for one in held if one > s):
                later[rows] += memory.adds[_F, rows - s + other, 0]
    stays = memory.may & (memory.adds[simulate.RELOAD] == 0)
    every = stays.reshape(-1, num_stages, stays.shape[1]).all(axis=0)
    modes = np.zeros((num_stages, int(every.sum(axis=1).max())), dtype=np.int64)
    for s in range(num_stages):
        may = np.flatnonzero(every[s])
        modes[s, : may.size] = may
    given, mode = problem.order == "given", np.zeros(num_stages, dtype=np.int64)
    return _Line(
        times, memory, holds, base, later, given, modes, every.sum(axis=1).astype(np.int64), mode
    )
