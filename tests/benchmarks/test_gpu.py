"""The GPU measurements on a CPU: sizes are tiny and times mean nothing, bytes and losses do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import as_markdown
from benchmarks.gpu.alone import (
    beside_estimate,
    in_flight,
    largest,
    modes,
    one_rank,
    pairs,
    sliced,
    slowdown,
    solved,
)
from benchmarks.gpu.runs import megatron
from optpipe.check import find_violations
from optpipe.memory import device_peak_bytes
from tests.building import problem, stage

ROOT = Path(__file__).parents[2]


def test_a_ranks_peak_is_the_prefix_walks() -> None:
    """Of a real schedule that offloads five of eight micro-batches."""
    (row,) = one_rank("cpu", tiny=True)
    assert abs(row["peak off by %"]) < 2
    assert row["offloaded MB"] > 0
    assert row["measured ms"] > 0
    assert row["simulated ms"] > 0


def test_offload_of_everything_takes_less_memory() -> None:
    (row,) = slowdown("cpu", tiny=True)
    assert row["offloadable %"] > 90
    assert row["full MB"] < 0.5 * row["none MB"]
    assert row["k"] > 0


@pytest.mark.extended
def test_every_mode_of_a_menu_takes_what_was_planned_and_has_keeps_gradients() -> None:
    keep, *others = modes("cpu", tiny=True)
    assert keep["mode"] == "keep"
    assert {row["gradients differ by"] for row in others} == {0}
    assert max(abs(row["peak off by %"]) for row in (keep, *others)) < 3
    assert all(row["measured MB"] < keep["measured MB"] for row in others)
    said = " ".join(row["mode"] for row in others)
    assert "recompute" in said
    assert "offload" in said


def test_passes_in_pairs_make_the_gradients_that_they_make_apart() -> None:
    (row,) = pairs("cpu", tiny=True)
    assert row["pairs in a step"] > 0
    assert row["gradients differ by"] == 0


def test_slices_make_a_whole_samples_gradients_in_its_memory() -> None:
    rows = sliced("cpu", tiny=True)
    assert [row["slices"] for row in rows] == [1, 4, 1, 4, 8]
    assert max(row["gradients differ by"] for row in rows) < 1e-5
    for row in rows:
        assert row["GB"] < rows[0]["GB"] or row["slices"] == 1


@pytest.mark.extended
def test_a_solved_schedule_takes_what_was_planned_on_every_rank() -> None:
    rows = solved("cpu", tiny=True)
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["measured MB"] < 1.03 * row["planned MB"] <= 1.03 * row["limit MB"]
        assert row["gradients differ by"] == 0
    assert "recompute" in rows[0]["modes"] or "offload" in rows[0]["modes"]


@pytest.mark.extended
def test_with_offload_larger_sizes_fit_and_run() -> None:
    for row in largest("cpu", tiny=True):
        assert row["times as large"] > 1.2
        for name in ("with", "without"):
            assert 0 < row[f"peak MB {name}"] <= row["limit MB"]


# tests/runtime/trainers/test_megatron.py holds the gradients in the gate.
@pytest.mark.extended
def test_megatrons_gpt_has_its_own_gradients_with_everything_offloaded() -> None:
    own, *ours = megatron("cpu", tiny=True)
    assert [row["gradients differ by"] for row in ours] == [0, 0, 0]
    assert {row["loss"] for row in ours} == {own["loss"]}
    _, kept, offloaded = ours
    assert offloaded["offloaded MB"] > 0
    assert offloaded["peak MB"] < 0.8 * kept["peak MB"]


def test_a_stage_of_llama_is_measured_beside_its_estimate() -> None:
    (row,) = beside_estimate("cpu", tiny=True)
    assert row["F ms"] > 0
    assert row["GB"] > 0
    assert row["estimated F"] > 0


@pytest.mark.parametrize(("count", "ahead"), [(4, 3), (9, 3), (12, 8)])
def test_the_program_in_flight_is_legal_and_holds_three(count: int, ahead: int) -> None:
    given = problem([stage(offload_bytes=10)], m=count)
    full, none = (in_flight(count, ahead, offload=offload) for offload in (True, False))
    assert not find_violations(given, (full,))
    assert not find_violations(given, (none,))
    assert device_peak_bytes(given, 0, full) == 30
    assert device_peak_bytes(given, 0, none) == 10 * ahead


@pytest.mark.extended
def test_the_script_runs_four_ranks_on_one_device(tmp_path) -> None:
    """Through the shell script, as on a GPU; messages are staged in the same way."""
    environment = {**os.environ, "PYTHON": sys.executable}
    options = ["--tiny", "--device", "cpu", "--parts", "dg", "--output", str(tmp_path)]
    done = subprocess.run(
        ["benchmarks/gpu/run.sh", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "results.json").read_text())
    rows = {part: result["parts"][part]["rows"] for part in "dg"}
    assert [len(rows[part]) for part in "dg"] == [2, 1]
    for row in (*rows["d"], *rows["g"]):
        assert row["equal"] is True
        assert row["offloaded MB"] > 0
    text = (tmp_path / "results.md").read_text()
    assert text == as_markdown(result)
    assert result["machine"]["date"] in text


def test_a_part_that_fails_is_told_and_costs_the_others_nothing() -> None:
    parts = {"a": {"error": "exit code 1"}, "d": {"rows": [{"equal": True, "ms": 1.23456}]}}
    machine = {"date": "2026-01-31", "device": "a card", "torch": "2", "cuda": "1", "host": "h"}
    text = as_markdown({"machine": machine, "tiny": False, "parts": parts})
    assert "Failed: exit code 1." in text
    assert "| True | 1.235 |" in text
