"""Every method on one problem in one table; and changed problems, solved and told beside it."""

import json
from typing import Any

import pytest
from hypothesis import given

from optpipe import Problem, Programs, Provenance, check, evaluate, parse_action, simulate
from optpipe.explain.what_if import AS_IT_IS, Unasked
from optpipe_solver import compare
from optpipe_solver.bounds import lower_bound
from optpipe_solver.budget import Result, SolveStatus
from optpipe_solver.compare import (
    AS_GIVEN,
    OURS,
    ComparisonRow,
    WhatIf,
    Workload,
    step_time_spread,
    what_if,
)
from optpipe_solver.families import FAMILIES
from tests.building import bus, offloadable, one_f_one_b, problem, programs, stage
from tests.solver.milp.test_horizon import parked_problem
from tests.strategies import Case, cases


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


def test_without_time_to_search_no_family_is_faster_than_ours() -> None:
    """The optimizer starts from the best row, so that its own row is never longer.

    Where families are tried re-placed, the best copy is optimised too, and its row says so.
    """
    stages = [stage(d, 4, 4, 2, layers={"transformer": 4}) for d in range(4)]
    rows = compare(problem(stages, [{"memory_bytes": 60}] * 4, m=16), time_limit_s=0.01)
    assert rows[0].method == OURS
    placements = {row.placement for row in rows if row.method == OURS}
    assert len(placements) == 2
    for placement in placements:
        legal = [row for row in rows if row.programs is not None and not row.over_limit]
        lengths = {row.method: row.objective_ms for row in legal if row.placement == placement}
        assert lengths[OURS] == min(lengths.values())
        assert len(lengths) > 1
    for row in rows:
        if row.method == OURS and row.programs is not None:
            check(row.problem, row.programs)


def test_only_cuts_that_can_be_built_are_tried() -> None:
    """11 layers have no halves: no row, and the reason; 10 have; unknown ones are a guess."""

    def placements(counts: dict[str, int] | None) -> tuple[set[str], str]:
        given = problem([stage(d, 4, 4, 2, layers=counts) for d in range(2)], m=4)
        rows = compare(given, time_limit_s=0.5)
        for row in rows:
            layers_of = [stage.layers for stage in row.problem.stages]
            assert sum(x.transformer for x in layers_of if x) == 2 * (counts or {}).get(
                "transformer", 0
            )
        return {row.placement for row in rows}, next(r.reason for r in rows if r.method == "zb-v")

    assert placements({"transformer": 10})[0] == {AS_GIVEN, "loop x2", "v x2"}
    assert placements(None)[0] == {AS_GIVEN, "loop x2, guess", "v x2, guess"}
    odd, reason = placements({"transformer": 11})
    assert odd == {AS_GIVEN}
    assert "stages[0] holds layers 11, not 2 equal parts" in reason
    assert "optpipe estimate --chunks 2 --placement v" in reason
    assert placements({"transformer": 10, "embedding": 1})[0] == {AS_GIVEN}


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
    # Two F of 10 and two B of 20, each +-10% uniform: variance 2 x 1/3 + 2 x 4/3 ms^2.
    assert spread.p95_ms == pytest.approx(60 + 1.645 * (10 / 3) ** 0.5, rel=0.01)


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_noise_never_helps_on_average_and_is_repeatable(objective: str) -> None:
    """A maximum over paths: the median is above the noiseless time; a seed gives one answer.

    The last device begins late and ends last: its span is less than the makespan.
    """
    stages = [stage(d, 4, 4, 2, grad_sync_ms=40 * (d == 3)) for d in range(4)]
    given = problem(stages, m=8, objective=objective)
    programs = one_f_one_b(4, 8)
    quiet = simulate(given, programs).objective_ms(objective)
    spread = step_time_spread(given, programs, seed=3)
    assert quiet < spread.p50_ms < spread.p95_ms
    assert spread == step_time_spread(given, programs, seed=3)
    assert step_time_spread(given, programs, noise=0.0).p95_ms == pytest.approx(quiet)


def test_every_row_is_told_as_it_is_made_and_is_json() -> None:
    """The optimiser's last; what is told is what is returned.

    As JSON: programs as texts that parse, the problem by its hash.
    """
    seen: list[ComparisonRow] = []
    given = problem([stage(0), stage(1)], m=2)
    rows = compare(given, time_limit_s=0.5, on_row=seen.append)
    assert sorted(map(id, seen)) == sorted(map(id, rows))
    assert seen[-1].method == "optpipe"
    for row in rows:
        data = json.loads(json.dumps(row.as_json()))
        assert data["problem_hash"] == row.problem.problem_hash
        for program in data["programs"] or []:
            assert [str(parse_action(cell)) for cell in program] == program


GB = 1_000_000_000


def lazy(posed: Problem, *, start: Programs, start_method: str, **options: Any) -> Result:
    """A solver that finds nothing better than its start, and proves what the bounds prove."""
    check(posed, start)
    schedule = evaluate(
        posed, start, Provenance(method=start_method), bound_ms=lower_bound(posed).ms
    )
    return Result(SolveStatus(schedule.status), schedule, schedule.bound_ms)


def ask(posed: Problem, rows: Programs, **options: Any) -> dict[str, WhatIf | Unasked]:
    length = simulate(posed, rows).objective_ms(posed.objective)
    answers = what_if(posed, rows, length, **{"solver": lazy, **options})
    return {answer.name: answer for answer in answers}


def answered(answer: WhatIf | Unasked) -> WhatIf:
    assert isinstance(answer, WhatIf)
    return answer


def tight() -> tuple[Problem, Programs]:
    """Two devices that offload, device 1 with less left."""
    posed = problem(
        [offloadable(0), offloadable(1)],
        [bus(memory_bytes=60_000_000), bus(memory_bytes=30_000_000)],
        m=2,
    )
    return posed, programs(
        "0F0 0OFFLOAD0 0F1 0RELEASE0 0RELOAD0 0B0 0B1",
        "1F0 1B0 1F1 1OFFLOAD1 1RELEASE1 1RELOAD1 1B1",
    )


def test_the_questions_change_what_they_say_and_nothing_else() -> None:
    posed, rows = tight()
    found = ask(posed, rows)
    assert list(found) == [AS_IT_IS, "one-more-gb", "faster-pcie", "twice-the-microbatches"]
    more, faster, twice = (answered(found[name]).problem for name in list(found)[1:])
    assert [device.memory_bytes for device in more.devices] == [60_000_000, 30_000_000 + GB]
    assert [(device.d2h_gb_per_s, device.h2d_gb_per_s) for device in faster.devices] == [
        (1.2, 1.2)
    ] * 2
    assert twice.num_microbatches == 4
    assert answered(found[AS_IT_IS]).problem == posed
    assert "gpu1, which has the least left (19.1 MiB)" in found["one-more-gb"].text
    document = found["one-more-gb"].as_json()
    assert Problem.parse(document["problem"]) == more
    assert document["schedule"]["problem_hash"] == more.problem_hash != posed.problem_hash
    assert document["is_never_worse"] is True


@given(cases())
def test_never_worse_where_that_is_said(case: Case) -> None:
    """Even by a solver that only hands back its start: the theorems of the module.

    It is said of more memory, of twice as many micro-batches where lanes are owned, and of a faster
    bus where, beside that, makespan counts.
    """
    found = ask(*case)
    groups = [device.pcie_group for device in case.problem.devices]
    owned = not any(
        device.half_duplex or (device.pcie_group and groups.count(device.pcie_group) > 1)
        for device in case.problem.devices
    )
    assert answered(found["one-more-gb"]).is_never_worse
    assert answered(found["twice-the-microbatches"]).is_never_worse is owned
    if isinstance(faster := found["faster-pcie"], WhatIf):
        assert faster.is_never_worse is (owned and case.problem.objective == "makespan")
    for answer in found.values():
        if isinstance(answer, WhatIf):
            check(answer.problem, answer.schedule.programs)
            per_step = answer.after_ms / answer.problem.num_microbatches
            before = answer.before_ms / answer.num_before
            assert not answer.is_never_worse or per_step <= before * (1 + 1e-9) + 1e-9


def test_each_answer_begins_with_the_best_schedule_known_without_the_change() -> None:
    """What the second search finds is the start of all others, and what they are held against."""
    posed, rows = tight()
    better = programs("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    starts = {}

    def solver(changed: Problem, *, start: Programs, **options: Any) -> Result:
        starts[changed.problem_hash] = start
        return lazy(changed, start=better if changed == posed else start, start_method="")

    found = ask(posed, rows, solver=solver)
    assert starts.pop(posed.problem_hash) == rows
    base = answered(found.pop(AS_IT_IS))
    assert base.before_ms > base.after_ms
    for answer in found.values():
        assert answered(answer).before_ms == base.after_ms
        start = starts[answered(answer).problem.problem_hash]
        assert [row[:4] for row in start] == list(better)


def test_what_the_bound_proves_is_said() -> None:
    """One device, no bubbles: nothing can be gained by memory; twice as many cost twice.

    Without offload the bus is no question.
    """
    posed = problem([stage(0)], m=2)
    found = ask(posed, programs("0F0 0B0 0F1 0B1"))
    assert answered(found["one-more-gb"]).buys_nothing
    assert found["one-more-gb"].sentence().endswith("6 ms as before; proven: nothing can be gained")
    twice = found["twice-the-microbatches"].sentence()
    assert twice.endswith("3 ms per micro-batch as before; proven: nothing can be gained")
    assert "no stage can be offloaded" in found["faster-pcie"].sentence()
    assert found["faster-pcie"].as_json()["reason"]


def test_who_says_stop_gets_the_answers_so_far() -> None:
    assert list(ask(*tight(), should_stop=lambda: True)) == [AS_IT_IS]


def test_the_solver_itself_uses_what_is_given() -> None:
    """One activation at a time fits device 0; with 1 GB more ZB-H1 does: F, then 18 ms of work."""
    posed = problem(
        [offloadable(0, 2, 2, 2), offloadable(1, 2, 2, 2)],
        [bus(memory_bytes=15_000_000), bus()],
        m=3,
    )
    rows = programs("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    length = simulate(posed, rows).makespan_ms
    found = {answer.name: answer for answer in what_if(posed, rows, length, time_limit_s=1.0)}
    more = answered(found["one-more-gb"])
    assert more.after_ms < more.before_ms <= length
    assert more.after_ms == 20
