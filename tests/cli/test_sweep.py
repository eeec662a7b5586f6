"""``optpipe sweep``: here and at a service, one table, one picture, gone on with after a stop."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

import optpipe_solver
from optpipe import dump_problem
from optpipe.cli.sweep import parse_axes, sweep_here
from optpipe.errors import InputError
from optpipe.formats.tables import load_sweep_csv
from optpipe.sweep import sweep as vary
from tests.api import fake_solver
from tests.api.live import make_settings, running
from tests.api.outcomes import Result, SolveStatus
from tests.api.serial import serial
from tests.plot.conftest import make_small_problem

MEMORY = ("--axis", "devices[*].memory_bytes=32,16,9", "--time-limit", "20", "--threads", "1")


@pytest.fixture
def solved(monkeypatch) -> list[tuple[str, bool]]:
    """Solve in no time; note the name of each problem, and whether it came with a start."""
    solves: list[tuple[str, bool]] = []

    def noting(problem, **options):
        solves.append((problem.name, options["start"] is not None))
        return fake_solver.solve(problem, **options)

    monkeypatch.setattr(optpipe_solver, "solve", noting)
    return solves


def read(path: Path) -> list[Any]:
    return load_sweep_csv(path.read_text(encoding="utf-8"))


def test_equal_reasons_are_printed_once(optpipe, problem_file, solved) -> None:
    axes = ("--axis", "devices[*].memory_bytes=9", "--axis", "objective=makespan,span")
    code, out, _ = optpipe("sweep", problem_file, *axes, "--time-limit", "20")
    assert code == 3
    assert out.count("no schedule fits") == 1
    assert " and 1 more: no schedule fits" in out


def test_a_sweep_gives_a_table_and_a_frontier(optpipe, problem_file, tmp_path, solved) -> None:
    """From the least memory up, each with the schedule of the one before; one is too small."""
    table, picture = tmp_path / "t.csv", tmp_path / "f.svg"
    code, out, err = optpipe("sweep", problem_file, *MEMORY, "-o", table, "--frontier", picture)
    assert code == 0, err
    rows = read(table)
    assert [row["values"] for row in rows] == [
        {"devices[*].memory_bytes": value} for value in (32, 16, 9)
    ]
    assert [row["state"] for row in rows] == ["succeeded", "succeeded", "infeasible"]
    assert [row["objective_ms"] for row in rows] == [20.0, 20.0, None]
    assert [row["bound_ms"] for row in rows] == [1.0, 1.0, None]
    assert "no schedule fits" in rows[2]["message"]
    assert [(name.split()[-1], start) for name, start in solved] == [
        ("9", False),
        ("16", False),
        ("32", True),
    ]
    _, *lines, empty, note = out.splitlines()
    assert [line.split()[0] for line in lines] == ["32", "16", "9"]
    assert (empty, note.startswith("small devices[*].memory_bytes = 9: no schedule fits")) == (
        "",
        True,
    )
    assert "[3/3] small devices[*].memory_bytes = 32: 20 ms, gap 95" in err
    assert "best schedule" in picture.read_text(encoding="utf-8")


def test_what_the_table_has_is_not_solved_again(optpipe, problem_file, tmp_path, solved) -> None:
    table = tmp_path / "t.csv"
    optpipe("sweep", problem_file, *MEMORY, "-o", table)
    first = read(table)
    text = table.read_text(encoding="utf-8").replace("succeeded", "cancelled", 1)
    table.write_text(text, encoding="utf-8")
    solved.clear()
    more = ("--axis", "devices[*].memory_bytes=40,32,16,9", *MEMORY[2:])
    code, _, err = optpipe("sweep", problem_file, *more, "-o", table)
    assert (code, err.count("from the file, not solved again")) == (0, 2)
    assert [name.split()[-1] for name, _ in solved] == ["32", "40"]
    again = read(table)
    assert [row["index"] for row in again] == [0, 1, 2, 3]
    assert [row["objective_ms"] for row in again[1:]] == [row["objective_ms"] for row in first]
    assert again[2] == {**first[1], "index": 2}


def test_a_solve_starts_from_what_fits_every_device_and_nothing_else(solved) -> None:
    """More on one device and less on the other: the first one's schedule may not fit the second."""
    axes = {f"devices[{device}].memory_bytes": [32, 40] for device in (0, 1)}
    _, one, other, both = vary(make_small_problem(), axes)
    options = {
        "time_limit_s": 20.0,
        "work_limit": None,
        "threads": 1,
        "seed": 0,
        "gap": 1e-6,
        "method": "auto",
    }
    rows, _ = sweep_here([one, other, both], {}, options, lambda _: None)
    assert [row["state"] for row in rows] == ["succeeded"] * 3
    assert [start for _, start in solved] == [False, False, True]


def test_no_row_is_worse_than_one_of_a_tighter_problem(
    optpipe, problem_file, tmp_path, monkeypatch
) -> None:
    """Whatever the solver finds, here less the more it may; and where a table is gone on with."""
    starts: list[str | None] = []

    def faulty(problem, **options):
        starts.append(options["start"] and options["start_method"])
        if problem.devices[0].memory_bytes == 40:
            return Result(SolveStatus.UNKNOWN, None, 1.0, "none found")
        is_tight = problem.devices[0].memory_bytes == 16 and problem.stages[0].grad_sync_ms == 1
        return fake_solver._finish(problem, serial(problem, 2 if is_tight else 0))

    monkeypatch.setattr(optpipe_solver, "solve", faulty)
    # What fuses a backward is sooner done here.
    problem = make_small_problem()
    stages = [stage.model_copy(update={"backward_ms": 2}) for stage in problem.stages]
    problem_file.write_text(dump_problem(problem.model_copy(update={"stages": stages})))
    table = tmp_path / "t.csv"
    more = ("--axis", "stages[0].grad_sync_ms=0,1", "-o", table, "--time-limit", "20")
    for memory, num_solves in (("16", 2), ("40,32,16", 4)):
        starts.clear()
        code, out, err = optpipe(
            "sweep", problem_file, "--axis", f"devices[*].memory_bytes={memory}", *more
        )
        assert (code, len(starts)) == (0, num_solves), err
        # What is gone on with knows no schedules.
        assert starts == [None] + ["tighter problem"] * (num_solves - 1)
        rows = read(table)
        assert {row["objective_ms"] for row in rows} == {17.0}
        for row in rows:
            has_none = row["values"]["devices[*].memory_bytes"] == 40
            assert row["state"] == ("failed" if has_none else "succeeded")
        words = "whose problem is tighter: it is legal here and as short"
        assert out.count(words) == len(rows) - 1


def test_ctrl_c_keeps_what_there_is(optpipe, problem_file, tmp_path, monkeypatch) -> None:
    """The combination under way keeps its best and counts as stopped; the next is not begun."""

    def stopped(problem, **options):
        if problem.devices[0].memory_bytes == 16:
            os.kill(os.getpid(), signal.SIGINT)
            assert options["should_stop"]()
        return fake_solver.solve(problem, **options)

    monkeypatch.setattr(optpipe_solver, "solve", stopped)
    table = tmp_path / "t.csv"
    code, _, err = optpipe("sweep", problem_file, *MEMORY, "-o", table)
    assert (code, "stopped by Ctrl-C" in err) == (130, True)
    rows = read(table)
    assert [(row["state"], row["objective_ms"]) for row in rows] == [
        ("cancelled", 20.0),
        ("infeasible", None),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--axis", "memory"], "--axis memory: must be NAME=VALUE"),
        (["--axis", "a=1", "--axis", "a=2"], "--axis a is given twice"),
        (["--axis", "memory=1"], "axes.memory: is neither an axis"),
        (["--axis", "num_microbatches=0"], "the variation num_microbatches = 0"),
        (["-o", "table.txt"], "use one of .csv, .md, .json"),
        (["--frontier", "f.txt"], "use one of .png, .svg, .pdf"),
        (["-o", "nowhere/t.csv"], "there is no folder"),
    ],
)
def test_mistakes_are_found_before_anything_is_solved(
    optpipe, problem_file, solved, arguments: list[str], words: str
) -> None:
    code, _, err = optpipe("sweep", problem_file, *arguments)
    assert (code, solved) == (2, [])
    assert words in err.replace("\n", " ")


def test_a_stopped_sweep_makes_no_row_of_the_file_worse(
    optpipe, problem_file, tmp_path, monkeypatch
) -> None:
    """Rows that are not reached stay; a job that is cancelled early finds less than before."""
    table = tmp_path / "t.csv"
    memory = ("--axis", "devices[*].memory_bytes=32,16")
    for objective_ms, bound_ms in ((15.0, 2.0), (18.0, 3.0)):

        def solve(problem, objective_ms=objective_ms, bound_ms=bound_ms, **_options):
            if objective_ms == 18 or problem.devices[0].memory_bytes == 32:
                os.kill(os.getpid(), signal.SIGINT)
            found = fake_solver.solve(problem, **_options)
            assert found.schedule is not None
            schedule = found.schedule.model_copy(
                update={"makespan_ms": objective_ms, "bound_ms": bound_ms}
            )
            return Result(SolveStatus.FEASIBLE, schedule, bound_ms, "", problem=problem)

        monkeypatch.setattr(optpipe_solver, "solve", solve)
        if objective_ms == 18:
            text = table.read_text(encoding="utf-8").replace("succeeded", "cancelled")
            table.write_text(text, encoding="utf-8")
        assert optpipe("sweep", problem_file, *memory, "-o", table)[0] == 130
        assert [row["objective_ms"] for row in read(table)] == [15.0, 15.0]
    assert [row["bound_ms"] for row in read(table)] == [2.0, 3.0]
    assert [row["state"] for row in read(table)] == ["cancelled"] * 2


def test_of_two_combinations_that_are_one_problem_the_better_row_is_known(
    optpipe, problem_file, tmp_path, solved
) -> None:
    """A finished row counts, also before one that was cancelled."""
    table = tmp_path / "t.csv"
    same = ("sweep", problem_file, "--axis", "recompute=true,false", "-o", table)
    assert optpipe(*same)[0] == 0
    head, first, second = table.read_text(encoding="utf-8").splitlines()
    second = second.replace("succeeded", "cancelled")
    table.write_text(f"{head}\n{first}\n{second}\n", encoding="utf-8")
    solved.clear()
    assert optpipe(*same)[0] == 0
    assert solved == []
    assert [row["state"] for row in read(table)] == ["succeeded"] * 2


def test_a_file_with_something_else_is_left_alone(optpipe, problem_file, tmp_path, solved) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,b\n", encoding="utf-8")
    code, _, err = optpipe("sweep", problem_file, *MEMORY, "-o", table)
    assert (code, "is not the table of a sweep" in err) == (2, True)
    optpipe("sweep", problem_file, "--axis", "num_microbatches=1", "-o", tmp_path / "o.csv")
    before = (tmp_path / "o.csv").read_bytes()
    solved.clear()
    code, _, err = optpipe("sweep", problem_file, *MEMORY, "-o", tmp_path / "o.csv")
    assert (code, solved) == (2, [])
    assert "'small num_microbatches = 1'" in err
    assert (tmp_path / "o.csv").read_bytes() == before
    there = ("--url", "http://127.0.0.1:1")
    assert optpipe("sweep", problem_file, *MEMORY, *there, "-o", tmp_path / "o.csv")[0] == 2


def test_nothing_that_fits_leaves_with_3(optpipe, problem_file, tmp_path, solved) -> None:
    table = tmp_path / "t.md"
    code, _, _ = optpipe("sweep", problem_file, "--axis", "memory_scale=0.5,0.4", "-o", table)
    assert code == 3
    assert table.read_text(encoding="utf-8").startswith("| memory_scale | state |")
    optpipe("sweep", problem_file, "-o", tmp_path / "t.json")
    (row,) = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["rows"]
    assert (row["values"], row["state"]) == ({}, "succeeded")


def test_a_service_solves_a_sweep_as_a_batch(optpipe, tmp_path) -> None:
    problem = make_small_problem(24).model_copy(update={"name": "there"})
    path, table, picture = (tmp_path / name for name in ("p.json", "t.csv", "f.svg"))
    path.write_text(dump_problem(problem), encoding="utf-8")
    with running(make_settings(tmp_path)) as (url, _):
        files = ("-o", table, "--frontier", picture)
        axes = ("--axis", "memory_scale=1,0.3", "--axis", "num_microbatches=1,2")
        code, _, err = optpipe("sweep", path, *axes, "--url", url, *files)
        assert code == 0, err
        batch_id = err.split()[1]
        batch = httpx.get(f"{url}/v1/batches/{batch_id}", timeout=60).json()
    rows = read(table)
    assert [row["job_id"] for row in rows] == [item["job_id"] for item in batch["items"]]
    assert [row["state"] for row in rows] == ["succeeded"] * 2 + ["infeasible"] * 2
    assert "4 of 4 have ended" in err
    assert "num_microbatches = 2" in picture.read_text(encoding="utf-8")


def test_values_are_json_or_words() -> None:
    texts = ["a=1,0.5", "placement=loop,v", "b = true, false", 'c=[0,1],"x"', "d=x=1,2"]
    assert parse_axes(texts) == {
        "a": [1, 0.5],
        "placement": ["loop", "v"],
        "b": [True, False],
        "c": [[0, 1], "x"],
        "d": ["x=1", 2],
    }
    for text in ("", "a", "=1", "a= "):
        with pytest.raises(InputError, match="must be NAME=VALUE"):
            parse_axes([text])
