"""Request bodies within limits, the form of an answer, entity tags, and cursors of pages."""

from __future__ import annotations

import hashlib
import hmac
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from optpipe.errors import InputError, RequestError
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
    "FRONTIER_FORMS",
    "MAX_VALUES",
    "SCHEDULE_FORMS",
    "TABLE_FORMS",
    "Cursors",
    "UnreadBodies",
    "decode_json",
    "etag_of",
    "is_known",
    "known_number",
    "preferred_form",
    "read_json_body",
]


MAX_VALUES = 100_000
"""Limit for one problem: a hundred devices have ten thousand links of about four values each."""


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request that declares JSON.

    uvicorn discards the rest of a refused body. A client that sends everything before it reads
    therefore still gets the refusal.

    Raises `MediaTypeError` if the Content-Type is not JSON or the body is encoded. Raises
    `BodyTooLargeError` as soon as the body is known to be larger than ``max_bytes``. Raises
    `TooManyBodiesError` as `UnreadBodies.counted`. Raises `RequestError` if the client disconnects
    before the end of the body.
    """
    # A browser lets pages of other sites send forms and plain text to this service, but not JSON.
    declared_type = request.headers.get("content-type", "")
    media_type = declared_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise MediaTypeError(
            f"Content-Type {declared_type[:80]!r} is not JSON; send Content-Type: application/json"
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise MediaTypeError(
            f"Content-Encoding {encoding[:80]!r} is not read; send the body without it"
        )
    declared_length = request.headers.get("content-length", "")[:20]
    if declared_length.isdecimal() and int(declared_length) > max_bytes:
        raise _body_too_large(f"{declared_length} bytes are declared", max_bytes)
    body = bytearray()
    unread: UnreadBodies = request.app.state.unread
    try:
        with unread.counted() as count:
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _body_too_large("it is larger", max_bytes)
                count(len(chunk))
    except ClientDisconnect:
        raise RequestError("the body ends before its end; send it again") from None
    return bytes(body)


def _body_too_large(fact: str, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body may have {max_bytes} bytes (OPTPIPE_MAX_BODY_BYTES), but {fact}; "
        "send a smaller problem"
    )


class UnreadBodies:
    """Limits the bytes of incomplete bodies in memory; for the event loop.

    A client may send most of a large body and then pause until its timeout. Above ``max_bytes`` in
    total, large bodies are refused and small ones are still read.
    """

    _SMALL_BYTES = 64 * 1024

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_bodies = 0

    @contextmanager
    def counted(self) -> Iterator[Callable[[int], None]]:
        """Count a body until the block ends; yields the function that counts its next bytes.

        That function raises `TooManyBodiesError` if the limit is exceeded and this body is large.
        """
        length = 0
        self._num_bodies += 1

        def count(num_bytes: int) -> None:
            nonlocal length
            length += num_bytes
            self._num_bytes += num_bytes
            if self._num_bytes > self._max_bytes and length > self._SMALL_BYTES:
                raise TooManyBodiesError(self._num_bodies)

        try:
            yield count
        finally:
            self._num_bytes -= length
            self._num_bodies -= 1


def decode_json(body: bytes, max_values: int = MAX_VALUES, *, takes_constants: bool = False) -> Any:
    """Return the value of a strict JSON body.

    The limits are checked before parsing, by counting commas and brackets: a small body can have
    millions of faults, and to list them takes minutes.

    Parameters
    ----------
    max_values
        Maximum number of values; at most a fifth as many objects, and a fifth as many lists.
    takes_constants
        As in `parse_json`: true for a body with the ``config`` of a model, which may hold
        ``Infinity``.

    Raises
    ------
    RequestError
        If the body is not UTF-8, not JSON, or repeats a key in an object.
    BodyTooLargeError
        If the body holds more values.
    """
    few = max_values // 5
    for sign, noun, limit in (
        (b",", "values", max_values),
        (b"{", "objects", few),
        (b"[", "lists", few),
    ):
        if body.count(sign) > limit:
            raise BodyTooLargeError(
                f"the body holds more than {limit} {noun}, the limit of this service; "
                "send a smaller problem"
            )
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8 text (byte {error.start}); encode it as UTF-8"
        ) from None
    return parse_json(text, RequestError, takes_constants=takes_constants)


# --- The form of an answer: `?format=`, else the Accept header.

_PLAIN_FORMS = {"json": "application/json", "csv": "text/csv"}

SCHEDULE_FORMS = {
    **_PLAIN_FORMS,
    "trace": "application/vnd.optpipe.trace+json",
    "svg": "image/svg+xml",
}
"""Forms of a schedule: value of `?format=` -> media type, in the order of our preference."""

TABLE_FORMS = {**_PLAIN_FORMS, "markdown": "text/markdown"}
"""Forms of a comparison, and of the table of a batch."""

FRONTIER_FORMS = {"json": "application/json", "svg": "image/svg+xml"}
"""Forms of the frontier of a batch."""


def preferred_form(accept: str | None, forms: Mapping[str, str] = SCHEDULE_FORMS) -> str:
    """Return the form that an Accept header prefers; JSON if there is no header.

    Raises `NotAcceptableError` if the header accepts none of the forms.
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
    """Return the q of the most specific range that covers a media type; 0 if none does."""
    specificity = {media_type: 3, f"{media_type.partition('/')[0]}/*": 2, "*/*": 1}
    best: tuple[int, float] = (0, 0.0)
    for item in accept.split(","):
        media_range, *parameters = (part.strip().lower() for part in item.split(";"))
        if media_range in specificity:
            given = [part[2:] for part in parameters if part.startswith("q=")]
            try:
                quality = min(1.0, max(0.0, float(given[0]))) if given else 1.0
            except ValueError:
                quality = 0.0
            best = max(best, (specificity[media_range], quality))
    return best[1]


# --- Entity tags of documents with numbered versions: ``"<id>.<number>"``.
# A URL answers in several forms, and each form of a version has its own tag. The tag of JSON has no
# suffix, other forms have ``.csv`` and so on.

_TAG = re.compile(r'(?:W/)?"([^"]*)"')


def etag_of(document_id: str, number: int, form: str = "json") -> str:
    """Return the entity tag of a version in a form, with its quotes."""
    return f'"{document_id}.{number}{_suffix(form)}"'


def known_number(if_none_match: str | None, document_id: str, form: str = "json") -> int | None:
    """Return the newest version that a client has in this form, by its If-None-Match header.

    None if the header names no version of this document. Tags that `etag_of` cannot return are
    ignored, and ``*`` is ignored because it names no version.
    """
    ours = re.compile(rf"{re.escape(document_id)}\.([0-9]{{1,15}}){re.escape(_suffix(form))}")
    matches = map(ours.fullmatch, _TAG.findall(if_none_match or ""))
    return max((int(match[1]) for match in matches if match), default=None)


def is_known(if_none_match: str | None, etag: str) -> bool:
    """Return whether an If-None-Match header names a tag, given with its quotes; ``*`` does."""
    header = (if_none_match or "").strip()
    return header == "*" or etag.strip('"') in _TAG.findall(header)


def _suffix(form: str) -> str:
    return "" if form == "json" else f".{form}"


# --- Cursors of pages: positions in lists that a client cannot read.

_POSITION_BYTES = 8


class Cursors:
    """Encrypts positions: plain ones would say how many jobs other keys have submitted.

    A cursor is the tag of its position, and the position under a pad made from the tag. It stays
    valid when the job at its position is deleted. ``secret``: the same for all servers of a
    database.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def encode(self, position: int) -> str:
        plain = position.to_bytes(_POSITION_BYTES, "big")
        tag = self._digest(b"tag" + plain)
        return (tag + self._pad(tag, plain)).hex()

    def decode(self, cursor: str | None) -> int | None:
        """Return the position of a cursor; None without one. Raises `InputError`."""
        if cursor is None:
            return None
        data = bytes.fromhex(cursor)
        plain = self._pad(data[:_POSITION_BYTES], data[_POSITION_BYTES:])
        if not hmac.compare_digest(self._digest(b"tag" + plain), data[:_POSITION_BYTES]):
            raise InputError(
                f"cursor = {cursor!r}: is none of this service; take `next` of the page before"
            ).at("/query/cursor")
        return int.from_bytes(plain, "big")

    def _pad(self, tag: bytes, text: bytes) -> bytes:
        return bytes(a ^ b for a, b in zip(text, self._digest(b"pad" + tag), strict=True))

    def _digest(self, data: bytes) -> bytes:
        return hmac.new(self._secret, data, hashlib.sha256).digest()[:_POSITION_BYTES]
