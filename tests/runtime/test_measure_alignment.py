"""Clocks of several devices on one axis: exact where wall clocks are, causal where they are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.runtime.timing import DeviceTimes, align
from optpipe.schedule import ActionType
from optpipe.simulate import Interval, make_timeline
from tests.building import one_f_one_b, problem, programs, stage
from tests.runtime import schedules

pytestmark = pytest.mark.usefixtures("few_objects")

WALL = 1.7e12
"""A wall clock of these years, in ms."""

Rows = tuple[tuple[Interval, ...], ...]
skews = st.lists(st.floats(-1e4, 1e4), min_size=4, max_size=4)


def simulated(placement: tuple[int, ...], seed: int) -> Rows:
    """What four devices do in a random legal schedule."""
    small = schedules.make_problem(placement, 4)
    programs = schedules.random_programs(small, seed, offload=0.3, recompute=0.2)
    return make_timeline(small, programs).intervals


def on_own_clocks(rows: Rows, zeros: list[float], wall_errors: list[float]) -> list[DeviceTimes]:
    """Each device's zero is elsewhere, and so is its wall clock."""
    return [
        DeviceTimes(3, device, WALL + zero + error, moved(row, -zero))
        for device, (row, zero, error) in enumerate(zip(rows, zeros, wall_errors, strict=True))
    ]


def moved(row: tuple[Interval, ...], shift: float) -> tuple[Interval, ...]:
    return tuple(
        Interval(item.device, item.lane, item.action, item.start + shift, item.end + shift)
        for item in row
    )


@given(zeros=skews, seed=st.integers(0, 20))
@pytest.mark.parametrize("placement", [schedules.LINEAR, schedules.V_SHAPE, schedules.LOOP])
def test_exact_wall_clocks_give_the_times_back(placement, zeros, seed) -> None:
    """But for the resolution of a double that holds a wall clock in ms."""
    rows = simulated(placement, seed)
    found = align(on_own_clocks(rows, zeros, [0.0] * 4))
    assert found.step == 3
    spans = [max(item.end for item in row) - min(item.start for item in row) for row in rows]
    assert found.span_ms == pytest.approx(max(spans), abs=5e-3)
    for row, wanted in zip(found.rows, rows, strict=True):
        assert [item.action for item in row] == [item.action for item in wanted]
        assert [item.start for item in row] == pytest.approx(
            [item.start for item in wanted], abs=5e-3
        )


@given(zeros=skews, errors=skews, seed=st.integers(0, 20))
@pytest.mark.parametrize("placement", [schedules.LINEAR, schedules.V_SHAPE, schedules.LOOP])
def test_nothing_is_received_before_it_was_sent(placement, zeros, errors, seed) -> None:
    """However wrong the wall clocks are; and no action becomes longer or shorter."""
    rows = simulated(placement, seed)
    found = align(on_own_clocks(rows, zeros, errors))
    ran = {str(item.action): item for row in found.rows for item in row}
    for item in ran.values():
        action = item.action
        assert action is not None
        if action.type is ActionType.FORWARD and action.stage > 0:
            before = ran[f"{action.stage - 1}F{action.microbatch}"]
            assert item.start >= before.end - 1e-6
        if action.type.is_backward and action.stage + 1 < len(placement):
            behind = f"{action.stage + 1}%s{action.microbatch}"
            before = ran.get(behind % "I") or ran[behind % "B"]
            assert item.start >= before.end - 1e-6
    lengths = [item.end - item.start for row in found.rows for item in row]
    assert lengths == pytest.approx(
        [item.end - item.start for row in rows for item in row], abs=1e-6
    )


@pytest.mark.parametrize(("error", "wanted"), [(0.0, 5.0), (1.0, 6.0), (-9.0, 1.0), (9.0, 8.0)])
def test_wall_clocks_decide_where_messages_leave_room(error, wanted) -> None:
    """The second device starts between 1, when it was sent something, and 8, to answer by 10."""
    forward, backward = programs("0F0 0B0", "1F0 1B0")
    first = tuple(
        Interval(0, "compute", action, start, start + 1.0)
        for action, start in zip(forward, (0.0, 10.0), strict=True)
    )
    second = tuple(
        Interval(1, "compute", action, start, start + 1.0)
        for action, start in zip(backward, (0.0, 1.0), strict=True)
    )
    times = [DeviceTimes(1, 0, 1e6, first), DeviceTimes(1, 1, 1e6 + 5.0 + error, second)]
    found = align(times)
    assert found.rows[0][0].start == 0
    assert found.rows[1][0].start == wanted


def test_messages_that_contradict_each_other_are_off_by_no_more_than_they_contradict() -> None:
    """Clocks of which no shift is right: the second device answers before it was asked."""
    small = problem([stage(0), stage(1)])
    first, second = make_timeline(small, one_f_one_b(2, 1)).intervals
    too_soon = 0.5
    squeezed = (first[0], *moved(first[1:], -too_soon))
    times = [DeviceTimes(0, 0, WALL, squeezed), DeviceTimes(0, 1, WALL, second)]
    found = align(times)
    sent, answered = found.rows[0][0].end, found.rows[0][1].start
    early = max(0.0, sent - found.rows[1][0].start)
    late = max(0.0, found.rows[1][-1].end - answered)
    assert early + late == pytest.approx(too_soon)
