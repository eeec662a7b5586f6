"""The compiled search: exactly the reference's meaning of time and memory, and worth having."""

import math
import random
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import find_violations, simulate
from optpipe.check import check
from optpipe.schedule import pass_of
from optpipe_solver.arrays.encoding import CompiledProblem, device_peaks
from optpipe_solver.budget import Stop
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.jit import seeded
from optpipe_solver.local_search.annealing import best_rows, make_fit, table_for
from optpipe_solver.local_search.propose import everywhere, some_stretch
from optpipe_solver.local_search.search import (
    improve_by_local_search,
    improve_by_stretches,
)
from tests.building import UNIT, bus, offloadable, one_f_one_b, problem, programs, stage
from tests.conftest import Yardstick
from tests.solver.local_search.boards import read, set_out
from tests.solver.starting import erratic_clock, serially, started
from tests.solver.test_solve import offload_problem
from tests.strategies import Case, cases, few


@given(cases(menus=True))
def test_integers_stand_for_the_same_programs(case: Case) -> None:
    """decode inverts encode, but for a mode that is named where actions tell it anyway."""
    compiled = CompiledProblem.of(case.problem)
    named = [
        tuple(one if case.problem.stages[one.stage].modes else one.bare for one in program)
        for program in case.programs
    ]
    assert compiled.decode(compiled.encode(case.programs)) == tuple(named)


@given(cases(menus=True), st.integers(0, 2**32))
def test_compiled_time_is_the_reference_time(case: Case, seed: int) -> None:
    """To the last bit, shared lanes and random durations included."""
    rng = random.Random(seed)
    compiled = CompiledProblem.of(case.problem)
    rows = compiled.encode(case.programs)
    replaced, table = {}, compiled.durations(rows).copy()
    for program, codes in zip(case.programs, rows.actions, strict=True):
        for action, code in zip(program, codes, strict=False):
            if action.type != "RELEASE":
                replaced[action.bare] = table[code] = rng.choice([0.5, 1.0, 3.0, 7.0])
    for durations, known in (({}, None), (replaced, table)):
        run = simulate(case.problem, case.programs, durations)
        assert compiled.length_ms(rows, known) == (run.makespan_ms, run.span_ms)


@given(cases(menus=True), st.floats(0.4, 1.0))
def test_what_is_made_to_fit_is_legal(case: Case, share: float) -> None:
    """Programs beyond memory, or that fit as they are; hosts aside."""
    compiled = CompiledProblem.of(case.problem)
    peaks = device_peaks(compiled, compiled.encode(case.programs))
    devices = tuple(
        device.model_copy(update={"memory_bytes": device.reserved_bytes + math.ceil(share * peak)})
        for device, peak in zip(case.problem.devices, peaks, strict=True)
    )
    hosts = tuple(host.model_copy(update={"memory_bytes": None}) for host in case.problem.hosts)
    tighter = case.problem.model_copy(update={"devices": devices, "hosts": hosts})
    compiled, table = set_out(tighter, case.programs)
    fitted_ms = make_fit(table, seeded(0))
    assert fitted_ms < math.inf or share < 1.0
    if fitted_ms < math.inf:
        assert not find_violations(tighter, read(compiled, table))
        both = compiled.length_ms(best_rows(table), table.times.duration)
        assert fitted_ms == both[tighter.objective == "span"]


def test_what_does_not_fit_is_offloaded() -> None:
    """1F1B keeps two micro-batches on the first device, and there is room for one."""
    small = problem([offloadable(0), offloadable(1)], [bus(memory_bytes=10 * UNIT), bus()], m=4)
    compiled, table = set_out(small, one_f_one_b(2, 4))
    assert make_fit(table, seeded(0)) < math.inf
    found = read(compiled, table)
    assert not find_violations(small, found)
    assert [any(action.type == "OFFLOAD" for action in row) for row in found] == [True, False]


def test_of_what_is_kept_the_farthest_backward_is_offloaded() -> None:
    """Two fit beside a third; 0 comes back last. Scratch of a table that fits nothing is reused."""
    lanes = {"d2h_gb_per_s": 100.0, "h2d_gb_per_s": 100.0, "half_duplex": True}
    small = problem([offloadable(0)], [bus(memory_bytes=20 * UNIT, **lanes)], m=3)
    rows = programs("0F0 0F1 0F2 0B2 0B1 0B0")
    tiny = small.model_copy(
        update={"devices": (small.devices[0].model_copy(update={"memory_bytes": 5 * UNIT}),)}
    )
    _, nothing = set_out(tiny, rows)
    assert make_fit(nothing, seeded(0)) == math.inf
    compiled = CompiledProblem.of(small)
    table = table_for(compiled, compiled.encode(rows), like=nothing)
    assert make_fit(table, seeded(0)) < math.inf
    found = read(compiled, table)
    assert not find_violations(small, found)
    assert {action.microbatch for action in found[0] if action.type == "OFFLOAD"} == {0}


def test_it_beats_every_start_where_memory_is_short() -> None:
    """A problem with offload; take the search away and this is red."""
    best = started(offload_problem())
    start_ms = best.objective_ms
    improve_by_local_search(best, Stop(60, work=1_000_000))
    assert best.objective_ms < 0.97 * start_ms
    assert best.method == "local-search"


def test_it_fuses_where_that_saves_bytes_alone() -> None:
    """An I needs workspace, a B none. One that never fuses ends at 47 ms."""
    cells = [
        stage(d, *times, weight_context_bytes=context, backward_input_workspace_bytes=beside)
        for d, (*times, beside, context) in enumerate(
            [(2, 1, 2, 6, 10), (1, 1, 3, 3, 3), (1, 3, 3, 3, 5)]
        )
    ]
    best = serially(problem(cells, [{"memory_bytes": size} for size in (25, 30, 20)], m=5))
    improve_by_local_search(best, Stop(60, work=300_000))
    assert best.objective_ms == 40


@pytest.mark.parametrize("improve", [improve_by_local_search, improve_by_stretches])
def test_with_a_work_limit_the_result_is_a_function_of_the_seed(
    improve: Callable[[Incumbent, Stop], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock does, it ends with the same, better programs and the same work."""
    results = []
    for jump_s in (0.0, 0.01, 0.1):
        monkeypatch.setattr(time, "perf_counter", erratic_clock(jump_s))
        best, stop = started(offload_problem()), Stop(600, seed=7, work=3_000_000)
        before_ms = best.objective_ms
        improve(best, stop)
        assert best.objective_ms < before_ms
        results.append((stop.spent, best.programs))
    assert results[0] == results[1] == results[2]
    assert results[0][0] >= 3_000_000


def test_it_stops_when_told_to_and_at_its_limit(yardstick: Yardstick) -> None:
    """Told at once it does nothing; a limit of a tenth of a second is kept."""
    best = started(offload_problem(m=64))
    stop = Stop(60, should_stop=lambda: True)
    improve_by_local_search(best, stop)
    assert stop.spent == 0
    improve_by_local_search(best, Stop(0.01))

    def spend_s() -> float:
        began = time.thread_time()
        improve_by_local_search(best, Stop(0.1))
        return time.thread_time() - began

    assert yardstick.times(spend_s) < 15


def test_passes_without_a_duration_are_no_obstacle() -> None:
    """After so much work a search that simulates every program anew was at 0.0141 to 0.0167 ms."""
    times = ((4, 0, 1), (0, 3, 2), (0, 3, 1), (0, 1, 4), (3, 4, 4), (0, 4, 2), (3, 2, 4), (2, 4, 4))
    stages = [
        stage(s % 4, *(ms * 1e-4 for ms in passes), activation_bytes=10, weight_context_bytes=5)
        for s, passes in enumerate(times)
    ]
    best = serially(problem(stages, [{"memory_bytes": 60}] * 4, m=6))
    improve_by_local_search(best, Stop(600, work=300_000))
    assert best.objective_ms < 0.0125


def test_it_finds_the_parked_optimum() -> None:
    """132 is proven; first in, first out cannot do better than 136, where a tame search stays."""
    sizes = {"activation_bytes": 16 * UNIT, "offload_bytes": 16 * UNIT}
    stages = [offloadable(d, 4, 4, 2, weight_context_bytes=8 * UNIT, **sizes) for d in range(4)]
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
    best = serially(offload_problem(m=300))
    improve_by_local_search(best, Stop(0.01))
    # A busy machine may halt once, a search that forgets to look does so each time.
    assert any(longest_without_a_look(best) < 0.4 for _ in range(3))


# --- Coolings of one stretch of time: which places it has, and that only they are moved from.


@given(cases(menus=True), st.integers(0, 2**32))
def test_what_ends_within_a_stretch_is_in_it(case: Case, seed: int) -> None:
    """Places in order, the same for the same seed; whatever the stretch, no program is longer.

    No F, I or B before its places ends later than those up to one of its places, on any device; one
    whose output waits for a link ends when that departs.
    """
    compiled = CompiledProblem.of(case.problem)
    rows = compiled.encode(case.programs)
    whole = everywhere(rows)
    assert (whole[:, 0] == 0).all()
    assert (whole[:, 1] >= rows.lengths).all()
    focus, again = (
        some_stretch(compiled, rows, table_for(compiled, rows).work, seeded(seed)) for _ in range(2)
    )
    assert np.array_equal(focus, again)
    assert (focus >= 0).all()
    assert (focus[:, 0] <= focus[:, 1]).all()
    assert (focus[:, 1] <= rows.lengths).all()
    inside: list[float] = []
    before = [0.0]
    run = simulate(case.problem, case.programs)
    departs = {message.producer: message.depart for message in run.messages}
    for program, times, (low, high) in zip(case.programs, run.times, focus, strict=True):
        latest = 0.0
        for place, (action, at) in enumerate(zip(program, times, strict=True)):
            if (done := pass_of(action)) is not None and place < high:
                latest = max(latest, departs.get(done, at.end))
                (before if place < low else inside).append(latest)
    assert not inside or min(inside) >= max(before)


@few(30)
@given(
    st.sampled_from([improve_by_local_search, improve_by_stretches]),
    cases(menus=True),
    st.integers(0, 2**32),
)
def test_what_is_found_is_legal_and_no_worse(
    improve: Callable[[Incumbent, Stop], None], case: Case, seed: int
) -> None:
    """As the reference judges it; from random programs, under limits just met or none."""
    best = Incumbent(case.problem)
    assert best.offer(case.programs, "given")
    before, stop = best.objective_ms, Stop(60, seed=seed, work=100_000)
    improve(best, stop)
    assert stop.spent > 0 or best.is_optimal
    assert best.programs is not None
    check(case.problem, best.programs)
    run = simulate(case.problem, best.programs)
    assert run.objective_ms(case.problem.objective) == best.objective_ms <= before


def test_of_large_problems_no_stretch_is_searched() -> None:
    """More than a hundred passes of one kind."""
    best = started(problem([stage(0), stage(1)], [bus(), bus()], m=51))
    stop = Stop(60)
    improve_by_stretches(best, stop)
    assert stop.spent == 0
