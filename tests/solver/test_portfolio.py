"""Whose turn it is, what a solve starts from, and threads that end when told."""

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given

from optpipe import Problem, find_violations, simulate
from optpipe_solver import portfolio
from optpipe_solver.budget import Limits, check_stop
from optpipe_solver.exact.rounds import improve_by_beam
from optpipe_solver.milp.horizon.items import MOST_PAIRS, num_order_pairs
from optpipe_solver.milp.horizon.model import improve_by_milp
from optpipe_solver.portfolio import FamilyStart, all_starts, milp_may_prove, plans, run_threads
from tests.building import UNIT, bus, offloadable, problem, stage
from tests.strategies import Case, cases


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("again", [{}, {"recompute_ms": 1.0, "checkpoint_bytes": 1}])
@pytest.mark.parametrize("m", [4, 2000])
def test_the_beam_has_a_turn_where_a_problem_is_not_large(
    again: dict[str, Any], threads: int, m: int
) -> None:
    """Over counts or as the general search, but on no large problem."""
    tight = [{"memory_bytes": 12}, {"memory_bytes": 12}]
    given = problem([stage(0, **again), stage(1, **again)], tight, m=m)
    found = plans(given, Limits(threads=threads))
    turns = [step.part.run for plan in found for step in plan.once]
    fits = num_order_pairs(given, fifo=True) <= MOST_PAIRS
    assert (improve_by_beam in turns) is fits is (m == 4)


@pytest.mark.parametrize(("limit", "m"), [(None, 2), (40, 2), (39, 2), (39, 200)])
def test_the_full_horizon_model_has_a_turn_where_a_host_can_be_full(
    limit: int | None, m: int
) -> None:
    """Only there it proves what exact searches cannot, and only of small problems."""
    stages = [offloadable(d, activation_bytes=10, offload_bytes=10) for d in range(2)]
    hosts = [{"name": "host0", "memory_bytes": limit}]
    given = problem(stages, [bus(memory_bytes=10)] * 2, m=m, hosts=hosts)
    (plan,) = plans(given, Limits())
    turns = [step.part.run for step in plan.once]
    assert (improve_by_milp in turns) is milp_may_prove(given) is (limit == 39 and m == 2)


# Starts: judged by compiled code as by the reference; copies made where they can win.


QUICK = ("serial", "gpipe", "1f1b", "1f1b-r", "interleaved", "zb-h1", "zb-h2", "gis", "zb-v")


def tight_line(**fields: float) -> Problem:
    """Four stages with room for two activations each, slow copies."""
    devices = [bus(memory_bytes=20 * UNIT, d2h_gb_per_s=1.0, h2d_gb_per_s=1.0) for _ in range(4)]
    return problem([offloadable(d, 10, 10, 10, **fields) for d in range(4)], devices, m=8)


@given(cases(tight=True, menus=True))
def test_judged_as_by_the_reference(case: Case) -> None:
    """Legality, hosts and recompute included, and the objective to the last bit."""
    for start in all_starts(case.problem, QUICK):
        if start.programs is not None:
            wrong = find_violations(case.problem, start.programs)
            assert start.legal == (not wrong)
            assert all(violation.code.startswith("memory.") for violation in wrong)
            run = simulate(case.problem, start.programs)
            assert start.objective_ms == run.objective_ms(case.problem.objective)


def copies(starts: list[FamilyStart]) -> list[str]:
    """The methods with offload added."""
    return [start.method for start in starts if start.method.endswith("+offload")]


def test_copies_come_last_the_shortest_originals_first() -> None:
    """Families as they are are cheap; a copy costs several sweeps."""
    starts = list(all_starts(tight_line(), QUICK))
    order = [start.method for start in starts]
    originals = {start.method: start for start in starts}
    fitted = copies(starts)
    assert len(fitted) > 2
    assert order[-len(fitted) :] == fitted
    before = [originals[method.removesuffix("+offload")] for method in fitted]
    assert not any(start.legal for start in before)
    assert before == sorted(before, key=lambda start: start.objective_ms)


def test_large_problems_get_copies_only_of_what_could_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than of a small problem, in the same order, and the best start is the same."""
    everything = list(all_starts(tight_line(), QUICK))
    monkeypatch.setattr(portfolio, "_LARGE", 0)
    starts = list(all_starts(tight_line(), QUICK))
    fitted = copies(starts)
    assert 0 < len(fitted) < len(copies(everything))
    assert fitted == [method for method in copies(everything) if method in fitted]
    best = min(start.objective_ms for start in starts if start.legal)
    assert best == min(start.objective_ms for start in everything if start.legal)


def test_a_large_problem_is_1f1b_before_it_is_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solve that ends with its first schedule, on a busy machine, must not end with Serial."""
    given = problem([stage(d) for d in range(4)], m=8)
    assert next(all_starts(given)).method == "serial"
    monkeypatch.setattr(portfolio, "_LARGE", 0)
    first, *others = all_starts(given)
    assert (first.method, first.legal) == ("1f1b", True)
    names = [start.method for start in others]
    assert "zb-h1" in names
    assert "serial" not in names, "nothing is longer"
    tight = [start.method for start in all_starts(tight_line(), QUICK) if start.legal]
    assert tight[0] == "serial", "where what is short exceeds the limits"


def test_programs_with_recompute_get_no_copy() -> None:
    """Offload is added to compute programs alone."""
    given = tight_line(recompute_ms=10.0, checkpoint_bytes=9 * UNIT)
    starts = {start.method: start for start in all_starts(given, ("1f1b-r",))}
    assert set(starts) == {"1f1b-r"}
    assert not starts["1f1b-r"].legal


# --- Threads of a solve run side by side, end when told, and say what went wrong.


def test_threads_run_side_by_side() -> None:
    """Each waits for the other: one after another would never end."""
    meet = threading.Barrier(2, timeout=30)

    def work() -> None:
        meet.wait()

    run_threads([work, work], lambda: False, threading.Event())
    assert not meet.broken


def test_a_thread_in_a_long_loop_has_ended_when_the_call_returns() -> None:
    """Its next look raises `Stopped` in it, which is no fault of the call."""
    end, ended = threading.Event(), threading.Event()
    answers = iter((False, True))

    def work() -> None:
        try:
            while True:
                check_stop()
                time.sleep(0.01)
        finally:
            time.sleep(0.5)
            ended.set()

    run_threads([work], lambda: next(answers), end)
    assert end.is_set()
    assert ended.is_set()


def test_what_a_thread_raises_is_raised_and_stops_the_others() -> None:
    """The caller sees the error itself; a thread that listens has ended when the call returns."""
    end, ended = threading.Event(), threading.Event()

    def broken() -> None:
        raise ValueError("broken")

    def listening() -> None:
        end.wait()
        time.sleep(0.1)
        ended.set()

    with pytest.raises(ValueError, match="broken"):
        run_threads([listening, broken], lambda: False, end)
    assert ended.is_set()


_IN_HIGHS = """
import random
import threading
import time
from optpipe_solver.portfolio import run_threads
from optpipe_solver.milp.highs import LinearProgram

draw = random.Random(1)
columns = range(400)
began = []

def add(program):
    terms = {draw.choice(columns): 1 + draw.random() for _ in range(60)}
    program.add_at_most(terms, 5.0)

def work():
    program = LinearProgram([1 + draw.random() for _ in columns], [1.0] * len(columns))
    for _ in range(400):
        add(program)
    began.append(time.monotonic())
    while time.monotonic() < began[0] + 1.5:
        program.best()
        add(program)

run_threads([work], lambda: bool(began), threading.Event())
print("returned", flush=True)
"""


def test_an_interpreter_ends_well_after_a_call_that_waited_for_highs() -> None:
    """No thread is cut inside C++, which would abort the process after its work was done."""
    ended = subprocess.run(
        [sys.executable, "-c", _IN_HIGHS], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "returned\n", "")
