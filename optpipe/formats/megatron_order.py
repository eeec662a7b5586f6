"""The order in which Megatron-Core runs passes: 1F1B, or with several chunks interleaved 1F1B.

``megatron/core/pipeline_parallel/schedules.py`` (get_pp_rank_microbatches, get_schedule_table)
defines it: forwards of ``group`` micro-batches on one chunk, then on the next; as many forwards
ahead as the rank asks for, then one forward and one backward in turn, then the backwards left.
Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, with the group as large as the pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType

if TYPE_CHECKING:
    from optpipe.action import Program, Programs

__all__ = ["group_sizes", "megatron_programs"]

_MOST_SIZES = 12


def group_sizes(num_devices: int, num_microbatches: int) -> tuple[int, ...]:
    """Return group sizes that Megatron-Core accepts, at most twelve of them.

    From the number of devices to that of micro-batches, with a last group that is full or no
    smaller than the pipeline is long. Of more than twelve, evenly spread ones with both ends.
    """
    sizes = [
        size
        for size in range(num_devices, num_microbatches + 1)
        if num_microbatches % size == 0 or num_microbatches % size >= num_devices
    ]
    if len(sizes) <= _MOST_SIZES:
        return tuple(sizes)
    last = len(sizes) - 1
    return tuple(sizes[round(k * last / (_MOST_SIZES - 1))] for k in range(_MOST_SIZES))


def megatron_programs(num_devices: int, chunks: int, num_microbatches: int, group: int) -> Programs:
    """Return the programs, stages in a loop over the devices, backwards fused."""
    order = [
        (chunk, microbatch)
        for first in range(0, num_microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]
    return tuple(_program(order, rank, num_devices, chunks, group) for rank in range(num_devices))


def _program(
    order: list[tuple[int, int]], rank: int, num_devices: int, chunks: int, group: int
) -> Program:
    ahead = num_devices - rank - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * group
    ahead = min(ahead, len(order))
    forwards = [
        Action(chunk * num_devices + rank, ActionType.FORWARD, microbatch)
        for chunk, microbatch in order
    ]
    backwards = [
        Action((chunks - 1 - chunk) * num_devices + rank, ActionType.FULL_BACKWARD, microbatch)
        for chunk, microbatch in order
    ]
    steady = len(order) - ahead
    pairs = zip(forwards[ahead:], backwards[:steady], strict=True)
    return (*forwards[:ahead], *(action for pair in pairs for action in pair), *backwards[steady:])
