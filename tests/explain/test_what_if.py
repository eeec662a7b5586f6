"""What can be asked of a schedule: changed problems with legal starts, and what is not asked."""

import pytest
from hypothesis import given

from optpipe import check
from optpipe.explain.what_if import Unasked, WhatIfAnswer, WhatIfQuestion, as_it_is, questions
from tests.building import bus, offloadable, problem, programs, stage
from tests.strategies import Case, cases

ROWS = programs("0F0 0B0 0F1 0B1")


@given(cases(menus=True))
def test_every_start_is_legal_for_its_changed_problem(case: Case) -> None:
    for question in questions(case.problem, case.programs):
        if isinstance(question, WhatIfQuestion):
            check(question.problem, question.start)
            assert question.problem.problem_hash != case.problem.problem_hash
    same = as_it_is(case.problem, case.programs)
    assert (same.problem, same.start) == (case.problem, case.programs)


def test_more_cells_than_there_may_be_are_not_asked_for() -> None:
    """One stage, two micro-batches: four cells when they are twice as many."""
    posed = problem([stage(0)], m=2)
    *_, refused = questions(posed, ROWS, max_cells=3)
    assert isinstance(refused, Unasked)
    assert refused.sentence().endswith("stages x micro-batches may not exceed 3")
    *_, question = questions(posed, ROWS, max_cells=4)
    assert isinstance(question, WhatIfQuestion)
    assert (question.problem.num_microbatches, len(question.start[0])) == (4, 8)


def test_the_bus_is_asked_about_where_something_crosses_it() -> None:
    """A stage that cannot be offloaded gains nothing by a faster one."""
    _, refused, _ = questions(problem([stage(0)], m=2), ROWS)
    _, question, _ = questions(problem([offloadable(0)], [bus()], m=2), ROWS)
    assert refused.name == question.name == "faster-pcie"
    assert isinstance(refused, Unasked)
    assert isinstance(question, WhatIfQuestion)
    assert question.problem.devices[0].d2h_gb_per_s == 1.2


# What an answer says: the gain per micro-batch, and what is proven of it.


def answer(after_ms: float, bound_ms: float | None, num_after: int = 4) -> WhatIfAnswer:
    """100 ms for four micro-batches without the change."""
    return WhatIfAnswer(
        name="more",
        text="more",
        before_ms=100.0,
        num_before=4,
        after_ms=after_ms,
        num_after=num_after,
        bound_ms=bound_ms,
        is_never_worse=True,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (answer(100, 100), "more: 100.0 ms as before; proven: nothing can be gained"),
        (answer(90, 90), "more: 100.0 -> 90 ms, 10.0% less; proven: that is the best"),
        (answer(90, 80), "more: 100.0 -> 90 ms, 10.0% less; no schedule gains more than 20"),
        (answer(100, 0), "more: 100.0 ms as before; nothing is proven"),
        (answer(110, None), "more: 100.0 -> 110.0 ms, 10.0% more; nothing is proven"),
        (answer(200, 150, 8), "more: 25 ms per micro-batch as before; no schedule gains more than"),
        (answer(180, 180, 8), "more: 25 -> 22.5 ms per micro-batch, 10.0% less; proven: that is"),
    ],
)
def test_gain_and_proof_in_words(given: WhatIfAnswer, said: str) -> None:
    """A bound of the changed problem is a proof of what it can gain at most."""
    assert given.sentence().startswith(said)


def test_numbers_say_the_same_as_words() -> None:
    said = answer(180, 160, 8).as_json()
    assert said["gain"] == pytest.approx(0.1)
    assert said["most_gain"] == pytest.approx(0.2)
    assert (said["buys_nothing"], said["microbatches_after"]) == (False, 8)
    assert answer(90, None).most_gain is None
    assert answer(0, 0).is_proven
