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
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING

from optpipe_solver.bounds.relaxation import hidden_in_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe.problem import Problem

__all__ = ["paired_load_ms", "shortened"]


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
    there, back = zip(*problem.boundary_ms, strict=True)
    least = [min(stage.backward_input_ms, stage.fused_backward_ms) for stage in stages]
    # When F of each stage can start first, and its backward.
    starts = list(accumulate((s.forward_ms + t for s, t in zip(stages, there, strict=True))))
    heads = [0.0, *starts[:-1]]
    turn = starts[-1] - there[-1]
    ways = [least[s + 1] + back[s] for s in range(len(stages) - 1)]
    rests = [*list(accumulate(reversed(ways)))[::-1], 0.0]
    best = 0.0
    for held in problem.stages_of:
        if not held:
            continue
        head = min(heads[s] for s in held)
        first = min(turn + rests[s] for s in held)
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
