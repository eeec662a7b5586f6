"""The general search: no device, and no few of them, makes it deny a schedule that exists."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from optpipe import Problem, find_violations, simulate
from optpipe.schedule import parse_cell
from optpipe_solver.bounds import lower_bound
from optpipe_solver.bounds.heads_tails import nothing_known
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.exact.fifo_search import fifo_can_search, search_fifo_beam
from optpipe_solver.exact.general_kernel import (
    make_general_loads,
    make_general_state,
    survey,
    wastes,
)
from optpipe_solver.exact.general_problem import general_problem_of
from optpipe_solver.exact.general_search import general_can_search, search_general
from optpipe_solver.exact.layers import HorizonAnswer, LayeredOutcome
from tests.building import UNIT, bus, offloadable, problem, programs, stage
from tests.solver.bounds.judging import assert_below
from tests.solver.exhaustive import optimum, tiny_problems, tiny_problems_with_pairs
from tests.solver.families.v_problems import all_in_pairs
from tests.strategies import B, Case, F, I, cases, few


def search(
    given: Problem, devices: Sequence[int], horizon_ms: float, *, knows: bool = False
) -> LayeredOutcome:
    """A search with room enough for small problems; ``knows``: when passes start is asked too."""
    known = nothing_known(relaxed(given)) if knows else None
    return search_general(
        given, devices, horizon_ms, most_states=10**6, most_in_layer=50_000, known=known
    )


def shortest(given: Problem, *devices: int) -> float:
    """The length of the shortest relaxed schedule; times are whole ms."""
    length = 10**4
    while (found := search(given, devices, length).found_ms) is not None:
        length = round(found) - 1
    return length + 1


def choices(given: Problem) -> Iterator[tuple[int, ...]]:
    """All sets of devices that can be searched."""
    devices = range(len(given.devices))
    for size in range(1, len(given.devices) + 1):
        for chosen in combinations(devices, size):
            if general_can_search(given, chosen):
                yield chosen


def answers(case: Case) -> Iterator[HorizonAnswer]:
    """What each choice of devices says at the length of a schedule there is."""
    length = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    for devices in choices(case.problem):
        found = search(case.problem, devices, length)
        assert (found.found_ms is None) is (found.answer is not HorizonAnswer.FOUND)
        assert found.found_ms is None or found.found_ms <= length
        yield found.answer


@given(st.one_of(cases(menus=True), cases(menus=True, pairs=True)))
def test_no_legal_schedule_is_denied(case: Case) -> None:
    """At the length of any schedule there is, no choice of devices says that there is none.

    The largest cases may not be decided: too many states prove nothing, and deny nothing.
    """
    for answer in answers(case):
        assert answer is not HorizonAnswer.NONE


def test_nearly_all_legal_schedules_are_found() -> None:
    """Of the choices in the same hundred cases each time, 19 in 20 are decided."""
    said: list[HorizonAnswer] = []

    @settings(max_examples=100, derandomize=True, database=None, phases=[Phase.generate])
    @given(cases())
    def ask(case: Case) -> None:
        said.extend(answers(case))

    ask()
    assert len(said) > 100
    assert said.count(HorizonAnswer.FOUND) >= 0.95 * len(said)


@given(cases(tight=True))
def test_no_pass_starts_before_it_is_said_to(case: Case) -> None:
    """At the length of any schedule there is: its k-th F and I of each stage, in order of time."""
    if case.problem.objective == "span":
        return
    run = simulate(case.problem, case.programs)
    starts: dict[tuple[int, bool], list[float]] = {}
    for program, times in zip(case.programs, run.times, strict=True):
        for action, at in zip(program, times, strict=True):
            if action.type in {F, I, B}:
                starts.setdefault((action.stage, action.type is F), []).append(at.start)
    for devices in choices(case.problem):
        earliest = search(case.problem, devices, run.makespan_ms, knows=True).earliest
        if earliest is None:
            continue
        for (s, is_forward), true in starts.items():
            said = earliest.forward if is_forward else earliest.gradient
            assert (said[:, s] <= np.sort(true) + 1e-6).all()


@given(tiny_problems(menus=True))
def test_what_it_proves_is_no_more_than_exhaustive_search_finds(tiny: Problem) -> None:
    """At the optimum, of which there are programs, no choice of devices says no."""
    least = optimum(tiny)
    for devices in choices(tiny):
        assert search(tiny, devices, least).answer is HorizonAnswer.FOUND


@few(8)
@given(tiny_problems_with_pairs())
def test_nothing_is_proven_of_pairs_that_exhaustive_search_beats(tiny: Problem) -> None:
    """Every bound, and every choice of devices, against all orders and all choices of pairs."""
    least = optimum(tiny)
    assert_below(tiny, least)
    for devices in choices(tiny):
        assert search(tiny, devices, least).answer is HorizonAnswer.FOUND


@pytest.mark.parametrize(
    ("num_done", "heads", "is_wasted"),
    [
        (0, (5, 20, 22), True),
        (0, (5, 21, 22), False),
        (0, (5, 20, 23), False),
        (0, (5, 21, 23), False),
        (1, (5, 9, 21), False),
        (1, (5, 9, 20), True),
    ],
)
def test_an_i_goes_first_only_where_all_others_may_be_one_number_later(
    num_done: int, heads: Sequence[int], is_wasted: bool
) -> None:
    """An I of 2 ms could run before an event at 20: then the k-th of the others is the k+1-st."""
    again = {"recompute_ms": 1, "checkpoint_bytes": 1}
    given = problem([stage(0, 1, 2, 1, **again)], [bus(memory_bytes=20)], m=3)
    known = nothing_known(relaxed(given))
    known.gradient[:, 0] = heads
    model = general_problem_of(given, 100, (0,), known)
    assert model.has_modes
    state, loads = make_general_state(model), make_general_loads(model)
    state.codes[:] = sorted([2] * num_done + [1, 1] + [0] * (1 - num_done))
    state.times[:] = 10
    survey(model, state, loads)
    assert wastes(model, state, loads, 0, 20) is is_wasted


def test_a_pair_needs_the_memory_of_both_its_passes() -> None:
    """A V of four, room for three chunks: 86 ms, which is reached, where a closed form says 60."""
    given = all_in_pairs((0, 1, 2, 3, 3, 2, 1, 0), m=8, memory=3)
    assert lower_bound(given).ms == 60
    assert search(given, (0, 3), 85.5).answer is HorizonAnswer.NONE


def test_a_backward_in_a_pair_waits_for_no_copy_that_ended_before() -> None:
    """The F beside it is to be copied too, when both are through; the copies before have ended.

    Room for two micro-batches and a byte: 88 ms, which a legal program reaches.
    """
    near = stage(0, 10, 10, 0, backward_ms=10.0, activation_bytes=2 * UNIT, offload_bytes=2 * UNIT,
                 backward_workspace_bytes=1, weight_context_bytes=0)  # fmt: skip
    far = stage(1, 5, 6, 0, backward_ms=6.0, activation_bytes=0)
    quick = {"d2h_gb_per_s": 2.0, "h2d_gb_per_s": 2.0}
    given = problem(
        [near, far],
        [bus(memory_bytes=4 * UNIT + 1, **quick), bus()],
        m=5,
        format="optpipe/problem/v2",
        links=[{"from": a, "to": 1 - a, "latency_ms": 6.0} for a in range(2)],
        pairs=[{"forward": 0, "backward": 0, "with": "B", "hidden_ms": 10.0}],
    )
    row = (
        "0F0 0F1 0OFFLOAD1 0RELEASE1 0F2 0OFFLOAD2 0RELEASE2 (0F3;0B0)OVERLAP_F_B 0OFFLOAD3 "
        "0RELEASE3 0RELOAD1 (0F4;0B1)OVERLAP_F_B 0RELOAD2 0B2 0RELOAD3 0B3 0B4"
    )
    reached = (
        tuple(action for cell in row.split() for action in parse_cell(cell)),
        programs(" ".join(f"1F{j} 1B{j}" for j in range(5)))[0],
    )
    assert find_violations(given, reached) == []
    length = simulate(given, reached).makespan_ms
    assert length == 88
    for devices in choices(given):
        assert search(given, devices, length).answer is HorizonAnswer.FOUND


def three_in_room_for_two(**fields: Any) -> Problem:
    """Three micro-batches, room for two on device 0: 12 ms there and back, 2 ms per copy."""
    near = offloadable(0, 2, 2, 1, offload_bytes=2 * UNIT, activation_bytes=2 * UNIT)
    far = stage(1, 0, 0, 0, activation_bytes=0)
    devices = [bus(memory_bytes=4 * UNIT), bus()]
    links = [{"from": 0, "to": 1, "latency_ms": 6.0}]
    return problem([{**near, **fields}, far], devices, m=3, links=links)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"offload_bytes": 0},
        {"offload_bytes": 0, "recompute_ms": 1, "checkpoint_bytes": 0},
        {"backward_ms": 1.0},
        {"weight_context_bytes": UNIT},
        {"grad_sync_ms": 3.0},
    ],
)
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_one_device_is_searched_exactly(fields: dict[str, Any], objective: str) -> None:
    """Alone on its pipeline, what the search finds is the optimum of all programs."""
    near = offloadable(0, 2, 2, 1, offload_bytes=2 * UNIT, activation_bytes=2 * UNIT)
    alone = problem([{**near, **fields}], [bus(memory_bytes=3 * UNIT)], m=2, objective=objective)
    assert shortest(alone, 0) == optimum(alone)


def test_the_others_are_waiting_times() -> None:
    """The third F waits for the first W, and its I for the way there and back."""
    given = three_in_room_for_two(offload_bytes=0)
    assert shortest(given, 0) == 2 + 12 + 2 + 1 + 2 + 12 + 2 + 1
    assert shortest(given, 1) <= shortest(given, 0) == shortest(given, 0, 1)


def in_pairs(stages: list[dict[str, Any]], room: int, letter: str, **fields: Any) -> Problem:
    """Three micro-batches, F of stage 0 may hide 1 ms beside a backward of it, bytes are cells."""
    sized = [one | {"activation_bytes": 1 - at} for at, one in enumerate(stages)]
    pair = {"forward": 0, "backward": 0, "with": letter, "hidden_ms": 1.0}
    devices = [bus(memory_bytes=room), bus()][: len(stages)]
    return problem(sized, devices, m=3, format="optpipe/problem/v2", pairs=[pair], **fields)


@pytest.mark.parametrize("letter", ["I", "B"])
def test_an_f_is_short_only_beside_a_backward(letter: str) -> None:
    """Alone on its device as short as all programs are; with none back in time all F take 2 ms."""
    for room in (1, 2, 3):
        alone = in_pairs([stage(0, 2, 1, 1)], room, letter)
        assert shortest(alone, 0) == optimum(alone)
    links = [{"from": 0, "to": 1, "latency_ms": 6.0}]
    given = in_pairs([stage(0, 2, 1, 0), stage(1, 0, 0, 0)], 3, letter, links=links)
    assert shortest(given, 0) == 3 * 2 + 12 + 1


@st.composite
def pipelines(draw: st.DrawFn) -> Problem:
    """Two devices, three micro-batches, no offload: first in, first out loses nothing."""
    times = st.sampled_from([1.0, 2.0, 3.0])
    stages = [stage(d, draw(times), draw(times), draw(times), weight_context_bytes=5)
              for d in range(2)]  # fmt: skip
    rooms = [draw(st.sampled_from([15, 20, 25, 1000])) for _ in range(2)]
    return problem(stages, [{"memory_bytes": room} for room in rooms], m=3)


@few(20)
@given(pipelines())
def test_all_devices_together_are_as_long_as_the_fifo_search_says(given: Problem) -> None:
    """Two searches that share no state: the shortest schedule of one is that of the other."""
    assert fifo_can_search(given)
    least = shortest(given, 0, 1)
    for length, answer in ((least, HorizonAnswer.FOUND), (least - 1, HorizonAnswer.NONE)):
        found = search_fifo_beam(given, length, 20_000)
        assert found.answer is answer


@pytest.mark.parametrize(
    ("most", "widest", "is_told"), [(10, 1000, 0), (9**9, 4, 0), (9**9, 99, 1)]
)
def test_too_many_states_or_a_stop_prove_nothing(most: int, widest: int, is_told: int) -> None:
    """Too many in all, or in one layer, or told to stop: unknown, however short the horizon."""
    found = search_general(
        three_in_room_for_two(),
        (0, 1),
        1 if is_told else 45,
        most_states=most,
        most_in_layer=widest,
        should_stop=lambda: bool(is_told),
    )
    assert (found.answer, found.found_ms) == (HorizonAnswer.UNKNOWN, None)


def test_problems_that_states_do_not_say() -> None:
    """Several devices under span, copies of unequal size on a device, and too many stages."""
    span = problem([stage(0), stage(1)], objective="span")
    assert general_can_search(span, (1,))
    assert not general_can_search(span, (0, 1))
    sizes = [offloadable(0, offload_bytes=n * UNIT) for n in (1, 2)]
    unequal = problem([*sizes, stage(1)], [bus(memory_bytes=11 * UNIT), bus()], m=2)
    assert not general_can_search(unequal, (0,))
    assert general_can_search(unequal, (1,))
    assert not general_can_search(problem([stage(0)] * 10), (0,))
