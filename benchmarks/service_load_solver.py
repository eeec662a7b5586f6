"""What the solver processes of `benchmarks.service_load` run; they need no server to be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.api import fake_solver

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver import Result

__all__ = ["SOLVE_PATH", "solve"]

SOLVE_PATH = "benchmarks.service_load_solver:solve"


def solve(problem: Problem, **options: Any) -> Result:
    """Solve as a script says that is the problem's name (see `tests.api.fake_solver`), or truly."""
    if problem.name.startswith("improve:"):
        return fake_solver.solve(problem, **options)
    import optpipe_solver

    options = {name: value for name, value in options.items() if name != "start_method"}
    return optpipe_solver.solve(problem, **options)
