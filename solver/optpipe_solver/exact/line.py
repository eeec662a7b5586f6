"""A problem in whole numbers of a unit of time, for `kernel`."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.bounds.tails import tails
from optpipe_solver.bounds.turnover import drain
from optpipe_solver.exact.kernel import Line
from optpipe_solver.milp.horizon.grid import grid_ms
from optpipe_solver.milp.horizon.items import fusing_may_pay

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from optpipe.problem import Problem, Stage

    Ints = NDArray[np.int64]

__all__ = ["line_of"]

_STEPS = 1e12
"""Units in the horizon, or in a ms if that is longer, where times have no common divisor."""

_ROUNDING = 1e-6
"""Share of a unit that sums of times in ms may be off."""

_SLOTS, _DECAYS, _PASSES = 512, 12, 5
"""Of the urgency: its slots, over so many decays by a factor of e, each as long as so many passes
on average. On `loop2-equal-p8-m16-4.5a` of the benchmarks 3 to 10 passes need the fewest states,
which are a fifth of those without urgency (measured)."""


def line_of(problem: Problem, horizon_ms: float) -> Line:
    """Return the problem with every time rounded down to whole units, and so the horizon.

    The unit divides all times where there is such a one; then nothing is rounded, and a schedule
    within the horizon lasts whole units. Else it is so small that rounding costs 1e-12 per pass of
    the horizon; then a schedule within the horizon is one of the rounded problem too, and no
    longer: times only shrink.
    """
    unit = grid_ms(problem) or max(1.0, horizon_ms) / _STEPS
    model = relaxed(problem)
    behind = tails(model, drain(model), np.zeros(len(problem.stages)))
    stages = problem.stages
    passes = _passes(problem, unit)
    length = max(float(passes.mean()), 1.0)
    return Line(
        num_microbatches=problem.num_microbatches,
        device=np.array(problem.placement, dtype=np.int64),
        forward=_units((s.forward_ms for s in stages), unit),
        split_i=_units((s.backward_input_ms for s in stages), unit),
        split_w=_units((s.backward_weight_ms for s in stages), unit),
        fused=_units((s.fused_backward_ms for s in stages), unit),
        gradient=_units(model.gradient, unit),
        weight=_units(model.weight, unit),
        may_fuse=np.array([fusing_may_pay(problem, s) for s in range(len(stages))]),
        activation=_whole(s.activation_bytes for s in stages),
        context=_whole(s.weight_context_bytes for s in stages),
        workspace=_workspace(stages),
        room=_whole(
            held.usable_bytes - problem.static_bytes_of(device)
            for device, held in enumerate(problem.devices)
        ),
        there=_units(model.there, unit),
        back=_units(model.back, unit),
        last_f=_units(behind.forward.ravel(), unit).reshape(behind.forward.shape),
        last_i=_units(behind.gradient.ravel(), unit).reshape(behind.gradient.shape),
        last_w=_units(behind.weight.ravel(), unit).reshape(behind.weight.shape),
        shortest=int(passes.min()),
        horizon=floor(horizon_ms / unit + _ROUNDING),
        slots=_SLOTS / (_DECAYS * _PASSES * length),
        urgency=length * np.exp(-_DECAYS / _SLOTS * np.arange(_SLOTS)),
    )


def _passes(problem: Problem, unit: float) -> Ints:
    """Return the times of F, I, W and, where it may be used, B of all stages."""
    times = [
        [s.forward_ms for s in problem.stages],
        [s.backward_input_ms for s in problem.stages],
        [s.backward_weight_ms for s in problem.stages],
        [s.fused_backward_ms for n, s in enumerate(problem.stages) if fusing_may_pay(problem, n)],
    ]
    return _units((time for row in times for time in row), unit)


def _workspace(stages: Sequence[Stage]) -> Ints:
    rows = [
        [s.forward_workspace_bytes for s in stages],
        [s.backward_input_workspace_bytes for s in stages],
        [s.backward_weight_workspace_bytes for s in stages],
        [s.backward_workspace_bytes for s in stages],
    ]
    return np.array(rows, dtype=np.int64)


def _units(values: Iterable[float], unit: float) -> Ints:
    return _whole(value / unit + _ROUNDING for value in values)


def _whole(values: Iterable[float]) -> Ints:
    return np.array([int(value) for value in values], dtype=np.int64)
