"""What a solve returns, and what it says on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule

__all__ = ["Progress", "Result", "SolveStatus"]


class SolveStatus(StrEnum):
    """How a solve can end.

    ``unknown`` is the only meaning of "nothing found": no schedule, and no proof that none exists.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Progress:
    """The best known so far, told whenever it improves; times in ms, ``seconds`` since the start.

    ``programs`` is None where only the bound improved. ``problem`` is what they solve, where the
    search chose that too.
    """

    seconds: float
    method: str
    objective_ms: float | None
    bound_ms: float | None
    programs: Programs | None = None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a solve.

    Attributes
    ----------
    status
        ``optimal`` and ``feasible`` come with a schedule, the others without.
    schedule
        The best schedule found; it carries objective, bound, gap and provenance.
    bound_ms
        Proven lower bound of the objective; None where infeasible.
    message
        Empty, or one sentence: why there is no schedule and what would help.
    needs
        Where infeasible: what is too small -> the smallest bytes that work.
    """

    status: SolveStatus
    schedule: Schedule | None
    bound_ms: float | None = None
    message: str = ""
    needs: dict[str, int] = field(default_factory=dict)
