"""Memory is a property of the program: the prefix walk, by hand, by an oracle, under any timing."""

import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Action, ActionType, Simulation, make_timeline, simulate
from optpipe.memory import device_peak_bytes, host_peak_bytes, memory_walk
from tests import oracle
from tests.building import problem, programs, stage
from tests.strategies import Case, cases

SIZES = {
    "activation_bytes": 10, "weight_context_bytes": 4, "offload_bytes": 7, "recompute_ms": 1,
    "checkpoint_bytes": 3, "static_bytes": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "levels"),
    [
        ("0F0 0I0 0W0", [110, 104, 100]),
        ("0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0I0 0W0", [110, 110, 103, 110, 104, 100]),
        ("0F0 0RECOMPUTE0 0B0", [103, 110, 100]),
    ],
)
def test_what_each_action_takes_and_gives_back(row: str, levels: list[int]) -> None:
    posed = problem([stage(**SIZES)], m=2)
    (program,) = programs(row)
    walk = memory_walk(posed, 0, program)
    assert [step.after for step in walk] == levels
    assert [step.before for step in walk] == [100, *levels[:-1]]
    assert device_peak_bytes(posed, 0, program) == max(levels)


def test_what_is_taken_is_there_from_the_start_and_what_is_given_back_until_the_end() -> None:
    posed = problem([stage(**SIZES)], m=2)
    row = "0F0 0F1 0OFFLOAD0 0RELEASE0 0RECOMPUTE1 0RELOAD0 0I0 0W0 0B1"
    (program,) = programs(row)
    walk = zip(program, memory_walk(posed, 0, program), strict=True)
    early = [str(action) for action, step in walk if step.taken_at_start]
    assert early == ["0F0", "0F1", "0RECOMPUTE1", "0RELOAD0"]


@given(cases(menus=True, pairs=True))
def test_the_walk_agrees_with_bytes_counted_from_states(case: Case) -> None:
    for device, row in enumerate(case.programs):
        walk = memory_walk(case.problem, device, row)
        levels = list(oracle.device_levels(case.problem, device, row))
        assert [(step.before, step.after) for step in walk] == [level[:2] for level in levels]
        assert device_peak_bytes(case.problem, device, row) == oracle.device_peak(
            case.problem, device, row
        )
    assert host_peak_bytes(case.problem, case.programs) == oracle.host_peaks(*case)


def events(case: Case, device: int, run: Simulation) -> list[int]:
    """Bytes over time on a device as an allocator would see them, workspaces included.

    What an action takes is there from its start (a reload's: from its issue), what it gives back
    until its end; at equal instants program order decides.
    """
    row = case.programs[device]
    changes: list[tuple[float, int, int, int]] = []
    levels = oracle.device_levels(case.problem, device, row)
    for place, (action, (before, after, extra, inside), at) in enumerate(
        zip(row, levels, run.times[device], strict=True)
    ):
        # The two of a pair are one event, also where it takes no time.
        index = place - action.paired
        delta = after - before
        start = at.issue if action.type is ActionType.RELOAD else at.start
        early = action.type in (ActionType.FORWARD, ActionType.RECOMPUTE, ActionType.RELOAD)
        phase = 0 if early else (3 if delta > 0 else 5)
        changes.append((start if early else at.end, index, phase, delta))
        changes.append((start, index, 1, extra + inside))
        changes.append((at.end, index, 2, -inside))
        changes.append((at.end, index, 4, -extra))
    static = case.problem.static_bytes_of(device)
    return list(accumulate((change for *_, change in sorted(changes)), initial=static))


def jittered(case: Case, seed: int) -> dict[Action, float]:
    """A duration for every action, over twelve orders of magnitude, some of them 0."""
    rng = random.Random(seed)
    return {
        action.bare: rng.choice([0.0, 1.0, 10 ** rng.uniform(-6, 6)])
        for row in case.programs
        for action in row
        if action.type is not ActionType.RELEASE
    }


@given(cases(menus=True, pairs=True), st.integers(0, 2**32))
def test_the_peak_is_the_same_under_every_timing_and_copies_are_whole(
    case: Case, seed: int
) -> None:
    durations = jittered(case, seed)
    run = simulate(case.problem, case.programs, durations)
    curves = make_timeline(case.problem, case.programs, durations).memory
    for device, row in enumerate(case.programs):
        walk = memory_walk(case.problem, device, row)
        assert max(events(case, device, run)) == device_peak_bytes(case.problem, device, row)
        static = case.problem.static_bytes_of(device)
        assert max(level for _, level in curves[device]) == max(
            [static] + [step.after for step in walk]
        )
        moments = [moment for moment, _ in curves[device]]
        assert moments == sorted(moments)
    # Bytes leave after the copy, and are back before they are used.
    at = {
        action.bare: times
        for row, lane in zip(case.programs, run.times, strict=True)
        for action, times in zip(row, lane, strict=True)
    }
    for (stage_index, kind, microbatch, *_), times in at.items():
        if kind is ActionType.RELEASE:
            copied = at[Action(stage_index, ActionType.OFFLOAD, microbatch)]
            forward = at[Action(stage_index, ActionType.FORWARD, microbatch)]
            assert forward.end <= copied.start <= copied.end <= times.end
        reload = Action(stage_index, ActionType.RELOAD, microbatch)
        if kind.consumes_reload and reload in at:
            assert at[reload].issue <= at[reload].start <= at[reload].end <= times.start
