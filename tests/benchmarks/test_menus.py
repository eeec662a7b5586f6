"""The problems with menus: what they cover, what v1 has of them, and what is said of the rows."""

from functools import cache

import pytest

from benchmarks.ledger import read_rows
from benchmarks.menus import RESULTS, MenuRow, all_problems, as_v1, report, v1_menus
from optpipe import Problem
from optpipe_solver.feasibility import feasibility

LONG = "llama3-70b-128k-"


@cache
def problems() -> dict[str, Problem]:
    """Return the set by name: it takes seconds, that not each worker's collection spends."""
    return dict(all_problems())


@pytest.mark.extended
def test_the_set_covers_what_it_must() -> None:
    """Measured and estimated menus, queueing links, free and uniform modes, three limits; a problem
    is made again the same."""
    assert len(problems()) >= 40
    hashes = [problem.problem_hash for problem in problems().values()]
    assert len(set(hashes)) == len(hashes)
    assert [problem.problem_hash for problem in dict(all_problems()).values()] == hashes
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
    for name, problem in problems().items():
        if "-tight-" in name:
            limits = [
                [device.memory_bytes for device in problems()[other].devices]
                for other in (name.replace("tight", kind) for kind in ("tight", "medium", "loose"))
            ]
            p, devices = len(problem.devices), range(len(problem.devices))
            sizes = [[problem.stages[s].activation_bytes for s in own] for own in problem.stages_of]
            most = [
                problem.static_bytes_of(d) + problem.devices[d].reserved_bytes + p * sum(sizes[d])
                for d in devices
            ]
            assert all(a < b < c < d for a, b, c, d in zip(*limits, most, strict=True))


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


def _row(instance: str, solver: str, objective_ms: float | None) -> MenuRow:
    return MenuRow(
        instance=instance, problem_hash="h", solver=solver, seconds=0.0, threads=1,
        work=4.0, cpu_seconds=5.0,
        objective_ms=objective_ms, bound_ms=None, status="", method="", commit="c", machine="m",
    )  # fmt: skip


def test_the_report_counts_what_is_shorter_and_the_mean_of_the_ratio() -> None:
    """1/2 and 2 have the mean 1; a schedule alone is shorter; the newest row counts."""
    values = {"a-free": (50.0, 100.0), "b-free": (200.0, 100.0), "c-uniform": (7.0, None)}
    rows = [_row("a-free", "ours", 1.0)]
    for name, (mine, theirs) in values.items():
        rows += [_row(name, "ours", mine), _row(name, "v1", theirs), _row(name, "families", 200.0)]
    rows.append(_row("a-free", "cp-sat", 49.0))
    head, v1, uniform, families, cp_sat, free, alike = report(rows)
    assert head == "3 problems, 4 units of work each, 15 CPU s; ours, against"
    assert v1 == (
        "v1: shorter on 2 of 3, 1 of these with a schedule alone, longer on 1 (b-free); geometric "
        "mean of the ratio 1.0000 over 2"
    )
    assert uniform.startswith("uniform: shorter on 0 of 0")
    assert families.startswith("families: shorter on 2 of 3, longer on 0;")
    assert cp_sat.startswith("cp-sat: shorter on 0 of 1, longer on 1 (a-free);")
    assert free.startswith("v1, free modes: shorter on 1 of 2, longer on 1 (b-free);")
    assert alike.startswith("v1, uniform modes: shorter on 1 of 1, 1 of these with")


def test_the_ledger_has_every_problem_with_its_limits() -> None:
    """All contestants of all problems, with the same limit."""
    rows = read_rows(MenuRow, RESULTS)
    newest = {(row.instance, row.solver): row for row in rows}
    contestants = ("families", "uniform", "v1", "ours", "cp-sat")
    assert set(newest) == {(name, solver) for name in problems() for solver in contestants}
    solved = [row for row in newest.values() if row.solver in ("v1", "ours")]
    assert len({(row.seconds, row.work) for row in solved}) == 1
    assert {row.threads for row in rows} == {1}
