"""Whose turn it is: each part only where it can do what no other does."""

from __future__ import annotations

from typing import Any

import pytest

from optpipe_solver.budget import Budget
from optpipe_solver.exact.widen import improve_by_beam
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.portfolio import plans
from tests.building import problem, stage


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("again", [{}, {"recompute_ms": 1.0, "checkpoint_bytes": 1}])
def test_the_beam_has_a_turn_where_any_order_is_open(again: dict[str, Any], threads: int) -> None:
    """Where first in, first out loses nothing the search over counts says as much."""
    tight = [{"memory_bytes": 12}, {"memory_bytes": 12}]
    given = problem([stage(0, **again), stage(1, **again)], tight, m=4)
    turns = [step.part.run for plan in plans(Incumbent(given), Budget(threads=threads))
             for step in plan.once]  # fmt: skip
    assert (improve_by_beam in turns) is bool(again)
