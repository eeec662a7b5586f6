"""The search over circles with offload and recompute, and the schedules made of what it finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optpipe import ActionType, Problem, find_violations
from optpipe_solver.budget import Stop
from optpipe_solver.families.v_shape import candidate_blocks
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.milp.periodic.circular_search import CircularSearch
from optpipe_solver.milp.periodic.items import load_ms
from optpipe_solver.milp.periodic.rounds import PeriodicRun, ShrinkRounds, fitted, with_memory
from tests.building import UNIT, bus, offloadable, problem, stage
from tests.solver.milp.periodic.shrinkable import shrinkable_problems
from tests.strategies import few


def short_of_memory(limit: int = 25) -> Problem:
    """Four devices with room for two activations and a half; transfers take a sixth of a period."""
    stages = [offloadable(d, 20, 20, 20, weight_context_bytes=5 * UNIT) for d in range(4)]
    return problem(stages, [bus(memory_bytes=limit * UNIT)] * 4, m=12)


def run_of(given_problem: Problem) -> PeriodicRun:
    """A run without any limit."""
    return PeriodicRun(Incumbent(given_problem), Stop(1e6))


def searched(given_problem: Problem, *, shrinks: bool) -> tuple[float, frozenset[ActionType]]:
    """The period found in so many moves, and what the block is made of."""
    search = CircularSearch(given_problem, fused=False, shrinks=shrinks)
    starts = [search.shrunk(search.from_times(b)) for b in candidate_blocks(given_problem)[:8]]
    start = min(starts, key=search.charged_ms)
    found, _ = search.improved(start, num_moves=4_000, seed=0, hot=0.1)
    block = search.block_of(found)
    assert block is not None
    return search.evaluated_ms(found), block.kinds()


def test_offload_is_found_where_memory_needs_it() -> None:
    """With room for two and a half activations the four devices wait; with offload they do not."""
    kept, _ = searched(short_of_memory(), shrinks=False)
    moved, kinds = searched(short_of_memory(), shrinks=True)
    assert moved < kept
    assert ActionType.RELOAD in kinds


def test_recompute_is_found_where_memory_needs_it() -> None:
    """The same with a checkpoint of a tenth, which costs a forward again."""
    held = [
        stage(d, 2, 2, 2, weight_context_bytes=0, recompute_ms=1, checkpoint_bytes=1)
        for d in range(3)
    ]
    tight = problem(held, [{"memory_bytes": 16}] * 3, m=7)
    kept, _ = searched(tight, shrinks=False)
    again, kinds = searched(tight, shrinks=True)
    assert again < kept
    assert ActionType.RECOMPUTE in kinds


@few(20)
@given(shrinkable_problems(), st.integers(1, 3))
def test_what_is_made_of_a_block_is_legal(given_problem: Problem, copies: int) -> None:
    """Unrolled, or made to fit anew: within the limits that the block keeps itself."""
    search = CircularSearch(given_problem, fused=False, copies=copies, shrinks=True)
    circle = search.shrunk(search.from_times(candidate_blocks(given_problem)[0]))
    circle, _ = search.improved(circle, num_moves=200, seed=1, hot=0.3)
    block = search.block_of(circle)
    assert block is not None
    devices = [
        device.model_copy(update={"memory_bytes": peak + device.reserved_bytes})
        for device, peak in zip(given_problem.devices, block.peaks(given_problem), strict=True)
    ]
    tight = given_problem.model_copy(update={"devices": devices})
    made = list(fitted(tight, block))
    assert made
    for programs in made:
        assert not find_violations(tight, programs)


def test_the_rounds_come_to_an_end() -> None:
    """One, two and three micro-batches per period; then nothing is left, however often asked."""
    run = run_of(short_of_memory())
    rounds = ShrinkRounds(run, fused=False, fit_work=1)
    copies = set()
    while rounds.next():
        copies.add(rounds.search.nodes.copies)
    assert copies == {1, 2, 3}
    assert not rounds.next()
    assert run.best.programs is not None
    assert run.best.objective_ms >= 12 * load_ms(run.best.problem)


def test_super_periods_start_from_the_best_of_one() -> None:
    """Two micro-batches per period are never slower than the block they start from."""
    run = run_of(short_of_memory(18))
    rounds = ShrinkRounds(run, fused=False, fit_work=1)
    shortest: dict[int, float] = {}
    while rounds.next():
        copies = rounds.search.nodes.copies
        shortest[copies] = min(ms for ms, _ in rounds.pool) / copies
    assert shortest[3] <= shortest[1] * (1 + 1e-9)
    assert shortest[2] <= shortest[1] * (1 + 1e-9)


def test_more_memory_for_every_device() -> None:
    """Twice the memory is twice the memory, on every device."""
    limits = [device.memory_bytes for device in with_memory(short_of_memory(), 2.0).devices]
    assert limits == [50 * UNIT] * 4
