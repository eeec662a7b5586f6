"""A schedule on the documentation's problems: where it can stand, how long, how much it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

from docs.generators.drawing import Figure
from docs.generators.examples import GB, PASS_MS, line
from optpipe import Problem, Programs, simulate
from optpipe.memory import device_peak_bytes
from optpipe_solver.families import Family, NotApplicable
from optpipe_solver.families.not_applicable import Reason
from optpipe_solver.families.registry import Limit
from optpipe_solver.families.replace import replaced

__all__ = ["Measured", "figure_of", "measure", "placements_of", "shown_problem"]

_PLENTY = 1000.0
_CHUNKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A family's schedule of one problem; ms, and activations of a device."""

    problem: Problem
    programs: Programs
    placement: str
    limit: float
    is_limited: bool
    makespan_ms: float
    span_ms: float
    peak: float

    @property
    def bubble_ms(self) -> float:
        """Makespan less a device's work."""
        return self.makespan_ms - self._work_ms

    @property
    def span_bubble_ms(self) -> float:
        """Span less a device's work."""
        return self.span_ms - self._work_ms

    @property
    def _work_ms(self) -> float:
        return 3 * PASS_MS * self.problem.num_microbatches


def placements_of(problem: Problem) -> dict[str, Problem]:
    """Return the same model on a line, in a loop and in a V, two chunks per device."""
    return {
        "line": problem,
        "loop": replaced(problem, "loop", _CHUNKS),
        "V": replaced(problem, "v", _CHUNKS),
    }


@cache
def measure(family: Family, num_devices: int, num_microbatches: int) -> Measured:
    """Return the family's schedule on the first placement that it has a rule for.

    Families that respect limits get half of 1F1B's memory, and copies that take half of a
    micro-batch's compute; the others all they want.

    Raises
    ------
    NotApplicable
        If there is none.
    """
    limited = family.limit is Limit.RESPECTED
    limit = num_devices / 2 if limited else _PLENTY
    problem = line(
        num_devices, num_microbatches, activations=limit, offload=0.5, recompute=not limited
    )
    refused: NotApplicable | None = None
    for placement, copy in placements_of(problem).items():
        try:
            programs = family.build(copy)
        except NotApplicable as why:
            refused = refused or why
            continue
        return _measured(copy, programs, placement, limit, limited=limited)
    raise refused or NotApplicable(Reason.DOES_NOT_FIT, "no placement was tried")


def _measured(
    problem: Problem, programs: Programs, placement: str, limit: float, *, limited: bool
) -> Measured:
    run = simulate(problem, programs)
    peaks = [device_peak_bytes(problem, device, row) for device, row in enumerate(programs)]
    return Measured(
        problem=problem,
        programs=programs,
        placement=placement,
        limit=limit,
        is_limited=limited,
        makespan_ms=run.makespan_ms,
        span_ms=run.span_ms,
        peak=max(peaks) / GB,
    )


def shown_problem(family: Family) -> Problem:
    """Return the problem of a family's picture, with just the memory that the schedule takes."""
    found = measure(family, 4, 8)
    limit = found.limit if found.is_limited else ceil(found.peak * 10) / 10
    devices = tuple(
        device.model_copy(update={"memory_bytes": round(limit * GB)})
        for device in found.problem.devices
    )
    return found.problem.model_copy(update={"devices": devices})


def figure_of(family: Family) -> Figure:
    """Return the picture of a family on four devices."""
    name = family.name
    return Figure(
        name=name,
        problems={"problem.json": shown_problem(family)},
        commands=(
            f"optpipe solve problem.json --method {name} -o {name}.csv",
            f"optpipe plot problem.json {name}.csv -o {name}.svg",
        ),
    )
