"""The best of all lower bounds, and the bounds from idle time and from pairs.

*Idle time* that memory forces on a device before some moment u and after some moment T - v. Let P
be all work of a device, and D(u, v) an upper bound of its work before u and after T - v together.
If D(u, v) < P, some work is done in between, so u <= T - v, and all that is missing:

    T >= u + v + P - D(u, v).

D is what heads and tails allow and fits into the device's memory (docs/bounds.md).

*Pairs*: where forwards and backwards may run in pairs, every bound already subtracts the time that
F hides (`optpipe_solver.bounds.relaxation.hidden_in_pairs`).

*Shortened backwards.* Take every backward shorter by the maximum that it can hide in a pair, and
allow no pairs. Any schedule becomes a schedule of that problem, with at most the same length and
memory. A pair of ``F + B - x`` becomes B, then F, one after the other in the same time. B ends
within the time of the pair; everything else ends no later than before. This bound is stronger where
few backwards may pair.

*Pairs begin late.* On a device no pair starts before ``e``, when its first backward can start: each
pair holds one. A path keeps its full times. A pair lasts at least as long as each of its two passes
(hidden_ms is at most the shorter). Between ``h``, when its first forward can start, and ``e`` the
device runs unpaired forwards only. All its other work, less the time that pairs can hide, runs
after ``e``. Each pass is in at most one pair. So the hidden time is at most the sum, over forwards
or over backwards, of the maximum that each can hide. Which forwards go before ``e`` is a fractional
knapsack of ``e - h`` ms; taking the best makes the bound valid for all.

*Pairs hold memory.* Hidden time shortens a device's load. But a pair sends its outputs only at its
end, so it lengthens the paths of two micro-batches. Their activations occupy the waiting devices
for longer. A linear program over how many F and backwards of each stage run in pairs weighs the two
effects. Its constraints on each device are:

* as many F as backwards run in pairs;
* the load, where the F before the first backward are at most as many as fit into memory;
* bytes times ms, at most all memory from the first F on, less the memory left free while the device
  fills and drains.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.simulate import link_loads
from optpipe_solver.bounds.energy import energy_ms
from optpipe_solver.bounds.heads_tails import ANYTIME, Events, drain, heads, refill, tails
from optpipe_solver.bounds.relaxation import Paths, hidden_in_pairs, relaxed
from optpipe_solver.budget import check_stop
from optpipe_solver.feasibility import refuse_unless
from optpipe_solver.jit import lean
from optpipe_solver.milp.highs import LinearProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from optpipe.problem import Problem, Stage
    from optpipe_solver.arrays import Flags, Floats, Ints
    from optpipe_solver.bounds.relaxation import Relaxed

__all__ = [
    "Bound",
    "lower_bound",
    "lower_bounds",
    "paired_load_ms",
    "paired_memory_ms",
    "shortened",
    "window_ms",
    "work_bound",
]


# --- Where forwards and backwards may run in pairs.


_TOLERANCE = 1e-6
"""Share of a linear program's optimum that its solver's tolerances may be worth."""


def _refuse_unless_even_makespan(part: str, problem: Problem) -> None:
    is_supported = problem.is_even and problem.objective == "makespan"
    rule = "equal micro-batches in a free order, and the objective makespan"
    refuse_unless(is_supported, part, problem, rule)


def shortened(problem: Problem) -> Problem:
    """Return the problem without pairs whose backwards are shorter by what they could hide."""
    refuse_unless(problem.is_even, "shortened", problem, "equal micro-batches in a free order")
    backward = _most_hidden(problem)
    stages = []
    for index, stage in enumerate(problem.stages):
        changed: dict[str, object] = {
            "backward_input_ms": _less(stage.backward_input_ms, backward[index, "I"]),
        }
        if backward[index, "I"] or backward[index, "B"]:
            changed["backward_ms"] = _less(stage.fused_backward_ms, backward[index, "B"])
        stages.append(stage.model_copy(update=changed))
    return problem.model_copy(update={"stages": tuple(stages), "pairs": ()})


def _less(ms: float, hidden_ms: float) -> float:
    return max(0.0, ms - hidden_ms)


def _most_hidden(problem: Problem) -> Mapping[tuple[int, str], float]:
    """Return the most ms that the backward of a stage hides in a pair, by letter."""
    most: dict[tuple[int, str], float] = defaultdict(float)
    for pair in problem.pairs:
        key = pair.backward, pair.with_
        most[key] = max(most[key], pair.hidden_ms)
    return most


def paired_load_ms(problem: Problem) -> float:
    """Return the bound of makespans from the load of each device, in ms (see the module)."""
    _refuse_unless_even_makespan("paired_load_ms", problem)
    forward, backward = hidden_in_pairs(problem), _most_hidden(problem)
    stages, m = problem.stages, problem.num_microbatches
    best = 0.0
    for indices, (head, first) in zip(problem.stages_of, _begins(problem), strict=True):
        if not indices:
            continue
        forwards = [(stages[s].forward_ms, forward[s]) for s in indices]
        work, hideable = 0.0, 0.0
        for s in indices:
            one = stages[s]
            work += min(one.fused_backward_ms, one.backward_input_ms + one.backward_weight_ms)
            hideable += max(backward[s, "B"], backward[s, "I"])
        before = first - head
        # Hidden time is counted at the forwards, or at the backwards.
        by_forward = m * sum(ms - hidden for ms, hidden in forwards) - _knapsack(
            [(ms, ms - hidden) for ms, hidden in forwards], m, before
        )
        by_backward = m * (sum(ms for ms, _ in forwards) - hideable) - _knapsack(
            [(ms, ms) for ms, _ in forwards], m, before
        )
        best = max(best, first + m * work + by_forward, first + m * work + by_backward)
    return best


def _begins(problem: Problem) -> list[tuple[float, float]]:
    """Return by device when its first F can start, and its first backward, in ms; inf for none."""
    stages = problem.stages
    there, back = zip(*problem.boundary_ms, strict=True)
    starts = list(accumulate((s.forward_ms + t for s, t in zip(stages, there, strict=True))))
    heads = [0.0, *starts[:-1]]
    turn = starts[-1] - there[-1]
    ways = [_gradient_ms(stages[s + 1]) + back[s] for s in range(len(stages) - 1)]
    rests = [*list(accumulate(reversed(ways)))[::-1], 0.0]
    return [
        (
            min((heads[s] for s in indices), default=inf),
            min((turn + rests[s] for s in indices), default=inf),
        )
        for indices in problem.stages_of
    ]


def _gradient_ms(stage: Stage) -> float:
    return min(stage.backward_input_ms, stage.fused_backward_ms)


def paired_memory_ms(problem: Problem) -> float:
    """Return the bound of makespans from memory that pairs hold, in ms (see the module).

    It is 0 where anything may be offloaded or recomputed.
    """
    _refuse_unless_even_makespan("paired_memory_ms", problem)
    if any(len(menu) > 1 for menu in problem.menus):
        return 0.0
    stages, m = problem.stages, problem.num_microbatches
    numbers, length = range(len(stages)), 2 * len(stages)
    later_f, later_b = _added(problem)
    hidden = hidden_in_pairs(problem)
    there, back = zip(*problem.boundary_ms, strict=True)
    hops = [stages[s].forward_ms + _gradient_ms(stages[s]) + there[s] + back[s] for s in numbers]
    ways = [sum(hops[s:]) - there[-1] - back[-1] for s in numbers]
    serial = m * sum(stage.forward_ms + 2 * stage.fused_backward_ms for stage in stages)
    tops = [float(m) if ms < inf else 0.0 for ms in (*later_f, *later_b)]
    program = LinearProgram([*([0.0] * length), -1.0], [*tops, serial + m * sum(ways)])
    for device, (head, first) in enumerate(_begins(problem)):
        indices = problem.stages_of[device]
        if not indices:
            continue
        both = dict.fromkeys(indices, 1.0) | {s + len(stages): -1.0 for s in indices}
        program.add_at_most(both, 0.0)
        program.add_at_most({column: -sign for column, sign in both.items()}, 0.0)
        room = float(problem.room_bytes(device))
        per_byte = max(_ratio(stages[s].forward_ms, stages[s].activation_bytes) for s in indices)
        before = min(first - head, room * per_byte if per_byte < inf else inf)
        work = m * sum(stages[s].busy_ms for s in indices)
        program.add_at_most(
            {s: -hidden[s] for s in indices} | {length: -1.0}, before - first - work
        )
        free = _free(stages, indices, room, work - m * sum(hidden[s] for s in indices))
        terms, needed = {length: -1.0}, head + free
        for s in indices if room > 0 else ():
            check_stop()
            one, bytes_ = stages[s], stages[s].activation_bytes
            rest = max(0.0, one.busy_ms - one.forward_ms - _gradient_ms(one))
            rest *= min(bytes_, one.weight_context_bytes)
            needed += m * (bytes_ * ways[s] + rest) / room
            for other in range(s, len(stages)):
                for column, ms in ((other, later_f), (other + len(stages), later_b)):
                    if ms[other] < inf:
                        terms[column] = terms.get(column, 0.0) + bytes_ * ms[other] / room
            column = s + len(stages)
            terms[column] = terms.get(column, 0.0) - rest / room
        program.add_at_most(terms, -needed)
    return max(0.0, program.best()[length] * (1 - _TOLERANCE))


def _added(problem: Problem) -> tuple[list[float], list[float]]:
    """Return by stage the ms by which its F, and its gradient, come later in a pair, at least.

    Infinite where it is in none.
    """
    stages = problem.stages
    forward, backward = [inf] * len(stages), [inf] * len(stages)
    for pair in problem.pairs:
        here, other = stages[pair.forward], stages[pair.backward]
        alone = other.fused_backward_ms if pair.with_ == "B" else other.backward_input_ms
        rest = alone - pair.hidden_ms
        forward[pair.forward] = min(forward[pair.forward], rest)
        later = here.forward_ms + rest - _gradient_ms(other)
        backward[pair.backward] = min(backward[pair.backward], later)
    return forward, backward


def _free(stages: Sequence[Stage], indices: Sequence[int], room: float, least_ms: float) -> float:
    """Return the ms for which all of a device's memory is as good as free, filling and draining.

    ``least_ms`` is how long it computes at least: of it each has half at most.
    """
    fills, drains, largest = 0.0, 0.0, 0.0
    for s in indices:
        one = stages[s]
        bytes_, context = one.activation_bytes, one.weight_context_bytes
        fills = max(fills, _ratio(bytes_, one.forward_ms))
        drains = max(
            drains,
            _ratio(bytes_, one.fused_backward_ms),
            _ratio(bytes_ - context, one.backward_input_ms),
            _ratio(context, one.backward_weight_ms),
        )
        largest = max(largest, bytes_, context)
    found, most = 0.0, room - largest
    for rate in (fills, drains):
        if 0 < rate < inf and most > 0:
            ms = min(most / rate, least_ms / 2)
            found += ms * most - rate * ms**2 / 2
    return found / room if room > 0 else 0.0


def _ratio(part: float, whole: float) -> float:
    if part <= 0:
        return 0.0
    return part / whole if whole > 0 else inf


def _knapsack(items: Sequence[tuple[float, float]], number: int, room_ms: float) -> float:
    """Return the most worth of (ms, worth) that fits, ``number`` of each and parts of them."""
    worth = 0.0
    for ms, value in sorted(items, key=lambda item: -item[1] / item[0] if item[0] > 0 else 0.0):
        if ms <= 0 or value <= 0:
            continue
        taken = min(number * ms, max(0.0, room_ms))
        worth += value / ms * taken
        room_ms -= taken
    return worth


# --- Idle time that memory forces on a device.


_MOST = 96


class _Slots(NamedTuple):
    """Pieces by work per byte: ms, bytes, index of the stage on its device, 0 F, 1 I, 2 W."""

    work: Floats
    size: Floats
    stage: Ints
    kind: Ints


class _Device(NamedTuple):
    """One device: pieces per stage in ms and bytes, as in `Relaxed`, its room, and its lanes.

    ``rate`` is the D2H and H2D bandwidth in bytes per ms. ``carried`` is the maximum bytes
    offloaded at a time. ``moves`` flags stages that can be offloaded.
    """

    num_microbatches: int
    forward: Floats
    gradient: Floats
    weight: Floats
    keep: Floats
    context: Floats
    moves: Flags
    carried: float
    rate: Floats
    room_before: float
    room_after: float
    first: _Slots
    last: _Slots


class _Side(NamedTuple):
    """Moments in ms; per moment and stage how many F, I, W are possible; bytes for the knapsack."""

    time: Floats
    forwards: Ints
    gradients: Ints
    weights: Ints
    free: Floats


def window_ms(
    model: Relaxed, stages: Sequence[int], heads: Events, tails: Events, rate: Floats
) -> float:
    """Return the bound of one device with these stages; ``rate`` as in `_Device`."""
    chosen = np.array(stages, dtype=np.int64)
    device = _device(model, chosen, rate)
    # One layout in memory, so that the compiled code needs one signature.
    before, after = (
        Events(*(np.ascontiguousarray(times[:, chosen]) for times in events))
        for events in (heads, tails)
    )
    early, late = _before(device, before), _after(device, after)
    # A side with one moment at which nothing has been possible yet.
    none = np.zeros((1, len(stages)), np.int64)
    nothing = _Side(np.zeros(1), none, none, none, np.zeros(1))
    tried_early = np.empty(min(len(early.time), _MOST), np.int64)
    tried_late = np.empty(min(len(late.time), _MOST), np.int64)
    return float(_best_pair(device, early, late, nothing, (tried_early, tried_late)))


def _device(model: Relaxed, stages: Ints, rate: Floats) -> _Device:
    forward, gradient, weight = (
        times[stages] for times in (model.forward, model.gradient, model.weight)
    )
    keep, context, index = model.keep[stages], model.context[stages], np.arange(len(stages))
    paired = gradient * context > weight * (keep - context)
    backward_rooms = np.maximum(model.room_gradient[stages], model.room_weight[stages])
    return _Device(
        num_microbatches=model.num_microbatches,
        forward=forward,
        gradient=gradient,
        weight=weight,
        keep=keep,
        context=context,
        moves=model.moved[stages] > 0,
        carried=float(np.sum(model.moved[stages] * model.most_away[stages])),
        rate=rate,
        room_before=float(np.max(model.room_forward[stages])),
        room_after=float(np.max(backward_rooms)),
        first=_by_density(forward, keep, index, np.zeros_like(index)),
        # If W is worth more per byte, it comes first in the knapsack anyway: slots of I and of W.
        # Otherwise the best use of bytes is I with its W, then W alone.
        last=_by_density(
            np.concatenate([gradient + np.where(paired, weight, 0.0), weight]),
            np.concatenate([np.where(paired, keep, keep - context), context]),
            np.concatenate([index, index]),
            np.concatenate([np.ones_like(index), np.where(paired, 3, 2)]),
        ),
    )


def _by_density(work: Floats, size: Floats, stage: Ints, kind: Ints) -> _Slots:
    """Sort slots by work per byte, those without bytes first."""
    density = np.divide(work, size, out=np.full(len(work), np.inf), where=size > 0)
    order = np.argsort(-density, kind="stable")
    return _Slots(work[order], size[order], stage[order], kind[order])


@lean
def _best_pair(
    device: _Device, before: _Side, after: _Side, nothing: _Side, tried: tuple[Ints, Ints]
) -> float:
    per_microbatch = 0.0
    for n in range(len(device.forward)):
        per_microbatch += device.forward[n] + device.gradient[n] + device.weight[n]
    total = device.num_microbatches * per_microbatch
    # Less than a billionth of the total is taken for rounding, not for work.
    least = total * (1 - 1e-9)
    best = total
    early, late = tried
    for share in range(len(early)):
        early[share] = _most_idle(device, before, nothing, share, len(early), True)
    for share in range(len(late)):
        late[share] = _most_idle(device, after, nothing, share, len(late), False)
    for u in early:
        for v in late:
            length = before.time[u] + after.time[v] + total
            # Even if nothing could be done, it would be no better than the best.
            if length > best:
                done = _done(device, before, u, after, v)
                if done < least:
                    best = max(best, length - done)
    return best


@lean
def _most_idle(  # noqa: PLR0917 - compiled code takes its arguments by position
    device: _Device, side: _Side, nothing: _Side, share: int, shares: int, is_before: bool
) -> int:
    """Return the moment with the most idle time of one of equal shares."""
    num = len(side.time)
    chosen, most = 0, -np.inf
    for at in range(share * num // shares, (share + 1) * num // shares):
        before, u, after, v = (side, at, nothing, 0) if is_before else (nothing, 0, side, at)
        idle = side.time[at] - _done(device, before, u, after, v)
        if idle > most:
            most, chosen = idle, at
    return chosen


@lean
def _done(device: _Device, before: _Side, u: int, after: _Side, v: int) -> float:
    """Return D for the u-th and v-th moments."""
    m, num = device.num_microbatches, len(device.forward)
    work, room = 0.0, before.free[u]
    for n in range(num):
        work += before.gradients[u, n] * device.gradient[n]
        work += before.weights[u, n] * device.weight[n]
        work += after.forwards[v, n] * device.forward[n]
    for slot in range(num):
        n = device.first.stage[slot]
        most = float(min(before.forwards[u, n], m - after.forwards[v, n]))
        fits = _fitting(most, room, device.first.size[slot])
        if num == 1:
            fits = np.floor(fits)
        work += fits * device.first.work[slot]
        room -= fits * device.first.size[slot]
    room = after.free[v]
    for slot in range(2 * num):
        n, kind = device.last.stage[slot], device.last.kind[slot]
        weights = min(after.weights[v, n], m - before.weights[u, n])
        gradients = min(after.gradients[v, n], m - before.gradients[u, n], weights)
        most = float(gradients if kind == 1 else weights - (gradients if kind == 3 else 0))
        fits = _fitting(most, room, device.last.size[slot])
        work += fits * device.last.work[slot]
        room -= fits * device.last.size[slot]
    return work


@lean
def _fitting(most: float, room: float, size: float) -> float:
    return min(most, max(0.0, room) / size) if size > 0 else most


def _moments(events: Events) -> Floats:
    """Return all times at which a piece of the device becomes possible, in order."""
    return np.unique(np.concatenate([times.ravel() for times in events]))


def _counts(times: Floats, delay: Floats, moments: Floats) -> Ints:
    """Return, per moment and stage, how many of the times plus delay are before it."""
    counts = np.zeros((len(moments), times.shape[1]), np.int64)
    _count(times, delay, moments, counts)
    return counts


@lean
def _count(times: Floats, delay: Floats, moments: Floats, counts: Ints) -> None:
    for n in range(times.shape[1]):
        count = 0
        for at in range(len(moments)):
            while count < len(times) and times[count, n] + delay[n] < moments[at]:
                count += 1
            counts[at, n] = count


def _carried(device: _Device, begins: Floats, rate: float, moments: Floats) -> Floats:
    """Return the bytes the lane can have carried: it starts when some stage's transfer can."""
    earliest = np.min(begins[device.moves])
    return np.minimum(device.carried, rate * np.maximum(0.0, moments - earliest))


def _before(device: _Device, heads: Events) -> _Side:
    moments, now = _moments(heads), np.zeros(len(device.forward))
    free = np.full(len(moments), device.room_before)
    if device.rate[0] > 0 and np.any(device.moves):
        free += _carried(device, heads.forward[0] + device.forward, device.rate[0], moments)
    freed = _counts(heads.gradient, device.gradient, moments) * (device.keep - device.context)
    freed += _counts(heads.weight, device.weight, moments) * device.context
    return _Side(
        moments,
        _counts(heads.forward, now, moments),
        _counts(heads.gradient, now, moments),
        _counts(heads.weight, now, moments),
        free + sum(freed.T),
    )


def _after(device: _Device, tails: Events) -> _Side:
    moments, now = _moments(tails), np.zeros(len(device.forward))
    free = np.full(len(moments), device.room_after)
    if device.rate[1] > 0 and np.any(device.moves):
        free += _carried(device, tails.gradient[0] + device.gradient, device.rate[1], moments)
    forwards = _counts(tails.forward, now, moments)
    return _Side(
        moments,
        forwards,
        _counts(tails.gradient, now, moments),
        _counts(tails.weight, now, moments),
        free + sum((forwards * device.keep).T),
    )


# --- The best of all bounds.


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

    The function calls ``should_stop`` between devices; devices that it has not reached by then add
    nothing. For problems with pairs it uses the arguments of `optpipe_solver.bounds.bound`.
    """
    if not problem.is_even:
        found = [
            Bound(bound.ms, f"{bound.method}, least micro-batches")
            for bound in lower_bounds(problem.least, should_stop=should_stop)
        ]
        return found if problem.pairs else [*found, work_bound(problem)]
    paths = Paths(problem)
    makespan = problem.objective == "makespan"
    energy = energy_ms(paths, makespan=makespan)
    window = 0.0
    model = relaxed(problem)
    for device, before, after in () if should_stop() else _clocks(paths, model):
        one = problem.devices[device]
        rates = np.array([(one.d2h_gb_per_s or 0.0) * 1e6, (one.h2d_gb_per_s or 0.0) * 1e6])
        window = max(window, window_ms(model, problem.stages_of[device], before, after, rates))
        if should_stop():
            break
    found = [Bound(window, "memory-window"), Bound(energy, "memory-energy")]
    if makespan and problem.queues:
        found.append(Bound(max(load.least_ms for load in link_loads(problem)), "link-load"))
    if makespan and problem.has_modes:  # v1 problems keep the results that they had
        found.append(Bound(_drain_ms(paths), "weight-drain"))
    if problem.pairs:
        found += [
            Bound(bound.ms, f"{bound.method}, shortened backwards")
            for bound in lower_bounds(shortened(problem), should_stop=should_stop)
        ]
    if makespan and problem.pairs:
        found.append(Bound(paired_load_ms(problem), "load with pairs"))
        found.append(Bound(paired_memory_ms(problem), "memory with pairs"))
    return found


def work_bound(problem: Problem) -> Bound:
    """Return the bound from the true work of a device and the minimum times before and after it.

    It holds where micro-batches are unequal too. Before its first I, the device runs at most its
    longest forwards, as many as fit into memory at the minimum bytes. After its last I, it runs at
    most the longest W whose minimum contexts fit. It runs all other work in between, or is idle
    (docs/bounds.md). `InputError` where the problem has pairs, because they hide work.
    """
    refuse_unless(not problem.pairs, "work_bound", problem, "problems without pairs")
    paths, costs = Paths(problem.least), problem.cost_of
    best = 0.0
    for device, stages in enumerate(problem.stages_of):
        if not stages:
            continue
        cells = [problem.stages_by_cost[cost][s] for s in stages for cost in costs]
        load = sum(cell.busy_ms for cell in cells)
        if problem.objective == "span":
            best = max(best, load)
            continue
        room = problem.room_bytes(device)
        modes = [mode for s in stages for mode in paths.menus[s]]
        context = min(mode.weight_context_bytes for mode in modes)
        kept = min(mode.least_bytes for mode in modes)
        forwards = _longest(room, kept, [cell.forward_ms for cell in cells])
        left = _longest(room, context, [_weight_ms(cell) for cell in cells])
        first = paths.head_f[stages[0]]
        turn = min(
            paths.head_f[s] + paths.problem.stages[s].forward_ms + paths.between[s] for s in stages
        )
        begin = max(first, turn - forwards)
        best = max(best, begin + load, begin + load - left + paths.tail[stages[0]])
    return Bound(best, "load of unequal micro-batches")


def _weight_ms(stage: Stage) -> float:
    gradient = min(stage.backward_input_ms, stage.fused_backward_ms)
    return max(0.0, stage.busy_ms - stage.forward_ms - gradient)


def _longest(room: int, size: int, lengths: list[float]) -> float:
    """Return the sum of the longest, as many as fit into ``room``."""
    count = room // size if size else len(lengths)
    return sum(sorted(lengths, reverse=True)[: max(0, count)])


def _drain_ms(paths: Paths) -> float:
    """Return the bound from the W that a device may still have to run after its last I or B.

    That I or B is of its first stage, and its micro-batch goes on to stage 0. The context of a
    waiting W stays on the device in every mode. So only W whose contexts fit together may wait. The
    other arguments use the minimum that any mode holds.
    """
    problem = paths.problem
    m, best = problem.num_microbatches, 0.0
    for device, stages in enumerate(problem.stages_of):
        if not stages:
            continue
        slots = []
        for s in stages:
            least = min(mode.weight_context_bytes for mode in paths.menus[s])
            ms = _weight_ms(problem.stages[s])
            slots.append((least / ms if ms else inf, least, ms))
        room, left = float(problem.room_bytes(device)), 0.0
        for _, size, ms in sorted(slots):
            most = min(float(m), room / size) if size else float(m)
            most = float(int(most)) if len(stages) == 1 else most
            left += most * ms
            room -= most * size
        work = m * sum(paths.busy[s] for s in stages)
        best = max(best, paths.head_f[stages[0]] + work - left + paths.tail[stages[0]])
    return best


def _clocks(paths: Paths, model: Relaxed) -> Iterator[tuple[int, Events, Events]]:
    """Yield devices with the heads and tails that hold on their clock.

    Makespan has one clock. Under span a device's clock runs from its first start to its last end,
    and the starts of other devices are unknown. Only as many devices are swept as time allows.
    Devices with the most work and the longest way to the last stage and back come first. The
    maximum over some devices is a bound as well.
    """
    problem = paths.problem
    filling, draining = refill(model), drain(model)
    used = [device for device, stages in enumerate(problem.stages_of) if stages]
    if problem.objective == "makespan":
        origin = np.zeros(len(problem.stages))
        before, after = heads(model, filling, origin), tails(model, draining, origin)
        for device in used:
            yield device, before, after
        return
    cells = len(problem.stages) * problem.num_microbatches

    def least_span_ms(device: int) -> float:
        """Return the work of a device plus the longest wait of one micro-batch."""
        stages = problem.stages_of[device]
        load = sum(paths.busy[s] for s in stages)
        return problem.num_microbatches * load + max(paths.between[s] for s in stages)

    used.sort(key=least_span_ms, reverse=True)
    for device in used[: max(1, _MOST_CELLS // cells)]:
        origin = np.where(model.device == device, 0.0, ANYTIME)
        yield device, heads(model, filling, origin), tails(model, draining, origin)
