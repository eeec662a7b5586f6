"""Why each offload and recomputation was chosen, held against programs without them."""

from __future__ import annotations

from itertools import chain

from hypothesis import given

from optpipe import Action, ActionType, Problem, Programs
from optpipe.explain.needs import stage_reliefs
from optpipe.explain.values import Relief, StageRelief, Verdict
from optpipe.memory import device_peak_bytes, memory_walk
from tests.building import bus, offloadable, problem, programs, stage
from tests.strategies import Case, cases

MB = 1_000_000
_TYPES = {
    "offload": (ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD),
    "recompute": (ActionType.RECOMPUTE,),
}


def without(rows: Programs, *taken: tuple[StageRelief, Relief]) -> Programs:
    """The programs without some offloads and recomputations."""
    gone = {
        Action(group.stage, kind, relief.microbatch)
        for group, relief in taken
        for kind in _TYPES[group.kind]
    }
    return tuple(tuple(action for action in row if action not in gone) for row in rows)


def pairs(made: Problem, rows: Programs) -> list[tuple[StageRelief, Relief]]:
    groups = stage_reliefs(made, rows)
    return [(group, relief) for group in groups for relief in group.reliefs]


def peak_over(made: Problem, rows: Programs, device: int) -> int:
    limit = made.devices[device].usable_bytes
    return device_peak_bytes(made, device, rows[device]) - limit


def limited(num_bytes: int) -> Problem:
    return problem([offloadable()], [bus(memory_bytes=num_bytes)], m=3)


ROWS = programs("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELEASE0 0RELEASE1 0F2 0B2 0RELOAD1 0B1 0RELOAD0 0B0")


def test_where_one_of_two_would_do_either_can_be_kept_but_not_both() -> None:
    """Of two offloads one would do: the first is called unneeded, the other instead of it."""
    (group,) = stage_reliefs(limited(20 * MB), ROWS)
    assert (group.stage, group.device, group.kind) == (0, 0, "offload")
    assert (str(group.exceeds_at), group.excess_bytes) == ("0F2", 10 * MB)
    assert [relief.verdict for relief in group.reliefs] == [
        Verdict.UNNEEDED,
        Verdict.INTERCHANGEABLE,
    ]


def test_one_alone_that_would_not_fit_is_needed() -> None:
    tight = programs("0F0 0OFFLOAD0 0RELEASE0 0F1 0F2 0B2 0B1 0RELOAD0 0B0")
    (group,) = stage_reliefs(limited(20 * MB), tight)
    (relief,) = group.reliefs
    assert relief.verdict is Verdict.NEEDED
    assert (relief.microbatch, relief.saved_bytes) == (0, 10 * MB)
    assert (str(relief.exceeds_at), relief.excess_bytes) == ("0F2", 10 * MB)


def test_with_memory_for_all_every_offload_is_unneeded() -> None:
    (group,) = stage_reliefs(limited(31 * MB), ROWS)
    assert {relief.verdict for relief in group.reliefs} == {Verdict.UNNEEDED}
    assert (str(group.exceeds_at), group.excess_bytes) == ("0F2", -MB)
    assert group.microbatches(Verdict.UNNEEDED) == (0, 1)


def test_a_recomputation_is_judged_from_its_forward_on() -> None:
    """The F that keeps only its checkpoint is the action that would exceed."""
    made = problem(
        [stage(recompute_ms=1, checkpoint_bytes=2, forward_workspace_bytes=5)],
        [{"memory_bytes": 20}],
        m=2,
    )
    rows = programs("0F0 0F1 0RECOMPUTE1 0B1 0B0")
    (group,) = stage_reliefs(made, rows)
    (relief,) = group.reliefs
    assert (group.kind, relief.saved_bytes, relief.verdict) == ("recompute", 8, Verdict.NEEDED)
    assert (str(relief.exceeds_at), relief.excess_bytes) == ("0F1", 5)


def test_a_release_right_before_its_reload_relieves_nothing() -> None:
    made = limited(10 * MB)
    rows = programs("0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0B0 0F1 0B1 0F2 0B2")
    (group,) = stage_reliefs(made, rows)
    (relief,) = group.reliefs
    assert (relief.verdict, relief.exceeds_at, relief.excess_bytes) == (Verdict.UNNEEDED, None, 0)


@given(cases(tight=True))
def test_what_is_needed_exceeds_the_limit_when_taken_out_and_nothing_else_does(case: Case) -> None:
    for group, relief in pairs(*case):
        rows = without(case.programs, (group, relief))
        is_over = peak_over(case.problem, rows, group.device) > 0
        assert is_over == (relief.verdict is Verdict.NEEDED)


@given(cases(tight=True))
def test_all_that_is_unneeded_can_be_taken_out_together_and_no_more(case: Case) -> None:
    found = pairs(*case)
    spare = [pair for pair in found if pair[1].verdict is Verdict.UNNEEDED]
    rows = without(case.programs, *spare)
    assert all(peak_over(case.problem, rows, d) <= 0 for d in range(len(rows)))
    for pair in found:
        if pair[1].verdict is Verdict.INTERCHANGEABLE:
            fewer = without(case.programs, *spare, pair)
            assert peak_over(case.problem, fewer, pair[0].device) > 0


@given(cases(tight=True))
def test_the_excess_is_that_of_the_action_that_is_named(case: Case) -> None:
    for group, relief in pairs(*case):
        for taken, told in (([relief], relief), (group.reliefs, group)):
            if told.exceeds_at is None:
                continue
            rows = without(case.programs, *((group, item) for item in taken))
            row = rows[group.device]
            steps = memory_walk(case.problem, group.device, row)
            limit = case.problem.devices[group.device].usable_bytes
            assert steps[row.index(told.exceeds_at)].peak - limit == told.excess_bytes


@given(cases())
def test_every_offload_and_recomputation_is_judged_once(case: Case) -> None:
    counted = (ActionType.OFFLOAD, ActionType.RECOMPUTE)
    made = [a for a in chain(*case.programs) if a.type in counted]
    told = [
        Action(group.stage, _TYPES[group.kind][0], relief.microbatch)
        for group, relief in pairs(*case)
    ]
    assert sorted(told) == sorted(made)
