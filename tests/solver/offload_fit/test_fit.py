"""`fit` keeps limits for any compute programs, moves no more than needed, hides copies."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Action, ActionType, Problem, Programs, dump_csv, find_violations, simulate
from optpipe_solver.families.classic import build_one_f_one_b
from optpipe_solver.families.zero_bubble import build_zb_h1
from optpipe_solver.offload_fit.fit import Frame, fit
from tests.building import UNIT, bus, offloadable, problem, programs, stage
from tests.solver.starting import with_memory
from tests.strategies import Case, cases, few, tightened

EXAMPLES = Path(__file__).parents[3] / "examples/problems"
SENT = (ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD, ActionType.RECOMPUTE)


def line(p: int, m: int, activations: float, one_way_ms: float, **device: Any) -> Problem:
    """Equal stages of F = I = W = 10 ms; memory in activations, and the time of one copy."""
    rate = 10 / one_way_ms
    memory = int(activations * 10 * UNIT)
    devices = [
        bus(memory_bytes=memory, d2h_gb_per_s=rate, h2d_gb_per_s=rate, **device) for _ in range(p)
    ]
    return problem([offloadable(d, 10, 10, 10) for d in range(p)], devices, m=m)


def compute_only(case: Case) -> Case:
    """The case with transfers and recompute left out of its programs, limits as they are."""
    rows = tuple(tuple(a for a in row if a.type not in SENT) for row in case.programs)
    return case._replace(programs=rows)


def fit_memory(
    given: Problem, rows: Programs, offloading: Sequence[int] | None = None
) -> Programs | None:
    """The programs made to fit, None where that fails; what comes back is legal."""
    fitted = fit(Frame(given, rows, offloading))
    if fitted is None:
        return None
    assert find_violations(given, fitted.programs()) == []
    return fitted.programs()


def fitted_to(given: Problem, rows: Programs, offloading: Sequence[int] | None = None) -> Programs:
    """The programs made to fit, where that must not fail."""
    fitted = fit_memory(given, rows, offloading)
    assert fitted is not None
    return fitted


def ms(given: Problem, rows: Programs) -> float:
    return simulate(given, rows).makespan_ms


@given(cases(tight=True))
def test_legal_for_any_compute_programs(case: Case) -> None:
    """Limits that some programs just meet; what comes back keeps them, hosts included."""
    compute = compute_only(case)
    fitted = fit_memory(compute.problem, compute.programs)
    if fitted is not None:
        assert compute_of(fitted) == compute_of(compute.programs)


def compute_of(rows: Programs) -> list[list[Action]]:
    """Per device the F, I and B in order: W alone may move."""
    kept = (ActionType.FORWARD, ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD)
    return [[action for action in row if action.type in kept] for row in rows]


@given(cases(tight=False), st.integers(0, 2**32))
def test_programs_that_fit_come_back(case: Case, seed: int) -> None:
    """Under a limit that they need themselves, not an action is added."""
    compute = tightened(compute_only(case))
    assert fit_memory(compute.problem, compute.programs) == compute.programs


@few(25)
@given(st.integers(0, 2**32), st.sampled_from([(2, 5), (3, 7), (4, 6)]))
def test_always_fits_where_everything_can_go(seed: int, size: tuple[int, int]) -> None:
    """One activation is enough when all of it can be offloaded, whatever the order asks for."""
    rng = random.Random(seed)
    p, m = size
    stages = [
        offloadable(d, rng.randint(0, 9), rng.randint(0, 9), rng.randint(0, 9)) for d in range(p)
    ]
    shared = {"half_duplex": rng.random() < 0.5, "pcie_group": rng.choice([None, "bus"])}
    given = problem(stages, [bus(memory_bytes=10 * UNIT, **shared) for _ in range(p)], m=m)
    for build in (build_one_f_one_b, build_zb_h1):
        fitted_to(given, build(given))


def test_the_example_loses_nothing() -> None:
    """ZB-H1 of the shipped example within 80 GB is as fast as without a limit (2,455 ms)."""
    given = Problem.parse(json.loads((EXAMPLES / "llama3-8b-h100-pp4.json").read_text()))
    base = build_zb_h1(given)
    assert find_violations(given, base)
    assert ms(given, fitted_to(given, base)) == pytest.approx(ms(given, base))


@pytest.mark.parametrize("one_way_ms", [7.5, 15, 30])
def test_1f1b_with_three_eighths_of_its_memory(one_way_ms: float) -> None:
    """Copies of up to a micro-batch's F + I + W each way are hidden on a full-duplex lane."""
    given = line(8, 32, 3.0, one_way_ms)
    base = build_one_f_one_b(given)
    assert ms(given, fitted_to(given, base)) == pytest.approx(ms(given, base))


def test_a_release_waits_for_no_copy_and_a_reload_is_in_time() -> None:
    """Written out: one activation of two leaves at once and is back when its backward starts."""
    given = with_memory(line(2, 3, 1.0, 5), [10 * UNIT, 100 * UNIT])
    assert dump_csv(fitted_to(given, build_one_f_one_b(given))) == (
        "0F0,0OFFLOAD0,0RELEASE0,0F1,0OFFLOAD1,0RELEASE1,0RELOAD0,0B0,0F2,0OFFLOAD2,0RELEASE2,"
        "0RELOAD1,0B1,0RELOAD2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    )


def test_weights_run_early_before_anything_moves_for_them() -> None:
    """ZB-H1's waiting W on the last stage: run at once, they cost nothing but their place."""
    given = with_memory(line(4, 8, 2.5, 1000), [400 * UNIT] * 3 + [20 * UNIT])
    fitted = fitted_to(given, build_zb_h1(given))
    assert not any(action.type in SENT for action in fitted[3])


def test_recompute_where_nothing_can_leave() -> None:
    """No bandwidth: what does not fit is recomputed, no more of it than necessary."""
    fields = {"recompute_ms": 10, "checkpoint_bytes": 1}
    given = problem(
        [stage(0, 10, 10, 10, **fields), stage(1, 10, 10, 10, **fields)],
        [{"memory_bytes": 11}, {"memory_bytes": 100}],
        m=4,
    )
    fitted = fitted_to(given, build_one_f_one_b(given))
    again = [a for row in fitted for a in row if a.type is ActionType.RECOMPUTE]
    assert {action.stage for action in again} == {0}


def test_host_limits_are_shared_out() -> None:
    """Two devices over their limit, a host with room for one activation of each."""
    given = line(3, 6, 2.0, 5)
    hosts = [{"name": "host0", "memory_bytes": 30 * UNIT}]
    fitted_to(given.model_copy(update={"hosts": hosts}), build_one_f_one_b(given))


def test_none_where_the_order_cannot_be_kept() -> None:
    """Nothing can leave and nothing can be recomputed."""
    given = problem([stage(0), stage(1)], [{"memory_bytes": 10}, {"memory_bytes": 10}], m=2)
    assert fit_memory(given, programs("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")) is None


def test_only_chosen_stages_leave() -> None:
    """``offloading`` restricts the victims."""
    given = problem([offloadable(0), offloadable(0)], [bus(memory_bytes=30 * UNIT)], m=2)
    rows = programs("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1")
    for chosen in (0, 1):
        fitted = fitted_to(given, rows, offloading=[chosen])
        assert {a.stage for a in fitted[0] if a.type is ActionType.OFFLOAD} == {chosen}
