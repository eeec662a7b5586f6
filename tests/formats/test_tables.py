"""Rows of a comparison as Markdown, CSV and JSON.

Tables of sweeps: CSV that is read back as it was, Markdown for people.
"""

import csv
import io
import json
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optpipe.errors import InputError
from optpipe.formats.tables import (
    SweepRow,
    comparison_columns,
    dump_comparison,
    dump_sweep,
    load_sweep_csv,
)

GIB = 1024**3
NUMBERS = {
    "seconds": 0.125,
    "makespan_ms": 1234.56,
    "span_ms": 1200.0,
    "makespan_bubble": 0.25,
    "span_bubble": 0.2,
    "p50_ms": 1240.0,
    "p95_ms": 1300.0,
    "peak_bytes": 3 * GIB // 2,
    "host_peak_bytes": 0,
}


def row(method: str, **changes: Any) -> dict[str, Any]:
    """A row with a schedule, as given, within the limit."""
    return {
        "method": method,
        "placement": "as given",
        "programs": [["0F0", "0B0"]],
        **NUMBERS,
        "over_limit": False,
        "tokens_per_s": None,
        "mfu": None,
        "reason": "",
        **changes,
    }


def absent(method: str, reason: str) -> dict[str, Any]:
    """A row without a schedule; its numbers mean nothing."""
    return row(method, programs=None, **dict.fromkeys(NUMBERS, 0.0), reason=reason)


ROWS = [
    row("best", tokens_per_s=12345.6),
    row("big", peak_bytes=100 * GIB, span_bubble=-2.2e-16, over_limit=True),
    absent("none", "needs a | loop\nplacement"),
]


def test_markdown_has_a_line_per_row_and_says_why_in_the_last_column() -> None:
    """Sizes share one unit; what nobody told is no column; cells cannot break the table, and a
    bubble that is 0 but for rounding is 0.0."""
    header, rule, *lines = dump_comparison(ROWS, "markdown").splitlines()
    assert header == (
        "| method | makespan ms | bubble % | span ms | bubble % | P50 ms | P95 ms | memory GiB "
        "| host B | tokens /s | took s | remark |"
    )
    assert rule.count("---") == header.count("|") - 1
    assert lines == [
        "| best | 1,234.6 | 25.0 | 1,200.0 | 20.0 | 1,240.0 | 1,300.0 | 1.5 | 0 | 12,346 | 0.12 "
        "|  |",
        "| big | 1,234.6 | 25.0 | 1,200.0 | 0.0 | 1,240.0 | 1,300.0 | 100.0 | 0 | - | 0.12 "
        "| over the memory limit |",
        r"| none | - | - | - | - | - | - | - | - | - | 0.00 | needs a \| loop placement |",
    ]


def test_csv_has_plain_numbers_and_leaves_unknown_ones_empty() -> None:
    best, big, none = csv.DictReader(io.StringIO(dump_comparison(ROWS, "csv")))
    assert float(best["makespan_ms"]) == 1234.56
    assert (best["tokens_per_s"], big["tokens_per_s"], best["mfu"]) == ("12345.6", "", "")
    assert (best["over_limit"], big["over_limit"]) == ("False", "True")
    assert {name: value for name, value in none.items() if value} == {
        "method": "none",
        "placement": "as given",
        "seconds": "0.0",
        "reason": "needs a | loop\nplacement",
    }


def test_json_is_the_rows_and_never_nan() -> None:
    assert json.loads(dump_comparison(ROWS, "json")) == {"rows": ROWS}
    with pytest.raises(ValueError, match="JSON compliant"):
        dump_comparison([row("bad", makespan_ms=float("nan"))], "json")


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"placement": "v x2"}, "placement"), ({"mfu": 0.5}, "MFU"), ({"tokens_per_s": 1}, "tokens")],
)
def test_columns_that_say_nothing_are_left_out(changes: dict[str, Any], name: str) -> None:
    assert name not in [column.name for column in comparison_columns([row("a")])]
    assert name in [column.name for column in comparison_columns([row("a"), row("b", **changes)])]


def sweep_row(index: int = 0, values: dict[str, Any] | None = None, **fields: Any) -> SweepRow:
    row: dict[str, Any] = {
        "index": index,
        "values": {"memory_scale": 0.5, "placement": "v"} if values is None else values,
        "name": "p",
        "state": "succeeded",
        "objective_ms": 1234.5,
        "bound_ms": 1200.0,
        "gap": 0.028,
        "memory_bytes": 3 * 1024**3,
        "seconds": 1.5,
        "problem_hash": "sha256:0",
        "job_id": None,
        "message": None,
    }
    return cast("SweepRow", row | fields)


FAILED = sweep_row(
    1,
    {"memory_scale": 0.1, "placement": [0, 1, 1, 0]},
    state="infeasible",
    objective_ms=None,
    bound_ms=None,
    gap=None,
    message="no schedule fits,\nsays | it",
)


def test_csv_has_a_column_per_axis_and_is_read_back() -> None:
    text = dump_sweep([sweep_row(), FAILED], "csv")
    first, second, *_ = text.splitlines()
    assert first == (
        "index,name,memory_scale,placement,state,objective_ms,bound_ms,gap,memory_bytes,seconds,"
        "problem_hash,job_id,message"
    )
    assert second == ("0,p,0.5,v,succeeded,1234.5,1200.0,0.028,3221225472,1.5,sha256:0,,")
    assert load_sweep_csv(text) == [sweep_row(), FAILED]


def test_markdown_is_for_people() -> None:
    """Units and shares; no hash, no id; nothing in a cell breaks the table."""
    lines = dump_sweep([sweep_row(), FAILED], "markdown").splitlines()
    assert lines[0].startswith("| memory_scale | placement | state | memory | objective ms |")
    assert lines[1].startswith("| ---: | --- | --- | ---: |")
    assert lines[2] == ("| 0.5 | v | succeeded | 3.0 GiB | 1,234.5 | 1,200.0 | 2.8% | 1.5 |  |")
    assert lines[3].startswith("| 0.1 | [0, 1, 1, 0] | infeasible | 3.0 GiB | - | - | - | 1.5 |")
    assert lines[3].endswith(r"| no schedule fits, says \| it |")


def test_without_axes_rows_are_told_by_their_names() -> None:
    lines = dump_sweep([sweep_row(values={}), sweep_row(1, {}, name="")], "markdown").splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["problem", "---", "p", "#1"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=9),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


AXIS = st.text("ab[*].,\"'0 é", max_size=5)


@given(st.lists(st.dictionaries(AXIS, JSON, max_size=3), min_size=1, max_size=4))
@example([{"a": "12"}, {"a": 12}, {"a": "null"}, {"a": '"x"'}, {"a": ""}])
@example([{"name": 7}, {"state": 7, "index": 7}, {"gap": 7}])
def test_any_values_on_any_axes_are_read_back(values: list[dict[str, Any]]) -> None:
    """An axis may be called as a column is."""
    rows = [sweep_row(index, value) for index, value in enumerate(values)]
    assert load_sweep_csv(dump_sweep(rows, "csv")) == rows


def test_line_ends_in_texts_leave_the_table_readable() -> None:
    """A lone carriage return would end a line for some readers, and is an error for others."""
    (read,) = load_sweep_csv(dump_sweep([sweep_row(name="a\rb\nc", message="x\r\ny")], "csv"))
    assert (read["name"], read["message"]) == ("a b\nc", "x \ny")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not that of a sweep's table"),
        ("a,b\n1,2\n", "not that of a sweep's table: 'a, b'"),
        (dump_sweep([sweep_row()], "csv").replace("1234.5", "x"), "damaged"),
        (dump_sweep([sweep_row()], "csv") + "1,2\n", "damaged"),
        ("x" * 200_000, "no CSV"),
    ],
)
def test_another_table_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_sweep_csv(text)
