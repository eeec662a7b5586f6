"""OR-tools CP-SAT on the problem: the peer that the optimizer is measured against.

It gets what ours gets: the best family as its start, that objective as its horizon, the closed-form
bound as its floor, the same seconds and threads. Micro-batches go in order where that loses
nothing. Elsewhere the first half of the time is spent on that restriction, which finds good
schedules sooner (measured) and proves nothing, and the rest on the free order from the best so far.
Every solution is lowered to programs and judged by `find_violations` and `simulate`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ortools.sat.python import cp_model

from benchmarks.jobs import Answer, Job, Judged, answer_of
from benchmarks.peers.cells import in_order, in_order_loses_nothing, renamed
from benchmarks.peers.cp_lowering import hint, lowered
from benchmarks.peers.cp_model import PipelineModel

__all__ = ["answer"]

_RESTRICTED = 0.5
"""Share of the time for the restriction, where it is one."""


def answer(job: Job) -> Answer:
    """Minimise the objective within the job's seconds, building models included.

    Raises
    ------
    ValueError
        If the job has no legal start: the horizon of the model is its objective.
    """
    began = time.perf_counter()
    best = Judged(job.problem)
    if job.start is None or not best.offer(job.start, "start"):
        raise ValueError("job.start: must be legal programs, its objective is the model's horizon")
    free = not in_order_loses_nothing(job.problem)
    if free:
        _run(job, best, ordered=True, seconds=_RESTRICTED * job.seconds)
    left = job.seconds - (time.perf_counter() - began)
    last = _run(job, best, ordered=not free, seconds=left)
    extra = {"refused": best.num_refused, "start_accepted": last.started}
    return answer_of(best, status=last.status, bound_ms=last.bound_ms, extra=extra)


@dataclass(frozen=True, slots=True)
class _Run:
    """How a run ended; ``started`` = its start was a solution of the model."""

    status: str
    bound_ms: float | None = None
    started: bool = False


def _run(job: Job, best: Judged, *, ordered: bool, seconds: float) -> _Run:
    """Improve on the best known programs for some seconds, where the model holds them."""
    began = time.perf_counter()
    horizon, start = best.objective_ms, best.programs
    pipeline = PipelineModel(job.problem, horizon, in_order=ordered, floor_ms=job.floor_ms)
    if start is not None:
        hint(pipeline, in_order(start) if pipeline.proves and ordered else renamed(start))
    started = _complete_hint(pipeline, seconds / 4)
    left = seconds - (time.perf_counter() - began)
    if left <= 0:
        return _Run("time limit while building")
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = job.threads
    solver.parameters.random_seed = job.seed
    solver.parameters.max_time_in_seconds = left
    status = solver.solve(pipeline.model, _Watch(pipeline, best))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        best.offer(lowered(pipeline, solver.value), "cp-sat")
    proven = pipeline.proves and status != cp_model.INFEASIBLE
    bound = max(job.floor_ms, pipeline.scale.ms(solver.best_objective_bound)) if proven else None
    return _Run(solver.status_name(status).lower(), bound, started)


def _complete_hint(pipeline: PipelineModel, seconds: float) -> bool:
    """Let CP-SAT work out the variables that follow from the hinted ones, and hint those too.

    An incomplete hint is only a preference of its search; a complete one is its first solution.
    """
    solver = cp_model.CpSolver()
    solver.parameters.fix_variables_to_their_hinted_value = True
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    if solver.solve(pipeline.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return False
    values = list(solver.response_proto.solution)
    pipeline.model.clear_hints()  # type: ignore[no-untyped-call]
    for index, value in enumerate(values):
        pipeline.model.add_hint(pipeline.model.get_int_var_from_proto_index(index), value)
    return True


class _Watch(cp_model.CpSolverSolutionCallback):
    """Judges every improving solution as it comes."""

    def __init__(self, pipeline: PipelineModel, best: Judged) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._best = best

    def on_solution_callback(self) -> None:
        """Lower the solution and offer it."""
        self._best.offer(lowered(self._pipeline, self.value), "cp-sat")
