"""Entity tags of things that come in numbered versions: ``"<id>.<number>"``.

One URL answers in several forms, and each form of a version has a tag of its own: JSON's has no
suffix, the others have ``.csv`` and so on.
"""

from __future__ import annotations

import re

__all__ = ["etag_of", "known_number"]

_TAG = re.compile(r'(?:W/)?"([^"]*)"')
_DIGITS = r"([0-9]{1,15})"


def etag_of(thing_id: str, number: int, form: str = "json") -> str:
    """Return the tag of a version in a form, with its quotes."""
    return f'"{thing_id}.{number}{_suffix(form)}"'


def known_number(if_none_match: str | None, thing_id: str, form: str = "json") -> int | None:
    """Return the newest version that a client has in this form, by its If-None-Match header.

    None where it has none of this thing. Tags that `etag_of` did not make count for nothing, and
    so does ``*``: which version that is, nobody knows.
    """
    ours = re.compile(rf"{re.escape(thing_id)}\.{_DIGITS}{re.escape(_suffix(form))}")
    found = (ours.fullmatch(tag) for tag in _TAG.findall(if_none_match or ""))
    return max((int(match[1]) for match in found if match), default=None)


def _suffix(form: str) -> str:
    return "" if form == "json" else f".{form}"
