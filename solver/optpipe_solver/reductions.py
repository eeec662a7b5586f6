"""Problems that are solved instead of another, and how their programs become programs of that.

A `Reduction` is a problem with fewer choices (no offload, narrower menus, no pairs), with equal
micro-batches, or with whole samples instead of slices. ``lift`` turns its programs into programs of
the original problem. Each function below says which times and limits the lifted programs keep.

Relaxations have more schedules than the original. The modules that prove bounds define them.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.memory import modes_of
from optpipe.problem import Microbatch
from optpipe.schedule import ActionType
from optpipe.stage import KEEP_ALONE, OF_STAGE, WORKSPACES, Stage
from optpipe_solver.budget import check_stop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from optpipe.problem import CellMode, Problem
    from optpipe.schedule import Programs

__all__ = [
    "Reduction",
    "fewer_choices",
    "kept_alone",
    "longest_first",
    "narrow_menus",
    "one_group",
    "orders",
    "projections",
    "serial_groups",
    "stand_ins",
    "whole_samples",
]


class Reduction(NamedTuple):
    """A problem, its name, and the function that turns its programs into ones of the original."""

    name: str
    problem: Problem
    lift: Callable[[Programs], Programs] = lambda programs: programs


# --- Fewer choices: lifted programs are as long in the original, and hold no more bytes.


def fewer_choices(problem: Problem) -> tuple[Reduction, ...]:
    """Return reductions without some choices of the problem, the strictest first.

    They have no pairs, narrower menus (see `narrow_menus`), or no offload, no recomputation or
    neither. Some may have no schedule.
    """
    if problem.pairs:
        alone = problem.model_copy(update={"pairs": ()})
        return (Reduction("without pairs", alone), *fewer_choices(alone))
    if problem.has_modes:
        return narrow_menus(problem)
    offload: dict[str, object] = {"offload_bytes": 0}
    recompute: dict[str, object] = {"recompute_ms": None, "checkpoint_bytes": None}
    can_offload = any(problem.can_offload(s) for s in range(len(problem.stages)))
    can_recompute = any(stage.can_recompute for stage in problem.stages)
    without = {
        "without offload and recompute": (can_offload and can_recompute, offload | recompute),
        "without offload": (can_offload, offload),
        "without recompute": (can_recompute, recompute),
    }
    return tuple(
        Reduction(name, _with_stages(problem, [s.model_copy(update=less) for s in problem.stages]))
        for name, (is_less, less) in without.items()
        if is_less
    )


def _with_stages(problem: Problem, stages: Sequence[Stage]) -> Problem:
    return problem.model_copy(update={"stages": tuple(stages)})


class _Rule(NamedTuple):
    """How the modes of each stage of a projection are chosen.

    ``share`` says how far along its modes without transfers, from the fastest to the leanest, the
    base of a stage is. None means: as far as its device must go to hold what 1F1B holds. ``lean``:
    take the leanest of the modes that recompute. ``offloads``, ``recomputes``: take one of them.
    """

    name: str
    share: float | None
    lean: bool
    offloads: bool = True
    recomputes: bool = True


_PROJECTIONS = (
    _Rule("of three modes", 0.0, True),
    _Rule("of three quick modes", 0.0, False),
    _Rule("as full as 1F1B", None, True),
    _Rule("half lean", 0.5, True),
    _Rule("lean", 1.0, True),
)
_PARTS = (
    _Rule("of keep and offload", 0.0, True, recomputes=False),
    _Rule("of keep and recompute", 0.0, True, offloads=False),
)

_Numbers = tuple[tuple[int, ...], ...]
"""Per stage, the numbers in the original menu of the modes that a narrower menu has."""


def projections(problem: Problem) -> tuple[Reduction, ...]:
    """Return v1 problems with at most three modes per stage, those of v1's menu first.

    The base of each stage is keep or a mode with recomputation inside: the fastest, the leanest, or
    one between. The menu adds one mode that offloads and one that recomputes apart, if they differ
    from the base in nothing else.
    """
    return tuple(_projections(problem, _PROJECTIONS).values())


def narrow_menus(problem: Problem) -> tuple[Reduction, ...]:
    """Return problems with narrower menus to search in, v1's menu first, then parts of it.

    If all micro-batches of a stage must use one mode, v1 cannot express its menu. Then the first
    problem has that rule too, and a menu of three modes.
    """
    if not any(stage.uniform_modes for stage in problem.stages):
        (modes, first), *others = _projections(problem, _PROJECTIONS).items()
        parts = _projections(problem, _PARTS).items()
        return (first, *(one for known, one in parts if known != modes), *(o for _, o in others))
    numbers = []
    for s, stage in enumerate(problem.stages):
        chosen = _with_offload_and_recompute(problem, s, 0, lean=True)
        numbers.append(chosen if stage.modes else tuple(range(len(problem.menus[s]))))
    if [len(chosen) for chosen in numbers] == [len(menu) for menu in problem.menus]:
        return projections(problem)
    stages = [
        stage.model_copy(update={"modes": tuple(stage.modes[k] for k in chosen)})
        if stage.modes
        else stage
        for stage, chosen in zip(problem.stages, numbers, strict=True)
    ]
    short = _narrower(problem, "of three modes", _with_stages(problem, stages), tuple(numbers))
    return (short, *projections(problem))


def kept_alone(problem: Problem) -> Problem:
    """Return the problem in which every stage keeps; it may exceed its memory limits."""
    stages = zip(problem.stages, problem.menus, strict=True)
    return _with_stages(problem, [_projected(stage, menu[:1]) for stage, menu in stages])


def _narrower(problem: Problem, name: str, less: Problem, numbers: _Numbers) -> Reduction:
    return Reduction(name, less, partial(_name_modes, problem, less, numbers))


def _name_modes(
    original: Problem, less: Problem, numbers: _Numbers, programs: Programs
) -> Programs:
    lifted = []
    for program in programs:
        modes = modes_of(less, program)
        lifted.append(
            tuple(
                action._replace(mode=numbers[action.stage][modes[action.cell]])
                if action.type is ActionType.FORWARD and original.stages[action.stage].modes
                else action
                for action in program
            )
        )
    return tuple(lifted)


def _projections(problem: Problem, rules: Sequence[_Rule]) -> dict[_Numbers, Reduction]:
    lines = [_bases(menu) for menu in problem.menus]
    found: dict[_Numbers, Reduction] = {}
    for rule in rules:
        numbers = []
        for s, line in enumerate(lines):
            share = rule.share
            if share is None:
                share = _share_of(problem, lines, problem.placement[s])
            numbers.append(_chosen(problem, s, _along(line, share), rule))
        menus = [
            tuple(menu[k] for k in chosen)
            for menu, chosen in zip(problem.menus, numbers, strict=True)
        ]
        less = _with_stages(problem, list(map(_projected, problem.stages, menus)))
        known = tuple(numbers)
        found.setdefault(known, _narrower(problem, rule.name, less, known))
    return found


def _chosen(problem: Problem, s: int, base: int, rule: _Rule) -> tuple[int, ...]:
    if problem.stages[s].uniform_modes:
        return (base,)
    base, *others = _with_offload_and_recompute(problem, s, base, lean=rule.lean)
    allowed = {True: rule.offloads, False: rule.recomputes}
    menu = problem.menus[s]
    return (base, *(k for k in others if allowed[bool(menu[k].offload_bytes)]))


def _along(line: list[int], share: float) -> int:
    return line[round(share * (len(line) - 1))]


def _share_of(problem: Problem, lines: list[list[int]], device: int) -> float:
    """Return how far a device's stages go along their lines so that 1F1B fits; 1 if nothing does.

    Between its F and its backward a micro-batch passes all later stages, while each device starts
    one of them per round of its own stages.
    """
    stages, m = problem.stages_of[device], problem.num_microbatches
    last, rounds = len(problem.stages), max(1, len(stages))
    in_flight = {s: min(m, -(-(last - s) // rounds)) for s in stages}
    room = problem.room_bytes(device)
    steps = max((len(lines[s]) - 1 for s in stages), default=0)
    for step in range(steps):
        chosen = {s: problem.menus[s][_along(lines[s], step / steps)] for s in stages}
        if sum(in_flight[s] * mode.forward_bytes for s, mode in chosen.items()) <= room:
            return step / steps
    return 1.0


def _bases(menu: tuple[CellMode, ...]) -> list[int]:
    """Return the modes without actions of their own, fastest first, each leaner than all before."""
    plain = [k for k, mode in enumerate(menu) if not mode.offload_bytes]
    plain = [k for k in plain if menu[k].recompute != "apart"]
    line: list[int] = []
    for k in sorted(plain, key=lambda k: (menu[k].inside_ms, menu[k].forward_bytes)):
        if not line or menu[k].forward_bytes < menu[line[-1]].forward_bytes:
            line.append(k)
    return line


def _with_offload_and_recompute(
    problem: Problem, s: int, base: int, *, lean: bool
) -> tuple[int, ...]:
    """Return a base, the mode that offloads most and one that recomputes, if there are any.

    ``lean``: take the mode that keeps fewest bytes, instead of the one that saves most per ms.
    """
    menu, known = problem.menus[s], problem.menus[s][base]
    usable = [k for k in range(len(menu)) if problem.can_use(s, k)]
    away = [
        k
        for k in usable
        if menu[k].offload_bytes
        and menu[k].forward_bytes == known.forward_bytes
        and menu[k].recompute != "apart"
        and menu[k].inside_ms == known.inside_ms
    ]
    again = [
        k
        for k in usable
        if menu[k].recompute == "apart"
        and not menu[k].offload_bytes
        and known.forward_bytes == known.activation_bytes
        and known.inside_ms == 0
    ]

    def saved_per_ms(k: int) -> float:
        saved = menu[k].activation_bytes - menu[k].forward_bytes
        return saved if lean else saved / (menu[k].recompute_ms + 1e-9)

    offload = [max(away, key=lambda k: menu[k].offload_bytes)] if away else []
    return (base, *offload, *([max(again, key=saved_per_ms)] if again else []))


def _projected(stage: Stage, used: tuple[CellMode, ...]) -> Stage:
    """Return a v1 stage with the modes base, offload and recompute, and the most bytes of any."""
    base = used[0]
    offload_bytes = max(mode.offload_bytes for mode in used)
    again = next((mode for mode in used if mode.recompute == "apart"), None)
    inside = max(mode.inside_bytes for mode in used)
    most = {name: max(getattr(mode, name) for mode in used) for name in WORKSPACES}
    most["backward_input_workspace_bytes"] += inside
    most["backward_workspace_bytes"] += inside
    update = most | {
        "modes": (),
        "uniform_modes": False,
        "backward_input_ms": stage.backward_input_ms + base.inside_ms,
        "backward_ms": stage.fused_backward_ms + base.inside_ms,
        "activation_bytes": base.forward_bytes,
        "weight_context_bytes": max(mode.weight_context_bytes for mode in used),
        "offload_bytes": offload_bytes,
        "recompute_ms": None if again is None else again.recompute_ms,
        "checkpoint_bytes": None if again is None else again.forward_bytes,
    }
    return stage.model_copy(update=update)


# --- Equal micro-batches in place of unequal ones.

_SHUFFLES = 2
_TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms")
_SIZES = ("activation_bytes", "weight_context_bytes", "output_bytes", *WORKSPACES)


def stand_ins(problem: Problem) -> tuple[Reduction, ...]:
    """Return problems of equal micro-batches: with the largest sizes of any, and the mean ones.

    All times are means. Lifted programs of the first keep the memory limits in each of `orders`,
    those of the second may not. A stage with menus of v2 keeps.
    """
    largest, mean = (_stand_in(problem, largest=largest) for largest in (True, False))
    found = (Reduction("largest", largest), Reduction("mean", mean))
    return found[:1] if largest == mean else found


def _stand_in(problem: Problem, *, largest: bool) -> Problem:
    many = sorted(Counter(problem.cost_of).items())
    stages = tuple(
        _mean_stage([(costs[cost], number) for cost, number in many], costs[0], largest=largest)
        for costs in zip(*problem.stages_by_cost, strict=True)
    )
    even = {"stages": stages, "other_costs": (), "microbatches": (), "order": "free"}
    return problem.model_copy(update=even)


def _mean_stage(costs: list[tuple[Stage, int]], like: Stage, *, largest: bool) -> Stage:
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


def orders(problem: Problem, shuffles: int = _SHUFFLES) -> list[NDArray[np.int64]]:
    """Return orders for `CompiledProblem.deal`: ``order[k]`` takes the place of micro-batch k.

    The first is the given order. If the order is free, these follow:

    * the longest micro-batches first, or last;
    * long and short ones in turn;
    * the longest or the shortest ones in the middle;
    * random orders.
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


def longest_first(problem: Problem) -> NDArray[np.int64]:
    """Return the micro-batches by compute time on all stages; equal ones keep their order."""
    busy_ms = np.array([sum(s.busy_ms for s in stages) for stages in problem.stages_by_cost])
    return np.argsort(-busy_ms[list(problem.cost_of)], kind="stable")


# --- Samples in place of slices.

_SUMS = ("activation_bytes", "weight_context_bytes", "output_bytes")
_IN_REVERSE = (
    ActionType.RELOAD,
    ActionType.RECOMPUTE,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)


def serial_groups(problem: Problem) -> list[tuple[int, ...]]:
    """Return what serial execution runs one after the other: micro-batches, or whole samples.

    If the order is given and other micro-batches lie between the slices of a sample, all of them
    are one group.
    """
    if problem.order == "free":
        return list(problem.samples)
    last = {j: sample[-1] for sample in problem.samples for j in sample}
    groups: list[tuple[int, ...]] = []
    begin = until = 0
    for j in range(problem.num_microbatches):
        until = max(until, last[j])
        if j == until:
            groups.append(tuple(range(begin, j + 1)))
            begin = until = j + 1
    return groups


def one_group(problem: Problem, group: Sequence[int]) -> Reduction:
    """Return the problem of one micro-batch whose stages are the cells of a serial group.

    Lifted programs have micro-batches 0, 1, ... of the group, and hold the same bytes. A stage
    whose cells must all use one mode keeps, unless the group is one micro-batch.
    """
    if len(group) == 1:
        return Reduction("one micro-batch", problem.alike(problem.cost_of[group[0]], 1))
    stages = []
    for s, stage in enumerate(problem.stages):
        for at, j in enumerate(group):
            fields: dict[str, object] = {"uniform_modes": False}
            if at:
                fields["static_bytes"] = 0
            if stage.uniform_modes:
                fields |= KEEP_ALONE
            stages.append(problem.stage_of(s, j).model_copy(update=fields))
    update = {
        "stages": tuple(stages),
        "other_costs": (),
        "microbatches": (),
        "order": "free",
        "num_microbatches": 1,
        "context": None,
    }
    return Reduction("one sample", problem.model_copy(update=update), partial(_fold, len(group)))


def _fold(count: int, programs: Programs) -> Programs:
    return tuple(
        tuple(
            action._replace(stage=action.stage // count, microbatch=action.stage % count)
            for action in program
        )
        for program in programs
    )


def whole_samples(problem: Problem) -> Reduction:
    """Return the problem whose micro-batches are the samples (`serial_groups`).

    Times and bytes of a sample are the sums of its slices, workspaces the largest of any. A sample
    with menus of v2 keeps. Lifted programs replace each action by those of the sample's slices, in
    order, backward actions in reverse. They are legal, except that they may exceed memory limits.
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
    return Reduction("whole samples", problem.model_copy(update=update), partial(_slice, groups))


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


def _slice(groups: Sequence[Sequence[int]], programs: Programs) -> Programs:
    found = []
    for program in programs:
        check_stop()
        found.append(
            tuple(
                action._replace(microbatch=j)
                for action in program
                for j in groups[action.microbatch][:: -1 if action.type in _IN_REVERSE else 1]
            )
        )
    return tuple(found)
