"""What each method contributed to a solve, from its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.schedule import Contribution

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe.schedule import TraceEntry

__all__ = ["contributions"]


def contributions(trace: Iterable[TraceEntry]) -> tuple[Contribution, ...]:
    """Sum up a trace by method, in the order of their first improvement.

    The first schedule gains nothing: there is none it is better than.
    """
    found: dict[str, Contribution] = {}
    objective: float | None = None
    bound = 0.0
    for entry in trace:
        known = found.get(entry.method, Contribution(method=entry.method))
        gain = 0.0
        if objective is not None and entry.objective_ms is not None:
            gain = max(0.0, objective - entry.objective_ms)
        risen = max(0.0, (entry.bound_ms or 0.0) - bound)
        found[entry.method] = known.model_copy(
            update={
                "objective_ms": entry.objective_ms
                if entry.objective_ms != objective
                else known.objective_ms,
                "objective_gain_ms": known.objective_gain_ms + gain,
                "bound_ms": entry.bound_ms if risen > 0 else known.bound_ms,
                "bound_gain_ms": known.bound_gain_ms + risen,
            }
        )
        objective, bound = entry.objective_ms, entry.bound_ms or bound
    return tuple(found.values())
