"""All private names of torch that the runtime uses.

`PRIVATE_NAMES` says of each what it is for, and what the runtime would do without it. All are
tested in torch 2.12.1, 2.13.0, 2.14.1 and 2.15.0 (`make test-torch` runs the runtime's tests with
another torch). ``tests/test_house.py`` compares the list with the code.
"""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo import eval_frame
from torch._dynamo.decorators import skip
from torch._dynamo.eval_frame import OptimizedModule
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.library import EffectType, custom_op  # type: ignore[attr-defined]
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store
    from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "PRIVATE_NAMES",
    "BufferPlace",
    "FsdpReduction",
    "TorchDispatchMode",
    "accumulator_of",
    "adds_to_grad",
    "alias_no_view",
    "backends",
    "buffers_of",
    "default_store",
    "dependencies_of",
    "detached",
    "effect",
    "fsdp_parts",
    "group_alike",
    "group_of_messages",
    "group_size",
    "has_accumulator_hooks",
    "has_gradient_hooks",
    "in_backward",
    "inductor_decompositions",
    "is_compiled",
    "is_grouped_product",
    "is_profiled",
    "is_transformed",
    "join_fake_ranks",
    "note_accumulator_hooks",
    "parts_with_memory",
    "prepare_ddp_reduction",
    "reduce_by_ddp",
    "reduced_by_ddp",
    "replaced",
    "running_accumulators",
    "sharded_in_forward",
    "slices_of_mesh",
    "storage_identity",
    "takes_grouped_products",
    "tensors_of",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "types_when_gathered",
    "untraced",
    "version_of",
    "versions_of",
    "viewed",
    "with_composites",
    "without_modes",
]


class PrivateName(NamedTuple):
    """The use of a private name, and its replacement if torch drops it."""

    use: str
    instead: str


_NO_SPLIT: Final = "the stage gets fused B"

PRIVATE_NAMES: Final = {
    # Modules and tensors.
    "torch.utils._pytree": PrivateName("tensors in nested values", "the package optree"),
    "torch.utils._python_dispatch": PrivateName(
        "operators that a pass calls, and the parts of wrapped tensors",
        "no measured memory inside of a pass, no DTensors, and no compiled layers in a trace",
    ),
    "_version": PrivateName(
        "changes in place; torch's notes on autograd describe it",
        "recomputing and offloading are refused, because a change would go unnoticed",
    ),
    "_base": PrivateName("what a tensor is a view of", "weights that are views are not split"),
    "_unsafe_view": PrivateName(
        "a tensor without memory that has the graph of an output",
        "outputs stay until their backward",
    ),
    "_cdata": PrivateName(
        "whether two tensors share a storage", "`data_ptr`, but not for tensors without data"
    ),
    "_parameters": PrivateName("a module's own parameters", "`parameters`, nine times as slow"),
    "_buffers": PrivateName("a module's own buffers", "`buffers`, nine times as slow"),
    "_grouped_mm": PrivateName("products of experts", _NO_SPLIT),
    "_can_use_grouped_mm": PrivateName(
        "whether transformers makes these products", "the rule that it has today, for GPUs"
    ),
    "_SetExcludeDispatchKeyGuard": PrivateName(
        "changes in place of what selective checkpointing keeps",
        "selective checkpointing together with offload is refused",
    ),
    # Autograd: which gradients W makes.
    "_backward_hooks": PrivateName("whether somebody waits for a gradient", _NO_SPLIT),
    "_post_accumulate_grad_hooks": PrivateName("whether somebody waits for a gradient", _NO_SPLIT),
    "_current_autograd_node": PrivateName(
        "whether a backward is running, and the parameters that its node has read", _NO_SPLIT
    ),
    "_will_engine_execute_node": PrivateName(
        "whether the running backward adds to a parameter's gradient", _NO_SPLIT
    ),
    "_are_functorch_transforms_active": PrivateName(
        "whether a function of torch.func runs", "`vmap`, `jvp` and `grad` fail in split layers"
    ),
    # Compiled code.
    "torch._dynamo.eval_frame": PrivateName("which modules are compiled", _NO_SPLIT),
    "_compiled_call_impl": PrivateName("which modules are compiled", _NO_SPLIT),
    "torch._C._dynamo": PrivateName(
        "whether code is being compiled", "`torch.compiler.disable`: offload is 5% slower"
    ),
    "torch._dynamo.decorators": PrivateName("functions that compiled code calls", "the same"),
    "torch._inductor.decomposition": PrivateName(
        "into what torch.compile takes operators apart",
        "in traces, compiled layers with a LayerNorm or a softmax keep a sixth too much",
    ),
    # Data parallelism.
    "_get_ddp_logging_data": PrivateName("how many parameters DDP reduces", _NO_SPLIT),
    "_module_parameters": PrivateName("which parameters DDP knows", _NO_SPLIT),
    "_fsdp_param_groups": PrivateName("which parameters FSDP2 gathers, and their type", _NO_SPLIT),
    # Ranks and their connections.
    "_get_default_store": PrivateName("ranks tell each other of failures", "a store of our own"),
    "_process_group_name": PrivateName(
        "groups that some ranks make", "all ranks of all pipelines make them together"
    ),
    "torch.testing._internal.distributed.fake_pg": PrivateName(
        "the other ranks of a traced stage", "no traced tensor-parallel stages"
    ),
    "_resolve_process_group": PrivateName(
        "a group of which only the name is given", "no traced tensor-parallel stages"
    ),
    "_get_root_mesh": PrivateName("the mesh that a mesh is a part of", "`mesh=` names it"),
    # The profiler.
    "_is_profiler_enabled": PrivateName(
        "names of actions in a profile", "they are always given, which is slower"
    ),
}
"""Attributes, and modules from which something is imported."""

_ALIAS: Final = torch.ops.aten._unsafe_view.default  # noqa: SLF001


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether somebody (DDP, a user) waits for autograd to make this parameter's gradient."""
    return bool(getattr(parameter, "_backward_hooks", None)) or bool(
        getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def has_accumulator_hooks(parameter: Tensor) -> bool:
    """Whether `note_accumulator_hooks` found hooks on the node that adds to ``parameter.grad``."""
    return hasattr(parameter, _HOOKED)


def note_accumulator_hooks(parameters: Iterable[Tensor]) -> None:
    """Mark the parameters whose autograd nodes, which add to ``.grad``, have hooks.

    ``torch.distributed.optim`` puts optimizers there. Such a node shows its hooks to the garbage
    collector, and only while no graph holds the node. So call this before a step.
    """
    for parameter in parameters:
        vars(parameter).pop(_HOOKED, None)
        if (
            parameter.requires_grad
            and not has_gradient_hooks(parameter)
            and any(gc.get_referents(accumulator_of(parameter)))
        ):
            setattr(parameter, _HOOKED, True)


_HOOKED: Final = "optpipe_has_accumulator_hooks"


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is nested, or torch.func transforms the functions that are called."""
    return tensor.is_nested or torch._C._are_functorch_transforms_active()  # noqa: SLF001


def reduce_by_ddp(module: DistributedDataParallel) -> None:
    """Let DDP reduce the gradients that are there, as at the end of a backward of its own.

    A W makes gradients without autograd, so DDP does not notice them. A backward of zeros fires its
    hooks: its buckets then take each parameter's whole gradient, the zeros added.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        seen = [parameter.view_as(parameter) for parameter in parameters]
    zeros = [tensor.new_zeros(()).expand_as(tensor) for tensor in seen]
    module.reducer.prepare_for_backward(seen)
    torch.autograd.backward(seen, zeros)


def reduced_by_ddp(module: DistributedDataParallel) -> tuple[set[Tensor], int]:
    """Return the parameters that a stage had when DDP wrapped it, and how many of them DDP reduces.

    DDP reduces those that required a gradient at that time.
    """
    logged = module._get_ddp_logging_data()  # type: ignore[no-untyped-call] # noqa: SLF001
    count = logged["num_parameter_tensors"]
    return set(module._module_parameters), int(count)  # noqa: SLF001


def prepare_ddp_reduction(module: DistributedDataParallel, roots: Sequence[Tensor]) -> None:
    """Let DDP reduce gradients during the next backward, which begins at these tensors.

    DDP prepares itself in a forward outside of `no_sync`, but several micro-batches lie between a
    forward and the last backward.
    """
    module.reducer.prepare_for_backward(list(roots))


class FsdpReduction:
    """When FSDP2 reduces the gradients of a stage: once in a step, after the last W or B.

    A W adds to ``.grad`` without autograd, so FSDP2's hooks do not see it. FSDP2 takes a method of
    the stage for a forward. It runs forward and backward on a zero, and the hooks of the stage and
    of all its parts then take up the existing gradients. All of this is public API.
    """

    def __init__(self, module: FSDPModule) -> None:
        self._module: Any = module
        if not hasattr(module, _FSDP_METHOD):
            setattr(module, _FSDP_METHOD, MethodType(_times_one, module))
            register_fsdp_forward_method(cast("nn.Module", module), _FSDP_METHOD)

    def hold_back(self) -> None:
        """Let backwards add up gradients without a reduction, and keep gathered weights."""
        self._set(reduces=False)

    def take_over(self) -> None:
        """Add what a W made to the sum that FSDP2 holds in the type of the reduction.

        With ``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)`` the gradients of
        several W's would otherwise be added up in bfloat16. Since torch 2.15 ``.grad`` itself has
        the type of the reduction (``grad_dtype``).
        """
        self._set(reduces=False)
        self._run_hooks()

    def reduce(self) -> None:
        """Reduce the gradients, and free gathered weights."""
        self._set(reduces=True)
        self._run_hooks()

    def _set(self, *, reduces: bool) -> None:
        self._module.set_is_last_backward(reduces)
        self._module.set_reshard_after_backward(reduces)
        self._module.set_requires_gradient_sync(reduces)

    def _run_hooks(self) -> None:
        device = next(self._module.parameters()).device
        with torch.enable_grad():
            zero = torch.zeros((), device=device, requires_grad=True)
            getattr(self._module, _FSDP_METHOD)(zero).backward()


_FSDP_METHOD: Final = "optpipe_take_up_gradients"


def _times_one(_: nn.Module, value: Tensor) -> Tensor:
    return value * 1


def sharded_in_forward(module: nn.Module) -> set[Tensor]:
    """Return the parameters that a forward sees as DTensors; FSDP2 gathers its own before."""
    gathered = {one.sharded_param for one in _fsdp_params(module) if not one.is_dtensor}
    sharded: set[Tensor] = {p for p in module.parameters() if isinstance(p, DTensor)}
    return sharded - gathered


def types_when_gathered(module: nn.Module) -> dict[Tensor, torch.dtype]:
    """Return the parameters that FSDP2 gathers whole for a forward, and of which type it is."""
    return {
        one.sharded_param: one.mp_policy.param_dtype or one.sharded_param.dtype
        for one in _fsdp_params(module)
        if not one.is_dtensor
    }


def fsdp_parts(module: nn.Module) -> list[Any]:
    """Return the modules of a stage whose weights FSDP2 gathers, the stage itself among them."""
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def _fsdp_params(module: nn.Module) -> Iterator[Any]:
    for part in fsdp_parts(module):
        for group in fully_shard.state(part)._fsdp_param_groups:  # type: ignore[attr-defined] # noqa: SLF001
            yield from group.fsdp_params


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of this module runs what torch.compile has made of it."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None  # noqa: SLF001


def is_profiled() -> bool:
    """Whether a profiler of torch looks for named ranges."""
    return bool(torch.autograd.profiler._is_profiler_enabled)  # noqa: SLF001


def effect(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make an operator of a function that is called for what it does, also by compiled code.

    It is run each time, in order; a CUDA graph is not made of it.
    """

    def operator_of(function: Callable[..., None]) -> Callable[..., None]:
        operator = custom_op(name, function, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
        operator.register_fake(lambda *_: None)
        operator.register_effect(EffectType.ORDERED)
        return operator

    return operator_of


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep compiled code from tracing a function that it calls, at no price where there is none.

    `torch.compiler.disable` alone makes offload 5% slower (`benchmarks.runtime_overhead`).
    """
    disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @skip
    def run(*given: Any) -> Any:
        is_tracing = eval_frame.get_eval_frame_callback() is not None
        return disabled(*given) if is_tracing else function(*given)

    return run


def version_of(tensor: Tensor) -> int:
    """Return how often it, or a tensor that autograd knows to share its memory, was changed."""
    return tensor._version  # noqa: SLF001


def versions_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return how often each, or a tensor that autograd knows to share its memory, was changed."""
    return tuple(map(version_of, tensors))


def detached(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph, both counting changes in place of their memory.

    Selective checkpointing calls hooks from a dispatch mode. There `Tensor.detach` alone would
    return a tensor with a count of its own.
    """
    if tensor.requires_grad:
        # Tensors of selective checkpointing never require a gradient, and the guard costs 1.5 us.
        return tensor.detach()
    key = torch._C.DispatchKey.ADInplaceOrView  # noqa: SLF001
    with torch._C._SetExcludeDispatchKeyGuard(key, False):  # noqa: SLF001
        return tensor.detach()


def alias_no_view(tensor: Tensor) -> Tensor:
    """Return the same values in the same memory, for autograd a tensor of its own.

    Unlike a view it does not keep the tensor that it was made from.
    """
    alias: Tensor = _ALIAS(tensor, tensor.shape)
    return alias


def parts_with_memory(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose memory this one uses: itself, except for wrappers like DTensor."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        # Since 2.13 a DTensor names its mesh, too.
        if isinstance(part, torch.Tensor):
            yield from parts_with_memory(part)


def is_grouped_product(function: object) -> bool:
    """Whether a torch function is the product of groups of rows with a matrix each.

    ``functional.grouped_mm`` calls it, and torchtitan calls it directly.
    """
    return function is torch._grouped_mm  # noqa: SLF001


def takes_grouped_products(weight: Tensor) -> bool:
    """Whether transformers makes the products of experts with such weights by `grouped_mm`.

    On GPUs before SM80, among others, it falls back to a product after the other.
    """
    can_use = getattr(sys.modules.get("transformers.integrations.moe"), "_can_use_grouped_mm", None)
    if can_use is not None:
        return bool(can_use(weight, weight, weight))
    capability = torch.cuda.get_device_capability(weight.device) if weight.is_cuda else (8, 0)
    return capability >= (8, 0)


def slices_of_mesh(mesh: DeviceMesh, dims: tuple[str, ...]) -> Iterator[DeviceMesh]:
    """Yield what has exactly these dimensions: the mesh, or part of it or of what it is part of."""
    for whole in (mesh, mesh._get_root_mesh()):  # noqa: SLF001
        names = tuple(whole.mesh_dim_names or ())
        if names == dims:
            yield whole
        elif dims and set(dims) <= set(names):
            yield whole[dims]


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Return what no other storage has while a reference to this one, weak or not, is held."""
    return int(storage._cdata)  # noqa: SLF001


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_autograd_node() is not None  # noqa: SLF001


def accumulator_of(parameter: Tensor) -> Any:
    """Return the node of autograd that adds gradients to a parameter's ``.grad``."""
    return get_gradient_edge(parameter).node


def dependencies_of(output: Tensor, inputs: Sequence[Tensor]) -> list[bool]:
    """Return whether the graph of a tensor leads to each of these leaves."""
    left = [get_gradient_edge(output).node] if output.requires_grad else []
    seen = set(left)
    while left:
        nodes = {node for node, _ in left.pop().next_functions if node is not None} - seen
        seen |= nodes
        left += nodes
    return [one.requires_grad and accumulator_of(one) in seen for one in inputs]


def running_accumulators() -> dict[Tensor, Any]:
    """Return the parameters that the running node of autograd read, each with its accumulator."""
    running: Any = torch._C._current_autograd_node()  # noqa: SLF001
    nodes = (node for node, _ in running.next_functions)
    return {node.variable: node for node in nodes if hasattr(node, "variable")}


def adds_to_grad(accumulator: Any, *, or_returns: bool = False) -> bool:
    """Return whether the backward that runs in this thread adds to ``.grad`` by this node.

    `torch.autograd.grad` adds to no parameter, and ``backward(inputs=...)`` to some of them. With
    ``or_returns``, a gradient that `torch.autograd.grad` returns counts, too.
    """
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))  # noqa: SLF001
    except RuntimeError:
        # Raised for a parameter whose gradient torch.autograd.grad returns.
        return or_returns


def viewed(tensor: Tensor) -> Tensor:
    """Return the tensor that autograd knows this one to be a view of; itself if of none."""
    base: Tensor | None = tensor._base  # noqa: SLF001
    return tensor if base is None else base


def default_store() -> Store:
    """Return the key-value store through which the ranks found each other."""
    return distributed_c10d._get_default_store()  # noqa: SLF001


def backends(group: ProcessGroup | None) -> dict[str, str]:
    """Return what carries tensors of each kind of device, as {"cpu": "gloo", "cuda": "nccl"}.

    The backend's own name does not say so: that of ``init_process_group()`` is "undefined".
    """
    config = distributed_c10d.get_backend_config(group)
    return dict(part.split(":", 1) for part in config.split(","))


def group_of_messages(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group whose messages have a queue per neighbour; all ranks together.

    This is the group itself, unless some rank has bound a device to it or to the default group
    (``init_process_group(device_id=...)``). NCCL makes the communicator of such a group
    immediately, and it carries all messages of a rank one after the other on one stream. Then the
    result is a new group of the same ranks, made while no device is bound. NCCL makes its
    communicators for two ranks each, at their first message.
    """
    default: Any = dist.group.WORLD
    bound = default.bound_device_id
    of_ranks: list[bool] = [False] * dist.get_world_size(group)
    is_bound = bound is not None or (group or default).bound_device_id is not None
    dist.all_gather_object(of_ranks, is_bound, group=group)
    if not any(of_ranks):
        return group
    default.bound_device_id = None
    try:
        return group_alike(group)
    finally:
        default.bound_device_id = bound


def group_alike(group: ProcessGroup | None, backend: str | None = None) -> ProcessGroup:
    """Return a new group of the same ranks, which make it together and without all others.

    Its first rank names it. By default each rank would name it by the number of groups that the
    rank is in. Ranks in more or fewer groups would then wait for each other for ever. For example,
    in Megatron-Core the first and last stages share a group for tied embeddings.
    """
    members = dist.get_process_group_ranks(group)
    naming = distributed_c10d._process_group_name  # noqa: SLF001
    names = [naming(members, use_hashed_name=True)] * len(members)
    dist.all_gather_object(names, names[0], group=group)
    distributed_c10d._process_group_name = lambda *_, **__: names[0]  # noqa: SLF001
    try:
        new_group: ProcessGroup = dist.new_group(
            members, backend=backend, use_local_synchronization=True
        )
    finally:
        distributed_c10d._process_group_name = naming  # noqa: SLF001
    return new_group


def group_size(group: Any) -> int:
    """Return the number of ranks of a group that an operator gets: the group, boxed, or a name."""
    if isinstance(group, str):
        group = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type] # noqa: SLF001
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return int(group.size())


def join_fake_ranks(count: int) -> None:
    """Join a fake group of ``count`` ranks as its only real one; collectives move nothing."""
    # Few need this module, which is slow to import.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's own parameters and buffers, quicker than its public methods do."""
    for one in (*module._parameters.values(), *module._buffers.values()):  # noqa: SLF001
        if one is not None:
            yield one


BufferPlace = tuple[nn.Module, str]
"""A module and the name of a buffer of its own."""


def buffers_of(module: nn.Module) -> dict[BufferPlace, Tensor]:
    """Return all buffers of a module and its parts."""
    return {
        (owner, name): buffer
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
    }


@contextmanager
def replaced(copies: Mapping[BufferPlace, Tensor]) -> Iterator[None]:
    """Let modules have these in place of their buffers inside the context."""
    buffers = {place: getattr(*place) for place in copies}
    for place, copy in copies.items():
        setattr(*place, copy)
    try:
        yield
    finally:
        for place, buffer in buffers.items():
            setattr(*place, buffer)


without_modes = _disable_current_modes
"""A context in which no mode sees operators."""


@contextmanager
def with_composites() -> Iterator[None]:
    """Let a graph that is traced on "meta" have the parts of operators made of others.

    Left alone, torch calls its own kernel for "meta" there, and the operator (`torch.where` with a
    number, or a dropout) has no gradient.
    """
    key = torch._C.DispatchKey  # noqa: SLF001
    with ExitStack() as stack:
        for packet in map(partial(getattr, torch.ops.aten), dir(torch.ops.aten)):
            for name in packet.overloads() if hasattr(packet, "overloads") else ():
                one = getattr(packet, name)
                if key.Meta not in one.py_kernels:
                    continue
                if not one.has_kernel_for_dispatch_key(key.CompositeImplicitAutograd):
                    continue
                kernel = one.py_kernels.pop(key.Meta)
                # A registration makes torch forget which kernel it has called.
                one.py_impl(key.Meta)(kernel)
                del one.py_kernels[key.Meta]
                stack.callback(one.py_impl(key.Meta), kernel)
        yield


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return into what operators ``torch.compile`` takes others apart."""
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    found: dict[Any, Callable[..., Any]] = select_decomp_table()
    return found
