"""Squeezing a block: the compiled execution means what the simulator means."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, find_violations, simulate
from optpipe_solver.families.squeeze import (
    BuildingBlock,
    Early,
    SqueezePolicy,
    Squeezer,
    uniform_block,
)
from tests.solver.families.pipelines import v_problems
from tests.solver.families.v_problems import equal_v


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
