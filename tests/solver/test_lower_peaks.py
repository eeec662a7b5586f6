"""The last step of a solve of v2: the same objective with less memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from optpipe import Programs, check_schedule, dump_schedule
from optpipe.check import find_violations
from optpipe.memory import device_peak_bytes
from optpipe_solver import solve
from optpipe_solver.budget import Stop
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.lower_peaks import lower_peaks, with_free_share, within_limit
from optpipe_solver.ranking import peak_shares
from tests.building import bus, problem, programs, stage
from tests.strategies import Case, cases, few

if TYPE_CHECKING:
    from optpipe import Problem

LAYERS = {"transformer": 1}


TIMES = ((2, 2, 2), (3, 2, 4), (4, 3, 3), (4, 2, 4), (2, 4, 4), (2, 3, 4))


def uneven_v(layers: dict[str, int] | None = LAYERS) -> Problem:
    """Six stages in a V on three devices, each with room for all eight micro-batches."""
    devices = [bus(memory_bytes=160) for _ in range(3)]
    stages = [
        stage(d, *times) | ({} if layers is None else {"layers": layers})
        for d, times in zip((0, 1, 2, 2, 1, 0), TIMES, strict=True)
    ]
    return problem(stages, devices, m=8)


def filled() -> Problem:
    """The same in v1, where what is found first stays: it fills a device."""
    return uneven_v(layers=None)


def all_forwards_first(given: Problem) -> Programs:
    """GPipe's order, which holds everything at once."""
    m = given.num_microbatches
    rows = []
    for held in given.stages_of:
        row = [f"{s}F{j}" for s in held for j in range(m)]
        row += [f"{s}{kind}{j}" for s in reversed(held) for j in range(m) for kind in "IW"]
        rows.append(" ".join(row))
    return programs(*rows)


def started_full(given: Problem) -> Incumbent:
    """An incumbent with GPipe's order, as if it were the best there is."""
    best = Incumbent(given)
    assert best.offer(all_forwards_first(given), "full")
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
    found, before = (
        solve(given, work_limit=1.0, time_limit_s=600).schedule for given in (uneven_v(), filled())
    )
    assert found is not None
    assert before is not None
    check_schedule(uneven_v(), found)
    assert found.objective_ms == before.objective_ms
    assert found.stopped_by == before.stopped_by == "optimal"
    assert peak_shares(filled(), before.peak_bytes)[0] == 1.0
    assert peak_shares(uneven_v(), found.peak_bytes)[0] <= 0.4
    assert not any(", peaks" in entry.method for entry in before.provenance.trace)


def test_a_search_goes_on_where_families_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any family, from the schedule itself squeezed into less and less."""
    monkeypatch.setattr("optpipe_solver.lower_peaks.all_starts", lambda _: iter(()))
    full = solve(filled(), work_limit=1.0, time_limit_s=600).schedule
    assert full is not None
    best = Incumbent(uneven_v())
    best.offer(full.programs, "full")
    lower_peaks(best, Stop(600, work=3.0))
    assert best.metrics is not None
    assert best.objective_ms <= full.objective_ms * (1 + 1e-9)
    assert peak_shares(uneven_v(), best.metrics.peak_bytes)[0] <= 0.7
    assert best.method.startswith("local-search, peaks")


@pytest.mark.parametrize("work", [0.05, 2.0])
def test_the_same_work_gives_the_same_file_in_v2(work: float) -> None:
    """Ranking and the last step follow no clock."""
    made = [solve(uneven_v(), time_limit_s=600, work_limit=work, seed=3).schedule for _ in range(2)]
    assert made[0] is not None
    assert made[1] is not None
    assert dump_schedule(made[0]) == dump_schedule(made[1])


def test_who_is_told_to_stop_gets_no_last_step() -> None:
    """The schedule is there, and peaks are as they were."""
    given = uneven_v()
    made = solve(given, time_limit_s=60, start=all_forwards_first(given), should_stop=lambda: True)
    assert made.schedule is not None
    assert made.schedule.stopped_by == "cancelled"
    assert not any(", peaks" in entry.method for entry in made.schedule.provenance.trace)


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
