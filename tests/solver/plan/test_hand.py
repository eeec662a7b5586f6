"""Plans by rule: the cuts of frameworks, one mode for all; ``plan`` begins with the best."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from optpipe import find_violations, simulate
from optpipe.memory import modes_of
from optpipe.problem import placement_of
from optpipe_solver.budget import Stop
from optpipe_solver.families.classic import build_one_f_one_b
from optpipe_solver.plan import hand_cuts, hand_plans
from optpipe_solver.plan.lines import PlacementLine, make_lines
from optpipe_solver.plan.search import CutCandidate, PlanSearch, evaluate_quickly
from tests.solver.milp.test_plan_milp import small_model
from tests.solver.plan.models import gpus, layer, model, models
from tests.strategies import few

if TYPE_CHECKING:
    from optpipe.model import Model
    from optpipe_solver.plan import HandPlan


@pytest.mark.parametrize(
    ("layers", "stages", "cuts"),
    [
        (126, 64, {(2,) * 64: "even, one layer less at both ends"}),
        (8, 4, {(3, 2, 2, 3): "even", (2, 3, 3, 2): "one layer less at both ends"}),
        (9, 4, {(3, 3, 2, 3): "even", (2, 3, 3, 3): "one layer less at both ends"}),
        (2, 2, {(2, 2): "even, one layer less at both ends"}),
        (1, 4, {}),
    ],
)
def test_embedding_and_head_count_as_no_layer(
    layers: int, stages: int, cuts: dict[tuple[int, ...], str]
) -> None:
    """Frameworks count transformer layers; at both ends one less makes room for what is there."""
    found = model([layer(0.1), layer(repeat=layers), layer(4, 4, 4)], gpus(2), m=2)
    assert hand_cuts(found, stages) == cuts


def _plans(found: Model) -> list[HandPlan]:
    lines = [placement_of("linear", len(found.devices), 1)]
    if len(found.devices) > 1:
        lines.append(placement_of("loop", len(found.devices), 2))
    return [
        rule
        for placement in lines
        if len(placement) <= found.num_layers
        for rule in hand_plans(found, placement)
    ]


def _check(found: Model) -> None:
    lines = make_lines(found, ["linear", "loop"], [1, 2])
    search = PlanSearch(found, lines, Stop(60), on_progress=None)
    search._try_by_hand()
    for rule in _plans(found):
        programs = rule.programs()
        if programs is None:
            continue
        problem = rule.compiled.problem
        assert not find_violations(problem, programs)
        length_ms = simulate(problem, programs).objective_ms(problem.objective)
        assert rule.objective_ms == pytest.approx(length_ms)
        assert search.objective_ms <= length_ms * (1 + 1e-9)


@few(10)
@given(models(chunks=2))
def test_a_plan_begins_with_the_best_rule(found: Model) -> None:
    """On random models, judged by the reference."""
    _check(found)


@pytest.mark.parametrize("room_mb", [120, 70])
def test_every_mode_of_the_menu_is_a_rule(room_mb: int) -> None:
    """Keep, inside, offload and apart; each stage's micro-batches are all treated alike."""
    found = small_model(room_mb)
    plans = _plans(found)
    assert {rule.mode for rule in plans} == {"keep", "norms", "away", "full"}
    fitting = [rule for rule in plans if rule.objective_ms is not None]
    assert {rule.mode for rule in fitting} >= {"norms", "away", "full"}
    for rule in fitting:
        for program in rule.programs() or ():
            menus = rule.compiled.problem.menus
            used = {
                (s, menus[s][k].name)
                for (s, _), k in modes_of(rule.compiled.problem, program).items()
            }
            assert {name for s, name in used if len(menus[s]) > 1} <= {rule.mode}
    _check(found)


def test_a_cut_with_programs_by_hand_still_gets_its_families() -> None:
    """Keep fits; zero bubble is shorter than the 1F1B that a rule has."""
    found = small_model(900, p=4, m=8, layers=14)
    line = PlacementLine("linear", 1, (0, 1, 2, 3))
    candidate = CutCandidate(found, line, (4, 4, 4, 4))
    programs = build_one_f_one_b(candidate.problem)
    candidate.best.offer(programs, "1f1b with keep")
    known_ms = candidate.objective_ms
    evaluate_quickly(candidate, search_s=0.0, stop=Stop(60))
    assert candidate.objective_ms < known_ms
