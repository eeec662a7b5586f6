"""``optpipe explain`` and ``diff``: words, JSON, files and exit codes."""

import io
import json
import os
import signal
from importlib import import_module
from pathlib import Path

import pytest

from optpipe import (
    Problem,
    Provenance,
    check,
    dump_csv,
    dump_problem,
    dump_schedule,
    evaluate,
    load_csv,
    load_problem,
    load_schedule,
)
from optpipe.errors import install_command
from optpipe.explain import Explanation, explain
from optpipe_solver.budget import Result, SolveStatus
from optpipe_solver.families.list_scheduling import build_greedy
from tests.cli.conftest import LEGAL, PLAIN, write
from tests.plot.conftest import make_small_problem

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lazy_solver(monkeypatch):
    seen: list[dict[str, object]] = []

    def solve(problem: Problem, *, start, start_method, should_stop, **options):
        check(problem, start)
        seen.append(options)
        schedule = evaluate(problem, start, Provenance(method="lazy"), bound_ms=1.0)
        return Result(SolveStatus.FEASIBLE, schedule, 1.0)

    monkeypatch.setattr(import_module("optpipe_solver.compare"), "solve", solve)
    return seen


def test_explain_says_it_in_words_and_in_json(
    optpipe, problem_file, schedule_file, csv_file
) -> None:
    code, out, _ = optpipe("explain", problem_file, schedule_file)
    assert code == 0
    explanation = explain(make_small_problem(), load_csv(LEGAL))
    assert all(sentence.text in out for sentence in explanation.sentences)
    assert "Critical path" in out
    assert "Why it offloads" in out
    assert optpipe("explain", problem_file, csv_file)[1] == out
    code, out, _ = optpipe("explain", problem_file, schedule_file, "--json")
    assert code == 0
    assert Explanation.model_validate_json(out) == explanation


def test_what_if_prints_answers_and_writes_their_files(
    optpipe, problem_file, schedule_file, tmp_path, lazy_solver
) -> None:
    folder = tmp_path / "new" / "folder"
    code, out, _ = optpipe(
        "explain", problem_file, schedule_file, "--what-if", "--time-limit", 3, "--seed", 5,
        "--threads", 1, "-o", folder,
    )  # fmt: skip
    assert code == 0
    assert "no change, searched again: " in out
    assert "1 GB more on " in out
    assert "20% more PCIe bandwidth" in out
    assert "twice the micro-batches (4): " in out
    assert lazy_solver == [{"time_limit_s": 3.0, "threads": 1, "seed": 5}] * 4
    document = json.loads(optpipe("explain", problem_file, schedule_file, "--what-if", "--json")[1])
    assert [answer["name"] for answer in document["what_if"]] == [
        "as-it-is", "one-more-gb", "faster-pcie", "twice-the-microbatches"
    ]  # fmt: skip
    assert document["what_if"][3]["schedule"]["programs"]
    assert document["length_ms"] == document["what_if"][0]["before_ms"]
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 8
    for name in names:
        if name.endswith(".problem.json"):
            problem = load_problem((folder / name).read_text())
            record = load_schedule((folder / name.replace("problem", "schedule")).read_text())
            assert record.problem_hash == problem.problem_hash
            check(problem, record.programs)


def test_a_folder_without_a_question_is_refused(
    optpipe, problem_file, schedule_file, tmp_path
) -> None:
    code, _, err = optpipe("explain", problem_file, schedule_file, "-o", tmp_path / "x")
    assert (code, "--what-if" in err) == (2, True)
    code, _, err = optpipe("explain", problem_file, schedule_file, "--what-if", "-o", problem_file)
    assert (code, "cannot make folder" in err) == (2, True)


def test_what_if_without_the_solver_names_the_pip_command(
    optpipe, problem_file, csv_file, monkeypatch
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'highspy'", name="highspy")

    monkeypatch.setattr(import_module("optpipe_solver.compare"), "what_if", absent)
    code, out, err = optpipe("explain", problem_file, csv_file, "--what-if")
    assert (code, install_command("solver") in err) == (1, True)
    assert "Critical path" in out


def test_what_if_ends_at_the_first_ctrl_c(optpipe, problem_file, csv_file, monkeypatch) -> None:
    def solve(problem: Problem, *, start, start_method, should_stop, **options):
        os.kill(os.getpid(), signal.SIGINT)
        assert should_stop()
        schedule = evaluate(problem, start, Provenance(method="lazy"))
        return Result(SolveStatus.FEASIBLE, schedule)

    monkeypatch.setattr(import_module("optpipe_solver.compare"), "solve", solve)
    code, out, err = optpipe("explain", problem_file, csv_file, "--what-if")
    assert code == 130
    assert "as before; nothing is proven" in out
    assert "1 GB more" not in out
    assert "stopped by Ctrl-C" in err


def test_diff_of_equal_schedules_is_empty_and_leaves_with_0(
    optpipe, problem_file, schedule_file, csv_file
) -> None:
    assert optpipe("diff", schedule_file, csv_file) == (0, "", "no difference\n")
    assert optpipe("diff", schedule_file, csv_file, problem_file)[:2] == (0, "")
    assert optpipe("diff", problem_file, problem_file)[:2] == (0, "")


def test_diff_of_schedules_says_what_changed_and_what_it_cost(
    optpipe, problem_file, csv_file, tmp_path
) -> None:
    write(problem_file, dump_problem(make_small_problem(10**12)))
    other = write(tmp_path / "other.csv", PLAIN)
    code, out, _ = optpipe("diff", csv_file, other, problem_file)
    assert code == 1
    assert "stage 0: micro-batch 0: offloaded -> kept" in out
    assert "device 0: 3 removed; first at cell 1: 0OFFLOAD0 -> 0F1" in out
    assert "makespan: " in out
    assert "device 1:" not in out
    code, out, _ = optpipe("diff", csv_file, other)
    assert (code, "makespan" in out) == (1, False)
    code, out, _ = optpipe("diff", csv_file, other, problem_file, "--json")
    assert (code, json.loads(out)["treatment"][0]["after"]) == (1, "kept")


def test_diff_of_records_without_their_problem_uses_what_they_say(
    optpipe, schedule_file, tmp_path
) -> None:
    record = load_schedule(schedule_file.read_text())
    plain = {"programs": load_csv(PLAIN), "makespan_ms": 1.0, "problem_hash": "sha256:x"}
    other = write(tmp_path / "other.json", dump_schedule(record.model_copy(update=plain)))
    code, out, err = optpipe("diff", schedule_file, other)
    assert code == 1
    assert "makespan: " in out
    assert "different problems" in err


def test_diff_of_one_order_for_two_problems_says_that_its_length_differs(
    optpipe, schedule_file, tmp_path
) -> None:
    record = load_schedule(schedule_file.read_text())
    longer = {"makespan_ms": 2 * record.makespan_ms, "problem_hash": "sha256:x"}
    other = write(tmp_path / "other.json", dump_schedule(record.model_copy(update=longer)))
    code, out, err = optpipe("diff", schedule_file, other)
    assert (code, "no difference" in err) == (1, False)
    assert "the programs are the same, the numbers in the files are not" in out
    assert "makespan: " in out


def test_diff_of_problems_names_fields_bound_and_smallest_memory(
    optpipe, problem_file, tmp_path
) -> None:
    small = make_small_problem()
    more = small.model_copy(update={"num_microbatches": 2 * small.num_microbatches})
    other = write(tmp_path / "more.json", dump_problem(more))
    code, out, _ = optpipe("diff", problem_file, other)
    assert code == 1
    assert f"num_microbatches: {small.num_microbatches} -> {more.num_microbatches}" in out
    assert "compute of the busiest device: " in out
    assert "proven bound of the makespan: " in out


def test_diff_with_a_problem_that_has_no_schedule_names_what_it_would_take(
    optpipe, problem_file, tmp_path
) -> None:
    less = write(tmp_path / "l.json", dump_problem(make_small_problem(1)))
    code, out, _ = optpipe("diff", problem_file, less, "--json")
    costs = {cost["name"]: cost for cost in json.loads(out)["costs"]}
    bound = costs["proven bound of the makespan"]
    assert (code, bound["before"] > 0, bound["after"]) == (1, True, None)
    least = costs["smallest memory of the largest device"]
    assert least["before"] == least["after"] > 1


def test_diff_reads_a_problem_from_standard_input(optpipe, problem_file, monkeypatch) -> None:
    text = problem_file.read_text().replace('"num_microbatches": 2', '"num_microbatches": 3')
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, out, _ = optpipe("diff", problem_file, "-")
    assert (code, out.splitlines()[0]) == (1, "num_microbatches: 2 -> 3 (+50.0%)")


def test_diff_refuses_what_cannot_be_compared(
    optpipe, problem_file, schedule_file, csv_file, tmp_path
) -> None:
    code, _, err = optpipe("diff", csv_file, problem_file)
    assert (code, "is a problem and" in err) == (2, True)
    code, _, err = optpipe("diff", problem_file, problem_file, problem_file)
    assert (code, "need no third" in err) == (2, True)
    nonsense = write(tmp_path / "bad.csv", "0F0,hello\n")
    code, _, err = optpipe("diff", csv_file, nonsense)
    assert (code, "bad.csv" in err) == (2, True)
    assert optpipe("diff", csv_file, tmp_path / "absent.csv")[0] == 2
    assert optpipe("diff", csv_file, schedule_file, csv_file)[0] == 2


def test_the_page_of_the_documentation_shows_what_is_printed(optpipe, tmp_path) -> None:
    """Its command solves with a published method, whose schedule is always the same."""
    instance = "benchmarks/instances/offload-0.5-p4-m8-1.5a.json"
    page = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
    assert f"optpipe solve {instance} --method greedy" in page
    problem = load_problem((ROOT / instance).read_text(encoding="utf-8"))
    rows = write(tmp_path / "greedy.csv", dump_csv(build_greedy(problem)))
    code, out, _ = optpipe("explain", ROOT / instance, rows)
    assert code == 0
    shown = page.partition("```text\n")[2].partition("```")[0].splitlines()
    assert len(shown) > 5
    assert [line for line in shown if line not in out] == []
