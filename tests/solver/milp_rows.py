"""What the tests of the horizon model and of windows share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.milp.highs import Model, Variable, value_of

if TYPE_CHECKING:
    from optpipe import Problem


def shares_lanes(problem: Problem) -> bool:
    """Whether transfers of different devices or directions compete (the model is then relaxed)."""
    return any(d.half_duplex or d.pcie_group is not None for d in problem.devices)


def broken(model: Model, values: dict[Variable, float]) -> list[str]:
    """The constraints and bounds of a model that a solution breaks."""
    found = [
        str(constraint) for constraint in model.constraints if value_of(constraint, values) < -1e-6
    ]
    for variable in model.problem.variables():
        low, high = variable.lowBound, variable.upBound
        if not low - 1e-6 <= values[variable] <= high + 1e-6:
            found.append(f"{variable} = {values[variable]} outside {low} .. {high}")
    return found
