"""Plans for less memory than there is, so that a rehearsal has to offload or recompute."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe import Problem

__all__ = ["with_room"]


def with_room(problem: Problem, activations: float) -> Problem:
    """Return the problem with memory for only so many activations per device."""
    devices = []
    for stage, device in zip(problem.stages, problem.devices, strict=True):
        largest = max(stage.activation_bytes, stage.weight_context_bytes)
        workspace = max(stage.forward_workspace_bytes, stage.backward_input_workspace_bytes)
        memory = device.reserved_bytes + stage.static_bytes + workspace + int(activations * largest)
        devices.append(device.model_copy(update={"memory_bytes": memory}))
    return problem.model_copy(update={"devices": tuple(devices)})
