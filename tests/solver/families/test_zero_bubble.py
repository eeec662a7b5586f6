"""The Zero Bubble greedy: golden programs, published rates, every limit, legality, its clock."""

from collections.abc import Callable
from itertools import count, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Action, Problem, Programs, dump_csv, find_violations, simulate
from optpipe.memory import device_peak_bytes
from optpipe.simulate import bubble_rate
from optpipe_solver.arrays.encoding import KINDS, CompiledProblem
from optpipe_solver.families.common import NotApplicable, NotApplicableReason, programs_by_device
from optpipe_solver.families.zero_bubble import (
    build_zb_1p,
    build_zb_2p,
    build_zero_bubble_greedy,
    plan_line,
)
from tests.building import problem, programs, stage
from tests.solver.families.pipelines import built, lines
from tests.solver.families.test_families import TABLE, published


def rate_of(given: Problem, rows: Programs) -> float:
    return bubble_rate(given, simulate(given, rows).span_ms)


def peak(given: Problem, rows: Programs) -> int:
    return max(device_peak_bytes(given, device, row) for device, row in enumerate(rows))


def serially(given: Problem) -> Programs:
    """F, I and W of one micro-batch after the other: the least memory without tricks."""
    return programs(
        *(
            " ".join(f"{s}F{j} {s}I{j} {s}W{j}" for s in own for j in range(given.num_microbatches))
            for own in given.stages_of
        )
    )


def test_golden_below_1p() -> None:
    """One and a half activations: the next F runs as soon as an I has left half of one behind."""
    given = problem(
        [stage(device, weight_context_bytes=5) for device in range(2)],
        [{"memory_bytes": 15}] * 2,
        m=3,
    )
    assert dump_csv(build_zero_bubble_greedy(given)) == (
        "0F0,0I0,0F1,0W0,0I1,0F2,0W1,0I2,0W2\n1F0,1I0,1W0,1F1,1I1,1W1,1F2,1I2,1W2\n"
    )


@pytest.mark.parametrize(
    ("factor", "column", "build"), [(1, "ZB-1p", build_zb_1p), (2, "ZB-2p", build_zb_2p)]
)
def test_published_at_its_limit_whatever_the_problems_own(
    factor: int, column: str, build: Callable[[Problem], Programs]
) -> None:
    """Zero Bubble, tables 5 and 9: span-based rates to four decimals or better, legal.

    ZB-1p and ZB-2p are the greedy at p and 2p activations.
    """
    for row in TABLE["rows"]:
        given = published(row, factor * row["p"])
        rows = build_zero_bubble_greedy(given)
        assert find_violations(given, rows) == []
        assert rate_of(given, rows) <= row["bubble_rate_span"][column] + 5e-5
        assert build(published(row, 1)) == rows


def test_every_limit_from_one_activation_to_2p() -> None:
    """p = 8, m = 24: legal, never over the limit, and more memory is never slower."""
    row = TABLE["rows"][2]
    rates = []
    for halves in range(2, 33):
        given = published(row, halves / 2)
        rows = build_zero_bubble_greedy(given)
        assert find_violations(given, rows) == []
        rates.append(rate_of(given, rows))
    assert all(less >= more - 1e-9 for less, more in pairwise(rates))


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_bubbles_and_memory_at_equal_times(p: int) -> None:
    """None with 2p activations; with p that of ZB-H1, (p - 1)(F + I - W), and 1F1B's memory."""
    given = problem([stage(device) for device in range(p)], m=3 * p)
    for build, idle_ms, most in ((build_zb_2p, 0, 2 * p), (build_zb_1p, p - 1, p)):
        rows = build(given)
        assert simulate(given, rows).span_ms == given.busy_ms + idle_ms
        assert peak(given, rows) <= 10 * most


def test_too_little_for_one_microbatch_is_refused_with_the_numbers() -> None:
    """Static and reserved bytes count, and what I needs beside the activation."""
    given = problem(
        [stage(0, weight_context_bytes=12, static_bytes=4, backward_weight_workspace_bytes=3)],
        [{"memory_bytes": 20, "reserved_bytes": 2}],
    )
    with pytest.raises(NotApplicable, match=r"stage 0 needs 15 bytes .* has room for 14") as raised:
        build_zero_bubble_greedy(given)
    assert raised.value.reason is NotApplicableReason.DOES_NOT_FIT


def test_astronomic_sizes_do_not_overflow() -> None:
    """2p activations of 2**53 bytes on 600 stages are more than 64 bits hold."""
    given = problem([stage(device, activation_bytes=2**53) for device in range(600)], m=2)
    assert find_violations(given, build_zb_2p(given))[0].code == "memory.device"


@given(lines(memory=lambda draw, one_stage: draw(st.integers(0, 120))))
def test_legal_or_does_not_fit(given: Problem) -> None:
    """Any limit, context above activation, workspaces: legal, or one micro-batch does not fit."""
    rows = built(build_zero_bubble_greedy, given)
    if isinstance(rows, NotApplicableReason):
        assert rows is NotApplicableReason.DOES_NOT_FIT
        assert find_violations(given, serially(given)) != []
    else:
        assert find_violations(given, rows) == []


@given(lines())
def test_named_limits_are_legal_on_any_line(given: Problem) -> None:
    """Workspaces and large contexts come on top of the p or 2p activations."""
    for factor, build in ((1, build_zb_1p), (2, build_zb_2p)):
        rows = build(given)
        assert find_violations(given, rows) == []
        for one_stage in given.stages:
            beside = max(
                one_stage.forward_workspace_bytes,
                max(0, one_stage.weight_context_bytes - one_stage.activation_bytes)
                + max(
                    one_stage.backward_input_workspace_bytes,
                    one_stage.backward_weight_workspace_bytes,
                ),
            )
            most = factor * len(given.stages) * one_stage.activation_bytes + beside
            used = device_peak_bytes(given, one_stage.device, rows[one_stage.device])
            assert used - one_stage.static_bytes <= most


@given(lines(memory=lambda draw, one_stage: 100))
def test_its_clock_is_the_simulators_and_the_best_setting_wins(given: Problem) -> None:
    """Every combination of hyper-parameters runs exactly as planned; none beats the result."""
    compiled = CompiledProblem.of(given)
    memory = compiled.memory._replace(limit=np.full(len(given.stages), 100))
    won = simulate(given, build_zero_bubble_greedy(given)).objective_ms(given.objective)
    for setting in product((False, True), (0, 1, 2), (False, True)):
        plan = plan_line(compiled.times, memory, *setting)
        by_stage: list[list[Action]] = []
        for s, kinds in enumerate(plan.kinds):
            next_of = [count(), count(), count()]
            by_stage.append([Action(s, KINDS[kind], next(next_of[kind])) for kind in kinds])
        run = simulate(given, programs_by_device(given, by_stage))
        for s, one_stage in enumerate(given.stages):
            assert run.times[one_stage.device][-1].end == plan.free[s]
            assert run.times[one_stage.device][0].start == plan.first[s]
        assert won <= run.objective_ms(given.objective)
