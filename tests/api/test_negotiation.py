"""JSON or CSV: what an Accept header asks for."""

from __future__ import annotations

import pytest

from optpipe_api.errors import NotAcceptableError
from optpipe_api.negotiation import TABLE_FORMS, preferred_form


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, "json"),
        ("*/*", "json"),
        ("text/csv", "csv"),
        ("text/*", "csv"),
        ("application/json, text/csv;q=0.9", "json"),
        ("application/json;q=0.1, text/csv;q=0.9", "csv"),
        ("*/*;q=0.5, text/csv", "csv"),
        ("application/json;q=0, */*", "csv"),
        ("TEXT/CSV; Q=1", "csv"),
    ],
)
def test_the_best_liked_form_is_chosen(accept: str | None, form: str) -> None:
    assert preferred_form(accept) == form


@pytest.mark.parametrize(
    ("accept", "form"), [(None, "json"), ("text/*", "csv"), ("text/markdown", "markdown")]
)
def test_tables_come_as_markdown_too(accept: str | None, form: str) -> None:
    assert preferred_form(accept, TABLE_FORMS) == form


@pytest.mark.parametrize("accept", ["image/png", "*/*;q=0", "text/csv;q=x", ";;,"])
def test_an_accept_without_our_forms_is_refused(accept: str) -> None:
    with pytest.raises(NotAcceptableError, match=r"application/json, text/csv"):
        preferred_form(accept)
