"""The objectives of the periodic model: shortest period, smallest memory, shortest way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from optpipe_solver.milp.highs import Linear
    from optpipe_solver.milp.periodic.variables import PeriodicVariables

__all__ = ["highest_rate", "largest_peak", "way"]


def highest_rate(v: PeriodicVariables) -> Linear:
    """Return minus the rate: the least of it is the shortest period."""
    return -1.0 * v.rate


def largest_peak(v: PeriodicVariables) -> Linear:
    """Return the largest peak of a device, its static bytes included, in units of bytes."""
    return v.peak


def way(v: PeriodicVariables) -> Linear:
    """Return the time from the first F of a micro-batch to its last I, in units.

    Warm-up and cool-down take as long: it is minimised at the period already found.
    """
    first, last = ActionType.FORWARD, ActionType.BACKWARD_INPUT
    return v.start(v.items.of[(0, 0), last]) - v.start(v.items.of[(0, 0), first])
