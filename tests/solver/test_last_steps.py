"""The last steps of a solve: less memory for the same length, and orders that noise delays less."""

from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given

from optpipe import InputError, Problem, Programs, check_schedule, dump_schedule, simulate
from optpipe.check import find_violations
from optpipe.memory import device_peak_bytes
from optpipe.schedule import Provenance, Schedule
from optpipe_solver import Noise, Robust, solve
from optpipe_solver.budget import Stop
from optpipe_solver.families.classic import build_gpipe
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.last_steps import (
    choose_robust,
    keep_where_peaks_allow,
    lower_peaks,
    with_device_factors,
    with_free_share,
    within_limit,
)
from optpipe_solver.portfolio import FamilyStart
from optpipe_solver.ranking import NoisyTimes, peak_shares
from optpipe_solver.solve import record
from tests.building import UNIT, bus, offloadable, problem, programs, stage
from tests.solver.starting import schedule_of
from tests.strategies import Case, cases, few

LAYERS = {"transformer": 1}
TIMES = ((2, 2, 2), (3, 2, 4), (4, 3, 3), (4, 2, 4), (2, 4, 4), (2, 3, 4))


def uneven_v(layers: dict[str, int] | None = LAYERS) -> Problem:
    """Six stages in a V on three devices, each with room for all eight micro-batches.

    Without layers it is of v1, where what is found first stays: it fills a device.
    """
    devices = [bus(memory_bytes=160) for _ in range(3)]
    stages = [
        stage(d, *times) | ({} if layers is None else {"layers": layers})
        for d, times in zip((0, 1, 2, 2, 1, 0), TIMES, strict=True)
    ]
    return problem(stages, devices, m=8)


@cache
def solved(*, of_v2: bool) -> Schedule:
    """What a unit of work finds; computed once, v1's without any last step."""
    given = uneven_v() if of_v2 else uneven_v(None)
    return schedule_of(given, work_limit=1.0, time_limit_s=600)


def started_full(given: Problem) -> Incumbent:
    """An incumbent with GPipe's order, as if it were the best there is."""
    best = Incumbent(given)
    assert best.offer(build_gpipe(given), "full")
    return best


def test_peaks_fall_and_the_objective_stays() -> None:
    """GPipe's length needs an eighth of what it fills; the name says where it was found."""
    best = started_full(problem([stage(0, layers=LAYERS)], [bus(memory_bytes=80)], m=8))
    assert best.metrics is not None
    assert best.metrics.peak_bytes == (80,)
    lower_peaks(best, Stop(60))
    assert best.metrics.peak_bytes == (10,)
    assert best.objective_ms == best.metrics.makespan_ms == 24
    assert ", peaks" in best.method


def test_a_solve_of_v2_ends_with_low_peaks_and_one_of_v1_as_it_was() -> None:
    """Both optimal, v1 with what fills its memory; v2's last step finds it in a third of that."""
    found, before = solved(of_v2=True), solved(of_v2=False)
    check_schedule(uneven_v(), found)
    assert found.objective_ms == before.objective_ms
    assert found.stopped_by == before.stopped_by == "optimal"
    assert peak_shares(uneven_v(None), before.peak_bytes)[0] == 1.0
    assert peak_shares(uneven_v(), found.peak_bytes)[0] <= 0.4
    assert not any(", peaks" in entry.method for entry in before.provenance.trace)


def test_a_result_has_the_peaks_before_the_last_step_if_it_lowered_them() -> None:
    result = solve(uneven_v(), work_limit=1.0, time_limit_s=600)
    assert result.schedule is not None
    before = peak_shares(uneven_v(), result.peak_bytes_before)[0]
    assert before > peak_shares(uneven_v(), result.schedule.peak_bytes)[0]
    assert solve(uneven_v(None), work_limit=1.0, time_limit_s=600).peak_bytes_before == ()


def test_offloads_that_lower_no_peak_are_kept_on_the_device() -> None:
    """Micro-batch 1 comes back at once; micro-batch 0 is away at the peak."""
    stages = [offloadable(f=30, i=30, w=30, layers=LAYERS)]
    given = problem(stages, [bus(memory_bytes=30 * UNIT)], m=3)
    both = "0F0 0OFFLOAD0 0F1 0RELEASE0 0OFFLOAD1 0F2 0B2 0RELEASE1 0RELOAD1 0B1 0RELOAD0 0B0"
    best = Incumbent(given)
    assert best.offer(programs(both), "search")
    assert best.metrics is not None
    before = best.metrics
    keep_where_peaks_allow(best)
    assert best.programs == programs("0F0 0OFFLOAD0 0F1 0RELEASE0 0F2 0B2 0B1 0RELOAD0 0B0")
    assert best.metrics.peak_bytes == before.peak_bytes == (20 * UNIT,)
    assert best.metrics.makespan_ms <= before.makespan_ms
    assert best.method == "search"


def test_a_search_goes_on_where_families_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any family, from the schedule itself squeezed into less and less."""
    monkeypatch.setattr("optpipe_solver.last_steps.all_starts", lambda *_: iter(()))
    full = solved(of_v2=False)
    best = Incumbent(uneven_v())
    best.offer(full.programs, "full")
    lower_peaks(best, Stop(600, work=3.0))
    assert best.metrics is not None
    assert best.objective_ms <= full.objective_ms * (1 + 1e-9)
    assert peak_shares(uneven_v(), best.metrics.peak_bytes)[0] <= 0.7
    assert best.method.startswith("local-search, peaks")


def test_only_families_with_the_known_objective_are_built_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If none has it, the best family is built for a local search to start from."""
    built: list[list[str]] = []

    def note(_: Problem, families: list[str]) -> Iterator[FamilyStart]:
        built.append(families)
        return iter(())

    monkeypatch.setattr("optpipe_solver.last_steps.all_starts", note)
    given = uneven_v()
    known_ms = started_full(given).objective_ms
    for family_ms in ({"zb-v": known_ms, "gpipe": known_ms + 1}, {"1f1b": 2e3, "zb-v": 1e3}):
        stop = Stop(600, work=0.3)
        lower_peaks(started_full(given), stop, family_ms)
        assert built
        assert all(families == ["zb-v"] for families in built)
        assert 0.0 < stop.spent < 0.31
        built.clear()


def test_the_same_work_gives_the_same_file_in_v2() -> None:
    """Ranking and the last step follow no clock; whether the work sufficed or not."""
    again = schedule_of(uneven_v(), work_limit=1.0, time_limit_s=600)
    assert dump_schedule(again) == dump_schedule(solved(of_v2=True))
    one, other = (
        schedule_of(uneven_v(), work_limit=0.05, seed=3, time_limit_s=600) for _ in range(2)
    )
    assert dump_schedule(one) == dump_schedule(other)


def test_who_is_told_to_stop_gets_no_last_step() -> None:
    """The schedule is there, and peaks are as they were."""
    given = uneven_v()
    start = build_gpipe(given)
    found = schedule_of(given, time_limit_s=60, start=start, should_stop=lambda: True)
    assert found.stopped_by == "cancelled"
    assert not any(", peaks" in entry.method for entry in found.provenance.trace)


@few(40)
@given(cases(tight=True, menus=True))
def test_a_program_within_a_tighter_limit_is_legal_where_it_is_one(case: Case) -> None:
    """Squeezed to what its limit was, and to less: nothing is lost, and no rule broken."""
    for share in (1.0, 0.7, 0.4):
        tighter = with_free_share(case.problem, share)
        for device, known in enumerate(case.programs):
            row = within_limit(tighter, device, known)
            if row is None or share == 1.0:
                assert (row is None) == (share < 1.0)
                assert row in (None, known)
                continue
            mixed = (*case.programs[:device], row, *case.programs[device + 1 :])
            codes = {broken.code for broken in find_violations(case.problem, mixed)}
            assert codes <= {"wait.cyclic"}
            assert device_peak_bytes(tighter, device, row) <= tighter.devices[device].usable_bytes
            assert sorted(row) == sorted(known)


def test_room_is_made_by_weight_gradients_first_then_by_waiting() -> None:
    """Of ten bytes each, two micro-batches fit: W0 comes before F2, and F3 behind W1."""
    given = problem([stage(0, layers=LAYERS)], [bus(memory_bytes=20)], m=3)
    (row,) = programs("0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2")
    (sooner,) = programs("0F0 0F1 0I0 0W0 0F2 0I1 0I2 0W1 0W2")
    assert within_limit(given, 0, row) == sooner
    lean = problem([stage(0, layers=LAYERS)], [bus(memory_bytes=10)], m=2)
    (full,) = programs("0F0 0F1 0I0 0I1 0W0 0W1")
    (serial,) = programs("0F0 0I0 0W0 0F1 0I1 0W1")
    assert within_limit(lean, 0, full) == serial
    small = {"activation_bytes": 4, "weight_context_bytes": 3, "forward_workspace_bytes": 8}
    two = [stage(0, layers=LAYERS, **small), stage(0, layers=LAYERS, weight_context_bytes=3)]
    both = problem(two, [bus(memory_bytes=14)], m=2)
    (owing,) = programs("0F0 1F0 1I0 0I0 0F1 1F1 1I1 0I1 1W0 0W0 1W1 0W1")
    (paid,) = programs("0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1")
    assert within_limit(both, 0, owing) == paid
    none = problem([stage(0, layers=LAYERS)], [bus(memory_bytes=9)], m=2)
    assert within_limit(none, 0, full) is None


MOST = Robust(percent=90.0, noise=Noise(jitter=0.2, stragglers=0.3, num_draws=50, seed=4))


def line(m: int = 6) -> Problem:
    """Three devices of v1, each with room for three micro-batches."""
    return problem([stage(d, 2, 2, 2) for d in range(3)], [bus(memory_bytes=30)] * 3, m=m)


def late_ms(given: Problem, programs: Programs, robust: Robust) -> float:
    """The percentile, which `test_ranking` holds against the simulator draw by draw."""
    return NoisyTimes(given, robust.noise).percentile(programs, robust.percent)


def test_the_one_is_chosen_that_noise_delays_least_of_all_that_was_met() -> None:
    """As a plain evaluation of the whole pool says; its numbers and those of the shortest too."""
    given = line()
    best = Incumbent(given, pools=True)
    found = schedule_of(given, work_limit=0.3, time_limit_s=600)
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
    nominal = schedule_of(given, work_limit=0.1, time_limit_s=600)
    results = [solve(given, work_limit=0.1, time_limit_s=600, robust=MOST) for _ in range(2)]
    (kept, choice), (again, same) = ((one.schedule, one.robust) for one in results)
    assert kept is not None
    assert again is not None
    assert choice is not None
    assert (dump_schedule(again), same) == (dump_schedule(kept), choice)
    check_schedule(given, kept)
    assert kept.makespan_ms == simulate(given, kept.programs).makespan_ms
    assert kept.bound_ms is not None
    assert kept.bound_ms <= nominal.objective_ms * (1 + 1e-9)
    found = late_ms(given, kept.programs, MOST)
    assert choice.late_ms == pytest.approx(found, rel=1e-12)
    assert found <= late_ms(given, nominal.programs, MOST)
    assert "Bound and gap are those without noise" in str(choice)


def test_where_time_is_up_the_shortest_stays_and_its_percentile_is_said() -> None:
    """One is always judged."""
    given = line()
    best = Incumbent(given, pools=True)
    found = schedule_of(given, work_limit=0.1, time_limit_s=600)
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
    found = schedule_of(given, work_limit=0.3, time_limit_s=600)
    serial = schedule_of(given, method="serial", time_limit_s=60)
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
    shorter = schedule_of(given, work_limit=0.1, time_limit_s=600)
    serial = schedule_of(given, method="serial", time_limit_s=60)
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
    robust = Robust.parse("P97.5", jitter=0.2, stragglers=0.0, seed=7)
    assert robust == Robust(percent=97.5, noise=Noise(jitter=0.2, stragglers=0.0, seed=7))
    for text in ("90", "P0", "P100", "p90", "P", "P90%"):
        with pytest.raises(InputError, match="write P90"):
            Robust.parse(text, jitter=0.1, stragglers=0.1, seed=0)
    with pytest.raises(InputError, match=r"noise\.jitter = 2"):
        Robust.parse("P90", jitter=2, stragglers=0.1, seed=0)
    with pytest.raises(InputError, match=r"robust\.percent = 100"):
        Robust(percent=100)
