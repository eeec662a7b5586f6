"""Random legal schedules of every kind train as one process does, step after step.

No placement, no order and no mixture of actions changes more than rounding.
"""

import functools
from collections import Counter
from typing import Any

import pytest

from optpipe import Problem, Schedule
from optpipe.schedule import ActionType
from tests.runtime import schedules, small_cases

NUM_SCHEDULES = 42
MICROBATCHES = 4
FLOAT_ERROR = 1e-14
"""Of float64 sums in another order, relative to the largest gradient."""

_PLACEMENTS = (
    schedules.LINEAR,
    schedules.V_SHAPE,
    schedules.LOOP,
    schedules.V_SHAPE,
    schedules.LINEAR,
    schedules.IRREGULAR,
)
_SHARES: tuple[dict[str, float], ...] = (
    {},
    {"offload": 0.6},
    {"recompute": 0.6},
    {"offload": 0.4, "recompute": 0.4},
    {"offload": 1.0},
    {"fused": 0.0, "offload": 0.3, "recompute": 0.3},
    {"fused": 1.0, "offload": 0.5, "recompute": 0.2},
)


@functools.cache
def _case(index: int) -> tuple[Problem, Schedule]:
    problem = schedules.make_problem(_PLACEMENTS[index % 6], MICROBATCHES)
    shares: dict[str, Any] = {"fused": 0.3, **_SHARES[index // 6]}
    programs = schedules.random_programs(problem, 1000 + index, in_order=index % 2 == 0, **shares)
    return problem, schedules.make_schedule(problem, programs)


def test_every_kind_of_schedule_is_among_them():
    found = [_case(index)[1] for index in range(NUM_SCHEDULES)]
    counts = Counter(kind for one in found for kind in _kinds(one))
    assert min(counts[kind] for kind in ActionType) >= 10, counts
    assert sum(one != sorted(one) for one in map(_last_forwards, found)) >= 10


def _kinds(schedule: Schedule) -> set[ActionType]:
    return {action.type for program in schedule.programs for action in program}


def _last_forwards(schedule: Schedule) -> list[int]:
    last = len(schedule.placement) - 1
    cells = [action for program in schedule.programs for action in program]
    return [a.microbatch for a in cells if (a.stage, a.type) == (last, ActionType.FORWARD)]


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=[] if index // 6 % 6 == index % 6 else [pytest.mark.extended])
        for index in range(NUM_SCHEDULES)
    ],
)
def test_losses_and_gradients_are_those_of_one_process(ranks, index):
    """What adds up in order does so to the last bit, with random delays around actions.

    Every change runs one case of each mixture of actions, and of each placement.
    """
    problem, schedule = _case(index)
    is_exact = index % 2 == 0
    train = functools.partial(small_cases.train, steps=2)
    outcomes = ranks.run(train, schedule, problem, small_cases.delay if is_exact else None)
    assert all(outcome.losses_equal for outcome in outcomes)
    assert sum(outcome.num_gradients for outcome in outcomes) == 2 * 8 * 7
    assert min(outcome.largest_gradient for outcome in outcomes) > 1e-3
    for outcome in outcomes:
        allowed = 0.0 if is_exact else FLOAT_ERROR * outcome.largest_gradient
        assert outcome.worst_difference <= allowed
        moved_bytes = outcome.offloaded_bytes
        assert outcome.reloaded_bytes == outcome.released_bytes == moved_bytes
        assert outcome.live_bytes_after_release == 0
    offloads = ActionType.OFFLOAD in _kinds(schedule)
    assert any(outcome.offloaded_bytes for outcome in outcomes) == offloads


def test_schedules_take_turns_on_the_same_stages(ranks):
    problem = schedules.make_problem(schedules.LINEAR, MICROBATCHES)
    in_turn = [
        schedules.make_schedule(
            problem,
            schedules.random_programs(problem, seed, fused=0.2, offload=offload, in_order=True),
        )
        for seed, offload in ((1, 0.0), (2, 0.5), (3, 0.0))
    ]
    for outcome in ranks.run(small_cases.take_turns, in_turn):
        assert outcome.worst_difference == 0.0
        assert outcome.least_deferred_bytes > 0
