"""``solve`` and ``compare``: never worse than a start, honest about what is proven."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from math import inf

import pytest
from hypothesis import given

from optpipe import InputError, Problem, check_schedule, dump_schedule, simulate
from optpipe_solver import Progress, SolveStatus, portfolio, solve
from optpipe_solver.bounds import Bound
from optpipe_solver.budget import Limits, Stop, Stopped, stopped_by
from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.portfolio import all_starts
from optpipe_solver.solve import _SolveRun
from tests.building import UNIT, bus, problem, stage
from tests.solver.milp.test_horizon import parked_problem
from tests.solver.starting import erratic_clock, schedule_of
from tests.solver.test_restriction import slow_bus
from tests.strategies import Case, cases, few


def offload_problem(m: int = 8, **fields: float) -> Problem:
    """Four devices with one and a half activations of memory, transfers half a forward."""
    sizes = {"activation_bytes": 10 * UNIT, "weight_context_bytes": 5 * UNIT}
    fields = fields or {"offload_bytes": 10 * UNIT}
    stages = [stage(d, 18.5, 18.1, 9.3, **sizes, **fields) for d in range(4)]
    return problem(stages, [bus(memory_bytes=15 * UNIT) for _ in range(4)], m=m)


def recompute_problem() -> Problem:
    """The same without transfers: what recomputation can do is hard to bound."""
    return offload_problem(12, recompute_ms=18.5, checkpoint_bytes=UNIT)


@few(8)
@given(cases(tight=True))
def test_never_worse_than_any_start_and_never_below_the_bound(case: Case) -> None:
    """On random problems whose limits some schedule just meets."""
    result = solve(case.problem, work_limit=0.05, time_limit_s=600)
    assert result.schedule is not None
    check_schedule(case.problem, result.schedule)
    run = simulate(case.problem, result.schedule.programs)
    assert result.schedule.objective_ms == run.objective_ms(case.problem.objective)
    for start in all_starts(case.problem):
        if start.programs is not None and start.legal:
            assert result.schedule.objective_ms <= start.objective_ms * (1 + 1e-9)
    assert result.schedule.bound_ms is not None
    assert result.schedule.bound_ms <= result.schedule.objective_ms * (1 + 1e-9)
    given_ms = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    assert result.schedule.bound_ms <= given_ms * (1 + 1e-9) + 1e-9


def test_progress_tells_every_improvement_in_order_and_contributions_sum_up() -> None:
    """Objectives fall, bounds rise, the last one is the result.

    Contributions: from the first schedule's objective to the last, from no bound to the last.
    """
    news: list[Progress] = []
    found = schedule_of(parked_problem(), time_limit_s=60, on_progress=news.append)
    objectives = [p.objective_ms or 0.0 for p in news if p.programs is not None]
    assert objectives == sorted(objectives, reverse=True)
    bounds = [p.bound_ms or 0.0 for p in news]
    assert bounds == sorted(bounds)
    assert objectives[-1] == found.objective_ms
    assert len(found.provenance.trace) == len(news)
    parts = found.provenance.contributions
    assert sum(part.objective_gain_ms for part in parts) == objectives[0] - found.objective_ms
    assert sum(part.bound_gain_ms for part in parts) == found.bound_ms
    assert len({part.method for part in parts}) == len(parts)


def test_it_returns_at_its_time_limit_and_when_told_to_stop() -> None:
    """A problem nobody can finish so soon: the limit holds, and so does cancellation."""
    given = recompute_problem()
    began = time.perf_counter()
    found = schedule_of(given, time_limit_s=2)
    assert time.perf_counter() - began < 10
    assert found.stopped_by == "time_limit"
    cancelled = schedule_of(given, time_limit_s=60, should_stop=lambda: True)
    assert cancelled.stopped_by == "cancelled"


@pytest.mark.parametrize(
    ("given", "work", "gap", "why"),
    [
        (recompute_problem(), 0.035, 0.0, "work_limit"),
        (slow_bus(), 0.1, 0.0, "work_limit"),
        (offload_problem(m=4), 2.0, 0.12, "gap"),
        (offload_problem(m=4), 2.0, 0.0, "optimal"),
    ],
)
def test_the_same_work_gives_the_same_file(
    given: Problem, work: float, gap: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock does the records are equal to the last byte, their traces included.

    Searches in restrictions, as with the slow bus, count their work as all others do.
    """
    found = []
    for jump_s in (0.0, 0.1):
        monkeypatch.setattr(time, "perf_counter", erratic_clock(jump_s))
        limits = {"time_limit_s": 6000, "work_limit": work, "gap": gap}
        found.append(schedule_of(given, seed=3, **limits))
    assert found[0].stopped_by == why
    assert dump_schedule(found[0]) == dump_schedule(found[1])
    spent = [entry.seconds for entry in found[0].provenance.trace]
    assert spent == sorted(spent)
    assert spent[-1] <= work


def test_a_turn_leaves_one_entry_by_a_method_where_work_is_limited() -> None:
    """When a part tells is a matter of time; what it has found in the end is not."""
    best = Incumbent(parked_problem())
    best.work = 1.5
    for ms in (1.0, 2.0, 3.0):
        best.offer_bound(ms, "milp")
    best.work = 2.5
    best.offer_bound(4.0, "milp")
    assert [(entry.seconds, entry.bound_ms) for entry in best.trace] == [(1.5, 3.0), (2.5, 4.0)]


def _unlimited(given: Problem) -> _SolveRun:
    return _SolveRun(Incumbent(given), Limits(), "auto", lambda: False)


def test_who_has_no_time_makes_the_cheapest_schedule_alone() -> None:
    """Told to stop from the first: one family, the bound that costs nothing, and no more."""
    run = _unlimited(offload_problem())
    run.ended.set()
    run._starts()
    assert run.start is not None
    assert run.start[0] == "serial"
    assert {entry.method for entry in run.best.trace} <= {"serial", "memory-energy"}
    assert not run.reasons


def test_between_any_two_starts_it_is_asked_whether_to_stop() -> None:
    """As many questions as starts, and one per device whose bounds are computed."""
    run, questions = _unlimited(offload_problem()), count()
    run.stop = Stop(60, should_stop=lambda: next(questions) < 0)
    run._starts()
    num_starts = len(list(all_starts(run.best.problem)))
    assert next(questions) == num_starts + 1 + len(run.best.problem.devices)


def large_problem() -> Problem:
    """20,480 cells of v2: a loop of four chunks, menus of modes, and links on which messages queue.

    Memory holds 40 activations of a device, which no family keeps to without modes.
    """
    modes = [
        {"name": "keep"},
        {"name": "half", "offload_bytes": 5 * UNIT},
        {"name": "mlp", "forward_bytes": 6 * UNIT, "recompute": "inside", "recompute_ms": 0.5},
        {"name": "full", "forward_bytes": UNIT, "recompute": "apart", "recompute_ms": 3.0},
    ]
    cost = {"activation_bytes": 10 * UNIT, "output_bytes": UNIT, "modes": modes}
    times = {"forward_ms": 3.0, "backward_input_ms": 3.0, "backward_weight_ms": 2.0}
    return problem(
        [{"device": k % 20, "costs": [cost | times]} for k in range(80)],
        [bus(memory_bytes=400 * UNIT) for _ in range(20)],
        m=256,
        format="optpipe/problem/v2",
        links=[{"from": d, "to": (d + 1) % 20, "bandwidth_gb_per_s": 25.0} for d in range(20)],
    )


def test_a_large_problem_has_a_schedule_that_fits_even_when_cancelled_at_once() -> None:
    """The serial schedule is made before anything looks at the clock."""
    given = large_problem()
    found = schedule_of(given, time_limit_s=60, should_stop=lambda: True)
    check_schedule(given, found)
    assert found.stopped_by == "cancelled"
    assert found.provenance.method == "serial"


@pytest.mark.parametrize(("after_s", "threads"), [(0.0, 1), (1.0, 2)])
def test_a_solve_leaves_no_thread(after_s: float, threads: int) -> None:
    """Families, bounds and searches of a large problem end before the solve returns."""
    before, schedule_at = set(threading.enumerate()), inf

    def note(progress: Progress) -> None:
        nonlocal schedule_at
        schedule_at = min(schedule_at, time.perf_counter())

    solve(
        large_problem(),
        time_limit_s=60,
        threads=threads,
        on_progress=note,
        should_stop=lambda: time.perf_counter() > schedule_at + after_s,
    )
    assert set(threading.enumerate()) <= before


def test_every_start_ends_as_soon_as_its_thread_is_told_to_stop() -> None:
    """No family of a large problem runs to its end after that; those that do not apply say so."""
    given = large_problem()
    for family in FAMILIES:
        with stopped_by(lambda: True), pytest.raises((Stopped, NotApplicable)):
            family.build(given)


def test_of_a_large_problem_families_come_before_what_can_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bounds that never end leave a better schedule than Serial, where 1F1B is over the limits."""
    monkeypatch.setattr(portfolio, "_LARGE", 0)
    found: list[str] = []

    def endless(solved: Problem, *_: object, **__: object) -> Iterator[Bound]:
        assert solved is posed
        assert run.start is not None
        found.append(run.start[0])
        return iter(())

    monkeypatch.setattr(sys.modules["optpipe_solver.solve"], "lower_bounds", endless)
    for posed in (offload_problem(), problem([stage(d) for d in range(4)], m=8)):
        run = _unlimited(posed)
        run._starts()
    assert found == ["zb-greedy", "1f1b"]


def test_no_start_is_begun_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold up the end of the process: as long as the longest before it, it may take."""
    start = next(all_starts(offload_problem()))
    slow = (replace(start, seconds=seconds) for seconds in (0.1, 100.0, 0.1, 0.1))
    monkeypatch.setattr(sys.modules["optpipe_solver.solve"], "all_starts", lambda *_: slow)
    _unlimited(offload_problem())._starts()
    assert len(list(slow)) == 2


def test_two_threads_find_and_prove_the_same_optimum() -> None:
    """Search and proof side by side."""
    result = solve(parked_problem(), time_limit_s=60, threads=2)
    assert result.status is SolveStatus.OPTIMAL
    assert result.schedule is not None
    assert result.schedule.objective_ms == 136


def test_a_given_start_is_kept_when_it_is_the_best() -> None:
    """The optimum as a start, a family as the method: the start wins."""
    given = parked_problem()
    best = schedule_of(given, time_limit_s=60)
    again = schedule_of(given, time_limit_s=1, method="greedy", start=best.programs)
    assert again.objective_ms == best.objective_ms
    assert again.provenance.method == "given start"


def test_each_part_says_its_cpu_seconds_where_time_is_the_limit() -> None:
    """Together no more than the process took; with limited work clocks would change the file."""
    began = time.process_time()
    timed = schedule_of(parked_problem(), time_limit_s=2)
    took = time.process_time() - began
    spent = timed.provenance.cpu_seconds
    assert spent is not None
    assert {"starts", "bounds"} <= set(spent)
    assert 0 < sum(spent.values()) <= took
    limited = schedule_of(parked_problem(), work_limit=0.05)
    assert limited.provenance.cpu_seconds is None


def test_a_model_that_is_too_large_is_refused() -> None:
    """By name, with its size and what to choose instead."""
    with pytest.raises(InputError, match=r"pairs of actions.*choose 'auto'"):
        solve(offload_problem(m=400), method="milp")


def test_a_method_by_name_gives_that_family() -> None:
    """No optimisation where a family was asked for."""
    found = schedule_of(problem([stage(0), stage(1)], m=3), method="1f1b")
    assert found.provenance.method == "1f1b"


def test_a_family_that_does_not_fit_is_unknown_with_a_reason() -> None:
    """1F1B over the limit and nothing to offload: nothing found, nothing proven.

    Who stops at once hears one too, whether the family came so far as to have its own or not.
    """
    result = solve(parked_problem(), method="1f1b")
    assert result.status is SolveStatus.UNKNOWN
    assert "memory limit" in result.message
    stopped = solve(parked_problem(), method="1f1b", should_stop=lambda: True)
    assert stopped.status is SolveStatus.UNKNOWN
    assert stopped.message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time_limit_s": 0}, "time_limit_s = 0"),
        ({"threads": 0}, "threads = 0"),
        ({"work_limit": 0}, "work_limit = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"gap": 1}, "gap = 1"),
        ({"method": "best"}, "method = 'best'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], said: str) -> None:
    """Value, rule, fix."""
    with pytest.raises(InputError, match=said):
        solve(parked_problem(), **options)  # type: ignore[arg-type]


def test_an_interpreter_exits_at_once_after_a_solve() -> None:
    """No thread of a cancelled solve holds it up."""
    script = (
        "from optpipe_solver import solve\n"
        "from tests.solver.test_solve import large_problem\n"
        "solve(large_problem(), time_limit_s=60, should_stop=lambda: True)\n"
        "print('returned', flush=True)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "returned\n"
        began = time.perf_counter()
        assert child.wait() == 0
        assert time.perf_counter() - began < 5
