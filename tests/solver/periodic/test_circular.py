"""The local search over circular orders: its period and its memory are those of the programs."""

from __future__ import annotations

import random
from math import inf, isfinite

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from optpipe import Problem, find_violations, simulate
from optpipe_solver.families.building_blocks import candidate_blocks
from optpipe_solver.improve import circular_kernel
from optpipe_solver.improve.circular import CircularSearch
from optpipe_solver.improve.circular_kernel import Circle
from optpipe_solver.improve.circular_memory import small_memory
from optpipe_solver.milp.periodic.unroll import unroll
from tests.solver.periodic.equal import equal
from tests.strategies import problems


def of_length(given: Problem, m: int) -> Problem:
    """The problem with another number of micro-batches."""
    return given.model_copy(update={"num_microbatches": m})


def shaken(search: CircularSearch, circle: Circle, seed: int) -> Circle:
    """The circle after a few random moves of its items, whatever becomes of its period."""
    rng = random.Random(seed)
    rows, turn = circle.rows.copy(), circle.turn.copy()
    for _ in range(rng.randrange(12)):
        device = rng.randrange(len(rows))
        size = int(circle.counts[device])
        if size > 1:
            at = rng.randrange(size - 1)
            rows[device, [at, at + 1]] = rows[device, [at + 1, at]]
            turn[rows[device, at]] += rng.randrange(2)
    return Circle(rows, circle.counts, turn)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 10**6), st.booleans())
def test_the_period_is_what_a_long_run_needs_per_micro_batch(
    given_problem: Problem, seed: int, fused: bool
) -> None:
    """However a circle looks, its period is the growth of the simulated time with m."""
    search = CircularSearch(given_problem, fused=fused)
    start = search.from_times(candidate_blocks(given_problem)[0])
    circle = shaken(search, start, seed)
    block = search.block_of(circle)
    if block is None or search.rules.duration.min() == 0:
        event("no period" if block is None else "zero times")
        return
    event("a period")
    lengths = []
    for m in (120, 240):
        longer = of_length(given_problem, m)
        programs = unroll(longer, block)
        assert not [v for v in find_violations(longer, programs) if "memory" not in v.code]
        # The reduction of gradients happens once; it is not part of the period.
        lengths.append(max(t.end for row in simulate(longer, programs).times for t in row))
    assert (lengths[1] - lengths[0]) / 120 == pytest.approx(block.period_ms, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 10**6), st.booleans())
def test_memory_is_the_peak_of_the_programs(given_problem: Problem, seed: int, fused: bool) -> None:
    """What the kernel counts from indices is the largest prefix sum of the repeated block."""
    search = CircularSearch(given_problem, fused=fused)
    circle = shaken(search, search.from_times(candidate_blocks(given_problem)[0]), seed)
    block = search.block_of(circle)
    if block is None or search.rules.duration.min() == 0:
        return
    for device, peak in enumerate(block.peaks(given_problem)):
        if given_problem.stages_of[device]:
            static = given_problem.static_bytes_of(device)
            counted = circular_kernel.excess(circle, search.rules, device)
            assert counted + search.rules.limit[device] == peak - static


def test_an_order_against_the_chain_has_no_period() -> None:
    """I before F in one turn waits for itself."""
    search = CircularSearch(equal(2, "v"), fused=False)
    circle = search.from_times(candidate_blocks(search.problem)[0])
    turn = circle.turn.copy()
    turn[0] += 99
    assert search.judged_ms(Circle(circle.rows, circle.counts, turn)) == inf


def test_starts_satisfy_every_arc() -> None:
    """The starts filled in with the period are a feasible schedule of it."""
    search = CircularSearch(equal(4, "loop"), fused=False)
    circle = search.from_times(candidate_blocks(search.problem)[3])
    start = np.zeros(search.rules.duration.size)
    period = circular_kernel.period(circle, search.rules, start)
    assert isfinite(period)
    turns = circle.turn[search.rules.arc_to] - circle.turn[search.rules.arc_from]
    gaps = start[search.rules.arc_to] - start[search.rules.arc_from]
    assert (gaps >= search.rules.lag - period * turns - 1e-6).all()


def test_it_finds_the_smallest_memory_of_four_devices() -> None:
    """From a start that is a third too slow to no idle time at 4/8 of 1F1B's memory."""
    search = CircularSearch(equal(4, "v", limit=8), fused=False)
    start = search.from_times(candidate_blocks(search.problem)[0])
    assert search.judged_ms(start) == 8
    found, _ = search.improved(start, num_moves=20_000, seed=0)
    assert search.judged_ms(found) == 6


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
