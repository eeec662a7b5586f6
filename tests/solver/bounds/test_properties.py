"""What every bound must be: below every schedule, and blind to what does not matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, simulate
from optpipe_solver.bounds import lower_bound, lower_bounds
from optpipe_solver.bounds.configurations import configurations_ms
from optpipe_solver.feasibility import smallest_memory
from optpipe_solver.incumbent import grid_ms
from tests.building import UNIT, problem, stage
from tests.solver.bounds.judging import assert_below, line, of_families
from tests.solver.exhaustive import optimum, tiny_problems
from tests.strategies import Case, cases, documents, few, random_modes

if TYPE_CHECKING:
    import random
    from typing import Any


@given(st.one_of(cases(menus=True, pairs=True), cases(tight=True, menus=True, pairs=True)))
def test_every_bound_is_below_every_schedule(case: Case) -> None:
    """Each argument alone; limits may be exactly what the schedule needs, where it is sharpest."""
    assert_below(
        case.problem, simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    )


@few(25)
@given(tiny_problems(menus=True))
def test_every_bound_is_below_the_best_of_all_programs(problem: Problem) -> None:
    """Exhaustive search is the judge where it is possible."""
    assert_below(problem, optimum(problem))


@few(20)
@given(st.one_of(cases(tight=True), cases(tight=True, pairs=True)))
def test_every_bound_is_below_all_families(case: Case) -> None:
    """Families look for good schedules, random programs do not."""
    assert_below(case.problem, min(of_families(case.problem)))


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("activations", [1, 1.5, 2, 3, 4, 6, 8, 16])
def test_every_bound_is_below_all_families_of_a_line(activations: float, objective: str) -> None:
    """Good schedules of a published profile under every limit."""
    given = line(4, 10, activations, objective)
    assert_below(given, min(of_families(given)))


@pytest.mark.parametrize(
    ("shape", "room", "m"),
    [("v", 9, 10), ("v", 9, 60), ("v", 7, 10), ("v", 4, 10), ("loop", 9, 10), ("loop", 5, 10)],
)
@pytest.mark.parametrize("hidden_ms", [1.0, 0.6])
def test_every_bound_is_below_good_schedules_in_pairs(
    shape: str, room: int, m: int, hidden_ms: float
) -> None:
    """DualPipeV and building blocks; a V with room for nine chunks is as short as can be.

    On a loop with room for five what pairs hold says most.
    """
    back = [3, 2, 1, 0] if shape == "v" else [0, 1, 2, 3]
    given = problem(
        [stage(d, 1, 1, 1, activation_bytes=1) for d in (0, 1, 2, 3, *back)],
        [{"memory_bytes": room}] * 4,
        m=m,
        format="optpipe/problem/v2",
        pairs=[
            {"forward": a, "backward": b, "hidden_ms": hidden_ms}
            for a, here in enumerate((0, 1, 2, 3, *back))
            for b, there in enumerate((0, 1, 2, 3, *back))
            if here == there
        ],
    )
    best = min(of_families(given))
    assert_below(given, best)
    if (shape, room, m, hidden_ms) == ("v", 9, 10, 1.0):
        assert best == max(bound.ms for bound in lower_bounds(given)) == 51
    if (shape, room) == ("loop", 5):
        assert lower_bound(given).method == "memory with pairs"


@given(cases(menus=True), st.sampled_from([1.0, 0.75]))
def test_every_objective_is_on_the_grid(case: Case, latency_ms: float) -> None:
    """Of two lengths on a grid the better one is so by a step: menus, lanes and links count."""
    data = case.problem.model_dump(mode="json", by_alias=True)
    data["links"] = [link | {"latency_ms": latency_ms} for link in data["links"]]
    problem = Problem.parse(data)
    length = simulate(problem, case.programs).objective_ms(problem.objective)
    grid = grid_ms(problem)
    if grid > 0:
        assert length / grid == pytest.approx(round(length / grid), abs=1e-6)


def test_a_grid_knows_how_long_a_message_leaves() -> None:
    """Two messages of 1 ms, 1 ms on their way: 2 ms alone, but 3 for the second."""
    link = {"from": 0, "to": 1, "latency_ms": 1.0, "bandwidth_gb_per_s": 1.0}
    ends = [stage(0, 0, 0, 0, output_bytes=UNIT), stage(1, 0, 0, 0)]
    given = problem(ends, m=2, links=[link], format="optpipe/problem/v2")
    assert grid_ms(given) == pytest.approx(1.0)


def _scaled(document: dict[str, Any], factor: float) -> dict[str, Any]:
    """The document with every duration times a factor; bandwidths the other way round."""
    devices = [
        {
            key: value / factor if key.endswith("per_s") and value else value
            for key, value in device.items()
        }
        for device in document["devices"]
    ]
    links = [
        link
        | {"latency_ms": link["latency_ms"] * factor}
        | {"bandwidth_gb_per_s": link["bandwidth_gb_per_s"] and link["bandwidth_gb_per_s"] / factor}
        for link in document["links"]
    ]
    stages = [_longer(stage, factor) for stage in document["stages"]]
    return document | {"devices": devices, "links": links, "stages": stages}


def _longer(data: Any, factor: float) -> Any:
    """A stage, with its costs and modes, in which every duration is times a factor."""
    if isinstance(data, list):
        return [_longer(one, factor) for one in data]
    if not isinstance(data, dict):
        return data
    return {
        key: value * factor if key.endswith("_ms") and value else _longer(value, factor)
        for key, value in data.items()
    }


@given(documents(menus=True), st.sampled_from([0.5, 2.0, 4.0]))
def test_scaling_every_duration_scales_every_bound(document: dict[str, Any], factor: float) -> None:
    """A bound is a time: its unit does not matter."""
    before = lower_bounds(Problem.parse(document))
    after = lower_bounds(Problem.parse(_scaled(document, factor)))
    for one, other in zip(before, after, strict=True):
        assert other.ms == pytest.approx(one.ms * factor, rel=1e-9, abs=1e-9)


@given(cases(tight=True, menus=True), st.integers(1, 10_000_000))
def test_more_memory_never_raises_a_bound(case: Case, extra: int) -> None:
    """What is possible with less is possible with more."""
    problem = case.problem
    devices = [
        device.model_copy(update={"memory_bytes": device.memory_bytes + extra})
        for device in problem.devices
    ]
    richer = problem.model_copy(update={"devices": devices})
    for one, other in zip(lower_bounds(problem), lower_bounds(richer), strict=True):
        assert other.ms <= one.ms * (1 + 1e-9) + 1e-9


@given(cases(tight=True, menus=True), st.data())
def test_one_mode_more_never_raises_a_bound(case: Case, data: st.DataObject) -> None:
    """What is possible with fewer modes is possible with more; so is the smallest memory."""
    richer = case.problem.model_dump(mode="json", by_alias=True)
    if "costs" not in richer["stages"][0]:
        return
    for held in richer["stages"]:
        (cost,) = held["costs"]
        one_more = data.draw(random_modes("one more", cost["activation_bytes"]))
        cost["modes"] = [*cost["modes"], one_more]
    after = Problem.parse(richer)
    known = {bound.method: bound.ms for bound in lower_bounds(after)}
    for one in lower_bounds(case.problem):  # menus have an argument more
        assert known[one.method] <= one.ms * (1 + 1e-9) + 1e-9, one.method
    assert configurations_ms(after) <= configurations_ms(case.problem) * (1 + 1e-9) + 1e-9
    for less, most in zip(smallest_memory(after), smallest_memory(case.problem), strict=True):
        assert less <= most


@given(cases(tight=True), st.randoms(use_true_random=False))
def test_numbering_of_devices_does_not_matter(case: Case, rng: random.Random) -> None:
    """Devices have names, not ranks."""
    problem = case.problem
    order = list(range(len(problem.devices)))
    rng.shuffle(order)
    place = {old: new for new, old in enumerate(order)}
    data = problem.model_dump(by_alias=True)
    data["devices"] = [data["devices"][old] for old in order]
    data["stages"] = [held | {"device": place[held["device"]]} for held in data["stages"]]
    data["links"] = [
        link | {"from": place[link["from"]], "to": place[link["to"]]} for link in data["links"]
    ]
    renamed = Problem.parse(data)
    for one, other in zip(lower_bounds(problem), lower_bounds(renamed), strict=True):
        assert other.ms == pytest.approx(one.ms, rel=1e-9, abs=1e-9)
