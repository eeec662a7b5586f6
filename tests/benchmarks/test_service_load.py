"""The load benchmark runs, and what it asks is answered as it should be."""

import csv

import pytest

from benchmarks.service_load import main


@pytest.mark.extended
def test_the_small_sweep_fails_nothing(tmp_path) -> None:
    (row,) = main(["--small", "--sweep", "--out", str(tmp_path / "load.csv")])
    assert row.failed == 0
    assert row.count > 0


@pytest.mark.extended
def test_the_small_run_answers_everything(tmp_path, capsys) -> None:
    out = tmp_path / "load.csv"
    rows = main(["--small", "--out", str(out)])
    assert [(row.what.split(",")[0], row.server) for row in rows] == [
        ("fetch a schedule", "service"),
        ("fetch a schedule", "bare route"),
        ("fetch it if newer", "service"),
        ("submit a solved problem", "service"),
        ("submit a problem", "service"),
        ("submit a problem", "bare route"),
        ("4 followers", "service"),
        ("fetch a schedule beside 4 followers", "service"),
    ]
    assert all(row.count > 0 and row.failed == 0 for row in rows)
    assert capsys.readouterr().out.count("| service |") == 6
    with out.open(encoding="utf-8") as file:
        assert [row["what"] for row in csv.DictReader(file)] == [row.what for row in rows]
