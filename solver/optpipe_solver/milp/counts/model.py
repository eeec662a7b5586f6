"""The model on counts as HiGHS takes it."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.milp.counts.constraints import CountVariables, all_rows
from optpipe_solver.milp.highs import SparseModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_solver.milp.counts.items import CountProblem

__all__ = ["WrittenModel", "count_model"]

_ROWS_BETWEEN_LOOKS = 500


class WrittenModel(NamedTuple):
    """A model, None where windows or a row alone prove that nothing ends in time."""

    model: SparseModel | None
    is_complete: bool = True


def count_model(given: CountProblem, should_stop: Callable[[], bool]) -> WrittenModel:
    """Write all rows, or, where told to stop, some."""
    v = CountVariables(given)
    if v.is_empty:
        return WrittenModel(None)
    sizes = [0]
    columns: list[int] = []
    factors: list[int] = []
    limits: list[int] = []
    for number, (left, right) in enumerate(all_rows(v)):
        most = left.constant
        for column, factor in left.terms.items():
            most += factor * (v.tops if factor > 0 else v.lows)[column]
        if most <= right:
            continue
        if not left.terms:
            return WrittenModel(None)
        sizes.append(len(left.terms))
        columns += left.terms.keys()
        factors += left.terms.values()
        limits.append(right - left.constant)
        if number % _ROWS_BETWEEN_LOOKS == 0 and should_stop():
            return WrittenModel(None, is_complete=False)
    model = SparseModel(
        lows=np.array(v.lows, dtype=np.float64),
        tops=np.array(v.tops, dtype=np.float64),
        starts=np.array(list(accumulate(sizes)), dtype=np.int32),
        columns=np.array(columns, dtype=np.int32),
        factors=np.array(factors, dtype=np.float64),
        limits=np.array(limits, dtype=np.float64),
    )
    return WrittenModel(model)
