"""The AdaOffload-style start: no slower than its bases where copies hide, legal or a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from optpipe import ActionType, Problem, Programs, dump_csv, find_violations, simulate
from optpipe_solver.families.ada_offload import build_ada_offload
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.zero_bubble import build_zb_h1
from tests.building import UNIT, bus, offloadable, problem, stage
from tests.strategies import Case, cases

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = Path(__file__).parents[3] / "examples/problems"


def built(build: Callable[[Problem], Programs], given: Problem) -> Programs | NotApplicableReason:
    """The programs, or why there are none."""
    try:
        return build(given)
    except NotApplicable as answer:
        return answer.reason


def test_golden() -> None:
    """Two devices, the first with room for one and a half activations of two."""
    devices = [bus(memory_bytes=15 * UNIT), bus(memory_bytes=100 * UNIT)]
    given = problem([offloadable(0, 10, 10, 10), offloadable(1, 10, 10, 10)], devices, m=3)
    assert dump_csv(build_ada_offload(given)) == (
        "0F0,0OFFLOAD0,0RELEASE0,0F1,0OFFLOAD1,0RELEASE1,0RELOAD0,0I0,0W0,0F2,0OFFLOAD2,"
        "0RELEASE2,0RELOAD1,0I1,0W1,0RELOAD2,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"
    )


def test_moves_nothing_where_everything_fits() -> None:
    """Tight otherwise."""
    given = problem([offloadable(0, 3, 3, 3), offloadable(1, 3, 3, 3)], m=4)
    made = build_ada_offload(given)
    assert not any(a.type is ActionType.OFFLOAD for row in made for a in row)
    assert simulate(given, made).makespan_ms <= simulate(given, build_zb_h1(given)).makespan_ms


def test_the_example_loses_nothing() -> None:
    """Within 80 GB at most as slow as ZB-H1 without any limit."""
    given = Problem.parse(json.loads((EXAMPLES / "llama3-8b-h100-pp4.json").read_text()))
    made = build_ada_offload(given)
    assert find_violations(given, made) == []
    unlimited = simulate(given, build_zb_h1(given)).makespan_ms
    assert simulate(given, made).makespan_ms <= unlimited + 1e-6


@given(cases(tight=True))
def test_legal_or_does_not_fit(case: Case) -> None:
    """Any placement, under limits that some schedule just meets."""
    made = built(build_ada_offload, case.problem)
    if isinstance(made, NotApplicableReason):
        assert made is NotApplicableReason.DOES_NOT_FIT
    else:
        assert find_violations(case.problem, made) == []


def test_does_not_fit() -> None:
    """Two micro-batches are in flight on the first stage, and nothing can leave."""
    given = problem([stage(0), stage(1)], [{"memory_bytes": 10}, {"memory_bytes": 10}], m=3)
    with pytest.raises(NotApplicable) as answer:
        build_ada_offload(given)
    assert answer.value.reason is NotApplicableReason.DOES_NOT_FIT
