"""What a solve returns, and what it says on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule

__all__ = ["Progress", "Result", "RobustChoice", "SolveStatus"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustChoice:
    """How a schedule was chosen by a percentile of its objective under noise; times in ms.

    Attributes
    ----------
    percent, late_ms
        The percentile, and what the chosen schedule has there.
    shortest_ms, shortest_late_ms
        The shortest objective without noise that is known, and what its schedule has there.
    num_compared
        Schedules that were judged, these two among them.
    jitter, stragglers
        The noise, as in `Noise`.
    """

    percent: float
    late_ms: float
    shortest_ms: float
    shortest_late_ms: float
    num_compared: int
    jitter: float
    stragglers: float

    def __str__(self) -> str:
        return (
            f"P{self.percent:g} under noise (actions +-{100 * self.jitter:g} %, devices "
            f"+-{100 * self.stragglers:g} %): {self.late_ms:,.1f} ms, the best of "
            f"{self.num_compared} schedules; the shortest without noise, {self.shortest_ms:,.1f} "
            f"ms, has {self.shortest_late_ms:,.1f} ms. Bound and gap are those without noise"
        )


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
    robust
        How the schedule was chosen, where noise was asked for.
    """

    status: SolveStatus
    schedule: Schedule | None
    bound_ms: float | None = None
    message: str = ""
    needs: dict[str, int] = field(default_factory=dict)
    robust: RobustChoice | None = None
