"""The only file that talks to PuLP and HiGHS.

Models are written with the few names below (`Model`, `Variable`, `Linear`, `total`, `at_least`).
PuLP's own HiGHS class has no warm start and labels a time-limit stop ``Optimal``: so PuLP builds
the model, and everything else - start, callbacks, status, bound - goes through highspy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import highspy
import pulp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "STATUS_OF",
    "Constraint",
    "Expression",
    "Linear",
    "MilpOutcome",
    "MilpStatus",
    "Model",
    "Variable",
    "at_least",
    "solve_milp",
    "solver_name",
    "total",
    "value_of",
]

Variable: TypeAlias = pulp.LpVariable
Expression: TypeAlias = pulp.LpAffineExpression
Constraint: TypeAlias = pulp.LpConstraint
Linear: TypeAlias = Expression | Variable | float
"""A linear expression; constants are plain numbers."""

_MIP_TOLERANCE = 1e-9
"""Feasibility tolerance: a large big-M times HiGHS's default lets orders overlap visibly."""


class MilpStatus(StrEnum):
    """How a MILP run can end, in our words."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time_limit"
    INTERRUPTED = "interrupted"
    LIMIT = "limit"
    FAILED = "failed"


_S = highspy.HighsModelStatus
STATUS_OF: dict[highspy.HighsModelStatus, MilpStatus] = {
    _S.kOptimal: MilpStatus.OPTIMAL,
    _S.kModelEmpty: MilpStatus.OPTIMAL,
    _S.kInfeasible: MilpStatus.INFEASIBLE,
    # Every variable of our models is bounded, so of the two only infeasible is left.
    _S.kUnboundedOrInfeasible: MilpStatus.INFEASIBLE,
    _S.kTimeLimit: MilpStatus.TIME_LIMIT,
    _S.kInterrupt: MilpStatus.INTERRUPTED,
    getattr(_S, "kHighsInterrupt"): MilpStatus.INTERRUPTED,  # noqa: B009 - absent from the stubs
    _S.kIterationLimit: MilpStatus.LIMIT,
    _S.kSolutionLimit: MilpStatus.LIMIT,
    _S.kMemoryLimit: MilpStatus.LIMIT,
    _S.kObjectiveBound: MilpStatus.LIMIT,
    _S.kObjectiveTarget: MilpStatus.LIMIT,
    _S.kUnbounded: MilpStatus.FAILED,
    _S.kNotset: MilpStatus.FAILED,
    _S.kLoadError: MilpStatus.FAILED,
    _S.kModelError: MilpStatus.FAILED,
    _S.kPresolveError: MilpStatus.FAILED,
    _S.kSolveError: MilpStatus.FAILED,
    _S.kPostsolveError: MilpStatus.FAILED,
    _S.kUnknown: MilpStatus.FAILED,
}
"""HiGHS's own status in our words; complete, which a test checks against the enum."""


class Model:
    """A minimisation model: variables are made by it, constraints added to it."""

    def __init__(self, name: str) -> None:
        self.problem = pulp.LpProblem(name, pulp.LpMinimize)
        self.constraints: list[Constraint] = []

    def continuous(self, name: str, low: float, high: float) -> Variable:
        """Make a variable between two finite bounds."""
        return self.problem.add_variable(name, low, high)

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
    """Return what an expression is worth in a solution; unknown variables count 0.

    Of a constraint: how far above its bound it is (negative = broken).
    """
    if isinstance(expression, pulp.LpVariable):
        return values.get(expression, 0.0)
    if isinstance(expression, int | float):
        return float(expression)
    terms = (factor * values.get(variable, 0.0) for variable, factor in expression.items())
    return float(expression.constant) + float(sum(terms))


@dataclass(frozen=True, slots=True)
class MilpOutcome:
    """The end of a run.

    ``bound`` is HiGHS's dual bound of the minimised objective, None when it has none;
    ``values`` are by PuLP variable, None when no solution was found.
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
    model: Model,
    *,
    time_limit_s: float,
    threads: int = 1,
    seed: int = 0,
    gap: float = 1e-7,
    start: Mapping[Variable, float] | None = None,
    on_solution: Callable[[Mapping[Variable, float]], None] | None = None,
    on_bound: Callable[[float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> MilpOutcome:
    """Minimise a model.

    Parameters
    ----------
    model
        A bounded minimisation model.
    time_limit_s, threads, seed, gap
        HiGHS's limits; ``gap`` is relative.
    start
        A solution to start from, complete or not.
    on_solution, on_bound
        Told every improving solution and every better dual bound while the run goes on.
    should_stop
        Asked often; True ends the run.
    """
    highs, variables = _built(model)
    _configure(highs, time_limit_s, threads, seed, gap)
    if start is not None:
        _set_start(highs, variables, start)
    watch = _Watch(variables, on_solution, on_bound, should_stop)
    watch.attach(highs)
    highs.run()
    watch.reraise()
    return _outcome(highs, variables)


def _built(model: Model) -> tuple[Any, list[Variable]]:
    """Let PuLP write the model into a highspy object; columns stand in PuLP's index order."""
    writer = pulp.HiGHS(msg=False)
    writer.createAndConfigureSolver(model.problem)
    writer.buildSolverModel(model.problem)
    variables = sorted(model.problem.variables(), key=lambda variable: variable.index)
    return model.problem.solverModel, variables


def _configure(highs: Any, time_limit_s: float, threads: int, seed: int, gap: float) -> None:
    options = {
        "output_flag": False,
        "time_limit": max(0.01, time_limit_s),
        "threads": threads,
        "random_seed": seed,
        "mip_rel_gap": gap,
        "mip_abs_gap": 1e-9,
        "mip_feasibility_tolerance": _MIP_TOLERANCE,
        "primal_feasibility_tolerance": _MIP_TOLERANCE,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    if threads > 1:
        highs.setOptionValue("parallel", "on")


def _set_start(highs: Any, variables: list[Variable], start: Mapping[Variable, float]) -> None:
    solution = highspy.HighsSolution()
    solution.col_value = [float(start.get(variable, 0.0)) for variable in variables]
    highs.setSolution(solution)


class _Watch:
    """HiGHS's callbacks; what a callback raises ends the run and is raised again after it."""

    def __init__(
        self,
        variables: list[Variable],
        on_solution: Callable[[Mapping[Variable, float]], None] | None,
        on_bound: Callable[[float], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.variables = variables
        self.on_solution = on_solution
        self.on_bound = on_bound
        self.should_stop = should_stop
        self.bound = -math.inf
        self.error: BaseException | None = None

    def attach(self, highs: Any) -> None:
        if self.on_solution is not None:
            highs.cbMipImprovingSolution += self._improving
        highs.cbMipInterrupt += self._interrupt

    def reraise(self) -> None:
        if self.error is not None:
            raise self.error

    def _improving(self, event: Any) -> None:
        if self.on_solution is None or self.error is not None:
            return
        try:
            values = event.data_out.mip_solution
            self.on_solution(dict(zip(self.variables, map(float, values), strict=True)))
        except BaseException as error:  # noqa: BLE001 - must not unwind through C++
            self.error = error

    def _interrupt(self, event: Any) -> None:
        try:
            bound = float(event.data_out.mip_dual_bound)
            if self.on_bound is not None and math.isfinite(bound) and bound > self.bound:
                self.bound = bound
                self.on_bound(bound)
            stop = self.should_stop is not None and self.should_stop()
        except BaseException as error:  # noqa: BLE001 - must not unwind through C++
            self.error = error
            stop = True
        if stop or self.error is not None:
            event.interrupt()


def _outcome(highs: Any, variables: list[Variable]) -> MilpOutcome:
    status = STATUS_OF[highs.getModelStatus()]
    info = highs.getInfo()
    bound = float(info.mip_dual_bound)
    solution = highs.getSolution()
    found = bool(solution.value_valid) and info.primal_solution_status == 2
    values = dict(zip(variables, map(float, solution.col_value), strict=True)) if found else None
    return MilpOutcome(
        status=status,
        bound=bound if math.isfinite(bound) else None,
        values=values,
        num_nodes=max(0, int(info.mip_node_count)),
    )
