"""What a little more of something would buy: the changed problem is solved, not guessed at.

`optpipe.explain.what_if` says what is asked, why an answer is never worse than its start, and what
it means. Here they are asked one after the other. Every answer is measured against the same search
for the problem as it is, so that what a second search finds anyway is not put down to the change;
and every search begins with the best schedule known without the change. The search keeps that start
if it finds nothing better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optpipe.explain.what_if import (
    AS_IT_IS,
    Unasked,
    WhatIfAnswer,
    WhatIfQuestion,
    as_it_is,
    questions,
)
from optpipe_solver.solve import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule
    from optpipe_solver.result import Result

__all__ = ["AS_IT_IS", "Unasked", "WhatIf", "what_if"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf(WhatIfAnswer):
    """The answer to one question, with the schedule it came from.

    Attributes
    ----------
    before_ms
        Of the given schedule where the question is `AS_IT_IS`, else of that answer's schedule.
    problem, schedule
        The changed problem, and the best schedule found for it.
    """

    problem: Problem
    schedule: Schedule

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can say, problem and schedule included."""
        return {
            # A dataclass with slots is made anew: super() alone would look for the first one.
            **WhatIfAnswer.as_json(self),
            "problem": self.problem.model_dump(mode="json", by_alias=True),
            "schedule": self.schedule.model_dump(mode="json"),
        }


def what_if(
    problem: Problem,
    programs: Programs,
    objective_ms: float,
    *,
    time_limit_s: float = 10.0,
    threads: int = 1,
    seed: int = 0,
    should_stop: Callable[[], bool] | None = None,
    solver: Callable[..., Result] | None = None,
) -> Iterator[WhatIf | Unasked]:
    """Yield what a second search brings, and what each change brings beyond that.

    Parameters
    ----------
    problem, programs, objective_ms
        The problem, legal programs for it, and their makespan or span.
    time_limit_s
        Seconds for each search.
    threads, seed, should_stop
        As `solve`; once ``should_stop`` is true, no further question is asked.
    solver
        What solves, with the arguments and the result of `solve`, which it is when left out.

    Raises
    ------
    InputError
        As `solve`.
    """
    search = solver or solve
    stop = should_stop or (lambda: False)
    options: dict[str, Any] = {
        "time_limit_s": time_limit_s,
        "threads": threads,
        "seed": seed,
        "should_stop": stop,
    }

    def answer(question: WhatIfQuestion, before_ms: float) -> WhatIf:
        found = search(
            question.problem, start=question.start, start_method="given schedule", **options
        ).schedule
        if found is None:
            raise AssertionError(f"{question.name}: the start is legal, and the solver refused it")
        return WhatIf(
            name=question.name,
            text=question.text,
            before_ms=before_ms,
            num_before=problem.num_microbatches,
            after_ms=found.objective_ms,
            num_after=question.problem.num_microbatches,
            bound_ms=found.bound_ms,
            is_never_worse=question.is_never_worse,
            problem=question.problem,
            schedule=found,
        )

    base = answer(as_it_is(problem, programs), objective_ms)
    yield base
    if stop():
        return
    for question in questions(problem, base.schedule.programs):
        yield answer(question, base.after_ms) if isinstance(question, WhatIfQuestion) else question
        if stop():
            return
