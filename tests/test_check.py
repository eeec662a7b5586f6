"""Legality: a message and a marked cell for every rule, and an oracle for everything else."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import (
    Action,
    ActionType,
    IllegalScheduleError,
    Problem,
    Provenance,
    ScheduleMismatchError,
    Violation,
    check,
    check_schedule,
    evaluate,
    find_violations,
)
from optpipe.check import render_grid
from tests.building import bus, offloadable, one_f_one_b, problem, programs, stage
from tests.oracle import is_legal
from tests.strategies import Case, cases, mutated

MODES = {"recompute_ms": 1, "checkpoint_bytes": 2, "offload_bytes": 4}


def two_stages(m: int = 1) -> Problem:
    """Stage 0 can be offloaded and recomputed, stage 1 neither."""
    return problem([stage(0, **MODES), stage(1)], [bus(), {"memory_bytes": 100}], m=m)


def only(found: list[Violation]) -> Violation:
    assert len(found) == 1, found
    return found[0]


LAST = "1F0 1I0 1W0"
BROKEN: list[tuple[list[str], str, tuple[int, int], str]] = [
    (["0F0 0I0 0W0"], "programs.count", (1, 0),
     "1 programs for 2 devices: there must be one per device; add empty ones"),
    (["0F0 0I0 0W0", LAST, ""], "programs.count", (2, 0), "3 programs for 2 devices"),
    (["0F0 0I0 0W0 7F0", LAST], "action.stage", (0, 3),
     "7F0: there is no stage 7; the problem has 2, numbered from 0; remove it or correct"),
    (["0F0 0I0 0W0", LAST + " 1F1"], "action.microbatch", (1, 3),
     "1F1: there is no micro-batch 1; the problem has 1, numbered from 0; remove it or correct"),
    (["0F0 0I0 0F0 0W0", LAST], "action.duplicate", (0, 2), "0F0 stands twice; remove one"),
    (["0I0 0F0 0W0", LAST], "order", (0, 0),
     "0I0 stands before 0F0, but must come after it; swap them"),
    (["0F0 0W0 0I0", LAST], "order", (0, 1), "0W0 stands before 0I0"),
    (["0B0 0F0", LAST], "order", (0, 0), "0B0 stands before 0F0"),
    (["0OFFLOAD0 0F0 0RELEASE0 0RELOAD0 0B0", LAST], "order", (0, 0),
     "0OFFLOAD0 stands before 0F0"),
    (["0F0 0RELEASE0 0OFFLOAD0 0RELOAD0 0B0", LAST], "order", (0, 1),
     "0RELEASE0 stands before 0OFFLOAD0"),
    (["0F0 0OFFLOAD0 0RELOAD0 0RELEASE0 0B0", LAST], "order", (0, 2),
     "0RELOAD0 stands before 0RELEASE0"),
    (["0F0 0OFFLOAD0 0RELEASE0 0B0 0RELOAD0", LAST], "order", (0, 3),
     "0B0 stands before 0RELOAD0"),
    (["0F0 0I0 0RECOMPUTE0 0W0", LAST], "order", (0, 1), "0I0 stands before 0RECOMPUTE0"),
    (["0RECOMPUTE0 0F0 0B0", LAST], "order", (0, 0), "0RECOMPUTE0 stands before 0F0"),
    (["0F0 0OFFLOAD0 0B0", LAST], "offload.incomplete", (0, 1),
     "0OFFLOAD0 without 0RELEASE0 and 0RELOAD0: an offloaded micro-batch needs OFFLOAD, RELEASE "
     "and RELOAD; add or remove them together"),
    (["0F0 0B0", "1F0 1OFFLOAD0 1RELEASE0 1RELOAD0 1B0"], "offload.impossible", (1, 1),
     "1OFFLOAD0: stage 1 cannot be offloaded (offload_bytes is 0, or its device has no "
     "bandwidth); remove it"),
    (["0F0 0B0", "1F0 1RECOMPUTE0 1B0"], "recompute.impossible", (1, 1),
     "1RECOMPUTE0: stage 1 has no recompute_ms; give it in the problem or remove it"),
    (["0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0RECOMPUTE0 0B0", LAST], "mode.both", (0, 4),
     "0RECOMPUTE0: (0, 0) is both offloaded and recomputed; keep one of the two"),
    (["0F0 0I0 0W0 0B0", LAST], "backward.both", (0, 3),
     "0B0: (0, 0) has B beside I or W; keep B, or I and W"),
    (["0F0 0I0 0B0", LAST], "backward.both", (0, 2), "0B0: (0, 0) has B beside I or W"),
    (["0I0 0W0", LAST], "missing.forward", (0, 2), "0F0 is missing; add it"),
    (["0F0 0W0", LAST], "missing.backward", (0, 2),
     "0I0 is missing (and there is no 0B0); add it"),
    (["0F0 0I0", LAST], "missing.backward", (0, 2),
     "0W0 is missing (and there is no 0B0); add it"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "code", "cell", "message"), BROKEN)
def test_every_rule_has_its_code_its_cell_and_its_message(rows, code, cell, message) -> None:
    found = only(find_violations(two_stages(), programs(*rows)))
    assert (found.code, (found.device, found.index)) == (code, cell)
    assert message in found.message


def test_an_action_on_the_wrong_device_is_marked_where_it_stands() -> None:
    rows = programs("0I0 0W0", "0F0 1F0 1I0 1W0")
    found = find_violations(two_stages(), rows)
    assert [item.code for item in found] == ["action.device", "missing.forward"]
    assert (found[0].device, found[0].index) == (1, 0)
    assert "0F0 is on device 1, but stage 0 lives on device 0; move it there" in found[0].message


def test_negative_numbers_do_not_count_from_the_end() -> None:
    wrong = Action(-1, ActionType.FORWARD, 0), Action(1, ActionType.FORWARD, -1)
    rows = programs("0F0 0B0", LAST)
    found = find_violations(two_stages(), (rows[0], (*rows[1], *wrong)))
    assert [item.code for item in found] == ["action.stage", "action.microbatch"]


def test_devices_that_wait_for_each_other_are_refused() -> None:
    posed = problem([stage(0), stage(1), stage(0)], m=2)
    rows = programs("0F0 2F0 2B0 2F1 0F1 0B0 2B1 0B1", "1F0 1F1 1B0 1B1")
    found = find_violations(posed, rows)
    assert [(item.code, item.device, item.index) for item in found] == [
        ("wait.cyclic", 0, 3),
        ("wait.cyclic", 1, 1),
    ]
    assert found[0].message == (
        "2F1 waits for the forward of stage 1, micro-batch 1, which waits for it in turn; "
        "reorder one of the programs"
    )
    assert "1F1 waits for the forward of stage 0, micro-batch 1" in found[1].message


def test_a_peak_one_byte_over_the_limit_is_marked_where_it_is_reached() -> None:
    rows = programs("0F0 0F1 0B0 0B1")
    stages = [stage(static_bytes=5, forward_workspace_bytes=2)]
    assert (
        find_violations(problem(stages, [{"memory_bytes": 30, "reserved_bytes": 3}], m=2), rows)
        == []
    )
    found = only(
        find_violations(problem(stages, [{"memory_bytes": 30, "reserved_bytes": 4}], m=2), rows)
    )
    assert (found.code, found.device, found.index) == ("memory.device", 0, 1)
    assert found.message == (
        "0F1 takes device 0 (gpu0) to 27 bytes, its limit is 26 (memory_bytes - reserved_bytes), "
        "1 too many; offload, recompute or start fewer micro-batches before it"
    )


def test_a_host_one_byte_over_its_limit_is_marked_at_its_largest_devices_peak() -> None:
    stages = [offloadable(0), offloadable(1, activation_bytes=30, offload_bytes=30)]
    first = "0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0B0"
    rows = programs(first, first.replace("0F0", "1F0").replace("0OF", "1OF")
                    .replace("0REL", "1REL").replace("0B0", "1B0"))  # fmt: skip
    devices = [bus(), bus()]
    need = 10_000_030

    def limited(limit: int) -> Problem:
        return problem(stages, devices, hosts=[{"name": "host0", "memory_bytes": limit}])

    assert find_violations(limited(need), rows) == []
    found = only(find_violations(limited(need - 1), rows))
    assert (found.code, found.device, found.index) == ("memory.host", 0, 1)
    assert "host host0 holds up to 10000030 bytes" in found.message
    assert "its limit is 10000029, 1 too many; offload less or raise the limit" in found.message


def test_an_empty_program_of_the_largest_problem_is_refused_at_once() -> None:
    posed = problem([stage()], m=2_000_000)
    found = find_violations(posed, ((),))
    assert found[0].message == "0F0 is missing; add it"
    assert len(found) == 10_000


def test_the_report_prints_the_grid_with_the_cell_marked() -> None:
    with pytest.raises(IllegalScheduleError) as caught:
        check(two_stages(), programs("0F0 0W0 0I0", LAST))
    assert str(caught.value) == (
        "illegal schedule, 1 fault(s):\n"
        "  device 0, cell 1: 0W0 stands before 0I0, but must come after it; swap them [order]\n"
        "device 0 |   0F0   >>0W0<<   0I0\n"
        "device 1 |   1F0     1I0     1W0"
    )
    assert caught.value.code == "schedule.illegal"
    assert only(list(caught.value.violations)).code == "order"


def test_the_report_marks_the_end_where_something_is_missing_and_counts_what_it_leaves_out() -> (
    None
):
    with pytest.raises(IllegalScheduleError) as caught:
        check(two_stages(m=3), programs("0F0 0B0", "1F0 1B0"))
    text = str(caught.value)
    assert text.startswith("illegal schedule, 12 fault(s):")
    assert "  ... and 7 more" in text
    assert "device 0 |   0F0     0B0   >>end<<" in text


def test_a_long_row_is_cut_around_the_mark() -> None:
    grid = render_grid(one_f_one_b(2, 20), {(1, 30)})
    rows = grid.splitlines()
    assert ">>1F15<<" in rows[1]
    assert all(row.count("...") == 2 for row in rows)
    assert len(rows[1].split("|")[1].split()) == 15


def test_a_schedule_of_another_problem_is_refused() -> None:
    schedule = evaluate(two_stages(), programs("0F0 0B0", LAST), Provenance(method="test"))
    check_schedule(two_stages(), schedule)
    with pytest.raises(ScheduleMismatchError) as caught:
        check_schedule(two_stages(m=2), schedule)
    assert schedule.problem_hash in str(caught.value)
    assert two_stages(m=2).problem_hash in str(caught.value)
    moved = schedule.model_copy(update={"placement": (1, 0)})
    with pytest.raises(
        ScheduleMismatchError, match=r"placement is \[1, 0\], the problem's \[0, 1\]"
    ):
        check_schedule(two_stages(), moved)


def lowered(posed: Problem, field: str, index: int) -> Problem:
    """The problem with the limit of one device or host a byte lower."""
    limits = list(getattr(posed, field))
    smaller = {"memory_bytes": limits[index].memory_bytes - 1}
    limits[index] = limits[index].model_copy(update=smaller)
    return posed.model_copy(update={field: limits})


@given(cases(menus=True, tight=True, pairs=True))
def test_a_limit_one_byte_lower_is_refused(case: Case) -> None:
    """Where it is exceeded: of a host at an OFFLOAD of one of its devices."""
    for index, device in enumerate(case.problem.devices):
        if device.usable_bytes and case.problem.stages_of[index]:
            found = only(find_violations(lowered(case.problem, "devices", index), case.programs))
            assert (found.code, found.device) == ("memory.device", index)
    for index, host in enumerate(case.problem.hosts):
        if host.memory_bytes:
            found = only(find_violations(lowered(case.problem, "hosts", index), case.programs))
            assert found.code == "memory.host"
            assert case.problem.devices[found.device].host == host.name
            assert case.programs[found.device][found.index].type is ActionType.OFFLOAD


@given(cases(menus=True, pairs=True), st.integers(0, 2**32))
def test_programs_mutated_by_one_action_are_judged_as_the_oracle_judges(
    case: Case, seed: int
) -> None:
    check(*case)
    assert is_legal(*case)
    rng = random.Random(seed)
    for _ in range(20):
        changed = mutated(case.programs, rng)
        found = find_violations(case.problem, changed)
        assert (not found) == is_legal(case.problem, changed), found
        if found:
            with pytest.raises(
                IllegalScheduleError, match=">>" if found[0].device < len(changed) else ""
            ):
                check(case.problem, changed)
