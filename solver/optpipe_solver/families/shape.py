"""Questions the published rules ask of a placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.families.not_applicable import NotApplicable, Reason

if TYPE_CHECKING:
    from optpipe.action import Action, Programs
    from optpipe.problem import Problem

__all__ = ["one_stage_per_device", "programs_by_device"]


def one_stage_per_device(problem: Problem) -> None:
    """Accept placements with at most one stage on each device.

    Raises
    ------
    NotApplicable
        Naming the first device with several.
    """
    for device, held in enumerate(problem.stages_of):
        if len(held) > 1:
            raise NotApplicable(
                Reason.NEEDS_ONE_STAGE_PER_DEVICE,
                f"this rule is for one stage per device, but device {device} holds stages "
                f"{', '.join(map(str, held))}",
            )


def programs_by_device(problem: Problem, by_stage: list[list[Action]]) -> Programs:
    """Return programs per device from programs per stage (one stage per device)."""
    return tuple(tuple(by_stage[held[0]]) if held else () for held in problem.stages_of)
