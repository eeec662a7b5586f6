"""An earlier plan as a start: its cut is recognised, and nothing of it is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import assume, given
from hypothesis import strategies as st

from optpipe import Problem, load_problem
from optpipe.formats.json import dump_problem
from optpipe_solver.plan import plan
from optpipe_solver.plan.search import cut_of
from tests.solver.plan.models import gpus, layer, model, models
from tests.strategies import few

if TYPE_CHECKING:
    from optpipe_solver import Progress


@given(models(), st.data())
def test_the_cut_of_a_problem_is_recognised_after_a_round_trip(found, data) -> None:
    """Whatever sizes come back make the same problem."""
    stages = min(len(found.devices), found.num_layers)
    inside = range(1, found.num_layers)
    ends = data.draw(st.permutations(inside))[: data.draw(st.integers(0, stages - 1))]
    cuts = [0, *sorted(ends), found.num_layers]
    sizes = [end - begin for begin, end in pairwise(cuts)]
    problem = found.problem(range(len(sizes)), sizes)
    again = cut_of(found, load_problem(dump_problem(problem)))
    # A layer of nothing may stand on either side of a cut: then the first one that fits counts.
    assume(all(one.activation_bytes or one.forward_ms for one in found.layers))
    assert again is not None
    assert found.problem(problem.placement, again) == problem


def test_a_problem_of_another_model_is_no_cut() -> None:
    """Neither one with other layers, nor one with more or fewer of them."""
    small = model([layer()] * 4, gpus(2))
    assert cut_of(small, model([layer(f=2)] * 4, gpus(2)).problem([0, 1], [2, 2])) is None
    assert cut_of(small, model([layer()] * 3, gpus(2)).problem([0, 1], [2, 1])) is None
    assert cut_of(small, model([layer()] * 4, gpus(3)).problem([0, 2], [2, 2])) is None


@few(5)
@given(models(roomy=True))
def test_a_plan_is_never_worse_than_its_start(found) -> None:
    """The start is the first thing that is told, with its problem."""
    first = plan(found, time_limit_s=0.5, chunks=(1,))
    assert first.problem is not None
    assert first.schedule is not None
    told: list[Progress] = []
    start = (first.problem, first.schedule.programs)
    second = plan(found, time_limit_s=0.05, chunks=(1,), start=start, on_progress=told.append)
    assert second.schedule is not None
    assert told[0].objective_ms == first.schedule.objective_ms
    assert told[0].problem == first.problem
    assert second.schedule.objective_ms <= first.schedule.objective_ms


def test_every_improvement_names_the_problem_it_solves() -> None:
    """The last one told is the one returned."""
    found = model([layer(f=f) for f in (1, 2, 3, 1, 2)], gpus(2))
    told: list[Progress] = []
    result = plan(found, time_limit_s=0.5, on_progress=told.append)
    assert all(isinstance(news.problem, Problem) for news in told)
    assert result.chosen is not None
    assert (told[-1].problem, told[-1].objective_ms) == (result.problem, result.chosen.final_ms)
