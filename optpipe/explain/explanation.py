"""``explain``: what limits a schedule, in numbers and in words."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from optpipe.explain.critical_path import critical_path, runs_of
from optpipe.explain.memory import device_memories, host_memories, program_peaks, stage_reliefs
from optpipe.explain.reasons import Reasons, idle_times, lane_uses
from optpipe.explain.text import sentences
from optpipe.explain.values import CriticalPath, Explanation
from optpipe.simulate import bubble_rate, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.explain.critical_path import Piece
    from optpipe.explain.values import PieceKind
    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe.simulate import Simulation

__all__ = ["explain"]


def explain(
    problem: Problem,
    programs: Programs,
    *,
    bound_ms: float | None = None,
    run: Simulation | None = None,
) -> Explanation:
    """Return what limits a schedule.

    * ``problem``, ``programs``: legal programs (see `optpipe.check.check`) of this problem.
    * ``bound_ms``: proven lower bound of the objective, where one is known.
    * ``run``: what `simulate` says of the programs, from a caller who has it.

    Raises `IllegalScheduleError` if the programs get stuck.
    """
    if run is None:
        run = simulate(problem, programs)
    length = run.objective_ms(problem.objective)
    reasons = Reasons(problem, programs, run)
    peaks = program_peaks(problem, programs)
    told = Explanation(
        problem_hash=problem.problem_hash,
        objective=problem.objective,
        length_ms=length,
        makespan_ms=run.makespan_ms,
        span_ms=run.span_ms,
        busiest_ms=problem.busy_ms,
        bubble_rate=bubble_rate(problem, length),
        bound_ms=bound_ms,
        critical_path=_path(critical_path(problem, programs, run, reasons), length),
        lanes=lane_uses(problem, programs, run),
        memory=device_memories(problem, programs, peaks),
        hosts=host_memories(problem, programs),
        idle=idle_times(problem, programs, run, reasons),
        reliefs=stage_reliefs(problem, programs, peaks),
    )
    return told.model_copy(update={"sentences": sentences(problem, told)})


def _path(pieces: Sequence[Piece], length_ms: float) -> CriticalPath:
    by_kind: dict[PieceKind, float] = defaultdict(float)
    by_device: dict[int, float] = defaultdict(float)
    for piece in pieces:
        by_kind[piece.kind] += piece.end - piece.start
        if piece.kind != "link":
            by_device[piece.device] += piece.end - piece.start
    return CriticalPath(
        length_ms=length_ms,
        by_kind=dict(by_kind),
        by_device=dict(sorted(by_device.items())),
        runs=runs_of(pieces),
    )
