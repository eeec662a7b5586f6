"""The work of each operator that torch calls, from the shapes of its tensors.

`OperatorLog` lists the operators that run inside it, also on device "meta", where tensors have no
data. Each operator has a `PassCost`:

* matrix products, convolutions and grouped products: ``matmul_flops``, or ``narrow_flops`` in fp8,
  by torch's table (`torch.utils.flop_counter`); ``weight_bytes`` are all bytes read and written;
* attention kernels: ``attention_flops``; causal attention does half, and the backward five products
  where the forward does two (FlashAttention-2, arXiv 2307.08691, section 3.1);
* all other operators: ``moved_bytes``, the bytes read and written.

Views, metadata and allocations are free. Collectives have no cost, but a `Collective`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from optpipe.planning.costs import PassCost
from optpipe.runtime.torch_names import (
    TorchDispatchMode,
    group_size,
    storage_identity,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optpipe.planning.accelerators import Efficiency, Hardware

__all__ = [
    "LAUNCH_MS",
    "Collective",
    "Operator",
    "OperatorCost",
    "OperatorLog",
    "has_flops",
    "is_causal",
    "is_free",
    "is_in_place",
    "operator_ms",
    "register_operator_cost",
]

OperatorCost: TypeAlias = "Callable[[tuple[Any, ...], dict[str, Any], Any], PassCost]"
"""Takes an operator's arguments, keyword arguments and result; returns its work.

``cast_elements`` must be 0: count casts in ``moved_bytes``.
"""


class Collective(NamedTuple):
    """A collective of one rank: ``num_bytes`` is the size of the whole tensor, on all ranks."""

    kind: str
    num_bytes: int
    ranks: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends around a ring."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * self.num_bytes * (self.ranks - 1) / self.ranks


class Operator(NamedTuple):
    """One operator that ran.

    Attributes
    ----------
    name
        As in "aten.mm.default".
    cost
        FLOPs and bytes.
    precision
        Of its first floating-point tensor: "bf16", "fp16", "fp32" or "fp8"; of others torch's name.
    launches
        Number of kernels; 0 for a collective.
    collective
        Set for a collective only.
    """

    name: str
    cost: PassCost
    precision: str
    launches: int = 1
    collective: Collective | None = None


LAUNCH_MS = 0.003
"""Time from one small kernel's start to the next one's (assumed)."""

_COSTS: dict[Any, OperatorCost] = {}


def register_operator_cost(operator: Any, cost: OperatorCost) -> None:
    """Let `OperatorLog` use this cost for an operator; it replaces an earlier one.

    ``operator`` is an ``OpOverloadPacket`` such as ``torch.ops.aten.mm``.
    """
    _COSTS[operator] = cost


class OperatorLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operators that run inside the context, without the free ones.

    Attributes
    ----------
    work
        All operators so far, in order.
    """

    def __init__(self, notify: Callable[[Operator], None] | None = None) -> None:
        """``notify`` is called with each operator after it has run."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Operator] = []
        self._notify = notify or self.work.append

    def mark(self) -> int:
        """Return the number of operators so far."""
        return len(self.work)

    def since(self, mark: int) -> list[Operator]:
        """Return the operators since a mark."""
        return self.work[mark:]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor then calls the operators on its shards, which arrive here again.
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # DTensor finds the shape of a result by fake tensors.
        is_fake = any(kind.__name__ == "FakeTensor" for kind in types)
        found = None if is_fake else _operator(func, args, kwargs, result)
        if found is not None:
            self._notify(found)
        return result


def operator_ms(operator: Operator, hardware: Hardware, efficiency: Efficiency) -> float:
    """Return the time of an operator on the device, without waiting for the host.

    The larger of FLOPs and bytes decides. Collectives take a ring's time at the bandwidth inside a
    node.

    Raises
    ------
    FieldError
        If the accelerator has no products of the operator's precision.
    """
    if (sent := operator.collective) is not None:
        rate = hardware.node_gb_per_s.value * 1e9 * efficiency.network
        network_ms = 1e3 * sent.sent_bytes / rate + hardware.network_latency_ms
        return network_ms if sent.ranks > 1 else 0.0
    cost = operator.cost
    seconds = 0.0
    for flops, share in (
        (cost.matmul_flops, efficiency.matmul),
        (cost.narrow_flops, efficiency.narrow),
        (cost.attention_flops, efficiency.attention),
    ):
        if flops:
            seconds += flops / (_peak_flops(hardware, operator.precision) * share)
    num_bytes = cost.weight_bytes + cost.moved_bytes + cost.gradient_bytes
    rate = hardware.memory_gb_per_s.value * 1e9 * efficiency.memory
    return 1e3 * max(seconds, num_bytes / rate) + operator.launches * LAUNCH_MS


_WITH_DOUBLE = frozenset({"ampere", "hopper", "blackwell-200"})
"""Generations whose double-precision rate is half of the single-precision one (data sheets)."""


def _peak_flops(hardware: Hardware, precision: str) -> float:
    if precision == "torch.float64" and hardware.generation in _WITH_DOUBLE:
        return hardware.peak_flops("fp32") / 2
    return hardware.peak_flops(precision)  # type: ignore[arg-type]


# --- Classes of operators.

_FREE_PREFIXES = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "set_", "resize_",
                  "_local_scalar_dense", "_assert", "sym_", "is_same_size", "_reshape_alias",
                  "record_stream")  # fmt: skip

_WRITE_ONLY = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_",
                         "exponential_", "_foreach_copy_", "_foreach_zero_"})  # fmt: skip
"""In-place operators that do not read what they overwrite."""

_GATHERS = frozenset({"embedding", "gather", "index", "index_select", "take"})
"""Read of their first argument as many bytes as they return."""

_SCATTERS = frozenset({"index_add", "index_put", "_index_put_impl", "scatter", "scatter_add",
                       "scatter_reduce", "index_copy"})  # fmt: skip
"""Read and write of their first argument as many bytes as the last tensor has."""

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})

_PRECISIONS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


def _operator(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Operator | None:
    """Return an operator that ran, None if it is free."""
    if func.namespace in _COLLECTIVES:
        found = _collective(args, result, func.overloadpacket.__name__)
        return found and Operator(str(func), PassCost(), "", launches=0, collective=found)
    cost_of = _COSTS.get(func.overloadpacket)
    if is_free(func):
        return None
    tensors = tensors_in(args, kwargs)
    if cost_of is not None:
        cost = cost_of(args, kwargs, result)
    elif func.overloadpacket in flop_registry:
        flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        cost = _product(flops, args, kwargs, result)
    else:
        cost = PassCost(moved_bytes=_moved_bytes(func, args, kwargs, result))
        if not cost.moved_bytes:
            return None
    floats = (one.dtype for one in tensors if one.is_floating_point())
    dtype = next(floats, torch.float32)
    return Operator(str(func), cost, _PRECISIONS.get(dtype, str(dtype)))


def is_free(func: Any) -> bool:
    """Whether an operator only makes views, reads metadata or takes memory."""
    packet = func.overloadpacket
    return packet not in _COSTS and (func.is_view or packet.__name__.startswith(_FREE_PREFIXES))


def has_flops(func: Any) -> bool:
    """Whether an operator is a product, attention, or has a cost of its own."""
    return func.overloadpacket in _COSTS or func.overloadpacket in flop_registry


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results; faster than `tree_leaves`."""
    found = list[Tensor]()
    for one in values:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += tensors_in(*one)
        elif isinstance(one, dict):
            found += tensors_in(*one.values())
    return found


# --- Bytes.


def _regions(tensors: Iterable[Tensor]) -> dict[tuple[Any, ...], int]:
    """Return the distinct regions of storages that tensors cover, with their bytes.

    An expanded dimension has stride 0 and counts once.
    """
    found = {}
    for one in tensors:
        dims = [(size, step) for size, step in zip(one.shape, one.stride(), strict=True) if step]
        num_bytes = math.prod(size for size, _ in dims) * one.element_size() if one.numel() else 0
        identity = storage_identity(one.untyped_storage())
        found[identity, one.storage_offset(), tuple(sorted(dims))] = num_bytes
    return found


def _count_bytes(*values: Any) -> int:
    """Return the bytes of the distinct regions in each value, added up over the values."""
    return sum(sum(_regions(tensors_in(value)).values()) for value in values)


def is_in_place(func: Any) -> bool:
    """Whether an operator changes its first input (torch 2.12 has no tag that says so)."""
    name = func.overloadpacket.__name__
    return bool(name.endswith("_") and (not name.endswith("__") or name.startswith("__i")))


def _moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that an operator without FLOPs reads and writes."""
    name = func.overloadpacket.__name__
    if name in _GATHERS:
        return _count_bytes((args[1:], kwargs), result, result)
    if name.rstrip("_") in _SCATTERS:
        indices_and_source = (args[1:], kwargs)
        added = tensors_in(indices_and_source)[-1:]
        copied = 0 if name.endswith("_") else _count_bytes(args[0], result)
        return copied + _count_bytes(indices_and_source, added, added)
    read = [args, {key: value for key, value in kwargs.items() if key != "out"}]
    written = [result, kwargs.get("out")]
    if is_in_place(func):
        # Operators on lists change them and return nothing.
        written.append(args[0])
        read[0] = args[1:] if name in _WRITE_ONLY else args
    return _count_bytes(read, written)


# --- FLOPs.


def _product(flops: float, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> PassCost:
    """Return the work of a matrix product with these FLOPs."""
    num_bytes = _count_bytes((args, kwargs), result)
    is_narrow = any(_PRECISIONS.get(one.dtype) == "fp8" for one in tensors_in(args))
    name = "narrow_flops" if is_narrow else "matmul_flops"
    return PassCost(weight_bytes=num_bytes, **{name: float(flops)})


def _grouped_product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> PassCost:
    """Return the work of ``_grouped_mm``: each row, or column, is in one group.

    Shapes of the factors: (m, k) and (g, k, n); (g, m, k) and (k, n); (g, m, k) and (g, k, n).
    Gradients of weights have (m, k) and (k, n), with groups along k.
    """
    left, right = args[:2]
    are_columns = left.dim() == 3 and right.dim() == 2
    flops = 2 * right.numel() * left.size(1) if are_columns else 2 * left.numel() * right.size(-1)
    return _product(flops, args, kwargs, result)


_PRODUCTS, _PRODUCTS_BACK = (1, 1), (3, 2)
"""Products of attention along the width of queries, and along that of values."""

_ATTENTION = {
    "_scaled_dot_product_flash_attention": (_PRODUCTS, 0, 4),
    "_scaled_dot_product_flash_attention_backward": (_PRODUCTS_BACK, 1, 11),
    "_scaled_dot_product_flash_attention_for_cpu": (_PRODUCTS, 0, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (_PRODUCTS_BACK, 1, 8),
    "_scaled_dot_product_efficient_attention": (_PRODUCTS, 0, 6),
    "_scaled_dot_product_efficient_attention_backward": (_PRODUCTS_BACK, 1, 11),
    "_scaled_dot_product_cudnn_attention": (_PRODUCTS, 0, 6),
    "_scaled_dot_product_cudnn_attention_backward": (_PRODUCTS_BACK, 1, 14),
}
"""Attention operator of torch -> products, and the places of ``query`` and ``is_causal``."""

_ATTENTION_OF_ANY_LAYOUT = {
    "_flash_attention_forward": 8,
    "_flash_attention_backward": 11,
    "_efficient_attention_forward": None,
    "_efficient_attention_backward": None,
}
"""Attention operators whose FLOPs torch's table has -> the place of ``is_causal``."""


def _attention(products: tuple[int, int], first: int, causal: int) -> OperatorCost:
    """Return the cost of an attention kernel, by the places of its arguments.

    Shapes: (samples, heads, tokens, width). A kernel reads and writes each tensor once.
    """

    def cost(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> PassCost:
        query, key, value = args[first : first + 3]
        samples, heads, tokens, width = query.shape
        seen: float = key.size(-2)
        if _causal_argument(args, kwargs, causal):
            # The last query sees all keys.
            seen = max(seen - tokens / 2, seen / 2)
        flops = 2.0 * samples * heads * tokens * seen
        flops *= products[0] * width + products[1] * value.size(-1)
        return PassCost(attention_flops=flops, weight_bytes=_count_bytes((args, kwargs), result))

    return cost


def _attention_of_any_layout(operator: Any, causal: int | None) -> OperatorCost:
    def cost(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> PassCost:
        flops = float(flop_registry[operator](*args, **kwargs, out_val=result))
        if causal is not None and _causal_argument(args, kwargs, causal):
            flops /= 2
        return PassCost(attention_flops=flops, weight_bytes=_count_bytes((args, kwargs), result))

    return cost


def is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an attention operator of torch is causal."""
    name = func.overloadpacket.__name__
    place = _ATTENTION[name][2] if name in _ATTENTION else _ATTENTION_OF_ANY_LAYOUT.get(name)
    return place is not None and _causal_argument(args, kwargs, place)


def _causal_argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> bool:
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


# --- Collectives.


def _collective(args: tuple[Any, ...], result: Any, name: str) -> Collective | None:
    """Return a collective of torch, None for operators of its library that move nothing."""
    group = [one for one in args if isinstance(one, (str, torch.ScriptObject, dist.ProcessGroup))]
    if not group or "barrier" in name:
        return None
    # The name of a reduction comes before the group's.
    ranks = group_size(group[-1] if isinstance(group[-1], str) else group[0])
    sizes = [_count_bytes(value) for value in (*args, result)]
    kind = next(kind for part, kind in _KINDS.items() if part in name)
    return Collective(kind, max(sizes), ranks)


_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "": "broadcast",
}
"""Part of an operator's name -> kind; all others send one tensor."""


def _register_operators() -> None:
    aten = torch.ops.aten
    for name in ("_grouped_mm", "_scaled_grouped_mm"):
        register_operator_cost(getattr(aten, name), _grouped_product)
    for name, found in _ATTENTION.items():
        register_operator_cost(getattr(aten, name), _attention(*found))
    for name, causal in _ATTENTION_OF_ANY_LAYOUT.items():
        operator = getattr(aten, name)
        register_operator_cost(operator, _attention_of_any_layout(operator, causal))


_register_operators()
