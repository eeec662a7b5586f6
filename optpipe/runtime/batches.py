"""Cuts the inputs and targets of a step on one rank into micro-batches.

A trainer gives a whole batch, which is cut here along dimension 0. Or it gives lists with an entry
per micro-batch, which are taken as they are. Positional inputs are the first stage's, targets the
last one's; keyword inputs go to every stage of the rank whose ``forward`` names them.

A keyword tensor is cut only if its dimension 0 has as many entries as the batch has samples. Any
other, such as a bias by head or a table by position, goes whole to all micro-batches. `ChunkSpecs`
replace this rule, tensor by tensor.
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

__all__ = [
    "NOT_SAID",
    "ChunkSpecs",
    "GivenBatch",
    "Microbatches",
    "given_batch",
    "keywords_of",
    "tensors_in",
]


class _NotSaid:
    """The type of a value that was not given, where None has a meaning."""


NOT_SAID = _NotSaid()


@dataclass(frozen=True, kw_only=True)
class ChunkSpecs:
    """The dimensions along which whole batches are cut.

    A dimension is an int or a ``TensorChunkSpec`` of torch; None is for a tensor that all
    micro-batches share. Each field has one for all tensors, or a tree of them in the form of the
    values. `NOT_SAID`, and a name that is missing, leave the choice to the rules above.
    """

    args: Any = NOT_SAID
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = NOT_SAID


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """A batch in pieces, each list by micro-batch; a list is empty if nothing is used."""

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

        def given_of(value: Any) -> Any:
            return value if isinstance(value, bool | int | float | str) else _shape_of(value)

        parts = (self.args, self.kwargs)
        return tuple(tree_map(given_of, part[microbatch]) if part else () for part in parts)

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
            if not isinstance(value, Tensor):
                return value
            return value.new_empty(value.shape, device="meta")

        return Microbatches(
            args=tree_map(bare, self.args),
            kwargs=tree_map(bare, self.kwargs),
            targets=tree_map(bare, self.targets),
            loss_kwargs=self.loss_kwargs,
        )


@dataclass(frozen=True)
class GivenBatch:
    """The inputs and targets that the caller of a step passed on this rank, uncut."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    arg_mbs: Sequence[Any] | None = None
    kwarg_mbs: Sequence[Mapping[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def num_samples(self, specs: ChunkSpecs) -> int | None:
        """Return how many samples the batch has, as the first stage's rank knows it.

        All positional inputs that are cut must agree on the size of that dimension; it is summed if
        they are by micro-batch. Without such inputs, all keyword inputs without a specification
        must. None if they do not agree.
        """
        if self.arg_mbs is not None:
            sizes = [_sizes_of(_laid_out(one, NOT_SAID, _first)) for one in self.arg_mbs]
            return sum(map(sum, sizes)) if all(len(one) == 1 for one in sizes) else None
        own = {name: one for name, one in self.kwargs.items() if name not in specs.kwargs}
        args = _laid_out(self.args, specs.args, _first, "the batch") if self.args else ()
        found = _sizes_of(args) or _sizes_of(_laid_out(own, NOT_SAID, _first))
        return found.pop() if len(found) == 1 else None

    def cut(
        self,
        count: int,
        num_samples: int | None,
        specs: ChunkSpecs,
        *,
        first: bool,
        last: bool,
        needs_target: bool,
    ) -> Microbatches:
        """Return the micro-batches.

        ``num_samples`` is that of the first stage's rank. ``first`` and ``last`` say whether this
        rank uses inputs and targets. A target may be missing unless one is needed.

        Raises
        ------
        PreflightError
            If something is missing, given twice, or does not divide, or if a keyword tensor may
            be the batch's or shared.
        """
        args = self._cut_args(count, specs.args) if first else []
        targets = self._cut_targets(count, specs.target, needed=needs_target) if last else []
        kwargs = self._cut_kwargs(count, num_samples, specs.kwargs)
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

    def _cut_args(self, count: int, spec: Any) -> list[tuple[Any, ...]]:
        if self.arg_mbs is not None:
            _only_once(self.args, "positional inputs", "arg_mbs")
            _check_length(self.arg_mbs, "arg_mbs", count)
            return [one if isinstance(one, tuple) else (one,) for one in self.arg_mbs]
        return _cut(self.args, "the batch", count, spec) if self.args else [()] * count

    def _cut_kwargs(
        self, count: int, num_samples: int | None, specs: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        if self.kwarg_mbs is not None:
            _only_once(self.kwargs, "keyword inputs", "kwarg_mbs")
            _check_length(self.kwarg_mbs, "kwarg_mbs", count)
            return [dict(one) for one in self.kwarg_mbs]

        def dimension(tensor: Tensor) -> int | None:
            return 0 if tensor.dim() and tensor.size(0) == num_samples else None

        layout = {}
        for name, value in self.kwargs.items():
            if name not in specs:
                for tensor in tensors_in(value):
                    if tensor.dim():
                        _check_shared(name, tensor, count, num_samples)
            layout[name] = _laid_out(value, specs.get(name, NOT_SAID), dimension, name)
            for size in _sizes_of(layout[name]):
                _check_divides(name, size, count)
        return _pieces(layout, count)

    def _cut_targets(self, count: int, spec: Any, *, needed: bool) -> list[Any]:
        if self.target_mbs is not None:
            _only_once(self.target is not None, "a target", "target_mbs")
            _check_length(self.target_mbs, "target_mbs", count)
            return list(self.target_mbs)
        if self.target is not None:
            return _cut(_tuple_of(self.target), "the target", count, _tuple_of(spec))
        if needed:
            raise PreflightError(_missing("target", "last"))
        return []


def given_batch(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Any,
    by_microbatch: tuple[Sequence[Any] | None, Sequence[Mapping[str, Any]] | None, Any],
    loss_kwargs: Mapping[str, Any] | None,
) -> GivenBatch:
    """Return what the caller of a step gave; two positional values are a batch and its target.

    ``by_microbatch`` are ``arg_mbs``, ``kwarg_mbs`` and ``target_mbs``.
    """
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
    return GivenBatch(args, kwargs, target, *by_microbatch, loss_kwargs or {})


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


def _check_shared(name: str, tensor: Tensor, count: int, num_samples: int | None) -> None:
    """Refuse a keyword tensor of which it is unknown whether it is the batch's or shared."""
    size = f"{name} has a tensor of shape {tuple(tensor.shape)}"
    if num_samples is None:
        raise PreflightError(
            f"{size}, and how many samples the batch has is unknown: positional inputs, or all "
            "keyword inputs where there are none, must agree on dimension 0 on the first stage's "
            "rank; give keyword inputs by micro-batch (kwarg_mbs=)"
        )
    if tensor.size(0) == num_samples:
        _check_divides("the batch given by keyword", num_samples, count)
    elif tensor.size(0) == num_samples // count > 1:
        raise PreflightError(
            f"{size}: dimension 0 has as many entries as a micro-batch has samples, and the batch "
            f"has {num_samples}. A tensor of all {num_samples} is cut, and others are shared; if "
            "all micro-batches share this one, give it a dimension of size 1 before, or give "
            "kwarg_mbs= with it in every entry"
        )


def _check_divides(what: str, size: int, count: int) -> None:
    if size % count or not size:
        raise PreflightError(
            f"{what} has {size} samples, which do not divide into {count} micro-batches of equal "
            f"size; give a multiple of {count}"
        )


def _cut(values: Any, what: str, count: int, spec: Any) -> list[Any]:
    """Cut tensors along dimension 0, or by a specification; other values go to all unchanged."""
    layout = _laid_out(values, spec, _first, what)
    sizes = _sizes_of(layout)
    if len(sizes) > 1:
        raise PreflightError(
            f"the tensors of {what} have {sorted(sizes)} samples in the dimension that is cut; "
            "give tensors of equal length, or a list by micro-batch (arg_mbs=, kwarg_mbs=, "
            "target_mbs=)"
        )
    if sizes or (spec is NOT_SAID and tensors_in(values)):
        _check_divides(what, sizes.pop() if sizes else 0, count)
    return _pieces(layout, count)


@dataclass(frozen=True)
class _Cuttable:
    """A value of a batch, which no tree looks into, and its dimension that is cut, if any."""

    value: Any
    dimension: int | None

    def part(self, index: int, count: int) -> Any:
        """Return the part of the value that belongs to a micro-batch."""
        if self.dimension is None:
            return self.value
        return self.value.chunk(count, self.dimension)[index]


def _laid_out(
    values: Any, spec: Any, default: Callable[[Tensor], int | None], what: str = ""
) -> Any:
    """Return the tree of values, each with its dimension; ``default`` is for those without one."""

    def cuttable(value: Any, own: Any) -> _Cuttable:
        if not isinstance(value, Tensor):
            return _Cuttable(value, None)
        dimension = default(value) if own is NOT_SAID else getattr(own, "split_dim", own)
        if dimension is not None and dimension not in range(-value.dim(), value.dim()):
            raise PreflightError(
                f"the chunk specification of {what} says {own}, but its tensor has shape "
                f"{tuple(value.shape)}; give a dimension of the tensor, torch's "
                "TensorChunkSpec(dimension), or None where all micro-batches share it"
            )
        return _Cuttable(value, dimension)

    if not isinstance(spec, tuple | list | dict):
        return tree_map(lambda value: cuttable(value, spec), values)
    try:
        return tree_map(cuttable, values, spec)
    except ValueError as error:
        raise PreflightError(
            f"the chunk specification of {what} is {spec}, and has another form: {error}; give one "
            "for all tensors, or one for each in the same tuples, lists and dicts"
        ) from None


def _pieces(layout: Any, count: int) -> list[Any]:
    """Return a tree for each micro-batch, with parts of the tensors that are cut."""
    return [tree_map(lambda one: one.part(index, count), layout) for index in range(count)]  # noqa: B023


def _sizes_of(layout: Any) -> set[int]:
    """Return all sizes of dimensions that are cut."""
    leaves = tree_leaves(layout)
    return {one.value.size(one.dimension) for one in leaves if one.dimension is not None}


def _first(tensor: Tensor) -> int | None:
    return 0 if tensor.dim() else None


def _tuple_of(values: Any) -> Any:
    return tuple(values) if isinstance(values, list) else values


def _shape_of(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__


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
