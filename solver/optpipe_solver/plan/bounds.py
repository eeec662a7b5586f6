"""What no cut and no placement of a model can beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.model import Model

__all__ = ["any_cut_bound", "load_weights", "weighted_work"]


def load_weights(model: Model, devices: Sequence[int]) -> list[float]:
    """Return a weight per device, inverse to its time for the whole model; their sum is 1.

    All 0 where a device has no work to do at all.
    """
    totals = [sum(stage.busy_ms for stage in model.stages_on[device]) for device in devices]
    if min(totals) <= 0:
        return [0.0] * len(totals)
    inverse = [1 / total for total in totals]
    return [value / sum(inverse) for value in inverse]


def weighted_work(model: Model, devices: Sequence[int]) -> list[float]:
    """Return, per layer, the least over the devices of weight x compute time in ms."""
    weights = load_weights(model, devices)
    busy = [[stage.busy_ms for stage in model.stages_on[device]] for device in devices]
    return [
        min(weight * ms for weight, ms in zip(weights, column, strict=True))
        for column in zip(*busy, strict=True)
    ]


def any_cut_bound(model: Model, devices: Sequence[int]) -> float:
    """Return a time in ms that no schedule of any cut on any placement on these devices beats.

    Load. Let t(l, d) be the compute time of one micro-batch in layer l on device d, and y(d) >= 0
    weights that sum to 1. The busiest device is at least as busy as the weighted mean of all, and
    in the mean layer l costs at least min over d of y(d) t(l, d), wherever it is. A stage's least
    compute time is never below the sum of its layers', as a minimum of sums is not below the sum
    of minima. Weights inverse to the devices' times for the whole model make this tight for
    devices that differ by a factor; any weights are valid.

    Path. One micro-batch goes forward and backward through all layers, one after the other.

    Both hold for makespan and, the load for every device and the path for the device of layer 0,
    for span.
    """
    path = [
        [
            stage.forward_ms + min(stage.backward_input_ms, stage.fused_backward_ms)
            for stage in model.stages_on[device]
        ]
        for device in devices
    ]
    one_by_one = float(sum(min(column) for column in zip(*path, strict=True)))
    return max(model.num_microbatches * sum(weighted_work(model, devices)), one_by_one)
