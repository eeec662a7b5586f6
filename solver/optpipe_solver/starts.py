"""Every start the solver has: families as they are, and fitted into the memory limits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe.check import find_violations
from optpipe.simulate import simulate
from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.fit.fit import fit_memory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.families.not_applicable import Reason

__all__ = ["Start", "all_starts"]


@dataclass(frozen=True, slots=True)
class Start:
    """Programs of a method, or the reason why it has none.

    ``legal`` is False for programs over a memory limit (they are shown, never returned);
    ``wants`` is why there are none, as a code.
    """

    method: str
    programs: Programs | None
    objective_ms: float
    legal: bool
    seconds: float
    reason: str = ""
    wants: Reason | None = None


def all_starts(problem: Problem, methods: Collection[str] | None = None) -> Iterator[Start]:
    """Yield the programs of every family, and, where they exceed memory, a fitted copy.

    Parameters
    ----------
    problem
        Any problem.
    methods
        Names of families; None for all.
    """
    for family in FAMILIES:
        if methods is not None and family.name not in methods:
            continue
        began = time.perf_counter()
        try:
            programs = family.build(problem)
        except NotApplicable as reason:
            seconds = time.perf_counter() - began
            yield Start(family.name, None, 0.0, False, seconds, str(reason), reason.reason)
            continue
        start = _judged(problem, family.name, programs, began)
        yield start
        if not start.legal:
            began = time.perf_counter()
            fitted = fit_memory(problem, programs)
            if fitted is not None:
                yield _judged(problem, f"{family.name}+offload", fitted, began)


def _judged(problem: Problem, method: str, programs: Programs, began: float) -> Start:
    legal = not find_violations(problem, programs)
    objective = simulate(problem, programs).objective_ms(problem.objective)
    return Start(method, programs, objective, legal, time.perf_counter() - began)
