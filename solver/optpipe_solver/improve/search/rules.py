"""What a search may do and how it judges, fixed for one problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.improve.compiled import kernel
from optpipe_solver.improve.times.propagate import can_propagate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.problem import Problem, Stage
    from optpipe_solver.improve.compiled.problem import CompiledProblem

__all__ = ["Rules", "least_tails", "rules_of"]


class Rules(NamedTuple):
    """Facts of a problem that decide how its search works.

    ``incremental``: times are kept up to date move by move (see `propagate.can_propagate`), else
    simulated from the start. ``fused``: stages whose fused backward is faster than I and W.
    ``tails``: see `least_tails`. ``mean_pass_ms``: the mean duration of F, I and W over all stages;
    1 where all are 0. ``offloads``: devices with a stage that can be offloaded.
    """

    by_span: bool
    incremental: bool
    has_sync: bool
    hosts_limited: bool
    fused: NDArray[np.bool_]
    tails: NDArray[np.float64]
    mean_pass_ms: float
    offloads: NDArray[np.bool_]


def rules_of(compiled: CompiledProblem) -> Rules:
    """Return the rules of a problem."""
    problem, times = compiled.problem, compiled.times
    return Rules(
        by_span=problem.objective == "span",
        incremental=can_propagate(times),
        has_sync=bool((times.grad_sync > 0).any()),
        hosts_limited=any(host.memory_bytes is not None for host in problem.hosts),
        fused=np.array([_saves_by_fusing(stage) for stage in problem.stages]),
        tails=least_tails(problem),
        mean_pass_ms=_mean_pass_ms(compiled),
        offloads=_offloads(compiled),
    )


def _offloads(compiled: CompiledProblem) -> NDArray[np.bool_]:
    flags = np.zeros(len(compiled.problem.devices), dtype=np.bool_)
    np.logical_or.at(flags, compiled.times.device_of, compiled.memory.may_offload)
    return flags


def _mean_pass_ms(compiled: CompiledProblem) -> float:
    mean = float(np.mean(compiled.times.duration[: 3 * compiled.times.num_cells]))
    return mean if mean > 0 else 1.0


def _saves_by_fusing(stage: Stage) -> bool:
    return stage.fused_backward_ms < stage.backward_input_ms + stage.backward_weight_ms


def least_tails(problem: Problem) -> NDArray[np.float64]:
    """Return the least time in ms from an action's end to the end of all, by kind and stage.

    A micro-batch still has to run the forwards behind it, then its backwards to the first stage;
    where a backward is split, its own W too. Links count, waiting does not: a lower bound. A
    thousand-millionth is taken off for rounding.
    """
    stages = problem.stages
    tails = np.zeros((8, len(stages)))
    for s, stage in enumerate(stages):
        weight = stage.backward_weight_ms
        onward = problem.boundary_ms[s - 1][1] + _backward_ms(problem, tails, s - 1) if s else 0.0
        tails[kernel.BACKWARD_INPUT, s] = max(weight, onward)
        tails[kernel.FULL_BACKWARD, s] = onward
    for s in range(len(stages) - 1, -1, -1):
        if s == len(stages) - 1:
            tails[kernel.FORWARD, s] = _backward_ms(problem, tails, s)
        else:
            there = problem.boundary_ms[s][0] + stages[s + 1].forward_ms
            tails[kernel.FORWARD, s] = there + tails[kernel.FORWARD, s + 1]
    return tails * (1 - 1e-9)


def _backward_ms(problem: Problem, tails: NDArray[np.float64], s: int) -> float:
    """Return the least time from the start of a stage's backward to the end of all."""
    stage = problem.stages[s]
    split = stage.backward_input_ms + float(tails[kernel.BACKWARD_INPUT, s])
    return min(split, stage.fused_backward_ms + float(tails[kernel.FULL_BACKWARD, s]))
