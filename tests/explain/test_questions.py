"""What can be asked of a schedule: changed problems with legal starts, and what is not asked."""

from __future__ import annotations

from hypothesis import given

from optpipe import check
from optpipe.explain.questions import Question, Unasked, as_it_is, questions
from tests.building import bus, offloadable, problem, programs, stage
from tests.strategies import Case, cases

ROWS = programs("0F0 0B0 0F1 0B1")


@given(cases())
def test_every_start_is_legal_for_its_changed_problem(case: Case) -> None:
    """And the problem is changed indeed."""
    for question in questions(case.problem, case.programs):
        if isinstance(question, Question):
            check(question.problem, question.start)
            assert question.problem.problem_hash != case.problem.problem_hash
    same = as_it_is(case.problem, case.programs)
    assert (same.problem, same.start) == (case.problem, case.programs)


def test_more_cells_than_there_may_be_are_not_asked_for() -> None:
    """One stage, two micro-batches: four cells when they are twice as many."""
    made = problem([stage(0)], m=2)
    *_, refused = questions(made, ROWS, max_cells=3)
    assert isinstance(refused, Unasked)
    assert refused.sentence().endswith("stages x micro-batches may not exceed 3")
    *_, asked = questions(made, ROWS, max_cells=4)
    assert isinstance(asked, Question)
    assert (asked.problem.num_microbatches, len(asked.start[0])) == (4, 8)


def test_the_bus_is_asked_about_where_something_crosses_it() -> None:
    """A stage that cannot be offloaded gains nothing by a faster one."""
    _, refused, _ = questions(problem([stage(0)], m=2), ROWS)
    _, asked, _ = questions(problem([offloadable(0)], [bus()], m=2), ROWS)
    assert refused.name == asked.name == "faster-pcie"
    assert isinstance(refused, Unasked)
    assert isinstance(asked, Question)
    assert asked.problem.devices[0].d2h_gb_per_s == 1.2
