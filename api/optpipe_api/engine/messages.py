"""What server and solver process say to each other: a JSON header and documents, in one frame.

A frame is eight bytes of length, then the header as one line of JSON, then the document as it is
(JSON text, which the server stores without looking inside). Where a plan speaks of a schedule, the
problem that it solves follows as a second document; the header then says how many bytes of the
rest are the first. Nothing is ever unpickled.

==========  =========  ==============================================  ==================
to          kind       header                                          document
==========  =========  ==============================================  ==================
process     job        options, has_start                              the problem
process     plan       options, has_start (instead of job)             the model
process     start      (follows either where has_start)                the last incumbent
process     stop       (finish now, keep the best)
process     compare    options (instead of job)                        the problem
server      ready      (imports are done)
server      progress   seconds, method, objective_ms, bound_ms         schedule, or empty
server      result     status, objective_ms, bound_ms, message, needs  schedule, or empty
server      rows       (the answer to compare)                         of the form asked
server      error      code, message
==========  =========  ==============================================  ==================
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FrameBuffer", "Message", "encode"]

_LENGTH_BYTES = 8
_FIRST = "document_bytes"


@dataclass(frozen=True, slots=True)
class Message:
    """One frame, taken apart.

    ``problem`` is what the schedule in ``document`` solves, where the search chose that too, and
    empty elsewhere.
    """

    kind: str
    header: dict[str, Any] = field(default_factory=dict)
    document: str = ""
    problem: str = ""


def encode(message: Message) -> bytes:
    """Return a message as one frame."""
    header, document = {"kind": message.kind, **message.header}, message.document.encode()
    if message.problem:
        header[_FIRST] = len(document)
    body = json.dumps(header).encode() + b"\n" + document + message.problem.encode()
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameBuffer:
    """Puts messages together from bytes as they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes in; return the messages that are now complete."""
        self._bytes += data
        complete = []
        while (body := self._next_body()) is not None:
            complete.append(_decode(body))
        return complete

    def _next_body(self) -> bytes | None:
        if len(self._bytes) < _LENGTH_BYTES:
            return None
        end = _LENGTH_BYTES + int.from_bytes(self._bytes[:_LENGTH_BYTES], "big")
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH_BYTES:end])
        del self._bytes[:end]
        return body


def _decode(body: bytes) -> Message:
    line, _, documents = body.partition(b"\n")
    header = json.loads(line)
    end = header.pop(_FIRST, len(documents))
    document, problem = documents[:end].decode(), documents[end:].decode()
    return Message(header.pop("kind"), header, document, problem)
