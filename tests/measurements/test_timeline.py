"""Traces as intervals: as they were written, on the devices of a problem, and without one."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from examples.measurements.make_samples import BASE
from optpipe import load_problem
from optpipe.errors import MeasurementError
from optpipe.formats.exports import dump_chrome_trace, dump_planned_beside_measured
from optpipe.measurements.timeline import read_step, unit_problem
from optpipe.measurements.trace_file import UploadedFile, read_trace
from optpipe.plot.scene import View
from optpipe.simulate import make_timeline
from tests import building
from tests.cli.test_importing import TRACES
from tests.measurements.traces import Trace
from tests.plot.conftest import make_small_problem, make_small_programs
from tests.strategies import cases

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from optpipe.simulate import Interval

KINETO = [UploadedFile(path.name, gzip.decompress(path.read_bytes()).decode()) for path in TRACES]


def shown(row: Iterable[Interval]) -> list[tuple[float | str, ...]]:
    """The intervals of actions without modes, in an order of their own."""
    return sorted(
        (round(one.start, 4), round(one.end, 4), one.lane, *map(bare, (one.action, one.partner)))
        for one in row
        if one.action is not None
    )


def bare(action: object) -> str:
    return str(action).partition("@")[0]


@given(cases(menus=True, pairs=True))
def test_our_own_traces_give_the_intervals_they_were_drawn_from(case) -> None:
    """A plan alone, and what ran at half of the speed, below a plan."""
    problem, programs = case.problem, case.programs
    planned = make_timeline(problem, programs)
    slow = [
        [one.__class__(one.device, one.lane, one.action, 2 * one.start, 2 * one.end, one.partner)
         for one in row]
        for row in planned.intervals
    ]  # fmt: skip
    both = dump_planned_beside_measured(problem, programs, slow, "measured, step 7")
    for text, true in ((dump_chrome_trace(problem, programs), planned.intervals), (both, slow)):
        step = read_step([UploadedFile("trace.json", text)]).on(problem)
        assert step.ran(programs)
        assert [shown(row) for row in step.rows] == [shown(row) for row in true]


def test_memory_of_a_measured_run_is_that_of_its_programs_at_the_measured_times() -> None:
    problem, programs = make_small_problem(), make_small_programs()
    trace = UploadedFile("trace.json", dump_chrome_trace(problem, programs))
    step = read_step([trace]).on(problem)
    planned = View("plan", problem, programs).drawing
    measured = View("run", problem, programs, measured=step.rows).drawing
    assert measured.makespan_ms == pytest.approx(planned.makespan_ms)
    assert measured.idle == pytest.approx(planned.idle)
    for own, other in zip(planned.memory, measured.memory, strict=True):
        assert own.held_bytes.tolist() == other.held_bytes.tolist()
        assert own.moments.tolist() == pytest.approx(other.moments.tolist(), abs=1e-4)


def test_the_memory_of_another_order_than_planned_is_that_of_the_order_that_ran() -> None:
    """With copies or menus nobody knows it, as a trace does not show what was released."""
    problem = building.problem([building.stage(0, 3, 4, 5), building.stage(1, 6, 7, 8)], m=2)
    serial = building.programs("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")
    eager = building.one_f_one_b(2, 2)
    step = read_step([UploadedFile("a.json", dump_chrome_trace(problem, eager))]).on(problem)
    assert not step.ran(serial)
    assert step.programs_with_memory(problem, serial) == eager
    assert step.programs_with_memory(problem, eager) is eager
    small, copied = make_small_problem(), make_small_programs()
    step = read_step([UploadedFile("a.json", dump_chrome_trace(small, copied))]).on(small)
    assert step.programs_with_memory(small, copied) is copied
    assert step.programs_with_memory(small, ()) is None


def test_traces_of_a_profiler_are_drawn_with_and_without_their_problem() -> None:
    """Four ranks; the last complete step, by the kernels; the first is at 0."""
    problem = load_problem(BASE.read_text("utf-8"))
    step = read_step(KINETO)
    assert step.clock == "GPU kernels"
    assert step.names == ("rank 0", "rank 1", "rank 2", "rank 3")
    assert min(row[0].start for row in step.rows) == 0.0
    for row in step.rows:
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(row))
    on = step.on(problem)
    assert [device.name for device in problem.devices] == list(on.names)
    assert on.programs == step.programs
    alone = unit_problem(step.programs, step.names)
    drawing = View("run", alone, step.programs, measured=step.rows, has_memory=False).drawing
    assert not drawing.has_memory
    assert len(drawing.bars) == sum(map(len, step.rows))
    assert 0 < min(drawing.idle) < 1


def test_the_last_step_that_all_ranks_have_completed_is_shown(tmp_path: Path) -> None:
    files = []
    for rank, names in enumerate((("F0", "B0", "F0", "B0", "F0"), ("F0", "B0", "F0", "B0"))):
        trace = Trace(rank=rank)
        for name in names:
            trace.gpu(f"PP:{rank}{name}", (0, 1000 * (rank + 1)))
        path = trace.write(tmp_path / f"{rank}.json")
        files.append(UploadedFile(path.name, path.read_text("utf-8")))
    step = read_step(files)
    assert step.step == 1
    assert [[one.end - one.start for one in row] for row in step.rows] == [[1.0] * 2, [2.0] * 2]
    with pytest.raises(MeasurementError, match="the traces have stage 1, but the problem has 1"):
        step.on(building.problem([building.stage(0)], m=2))


@pytest.mark.parametrize(
    "event",
    [
        {"cat": ["kernel"]},
        {"cat": 5},
        {"cat": None},
        {"cat": "cpu_op", "args": {"Collective name": ["send"]}},
        {"ts": 10**400},
        {"dur": 10**400},
        {"pid": "1" * 5000},
        {"ph": "i", "name": "[memory]", "ts": 10**400, "args": {"Bytes": 1}},
    ],
)
def test_an_odd_event_is_read_or_refused_in_a_sentence(event: dict[str, object]) -> None:
    usual = {"ph": "X", "name": "0F0", "ts": 1, "dur": 1, "pid": 0}
    text = json.dumps({"traceEvents": [usual, usual | event]})
    with suppress(MeasurementError):
        read_trace(UploadedFile("odd.json", text))


def test_an_integer_of_thousands_of_digits_is_refused_in_a_sentence() -> None:
    text = '{"traceEvents": [{"ph": "X", "name": "0F0", "dur": 1, "ts": ' + "1" * 5000 + "}]}"
    with pytest.raises(MeasurementError, match="must be a number of"):
        read_trace(UploadedFile("odd.json", text))


def test_a_schedule_alone_has_unit_times_and_no_modes() -> None:
    programs = building.programs("0F0 0B0", "1F0 1B0")
    assert make_timeline(unit_problem(programs), programs).makespan_ms == 6.0
    for row, said in (("0F0@1 0B0", "modes"), ("0F1048577 0B1048577", "open a smaller schedule")):
        with pytest.raises(MeasurementError, match=said):
            unit_problem(building.programs(row))
