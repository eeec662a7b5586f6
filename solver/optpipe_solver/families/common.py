"""Properties of a placement that the published rules require, and `NotApplicable`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from optpipe_solver.feasibility import fusing_may_pay

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Action, Programs

__all__ = [
    "NotApplicable",
    "NotApplicableReason",
    "chunks_of_loop",
    "devices_of_v",
    "fusing_pays",
    "one_stage_per_device",
    "programs_by_device",
]


def one_stage_per_device(problem: Problem) -> None:
    """Accept placements with at most one stage on each device.

    Raises
    ------
    NotApplicable
        Naming the first device with several.
    """
    for device, stages in enumerate(problem.stages_of):
        if len(stages) > 1:
            raise NotApplicable(
                NotApplicableReason.NEEDS_ONE_STAGE_PER_DEVICE,
                f"this rule is for one stage per device, but device {device} holds stages "
                f"{', '.join(map(str, stages))}",
            )


def programs_by_device(problem: Problem, by_stage: list[list[Action]]) -> Programs:
    """Return programs per device from programs per stage (one stage per device)."""
    return tuple(tuple(by_stage[stages[0]]) if stages else () for stages in problem.stages_of)


def chunks_of_loop(problem: Problem) -> int:
    """Return how many stages each device holds if stage k is on the (k mod p)-th device.

    The p devices may be numbered in any order, and devices without a stage do not count.

    Raises
    ------
    NotApplicable
        If the placement is no loop, or only one round of it (a line).
    """
    placement = problem.placement
    num_used = len(set(placement))
    round_trip = placement[:num_used]
    chunks = len(placement) // num_used
    if chunks < 2 or placement != round_trip * chunks:
        raise NotApplicable(
            NotApplicableReason.NEEDS_LOOP_PLACEMENT,
            f"this rule is for a loop placement of at least two rounds, stage k on device "
            f"k mod {num_used}, but the placement is {_shown(placement)}",
        )
    return chunks


def devices_of_v(problem: Problem) -> int:
    """Return p if p devices hold two stages each, k and 2p - 1 - k: down and up again.

    The p devices may be numbered in any order, and devices without a stage do not count.

    Raises
    ------
    NotApplicable
        If the placement is no V.
    """
    placement = problem.placement
    num_used = len(set(placement))
    down = placement[:num_used]
    if placement != down + down[::-1]:
        raise NotApplicable(
            NotApplicableReason.NEEDS_V_PLACEMENT,
            "this rule is for a V placement, stages down the devices and up again, two on each, "
            f"but the placement is {_shown(placement)}",
        )
    return num_used


def fusing_pays(problem: Problem) -> bool:
    """Whether B instead of I and W saves time or bytes on some stage."""
    return any(fusing_may_pay(problem, s) for s in range(len(problem.stages)))


def _shown(placement: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, placement[:16]))
    return f"[{shown}, ...]" if len(placement) > 16 else f"[{shown}]"


# --- Why a family has no schedule for a problem: enumerated codes, each with a sentence.


class NotApplicableReason(StrEnum):
    """Stable codes; the sentence comes with the numbers of the problem at hand."""

    NEEDS_ONE_STAGE_PER_DEVICE = "needs-one-stage-per-device"
    DOES_NOT_FIT = "does-not-fit"
    INFEASIBLE = "infeasible"
    NEEDS_LOOP_PLACEMENT = "needs-loop-placement"
    NEEDS_V_PLACEMENT = "needs-v-placement"
    NEEDS_RECOMPUTE = "needs-recompute"
    CANNOT_BE_SPLIT = "cannot-be-split"
    TOO_FEW_MICROBATCHES = "too-few-microbatches"
    CANNOT_OFFLOAD = "cannot-offload"
    NEEDS_PAIRS = "needs-pairs"
    NEEDS_SLICES = "needs-slices"
    NEEDS_EQUAL_MICROBATCHES = "needs-equal-microbatches"


class NotApplicable(Exception):  # noqa: N818 - an answer, not an error
    """A family has no schedule for this problem; ``str()`` says why in a sentence."""

    def __init__(self, reason: NotApplicableReason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
