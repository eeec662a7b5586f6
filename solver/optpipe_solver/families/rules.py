"""What a problem asks of passes executed one after the other, as arrays (`execution.Rules`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.families.execution import BACKWARD, WEIGHT, Rules

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.problem import Problem

__all__ = ["rules_in_bytes", "rules_of"]


def rules_in_bytes(problem: Problem, *, fused: bool = False) -> Rules:
    """Return the rules under the devices' limits, workspaces included; ``fused``: B for I and W."""
    stages = problem.stages
    activation = np.array([stage.activation_bytes for stage in stages], dtype=np.int64)
    context = np.array([stage.weight_context_bytes for stage in stages], dtype=np.int64)
    workspace = np.array(
        [
            [stage.forward_workspace_bytes for stage in stages],
            [
                stage.backward_workspace_bytes if fused else stage.backward_input_workspace_bytes
                for stage in stages
            ],
            [stage.backward_weight_workspace_bytes for stage in stages],
        ],
        dtype=np.int64,
    )
    after_backward = -activation if fused else context - activation
    room = [
        device.usable_bytes - problem.static_bytes_of(index)
        for index, device in enumerate(problem.devices)
    ]
    delta = np.array([activation, after_backward, -context])
    return rules_of(problem, delta, workspace, np.array(room), fused=fused)


def rules_of(
    problem: Problem,
    delta: NDArray[np.int64],
    workspace: NDArray[np.int64],
    limit: NDArray[np.int64],
    *,
    fused: bool,
) -> Rules:
    """Return the rules for what each pass adds, its workspace, and a limit per device."""
    stages = problem.stages
    widest = max(len(held) for held in problem.stages_of)
    peak = np.maximum(delta, 0) + workspace
    finish = peak[:WEIGHT].copy()
    if not fused:
        finish[BACKWARD] = np.maximum(finish[BACKWARD], delta[BACKWARD] + peak[WEIGHT])
    backward = [stage.fused_backward_ms if fused else stage.backward_input_ms for stage in stages]
    return Rules(
        device_of=np.array(problem.placement, dtype=np.int64),
        held=np.array(
            [[*held, *[0] * (widest - len(held))] for held in problem.stages_of], dtype=np.int64
        ),
        num_held=np.array([len(held) for held in problem.stages_of], dtype=np.int64),
        duration=np.array(
            [
                [stage.forward_ms for stage in stages],
                backward,
                [stage.backward_weight_ms for stage in stages],
            ],
            dtype=np.float64,
        ),
        delta=delta.astype(np.int64),
        peak=peak.astype(np.int64),
        finish=finish.astype(np.int64),
        there=np.array([there for there, _ in problem.boundary_ms], dtype=np.float64),
        back=np.array([back for _, back in problem.boundary_ms], dtype=np.float64),
        limit=limit.astype(np.int64),
        split=0 if fused else 1,
    )
