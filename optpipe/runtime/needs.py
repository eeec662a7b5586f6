"""What a rank needs of its device and host, added up over the ranks that share them.

Memory is a property of the program (DESIGN section 3), so it can be compared with what is there
before anything runs: the plan's peak, and the boundary tensors in flight at their real sizes.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, NamedTuple

import torch

from optpipe.memory import host_walk, memory_walk
from optpipe.runtime.errors import PreflightError
from optpipe.runtime.host_pool import host_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe.action import Action, Program
    from optpipe.problem import Problem

__all__ = ["Needs", "check_needs", "needs_of"]


class Needs(NamedTuple):
    """One rank's needs and what there is; in bytes."""

    host: str
    device: str
    planned_bytes: int
    boundary_bytes: int
    pinned_bytes: int
    device_bytes: int
    host_bytes: int


def needs_of(
    rank: int,
    program: Program,
    problem: Problem | None,
    boundary: Mapping[Action, int],
    device: torch.device,
) -> Needs:
    """Return what this rank will need; without a problem only its boundary tensors are known.

    Parameters
    ----------
    boundary
        Bytes of boundary tensors on the device while each action of torch's runs.

    Raises
    ------
    PreflightError
        If the problem reserves bytes on this device, but fewer than the boundary tensors take:
        the limit that the plan keeps to would not be the device's.
    """
    boundary_bytes = max(boundary.values(), default=0)
    reserved = problem.devices[rank].reserved_bytes if problem is not None else 0
    if 0 < reserved < boundary_bytes:
        raise PreflightError(
            f"boundary tensors in flight take up to {boundary_bytes} bytes of device {rank}, its "
            f"reserved_bytes are {reserved}; reserve at least as much, and solve again"
        )
    host_bytes = host_memory_bytes()
    on_gpu = device.type == "cuda"
    return Needs(
        host=socket.gethostname(),
        device=str(device),
        planned_bytes=_planned_bytes(rank, program, problem, boundary),
        boundary_bytes=boundary_bytes,
        pinned_bytes=0 if problem is None else max(host_walk(problem, program), default=0),
        device_bytes=torch.cuda.get_device_properties(device).total_memory
        if on_gpu
        else host_bytes,
        host_bytes=host_bytes,
    )


def _planned_bytes(
    rank: int, program: Program, problem: Problem | None, boundary: Mapping[Action, int]
) -> int:
    """Return the peak of activations, static bytes and boundary tensors together."""
    if problem is None:
        return max(boundary.values(), default=0)
    level = peak = 0
    for action, step in zip(program, memory_walk(problem, rank, program), strict=True):
        # Transfers and recomputation neither post nor use boundary tensors.
        level = boundary.get(action, level)
        peak = max(peak, step.peak + level)
    return peak


def check_needs(all_needs: Sequence[Needs]) -> None:
    """Refuse ranks that together need more of a device or host than there is.

    Raises
    ------
    PreflightError
        With every device and host that is too small; the same on all ranks.
    """
    shortages = _shortages(
        [
            ((needs.host, needs.device), needs.planned_bytes, needs.device_bytes)
            for needs in all_needs
            if needs.device != "cpu"
        ],
        "plan a smaller peak (memory_bytes), or offload or recompute more",
    )
    shortages += _shortages(
        [
            # On a CPU the device is the host.
            (
                (needs.host, "host memory"),
                needs.pinned_bytes + (needs.planned_bytes if needs.device == "cpu" else 0),
                needs.host_bytes,
            )
            for needs in all_needs
        ],
        "offload less, plan a smaller peak, or give hosts a memory_bytes, and solve again; to "
        "rehearse a plan with smaller stages, leave out problem=",
    )
    if shortages:
        raise PreflightError("; ".join(shortages))


def _shortages(rows: Sequence[tuple[tuple[str, str], int, int]], fix: str) -> list[str]:
    """Return a line for every place whose ranks need more than it has."""
    needed: dict[tuple[str, str], int] = {}
    for place, num_bytes, _ in rows:
        needed[place] = needed.get(place, 0) + num_bytes
    has = {place: available for place, _, available in rows}
    return [
        f"{what} of {host} would hold {num_bytes} bytes at its peak, but has {has[host, what]}; "
        f"{fix}"
        for (host, what), num_bytes in needed.items()
        if num_bytes > has[host, what]
    ]
