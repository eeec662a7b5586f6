"""The plan MILP against all cuts and modes of small models, and its path against the simulator."""

from __future__ import annotations

from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from optpipe import find_violations, simulate
from optpipe.problem import placement_of
from optpipe_solver.budget import Stop
from optpipe_solver.families import FAMILIES
from optpipe_solver.milp.plan import (
    PAIRED_PATTERNS,
    PatternPlan,
    boundaries,
    patterns_of,
    plan_pattern,
)
from optpipe_solver.milp.plan.model import _PatternSearch
from optpipe_solver.milp.plan.variables import PlanChoice, as_counts
from optpipe_solver.milp.plan.walk import walked
from tests.solver.plan import models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.model import Model

MB = 1_000_000
MODES = [
    {"name": "keep"},
    {"name": "norms", "forward_bytes": 7 * MB, "recompute": "inside", "recompute_ms": 0.5,
     "inside_bytes": 3 * MB},
    {"name": "away", "offload_bytes": 6 * MB},
    {"name": "full", "forward_bytes": MB, "recompute": "apart", "recompute_ms": 3},
]  # fmt: skip


def layer(**fields: Any) -> dict[str, Any]:
    return {
        "forward_ms": 3, "backward_input_ms": 4, "backward_weight_ms": 2,
        "activation_bytes": 10 * MB, "weight_context_bytes": 6 * MB, "output_bytes": MB,
        "static_bytes": 2 * MB, "grad_sync_ms": 1, "modes": MODES, **fields,
    }  # fmt: skip


def small_model(
    room_mb: int, p: int = 2, m: int = 4, layers: int = 5, *, light: bool = False
) -> Model:
    """A light first layer, equal ones, a heavy last one unless it is light; memory in MB."""
    first = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1,
             "activation_bytes": 2 * MB, "output_bytes": MB, "static_bytes": 5 * MB}  # fmt: skip
    last = {**first, "forward_ms": 5, "backward_input_ms": 6, "activation_bytes": 8 * MB}
    last = first if light else last
    device = {"memory_bytes": room_mb * MB, "d2h_gb_per_s": 4.0, "h2d_gb_per_s": 3.0}
    link = {"latency_ms": 0.25, "bandwidth_gb_per_s": 2.0}
    return models.model([first, layer(repeat=layers), last], [device] * p, m, default_link=link)


def all_patterns(model: Model, shape: str, chunks: int, *, moves: bool) -> list[Any]:
    placement = placement_of(shape, len(model.devices), chunks)
    links = boundaries(model, placement)
    m = model.num_microbatches
    return list(patterns_of(placement, m, links, transfers=moves, recompute=moves))


def best_by_looking(model: Model, pattern: Any) -> float:
    """The shortest longest path over all cuts and all modes that fit."""
    search = _PatternSearch(model, pattern, Stop(60))
    fitting = filter(search._fits, _all_choices(search))
    return min(map(search._length_ms, fitting), default=inf)


def _all_choices(search: _PatternSearch) -> Iterator[PlanChoice]:
    stages, total = len(search.tables.placement), search.model.num_layers
    for sizes in product(range(1, total), repeat=stages):
        if sum(sizes) == total:
            for modes in product(range(len(search.tables.names)), repeat=stages):
                yield PlanChoice(sizes, modes)


@pytest.mark.parametrize("room_mb", [150, 70, 55, 45, 20])
def test_it_is_the_best_of_all_cuts_and_modes_and_its_path_is_what_is_simulated(
    room_mb: int,
) -> None:
    """1F1B and zero bubble on two devices, from plenty of memory to none."""
    model = small_model(room_mb)
    for pattern in all_patterns(model, "linear", 1, moves=True):
        found = plan_pattern(model, pattern, Stop(60))
        best = best_by_looking(model, pattern)
        if isinstance(found, float):
            assert best == found == inf
            continue
        assert found.path_ms == pytest.approx(best, rel=1e-4)
        assert found.bound_ms <= best * (1 + 1e-9)
        assert found.bound_ms >= found.path_ms * (1 - 2e-4)
        assert found.objective_ms == pytest.approx(found.path_ms, rel=1e-9)
        assert found.difference == ""


def test_the_first_relaxation_knows_each_devices_load() -> None:
    """Before any row is found to be broken: no makespan is shorter than all work, shared evenly."""
    model = small_model(900, p=4, m=16, layers=16)
    (pattern,) = (one for one in all_patterns(model, "loop", 2, moves=True) if one.name[0] == "i")
    search = _PatternSearch(model, pattern, Stop(60))
    relaxed = search.rows.solve(Stop(60), integer=False)
    assert relaxed.bound is not None
    assert relaxed.bound >= 16 * (3 + 16 * 9 + 12) / 4


@pytest.mark.parametrize(
    ("room_mb", "fit"),
    [
        pytest.param(150, 5, marks=pytest.mark.extended),
        pytest.param(60, 4, marks=pytest.mark.extended),
        (50, 3),
    ],
)
def test_no_device_holds_more_layers_than_it_can_and_one_holds_its_share(
    room_mb: int, fit: int
) -> None:
    """Two chunks on two devices: of five layers one holds three, which the relaxation knows."""
    model = small_model(room_mb, m=16, light=True)
    for pattern in all_patterns(model, "v", 2, moves=True):
        search = _PatternSearch(model, pattern, Stop(60))
        assert search.best is not None
        most_ms, home = search._most()[0], np.array(pattern.problem.placement)
        can, anyway = search._most_on_devices(most_ms), search._most_on_devices(1e9)
        assert anyway[1, 1] == fit
        relaxed = search.rows.solve(Stop(60), integer=False)
        assert relaxed.bound is not None
        assert relaxed.bound >= model.num_microbatches * 3 * 9
        best_ms = inf
        for choice in filter(search._fits, _all_choices(search)):
            length_ms = search._length_ms(choice)
            best_ms = min(best_ms, length_ms)
            most = can if length_ms <= most_ms else anyway
            layers_in = as_counts(search.tables, choice)[0].sum(axis=2)
            assert all(layers_in[home == device, t].sum() <= most[device, t] for device, t in most)
        search.run()
        assert search.bound_ms <= best_ms * (1 + 1e-9)
        assert search.best[0] == pytest.approx(best_ms, rel=1e-4)


def test_it_is_never_longer_than_a_cut_to_start_from() -> None:
    """Told to stop at once it has the best cut, if that is among those it was given."""
    model = small_model(900, p=3, m=6, layers=7)
    (pattern,) = (one for one in all_patterns(model, "loop", 2, moves=True) if one.name[0] == "i")
    best = plan_pattern(model, pattern, Stop(60))
    alone = plan_pattern(model, pattern, Stop(0.0))
    assert isinstance(best, PatternPlan)
    assert isinstance(alone, PatternPlan)
    assert set(best.modes) == {"keep"}
    again = plan_pattern(model, pattern, Stop(0.0), [best.sizes])
    assert isinstance(again, PatternPlan)
    assert again.path_ms == best.path_ms < alone.path_ms


@pytest.mark.parametrize("room_mb", [150, 50])
def test_a_walk_ends_at_the_best_of_all_cuts_and_modes(room_mb: int) -> None:
    """From a long choice, in a tenth of a unit of work; what it says is so, and so it is again."""
    model = small_model(room_mb, layers=4)
    for pattern in all_patterns(model, "loop", 2, moves=True)[:1]:
        search = _PatternSearch(model, pattern, Stop(60))
        names, stages = range(len(search.tables.names)), len(pattern.problem.stages)
        cuts = [c for c in product(range(1, 6), repeat=stages) if sum(c) == model.num_layers]
        chosen = [PlanChoice(cut, (k,) * stages) for cut in cuts for k in names]
        start = max((search._length_ms(one), one) for one in chosen if search._fits(one))
        ends = {walked(search.cuts, start, Stop(60, work=0.1)) for _ in range(2)}
        ((length_ms, choice),) = ends
        assert length_ms == search._length_ms(choice)
        assert search._fits(choice)
        assert start[0] > length_ms == pytest.approx(best_by_looking(model, pattern), rel=1e-12)


@pytest.mark.parametrize(("shape", "chunks"), [("loop", 2), ("v", 2)])
def test_chunks_are_simulated_as_the_path_says_where_nothing_is_moved(
    shape: str, chunks: int
) -> None:
    """Interleaved, GIS and the V's; with transfers the path may be longer, and says why."""
    model = small_model(90, layers=8)
    for moves in (False, True):
        for pattern in all_patterns(model, shape, chunks, moves=moves):
            found = plan_pattern(model, pattern, Stop(60))
            assert isinstance(found, PatternPlan)
            if "away" not in found.modes:
                assert found.objective_ms <= found.path_ms * (1 + 1e-9)
            if not moves:
                assert found.objective_ms == pytest.approx(found.path_ms, rel=1e-9)
            assert bool(found.difference) == (
                abs(found.objective_ms - found.path_ms) > 1e-9 * found.path_ms
            )


def model_in_pairs(room_mb: int, first_hides_ms: float) -> Model:
    """Layers that hide 0.5 to 2 ms, and workspaces of which a pair needs two; times are dyadic."""
    work = {
        "forward_workspace_bytes": 3 * MB, "backward_workspace_bytes": 4 * MB,
        "backward_input_workspace_bytes": 2 * MB, "backward_weight_workspace_bytes": MB,
        "activation_bytes": 10 * MB, "static_bytes": MB, "output_bytes": MB, "grad_sync_ms": 1,
    }  # fmt: skip
    times = [(1, 0.5, 0.75, first_hides_ms, 1), (2, 2.5, 1.5, 1.5, 5), (3, 2, 2, 2, 1)]
    layers = [
        {"forward_ms": f, "backward_input_ms": i, "backward_weight_ms": w, "hidden_ms": x,
         "repeat": count, **work}
        for f, i, w, x, count in times
    ]  # fmt: skip
    link = {"latency_ms": 0.25, "bandwidth_gb_per_s": 4.0}
    return models.model(layers, [{"memory_bytes": room_mb * MB}] * 2, 24, default_link=link)


@pytest.mark.parametrize("first_hides_ms", [0.5, 0.0])
@pytest.mark.parametrize("room_mb", [900, 120, 40])
@pytest.mark.parametrize(("shape", "name"), [("v", "dualpipe-v"), ("loop", "1f1b-overlap")])
def test_in_pairs_it_is_the_best_of_all_cuts_as_simulated(
    shape: str, name: str, room_mb: int, first_hides_ms: float
) -> None:
    """Each cut fits where the family's programs do, and lasts as long, to the last bit.

    Where a stage hides nothing its pairs are none, and what is simulated may be shorter.
    """
    model = model_in_pairs(room_mb, first_hides_ms)
    placement = placement_of(shape, 2, 2)
    links = boundaries(model, placement)
    (pattern,) = patterns_of(placement, 24, links, transfers=True, recompute=True,
                             names=PAIRED_PATTERNS)  # fmt: skip
    assert pattern.name == name
    family = next(one for one in FAMILIES if one.name == name)
    search, best_ms = _PatternSearch(model, pattern, Stop(60)), inf
    for choice in _all_choices(search):
        problem = model.problem(placement, choice.sizes)
        programs = family.build(problem)
        fits = not find_violations(problem, programs)
        assert search._fits(choice) == fits
        length_ms, simulated_ms = search._length_ms(choice), simulate(problem, programs).makespan_ms
        assert simulated_ms <= length_ms
        assert simulated_ms == length_ms or (first_hides_ms == 0.0 and choice.sizes[0] == 1)
        best_ms = min(best_ms, length_ms if fits else inf)
    search.run()
    assert search.bound_ms <= best_ms * (1 + 1e-9)
    found = search.result()
    if isinstance(found, float):
        assert best_ms == found == inf
        return
    assert found.path_ms == best_ms
    assert found.bound_ms >= best_ms * (1 - 2e-4)
    assert any(action.paired for program in found.programs for action in program)
    assert bool(found.difference) == (found.objective_ms < found.path_ms)
    assert first_hides_ms == 0.0 or found.difference == ""
