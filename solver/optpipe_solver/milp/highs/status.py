"""How HiGHS can end, in our words."""

from __future__ import annotations

from enum import StrEnum

import highspy

__all__ = ["STATUS_OF", "MilpStatus"]


class MilpStatus(StrEnum):
    """How a MILP run can end, in our words."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time_limit"
    INTERRUPTED = "interrupted"
    LIMIT = "limit"
    FAILED = "failed"


_S = highspy.HighsModelStatus
STATUS_OF: dict[highspy.HighsModelStatus, MilpStatus] = {
    _S.kOptimal: MilpStatus.OPTIMAL,
    _S.kModelEmpty: MilpStatus.OPTIMAL,
    _S.kInfeasible: MilpStatus.INFEASIBLE,
    # Every variable of our models is bounded, so of the two only infeasible is left.
    _S.kUnboundedOrInfeasible: MilpStatus.INFEASIBLE,
    _S.kTimeLimit: MilpStatus.TIME_LIMIT,
    _S.kInterrupt: MilpStatus.INTERRUPTED,
    getattr(_S, "kHighsInterrupt"): MilpStatus.INTERRUPTED,  # noqa: B009 - absent from the stubs
    _S.kIterationLimit: MilpStatus.LIMIT,
    _S.kSolutionLimit: MilpStatus.LIMIT,
    _S.kMemoryLimit: MilpStatus.LIMIT,
    _S.kObjectiveBound: MilpStatus.LIMIT,
    _S.kObjectiveTarget: MilpStatus.LIMIT,
    _S.kUnbounded: MilpStatus.FAILED,
    _S.kNotset: MilpStatus.FAILED,
    _S.kLoadError: MilpStatus.FAILED,
    _S.kModelError: MilpStatus.FAILED,
    _S.kPresolveError: MilpStatus.FAILED,
    _S.kSolveError: MilpStatus.FAILED,
    _S.kPostsolveError: MilpStatus.FAILED,
    _S.kUnknown: MilpStatus.FAILED,
}
"""HiGHS's own status in our words; complete, which a test checks against the enum."""
