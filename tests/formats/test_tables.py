"""Rows of a comparison as Markdown, CSV and JSON."""

import csv
import io
import json
from typing import Any

import pytest

from optpipe.formats.tables import comparison_columns, dump_comparison

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
    row("big", peak_bytes=100 * GIB, over_limit=True),
    absent("none", "needs a | loop\nplacement"),
]


def test_markdown_has_a_line_per_row_and_says_why_in_the_last_column() -> None:
    """Sizes share one unit; what nobody told is no column; cells cannot break the table."""
    header, rule, *lines = dump_comparison(ROWS, "markdown").splitlines()
    assert header == (
        "| method | makespan ms | bubble % | span ms | bubble % | P50 ms | P95 ms | memory GiB "
        "| host B | tokens /s | took s | remark |"
    )
    assert rule.count("---") == header.count("|") - 1
    assert lines == [
        "| best | 1,234.6 | 25.0 | 1,200.0 | 20.0 | 1,240.0 | 1,300.0 | 1.5 | 0 | 12,346 | 0.12 "
        "|  |",
        "| big | 1,234.6 | 25.0 | 1,200.0 | 20.0 | 1,240.0 | 1,300.0 | 100.0 | 0 | - | 0.12 "
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
