"""Windows: what surrounds them is exact, what they find is legal, and they find something."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from optpipe import Programs, find_violations, simulate
from optpipe_solver.improve.window import improve_by_windows
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.milp.horizon.model import HorizonModel
from optpipe_solver.milp.horizon.start import relabelled
from optpipe_solver.milp.horizon.surroundings import Surroundings
from optpipe_solver.starts import all_starts
from tests.building import problem, stage
from tests.solver.milp_rows import broken, shares_lanes
from tests.strategies import Case, cases

if TYPE_CHECKING:
    from optpipe_solver.milp.horizon.context import Context


def started(devices: int = 4, m: int = 8) -> Incumbent:
    """The incumbent of a line with 2 activations per device, holding its worst legal start."""
    stages = [
        stage(d, 4, 4, 2, activation_bytes=10, weight_context_bytes=5) for d in range(devices)
    ]
    best = Incumbent(problem(stages, [{"memory_bytes": 20} for _ in range(devices)], m=m))
    legal = [s for s in all_starts(best.problem) if s.programs is not None and s.legal]
    worst = max(legal, key=lambda start: start.objective_ms)
    assert worst.programs is not None
    best.offer(worst.programs, worst.method)
    return best


def some_window(
    around: Surroundings, programs: Programs, rng: random.Random
) -> tuple[Context, frozenset[int]]:
    """A stretch of time between two random moments, some devices frozen."""
    first, second = sorted(rng.uniform(-0.1, 1.1) * around.objective_ms for _ in range(2))
    low = around.cut_at(first)
    if around.problem.objective == "span":
        low = around.closed(low)
    high = [max(a, b) for a, b in zip(low, around.cut_at(second), strict=True)]
    frozen = frozenset(d for d in range(len(programs)) if rng.random() < 0.3)
    return around.context(low, high, frozen), frozen


@settings(max_examples=60)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_the_schedule_itself_is_a_solution_of_each_of_its_windows(case: Case, seed: int) -> None:
    """Heads, tails and bytes of the surroundings are no tighter than they are.

    And what the window's solution stands for is the schedule, or one no worse.
    """
    programs = relabelled(case.programs)
    around = Surroundings(case.problem, programs)
    context, _ = some_window(around, programs, random.Random(seed))
    model = HorizonModel(case.problem, around.objective_ms, fifo=False, context=context)
    assert not model.items.is_empty
    values = model.values_of(programs)
    if values is None:
        event("uses a pointless choice")
        return
    assert not broken(model.model, values)
    lowered = model.lowered(values)
    faults = {violation.code for violation in find_violations(case.problem, lowered)}
    assert faults <= {"memory.host"}  # a window leaves host limits to the check
    again = simulate(case.problem, lowered).objective_ms(case.problem.objective)
    if not shares_lanes(case.problem):
        assert again <= around.objective_ms * (1 + 1e-9)


@settings(max_examples=60)
@given(case=cases())
def test_the_longest_path_is_the_objective(case: Case) -> None:
    """Tails are what really follows: head + path of the critical action is the whole length."""
    around = Surroundings(case.problem, case.programs)
    longest = max(at.start + around.after[action] for action, at in around.at.items())
    assert longest <= around.objective_ms * (1 + 1e-9) + 1e-9
    if not shares_lanes(case.problem):
        syncs = [s for s in case.problem.stages if s.grad_sync_ms > 0]
        if len(syncs) < 2:
            assert longest == pytest.approx(around.objective_ms)


def test_windows_improve_and_say_so() -> None:
    """From the worst start windows alone come to within 5 % of the optimum, 150."""
    best = started()
    before = best.objective_ms
    nodes = improve_by_windows(best, time_limit_s=10, threads=1, seed=0)
    assert nodes >= 1
    assert best.method == "window"
    assert best.objective_ms < before
    assert best.objective_ms <= 150 * 1.05


def test_a_work_limit_makes_windows_repeatable() -> None:
    """The same seed and the same work give the same programs."""
    found = []
    for _ in range(2):
        best = started()
        improve_by_windows(best, time_limit_s=60, threads=1, seed=3, work_limit=6)
        found.append(best.programs)
    assert found[0] == found[1]


def test_windows_stop_at_once() -> None:
    """Told to stop, they end within half a second."""
    best = started(8, 24)
    began = time.perf_counter()
    improve_by_windows(
        best,
        time_limit_s=60,
        threads=1,
        seed=0,
        should_stop=lambda: time.perf_counter() > began + 1,
    )
    assert time.perf_counter() - began < 1.5 + 0.5
