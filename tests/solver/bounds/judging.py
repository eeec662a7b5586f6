"""A bound is judged by schedules: none may be shorter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe import find_violations, simulate
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.families import FAMILIES, NotApplicable
from tests.building import problem, stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe import Problem


def assert_below(given: Problem, length_ms: float) -> None:
    """Every argument alone proves no more than a length that exists; rounding aside."""
    for bound in lower_bounds(given):
        assert bound.ms <= length_ms * (1 + 1e-9) + 1e-9, bound.method


def of_families(given: Problem) -> Iterator[float]:
    """The objectives of all families that apply and fit."""
    for family in FAMILIES:
        try:
            programs = family.build(given)
        except NotApplicable:
            continue
        if not find_violations(given, programs):
            yield simulate(given, programs).objective_ms(given.objective)


def line(p: int, m: int, activations: float, objective: str = "makespan") -> Problem:
    """The Zero Bubble paper's 6.2B profile on p devices with so many activations of memory."""
    sizes = {"activation_bytes": 66_000, "weight_context_bytes": 32_000}
    return problem(
        [stage(d, 29.718, 29.444, 19.927, **sizes) for d in range(p)],
        [{"memory_bytes": int(activations * 66_000)}] * p,
        m=m,
        objective=objective,
        links=[{"from": d, "to": d + 1, "latency_ms": 0.527} for d in range(p - 1)],
    )
