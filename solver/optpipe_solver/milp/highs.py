"""One run of HiGHS: takes a model, reports progress while it runs, and returns the outcome.

PuLP's own HiGHS class has no callbacks, and labels a time-limit stop ``Optimal``. PuLP therefore
only builds the model. Callbacks, status and bound go through highspy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import highspy
import numpy as np
import pulp

from optpipe.problem import Problem, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pydantic import BaseModel

    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.budget import Stop

__all__ = [
    "Constraint",
    "Expression",
    "Linear",
    "LinearProgram",
    "MilpModel",
    "MilpOutcome",
    "MilpStatus",
    "RowByRow",
    "Variable",
    "at_least",
    "scale_for",
    "scaled",
    "solve_milp",
    "solver_name",
    "total",
    "value_of",
]


# --- The terms of a model: variables, linear expressions, constraints.

Variable: TypeAlias = pulp.LpVariable
Expression: TypeAlias = pulp.LpAffineExpression
Constraint: TypeAlias = pulp.LpConstraint
Linear: TypeAlias = Expression | Variable | float
"""A linear expression; constants are plain numbers."""


class MilpModel:
    """A minimisation model that creates its variables and collects its constraints."""

    def __init__(self, name: str) -> None:
        self.problem = pulp.LpProblem(name, pulp.LpMinimize)
        self.constraints: list[Constraint] = []

    def continuous(self, name: str, low: float, high: float) -> Variable:
        """Make a variable between two finite bounds."""
        return self.problem.add_variable(name, low, high)

    def whole(self, name: str, low: int, high: int) -> Variable:
        """Make an integer variable between two bounds."""
        return self.problem.add_variable(name, low, high, pulp.LpInteger)

    def binary(self, name: str) -> Variable:
        """Make a 0-1 variable."""
        return self.problem.add_variable(name, cat=pulp.LpBinary)

    def minimise(self, objective: Linear) -> None:
        """Set the objective."""
        self.problem.setObjective(pulp.LpAffineExpression(objective))

    def add(self, constraint: Constraint) -> None:
        """Add a constraint."""
        self.constraints.append(constraint)
        self.problem += constraint


def at_least(expression: Linear, bound: float) -> Constraint:
    """Return the constraint expression >= bound."""
    return pulp.LpConstraint(
        pulp.LpAffineExpression(expression), sense=pulp.LpConstraintGE, rhs=bound
    )


def total(terms: list[Linear]) -> Expression:
    """Return the sum of linear terms."""
    return pulp.lpSum(terms)


def value_of(expression: Linear | Constraint, values: Mapping[Variable, float]) -> float:
    """Return the value of an expression in a solution; unknown variables count 0.

    For a constraint: how far it is above its bound (negative = violated).
    """
    if isinstance(expression, pulp.LpVariable):
        return values.get(expression, 0.0)
    if isinstance(expression, int | float):
        return float(expression)
    terms = (factor * values.get(variable, 0.0) for variable, factor in expression.items())
    return float(expression.constant) + float(sum(terms))


# --- The ways in which HiGHS can end.


class MilpStatus(StrEnum):
    """The result of a MILP run; ``UNDECIDED`` after a limit, a stop or a numerical error."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    UNDECIDED = "undecided"


_S = highspy.HighsModelStatus
_STATUS_OF = {
    _S.kOptimal: MilpStatus.OPTIMAL,
    _S.kModelEmpty: MilpStatus.OPTIMAL,
    _S.kInfeasible: MilpStatus.INFEASIBLE,
    # Every variable of our models is bounded, so of the two only infeasible is left.
    _S.kUnboundedOrInfeasible: MilpStatus.INFEASIBLE,
}


def _status(highs: Any) -> MilpStatus:
    return _STATUS_OF.get(highs.getModelStatus(), MilpStatus.UNDECIDED)


_GAP = 1e-7
"""The relative gap at which HiGHS stops."""

_MIP_TOLERANCE = 1e-7
"""Feasibility tolerance. A larger one, times a big-M, lets orders overlap visibly. At 1e-9 HiGHS
1.15 proved wrong bounds (4.5 although 4.0 is feasible, in 8 of 128 runs)."""

_GRACE_S = 0.3
"""Seconds by which HiGHS may exceed its own limit."""


_BOUND_ALONE = {
    "presolve": "off",
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
}
"""Options of integer runs that grow row by row: they have good starts and need only the bound.
HiGHS's neighbourhood searches find nothing there. Presolve hides the program that earlier rows were
made for. 1F1B on 32 devices takes 7 CPU seconds instead of 21. ZB-V on 8 devices has a gap of
0.5% instead of 1.7% after 40 s. Source: `python -m benchmarks.plan_milp`, HiGHS 1.15.1."""

_ITERATIONS, _LOOKS, _RUNS = 10_000, 1_500, 1_000
"""Simplex iterations, limit checks of HiGHS, and runs per unit of work. A unit takes about a second
in programs that grow row by row (measured on the cuts of 40 stages)."""

_SEEDS = 2**31
"""HiGHS's seed is a 32-bit integer; larger seeds wrap around."""


@dataclass(frozen=True, slots=True)
class MilpOutcome:
    """The outcome of a run.

    ``bound`` is HiGHS's dual bound of the minimised objective, None if it has none. ``values`` are
    by PuLP variable, None if no solution was found.
    """

    status: MilpStatus
    bound: float | None
    values: dict[Variable, float] | None
    num_nodes: int


def solver_name() -> str:
    """Return name and version, e.g. ``highs 1.15.1``."""
    highs: Any = highspy.Highs
    return f"highs {highs().version()}"


def solve_milp(
    model: MilpModel,
    stop: Stop,
    *,
    integer: bool = True,
    on_solution: Callable[[Mapping[Variable, float]], None] | None = None,
    on_bound: Callable[[float], None] | None = None,
) -> MilpOutcome:
    """Minimise a model.

    Parameters
    ----------
    model
        A bounded minimisation model; it must not change afterwards.
    integer
        Whether integer variables must be whole; otherwise a linear program is solved.
    stop
        Seconds, HiGHS's threads and its seed (any >= 0: HiGHS gets it modulo 2^31). Work is counted
        in branch-and-bound nodes. If they end a run before the clock does, the run is reproducible
        for one seed and thread count. A stop ends the run at the next callback of HiGHS.
    on_solution, on_bound
        Called with every improving solution and every better dual bound during the run. Their
        exceptions end the run and reach the caller.
    """
    if stop.is_told():
        return MilpOutcome(MilpStatus.UNDECIDED, bound=None, values=None, num_nodes=0)
    highs, variables = _built(model)
    for name, value in (_options(stop) | {"solve_relaxation": not integer}).items():
        highs.setOptionValue(name, value)
    callbacks = _Callbacks(variables, stop, on_solution, on_bound)
    callbacks.attach(highs)
    _run(highs)
    if callbacks.raised is not None:
        raise callbacks.raised
    outcome = _outcome(highs, variables, integer=None if integer else False)
    stop.spend(outcome.num_nodes)
    return outcome


class _Callbacks:
    """The callbacks of one run; ``raised`` is the first exception of a caller's function."""

    def __init__(
        self,
        variables: list[Variable],
        stop: Stop,
        on_solution: Callable[[Mapping[Variable, float]], None] | None,
        on_bound: Callable[[float], None] | None,
    ) -> None:
        self.variables, self.stop = variables, stop
        self.on_solution, self.on_bound = on_solution, on_bound
        self.bound = -math.inf
        self.raised: BaseException | None = None

    def attach(self, highs: Any) -> None:
        if self.on_solution is not None:
            highs.cbMipImprovingSolution += lambda event: self._guard(self._solution, event)
        highs.cbMipInterrupt += lambda event: self._guard(self._bound, event)
        highs.cbSimplexInterrupt += lambda event: self._guard(self._interrupt, event)

    def _guard(self, report: Callable[[Any], None], event: Any) -> None:
        # An exception must not pass through HiGHS's own code. After one, nothing is reported.
        if self.raised is not None and report == self._solution:
            return
        try:
            report(event)
        except BaseException as error:  # noqa: BLE001 - raised again when HiGHS has ended
            self.raised = self.raised or error

    def _solution(self, event: Any) -> None:
        values = map(float, event.data_out.mip_solution)
        if self.on_solution is not None:
            self.on_solution(dict(zip(self.variables, values, strict=True)))

    def _bound(self, event: Any) -> None:
        bound = float(event.data_out.mip_dual_bound)
        if self.on_bound is not None and math.isfinite(bound) and bound > self.bound:
            self.bound = bound
            self.on_bound(bound)
        self._interrupt(event)

    def _interrupt(self, event: Any) -> None:
        late = self.stop.seconds() > self.stop.limit_s + _GRACE_S
        if self.raised is not None or late or self.stop.is_told():
            event.interrupt()


def _options(stop: Stop) -> dict[str, Any]:
    options: dict[str, Any] = {
        "output_flag": False,
        "time_limit": max(0.01, stop.left_s()),
        "threads": stop.threads,
        "random_seed": stop.seed % _SEEDS,
        "mip_rel_gap": _GAP,
        "mip_abs_gap": 1e-9,
        "mip_feasibility_tolerance": _MIP_TOLERANCE,
        "primal_feasibility_tolerance": _MIP_TOLERANCE,
    }
    if stop.threads > 1:
        options["parallel"] = "on"
    if stop.work is not None:
        options["mip_max_nodes"] = max(0, int(stop.left_work))
    return options


def _built(model: MilpModel) -> tuple[Any, list[Variable]]:
    """Let PuLP write the model into a highspy object, with columns in PuLP's index order."""
    writer = pulp.HiGHS(msg=False)
    writer.createAndConfigureSolver(model.problem)
    writer.buildSolverModel(model.problem)
    variables = sorted(model.problem.variables(), key=lambda variable: variable.index)
    return model.problem.solverModel, variables


def _run(highs: Any) -> None:
    """Run HiGHS; RuntimeError if it refuses.

    HiGHS creates its task scheduler once per thread. It then refuses runs with another number of
    threads, so each run gets a scheduler of its own.
    """
    highspy.Highs.resetGlobalScheduler(True)
    if highs.run() == highspy.HighsStatus.kError:
        raise RuntimeError(f"HiGHS refused to run: {highs.getModelStatus()}")


def _outcome(highs: Any, variables: list[Variable], *, integer: bool | None = None) -> MilpOutcome:
    status = _status(highs)
    info = highs.getInfo()
    bound = float(info.mip_dual_bound)
    if integer is None:
        integer = any(variable.cat == pulp.LpInteger for variable in variables)
    if not integer:
        # Without integers HiGHS solves a linear program, whose optimum is its own bound.
        is_optimal = status is MilpStatus.OPTIMAL
        bound = float(info.objective_function_value) if is_optimal else -math.inf
    solution = highs.getSolution()
    found = bool(solution.value_valid) and info.primal_solution_status == 2
    if not variables:
        found = False
    values = dict(zip(variables, map(float, solution.col_value), strict=True)) if found else None
    return MilpOutcome(
        status=status,
        bound=bound if math.isfinite(bound) else None,
        values=values,
        num_nodes=max(0, int(info.mip_node_count)),
    )


# --- Linear programs that grow row by row, straight to HiGHS.


class LinearProgram:
    """A linear program that is maximised again and again while rows are added to it.

    Parameters
    ----------
    gain
        By column, the objective per unit.
    tops
        By column, the maximum; the minimum is 0.
    """

    def __init__(self, gain: Sequence[float], tops: Sequence[float]) -> None:
        make: Any = highspy.Highs
        self._highs: Any = make()
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        self._num = len(gain)
        for column, (worth, top) in enumerate(zip(gain, tops, strict=True)):
            self._highs.addVar(0.0, float(top))
            self._highs.changeColCost(column, -float(worth))

    def add_at_most(self, terms: Mapping[int, float], limit: float) -> None:
        """Add a row: the sum of factor x column is at most ``limit``."""
        columns = np.array(list(terms), dtype=np.int32)
        factors = np.array(list(terms.values()), dtype=np.float64)
        self._highs.addRow(-math.inf, float(limit), len(columns), columns, factors)

    def best(self) -> list[float]:
        """Return the columns of an optimum within HiGHS's tolerances; zeros if it found none."""
        _run(self._highs)
        if _status(self._highs) is not MilpStatus.OPTIMAL:
            return [0.0] * self._num
        return [float(value) for value in self._highs.getSolution().col_value]


class RowByRow:
    """A model that is minimised again and again while rows are added to it.

    Parameters
    ----------
    model
        A bounded minimisation model; its constraints remain, later ones are `add`-ed here.
    """

    def __init__(self, model: MilpModel) -> None:
        self._highs, self._variables = _built(model)
        self._looks, self._most_looks = 0, math.inf
        self._is_counted = False
        self._column = {variable: index for index, variable in enumerate(self._variables)}
        whole = [v.cat == pulp.LpInteger for v in self._variables]
        self._whole = np.flatnonzero(np.array(whole)).astype(np.int32)
        self._is_integer = True
        self._start: list[float] | None = None

    def add(self, constraint: Constraint) -> None:
        """Add a row; its variables must be the model's."""
        columns = np.array([self._column[v] for v in constraint], dtype=np.int32)
        factors = np.array([float(f) for f in constraint.values()])
        side = -float(constraint.constant)
        low = -math.inf if constraint.sense == pulp.LpConstraintLE else side
        high = math.inf if constraint.sense == pulp.LpConstraintGE else side
        self._highs.addRow(low, high, len(columns), columns, factors)

    def columns_of(self, variables: Sequence[Variable]) -> Ints:
        """Return the column indices of variables."""
        return np.array([self._column[one] for one in variables], dtype=np.int64)

    def add_row(self, columns: Ints, factors: Floats, low: float) -> None:
        """Add a row: the sum of factor x column is at least ``low``."""
        self._highs.addRow(low, math.inf, len(columns), columns.astype(np.int32), factors)

    def minimise(self, factors: Mapping[Variable, float]) -> None:
        """Set another objective; variables without a factor cost nothing."""
        costs = np.zeros(len(self._variables))
        for variable, factor in factors.items():
            costs[self._column[variable]] = factor
        columns = np.arange(costs.size, dtype=np.int32)
        self._highs.changeColsCost(costs.size, columns, costs)

    def bound(self, variable: Variable, low: float, high: float) -> None:
        """Set the minimum and the maximum of a variable."""
        self._highs.changeColBounds(self._column[variable], low, high)

    def thin(self, first: int, most: int) -> None:
        """Drop rows from ``first`` on with the largest slack in the last solution; keep ``most``.

        Rows are those of the model, then those that were added, as in `prices`.
        """
        num_rows = self._highs.getNumRow()
        if num_rows - first <= most:
            return
        lows = np.array(self._highs.getLp().row_lower_[first:])
        slack = np.array(self._highs.getSolution().row_value[first:num_rows]) - lows
        dropped = first + np.sort(np.argsort(slack, kind="stable")[most:])
        self._highs.deleteRows(dropped.size, dropped.astype(np.int32))

    def start_from(self, values: Mapping[Variable, float]) -> None:
        """Set the start of integer solves; HiGHS uses it if it satisfies the rows."""
        self._start = [values.get(variable, 0.0) for variable in self._variables]

    def solve(self, stop: Stop, *, integer: bool, gap: float = _GAP) -> MilpOutcome:
        """Minimise, with or without integrality, within the time of ``stop``.

        ``bound`` is proven for the present rows, and thus with any added later. Work is counted in
        simplex iterations and, with integrality, also in HiGHS's checks of its limits, which can
        end a run. Both counts are reproducible on one thread. The status is ``UNDECIDED`` if
        HiGHS ends in a numerical error even from a fresh start. Then nothing is known.
        """
        if integer != self._is_integer:
            kind = highspy.HighsVarType.kInteger if integer else highspy.HighsVarType.kContinuous
            for column in self._whole:
                self._highs.changeColIntegrality(int(column), kind)
            self._is_integer = integer
        options = _options(stop) | {"mip_rel_gap": gap} | _BOUND_ALONE
        if stop.work is not None:
            iterations = max(1, int(stop.left_work * _ITERATIONS))
            limits = {"mip_max_nodes": highspy.kHighsIInf, "simplex_iteration_limit": iterations}
            options |= limits
            self._count_looks(max(1, int(stop.left_work * _LOOKS)))
        for name, value in options.items():
            self._highs.setOptionValue(name, value)
        # HiGHS's clock continues from run to run.
        seconds = self._highs.getRunTime() + max(0.01, stop.left_s())
        self._highs.setOptionValue("time_limit", seconds)
        if integer and self._start is not None:
            solution: Any = highspy.HighsSolution()
            solution.col_value = self._start
            self._highs.setSolution(solution)
        is_run = self._has_run()
        if stop.work is not None:
            iterations = max(0, int(self._highs.getInfo().simplex_iteration_count))
            stop.spend(max(iterations / _ITERATIONS, self._looks / _LOOKS, 1 / _RUNS))
        if not is_run:
            return MilpOutcome(MilpStatus.UNDECIDED, bound=None, values=None, num_nodes=0)
        return _outcome(self._highs, self._variables, integer=integer)

    def prices(self) -> list[float]:
        """Return the dual value of each row, after a relaxation.

        The model's constraints come first, then the rows added before that run.
        """
        return [float(dual) for dual in self._highs.getSolution().row_dual]

    def _has_run(self) -> bool:
        """Run HiGHS, and again from a fresh start if it fails; return whether a run succeeded."""
        for is_again in (False, True):
            if is_again:
                self._highs.clearSolver()
            try:
                _run(self._highs)
            except RuntimeError:
                continue
            return True
        return False

    def _count_looks(self, most: int) -> None:
        """Let a run with integrality end after ``most`` checks of its limits."""
        self._looks, self._most_looks = 0, most
        if not self._is_counted:
            self._highs.cbMipInterrupt += self._look
            self._is_counted = True

    def _look(self, event: Any) -> None:
        self._looks += 1
        if self._looks >= self._most_looks:
            event.interrupt()


# --- The same problem in another unit of time, with numbers that suit HiGHS's tolerances.
# These are absolute: with an objective of 1e9 ms HiGHS proved wrong results.

_LEAST_MS, _MOST_MS = 16.0, 65_536.0
_AIM_MS = 1024.0

_STAGE_TIMES = tuple(name for name in Stage.model_fields if name.endswith("_ms"))


def scale_for(objective_ms: float) -> float:
    """Return a power of 2 that brings an objective near 1 s; 1 if it is near enough."""
    if objective_ms <= 0 or _LEAST_MS <= objective_ms <= _MOST_MS:
        return 1.0
    return 2.0 ** round(math.log2(_AIM_MS / objective_ms))


def scaled(problem: Problem, factor: float) -> Problem:
    """Return the problem with every time multiplied by a factor > 0.

    A power of 2 is exact: it multiplies the length of every schedule by the factor.
    """
    if factor == 1.0:
        return problem
    slower = {"d2h_gb_per_s": 1 / factor, "h2d_gb_per_s": 1 / factor}
    between = {"latency_ms": factor, "bandwidth_gb_per_s": 1 / factor}
    changed = problem.model_copy(
        update={
            "devices": [_times(device, slower) for device in problem.devices],
            "stages": [_times(s, dict.fromkeys(_STAGE_TIMES, factor)) for s in problem.stages],
            "links": [_times(link, between) for link in problem.links],
        }
    )
    return Problem.parse(changed.model_dump(by_alias=True))


def _times(value: BaseModel, factors: dict[str, float]) -> BaseModel:
    known = {name: getattr(value, name) for name in factors}
    return value.model_copy(
        update={name: was * factors[name] for name, was in known.items() if was is not None}
    )
