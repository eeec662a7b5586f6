"""One device re-optimised: never worse, legal, and as good as any of its programs can be."""

import random
from collections.abc import Iterator
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, Programs, check, simulate
from optpipe_solver.arrays import simulate as kernel
from optpipe_solver.arrays.encoding import KINDS, CompiledProblem, Rows, device_peaks
from optpipe_solver.families.classic import build_serial
from optpipe_solver.local_search.one_device import OneDevice, Polish, can_reoptimise, in_order
from tests.building import offloadable, problem, programs, stage
from tests.solver.exhaustive import chains_of, interleavings
from tests.strategies import Case, documents, random_programs, tightened

TRIED = 3
"""Cells of a device up to which all its programs are tried."""


@st.composite
def plain_cases(draw: st.DrawFn) -> Case:
    """Problems and legal programs without offload or recompute; half have no byte to spare."""
    document = draw(documents())
    document["num_microbatches"] = draw(st.integers(1, 4))
    for one_stage in document["stages"]:
        cost = one_stage["costs"][0] if "costs" in one_stage else one_stage
        cost.pop("recompute_workspace_bytes")
        for name in ("modes", "offload_bytes", "recompute_ms", "checkpoint_bytes"):
            cost.pop(name, None)
    given_problem = Problem.parse(document)
    rng = random.Random(draw(st.integers(0, 2**32)))
    case = Case(given_problem, random_programs(given_problem, rng))
    return tightened(case) if draw(st.booleans()) else case


def objective_ms(given: Problem, rows: Programs) -> float:
    """What the simulator says."""
    return simulate(given, rows).objective_ms(given.objective)


def best_by_trying(compiled: CompiledProblem, rows: Rows, device: int) -> float:
    """The least objective over all programs of a device that fit, the others' as they are."""
    actions, lengths = rows.actions.copy(), rows.lengths.copy()
    by_span = compiled.problem.objective == "span"
    usable = compiled.problem.devices[device].usable_bytes
    work = kernel.workspace_for(compiled.times, lengths.size)
    best = inf
    for program in every_program(compiled, device):
        actions[device, : len(program)] = program
        lengths[device] = len(program)
        if device_peaks(compiled, Rows(actions, lengths, rows.modes))[device] <= usable:
            best = min(best, kernel.length(actions, lengths, compiled.times, work)[by_span])
    return best


def every_program(compiled: CompiledProblem, device: int) -> Iterator[list[int]]:
    """Every order of a device's passes, fused and split."""
    given, m = compiled.problem, compiled.times.num_microbatches
    cells = [(s, j) for s in given.stages_of[device] for j in range(m)]
    for chains in product(*(chains_of(given, s, j) for s, j in cells)):
        for program in interleavings(tuple(chain for _, chain in chains)):
            yield [
                KINDS.index(one.type) * compiled.times.num_cells + one.stage * m + one.microbatch
                for one in program
            ]


def one_device(compiled: CompiledProblem, **limits: int) -> OneDevice:
    """Room for all that small problems need."""
    return OneDevice(compiled, **{"width": 4_000, "most": 100_000, "most_per_state": 500, **limits})


@given(plain_cases())
def test_names_in_order_cost_nothing(case: Case) -> None:
    """Every stage's passes renamed in order: legal, as plain, and no later."""
    compiled = CompiledProblem.of(case.problem)
    rows = in_order(compiled.encode(case.programs), compiled.times)
    assert compiled.is_compute_only(rows)
    renamed = compiled.decode(rows)
    check(case.problem, renamed)
    assert objective_ms(case.problem, renamed) <= objective_ms(case.problem, case.programs)


@given(plain_cases(), st.integers(0, 2))
def test_no_program_of_the_device_is_better(case: Case, which: int) -> None:
    """Against all programs of a device, in any order of micro-batches, fused or split.

    Where messages queue it may say that it does not know.
    """
    compiled = CompiledProblem.of(case.problem)
    if not can_reoptimise(case.problem):
        return
    rows = in_order(compiled.encode(case.programs), compiled.times)
    before = compiled.decode(rows)
    device = which % len(before)
    found = one_device(compiled).reoptimise(rows, device)
    after = compiled.decode(found.rows)
    check(case.problem, after)
    assert found.objective_ms == objective_ms(case.problem, after)
    assert found.objective_ms <= objective_ms(case.problem, before)
    assert found.is_exact or case.problem.queues
    if (
        found.is_exact
        and case.problem.num_microbatches * len(case.problem.stages_of[device]) <= TRIED
    ):
        assert found.objective_ms == pytest.approx(best_by_trying(compiled, rows, device))


@given(plain_cases())
def test_polished_programs_cannot_gain_from_one_device(case: Case) -> None:
    """Legal, no worse, and every device's program is then the best beside the others'."""
    compiled = CompiledProblem.of(case.problem)
    rows = compiled.encode(case.programs)
    start_ms = objective_ms(case.problem, case.programs)
    found = Polish(compiled).polish(rows, start_ms)
    after = compiled.decode(found.rows)
    check(case.problem, after)
    assert found.objective_ms == objective_ms(case.problem, after) <= start_ms
    unknown = case.problem.queues and not found.is_exact
    assert unknown or found.is_exact == can_reoptimise(case.problem)
    if found.is_exact:
        for device in range(len(after)):
            again = one_device(compiled).reoptimise(found.rows, device)
            assert again.objective_ms == found.objective_ms


def test_too_little_room_is_said() -> None:
    """With one label per layer the search goes on but claims nothing."""
    compiled = CompiledProblem.of(problem([stage(0, 1, 1, 1), stage(1, 1, 1, 1)], m=4))
    serial = compiled.encode(build_serial(compiled.problem))
    found = one_device(compiled, width=1).reoptimise(serial, 0)
    assert not found.is_exact
    assert found.objective_ms <= compiled.length_ms(serial)[0]


def test_what_it_does_not_apply_to_comes_back_as_it_was() -> None:
    """Offloaded programs, two reductions on one device, a stage before another device's first."""
    stages = [stage(0, 1, 1, 1, grad_sync_ms=1), stage(0, 1, 1, 1, grad_sync_ms=1)]
    assert not can_reoptimise(problem(stages))
    ahead = [stage(0, 1, 1, 1), stage(0, 1, 1, 1), stage(1, 1, 1, 1)]
    assert can_reoptimise(problem(ahead))
    assert not can_reoptimise(problem(ahead, objective="span"))
    compiled = CompiledProblem.of(problem([offloadable(0, 1, 1, 1)]))
    away = compiled.encode(programs("0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0B0"))
    assert not compiled.is_compute_only(away)
    assert Polish(compiled).polish(away, 9.0) == (away, 9.0, False, 0)
