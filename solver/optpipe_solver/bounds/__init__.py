"""Proven lower bounds of the objective, each with its argument; times in ms.

Every bound is at most the objective of every legal schedule: any placement, fused or split
backwards, offload, recompute, unequal stages, devices and limits. All bounds share the model in
`relaxation`. `heads` and `tails` count events in it; `window` and `energy` compute the bounds.
docs/bounds.md has them in mathematics.
"""

from __future__ import annotations

from optpipe_solver.bounds.bound import Bound, lower_bound, lower_bounds, work_bound
from optpipe_solver.bounds.relaxation import Paths

__all__ = ["Bound", "Paths", "lower_bound", "lower_bounds", "work_bound"]
