"""What crosses between ranks: both post it in one order, and sends end in time."""

import random
from collections import Counter, defaultdict
from functools import partial
from typing import NamedTuple

import pytest

from optpipe import Schedule
from optpipe.runtime.messages import (
    BoundaryLevel,
    MessageSend,
    Order,
    Receive,
    boundary_levels,
    max_boundary_bytes,
    sends_over_before,
    window_of,
)
from optpipe.schedule import Action, ActionType, Pass, input_of
from tests.runtime import schedules, small_cases


class Case(NamedTuple):
    """Orders of a schedule, and its placement."""

    placement: tuple[int, ...]
    orders: tuple[Order, ...]


@pytest.fixture(scope="module")
def cases(ranks) -> list[Case]:
    placements = [schedules.LINEAR, schedules.V_SHAPE, schedules.LOOP, schedules.IRREGULAR]
    chosen = [_one_f_one_b(8), _one_f_one_b(16), _all_forwards_first(16), _first_stages_first(8)]
    for seed, placement in enumerate(placements):
        problem = schedules.make_problem(placement, 4)
        programs = schedules.random_programs(problem, 70 + seed, offload=0.3, recompute=0.3)
        chosen.append(schedules.make_schedule(problem, programs))
    found = ranks.run(small_cases.orders_of, chosen)
    assert all(theirs == found[0] for theirs in found)
    return [Case(one.placement, orders) for one, orders in zip(chosen, found[0], strict=True)]


def _one_f_one_b(num_microbatches: int) -> Schedule:
    problem = schedules.make_problem(schedules.LINEAR, num_microbatches)
    return schedules.make_schedule(problem, schedules.one_f_one_b(4, num_microbatches))


def _all_forwards_first(num_microbatches: int) -> Schedule:
    problem = schedules.make_problem(schedules.LINEAR, num_microbatches)
    order = [f"F{j}" for j in range(num_microbatches)] + [f"B{j}" for j in range(num_microbatches)]
    rows = [" ".join(f"{stage}{cell}" for cell in order) for stage in range(4)]
    return schedules.make_schedule(problem, schedules.from_text(rows))


def _first_stages_first(num_microbatches: int) -> Schedule:
    """Return all forwards of both ends of a loop on one rank, which keeps what it receives."""
    problem = schedules.make_problem(schedules.LOOP, num_microbatches)
    rows = []
    for rank in range(4):
        cells = [f"{stage}F{j}" for stage in (rank, rank + 4) for j in range(num_microbatches)]
        cells += [f"{stage}B{j}" for stage in (rank + 4, rank) for j in range(num_microbatches)]
        rows.append(" ".join(cells))
    return schedules.make_schedule(problem, schedules.from_text(rows))


def test_both_ranks_of_a_queue_post_the_same_messages_in_the_same_order(cases):
    """Otherwise two tensors would be mixed up, and no rank would notice."""
    for case in cases:
        queues: defaultdict[tuple[int, int], list[Pass]] = defaultdict(list)
        for rank, order in enumerate(case.orders):
            for step in order:
                if not isinstance(step, Action):
                    message = step.message
                    ends = [case.placement[message.stage], case.placement[message.reader]]
                    assert ends.index(rank) == isinstance(step, Receive)
                    ends.remove(rank)
                    queues[rank, ends[0]].append(message)
        assert queues
        assert all(queue == queues[theirs, own] for (own, theirs), queue in queues.items())


@pytest.mark.parametrize("window", [1, 2, 6])
def test_no_order_waits_for_ever(cases, window):
    """A message passes when both ranks have posted it, and all before it in their queue."""
    for case in cases:
        over = sends_over_before(case.orders, case.placement, window)
        left = [list(order) for order in case.orders]
        posted: Counter[Pass | None] = Counter()
        while heads := [(rank, steps[0]) for rank, steps in enumerate(left) if steps]:
            can_run = []
            for rank, step in heads:
                needed = input_of(step, len(case.placement)) if isinstance(step, Action) else None
                is_sent = needed is not None and case.placement[needed.stage] != rank
                waits_for = [*over[rank].get(step, ()), *([needed] if is_sent else [])]
                if all(posted[message] == 2 for message in waits_for):
                    can_run.append((rank, step))
            assert can_run, [str(step) for _, step in heads]
            for rank, step in can_run:
                left[rank].pop(0)
                if not isinstance(step, Action):
                    posted[step.message] += 1


def test_a_send_is_let_go_only_when_its_tensor_is_used_under_any_timing(cases):
    """Run every case in random orders; whenever a send is let go, its user must have begun."""
    num_checked = 0
    for seed, case in enumerate(cases * 8):
        taken = sends_over_before(case.orders, case.placement, 1000)
        begun: set[Pass] = set()
        for rank, step in _any_execution(case, random.Random(seed)):
            if isinstance(step, Action):
                for message in taken[rank].get(step, ()):
                    assert message in begun
                    num_checked += 1
                needed = input_of(step, len(case.placement))
                begun |= {needed} if needed is not None else set()
    assert num_checked > 1000


def _any_execution(case: Case, chooser: random.Random):
    """Yield all steps in an order that some timing leads to."""
    heads = [0] * len(case.orders)
    passed: set[Pass] = set()
    while ready := [rank for rank in range(len(heads)) if _can_run(case, rank, heads, passed)]:
        rank = chooser.choice(ready)
        # Long runs of one rank are as likely as fine mixtures.
        for _ in range(chooser.choice([1, 1, 20])):
            if not _can_run(case, rank, heads, passed):
                break
            step = case.orders[rank][heads[rank]]
            yield rank, step
            heads[rank] += 1
            if isinstance(step, Action):
                passed.add(Pass(step.type.is_backward, step.stage, step.microbatch))
    assert heads == [len(order) for order in case.orders]


def _can_run(case: Case, rank: int, heads: list[int], passed: set[Pass]) -> bool:
    if heads[rank] == len(case.orders[rank]):
        return False
    step = case.orders[rank][heads[rank]]
    needed = input_of(step, len(case.placement)) if isinstance(step, Action) else None
    return needed is None or needed in passed


def test_boundary_tensors_in_flight_in_1f1b_do_not_grow_with_the_microbatches(cases):
    eight, sixteen = (_most_in_flight(case, 1000) for case in cases[:2])
    assert eight == sixteen
    # Slots, and what a pass takes and makes.
    assert max(eight) <= 5 + 2


def test_a_window_bounds_what_a_rank_sends_before_it_hears_anything(cases):
    gpipe = cases[2]
    assert _most_in_flight(gpipe, 1000)[0] >= 16
    assert max(_most_in_flight(gpipe, 4)) <= 4 + 4
    for case in cases:
        for rank, over in enumerate(sends_over_before(case.orders, case.placement, 2)):
            in_flight: set[Pass] = set()
            for step in case.orders[rank]:
                in_flight -= set(over.get(step, ()))
                if isinstance(step, MessageSend):
                    assert len(in_flight) < 2
                    in_flight.add(step.message)


def _most_in_flight(case: Case, window: int) -> list[int]:
    over = sends_over_before(case.orders, case.placement, window)
    levels = [
        boundary_levels(order, over[rank], len(case.placement), lambda message: 1)
        for rank, order in enumerate(case.orders)
    ]
    for level, order in zip(levels, case.orders, strict=True):
        assert set(level) == {step for step in order if isinstance(step, Action)}
    return [max(level.during for level in found.values()) for found in levels]


def test_there_is_room_for_the_boundary_tensors_of_every_schedule(cases):
    """Boundaries of unequal sizes; where a rank takes all it receives last, little is to spare."""
    shares = []
    for case in cases:
        num_stages, window = len(case.placement), window_of(len(case.placement), trains=True)
        sizes = [100 + 37 * boundary % 90 for boundary in range(num_stages - 1)]
        count = max(step.microbatch for step in case.orders[0] if isinstance(step, Action)) + 1
        over = sends_over_before(case.orders, case.placement, window)
        for rank, order in enumerate(case.orders):
            levels = boundary_levels(order, over[rank], num_stages, partial(_size_of, sizes))
            own = [max(sizes[max(0, stage - 1) : stage + 1])
                   for stage, home in enumerate(case.placement) if home == rank]  # fmt: skip
            most = max(level.during for level in levels.values())
            shares.append(most / max_boundary_bytes(own, num_stages, count))
    assert max(shares) <= 1
    assert max(shares) > 0.5


def _size_of(sizes: list[int], message: Pass) -> int:
    return sizes[message.stage - 1 if message.backward else message.stage]


def test_what_nobody_is_known_to_have_taken_counts_to_the_end():
    order = tuple(
        step
        for j in range(3)
        for step in (Action(0, ActionType.FORWARD, j), MessageSend(Pass(False, 0, j)))
    )
    levels = boundary_levels(order, {}, 2, lambda message: 10)
    # Three slots, and what the F makes, until it is sent.
    assert list(levels.values()) == [BoundaryLevel(40, 30)] * 3
