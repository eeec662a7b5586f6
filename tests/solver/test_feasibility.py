"""The closed form: serial execution attains it, and nothing below it works."""

from __future__ import annotations

import pytest
from hypothesis import given

from optpipe import Problem, check
from optpipe_solver import SolveStatus, feasibility, smallest_memory, solve
from optpipe_solver.families.classic import build_serial
from tests.building import UNIT, bus, problem, stage
from tests.solver.exhaustive import optimum
from tests.strategies import Case, cases, problems


def with_memory(given: Problem, memory: list[int]) -> Problem:
    """The same problem with other device limits."""
    data = given.model_dump(mode="json", by_alias=True)
    for device, limit in zip(data["devices"], memory, strict=True):
        device["memory_bytes"] = limit
    return Problem.parse(data)


@given(problems())
def test_serial_execution_fits_the_smallest_memory(given: Problem) -> None:
    """At exactly the smallest memory there is a legal schedule."""
    tight = with_memory(given, smallest_memory(given))
    check(tight, build_serial(tight))


@given(cases(tight=True))
def test_no_schedule_needs_less(case: Case) -> None:
    """Whatever a legal schedule gets by with is at least the closed form."""
    for limit, held in zip(smallest_memory(case.problem), case.problem.devices, strict=True):
        assert held.memory_bytes >= limit


@given(cases(tight=True))
def test_what_has_a_schedule_is_feasible(case: Case) -> None:
    """Host limits included: the decision never says no where a schedule exists."""
    feasible = feasibility(case.problem)
    assert feasible.plan is not None, feasible.message
    check(case.problem, build_serial(case.problem))


def test_one_byte_less_is_infeasible_by_exhaustive_search() -> None:
    """Two micro-batches, two stages on one device: the closed form is exact."""
    stages = [
        stage(0, activation_bytes=10, weight_context_bytes=12, static_bytes=3),
        stage(0, activation_bytes=7, weight_context_bytes=9, forward_workspace_bytes=1),
    ]
    given = problem(stages, [bus(memory_bytes=1000)], m=1)
    (limit,) = smallest_memory(given)
    assert limit == 3 + 10 + 7 + 1
    assert optimum(with_memory(given, [limit])) < float("inf")
    assert optimum(with_memory(given, [limit - 1])) == float("inf")


def test_infeasible_names_the_device_and_the_smallest_memory() -> None:
    """A limit below one activation: proven, with path and value."""
    given = problem([stage(0, activation_bytes=10), stage(1)], [bus(memory_bytes=9), bus()])
    result = solve(given, time_limit_s=1)
    assert result.status is SolveStatus.INFEASIBLE
    assert result.schedule is None
    assert result.needs == {"devices[0].memory_bytes": 10}
    assert "devices[0].memory_bytes must be at least 10" in result.message


def test_a_host_limit_makes_infeasible_what_the_device_allows() -> None:
    """Two stages on one device, room for one activation and a half: one must go to the host."""
    held = {"activation_bytes": 10 * UNIT, "offload_bytes": 6 * UNIT}
    given = problem(
        [stage(0, **held), stage(0, **held)],
        [bus(memory_bytes=15 * UNIT)],
        hosts=[{"name": "host0", "memory_bytes": 5 * UNIT}],
    )
    assert feasibility(given).needs == {"hosts[0].memory_bytes": 6 * UNIT}


def test_recompute_lowers_the_smallest_memory() -> None:
    """The earlier stage keeps its checkpoint only."""
    plain = [stage(0, activation_bytes=10), stage(0, activation_bytes=10)]
    again = [{**plain[0], "recompute_ms": 1.0, "checkpoint_bytes": 2}, plain[1]]
    assert smallest_memory(problem(plain, [bus()])) == [20]
    assert smallest_memory(problem(again, [bus()])) == [12]


@pytest.mark.parametrize("reserved", [0, 5])
def test_reserved_and_static_bytes_count(reserved: int) -> None:
    """memory_bytes is the device's whole budget."""
    given = problem([stage(0, activation_bytes=10, static_bytes=7)], [bus(reserved_bytes=reserved)])
    assert smallest_memory(given) == [reserved + 7 + 10]
