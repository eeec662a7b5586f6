"""The objective of the full-horizon model: the length, makespan or span."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe_solver.milp.highs import Linear
    from optpipe_solver.milp.horizon.variables import HorizonVariables

__all__ = ["length"]


def length(v: HorizonVariables) -> Linear:
    """Return the length in ms; `constraints.ends_within_length` gives it its meaning."""
    return v.length
