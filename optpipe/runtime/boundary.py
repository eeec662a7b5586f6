"""What crosses the stage boundaries: shapes and types, found by one forward without a graph.

torch would infer them by a forward and a backward of every stage, holding the graphs of all
chunks of a rank at once; here each stage runs once under ``no_grad``, on zeros, and leaves no trace
in its buffers or in the random state.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.runtime.agreement import attempt
from optpipe.runtime.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

__all__ = ["Shapes", "TensorShape", "as_tensors", "probe_pipeline", "probe_stage", "shapes_of"]


class TensorShape(NamedTuple):
    """Size and type of one boundary tensor; picklable, and equal where the tensors fit."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this shape for metadata, with gradients where it can have them."""
        return torch.empty(
            self.size, dtype=self.dtype, device=device, requires_grad=self.dtype.is_floating_point
        )

    def zeros(self, device: torch.device) -> Tensor:
        """Return zeros of this shape."""
        return torch.zeros(self.size, dtype=self.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.size).numel() * self.dtype.itemsize


Shapes = tuple[TensorShape, ...]
"""Shapes of what crosses one boundary."""


def as_tensors(values: object, what: str) -> tuple[Tensor, ...]:
    """Return a tensor, or a tuple or list of tensors, as a tuple.

    Raises
    ------
    PreflightError
        If it is anything else.
    """
    items = values if isinstance(values, tuple | list) else (values,)
    for item in items:
        if not isinstance(item, Tensor):
            raise PreflightError(
                f"{what} holds a {type(item).__name__}, but only tensors cross a stage boundary; "
                "give a tensor or a tuple of tensors"
            )
    return tuple(items)


def shapes_of(tensors: tuple[Tensor, ...]) -> Shapes:
    """Return the shapes of tensors."""
    return tuple(TensorShape(tuple(tensor.size()), tensor.dtype) for tensor in tensors)


def probe_pipeline(
    stages: Mapping[int, nn.Module],
    placement: Sequence[int],
    first: Shapes,
    device: torch.device,
    group: ProcessGroup | None,
) -> list[Shapes]:
    """Return the shapes at all boundaries: before stage 0, between stages, after the last.

    Parameters
    ----------
    stages
        The stages of this rank; all ranks of the group call this together.
    placement
        Rank of each stage.
    first
        Input shapes of one micro-batch; looked at on the first stage's rank.

    Raises
    ------
    PreflightError
        On every rank, if a stage cannot run or its output cannot be sent.
    """
    boundaries = [first]
    for index, home in enumerate(placement):
        told: list[Any] = [None]
        if home == dist.get_rank(group):
            told = [_tell(index, stages[index], boundaries[index], device)]
        dist.broadcast_object_list(
            told, group=group, group_src=home, device=_packing(device, group)
        )
        inputs, outputs, faults = told[0]
        if faults:
            sizes = [shape.size for shape in inputs]
            raise PreflightError(
                f"rank {home}: stage {index} cannot run on inputs of size {sizes}: {faults[0]}"
            )
        boundaries = [*boundaries[:-1], inputs, outputs]
    return boundaries


def _tell(
    index: int, module: nn.Module, inputs: Shapes, device: torch.device
) -> tuple[Shapes, Shapes, list[str]]:
    faults: list[str] = []
    outputs = attempt(lambda: probe_stage(index, module, inputs, device), faults)
    return inputs, outputs or (), faults


def _packing(device: torch.device, group: ProcessGroup | None) -> torch.device:
    """Return where objects are packed to be sent: NCCL sends from its GPU only."""
    return device if dist.get_backend(group) == dist.Backend.NCCL else torch.device("cpu")


def probe_stage(index: int, module: nn.Module, inputs: Shapes, device: torch.device) -> Shapes:
    """Return the shapes of a stage's outputs.

    Raises
    ------
    PreflightError
        If an output is not a dense tensor, which could not be sent.
    """
    with torch.no_grad(), _untouched(module, device):
        outputs = as_tensors(
            module(*(shape.zeros(device) for shape in inputs)), f"the output of stage {index}"
        )
    for position, output in enumerate(outputs):
        if not output.is_contiguous():
            raise PreflightError(
                f"output {position} of stage {index} has strides {output.stride()} for size "
                f"{tuple(output.size())}, but only contiguous tensors are sent; "
                "return it through .contiguous()"
            )
    return shapes_of(outputs)


@contextmanager
def _untouched(module: nn.Module, device: torch.device) -> Iterator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for buffer, before in buffers:
        buffer.copy_(before)
