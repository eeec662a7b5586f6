"""The list scheduler: every rule keeps the limits, and knows the times that the simulator finds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, find_violations, simulate
from optpipe.simulate import Simulation
from optpipe_solver.arrays.list_scheduler import (
    Early,
    ListRule,
    ListSchedule,
    ListScheduler,
    Policy,
    SplitBackward,
)
from optpipe_solver.families.building_blocks import BuildingBlock, uniform_block, unroll
from tests.building import problem, stage
from tests.solver.families.pipelines import v_problems
from tests.solver.families.v_problems import equal_v


def test_a_uniform_block_turns_three_times() -> None:
    """Five stages: the second half is the longer one."""
    block = uniform_block(5, offsets=(1, 10, 100, 1000), gaps=(2, 3, 4), period=7)
    assert block.forward.tolist() == [0, 1, 3, 13, 23]
    assert block.backward.tolist() == [1230, 230, 226, 126, 26]


policies = st.builds(
    Policy,
    st.sampled_from(list(ListRule)),
    st.sampled_from([1.0, 0.5, 0.0]),
    st.sampled_from(list(SplitBackward)),
    st.sampled_from(list(Early)),
    in_flight=st.sampled_from([1.0, 1.5, 1e9]),
    wait=st.sampled_from([0.0, 1.0]),
    reach=st.sampled_from([2, 100]),
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A V with little memory; perhaps with pairs, perhaps with messages that queue on links."""
    found = draw(v_problems())
    document = found.model_dump(by_alias=True, mode="json", exclude_none=True)
    document["format"] = "optpipe/problem/v2"
    if draw(st.booleans()):
        for link in document["links"]:
            link["bandwidth_gb_per_s"] = 1e-6
        for stage in document["stages"]:
            stage["output_bytes"] = draw(st.integers(0, 7))
    if draw(st.booleans()):
        placement = found.placement
        document["pairs"] = [
            {"forward": a, "backward": b, "hidden_ms": draw(st.integers(0, _shorter(found, a, b)))}
            for a, here in enumerate(placement)
            for b, there in enumerate(placement)
            if here == there
        ]
    for device in document["devices"]:
        device["memory_bytes"] = draw(st.integers(60, 400))
    return Problem.parse(document)


def _shorter(given: Problem, forward: int, backward: int) -> int:
    stage = given.stages[backward]
    return int(min(given.stages[forward].forward_ms, stage.fused_backward_ms))


@given(problems(), policies, st.data())
def test_a_schedule_is_legal_and_takes_no_longer_than_it_says(
    given: Problem, policy: Policy, data: st.DataObject
) -> None:
    """For each rule, with pairs and queueing messages; gradient reductions aside.

    A W that was not worth a wait may start late, because the pass that came did not fit. The
    simulator starts it earlier.
    """
    offsets = data.draw(st.sampled_from([(1, 1, 1, 1), (3, 3, 3, 3), (2, 1, 2, 1)]))
    block = uniform_block(len(given.stages), offsets, (1, 1, 1), 6)
    order = unroll(given, block, given.num_microbatches)
    schedule = ListScheduler(given).run(policy, order)
    if schedule is not None:
        assert find_violations(given, schedule.programs()) == []
        assert schedule.makespan_ms >= _simulated(given, schedule).makespan_ms - 1e-9


def _simulated(given: Problem, schedule: ListSchedule) -> Simulation:
    quiet = tuple(stage.model_copy(update={"grad_sync_ms": 0}) for stage in given.stages)
    return simulate(given.model_copy(update={"stages": quiet}), schedule.programs())


@given(v_problems(), st.sampled_from(list(Early)), st.sampled_from([1.0, 0.5, 0.0, -1.0]))
def test_with_enough_memory_no_policy_gets_stuck_and_times_are_exact(
    given: Problem, early: Early, patience: float
) -> None:
    """A block in order, with W as early or as late as it may be."""
    block = uniform_block(len(given.stages), (1, 1, 1, 1), (1, 1, 1), 6)
    order = unroll(given, block, given.num_microbatches)
    policy = Policy(ListRule.BLOCK, patience, early=early)
    schedule = ListScheduler(given).run(policy, order)
    assert schedule is not None
    assert find_violations(given, schedule.programs()) == []
    run = _simulated(given, schedule)
    assert (schedule.makespan_ms, schedule.span_ms) == (run.makespan_ms, run.span_ms)


def test_a_block_without_time_follows_the_chain() -> None:
    """Where passes tie, the order is that of their dependencies, micro-batch after micro-batch."""
    given = equal_v(3, 4, memory=8)
    order = unroll(given, BuildingBlock(np.zeros(6), np.zeros(6), 0.0), 4)
    schedule = ListScheduler(given).run(Policy(ListRule.BLOCK, early=Early.NEVER), order)
    assert schedule is not None
    programs = schedule.programs()
    assert find_violations(given, programs) == []
    first = [str(action) for action in programs[2][:8]]
    assert first == ["2F0", "2F1", "2F2", "2F3", "3F0", "3F1", "3F2", "3F3"]


def test_an_order_that_does_not_fit_is_refused() -> None:
    """All four forwards first need eight activations of a stage."""
    given = equal_v(3, 4, memory=7)
    order = unroll(given, BuildingBlock(np.zeros(6), np.zeros(6), 0.0), 4)
    assert ListScheduler(given).run(Policy(ListRule.BLOCK, early=Early.NEVER), order) is None


def test_greedy_keeps_memory_for_every_w_that_waits() -> None:
    """A W takes 5 bytes more while it runs; with all memory in forwards, no W could run again."""
    stages = [
        stage(d, activation_bytes=4, weight_context_bytes=4, backward_weight_workspace_bytes=5)
        for d in (0, 1, 0, 1)
    ]
    found = []
    for room in range(13, 40):
        given = problem(stages, [{"memory_bytes": room}] * 2, 4)
        for patience in (0.0, 0.5, 1.0):
            schedule = ListScheduler(given).run(Policy(ListRule.GREEDY, patience))
            found.append(schedule is not None)
            if schedule is not None:
                assert find_violations(given, schedule.programs()) == []
    assert all(found)


@pytest.mark.parametrize("split", [SplitBackward.NEVER, SplitBackward.ALWAYS])
def test_a_quick_look_runs_fewer_micro_batches(split: SplitBackward) -> None:
    """The search looks at a few before it runs them all."""
    given = equal_v(3, 9)
    order = unroll(given, uniform_block(6, (3, 3, 3, 3), (1, 1, 1), 6), 2)
    schedule = ListScheduler(given).run(Policy(ListRule.BLOCK, split=split), order, 2)
    assert schedule is not None
    assert [len(row) for row in schedule.programs()] == [2 * 2 * (3 if split else 2)] * 3
