"""Entity tags: what a client has is read back from its If-None-Match."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe_api.etags import etag_of, known_number

ID = "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b"
FORMS = st.sampled_from(["json", "csv", "trace", "svg"])


@given(st.lists(st.integers(0, 10**15 - 1), min_size=1), FORMS, st.sampled_from([", ", ",", " , "]))
def test_the_newest_of_the_tags_sent_is_what_a_client_has(numbers, form, comma) -> None:
    """Weak or strong, one or several."""
    tags = [("W/" if number % 2 else "") + etag_of(ID, number, form) for number in numbers]
    assert known_number(comma.join(tags), ID, form) == max(numbers)


@given(st.integers(0, 10**9), FORMS, FORMS)
def test_each_form_has_tags_of_its_own(number, one, other) -> None:
    """A client that has the CSV does not have the JSON."""
    assert known_number(etag_of(ID, number, one), ID, other) == (number if one == other else None)


@pytest.mark.parametrize("header", [None, "", "*", "W/", '"x"', f'"{ID}."', f'"{ID}.-1"', '"'])
def test_other_tags_count_for_nothing(header) -> None:
    """Neither those of other things nor what is no tag at all."""
    assert known_number(header, ID) is None
    assert known_number(etag_of("another", 3), ID) is None


@given(st.text())
def test_no_header_is_an_error(header) -> None:
    """Whatever a client sends."""
    known_number(header, ID)
