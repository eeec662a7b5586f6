"""What waits for what between devices: activations go forward, gradients come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe.action import Action, ActionType

if TYPE_CHECKING:
    from optpipe.problem import Problem

__all__ = ["Pass", "input_of", "pass_of", "transit_ms"]


class Pass(NamedTuple):
    """The forward or the input-gradient pass of a (stage, micro-batch), by I or by B."""

    backward: bool
    stage: int
    microbatch: int


def pass_of(action: Action) -> Pass | None:
    """Return the pass an action completes; None where nobody else waits for it."""
    if action.type is ActionType.FORWARD:
        return Pass(False, action.stage, action.microbatch)
    if action.type.is_backward:
        return Pass(True, action.stage, action.microbatch)
    return None


def input_of(action: Action, num_stages: int) -> Pass | None:
    """Return the pass whose output an action needs; None for all but F, I and B, and for 0F."""
    stage, kind, microbatch = action
    if kind is ActionType.FORWARD:
        return Pass(False, stage - 1, microbatch) if stage > 0 else None
    if kind.is_backward:
        if stage == num_stages - 1:
            return Pass(False, stage, microbatch)
        return Pass(True, stage + 1, microbatch)
    return None


def transit_ms(problem: Problem, source: Pass, target: Action) -> float:
    """Return the ms from the end of a pass to the earliest start of the action that needs it."""
    if source.stage == target.stage:
        return 0.0
    there, back = problem.boundary_ms[min(source.stage, target.stage)]
    return back if source.backward else there
