"""GPipe, 1F1B-R, ZB-H2 and interleaved 1F1B: golden programs, formulas, published rates."""

from typing import Any

import pytest

from optpipe import Problem, dump_csv, simulate
from optpipe.memory import device_peak_bytes
from optpipe.simulate import bubble_rate
from optpipe_solver.families.classic import (
    build_gpipe,
    build_interleaved,
    build_one_f_one_b,
    build_recompute_1f1b,
)
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.registry import replaced
from optpipe_solver.families.zero_bubble import build_zb_h2
from tests.building import problem, stage
from tests.solver.families.test_families import TABLE, published

RECOMPUTE = {"recompute_ms": 1, "checkpoint_bytes": 2}


def peaks(given: Problem, programs: Any) -> list[int]:
    return [device_peak_bytes(given, device, row) for device, row in enumerate(programs)]


def line(p: int, m: int, **fields: Any) -> Problem:
    """Equal stages of F = I = W = 1 and 10 bytes per micro-batch."""
    return problem([stage(device, **fields) for device in range(p)], m=m)


def test_gpipe_golden_on_a_loop_goes_breadth_first() -> None:
    looped = problem([stage(device) for device in (0, 1, 0, 1)], m=2)
    assert dump_csv(build_gpipe(looped)) == (
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1\n"
    )


def test_zb_h2_golden_with_few_microbatches() -> None:
    """Once the forwards are used up, W fills the wait for the next I however little it lags."""
    assert dump_csv(build_zb_h2(line(3, 2))) == (
        "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1I0,1W0,1I1,1W1\n2F0,2I0,2F1,2I1,2W0,2W1\n"
    )


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 3), (3, 2), (4, 7), (5, 9), (8, 24)])
def test_what_each_stage_holds(p: int, m: int) -> None:
    """In micro-batches: all, min(m, p - s), and with recompute so many checkpoints and one more.

    ZB-H2: 2p - 1 on every stage where W keeps all bytes, m where that is less. The bubbles are
    docs/generators' formulas, which a test holds against the simulator.
    """
    given = line(p, m, **RECOMPUTE)
    in_flight = [min(m, p - s) for s in range(p)]
    assert peaks(given, build_gpipe(given)) == [10 * m] * p
    assert peaks(given, build_one_f_one_b(given)) == [10 * count for count in in_flight]
    assert max(peaks(given, build_zb_h2(given))) == 10 * min(m, 2 * p - 1)
    programs = build_recompute_1f1b(given)
    assert peaks(given, programs) == [2 * count + 8 for count in in_flight]
    assert m * 4 + (p - 1) * 3 <= simulate(given, programs).makespan_ms <= (m + p - 1) * 4


def test_recompute_1f1b_names_the_stage_without_recompute() -> None:
    given = problem([stage(0, **RECOMPUTE), stage(1)])
    with pytest.raises(NotApplicable, match="stage 1 has no recompute_ms") as raised:
        build_recompute_1f1b(given)
    assert raised.value.reason is NotApplicableReason.NEEDS_RECOMPUTE


# --- Interleaved 1F1B.


def test_golden_where_m_is_no_multiple_of_p() -> None:
    """As of four micro-batches, 3 left out."""
    given = problem([stage(k % 2) for k in range(4)], m=3)
    assert dump_csv(build_interleaved(given)) == (
        "0F0,0F1,2F0,2F1,0F2,2B0,2B1,2F2,0B0,0B1,2B2,0B2\n"
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1B1,3F2,3B2,1B2\n"
    )


def test_published() -> None:
    """Zero Bubble, tables 5 and 9: the rate of 1F1B-I within 4% of the published one.

    Most chunks per device, i.e. one layer each: the table's layer counts are 2 short of a multiple
    of p (the first and last stage have one less), so a device holds (layers + 2)/p: 3, 4, 3, 2.
    The copy divides times by the chunks and leaves the communication as it is; the rest of the
    difference is the paper's measured times per chunk, which are not printed.
    """
    for row in TABLE["rows"]:
        chunks, rest = divmod(TABLE["models"][row["model"]]["layers"] + 2, row["p"])
        assert rest == 0
        given = replaced(published(row, 1000), "loop", chunks)
        rate = bubble_rate(given, simulate(given, build_interleaved(given)).span_ms)
        assert rate == pytest.approx(row["bubble_rate_span"]["1F1B-I"], rel=0.04)


def test_a_long_placement_is_shown_short() -> None:
    with pytest.raises(NotApplicable, match=r"14, 15, \.\.\.\]$"):
        build_interleaved(problem([stage(device) for device in range(20)]))
