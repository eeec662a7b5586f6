"""Programs on the board of a local search, and back."""

from optpipe import Problem, Programs
from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.local_search.annealing import table_for
from optpipe_solver.local_search.board import Table, rows_on


def set_out(given: Problem, rows: Programs) -> tuple[CompiledProblem, Table]:
    """Programs on a board, with nothing to undo."""
    compiled = CompiledProblem.of(given)
    table = table_for(compiled, compiled.encode(rows))
    table.undo.sizes[:] = 0
    return compiled, table


def read(compiled: CompiledProblem, table: Table) -> Programs:
    """What stands on the board."""
    return compiled.decode(rows_on(table.board))
