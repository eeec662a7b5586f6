"""The configuration bound: below every schedule, sharp where memory holds whole numbers only."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, simulate
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.bounds.configurations import (
    DeviceWork,
    Pattern,
    Patterns,
    PhaseLane,
    Program,
    Window,
    configurations_ms,
    windows_of,
    work_of,
)
from optpipe_solver.bounds.relaxation import Paths
from optpipe_solver.budget import Stop
from optpipe_solver.exact.rounds import improve_by_exact_search
from tests.building import problem, stage
from tests.solver.exhaustive import optimum
from tests.solver.starting import started
from tests.strategies import Case, cases


def line(activations: float, ratio: float, m: int = 8) -> Problem:
    """Four devices, times of a published profile; a transfer takes ``ratio`` of F, I and W."""
    sizes = {"activation_bytes": 1000, "weight_context_bytes": 432, "offload_bytes": 1000}
    times = (29.718, 29.444, 19.927)
    rate = 1000 / (ratio * sum(times) * 1e6)
    device = {"memory_bytes": int(1000 * activations), "d2h_gb_per_s": rate, "h2d_gb_per_s": rate}
    return problem([stage(d, *times, **sizes) for d in range(4)], [device] * 4, m=m)


@pytest.mark.parametrize(("ratio", "best_ms"), [(0.5, 1185.089), (1.0, 1758.647), (2.0, 1913.111)])
def test_room_for_one_and_a_half_is_room_for_one(ratio: float, best_ms: float) -> None:
    """Schedules of these lengths are known, so the bound is sharp; others are 30 % below."""
    given = line(1.5, ratio)
    assert configurations_ms(given) == pytest.approx(best_ms, rel=1e-5)
    assert max(bound.ms for bound in lower_bounds(given)) < 0.75 * best_ms


@pytest.mark.parametrize(("objective", "least"), [("makespan", 20.0), ("span", 16.0)])
def test_the_clock_is_that_of_the_objective(objective: str, least: float) -> None:
    """Room for one on the second of two devices: two turns of 6, and under makespan 4 around."""
    stages = [stage(0, 4, 2, 2), stage(1, 3, 3, 2)]
    devices = [{"memory_bytes": 1000}, {"memory_bytes": 10}]
    given = problem(stages, devices, m=2, objective=objective)
    assert least - 2 <= configurations_ms(given) <= optimum(given)


@pytest.mark.parametrize("room", [1, 2, 3])
@pytest.mark.parametrize("hidden_ms", [0.5, 1.0, 2.0])
def test_a_pair_holds_both_its_cells_as_long_as_it_runs(room: int, hidden_ms: float) -> None:
    """One device: F, two pairs, B, as all programs say; with room for one there are no pairs."""
    given = problem(
        [stage(0, 2, 1, 1, activation_bytes=1)],
        [{"memory_bytes": room}],
        m=3,
        format="optpipe/problem/v2",
        pairs=[{"forward": 0, "backward": 0, "hidden_ms": hidden_ms}],
    )
    assert configurations_ms(given) == pytest.approx(12 if room == 1 else 12 - 2 * hidden_ms)


def program_of(given: Problem, device: int, *, with_windows: bool) -> Program:
    """The linear program of one device, before anything is solved."""
    work = work_of(Paths(given), device, makespan=given.objective == "makespan")
    plain = Program(work, Patterns(work), []).solve(lambda: False)
    windows = windows_of(work, plain - work.head - work.tail) if with_windows else []
    return Program(work, Patterns(work), windows)


@given(cases(tight=True, pairs=True), st.booleans(), st.integers(0, 2**32))
def test_any_prices_prove_a_bound(case: Case, with_windows: bool, seed: int) -> None:
    """What is proven does not depend on how well the linear program was solved."""
    length = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    rng = np.random.default_rng(seed)
    for device, own in enumerate(case.problem.stages_of):
        if own:
            program = program_of(case.problem, device, with_windows=with_windows)
            prices = rng.uniform(0, 2, len(program.patterns.phases)).tolist()
            assert program.proven(prices) <= length * (1 + 1e-9) + 1e-9


@given(cases(tight=True), st.integers(1, 4), st.integers(0, 2**32))
def test_the_heaviest_pattern_is_that_of_brute_force(case: Case, most: int, seed: int) -> None:
    """All sets of up to three cells, tried one by one, hold no heavier one that fits."""
    rng = np.random.default_rng(seed)
    for device, own in enumerate(case.problem.stages_of):
        if not own:
            continue
        work = work_of(Paths(case.problem), device, makespan=True)
        patterns = Patterns(work)
        prices = rng.uniform(0, 1, len(work.phases)).tolist()
        window = Window(1.0, tuple(bool(x) for x in rng.integers(0, 4, len(work.phases))), most)
        weight, found = patterns.heaviest(prices, window)
        assert weight == pytest.approx(sum(prices[i] for i in found))
        assert fits(work, found, window)
        for size in range(min(4, work.num_microbatches * len(work.stages) + 1)):
            for pattern in combinations_with_replacement(range(len(prices)), size):
                if fits(work, pattern, window):
                    assert sum(prices[i] for i in pattern) <= weight + 1e-12


def fits(work: DeviceWork, pattern: Pattern, window: Window) -> bool:
    """Whether phases can be together: lanes, bytes, what the window allows."""
    chosen = [work.phases[i] for i in pattern]
    lanes = [phase.lane for phase in chosen if phase.lane is not PhaseLane.NONE]
    transfers = sum(lane is not PhaseLane.COMPUTE for lane in lanes)
    most = min(window.most_held, work.num_microbatches * len(work.stages))
    return (
        len(set(lanes)) == len(lanes)
        and not (work.half_duplex and transfers > 1)
        and sum(phase.held_bytes for phase in chosen) <= work.room_bytes
        and all(window.allowed[i] for i in pattern)
        and sum(not phase.is_late for phase in chosen) <= most
    )


def test_windows_raise_the_bound() -> None:
    """With one lane and room for two a device cannot be full from its first moment on."""
    given = line(2, 0.5)
    program = program_of(given, 0, with_windows=False)
    assert program.solve(lambda: False) < configurations_ms(given) - 1


def test_the_search_offers_what_it_proves() -> None:
    """The bound reaches the incumbent under its own name; told to stop, none does."""
    best = started(line(1.5, 2.0))
    before = best.bound_ms
    improve_by_exact_search(best, Stop(10, should_stop=lambda: True))
    assert best.bound_ms == before
    stop = Stop(10)
    improve_by_exact_search(best, stop)
    assert stop.spent > 0
    assert best.bound_ms == pytest.approx(1913.111)
    assert best.bound_method == "configurations"
