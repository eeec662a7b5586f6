"""What DeepSpeed's pipeline engine cannot run, or would run with wrong gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe.errors import ScheduleFormatError

if TYPE_CHECKING:
    from optpipe.action import Program, Programs
    from optpipe.problem import Problem

__all__ = ["expect_deepspeed", "fuse_backwards"]

_RUNS = (ActionType.FORWARD, ActionType.FULL_BACKWARD)
_WHY_NOT = {
    ActionType.BACKWARD_INPUT: "BackwardPass makes both gradients at once; export with --fuse",
    ActionType.BACKWARD_WEIGHT: "BackwardPass makes both gradients at once; export with --fuse",
    ActionType.RECOMPUTE: "there is no instruction to run a forward again (activation "
    "checkpointing does it inside BackwardPass, for all micro-batches alike); solve without "
    "recompute_ms",
}
_NO_OFFLOAD = (
    "there is no instruction for it, and without it the program needs more memory than was "
    "planned; run it with optpipe.runtime, or solve a problem without bandwidths"
)


def fuse_backwards(programs: Programs) -> Programs:
    """Return programs in which every I is a B and no W is left.

    Whether they are legal is to be checked anew: a B has a workspace and a time of its own.
    """
    return tuple(
        tuple(
            action._replace(type=ActionType.FULL_BACKWARD)
            if action.type is ActionType.BACKWARD_INPUT
            else action
            for action in program
            if action.type is not ActionType.BACKWARD_WEIGHT
        )
        for program in programs
    )


def expect_deepspeed(problem: Problem, programs: Programs) -> None:
    """Accept legal programs that DeepSpeed's pipeline engine runs right, refuse all others.

    Raises
    ------
    ScheduleFormatError
        With row, column and cell, and what to do.
    """
    for device, stages in enumerate(problem.stages_of):
        if len(stages) > 1:
            raise ScheduleFormatError(
                f"row {device + 1}: device {device} has stages {list(stages)}, but DeepSpeed's "
                "pipeline engine runs one stage per rank; solve a problem with one stage per device"
            )
    for device, program in enumerate(programs):
        for index, action in enumerate(program):
            if action.type not in _RUNS:
                why = _WHY_NOT.get(action.type, _NO_OFFLOAD)
                raise _refused(device, index, action, f"DeepSpeed cannot express it: {why}")
    last = problem.placement[-1]
    _expect_loss_at_hand(last, programs[last])
    _expect_same_batches(last, programs[problem.placement[0]], programs[last])


def _expect_loss_at_hand(device: int, program: Program) -> None:
    """The engine keeps the last loss only: a last stage's backward is that of its last forward."""
    for index, action in enumerate(program):
        if action.type is ActionType.FORWARD:
            following = program[index + 1] if index + 1 < len(program) else None
            if following != action._replace(type=ActionType.FULL_BACKWARD):
                raise _refused(
                    device, index, action, "DeepSpeed's last stage keeps one loss, so its backward "
                    "must be the very next action, or it went back through another micro-batch; "
                    "use optpipe.runtime, or a schedule such as 1f1b",
                )  # fmt: skip


def _expect_same_batches(device: int, first: Program, last: Program) -> None:
    """First and last stage each load their own batches, inputs and labels, in forward order."""
    forwards = [a.microbatch for a in first if a.type is ActionType.FORWARD]
    number = 0
    for index, action in enumerate(last):
        if action.type is not ActionType.FORWARD:
            continue
        if action.microbatch != forwards[number]:
            raise _refused(
                device, index, action, "DeepSpeed's first and last stage load inputs and labels in "
                f"the order of their forwards, and stage 0 has micro-batch {forwards[number]} "
                "here: inputs would meet other labels; use optpipe.runtime, or a schedule that "
                "keeps the order",
            )  # fmt: skip
        number += 1


def _refused(device: int, index: int, action: Action, why: str) -> ScheduleFormatError:
    return ScheduleFormatError(f"row {device + 1}, column {index + 1}: {action}: {why}")
