"""``optpipe plan``: what it prints and writes, and its exit codes."""

import json
from pathlib import Path

import pytest

from optpipe import check_schedule, load_problem, load_schedule
from optpipe.formats.json import dump_model
from tests.solver.plan.models import gpus, layer, model

MIXED = model(
    [layer(repeat=6), layer(3, 3, 3, name="head")],
    [*gpus(1, speed=2, type="fast"), *gpus(1, type="slow")],
    name="mixed",
)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(dump_model(MIXED))
    return path


def test_the_table_the_cut_and_the_gain_are_shown(optpipe, model_file) -> None:
    code, out, err = optpipe("plan", model_file, "--time-limit", 1, "--chunks", "1,2")
    assert code == 0, err
    assert "layers per stage" in out
    assert "chosen" in out
    assert "linear (even)" in out
    assert "gpu0 fast" in out
    assert "█" in out
    assert "even linear cut" in out
    assert "shorter" in out
    assert "bound of the set" in out
    assert "the bound holds for every cut of" in out


def test_texts_wrap_and_numbers_are_whole(optpipe, tmp_path, monkeypatch) -> None:
    """Cuts of 32 stages are longer than a line; every time is there as JSON has it."""
    monkeypatch.setenv("COLUMNS", "80")
    long = model([layer(900, 900, 900, repeat=48)], gpus(8, type="accelerator"))
    (path := tmp_path / "long.json").write_text(dump_model(long))
    command = ("plan", path, "--work-limit", 0.3, "--chunks", "4", "--placements", "loop")
    code, out, err = optpipe(*command)
    assert code == 0, err
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    rows = json.loads(optpipe(*command, "--json")[1])["candidates"]
    times = [row[name] for row in rows for name in ("bound_ms", "quick_ms", "final_ms")]
    assert {f"{ms:,.1f}" for ms in times if ms is not None and ms < 1e6} <= set(out.split())


def test_schedule_and_problem_are_written_and_belong_together(
    optpipe, model_file, tmp_path
) -> None:
    schedule, problem = tmp_path / "s.json", tmp_path / "p.json"
    code, _, err = optpipe(
        "plan", model_file, "-o", schedule, "--problem-out", problem, "--time-limit", 0.5
    )
    assert code == 0, err
    assert f"problem written to {problem}" in err.replace("\n", "")
    read = load_problem(problem.read_text())
    check_schedule(read, load_schedule(schedule.read_text()))
    assert read.name == "mixed"


def test_json_holds_everything(optpipe, model_file) -> None:
    code, out, _ = optpipe("plan", model_file, "--json", "--time-limit", 0.5, "--chunks", "1")
    assert code == 0
    found = json.loads(out)
    assert found["status"] in {"optimal", "feasible"}
    assert found["candidates"][0]["fate"] == "chosen"
    assert found["candidates"][0]["final_ms"] == found["schedule"]["makespan_ms"]
    assert found["bound_ms"] <= found["schedule"]["makespan_ms"]
    assert found["even"]["sizes"] == [4, 3]
    assert found["problem"]["format"] == "optpipe/problem/v1"


def test_where_nothing_fits_it_leaves_with_3(optpipe, tmp_path) -> None:
    path = tmp_path / "model.json"
    path.write_text(dump_model(model([layer(repeat=2)], gpus(1, memory_bytes=15))))
    code, out, err = optpipe("plan", path, "--time-limit", 0.5)
    assert code == 3
    assert not out
    assert "infeasible" in err
    assert "devices[0].memory_bytes must be at least 20" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chunks", "1,x"], "--chunks 1,x: must be whole numbers"),
        (["--chunks", "0"], "--chunks [0]=0: must be >= 1"),
        (["--placements", "linear,w"], "must be 'linear', 'loop', 'v' or 'free'"),
        (["-o", "/nowhere/s.json"], "there is no folder"),
    ],
)
def test_bad_options_leave_with_2(optpipe, model_file, arguments, message) -> None:
    code, _, err = optpipe("plan", model_file, *arguments)
    assert code == 2
    assert message in err


def test_a_model_by_name_is_planned_as_its_file_and_not_next_to_one(optpipe, tmp_path) -> None:
    path = tmp_path / "model.json"
    named = ("--model", "llama3.2-1b", "--gpu", "h100", "--pp", "2", "--microbatches", "4")
    assert optpipe("estimate", *named, "--model-json", "-o", path).code == 0
    limits = ("--work-limit", 0.3, "--chunks", "1,2", "--placements", "linear,loop", "--json")
    by_file, by_name = (
        json.loads(optpipe("plan", *what, *limits).out) for what in ((path,), named)
    )
    assert by_name["problem"] == by_file["problem"]
    assert by_name["schedule"]["programs"] == by_file["schedule"]["programs"]
    both = optpipe("plan", path, *named)
    assert both.code == 2
    assert "--gpu: a model file has the durations" in both.err
    neither = optpipe("plan")
    assert neither.code == 2
    assert "--model" in neither.err
