"""Lower bounds where forwards and backwards may run in pairs.

What F hides is in every bound already (`optpipe_solver.bounds.relaxation.hidden_in_pairs`).

*Shortened backwards.* Take every backward shorter by the most that it can hide in a pair, and allow
no pairs. Any schedule becomes one of that problem, no longer and with the same memory at most: a
pair of ``F + B - x`` becomes B, then F, one after the other in the same time; B ends within the
time of the pair; all else ends no later than it did. It says more where few backwards may pair.

*Pairs begin late.* On a device no pair starts before ``e``, when the first backward there can: each
pair holds one. A path keeps its full times, for a pair lasts at least as long as each of its two
passes (hidden_ms is at most the shorter). Before ``e``, and not before ``h``, when its first
forward can, the device does unpaired forwards at most: whatever else must run there, less what can
hide, runs after ``e``. What hides is at most the sum over forwards, or over backwards, of the most
that each can hide, for each is in one pair at most. Which forwards go before ``e`` is a fractional
knapsack of ``e - h`` ms; taking the best makes the bound valid for all.

*Pairs hold memory.* What hides shortens a device's load; but a pair hands on at its end, so each
pair also makes the ways of two micro-batches longer, and what they hold on the devices that wait
for them is held so much longer. A linear program over how many F and backwards of each stage run
in pairs weighs the one against the other: on each device as many F as backwards do; load, the
F before the first backward being no more than memory has room for; and bytes times ms, of at most
all memory from the first F on, less what filling and draining it, one pass at a time, leaves free.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from optpipe_solver.bounds.relaxation import hidden_in_pairs
from optpipe_solver.milp.highs import LinearProgram

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe.problem import Problem
    from optpipe.stage import Stage

__all__ = ["paired_load_ms", "paired_memory_ms", "shortened"]

_TOLERANCE = 1e-6
"""Share of a linear program's optimum that its solver's tolerances may be worth."""


def shortened(problem: Problem) -> Problem:
    """Return the problem without pairs whose backwards are shorter by what they could hide."""
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
    forward, backward = hidden_in_pairs(problem), _most_hidden(problem)
    stages, m = problem.stages, problem.num_microbatches
    best = 0.0
    for held, (head, first) in zip(problem.stages_of, _begins(problem), strict=True):
        if not held:
            continue
        forwards = [(stages[s].forward_ms, forward[s]) for s in held]
        work, hideable = 0.0, 0.0
        for s in held:
            options = _backward_options(problem, s, backward)
            work += min(ms for ms, _ in options)
            hideable += max(hidden for _, hidden in options)
        before = first - head
        # What hides is counted at the forwards, or at the backwards.
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
            min((heads[s] for s in held), default=inf),
            min((turn + rests[s] for s in held), default=inf),
        )
        for held in problem.stages_of
    ]


def _gradient_ms(stage: Stage) -> float:
    return min(stage.backward_input_ms, stage.fused_backward_ms)


def paired_memory_ms(problem: Problem) -> float:
    """Return the bound of makespans from memory that pairs hold, in ms (see the module).

    It is 0 where anything may be offloaded or recomputed.
    """
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
        held = problem.stages_of[device]
        if not held:
            continue
        both = dict.fromkeys(held, 1.0) | {s + len(stages): -1.0 for s in held}
        program.add_at_most(both, 0.0)
        program.add_at_most({column: -sign for column, sign in both.items()}, 0.0)
        room = float(problem.room_bytes(device))
        per_byte = max(_ratio(stages[s].forward_ms, stages[s].activation_bytes) for s in held)
        before = min(first - head, room * per_byte if per_byte < inf else inf)
        work = m * sum(stages[s].busy_ms for s in held)
        program.add_at_most({s: -hidden[s] for s in held} | {length: -1.0}, before - first - work)
        free = _free(stages, held, room, work - m * sum(hidden[s] for s in held))
        terms, needed = {length: -1.0}, head + free
        for s in held if room > 0 else ():
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


def _free(stages: Sequence[Stage], held: Sequence[int], room: float, least_ms: float) -> float:
    """Return the ms for which all of a device's memory is as good as free, filling and draining.

    ``least_ms`` is how long it computes at least: of it each has half at most.
    """
    fills, drains, largest = 0.0, 0.0, 0.0
    for s in held:
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


def _backward_options(
    problem: Problem, stage: int, backward: Mapping[tuple[int, str], float]
) -> tuple[tuple[float, float], ...]:
    """Return the work of B, and of I and W, in ms, each with the most that it hides."""
    held = problem.stages[stage]
    split = held.backward_input_ms + held.backward_weight_ms
    return (
        (held.fused_backward_ms, backward[stage, "B"]),
        (split, backward[stage, "I"]),
    )


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
