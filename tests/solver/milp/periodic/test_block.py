"""Unrolled blocks are legal programs for every number of micro-batches, within the limits."""

from __future__ import annotations

from hypothesis import event, given
from hypothesis import strategies as st

from optpipe import find_violations, simulate
from optpipe_solver.budget import Stop
from optpipe_solver.milp.periodic.block import squeezed, unroll
from optpipe_solver.milp.periodic.items import load_ms
from optpipe_solver.milp.periodic.questions import shortest_period, smallest_memory
from tests.solver.milp.periodic.equal import equal
from tests.strategies import Case, cases, few


@few(25)
@given(cases(tight=True), st.integers(1, 7))
def test_any_block_is_legal_for_any_m(case: Case, m: int) -> None:
    """Offload, recompute, fused backwards, shared lanes: what the model allows is legal."""
    given_problem = case.problem
    if not load_ms(given_problem) > 0:
        return
    serial = 10.0 + 10 * sum(stage.busy_ms for stage in given_problem.stages)
    found = shortest_period(given_problem, serial, Stop(5.0), proves=False)
    event(f"{found.status}")
    if found.block is None:
        return
    longer = given_problem.model_copy(update={"num_microbatches": m})
    assert not find_violations(longer, unroll(longer, found.block))


def test_squeezing_keeps_the_limits_and_saves_time() -> None:
    """Warm-up and cool-down shrink; memory does not grow."""
    block = smallest_memory(equal(8, "v"), 6.0, Stop(60.0), proves=False).block
    assert block is not None
    tight = equal(8, "v", m=32, limit=max(block.peaks(equal(8, "v"))))
    plain = simulate(tight, unroll(tight, block)).makespan_ms
    made = squeezed(tight, block)
    assert made
    programs = made[0].programs(16)
    assert not find_violations(tight, programs)
    assert simulate(tight, programs).makespan_ms == made[0].makespan_ms
    assert made[0].makespan_ms <= plain
