"""The model on counts, built below a horizon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.milp.counts.constraints import all_rows
from optpipe_solver.milp.counts.variables import CountVariables
from optpipe_solver.milp.highs import MilpModel, row_at_most

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_solver.milp.counts.items import CountProblem

__all__ = ["CountModel"]

_ROWS_BETWEEN_LOOKS = 500


class CountModel:
    """Variables and rows of one problem below one horizon.

    Attributes
    ----------
    is_empty
        Whether windows or a row alone prove that nothing ends in time.
    is_complete
        Whether all rows are written: not where told to stop before.
    """

    def __init__(
        self, given: CountProblem, *, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.given = given
        self.model = MilpModel("counts")
        self.model.minimise(0.0)
        self.is_complete = False
        self.num_rows = 0
        variables = CountVariables(given, self.model)
        self.is_empty = variables.is_empty
        if self.is_empty:
            return
        for number, (left, right) in enumerate(all_rows(variables)):
            if left.most <= right:
                continue
            if not left.terms:
                self.is_empty = True
                return
            self.model.add(row_at_most(left.terms, right - left.constant))
            self.num_rows += 1
            if number % _ROWS_BETWEEN_LOOKS == 0 and should_stop():
                return
        self.is_complete = True
