"""Cursors of pages: positions in lists that a client cannot read."""

from __future__ import annotations

import hashlib
import hmac

from optpipe.errors import InputError

__all__ = ["Cursors"]

_BYTES = 8


class Cursors:
    """Encrypts positions: plain ones would say how many jobs other keys have submitted.

    A cursor is the tag of its position, and the position under a pad made from the tag. It stays
    valid when the job at its position is deleted. ``secret``: the same for all servers of a
    database.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def encode(self, position: int) -> str:
        plain = position.to_bytes(_BYTES, "big")
        tag = self._digest(b"tag" + plain)
        return (tag + self._pad(tag, plain)).hex()

    def decode(self, cursor: str | None) -> int | None:
        """Return the position of a cursor; None without one. Raises `InputError`."""
        if cursor is None:
            return None
        data = bytes.fromhex(cursor)
        plain = self._pad(data[:_BYTES], data[_BYTES:])
        if not hmac.compare_digest(self._digest(b"tag" + plain), data[:_BYTES]):
            raise InputError(
                f"cursor = {cursor!r}: is none of this service; take `next` of the page before"
            ).at("/query/cursor")
        return int.from_bytes(plain, "big")

    def _pad(self, tag: bytes, text: bytes) -> bytes:
        return bytes(a ^ b for a, b in zip(text, self._digest(b"pad" + tag), strict=True))

    def _digest(self, data: bytes) -> bytes:
        return hmac.new(self._secret, data, hashlib.sha256).digest()[:_BYTES]
