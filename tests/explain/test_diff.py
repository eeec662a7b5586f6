"""What changed between two schedules: nothing between equal ones, everything else by name."""

import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Action, ActionType, Problem, simulate
from optpipe.explain import (
    compare_problems,
    compare_programs,
    cost_line,
    difference_lines,
    problem_costs,
    schedule_costs,
)
from optpipe.explain.diff import Cost, num_moved
from tests.building import everything_at_once, offloadable, problem, programs, stage
from tests.strategies import Case, cases, mutated, problems, random_programs

BEFORE = programs("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1B0 1F1 1B1")
AFTER = programs("0F0 0OFFLOAD0 0F1 0RELEASE0 0B1 0RELOAD0 0I0 0W0", "1F0 1F1 1B0 1B1")


def test_offload_fusion_and_order_are_told_apart() -> None:
    assert difference_lines(compare_programs(BEFORE, AFTER)) == [
        "stage 0: micro-batch 0: kept -> offloaded",
        "stage 0: micro-batch 1: backward split (I, W) -> fused (B)",
        "device 0: 2 removed, 4 added; first at cell 1: 0F1 -> 0OFFLOAD0",
        "device 1: 1 of 4 common actions moved; first at cell 1: 1B0 -> 1F1",
    ]


def test_placement_is_compared_by_stage() -> None:
    found = compare_programs(programs("0F0 0B0", "1F0 1B0"), programs("0F0 0B0 1F0 1B0"))
    assert difference_lines(found) == [
        "stage 1: device 1 -> device 0",
        "device 0: 2 added; first at cell 2: the end -> 1F0",
        "device 1: 2 removed; first at cell 0: 1F0 -> the end",
    ]


def test_costs_are_those_of_the_simulator_and_the_walk() -> None:
    given_problem = problem([offloadable(0), offloadable(1)], m=2)
    costs = {cost.name: cost for cost in schedule_costs(given_problem, BEFORE, AFTER)}
    makespan = costs["makespan"]
    assert (makespan.before, makespan.after) == (
        simulate(given_problem, BEFORE).makespan_ms, simulate(given_problem, AFTER).makespan_ms
    )  # fmt: skip
    assert (costs["offloaded"].before, costs["offloaded"].after) == (0, 10_000_000)
    assert costs["idle, reload"].before == 0
    assert costs["peak memory of device 0"].before == 20_000_000


@pytest.mark.parametrize(
    ("cost", "line"),
    [
        (("makespan", "ms", 200.0, 150.0), "makespan: 200.0 ms -> 150.0 ms (-50 ms, -25.0%)"),
        (("peak", "bytes", 0, 2048), "peak: 0 B -> 2.0 KiB (+2.0 KiB)"),
        (("bubble", "share", 0.5, 0.25), "bubble: 50.0% -> 25.0% (-25.0 points)"),
        (("bound", "ms", None, 7.0), "bound: unknown -> 7 ms"),
        (("span", "ms", 7.0, 7.0), "span: 7 ms, unchanged"),
    ],
)
def test_a_cost_reads_as_before_after_and_by_how_much(cost, line) -> None:
    name, unit, before, after = cost
    assert cost_line(Cost(name=name, unit=unit, before=before, after=after)) == line


@given(cases(menus=True), st.integers(0, 2**32))
def test_the_difference_is_empty_for_equal_programs_and_only_for_them(case: Case, seed) -> None:
    rng = random.Random(seed)
    rows = case.programs
    assert compare_programs(rows, rows).is_empty
    assert difference_lines(compare_programs(rows, rows)) == []
    for other in (random_programs(case.problem, rng), mutated(rows, rng)):
        assert compare_programs(rows, other).is_empty == (rows == other)


@given(cases(menus=True), st.integers(0, 2**32))
def test_backwards_it_says_the_opposite(case: Case, seed) -> None:
    other = random_programs(case.problem, random.Random(seed))
    there, back = compare_programs(case.programs, other), compare_programs(other, case.programs)
    for left, right in zip(there.order, back.order, strict=True):
        assert (left.moved, left.removed, left.added) == (right.moved, right.added, right.removed)
    assert {(c.stage, c.before, c.after, c.microbatches) for c in there.treatment} == {
        (c.stage, c.after, c.before, c.microbatches) for c in back.treatment
    }


def test_no_fewer_moves_would_do() -> None:
    """All orders of five actions, against taking out ever larger sets of them."""
    row = tuple(Action(0, ActionType.FORWARD, j) for j in range(5))
    for other in permutations(row):
        kept = max(
            len(chosen)
            for mask in range(32)
            if (chosen := [a for i, a in enumerate(other) if mask >> i & 1]) == sorted(chosen)
        )
        assert num_moved(row, other) == 5 - kept


def test_of_very_many_changes_the_first_are_told() -> None:
    before = programs(*(f"{d}F0 {d}B0" for d in range(50)))
    after = programs(*(f"{d}F0 {d}I0 {d}W0" for d in range(50)))
    lines = difference_lines(compare_programs(before, after))
    assert len(lines) == 41
    assert lines[-1] == "... and 60 more (--json has all)"


# What changed between two problems, field by field.


def test_fields_that_change_alike_stand_in_one_line() -> None:
    before = problem([stage(d) for d in range(4)], m=2)
    after = before.model_copy(
        update={
            "num_microbatches": 4,
            "stages": [
                one_stage.model_copy(update={"forward_ms": 2.0 if i < 3 else 1.5})
                for i, one_stage in enumerate(before.stages)
            ],
        }
    )
    assert difference_lines(compare_problems(before, after)) == [
        "num_microbatches: 2 -> 4 (+100.0%)",
        "stages[0..2].forward_ms: 1.0 -> 2.0 (+100.0%)",
        "stages[3].forward_ms: 1.0 -> 1.5 (+50.0%)",
    ]


def test_links_and_hosts_are_found_by_what_they_are() -> None:
    whole, _ = everything_at_once()
    links = [link.model_copy(update={"latency_ms": 9.0}) for link in whole.links[:1]]
    after = whole.model_copy(
        update={"links": [*links, *whole.links[1:]], "hosts": [{"name": "other"}]}
    )
    lines = difference_lines(compare_problems(whole, after))
    assert lines == [
        "hosts[host0].memory_bytes: 40000000 -> null",
        "links[0->1].latency_ms: 0.5 -> 9.0 (+1,700.0%)".replace(",", ""),
    ]


def test_what_only_one_of_them_has_is_null_in_the_other() -> None:
    lines = difference_lines(compare_problems(problem([stage()]), problem([stage(), stage()])))
    assert "stages[1].forward_ms: null -> 1.0" in lines


def test_costs_follow_from_the_problems_alone() -> None:
    before = problem([stage(0, 1, 2, 3), stage(1)], [{"memory_bytes": 30}] * 2, m=4)
    after = before.model_copy(update={"num_microbatches": 8})
    assert [(cost.before, cost.after) for cost in problem_costs(before, after)] == [
        (24, 48),
        (80, 160),
        (60, 60),
    ]


@given(problems(), problems())
def test_it_is_empty_exactly_where_the_hashes_agree(left: Problem, right: Problem) -> None:
    assert compare_problems(left, left.model_copy(update={"name": "other"})).is_empty
    same = left.problem_hash == right.problem_hash
    assert compare_problems(left, right).is_empty == same
