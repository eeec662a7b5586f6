"""What two neighbouring runs of layers are when they are one stage: the one meaning of a merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe.problem import Stage

__all__ = ["fuse"]

_SUMS = (
    "forward_ms",
    "backward_input_ms",
    "backward_weight_ms",
    "grad_sync_ms",
    "activation_bytes",
    "weight_context_bytes",
    "offload_bytes",
    "static_bytes",
)
_LARGER = (
    "backward_weight_workspace_bytes",
    "backward_workspace_bytes",
    "recompute_workspace_bytes",
)


def fuse(left: Stage, right: Stage) -> Stage:
    """Return the stage of two neighbouring runs of layers, on the device of the left one.

    A longer run is a fold from its first layer on. The rule, field by field:

    * Times are sums. ``backward_ms`` stays None where both are, else it is the sum of the fused
      durations. ``grad_sync_ms`` is a sum: one lane reduces one after the other.
    * ``activation_bytes`` (which include a layer's received input), ``weight_context_bytes``,
      ``offload_bytes`` and ``static_bytes`` are sums; ``output_bytes`` is the right one's.
    * A run can be recomputed where all of it can. ``recompute_ms`` is the sum. F keeps the left
      checkpoint, and of the right one only what exceeds the left's output: that output comes
      back with the recomputation. If checkpoints are inputs, this is the first layer's input.
    * Workspaces are the larger: layers run one by one, and bytes only grow (F, RECOMPUTE) or only
      fall (W, B) meanwhile, so that max(before, after) + workspace covers every layer. Two add:
      In I each layer's activation turns into its weight context, and the bytes in between may
      exceed both ends; ``backward_input_workspace_bytes`` holds exactly what they do. In an F
      that keeps a checkpoint only, the input of the right layer is alive while that layer runs.
    """
    totals = {name: getattr(left, name) + getattr(right, name) for name in _SUMS}
    larger = {name: max(getattr(left, name), getattr(right, name)) for name in _LARGER}
    unfused = left.backward_ms is None and right.backward_ms is None
    recompute = None
    if left.recompute_ms is not None and right.recompute_ms is not None:
        recompute = left.recompute_ms + right.recompute_ms
    inside = max(
        left.activation_bytes + _input_backward_peak(right),
        _input_backward_peak(left) + right.weight_context_bytes,
    )
    ends = max(totals["activation_bytes"], totals["weight_context_bytes"])
    return left.model_copy(
        update={
            **totals,
            **larger,
            "backward_ms": None if unfused else left.fused_backward_ms + right.fused_backward_ms,
            "recompute_ms": recompute,
            "checkpoint_bytes": _fused_checkpoint(left, right),
            "output_bytes": right.output_bytes,
            "forward_workspace_bytes": _fused_forward_workspace(left, right),
            "backward_input_workspace_bytes": inside - ends,
        }
    )


def _input_backward_peak(stage: Stage) -> int:
    """Largest bytes while I runs, from the activation it starts with."""
    ends = max(stage.activation_bytes, stage.weight_context_bytes)
    return ends + stage.backward_input_workspace_bytes


def _fused_forward_workspace(left: Stage, right: Stage) -> int:
    input_bytes = 0
    if left.checkpoint_bytes is not None and right.checkpoint_bytes is not None:
        input_bytes = min(left.output_bytes, right.checkpoint_bytes)
    return max(left.forward_workspace_bytes, right.forward_workspace_bytes + input_bytes)


def _fused_checkpoint(left: Stage, right: Stage) -> int | None:
    if left.checkpoint_bytes is None or right.checkpoint_bytes is None:
        return None
    return left.checkpoint_bytes + max(0, right.checkpoint_bytes - left.output_bytes)
