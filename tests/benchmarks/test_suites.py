"""The suites of problems that are made: what they cover, and what v1 has of their menus."""

from functools import cache

import pytest

from benchmarks.bench import main
from benchmarks.ledger import BenchRow, read_rows, results_of
from benchmarks.suites import SUITES, as_v1, v1_menus
from optpipe import Problem
from optpipe_solver.feasibility import feasibility

LONG = "llama3-70b-128k-"


@cache
def problems() -> dict[str, Problem]:
    """Return the menus by name; they take seconds, which no collection of tests should spend."""
    return dict(SUITES["menus"]())


@pytest.mark.extended
def test_menus_cover_what_they_must() -> None:
    """Measured and estimated menus, queueing links, free and uniform modes, three limits; a problem
    is made again the same."""
    assert len(problems()) >= 40
    hashes = [problem.problem_hash for problem in problems().values()]
    assert len(set(hashes)) == len(hashes)
    assert [problem.problem_hash for _, problem in SUITES["menus"]()] == hashes
    for model in ("tiny-gpt", "llama3-8b", "llama3-70b", "llama3.1-405b", "qwen3", "deepseek"):
        for limit in ("tight", "medium", "loose"):
            for way in ("free", "uniform"):
                assert [
                    n for n in problems() if n.startswith(model) and n.endswith(f"{limit}-{way}")
                ]
    for name, problem in problems().items():
        assert problem.queues
        assert all(3 < len(menu) <= 8 for menu in problem.menus)
        uniform = {stage.uniform_modes for stage in problem.stages}
        assert uniform == {name.endswith("uniform")}


def test_limits_grow_and_v1_has_a_schedule_at_each_but_of_the_longest_context() -> None:
    for name, problem in problems().items():
        assert feasibility(problem).plan is not None
        for of_v1 in (v1_menus(problem), as_v1(problem)):
            assert (feasibility(of_v1).plan is None) == name.startswith(LONG)
        if "-tight-" not in name:
            continue
        kinds = ("tight", "medium", "loose")
        others = [problems()[name.replace("tight", kind)].devices for kind in kinds]
        for tight, medium, loose in zip(*others, strict=True):
            assert tight.memory_bytes < medium.memory_bytes < loose.memory_bytes


@pytest.mark.parametrize("name", ["tiny-gpt-p4-m8-tight-free", "llama3-8b-p4-m12-loose-uniform"])
def test_v1_has_the_same_work_and_the_three_modes_that_it_can_say(name) -> None:
    """Whole offload and recomputation by an action; in v1's fields no workspace is less."""
    problem = problems()[name]
    short, flat = v1_menus(problem), as_v1(problem)
    for stage, few, plain in zip(problem.stages, short.stages, flat.stages, strict=True):
        _, away, again = few.menu
        assert not away.recompute
        assert away.offload_bytes == max(m.offload_bytes for m in stage.menu if not m.recompute)
        assert again.recompute == "apart"
        assert not again.offload_bytes
        assert set(few.menu) <= set(stage.menu)
        assert not plain.modes
        assert plain.offload_bytes == away.offload_bytes
        assert (plain.checkpoint_bytes, plain.recompute_ms) == (
            again.forward_bytes, again.recompute_ms
        )  # fmt: skip
        for mine, theirs in zip(plain.menu, few.menu, strict=True):
            assert mine.forward_workspace_bytes >= theirs.forward_workspace_bytes
        assert (plain.forward_ms, plain.activation_bytes) == (
            stage.forward_ms, stage.activation_bytes
        )  # fmt: skip


@pytest.mark.extended
def test_a_contest_leaves_a_row_of_each_contestant_and_does_not_repeat_it(tmp_path, capsys) -> None:
    """Families, the best with uniform modes, v1 and ours; ours is not longer than the others."""
    results = tmp_path / "menus.csv"
    arguments = ["menus", "--work", "0.05", "--only", "tiny-gpt-p4-m8-tight-free"]
    arguments += ["--solvers", "families", "v1", "ours", "--results", str(results)]
    main(arguments)
    rows = {row.solver: row for row in read_rows(BenchRow, results)}
    assert {"families", "uniform", "v1", "ours"} <= set(rows)
    ours = rows["ours"]
    assert ours.objective_ms is not None
    assert ours.device_bytes > 0
    for label in ("families", "uniform"):
        assert ours.objective_ms <= (rows[label].objective_ms or float("inf")) * (1 + 1e-9)
    capsys.readouterr()
    main(arguments)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "suite", ["menus", "pairs", pytest.param("slices", marks=pytest.mark.extended)]
)
def test_the_results_have_every_problem_of_a_suite(suite) -> None:
    """Rows with work limits, so that a busy machine changed nothing."""
    names = set(problems()) if suite == "menus" else {name for name, _ in SUITES[suite]()}
    rows = [row for row in read_rows(BenchRow, results_of(suite)) if row.solver == "ours"]
    assert names <= {row.instance for row in rows if row.work}
