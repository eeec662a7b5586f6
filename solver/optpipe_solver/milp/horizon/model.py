"""The full-horizon model, built and solved below the length of a known schedule.

The model chooses compute order, fused or split backward, offload, transfer times and lanes, and
recompute together, under device and host memory. It generalises OptPipe (arXiv 2510.05186) to any
placement, unequal stages and mixed hardware. Its dual bound is a proven lower bound of the
objective, unless a restriction to first-in-first-out micro-batches loses something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.schedule import OPTIMAL_GAP, Action, ActionType
from optpipe_solver.feasibility import exact_parts_know, fifo_loses_nothing, refuse_unless
from optpipe_solver.incumbent import Goal
from optpipe_solver.milp.highs import MilpModel, MilpStatus, scale_for, scaled, solve_milp, value_of
from optpipe_solver.milp.horizon.constraints import HorizonVariables, all_constraints
from optpipe_solver.milp.horizon.items import HorizonChoice, HorizonItems, num_order_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs
    from optpipe_solver.budget import Stop
    from optpipe_solver.incumbent import Incumbent
    from optpipe_solver.milp.highs import Linear, Variable
    from optpipe_solver.milp.horizon.items import Cell, HorizonItem

    Values = Mapping[Variable, float]

__all__ = [
    "HorizonModel",
    "improve_by_milp",
    "lower",
    "solve_horizon",
]


_ROWS_BETWEEN_LOOKS = 500

_KNOWN = (
    "equal micro-batches in a free order, no pairs, and no menus but keep, offload and recompute"
)


class HorizonModel:
    """Variables and constraints of one problem below one horizon.

    Parameters
    ----------
    problem
        The problem to schedule.
    horizon_ms
        The model contains only schedules with at most this objective.
    fifo
        See `HorizonItems`.
    floor_ms
        A proven lower bound of the objective.
    should_stop
        Called while constraints are written; True leaves the model incomplete.
    """

    def __init__(
        self,
        problem: Problem,
        horizon_ms: float,
        *,
        fifo: bool,
        floor_ms: float = 0.0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        refuse_unless(exact_parts_know(problem), "HorizonModel", problem, _KNOWN)
        self.problem = problem
        # A schedule of that length must stay inside its own windows. These come from sums in
        # another order, and a relative 1e-9 covers their rounding.
        self.items = HorizonItems(problem, horizon_ms * (1 + 1e-9), fifo=fifo)
        self.model = MilpModel("horizon")
        self.is_complete = False
        if self.items.is_empty or should_stop():
            return
        self.variables = HorizonVariables(problem, self.items, self.model)
        self.variables.length.lowBound = floor_ms
        self.model.minimise(self.variables.length)
        for number, constraint in enumerate(all_constraints(self.variables)):
            self.model.add(constraint)
            if number % _ROWS_BETWEEN_LOOKS == 0 and should_stop():
                return
        self.is_complete = True


def solve_horizon(
    problem: Problem,
    incumbent_ms: float,
    stop: Stop,
    *,
    on_programs: Callable[[Programs], object],
    on_bound: Callable[[float], None],
    fifo: bool,
    floor_ms: float,
) -> float:
    """Search for a schedule better than a known one; return the bound in ms, 0 without one.

    If all times are multiples of a grid (see `grid_ms`), better means by one step of it. Otherwise
    it means by half of the gap that counts as zero.

    Parameters
    ----------
    incumbent_ms
        The objective of a legal schedule.
    stop
        The limits of the run; work is counted in branch-and-bound nodes.
    on_programs, on_bound
        Called with the programs of every improving solution (not yet checked) and every better
        bound.
    fifo
        Restrict to first-in-first-out micro-batches. If that loses anything, the caller must not
        use the bound.
    floor_ms
        A proven lower bound.
    """
    goal = Goal.of(problem, incumbent_ms)
    horizon = HorizonModel(
        problem, goal.horizon_ms, fifo=fifo, floor_ms=floor_ms, should_stop=stop.is_over
    )
    if horizon.items.is_empty:
        return goal.proven_ms
    if not horizon.is_complete:
        return 0.0

    def found(values: Values) -> None:
        on_programs(lower(horizon.variables, values))

    outcome = solve_milp(
        horizon.model,
        stop.turn(),
        on_solution=found,
        on_bound=lambda bound: on_bound(goal.proven(bound)),
    )
    if outcome.values is not None:
        found(outcome.values)
    if outcome.status is MilpStatus.INFEASIBLE:
        return goal.proven_ms
    return 0.0 if outcome.bound is None else goal.proven(outcome.bound)


# --- From a solution of the full-horizon model to programs.
# These functions read only orders and choices, never times: HiGHS's tolerances times a large big-M
# let times overlap slightly. The caller checks and simulates the result.


def lower(v: HorizonVariables, values: Values) -> Programs:
    """Return the programs of a solution."""
    return tuple(_program(v, values, device) for device in range(len(v.problem.devices)))


def _program(v: HorizonVariables, values: Values, device: int) -> Program:
    order = _ordered(v, values, device)
    position = {item: at for at, item in enumerate(order)}
    before: dict[int, list[Action]] = {}
    away = _away(v, values, device)
    for cell in away:
        at = _release_position(v, values, cell, position)
        before.setdefault(at, []).append(Action(cell[0], ActionType.RELEASE, cell[1]))
    behind = _offloads(v, values, away, position)
    program: list[Action] = []
    for at, item in enumerate(order):
        program += before.get(at, [])
        program.append(item.action)
        program += behind.get(at, [])
    return tuple(program)


def _away(v: HorizonVariables, values: Values, device: int) -> list[Cell]:
    """Return the cells that are offloaded here, in the order of their copies out."""
    cells = [
        cell
        for cell in v.items.open_cells(device, ActionType.OFFLOAD)
        if _is_one(v.chosen(HorizonChoice.OFFLOADED, *cell), values)
    ]
    return sorted(cells, key=lambda cell: values.get(v.d2h[cell], 0.0))


def _ordered(v: HorizonVariables, values: Values, device: int) -> list[HorizonItem]:
    """Return the device's existing items in order, by the number of items before each."""
    there = [item for item in v.items.by_device[device] if _is_one(v.present(item), values)]
    rank = {
        item: sum(_is_one(v.before(other, item), values) for other in there if other is not item)
        for item in there
    }
    # PuLP omits a variable that is in no constraint: its start is free.
    return sorted(there, key=lambda item: (rank[item], values.get(v.start[item], item.earliest)))


def _release_position(
    v: HorizonVariables, values: Values, cell: Cell, position: dict[HorizonItem, int]
) -> int:
    """Return the first item that counts the cell's bytes as released: its RELOAD at the latest."""
    at = position[v.items.of_action[Action(cell[0], ActionType.RELOAD, cell[1])]]
    for (other, item), released in v.released.items():
        if other == cell and item in position and _is_one(released, values):
            at = min(at, position[item])
    return at


def _offloads(
    v: HorizonVariables, values: Values, cells: list[Cell], position: dict[HorizonItem, int]
) -> dict[int, list[Action]]:
    """Issue every OFFLOAD as early as its forward, the lane's order and host memory allow."""
    behind: dict[int, list[Action]] = {}
    at = -1
    for cell in cells:
        at = max(at, position[v.items.of_action[Action(cell[0], ActionType.FORWARD, cell[1])]])
        for (other, later), gone in v.host_after.items():
            if later == cell and other in cells and _is_one(gone, values):
                ends = [position[item] for item in v.backwards(other) if item in position]
                at = max(at, ends[0] if ends else 0)
        behind.setdefault(at, []).append(Action(cell[0], ActionType.OFFLOAD, cell[1]))
    return behind


def _is_one(expression: Linear, values: Values) -> bool:
    return value_of(expression, values) > 0.5


# --- Let the full-horizon MILP improve the best schedule known: ``method="milp"``.

_MAX_FREE_PAIRS = 6_000
"""Above this many pairs HiGHS can solve only the first-in-first-out order of micro-batches."""

_FIRST = 0.6
"""Share of the time or nodes for the first run; the rest confirms what it proved."""


def improve_by_milp(best: Incumbent, stop: Stop) -> None:
    """Run the model from the best schedule known; work is counted in branch-and-bound nodes.

    Raises `InputError` unless `exact_parts_know`. The run offers its schedules as ``milp``. If a
    restriction to first-in-first-out micro-batches may lose something, it offers them as
    ``milp-fifo``, and proves nothing.

    A bound counts only if two runs with different seeds agree. HiGHS 1.15.1 excluded existing
    schedules in about one run of 500, with any options. It never did so with two seeds on one
    model (`benchmarks/RESULTS.md`). If work is limited, the run is a function of problem, start,
    seed and threads, unless the time limit ends it.
    """
    problem = best.problem
    refuse_unless(exact_parts_know(problem), "improve_by_milp", problem, _KNOWN)
    if best.programs is None:
        return
    loses_nothing = fifo_loses_nothing(problem)
    fifo = loses_nothing or num_order_pairs(problem, fifo=False) > _MAX_FREE_PAIRS
    proves = loses_nothing or not fifo
    name = "milp" if proves else "milp-fifo"

    def run(turn: Stop, confirms_ms: float = 0.0) -> float:
        """Return the bound in ms, 0 without one; offer what it and ``confirms_ms`` both prove."""
        scale = scale_for(best.objective_ms)

        def prove(bound_ms: float) -> None:
            agreed_ms = min(bound_ms / scale, confirms_ms, best.objective_ms)
            if agreed_ms > 0:
                best.offer_bound(agreed_ms, name)

        bound_ms = solve_horizon(
            scaled(problem, scale),
            best.objective_ms * scale,
            turn,
            on_programs=lambda found: best.offer(found, name),
            on_bound=prove,
            fifo=fifo,
            floor_ms=best.bound_ms * scale,
        )
        prove(bound_ms)
        if not turn.spent:
            turn.spend(1)
        return bound_ms / scale

    first_ms = run(stop.turn(_FIRST if proves else 1.0))
    # A run that excluded a schedule found since then was wrong, and confirms nothing.
    is_wrong = first_ms > best.objective_ms * (1 + OPTIMAL_GAP)
    if proves and first_ms > best.bound_ms and not is_wrong and not stop.is_over():
        run(stop.turn(seed=stop.seed + 1), confirms_ms=first_ms)
