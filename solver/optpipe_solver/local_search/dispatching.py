"""List scheduling of a batch of unequal micro-batches: dispatching rules, and a search over them.

Devices run in the order of time. A free device takes a ready backward, else a forward that its
memory and the rule's depth allow. Otherwise it takes a W that fits the time until something
arrives. A rule sets

* the order in which micro-batches are preferred, and how deep the pipeline is filled;
* how long a wait a W is worth, and whether backwards are fused;
* the mode of each stage, among those that move nothing to the host.

The search draws rules, then changes the best a little at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import KINDS, Rows
from optpipe_solver.feasibility import refuse_unless
from optpipe_solver.jit import below, lean, seeded, unit
from optpipe_solver.local_search.board import copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.problem import Problem
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.arrays.encoding import CompiledProblem
    from optpipe_solver.arrays.simulate import MemoryArrays, SimulationScratch, TimeArrays
    from optpipe_solver.jit import Draw

__all__ = ["CELL_WORK", "Dispatched", "DispatchingRule", "dispatched", "rules_can_dispatch"]


_F, _I, _W, _B = range(4)
_DEPTH, _PATIENCE, _FUSED = range(3)
_RANDOM = 4
"""One in so many tries changes the rule's numbers, the others its order."""

_USUAL = (1.5, 0.5, 0.0)
"""The rule that is tried first."""

CELL_WORK = 11
"""The cost of a cell in a schedule, in actions simulated."""


class DispatchingRule(NamedTuple):
    """By micro-batch its ``rank``, lowest first; depth, patience, whether backwards are fused.

    ``mode`` has by stage the number of its cells' mode (`CellMode`).
    """

    rank: Ints
    numbers: Floats
    mode: Ints


class Dispatched(NamedTuple):
    """The best schedule of a search, its objective in ms, and the rule that makes it."""

    objective_ms: float
    rows: Rows
    rule: DispatchingRule


class _Dispatching(NamedTuple):
    """The work to schedule, the rule's modes, and a schedule under construction.

    ``base`` is how many cells of a device are between F and backward where nothing waits. ``later``
    has by row the bytes that F's of later stages add on the same device, all kept. ``given`` flags
    an order that all stages keep. ``modes[s, :num_modes[s]]`` are those that a stage may have,
    ``mode`` those it has; ``times.duration`` follows them.

    ``waiting[kind, s, :sizes[kind, s]]`` are the micro-batches whose F, I or W could be next on a
    stage. ``ready`` has by kind and cell when F or I may start. ``flying[d, :num_flying[d]]`` are
    cells between F and backward.
    """

    times: TimeArrays
    memory: MemoryArrays
    base: Floats
    later: Ints
    given: bool
    modes: Ints
    num_modes: Ints
    mode: Ints
    waiting: Ints
    sizes: Ints
    ready: Floats
    flying: Ints
    num_flying: Ints
    held_bytes: Ints
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
def _dispatch(run: _Dispatching, rank: Ints, rule: Floats) -> bool:
    """Make the schedule of a rule; False where it gets stuck for want of memory."""
    times = run.times
    cells, m = times.num_cells, times.num_microbatches
    run.sizes[:] = 0
    run.num_flying[:] = 0
    run.held_bytes[:] = 0
    run.wake[:] = np.inf
    run.free[:] = 0.0
    run.link_free[:] = 0.0
    run.counts[:] = 0
    for j in range(m):
        run.waiting[_F, 0, j] = j
        run.ready[_F, j] = 0.0
    run.sizes[_F, 0] = m
    run.wake[times.device_of[0]] = 0.0
    left = cells
    while left > 0:
        device, now = -1, np.inf
        for other in range(run.wake.size):
            if run.wake[other] < now:
                device, now = other, run.wake[other]
        if device < 0:
            return False
        code = _choose(run, rank, rule, device, now)
        if code < 0:
            continue
        _execute(run, device, code, now)
        if code >= _W * cells or (code >= _I * cells and rule[_FUSED] > 0.0):
            left -= 1
    return True


@lean
def _choose(run: _Dispatching, rank: Ints, rule: Floats, device: int, now: float) -> int:
    """Return what a free device does now, -1 for nothing; then it wakes when something arrives."""
    back = _B if rule[_FUSED] > 0.0 else _I
    found, later = _backward(run, rank, device, back, now)
    if found >= 0:
        return found
    idle = later - now
    if run.num_flying[device] < max(1.0, rule[_DEPTH] * run.base[device]):
        found, arrival, lacks_room = _forward(run, rank, device, back, now)
        if lacks_room:
            weight = _weight(run, rule, device, np.inf)
            found = weight if weight >= 0 else found
        if found >= 0:
            return found
        later = min(later, arrival)
        idle = later - now
    found = _weight(run, rule, device, idle)
    if found < 0:
        run.wake[device] = later
    return found


@lean
def _backward(
    run: _Dispatching, rank: Ints, device: int, back: int, now: float
) -> tuple[int, float]:
    """Return the backward to run now, -1 for none, and when the next one that fits arrives (ms)."""
    cells, m = run.times.num_cells, run.times.num_microbatches
    room = run.memory.limit[device] - run.held_bytes[device]
    best, found, later = m, -1, np.inf
    for at in range(run.times.owned.shape[1] - 1, -1, -1):
        s = run.times.owned[device, at]
        if s < 0:
            continue
        if found >= 0:
            break
        for i in range(run.sizes[_I, s]):
            j = run.waiting[_I, s, i]
            cell = s * m + j
            if _back_rise(run, cell, back) > room:
                continue
            if run.ready[_I, cell] > now:
                later = min(later, run.ready[_I, cell])
            elif rank[j] < best:
                best, found = rank[j], back * cells + cell
    return found, later


@lean
def _forward(
    run: _Dispatching, rank: Ints, device: int, back: int, now: float
) -> tuple[int, float, bool]:
    """Return the forward to run now, -1 for none, and when the next one that fits arrives (ms).

    The third value tells whether a preferred, ready forward lacks memory that a W may free.
    """
    m = run.times.num_microbatches
    best, first, found, later = m, m, -1, np.inf
    for at in range(run.times.owned.shape[1] - 1, -1, -1):
        s = run.times.owned[device, at]
        if s < 0:
            continue
        if found >= 0:
            break
        for i in range(run.sizes[_F, s]):
            j = run.waiting[_F, s, i]
            cell = s * m + j
            is_behind = rank[j] >= best or (run.given and not _is_next(run, s, j))
            if is_behind:
                continue
            if not _admits(run, device, cell, back):
                if run.ready[_F, cell] <= now:
                    first = min(first, rank[j])
            elif run.ready[_F, cell] > now:
                later = min(later, run.ready[_F, cell])
            else:
                best, found = rank[j], cell
    return found, later, first < best


@lean
def _is_next(run: _Dispatching, s: int, j: int) -> bool:
    """Whether no earlier micro-batch waits: all of a stage arrive in their order."""
    for i in range(run.sizes[_F, s]):  # noqa: SIM110 - numba knows no generators
        if run.waiting[_F, s, i] < j:
            return False
    return True


@lean
def _weight(run: _Dispatching, rule: Floats, device: int, idle: float) -> int:
    """Return the longest W that is worth the wait after so many idle ms, -1 where there is none."""
    times, memory = run.times, run.memory
    cells, m = times.num_cells, times.num_microbatches
    room = memory.limit[device] - run.held_bytes[device]
    longest, found = -1.0, -1
    for at in range(run.times.owned.shape[1] - 1, -1, -1):
        s = run.times.owned[device, at]
        if s < 0:
            continue
        for i in range(run.sizes[_W, s]):
            cell = s * m + run.waiting[_W, s, i]
            code = _W * cells + cell
            if memory.rises[_W, times.row[cell], run.mode[s]] > room:
                continue
            ms = times.duration[code]
            if ms > longest and rule[_PATIENCE] * ms <= idle:
                longest, found = ms, code
    return found


@lean
def _admits(run: _Dispatching, device: int, cell: int, back: int) -> bool:
    """Whether an F fits, and each backward of what is then in flight; one of them to its end."""
    times, memory, m = run.times, run.memory, run.times.num_microbatches
    row, mode = times.row[cell], run.mode[cell // m]
    room = memory.limit[device] - run.held_bytes[device]
    if memory.rises[_F, row, mode] > room:
        return False
    rise, least = _back_rise(run, cell, back), run.later[row]
    for i in range(run.num_flying[device]):
        other = run.flying[device, i]
        rise = max(rise, _back_rise(run, other, back))
        least = min(least, run.later[times.row[other]])
    return least + rise <= room - memory.adds[_F, row, mode]


@lean
def _back_rise(run: _Dispatching, cell: int, back: int) -> int:
    """Return the most bytes above what is held while a backward, or what it needs again, runs."""
    mode = run.mode[cell // run.times.num_microbatches]
    return simulate.backward_rise(back, run.times.row[cell], mode, run.memory)


@lean
def _execute(run: _Dispatching, device: int, code: int, now: float) -> None:
    times, memory = run.times, run.memory
    cells, m = times.num_cells, times.num_microbatches
    kind = code // cells
    cell = code - kind * cells
    s, j = cell // m, cell % m
    row, mode = times.row[cell], run.mode[s]
    end = now + times.duration[code]
    if kind in (_I, _B) and memory.again[row, mode]:
        again = simulate.RECOMPUTE
        end += times.duration[again * cells + cell]
        run.actions[device, run.counts[device]] = again * cells + cell
        run.counts[device] += 1
        run.held_bytes[device] += memory.adds[again, row, mode]
    run.actions[device, run.counts[device]] = code
    run.counts[device] += 1
    run.free[device] = end
    run.wake[device] = end
    run.held_bytes[device] += memory.adds[kind, row, mode]
    if kind == _W:
        _take(run.waiting[_W, s], run.sizes[_W], s, j)
        return
    if kind == _F:
        _take(run.waiting[_F, s], run.sizes[_F], s, j)
        run.flying[device, run.num_flying[device]] = cell
        run.num_flying[device] += 1
    else:
        _take(run.waiting[_I, s], run.sizes[_I], s, j)
        _take(run.flying[device], run.num_flying, device, cell)
        if kind == _I:
            run.waiting[_W, s, run.sizes[_W, s]] = j
            run.sizes[_W, s] += 1
    needed, transit = simulate.output_of(kind, cell, times)
    if needed >= 0:
        arrival = simulate.depart(kind, cell, end, 1.0, times, run.link_free) + transit
        _put(run, _F if kind == _F and needed != cell else _I, needed, arrival)


@lean
def _take(items: Ints, sizes: Ints, of: int, item: int) -> None:
    """Take an item out of a list of ``sizes[of]``; the last one gets its place."""
    sizes[of] -= 1
    for i in range(sizes[of]):
        if items[i] == item:
            items[i] = items[sizes[of]]
            break


@lean
def _put(run: _Dispatching, kind: int, cell: int, arrival: float) -> None:
    """Note that an F or I may start; wake its device then, or when it is free."""
    s = cell // run.times.num_microbatches
    run.waiting[kind, s, run.sizes[kind, s]] = cell - s * run.times.num_microbatches
    run.sizes[kind, s] += 1
    run.ready[kind, cell] = arrival
    device = run.times.device_of[s]
    run.wake[device] = min(run.wake[device], max(arrival, run.free[device]))


# --- The search: rules drawn, then the best one changed.


@lean
def _search(  # noqa: PLR0917 - compiled code takes its arguments by position
    run: _Dispatching,
    best: _Best,
    known: DispatchingRule,
    ranks: Ints,
    work: SimulationScratch,
    by_span: bool,
    drawn: int,
    tries: int,
    draw: Draw,
) -> None:
    """Try those ``known`` (a row each), ``drawn`` at random, then ``tries`` changes of the best."""
    m, many = run.times.num_microbatches, known.rank.shape[0]
    for number in range(-many, drawn + tries):
        if number < 0:
            copy(best.tried_rank, known.rank[number + many], m)
            copy(best.tried_rule, known.numbers[number + many], best.rule.size)
            copy(run.mode, known.mode[number + many], best.mode.size)
        elif number < drawn:
            copy(best.tried_rank, ranks[number % ranks.shape[0]], m)
            if number > 0:
                _draw_rule(best.tried_rule, draw)
                _draw_modes(run, draw)
        else:
            copy(best.tried_rank, best.rank, m)
            copy(best.tried_rule, best.rule, best.rule.size)
            copy(run.mode, best.mode, best.mode.size)
            if run.given or below(draw, _RANDOM) == 0:
                _change_rule(best.tried_rule, draw)
            else:
                _reorder(best.tried_rank, below(draw, m), below(draw, m), draw)
            if below(draw, 2) == 0:
                s = below(draw, run.mode.size)
                run.mode[s] = run.modes[s, below(draw, run.num_modes[s])]
        _settle_durations(run)
        if not _dispatch(run, best.tried_rank, best.tried_rule):
            continue
        makespan, span, _ = simulate.length(run.actions, run.counts, run.times, work)
        length = span if by_span else makespan
        if length <= best.length[0]:
            best.length[0] = length
            copy(best.rank, best.tried_rank, m)
            copy(best.rule, best.tried_rule, best.rule.size)
            copy(best.mode, run.mode, run.mode.size)
            for device in range(run.counts.size):
                best.counts[device] = run.counts[device]
                copy(best.actions[device], run.actions[device], run.counts[device])


@lean
def _draw_rule(rule: Floats, draw: Draw) -> None:
    for at in range(rule.size):
        _draw_number(rule, at, draw)


@lean
def _change_rule(rule: Floats, draw: Draw) -> None:
    """Draw one number anew, or all."""
    if below(draw, 4) == 0:
        _draw_rule(rule, draw)
    else:
        _draw_number(rule, below(draw, rule.size), draw)


@lean
def _draw_number(rule: Floats, at: int, draw: Draw) -> None:
    if at == _DEPTH:
        rule[at] = 0.8 + 5.2 * unit(draw) ** 2
    elif at == _PATIENCE:
        rule[at] = unit(draw)
    else:
        rule[at] = 1.0 if below(draw, 4) == 0 else 0.0


@lean
def _draw_modes(run: _Dispatching, draw: Draw) -> None:
    """Draw a mode for every stage: keep in all, one position of all menus, or one each."""
    way = below(draw, 3)
    position = below(draw, run.modes.shape[1])
    for s in range(run.mode.size):
        if way == 2:
            position = below(draw, run.num_modes[s])
        run.mode[s] = run.modes[s, 0 if way == 0 else min(position, run.num_modes[s] - 1)]


@lean
def _settle_durations(run: _Dispatching) -> None:
    times = run.times
    cells, m = times.num_cells, times.num_microbatches
    for kind in range(times.mode_ms.shape[0]):
        for cell in range(cells):
            ms = times.mode_ms[kind, times.row[cell], run.mode[cell // m]]
            times.duration[kind * cells + cell] = ms


@lean
def _reorder(rank: Ints, one: int, other: int, draw: Draw) -> None:
    """Exchange two micro-batches, or move one after or before the other."""
    if below(draw, 2) == 0:
        rank[one], rank[other] = rank[other], rank[one]
        return
    low, high = rank[one], rank[other]
    for j in range(rank.size):
        if low < rank[j] <= high:
            rank[j] -= 1
        elif high <= rank[j] < low:
            rank[j] += 1
    rank[one] = high


def rules_can_dispatch(problem: Problem) -> bool:
    """Whether rules keep the order of all passes: not where slices of a sample have turns."""
    return not problem.has_samples


def dispatched(
    compiled: CompiledProblem,
    orders: Sequence[Ints],
    work: int,
    seed: int,
    known: Sequence[DispatchingRule] = (),
) -> Dispatched | None:
    """Return the best schedule found; None where every rule gets stuck, or none is usable.

    Parameters
    ----------
    compiled
        The problem; pairs that it allows are not used.
    orders
        Orders of micro-batches to begin with.
    work
        About how many actions may be simulated, about 0.03 us of one core each; one schedule, or
        those of all that are known, are made whatever it is.
    seed
        Of the draws.
    known
        Rules that are all tried, instead of drawn ones, then the best of them changed. One with a
        mode that a stage of this problem may not have is not usable.
    """
    problem, times = compiled.problem, compiled.times
    refuse_unless(rules_can_dispatch(problem), "dispatched", problem, "problems without samples")
    cells, m, num_devices = times.num_cells, times.num_microbatches, len(problem.devices)
    run = _dispatching_of(compiled)
    best = _Best(
        rank=np.arange(m),
        rule=np.zeros(3),
        tried_rank=np.arange(m),
        tried_rule=np.array(_USUAL),
        mode=np.zeros_like(run.mode),
        actions=np.zeros_like(run.actions),
        counts=np.zeros_like(run.counts),
        length=np.full(1, np.inf),
    )
    ranks = np.array([np.argsort(order) for order in orders])
    numbers = np.arange(run.modes.shape[1]) < run.num_modes[:, None]
    usable = [
        rule for rule in known if ((run.modes == rule.mode[:, None]) & numbers).any(axis=1).all()
    ]
    if known and not usable:
        return None
    stacked = DispatchingRule(
        rank=np.array([one.rank for one in usable], dtype=np.int64).reshape(-1, m),
        numbers=np.array([one.numbers for one in usable]).reshape(-1, len(_USUAL)),
        mode=np.array([one.mode for one in usable], dtype=np.int64).reshape(-1, times.num_stages),
    )
    count = max(0 if usable else 1, work // (CELL_WORK * cells) - len(usable))
    drawn = 0 if usable else max(min(len(orders), count), count // 3)
    scratch, by_span = simulate.workspace_for(times, num_devices), problem.objective == "span"
    _search(
        run, best, stacked, ranks, scratch, by_span, drawn, count - drawn,
        seeded(seed),
    )  # fmt: skip
    if best.length[0] == np.inf:
        return None
    rows = Rows(best.actions, best.counts, np.repeat(best.mode, m))
    return Dispatched(float(best.length[0]), rows, DispatchingRule(best.rank, best.rule, best.mode))


def _dispatching_of(compiled: CompiledProblem) -> _Dispatching:
    problem, memory = compiled.problem, compiled.memory
    times = compiled.times._replace(duration=compiled.times.duration.copy())
    num_stages, m, num_rows = times.num_stages, times.num_microbatches, memory.adds.shape[1]
    num_devices, widest = times.owned.shape
    later = np.zeros(num_rows, dtype=np.int64)
    base = np.zeros(num_devices)
    mean_ms = times.duration.reshape(len(KINDS), num_stages, -1).mean(axis=2)
    busy_ms = mean_ms[[_F, _I, _W]].sum(axis=0)
    slowest_ms = max(busy_ms[list(stages)].sum() for stages in problem.stages_of)
    return_ms = np.cumsum((mean_ms[_F] + mean_ms[_I])[::-1])[::-1]
    for device, stages in enumerate(problem.stages_of):
        base[device] = return_ms[sorted(stages, reverse=True)].sum() / max(slowest_ms, 1e-9)
        for s in stages:
            rows = np.arange(s, num_rows, num_stages)
            for other in (one for one in stages if one > s):
                later[rows] += memory.adds[_F, rows - s + other, 0]
    stays = memory.may & (memory.adds[simulate.RELOAD] == 0)
    every = stays.reshape(-1, num_stages, stays.shape[1]).all(axis=0)
    modes = np.zeros((num_stages, int(every.sum(axis=1).max())), dtype=np.int64)
    for s in range(num_stages):
        may = np.flatnonzero(every[s])
        modes[s, : may.size] = may
    return _Dispatching(
        times=times,
        memory=memory,
        base=base,
        later=later,
        given=problem.order == "given",
        modes=modes,
        num_modes=every.sum(axis=1).astype(np.int64),
        mode=np.zeros(num_stages, dtype=np.int64),
        waiting=np.zeros((3, num_stages, m), dtype=np.int64),
        sizes=np.zeros((3, num_stages), dtype=np.int64),
        ready=np.zeros((2, times.num_cells)),
        flying=np.zeros((num_devices, times.num_cells), dtype=np.int64),
        num_flying=np.zeros(num_devices, dtype=np.int64),
        held_bytes=np.zeros(num_devices, dtype=np.int64),
        wake=np.zeros(num_devices),
        free=np.zeros(num_devices),
        link_free=np.zeros(max(1, times.num_links)),
        actions=np.zeros((num_devices, widest * m * len(KINDS)), dtype=np.int64),
        counts=np.zeros(num_devices, dtype=np.int64),
    )
