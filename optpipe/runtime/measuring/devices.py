"""What is known of the devices: memory, and how fast they copy."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from optpipe.errors import InputError
from optpipe.measurements import DeviceFacts, Transfer
from optpipe.runtime.demo_model import join_ranks
from optpipe.runtime.errors import PreflightError
from optpipe.runtime.offload import host_memory_bytes
from optpipe.runtime.preflight import gather, made_on
from optpipe.runtime.torch_names import backends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from optpipe.runtime.measuring.times import Bandwidths, Clock

__all__ = [
    "MeasuringRanks",
    "computing_with",
    "device_facts",
    "device_name",
    "device_named",
    "joined",
    "local_copies",
    "message_sizes",
    "ping_pong",
]


def device_facts(
    ranks: MeasuringRanks, bandwidths: Sequence[Bandwidths | None], memory_bytes: int | None
) -> tuple[DeviceFacts, ...]:
    """Return the facts of every device; each is asked for its own.

    ``memory_bytes`` of each; None = the GPU's own, or an equal part of the host's.
    """
    found = []
    for index, rates in enumerate(bandwidths):
        make = partial(_own_facts, ranks, len(bandwidths), memory_bytes)
        own: dict[str, Any] = ranks.tell(index, make)
        if rates is not None:
            own |= rates.under_compute._asdict()
        found.append(DeviceFacts(**own))
    return tuple(found)


def _own_facts(ranks: MeasuringRanks, num_devices: int, memory_bytes: int | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"host": socket.gethostname()} if ranks.are_many else {}
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        taken = total - free - torch.cuda.memory_reserved(ranks.device)
        return facts | {"memory_bytes": memory_bytes or total, "reserved_bytes": max(0, taken)}
    return facts | {"memory_bytes": memory_bytes or host_memory_bytes() // num_devices}


def device_name(device: torch.device) -> str:
    """Return what people call a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


# --- What messages between devices take: ping-pong between ranks, or copies on the one there is.

_WARMUPS = 2

Pair = tuple[int, int]
"""(lower, higher) device."""


def message_sizes(boundary_bytes: int) -> tuple[int, ...]:
    """Return the sizes that are sent: a short one for the latency, the boundary's, and larger.

    The larger ones, up to 16 times the boundary where that is not more than 256 MiB, tell the
    bandwidth of links on which the boundary's own is as fast as a short message.
    """
    most = max(boundary_bytes, 2**28)
    sizes = {1024, *(min(most, factor * boundary_bytes) for factor in (1, 4, 16))}
    return tuple(sorted(size for size in sizes if size > 0))


def local_copies(
    sizes_of: Mapping[Pair, Sequence[int]], clock: Clock, device: torch.device, repeats: int
) -> tuple[Transfer, ...]:
    """Copy on one device in place of messages between devices that are not there."""
    times: dict[int, list[float]] = {}
    for size in sorted({size for sizes in sizes_of.values() for size in sizes}):
        source, target = _buffer(size, device), _buffer(size, device)
        times[size] = _timed(clock, partial(target.copy_, source), repeats)
    return tuple(
        Transfer(source=a, target=b, num_bytes=size, time_ms=ms)
        for (a, b), sizes in sorted(sizes_of.items())
        for size in sizes
        for ms in times[size]
    )


def ping_pong(
    sizes_of: Mapping[Pair, Sequence[int]],
    clock: Clock,
    device: torch.device,
    group: ProcessGroup | None,
    repeats: int,
) -> tuple[Transfer, ...]:
    """Send messages to and fro between pairs of ranks, one pair at a time.

    A message's time is half of its round trip. All ranks call this together and get all times.
    ``sizes_of`` has the bytes of each pair's messages, the same on all ranks; of each size
    ``repeats`` round trips are kept, and two more come before them. Over gloo messages start and
    end in the host's memory.
    """
    if backends(group).get(device.type) != dist.Backend.NCCL:
        device = torch.device("cpu")
    own: list[Transfer] = []
    for pair, sizes in sorted(sizes_of.items()):
        dist.barrier(group)
        for size in sizes if dist.get_rank(group) in pair else ():
            own += _play(pair, _buffer(size, device), group, clock, repeats)
    return tuple(one for part in gather(own, group) for one in part)


def _play(
    pair: Pair, buffer: Tensor, group: ProcessGroup | None, clock: Clock, repeats: int
) -> list[Transfer]:
    """Send a buffer to and fro; return the transfers on the first rank, which times them."""
    first, second = pair
    if dist.get_rank(group) == second:
        for _ in range(repeats + _WARMUPS):
            dist.recv(buffer, group=group, group_src=first)
            dist.send(buffer, group=group, group_dst=first)
        return []

    def there_and_back() -> None:
        dist.send(buffer, group=group, group_dst=second)
        dist.recv(buffer, group=group, group_src=second)

    return [
        Transfer(source=first, target=second, num_bytes=buffer.numel(), time_ms=ms / 2)
        for ms in _timed(clock, there_and_back, repeats)
    ]


def _timed(clock: Clock, run: Callable[[], object], repeats: int) -> list[float]:
    marks = []
    for _ in range(repeats + _WARMUPS):
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    return [clock.ms_between(start, end) for start, end in marks[_WARMUPS:]]


def _buffer(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


# --- The ranks that measure together, or the one process that measures alone.


class MeasuringRanks:
    """Runs a part of the measuring on one rank and tells all others what came out.

    Without torch.distributed there is one process, which plays all devices.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.are_many = dist.is_initialized() and dist.get_world_size(group) > 1
        self.size = dist.get_world_size(group) if self.are_many else None
        """Number of ranks, or None where one process plays all devices."""

    def check_devices(self, num_devices: int) -> None:
        """Refuse another number of ranks than devices."""
        if self.size not in (None, num_devices):
            raise PreflightError(
                f"the placement names {num_devices} devices, but {self.size} ranks measure: there "
                "must be one rank per device, or one process for all; start that many"
            )

    def tell(self, home: int, make: Callable[[], Any]) -> Any:
        """Return what a function gives on rank ``home``; a failure there fails all ranks."""
        if not self.are_many:
            return make()
        value, faults = made_on(home, make, self.device, self.group)
        if faults:
            raise PreflightError(f"rank {home} could not measure: {faults[0]}")
        return value


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Meet the other ranks where torchrun, or `optpipe.runtime.demo_model`, started some."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or dist.is_initialized():
        yield
        return
    on_gpu = device.type == "cuda"
    join_ranks("nccl" if on_gpu else "gloo", **({"device_id": device} if on_gpu else {}))
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Let the CPU's operations use so many threads, as many as a rank will have."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_named(name: str | None) -> torch.device:
    """Return the device to measure on: the one named, else this rank's GPU, else the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(
            f"--device {name}: torch knows no such device; write cuda or cpu"
        ) from None
    return _own_gpu(device) if device.type == "cuda" else device


def _own_gpu(device: torch.device) -> torch.device:
    """Return the GPU that is named, or that torchrun gave this rank, and make it current."""
    if not torch.cuda.is_available():
        raise InputError(f"--device {device}: torch finds no GPU here; write cpu")
    if ":" not in str(device):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
