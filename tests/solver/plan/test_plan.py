"""``plan``: never worse than the naive cut, honest about proofs, clear where nothing fits."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from examples.make_llama3_8b import MODEL_FILE, make_model
from optpipe import InputError, Problem, check_schedule, dump_problem, load_problem, simulate
from optpipe.formats.json import dump_model
from optpipe.units import format_ms
from optpipe_solver import Progress, SolveStatus
from optpipe_solver.bounds import lower_bound
from optpipe_solver.budget import Stop
from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.families.classic import build_one_f_one_b, build_serial
from optpipe_solver.feasibility import feasibility
from optpipe_solver.plan import Fate, PlanResult, plan
from optpipe_solver.plan.lines import PlacementLine, make_lines
from optpipe_solver.plan.search import CutCandidate, PlanSearch, cut_of
from tests.solver.exhaustive import optimum
from tests.solver.plan.models import all_cuts, gpus, layer, model, models
from tests.strategies import few

if TYPE_CHECKING:
    from optpipe import Schedule
    from optpipe.model import Model
    from optpipe.requests import PlacementKind
    from optpipe_solver.plan.search import PlanRow


def check_result(found: Model, result: PlanResult) -> tuple[Schedule, PlanRow]:
    """What must hold of every plan with a schedule, which is returned with its row."""
    assert result.problem is not None
    assert result.schedule is not None
    assert result.chosen is not None
    check_schedule(result.problem, result.schedule)
    chosen = result.chosen
    assert chosen.fate is Fate.CHOSEN
    assert found.problem(chosen.placement, chosen.sizes) == result.problem
    assert result.schedule.objective_ms == chosen.final_ms
    assert result.bound_ms is not None
    assert result.bound_ms <= chosen.final_ms * (1 + 1e-9)
    for row in result.rows:
        assert row.final_ms is None or chosen.final_ms <= row.final_ms
        if row.fate is Fate.PROVEN:
            assert row.bound_ms is not None
            assert row.bound_ms >= chosen.final_ms * (1 - 1e-9)
    return result.schedule, chosen


@few(10)
@given(models())
def test_never_worse_than_any_candidate_and_never_below_the_bound(found: Model) -> None:
    """On random models: a schedule exists exactly where it must, and the numbers fit together."""
    result = plan(found, time_limit_s=600, work_limit=0.3, chunks=(1, 2))
    if result.schedule is not None:
        check_result(found, result)
        return
    assert result.status in {SolveStatus.INFEASIBLE, SolveStatus.UNKNOWN}
    assert "memory" in result.message
    order = tuple(range(len(found.devices)))
    for sizes in all_cuts(found.num_layers, len(order)):
        assert feasibility(found.problem(order, sizes)).plan is None


def test_it_finds_the_best_cut_of_all_by_brute_force() -> None:
    """Two devices, four unequal layers, two micro-batches: every cut, every program."""
    found = model([layer(2, 3, 1), layer(1, 1, 1), layer(1, 1, 1), layer(3, 2, 2)], gpus(2), m=2)
    best = min(optimum(found.problem((0, 1), sizes)) for sizes in all_cuts(4, 2))
    result = plan(found, time_limit_s=4, chunks=(1,), placements=["linear"])
    schedule, _ = check_result(found, result)
    assert schedule.objective_ms == best


def test_a_plan_in_pairs_is_as_short_as_can_be() -> None:
    """Eight layers whose F hides wholly, on four devices with room for nine: a V, at its bound."""
    given = model([layer(hidden_ms=1.0, repeat=8)], gpus(4, memory_bytes=90), m=10)
    found = plan(given, work_limit=0.5, time_limit_s=600, chunks=(1, 2))
    schedule, _ = check_result(given, found)
    assert schedule.makespan_ms == schedule.bound_ms == 51
    assert any(action.paired for program in schedule.programs for action in program)


@pytest.mark.parametrize("placement", ["v", "loop"])
def test_a_plan_is_never_worse_than_published_schedules_in_pairs(placement: PlacementKind) -> None:
    """Of the cut that it chose, even where there was no time to look at anything."""
    layers = [layer(hidden_ms=0.8, repeat=7), layer(2)]
    given = model(layers, gpus(2, memory_bytes=300), m=8)
    found = plan(given, work_limit=0.001, time_limit_s=600, chunks=(2,), placements=(placement,))
    assert found.schedule is not None
    assert found.problem is not None
    families = [one for one in FAMILIES if one.name in {"dualpipe-v", "1f1b-overlap"}]
    lengths = []
    for family in families:
        with suppress(NotApplicable):
            lengths.append(simulate(found.problem, family.build(found.problem)).makespan_ms)
    assert found.schedule.makespan_ms <= min(lengths, default=math.inf)


def test_a_huge_head_gets_an_uneven_cut() -> None:
    """Twelve layers and a head worth four: the last device gets fewer, and the plan is faster."""
    found = model([layer(repeat=12), layer(4, 4, 4)], gpus(4), m=8)
    result = plan(found, time_limit_s=3, chunks=(1,), placements=["linear"])
    schedule, chosen = check_result(found, result)
    assert chosen.sizes == (4, 4, 4, 1)
    assert result.even.sizes == (4, 3, 3, 3)
    assert result.even.final_ms is not None
    assert schedule.objective_ms < result.even.final_ms
    shown = result._repr_html_()
    assert f"<td>{schedule.objective}</td><td>{format_ms(schedule.objective_ms)} ms" in shown
    for row in (chosen, result.even):
        assert f"<td>{' '.join(map(str, row.sizes))}</td>" in shown
    assert len(repr(result)) < 200


def test_where_nothing_fits_it_says_the_smallest_memory() -> None:
    """Proven for every cut, with the number that works: given that, a plan exists."""
    found = model([layer(repeat=4, static_bytes=100)], gpus(2, memory_bytes=219), m=2)
    result = plan(found, time_limit_s=2, chunks=(1, 2))
    assert result.status is SolveStatus.INFEASIBLE
    assert result.schedule is None
    assert result.needs == {"devices[0].memory_bytes": 220, "devices[1].memory_bytes": 220}
    assert "(proven)" in result.message
    assert f"<td>{result.message}</td>" in result._repr_html_()
    assert "with layers 2 2" in result.message
    assert "devices[0].memory_bytes must be at least 220" in result.message
    enough = model([layer(repeat=4, static_bytes=100)], gpus(2, memory_bytes=220), m=2)
    assert plan(enough, time_limit_s=2, chunks=(1,)).schedule is not None


def test_an_even_cut_that_does_not_fit_is_no_obstacle() -> None:
    """The first layer is heavy: one device cannot hold two of the three."""
    found = model([layer(static_bytes=80), layer(), layer()], gpus(2, memory_bytes=95), m=2)
    result = plan(found, time_limit_s=1, chunks=(1,), placements=["linear"])
    _, chosen = check_result(found, result)
    assert result.even.fate is Fate.NO_MEMORY
    assert chosen.sizes == (1, 2)


def test_a_model_on_one_device_is_one_stage() -> None:
    """Nothing to choose, optimal at once."""
    found = model([layer(repeat=3)], gpus(1), m=2)
    result = plan(found, time_limit_s=1)
    assert result.status is SolveStatus.OPTIMAL
    assert check_result(found, result)[0].objective_ms == 18


def test_progress_falls_and_its_last_word_is_the_result() -> None:
    """Every improvement is told once, with its problem; the bound of the set is never above."""
    news_told: list[Progress] = []
    found = model([layer(repeat=6), layer(2, 2, 2)], gpus(2), m=4)
    result = plan(found, time_limit_s=1, chunks=(1, 2), on_progress=news_told.append)
    values = [news.objective_ms or math.inf for news in news_told]
    assert values == sorted(values, reverse=True)
    assert result.schedule is not None
    assert values[-1] == result.schedule.objective_ms
    assert all(isinstance(news.problem, Problem) for news in news_told)
    assert news_told[-1].problem == result.problem
    assert all((news.bound_ms or 0) <= (news.objective_ms or 0) * (1 + 1e-9) for news in news_told)


def test_the_best_cut_that_gets_better_is_told_too() -> None:
    """First with serial programs, then with 1F1B's; nothing is told twice."""
    news_told: list[Progress] = []
    found = model([layer(repeat=4)], gpus(2), m=4)
    lines = make_lines(found, ["linear"], [1])
    search = PlanSearch(found, lines, Stop(60), on_progress=news_told.append)
    for build in (build_serial, build_one_f_one_b, build_one_f_one_b):
        search.even.best.offer(build(search.even.problem), "made")
        search._tell(search.even)
    assert len(news_told) == 2
    assert news_told[-1].objective_ms == search.objective_ms


def test_told_to_stop_it_returns_what_it_has() -> None:
    """Soon, with the naive cut at least."""
    began = time.perf_counter()
    result = plan(make_model(), time_limit_s=60, should_stop=lambda: True)
    assert time.perf_counter() - began < 20
    assert result.schedule is not None
    assert result.schedule.stopped_by == "cancelled"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"time_limit_s": 0}, "time_limit_s = 0: must be > 0"),
        ({"threads": 0}, "threads = 0: must be >= 1"),
        ({"chunks": (0, 1)}, r"chunks = \[0, 1\]: stages per device"),
        ({"chunks": ()}, r"chunks = \[\]"),
        ({"placements": ("x",)}, r"placements = \['x'\]: at least one of linear, loop, v, free"),
    ],
)
def test_arguments_out_of_range_are_refused(wrong: dict[str, object], message: str) -> None:
    """With value, rule and fix."""
    with pytest.raises(InputError, match=message):
        plan(model([layer()], gpus(1)), **wrong)  # type: ignore[arg-type]


def test_the_committed_example_is_what_the_formulas_give() -> None:
    """And one of its cuts round-trips as a problem with a bound."""
    assert MODEL_FILE.read_text() == dump_model(make_model())
    cut = make_model().problem((0, 1, 2, 3), (12, 12, 5, 5))
    assert load_problem(dump_problem(cut)) == cut
    assert lower_bound(cut).ms > 0


def test_only_a_bound_that_is_not_below_proves_a_candidate_slower() -> None:
    """One per cent below is no proof, equality is."""
    candidate = CutCandidate(
        model([layer(repeat=2)], gpus(2)), PlacementLine("linear", 1, (0, 1)), (1, 1)
    )
    assert candidate.cannot_beat(candidate.bound_ms)
    assert not candidate.cannot_beat(candidate.bound_ms * 1.01)


def test_cuts_are_looked_for_however_long_the_naive_cut_took() -> None:
    """Half of the time is over when the search begins: one round of cuts is made all the same."""
    found = model([layer(1), layer(1), layer(8)], gpus(2))
    stop = Stop(4.0)
    stop.began -= 2.0
    search = PlanSearch(found, make_lines(found, ["linear"], [1]), stop, on_progress=None)
    search.run()
    assert search.num_cut_lines == 1
    assert search.best is not None
    assert search.best.sizes == (2, 1)


# --- An earlier plan as a start: its cut is recognised, and nothing of it is lost.


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
    news_told: list[Progress] = []
    start = (first.problem, first.schedule.programs)
    second = plan(found, time_limit_s=0.05, chunks=(1,), start=start, on_progress=news_told.append)
    assert second.schedule is not None
    assert news_told[0].objective_ms == first.schedule.objective_ms
    assert news_told[0].problem == first.problem
    assert second.schedule.objective_ms <= first.schedule.objective_ms


def test_with_a_work_limit_the_plan_is_a_function_of_model_seed_and_limit() -> None:
    """Whatever the number of threads: rows, bound, schedule, provenance, to the last byte."""
    layers = [layer(2 + n % 3, 3 + n % 5, 1 + n % 2) for n in range(11)]
    found = model(layers, gpus(4, memory_bytes=120), m=8)
    results = [
        plan(found, time_limit_s=300, work_limit=0.3, threads=threads, seed=2, chunks=(1, 2))
        for threads in (1, 3)
    ]
    one, other = (json.dumps(result.as_json()) for result in results)
    assert one == other
    assert check_result(found, results[0])[0].stopped_by == "work_limit"
    late = plan(found, time_limit_s=0.01, work_limit=100.0, chunks=(1, 2))
    assert check_result(found, late)[0].stopped_by == "time_limit"
