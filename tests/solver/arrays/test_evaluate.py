"""Evaluation on arrays says what the reference says, of legal and of spoilt programs."""

import random
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, Programs
from optpipe_solver.arrays import encoding, simulate
from optpipe_solver.arrays.encoding import (
    CompiledProblem,
    Evaluator,
    evaluate_arrays,
    evaluate_by_reference,
)
from tests.building import UNIT, bus, everything_at_once, offloadable, problem, programs, stage
from tests.solver.starting import with_memory
from tests.strategies import Case, cases, mutated


def _say_the_same(posed: Problem, rows: Programs) -> None:
    assert evaluate_arrays(CompiledProblem.of(posed), rows) == evaluate_by_reference(posed, rows)


@given(cases(menus=True, pairs=True))
def test_legal_programs_have_the_same_numbers(case: Case) -> None:
    """Times to the last bit, bytes of devices and hosts."""
    assert evaluate_by_reference(*case) is not None
    _say_the_same(*case)


@given(cases(tight=True, menus=True, pairs=True), st.integers(1, 3), st.integers(0, 2**32))
def test_spoilt_programs_are_refused_by_both(case: Case, times: int, seed: int) -> None:
    """Actions moved, lost, doubled, or of another kind; some are legal still."""
    rng, rows = random.Random(seed), case.programs
    for _ in range(times):
        rows = mutated(rows, rng) if any(rows) else rows
    _say_the_same(case.problem, rows)


@given(cases(tight=True, menus=True, pairs=True), st.integers(0, 2**32))
def test_limits_refuse_the_same_programs(case: Case, seed: int) -> None:
    """A byte less on one device than the programs need."""
    room = [device.memory_bytes for device in case.problem.devices]
    one = random.Random(seed).randrange(len(room))
    room[one] = max(case.problem.devices[one].reserved_bytes, room[one] - 1)
    _say_the_same(with_memory(case.problem, room), case.programs)


def test_every_feature_at_once() -> None:
    """Groups, half duplex, hosts, workspaces, reductions, offload, recompute, fused backwards."""
    _say_the_same(*everything_at_once())


@given(cases(tight=False, unequal=True))
def test_outputs_go_to_the_passes_that_need_them(case: Case) -> None:
    """`output_of` says of each F and I what `input_of` says of the pass that needs it."""
    times = CompiledProblem.of(case.problem).times
    kernels: tuple[Any, ...] = simulate.output_of, simulate.input_of
    output_of, input_of = (kernel.py_func for kernel in kernels)
    cells, m = times.num_cells, times.num_microbatches
    for kind, cell in product((simulate.FORWARD, simulate.BACKWARD_INPUT), range(cells)):
        needed, transit = output_of(kind, cell, times)
        if needed < 0:
            assert kind == simulate.BACKWARD_INPUT
            assert cell < m
            continue
        is_forward = kind == simulate.FORWARD and needed != cell
        needs = simulate.FORWARD if is_forward else simulate.BACKWARD_INPUT
        source = cell if kind == simulate.FORWARD else cells + cell
        found = input_of(needs, needed, needed // m, times)
        assert found == (source, transit)


TWO = problem([stage(0), stage(1)], m=2)
HELD = problem([offloadable(0)], [bus()], m=1)
AGAIN = problem([stage(0, recompute_ms=1, checkpoint_bytes=2)], m=1)
BOTH = problem([offloadable(0, recompute_ms=1, checkpoint_bytes=2)], [bus()], m=1)


@pytest.mark.parametrize(
    ("posed", "rows"),
    [
        (TWO, programs("0F0 0F1 0B0 0B1")),
        (TWO, programs("0F0 0F1 0B0 0B1", "1F0 1F1 1B0")),
        (TWO, programs("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1B1")),
        (TWO, programs("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1")),
        (TWO, programs("0F0 0F1 0B0 0B1 0F2", "1F0 1B0 1F1 1B1")),
        (TWO, programs("0F0 0F1 0B0 0B1 2F0", "1F0 1B0 1F1 1B1")),
        (TWO, programs("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")),
        (TWO, programs("0F0 0F1 0B0 0B1", "1F0 1B0 1W0 1F1 1B1")),
        (TWO, programs("0F0 0F1 0B0 0B1", "1F0 1I0 1B0 1F1 1B1")),
        (TWO, programs("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1")),
        (TWO, programs("0F0 0F1 0B0 0B1", "1F0 1W0 1I0 1F1 1B1")),
        (TWO, programs("0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")),
        (TWO, programs("0F0 0RECOMPUTE0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")),
        (HELD, programs("0F0 0OFFLOAD0 0RELEASE0 0B0")),
        (HELD, programs("0F0 0OFFLOAD0 0RELEASE0 0B0 0RELOAD0")),
        (HELD, programs("0F0 0OFFLOAD0 0RELEASE0 0I0 0RELOAD0 0W0")),
        (HELD, programs("0F0 0OFFLOAD0 0RELOAD0 0RELEASE0 0B0")),
        (HELD, programs("0F0 0RELEASE0 0OFFLOAD0 0RELOAD0 0B0")),
        (HELD, programs("0OFFLOAD0 0F0 0RELEASE0 0RELOAD0 0B0")),
        (AGAIN, programs("0F0 0B0 0RECOMPUTE0")),
        (AGAIN, programs("0F0 0I0 0RECOMPUTE0 0W0")),
        (AGAIN, programs("0RECOMPUTE0 0F0 0I0 0W0")),
        (BOTH, programs("0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0RECOMPUTE0 0B0")),
    ],
)
def test_each_rule_is_asked(posed: Problem, rows: Programs) -> None:
    """One broken rule each, which both refuse."""
    assert evaluate_by_reference(posed, rows) is None
    assert evaluate_arrays(CompiledProblem.of(posed), rows) is None


@pytest.mark.parametrize(("copies", "fits"), [(2, True), (1, False)])
def test_hosts_have_limits(copies: int, fits: bool) -> None:
    """Two copies where the host takes one or two."""
    hosts = [{"name": "host0", "memory_bytes": copies * 10 * UNIT}]
    posed = problem([offloadable(0)], [bus()], m=2, hosts=hosts)
    trips = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELEASE0 0RELEASE1 0RELOAD0 0B0 0RELOAD1 0B1"
    assert (evaluate_arrays(CompiledProblem.of(posed), programs(trips)) is not None) == fits
    _say_the_same(posed, programs(trips))


def test_large_programs_are_judged_on_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is asked of small ones alone: of large ones it takes too long."""
    rows = programs("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    said = evaluate_by_reference(TWO, rows)
    monkeypatch.setattr(encoding, "_LARGE", 8)
    monkeypatch.setattr(encoding, "find_violations", None)
    monkeypatch.setattr(encoding, "simulate_reference", None)
    assert Evaluator(TWO)(rows) == said
