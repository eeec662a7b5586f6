"""PO-H, PO-F and the start after AdaOffload: published memory, limits, reasons.

GIS and GIS-H: memory and bubble formulas, published numbers, reasons.
"""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, Programs, find_violations, simulate
from optpipe.memory import device_peak_bytes
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.list_scheduling import (
    build_ada_offload,
    build_gis,
    build_gis_h,
    build_po_f,
    build_po_h,
    grouped_interleaved,
    pipeoffload,
    smallest_group,
)
from optpipe_solver.feasibility import smallest_memory
from tests.building import PLENTY, UNIT, bus, offloadable, problem, stage
from tests.solver.families.pipelines import built

TRANSFERS = (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
MAP = [
    (p, rounds * p, v, group, chunks, transfer)
    for p, rounds, v in product((4, 8), (2, 4), (2, 3, 4))
    for group, chunks, transfer in product((p, p // 2), sorted({1, v // 2, v}), TRANSFERS)
]
LANES = {
    "published": {"half_duplex": True, "paired": True},
    "half duplex": {"half_duplex": True, "paired": False},
    "full duplex": {"half_duplex": False, "paired": False},
}


def loop(
    d: int,
    v: int,
    m: int,
    transfer: float,
    *,
    half_duplex: bool = True,
    paired: bool = True,
    memory_bytes: int = PLENTY,
) -> Problem:
    """Equal stages of F = I = W = 10 ms and 10 UNIT, all of it to be offloaded."""
    rate = 10 / (30 * transfer)
    devices = [
        bus(
            memory_bytes=memory_bytes,
            d2h_gb_per_s=rate,
            h2d_gb_per_s=rate,
            half_duplex=half_duplex,
            pcie_group=f"pair {k // 2}" if paired else None,
        )
        for k in range(d)
    ]
    return problem([offloadable(k % d, 10, 10, 10) for k in range(d * v)], devices, m=m)


def peak(given: Problem, rows: Programs) -> float:
    """Micro-batches (all stages of a device) that the fullest device holds."""
    most = max(device_peak_bytes(given, k, row) for k, row in enumerate(rows))
    return most / sum(given.stages[s].activation_bytes for s in given.stages_of[0])


def ms(given: Problem, rows: Programs) -> float:
    return simulate(given, rows).makespan_ms


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("v", "group", "published"), [(4, 4, 3.0), (2, 8, 4.0)])
def test_never_worse_than_the_published_planner(
    lanes: str, v: int, group: int, published: float
) -> None:
    """p = 8, m = 16, transfer 0.5, no added bubble: 3.0 for v = 4 GIS-H, 4.0 for v = 2 GIS."""
    given = loop(8, v, 16, 0.5, **LANES[lanes])
    base_ms = ms(given, grouped_interleaved(given, group))
    peaks = []
    for chunks in sorted({1, v // 2, v}):
        rows = pipeoffload(given, group, chunks)
        assert find_violations(given, rows) == []
        assert ms(given, rows) == pytest.approx(base_ms)
        peaks.append(peak(given, rows))
    assert min(peaks) <= published


@pytest.mark.parametrize("v", [2, 4])
def test_formula_beside_value(v: int) -> None:
    """PO-H's (v + 2) / (8 v) of d is asymptotic: the value lies above it, below GIS-H's."""
    given = loop(8, v, 32, 0.1)
    value = peak(given, build_po_h(given))
    formula = 8 * (v + 2) / (8 * v)
    assert formula < value <= formula + 1 + 1 / v
    assert value < peak(given, build_gis_h(given))


def test_full_offload_holds_next_to_nothing() -> None:
    """PO-F with fast copies: one of 8 micro-batches, and less with more chunks."""
    values = {v: peak(given := loop(8, v, 16, 0.1), build_po_f(given)) for v in (2, 4)}
    assert values[4] < values[2] <= 1.0


@pytest.mark.parametrize("at", MAP[5::82], ids=str)
def test_the_map(at: tuple[int, int, int, int, int, float]) -> None:
    """A sample of the 448 settings, without a limit and under two: always legal, never refused."""
    p, m, v, group, chunks, transfer = at
    given = loop(p, v, m, transfer)
    base_ms = ms(given, grouped_interleaved(given, group))
    free = pipeoffload(given, group, chunks)
    assert find_violations(given, free) == []
    assert ms(given, free) == pytest.approx(base_ms)
    smallest = max(smallest_memory(given))
    assert smallest == 10 * UNIT
    most = max(device_peak_bytes(given, k, row) for k, row in enumerate(free))
    for limit in (smallest, (smallest + most) // 2):
        tight = loop(p, v, m, transfer, memory_bytes=limit)
        rows = pipeoffload(tight, group, chunks)
        assert find_violations(tight, rows) == []
        assert ms(tight, rows) >= base_ms * (1 - 1e-12)


@st.composite
def offloading_loops(draw: st.DrawFn) -> Problem:
    """Unequal loops, some stages or devices that cannot offload, any lanes, with tight limits."""
    p, v = draw(st.integers(1, 4)), draw(st.integers(2, 3))
    times = st.integers(0, 9)
    stages = []
    for k in range(p * v):
        size = draw(st.integers(1, 4)) * UNIT
        moved = draw(st.sampled_from([size, size, size // 2, 0]))
        stages.append(
            stage(
                k % p,
                draw(times),
                draw(times),
                draw(times),
                activation_bytes=size,
                offload_bytes=moved,
                weight_context_bytes=draw(st.sampled_from([size, size // 2])),
            )
        )
    devices = [
        bus(
            memory_bytes=draw(st.integers(4, 30)) * UNIT,
            half_duplex=draw(st.booleans()),
            pcie_group=draw(st.sampled_from([None, "bus"])),
        )
        for _ in range(p)
    ]
    host = {"name": "host0", "memory_bytes": draw(st.sampled_from([None, 20 * UNIT]))}
    links = [{"from": a, "to": b, "latency_ms": draw(times)} for a in range(p) for b in range(a)]
    return problem(stages, devices, m=draw(st.integers(1, 7)), links=links, hosts=[host])


@given(offloading_loops())
def test_legal_within_the_limits_or_a_reason(given: Problem) -> None:
    """Whatever the times, sizes, lanes and limits."""
    for build in (build_po_h, build_po_f):
        rows = built(build, given)
        if isinstance(rows, NotApplicableReason):
            assert rows in {
                NotApplicableReason.TOO_FEW_MICROBATCHES,
                NotApplicableReason.CANNOT_OFFLOAD,
                NotApplicableReason.DOES_NOT_FIT,
            }
        else:
            assert find_violations(given, rows) == []


def test_reasons() -> None:
    """No bandwidth, too few micro-batches, parts that cannot move or nothing that can."""
    with pytest.raises(NotApplicable, match="d2h_gb_per_s"):
        build_po_h(problem([stage(k % 2) for k in range(4)], m=4))
    halves = [offloadable(k % 2, offload_bytes=UNIT) for k in range(4)]
    tight = problem(halves, [bus(memory_bytes=20 * UNIT)] * 2, m=4)
    for build in (build_gis, build_po_f):
        assert built(build, loop(4, 2, 3, 0.5)) is NotApplicableReason.TOO_FEW_MICROBATCHES
    assert built(build_gis_h, loop(4, 2, 1, 0.5)) is NotApplicableReason.TOO_FEW_MICROBATCHES
    assert built(build_po_f, tight) is NotApplicableReason.DOES_NOT_FIT
    two_in_flight = problem([stage(0), stage(1)], [{"memory_bytes": 10}] * 2, m=3)
    assert built(build_ada_offload, two_in_flight) is NotApplicableReason.DOES_NOT_FIT


def test_gis_itself_is_kept_where_nothing_can_be_hidden() -> None:
    """Copies that take longer than the whole schedule stay undone, without a limit."""
    given = loop(2, 2, 4, 1000.0)
    assert build_po_f(given) == build_gis(given)


@pytest.mark.parametrize("times", [(10, 10, 10), (10, 12, 7), (10, 15, 5), (10, 7, 12)], ids=str)
def test_memory_and_bubble_formulas(times: tuple[float, float, float]) -> None:
    """Every group size from half of the devices to all: g (v - 1) + d, and the bubble.

    Of equal times those of the paper; docs/generators has them, and a test that holds them.
    """
    forward, inputs, weights = times
    for d, v in product((2, 3, 5, 8), (2, 4)):
        for group in range((d + 1) // 2, d + 1):
            given = problem([stage(k % d, *times) for k in range(d * v)], m=3 * group)
            rows = grouped_interleaved(given, group)
            late = (d - group) * forward + max(0.0, d * inputs - group * (inputs + weights))
            busy = 3 * group * v * sum(times)
            bubble = (d - 1) * (forward + inputs) + (v - 1) * late
            assert simulate(given, rows).makespan_ms == pytest.approx(busy + bubble)
            peaks = [device_peak_bytes(given, k, rows[k]) // 10 for k in range(d)]
            assert peaks == [group * (v - 1) + d - k for k in range(d)]


def test_groups_grow_with_unequal_stages() -> None:
    """A device three times as fast as the others: two micro-batches do not cover a pass of four."""
    slow, fast = stage(0, 30, 30, 1), stage(0, 20, 20, 1)
    stages = [(slow if k % 4 == 1 else fast) | {"device": k % 4} for k in range(8)]
    assert smallest_group(problem(stages, m=8)) == 2
    long = stage(0, 9, 30, 0)
    stages = [long | {"device": k % 4} for k in range(8)]
    assert smallest_group(problem(stages, m=8)) == 4
