"""The benchmark set: what stands in its folder is what its script makes, and is what it says."""

import json

import pytest

from benchmarks.instances.make import FOLDER, all_documents
from benchmarks.ledger import index, load_problem
from optpipe_solver.feasibility import feasibility

DOCUMENTS = {row["name"]: (document, row) for document, row in all_documents()}
ROWS = index()


def test_the_files_are_what_the_script_makes() -> None:
    files = sorted(FOLDER.glob("*.json"))
    assert sorted(file.stem for file in files) == sorted(DOCUMENTS)
    for file in files:
        assert json.loads(file.read_text(encoding="utf-8")) == DOCUMENTS[file.stem][0]
        assert file.stat().st_size < 50_000


def test_the_index_is_what_the_script_makes() -> None:
    rows = [{key: str(value) for key, value in row.items()} for _, row in DOCUMENTS.values()]
    assert rows == ROWS


@pytest.mark.parametrize("name", [row["name"] for row in ROWS])
def test_every_instance_is_feasible(name: str) -> None:
    """Some schedule fits, so that never worse is a claim about all of them."""
    assert feasibility(load_problem(name)).plan is not None


def test_the_set_covers_what_it_must() -> None:
    problems = [load_problem(row["name"]) for row in ROWS]
    assert len(problems) >= 60
    assert len({problem.problem_hash for problem in problems}) == len(problems)
    sizes = {(len(problem.devices), problem.num_microbatches) for problem in problems}
    assert {2, 64} <= {p for p, _ in sizes}
    assert {4, 512} <= {m for _, m in sizes}
    assert (16, 64) in sizes
    assert {problem.objective for problem in problems} == {"makespan", "span"}


def test_the_set_covers_every_feature() -> None:
    problems = [load_problem(row["name"]) for row in ROWS]
    stages = [stage for problem in problems for stage in problem.stages]
    devices = [device for problem in problems for device in problem.devices]
    ratios = {
        round(problem.offload_ms(0) / problem.stages[0].busy_ms, 2)
        for problem in problems
        if problem.can_offload(0)
    }
    assert {0.25, 0.5, 1.0, 2.0} <= ratios
    assert any(stage.can_recompute for stage in stages)
    assert any(stage.backward_ms is not None for stage in stages)
    assert any(stage.grad_sync_ms for stage in stages)
    assert any(device.half_duplex and device.pcie_group for device in devices)
    assert any(host.memory_bytes is not None for problem in problems for host in problem.hosts)
    assert any(problem.links for problem in problems)
    assert any(len(set(problem.placement)) < len(problem.stages) for problem in problems)
    assert any(len({d.memory_bytes for d in problem.devices}) > 1 for problem in problems)
