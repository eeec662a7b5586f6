"""The families: golden programs, published numbers, and legality on anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from optpipe import Problem, dump_csv, find_violations, simulate
from optpipe.timeline import bubble_rate
from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.fit import fit_memory
from tests.building import problem, stage
from tests.strategies import Case, cases, problems

TABLE = json.loads(
    (Path(__file__).parents[1] / "data/published/zero_bubble_table.json").read_text()
)
GOLDEN = {
    "1f1b": "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n",
    "zb-h1": "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n",
    "serial": "0F0,0I0,0W0,0F1,0I1,0W1,0F2,0I2,0W2\n1F0,1I0,1W0,1F1,1I1,1W1,1F2,1I2,1W2\n",
}


def published(row: dict[str, Any], limit: float) -> Problem:
    """A row of the Zero Bubble table with a memory limit in activations of one micro-batch.

    Bytes are those of one layer in units of s b h: 34 + 5 a s / h from F, 32 after I.
    """
    model = TABLE["models"][row["model"]]
    held = round(1000 * (34 + 5 * model["heads"] * model["seq"] / model["hidden"]))
    p = row["p"]
    return Problem.parse(
        {
            "num_microbatches": row["m"],
            "objective": "span",
            "devices": [{"memory_bytes": int(limit * held)} for _ in range(p)],
            "stages": [
                {
                    "device": d,
                    "forward_ms": row["forward_ms"],
                    "backward_input_ms": row["backward_input_ms"],
                    "backward_weight_ms": row["backward_weight_ms"],
                    "activation_bytes": held,
                    "weight_context_bytes": 32000,
                }
                for d in range(p)
            ],
            "links": [
                {"from": d, "to": d + 1, "latency_ms": row["communication_ms"]}
                for d in range(p - 1)
            ],
        }
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_program(name: str) -> None:
    """Two stages, three micro-batches, written out."""
    given = problem([stage(0), stage(1)], m=3)
    family = next(family for family in FAMILIES if family.name == name)
    assert dump_csv(family.build(given)) == GOLDEN[name]


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: f"{row['model']}-m{row['m']}")
@pytest.mark.parametrize(("name", "column"), [("1f1b", "1F1B"), ("zb-h1", "ZB-H1")])
def test_published_bubble_rates(row: dict[str, Any], name: str, column: str) -> None:
    """Zero Bubble, tables 5 and 9: span-based rates to four decimals."""
    given = published(row, 1000)
    family = next(family for family in FAMILIES if family.name == name)
    run = simulate(given, family.build(given))
    rate = bubble_rate(given, run.span_ms)
    assert rate == pytest.approx(row["bubble_rate_span"][column], abs=6e-5)


@settings(max_examples=30)
@given(problems())
def test_families_are_legal_but_for_memory(given: Problem) -> None:
    """Every family gives legal programs or a reason."""
    for family in FAMILIES:
        try:
            programs = family.build(given)
        except NotApplicable:
            assert family.name in {"1f1b", "zb-h1"}
            assert any(len(held) > 1 for held in given.stages_of)
            continue
        assert find_violations(given, programs) == [], family.name


@settings(max_examples=30)
@given(cases(tight=True))
def test_families_that_respect_limits_do(case: Case) -> None:
    """Under limits that some schedule just meets."""
    for family in FAMILIES:
        if family.limit != "respected":
            continue
        try:
            programs = family.build(case.problem)
        except NotApplicable:
            assert family.name != "serial"
            continue
        assert find_violations(case.problem, programs) == [], family.name


@settings(max_examples=50)
@given(cases(tight=True))
def test_fitted_programs_are_legal(case: Case) -> None:
    """What `fit_memory` returns keeps every limit, for any compute programs."""
    for family in FAMILIES:
        if family.limit != "ignored":
            continue
        try:
            programs = family.build(case.problem)
        except NotApplicable:
            continue
        fitted = fit_memory(case.problem, programs)
        if fitted is not None:
            assert find_violations(case.problem, fitted) == []


def test_fit_offloads_no_more_than_the_limit_asks_for() -> None:
    """Programs that fit come back unchanged."""
    given = problem([stage(0), stage(1)], m=3)
    for family in FAMILIES:
        programs = family.build(given)
        assert fit_memory(given, programs) == programs
