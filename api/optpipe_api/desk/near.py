"""Programs of near problems: which are legal here too, and which of them is the best.

Two problems are near when they have the same shape and no time and no size of one differs from the
other's by more than a quarter. What comes of it is never trusted: programs are checked and
simulated under the new problem, as if somebody had sent them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from optpipe.check import find_violations
from optpipe.evaluate import evaluate
from optpipe.formats.json_text import load_problem, load_schedule
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from optpipe_api.desk.readers import Reading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["TOLERANCE", "best_start", "is_near", "pack"]

TOLERANCE = 0.25
"""Largest relative difference of a time or a size, to the larger of the two."""

_SIZES = ("_ms", "_bytes", "_gb_per_s")


def is_near(problem: Any, other: Any) -> bool:
    """Whether two problems of one shape, JSON-like, differ by no more than `TOLERANCE`.

    Names do not matter; which device a link joins does.
    """
    if isinstance(problem, dict) and isinstance(other, dict):
        return problem.keys() == other.keys() and all(
            _is_near_field(name, problem[name], other[name]) for name in problem
        )
    if isinstance(problem, list) and isinstance(other, list):
        return len(problem) == len(other) and all(map(is_near, problem, other))
    return True


def _is_near_field(name: str, value: Any, other: Any) -> bool:
    if name.endswith(_SIZES):
        if value is None or other is None:
            return value is other
        return bool(abs(value - other) <= TOLERANCE * max(abs(value), abs(other)))
    if name in ("from", "to", "half_duplex"):
        return bool(value == other)
    return is_near(value, other)


def pack(problem: str, known: Iterable[tuple[str, str]]) -> bytes:
    """Return what `best_start` reads: a problem, and pairs of a problem and its schedule."""
    texts = [problem.encode(), *(text.encode() for pair in known for text in pair)]
    return json.dumps([len(text) for text in texts]).encode() + b"\n" + b"".join(texts)


def best_start(body: bytes) -> Reading:
    """Return the shortest legal schedule that near problems' programs make, and whose it is.

    Its ``index`` counts the pairs; None where there is none. A bound holds for the same problem
    only.
    """
    text, *others = _unpack(body)
    problem, fields = load_problem(text), json.loads(text)
    found = [
        (schedule.objective_ms, index, schedule)
        for index, (other, known) in enumerate(zip(others[::2], others[1::2], strict=True))
        if is_near(fields, json.loads(other))
        and (schedule := _transferred(problem, load_schedule(known))) is not None
    ]
    if not found:
        return Reading({"index": None})
    objective_ms, index, schedule = min(found, key=lambda item: item[:2])
    header = {
        "index": index,
        "objective_ms": objective_ms,
        "bound_ms": schedule.bound_ms,
        "method": schedule.provenance.method,
    }
    return Reading(header, (schedule.model_dump_json(by_alias=True),))


def _transferred(problem: Problem, known: Schedule) -> Schedule | None:
    """Return the schedule that known programs are here; None where they are illegal."""
    is_same = known.problem_hash == problem.problem_hash
    if find_violations(problem, known.programs):
        return None
    return evaluate(
        problem,
        known.programs,
        Provenance(method=known.provenance.method, seed=known.provenance.seed),
        bound_ms=known.bound_ms if is_same else None,
        stopped_by="cancelled",
        run=simulate(problem, known.programs),
    )


def _unpack(body: bytes) -> Iterator[str]:
    head, _, rest = body.partition(b"\n")
    start = 0
    for length in json.loads(head):
        yield rest[start : start + length].decode()
        start += length
