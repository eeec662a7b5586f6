"""Menus that v1 cannot say: starts that fit, and the best of all programs there are."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from optpipe import ActionType, Problem, check, find_violations
from optpipe.memory import modes_of
from optpipe_solver import SolveStatus, solve
from optpipe_solver.arrays.encoding import CompiledProblem, device_peaks
from optpipe_solver.families.classic import build_gpipe
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.portfolio import all_starts, is_large
from optpipe_solver.reductions import Reduction, kept_alone, narrow_menus, projections
from optpipe_solver.uniform_modes import _with_actions, with_uniform_modes
from tests.building import UNIT, problem, programs
from tests.solver.exhaustive import optimum, tiny_problems
from tests.solver.starting import schedule_of
from tests.strategies import Case, cases, few

KEEP = {"name": "keep"}
NORMS = {"name": "norms", "forward_bytes": 8, "recompute": "inside", "recompute_ms": 1}
ALL = {"name": "recompute", "forward_bytes": 2, "recompute": "apart", "recompute_ms": 4}
PART = {"name": "offload", "offload_bytes": 6}
FP8 = {"name": "fp8 copy", "forward_bytes": 5}
AWAY = {"name": "checkpoint away", "forward_bytes": 4, "offload_bytes": 4} | {
    "recompute": "apart",
    "recompute_ms": 3,
}


def made(*modes: dict[str, Any], m: int, memory: int, devices: int = 2, **stage: Any) -> Problem:
    """One stage per device, all with the same menu beside keep; a UNIT takes a ms to copy."""
    scaled = [
        {name: value * UNIT if name.endswith("bytes") else value for name, value in mode.items()}
        for mode in (KEEP, *modes)
    ]
    cost = {"forward_ms": 3, "backward_input_ms": 3, "backward_weight_ms": 2, "modes": scaled}
    sizes = {"activation_bytes": 10 * UNIT, "weight_context_bytes": 4 * UNIT}
    device = {"memory_bytes": memory * UNIT, "d2h_gb_per_s": 4.0, "h2d_gb_per_s": 4.0}
    stages = [{"device": d, "costs": [cost | sizes], **stage} for d in range(devices)]
    return problem(stages, [device] * devices, m, format="optpipe/problem/v2")


TINY: dict[str, tuple[int, int, list[dict[str, Any]]]] = {
    "inside": (2, 18, [NORMS]),
    "apart": (2, 12, [ALL]),
    "part of it goes": (2, 14, [PART]),
    "smaller copies": (2, 15, [FP8]),
    "offloaded checkpoints": (1, 10, [AWAY]),
    "two at once": (1, 16, [NORMS, AWAY]),
    "all alike": (1, 14, [FP8, PART]),
}
"""Devices, memory of each in UNITs, menu beside keep."""
IN_OTHERS = {"inside", "smaller copies", "part of it goes"}
"""Whose modes another menu has, too."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extended) if name in IN_OTHERS else name
        for name in TINY
    ],
)
def test_nothing_better_exists_and_more_modes_never_hurt(name: str) -> None:
    """Found in a fraction of a unit of work what all programs there are say, mode by mode more."""
    devices, memory, modes = TINY[name]
    before = float("inf")
    for count in range(len(modes) + 1):
        alike = {"uniform_modes": name == "all alike"}
        posed = made(*modes[:count], m=2, memory=memory, devices=devices, **alike)
        result, least = solve(posed, work_limit=0.1, time_limit_s=600), optimum(posed)
        if result.schedule is None:
            assert (result.status, least) == (SolveStatus.INFEASIBLE, before)
            continue
        check(posed, result.schedule.programs)
        assert result.schedule.objective_ms == pytest.approx(least, rel=1e-9)
        assert least <= before
        before = least
    assert before < float("inf")


@few(6)
@given(tiny_problems(menus=True))
def test_a_solve_finds_the_best_of_all_programs(posed: Problem) -> None:
    """Of two cells in memory that some program fills; what is proven is no more than that."""
    found, least = schedule_of(posed, work_limit=0.1, time_limit_s=600), optimum(posed)
    check(posed, found.programs)
    assert found.bound_ms is not None
    assert found.bound_ms <= least * (1 + 1e-9)
    assert found.objective_ms == pytest.approx(least, rel=1e-9)


@given(cases(tight=True, menus=True))
def test_one_mode_per_stage_is_found_where_there_is_one(case: Case) -> None:
    """Of all choices with the tightest transfers some fits, or none; what fits stays legal."""
    compiled = CompiledProblem.of(case.problem)
    rows = compiled.encode(build_gpipe(kept_alone(case.problem)))
    found = with_uniform_modes(compiled, rows)
    m, usable = case.problem.num_microbatches, [np.flatnonzero(may) for may in compiled.memory.may]
    limits = [device.usable_bytes for device in case.problem.devices]
    fits = any(
        (np.array(device_peaks(compiled, _with_actions(compiled, rows, modes))) <= limits).all()
        for modes in (np.repeat(picked, m) for picked in product(*usable))
    )
    assert (found is not None) == fits
    if found is not None:
        wrong = find_violations(case.problem, compiled.decode(found))
        assert {violation.code for violation in wrong} <= {"memory.host"}


def test_the_cheapest_modes_that_fit_are_taken() -> None:
    """Both stages of a device: norms alone frees too little, all costs more than to copy a part."""
    posed = made(NORMS, ALL, PART, m=4, memory=24)
    compiled = CompiledProblem.of(posed)
    found = with_uniform_modes(compiled, compiled.encode(build_gpipe(posed)))
    assert found is not None
    assert set(found.modes.tolist()) == {3}
    (text, _) = (",".join(map(str, row)) for row in compiled.decode(found))
    assert text.startswith("0F0@3,0OFFLOAD0,0F1@3,0OFFLOAD1,0RELEASE0,0F2@3")


def modes_of_first_stage(less: Reduction) -> tuple[int, ...]:
    """Return the numbers in the original menu of the modes that stage 0 of a reduction has."""
    text = {"keep": "0F0", "offload": "0F0 0OFFLOAD0", "recompute": "0F0 0RECOMPUTE0"}
    stage = less.problem.stages[0]
    names = [mode.name for mode in less.problem.menus[0]]
    rows = [f"0F0@{k}" if stage.modes else text[name] for k, name in enumerate(names)]
    return tuple(less.lift(programs(row))[0][0].mode for row in rows)


def test_projections_say_what_a_menu_has_of_keep_offload_and_recompute() -> None:
    """The base is keep or a leaner mode inside; what goes with it differs in nothing else."""
    posed = made(NORMS, ALL, PART, AWAY, m=4, memory=24)
    found = {one.name: one for one in projections(posed)}
    assert {name: modes_of_first_stage(one) for name, one in found.items()} == {
        "of three modes": (0, 3, 2),
        "lean": (1,),
    }
    lean = found["lean"].problem
    assert lean.format == "optpipe/problem/v1"
    assert (lean.stages[0].activation_bytes, lean.stages[0].backward_input_ms) == (8 * UNIT, 4)
    uniform = made(NORMS, PART, m=4, memory=24, uniform_modes=True)
    assert {modes_of_first_stage(one) for one in projections(uniform)} == {(0,), (1,)}


def test_modes_of_a_stage_leave_room_for_copies_to_wait_in() -> None:
    """Half as many bytes to copy fit with the tightest transfers, and a device then waits for each:
    more of them go, and nothing waits."""
    half = {"name": "half", "offload_bytes": 5}
    posed = made(half, PART | {"offload_bytes": 9}, m=8, memory=32, devices=4)
    compiled = CompiledProblem.of(posed)
    rows = compiled.encode(build_gpipe(posed))
    found = with_uniform_modes(compiled, rows)
    assert found is not None
    tightest = _with_actions(compiled, rows, found.modes)
    assert compiled.objective_ms(found) < 0.8 * compiled.objective_ms(tightest)


def test_narrower_menus_begin_with_v1s_and_name_modes_as_the_whole_menu_does() -> None:
    """Uniform menus are cut down and stay uniform; parts of v1's offload or recompute only."""
    uniform = made(NORMS, ALL, PART, m=4, memory=24, uniform_modes=True)
    short = narrow_menus(uniform)[0]
    assert modes_of_first_stage(short) == (0, 3, 2)
    assert all(stage.uniform_modes for stage in short.problem.stages)
    assert [mode.name for mode in short.problem.menus[0]] == ["keep", "offload", "recompute"]
    (result,) = [start for start in all_starts(short.problem) if start.method == "gpipe+modes"]
    assert result.programs is not None
    check(uniform, short.lift(result.programs))
    narrowed = narrow_menus(made(NORMS, ALL, PART, m=4, memory=24))
    free = {one.name: modes_of_first_stage(one) for one in narrowed}
    assert list(free)[:3] == ["of three modes", "of keep and offload", "of keep and recompute"]
    assert list(free.values())[:3] == [(0, 3, 2), (0, 3), (0, 2)]


@pytest.mark.parametrize(("uniform", "work"), [(False, 0.05), (True, 0.3)])
def test_a_solve_chooses_modes_together_with_the_order(uniform: bool, work: float) -> None:
    """Better than every start; where all are alike they stay so."""
    posed = made(NORMS, ALL, PART, AWAY, m=6, memory=21, devices=3, uniform_modes=uniform)
    starts = [start for start in all_starts(posed) if start.legal]
    assert {start.method for start in starts} >= {"serial", "1f1b+modes"}
    found = schedule_of(posed, work_limit=work, time_limit_s=600)
    check(posed, found.programs)
    assert found.objective_ms < min(start.objective_ms for start in starts)
    for stage in range(3):
        modes = modes_of(posed, found.programs[stage])
        assert len(set(modes.values())) == 1 or not uniform


def test_large_problems_get_one_mode_per_stage_and_one_projection() -> None:
    """Both are found by sums and sweeps; hundreds of thousands of actions take seconds."""
    posed = made(NORMS, ALL, PART, m=900, memory=40, devices=8)
    assert is_large(posed)
    starts = {start.method: start for start in all_starts(posed, ("1f1b", "gpipe"))}
    assert {name.partition(" ")[2] for name in starts} == {"", "of three modes"}
    alike, fitted = starts["1f1b+modes"], starts["1f1b+offload of three modes"]
    assert alike.programs is not None
    assert len({one.mode for one in alike.programs[0] if one.type is ActionType.FORWARD}) == 1
    for start in (alike, fitted):
        best = Incumbent(posed)
        assert start.programs is not None
        assert best.offer(start.programs, start.method)
        assert best.objective_ms == start.objective_ms
