"""A layer as ``torch.compile`` runs it, on tensors without data.

``functorch.compile`` traces the layer's forward and backward into one graph, and its min-cut
partitioner chooses what the forward keeps. The two graphs then run operator by operator:

* A product, and a leaf kernel such as attention, is a kernel of its own.
* All other operators between products are fused. Those that depend on the same products, and read
  each other's results or the same tensor in full, are one kernel. It reads each tensor once, and
  writes what other kernels or the caller need. It computes elementwise operators again instead of
  reading their result if their inputs have no more bytes. This is a model of Inductor, whose own
  choices are not used.
* Gradients of the weights of linear layers run in W. The others, as of norms, biases and experts,
  run in I. As in `optpipe.runtime.passes`, I copies both factors of each product for W.
"""

from __future__ import annotations

import operator
from collections import UserDict, defaultdict
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    aot_function,
    min_cut_rematerialization_partition,
)
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.traceback import annotate, preserve_node_meta

from optpipe.errors import InputError
from optpipe.runtime.measuring.kernels import LeafWork, is_known_mask, trace_leaves
from optpipe.runtime.measuring.operators import has_flops, is_free
from optpipe.runtime.torch_names import (
    inductor_decompositions,
    tree_flatten,
    tree_unflatten,
    with_composites,
    without_modes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence
    from contextlib import AbstractContextManager

    from optpipe.runtime.passes import WeightGradients

__all__ = ["Part", "compile_layer"]


def compile_layer(
    layer: nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    gradients: WeightGradients,
    split: Container[Tensor],
    part: Part | None = None,
) -> Callable[[], Any]:
    """Return a function that runs a compiled layer with these arguments.

    Parameters
    ----------
    layer
        The layer; its linear layers are plain ones.
    forward
        The layer's own forward.
    args, kwargs
        Arguments with tensors on "meta".
    gradients
        Defers the products of W.
    split
        The weights whose gradients W computes: those of plain linear layers.
    part
        Modules of the layer, and what runs around their operators.

    Raises
    ------
    InputError
        If the layer reads tensors that are not among its arguments.
    """
    leaves, spec = tree_flatten((args, kwargs))
    if any(isinstance(one, UserDict) for one in leaves):
        raise InputError(
            f"a {type(layer).__name__} shares keys and values with other layers, so it cannot be "
            "traced as compiled; choose kernels torch (without --compiled)"
        )
    # A mask that no kernel reads stays outside the graph.
    places = [
        index
        for index, one in enumerate(leaves)
        if isinstance(one, Tensor) and not is_known_mask(one)
    ]
    body = _Body(layer, forward)
    state = dict(body.named_parameters()) | dict(body.named_buffers())
    deferred = [one.requires_grad and one in split for one in state.values()]
    around = None if part is None else part.around

    def call(values: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
        filled = list(leaves)
        for place, one in zip(places, given, strict=True):
            filled[place] = one
        own_args, own_kwargs = tree_unflatten(filled, spec)
        return functional_call(body, dict(zip(state, values, strict=True)), own_args, own_kwargs)

    compiled = aot_function(
        call,
        fw_compiler=lambda graph, _: _Graph(graph, around),
        bw_compiler=lambda graph, _: _Graph(graph, around, deferred, gradients),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=inductor_decompositions(),
    )
    values, given = list(state.values()), [leaves[place] for place in places]
    bare = [one.detach().requires_grad_(one.requires_grad) for one in given]
    keep = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)
    with ExitStack() as stack:
        contexts = without_modes(), with_composites(), keep, trace_leaves(), preserve_node_meta()
        for context in contexts:
            stack.enter_context(context)
        for module in () if part is None else part.modules:
            stack.enter_context(patch.object(module, "forward", partial(_tagged, module.forward)))
        compiled(values, bare)
    return partial(compiled, values, given)


class Part(NamedTuple):
    """Modules of a layer whose operators are counted on their own.

    ``around`` makes the context in which each kernel of theirs runs, and in which products are
    deferred; it takes whether the backward is running.
    """

    modules: Sequence[nn.Module]
    around: Callable[[bool], AbstractContextManager[None]]


_TAG = "optpipe_part"


def _tagged(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module whose operators, and their gradients, get a tag in the graph."""
    with annotate({_TAG: True}):
        return forward(*args, **kwargs)


def _is_tagged(node: fx.Node) -> bool:
    return _TAG in node.meta.get("custom", ())


class _Body(nn.Module):
    """A layer whose ``forward`` somebody has replaced, with its own."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self._call = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


# --- Kernels of a graph.


class _KernelCall(NamedTuple):
    """Operators that run as one, the values that they read, and those that they write."""

    nodes: tuple[fx.Node, ...]
    read: tuple[fx.Node, ...]
    written: tuple[fx.Node, ...]


class _Graph:
    """Runs a graph kernel by kernel; a value is freed after the last kernel that reads it.

    A backward gets ``gradients``, and for each of its first results, whether W computes it if a
    product makes it (``deferred``). It returns None for the gradients that W computes.
    """

    _boxed_call = True
    """To torch: it empties the list of its arguments."""

    def __init__(
        self,
        graph: fx.GraphModule,
        around: Callable[[bool], AbstractContextManager[None]] | None,
        deferred: Sequence[bool] = (),
        gradients: WeightGradients | None = None,
    ) -> None:
        nodes = list(graph.graph.nodes)
        self._around = around
        self._inputs = [one for one in nodes if one.op == "placeholder"]
        (last,) = (one for one in nodes if one.op == "output")
        self._results = list(last.args[0])
        if others := [one.name for one in nodes if one.op not in _OPS]:
            raise InputError(
                f"the compiled layer reads tensors that are no arguments ({', '.join(others)}), "
                "and cannot be traced; choose kernels torch (without --compiled)"
            )
        self._kept = {_home(one) for one in self._results if isinstance(one, fx.Node)}
        self._kernels = _order(nodes, self._kept)
        self._last: dict[fx.Node, int] = {}
        for index, kernel in enumerate(self._kernels):
            for one in kernel.read:
                self._last[one] = index
        self._gradients = gradients
        results = zip(self._results, deferred, strict=False)
        homes = [
            _home(one) for one, is_deferred in results if is_deferred and isinstance(one, fx.Node)
        ]
        self._deferred = {one for one in homes if _is_alone(one) and _ends(one) == 1}

    def __call__(self, given: list[Any]) -> list[Any]:
        """Run on these inputs, and return the results."""
        values: dict[fx.Node, Any] = dict(zip(self._inputs, given, strict=True))
        given.clear()
        is_backward = self._gradients is not None
        for index, kernel in enumerate(self._kernels):
            is_part = self._around is not None and all(map(_is_tagged, kernel.nodes))
            with self._around(is_backward) if self._around and is_part else nullcontext():
                values |= self._run_kernel(kernel, values)
            for one in kernel.read:
                if self._last[one] == index and one not in self._kept:
                    values.pop(one, None)
        return [self._result(one, values) for one in self._results]

    def _defers(self, node: fx.Node) -> bool:
        defers = self._gradients is not None and self._gradients.defers
        return defers and node in self._deferred

    def _result(self, result: Any, values: dict[fx.Node, Any]) -> Any:
        if not isinstance(result, fx.Node):
            return result
        return None if self._defers(_home(result)) else _value(result, values)

    def _run_kernel(self, kernel: _KernelCall, values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
        (first, *_) = kernel.nodes
        if self._gradients is None or not self._defers(first):
            return _run_kernel(kernel, values)
        copies: dict[fx.Node, Tensor] = {}
        for node in first.all_input_nodes:
            factor = _value(node, values)
            copies[node] = torch.empty_like(factor)
            _run_fused("copy", [factor], [copies[node]])
        args, kwargs = fx.node.map_arg((first.args, first.kwargs), copies.__getitem__)
        target: Any = first.target
        self._gradients.put_aside(partial(target, *args, **kwargs), list(copies.values()))
        return {}


_OPS = frozenset({"placeholder", "output", "call_function"})


def _run_fused(name: str, read: list[Tensor], written: list[Tensor]) -> None:
    torch.ops.optpipe.leaf(name, read, written, *LeafWork())


def _run_kernel(kernel: _KernelCall, values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Run a kernel and return what it has written."""
    (first, *items) = kernel.nodes
    if not _is_alone(first):
        written = {one: _empty(one.meta["val"]) for one in kernel.written}
        _run_fused("fused", [values[one] for one in kernel.read], list(written.values()))
        return written
    if first.target is _LEAF:
        name, read, _, *work = first.args
        result: Any = [_empty(one) for one in first.meta["val"]]
        torch.ops.optpipe.leaf(name, [_value(one, values) for one in read], result, *work)
    else:
        target: Any = first.target
        args, kwargs = fx.node.map_arg((first.args, first.kwargs), partial(_value, values=values))
        result = target(*args, **kwargs)
    return {one: result[one.args[1]] for one in items} if items else {first: result}


_LEAF: Any = torch.ops.optpipe.traced_leaf.default


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return the value of a node: of a kernel, or a view of one."""
    if node in values:
        return values[node]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), partial(_value, values=values))
    target: Any = node.target
    return target(*args, **kwargs)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return False
    return node.op == "call_function" and is_free(node.target) and bool(node.all_input_nodes)


def _home(node: fx.Node) -> fx.Node:
    """Return the node that a node is a view of."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


_ALONE = frozenset({"bincount", "cumsum", "histc", "index_add", "index_put", "scatter",
                    "scatter_add", "scatter_reduce", "sort", "topk"})  # fmt: skip
"""Operators without FLOPs that are kernels of their own."""


def _is_alone(node: fx.Node) -> bool:
    """Whether an operator is a kernel of its own."""
    target: Any = node.target
    if node.op != "call_function" or target is operator.getitem:
        return False
    return target is _LEAF or has_flops(target) or target.overloadpacket.__name__ in _ALONE


def _ends(node: fx.Node) -> int:
    """Return how many kernels and results read a node, or a view of it."""
    return sum(_ends(one) if _is_view(one) else 1 for one in node.users)


def _order(nodes: Iterable[fx.Node], kept: Container[fx.Node]) -> list[_KernelCall]:
    """Return the kernels of a graph in an order in which they can run, fused ones late."""
    computed = [one for one in nodes if one.op == "call_function" and not _is_view(one)]
    # Operators that read nothing make constants.
    computed = [one for one in computed if one.all_input_nodes]
    level: dict[fx.Node, int] = {}
    for one in computed:
        ahead = max((level.get(home, 0) for home in _reads(one)), default=0)
        level[one] = ahead + _is_alone(one)
    products = [one for one in computed if _is_alone(one)]
    results = {one: [one, *_items(one)] for one in products}
    apart = {one for items in results.values() for one in items}
    groups = _fuse([one for one in computed if one not in apart], level)
    reads = [_reads_of_group(group) for group in groups] + [_reads(one) for one in products]
    needed = {one for read in reads for one in read}
    homes: dict[fx.Node, _KernelCall] = {}
    for group, read in zip([*groups, *results.values()], reads, strict=True):
        written = tuple(one for one in group if one in needed or one in kept)
        homes |= dict.fromkeys(group, _KernelCall(tuple(group), tuple(read), written))
    found: dict[_KernelCall, None] = {}

    def add(kernel: _KernelCall) -> None:
        if kernel in found:
            return
        for one in kernel.read:
            if one in homes:
                add(homes[one])
        found[kernel] = None

    for one in [*products, *computed]:
        if homes[one].written or _is_alone(one):
            add(homes[one])
    return list(found)


def _items(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that take one of several results of an operator."""
    return [one for one in node.users if one.target is operator.getitem]


def _reads_of_group(group: list[fx.Node]) -> list[fx.Node]:
    """Return the nodes that a fused kernel reads.

    It computes elementwise operators of other kernels again where their sources are no more bytes.
    """
    inside = set(group)
    homes = {home for one in group for home in _reads(one)} - inside
    read = {one for one in homes if not _is_elementwise(one)}
    for one in sorted(homes - read):
        sources = _sources(one) - read
        is_shorter = sum(map(_num_bytes, sources)) <= _num_bytes(one)
        read |= sources if is_shorter else {one}
    return sorted(read)


def _sources(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that the elementwise operators before a node read."""
    found, seen, left = set(), {node}, [node]
    while left:
        for one in _reads(left.pop()):
            if one in seen:
                continue
            seen.add(one)
            if _is_elementwise(one):
                left.append(one)
            else:
                found.add(one)
    return found


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


_ELEMENTWISE = frozenset({"_to_copy", "clone", "convert_element_type"})
"""Elementwise operators without torch's tag."""


def _is_elementwise(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or target is operator.getitem or _is_alone(node):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket.__name__ in _ELEMENTWISE


def _reads(node: fx.Node) -> list[fx.Node]:
    """Return the distinct values that a node reads; templates of a leaf kernel are not read."""
    given = node.all_input_nodes
    if node.target is _LEAF:
        given = list(node.args[1])
    homes = dict.fromkeys(map(_home, given))
    return [one for one in homes if one.op == "placeholder" or one.all_input_nodes]


def _size(node: fx.Node) -> int:
    """Return the number of elements over which a fused operator iterates."""
    shapes = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    return max(one.numel() for one in shapes if isinstance(one, Tensor))


def _fuse(nodes: list[fx.Node], level: dict[fx.Node, int]) -> list[list[fx.Node]]:
    """Return the groups of operators that become one kernel each."""
    parent = {one: one for one in nodes}

    def find(one: fx.Node) -> fx.Node:
        while parent[one] is not one:
            one = parent[one]
        return one

    readers: dict[Any, fx.Node] = {}
    for one in nodes:
        for home in _reads(one):
            if home in parent and level[home] == level[one]:
                parent[find(one)] = find(home)
            else:
                known = readers.setdefault((home, level[one], _size(one)), one)
                parent[find(one)] = find(known)
    groups = defaultdict(list)
    for one in nodes:
        groups[find(one)].append(one)
    return list(groups.values())
