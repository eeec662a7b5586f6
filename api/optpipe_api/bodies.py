"""Request bodies: never more than the limit in memory, strictly JSON."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from optpipe.errors import RequestError
from optpipe.formats.json import parse_json
from optpipe_api.errors import (
    BodyTooLargeError,
    MediaTypeError,
    NotAcceptableError,
    TooManyBodiesError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from starlette.requests import Request

__all__ = [
    "FORMS",
    "FRONTIER_FORMS",
    "MAX_VALUES",
    "TABLE_FORMS",
    "UnreadBodies",
    "decode_json",
    "etag_of",
    "is_known",
    "known_number",
    "preferred_form",
    "read_body",
    "require_json",
]


MAX_VALUES = 100_000
"""Of one problem: a hundred devices have ten thousand links, of some four values each."""

_COUNTED = {b",": "values", b"{": "objects", b"[": "lists"}


def require_json(request: Request) -> None:
    """Refuse a body that is not declared as JSON.

    A page of some other site may make a browser send forms and plain text here, but not JSON.

    Raises `MediaTypeError` if it is declared otherwise, or not at all.
    """
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise MediaTypeError(
            f"Content-Type {declared[:80]!r} is not JSON; send Content-Type: application/json"
        )


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body.

    Raises `BodyTooLargeError` as soon as it is known to be larger than ``max_bytes``: before the
    first byte where its length is declared. What still comes is thrown away by uvicorn, so that a
    client which sends everything before it reads still gets the refusal.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(f"{declared[:20]} bytes are declared", max_bytes)
    body = bytearray()
    unread: UnreadBodies = request.app.state.unread
    try:
        with unread.holding() as hold:
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large("it is larger", max_bytes)
                hold(len(chunk))
    except ClientDisconnect:
        raise RequestError("the body ends before its end; send it again") from None
    return bytes(body)


class UnreadBodies:
    """How many bytes of bodies may be here in part, waiting for the rest; for the event loop.

    Whoever sends most of a large body and stops would have us keep it until its time is over; so
    beyond ``most_bytes`` together large bodies are refused, and small ones are not.
    """

    _SMALL = 64 * 1024

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._num_bytes = 0
        self._num_bodies = 0

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Count a body until the block ends; yields what counts that many bytes more of it.

        That raises `TooManyBodiesError` if there are too many, and this body is no small one.
        """
        length = 0
        self._num_bodies += 1

        def hold(more: int) -> None:
            nonlocal length
            length += more
            self._num_bytes += more
            if self._num_bytes > self._most and length > self._SMALL:
                raise TooManyBodiesError(self._num_bodies)

        try:
            yield hold
        finally:
            self._num_bytes -= length
            self._num_bodies -= 1


def decode_json(body: bytes, max_values: int = MAX_VALUES, *, takes_constants: bool = False) -> Any:
    """Return the object of a strict JSON body.

    Values are counted before the body is parsed, by its commas and brackets: to find millions of
    faults in a body takes minutes, however few bytes say them.

    Parameters
    ----------
    max_values
        Most values that the body may hold; a fifth as many may be lists, and a fifth objects.
    takes_constants
        As `parse_json`: for a body with a model's ``config``, which may hold ``Infinity``.

    Raises
    ------
    RequestError
        If the body is not UTF-8, not JSON, or has a key twice.
    BodyTooLargeError
        If the body holds more values.
    """
    for sign, limit in ((b",", max_values), (b"{", max_values // 5), (b"[", max_values // 5)):
        if body.count(sign) > limit:
            raise BodyTooLargeError(
                f"the body holds more than {limit} {_COUNTED[sign]}, the limit of this service; "
                "send a smaller problem"
            )
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8 text (byte {error.start}); encode it as UTF-8"
        ) from None
    return parse_json(text, RequestError, takes_constants=takes_constants)


def _too_large(what: str, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body may have {max_bytes} bytes (OPTPIPE_MAX_BODY_BYTES), but {what}; "
        "send a smaller problem"
    )


# --- Which form of an answer a client wants: ``?format=``, else ``Accept``.

_PLAIN_FORMS = {"json": "application/json", "csv": "text/csv"}

FORMS = {**_PLAIN_FORMS, "trace": "application/vnd.optpipe.trace+json", "svg": "image/svg+xml"}
"""Of schedules: name in ``?format=`` -> media type, in order of our preference."""

TABLE_FORMS = {**_PLAIN_FORMS, "markdown": "text/markdown"}
"""Of comparisons and batches, likewise."""

FRONTIER_FORMS = {"json": "application/json", "svg": "image/svg+xml"}
"""Of the frontier of a batch, likewise."""


def preferred_form(accept: str | None, forms: Mapping[str, str] = FORMS) -> str:
    """Return the name of the form that an Accept header likes best; JSON where it does not care.

    Raises `NotAcceptableError` if it takes none of ours.
    """
    if not accept:
        return "json"
    weights = {name: _weight(accept, media_type) for name, media_type in forms.items()}
    best = max(weights, key=lambda name: weights[name])
    if weights[best] <= 0:
        raise NotAcceptableError(
            f"Accept {accept[:80]!r} takes none of {', '.join(forms.values())}; ask for one"
        )
    return best


def _weight(accept: str, media_type: str) -> float:
    """Return the q of the most specific range that covers a media type; 0 where none does."""
    ranges = {media_type: 3, f"{media_type.partition('/')[0]}/*": 2, "*/*": 1}
    found: tuple[int, float] = (0, 0.0)
    for item in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in item.split(";"))
        if kind in ranges:
            found = max(found, (ranges[kind], _quality(parameters)))
    return found[1]


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return min(1.0, max(0.0, float(parameter[2:])))
            except ValueError:
                return 0.0
    return 1.0


# --- Entity tags of things that come in numbered versions: ``"<id>.<number>"``.
# One URL answers in several forms, and each form of a version has a tag of its own: JSON's has no
# suffix, the others have ``.csv`` and so on.

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


def is_known(if_none_match: str | None, etag: str) -> bool:
    """Whether an If-None-Match header names a tag, given with its quotes; ``*`` names all."""
    given = (if_none_match or "").strip()
    return given == "*" or etag.strip('"') in _TAG.findall(given)


def _suffix(form: str) -> str:
    return "" if form == "json" else f".{form}"
