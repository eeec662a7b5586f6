"""``plan`` calls the search over lines, cuts and schedules, and returns the best with a bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optpipe.errors import InputError
from optpipe.evaluate import evaluate
from optpipe.schedule import Provenance, gap_of
from optpipe.units import ShortRepr, format_ms, format_share, html_table
from optpipe_solver.budget import Limits, SolveStatus, Stop
from optpipe_solver.feasibility import feasibility, needs_text
from optpipe_solver.plan.cuts import roomiest_cut
from optpipe_solver.plan.lines import PLACEMENTS, PlacementLine, make_lines, natural_order
from optpipe_solver.plan.search import PlanSearch
from optpipe_solver.warm import ensure_warm

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from optpipe.model import Model
    from optpipe.problem import Problem
    from optpipe.requests import PlacementKind
    from optpipe.schedule import Programs, Schedule
    from optpipe_solver.budget import Progress
    from optpipe_solver.plan.lines import Lines
    from optpipe_solver.plan.search import CutCandidate, PlanRow

__all__ = ["DEFAULT_CHUNKS", "PlanResult", "plan"]

DEFAULT_CHUNKS = (1, 2, 4)
_MOST_CHUNKS = 8
_SHOWN_ROWS = 12  # of a notebook


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanResult(ShortRepr):
    """The result of a plan.

    Attributes
    ----------
    status
        ``optimal``: no cut of the searched set has a faster schedule, proven. ``feasible``: a
        schedule, not proven the best of the set. ``infeasible``: no cut of the set fits, proven.
        ``unknown``: nothing found, nothing proven.
    problem, schedule
        The chosen cut and its schedule. The schedule's own bound and gap are of this cut alone.
    rows
        Every candidate cut, the chosen one first, then by objective and bound.
    even
        The row of the naive plan: equal numbers of layers, in the order of the devices.
    bound_ms
        Proven: no schedule of any cut of any placement of the set is faster. None without one.
    searched
        The set, in words, and the number of its placements that the time allowed to cut.
    work
        Units of work of the plan, 0 if work was not limited.
    message, needs
        Without a schedule: the reason, and the smallest memory that works for each limit.
    """

    status: SolveStatus
    problem: Problem | None
    schedule: Schedule | None
    rows: tuple[PlanRow, ...]
    even: PlanRow
    bound_ms: float | None
    searched: str
    work: float = 0.0
    message: str = ""
    needs: dict[str, int] = field(default_factory=dict)

    @property
    def chosen(self) -> PlanRow | None:
        """The row of the chosen cut."""
        return self.rows[0] if self.schedule is not None else None

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective over the whole set."""
        return None if self.schedule is None else gap_of(self.schedule.objective_ms, self.bound_ms)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "status": self.status.value,
            "message": self.message,
            "needs": self.needs,
            "searched": self.searched,
            "bound_ms": self.bound_ms,
            "gap": self.gap,
            "even": self.even.as_json(),
            "candidates": [row.as_json() for row in self.rows],
            "problem": _dumped(self.problem),
            "schedule": _dumped(self.schedule),
        }

    def _repr_html_(self) -> str:
        """Return the numbers and a table of the best cuts and the even one, for notebooks."""
        numbers = [("status", self.status.value), ("message", self.message)]
        if self.schedule is not None:
            gap = "unknown" if self.gap is None else format_share(self.gap)
            numbers[1:] = [(self.schedule.objective, _ms(self.schedule.objective_ms))]
            numbers += [("bound of all cuts", _ms(self.bound_ms)), ("gap", gap)]
        shown = self.rows[:_SHOWN_ROWS]
        shown = shown if self.even in shown else (*shown, self.even)
        heads = ("placement", "layers per stage", "bound", "best", "outcome")
        rows = [
            (
                f"{row.label} (even)" if row.is_even else row.label,
                " ".join(map(str, row.sizes)),
                _ms(row.bound_ms),
                _ms(row.final_ms),
                row.fate.value,
            )
            for row in shown
        ]
        return html_table(numbers) + html_table([heads, *rows])


def plan(
    model: Model,
    *,
    time_limit_s: float = 60.0,
    work_limit: float | None = None,
    threads: int = 1,
    seed: int = 0,
    chunks: Collection[int] = DEFAULT_CHUNKS,
    placements: Collection[PlacementKind] = PLACEMENTS,
    start: tuple[Problem, Programs] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> PlanResult:
    """Choose cut, placement and schedule together, within a limit of time or of work.

    The naive plan is always a candidate: equal numbers of layers in the order of the devices. The
    result is never worse than the schedule found for it.

    Parameters
    ----------
    model
        The model to cut.
    time_limit_s
        Seconds, > 0; the call returns soon after.
    work_limit
        As in `optpipe_solver.solve`; then only one thread works, with any ``threads``. The result
        is a function of model, seed and this number, unless the time limit ends the search.
    threads, seed
        As in `optpipe_solver.solve`.
    chunks
        Stages per device to try, each 1-8.
    placements
        Kinds of placement to try.
    start
        The problem and programs of an earlier plan of the model; the result is then never worse.
        The start is ignored if its placement is not in the set, or its problem is no cut of the
        model.
    on_progress
        Called with every improvement of the best schedule, with its problem; ``bound_ms`` is that
        of the whole set.
    should_stop
        Called often; True ends the plan with the best so far.

    Raises
    ------
    InputError
        For limits, threads, seed, chunks or placements out of range.
    """
    Limits(time_limit_s=time_limit_s, work_limit=work_limit, threads=threads, seed=seed)
    _check_arguments(chunks, placements)
    lines = make_lines(model, placements, chunks)
    ensure_warm(whole=work_limit is not None)
    num_threads = threads if work_limit is None else 1
    stop = Stop(
        time_limit_s, work=work_limit, threads=num_threads, seed=seed, should_stop=should_stop
    )
    search = PlanSearch(model, lines, stop, on_progress=on_progress)
    if start is not None:
        search.adopt(*start)
    search.run()
    ranked = sorted(
        search.candidates.values(),
        key=lambda one: (one is not search.best, one.objective_ms, one.bound_ms),
    )
    rows = tuple(candidate.row(search.best) for candidate in ranked)
    even = search.even.row(search.best)
    searched = _searched(lines, search.num_cut_lines)
    if search.best is None:
        return _without_schedule(search, rows, even, searched)
    schedule = _schedule(search.best, stop)
    status = SolveStatus.OPTIMAL if search.is_finished else SolveStatus.FEASIBLE
    return PlanResult(
        status=status,
        problem=search.best.problem,
        schedule=schedule,
        rows=rows,
        even=even,
        bound_ms=search.bound_ms,
        searched=searched,
        work=0.0 if stop.work is None else stop.spent,
    )


def _check_arguments(chunks: Collection[int], placements: Collection[PlacementKind]) -> None:
    if not chunks or not all(1 <= count <= _MOST_CHUNKS for count in chunks):
        raise InputError(
            f"chunks = {list(chunks)}: stages per device, at least one number, each "
            f"1-{_MOST_CHUNKS}; correct them"
        )
    unknown = sorted(set(placements) - set(PLACEMENTS))
    if unknown or not placements:
        raise InputError(
            f"placements = {list(placements)}: at least one of {', '.join(PLACEMENTS)}; correct "
            "them"
        )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{format_ms(value)} ms"


def _dumped(value: Problem | Schedule | None) -> Any:
    return None if value is None else value.model_dump(mode="json", by_alias=True)


def _searched(lines: Lines, num_cut: int) -> str:
    """Return the set in words; no bound covers placements outside it."""
    names = dict.fromkeys(
        ("free " if line.free else "")
        + (line.shape if line.chunks == 1 else f"{line.shape} x{line.chunks}")
        for line in lines.lines
    )
    kinds = ", ".join(names) or "none"
    rest = "" if lines.complete else " (free: the first orders only, there are more)"
    return (
        f"every cut of {len(lines.lines)} placements ({kinds}){rest} and the even linear cut; "
        f"cuts were looked for on {num_cut} of them, the others were proven slower or not reached"
    )


def _schedule(best: CutCandidate, stop: Stop) -> Schedule:
    if best.best.programs is None:
        raise ValueError("the best candidate has programs")
    provenance = Provenance(
        method=f"plan+{best.best.method}",
        bound_method=best.best.bound_method or None,
        seed=stop.seed,
        solve_seconds=round(stop.seconds(), 4) if stop.work is None else 0.0,
        trace=tuple(best.best.trace),
    )
    return evaluate(
        best.problem,
        best.best.programs,
        provenance,
        bound_ms=best.best.bound_ms,
        stopped_by=stop.why,
    )


def _without_schedule(
    search: PlanSearch, rows: tuple[PlanRow, ...], even: PlanRow, searched: str
) -> PlanResult:
    """Return the lack of memory in words, and whether it is proven for every cut of the set."""
    proven = search.nothing_fits
    message = "no cut of the placements searched fits the memory limits" + " (proven)" * proven
    # The linear cut nearest to fitting.
    line = PlacementLine("linear", 1, natural_order(search.model))
    sizes = roomiest_cut(search.table, line)
    feasible = feasibility(search.model.problem(line.placement, sizes))
    missing = "a linear one does; add linear to the placements and 1 to the chunks"
    needs = {}
    if feasible.plan is None:
        needs, layers = feasible.needs, " ".join(map(str, sizes))
        missing = f"with layers {layers} on the devices in their order, {needs_text(needs)}"
    return PlanResult(
        status=SolveStatus.INFEASIBLE if proven else SolveStatus.UNKNOWN,
        problem=None,
        schedule=None,
        rows=rows,
        even=even,
        bound_ms=None,
        searched=searched,
        message=f"{message}: {missing}",
        needs=needs,
    )
