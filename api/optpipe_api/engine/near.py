"""Near problems: which of their programs are legal for a new problem, and which are the best.

Two problems of one shape are near if no time and no size differs by more than a quarter. Memory
limits may differ by any amount: they decide only whether programs are legal. The programs are
checked and simulated under the new problem, like those of a client.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from optpipe.check import find_violations
from optpipe.evaluate import evaluate
from optpipe.formats.json import load_schedule
from optpipe.schedule import Provenance
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["MAX_NEAR_CELLS", "MAX_NEAR_JOBS", "TOLERANCE", "best_start", "is_near"]

MAX_NEAR_CELLS = 20_000
"""Cells of all near problems of a job together: about a second, at 50 us each."""
MAX_NEAR_JOBS = 5
"""Near jobs of a job; the newest first."""
TOLERANCE = 0.25
"""Largest relative difference of a time or a size, to the larger of the two."""

_SIZES = ("_ms", "_bytes", "_gb_per_s")
_LIMIT = "memory_bytes"


def is_near(value: Any, other: Any, name: str = "") -> bool:
    """Return whether two problems of one shape, as JSON values, differ by at most `TOLERANCE`.

    Names of devices and stages may differ; the devices of a link may not.

    ``name``: of the field that has these values.
    """
    if name == _LIMIT:
        return True
    if name.endswith(_SIZES):
        if value is None or other is None:
            return value is other
        return bool(abs(value - other) <= TOLERANCE * max(abs(value), abs(other)))
    if name in ("from", "to", "half_duplex"):
        return bool(value == other)
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(
            is_near(value[key], other[key], key) for key in value
        )
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_near, value, other))
    return True


def best_start(
    problem: Problem, text: str, others: Sequence[tuple[str, str]]
) -> tuple[int, Schedule] | None:
    """Return the shortest legal schedule of near problems' programs, and the index of its pair.

    The bound is kept only if the problem is the same. None if no programs are near and legal.

    ``text``: the problem, as JSON text. ``others``: other problems and their schedules, of which no
    more are tried than `MAX_NEAR_CELLS` allows.
    """
    fields = json.loads(text)
    num_cells = len(problem.stages) * problem.num_microbatches
    best: tuple[int, Schedule] | None = None
    for index, (other, schedule_text) in enumerate(others[: MAX_NEAR_CELLS // num_cells]):
        if not is_near(fields, json.loads(other)):
            continue
        known = load_schedule(schedule_text)
        if find_violations(problem, known.programs):
            continue
        is_same = known.problem_hash == problem.problem_hash
        schedule = evaluate(
            problem,
            known.programs,
            Provenance(method=known.provenance.method, seed=known.provenance.seed),
            bound_ms=known.bound_ms if is_same else None,
            stopped_by="cancelled",
            run=simulate(problem, known.programs),
        )
        if best is None or schedule.objective_ms < best[1].objective_ms:
            best = index, schedule
    return best
