"""PO-H and PO-F: interleaved schedules whose longest-lived activations wait on the host.

PipeOffload, arXiv 2503.01328, sections 3.2 (selective offload) and 4.

Rule: a chunk of a loop placement lives from its F to its I, the first chunk longest. PO-H is
`gis_h` with the floor(v / 2) longest-lived of every device's v chunks offloaded, PO-F is `gis`
with all of them. Copies go out behind the F and come back just before the I. What moves is as much
as lowers the peak without delaying anything (`hide_offload`). Where copies are too
slow for that (one-way time over a chunk's F + I + W above 1/2 on a half-duplex lane), the published
planner refuses; here what cannot be hidden stays. Under a memory limit below that, as much moves as
the limit asks for, of these chunks or of all, and stalls are taken.

Lane models: that of the problem. Half duplex with a PCIe pair (``half_duplex`` and ``pcie_group``):
each device's copies out and back exclude each other, as the paper's alternating slots of one
round trip, in which one of the pair sends while the other receives. Full duplex: both directions
have a lane of their own.

Memory, in units of a device's micro-batch (v chunks), for d devices: PO-H (v + 2) / (8 v) of d;
asymptotic in d (`po_h_formula`), since what is in transit, and a group's worth of F in a row, come
on top. PO-F O(1 / (v d)) of GIS's. Bubble: that of gis_h and gis. It ignores host limits until it
has to fit them, recompute, and the fused backward.
"""

from __future__ import annotations

from operator import attrgetter, le
from typing import TYPE_CHECKING

from optpipe_solver.families.gis import grouped_interleaved
from optpipe_solver.families.gis_h import smallest_group
from optpipe_solver.families.not_applicable import NotApplicable, Reason
from optpipe_solver.families.shape import chunks_of_loop
from optpipe_solver.fit.fit import THOROUGH, fit
from optpipe_solver.fit.hidden_offload import hide_offload
from optpipe_solver.fit.jobs import Frame
from optpipe_solver.fit.limits import within_hosts

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["build_po_f", "build_po_h", "pipeoffload", "po_h_formula"]

_LARGE = 20_000


def build_po_h(problem: Problem) -> Programs:
    """Return GIS-H with half of the chunks offloaded.

    Raises
    ------
    NotApplicable
        As GIS-H, or if nothing can be offloaded, or if no offload fits the memory limits.
    """
    return pipeoffload(problem, smallest_group(problem), max(1, chunks_of_loop(problem) // 2))


def build_po_f(problem: Problem) -> Programs:
    """Return GIS with all chunks offloaded.

    Raises
    ------
    NotApplicable
        As GIS, or if nothing can be offloaded, or if no offload fits the memory limits.
    """
    chunks = chunks_of_loop(problem)
    return pipeoffload(problem, len(problem.stages) // chunks, chunks)


def po_h_formula(num_devices: int, chunks: int) -> float:
    """Return PO-H's asymptotic memory, in micro-batches of a device."""
    return num_devices * (chunks + 2) / (8 * chunks)


def pipeoffload(problem: Problem, group: int, num_chunks: int) -> Programs:
    """Return the interleaved schedule with the longest-lived chunks of every device offloaded.

    Parameters
    ----------
    problem
        Its limits are kept.
    group
        Micro-batches per group, from half of the devices to all of them.
    num_chunks
        How many of a device's chunks are offloaded, at least 1.

    Raises
    ------
    NotApplicable
        If the placement is no loop, there are fewer micro-batches than a group holds, nothing can
        be offloaded, or the limits cannot be kept in this order.
    """
    programs = grouped_interleaved(problem, group)
    d = len(problem.stages) // chunks_of_loop(problem)
    leaving = range(num_chunks * d)
    if not any(map(problem.can_offload, leaving)):
        raise NotApplicable(
            Reason.CANNOT_OFFLOAD,
            f"none of the first {num_chunks} chunks of any device can be offloaded: that takes "
            "offload_bytes of the stage, and d2h_gb_per_s and h2d_gb_per_s of its device",
        )
    frame = Frame(problem, programs, leaving)
    hidden = hide_offload(frame)
    if all(map(le, hidden.peaks, frame.limits)) and within_hosts(frame.compiled, hidden.rows):
        return frame.decode(hidden.rows)
    return _fitted(frame, group)


def _fitted(frame: Frame, group: int) -> Programs:
    """Return the programs made to fit with stalls; for large problems the first way that does."""
    found = []
    first = fit(frame, THOROUGH)
    if first is not None:
        found.append(first)
    if first is None or len(frame.problem.stages) * frame.problem.num_microbatches <= _LARGE:
        second = fit(Frame(frame.problem, frame.programs), THOROUGH)
        if second is not None:
            found.append(second)
    if not found:
        raise NotApplicable(
            Reason.DOES_NOT_FIT,
            f"interleaving groups of {group} micro-batches does not fit the memory limits, "
            "whatever is offloaded",
        )
    return min(found, key=attrgetter("objective_ms")).programs()
