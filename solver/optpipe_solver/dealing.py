"""Which micro-batch stands where: programs for equal micro-batches, dealt out to unequal ones.

A stand-in has equal micro-batches, with the mean times and the largest or mean sizes of those
that there are; what is known for equal ones makes programs of it. Into their places the
micro-batches are dealt in several orders (`orders`); whoever asks judges each on the problem.

Slices are not dealt: samples are (`whole_samples`), and then cut into their slices (`in_slices`).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from optpipe.problem import Microbatch
from optpipe.schedule import Action, ActionType
from optpipe.stage import OF_STAGE, WORKSPACES, Stage
from optpipe_solver.arrays.encoding import Rows
from optpipe_solver.budget import check_stop
from optpipe_solver.feasibility import serial_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs
    from optpipe_solver.arrays import Ints
    from optpipe_solver.arrays.encoding import CompiledProblem

__all__ = ["dealt", "in_slices", "longest_first", "orders", "stand_ins", "whole_samples"]


_SHUFFLES = 2
_TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms")
_SIZES = ("activation_bytes", "weight_context_bytes", "output_bytes", *WORKSPACES)


def stand_ins(problem: Problem) -> tuple[Problem, ...]:
    """Return problems of equal micro-batches: with the largest sizes of any, and the mean ones.

    What fits the first fits the problem, however it is dealt; of the second it may. Where a stage
    has modes that v1 cannot say, its cells are kept there.
    """
    problems = (_stand_in(problem, largest=True), _stand_in(problem, largest=False))
    return problems[:1] if problems[0] == problems[1] else problems


def _stand_in(problem: Problem, *, largest: bool) -> Problem:
    many = sorted(Counter(problem.cost_of).items())
    stages = tuple(
        _stage([(costs[cost], number) for cost, number in many], costs[0], largest=largest)
        for costs in zip(*problem.stages_by_cost, strict=True)
    )
    even = {"stages": stages, "other_costs": (), "microbatches": (), "order": "free"}
    return problem.model_copy(update=even)


def _stage(costs: list[tuple[Stage, int]], like: Stage, *, largest: bool) -> Stage:
    total = sum(number for _, number in costs)

    def mean(values: list[float]) -> float:
        weighted = zip(values, costs, strict=True)
        return sum(value * number for value, (_, number) in weighted) / total

    def size(values: list[int]) -> int:
        return max(values) if largest else round(mean([float(value) for value in values]))

    fields: dict[str, object] = {name: getattr(like, name) for name in OF_STAGE}
    fields |= {name: mean([getattr(one, name) for one, _ in costs]) for name in _TIMES}
    fields |= {name: size([getattr(one, name) for one, _ in costs]) for name in _SIZES}
    if any(one.backward_ms is not None for one, _ in costs):
        fields["backward_ms"] = mean([one.fused_backward_ms for one, _ in costs])
    if not any(one.modes for one, _ in costs):
        activation_bytes = size([one.activation_bytes for one, _ in costs])
        if all(one.offload_bytes for one, _ in costs):
            left = size([one.activation_bytes - one.offload_bytes for one, _ in costs])
            fields["offload_bytes"] = activation_bytes - left
        again = [(one.recompute_ms, one.checkpoint_bytes) for one, _ in costs]
        if all(ms is not None and kept is not None for ms, kept in again):
            fields["recompute_ms"] = mean([ms or 0.0 for ms, _ in again])
            fields["checkpoint_bytes"] = min(
                activation_bytes, size([kept or 0 for _, kept in again])
            )
    return Stage.model_validate(fields)


def orders(problem: Problem, shuffles: int = _SHUFFLES) -> list[Ints]:
    """Return orders in which micro-batches may be dealt: ``order[k]`` stands where k stood.

    As they are; where the order is free also the longest first and last, long and short in turn,
    the longest and the shortest in the middle, and some at random.
    """
    m = problem.num_microbatches
    given = np.arange(m, dtype=np.int64)
    if problem.order == "given" or problem.num_costs == 1:
        return [given]
    down = longest_first(problem).tolist()
    up = down[::-1]
    in_turn = [j for pair in zip(down, up, strict=True) for j in pair][:m]
    lists = [down, up, in_turn, down[::2][::-1] + down[1::2], up[::2][::-1] + up[1::2]]
    rng = random.Random(0)  # noqa: S311 - no secret
    lists += [rng.sample(range(m), m) for _ in range(shuffles)]
    return [given, *(np.array(order, dtype=np.int64) for order in lists)]


def longest_first(problem: Problem) -> Ints:
    """Return the micro-batches by compute time on all stages, of equal ones the first first."""
    busy_ms = np.array([sum(s.busy_ms for s in stages) for stages in problem.stages_by_cost])
    return np.argsort(-busy_ms[list(problem.cost_of)], kind="stable")


def dealt(compiled: CompiledProblem, rows: Rows, order: Ints) -> Rows:
    """Return programs with ``order[k]`` in the places of micro-batch k.

    Each takes the mode of its place. Of `stand_ins` whose menus v1 cannot say all are kept.
    """
    cells, m = compiled.times.num_cells, compiled.problem.num_microbatches
    stages = np.arange(cells) // m
    renamed = stages * m + order[np.arange(cells) % m]
    kinds, cell = np.divmod(rows.actions, cells)
    modes = np.zeros_like(rows.modes)
    modes[renamed] = rows.modes
    return Rows(kinds * cells + renamed[cell], rows.lengths, modes)


# --- Samples as micro-batches.

_SUMS = ("activation_bytes", "weight_context_bytes", "output_bytes")
_BACK = (
    ActionType.RELOAD,
    ActionType.RECOMPUTE,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)


def whole_samples(problem: Problem) -> Problem:
    """Return the problem whose micro-batches are the samples (`serial_groups`), uncut.

    It takes the sums of its slices' times and bytes; workspaces are the largest of any. Where a
    slice has modes that v1 cannot say, samples are kept.
    """
    groups = serial_groups(problem)
    kinds = {tuple(problem.cost_of[j] for j in group): None for group in groups}
    numbers = {kind: number for number, kind in enumerate(kinds)}
    columns = [
        tuple(
            _sum(stage, [problem.stages_by_cost[cost][s] for cost in kind])
            for s, stage in enumerate(problem.stages)
        )
        for kind in kinds
    ]
    micro = tuple(
        Microbatch(cost=numbers[tuple(problem.cost_of[j] for j in group)]) for group in groups
    )
    update = {"microbatches": micro, "num_microbatches": len(groups)}
    update |= {"stages": columns[0], "other_costs": tuple(zip(*columns[1:], strict=True))}
    return problem.model_copy(update=update)


def _sum(stage: Stage, cells: Sequence[Stage]) -> Stage:
    fields: dict[str, object] = {name: getattr(stage, name) for name in OF_STAGE}
    fields |= {name: sum(getattr(one, name) for one in cells) for name in (*_TIMES, *_SUMS)}
    fields |= {name: max(getattr(one, name) for one in cells) for name in WORKSPACES}
    if any(one.backward_ms is not None for one in cells):
        fields["backward_ms"] = sum(one.fused_backward_ms for one in cells)
    if not any(one.modes for one in cells) and not stage.uniform_modes:
        if all(one.offload_bytes for one in cells):
            fields["offload_bytes"] = sum(one.offload_bytes for one in cells)
        if all(one.can_recompute for one in cells):
            fields["recompute_ms"] = sum(one.recompute_ms or 0.0 for one in cells)
            fields["checkpoint_bytes"] = sum(one.checkpoint_bytes or 0 for one in cells)
    return Stage.model_validate(fields)


def in_slices(problem: Problem, programs: Programs) -> Programs:
    """Return programs of `whole_samples` with each action cut into those of its slices.

    Legal for the problem but for memory: each stands where the whole stood, in order, what goes
    backwards in reverse.
    """
    groups = serial_groups(problem)
    found = []
    for program in programs:
        check_stop()
        found.append(tuple(_cut(program, groups)))
    return tuple(found)


def _cut(program: Program, groups: Sequence[Sequence[int]]) -> Iterator[Action]:
    for action in program:
        group = groups[action.microbatch]
        for j in reversed(group) if action.type in _BACK else group:
            yield action._replace(microbatch=j)
