"""The periodic MILP: the published minima, proven, and every tiny problem against all circles."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from optpipe import ActionType, Problem, find_violations, simulate
from optpipe_solver.budget import Stop
from optpipe_solver.milp.highs import MilpStatus, at_least, solve_milp, value_of
from optpipe_solver.milp.periodic import circular_kernel
from optpipe_solver.milp.periodic.block import unroll
from optpipe_solver.milp.periodic.circular_search import CircularSearch
from optpipe_solver.milp.periodic.items import Modes, PeriodChoice, load_ms
from optpipe_solver.milp.periodic.model import PeriodicModel
from optpipe_solver.milp.periodic.objective import highest_rate
from optpipe_solver.milp.periodic.questions import (
    num_order_pairs,
    shortest_period,
    shortest_way,
    smallest_memory,
)
from tests.building import UNIT, bus, offloadable, problem, stage
from tests.solver.milp.periodic.equal import equal
from tests.solver.milp.periodic.every_circle import every_circle
from tests.strategies import few


@pytest.mark.parametrize(("p", "shape", "eighths"), [(4, "v", 4), (8, "v", 7), (8, "loop", 9)])
def test_the_smallest_memory_without_idle_time(p: int, shape: str, eighths: int) -> None:
    """4/8, 7/16 and 9/16 of 1F1B's memory, proven smallest, and kept by the programs."""
    found = smallest_memory(equal(p, shape), 6.0, Stop(120.0))
    share = eighths / (2 * p)
    assert found.is_optimal
    assert found.block is not None
    assert max(found.block.peaks(equal(p, shape))) == share * 4 * p
    assert found.bound == pytest.approx(share * 4 * p)
    long = equal(p, shape, m=40, limit=round(share * 4 * p))
    programs = unroll(long, found.block)
    assert not find_violations(long, programs)
    longer = equal(p, shape, m=41)
    grown = simulate(longer, unroll(longer, found.block)).makespan_ms
    assert grown - simulate(long, programs).makespan_ms == pytest.approx(6.0)


def test_the_shortest_period_meets_the_load() -> None:
    """At 7/16 of 1F1B's memory eight devices are never idle; with one byte less they are."""
    enough = shortest_period(equal(8, "v", limit=14), 30.0, Stop(60.0))
    assert enough.is_optimal
    assert enough.bound == 6.0
    less = shortest_period(equal(4, "v", limit=7), 30.0, Stop(60.0))
    assert less.is_optimal
    assert less.bound is not None
    assert less.bound > 6.0 + 1e-3


def test_no_block_fits() -> None:
    """Less memory than one activation is proven to admit no block of any period."""
    found = shortest_period(equal(2, "v", limit=1), 30.0, Stop(30.0))
    assert found.status is MilpStatus.INFEASIBLE
    assert found.block is None


def test_an_empty_period_is_refused() -> None:
    """Without any compute time there is no period."""
    idle = problem([stage(0, 0, 0, 0)])
    with pytest.raises(ValueError, match="0 ms"):
        smallest_memory(idle, 1.0, Stop(1.0))


@few(15)
@given(
    st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=1, max_size=2),
    st.integers(10, 50),
    st.integers(0, 14),
    st.integers(0, 3),
)
def test_no_circle_is_better(
    times: list[tuple[int, int, int]], limit: int, context: int, latency: int
) -> None:
    """The MILP's shortest period is that of the best of all circles within the limit."""
    stages = [stage(d, *row, weight_context_bytes=context) for d, row in enumerate(times)]
    links = [{"from": 0, "to": 1, "latency_ms": latency}] if len(times) == 2 else []
    tiny = problem(stages, [{"memory_bytes": limit}] * len(times), links=links)
    search = CircularSearch(tiny, fused=False)
    best = min(search.evaluated_ms(circle) for circle in every_circle(search, (4, 4)))
    found = shortest_period(tiny, 60.0, Stop(30.0), Modes(fuse=False))
    if best == inf:
        event("nothing fits")
        assert found.status is MilpStatus.INFEASIBLE
        return
    event("no idle time" if best == load_ms(tiny) else "idle time")
    assert found.is_optimal
    assert found.bound == pytest.approx(best, rel=1e-5)
    assert found.block is not None
    exact = search.from_block(found.block)
    assert exact is not None
    assert search.evaluated_ms(exact) == pytest.approx(best, rel=1e-5)


def test_the_bound_is_below_the_best_circle_at_a_period() -> None:
    """Smallest memory of a line of two devices: the same by all circles and by the MILP."""
    line = problem(
        [stage(d, 2, 3, 1, activation_bytes=4, weight_context_bytes=3) for d in range(2)]
    )
    search = CircularSearch(line, fused=False)
    peaks = []
    for circle in every_circle(search, (4, 4)):
        if (
            circular_kernel.period(circle, search.rules, circular_kernel.new_graph(search.rules))
            <= 7.0
        ):
            over = max(search.excess(circle, d) for d in range(2))
            peaks.append(over + search.rules.limit[0])
    found = smallest_memory(line, 7.0, Stop(30.0), Modes(fuse=False))
    assert found.bound == pytest.approx(min(peaks))


def offloading(limit: int, **fields: float) -> Problem:
    """Two devices whose activations take a sixth of a period to the host and back."""
    stages = [offloadable(d, 20, 20, 20, weight_context_bytes=0, **fields) for d in range(2)]
    return problem(stages, [bus(memory_bytes=limit * UNIT)] * 2, m=9)


def test_offload_is_chosen_where_memory_needs_it() -> None:
    """Two activations in flight make one device wait; offloaded, they do not."""
    kept = shortest_period(offloading(15), 400.0, Stop(30.0), Modes(offload=False))
    moved = shortest_period(offloading(15), 400.0, Stop(30.0))
    assert kept.block is not None
    assert moved.block is not None
    assert moved.block.period_ms < kept.block.period_ms
    assert ActionType.RELOAD in moved.block.kinds()
    programs = unroll(offloading(15), moved.block)
    assert not find_violations(offloading(15), programs)


@pytest.mark.parametrize(
    ("half_duplex", "out_ms", "back_ms", "least_ms"),
    [(False, 40, 40, 60), (True, 40, 40, 80), (False, 70, 10, 70), (False, 10, 70, 70)],
)
def test_a_lane_carries_one_transfer_at_a_time(
    half_duplex: bool, out_ms: int, back_ms: int, least_ms: int
) -> None:
    """No period is shorter than the transfers of a lane, both directions where half duplex."""
    device = bus(
        memory_bytes=50 * UNIT,
        d2h_gb_per_s=10 / out_ms,
        h2d_gb_per_s=10 / back_ms,
        half_duplex=half_duplex,
    )
    # The way to the second device and back is so long that keeping everything is no choice.
    stages = [offloadable(0, 20, 20, 20), stage(1, 20, 20, 20)]
    far = problem(stages, [device, bus()], links=[{"from": 0, "to": 1, "latency_ms": 200}])
    found = shortest_period(far, 900.0, Stop(30.0), Modes(fuse=False))
    assert found.is_optimal
    assert found.bound == pytest.approx(least_ms, rel=1e-5)
    assert found.block is not None
    search = CircularSearch(far, fused=False, shrinks=True)
    circle = search.from_block(found.block)
    assert circle is not None
    assert search.evaluated_ms(circle) >= least_ms * (1 - 1e-6)


def test_transfers_of_a_lane_do_not_overlap() -> None:
    """Two stages of a device that both go to the host, one after the other modulo the period."""
    device = bus(d2h_gb_per_s=10 / 55, h2d_gb_per_s=10 / 55)
    stages = [offloadable(d, 20, 20, 20) for d in (0, 1, 0)]
    links = [{"from": 0, "to": 1, "latency_ms": 100}]
    given_problem = problem(stages, [device, bus()], links=links)
    modes = Modes(fuse=False)
    model = PeriodicModel(given_problem, modes, shortest_ms=120.0, longest_ms=240.0)
    for s in (0, 2):
        model.model.add(at_least(model.variables.chosen(PeriodChoice.OFFLOADED, (s, 0)), 1.0))
    model.minimise(highest_rate(model.variables))
    values = solve_milp(model.model, Stop(30.0)).values
    assert values is not None
    turn = model.variables.turn
    period_ms = model.variables.period_ms(value_of(model.variables.rate, values))
    for starts in (model.variables.d2h, model.variables.h2d):
        apart = (values[starts[2, 0]] - values[starts[0, 0]]) % turn * period_ms / turn
        assert 55.0 - 1e-3 <= apart <= period_ms - 55.0 + 1e-3


def test_a_super_period_offloads_a_fraction() -> None:
    """Of two micro-batches at a time, each decides for itself: never worse than one for all."""
    one = smallest_memory(offloading(99), 66.0, Stop(30.0))
    two = smallest_memory(offloading(99), 66.0, Stop(30.0), Modes(copies=2))
    assert one.bound is not None
    assert two.bound is not None
    assert two.bound <= one.bound * (1 + 1e-6)
    assert two.block is not None
    assert two.block.copies == 2
    for m in range(1, 7):
        short = offloading(99).model_copy(update={"num_microbatches": m})
        assert not find_violations(short, unroll(short, two.block))


def test_recompute_is_chosen_where_memory_needs_it() -> None:
    """With room for one activation and a checkpoint, recompute lets two be in flight."""
    held = [
        stage(d, 2, 2, 2, weight_context_bytes=0, recompute_ms=1, checkpoint_bytes=1)
        for d in range(2)
    ]
    tight = problem(held, [{"memory_bytes": 12}] * 2, m=7)
    kept = shortest_period(tight, 60.0, Stop(30.0), Modes(recompute=False))
    again = shortest_period(tight, 60.0, Stop(30.0))
    assert kept.block is not None
    assert again.block is not None
    assert again.block.period_ms < kept.block.period_ms
    assert ActionType.RECOMPUTE in again.block.kinds()
    assert not find_violations(tight, unroll(tight, again.block))


def test_what_may_be_recomputed_may_be_kept_for_long() -> None:
    """With memory enough four devices are never idle, whatever else their stages could do."""
    held = [stage(d, 2, 2, 2, recompute_ms=1, checkpoint_bytes=1) for d in range(4)]
    found = shortest_period(problem(held), 60.0, Stop(30.0))
    assert found.is_optimal
    assert found.bound == 6.0
    assert found.block is not None
    assert ActionType.RECOMPUTE not in found.block.kinds()


def test_fusing_is_chosen_where_it_is_shorter() -> None:
    """A B shorter than I + W is taken, and counts in the load bound."""
    fused = problem([stage(d, 2, 2, 2, backward_ms=3) for d in range(2)], m=5)
    found = shortest_period(fused, 60.0, Stop(30.0))
    assert found.bound == 5.0
    assert found.block is not None
    assert ActionType.FULL_BACKWARD in found.block.kinds()
    assert not find_violations(fused, unroll(fused, found.block))


def test_the_shortest_way_is_no_longer() -> None:
    """At the same period a block with a shorter way in flight, proven, fits as well."""
    given_problem = equal(4, "v", limit=10)
    block = shortest_way(given_problem, 6.0, Stop(60.0)).block
    assert block is not None
    assert max(block.peaks(given_problem)) <= 10
    way = {(e.stage, e.kind): e.start_ms for row in block.rows for e in row}
    passes = way[0, ActionType.BACKWARD_INPUT] - way[0, ActionType.FORWARD]
    assert passes >= 15.0 - 1e-6


def test_the_size_does_not_depend_on_the_micro_batches() -> None:
    """Order pairs are counted per period."""
    assert num_order_pairs(equal(8, "v", m=2)) == num_order_pairs(equal(8, "v", m=500)) == 80
