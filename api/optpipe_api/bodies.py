"""Request bodies: never more than the limit in memory, strictly JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optpipe.formats.json_text import parse_json
from optpipe_api.errors import BodyTooLargeError, MediaTypeError, RequestError

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["MAX_VALUES", "decode_json", "read_body", "require_json"]

MAX_VALUES = 100_000
"""Of one problem: a hundred devices have ten thousand links, of some four values each."""

_COUNTED = {b",": "values", b"{": "objects", b"[": "lists"}


def require_json(request: Request) -> None:
    """Refuse a body that is not declared as JSON.

    A page of some other site may make a browser send forms and plain text here, but not JSON.

    Raises
    ------
    MediaTypeError
        If it is declared otherwise, or not at all.
    """
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise MediaTypeError(
            f"Content-Type {declared[:80]!r} is not JSON; send Content-Type: application/json"
        )


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body.

    Raises
    ------
    BodyTooLargeError
        As soon as it is known to be larger than ``max_bytes``: before the first byte where its
        length is declared. What still comes is thrown away by uvicorn, so that a client which
        sends everything before it reads still gets the refusal.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(f"{declared[:20]} bytes are declared", max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large("it is larger", max_bytes)
    return bytes(body)


def decode_json(body: bytes, max_values: int = MAX_VALUES) -> Any:
    """Return the object of a strict JSON body.

    Parameters
    ----------
    max_values
        Most values that it may hold; a fifth as many may be lists, and a fifth objects.

    Raises
    ------
    RequestError
        If it is not UTF-8, not JSON, or says a thing twice.
    BodyTooLargeError
        If it holds more values. They are counted before it is read, by their commas and brackets:
        to find millions of faults in a body takes minutes, however few bytes say them.
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
    return parse_json(text, RequestError)


def _too_large(what: str, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body may have {max_bytes} bytes (OPTPIPE_MAX_BODY_BYTES), but {what}; "
        "send a smaller problem"
    )
