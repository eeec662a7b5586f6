"""Every prover and improver that can be called directly: it proves what is true, or it refuses."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from optpipe import InputError, Problem
from optpipe.problem import Microbatch
from optpipe_solver import solve
from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.bounds import Paths, lower_bound, lower_bounds, work_bound
from optpipe_solver.bounds.bound import paired_load_ms, paired_memory_ms, shortened
from optpipe_solver.bounds.energy import energy_ms
from optpipe_solver.budget import Stop
from optpipe_solver.exact.fifo_search import search_fifo_beam
from optpipe_solver.exact.general_search import search_beam, search_general
from optpipe_solver.exact.layers import HorizonAnswer, LayeredOutcome
from optpipe_solver.exact.rounds import (
    improve_by_beam,
    improve_by_exact_search,
    search_in_turn,
)
from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.families.polish_blocks import improve_by_blocks
from optpipe_solver.feasibility import feasibility
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.last_steps import lower_peaks
from optpipe_solver.local_search.dispatching import dispatched
from optpipe_solver.local_search.pairing import improve_by_pairing
from optpipe_solver.local_search.search import improve_by_local_search, improve_by_stretches
from optpipe_solver.milp.horizon.model import improve_by_milp, solve_horizon
from optpipe_solver.offload_fit.fit import Frame
from optpipe_solver.reductions import orders
from optpipe_solver.replan import replan
from optpipe_solver.uniform_modes import in_modes, with_uniform_modes
from tests.building import problem, programs, stage
from tests.solver.exhaustive import optimum, tiny_problems, tiny_problems_with_pairs
from tests.solver.starting import serially
from tests.strategies import Case, documents, few, random_programs, tightened


@st.composite
def tiny_problems_with_unequal_microbatches(draw: st.DrawFn) -> Problem:
    """Two micro-batches on one stage, of two costs where there are two, in memory just enough."""
    document = draw(documents(unequal=True))
    del document["stages"][1:]
    document["num_microbatches"] = 2
    document["microbatches"] = [
        {
            "cost": number % len(document["stages"][0]["costs"]),
            "sample": draw(st.none() | st.just(0)),
        }
        for number in draw(st.permutations(range(2)))
    ]
    tiny = Problem.parse(document)
    rng = random.Random(draw(st.integers(0, 2**32)))
    tight = tightened(Case(tiny, random_programs(tiny, rng))).problem
    # Slices whose stage must use one mode may be left undecided (docs/limits.md).
    is_undecided = tight.has_samples and tight.stages[0].uniform_modes
    assume(not is_undecided or feasibility(tight).plan is not None)
    return tight


def in_given_order(posed: Problem) -> Problem:
    """Return the problem whose micro-batches must come in order."""
    return posed.model_copy(update={"order": "given"})


tiny_problems_of_v2 = st.one_of(
    tiny_problems(menus=True),
    tiny_problems_with_pairs(),
    tiny_problems_with_pairs().map(in_given_order),
    tiny_problems_with_unequal_microbatches(),
)


def _improved(improve: Callable[[Incumbent, Stop], None]) -> Callable[[Problem, float], float]:
    def bound_ms(posed: Problem, least_ms: float) -> float:
        best = serially(posed)
        improve(best, Stop(600, work=300))
        assert best.objective_ms >= least_ms * (1 - 1e-9)
        return best.bound_ms

    return bound_ms


def _within(search: Callable[..., LayeredOutcome], *devices: Any) -> Callable[..., float]:
    """Return what a search proves that is asked for a schedule as long as the optimum."""
    limits = {"most_states": 20_000, "most_in_layer": 2_000} if devices else {"width": 500}

    def bound_ms(posed: Problem, least_ms: float) -> float:
        found = search(posed, *devices, least_ms, **limits)
        return 2 * least_ms + 1 if found.answer is HorizonAnswer.NONE else 0.0

    return bound_ms


def _dispatched_ms(posed: Problem, least_ms: float) -> float:
    found = dispatched(CompiledProblem.of(posed), orders(posed), 1_000, 0)
    assert found is None or found.objective_ms >= least_ms * (1 - 1e-9)
    return 0.0


PROVERS: dict[str, Callable[[Problem, float], float]] = {
    "lower_bounds": lambda posed, _: max(bound.ms for bound in lower_bounds(posed)),
    "energy": lambda posed, _: energy_ms(Paths(posed), makespan=posed.objective == "makespan"),
    "paired load": lambda posed, _: paired_load_ms(posed),
    "paired memory": lambda posed, _: paired_memory_ms(posed),
    "work bound": lambda posed, _: work_bound(posed).ms,
    "dispatching": _dispatched_ms,
    "replan": lambda posed, _: replan(posed, work=1_000).bound_ms or 0.0,
    "peaks": _improved(lower_peaks),
    "shortened": lambda posed, _: lower_bound(shortened(posed)).ms,
    "exact search": _improved(improve_by_exact_search),
    "beam": _improved(improve_by_beam),
    "milp": _improved(improve_by_milp),
    "blocks": _improved(improve_by_blocks),
    "local search": _improved(improve_by_local_search),
    "stretches": _improved(improve_by_stretches),
    "pairing": _improved(improve_by_pairing),
    "fifo": _within(search_fifo_beam),
    "general beam": _within(search_beam),
    "general": _within(search_general, (0,)),
    "cells": _within(partial(search_general, by_cell=True), (0,)),
    "in turn": _within(search_in_turn, [(0,)]),
    "horizon": lambda posed, least_ms: solve_horizon(
        posed,
        least_ms,
        Stop(600, work=50),
        on_programs=lambda _: None,
        on_bound=lambda _: None,
        fifo=False,
        floor_ms=0.0,
    ),
}


@few(10)
@given(tiny_problems_of_v2)
def test_every_part_proves_no_more_than_is_true_or_refuses(posed: Problem) -> None:
    """Against every program of a tiny problem with menus, pairs or unequal micro-batches."""
    least_ms = optimum(posed)
    false = {}
    for name, prove in PROVERS.items():
        try:
            bound_ms = prove(posed, least_ms)
        except InputError as error:
            if "this part supports" not in str(error):
                raise
        else:
            if bound_ms > least_ms * (1 + 1e-6) + 1e-9:
                false[name] = bound_ms
    assert not false, least_ms


def unequal() -> Problem:
    """Four micro-batches, every second one shorter."""
    costs = [{"forward_ms": f, "backward_input_ms": f, "backward_weight_ms": f,
              "activation_bytes": 10} for f in (4, 1)]  # fmt: skip
    return problem(
        [{"device": d, "costs": costs} for d in range(2)],
        m=4,
        format="optpipe/problem/v2",
        microbatches=[{"cost": j % 2} for j in range(4)],
    )


def paired() -> Problem:
    """A line whose forwards hide behind backwards."""
    pairs = [{"forward": d, "backward": d, "with": "B", "hidden_ms": 3} for d in range(2)]
    stages = [stage(d, 4, 4, 2) for d in range(2)]
    return problem(stages, m=4, format="optpipe/problem/v2", pairs=pairs)


KNOW_UNEQUAL = {
    "lower_bounds", "work bound", "local search", "stretches", "dispatching", "replan", "peaks"
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*PROVERS} - KNOW_UNEQUAL))
def test_unequal_microbatches_are_refused(name: str) -> None:
    """A part that reads the first cost alone would prove what is false."""
    with pytest.raises(InputError, match=r"micro-batches with costs.*supports.*call solve"):
        PROVERS[name](unequal(), 100.0)


NO_PAIRS = {
    "fifo", "cells", "milp", "horizon", "blocks", "local search", "stretches", "work bound",
    "replan", "peaks",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NO_PAIRS))
def test_pairs_are_refused(name: str) -> None:
    """A part that knows passes alone would prove what is false, or read what is not there."""
    with pytest.raises(InputError, match=r"the problem has pairs.*supports.*call solve"):
        PROVERS[name](paired(), 100.0)


@pytest.mark.parametrize("name", ["dispatching", "replan"])
def test_samples_are_refused(name: str) -> None:
    """A rule would break the turns of slices."""
    sliced = unequal().model_copy(
        update={"microbatches": tuple(Microbatch(cost=j % 2, sample=j // 2) for j in range(4))}
    )
    with pytest.raises(
        InputError, match=r"micro-batches with costs, samples.*supports.*call solve"
    ):
        PROVERS[name](sliced, 100.0)


def test_pairs_in_a_given_order_have_a_bound_below_their_schedules() -> None:
    """Pairs hide work that a bound of the whole work would count."""
    result = solve(in_given_order(paired()), work_limit=0.05, time_limit_s=600)
    assert result.schedule is not None
    assert result.bound_ms is not None
    assert 0 < result.bound_ms <= result.schedule.objective_ms
    assert any(action.paired for row in result.schedule.programs for action in row)


def test_the_beam_takes_the_search_that_knows_pairs() -> None:
    """Of pairs the search over counts proved a bound above the optimum."""
    best = serially(paired())
    improve_by_pairing(best, Stop(60, work=200_000))
    improve_by_beam(best, Stop(60, work=100_000))
    assert best.bound_ms <= best.objective_ms


def test_only_compute_programs_are_made_to_fit() -> None:
    """Transfers, recomputation and pairs would be read as other actions."""
    posed = problem([stage(0, recompute_ms=1, checkpoint_bytes=1)])
    rows = programs("0F0 0RECOMPUTE0 0B0")
    compiled = CompiledProblem.of(posed)
    encoded = compiled.encode(rows)
    for part in (
        lambda: Frame(posed, rows),
        lambda: with_uniform_modes(compiled, encoded),
        lambda: in_modes(compiled, encoded, [0]),
    ):
        with pytest.raises(InputError, match=r"the programs hold transfers.*give programs"):
            part()


def test_a_family_for_equal_microbatches_says_so() -> None:
    """Those for slices, and Serial, take unequal ones; all others give a reason."""
    for family in FAMILIES:
        if not family.supports(unequal()):
            with pytest.raises(NotApplicable, match="rule for equal micro-batches") as why:
                family.build(unequal())
            assert why.value.reason == "needs-equal-microbatches"
    assert {family.name for family in FAMILIES if family.supports(unequal())} == {
        "serial",
        "seq1f1b",
        "slimpipe",
    }
