"""Estimates against published profiles: no row may get worse than what docs/estimate.md says."""

from __future__ import annotations

import csv

import pytest

from benchmarks.estimates import FITTED, RESULTS, Row, all_rows, summary
from optpipe.presets import find_gpu

LARGEST = {
    ("zero bubble", "forward_ms"): 0.10,
    ("zero bubble", "backward_input_ms"): 0.13,
    ("zero bubble", "backward_weight_ms"): 0.10,
    ("pipeoffload", "activation GB"): 0.06,
    ("pipeoffload", "mfu %"): 0.15,
    ("pipeoffload", "TFLOP/s"): 0.04,
    ("pipeoffload k", "k"): 0.08,
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Every published number with ours."""
    return all_rows()


def test_no_error_is_larger_than_documented(rows) -> None:
    """Row by row."""
    for row in rows:
        assert abs(row.error) <= LARGEST[row.table, row.quantity], row


def test_every_published_row_is_there(rows) -> None:
    """Eight profiles of three passes, six runs in two quantities, two rates, the grid of k."""
    assert len(rows) == 8 * 3 + 6 * 2 + 2 + 24
    assert {row.used for row in rows if row.table == "zero bubble"} == {"fit", "check"}
    fitted = {row.model for row in rows if row.table == "zero bubble" and row.used == "fit"}
    assert fitted == {FITTED[0]}
    assert len(summary(rows)) == 11


def test_the_kept_file_is_what_the_script_makes(rows) -> None:
    """benchmarks/results/estimates.csv is neither edited nor old."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        kept = list(csv.DictReader(file))
    assert [row["estimated"] for row in kept] == [f"{row.estimated:.4f}" for row in rows]
    assert [row["error"] for row in kept] == [f"{row.error:.4f}" for row in rows]


def test_the_a100s_efficiencies_are_the_fitted_ones() -> None:
    """Their neighbours on the grid are no better for the fitted row."""
    from dataclasses import replace

    from benchmarks.estimates import zero_bubble

    def worst(matmul: float, memory: float) -> float:
        efficiency = replace(find_gpu("a100").efficiency, matmul=matmul, memory=memory)
        return max(abs(row.error) for row in zero_bubble(efficiency) if row.used == "fit")

    best = worst(0.75, 0.64)
    assert (find_gpu("a100").efficiency.matmul, find_gpu("a100").efficiency.memory) == (0.75, 0.64)
    assert best <= min(worst(a / 100, b / 100) for a in (74, 75, 76) for b in (63, 64, 65))
