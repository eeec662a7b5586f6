"""Names of methods, as the field writes them."""

from __future__ import annotations

import pytest

from optpipe.plot.methods import TITLES, title_of
from optpipe_solver import METHODS


def test_every_method_has_a_name_of_its_own() -> None:
    """A new family is not forgotten, and none is shown under another's name."""
    assert set(METHODS) <= set(TITLES)
    assert len(set(TITLES.values())) == len(TITLES)


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("1f1b", "1F1B"),
        ("zb-h1+offload", "ZB-H1 + offload"),
        ("plan+v-half", "plan + V-Half"),
        ("given schedule", "given schedule"),
        ("", ""),
    ],
)
def test_a_method_is_shown_as_the_field_writes_it(method: str, title: str) -> None:
    """What is put together of several keeps its parts."""
    assert title_of(method) == title
