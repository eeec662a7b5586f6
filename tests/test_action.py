"""The text form of actions, and its inverse."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from optpipe import Action, ActionType, parse_action
from optpipe.errors import ActionSyntaxError
from tests.strategies import actions


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
        ("(0F0;1B0)OVERLAP_F_B", "overlapped forward-backward pair", "one after the other"),
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
    held = [parse_action("0F0"), parse_action("1RECOMPUTE2")]
    assert adapter.validate_json('["0F0", "1RECOMPUTE2"]') == held
    assert adapter.validate_python(held) == held
    assert adapter.dump_json(held) == b'["0F0","1RECOMPUTE2"]'
    pattern = adapter.json_schema()["items"]["pattern"]
    assert re.match(pattern, "0F0")
    assert not re.match(pattern, "0F0x")
    with pytest.raises(ValidationError, match="7 is not an action; write it as text"):
        adapter.validate_python([7])


def test_every_type_is_on_one_lane() -> None:
    transfers = {kind for kind in ActionType if kind.is_transfer}
    compute = {kind for kind in ActionType if kind.is_compute}
    assert transfers == {ActionType.OFFLOAD, ActionType.RELOAD}
    assert set(ActionType) - transfers - compute == {ActionType.RELEASE}
    assert {kind.value for kind in ActionType if kind.is_backward} == {"I", "B"}
