"""JSON or CSV: what an Accept header asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe_api.bodies import TABLE_FORMS, etag_of, known_number, preferred_form
from optpipe_api.errors import NotAcceptableError


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


# Entity tags: what a client has is read back from its If-None-Match.


ID = "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b"
FORMS = st.sampled_from(["json", "csv", "trace", "svg"])


@given(st.lists(st.integers(0, 10**15 - 1), min_size=1), FORMS, st.sampled_from([", ", ",", " , "]))
def test_the_newest_of_the_tags_sent_is_what_a_client_has(numbers, form, comma) -> None:
    tags = [("W/" if number % 2 else "") + etag_of(ID, number, form) for number in numbers]
    assert known_number(comma.join(tags), ID, form) == max(numbers)


@given(st.integers(0, 10**9), FORMS, FORMS)
def test_each_form_has_tags_of_its_own(number, one, other) -> None:
    assert known_number(etag_of(ID, number, one), ID, other) == (number if one == other else None)


@pytest.mark.parametrize("header", [None, "", "*", "W/", '"x"', f'"{ID}."', f'"{ID}.-1"', '"'])
def test_other_tags_count_for_nothing(header) -> None:
    assert known_number(header, ID) is None
    assert known_number(etag_of("another", 3), ID) is None


@given(st.text())
def test_no_header_is_an_error(header) -> None:
    known_number(header, ID)
