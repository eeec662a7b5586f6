"""JSON: round trips, and quick refusals of whatever is odd."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optpipe import (
    InputError,
    Problem,
    ProblemError,
    Provenance,
    ScheduleFormatError,
    dump_problem,
    dump_schedule,
    evaluate,
    load_model,
    load_problem,
    load_schedule,
    simulate,
)
from optpipe.formats.json import read_text
from tests.building import document, everything_at_once, problem, programs, stage
from tests.conftest import Yardstick
from tests.strategies import Case, cases, problems

PLAIN = document([stage()])
TEXT = json.dumps(PLAIN)


@given(problems(menus=True))
@example(everything_at_once()[0])
def test_problems_round_trip(written: Problem) -> None:
    again = load_problem(dump_problem(written))
    assert again == written
    assert again.problem_hash == written.problem_hash


@given(cases(menus=True), st.none() | st.floats(0, 1))
@example(Case(*everything_at_once()), 0.5)
def test_schedules_round_trip(case: Case, share: float | None) -> None:
    length = simulate(*case).objective_ms(case.problem.objective)
    bound = None if share is None else share * length
    schedule = evaluate(*case, Provenance(method='odd "programs": 0 \u2028 名'), bound_ms=bound)
    assert load_schedule(dump_schedule(schedule)) == schedule


def test_a_schedule_has_one_line_per_program() -> None:
    rows = programs("0F0 0I0 0W0", "1F0 1B0")
    schedule = evaluate(problem([stage(0), stage(1)]), rows, Provenance(method="test"))
    lines = dump_schedule(schedule).splitlines()
    assert lines[:6] == [
        "{", '  "programs": [', '    ["0F0", "0I0", "0W0"],', '    ["1F0", "1B0"]', "  ],",
        '  "format": "optpipe/schedule/v1",',
    ]  # fmt: skip


ODD = [
    ("", "the text is empty; JSON starts with { here"),
    ("\ufeff" + TEXT, "starts with a byte order mark; save it as UTF-8 without one"),
    (TEXT[:-20], "at line 1, column"),
    ('{\n  "a": 1,\n  "b": x\n}', "at line 3, column 8; is the file complete"),
    (TEXT + "}", "not JSON: Extra data at line 1, column"),
    ("{'num_microbatches': 1}", "not JSON: Expecting property name enclosed in double quotes"),
    (TEXT.replace("1,", "NaN,", 1), "NaN is not a JSON number; give a finite number"),
    (TEXT.replace('"forward_ms": 1', '"forward_ms": 1e999'),
     "stages[0].forward_ms = inf: must be finite; give a measured number"),
    (TEXT[:-1] + ', "stages": []}', "key 'stages' stands twice in one object; remove one"),
    (TEXT.replace('"num_microbatches": 1', '"num_microbatches": ' + "9" * 4000),
     "num_microbatches = an integer of 13288 bits: is too large; times are in ms, sizes in bytes"),
    (TEXT.replace('"num_microbatches": 1', '"num_microbatches": ' + "9" * 100_000),
     "a number has more than 4300 digits; give bytes, milliseconds or a count"),
    ('{"name": "' + "x" * 5_000_000 + '"}', "String should have at most 200 characters"),
    ('{"name": "a", "' + "x" * 5_000_000 + '": 1}', "xxx...: unknown field; remove it"),
    ('{"' + "x" * 5_000_000 + '": 1}', "this is no problem: it has none of a problem's fields"),
    ("{" + ",".join(f'"k{i}": 1' for i in range(100_000)) + ', "k99999": 1}',
     "key 'k99999' stands twice"),
    ('{"name": "", ' + ",".join(f'"k{i}": 1' for i in range(100_000)) + "}", "... and 99995 more"),
    ('{"name": "\\ud800"}', "name = '\\ud800': Input should be a valid string"),
    ('{"name": "", "\\ud800": 1}', "unable to parse raw data as a unicode string"),
    ('{"\\ud800": 1}', "but '\\ud800'; give a file of optpipe/problem/v1"),
    ('{"format": "\\ud800"}', "format = '\\ud800': must be 'optpipe/problem/v1'; correct it"),
    ('{"name": "\\u0000"}', "stages: is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), ODD, ids=[message[:40] for _, message in ODD])
def test_odd_texts_are_refused_quickly_and_shortly(
    text: str, message: str, yardstick: Yardstick
) -> None:
    """As quickly as 45 million zeros are parsed; the slowest takes half of that.

    At best of three times: beside a load of 17 a single one was seen to take 77.
    """
    caught: list[pytest.ExceptionInfo[ProblemError]] = []

    def spend_s() -> float:
        began = time.process_time()
        with pytest.raises(ProblemError) as refusal:
            load_problem(text)
        caught.append(refusal)
        return time.process_time() - began

    assert any(yardstick.times(spend_s) < 45 for _ in range(3))
    assert message in str(caught[0].value)
    assert len(str(caught[0].value)) < 2000
    str(caught[0].value).encode()


def test_another_kind_or_version_is_named_in_one_line() -> None:
    """A line for each of its fields would hide what is wrong: the file, or who wrote it."""
    whole, rows = everything_at_once()
    schedule = dump_schedule(evaluate(whole, rows, Provenance(method="test")))
    newer = dump_problem(whole).replace("problem/v1", "problem/v3")
    trace = '{"traceEvents": [], "displayTimeUnit": "ms"}'
    wrong = "but a problem is asked for here; give a file"
    refusals = (
        (load_problem, schedule, f"this is a schedule, {wrong}"),
        (load_model, dump_problem(whole), "this is a problem, but a model is asked for here"),
        (load_schedule, dump_problem(whole), "this is a problem, but a schedule is asked for here"),
        (load_schedule, schedule.replace("/v1", "/v9"), "reads 'optpipe/schedule/v1'; read it"),
        (load_problem, newer, "format = 'optpipe/problem/v3': this optpipe reads"),
        (load_problem, trace, "none of a problem's fields, but 'traceEvents', 'displayTimeUnit'"),
    )
    for load, text, message in refusals:
        with pytest.raises(InputError) as caught:
            load(text)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("opening", "closing"), [("[", "]"), ('{"name": ', "}"), ('{"stages": [', "]}")]
)
def test_no_depth_of_nesting_ends_in_a_recursion_error(opening, closing) -> None:
    for depth in (50, 900, 960, 970, 980, 990, 1000, 100_000):
        for text in (opening * depth + "1" + closing * depth, opening * depth):
            with pytest.raises(ProblemError):
                load_problem(text)
            with pytest.raises(ScheduleFormatError):
                load_schedule(text)


@given(st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_no_text_ends_in_anything_but_our_own_error(text: str) -> None:
    with pytest.raises(ProblemError):
        load_problem(text)
    with pytest.raises(ScheduleFormatError):
        load_schedule(text)


def test_a_file_that_cannot_be_read_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none.json: No such file.*check the path"):
        read_text(tmp_path / "none.json")
    with pytest.raises(InputError, match="Is a directory"):
        read_text(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xe9"}')
    with pytest.raises(InputError, match=r"is not UTF-8 text \(byte 10\); save it as UTF-8"):
        read_text(str(tmp_path / "latin.json"))
    (tmp_path / "good.json").write_text(TEXT, "utf-8")
    assert load_problem(read_text(tmp_path / "good.json")).num_microbatches == 1
