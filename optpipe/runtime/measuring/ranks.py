"""The ranks that measure together, or the one process that measures alone."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from optpipe.errors import InputError
from optpipe.runtime.agreement import attempt
from optpipe.runtime.errors import PreflightError
from optpipe.runtime.launch import RENDEZVOUS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup

__all__ = ["MeasuringRanks", "computing_with", "device_named", "joined"]


class MeasuringRanks:
    """Runs a part of the measuring on one rank and tells all others what came out.

    Without torch.distributed there is one process, which plays all devices.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.are_many = dist.is_initialized() and dist.get_world_size(group) > 1
        self.rank = dist.get_rank(group) if self.are_many else 0

    @property
    def size(self) -> int | None:
        """Number of ranks, or None where one process plays all devices."""
        return dist.get_world_size(self.group) if self.are_many else None

    def check_devices(self, num_devices: int) -> None:
        """Refuse another number of ranks than devices.

        Raises
        ------
        PreflightError
            With both numbers.
        """
        if self.size not in (None, num_devices):
            raise PreflightError(
                f"the placement names {num_devices} devices, but {self.size} ranks measure: there "
                "must be one rank per device, or one process for all; start that many"
            )

    def tell(self, home: int, make: Callable[[], Any]) -> Any:
        """Return what a function gives on rank ``home``; it runs there only.

        Raises
        ------
        PreflightError
            On every rank, with the cause, if it failed.
        """
        if not self.are_many:
            return make()
        told: list[Any] = [None]
        if self.rank == home:
            faults: list[str] = []
            told = [(attempt(make, faults), faults)]
        dist.broadcast_object_list(
            told, group=self.group, group_src=home, device=self._packing_device()
        )
        value, faults = told[0]
        if faults:
            raise PreflightError(f"rank {home} could not measure: {faults[0]}")
        return value

    def _packing_device(self) -> torch.device:
        nccl = dist.get_backend(self.group) == dist.Backend.NCCL
        return self.device if nccl else torch.device("cpu")


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Meet the other ranks where torchrun, or `optpipe.runtime.launch`, started some."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if num_ranks == "1" or dist.is_initialized():
        yield
        return
    rendezvous = os.environ.get(RENDEZVOUS_VARIABLE)
    where: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if rendezvous is not None:
        rank = int(os.environ["RANK"])
        where |= {
            "init_method": f"file://{rendezvous}",
            "rank": rank,
            "world_size": int(num_ranks),
        }
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **where)
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
    """Return the device to measure on: the one named, else this rank's GPU, else the CPU.

    Raises
    ------
    InputError
        If there is no such device.
    """
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
