"""Why a family has no schedule for a problem: enumerated codes, each with a sentence."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["NotApplicable", "Reason"]


class Reason(StrEnum):
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


class NotApplicable(Exception):  # noqa: N818 - an answer, not an error
    """A family has no schedule for this problem; ``str()`` says why in a sentence."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
