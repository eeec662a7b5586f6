"""Request bodies: never more than the limit in memory, strictly JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optpipe.formats.json_text import parse_json
from optpipe_api.errors import BodyTooLargeError, MediaTypeError, RequestError

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["decode_json", "read_body", "require_json"]


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


def decode_json(body: bytes) -> Any:
    """Return the object of a strict JSON body.

    Raises
    ------
    RequestError
        If it is not UTF-8, not JSON, or says a thing twice.
    """
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
