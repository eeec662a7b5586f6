"""The local search over circular orders: its period and its memory are those of the programs."""

from __future__ import annotations

import random
from math import inf, isfinite
from typing import TYPE_CHECKING

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from optpipe import Problem, find_violations, simulate
from optpipe.memory import host_peak_bytes
from optpipe_solver.families.v_shape import candidate_blocks
from optpipe_solver.milp.periodic import circular_kernel
from optpipe_solver.milp.periodic.block import unroll
from optpipe_solver.milp.periodic.circular_kernel import Circle
from optpipe_solver.milp.periodic.circular_moves import set_mode
from optpipe_solver.milp.periodic.circular_search import CircularSearch, small_memory
from tests.solver.milp.periodic.equal import equal
from tests.solver.milp.periodic.shrinkable import shrinkable_problems
from tests.strategies import few

if TYPE_CHECKING:
    from optpipe_solver.milp.periodic.block import PeriodicBlock


def of_length(given: Problem, m: int) -> Problem:
    """The problem with another number of micro-batches."""
    return given.model_copy(update={"num_microbatches": m})


def shaken(search: CircularSearch, circle: Circle, seed: int) -> Circle:
    """The circle after random moves of its items and changes of modes that leave it a period."""
    rng = random.Random(seed)
    graph = circular_kernel.new_graph(search.rules)
    for _ in range(20):
        made = Circle(*(field.copy() for field in circle))
        period = circular_kernel.period(circle, search.rules, graph)
        device = rng.randrange(len(circle.rows))
        size = int(circle.counts[device])
        if rng.random() < 0.5 and size > 1:
            at = rng.randrange(size - 1)
            made.rows[device, [at, at + 1]] = made.rows[device, [at + 1, at]]
            made.turn[made.rows[device, at]] += rng.randrange(-1, 2)
        else:
            cell = rng.randrange(len(search.nodes.cells))
            mode = rng.choice([mode for mode in range(3) if search.rules.may[cell, mode]])
            set_mode(made, search.rules, cell, mode, graph.start.copy(), period)
            device = int(search.rules.device[cell])
        in_order = circular_kernel.cells_in_order(made, search.rules, device)
        if in_order and isfinite(circular_kernel.period(made, search.rules, graph)):
            circle = made
    return circle


def some_block(
    given_problem: Problem, seed: int, *, fused: bool, copies: int
) -> tuple[CircularSearch, Circle, PeriodicBlock]:
    """A shaken circle and its block."""
    search = CircularSearch(given_problem, fused=fused, copies=copies, shrinks=True)
    circle = shaken(search, search.from_times(candidate_blocks(given_problem)[0]), seed)
    block = search.block_of(circle)
    assert block is not None
    event(f"modes {sorted(set(circle.mode.tolist()))}")
    return search, circle, block


@given(shrinkable_problems(), st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
def test_the_period_is_what_a_long_run_needs_per_micro_batch(
    given_problem: Problem, seed: int, fused: bool, copies: int
) -> None:
    """However a circle looks, its period is the growth of the simulated time with m.

    Where devices share a bus it is no more: what waits for whom is left out.
    """
    _, circle, block = some_block(given_problem, seed, fused=fused, copies=copies)
    lengths = []
    for periods in (60, 120):
        longer = of_length(given_problem, periods * copies)
        programs = unroll(longer, block)
        assert not [v for v in find_violations(longer, programs) if "memory" not in v.code]
        # The reduction of gradients happens once; it is not part of the period.
        lengths.append(max(t.end for row in simulate(longer, programs).times for t in row))
    grown = (lengths[1] - lengths[0]) / 60
    assert block.period_ms <= grown * 1.02
    if 1 not in circle.mode or not any(d.pcie_group for d in given_problem.devices):
        assert grown == pytest.approx(block.period_ms, rel=0.02)


@given(shrinkable_problems(), st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
def test_memory_is_the_peak_of_the_programs(
    given_problem: Problem, seed: int, fused: bool, copies: int
) -> None:
    """What the kernel counts from indices is the largest prefix sum of the repeated block."""
    search, circle, block = some_block(given_problem, seed, fused=fused, copies=copies)
    for device, peak in enumerate(block.peaks(given_problem)):
        if given_problem.stages_of[device]:
            static = given_problem.static_bytes_of(device)
            counted = search.excess(circle, device)
            assert counted + search.rules.limit[device] == peak - static
    longer = of_length(given_problem, 24 * copies)
    hosted = host_peak_bytes(longer, unroll(longer, block))
    for number, host in enumerate(given_problem.hosts):
        peaks = [
            circular_kernel.host_peak(circle, search.rules, device)
            for device in range(len(given_problem.devices))
            if search.rules.host[device] == number
        ]
        assert sum(peaks) == hosted[host.name]


@few(30)
@given(shrinkable_problems(), st.integers(0, 10**6), st.integers(2, 3))
def test_a_block_repeated_is_the_same_programs(
    given_problem: Problem, seed: int, times: int
) -> None:
    """So many periods taken as one run the same actions in the same order, whatever m."""
    _, _, block = some_block(given_problem, seed, fused=False, copies=1)
    for m in (1, 5, 12):
        longer = of_length(given_problem, m)
        assert unroll(longer, block.repeated(times)) == unroll(longer, block)


def test_an_order_against_the_chain_has_no_period() -> None:
    """I before F in one turn waits for itself."""
    search = CircularSearch(equal(2, "v"), fused=False)
    circle = search.from_times(candidate_blocks(search.problem)[0])
    turn = circle.turn.copy()
    turn[0] += 99
    assert search.evaluated_ms(circle._replace(turn=turn)) == inf


def test_starts_satisfy_every_arc() -> None:
    """The starts filled in with the period are a feasible schedule of it."""
    search = CircularSearch(equal(4, "loop"), fused=False)
    circle = search.from_times(candidate_blocks(search.problem)[3])
    graph = circular_kernel.new_graph(search.rules)
    period = circular_kernel.period(circle, search.rules, graph)
    start = graph.start
    assert isfinite(period)
    turns = circle.turn[search.rules.arc_to] - circle.turn[search.rules.arc_from]
    gaps = start[search.rules.arc_to] - start[search.rules.arc_from]
    assert (gaps >= search.rules.lag - period * turns - 1e-6).all()


def test_it_finds_the_smallest_memory_of_four_devices() -> None:
    """From a start that is a third too slow to no idle time at 4/8 of 1F1B's memory."""
    search = CircularSearch(equal(4, "v", limit=8), fused=False)
    start = search.from_times(candidate_blocks(search.problem)[0])
    assert search.evaluated_ms(start) == 8
    found, _ = search.improved(start, num_moves=20_000, seed=0)
    assert search.evaluated_ms(found) == 6


def test_one_seed_is_one_search() -> None:
    """The same seed moves the same items; the start is left as it was."""
    search = CircularSearch(equal(8, "v", limit=14), fused=False)
    start = search.from_times(candidate_blocks(search.problem)[0])
    kept = start.rows.copy()
    runs = [search.improved(start, num_moves=3_000, seed=5) for _ in range(2)]
    assert runs[0][1] == runs[1][1]
    assert (runs[0][0].rows == runs[1][0].rows).all()
    assert (start.rows == kept).all()


def test_small_memory_comes_close_to_the_smallest() -> None:
    """Four devices without idle time: 4/8 of 1F1B's memory, which is proven smallest."""
    given_problem = equal(4, "v")
    block = small_memory(given_problem, 6.0, num_moves=3_000, seed=0)
    assert block is not None
    assert block.period_ms == pytest.approx(6.0)
    assert max(block.peaks(given_problem)) == 8
