"""Compiled: how promising the states of a layer of `beam` are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.exact.journey_kernel import State, survey
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from optpipe_solver.exact.journey_kernel import Desk
    from optpipe_solver.exact.journey_layers import Layer
    from optpipe_solver.exact.road import Road

__all__ = ["rate"]


@lean
def rate(road: Road, layer: Layer, desk: Desk, rates: NDArray[np.int64]) -> None:
    """Write the rate of every row, the lower the more promising; the desk is written to.

    It is the lower bound of the end, and as many such bounds agree, the mean over the devices of
    when each could have all its work done if it never waited again: that is what idle time and
    RECOMPUTEs have cost so far.
    """
    devices = len(road.room)
    for row in range(layer.size[0]):
        state = State(layer.codes[row], layer.weights[row], layer.times[row])
        survey(road, state, desk)
        total = 0
        for device in range(devices):
            total += state.times[1 + device] + desk.owed[device]
        for s in range(len(road.forward)):
            total += (road.num_microbatches - desk.forwards[s]) * road.forward[s]
            total += (road.num_microbatches - desk.gradients[s]) * road.gradient[s]
            total += (road.num_microbatches - state.weights[s]) * road.weight[s]
        rates[row] = layer.end[row] + total // devices
