"""The contestants that live in this process, and one that does not."""

import pytest

from benchmarks.jobs import PeerJob, judge, run_apart
from benchmarks.ledger import load_problem
from benchmarks.peers.cp_data import Scale, in_order, in_order_loses_nothing, renamed
from benchmarks.peers.ours import families, milp, ours
from optpipe import check, simulate
from tests.building import bus, offloadable, one_f_one_b, problem, programs, stage
from tests.solver.exhaustive import optimum


def test_the_families_say_the_best_of_all() -> None:
    given = load_problem("6.2b-p3-m6-2.0a")
    said = families(PeerJob(problem=given))
    found = judge(given, said.programs)
    assert found is not None
    assert found == min(said.extra["values"].values())
    assert said.bound_ms is not None
    assert said.bound_ms <= found * (1 + 1e-9)


def test_ours_tells_its_trace() -> None:
    given = load_problem("6.2b-p3-m6-2.0a")
    said = ours(PeerJob(problem=given, seconds=4.0))
    assert said.trace[-1].objective_ms == judge(given, said.programs)
    assert said.trace[-1].bound_ms == said.bound_ms


@pytest.mark.extended
def test_the_milp_proves_a_tiny_optimum() -> None:
    given = problem([stage(0, 2, 3, 1), stage(1, 3, 2, 2)], m=2)
    said = milp(PeerJob(problem=given, seconds=10.0))
    assert judge(given, said.programs) == pytest.approx(optimum(given))
    assert said.bound_ms == pytest.approx(optimum(given))
    assert {"starts", "bounds"} <= set(said.cpu_seconds)


@pytest.mark.extended
def test_a_contestant_runs_apart() -> None:
    given = problem([stage(0), stage(1)], m=2)
    said = run_apart("cp-sat", PeerJob(problem=given, start=one_f_one_b(2, 2), seconds=5.0))
    assert said.status == "optimal"
    assert judge(given, said.programs) == pytest.approx(said.bound_ms)
    assert said.peak_bytes > 10_000_000
    assert "job.start" in run_apart("cp-sat", PeerJob(problem=given, seconds=5.0)).status


def test_equal_micro_batches_are_renamed_without_loss() -> None:
    given = problem([stage(0, 1, 2, 1), stage(1, 2, 1, 1)], m=3)
    mixed = programs(
        "0F2 0F0 0F1 0I0 0I2 0W2 0W0 0I1 0W1", "1F0 1F2 1I0 1I2 1F1 1W2 1B1 1W0"
    )  # fmt: skip
    check(given, mixed)
    for changed in (renamed(mixed), in_order(mixed)):
        check(given, changed)
        assert simulate(given, changed).makespan_ms <= simulate(given, mixed).makespan_ms
    assert [a.microbatch for a in in_order(mixed)[0] if a.type.value == "F"] == [0, 1, 2]


def test_order_is_free_only_where_something_can_leave() -> None:
    """Offload matters where memory binds, and nowhere else."""
    stages = [offloadable(0), stage(1)]
    assert in_order_loses_nothing(problem(stages, m=2))
    tight = [bus(memory_bytes=15_000_000), bus()]
    assert not in_order_loses_nothing(problem(stages, tight, m=2))


def test_times_are_whole_and_rounded_down() -> None:
    """A unit that is exact where there is one, and below the truth elsewhere."""
    assert Scale(problem([stage(0, 1.25, 2, 1)])).per_ms == 100
    third = Scale(problem([stage(0, 1 / 3, 2, 1)]))
    assert third.ms(third.units(1 / 3)) <= 1 / 3 < third.ms(third.units(1 / 3) + 1)
    assert third.ms(third.units_up(1 / 3)) >= 1 / 3


def test_memory_units_lose_nothing() -> None:
    """The unit divides every size; the room is rounded down to it."""
    given = problem([stage(0, weight_context_bytes=4)], [{"memory_bytes": 25}], m=3)
    assert Scale(given).memory(0) == (2, 12)
