"""Schedules as records: their rules, hashes and gap."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from optpipe import Provenance, Schedule, ScheduleFormatError, evaluate
from optpipe.schedule import gap_of
from tests.building import everything_at_once, problem, programs, stage


def record(**changes: Any) -> dict[str, Any]:
    """The JSON-like object of a legal schedule, changed."""
    made = evaluate(problem([stage()]), programs("0F0 0I0 0W0"), Provenance(method="test"))
    return made.model_dump(mode="json") | changes


BROKEN = [
    ({"programs": []}, "programs: Tuple should have at least 1 item"),
    ({"programs": [["0F0", "0X0"]]}, "programs[0][1]: '0X0' is not an action; an action is"),
    ({"programs": [["0F0", 7]]}, "programs[0][1]: 7 is not an action; write it as text"),
    ({"programs": ["0F0"]}, "programs[0] = '0F0': must be a list; put it in [ ]"),
    ({"peak_bytes": [1, 2]}, "peak_bytes has 2 values for 1 programs; give one per device"),
    ({"status": "optimal"}, "optimal needs a gap of at most 1e-06, not None; call it feasible"),
    ({"status": "optimal", "gap": 0.1}, "needs a gap of at most 1e-06, not 0.1; call it feasible"),
    ({"status": "great"}, "status = 'great': Input should be 'optimal' or 'feasible'; change it"),
    ({"stopped_by": "x"}, "stopped_by = 'x': Input should be 'optimal', 'gap', 'time_limit'"),
    ({"makespan_ms": -1}, "makespan_ms = -1: must be >= 0; stay in range"),
    ({"makespan_ms": math.nan}, "makespan_ms = nan: must be finite"),
    ({"bound_ms": math.inf}, "bound_ms = inf: must be finite"),
    ({"gap": 1.5}, "gap = 1.5: must be <= 1; stay in range"),
    ({"provenance": {"method": "x", "solve_seconds": math.inf}},
     "provenance.solve_seconds = inf: must be finite"),
    ({"provenance": {"method": "x", "trace": [{"seconds": math.nan, "method": "x"}]}},
     "provenance.trace[0].seconds = nan: must be finite"),
    ({"provenance": {}}, "provenance.method: is missing; give it"),
    ({"format": "optpipe/schedule/v9"}, "Input should be 'optpipe/schedule/v1'; change it"),
    ({"makespanms": 1}, "makespanms: unknown field; did you mean 'makespan_ms'?"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_every_rule_says_value_rule_and_fix(changes, message: str) -> None:
    with pytest.raises(ScheduleFormatError) as caught:
        Schedule.parse(record(**changes))
    assert message in str(caught.value)
    assert "Value error" not in str(caught.value)


def test_a_schedule_survives_its_own_dump() -> None:
    made = evaluate(*everything_at_once(), Provenance(method="test"), bound_ms=1.0)
    assert Schedule.parse(made.model_dump(mode="json")) == made
    assert Schedule.parse(made.model_dump()) == made


def test_program_hash_is_of_the_programs_alone() -> None:
    one = Schedule.parse(record())
    assert Schedule.parse(record(makespan_ms=9)).program_hash == one.program_hash
    split = Schedule.parse(record(programs=[["0F0"], ["0I0", "0W0"]], peak_bytes=[1, 1]))
    other = Schedule.parse(record(programs=[["0F0", "0I0"], ["0W0"]], peak_bytes=[1, 1]))
    assert len({one.program_hash, split.program_hash, other.program_hash}) == 3


def test_objective_is_the_one_that_was_minimised() -> None:
    assert Schedule.parse(record(makespan_ms=9, span_ms=7)).objective_ms == 9
    assert Schedule.parse(record(makespan_ms=9, span_ms=7, objective="span")).objective_ms == 7


@pytest.mark.parametrize(
    ("objective", "bound", "gap"),
    [(10, 9, 0.1), (10, 10, 0), (10, 0, 1), (0, 0, 0), (10, 10.000001, 0), (10, None, None)],
)
def test_gap(objective: float, bound: float | None, gap: float | None) -> None:
    assert gap_of(objective, bound) == (gap if gap is None else pytest.approx(gap))


def test_schedules_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Schedule.parse(record()).makespan_ms = 3.0  # type: ignore[misc]
