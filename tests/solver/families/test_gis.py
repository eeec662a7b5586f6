"""GIS and GIS-H: memory and bubble formulas, published numbers, reasons."""

import json
from pathlib import Path

import pytest
from hypothesis import given

from optpipe import Problem, find_violations, simulate
from optpipe.memory import device_peak_bytes
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.list_scheduling import (
    build_gis,
    build_gis_h,
    grouped_interleaved,
    smallest_group,
)
from tests.building import problem, stage
from tests.solver.families.pipelines import built, loops

PUBLISHED = json.loads((Path(__file__).parents[2] / "data/published/published.json").read_text())[
    "pipeoffload"
]
TIMES = [(10, 10, 10), (10, 12, 7), (10, 15, 5), (10, 7, 12)]


def loop(d: int, v: int, m: int, times: tuple[float, float, float] = (10, 10, 10)) -> Problem:
    """Equal stages of 10 bytes per micro-batch."""
    return problem([stage(k % d, *times) for k in range(d * v)], m=m)


@pytest.mark.parametrize("d", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("times", TIMES, ids=str)
def test_memory_and_bubble_formulas(d: int, v: int, times: tuple[float, float, float]) -> None:
    """Every group size from half of the devices to all: g (v - 1) + d, and the bubble."""
    for group in range((d + 1) // 2, d + 1):
        given = loop(d, v, 3 * group, times)
        made = grouped_interleaved(given, group)
        busy = 3 * group * v * sum(times)
        forward, inputs, weights = times
        late = (d - group) * forward + max(0.0, d * inputs - group * (inputs + weights))
        bubble = (d - 1) * (forward + inputs) + (v - 1) * late
        assert simulate(given, made).makespan_ms == pytest.approx(busy + bubble)
        peaks = [device_peak_bytes(given, k, made[k]) // 10 for k in range(d)]
        assert peaks == [group * (v - 1) + d - k for k in range(d)]


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("d", [2, 4, 8, 16])
def test_published_memory_and_bubble(d: int, v: int) -> None:
    """Table 1 of PipeOffload: M and (v + 1) / (2 v) M; (d - 1)(F + B) and the extra of GIS-H."""
    assert PUBLISHED["table1"]["GIS"] == ["M", "(d-1)(F+B)"]
    assert PUBLISHED["table1"]["GIS-H"] == ["(v+1)/(2v) M", "(d-1)(F+B)+((v-1)d/2)(F+B-W)"]
    given = loop(d, v, 3 * d)
    busy = 3 * d * v * 30
    unit = 10 * v
    whole, half = build_gis(given), build_gis_h(given)
    assert device_peak_bytes(given, 0, whole[0]) / unit == d
    assert device_peak_bytes(given, 0, half[0]) / unit == d * (v + 1) / (2 * v)
    assert simulate(given, whole).makespan_ms == busy + (d - 1) * 20
    assert simulate(given, half).makespan_ms == busy + (d - 1) * 20 + (v - 1) * d / 2 * 10


@given(loops())
def test_legal_or_too_few(given: Problem) -> None:
    """Unequal times, any m, an idle device: legal programs, or too few micro-batches."""
    d = len(set(given.placement))
    for build, group in ((build_gis, d), (build_gis_h, smallest_group(given))):
        assert (d + 1) // 2 <= group <= d
        made = built(build, given)
        if isinstance(made, NotApplicableReason):
            assert made is NotApplicableReason.TOO_FEW_MICROBATCHES
            assert given.num_microbatches < group
        else:
            assert find_violations(given, made) == []


def test_groups_grow_with_unequal_stages() -> None:
    """A device three times as fast as the others: two micro-batches do not cover a pass of four."""
    slow, fast = stage(0, 30, 30, 1), stage(0, 20, 20, 1)
    stages = [(slow if k % 4 == 1 else fast) | {"device": k % 4} for k in range(8)]
    assert smallest_group(problem(stages, m=8)) == 2
    long = stage(0, 9, 30, 0)
    stages = [long | {"device": k % 4} for k in range(8)]
    assert smallest_group(problem(stages, m=8)) == 4


@pytest.mark.parametrize("build", [build_gis, build_gis_h])
def test_a_group_must_fill(build) -> None:
    """One micro-batch makes none of two."""
    with pytest.raises(NotApplicable, match="only 1") as answer:
        build(loop(3, 2, 1))
    assert answer.value.reason is NotApplicableReason.TOO_FEW_MICROBATCHES
