"""``solve(robust=...)``: the schedule that noise delays least, of those that a solve has met."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from optpipe import InputError, check_schedule, dump_schedule, simulate
from optpipe.schedule import Provenance
from optpipe.simulate import duration_ms
from optpipe_solver import Noise, Robust, solve
from optpipe_solver.arrays.encoding import KINDS
from optpipe_solver.budget import Stop
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.robust import choose_robust, with_device_factors
from optpipe_solver.solve import record
from tests.building import bus, problem, stage
from tests.solver.test_lower_peaks import uneven_v

if TYPE_CHECKING:
    from optpipe import Problem, Programs

MOST = Robust(percent=90.0, noise=Noise(jitter=0.2, stragglers=0.3, num_draws=50, seed=4))


def line(m: int = 6) -> Problem:
    """Three devices of v1, each with room for three micro-batches."""
    return problem([stage(d, 2, 2, 2) for d in range(3)], [bus(memory_bytes=30)] * 3, m=m)


def late_ms(given: Problem, programs: Programs, robust: Robust) -> float:
    """The percentile in plain Python: the simulator, once for each draw."""
    noise, m = robust.noise, given.num_microbatches
    cells = len(given.stages) * m
    sizes = (len(KINDS) * cells, 2 * cells, len(given.devices))
    draw = np.random.default_rng(noise.seed)
    lengths = []
    for _ in range(noise.num_draws):
        own, _, shared = np.split(draw.uniform(-1, 1, sum(sizes)), np.cumsum(sizes)[:-1])
        durations = {}
        for device, program in enumerate(programs):
            for action in program:
                at = KINDS.index(action.type) * cells + action.stage * m + action.microbatch
                slow = 1 + noise.jitter * own[at]
                if not action.type.is_transfer:
                    slow *= 1 + noise.stragglers * shared[device]
                durations[action] = duration_ms(given, action) * slow
        lengths.append(simulate(given, programs, durations).objective_ms(given.objective))
    return float(np.percentile(lengths, robust.percent))


def test_the_one_is_chosen_that_noise_delays_least_of_all_that_was_met() -> None:
    """As a plain evaluation of the whole pool says; its numbers and those of the shortest too."""
    given = line()
    best = Incumbent(given, pools=True)
    found = solve(given, work_limit=0.3, time_limit_s=600).schedule
    assert found is not None
    best.offer(found.programs, "shortest")
    choice = choose_robust(best, MOST, Stop(600))
    assert choice is not None
    pool = best.pool()
    values = {one.programs: late_ms(given, one.programs, MOST) for one in pool}
    assert choice.num_compared == len({one.programs for one in pool}) > 3
    assert best.programs is not None
    assert values[best.programs] == pytest.approx(min(values.values()), rel=1e-12)
    assert choice.late_ms == pytest.approx(min(values.values()), rel=1e-12)
    assert choice.shortest_late_ms == pytest.approx(values[found.programs], rel=1e-12)
    assert choice.late_ms < choice.shortest_late_ms
    assert choice.shortest_ms == found.objective_ms


@pytest.mark.parametrize("given", [line(), uneven_v()])
def test_a_robust_solve_keeps_its_proof_and_repeats_itself(given: Problem) -> None:
    """Legal, with its own length and the bound of all; twice the same to the byte."""
    nominal = solve(given, work_limit=0.3, time_limit_s=600)
    results = [solve(given, work_limit=0.3, time_limit_s=600, robust=MOST) for _ in range(2)]
    assert nominal.schedule is not None
    assert results[0].schedule is not None
    assert results[1].schedule is not None
    assert dump_schedule(results[0].schedule) == dump_schedule(results[1].schedule)
    assert results[0].robust == results[1].robust
    check_schedule(given, results[0].schedule)
    run = simulate(given, results[0].schedule.programs)
    assert results[0].schedule.makespan_ms == run.makespan_ms
    assert results[0].schedule.bound_ms is not None
    assert results[0].schedule.bound_ms <= nominal.schedule.objective_ms * (1 + 1e-9)
    choice = results[0].robust
    assert choice is not None
    found = late_ms(given, results[0].schedule.programs, MOST)
    assert choice.late_ms == pytest.approx(found, rel=1e-12)
    assert found <= late_ms(given, nominal.schedule.programs, MOST)
    assert "Bound and gap are those without noise" in str(choice)


def test_where_time_is_up_the_shortest_stays_and_its_percentile_is_said() -> None:
    """One is always judged."""
    given = line()
    best = Incumbent(given, pools=True)
    found = solve(given, work_limit=0.1, time_limit_s=600).schedule
    assert found is not None
    best.offer(found.programs, "shortest")
    choice = choose_robust(best, MOST, Stop(0.0))
    assert choice is not None
    assert choice.num_compared == 1
    assert best.programs == found.programs
    assert choose_robust(Incumbent(given, pools=True), MOST, Stop(0.0)) is None


def test_a_longer_one_that_was_chosen_is_not_called_optimal() -> None:
    """Its gap is that of its own length, and what ended the search was another's."""
    given = line()
    best = Incumbent(given, pools=True)
    found = solve(given, work_limit=0.3, time_limit_s=600).schedule
    serial = solve(given, method="serial", time_limit_s=60).schedule
    assert found is not None
    assert serial is not None
    assert found.stopped_by == "optimal"
    best.offer(serial.programs, "serial")
    best.offer(found.programs, "shortest")
    best.offer_bound(found.objective_ms, "bound")
    (chosen,) = (one for one in best.pool() if one.programs == serial.programs)
    best.put_first(chosen)
    kept = record(best, Provenance(method="serial"), "optimal")
    assert (kept.status, kept.stopped_by) == ("feasible", "gap")
    assert kept.gap == 1 - found.objective_ms / serial.objective_ms
    assert not best.offer(found.programs, "too late")


def test_the_pool_follows_no_clock_where_work_is_limited() -> None:
    """Of what a part finds in a turn only the last is kept: how often it tells is chance."""
    given = line()
    shorter = solve(given, work_limit=0.1, time_limit_s=600).schedule
    serial = solve(given, method="serial", time_limit_s=60).schedule
    assert shorter is not None
    assert serial is not None
    pools = []
    for offered in ([serial, shorter], [shorter]):
        best = Incumbent(given, pools=True)
        best.work = 0.5
        for schedule in offered:
            best.offer(schedule.programs, "local-search")
        pools.append([one.programs for one in best.pool()])
    assert pools[0] == pools[1] == [shorter.programs]


def test_a_slow_device_is_slow_in_all_that_it_computes() -> None:
    """Not in its copies, nor in the other devices' passes; recomputation counts."""
    again = {"recompute_ms": 3.0, "checkpoint_bytes": 1}
    given = problem([stage(0, 1, 2, 4, backward_ms=5, **again), stage(1)], m=1)
    slow = with_device_factors(given, [2.0, 1.0])
    assert slow.stages[1] == given.stages[1]
    times = [getattr(slow.stages[0], f"{name}_ms") for name in (
        "forward", "backward_input", "backward_weight", "backward", "recompute"
    )]  # fmt: skip
    assert times == [2.0, 4.0, 8.0, 10.0, 6.0]
    assert slow.stages[0].activation_bytes == given.stages[0].activation_bytes


def test_a_percentile_is_read_from_its_text() -> None:
    """As on the command line and over HTTP."""
    asked = Robust.parse("P97.5", jitter=0.2, stragglers=0.0, seed=7)
    assert asked == Robust(percent=97.5, noise=Noise(jitter=0.2, stragglers=0.0, seed=7))
    for text in ("90", "P0", "P100", "p90", "P", "P90%"):
        with pytest.raises(InputError, match="write P90"):
            Robust.parse(text, jitter=0.1, stragglers=0.1, seed=0)
    with pytest.raises(InputError, match=r"noise\.jitter = 2"):
        Robust.parse("P90", jitter=2, stragglers=0.1, seed=0)
    with pytest.raises(InputError, match=r"robust\.percent = 100"):
        Robust(percent=100)
