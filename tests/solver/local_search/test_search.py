"""The compiled search: exactly the reference's meaning of time and memory, and worth having."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, find_violations, simulate
from optpipe.check import check
from optpipe.memory import device_peak_bytes, host_walk
from optpipe_solver.arrays import simulate as kernel
from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.budget import Stop
from optpipe_solver.families.classic import build_serial
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.local_search.search import _LocalSearch, improve_by_local_search
from optpipe_solver.portfolio import all_starts
from tests.building import UNIT, bus, offloadable, problem
from tests.solver.milp.test_horizon import parked_problem
from tests.solver.test_solve import offload_problem
from tests.strategies import Case, cases, few


@given(cases())
def test_integers_stand_for_the_same_programs(case: Case) -> None:
    """decode inverts encode."""
    compiled = CompiledProblem.of(case.problem)
    assert compiled.decode(compiled.encode(case.programs)) == case.programs


@given(cases(), st.integers(0, 2**32))
def test_compiled_time_is_the_reference_time(case: Case, seed: int) -> None:
    """To the last bit, shared lanes and random durations included."""
    rng = random.Random(seed)
    durations = {
        action: rng.choice([0.5, 1.0, 3.0, 7.0])
        for program in case.programs
        for action in program
        if action.type != "RELEASE"
    }
    compiled = CompiledProblem.of(case.problem)
    rows = compiled.encode(case.programs)
    for replaced in ({}, durations):
        run = simulate(case.problem, case.programs, replaced)
        found = compiled.length_ms(rows, compiled.durations(replaced))
        assert found == (run.makespan_ms, run.span_ms)


@given(cases(tight=True))
def test_compiled_memory_is_the_reference_memory(case: Case) -> None:
    """Limits that the programs just meet are met; one byte less is not."""
    compiled = CompiledProblem.of(case.problem)
    rows = compiled.encode(case.programs)
    cells = compiled.times.num_cells
    m = case.problem.num_microbatches
    again = np.zeros(cells, dtype=np.bool_)
    for program in case.programs:
        for stage, kind, j in program:
            if kind == "RECOMPUTE":
                again[stage * m + j] = True
    away = np.zeros(cells, dtype=np.bool_)
    for device, program in enumerate(case.programs):
        row, count = rows.actions[device], rows.lengths[device]
        peak = device_peak_bytes(case.problem, device, program)
        limit = compiled.memory.limit.copy()
        limit[device] = peak - case.problem.static_bytes_of(device)
        memory = compiled.memory._replace(limit=limit)
        assert kernel.device_fits(device, row, count, compiled.times, memory, again)
        limit[device] -= 1
        if program and limit[device] >= 0:
            assert not kernel.device_fits(device, row, count, compiled.times, memory, again)
        held = kernel.host_peak(row, count, compiled.times, compiled.memory, away)
        assert held == max(host_walk(case.problem, program), default=0)
        assert not away.any()


@few(30)
@given(cases(tight=True), st.integers(0, 1000))
def test_what_it_finds_is_legal_and_no_worse(case: Case, seed: int) -> None:
    """From random programs under tight limits; the incumbent checks what it is offered."""
    best = Incumbent(case.problem)
    assert best.offer(case.programs, "start")
    start_ms = best.objective_ms
    improve_by_local_search(best, Stop(0.05, seed=seed))
    assert best.programs is not None
    check(case.problem, best.programs)
    assert best.objective_ms <= start_ms


def test_it_beats_every_start_where_memory_is_short() -> None:
    """A problem with offload; take the search away and this is red."""
    given = offload_problem()
    best = Incumbent(given)
    for start in all_starts(given):
        if start.programs is not None and not find_violations(given, start.programs):
            best.offer(start.programs, start.method)
    start_ms = best.objective_ms
    improve_by_local_search(best, Stop(5))
    assert best.objective_ms < 0.97 * start_ms
    assert best.method == "local-search"


def test_with_a_work_limit_the_result_is_a_function_of_the_seed() -> None:
    """Two runs with time enough end with the same programs and the same work done."""
    results = []
    for _ in range(2):
        best = started(offload_problem())
        stop = Stop(60, seed=7, work=1_000_000)
        improve_by_local_search(best, stop)
        work = stop.spent
        results.append((work, best.programs))
    assert results[0] == results[1]
    assert results[0][0] >= 1_000_000


def test_it_stops_when_told_to_and_at_its_limit() -> None:
    """Told at once it does nothing; a limit of a tenth of a second is kept."""
    best = started(offload_problem(m=64))
    stop = Stop(60, should_stop=lambda: True)
    improve_by_local_search(best, stop)
    assert stop.spent == 0
    improve_by_local_search(best, Stop(0.01))
    began = time.process_time()
    improve_by_local_search(best, Stop(0.1))
    assert time.process_time() - began < 0.5


def started(given: Problem) -> Incumbent:
    """An incumbent with the best start."""
    best = Incumbent(given)
    for start in all_starts(given):
        if start.legal and start.programs is not None:
            best.offer(start.programs, start.method)
    return best


def test_the_same_seed_tries_the_same_moves() -> None:
    """Two runs see the same improvements in the same order; time only cuts the list."""
    traces = []
    for _ in range(2):
        best = Incumbent(parked_problem())
        for start in all_starts(best.problem):
            if start.legal and start.programs is not None:
                best.offer(start.programs, start.method)
        improve_by_local_search(best, Stop(1.0, seed=5))
        traces.append([entry.objective_ms for entry in best.trace])
    shorter = min(map(len, traces))
    assert shorter > 1
    assert traces[0][:shorter] == pytest.approx(traces[1][:shorter])


def test_it_finds_the_parked_optimum() -> None:
    """132 is proven; first in, first out cannot do better than 136, where a tame search stays."""
    held = {"activation_bytes": 16 * UNIT, "offload_bytes": 16 * UNIT}
    stages = [offloadable(d, 4, 4, 2, weight_context_bytes=8 * UNIT, **held) for d in range(4)]
    given = problem(stages, [bus(memory_bytes=32 * UNIT) for _ in range(4)], m=7)
    best = started(given)
    best.offer_bound(132.0, "proven")
    improve_by_local_search(best, Stop(60, work=45_000_000))
    assert best.objective_ms == pytest.approx(132.0)


def longest_without_a_look(best: Incumbent) -> float:
    """Return the most seconds of computing between two looks, in one and a half."""
    looks: list[float] = []

    def look() -> bool:
        looks.append(time.thread_time())
        return looks[-1] - looks[0] > 1.5

    improve_by_local_search(best, Stop(60, should_stop=look))
    return max(after - before for before, after in pairwise(looks))


def test_it_looks_often_enough_whether_to_stop_at_any_size() -> None:
    """However long a program is; a solve has 0.5 s in all to end."""
    best = Incumbent(offload_problem(m=300))
    best.offer(build_serial(best.problem), "serial")
    improve_by_local_search(best, Stop(0.01))
    # A busy machine may halt once, a search that forgets to look does so each time.
    assert any(longest_without_a_look(best) < 0.4 for _ in range(3))


def test_it_keeps_as_much_time_for_an_offer_as_evaluating_took() -> None:
    """And a few us per action to write it down: more would end a short turn at its first gain."""
    best = Incumbent(offload_problem(m=300))
    best.offer(build_serial(best.problem), "serial")
    best.evaluate_s = 0.25
    num_actions = sum(map(len, best.programs or ()))
    assert 0.25 < _LocalSearch(best, 0, ()).offer_s < 0.25 + 5e-6 * num_actions
