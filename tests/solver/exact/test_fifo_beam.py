"""The beam over counts: what it finds can be run, it denies nothing, and it leaves plateaus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, check, simulate
from optpipe_solver.bounds import lower_bound
from optpipe_solver.budget import Stop
from optpipe_solver.exact.beam import improve_by_beam, search_fifo_beam
from optpipe_solver.exact.fifo_search import HorizonAnswer, search_fifo
from optpipe_solver.families.classic import build_serial
from optpipe_solver.incumbent import Incumbent
from tests.building import problem, stage
from tests.solver.exact.test_fifo_search import (
    counted_cases,
    fused_problem,
    is_relaxed,
    tiny_problems,
)
from tests.solver.exhaustive import optimum
from tests.strategies import few

if TYPE_CHECKING:
    from tests.strategies import Case


def equal_times(num_devices: int, chunks: int, m: int, held: float) -> Problem:
    """Stages in a loop over the devices, all times equal, ``held`` activations per device."""
    stages = [
        stage(
            s % num_devices,
            *[5.0] * 3,
            activation_bytes=1000 // chunks,
            weight_context_bytes=500 // chunks,
        )
        for s in range(chunks * num_devices)
    ]
    return problem(stages, [{"memory_bytes": int(1000 * held)}] * num_devices, m=m)


def serially(given: Problem) -> Incumbent:
    """One micro-batch after the other: legal, and long."""
    best = Incumbent(given)
    best.offer(build_serial(given), "serial")
    return best


@given(counted_cases())
def test_what_it_finds_can_be_run(case: Case) -> None:
    """Legal, and within the length of any schedule there is; with that horizon none is denied."""
    length = simulate(case.problem, case.programs).makespan_ms
    found = search_fifo_beam(case.problem, length, 300)
    assert found.answer is not HorizonAnswer.NONE
    if found.programs is not None:
        check(case.problem, found.programs)
        if not is_relaxed(case.problem):
            assert simulate(case.problem, found.programs).makespan_ms <= length


@given(tiny_problems())
def test_wide_enough_it_is_exact(tiny: Problem) -> None:
    """A schedule at the optimum that exhaustive search knows, none below it."""
    least = optimum(tiny)
    assert search_fifo_beam(tiny, least, 10_000).answer is HorizonAnswer.FOUND
    below = search_fifo_beam(tiny, least - 0.5, 10_000)
    assert below.answer is HorizonAnswer.NONE or is_relaxed(tiny)


@st.composite
def tied_problems(draw: st.DrawFn) -> Problem:
    """Few different times on two to four devices: many passes start at one instant."""
    num_devices, chunks = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2)]))
    times = st.sampled_from([1.0, 1.0, 2.0])
    stages = [
        stage(s % num_devices, draw(times), draw(times), draw(times), weight_context_bytes=5)
        for s in range(chunks * num_devices)
    ]
    rooms = [draw(st.sampled_from([15, 20, 25, 30])) * chunks for _ in range(num_devices)]
    return problem(stages, [{"memory_bytes": room} for room in rooms], m=3)


@few(25)
@given(tied_problems(), st.permutations(range(4)))
def test_the_order_of_devices_says_nothing(tied: Problem, order: list[int]) -> None:
    """Ties go by device: under other names of the devices the optimum is the same."""
    names = [d for d in order if d < len(tied.devices)]
    devices = [tied.devices[names.index(d)] for d in range(len(names))]
    stages = [held.model_copy(update={"device": names[held.device]}) for held in tied.stages]
    renamed = Problem(num_microbatches=3, devices=tuple(devices), stages=tuple(stages))
    assert _least(tied) == _least(renamed)


def _least(given: Problem) -> float:
    """The shortest length within which there is a schedule; times are whole ms."""
    low, high = 0, round(simulate(given, build_serial(given)).makespan_ms)
    while low + 1 < high:
        middle = (low + high) // 2
        found = search_fifo(given, middle, most_states=10**6, most_in_layer=10**5)
        assert found.answer is not HorizonAnswer.UNKNOWN
        low, high = (low, middle) if found.answer is HorizonAnswer.FOUND else (middle, high)
    return high


def test_what_was_left_out_proves_nothing() -> None:
    """Five states per layer do not lead to the optimum, and do not deny it either."""
    found = search_fifo_beam(fused_problem(), 1114.646 + 1e-6, 5)
    assert found.answer is HorizonAnswer.UNKNOWN
    assert found.programs is None


def test_where_nothing_is_left_out_it_proves() -> None:
    """The optimum of a small problem, and its proof."""
    best = serially(equal_times(2, 1, 3, 1.5))
    improve_by_beam(best, Stop(60))
    assert best.is_optimal
    assert best.method == best.bound_method == "beam"


def test_it_leaves_a_plateau() -> None:
    """Equal times, two chunks in a loop: 430 ms, the bound; the best family is at 475."""
    best = serially(equal_times(6, 2, 12, 3.5))
    best.offer_bound(lower_bound(best.problem).ms, "bound")
    improve_by_beam(best, Stop(600, work=300_000))
    assert best.objective_ms == pytest.approx(430)
    assert best.is_optimal


def test_the_same_work_is_the_same_run() -> None:
    """A limit on states, and no clock, decides where a run ends."""
    runs = []
    for _ in range(2):
        best = serially(equal_times(4, 1, 6, 2.0))
        stop = Stop(600, work=60_000)
        improve_by_beam(best, stop)
        met = stop.spent
        runs.append((met, best.objective_ms, best.bound_ms, best.programs))
    assert runs[0] == runs[1]


def test_told_to_stop_it_stops() -> None:
    """One layer, and nothing found."""
    stopped = search_fifo_beam(fused_problem(), 2000, 10, should_stop=lambda: True)
    assert (stopped.answer, stopped.num_states) == (HorizonAnswer.UNKNOWN, 1)
