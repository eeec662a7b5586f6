"""Interleaved 1F1B: golden programs, formulas, published rates, legality."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from optpipe import Problem, dump_csv, find_violations, simulate
from optpipe.memory import device_peak_bytes
from optpipe.simulate import bubble_rate
from optpipe_solver.families.classic import build_interleaved
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.replace import replaced
from tests.building import problem, stage
from tests.solver.families.pipelines import loops
from tests.solver.families.test_families import TABLE, published


def loop(p: int, v: int, m: int) -> Problem:
    """Equal stages of F = I = W = 1 and 10 bytes per micro-batch."""
    return problem([stage(k % p) for k in range(p * v)], m=m)


def test_golden() -> None:
    """Two devices, two chunks, two groups of micro-batches."""
    assert dump_csv(build_interleaved(loop(2, 2, 4))) == (
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3\n"
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3\n"
    )


def test_golden_where_m_is_no_multiple_of_p() -> None:
    """The same, micro-batch 3 left out."""
    assert dump_csv(build_interleaved(loop(2, 2, 3))) == (
        "0F0,0F1,2F0,2F1,0F2,2B0,2B1,2F2,0B0,0B1,2B2,0B2\n"
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1B1,3F2,3B2,1B2\n"
    )


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (3, 2, 9), (4, 3, 8), (8, 4, 16), (1, 3, 2)])
def test_formulas(p: int, v: int, m: int) -> None:
    """2(p - 1 - r) + (v - 1)p + 1 micro-batches of one chunk; a bubble of p - 1 of its F + B."""
    given = loop(p, v, m)
    programs = build_interleaved(given)
    for rank, program in enumerate(programs):
        most = min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1)
        assert device_peak_bytes(given, rank, program) == 10 * most
    assert simulate(given, programs).makespan_ms == given.busy_ms + (p - 1) * 3


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: f"{row['model']}-m{row['m']}")
def test_published(row: dict[str, Any]) -> None:
    """Zero Bubble, tables 5 and 9: the rate of 1F1B-I within 4 % of the published one.

    Most chunks per device, i.e. one layer each: the table's layer counts are 2 short of a multiple
    of p (the first and last stage have one less), so a device holds (layers + 2)/p: 3, 4, 3, 2.
    The copy divides times by the chunks and leaves the communication as it is; the rest of the
    difference is the paper's measured times per chunk, which are not printed.
    """
    chunks, rest = divmod(TABLE["models"][row["model"]]["layers"] + 2, row["p"])
    assert rest == 0
    given = replaced(published(row, 1000), "loop", chunks)
    rate = bubble_rate(given, simulate(given, build_interleaved(given)).span_ms)
    assert rate == pytest.approx(row["bubble_rate_span"]["1F1B-I"], rel=0.04)


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1), (0,)])
def test_other_placements_are_refused(placement: tuple[int, ...]) -> None:
    with pytest.raises(NotApplicable, match="loop placement") as raised:
        build_interleaved(problem([stage(device) for device in placement]))
    assert raised.value.reason is NotApplicableReason.NEEDS_LOOP_PLACEMENT


def test_a_long_placement_is_shown_short() -> None:
    with pytest.raises(NotApplicable, match=r"14, 15, \.\.\.\]$"):
        build_interleaved(problem([stage(device) for device in range(20)]))


@given(loops())
def test_legal_on_any_loop(given: Problem) -> None:
    """Any device order, any m, odd p, one device, unequal times."""
    assert find_violations(given, build_interleaved(given)) == []
