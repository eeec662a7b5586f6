"""Random legal programs in which some actions keep the order of the micro-batches."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from optpipe import Action, ActionType, Problem, Programs, check
from optpipe.schedule import input_of
from tests.building import UNIT, bus, problem, stage

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

F, I, W, B = (  # noqa: E741 - DESIGN's letters
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
ROUND_TRIP = (ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD)
Lives = dict[tuple[int, int], list[ActionType]]


def random_problem(placement: list[int], m: int, rng: random.Random) -> Problem:
    """Return a problem with whole times, many of them 0, and links that some pairs share."""
    count = max(placement) + 1
    stages = [
        stage(
            device, rng.randrange(4), rng.randrange(4), rng.randrange(3), output_bytes=UNIT,
            activation_bytes=UNIT, offload_bytes=UNIT, grad_sync_ms=rng.randrange(2),
        )
        for device in placement
    ]  # fmt: skip
    links = [
        {"from": a, "to": b, "latency_ms": rng.randrange(3)}
        for a in range(count)
        for b in range(a)
        if rng.random() < 0.7
    ]
    return problem(stages, [bus() for _ in range(count)], m, links=links)


def random_programs(
    problem: Problem,
    rng: random.Random,
    lives: Lives,
    queue_of: Callable[[Action], Hashable],
    at_once: Callable[[Action], bool] = lambda action: False,
) -> Programs:
    """Run a random legal execution and write it down.

    Actions of one queue keep the order of the micro-batches (None = no queue); right after an
    action that is ``at_once``, the next one of its micro-batch follows.
    """
    todo = {cell: list(life) for cell, life in lives.items()}
    left: dict[Hashable, list[int]] = {}
    for (at, microbatch), life in sorted(lives.items(), key=lambda item: item[0][1]):
        for kind in life:
            left.setdefault(queue_of(Action(at, kind, microbatch)), []).append(microbatch)
    liking = {kind: rng.random() ** 3 for kind in ActionType}
    done: set[tuple[bool, int, int]] = set()
    rows: list[list[Action]] = [[] for _ in problem.devices]
    while todo:
        heads = [Action(at, life[0], microbatch) for (at, microbatch), life in todo.items()]
        queues = {queue: row[0] for queue, row in left.items() if queue is not None and row}
        free = (a for a in heads if queues.get(queue_of(a), a.microbatch) == a.microbatch)
        ready = (a for a in free if _has_input(problem, a, done))
        action = max(ready, key=lambda a: liking[a.type] * rng.random())
        again = True
        while again:
            rows[problem.placement[action.stage]].append(action)
            left[queue_of(action)].remove(action.microbatch)
            if action.type is F or action.type.is_backward:
                done.add((action.type is not F, action.stage, action.microbatch))
            again = at_once(action)
            life = todo[action.stage, action.microbatch]
            life.pop(0)
            if life:
                action = action._replace(type=life[0])
            else:
                del todo[action.stage, action.microbatch]
    programs = tuple(map(tuple, rows))
    check(problem, programs)
    return programs


def _has_input(problem: Problem, action: Action, done: set[tuple[bool, int, int]]) -> bool:
    needed = input_of(action, len(problem.stages))
    return needed is None or needed in done


seeds = st.integers(0, 2**32).map(random.Random)
