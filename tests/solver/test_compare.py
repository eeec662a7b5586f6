"""``compare``: every method, one judge, best first; and the noise it is judged under."""

from __future__ import annotations

import json

import pytest

from optpipe import Problem, check, parse_action, simulate
from optpipe_solver import compare
from optpipe_solver.compare import AS_GIVEN, OURS, ComparisonRow, Workload, step_time_spread
from optpipe_solver.families import FAMILIES
from tests.building import one_f_one_b, problem, stage
from tests.solver.milp.test_horizon import parked_problem


def test_every_method_has_a_row_best_first_under_the_limit() -> None:
    """OptPipe's row is the best of the problem as given; 1F1B is over the limit."""
    rows = compare(parked_problem(), time_limit_s=10)
    legal = [row for row in rows if row.programs is not None and not row.over_limit]
    assert [row.makespan_ms for row in legal] == sorted(row.makespan_ms for row in legal)
    assert next(row for row in legal if row.placement == AS_GIVEN).method == "optpipe"
    assert {family.name for family in FAMILIES} <= {row.method for row in rows}
    assert next(row for row in rows if row.method == "1f1b").over_limit
    for row in legal:
        assert row.programs is not None
        check(row.problem, row.programs)
        assert simulate(row.problem, row.programs).makespan_ms == row.makespan_ms
    absent = [row for row in rows if row.programs is None]
    assert all(row.reason for row in absent)


def test_no_family_on_a_copy_stands_above_ours() -> None:
    """Where families are tried re-placed, the best copy is optimised too, and its row says so."""
    given = problem(
        [stage(d, 4, 4, 2, weight_context_bytes=5) for d in range(4)],
        [{"memory_bytes": 40}] * 4,
        m=8,
    )
    rows = compare(given, time_limit_s=2)
    ours = [row for row in rows if row.method == OURS]
    assert rows[0].method == OURS
    assert len({row.placement for row in ours}) == 2
    best = min(row.objective_ms for row in rows if row.programs is not None and not row.over_limit)
    assert rows[0].objective_ms == best
    copy = next(row for row in ours if row.placement != AS_GIVEN)
    assert copy.programs is not None
    check(copy.problem, copy.programs)
    assert copy.problem.problem_hash != given.problem_hash
    on_copies = [row.objective_ms for row in rows if row.placement != AS_GIVEN and row.programs]
    assert copy.objective_ms == min(on_copies)


def test_only_cuts_that_can_be_built_are_tried() -> None:
    """11 layers have no halves: no row, and the reason; 10 have; unknown ones are a guess."""

    def placements(counts: dict[str, int] | None) -> tuple[set[str], str]:
        given = problem([stage(d, 4, 4, 2, layers=counts) for d in range(2)], m=4)
        rows = compare(given, time_limit_s=0.5)
        for row in rows:
            held = [stage.layers for stage in row.problem.stages]
            assert sum(x.transformer for x in held if x) == 2 * (counts or {}).get("transformer", 0)
        return {row.placement for row in rows}, next(r.reason for r in rows if r.method == "zb-v")

    assert placements({"transformer": 10})[0] == {AS_GIVEN, "loop x2", "v x2"}
    assert placements(None)[0] == {AS_GIVEN, "loop x2, guess", "v x2, guess"}
    odd, reason = placements({"transformer": 11})
    assert odd == {AS_GIVEN}
    assert "stages[0] holds layers 11, not 2 equal parts" in reason
    assert "optpipe estimate --chunks 2 --placement v" in reason
    assert placements({"transformer": 10, "embedding": 1})[0] == {AS_GIVEN}


def test_rows_are_json() -> None:
    """Programs as texts that parse, the problem by its hash."""
    given = problem([stage(0), stage(1)], m=2)
    for row in compare(given, time_limit_s=1):
        data = json.loads(json.dumps(row.as_json()))
        assert data["problem_hash"] == row.problem.problem_hash
        for program in data["programs"] or []:
            assert [str(parse_action(cell)) for cell in program] == program


def test_tokens_and_mfu() -> None:
    """Two micro-batches of 1000 tokens and 1 GFLOP in 6 ms, 1 TFLOP/s peak."""
    given = problem([stage(0, 1, 1, 1)], m=2)
    work = Workload(tokens_per_microbatch=1000, flops_per_microbatch=1e9, peak_flops_per_s=1e12)
    row = next(r for r in compare(given, time_limit_s=1, workload=work) if r.method == "1f1b")
    assert row.makespan_ms == 6
    assert row.tokens_per_s == pytest.approx(2000 / 6e-3)
    assert row.mfu == pytest.approx(2e9 / 6e-3 / 1e12)


def test_noise_of_a_single_chain() -> None:
    """One device: the sum of six independent factors; the median is the sum itself."""
    given = problem([stage(0, 10, 10, 10)], m=2)
    spread = step_time_spread(given, one_f_one_b(1, 2), seed=1)
    assert spread.num_samples == 400
    assert spread.p50_ms == pytest.approx(60, rel=0.01)
    # Two F of 10 and two B of 20, each +-10 % uniform: variance 2 x 1/3 + 2 x 4/3 ms^2.
    assert spread.p95_ms == pytest.approx(60 + 1.645 * (10 / 3) ** 0.5, rel=0.01)


def test_noise_never_helps_on_average_and_is_repeatable() -> None:
    """A maximum over paths: the median is above the noiseless time; a seed gives one answer."""
    given = problem([stage(d, 4, 4, 2) for d in range(4)], m=8)
    programs = one_f_one_b(4, 8)
    quiet = simulate(given, programs).makespan_ms
    spread = step_time_spread(given, programs, seed=3)
    assert quiet < spread.p50_ms < spread.p95_ms
    assert spread == step_time_spread(given, programs, seed=3)
    assert step_time_spread(given, programs, noise=0.0).p95_ms == pytest.approx(quiet)


def test_span_objective_is_judged_by_span() -> None:
    """The spread is of what the problem minimises."""
    data = problem([stage(d, 4, 4, 2) for d in range(4)], m=4).model_dump(by_alias=True)
    given = Problem.parse({**data, "objective": "span"})
    programs = one_f_one_b(4, 4)
    still = step_time_spread(given, programs, noise=0.0)
    assert still.p50_ms == pytest.approx(simulate(given, programs).span_ms)


def test_every_row_is_told_as_it_is_made() -> None:
    """The optimiser's last; what is told is what is returned."""
    told: list[ComparisonRow] = []
    given = problem([stage(0), stage(1)], m=2)
    rows = compare(given, time_limit_s=0.5, on_row=told.append)
    assert sorted(map(id, told)) == sorted(map(id, rows))
    assert told[-1].method == "optpipe"
