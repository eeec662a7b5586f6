"""Sentences about what was asked, for each who asks."""

from __future__ import annotations

import inspect

import pytest

from optpipe.cli.estimate import estimate_problem
from optpipe.presets import AskedError, AskedSentence, Training, estimate
from optpipe.presets.shape import Field, flag, plain


def test_a_sentence_names_fields_as_the_asker_knows_them() -> None:
    """Names and values over HTTP and in Python, flags on the command line."""
    sentence = AskedSentence(
        (Field("tp", 3), " does not divide 32; lower ", Field("num_microbatches"))
    )
    assert str(sentence) == "tp = 3 does not divide 32; lower num_microbatches"
    assert sentence.told(flag) == "--tp 3 does not divide 32; lower --microbatches"
    assert sentence.told(plain) == str(sentence)


def test_an_error_is_its_plain_sentence() -> None:
    """Who does not know the parts reads it like any other error."""
    with pytest.raises(AskedError, match=r"^zero = 7: must be 0, 1 or 2; choose one$") as caught:
        Training(zero=7)
    assert caught.value.sentence.told(flag).startswith("--zero 7:")


def test_every_field_has_a_flag() -> None:
    """A sentence never sends people to an option that the command has not."""
    fields = {*inspect.signature(estimate).parameters, *Training.__dataclass_fields__}
    not_asked = {"shape", "hardware", "training", "efficiency"}
    flags = {flag(Field(name)) for name in fields - not_asked}
    options = {
        f"--{name.replace('_', '-')}" for name in inspect.signature(estimate_problem).parameters
    }
    assert flags <= options
