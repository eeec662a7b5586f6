"""Whose turn it is: each part only where it can do what no other does."""

from __future__ import annotations

from typing import Any

import pytest

from optpipe_solver.budget import Budget
from optpipe_solver.exact.widen import improve_by_beam
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.milp.improve import milp_fits
from optpipe_solver.portfolio import plans
from tests.building import problem, stage


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("again", [{}, {"recompute_ms": 1.0, "checkpoint_bytes": 1}])
@pytest.mark.parametrize("m", [4, 2000])
def test_the_beam_has_a_turn_where_the_milp_fits(
    again: dict[str, Any], threads: int, m: int
) -> None:
    """Over counts or over journeys, but on no large problem."""
    tight = [{"memory_bytes": 12}, {"memory_bytes": 12}]
    given = problem([stage(0, **again), stage(1, **again)], tight, m=m)
    lanes = plans(Incumbent(given), Budget(threads=threads))
    turns = [step.part.run for plan in lanes for step in plan.once]
    assert (improve_by_beam in turns) is milp_fits(given) is (m == 4)
