"""What the public zero-bubble runtime cannot run, or would run with wrong gradients.

It keeps activations, received tensors, weight gradients and offloaded activations of a chunk in
queues, first in first out (``TrainingIteration.Buffers``, ``WeightGradStore`` and
``ActivationStorePool``): what comes in another order gets another micro-batch's tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe.errors import ScheduleFormatError
from optpipe.presets.cut import placement_of

if TYPE_CHECKING:
    from optpipe.action import Program, Programs
    from optpipe.problem import Problem

__all__ = ["expect_zero_bubble"]

_QUEUES = {
    ActionType.FORWARD: "forwards",
    ActionType.BACKWARD_INPUT: "backwards",
    ActionType.FULL_BACKWARD: "backwards",
    ActionType.BACKWARD_WEIGHT: "weight gradients",
    ActionType.OFFLOAD: "offloads",
    ActionType.RELEASE: "releases",
    ActionType.RELOAD: "reloads",
}


def expect_zero_bubble(problem: Problem, programs: Programs) -> None:
    """Accept legal programs that the runtime runs right, refuse all others.

    Raises
    ------
    ScheduleFormatError
        With row, column and cell, and what to do.
    """
    _expect_placement(problem)
    for device, program in enumerate(programs):
        _expect_queues(device, program)


def _expect_placement(problem: Problem) -> None:
    num_devices = len(problem.devices)
    chunks, rest = divmod(len(problem.stages), num_devices)
    known = []
    if rest == 0 and num_devices > 1:
        known.append(placement_of("loop", num_devices, chunks))
        if chunks == 2:
            known.append(placement_of("v", num_devices, chunks))
    if problem.placement not in known:
        raise ScheduleFormatError(
            f"placement {list(problem.placement)} on {num_devices} devices: the zero-bubble "
            "runtime has two devices or more, and one stage on each, chunks in a loop, or two "
            "chunks in a V; use optpipe.runtime, or such a placement"
        )


def _expect_queues(device: int, program: Program) -> None:
    last: dict[tuple[int, str], int] = {}
    for index, action in enumerate(program):
        if action.type is ActionType.RECOMPUTE:
            raise _refused(
                device, index, action, "the zero-bubble runtime's R makes again only what a layer "
                "handed in for it (norms, activation functions), not a whole forward; solve "
                "without recompute_ms",
            )  # fmt: skip
        queue = (action.stage, _QUEUES[action.type])
        before = last.get(queue, -1)
        if action.microbatch < before:
            raise _refused(
                device, index, action, f"comes after micro-batch {before}, but the zero-bubble "
                f"runtime takes the {queue[1]} of a chunk in the order of the micro-batches, and "
                "would make wrong gradients silently; use optpipe.runtime, or a schedule that "
                "keeps the order",
            )  # fmt: skip
        last[queue] = action.microbatch


def _refused(device: int, index: int, action: Action, why: str) -> ScheduleFormatError:
    return ScheduleFormatError(f"row {device + 1}, column {index + 1}: {action}: {why}")
