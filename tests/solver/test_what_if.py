"""What a little more would buy: never worse where that is a theorem, and measured fairly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given

from optpipe import Problem, Programs, Provenance, check, evaluate, simulate
from optpipe.explain.what_if import AS_IT_IS, Unasked
from optpipe_solver.bounds import lower_bound
from optpipe_solver.result import Result, SolveStatus
from optpipe_solver.what_if import WhatIf, what_if
from tests.building import bus, offloadable, one_f_one_b, problem, programs, stage
from tests.strategies import Case, cases

GB = 1_000_000_000


def lazy(made: Problem, *, start: Programs, start_method: str, **options: Any) -> Result:
    """A solver that finds nothing better than its start, and proves what the bounds prove."""
    check(made, start)
    schedule = evaluate(made, start, Provenance(method=start_method), bound_ms=lower_bound(made).ms)
    return Result(SolveStatus(schedule.status), schedule, schedule.bound_ms)


def ask(made: Problem, rows: Programs, **options: Any) -> dict[str, WhatIf | Unasked]:
    length = simulate(made, rows).objective_ms(made.objective)
    answers = what_if(made, rows, length, **{"solver": lazy, **options})
    return {answer.name: answer for answer in answers}


def answered(answer: WhatIf | Unasked) -> WhatIf:
    assert isinstance(answer, WhatIf)
    return answer


def tight() -> tuple[Problem, Programs]:
    """Two devices that offload, device 1 with less left."""
    made = problem(
        [offloadable(0), offloadable(1)],
        [bus(memory_bytes=60_000_000), bus(memory_bytes=30_000_000)],
        m=2,
    )
    return made, programs(
        "0F0 0OFFLOAD0 0F1 0RELEASE0 0RELOAD0 0B0 0B1",
        "1F0 1B0 1F1 1OFFLOAD1 1RELEASE1 1RELOAD1 1B1",
    )


def test_the_questions_change_what_they_say_and_nothing_else() -> None:
    made, rows = tight()
    found = ask(made, rows)
    assert list(found) == [AS_IT_IS, "one-more-gb", "faster-pcie", "twice-the-microbatches"]
    more, faster, twice = (answered(found[name]).problem for name in list(found)[1:])
    assert [held.memory_bytes for held in more.devices] == [60_000_000, 30_000_000 + GB]
    assert [(held.d2h_gb_per_s, held.h2d_gb_per_s) for held in faster.devices] == [(1.2, 1.2)] * 2
    assert twice.num_microbatches == 4
    assert answered(found[AS_IT_IS]).problem == made
    assert "gpu1, which has the least left (19.1 MiB)" in found["one-more-gb"].text


@given(cases())
def test_never_worse_where_that_is_said(case: Case) -> None:
    """Even by a solver that only hands back its start: the theorems of the module."""
    for answer in ask(*case).values():
        if isinstance(answer, WhatIf):
            check(answer.problem, answer.schedule.programs)
            per_step = answer.after_ms / answer.problem.num_microbatches
            before = answer.before_ms / answer.num_before
            assert not answer.is_never_worse or per_step <= before * (1 + 1e-9) + 1e-9


@given(cases())
def test_memory_is_never_worse_and_lanes_of_ones_own_make_twice_as_many_so(case: Case) -> None:
    found = ask(*case)
    assert answered(found["one-more-gb"]).is_never_worse
    devices = case.problem.devices
    own = not any(held.half_duplex or held.pcie_group for held in devices)
    assume(own)
    assert answered(found["twice-the-microbatches"]).is_never_worse


def test_a_faster_bus_can_lengthen_the_span() -> None:
    """Device 2 starts earlier, after a RELEASE upstream, and ends as before: nothing is claimed."""
    made = problem(
        [stage(0, 20), offloadable(1), stage(1), stage(2, 1, 1, 100)], m=2, objective="span"
    )
    rows = programs(
        "0F0 0F1 0B0 0B1",
        "1F0 1OFFLOAD0 1RELEASE0 2F0 1F1 2F1 2B0 1RELOAD0 1B0 2B1 1B1",
        "3F0 3F1 3I0 3I1 3W0 3W1",
    )
    answer = answered(ask(made, rows)["faster-pcie"])
    assert answer.after_ms > answer.before_ms
    assert not answer.is_never_worse
    assert " more; " in answer.sentence()


@pytest.mark.parametrize(
    ("name", "stages", "rows", "lengths"),
    [
        (
            "faster-pcie",
            [(2, 6, 4, 1), (1, 0, 5, 4)],
            (
                "0F1 0F2 0F0 0OFFLOAD1 0RELEASE1 0OFFLOAD2 0RELEASE2 0RELOAD2 0I2 0W2 0RELOAD1 0I1"
                " 0W1 0I0 0W0",
                "1F1 1I1 1W1 1F2 1I2 1W2 1F0 1OFFLOAD0 1RELEASE0 1RELOAD0 1B0",
            ),
            (40, 42.5),
        ),
        (
            "twice-the-microbatches",
            [(0, 4, 0, 7), (6, 5, 6, 10)],
            (
                "0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0F2 0F1 0OFFLOAD1 0RELEASE1 0RELOAD1 0B1 0B0 0B2",
                "1F0 1OFFLOAD0 1RELEASE0 1F2 1F1 1B1 1RELOAD0 1I0 1W0 1I2 1W2",
            ),
            (72, 149),
        ),
    ],
)
def test_where_devices_share_a_bus_nothing_is_claimed(name, stages, rows, lengths) -> None:
    """Found by search: another order on the bus makes the same programs longer."""
    made = problem(
        [
            offloadable(d, f, i, w, offload_bytes=mb * 1_000_000)
            for d, (f, i, w, mb) in enumerate(stages)
        ],
        [bus(pcie_group="g"), bus(pcie_group="g")],
        m=3,
    )
    answer = answered(ask(made, programs(*rows))[name])
    assert [answer.before_ms, answer.after_ms] == pytest.approx(lengths)
    assert answer.gain < 0
    assert not answer.is_never_worse


def test_each_answer_begins_with_the_best_schedule_known_without_the_change() -> None:
    """What the second search finds is the start of all others, and what they are held against."""
    made, rows = tight()
    better = programs("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    starts = {}

    def solver(changed: Problem, *, start: Programs, **options: Any) -> Result:
        starts[changed.problem_hash] = start
        return lazy(changed, start=better if changed == made else start, start_method="")

    found = ask(made, rows, solver=solver)
    assert starts.pop(made.problem_hash) == rows
    base = answered(found.pop(AS_IT_IS))
    assert base.before_ms > base.after_ms
    for answer in found.values():
        assert answered(answer).before_ms == base.after_ms
        start = starts[answered(answer).problem.problem_hash]
        assert [row[:4] for row in start] == list(better)


def test_what_the_bound_proves_is_said() -> None:
    """One device, no bubbles: nothing can be gained by memory; twice as many cost twice."""
    made = problem([stage(0)], m=2)
    found = ask(made, programs("0F0 0B0 0F1 0B1"))
    assert answered(found["one-more-gb"]).buys_nothing
    assert found["one-more-gb"].sentence().endswith("6 ms as before; proven: nothing can be gained")
    assert (
        found["twice-the-microbatches"]
        .sentence()
        .endswith("3 ms per micro-batch as before; proven: nothing can be gained")
    )


def test_a_gain_is_told_per_microbatch_where_their_number_differs() -> None:
    """1F1B on two devices: 9 ms for two micro-batches, 15 for four."""

    def solver(changed: Problem, *, start: Programs, **options: Any) -> Result:
        return lazy(changed, start=one_f_one_b(2, changed.num_microbatches), start_method="")

    found = ask(problem([stage(0), stage(1)], m=2), one_f_one_b(2, 2), solver=solver)
    twice = answered(found["twice-the-microbatches"])
    assert (twice.before_ms, twice.num_before, twice.after_ms) == (9, 2, 15)
    assert twice.gain == pytest.approx(1 - 3.75 / 4.5)
    assert ": 4.5 -> 3.75 ms per micro-batch, 16.7 % less; " in twice.sentence()


def test_without_offload_the_bus_is_no_question() -> None:
    (answer,) = [
        answer
        for answer in ask(problem([stage(0)]), programs("0F0 0B0")).values()
        if isinstance(answer, Unasked)
    ]
    assert answer.name == "faster-pcie"
    assert "no stage can be offloaded" in answer.sentence()
    assert answer.as_json()["reason"]


def test_who_says_stop_gets_the_answers_so_far() -> None:
    assert list(ask(*tight(), should_stop=lambda: True)) == [AS_IT_IS]


def test_json_carries_problem_and_schedule() -> None:
    made, rows = tight()
    document = ask(made, rows)["one-more-gb"].as_json()
    changed = Problem.parse(document["problem"])
    assert document["schedule"]["problem_hash"] == changed.problem_hash != made.problem_hash
    assert document["is_never_worse"] is True


def test_the_solver_itself_uses_what_is_given() -> None:
    """One activation at a time fits device 0; with 1 GB more ZB-H1 does: F, then 18 ms of work."""
    made = problem(
        [offloadable(0, 2, 2, 2), offloadable(1, 2, 2, 2)],
        [bus(memory_bytes=15_000_000), bus()],
        m=3,
    )
    rows = programs("0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    length = simulate(made, rows).makespan_ms
    found = {answer.name: answer for answer in what_if(made, rows, length, time_limit_s=1.0)}
    more = answered(found["one-more-gb"])
    assert more.after_ms < more.before_ms <= length
    assert more.after_ms == 20
