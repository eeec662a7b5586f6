"""The numbers behind a picture's title."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.plot.units import format_ms, format_share
from optpipe.timeline import bubble_rate

if TYPE_CHECKING:
    from optpipe.plot.bars import Drawing
    from optpipe.problem import Problem

__all__ = ["gap_of", "headline"]


def headline(problem: Problem, drawing: Drawing, bound_ms: float | None) -> str:
    """Return makespan, span where that is the objective, bubble; bound and gap where known.

    A bound of 0 is always true and says nothing.
    """
    told = [f"makespan {format_ms(drawing.makespan_ms)} ms"]
    length = drawing.makespan_ms
    if problem.objective == "span":
        told.append(f"span {format_ms(drawing.span_ms)} ms")
        length = drawing.span_ms
    told.append(f"bubble {format_share(bubble_rate(problem, length))}")
    if bound_ms:
        told.append(f"bound {format_ms(bound_ms)} ms")
        told.append(f"gap {format_share(gap_of(length, bound_ms))}")
    return ", ".join(told)


def gap_of(objective_ms: float, bound_ms: float) -> float:
    """Return (objective - bound) / objective; 0 for an objective of 0."""
    return (objective_ms - bound_ms) / objective_ms if objective_ms > 0 else 0.0
