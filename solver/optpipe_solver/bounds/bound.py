"""The best of all bounds, and what each is worth."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from optpipe.simulate import link_loads
from optpipe_solver.bounds.energy import energy_ms
from optpipe_solver.bounds.heads_tails import ANYTIME, drain, heads, refill, tails
from optpipe_solver.bounds.pairs import paired_load_ms, paired_memory_ms, shortened
from optpipe_solver.bounds.relaxation import Paths, relaxed
from optpipe_solver.bounds.window import window_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem, Stage
    from optpipe_solver.arrays import Floats
    from optpipe_solver.bounds.heads_tails import Events
    from optpipe_solver.bounds.relaxation import Relaxed

__all__ = ["Bound", "lower_bound", "lower_bounds", "work_bound"]

_MOST_CELLS = 131_072
"""Under span, devices x stages x micro-batches that are swept: a few tenths of a second."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound of the problem's objective and the argument that gives it."""

    ms: float
    method: str


def lower_bound(problem: Problem) -> Bound:
    """Return the best of `lower_bounds`, the first of equals."""
    return max(lower_bounds(problem), key=lambda bound: bound.ms)


def lower_bounds(
    problem: Problem, *, should_stop: Callable[[], bool] = lambda: False
) -> list[Bound]:
    """Return the best value of every argument, in a fixed order.

    ``should_stop`` is asked between devices; what was not looked at by then proves nothing. Where
    passes may pair, the arguments are those of `optpipe_solver.bounds.pairs`.
    """
    if not problem.is_even:
        return _bounds_of_unequal(problem, should_stop)
    paths = Paths(problem)
    makespan = problem.objective == "makespan"
    energy = energy_ms(paths, makespan=makespan)
    window = 0.0
    model = relaxed(problem)
    for device, before, after in () if should_stop() else _clocks(paths, model):
        rates = _rates(problem, device)
        window = max(window, window_ms(model, problem.stages_of[device], before, after, rates))
        if should_stop():
            break
    found = [Bound(window, "memory-window"), Bound(energy, "memory-energy")]
    if makespan and problem.queues:
        found.append(Bound(max(load.least_ms for load in link_loads(problem)), "link-load"))
    if makespan and problem.has_modes:  # v1 problems keep the results that they had
        found.append(Bound(_drain_ms(paths), "weight-drain"))
    if problem.pairs:
        found += _bounds_with_pairs(problem, should_stop)
    return found


def _bounds_of_unequal(problem: Problem, should_stop: Callable[[], bool]) -> list[Bound]:
    """Return the bounds of the least problem, below all others, and those of the true work."""
    found = [
        Bound(bound.ms, f"{bound.method}, least micro-batches")
        for bound in lower_bounds(problem.least, should_stop=should_stop)
    ]
    return [*found, work_bound(problem)]


def work_bound(problem: Problem) -> Bound:
    """Return the bound of the true work, which holds where micro-batches are unequal too."""
    return Bound(_true_work_ms(problem), "load of unequal micro-batches")


def _true_work_ms(problem: Problem) -> float:
    """Return what the true work of a device and the least ways to it, and from it, ask for.

    Work that may stand before its first I ends, beside the way there, is its longest forwards, as
    many as memory holds of the least; work behind its last I are the longest W whose least contexts
    memory holds. All else lies between, or the device has nothing to do (docs/bounds.md).
    """
    paths, costs = Paths(problem.least), problem.cost_of
    best = 0.0
    for device, held in enumerate(problem.stages_of):
        if not held:
            continue
        cells = [problem.stages[s].under(cost) for s in held for cost in costs]
        load = sum(cell.busy_ms for cell in cells)
        if problem.objective == "span":
            best = max(best, load)
            continue
        room = problem.room_bytes(device)
        modes = [mode for s in held for mode in paths.menus[s]]
        context = min(mode.weight_context_bytes for mode in modes)
        kept = min(mode.least_bytes for mode in modes)
        forwards = _longest(room, kept, [cell.forward_ms for cell in cells])
        left = _longest(room, context, [_weight_ms(cell) for cell in cells])
        first = paths.head_f[held[0]]
        turn = min(
            paths.head_f[s] + paths.problem.stages[s].forward_ms + paths.between[s] for s in held
        )
        begin = max(first, turn - forwards)
        best = max(best, begin + load, begin + load - left + paths.tail[held[0]])
    return best


def _weight_ms(stage: Stage) -> float:
    gradient = min(stage.backward_input_ms, stage.fused_backward_ms)
    return max(0.0, stage.busy_ms - stage.forward_ms - gradient)


def _longest(room: int, size: int, lengths: list[float]) -> float:
    """Return the sum of the longest, as many as there is room for."""
    count = room // size if size else len(lengths)
    return sum(sorted(lengths, reverse=True)[: max(0, count)])


def _drain_ms(paths: Paths) -> float:
    """Return what follows from the W that a device may have left at the end of its last I or B.

    That is of its first stage, and its micro-batch goes on to stage 0. What waits for W stays on
    the device in every mode, where the other arguments take the least that any mode holds.
    """
    problem = paths.problem
    best = 0.0
    for device, held in enumerate(problem.stages_of):
        if held:
            work = problem.num_microbatches * sum(paths.busy[s] for s in held)
            left = _most_weights_ms(paths, device)
            best = max(best, paths.head_f[held[0]] + work - left + paths.tail[held[0]])
    return best


def _most_weights_ms(paths: Paths, device: int) -> float:
    """Return how long the W are at most whose contexts a device can hold at once."""
    problem = paths.problem
    held, m = problem.stages_of[device], problem.num_microbatches
    room = float(problem.room_bytes(device))
    slots = []
    for s in held:
        stage = problem.stages[s]
        least = min(mode.weight_context_bytes for mode in paths.menus[s])
        ms = max(0.0, stage.busy_ms - stage.forward_ms - paths.backward[s])
        slots.append((least / ms if ms else inf, least, ms))
    total = 0.0
    for _, size, ms in sorted(slots):
        most = min(float(m), room / size) if size else float(m)
        most = float(int(most)) if len(held) == 1 else most
        total += most * ms
        room -= most * size
    return total


def _bounds_with_pairs(problem: Problem, should_stop: Callable[[], bool]) -> list[Bound]:
    """Return the bounds of the problem of shorter backwards, and that of the load."""
    found = [
        Bound(bound.ms, f"{bound.method}, shortened backwards")
        for bound in lower_bounds(shortened(problem), should_stop=should_stop)
    ]
    if problem.objective == "makespan":
        found.append(Bound(paired_load_ms(problem), "load with pairs"))
        found.append(Bound(paired_memory_ms(problem), "memory with pairs"))
    return found


def _clocks(paths: Paths, model: Relaxed) -> Iterator[tuple[int, Events, Events]]:
    """Yield devices with the heads and tails that hold on their clock.

    Makespan has one clock. Under span a device's clock runs from its first start to its last end,
    and nothing is known of when others begin. Then so many devices are swept as time allows, those
    with the most work and the longest way to the last stage and back first: the greatest over some
    devices is a bound as well.
    """
    problem = paths.problem
    filling, draining = refill(model), drain(model)
    used = [device for device, held in enumerate(problem.stages_of) if held]
    if problem.objective == "makespan":
        origin = np.zeros(len(problem.stages))
        before, after = heads(model, filling, origin), tails(model, draining, origin)
        for device in used:
            yield device, before, after
        return
    cells = len(problem.stages) * problem.num_microbatches
    used.sort(key=lambda device: -_promise(paths, device))
    for device in used[: max(1, _MOST_CELLS // cells)]:
        origin = np.where(model.device == device, 0.0, ANYTIME)
        yield device, heads(model, filling, origin), tails(model, draining, origin)


def _promise(paths: Paths, device: int) -> float:
    """Return the work of a device plus the longest wait of one micro-batch, in ms."""
    held = paths.problem.stages_of[device]
    load = sum(paths.busy[s] for s in held)
    return paths.problem.num_microbatches * load + max(paths.between[s] for s in held)


def _rates(problem: Problem, device: int) -> Floats:
    """Return the D2H and H2D bandwidth in bytes per ms, 0 where there is none."""
    held = problem.devices[device]
    return np.array([(held.d2h_gb_per_s or 0.0) * 1e6, (held.h2d_gb_per_s or 0.0) * 1e6])
