"""Every start the solver has: families as they are, and fitted into the memory limits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.fit.fit import fit
from optpipe_solver.fit.jobs import Frame
from optpipe_solver.fit.limits import is_compute_only, keeps_limits
from optpipe_solver.improve.compiled.problem import CompiledProblem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.families.not_applicable import Reason
    from optpipe_solver.families.registry import Family
    from optpipe_solver.improve.compiled.problem import Rows

__all__ = ["Start", "all_starts"]

_LARGE = 20_000
"""Compute actions beyond which no time is spent on copies that are unlikely to win."""
_LOST = 3


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
    """Yield the programs of every family, then fitted copies of those that exceed memory.

    The copies come in the order of what they were before, the shortest first. Of a large problem
    only those are made whose original is shorter than the best legal start so far (offload rarely
    makes anything shorter) and as long as no other, and none after three in a row that lose.
    Legality and time are asked of compiled code, which says the same as the reference (tested);
    families are wrong about nothing but memory.

    Parameters
    ----------
    problem
        Any problem.
    methods
        Names of families; None for all.
    """
    judge = _Judge(problem)
    over: list[tuple[Start, Rows]] = []
    best_ms = inf
    for family in FAMILIES:
        if methods is None or family.name in methods:
            start, rows = judge.build(family)
            yield start
            if start.legal:
                best_ms = min(best_ms, start.objective_ms)
            elif rows is not None:
                over.append((start, rows))
    lost, seen = 0, set()
    for start, rows in sorted(over, key=lambda item: item[0].objective_ms):
        if judge.is_large and (start.objective_ms >= best_ms or lost == _LOST):
            return
        if judge.is_large and start.objective_ms in seen:
            continue
        seen.add(start.objective_ms)
        fitted = judge.fit(start.method, rows)
        if fitted is not None:
            yield fitted
            lost = lost + 1 if fitted.objective_ms >= best_ms else 0
            best_ms = min(best_ms, fitted.objective_ms)


class _Judge:
    """Builds, measures and fits, for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.compiled = CompiledProblem.of(problem)
        self.is_large = 3 * len(problem.stages) * problem.num_microbatches > _LARGE

    def build(self, family: Family) -> tuple[Start, Rows | None]:
        """Return a family's start, and its programs as integers if it has any."""
        began = time.perf_counter()
        try:
            programs = family.build(self.problem)
        except NotApplicable as why:
            seconds = time.perf_counter() - began
            return Start(family.name, None, 0.0, False, seconds, str(why), why.reason), None
        rows = self.compiled.encode(programs)
        makespan_ms, span_ms = self.compiled.length_ms(rows)
        length_ms = makespan_ms if self.problem.objective == "makespan" else span_ms
        legal = length_ms < inf and keeps_limits(self.compiled, rows)
        return Start(family.name, programs, length_ms, legal, time.perf_counter() - began), rows

    def fit(self, method: str, rows: Rows) -> Start | None:
        """Return the start with what must be offloaded or recomputed, if that can be."""
        began = time.perf_counter()
        if not is_compute_only(self.compiled, rows):
            return None
        fitted = fit(Frame(self.problem, rows))
        if fitted is None:
            return None
        programs = fitted.programs()
        seconds = time.perf_counter() - began
        return Start(f"{method}+offload", programs, fitted.objective_ms, True, seconds)
