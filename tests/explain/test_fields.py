"""What changed between two problems, field by field."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given

from optpipe.explain import compare_problems, difference_lines, problem_costs
from optpipe.sweep import sweep
from tests.building import everything_at_once, problem, stage
from tests.strategies import problems

if TYPE_CHECKING:
    from optpipe import Problem


def test_fields_that_change_alike_stand_in_one_line() -> None:
    before = problem([stage(d) for d in range(4)], m=2)
    after = before.model_copy(
        update={
            "num_microbatches": 4,
            "stages": [
                held.model_copy(update={"forward_ms": 2.0 if i < 3 else 1.5})
                for i, held in enumerate(before.stages)
            ],
        }
    )
    assert difference_lines(compare_problems(before, after)) == [
        "num_microbatches: 2 -> 4 (+100.0 %)",
        "stages[0..2].forward_ms: 1.0 -> 2.0 (+100.0 %)",
        "stages[3].forward_ms: 1.0 -> 1.5 (+50.0 %)",
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
        "links[0->1].latency_ms: 0.5 -> 9.0 (+1,700.0 %)".replace(",", ""),
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


def test_a_variation_of_a_sweep_is_told_by_what_it_varied() -> None:
    before = problem([stage(0), stage(1)])
    (varied,) = sweep(before, {"memory_scale": [0.5]})
    (line,) = difference_lines(compare_problems(before, varied.problem))
    assert line == "devices[0, 1].memory_bytes: 1000000000000 -> 500000000000 (-50.0 %)"
