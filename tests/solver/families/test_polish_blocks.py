"""Polished building blocks: legal, worth having, the same for a seed, and soon at an end."""

from optpipe import Problem, find_violations
from optpipe_solver.budget import Stop
from optpipe_solver.families.building_blocks import build_building_blocks
from optpipe_solver.families.polish_blocks import improve_by_blocks
from optpipe_solver.incumbent import Incumbent
from tests.building import problem, stage
from tests.solver.families.v_problems import equal_v


def uneven() -> Problem:
    """A V of four devices with unequal times and three eighths of 1F1B's memory."""
    stages = [
        stage(d, 3 + d / 2, 4, 2 + k / 5, activation_bytes=10, weight_context_bytes=5)
        for k, d in enumerate([0, 1, 2, 3, 3, 2, 1, 0])
    ]
    return problem(stages, [{"memory_bytes": 45}] * 4, m=12)


def test_it_beats_the_best_building_block() -> None:
    """Where memory is short, offsets that are not uniform are worth having."""
    best = Incumbent(uneven())
    best.offer(build_building_blocks(uneven()), "building-blocks")
    before = best.objective_ms
    improve_by_blocks(best, Stop(60, work=120_000))
    assert best.objective_ms < before - 1
    assert best.method == "periodic"


def test_work_alone_decides() -> None:
    """Two runs that only the work limit ends offer the same programs and count the same work."""
    runs = []
    for _ in range(2):
        best, stop = Incumbent(uneven()), Stop(600, seed=3, work=40_000)
        improve_by_blocks(best, stop)
        runs.append((stop.spent, best.objective_ms, best.programs))
    assert runs[0] == runs[1]
    assert runs[0][0] >= 40_000


def test_it_ends_when_told_to() -> None:
    """Told to stop before it begins, it offers nothing."""
    best, stop = Incumbent(uneven()), Stop(60, should_stop=lambda: True)
    improve_by_blocks(best, stop)
    assert stop.spent == 0
    assert best.programs is None


def test_many_micro_batches_are_no_more_to_search() -> None:
    """Four hundred find a legal schedule close to the load in no time."""
    many = equal_v(4, m=400, memory=4)
    best = Incumbent(many)
    improve_by_blocks(best, Stop(10.0, work=20_000))
    assert best.programs is not None
    assert not find_violations(many, best.programs)
    assert best.objective_ms <= 1.02 * many.busy_ms


def test_nothing_to_compute_is_no_work() -> None:
    """A problem without compute time has no period."""
    idle, stop = Incumbent(problem([stage(0, 0, 0, 0)])), Stop(5)
    improve_by_blocks(idle, stop)
    assert stop.spent == 0
