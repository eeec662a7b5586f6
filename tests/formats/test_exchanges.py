"""The joint order: nothing lost, nothing out of order, nobody stuck."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given

from optpipe import Action, ActionType
from optpipe.formats import zero_bubble
from optpipe.formats.zero_bubble import Exchange, Turn, rows_of
from optpipe.simulate import simulate
from tests.building import everything_at_once
from tests.formats.blocking import Receive, Send, run
from tests.strategies import cases

if TYPE_CHECKING:
    from optpipe import Problem, Programs
    from optpipe.formats.zero_bubble import Event
    from tests.formats.blocking import Device
    from tests.strategies import Case


def joint_order(problem: Problem, rows: Programs) -> list[Event]:
    """The line of simulated programs."""
    return zero_bubble.joint_order(problem, rows, simulate(problem, rows))


@given(cases())
def test_rows_keep_programs_and_no_blocking_executor_gets_stuck(case: Case) -> None:
    """For every legal schedule: same actions, every exchange once, between its two passes."""
    line = joint_order(case.problem, case.programs)
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
def test_exchanges_come_before_what_is_later(case: Case) -> None:
    """Sorted by the end of the pass that made the tensor, between actions by their own time."""
    line = joint_order(case.problem, case.programs)
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
    line = joint_order(whole, rows)
    assert sum(isinstance(event, Turn) for event in line) == sum(map(len, rows))
    assert sum(isinstance(event, Exchange) for event in line) == 2 * 2 * 4
