"""Rows, the best known, the report and the jobs: what the benchmark says of its runs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import fixed_work
from benchmarks.bench import SMOKE, broken
from benchmarks.fixed_work import BASELINE, WorkRow, worse
from benchmarks.jobs import BestLegal
from benchmarks.ledger import (
    LEDGER,
    RESULTS,
    BenchRow,
    LatestRows,
    entry,
    index,
    known_best,
    latest,
    read_known,
    read_rows,
    row_of,
    table_of,
    write_known,
    write_rows,
)
from docs.generators import find_subject
from optpipe_solver.budget import SolveStatus
from tests.building import one_f_one_b, problem, programs, stage

ROW = BenchRow(
    instance="one", solver="families", objective_ms=100.0, bound_ms=80.0, gap=0.2, seconds=1.5,
    status="feasible", method="zb-h1", refused=0, peak_bytes=1_000_000, commit="abc", machine="m",
)  # fmt: skip


def test_only_legal_and_better_programs_are_kept() -> None:
    given = problem([stage(0, 1, 1, 1), stage(1, 1, 1, 1)], m=2)
    best = BestLegal(given)
    serial = programs("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")
    assert not best.offer(programs("0F0", "1F0"), "broken")
    assert best.offer(serial, "serial")
    assert best.offer(one_f_one_b(2, 2), "1f1b")
    assert not best.offer(serial, "serial")
    assert (best.method, best.num_refused) == ("1f1b", 1)


def test_rows_survive_the_file_and_the_last_counts(tmp_path: Path) -> None:
    none = replace(ROW, solver="milp", objective_ms=None, gap=None, cpu_seconds="milp=1.5")
    newer = replace(ROW, objective_ms=90.0)
    path = tmp_path / "bench.csv"
    write_rows([ROW, none], path)
    write_rows([newer], path)
    assert read_rows(BenchRow, path) == [ROW, none, newer]
    assert latest(read_rows(BenchRow, path))["one", "families"] == newer


def test_rows_from_before_a_column_was_kept_are_read(tmp_path: Path) -> None:
    """Their last cells are missing, and say nothing."""
    path = tmp_path / "bench.csv"
    write_rows([replace(ROW, bound_method="bounds", cpu_seconds="bounds=0.1")], path)
    head, row = path.read_text(encoding="utf-8").splitlines()
    path.write_text(f"{head}\n{row.rsplit(',', 6)[0]}\n", encoding="utf-8")
    assert read_rows(BenchRow, path) == [ROW]


def test_what_is_worse_with_the_same_work_is_said() -> None:
    before = WorkRow(
        name="one", objective=100.0, bound=80.0, bound_method="exact", method="beam",
        cpu_seconds=1.0, commit="abc",
    )  # fmt: skip
    assert worse(replace(before, objective=100.0 + 1e-8, bound=90.0), before) == []
    assert worse(replace(before, objective=99.0, bound=80.0 - 1e-9), before) == []
    assert len(worse(replace(before, objective=100.1, bound=79.9), before)) == 2


def test_a_problem_that_lost_its_schedule_is_worse(monkeypatch) -> None:
    """Rows of other problems, which are not solved, say nothing."""
    none = SimpleNamespace(status=SolveStatus.UNKNOWN, schedule=None, bound_ms=1.0)
    monkeypatch.setattr(fixed_work, "solve", lambda *_, **__: none)
    with pytest.raises(SystemExit, match=r"parking-p4-m7: no schedule any more$"):
        fixed_work.main(["--only", "parking-*"])


def test_the_rows_compared_with_are_of_every_instance() -> None:
    rows = read_rows(WorkRow, BASELINE)
    assert sorted(row.name for row in rows) == sorted(row["name"] for row in index())
    assert all(row.bound <= row.objective * (1 + 1e-9) for row in rows)


def test_the_best_known_takes_value_and_bound_apart(tmp_path: Path) -> None:
    """Each is by whoever was first to have it; of equals the earlier stays."""
    rows = [
        ROW,
        replace(ROW, solver="cp-sat", objective_ms=100.0, bound_ms=85.0),
        replace(ROW, solver="ours-20", objective_ms=95.0, bound_ms=None),
    ]
    known = known_best({}, rows)
    assert (known["one"].best_ms, known["one"].found_by) == (95.0, "ours-20")
    assert (known["one"].bound_ms, known["one"].bound_by) == (85.0, "cp-sat")
    write_known(known, tmp_path / "known.csv")
    assert read_known(tmp_path / "known.csv") == known


def test_a_bound_above_a_schedule_is_refused() -> None:
    """One of the two is wrong, and neither may enter the file."""
    with pytest.raises(ValueError, match="find out which"):
        known_best({}, [ROW, replace(ROW, solver="cp-sat", objective_ms=None, bound_ms=101.0)])


def test_the_smoke_run_refuses_what_it_must() -> None:
    worse = replace(ROW, solver="ours-2", objective_ms=100.1)
    nothing = replace(ROW, solver="ours-2", objective_ms=None)
    same = replace(ROW, solver="ours-2", objective_ms=100.0 * (1 + 1e-7))
    assert len(broken([ROW, worse])) == 1
    assert len(broken([ROW, nothing])) == 1
    assert broken([ROW, same]) == []
    assert set(SMOKE) <= {row["name"] for row in index()}


def test_the_report_counts() -> None:
    values = {
        "plenty": {"families": 110.0, "cp-sat": 104.0, "ours-20": 104.0},
        "tight": {"families": 200.0, "cp-sat": 150.0, "ours-20": 151.0, "offloading": 202.0},
        "equal": {"families": 120.0, "cp-sat": 130.0, "ours-20": 120.0, "offloading": 140.0},
    }
    bound = {"plenty": 104.0, "tight": 140.0, "equal": 110.0}
    rows = {
        (name, solver): replace(
            ROW, instance=name, solver=solver, objective_ms=value, bound_ms=bound[name],
            gap=(value - bound[name]) / value,
        )
        for name, line in values.items()
        for solver, value in line.items()
    }  # fmt: skip
    about = {name: {"class": "plenty" if name == "plenty" else "tight"} for name in values}
    known = known_best({}, rows.values())
    text = entry(
        LatestRows(rows, about, dict.fromkeys(values, 100.0), frozenset({"tight"}), known), "title"
    )
    for line in (
        "ours-20 against families, 3 instances: worse on 0, better on 2;",
        "ours-20 against cp-sat, 3 instances: worse on 1 (tight), better on 1;",
        "strictly better than the best family on 1 of 2 (50%) tight",
        "proven optimal on 1 of 3 (33%)",
        "median proven gap plenty 0.00% (1), tight 7.81% (2)",
        "best offloading family's, 1 instances that can offload: less on 1, at most half on 1 (no "
        "bound forbids it on 1); ratios 0.50 to 0.50, median 0.50",
        "within 1% of the best known on 3 of 3 (100%)",
        "| tight | 200.000 | 202.000 | 151.000 | 150.000 | 140.000 | 7.28% | 1 | - |",
    ):
        assert line in text


def test_the_ledger_begins_with_the_newest_rows_of_the_benchmark_set() -> None:
    """Its first rows are what their CSV gives, and the whole is short enough to be read."""
    ledger = LEDGER.read_text("utf-8")
    newest = table_of(read_rows(BenchRow, RESULTS))
    found = [x for x in find_subject(ledger, "The benchmark set").splitlines() if x[:3] == "| 2"]
    rows = [row_of(newest, ours) for ours in newest.solvers()]
    assert ["|" + x.split("|", 2)[2] for x in found[: len(rows)]] == rows
    assert len(rows) == 2
    assert len(ledger.splitlines()) <= 300


def test_no_schedule_is_worse_than_any() -> None:
    """Ours with nothing, where a family has something, counts against us."""
    rows = {("one", "families"): ROW}
    rows["one", "ours-20"] = replace(ROW, solver="ours-20", objective_ms=None, gap=None)
    text = entry(
        LatestRows(rows, {"one": {"class": "tight"}}, {"one": 50.0}, frozenset(), {}), "title"
    )
    assert "ours-20 against families, 1 instances: worse on 1 (one), better on 0" in text
