"""The closed form: serial execution attains it, and nothing below it works."""

import random
from typing import Any

import pytest
from hypothesis import given

from optpipe import Problem, check
from optpipe_solver import SolveStatus, feasibility, smallest_memory, solve
from optpipe_solver.families.classic import build_serial
from tests.building import bus, problem, stage
from tests.solver.exhaustive import least_of_one_microbatch, optimum
from tests.solver.starting import with_memory
from tests.strategies import Case, cases, problems

_FEW = {1: 60, 2: 60, 3: 12}


@given(problems(menus=True))
def test_serial_execution_fits_the_smallest_memory(given: Problem) -> None:
    """At exactly the smallest memory there is a legal schedule."""
    tight = with_memory(given, smallest_memory(given))
    check(tight, build_serial(tight))


@given(cases(tight=True, menus=True))
def test_no_schedule_needs_less(case: Case) -> None:
    """Whatever a legal schedule gets by with is at least the closed form."""
    for limit, device in zip(smallest_memory(case.problem), case.problem.devices, strict=True):
        assert device.memory_bytes >= limit


@given(cases(tight=True, menus=True))
def test_what_has_a_schedule_is_feasible(case: Case) -> None:
    """Host limits included: the decision never says no where a schedule exists."""
    feasible = feasibility(case.problem)
    assert feasible.plan is not None, feasible.message
    check(case.problem, build_serial(case.problem))


def of_one_device(rng: random.Random, num_stages: int, most: int) -> Problem:
    """One micro-batch on one device; menus with every kind of mode, workspaces as large as all."""

    def mode(name: str, activation: int) -> dict[str, Any]:
        kept = rng.randint(0, activation)
        found = {"name": name, "forward_bytes": kept, "offload_bytes": rng.choice([0, kept])}
        if again := rng.choice([None, "apart", "inside"]):
            found |= {"recompute": again, "recompute_ms": 1.0}
        if again == "inside":
            found["inside_bytes"] = rng.randint(0, 4)
        return found | _workspaces(rng)

    stages = []
    for _ in range(num_stages):
        activation = rng.randint(0, 9)
        menu = [mode(str(number), activation) for number in range(rng.randint(0, most))]
        cost = {"activation_bytes": activation, "weight_context_bytes": rng.randint(0, 4)}
        times = dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms"), 1.0)
        cost |= _workspaces(rng)
        costs = [{**cost, **times, "modes": [{"name": "keep"}, *menu]}]
        stages.append({"device": 0, "static_bytes": 3, "costs": costs})
    return problem(stages, [bus(memory_bytes=1000)], m=1, format="optpipe/problem/v2")


def _workspaces(rng: random.Random) -> dict[str, int]:
    kinds = ("forward", "backward_input", "backward_weight", "backward", "recompute")
    return {f"{kind}_workspace_bytes": rng.choice([0, 0, 0, 5, 12]) for kind in kinds}


@pytest.mark.parametrize(("num_stages", "most"), [(1, 4), (2, 2), (3, 1)])
def test_smallest_memory_and_host_bytes_are_those_of_exhaustive_search(
    num_stages: int, most: int
) -> None:
    """All modes and all orders of one micro-batch; a W that waits, and a RECOMPUTE before it."""
    rng = random.Random(num_stages + 1)
    for _ in range(_FEW[num_stages]):
        given = of_one_device(rng, num_stages, most)
        least, _ = least_of_one_microbatch(given)
        assert smallest_memory(given) == [least + 3 * num_stages]
        room = least + rng.choice([0, 0, 3])
        tight = with_memory(given, [int(room) + 3 * num_stages])
        _, on_host = least_of_one_microbatch(tight, room)
        for host in {int(on_host), max(0, int(on_host) - 1)}:
            hosts = [{"name": "host0", "memory_bytes": host}]
            limited = tight.model_copy(update={"hosts": hosts})
            found = feasibility(limited)
            if host < on_host:
                assert found.needs == {"hosts[0].memory_bytes": on_host}
            else:
                check(limited, build_serial(limited))


def test_a_w_may_wait_for_an_earlier_stage() -> None:
    """Behind its I the W of stage 1 would stand beside stage 0: 110 bytes; behind that's I: 100."""
    workspaces = {"backward_weight_workspace_bytes": 100, "backward_workspace_bytes": 200}
    given = problem([stage(0, weight_context_bytes=0, **workspaces)] * 2, [bus()], m=1)
    assert smallest_memory(given) == [100]
    assert optimum(with_memory(given, [100])) < float("inf")
    assert solve(with_memory(given, [100]), time_limit_s=5).status is SolveStatus.OPTIMAL


def test_infeasible_names_the_device_and_the_smallest_memory() -> None:
    """A limit below one activation: proven, with path and value."""
    given = problem([stage(0, activation_bytes=10), stage(1)], [bus(memory_bytes=9), bus()])
    result = solve(given, time_limit_s=1)
    assert result.status is SolveStatus.INFEASIBLE
    assert result.schedule is None
    assert result.needs == {"devices[0].memory_bytes": 10}
    assert "devices[0].memory_bytes must be at least 10" in result.message
