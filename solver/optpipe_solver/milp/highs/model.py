"""The words that models are written in: variables, linear expressions, constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import pulp

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Constraint",
    "Expression",
    "Linear",
    "Model",
    "Variable",
    "at_least",
    "total",
    "value_of",
]

Variable: TypeAlias = pulp.LpVariable
Expression: TypeAlias = pulp.LpAffineExpression
Constraint: TypeAlias = pulp.LpConstraint
Linear: TypeAlias = Expression | Variable | float
"""A linear expression; constants are plain numbers."""


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
