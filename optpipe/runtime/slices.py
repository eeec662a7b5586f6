"""Slices of a sequence: later slices read keys and values, and return their gradients.

A model that trains in slices calls two functions. `number` returns which slice of its sample is
running, for positions. `past` returns the keys and values of all slices so far, for attention.
Without a runner of slices, the whole sequence is one slice, and `past` returns its arguments. So
the same model also trains on whole sequences.

Tensors are detached between slices. Each slice leaves its keys and values as leaves of autograd for
the later slices. Their backwards run first and accumulate gradients at these leaves. The backward
of the slice then adds these gradients to its own (`_AddLaterGradients`).

`past` joins the keys and values again for every slice. If an attention saves the joined tensor for
its backward, only a reference to its parts is saved, which their slices keep anyway. The backward
joins them once more. So keys and values are in memory once, however many slices read them. Copies
that a module makes, such as repeated heads for grouped queries, are saved like any other tensor.

Saved-tensor hooks around each F of a slice do this. They hide such hooks around the runner.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from optpipe.runtime.offload import KeptTensor, is_plain, weak_storage
from optpipe.runtime.torch_names import (
    detached,
    in_backward,
    storage_identity,
    untraced,
    version_of,
    versions_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["SliceStates", "number", "past"]


_running: list[SliceStates] = []
"""The states of the stage whose F is running."""

_steps: weakref.WeakSet[SliceStates] = weakref.WeakSet()
"""The states of all stages that are in a step."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def number() -> int:
    """Return the number of the slice whose F is running, from 0; 0 for a whole sequence.

    Raises
    ------
    RuntimeError
        If a backward calls it, as a checkpoint around it does: the slice is then unknown.
    """
    running = _running_states("number")
    return running.number if running else 0


@torch.compiler.disable  # type: ignore[untyped-decorator]
def past(key: Tensor, value: Tensor, dim: int = -2) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all slices of the sample so far; those of this slice are last.

    Call it once in each attention of a stage, in the same order for every slice.

    Parameters
    ----------
    key, value
        Those of this slice.
    dim
        The dimension of positions.

    Raises
    ------
    RuntimeError
        As `number`.
    """
    running = _running_states("past")
    if running is None:
        return key, value
    keys, values = running.join((key, value), dim)
    return keys, values


def _running_states(caller: str) -> SliceStates | None:
    """Return the states of the running F; None for a whole sequence."""
    if not _running and _steps and in_backward():
        raise RuntimeError(
            f"slices.{caller} is called in a backward, which runs a checkpointed module again; "
            "exclude the module that calls it from the checkpoint"
        )
    return _running[-1] if _running else None


class _Joined(NamedTuple):
    """The parts of a joined tensor with their version counters, and its strides.

    The weak reference to ``storage`` ensures that no other storage gets its identity.
    """

    storage: StorageWeakRef
    parts: tuple[Tensor, ...]
    dim: int
    versions: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]

    def join_again(self) -> Tensor:
        """Return the joined tensor again, with the same strides."""
        if self.versions != versions_of(self.parts):
            raise RuntimeError(
                "keys or values, or tensors that share their memory, were changed in place after "
                "slices.past, but a backward needs the original values; change a copy, or change "
                "them before the call"
            )
        parts = [part.detach() for part in self.parts]
        joined = torch.empty_strided(
            self.size, self.stride, dtype=parts[-1].dtype, device=parts[-1].device
        )
        return torch.cat(parts, self.dim, out=joined)


class _JoinedView(NamedTuple):
    """A saved tensor as a view of a joined one."""

    joined: _Joined
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class SliceStates:
    """The keys and values of all slices in one stage and one step.

    ``samples`` has the micro-batches of each sample, in order. ``number`` is the index of the slice
    that runs, or ran last.
    """

    def __init__(self, samples: Sequence[Sequence[int]]) -> None:
        self._place = {j: (s, k) for s, sample in enumerate(samples) for k, j in enumerate(sample)}
        self._num_slices = [len(sample) for sample in samples]
        self._earlier: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}
        """(Sample, index of the call of `past`) -> the leaves of each slice so far."""
        self._joined: dict[int, _Joined] = {}
        self._sample = self.number = self._num_calls = 0

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Set the micro-batch of `number` and `past` while its F runs."""
        self._sample, self.number = self._place[microbatch]
        self._num_calls = 0
        _steps.add(self)
        _running.append(self)
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            _running.pop()
            self._joined.clear()
        if self.number + 1 == self._num_slices[self._sample]:
            for call in range(self._num_calls):
                self._earlier.pop((self._sample, call), None)

    def clear(self) -> None:
        """Drop all tensors of the step."""
        _steps.discard(self)
        self._earlier.clear()

    def join(self, own: tuple[Tensor, ...], dim: int) -> tuple[Tensor, ...]:
        """Return the tensors of the earlier slices in this call, joined with those of this one."""
        slices = self._earlier.setdefault((self._sample, self._num_calls), [])
        self._num_calls += 1
        slices.append(tuple(one.detach().requires_grad_(one.requires_grad) for one in own))
        return tuple(
            self._join(tensor, parts, dim)
            for tensor, parts in zip(own, zip(*slices, strict=True), strict=True)
        )

    def _join(self, own: Tensor, parts: tuple[Tensor, ...], dim: int) -> Tensor:
        """Join parts of which the last is the leaf of a tensor of the running slice."""
        *earlier, leaf = parts
        last: Tensor = own
        if own.requires_grad:
            last = _AddLaterGradients.apply(own, leaf)  # type: ignore[no-untyped-call]
        joined = torch.cat([*earlier, last], dim)
        may_be_saved = torch.is_grad_enabled() and is_plain(joined)
        if may_be_saved and all(part.dtype == joined.dtype for part in parts):
            storage = weak_storage(joined)
            self._joined[storage_identity(joined.untyped_storage())] = _Joined(
                storage, parts, dim, versions_of(parts), joined.size(), joined.stride()
            )
        return joined

    @untraced
    def _pack(self, tensor: Tensor) -> Tensor | KeptTensor | _JoinedView:
        if not is_plain(tensor):
            return detached(tensor)
        whole = self._joined.get(storage_identity(tensor.untyped_storage()))
        # A tensor that was changed in place after it was joined differs from its parts.
        if whole is None or tensor.dtype != whole.parts[-1].dtype or version_of(tensor):
            return KeptTensor.of(tensor)
        return _JoinedView(whole, int(tensor.storage_offset()), tensor.size(), tensor.stride())


@untraced
def _unpack(packed: Tensor | KeptTensor | _JoinedView) -> Tensor:
    if isinstance(packed, _JoinedView):
        return packed.joined.join_again().as_strided(packed.size, packed.stride, packed.offset)
    return packed.checked() if isinstance(packed, KeptTensor) else packed


class _AddLaterGradients(torch.autograd.Function):
    """Returns a slice's keys or values; the backward adds the gradients of later slices."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        later, ctx.leaf.grad = ctx.leaf.grad, None
        return gradient if later is None else gradient + later, None
