"""The periodic MILP on tiny problems, against all circles there are."""

from __future__ import annotations

import random
from math import inf
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from optpipe_solver.budget import Stop
from optpipe_solver.milp.highs import MilpStatus
from optpipe_solver.milp.periodic.circular_search import CircularSearch
from optpipe_solver.milp.periodic.items import Modes, load_ms
from optpipe_solver.milp.periodic.questions import shortest_period, smallest_memory
from tests.building import UNIT, bus, problem, stage
from tests.solver.milp.periodic.every_circle import every_circle
from tests.strategies import few

if TYPE_CHECKING:
    from optpipe import Problem
    from optpipe_solver.milp.periodic import circular_kernel

_SPACES = ("forward", "backward_input", "backward_weight", "backward", "recompute")


def tiny_stage(rng: random.Random, device: int, *, shrinks: bool, fuses: bool) -> dict[str, Any]:
    """A stage that may be offloaded or recomputed; every time is a whole number of ms."""
    activation = rng.choice([2, 3])
    fields: dict[str, Any] = {
        "activation_bytes": activation * UNIT,
        "weight_context_bytes": rng.randrange(activation + 2) * UNIT,
        "static_bytes": UNIT,
    }
    if shrinks:
        fields["offload_bytes"] = rng.choice([activation, activation - 1]) * UNIT
        if rng.random() < 0.4:
            fields["recompute_ms"] = rng.randrange(4)
            fields["checkpoint_bytes"] = rng.choice([0, UNIT])
    if fuses:
        fields["backward_ms"] = rng.randint(2, 8)
    for name in _SPACES:
        fields[f"{name}_workspace_bytes"] = rng.choice([0, 0, 0, UNIT])
    times = [rng.randint(2, 4) for _ in range(3)]
    return stage(device, *times, **fields)


def shrinking(seed: int) -> Problem:
    """Two devices; the first may offload and recompute, to a host that may be small.

    Full duplex, one transfer per lane: there the order on a lane, which the model relaxes, is none.
    """
    rng = random.Random(seed)
    stages = [tiny_stage(rng, device, shrinks=device == 0, fuses=False) for device in range(2)]
    devices = [
        bus(
            memory_bytes=(rng.randint(4, 7) if device == 0 else 14) * UNIT,
            reserved_bytes=rng.choice([0, UNIT]),
            d2h_gb_per_s=rng.choice([1.0, 0.5, 0.25]),
            h2d_gb_per_s=rng.choice([1.0, 0.5, 0.25]),
        )
        for device in range(2)
    ]
    hosts = [{"name": "host0", "memory_bytes": rng.choice([None, None, 3 * UNIT, 5 * UNIT])}]
    links = [{"from": 0, "to": 1, "latency_ms": rng.randrange(3)}]
    return problem(stages, devices, links=links, hosts=hosts)


@few(16)
@given(st.integers(0, 10**6))
def test_no_circle_with_offload_or_recompute_is_shorter(seed: int) -> None:
    """The shortest period is that of the best of all circles, within device and host memory."""
    tiny = shrinking(seed)
    search = CircularSearch(tiny, fused=False, shrinks=True)
    judged = [(search.evaluated_ms(circle), circle) for circle in every_circle(search, (5, 3))]
    best, circle = min(judged, key=lambda pair: pair[0])
    found = shortest_period(tiny, 60.0, Stop(30.0), Modes(fuse=False))
    if best == inf:
        event("nothing fits")
        assert found.status is MilpStatus.INFEASIBLE
        return
    event(f"mode {circle.mode[0]}, idle {best > load_ms(tiny)}")
    assert found.is_optimal
    assert found.bound == pytest.approx(best, rel=1e-5)
    assert found.block is not None
    exact = search.from_block(found.block)
    assert exact is not None
    assert search.evaluated_ms(exact) == pytest.approx(best, rel=1e-5)


@few(16)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 1.25, 2.0]))
def test_no_circle_with_offload_or_recompute_is_smaller(seed: int, factor: float) -> None:
    """The smallest memory at a period is the smallest of all circles that keep the period."""
    tiny = shrinking(seed)
    period_ms = factor * load_ms(tiny)
    search = CircularSearch(tiny, fused=False, shrinks=True)
    best = min((peak_of(search, c, period_ms) for c in every_circle(search, (5, 3))), default=inf)
    found = smallest_memory(tiny, period_ms, Stop(30.0), Modes(fuse=False))
    assert (found.block is None) == (best == inf)
    if found.block is not None:
        assert found.bound == pytest.approx(best)
        assert max(found.block.peaks(tiny)) == best


def peak_of(search: CircularSearch, circle: circular_kernel.Circle, period_ms: float) -> float:
    """The largest peak of a circle that keeps the period and the limits, else inf."""
    if search.evaluated_ms(circle) > period_ms * (1 + 1e-9):
        return inf
    devices = enumerate(search.problem.devices)
    return max(search.excess(circle, d) + held.usable_bytes for d, held in devices)


@few(15)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 1.5]))
def test_fused_or_split_whichever_is_smaller(seed: int, factor: float) -> None:
    """Of one stage alone: B or I and W, whichever takes less memory at the period."""
    tiny = problem([tiny_stage(random.Random(seed), 0, shrinks=False, fuses=True)])
    period_ms = factor * load_ms(tiny)
    searches = [CircularSearch(tiny, fused=fused) for fused in (False, True)]
    best = min(peak_of(s, c, period_ms) for s in searches for c in every_circle(s, (3,)))
    found = smallest_memory(tiny, period_ms, Stop(30.0))
    assert found.bound == pytest.approx(best)
    assert found.block is not None
    assert max(found.block.peaks(tiny)) == best


@few(15)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 1.5]))
def test_two_micro_batches_per_period(seed: int, factor: float) -> None:
    """With two copies the smallest memory is that of all circles of two copies."""
    tiny = problem([tiny_stage(random.Random(seed), 0, shrinks=False, fuses=False)])
    period_ms = factor * load_ms(tiny)
    search = CircularSearch(tiny, fused=False, copies=2)
    best = min(peak_of(search, c, 2 * period_ms) for c in every_circle(search, (2,)))
    found = smallest_memory(tiny, period_ms, Stop(30.0), Modes(fuse=False, copies=2))
    assert found.bound == pytest.approx(best)
    assert found.block is not None
    assert max(found.block.peaks(tiny)) == best
