"""Slices of a sequence: keys and values go from slice to slice, their gradients come back.

A model that trains in slices asks two things where it attends: `number`, which slice of its sample
is running, for positions, and `past`, for the keys and values of all slices so far. Outside of a
runner of slices there is one slice, the whole sequence, and `past` gives back what it was given: so
the same model trains whole.

Between slices tensors are detached. Each slice hands on its keys and values as leaves of autograd;
the backwards of later slices, which come first, leave gradients there, and the slice's own backward
adds them to its own (`_HandedOn`). What `past` returns is joined anew for every slice. Where an
attention saves it for its backward, the parts are kept in its place, which the slices that they are
of hold anyway, and they are joined once more when the backward asks: so keys and values are held
once, however many slices read them. A copy that a module makes of them, such as heads repeated for
grouped queries, is a tensor like any other.

That is done by hooks of autograd around each F of a slice, which hide those around the runner.
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


class _Running(NamedTuple):
    """The F that runs: its stage's states, its sample, and its number there."""

    states: SliceStates
    sample: int
    number: int


_running: list[_Running] = []

_steps: weakref.WeakSet[SliceStates] = weakref.WeakSet()
"""Those in the middle of a step."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def number() -> int:
    """Return which slice of its sample the running F is of, from 0; 0 where nothing is cut.

    Raises
    ------
    RuntimeError
        If a backward calls it, as a checkpoint around it does: nothing says of which slice.
    """
    running = _now("number")
    return running.number if running else 0


@torch.compiler.disable  # type: ignore[untyped-decorator]
def past(key: Tensor, value: Tensor, dim: int = -2) -> tuple[Tensor, Tensor]:
    """Return keys and values of all slices of the sample so far, this one's last.

    To be called once in each attention of a stage, in the same order for every slice.

    Parameters
    ----------
    key, value
        Of this slice.
    dim
        Their dimension of positions.

    Raises
    ------
    RuntimeError
        As `number`.
    """
    running = _now("past")
    if running is None:
        return key, value
    keys, values = running.states.join(running.sample, (key, value), dim)
    return keys, values


def _now(asks: str) -> _Running | None:
    """Return the F that runs, None where nothing is cut."""
    if not _running and _steps and in_backward():
        raise RuntimeError(
            f"slices.{asks} is called in a backward, which runs a checkpointed module again; "
            "leave the module that calls it out of the checkpoint"
        )
    return _running[-1] if _running else None


class _Joined(NamedTuple):
    """What a tensor was joined of: its parts, how often each was changed in place, its form.

    ``storage`` keeps its identity from being another's.
    """

    storage: StorageWeakRef
    parts: tuple[Tensor, ...]
    dim: int
    versions: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]

    def again(self) -> Tensor:
        """Return the tensor once more, laid out as it was."""
        if self.versions != versions_of(self.parts):
            raise RuntimeError(
                "keys or values, or what shares their memory, were changed in place after "
                "slices.past, and a backward needs them as they were; change a copy, or change "
                "them before"
            )
        parts = [part.detach() for part in self.parts]
        joined = torch.empty_strided(
            self.size, self.stride, dtype=parts[-1].dtype, device=parts[-1].device
        )
        return torch.cat(parts, self.dim, out=joined)


class _JoinedView(NamedTuple):
    """How to see a saved tensor in a joined one."""

    joined: _Joined
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class SliceStates:
    """What the slices of each sample have handed on in one stage, in one step.

    ``samples`` are the micro-batches of each sample, in order.
    """

    def __init__(self, samples: Sequence[Sequence[int]]) -> None:
        self._place = {j: (s, k) for s, sample in enumerate(samples) for k, j in enumerate(sample)}
        self._sizes = [len(sample) for sample in samples]
        self._handed: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}
        self._joined: dict[int, _Joined] = {}
        self._calls = 0

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Let `number` and `past` speak of a micro-batch while its F runs."""
        sample, at = self._place[microbatch]
        self._calls = 0
        _steps.add(self)
        _running.append(_Running(self, sample, at))
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            _running.pop()
            self._joined.clear()
        if at + 1 == self._sizes[sample]:
            for call in range(self._calls):
                self._handed.pop((sample, call), None)

    def clear(self) -> None:
        """Forget everything of the step."""
        _steps.discard(self)
        self._handed.clear()

    def join(self, sample: int, own: tuple[Tensor, ...], dim: int) -> tuple[Tensor, ...]:
        """Return what earlier slices have handed on in this call with a slice's own behind it."""
        handed = self._handed.setdefault((sample, self._calls), [])
        self._calls += 1
        leaves = tuple(one.detach().requires_grad_(one.requires_grad) for one in own)
        joined = tuple(
            self._join([earlier[at] for earlier in handed], one, leaf, dim)
            for at, (one, leaf) in enumerate(zip(own, leaves, strict=True))
        )
        handed.append(leaves)
        return joined

    def _join(self, earlier: list[Tensor], own: Tensor, leaf: Tensor, dim: int) -> Tensor:
        joined = torch.cat([*earlier, _handed_on(own, leaf)], dim)
        if torch.is_grad_enabled() and is_plain(joined):
            parts = (*earlier, leaf)
            if all(part.dtype == joined.dtype for part in parts):
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
        # What was changed in place after it was joined is no longer its parts.
        if whole is None or tensor.dtype != whole.parts[-1].dtype or version_of(tensor):
            return KeptTensor.of(tensor)
        return _JoinedView(whole, int(tensor.storage_offset()), tensor.size(), tensor.stride())


@untraced
def _unpack(packed: Tensor | KeptTensor | _JoinedView) -> Tensor:
    if isinstance(packed, _JoinedView):
        return packed.joined.again().as_strided(packed.size, packed.stride, packed.offset)
    return packed.checked() if isinstance(packed, KeptTensor) else packed


def _handed_on(own: Tensor, leaf: Tensor) -> Tensor:
    if not own.requires_grad:
        return own
    result: Tensor = _HandedOn.apply(own, leaf)  # type: ignore[no-untyped-call]
    return result


class _HandedOn(torch.autograd.Function):
    """A slice's own keys or values; its backward adds what later slices left at their leaf."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        later, ctx.leaf.grad = ctx.leaf.grad, None
        return gradient if later is None else gradient + later, None
