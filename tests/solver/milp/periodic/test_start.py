"""Blocks as starts of the periodic model: HiGHS gets a solution, not a wish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe_solver.budget import Stop
from optpipe_solver.families.v_shape import candidate_blocks
from optpipe_solver.milp.periodic.circular_search import CircularSearch, small_memory
from optpipe_solver.milp.periodic.items import Modes
from optpipe_solver.milp.periodic.model import PeriodicModel, start_of
from optpipe_solver.milp.periodic.questions import shortest_period, smallest_memory
from tests.solver.milp.periodic.equal import equal
from tests.solver.milp.periodic.test_exhaustive import shrinking
from tests.solver.milp.rows import broken
from tests.strategies import few


@few(12)
@given(st.integers(0, 10**6), st.sampled_from([1, 2]))
def test_what_the_model_found_is_a_start_of_it(seed: int, copies: int) -> None:
    """A block of the MILP breaks no constraint as a start, but for the times of transfers.

    Those HiGHS finds, as it does what a host holds.
    """
    tiny, modes = shrinking(seed), Modes(copies=copies)
    hosts = tuple(host.model_copy(update={"memory_bytes": None}) for host in tiny.hosts)
    tiny = tiny.model_copy(update={"hosts": hosts})
    found = shortest_period(tiny, 40.0, Stop(10.0), modes, proves=False)
    if found.block is None:
        return
    per_batch = found.block.period_ms / copies
    model = PeriodicModel(tiny, modes, shortest_ms=per_batch, longest_ms=80.0)
    values = start_of(model.variables, found.block)
    assert values is not None
    timed = ("d2h_", "h2d_", "turns_")
    rows = broken(model.model, values)
    assert [row for row in rows if not any(name in row for name in timed)] == []


@pytest.mark.parametrize(("p", "shape"), [(4, "v"), (8, "v"), (4, "loop")])
def test_uniform_offsets_are_a_start(p: int, shape: str) -> None:
    """A building block, whose offsets are uniform, breaks no constraint of a plain model."""
    given_problem = equal(p, shape)
    search = CircularSearch(given_problem, fused=False)
    for uniform in candidate_blocks(given_problem)[:10]:
        block = search.block_of(search.from_times(uniform))
        assert block is not None
        model = PeriodicModel(given_problem, Modes(), shortest_ms=6.0, longest_ms=600.0)
        values = start_of(model.variables, block)
        assert values is not None
        assert broken(model.model, values) == []


def test_a_start_of_other_copies_is_none() -> None:
    """A block of one micro-batch is no start of a model of two."""
    given_problem = equal(2, "v")
    search = CircularSearch(given_problem, fused=False)
    block = search.block_of(search.from_times(candidate_blocks(given_problem)[0]))
    assert block is not None
    model = PeriodicModel(given_problem, Modes(copies=2), shortest_ms=6.0, longest_ms=60.0)
    assert start_of(model.variables, block) is None
    assert start_of(model.variables, block.repeated(2)) is not None


def test_highs_takes_the_start() -> None:
    """Without a node and almost without time the answer is as good as the start at least."""
    given_problem = equal(8, "v")
    start = small_memory(given_problem, 6.0, num_moves=500, seed=0)
    assert start is not None
    known = max(start.peaks(given_problem))
    found = smallest_memory(given_problem, 6.0, Stop(60.0, work=0), start=start)
    assert found.block is not None
    assert max(found.block.peaks(given_problem)) <= known
