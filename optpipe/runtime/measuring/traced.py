"""A simulated device: stages run on tensors without data, and times come from a catalogue.

Tensors are on "meta". The clock adds up the times of operators (`operator_ms`), the meter counts
live storages, and rates of copies and links come from the accelerator's numbers. All else is the
code that measures a real device.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from optpipe.errors import InputError
from optpipe.planning.machine import PEER_LATENCY_MS
from optpipe.planning.step import reserved_bytes
from optpipe.runtime.launch import leave_ranks
from optpipe.runtime.measuring.architectures import count_experts
from optpipe.runtime.measuring.attention import map_attention
from optpipe.runtime.measuring.kernels import with_leaf_kernels
from optpipe.runtime.measuring.memory import meter_for
from optpipe.runtime.measuring.operators import OperatorLog, is_in_place, operator_ms, tensors_in
from optpipe.runtime.measuring.times import Instruments, KnownDevice, Rate
from optpipe.runtime.offload import PlainCopies
from optpipe.runtime.preflight import describe
from optpipe.runtime.torch_names import (
    TorchDispatchMode,
    join_fake_ranks,
    parts_with_memory,
    storage_identity,
    tree_map,
)
from optpipe.runtime.treatments import declare_for_copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.planning.accelerators import Efficiency, Hardware
    from optpipe.runtime.measuring.operators import Operator
    from optpipe.runtime.measuring.times import DevicePair
    from optpipe.runtime.offload import Fence

__all__ = ["TRACED", "TracedClock", "trace_instruments", "use_fake_ranks", "without_data"]

TRACED = torch.device("meta")
"""The device of a traced stage's tensors."""

HOST_LAUNCH_MS = 0.025
"""Time in which the host launches one operator: from the smallest row of (b) in
benchmarks/gpu/RESULTS.md, 86 operators in 2.4 ms."""


def trace_instruments(hardware: Hardware, efficiency: Efficiency | None = None) -> Instruments:
    """Return what measures a stage as on this accelerator, from tensors without data.

    ``efficiency`` are the shares of peak rates; None = those of the catalogue for operators.

    Raises
    ------
    InputError
        If the accelerator has no host to offload to, as a CPU.
    """
    reached = efficiency or hardware.operator_efficiency
    if hardware.pcie_gb_per_s is None:
        raise InputError(
            f"{hardware.title} cannot be traced: it has no link to a host; choose a GPU, or "
            "measure this machine with --device cpu"
        )
    clock = TracedClock(hardware, reached)
    gb_per_s = hardware.pcie_gb_per_s.value * reached.pcie
    rate = Rate(gb_per_s, gb_per_s)
    shares = ", ".join(f"{name} {share:g}" for name, share in asdict(reached).items())
    return Instruments(
        clock=clock,
        meter_for=partial(meter_for, TRACED),
        copies=PlainCopies(),
        known=KnownDevice(
            name=f"{hardware.title}, traced",
            memory_bytes=int(hardware.memory_bytes.value),
            reserved_bytes=reserved_bytes(hardware),
            rate=rate,
            message_ms=partial(_message_ms, hardware, reached),
            note=f"Traced: no pass ran on a GPU. Times are those of a {hardware.title}, computed "
            "from the FLOPs and bytes of each operator, with these shares of its peak rates: "
            f"{shares}. Attention is FlashAttention. Scans and delta rules of transformers are "
            "fused kernels.",
        ),
        running=_running,
        timing=partial(OperatorLog, clock.add),
    )


def _message_ms(
    hardware: Hardware, reached: Efficiency, devices: DevicePair, num_bytes: int
) -> float:
    """Return the time of a message between devices, numbered node after node."""
    first, second = (device // hardware.gpus_per_node for device in devices)
    if first == second:
        latency_ms, rate = PEER_LATENCY_MS, hardware.peer_gb_per_s.value
    else:
        latency_ms = hardware.network_latency_ms
        rate = hardware.network_gb_per_s.value * hardware.network_share
    return latency_ms + num_bytes / (rate * reached.network * 1e6)


@contextmanager
def use_fake_ranks(count: int) -> Iterator[None]:
    """Make this process the first of ``count`` ranks inside the context; the others do not exist.

    Stages that share their tensors with these ranks (``parallelize_module``, ``fully_shard``) are
    traced as this rank's part. They must be made on "meta".
    """
    join_fake_ranks(count)
    try:
        yield
    finally:
        leave_ranks()


@contextmanager
def _running(module: nn.Module) -> Iterator[None]:
    """Run a stage with the kernels of a GPU: flash attention, and those of transformers' models."""
    names = {type(one).__module__ for one in module.modules()}
    kernels = map_attention()
    if any(name.startswith("transformers.") for name in names):
        num_experts = count_experts(getattr(module, "config", None))
        kernels = with_leaf_kernels(module, "torch", num_experts)
    with KnownValues(), kernels:
        yield


class TracedClock:
    """Adds up the times of operators, on the device and on the host that launches them.

    The slower of the two decides between two marks: before each pass the host is far enough ahead.
    """

    def __init__(self, hardware: Hardware, efficiency: Efficiency) -> None:
        self._hardware = hardware
        self._efficiency = efficiency
        self._host_ms = 0.0
        self._device_ms = 0.0

    def add(self, operator: Operator) -> None:
        """Launch an operator."""
        self._host_ms += HOST_LAUNCH_MS
        self._device_ms += operator_ms(operator, self._hardware, self._efficiency)

    def mark(self) -> float:
        """Return the ms at which all operators so far have ended."""
        self._host_ms = self._device_ms = max(self._host_ms, self._device_ms)
        return self._device_ms

    def mark_after(self, fence: Fence, lane: int) -> float:  # noqa: ARG002 - rates are known
        """Return the same: copies are not timed."""
        return self.mark()

    def ms_between(self, start: float, end: float) -> float:
        """Return the difference, rounded to a femtosecond: equal passes take equal times."""
        return round(end - start, 12)


_MAX_KNOWN = 1 << 20
"""Number of elements above which a tensor's values are not known."""


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the values of small integer and boolean tensors that depend on no other values.

    Models read such values to choose a path: for example, transformers reads from positions whether
    a sample has several sequences. Each operator on known tensors also runs on the CPU.

    Raises
    ------
    InputError
        If a value is read that is not known.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and "_wrap_tensor" in func.overloadpacket.__name__:
            # It wraps the result of a collective; on "meta" torch would take new memory for it.
            return args[0]
        kwargs = kwargs or {}
        given = tensors_in(args, kwargs)
        are_known = all(one in self._values for one in given if one.is_meta)
        if torch.Tag.data_dependent_output in func.tags and given and given[0].is_meta:
            if not are_known:
                raise InputError(
                    f"{func} reads a value of a tensor of shape {tuple(given[0].shape)}, but a "
                    "traced stage has shapes only; replace the choice by one that depends on "
                    "shapes, or measure on a GPU"
                )
            return func(*self._on_host(args), **kwargs)
        result = func(*args, **kwargs)
        results = tensors_in(result) if are_known else []
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_filled = not is_random and "empty" not in func.overloadpacket.__name__
        if results and is_filled and all(map(_may_be_known, results)):
            on_host = self._on_host(kwargs) | ({"device": "cpu"} if "device" in kwargs else {})
            values = tensors_in(func(*self._on_host(args), **on_host))
            self._values.update(zip(results, values, strict=True))
        elif is_in_place(func) and given[0] in self._values:
            self._forget(given[0])
        return result

    def _forget(self, changed: Tensor) -> None:
        """Forget all tensors that share memory with one that gets unknown values."""
        storage = storage_identity(changed.untyped_storage())
        shared = [one for one in self._values if storage_identity(one.untyped_storage()) == storage]
        for one in shared:
            del self._values[one]

    def _on_host(self, value: Any) -> Any:
        """Return arguments with the known values of tensors."""

        def known(one: Any) -> Any:
            is_known = isinstance(one, Tensor) and one in self._values
            return self._values[one] if is_known else one

        return tree_map(known, value)


def _may_be_known(tensor: Tensor) -> bool:
    return (
        tensor.is_meta
        and not (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel() <= _MAX_KNOWN
    )


# --- Modules without data.

Value = TypeVar("Value")


def without_data(value: Value) -> Value:
    """Return a copy of modules and tensors with all tensors on "meta"; the originals stay as is.

    Tensors that share memory share it in the copy. Modules and tensors that are on "meta" already
    are not copied.

    Raises
    ------
    InputError
        If something in a module cannot be copied.
    """
    # `copy.deepcopy` returns these for the parts, by their identity.
    copies: dict[int, Any] = {}
    for part in _parts_of(value):
        tensors = [part] if isinstance(part, Tensor) else [*part.parameters(), *part.buffers()]
        if tensors and all(one.is_meta for one in tensors):
            copies[id(part)] = part
    with _Bare():
        try:
            copied = copy.deepcopy(value, copies)
        except Exception as error:
            raise InputError(
                f"the stages cannot be copied to trace them: {describe(error)}; make them without "
                'data, inside of `with torch.device("meta"):`'
            ) from error
    for module in _parts_of(value):
        if isinstance(module, nn.Module):
            declare_for_copy(module, lambda part: copies.get(id(part), part))
    return copied


def _parts_of(value: Any) -> Iterator[Tensor | nn.Module]:
    """Yield the tensors and modules of nested lists and tuples."""
    if isinstance(value, Tensor | nn.Module):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _parts_of(one)


class _Bare(TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors without their data inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._copy(tensor).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        if func is Tensor.clone:
            # A parameter's copy clones its data.
            return self._copy(args[0])
        return func(*args, **(kwargs or {}))

    def _copy(self, tensor: Tensor) -> Tensor:
        if len(list(parts_with_memory(tensor))) != 1 or type(tensor) not in _PLAIN:
            raise TypeError(f"no copy of a {type(tensor).__name__} without data")
        storage = tensor.untyped_storage()
        bare = self._storages.setdefault(
            storage_identity(storage),
            torch.UntypedStorage(storage.nbytes(), device="meta"),  # type: ignore[no-untyped-call]
        )
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        return empty.set_(bare, tensor.storage_offset(), tensor.size(), tensor.stride())


_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})
