"""Measures one stage: what its passes take and hold, as a `Stage` of a problem."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from optpipe.problem import Stage
from optpipe.runtime.offload import DEFAULT_MIN_BYTES, Offloader
from optpipe.runtime.saved import SavedActivations
from optpipe.runtime.weight_gradients import WeightGradients, split_linears

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StageMeasurement", "measure_stage"]

_ADAM_COPIES = 4
"""Weights, gradients, and the two moments."""


class StageMeasurement(NamedTuple):
    """A stage's numbers, its output for the next one, and how fast its activations were copied."""

    stage: Stage
    output: Tensor
    copy_gb_per_s: float


def measure_stage(
    module: nn.Module,
    stage_input: Tensor,
    device_index: int,
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    repeats: int = 15,
) -> StageMeasurement:
    """Run a stage's passes on the CPU and return their medians and what they hold.

    Parameters
    ----------
    module
        The stage; its linear layers become `SplitLinear`.
    stage_input
        One micro-batch.
    device_index
        The device of the returned `Stage`.
    loss
        From output to loss, on the last stage.
    repeats
        Runs that the medians are taken of; two more come before them.
    """
    gradients = WeightGradients()
    split_linears(module, gradients)
    runs = [_run(module, stage_input, loss, gradients) for _ in range(repeats + 2)][2:]
    last = runs[-1]
    output_bytes = 0 if loss is not None else _bytes(last.output)
    boundary = (_bytes(stage_input) if stage_input.is_floating_point() else 0) + output_bytes
    stage = Stage(
        device=device_index,
        forward_ms=_median_ms([run.forward_s for run in runs]),
        backward_input_ms=_median_ms([run.backward_input_s for run in runs]),
        backward_weight_ms=_median_ms([run.backward_weight_s for run in runs]),
        activation_bytes=last.saved_bytes + boundary,
        weight_context_bytes=last.weight_context_bytes,
        offload_bytes=last.offload_bytes,
        static_bytes=_ADAM_COPIES * sum(_bytes(p) for p in module.parameters()),
        output_bytes=output_bytes,
    )
    copy_s = statistics.median([run.copy_s for run in runs])
    return StageMeasurement(stage, last.output, last.offload_bytes / copy_s / 1e9)


class _Run(NamedTuple):
    output: Tensor
    forward_s: float
    copy_s: float
    backward_input_s: float
    backward_weight_s: float
    saved_bytes: int
    offload_bytes: int
    weight_context_bytes: int


def _run(
    module: nn.Module,
    stage_input: Tensor,
    loss: Callable[[Tensor], Tensor] | None,
    gradients: WeightGradients,
) -> _Run:
    """Run F, OFFLOAD, RELEASE, RELOAD, I and W once."""
    received = stage_input.detach().requires_grad_(stage_input.is_floating_point())
    saved_bytes = _saved_bytes(module, received, loss)
    cell = (0, 0)
    offloader = Offloader({0: module}, received.device, [cell], min_bytes=DEFAULT_MIN_BYTES)
    start = time.perf_counter()
    with offloader.capture(cell, [received]):
        output = module(received)
        result = output if loss is None else loss(output)
    if loss is None:
        offloader.keep(cell, [output])
    forward_end = time.perf_counter()
    offloader.offload(cell)
    copy_end = time.perf_counter()
    offloader.release(cell)
    offloader.reload(cell)
    offloader.before_backward(cell)
    backward_start = time.perf_counter()
    with gradients.collect():
        result.backward(torch.ones_like(result))
        backward_end = time.perf_counter()
        context_bytes = gradients.held_bytes()
        make_weight_gradients = gradients.take()
    weight_start = time.perf_counter()
    make_weight_gradients()
    weight_end = time.perf_counter()
    return _Run(
        output=output.detach(),
        forward_s=forward_end - start,
        copy_s=copy_end - forward_end,
        backward_input_s=backward_end - backward_start,
        backward_weight_s=weight_end - weight_start,
        saved_bytes=saved_bytes,
        offload_bytes=offloader.offloaded_bytes,
        weight_context_bytes=context_bytes,
    )


def _saved_bytes(
    module: nn.Module, received: Tensor, loss: Callable[[Tensor], Tensor] | None
) -> int:
    """Return the bytes of all storages autograd saves, but for parameters and boundary tensors."""
    resident = [*module.parameters(), *module.buffers(), received]
    saved = SavedActivations("measured", resident, received.device, min_bytes=1)
    with saved.capture():
        output = module(received)
        result = output if loss is None else loss(output)
    if loss is None:
        saved.keep([output])
    total = sum(parcel.num_bytes for parcel in saved.parcels())
    del result
    return total


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _median_ms(seconds: list[float]) -> float:
    return float(f"{1e3 * statistics.median(seconds):.2g}")
