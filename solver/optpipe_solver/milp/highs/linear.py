"""Linear programs that grow row by row, straight to HiGHS."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import highspy
import numpy as np

from optpipe_solver.milp.highs.status import STATUS_OF, MilpStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LinearProgram"]


class LinearProgram:
    """A linear program that is maximised again and again while rows are added to it.

    Parameters
    ----------
    gain
        By column, what one unit is worth.
    tops
        By column, the most it can be; the least is 0.
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
        """Return the columns of an optimum within HiGHS's tolerances; zeros where it found none."""
        self._highs.run()
        if STATUS_OF[self._highs.getModelStatus()] is not MilpStatus.OPTIMAL:
            return [0.0] * self._num
        return [float(value) for value in self._highs.getSolution().col_value]
