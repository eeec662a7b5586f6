"""What memory buys: which problems share a line, and what carries over along it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import check, simulate
from optpipe.frontier import Point, family_of, frontier, label_of, memory_of
from optpipe.sweep import sweep
from tests import building
from tests.strategies import cases, problems


def point(index: int, *memory: int, family: str = "f", **found: Any) -> Point:
    return Point(index=index, family=family, label=family, memory_bytes=memory, **found)


def test_families_are_lines_in_order_of_appearance_from_least_memory_to_most() -> None:
    """Two families, their points in disorder."""
    points = [point(0, 9), point(1, 5, family="g"), point(2, 3), point(3, 4, family="g")]
    lines = frontier(points)
    assert [line.label for line in lines] == ["f", "g"]
    assert [[p.index for p in line.points] for line in lines] == [[2, 0], [3, 1]]
    assert [p.limit_bytes for p in lines[0].points] == [3, 9]


def test_schedules_carry_to_more_memory_and_bounds_to_less() -> None:
    """By hand: the middle was solved worst and bounded best; the least has nothing."""
    (line,) = frontier(
        [
            point(0, 1, is_infeasible=True),
            point(1, 2),
            point(2, 3, objective_ms=12.0, bound_ms=8.0),
            point(3, 4, objective_ms=14.0, bound_ms=9.0),
            point(4, 5, bound_ms=7.0),
        ]
    )
    assert [p.objective_ms for p in line.points] == [None, None, 12.0, 12.0, 12.0]
    assert [p.bound_ms for p in line.points] == [9.0, 9.0, 9.0, 9.0, 7.0]
    assert [p.is_infeasible for p in line.points] == [True, False, False, False, False]


def test_where_nothing_fits_nothing_fits_less() -> None:
    """A smaller limit that was not decided is decided by the larger one."""
    (line,) = frontier([point(0, 1), point(1, 2, is_infeasible=True), point(2, 3)])
    assert [p.is_infeasible for p in line.points] == [True, True, False]


def test_nothing_carries_over_between_limits_that_do_not_compare() -> None:
    """More on one device and less on the other: neither fits the other."""
    (line,) = frontier(
        [
            point(0, 2, 5, objective_ms=10.0, bound_ms=9.0),
            point(1, 5, 2, objective_ms=20.0, bound_ms=1.0),
            point(2, 5, 5),
        ]
    )
    assert [(p.index, p.objective_ms, p.bound_ms) for p in line.points] == [
        (0, 10.0, 9.0),
        (1, 20.0, 1.0),
        (2, 10.0, None),
    ]


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ({}, "named"),
        ({"memory_scale": 1, "devices[*].memory_bytes": 2}, "best schedule"),
        ({"memory_gb": 1, "placement": "v", "offload": True}, 'placement = "v", offload = true'),
    ],
)
def test_a_line_is_called_by_what_distinguishes_it(values: dict[str, Any], label: str) -> None:
    """All axes but those of memory; a listed problem by its name."""
    assert label_of(values, "named") == label


@given(problems(), st.integers(0, 10**6))
def test_a_family_knows_neither_names_nor_the_memory_of_devices(problem, more: int) -> None:
    """Other memory is the same family, other times are another one."""
    family = family_of(problem)
    devices = [
        {**device.model_dump(), "name": f"x{index}", "memory_bytes": device.memory_bytes + more}
        for index, device in enumerate(problem.devices)
    ]
    changed = problem.model_copy(update={"devices": devices, "name": "other"})
    assert memory_of(changed) == tuple(memory + more for memory in memory_of(problem))
    assert family_of(changed) == family
    slower = sweep(problem, {"stages[0].forward_ms": [problem.stages[0].forward_ms + 1]})
    assert family_of(slower[0].problem) != family


@given(cases(), st.integers(0, 10**6))
def test_programs_that_fit_a_limit_fit_a_larger_one_and_take_the_same_time(case, more: int) -> None:
    """What `frontier` takes for granted: schedules carry over to more memory."""
    problem, programs = case
    devices = [
        device.model_copy(update={"memory_bytes": device.memory_bytes + more})
        for device in problem.devices
    ]
    larger = problem.model_copy(update={"devices": devices})
    check(problem, programs)
    check(larger, programs)
    assert simulate(larger, programs) == simulate(problem, programs)


def test_the_smallest_pipeline_has_one_line_over_its_memory() -> None:
    """From problems to a line: the index of each is found again."""
    base = building.problem([building.stage(0)], [{"memory_bytes": 100}])
    found = sweep(base, {"memory_scale": [1, 0.5]})
    points = [
        Point(
            index=index,
            family=family_of(item.problem),
            label=label_of(item.values, base.name),
            memory_bytes=memory_of(item.problem),
        )
        for index, item in enumerate(found)
    ]
    (line,) = frontier(points)
    assert [(p.index, p.limit_bytes) for p in line.points] == [(1, 50), (0, 100)]
