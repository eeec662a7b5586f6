"""What every bound must be: below every schedule, and blind to what does not matter."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, simulate
from optpipe_solver.bounds import lower_bounds
from tests.solver.bounds.judging import assert_below, line, of_families
from tests.solver.exhaustive import optimum
from tests.strategies import Case, cases, documents, few, random_programs, tightened

if TYPE_CHECKING:
    from typing import Any


@given(cases())
def test_every_bound_is_below_every_schedule(case: Case) -> None:
    """Each argument alone, under both objectives."""
    assert_below(
        case.problem, simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    )


@given(cases(tight=True))
def test_every_bound_is_below_schedules_that_fill_the_memory(case: Case) -> None:
    """Limits are exactly what the schedule needs: the memory arguments are at their sharpest."""
    assert_below(
        case.problem, simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    )


@st.composite
def _tiny(draw: st.DrawFn) -> Problem:
    """Few enough actions for all programs, with the tightest limits some program needs."""
    document = draw(documents())
    num_cells = len(document["stages"]) * document["num_microbatches"]
    while num_cells > 2:
        if document["num_microbatches"] > 1:
            document["num_microbatches"] -= 1
        else:
            document["stages"].pop()
        num_cells = len(document["stages"]) * document["num_microbatches"]
    problem = Problem.parse(document)
    programs = random_programs(problem, random.Random(draw(st.integers(0, 2**32))))
    return tightened(Case(problem, programs)).problem


@few(15)
@given(_tiny())
def test_every_bound_is_below_the_best_of_all_programs(problem: Problem) -> None:
    """Exhaustive search is the judge where it is possible."""
    assert_below(problem, optimum(problem))


@few(15)
@given(cases(tight=True))
def test_every_bound_is_below_all_families(case: Case) -> None:
    """Families look for good schedules, random programs do not."""
    for length_ms in of_families(case.problem):
        assert_below(case.problem, length_ms)


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("activations", [1, 1.5, 2, 3, 4, 6, 8, 16])
def test_every_bound_is_below_all_families_of_a_line(activations: float, objective: str) -> None:
    """Good schedules of a published profile under every limit."""
    given = line(4, 10, activations, objective)
    for length_ms in of_families(given):
        assert_below(given, length_ms)


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
    stages = [
        {
            key: value * factor if key.endswith("_ms") and value else value
            for key, value in stage.items()
        }
        for stage in document["stages"]
    ]
    return document | {"devices": devices, "links": links, "stages": stages}


@given(documents(), st.sampled_from([0.5, 2.0, 4.0]))
def test_scaling_every_duration_scales_every_bound(document: dict[str, Any], factor: float) -> None:
    """A bound is a time: its unit does not matter."""
    before = lower_bounds(Problem.parse(document))
    after = lower_bounds(Problem.parse(_scaled(document, factor)))
    for one, other in zip(before, after, strict=True):
        assert other.ms == pytest.approx(one.ms * factor, rel=1e-9, abs=1e-9)


@given(cases(tight=True), st.integers(1, 10_000_000))
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
