"""Exact searches in rounds: what few devices prove and what beams find, all of it legal."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import InputError, Problem, find_violations, simulate
from optpipe_solver.bounds import lower_bound
from optpipe_solver.budget import Stop
from optpipe_solver.exact.fifo_search import search_fifo_beam
from optpipe_solver.exact.general_search import beam_can_search, search_beam
from optpipe_solver.exact.layers import HorizonAnswer, LayeredOutcome
from optpipe_solver.exact.rounds import (
    improve_by_beam,
    improve_by_exact_search,
    search_in_turn,
)
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.local_search.search import improve_by_local_search
from tests.building import UNIT, bus, offloadable, problem, stage
from tests.solver.exact import test_fifo_search as fifo
from tests.solver.exact.test_general_search import choices, three_in_room_for_two
from tests.solver.exhaustive import optimum, tiny_problems
from tests.solver.starting import renumbered, serially, started
from tests.strategies import Case, cases, few

REAL = {"activation_bytes": 3_724_541_952, "weight_context_bytes": 1_610_612_736}


def real_problem(limit: float, m: int, **fields: Any) -> Problem:
    """Four devices with times of a 6.2b profile and room for ``limit`` activations."""
    stages = [stage(d, 29.718, 29.444, 19.927, **{**REAL, **fields}) for d in range(4)]
    room = int(limit * REAL["activation_bytes"])
    device = {"memory_bytes": room, "d2h_gb_per_s": 20.0, "h2d_gb_per_s": 20.0}
    return problem(stages, [device] * 4, m=m)


def searched(given: Problem, steps: int) -> Incumbent:
    """The best of all starts after some steps of local search."""
    best = started(given)
    improve_by_local_search(best, Stop(600, work=steps))
    return best


OFFLOAD = {"offload_bytes": REAL["activation_bytes"] // 2}
RECOMPUTE = {"recompute_ms": 20.0, "checkpoint_bytes": 372_454_195}


@pytest.mark.parametrize("fields", [OFFLOAD, RECOMPUTE])
def test_offload_and_recompute_are_proven_optimal(fields: dict[str, Any]) -> None:
    """The bounds without search leave a gap that few devices close."""
    best = searched(real_problem(1.5, 4, **fields), 2_000_000)
    improve_by_exact_search(best, Stop(600, work=2_000_000))
    assert best.is_optimal
    assert best.bound_method in {"general-search", "search-in-turn"}


@pytest.mark.parametrize(("ratio", "best_ms"), [(0.5, 1185.089), (2.0, 1913.111)])
def test_room_for_one_and_a_half_is_room_for_one(ratio: float, best_ms: float) -> None:
    """A copy takes ``ratio`` of F, I and W. All closed forms are 25% or more below the optimum."""
    given = real_problem(1.5, 8, offload_bytes=REAL["activation_bytes"])
    rate = REAL["activation_bytes"] / (ratio * (29.718 + 29.444 + 19.927) * UNIT)
    devices = [
        device.model_copy(update={"d2h_gb_per_s": rate, "h2d_gb_per_s": rate})
        for device in given.devices
    ]
    best = searched(given.model_copy(update={"devices": tuple(devices)}), 2_000_000)
    assert best.bound_ms < 0.75 * best_ms
    improve_by_exact_search(best, Stop(600, work=2_000_000))
    assert best.is_optimal
    assert best.objective_ms == pytest.approx(best_ms, rel=1e-5)


def test_under_span_the_cells_of_one_device_raise_the_bound() -> None:
    """The search over counts does not know that a device may begin before the first stage's."""
    offload = {"activation_bytes": 1_186_340_000, "offload_bytes": 1_186_340_000}
    given = real_problem(0.64, 8, **offload, weight_context_bytes=513_011_892)
    given = given.model_copy(update={"objective": "span"})
    best = searched(given, 2_000_000)
    improve_by_exact_search(best, Stop(600, work=100_000))
    assert best.bound_method == "cell-search"
    assert best.gap < 0.025


def turns(given: Problem, horizon_ms: float) -> Iterator[HorizonAnswer]:
    """What all choices of one device say in turn, then all of two, ..."""
    for _, same in groupby(choices(given), len):
        found = search_in_turn(
            given, tuple(same), horizon_ms, most_states=10**6, most_in_layer=20_000
        )
        yield found.answer


@given(st.one_of(cases(menus=True, pairs=True), cases(tight=True)))
def test_asked_in_turn_nobody_denies_a_legal_schedule(case: Case) -> None:
    """At its length, with all that the others say of when passes start."""
    if case.problem.objective == "makespan":
        length = simulate(case.problem, case.programs).makespan_ms
        assert HorizonAnswer.NONE not in turns(case.problem, length)


@given(tiny_problems(menus=True))
def test_asked_in_turn_nobody_denies_the_optimum(tiny: Problem) -> None:
    """Which exhaustive search knows."""
    if tiny.objective == "makespan":
        assert HorizonAnswer.NONE not in turns(tiny, optimum(tiny))


def test_in_turn_single_devices_prove_what_pairs_do_not() -> None:
    """Within 574 ms every pair of neighbours has a relaxed schedule, but none alone knows how."""
    posed, alone = real_problem(1.5, 5, **RECOMPUTE), tuple((device,) for device in range(4))

    def answer(choices: Sequence[tuple[int, ...]], horizon_ms: float, most: int = 9999) -> str:
        found = search_in_turn(posed, choices, horizon_ms, most_states=most, most_in_layer=most)
        return found.answer

    for devices in ((0, 1), (1, 2), (2, 3)):
        assert answer([devices], 574) == HorizonAnswer.FOUND
    assert answer(alone, 574) == HorizonAnswer.NONE
    assert answer(alone, 574, most=100) == HorizonAnswer.UNKNOWN
    assert answer(alone, 590) == HorizonAnswer.FOUND


def test_inputs_that_come_while_their_device_is_busy_are_as_one() -> None:
    """Were it a state of its own when each came, 16,000 per layer would prove nothing here."""
    sizes = {"activation_bytes": 30 * UNIT, "offload_bytes": 30 * UNIT}
    chunks = [stage(s % 4, 10, 11, 9, **sizes, weight_context_bytes=15 * UNIT) for s in range(8)]
    posed = problem(chunks, [bus(memory_bytes=90 * UNIT)] * 4, m=8)
    alone = tuple((device,) for device in range(4))
    found = search_in_turn(posed, alone, 553.5, most_states=10**6, most_in_layer=16_000)
    assert found.answer is HorizonAnswer.NONE
    assert found.num_states < 600_000


def test_a_later_turn_goes_on_where_the_one_before_was_over() -> None:
    """1,188 states prove it; turns of 1,000 that began anew would meet the same ones for ever."""
    best = searched(real_problem(1.5, 4, **RECOMPUTE), 2_000_000)
    for is_proven in (False, True):
        improve_by_exact_search(best, Stop(600, work=1_000))
        assert best.is_optimal is is_proven


AGAIN = {"recompute_ms": 29.718, "checkpoint_bytes": 372_454_195}


def equal_times(num_devices: int, chunks: int, m: int, activations: float) -> Problem:
    """Stages in a loop over the devices, all times equal, ``held`` activations per device."""
    sizes = {"activation_bytes": 1000 // chunks, "weight_context_bytes": 500 // chunks}
    stages = [stage(s % num_devices, 5, 5, 5, **sizes) for s in range(chunks * num_devices)]
    return problem(stages, [{"memory_bytes": int(1000 * activations)}] * num_devices, m=m)


def is_said_in_full(given: Problem) -> bool:
    """Whether general states relax nothing: no copies, and reductions that cannot queue."""
    copies = any(given.can_offload(s) for s in range(len(given.stages)))
    return not copies and all(s.grad_sync_ms == 0 for s in given.stages)


@given(cases())
def test_what_the_general_beam_finds_can_be_run(case: Case) -> None:
    """At the length of any schedule there is: legal but for hosts, no longer in full states."""
    given_problem = case.problem
    if not beam_can_search(given_problem):
        return
    length = simulate(*case).objective_ms(given_problem.objective)
    found = search_beam(given_problem, length, 300)
    assert found.answer is not HorizonAnswer.NONE
    if found.programs is not None:
        wrong = find_violations(given_problem, found.programs)
        assert {violation.code for violation in wrong} <= {"memory.host"}
        reached = simulate(given_problem, found.programs).objective_ms(given_problem.objective)
        assert reached <= length * (1 + 1e-9) or not is_said_in_full(given_problem)


@given(tiny_problems())
def test_wide_enough_the_general_beam_finds_the_optimum(tiny: Problem) -> None:
    """At the optimum that exhaustive search knows, where states relax nothing."""
    if not (beam_can_search(tiny) and is_said_in_full(tiny)):
        return
    least = optimum(tiny)
    assert search_beam(tiny, least, 1).answer is not HorizonAnswer.NONE
    found = search_beam(tiny, least, 10_000)
    assert found.programs is not None
    assert simulate(tiny, found.programs).objective_ms(tiny.objective) == pytest.approx(least)


@pytest.mark.parametrize(
    ("beam", "given", "length", "width"),
    [
        (search_beam, real_problem(1.5, 8, **AGAIN), 908.25, 10),
        (search_fifo_beam, fifo.fused_problem(), 1114.646, 5),
    ],
)
def test_what_was_left_out_proves_nothing(
    beam: Callable[..., LayeredOutcome], given: Problem, length: float, width: int
) -> None:
    """A few states per layer do not lead to the optimum, and do not deny it either."""
    found = beam(given, length + 1e-6, width)
    assert (found.answer, found.programs) == (HorizonAnswer.UNKNOWN, None)
    stopped = beam(given, 2000, 10, should_stop=lambda: True)
    assert (stopped.answer, stopped.num_states) == (HorizonAnswer.UNKNOWN, 1)


@st.composite
def tied_problems(draw: st.DrawFn) -> Problem:
    """Few different times on two to four devices: many passes start at one instant."""
    num_devices, chunks = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2)]))
    times = st.sampled_from([1.0, 1.0, 2.0])
    stages = [
        stage(s % num_devices, draw(times), draw(times), draw(times), weight_context_bytes=5)
        for s in range(chunks * num_devices)
    ]
    rooms = [draw(st.sampled_from([15, 20, 25, 30])) * chunks for _ in range(num_devices)]
    return problem(stages, [{"memory_bytes": room} for room in rooms], m=3)


@few(25)
@given(tied_problems(), st.permutations(range(4)))
def test_the_order_of_devices_says_nothing(tied: Problem, order: list[int]) -> None:
    """Ties go by device: under other names of the devices the optimum is the same."""
    names = [device for device in order if device < len(tied.devices)]
    assert _least(tied) == _least(renumbered(tied, names))


def _least(given: Problem) -> float:
    """The shortest length within which there is a schedule; times are whole ms."""
    low, high = 0, round(serially(given).objective_ms)
    while low + 1 < high:
        middle = (low + high) // 2
        found = search_fifo_beam(given, middle, 30_000)
        assert found.answer is not HorizonAnswer.UNKNOWN
        low, high = (low, middle) if found.answer is HorizonAnswer.FOUND else (middle, high)
    return high


@pytest.mark.parametrize(
    "fields",
    [{}, {"offload_bytes": 0, "recompute_ms": 1, "checkpoint_bytes": 0}, {"backward_ms": 2.0}],
)
def test_copies_and_recomputes_are_written_down(fields: dict[str, Any]) -> None:
    """Three micro-batches in room for two: shorter than the room allows, and legal."""
    best = serially(three_in_room_for_two(**fields))
    other = serially(three_in_room_for_two(offload_bytes=0))
    for incumbent in (best, other):
        improve_by_beam(incumbent, Stop(60))
    assert best.objective_ms < other.objective_ms


def test_a_release_stands_before_what_needs_its_bytes() -> None:
    """Copies that take long: memory is never exceeded, though states count ended copies alone."""
    near = offloadable(0, 2, 2, 1, offload_bytes=5 * UNIT)
    best = serially(problem([near, stage(1, 9, 9, 1)], [bus(memory_bytes=17 * UNIT), bus()], m=4))
    improve_by_beam(best, Stop(60))
    assert best.programs is not None
    assert any("RELEASE" in str(action) for action in best.programs[0])
    assert best.method == "beam"


def test_it_finds_what_differs_on_every_device() -> None:
    """Recompute, 1.5 activations: 908.25, which local search misses (909.143)."""
    best = serially(real_problem(1.5, 8, **AGAIN))
    improve_by_beam(best, Stop(600, work=700_000))
    assert best.objective_ms == pytest.approx(908.25)


@pytest.mark.extended
def test_it_leaves_a_plateau() -> None:
    """Equal times, two chunks in a loop: 430 ms, the bound; the best family is at 475."""
    best = serially(equal_times(6, 2, 12, 3.5))
    best.offer_bound(lower_bound(best.problem).ms, "bound")
    improve_by_beam(best, Stop(600, work=300_000))
    assert best.objective_ms == pytest.approx(430)
    assert best.is_optimal


@pytest.mark.parametrize("given", [real_problem(1.5, 2, **AGAIN), equal_times(2, 1, 3, 1.5)])
def test_where_nothing_is_left_out_it_proves(given: Problem) -> None:
    """A small problem: the last search holds all states and finds none."""
    best = serially(given)
    improve_by_beam(best, Stop(600))
    assert best.is_optimal
    assert best.method == best.bound_method == "beam"


@pytest.mark.parametrize("improve", [improve_by_exact_search, improve_by_beam])
def test_the_same_work_is_the_same_run(improve: Callable[[Incumbent, Stop], None]) -> None:
    """A limit on states, and no clock, decides where a run ends."""
    given = real_problem(2.0, 6, **OFFLOAD, **AGAIN)
    runs = []
    for _ in range(2):
        best, stop = searched(given, 10_000), Stop(600, work=20_000)
        improve(best, stop)
        runs.append((stop.spent, best.objective_ms, best.bound_ms, best.programs))
    assert runs[0] == runs[1]
    assert runs[0][0] >= 20_000


@pytest.mark.parametrize(
    ("improve", "fields"), [(improve_by_exact_search, OFFLOAD), (improve_by_beam, AGAIN)]
)
def test_told_to_stop_it_stops(
    improve: Callable[[Incumbent, Stop], None], fields: dict[str, Any]
) -> None:
    """No state is met or one layer at most, and nothing is proven or found."""
    best, stop = serially(real_problem(1.5, 8, **fields)), Stop(600, should_stop=lambda: True)
    before = best.objective_ms
    improve(best, stop)
    assert stop.spent == 1
    assert (best.objective_ms, best.bound_ms) == (before, 0.0)


def test_problems_it_has_nothing_to_do_for() -> None:
    """Several devices under span are refused; without a schedule there is nothing to be better."""
    span = problem([stage(0), stage(1)], objective="span")
    assert not beam_can_search(span)
    assert not beam_can_search(problem([stage(0)], [bus(), bus()]))
    with pytest.raises(InputError, match=r"improve_by_beam: the problem has objective span"):
        improve_by_beam(serially(span), Stop(60))
    stop = Stop(60)
    improve_by_beam(Incumbent(problem([stage(0), stage(1)])), stop)
    assert stop.spent == 0
