"""CSV: torch's form of programs, strictly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import ActionType, Programs, ScheduleFormatError, dump_csv, load_csv
from tests.building import programs
from tests.strategies import Case, actions, cases


@given(st.lists(st.lists(actions).map(tuple), min_size=1).map(tuple))
def test_any_programs_round_trip_empty_ones_included(rows: Programs) -> None:
    assert load_csv(dump_csv(rows)) == rows


def test_one_row_per_device_and_cells_as_in_torch() -> None:
    rows = programs("0F0 0I0 0W0", "", "1F0 1B0")
    assert dump_csv(rows) == "0F0,0I0,0W0\n\n1F0,1B0\n"


def test_cells_that_torch_leaves_empty_to_line_steps_up_are_skipped() -> None:
    assert load_csv("0F0,0F1,,,0B0\r\n,1F0, 1B0 ,,\r\n") == programs("0F0 0F1 0B0", "1F0 1B0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the CSV is empty; write one row per device"),
        ("0F0,0X1\n", "row 1, column 2: '0X1' is not an action"),
        ("0F0\n1F0,,1B0x\n", "row 2, column 3: '1B0x' is not an action"),
        ("0F0\x00\n", "row 1, column 1: '0F0\\x00' is not an action"),
        ("0F0;0B0\n", "row 1, column 1: '0F0;0B0' is not an action"),
        ("0F0\t0B0\n", "for example 2F0; separate cells by commas"),
        ("(0F0; 1B0)OVERLAP_F_B\n", "row 1, column 1: ' 1B0' is not an action"),
        ("0F0,1SEND_F0\n", "row 1, column 2: '1SEND_F0' is a communication action"),
        ('"0F0\n', "not CSV: unexpected end of data; write one row per device"),
        ("0F0\r0B0\n", "not CSV: new-line character"),
        ("0F0," + "x" * 200_000, "not CSV: field larger than field limit"),
    ],
    ids=range(11),
)
def test_a_wrong_cell_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleFormatError) as caught:
        load_csv(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@given(st.text())
def test_no_text_ends_in_anything_but_programs_or_our_own_error(text: str) -> None:
    try:
        rows = load_csv(text)
    except ScheduleFormatError:
        return
    assert load_csv(dump_csv(rows)) == rows


def test_a_byte_order_mark_of_a_spreadsheet_is_read_over() -> None:
    assert load_csv("\ufeff0F0,0B0\n") == load_csv("0F0,0B0\n")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0OFFLOAD0 0B0"], "row 1, column 2: torch's runtime has no OFFLOAD (0OFFLOAD0)"),
        (["0F0 0B0", "1F0 1RELEASE0"], "row 2, column 2: torch's runtime has no RELEASE"),
        (["0F0 0RELOAD0"], "row 1, column 2: torch's runtime has no RELOAD"),
        (["0F0 0RECOMPUTE0 0B0"], "row 1, column 2: torch's runtime has no RECOMPUTE"),
        (["0F1 0F0", "1F0 1F2 1F1"], "row 2, column 2: 1F2 stands where torch's runtime expects"),
        (["0F0 1F1 1F0 0F1"], "row 1, column 2: 1F1 stands where torch's runtime expects 1F0"),
        (["0F0 0B0", ""], "row 2 is empty, but torch's runtime needs an action on every rank"),
    ],
)
def test_what_torch_would_not_run_right_is_refused_for_it_alone(
    rows: list[str], message: str
) -> None:
    with pytest.raises(ScheduleFormatError) as caught:
        dump_csv(programs(*rows), for_torch=True)
    assert str(caught.value).startswith(message)
    assert load_csv(dump_csv(programs(*rows))) == programs(*rows)


@given(cases())
def test_for_torch_a_schedule_is_refused_or_written_as_ever(case: Case) -> None:
    """Refused where it holds an action of our own, or the last stage leaves the order."""
    last = len(case.problem.stages) - 1
    cells = [action for row in case.programs for action in row]
    forwards = [a.microbatch for a in cells if a.stage == last and a.type is ActionType.FORWARD]
    runs = forwards == sorted(forwards) and all(action.type.value in "FIWB" for action in cells)
    if runs and all(case.programs):
        assert dump_csv(case.programs, for_torch=True) == dump_csv(case.programs)
    else:
        with pytest.raises(ScheduleFormatError):
            dump_csv(case.programs, for_torch=True)
