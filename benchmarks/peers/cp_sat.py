"""OR-tools CP-SAT on the problem: the peer that the optimizer is measured against.

It gets what ours gets: the best family as its start, that objective as its horizon, the closed-form
bound as its floor, the same seconds and threads. Micro-batches go in order where that loses
nothing. Elsewhere the first half of the time is spent on that restriction, which finds good
schedules sooner (measured) and proves nothing, and the rest on the free order from the best so far.
Every solution is lowered to programs and judged by `find_violations` and `simulate`.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ortools.sat.python import cp_model

from benchmarks.jobs import BestLegal, PeerAnswer, PeerJob
from benchmarks.peers.cp_data import in_order, in_order_loses_nothing, renamed
from benchmarks.peers.cp_model import PipelineModel
from optpipe import Action, ActionType, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ortools.sat.python.cp_model import IntVar

    from benchmarks.peers.cp_data import Cell
    from benchmarks.peers.cp_model import Parts
    from optpipe import Program, Programs
    from optpipe.simulate import Times

__all__ = ["cp_sat"]

_RESTRICTED = 0.5
"""Share of the time for the restriction, where it is one."""

_LOOK_S = 0.02


def cp_sat(job: PeerJob) -> PeerAnswer:
    """Minimise the objective within the job's seconds, building models included.

    Raises
    ------
    ValueError
        If the job has no legal start: the horizon of the model is its objective.
    """
    began = time.perf_counter()
    best = BestLegal(job.problem)
    if job.start is None or not best.offer(job.start, "start"):
        raise ValueError("job.start: must be legal programs, its objective is the model's horizon")
    free = not in_order_loses_nothing(job.problem)
    if free:
        _run(job, best, ordered=True, seconds=_RESTRICTED * job.seconds)
    left = job.seconds - (time.perf_counter() - began)
    last = _run(job, best, ordered=not free, seconds=left)
    extra = {"refused": best.num_refused, "start_accepted": last.started}
    return best.answer(status=last.status, bound_ms=last.bound_ms, extra=extra)


@dataclass(frozen=True, slots=True)
class _Run:
    """How a run ended; ``started`` = its start was a solution of the model."""

    status: str
    bound_ms: float | None = None
    started: bool = False


def _run(job: PeerJob, best: BestLegal, *, ordered: bool, seconds: float) -> _Run:
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
    with _ended_after(solver, left):
        status = solver.solve(pipeline.model, _Watch(pipeline, best))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        best.offer(lowered(pipeline, solver.value), "cp-sat")
    proven = pipeline.proves and status != cp_model.INFEASIBLE
    bound = max(job.floor_ms, pipeline.scale.ms(solver.best_objective_bound)) if proven else None
    return _Run(solver.status_name(status).lower(), bound, started)


@contextmanager
def _ended_after(solver: cp_model.CpSolver, seconds: float) -> Iterator[None]:
    """End the search after so many seconds of our clock, which may count those of the CPU."""
    began, over = time.perf_counter(), threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if time.perf_counter() - began > seconds:
                solver.stop_search()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


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

    def __init__(self, pipeline: PipelineModel, best: BestLegal) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._best = best

    def on_solution_callback(self) -> None:
        """Lower the solution and offer it."""
        self._best.offer(lowered(self._pipeline, self.value), "cp-sat")


# --- From CP-SAT's values to programs, and from programs to hints.

_RELEASE, _OFFLOAD, _RELOAD, _COMPUTE = range(4)
"""At one instant: bytes are released, then copies issued, then the next action starts."""


class _Event(NamedTuple):
    time: int
    rank: int
    order: int
    action: Action


def lowered(pipeline: PipelineModel, value: Callable[[IntVar], int]) -> Programs:
    """Return the programs that a solution stands for; they may still break a relaxed rule."""
    return tuple(_program(pipeline, value, d) for d in range(len(pipeline.problem.devices)))


def _program(pipeline: PipelineModel, value: Callable[[IntVar], int], device: int) -> Program:
    cells = [
        ((s, j), pipeline.parts[s, j])
        for s in pipeline.problem.stages_of[device]
        for j in range(pipeline.problem.num_microbatches)
    ]
    events = [event for cell, parts in cells for event in _computed(cell, parts, value)]
    away = [
        (cell, parts)
        for cell, parts in cells
        if parts.offloaded is not None and value(parts.offloaded)
    ]
    events += _issued(pipeline, away, value, device)
    return tuple(event.action for event in sorted(events, key=lambda event: event[:3]))


def _computed(cell: Cell, parts: Parts, value: Callable[[IntVar], int]) -> list[_Event]:
    s, j = cell

    def event(start: IntVar, kind: ActionType, order: int) -> _Event:
        return _Event(value(start), _COMPUTE, order, Action(s, kind, j))

    fused = parts.fused is not None and value(parts.fused)
    events = [event(parts.forward, ActionType.FORWARD, 0)]
    if parts.recomputed is not None and parts.again is not None and value(parts.recomputed):
        events.append(event(parts.again, ActionType.RECOMPUTE, 1))
    if fused:
        events.append(event(parts.backward, ActionType.FULL_BACKWARD, 2))
    else:
        events.append(event(parts.backward, ActionType.BACKWARD_INPUT, 2))
        events.append(event(parts.weight, ActionType.BACKWARD_WEIGHT, 3))
    return events


def _issued(
    pipeline: PipelineModel,
    away: list[tuple[Cell, Parts]],
    value: Callable[[IntVar], int],
    device: int,
) -> list[_Event]:
    """RELEASE when the copy has ended, RELOAD and OFFLOAD in the order of their lanes.

    The model lets copies pass one another between issue and start; issuing each no earlier than
    those that start before it changes no start and only shortens what memory is held for.
    """
    problem, scale = pipeline.problem, pipeline.scale
    held = problem.devices[device]
    shared = held.half_duplex or held.pcie_group is not None
    events = []
    at = 0
    for order, (cell, parts) in enumerate(sorted(away, key=lambda x: _value(value, x[1].away))):
        made = value(parts.forward) + scale.units(problem.stages[cell[0]].forward_ms)
        begins = _value(value, parts.away)
        issue = made if parts.leave is None else value(parts.leave)
        at = max(at, begins if shared and parts.leave is None else issue)
        gone = begins + scale.units(problem.offload_ms(cell[0]))
        events.append(_Event(at, _OFFLOAD, order, Action(cell[0], ActionType.OFFLOAD, cell[1])))
        events.append(_Event(gone, _RELEASE, order, Action(cell[0], ActionType.RELEASE, cell[1])))
    at = 0
    for order, (cell, parts) in enumerate(sorted(away, key=lambda x: _value(value, x[1].back))):
        at = max(at, _value(value, parts.issue))
        events.append(_Event(at, _RELOAD, order, Action(cell[0], ActionType.RELOAD, cell[1])))
    return events


def _value(value: Callable[[IntVar], int], variable: IntVar | None) -> int:
    return 0 if variable is None else value(variable)


def hint(pipeline: PipelineModel, programs: Programs) -> None:
    """Hand legal programs to CP-SAT as the solution to start from."""
    run = simulate(pipeline.problem, programs)
    at: dict[Action, Times] = {}
    for program, row in zip(programs, run.times, strict=True):
        at |= dict(zip(program, row, strict=True))
    for cell, parts in pipeline.parts.items():
        _hint_cell(pipeline, cell, parts, at)
    units = pipeline.scale.units_up(run.objective_ms(pipeline.problem.objective))
    pipeline.model.add_hint(pipeline.length, min(units, pipeline.horizon))


def _hint_cell(pipeline: PipelineModel, cell: Cell, parts: Parts, at: dict[Action, Times]) -> None:
    s, j = cell

    def times(kind: ActionType) -> Times | None:
        return at.get(Action(s, kind, j))

    def say(variable: IntVar | None, units: int) -> None:
        if variable is not None:
            pipeline.model.add_hint(variable, units)

    def say_start(variable: IntVar | None, found: Times | None, *, issue: bool = False) -> None:
        ms = 0.0 if found is None else found.issue if issue else found.start
        say(variable, round(ms * pipeline.scale.per_ms))

    fused, away = times(ActionType.FULL_BACKWARD), times(ActionType.OFFLOAD)
    again, back = times(ActionType.RECOMPUTE), times(ActionType.RELOAD)
    say(parts.fused, fused is not None)
    say(parts.offloaded, away is not None)
    say(parts.recomputed, again is not None)
    say_start(parts.forward, times(ActionType.FORWARD))
    say_start(parts.backward, fused or times(ActionType.BACKWARD_INPUT))
    say_start(parts.weight, times(ActionType.BACKWARD_WEIGHT))
    say_start(parts.again, again)
    say_start(parts.away, away)
    say_start(parts.leave, away, issue=True)
    say_start(parts.issue, back, issue=True)
    say_start(parts.back, back)
