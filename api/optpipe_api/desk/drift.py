"""What measured times do to the schedule in use, and whether another one could do better.

Times that change alone are no reason to solve again: where everything takes a tenth longer, or the
busiest device does, the best schedule takes longer too. So the step time is held against what it
may be expected to be. Let O be the length of the schedule in use under the times that were solved
for, and L(.) a proven lower bound: that of `optpipe_solver.bounds.energy`, from work and memory,
which is the one that compiles nothing in the server's process. Then O / L(planned) says how good
the schedule was for those times, and

    expected = O * L(measured) / L(planned)

is what one as good would take under the measured ones. O is never below L(planned), so this is
never below L(measured). Drift is what the schedule in use takes beyond it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe.evaluate import evaluate
from optpipe.formats.json_text import load_schedule
from optpipe.problem import Problem
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from optpipe_api.deployments import Judgement
from optpipe_api.desk.measured_times import times_of
from optpipe_api.jobs import Start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.measurements import MeasuredAction
    from optpipe_api.deployments import Deployment, Documents

__all__ = ["Candidate", "bound_ms", "judged", "largest_change", "length_ms", "start_from", "under"]

_WORDS: dict[MeasuredAction, str] = {
    "F": "forward",
    "I": "input backward",
    "W": "weight backward",
    "B": "backward",
    "RECOMPUTE": "recomputation",
}


class Candidate(NamedTuple):
    """A schedule (JSON text) whose numbers are those under the truest times, and its length."""

    schedule: str
    length_ms: float


def judged(deployment: Deployment, documents: Documents, schedule: str) -> Judgement:
    """Return how the schedule in use does under the measured times.

    Parameters
    ----------
    deployment
        One with a version and reports.
    documents
        Its problems.
    schedule
        Its newest version, as JSON text.
    """
    measured = Problem.model_validate_json(documents.newest)
    planned = Problem.model_validate_json(documents.planned)
    current_ms = length_ms(measured, schedule)
    planned_ms = current_ms if deployment.planned_ms is None else deployment.planned_ms
    expected_ms = planned_ms * _scale(planned, measured)
    judgement = Judgement(
        num_reports=deployment.num_reports, current_ms=current_ms, expected_ms=expected_ms
    )
    if current_ms <= expected_ms * (1 + deployment.options.threshold):
        return judgement
    return Judgement(
        num_reports=deployment.num_reports,
        current_ms=current_ms,
        expected_ms=expected_ms,
        reason=f"drift: {largest_change(planned, measured)}; the schedule in use takes "
        f"{current_ms:.6g} ms under the measured times, {current_ms / expected_ms - 1:.1%} more "
        "than one as good for them as it was for those it was made for",
        problem=documents.newest,
    )


def length_ms(problem: Problem, schedule: str) -> float:
    """Return the objective, in ms, of a schedule (JSON text) under the times of a problem."""
    run = simulate(problem, load_schedule(schedule).programs)
    return run.objective_ms(problem.objective)


def under(newest: str, schedule: str) -> Candidate:
    """Return a schedule with its numbers under the times of a problem; both as JSON text.

    A bound that was proven for other times is left out.

    Raises
    ------
    IllegalScheduleError
        If it breaks a rule there, or does not fit its memory.
    """
    problem, found = Problem.model_validate_json(newest), load_schedule(schedule)
    bound_ms = found.bound_ms if found.problem_hash == problem.problem_hash else None
    true = evaluate(
        problem,
        found.programs,
        found.provenance,
        bound_ms=bound_ms,
        stopped_by="work_limit" if found.stopped_by == "optimal" else found.stopped_by,
    )
    return Candidate(true.model_dump_json(by_alias=True), true.objective_ms)


def start_from(problem: Problem, schedule: str, version: int) -> Start:
    """Return the schedule in use as the start of a solve of other times."""
    method = f"version {version} of the deployment"
    true = evaluate(problem, load_schedule(schedule).programs, Provenance(method=method))
    return Start(
        schedule=true.model_dump_json(by_alias=True),
        objective_ms=true.objective_ms,
        method=method,
    )


def largest_change(planned: Problem, measured: Problem) -> str:
    """Return a clause about the time that changed by the most milliseconds."""
    changes = [
        (abs(after - before), what, before, after)
        for (what, before), (_, after) in zip(_times(planned), _times(measured), strict=True)
    ]
    _, what, before, after = max(changes, key=lambda change: change[0])
    if before <= 0:
        return f"{what} takes {after:.4g} ms instead of none"
    share = after / before - 1
    return f"{what} takes {abs(share):.0%} {'longer' if share >= 0 else 'less'} than planned"


def bound_ms(problem: Problem) -> float:
    """Return a proven lower bound of a problem's objective, in ms."""
    # Heavy, and loaded by then.
    from optpipe_solver.bounds import Paths  # noqa: PLC0415
    from optpipe_solver.bounds.energy import energy_ms  # noqa: PLC0415

    return energy_ms(Paths(problem), makespan=problem.objective == "makespan")


def _times(problem: Problem) -> Iterator[tuple[str, float]]:
    """Yield everything that takes time, in ms; equally many for problems of one deployment."""
    for index, stage in enumerate(problem.stages):
        times = times_of(stage) | {"B": stage.fused_backward_ms}
        for action, word in _WORDS.items():
            yield f"{word} of stage {index}", times.get(action, 0.0)
        moved = problem.can_offload(index)
        yield f"offload of stage {index}", problem.offload_ms(index) if moved else 0.0
        yield f"reload of stage {index}", problem.reload_ms(index) if moved else 0.0
    for index, (there, back) in enumerate(problem.boundary_ms):
        yield f"transfer from stage {index} to {index + 1}", there
        yield f"transfer from stage {index + 1} to {index}", back


def _scale(planned: Problem, measured: Problem) -> float:
    """Return by how much the lower bound grew; 1 where there is nothing to compare."""
    before, after = bound_ms(planned), bound_ms(measured)
    return after / before if before > 0 and after > 0 else 1.0
