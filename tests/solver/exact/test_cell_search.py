"""The general search by cell: every schedule is met, and what it denies does not exist."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, simulate
from optpipe_solver.budget import Stop
from optpipe_solver.exact.general_search import cells_can_search, search_general
from optpipe_solver.exact.layers import HorizonAnswer
from optpipe_solver.exact.rounds import improve_by_exact_search
from optpipe_solver.families.classic import build_serial
from optpipe_solver.incumbent import Incumbent
from tests.building import UNIT, bus, problem, stage
from tests.solver.exhaustive import optimum, tiny_problems
from tests.strategies import Case, cases, few

MOST = 4_000


def answer(given: Problem, horizon_ms: float) -> HorizonAnswer:
    """What the search says of a horizon."""
    return asked(given, range(len(given.devices)), horizon_ms)


def asked(given: Problem, devices: Sequence[int], horizon_ms: float) -> HorizonAnswer:
    """What the search says of some devices."""
    used = [device for device in devices if given.stages_of[device]]
    found = search_general(
        given, used, horizon_ms, most_states=100_000, most_in_layer=MOST, by_cell=True
    )
    return found.answer


@given(st.one_of(cases(menus=True), cases(tight=True, menus=True)))
def test_every_schedule_is_met(case: Case) -> None:
    """No horizon is denied that a legal schedule keeps, whatever memory and lanes allow."""
    length = simulate(*case).objective_ms(case.problem.objective)
    used = [device for device, own in enumerate(case.problem.stages_of) if own]
    for size in (1, len(used)):
        for devices in combinations(used, size):
            if cells_can_search(case.problem, devices):
                assert asked(case.problem, devices, length) is not HorizonAnswer.NONE


def test_under_span_others_may_end_after_the_first_device() -> None:
    """Device 1 begins 1 ms after device 0 and works on for 12: nobody is busy for longer."""
    given = problem([stage(0, 1, 1, 0), stage(1, 1, 1, 10)], m=1, objective="span")
    assert simulate(given, build_serial(given)).span_ms == 12
    assert answer(given, 12.0) is HorizonAnswer.FOUND
    assert answer(given, 11.0) is HorizonAnswer.NONE


def test_under_span_a_device_that_has_ended_is_busy_no_longer() -> None:
    """Device 0 ends at 10 ms, as device 1 starts its first W of two: 10 ms each."""
    late = [stage(0, 5, 1, 0), stage(1, 1, 1, 3), stage(1, 1, 1, 3)]
    given = problem(late, m=1, objective="span")
    assert optimum(given) == 10
    assert answer(given, 10.0) is HorizonAnswer.FOUND
    assert answer(given, 9.0) is HorizonAnswer.NONE


@few(60)
@given(tiny_problems(menus=True))
def test_nothing_that_exists_is_denied(given: Problem) -> None:
    """Exhaustive search is the judge: modes, lanes, hosts, links, both objectives."""
    assert answer(given, optimum(given)) is not HorizonAnswer.NONE


MENU = [
    {"name": "keep"},
    {"name": "half", "offload_bytes": UNIT, "forward_bytes": 2 * UNIT},
    {
        "name": "inside",
        "forward_bytes": UNIT,
        "recompute": "inside",
        "recompute_ms": 3,
        "inside_bytes": 0,
        "weight_context_bytes": UNIT,
    },
    {
        "name": "apart",
        "forward_bytes": UNIT,
        "offload_bytes": UNIT,
        "recompute": "apart",
        "recompute_ms": 2,
    },
]


LONG_AND_SHORT = [
    {"name": "keep"},
    {
        "name": "long",
        "forward_bytes": 2 * UNIT,
        "forward_workspace_bytes": UNIT,
        "offload_bytes": 2 * UNIT,
        "recompute": "inside",
        "recompute_ms": 1,
    },
    {"name": "short", "forward_bytes": 3 * UNIT, "offload_bytes": UNIT},
]
"""Where keep does not fit; it would pay if the short RELOAD need not wait for the long one."""


def _with_menu(
    device: int, menu: object = MENU, kept_bytes: int = 2 * UNIT, times: Sequence[int] = (3, 2, 2)
) -> dict[str, object]:
    """A stage whose micro-batches hold so much where they are kept."""
    fields = stage(device, *times, activation_bytes=kept_bytes)
    del fields["device"]
    return {"device": device, "costs": [{**fields, "modes": menu}]}


V2 = {"format": "optpipe/problem/v2"}
HALF = {"activation_bytes": 2 * UNIT, "weight_context_bytes": UNIT, "offload_bytes": 2 * UNIT}
AGAIN = {"activation_bytes": 10, "recompute_ms": 3, "checkpoint_bytes": 1}
EXACT = {
    "memory": problem([stage(), stage(1)], [{"memory_bytes": 10}] * 2, 2),
    "offload": problem([stage(0, 3, 2, 1, **HALF)], [bus(memory_bytes=3 * UNIT)], 2),
    "contexts": problem([stage(0, 1, 1, 5), stage(1)], [{"memory_bytes": 10}, bus()], 2),
    "copies": problem(
        [stage(0, 2, 4, 1, **HALF), stage(1, 3, 3, 1)],
        [bus(memory_bytes=3 * UNIT), {"memory_bytes": 20}],
        2,
    ),
    "half duplex": problem(
        [stage(0, 1, 1, 1, **HALF)], [bus(memory_bytes=3 * UNIT, half_duplex=True)], 2
    ),
    "reloads queue": problem(
        [_with_menu(0, LONG_AND_SHORT, 6 * UNIT, (1, 1, 1))],
        [bus(memory_bytes=5 * UNIT, h2d_gb_per_s=0.5)],
        2,
        **V2,
    ),
    "recompute waits for a copy": problem(
        [
            stage(0, activation_bytes=UNIT, offload_bytes=UNIT),
            stage(0, 3, activation_bytes=2 * UNIT, checkpoint_bytes=UNIT, recompute_ms=1),
        ],
        [bus(memory_bytes=2 * UNIT, d2h_gb_per_s=0.25)],
    ),
    "recompute": problem([stage(0, 3, 2, 1, **AGAIN), stage(1)], [{"memory_bytes": 11}] * 2, 2),
    "fused": problem([stage(0, 3, 2, 2, backward_ms=3), stage(1)], [{"memory_bytes": 20}] * 2, 2),
    "workspace": problem(
        [stage(0, backward_input_workspace_bytes=5), stage(1)], [{"memory_bytes": 20}] * 2, 2
    ),
    "span": problem([stage(), stage(1, 2, 2, 2)], [{"memory_bytes": 10}] * 2, 2, objective="span"),
    "menu": problem([_with_menu(0)], [bus(memory_bytes=3 * UNIT)], 2, **V2),
    "menu, two devices": problem(
        [_with_menu(0), _with_menu(1)],
        [bus(memory_bytes=3 * UNIT), bus(memory_bytes=4 * UNIT)],
        1,
        **V2,
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_does_not_exist_is_denied(name: str) -> None:
    """Nothing of these is relaxed: what is found at the optimum is denied just below."""
    given = EXACT[name]
    best = optimum(given)
    assert answer(given, best) is HorizonAnswer.FOUND
    assert answer(given, best - 0.5) is HorizonAnswer.NONE


@pytest.mark.parametrize("name", ["menu", "menu, two devices", "half duplex", "span"])
def test_few_devices_prove_the_optimum(name: str) -> None:
    """What no other exact search knows is proven, from the poorest start."""
    given = EXACT[name]
    best = Incumbent(given)
    best.offer(build_serial(given), "serial")
    improve_by_exact_search(best, Stop(60.0))
    assert best.bound_ms == pytest.approx(optimum(given), rel=1e-9)
