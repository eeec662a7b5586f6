"""What a step is given on one rank, and how it is cut into micro-batches.

A trainer gives a whole batch, which is cut here along dimension 0, or lists with an entry per
micro-batch, which are taken as they are. Positional inputs are the first stage's, targets the
last one's; keyword inputs go to every stage of the rank whose ``forward`` names them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optpipe.errors import PreflightError
from optpipe.runtime.torch_names import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

__all__ = ["NOT_SAID", "GivenBatch", "Microbatches", "given_batch", "keywords_of", "tensors_in"]


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """A batch in pieces, each list by micro-batch; a list is empty where nothing is used."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any]
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def shapes(self, microbatch: int) -> tuple[Any, ...]:
        """Return sizes and types of the tensors of a micro-batch: they decide what is sent."""
        parts = (self.args, self.kwargs, self.targets)
        return tuple(tree_map(_shape_of, part[microbatch]) if part else () for part in parts)

    def inputs(self, microbatch: int) -> tuple[Any, ...]:
        """Return what decides the sizes that cross stages: of tensors theirs, and numbers."""
        parts = (self.args, self.kwargs)
        return tuple(tree_map(_given_of, part[microbatch]) if part else () for part in parts)

    def check_equal(self) -> None:
        """Refuse micro-batches of different shapes."""
        for part, what in ((self.args, "input"), (self.kwargs, "input"), (self.targets, "target")):
            shapes = [tree_map(_shape_of, one) for one in part]
            for index, shape in enumerate(shapes):
                if shape != shapes[0]:
                    raise PreflightError(
                        f"the {what} of micro-batch {index} has shapes {shape}, that of "
                        f"micro-batch 0 {shapes[0]}: without costs of their own all of a step must "
                        "be equal; pad them, pass the problem whose costs they have, or run them "
                        "in steps of their own, each with its bucket="
                    )

    def without_memory(self) -> Microbatches:
        """Return a batch of the same shapes on no device."""

        def bare(value: Any) -> Any:
            return value.new_empty(value.shape, device="meta") if _is_tensor(value) else value

        return Microbatches(
            args=tree_map(bare, self.args),
            kwargs=tree_map(bare, self.kwargs),
            targets=tree_map(bare, self.targets),
            loss_kwargs=self.loss_kwargs,
        )


@dataclass(frozen=True, kw_only=True)
class GivenBatch:
    """What the caller of a step gave on this rank, uncut."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    arg_mbs: Sequence[Any] | None = None
    kwarg_mbs: Sequence[Mapping[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def cut(self, count: int, *, first: bool, last: bool, needs_target: bool) -> Microbatches:
        """Return the micro-batches.

        ``first`` and ``last`` say whether inputs and targets are looked at here; a target may be
        missing unless one is needed.

        Raises
        ------
        PreflightError
            If something is missing, given twice, or does not divide.
        """
        args = self._cut_args(count) if first else []
        targets = self._cut_targets(count, needed=needs_target) if last else []
        kwargs = self._cut_kwargs(count)
        if first and not any(args) and not any(kwargs):
            raise PreflightError(_missing("batch", "first"))
        for what, given, taker in (
            ("batch", (args, kwargs), "stage"),
            ("target", targets, "loss"),
        ):
            if any(isinstance(one, DTensor) for one in tensors_in(given)):
                raise PreflightError(
                    f"the {what} holds a DTensor, but a {taker} is given plain tensors, of which "
                    "their shapes are found; give what this rank holds of it (.to_local()), and "
                    f"make it whole in the {taker} that takes it (DTensor.from_local)"
                )
        return Microbatches(args=args, kwargs=kwargs, targets=targets, loss_kwargs=self.loss_kwargs)

    def _cut_args(self, count: int) -> list[tuple[Any, ...]]:
        if self.arg_mbs is not None:
            _only_once(self.args, "positional inputs", "arg_mbs")
            _check_length(self.arg_mbs, "arg_mbs", count)
            return [one if isinstance(one, tuple) else (one,) for one in self.arg_mbs]
        return _cut(self.args, "the batch", count) if self.args else [()] * count

    def _cut_kwargs(self, count: int) -> list[dict[str, Any]]:
        if self.kwarg_mbs is not None:
            _only_once(self.kwargs, "keyword inputs", "kwarg_mbs")
            _check_length(self.kwarg_mbs, "kwarg_mbs", count)
            return [dict(one) for one in self.kwarg_mbs]
        return (
            _cut(dict(self.kwargs), "the batch given by keyword", count)
            if self.kwargs
            else [{}] * count
        )

    def _cut_targets(self, count: int, *, needed: bool) -> list[Any]:
        if self.target_mbs is not None:
            _only_once(self.target is not None, "a target", "target_mbs")
            _check_length(self.target_mbs, "target_mbs", count)
            return list(self.target_mbs)
        if self.target is not None:
            target = tuple(self.target) if isinstance(self.target, list) else self.target
            return _cut(target, "the target", count)
        if needed:
            raise PreflightError(_missing("target", "last"))
        return []


class _NotSaid:
    """Stands for a target that was not named."""


NOT_SAID = _NotSaid()


def given_batch(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    target: Any,
    arg_mbs: Sequence[Any] | None,
    kwarg_mbs: Sequence[Mapping[str, Any]] | None,
    target_mbs: Sequence[Any] | None,
    loss_kwargs: Mapping[str, Any] | None,
) -> GivenBatch:
    """Return what the caller of a step gave; two positional values are a batch and its target."""
    if target is NOT_SAID:
        if len(args) > 2:
            raise TypeError(
                f"{len(args)} positional inputs and no target=: two are a batch and its target; "
                "name the target, None where it is not looked at"
            )
        args, target = args[:1], args[1] if len(args) == 2 else None
    if len(args) == 1:
        (only,) = args
        args = tuple(only) if isinstance(only, tuple | list) else () if only is None else args
    return GivenBatch(
        args=args,
        kwargs=kwargs,
        target=target,
        arg_mbs=arg_mbs,
        kwarg_mbs=kwarg_mbs,
        target_mbs=target_mbs,
        loss_kwargs=loss_kwargs or {},
    )


def _missing(what: str, stage: str) -> str:
    return f"the rank that uses the {what} was given none; pass it there, it is the {stage} stage's"


def _only_once(given: object, what: str, name: str) -> None:
    if given:
        raise PreflightError(f"{what} were given beside {name}=; give either")


def _check_length(values: Sequence[Any], name: str, count: int) -> None:
    if len(values) != count:
        raise PreflightError(
            f"{name} has {len(values)} entries, the schedule {count} micro-batches; give one each"
        )


def _cut(values: Any, what: str, count: int) -> list[Any]:
    """Cut tensors along dimension 0; numbers, tensors of no dimension and None go to all whole."""
    given = tensors_in(values)
    sizes = {one.size(0) for one in given if one.dim()}
    if len(sizes) > 1:
        raise PreflightError(
            f"the tensors of {what} have {sorted(sizes)} samples in dimension 0; give tensors of "
            "equal length, or a list by micro-batch (arg_mbs=, kwarg_mbs=, target_mbs=)"
        )
    size = sizes.pop() if sizes else 0
    if size % count or (given and not size):
        raise PreflightError(
            f"{what} has {size} samples, which do not divide into {count} micro-batches of equal "
            f"size; give a multiple of {count}"
        )

    def parts(value: Any) -> Any:
        return _Parts(value.chunk(count) if _is_tensor(value) and value.dim() else [value] * count)

    cut = tree_map(parts, values)
    return [tree_map(lambda one: one.parts[index], cut) for index in range(count)]  # noqa: B023


@dataclass(frozen=True)
class _Parts:
    """The pieces of one value, which no tree looks into."""

    parts: Sequence[Any]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _shape_of(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _given_of(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else _shape_of(value)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in a tree of values."""
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def keywords_of(module: nn.Module) -> frozenset[str] | None:
    """Return the names by which a module's ``forward`` takes inputs; None = any."""
    inner: Any = module
    while (wrapped := getattr(inner, "_orig_mod", getattr(inner, "module", None))) is not None:
        if not isinstance(wrapped, torch.nn.Module):
            break
        inner = wrapped
    forward: Callable[..., Any] = inner.forward
    kinds = inspect.Parameter
    parameters = inspect.signature(forward).parameters.values()
    if any(one.kind is kinds.VAR_KEYWORD for one in parameters):
        return None
    named = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    return frozenset(one.name for one in parameters if one.kind in named)
