"""The one way this model writes "if": a big-M row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.milp.highs import at_least

if TYPE_CHECKING:
    from optpipe_solver.milp.highs import Constraint, Linear

__all__ = ["relaxed"]


def relaxed(gap: Linear, holds: Linear, big: float) -> Constraint:
    """Return gap >= 0 where ``holds`` is 1, and nothing where it is 0 (big-M)."""
    return at_least(gap + max(0.0, big) * (1.0 - holds), 0.0)
