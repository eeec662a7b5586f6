"""Evaluation: numbers that are true, or an error."""

from importlib import import_module

import pytest
from hypothesis import given

from optpipe import IllegalScheduleError, Provenance, ScheduleMismatchError, evaluate, simulate
from optpipe.evaluate import verify
from optpipe.memory import CellModes, device_peak_bytes, host_peak_bytes, modes_of
from optpipe.problem import Problem
from optpipe.schedule import Program
from tests.building import everything_at_once, problem, programs, stage
from tests.strategies import Case, cases

WHERE_FROM = Provenance(method="test", seed=3)
ROW = programs("0F0 0I0 0W0")


@given(cases(menus=True, pairs=True))
def test_every_number_is_the_cores_own(case: Case) -> None:
    schedule = evaluate(*case, WHERE_FROM)
    run = simulate(*case)
    assert (schedule.makespan_ms, schedule.span_ms) == (run.makespan_ms, run.span_ms)
    assert schedule.objective_ms == run.objective_ms(case.problem.objective)
    assert schedule.peak_bytes == tuple(
        device_peak_bytes(case.problem, device, row) for device, row in enumerate(case.programs)
    )
    assert schedule.host_peak_bytes == host_peak_bytes(*case)
    assert schedule.problem_hash == case.problem.problem_hash
    assert schedule.placement == case.problem.placement
    assert schedule.provenance is WHERE_FROM
    verify(case.problem, evaluate(*case, WHERE_FROM, bound_ms=0.0))


def test_a_run_that_the_caller_has_made_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same schedule, without another check or simulation."""
    given_problem = problem([stage()])
    run, schedule = simulate(given_problem, ROW), evaluate(given_problem, ROW, WHERE_FROM)
    for name in ("check", "simulate"):
        monkeypatch.delattr(import_module("optpipe.evaluate"), name)
    assert evaluate(given_problem, ROW, WHERE_FROM, run=run) == schedule


@pytest.mark.parametrize(
    ("bound", "gap", "status", "stopped_by"),
    [
        (None, None, "feasible", "time_limit"),
        (1.5, 0.5, "feasible", "time_limit"),
        (3.0, 0.0, "optimal", "optimal"),
        (3.0 - 1e-6, pytest.approx(1e-6 / 3), "optimal", "optimal"),
        (3.0 + 1e-9, 0.0, "optimal", "optimal"),
    ],
)
def test_optimal_is_what_the_gap_says(bound, gap, status, stopped_by) -> None:
    schedule = evaluate(
        problem([stage()]), ROW, WHERE_FROM, bound_ms=bound, stopped_by="time_limit"
    )
    assert (schedule.gap, schedule.status, schedule.stopped_by) == (gap, status, stopped_by)
    assert schedule.bound_ms == (bound and min(bound, 3.0))


def test_the_gap_is_that_of_the_objective() -> None:
    stages = [stage(0), stage(1, w=4)]
    rows = programs("0F0 0I0 0W0", "1F0 1I0 1W0")
    span = evaluate(problem(stages, objective="span"), rows, WHERE_FROM, bound_ms=4.2)
    makespan = evaluate(problem(stages, objective="makespan"), rows, WHERE_FROM, bound_ms=4.2)
    assert (span.makespan_ms, span.span_ms) == (7, 6)
    assert [span.gap, makespan.gap] == pytest.approx([0.3, 0.4])


def test_illegal_programs_are_refused_even_if_they_would_run() -> None:
    small = problem([stage()], [{"memory_bytes": 19}], m=2)
    with pytest.raises(IllegalScheduleError, match="0F1 takes device 0"):
        evaluate(small, programs("0F0 0F1 0B0 0B1"), WHERE_FROM)


def test_a_bound_above_the_objective_is_no_proof() -> None:
    """It would look like an optimum; one of the two is wrong."""
    with pytest.raises(ValueError, match=r"bound_ms = 3\.1: a bound may not exceed"):
        evaluate(problem([stage()]), ROW, WHERE_FROM, bound_ms=3.1)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ({"makespan_ms": 1.0}, "makespan_ms = 1.0: the programs have 3.0"),
        ({"makespan_ms": 3.0001}, "makespan_ms = 3.0001: the programs have 3.0"),
        ({"bound_ms": 3.1, "gap": 0.0, "status": "optimal"}, "bound_ms = 3.1: no bound exceeds"),
        ({"span_ms": 1.0}, "span_ms = 1.0: the programs have 3.0"),
        ({"peak_bytes": (1,)}, "peak_bytes"),
        ({"host_peak_bytes": {"host0": 7}}, "host_peak_bytes"),
        ({"objective": "span"}, "objective = span"),
        ({"gap": 0.0, "status": "optimal"}, "gap = 0.0"),
        ({"problem_hash": "sha256:0"}, "was made for problem sha256:0"),
    ],
)
def test_a_false_claim_is_refused(claim, said) -> None:
    """A record is edited by hand; its programs are still legal."""
    given = problem([stage()])
    true = evaluate(given, ROW, WHERE_FROM, bound_ms=1.5)
    with pytest.raises(ScheduleMismatchError, match=said):
        verify(given, true.model_copy(update=claim))


def test_the_modes_of_each_program_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, rows = everything_at_once()
    computed: list[Program] = []

    def counted(given: Problem, program: Program) -> CellModes:
        computed.append(program)
        return modes_of(given, program)

    for name in ("check", "simulate", "memory"):
        monkeypatch.setattr(import_module(f"optpipe.{name}"), "modes_of", counted)
    evaluate(whole, rows, WHERE_FROM)
    assert computed == list(rows)
