"""Schedules as records: their rules, hashes and gap."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from optpipe import (
    Action,
    ActionType,
    Provenance,
    Schedule,
    ScheduleFormatError,
    evaluate,
    parse_action,
)
from optpipe.errors import ActionSyntaxError
from optpipe.schedule import gap_of
from tests.building import problem, programs, stage
from tests.strategies import actions


def record(**changes: Any) -> dict[str, Any]:
    """The JSON-like object of a legal schedule, changed."""
    schedule = evaluate(problem([stage()]), programs("0F0 0I0 0W0"), Provenance(method="test"))
    return schedule.model_dump(mode="json") | changes


BROKEN = [
    ({"programs": []}, "programs: must have at least 1 items"),
    ({"programs": [["0F0", "0X0"]]}, "programs[0][1]: '0X0' is not an action; an action is"),
    ({"programs": [["0F0", 7]]}, "programs[0][1]: 7 is not an action; write it as text"),
    ({"programs": ["0F0"]}, "programs[0] = '0F0': must be a list; put it in [ ]"),
    ({"peak_bytes": [1, 2]}, "peak_bytes has 2 values for 1 programs; give one per device"),
    ({"status": "optimal"}, "optimal needs a gap of at most 1e-06, not None; call it feasible"),
    ({"status": "optimal", "gap": 0.1}, "needs a gap of at most 1e-06, not 0.1; call it feasible"),
    ({"status": "great"}, "status = 'great': must be 'optimal' or 'feasible'; choose one"),
    ({"stopped_by": "x"}, "stopped_by = 'x': must be 'optimal', 'gap', 'time_limit'"),
    ({"makespan_ms": -1}, "makespan_ms = -1: must be >= 0; stay in range"),
    ({"makespan_ms": math.nan}, "makespan_ms = nan: must be finite"),
    ({"bound_ms": math.inf}, "bound_ms = inf: must be finite"),
    ({"gap": 1.5}, "gap = 1.5: must be <= 1; stay in range"),
    ({"provenance": {"method": "x", "solve_seconds": math.inf}},
     "provenance.solve_seconds = inf: must be finite"),
    ({"provenance": {"method": "x", "trace": [{"seconds": math.nan, "method": "x"}]}},
     "provenance.trace[0].seconds = nan: must be finite"),
    ({"provenance": {}}, "provenance.method: is missing; give it"),
    ({"format": "optpipe/schedule/v9"}, "must be 'optpipe/schedule/v1'; choose one"),
    ({"makespanms": 1}, "makespanms: unknown field; did you mean 'makespan_ms'?"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_every_rule_says_value_rule_and_fix(changes, message: str) -> None:
    with pytest.raises(ScheduleFormatError) as caught:
        Schedule.parse(record(**changes))
    assert message in str(caught.value)
    assert "Value error" not in str(caught.value)


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


# The text form of actions, and its inverse.


@given(actions)
def test_text_form_and_its_inverse(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(st.text(max_size=12) | st.from_regex(r"\d+[FIWB]\d+", fullmatch=True))
def test_a_text_is_an_action_as_a_whole_or_not_at_all(text: str) -> None:
    try:
        action = parse_action(text)
    except ActionSyntaxError:
        return
    assert str(action) == text


def test_letters_are_torchs() -> None:
    assert parse_action("2F0") == Action(2, ActionType.FORWARD, 0)
    assert parse_action("10I7") == Action(10, ActionType.BACKWARD_INPUT, 7)
    assert parse_action("0W12") == Action(0, ActionType.BACKWARD_WEIGHT, 12)
    assert parse_action("3B4") == Action(3, ActionType.FULL_BACKWARD, 4)
    assert parse_action("1RELOAD2") == Action(1, ActionType.RELOAD, 2)


@pytest.mark.parametrize(
    "text",
    ["", "F", "2F", "F0", "02F0", "2F00", "2f0", "2F0 ", " 2F0", "2F0\n", "2F-1", "-1F0", "2X0",
     "0B1x7", "2FF0", "2.0F0", "٢F0", "2F0,3F0", "1000000000F0", "2OFF0", "2offload0"],
)  # fmt: skip
def test_texts_that_torch_or_int_would_let_pass_are_refused(text: str) -> None:
    with pytest.raises(ActionSyntaxError, match="is not an action") as caught:
        parse_action(text)
    assert repr(text) in str(caught.value)
    assert "for example 2F0" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "rule", "fix"),
    [
        ("(0F0;1B0)OVERLAP_F_B", "no single action", "without spaces"),
        ("1SEND_F0", "communication action", "compute_only"),
        ("1RECV_B0", "communication action", "compute_only"),
        ("1UNSHARD", "communication action", "compute_only"),
    ],
)
def test_what_v1_cannot_express_is_refused_by_name(text: str, rule: str, fix: str) -> None:
    with pytest.raises(ActionSyntaxError) as caught:
        parse_action(text)
    assert repr(text) in str(caught.value)
    assert rule in str(caught.value)
    assert fix in str(caught.value)


def test_a_long_text_is_shown_short() -> None:
    with pytest.raises(ActionSyntaxError) as caught:
        parse_action("x" * 100_000)
    assert len(str(caught.value)) < 300


def test_pydantic_reads_and_writes_the_text_and_publishes_its_pattern() -> None:
    adapter = TypeAdapter(list[Action])
    parsed = [parse_action("0F0"), parse_action("1RECOMPUTE2")]
    assert adapter.validate_json('["0F0", "1RECOMPUTE2"]') == parsed
    assert adapter.validate_python(parsed) == parsed
    assert adapter.dump_json(parsed) == b'["0F0","1RECOMPUTE2"]'
    pattern = adapter.json_schema()["items"]["pattern"]
    assert re.match(pattern, "0F0")
    assert not re.match(pattern, "0F0x")
    with pytest.raises(ValidationError, match="7 is not an action; write it as text"):
        adapter.validate_python([7])
