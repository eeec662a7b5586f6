"""GPipe, 1F1B-R and ZB-H2: golden programs, formulas, published rates, legality."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from optpipe import Problem, dump_csv, find_violations, simulate
from optpipe.memory import device_peak_bytes
from optpipe.simulate import bubble_rate
from optpipe_solver.families.classic import build_gpipe, build_one_f_one_b, build_recompute_1f1b
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.zero_bubble import build_zb_h2
from tests.building import problem, stage
from tests.solver.families.pipelines import lines
from tests.solver.families.test_families import TABLE, published
from tests.strategies import problems

RECOMPUTE = {"recompute_ms": 1, "checkpoint_bytes": 2}
SIZES = [(1, 1), (1, 5), (2, 3), (3, 2), (4, 7), (5, 9), (8, 24)]


def peaks(given: Problem, programs: Any) -> list[int]:
    return [device_peak_bytes(given, device, row) for device, row in enumerate(programs)]


def line(p: int, m: int, **fields: Any) -> Problem:
    """Equal stages of F = I = W = 1 and 10 bytes per micro-batch."""
    return problem([stage(device, **fields) for device in range(p)], m=m)


def test_gpipe_golden() -> None:
    assert dump_csv(build_gpipe(line(2, 3))) == (
        "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
    )


def test_gpipe_golden_on_a_loop_goes_breadth_first() -> None:
    looped = problem([stage(device) for device in (0, 1, 0, 1)], m=2)
    assert dump_csv(build_gpipe(looped)) == (
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1\n"
    )


def test_recompute_1f1b_golden() -> None:
    assert dump_csv(build_recompute_1f1b(line(2, 3, **RECOMPUTE))) == (
        "0F0,0F1,0RECOMPUTE0,0B0,0F2,0RECOMPUTE1,0B1,0RECOMPUTE2,0B2\n"
        "1F0,1RECOMPUTE0,1B0,1F1,1RECOMPUTE1,1B1,1F2,1RECOMPUTE2,1B2\n"
    )


def test_zb_h2_golden() -> None:
    """Three forwards before the first I of stage 0; W of stage 1 two micro-batches behind."""
    assert dump_csv(build_zb_h2(line(2, 4))) == (
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3\n"
        "1F0,1I0,1F1,1I1,1F2,1I2,1W0,1F3,1I3,1W1,1W2,1W3\n"
    )


def test_zb_h2_golden_with_few_microbatches() -> None:
    """Once the forwards are used up, W fills the wait for the next I however little it lags."""
    assert dump_csv(build_zb_h2(line(3, 2))) == (
        "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1I0,1W0,1I1,1W1\n2F0,2I0,2F1,2I1,2W0,2W1\n"
    )


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_formulas(p: int, m: int) -> None:
    """All m micro-batches on every stage; makespan (m + p - 1)(F + B)."""
    given = line(p, m)
    programs = build_gpipe(given)
    assert peaks(given, programs) == [10 * m] * p
    assert simulate(given, programs).makespan_ms == (m + p - 1) * 3


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_one_f_one_b_memory(p: int, m: int) -> None:
    """Stage s holds min(m, p - s) micro-batches: p on the first."""
    given = line(p, m)
    assert peaks(given, build_one_f_one_b(given)) == [10 * min(m, p - s) for s in range(p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_recompute_1f1b_formulas(p: int, m: int) -> None:
    """min(m, p - s) checkpoints of 2 bytes and the other 8 of one activation; time as stated."""
    given = line(p, m, **RECOMPUTE)
    programs = build_recompute_1f1b(given)
    assert peaks(given, programs) == [2 * min(m, p - s) + 8 for s in range(p)]
    assert simulate(given, programs).makespan_ms <= (m + p - 1) * 4
    assert simulate(given, programs).makespan_ms >= m * 4 + (p - 1) * 3


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h2_memory(p: int, m: int) -> None:
    """2p - 1 micro-batches on every stage where W keeps all bytes; m where that is less."""
    given = line(p, m)
    assert max(peaks(given, build_zb_h2(given))) == 10 * min(m, 2 * p - 1)


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_zb_h2_has_no_bubble_at_equal_times(p: int) -> None:
    given = line(p, 3 * p)
    assert simulate(given, build_zb_h2(given)).span_ms == given.busy_ms


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: f"{row['model']}-m{row['m']}")
def test_zb_h2_published(row: dict[str, Any]) -> None:
    """Zero Bubble, tables 5 and 9: the span-based rate to four decimals, 2p - 1 activations."""
    given = published(row, 1000)
    programs = build_zb_h2(given)
    rate = bubble_rate(given, simulate(given, programs).span_ms)
    assert rate == pytest.approx(row["bubble_rate_span"]["ZB-H2"], abs=6e-5)
    assert max(peaks(given, programs)) == (2 * row["p"] - 1) * given.stages[0].activation_bytes


@pytest.mark.parametrize("build", [build_recompute_1f1b, build_zb_h2])
def test_needs_one_stage_per_device(build: Any) -> None:
    looped = problem([stage(device, **RECOMPUTE) for device in (0, 1, 0, 1)])
    with pytest.raises(NotApplicable, match="device 0 holds stages 0, 2") as raised:
        build(looped)
    assert raised.value.reason is NotApplicableReason.NEEDS_ONE_STAGE_PER_DEVICE


def test_recompute_1f1b_names_the_stage_without_recompute() -> None:
    given = problem([stage(0, **RECOMPUTE), stage(1)])
    with pytest.raises(NotApplicable, match="stage 1 has no recompute_ms") as raised:
        build_recompute_1f1b(given)
    assert raised.value.reason is NotApplicableReason.NEEDS_RECOMPUTE


@given(lines(recompute=True))
def test_legal_on_any_line(given: Problem) -> None:
    for build in (build_gpipe, build_recompute_1f1b, build_zb_h2):
        assert find_violations(given, build(given)) == [], build.__name__


@given(problems())
def test_gpipe_is_legal_on_any_placement(given: Problem) -> None:
    assert find_violations(given, build_gpipe(given)) == []
