"""Squeezing a block: the compiled execution means what the simulator means.

Polished building blocks: legal, worth having, the same for a seed, and soon at an end.
"""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, find_violations, simulate
from optpipe_solver.budget import Stop
from optpipe_solver.families.polish_blocks import improve_by_blocks
from optpipe_solver.families.squeeze import (
    BuildingBlock,
    Early,
    SqueezePolicy,
    Squeezer,
    uniform_block,
)
from optpipe_solver.families.v_shape import build_building_blocks
from optpipe_solver.incumbent import Incumbent
from tests.building import problem, stage
from tests.solver.families.v_problems import equal_v, v_problems


def test_a_uniform_block_turns_three_times() -> None:
    """Five stages: the second half is the longer one."""
    block = uniform_block(5, offsets=(1, 10, 100, 1000), gaps=(2, 3, 4), period=7)
    assert block.forward.tolist() == [0, 1, 3, 13, 23]
    assert block.backward.tolist() == [1230, 230, 226, 126, 26]


@given(v_problems(), st.sampled_from(list(Early)), st.sampled_from([1.0, 0.5, 0.0, -1.0]))
def test_it_is_legal_and_takes_as_long_as_it_says(
    given: Problem, early: Early, patience: float
) -> None:
    """No policy gets stuck, and the simulator finds the same times, gradient reductions aside."""
    block = uniform_block(len(given.stages), (1, 1, 1, 1), (1, 1, 1), 6)
    squeezed = Squeezer.in_bytes(given, fused=False).squeeze(block, SqueezePolicy(early, patience))
    assert squeezed is not None
    programs = squeezed.programs(len(given.stages))
    assert find_violations(given, programs) == []
    quiet = [stage.model_copy(update={"grad_sync_ms": 0}) for stage in given.stages]
    run = simulate(given.model_copy(update={"stages": quiet}), programs)
    assert (squeezed.makespan_ms, squeezed.span_ms) == (run.makespan_ms, run.span_ms)


def test_a_block_without_time_follows_the_chain() -> None:
    """Where passes tie, the order is that of their dependencies, micro-batch after micro-batch."""
    given = equal_v(3, 4, memory=8)
    block = BuildingBlock(np.zeros(6), np.zeros(6), 0.0)
    squeezed = Squeezer.in_bytes(given, fused=False).squeeze(block, SqueezePolicy(Early.NEVER))
    assert squeezed is not None
    programs = squeezed.programs(6)
    assert find_violations(given, programs) == []
    first = [str(action) for action in programs[2][:8]]
    assert first == ["2F0", "2F1", "2F2", "2F3", "3F0", "3F1", "3F2", "3F3"]


def test_an_order_that_does_not_fit_is_refused() -> None:
    """All four forwards first need eight activations of a stage."""
    block = BuildingBlock(np.zeros(6), np.zeros(6), 0.0)
    squeezer = Squeezer.in_bytes(equal_v(3, 4, memory=7), fused=False)
    assert squeezer.squeeze(block, SqueezePolicy(Early.NEVER)) is None


@pytest.mark.parametrize("fused", [False, True])
def test_a_quick_look_runs_fewer_micro_batches(fused: bool) -> None:
    """The search looks at a few before it runs them all."""
    squeezed = Squeezer.in_bytes(equal_v(3, 9), fused=fused).squeeze(
        uniform_block(6, (3, 3, 3, 3), (1, 1, 1), 6), SqueezePolicy(), 2
    )
    assert squeezed is not None
    assert [len(row) for row in squeezed.programs(6)] == [2 * 2 * (2 if fused else 3)] * 3


def uneven() -> Problem:
    """A V of four devices with unequal times and three eighths of 1F1B's memory."""
    stages = [
        stage(d, 3 + d / 2, 4, 2 + k / 5, activation_bytes=10, weight_context_bytes=5)
        for k, d in enumerate([0, 1, 2, 3, 3, 2, 1, 0])
    ]
    return problem(stages, [{"memory_bytes": 45}] * 4, m=12)


def equal_v(p: int, m: int, limit: int) -> Problem:
    """A V of two chunks of 1 ms passes per device; 2 bytes per activation, 1 of them until W."""
    line = list(range(p))
    stages = [stage(d, activation_bytes=2, weight_context_bytes=1) for d in line + line[::-1]]
    return problem(stages, [{"memory_bytes": limit}] * p, m=m)


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


def test_it_ends_in_time() -> None:
    """A second is a second, give or take what one round takes."""
    best = Incumbent(equal_v(8, m=200, limit=16))
    began = time.perf_counter()
    improve_by_blocks(best, Stop(1.0))
    assert time.perf_counter() - began < 20.0


def test_many_micro_batches_are_no_more_to_search() -> None:
    """Four hundred find a legal schedule close to the load in no time."""
    many = equal_v(4, m=400, limit=8)
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
