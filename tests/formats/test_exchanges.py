"""The joint order: nothing lost, nothing out of order, nobody stuck."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Action, ActionType
from optpipe.formats import exchanges
from optpipe.formats.exchanges import Exchange, Turn, blocking_ms, rows_of
from optpipe.simulate import simulate
from tests.building import UNIT, everything_at_once, one_f_one_b, problem, programs, stage
from tests.formats.blocking import Receive, Send, run
from tests.strategies import cases

if TYPE_CHECKING:
    from optpipe import Problem, Programs
    from optpipe.formats.exchanges import Event
    from tests.formats.blocking import Device
    from tests.strategies import Case

early = st.booleans()


def joint_order(problem: Problem, rows: Programs, **how: Any) -> list[Event]:
    """The line of simulated programs."""
    return exchanges.joint_order(problem, rows, simulate(problem, rows), **how)


@given(cases(), st.sampled_from(["start", "end"]), early, early)
def test_rows_keep_programs_and_no_blocking_executor_gets_stuck(
    case: Case, by, early_activations: bool, early_gradients: bool
) -> None:
    """For every legal schedule: same actions, every exchange once, between its two passes."""
    line = joint_order(
        case.problem, case.programs, by=by,
        early_activations=early_activations, early_gradients=early_gradients,
    )  # fmt: skip
    rows = rows_of(line, len(case.problem.devices))
    for row, program in zip(rows, case.programs, strict=True):
        assert tuple(event for event in row if not isinstance(event, Exchange)) == program
    run([_device(number, row) for number, row in enumerate(rows)])
    placed = case.problem.placement
    crossings = sum(a != b for a, b in pairwise(placed))
    exchanges = [event for event in line if isinstance(event, Exchange)]
    assert len(set(exchanges)) == len(exchanges) == 2 * crossings * case.problem.num_microbatches


def _device(number: int, row: list[Action | Exchange]) -> Device:
    """Execute a row, and check that every tensor is made before it leaves, and there when needed.

    What a pass needs from the same device is checked by the order of programs alone.
    """
    made: set[tuple[bool, int, int]] = set()
    got: set[tuple[bool, int, int]] = set()
    for event in row:
        if isinstance(event, Exchange):
            name = (event.backward, event.stage, event.microbatch)
            if event.source == number:
                assert name in made
                yield Send(event.target, name)
            else:
                sent = yield Receive(event.source)
                assert sent == name
                got.add(name)
                made_here = event.stage - 1 if event.backward else event.stage + 1
                assert (event.backward, made_here, event.microbatch) not in made
        elif event.type is ActionType.FORWARD or event.type.is_backward:
            made.add((event.type is not ActionType.FORWARD, event.stage, event.microbatch))
    expected = {
        (event.backward, event.stage, event.microbatch)
        for event in row
        if isinstance(event, Exchange) and event.target == number
    }
    assert got == expected


@given(cases())
def test_late_gradients_stand_right_before_their_backward(case: Case) -> None:
    """Nothing else is received between: DeepSpeed's engine has one place for both."""
    line = joint_order(
        case.problem, case.programs, by="start", early_activations=True, early_gradients=False
    )
    for event, following in pairwise(line):
        if isinstance(event, Exchange) and event.backward:
            assert isinstance(following, Turn)
            assert following.device == event.target
            assert following.action.stage == event.stage - 1
            assert following.action.microbatch == event.microbatch


@given(cases(), st.sampled_from(["start", "end"]))
def test_early_exchanges_come_before_what_is_later(case: Case, by) -> None:
    """Sorted by the end of the pass that made the tensor, between actions by their own time."""
    line = joint_order(
        case.problem, case.programs, by=by, early_activations=True, early_gradients=True
    )
    run_ = simulate(case.problem, case.programs)
    ends = {
        (action.type is not ActionType.FORWARD, action.stage, action.microbatch): at.end
        for program, row in zip(case.programs, run_.times, strict=True)
        for action, at in zip(program, row, strict=True)
        if action.type is ActionType.FORWARD or action.type.is_backward
    }
    moments = [ends[event[:3]] for event in line if isinstance(event, Exchange)]
    assert moments == sorted(moments)


def test_everything_at_once_has_a_line() -> None:
    """With offload, recompute, split backwards and a V."""
    whole, rows = everything_at_once()
    line = joint_order(whole, rows, by="end", early_activations=True, early_gradients=True)
    assert sum(isinstance(event, Turn) for event in line) == sum(map(len, rows))
    assert sum(isinstance(event, Exchange) for event in line) == 2 * 2 * 4


def test_blocking_communication_holds_up_the_sender() -> None:
    """By hand: F 1, transfer 1, F and B of the second stage 1 + 2, transfer 1, B 2."""
    one = problem(
        [stage(0, 1, 1, 1, output_bytes=UNIT), stage(1, 1, 1, 1, output_bytes=UNIT)],
        links=[{"from": 0, "to": 1, "latency_ms": 1}],
    )
    line = joint_order(
        one, one_f_one_b(2, 1), by="start", early_activations=True, early_gradients=False
    )
    assert blocking_ms(one, line) == simulate(one, one_f_one_b(2, 1)).makespan_ms == 8

    two = one.model_copy(update={"num_microbatches": 2})
    rows = programs("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    line = joint_order(two, rows, by="start", early_activations=True, early_gradients=False)
    # 0F0 to 1, sent to 2 (both wait), 0F1 to 3 beside 1F0, then the send waits for 1B0 at 5 ...
    assert blocking_ms(two, line) > simulate(two, rows).makespan_ms


@pytest.mark.parametrize("seed", range(3))
def test_blocking_is_never_faster_than_planned(seed: int) -> None:
    """Waiting for partners is the only difference, and gradients reduced last."""
    rng = random.Random(seed)
    for count in (1, 2, 4):
        stages = [
            stage(d, rng.randrange(4), rng.randrange(4), rng.randrange(4), output_bytes=UNIT)
            for d in range(count)
        ]
        links = [{"from": d, "to": d + 1, "latency_ms": rng.randrange(3)} for d in range(count - 1)]
        whole = problem(stages, m=5, links=links)
        rows = one_f_one_b(count, 5)
        for is_early in (True, False):
            line = joint_order(
                whole, rows, by="start", early_activations=is_early, early_gradients=False
            )
            assert blocking_ms(whole, line) >= simulate(whole, rows).makespan_ms - 1e-9


def test_gradients_are_reduced_one_after_the_other_at_the_end() -> None:
    """Two stages on one device: 6 ms of work, then 4 ms and 5 ms."""
    made = problem([stage(0, grad_sync_ms=4), stage(0, grad_sync_ms=5)])
    line = joint_order(
        made, programs("0F0 1F0 1B0 0B0"), by="start", early_activations=True, early_gradients=True
    )
    assert blocking_ms(made, line) == 6 + 4 + 5
