"""The only folder that talks to PuLP and HiGHS.

Models are written with the few names of `model` (`Model`, `Variable`, `Linear`, `total`,
`at_least`), and solved by `run`; `status` has HiGHS's words in ours, `linear` the linear programs
that grow row by row.
"""

from optpipe_solver.milp.highs.linear import LinearProgram
from optpipe_solver.milp.highs.model import (
    Constraint,
    Expression,
    Linear,
    Model,
    Variable,
    at_least,
    total,
    value_of,
)
from optpipe_solver.milp.highs.run import MilpOutcome, solve_milp, solver_name
from optpipe_solver.milp.highs.status import STATUS_OF, MilpStatus

__all__ = [
    "STATUS_OF",
    "Constraint",
    "Expression",
    "Linear",
    "LinearProgram",
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
