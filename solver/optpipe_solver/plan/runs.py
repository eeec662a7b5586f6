"""What every run of layers costs as one stage, per kind of device: the table the cutting reads."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from optpipe.fuse import fuse

if TYPE_CHECKING:
    from optpipe.model import Model
    from optpipe.problem import Stage

__all__ = ["Run", "RunTable", "least_bytes"]


class Run(NamedTuple):
    """One run of layers on one kind of device; ms and bytes per micro-batch, static aside.

    ``needed_bytes`` is the least that must be there while it works, ``held_bytes`` the least it
    keeps between F and its backward, offloaded or recomputed where that is less.
    """

    busy_ms: float
    forward_ms: float
    sync_ms: float
    needed_bytes: int
    held_bytes: int
    static_bytes: int


class RunTable:
    """All runs of a model's layers; devices that compute alike share their rows.

    Parameters
    ----------
    model
        With n layers: n (n + 1) / 2 runs per kind of device.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.num_layers = model.num_layers
        self.output_bytes = [stage.output_bytes for stage in model.stages_on[0]]
        known: dict[tuple[str | None, float, bool], list[list[Run]]] = {}
        self._rows = []
        for device, layers in zip(model.devices, model.stages_on, strict=True):
            kind = (device.type, device.speed, device.can_offload)
            if kind not in known:
                known[kind] = [
                    [_run(stage, can_offload=device.can_offload) for stage in _from(layers, start)]
                    for start in range(len(layers))
                ]
            self._rows.append(known[kind])

    def run(self, device: int, start: int, end: int) -> Run:
        """Return the run of layers start, ..., end - 1 on a device."""
        return self._rows[device][start][end - start - 1]


def _from(layers: tuple[Stage, ...], start: int) -> list[Stage]:
    """Every run that starts with one layer, shortest first."""
    return list(accumulate(layers[start:], fuse))


def _run(stage: Stage, *, can_offload: bool) -> Run:
    held, needed = least_bytes(stage, can_offload=can_offload)
    return Run(
        busy_ms=stage.busy_ms,
        forward_ms=stage.forward_ms,
        sync_ms=stage.grad_sync_ms,
        needed_bytes=needed,
        held_bytes=held,
        static_bytes=stage.static_bytes,
    )


def least_bytes(stage: Stage, *, can_offload: bool) -> tuple[int, int]:
    """Return the least bytes a stage holds between its passes, and needs during them.

    The argument is `optpipe_solver.smallest_memory`'s for one stage: on a device with one stage
    the second number is exactly what decides whether a schedule exists.
    """
    full, context = stage.activation_bytes, stage.weight_context_bytes
    split = max(
        max(full, context) + stage.backward_input_workspace_bytes,
        context + stage.backward_weight_workspace_bytes,
    )
    backward = min(split, full + stage.backward_workspace_bytes)
    needed = max(full + stage.forward_workspace_bytes, backward)
    held = full - stage.offload_bytes if can_offload else full
    if stage.checkpoint_bytes is not None:
        first = stage.checkpoint_bytes + stage.forward_workspace_bytes
        again = full + stage.recompute_workspace_bytes
        needed = min(needed, max(first, again, backward))
        held = min(held, stage.checkpoint_bytes)
    return held, needed
