"""Problems and hand-made programs: small, legal, each with a trait of its own."""

import random
from collections.abc import Iterable, Sequence

from optpipe import Problem, Programs, Provenance, Schedule, evaluate, parse_action
from optpipe.check import find_violations
from optpipe.runtime.offload import Cell
from optpipe.schedule import Action, ActionType
from tests import building

LINEAR = (0, 1, 2, 3)
V_SHAPE = (0, 1, 2, 3, 3, 2, 1, 0)
LOOP = (0, 1, 2, 3, 0, 1, 2, 3)
IRREGULAR = (0, 0, 1, 2, 2, 3, 1, 3)


def make_problem(placement: Sequence[int], num_microbatches: int, limit: int = 1000) -> Problem:
    """Return a problem with unit costs: activations of 4 bytes, 3 of them offloadable."""
    sizes = {"activation_bytes": 4, "weight_context_bytes": 3, "offload_bytes": 3}
    again = {"recompute_ms": 1, "checkpoint_bytes": 1}
    devices = [building.bus(memory_bytes=limit)] * (max(placement) + 1)
    stages = [building.stage(home, **sizes, **again) for home in placement]
    return building.problem(stages, devices, m=num_microbatches)


def make_schedule(problem: Problem, programs: Programs) -> Schedule:
    return evaluate(problem, programs, Provenance(method="by hand"))


def from_text(rows: Iterable[str]) -> Programs:
    return tuple(tuple(parse_action(cell) for cell in row.split()) for row in rows)


one_f_one_b = building.one_f_one_b
"""1F1B with fused backwards, one stage per rank."""


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Programs:
    """1F1B with split backwards; the weight gradients fill the end."""
    from optpipe_solver.families.zero_bubble import build_zb_h1

    return build_zb_h1(make_problem(range(num_ranks), num_microbatches))


def wave(placement: Sequence[int], num_microbatches: int) -> Programs:
    """Programs of any placement in which every stage takes the micro-batches in their order."""
    num_stages = len(placement)
    moments: dict[str, float] = {}
    for stage in range(num_stages):
        for j in range(num_microbatches):
            back = 2 * j + 2 * num_stages - stage
            moments[f"{stage}F{j}"] = 2 * j + stage
            moments[f"{stage}I{j}"] = back
            moments[f"{stage}W{j}"] = back + 3.5
    rows: list[list[str]] = [[] for _ in range(max(placement) + 1)]
    for cell in sorted(moments, key=moments.__getitem__):
        rows[placement[int(cell[0])]].append(cell)
    return from_text(map(" ".join, rows))


def random_programs(
    problem: Problem,
    seed: int,
    *,
    offload: float = 0.0,
    recompute: float = 0.0,
    fused: float = 0.3,
    in_order: bool = False,
    forwards_in_order: bool = False,
) -> Programs:
    """Return legal programs in a random order that respects all waits.

    Parameters
    ----------
    offload, recompute
        Share of the (stage, micro-batch) pairs that are offloaded, that are recomputed.
    fused
        Share of the remaining backwards that are B instead of I and W.
    in_order
        Whether every stage makes its gradients in the order of the micro-batches, so that they are
        added up as in one process.
    forwards_in_order
        Whether every stage runs its forwards in that order, as what draws random numbers must.
    """
    chooser = random.Random(seed)
    waits = _random_waits(problem, chooser, offload, recompute, fused)
    for kinds in [("IB", "WB")] * in_order + [("F",)] * forwards_in_order:
        _keep_order(problem, waits, kinds)
    programs: list[list[Action]] = [[] for _ in problem.devices]
    done: set[str] = set()
    while waits:
        ready = [cell for cell, needed in waits.items() if needed <= done]
        cell = chooser.choice(ready)
        del waits[cell]
        done.add(cell)
        action = parse_action(cell)
        programs[problem.placement[action.stage]].append(action)
    rows = tuple(map(tuple, programs))
    assert not find_violations(problem, rows)
    return rows


def _random_waits(
    problem: Problem, chooser: random.Random, offload: float, recompute: float, fused: float
) -> dict[str, set[str]]:
    """Return every action with those that must come before it, on whichever device."""
    last = len(problem.stages) - 1
    backward_of = {
        (s, j): "B" if chooser.random() < fused else "I"
        for s in range(last + 1)
        for j in range(problem.num_microbatches)
    }
    waits: dict[str, set[str]] = {}
    for (s, j), kind in backward_of.items():
        waits[f"{s}F{j}"] = {f"{s - 1}F{j}"} if s else set()
        before = {f"{s + 1}{backward_of[s + 1, j]}{j}"} if s < last else set()
        draw = chooser.random()
        if draw < offload:
            waits[f"{s}OFFLOAD{j}"] = {f"{s}F{j}"}
            waits[f"{s}RELEASE{j}"] = {f"{s}OFFLOAD{j}"}
            waits[f"{s}RELOAD{j}"] = {f"{s}RELEASE{j}"}
            before.add(f"{s}RELOAD{j}")
        elif draw < offload + recompute:
            waits[f"{s}RECOMPUTE{j}"] = {f"{s}F{j}"}
            before.add(f"{s}RECOMPUTE{j}")
        waits[f"{s}{kind}{j}"] = before | {f"{s}F{j}"}
        if kind == "I":
            waits[f"{s}W{j}"] = {f"{s}I{j}"}
    return waits


def _keep_order(problem: Problem, waits: dict[str, set[str]], kinds_of: Sequence[str]) -> None:
    for s in range(len(problem.stages)):
        for j in range(1, problem.num_microbatches):
            for kinds in kinds_of:
                before, after = (
                    next(f"{s}{kind}{k}" for kind in kinds if f"{s}{kind}{k}" in waits)
                    for k in (j - 1, j)
                )
                waits[after].add(before)


def in_modes(problem: Problem, programs: Programs, number_of: dict[Cell, int]) -> Programs:
    """Return programs of F, I, W and B with cells in modes, and the actions those ask for.

    What a mode has goes to the host behind the F and comes back just before the backward.
    """
    changed: list[tuple[Action, ...]] = []
    for program in programs:
        row: list[Action] = []
        for action in program:
            stage, kind, microbatch, *_ = action
            number = number_of.get(action.cell, 0)
            mode = problem.menus[stage][number]
            away, back = [], []
            if mode.offload_bytes:
                away, back = [ActionType.OFFLOAD, ActionType.RELEASE], [ActionType.RELOAD]
            if mode.recompute == "apart":
                back.append(ActionType.RECOMPUTE)
            if kind.is_backward:
                row += [Action(stage, one, microbatch) for one in back]
            if kind is ActionType.FORWARD:
                row.append(action._replace(mode=number))
                row += [Action(stage, one, microbatch) for one in away]
            else:
                row.append(action)
        changed.append(tuple(row))
    return tuple(changed)


def all_offloaded(problem: Problem) -> Programs:
    """1F1B with split backwards, one stage per device, whose micro-batches all wait on the host."""
    modes = [[mode.name for mode in menu].index("offload") for menu in problem.menus]
    programs = building.one_f_one_b(len(modes), problem.num_microbatches, "IW")
    cells = {action.cell for program in programs for action in program}
    return in_modes(problem, programs, {cell: modes[cell[0]] for cell in cells})
