"""The schedule: one program per device, and what is known about it (``optpipe/schedule/v1``).

A `Schedule` is a record: whether its programs are legal is `optpipe.check`'s to say, what they
cost `optpipe.simulate`'s. `optpipe.evaluate.evaluate` makes a schedule whose numbers are true.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from optpipe.action import Action
from optpipe.errors import ScheduleFormatError
from optpipe.problem import Objective
from optpipe.validation import explain, rule_broken

__all__ = [
    "OPTIMAL_GAP",
    "Contribution",
    "Provenance",
    "Schedule",
    "Status",
    "StoppedBy",
    "TraceEntry",
    "gap_of",
]

OPTIMAL_GAP = 1e-6
"""``optimal`` means a relative gap of at most this."""

Status = Literal["optimal", "feasible"]
StoppedBy = Literal["optimal", "gap", "time_limit", "work_limit", "cancelled"]


def gap_of(objective_ms: float, bound_ms: float | None) -> float | None:
    """Return (objective - bound) / objective, at least 0; None without a bound."""
    if bound_ms is None:
        return None
    if objective_ms <= 0:
        return 0.0
    return max(0.0, (objective_ms - bound_ms) / objective_ms)


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TraceEntry(_Value):
    """One improvement while solving.

    ``seconds`` counts from the start of the solve; ``bound_ms`` is the best known then.
    """

    seconds: float
    method: str
    objective_ms: float | None = None
    bound_ms: float | None = None


class Contribution(_Value):
    """What one method contributed to a solve, in ms, all its improvements together.

    ``objective_ms`` and ``bound_ms`` are the best known when it last improved one of them;
    ``objective_gain_ms`` is by how much it lowered the objective below the first schedule's and
    what others had reached, ``bound_gain_ms`` by how much it raised the bound.
    """

    method: str
    objective_ms: float | None = None
    objective_gain_ms: float = Field(default=0.0, ge=0)
    bound_ms: float | None = None
    bound_gain_ms: float = Field(default=0.0, ge=0)


class Provenance(_Value):
    """Where a schedule comes from.

    ``method`` made it, ``start_method`` made the best schedule before optimisation, whose
    objective was ``start_objective_ms``; ``bound_method`` proved the bound. ``contributions`` sums
    up ``trace`` by method, in the order of their first improvement.
    """

    method: str
    start_method: str | None = None
    start_objective_ms: float | None = None
    bound_method: str | None = None
    solver: str | None = None
    seed: int | None = None
    solve_seconds: float = 0.0
    contributions: tuple[Contribution, ...] = ()
    trace: tuple[TraceEntry, ...] = ()


class Schedule(_Value):
    """One program per device, and what is known about it.

    Parameters
    ----------
    placement
        Device of each stage.
    programs
        One list of actions per device.
    makespan_ms, span_ms
        DESIGN section 2; ``objective`` says which of them was minimised.
    bound_ms, gap
        Proven lower bound of the objective and relative gap; None = nothing proven.
    peak_bytes
        Per device, static bytes included, reserved bytes not.
    host_peak_bytes
        Per host, offloaded bytes.
    """

    format: Literal["optpipe/schedule/v1"] = "optpipe/schedule/v1"
    problem_hash: str
    placement: tuple[int, ...]
    programs: tuple[tuple[Action, ...], ...] = Field(min_length=1)
    objective: Objective
    makespan_ms: float = Field(ge=0)
    span_ms: float = Field(ge=0)
    bound_ms: float | None = Field(default=None, ge=0)
    gap: float | None = Field(default=None, ge=0, le=1)
    peak_bytes: tuple[int, ...]
    host_peak_bytes: dict[str, int]
    status: Status
    stopped_by: StoppedBy
    provenance: Provenance

    @classmethod
    def parse(cls, data: Any) -> Schedule:
        """Return the schedule a JSON-like object describes.

        Raises
        ------
        ScheduleFormatError
            With one line per fault: path, value, rule, fix.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ScheduleFormatError(explain(error, cls)) from None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.peak_bytes) != len(self.programs):
            raise rule_broken(
                f"peak_bytes has {len(self.peak_bytes)} values for {len(self.programs)} programs",
                "give one per device",
            )
        if self.status == "optimal" and (self.gap is None or self.gap > OPTIMAL_GAP):
            raise rule_broken(
                f"status optimal needs a gap of at most {OPTIMAL_GAP}, not {self.gap}",
                "call it feasible",
            )
        return self

    @property
    def objective_ms(self) -> float:
        """The minimised length: makespan_ms or span_ms."""
        return self.makespan_ms if self.objective == "makespan" else self.span_ms

    @property
    def program_hash(self) -> str:
        """``sha256:...`` of the programs alone: what all ranks must agree on."""
        text = "\n".join(",".join(map(str, program)) for program in self.programs)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
