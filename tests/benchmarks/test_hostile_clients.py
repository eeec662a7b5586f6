"""The benchmark of hostile clients runs, and the normal client is answered next to each kind."""

import csv

import pytest

from benchmarks.hostile_clients import HOSTILE, main


@pytest.mark.extended
def test_the_small_run_measures_every_kind_of_hostile_client(tmp_path) -> None:
    out = tmp_path / "hostile.csv"
    rows = main(["--small", "--out", str(out)])
    assert [row.kind for row in rows] == list(HOSTILE)
    assert all(row.count > 0 and row.failed == 0 and row.rate > 0 for row in rows)
    with out.open(encoding="utf-8") as file:
        assert [row["kind"] for row in csv.DictReader(file)] == list(HOSTILE)
