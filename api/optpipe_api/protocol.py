"""HTTP/1.1 on one connection, with limits on what a client may make the server keep."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from optpipe_api.errors import HeadersTooLargeError, TooManyPipelinedError
from optpipe_api.http_errors import response_to

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from optpipe.errors import OptPipeError

__all__ = ["Protocol"]

_PART_BYTES = 16 * 1024
"""Received bytes that the parser gets in one call, so that a header is refused before it grows."""

_SEND_BUFFER_BYTES = 128 * 1024
"""For ``SO_SNDBUF``; without it, Linux keeps 3 MB of unread answers for each connection."""

_NO_LINGER = struct.pack("ii", 1, 0)
"""For ``SO_LINGER``: closing resets the connection and drops what was not sent."""


class Protocol(HttpToolsProtocol):
    """Limit the bytes, the waiting requests and the time of each connection.

    `docs/service.md` lists the limits. An error is the answer to the first request that has none.
    If that answer has begun, the connection closes.

    uvicorn's h11 protocol would need less code. There, chunks of one byte raise the 99th percentile
    of a normal client 602 times, to 12.2 s. Here they raise it 1.0 to 19 times in five runs, to
    at most 0.83 s. With h11 the service also served 16% fewer requests, 1,176 a second instead of
    1,398.
    Source: ``python -m benchmarks.hostile_clients --seconds 6``, 2026-11-30, two busy cores.
    """

    HEADERS_S, BODY_S, WRITE_S, IDLE_S = 10.0, 60.0, 20.0, 1.0
    HEADER_BYTES, HEADER_FIELDS, PIPELINED = 64 * 1024, 200, 4

    url = b""
    _answering: RequestResponseCycle | None = None
    _error: OptPipeError | None = None
    _header_bytes = _header_fields = 0
    _unparsed_bytes = 0
    """Bytes that were received since the parser last reported a field or a part of a body."""
    _unsent_bytes: int | None = None
    """Bytes that waited to be sent at the last check, if no answer was written since."""
    _headers_complete = _closes_after_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request; if all connections are in use, close idle ones or this one."""
        super().connection_made(transport)
        self._serve, self.app = self.app, self._serve_unless_refused
        self._active_at = self.loop.time()
        self._deadline = self.loop.call_later(self.HEADERS_S, self.abort)
        self._check_writing()
        self._set_option(socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # uvicorn answers 503 to every request while the connections are as many as the limit.
        limit = self.limit_concurrency or sys.maxsize
        if len(self.connections) >= limit:
            for connection in list(self.connections):
                if isinstance(connection, Protocol) and connection.is_idle():
                    connection.abort()
        if len(self.connections) >= limit:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._write_check.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection now; neither this process nor the kernel sends the rest."""
        self.connections.discard(self)
        self._set_option(socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def is_idle(self) -> bool:
        """Return whether the server has waited for the client for more than ``IDLE_S``."""
        answering = self._answering
        return self.loop.time() - self._active_at > self.IDLE_S and (
            answering is None
            or answering.response_complete
            or answering.more_body
            or self.flow.write_paused
            or self.transport.is_closing()
        )

    def _set_option(self, option: int, value: int | bytes) -> None:
        # Some systems refuse options of a connection that the client has already ended.
        with suppress(OSError):
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, value)

    def _set_deadline(self, seconds: float) -> None:
        self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.abort)

    # --- Requests: the parser calls the functions `on_...`

    def data_received(self, data: bytes) -> None:
        self._active_at = self.loop.time()
        for start in range(0, len(data), _PART_BYTES):
            part = data[start : start + _PART_BYTES]
            if not self.transport.is_closing():
                self._unparsed_bytes += len(part)
                super().data_received(part)
            if self._unparsed_bytes > self.HEADER_BYTES and not self.transport.is_closing():
                self._headers_error(self._unparsed_bytes)
                self.send_400_response("")
        is_answered = self._answering is None or self._answering.response_complete
        if is_answered and not self.pipeline and self._deadline.cancelled():
            # The next request on this connection, or an empty line before it.
            self._set_deadline(self.HEADERS_S)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._header_fields = self._unparsed_bytes = 0
        self._headers_complete = False

    def on_url(self, url: bytes) -> None:
        self._count(len(url), 0)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or trailer; a trailer is not passed on to the application."""
        self._count(len(name) + len(value) + 4, 1)
        if not self._headers_complete:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the answer, unless too many requests wait on this connection."""
        self._unparsed_bytes = 0
        self._headers_complete = True
        if len(self.pipeline) >= self.PIPELINED:
            self._error = TooManyPipelinedError(self.PIPELINED)
            # The parser stops at an exception, and uvicorn then calls `send_400_response`.
            raise self._error
        super().on_headers_complete()
        self.cycle.transport = _AnswerTransport(self)  # type: ignore[assignment]
        if not self.pipeline:
            self._answering = self.cycle
        self._set_deadline(self.BODY_S)

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        self._headers_complete = False
        self._deadline.cancel()
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()

    def close_after_body(self) -> None:
        """Close when the request is complete, or the client's system could drop the answer."""
        self._closes_after_body = self._headers_complete
        if not self._closes_after_body:
            self.transport.close()

    def _count(self, num_bytes: int, num_fields: int) -> None:
        self._unparsed_bytes = 0
        self._header_bytes += num_bytes
        self._header_fields += num_fields
        if self._header_bytes > self.HEADER_BYTES or self._header_fields > self.HEADER_FIELDS:
            raise self._headers_error(self._header_bytes)

    def _headers_error(self, num_bytes: int) -> OptPipeError:
        limits = self.HEADER_BYTES, self.HEADER_FIELDS
        self._error = HeadersTooLargeError(num_bytes, self._header_fields, *limits)
        return self._error

    # --- Answers

    async def _serve_unless_refused(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._error is None:
            await self._serve(scope, receive, send)

    def send_400_response(self, msg: str) -> None:
        """Answer the error that stopped the parser, or 400, and close the connection."""
        answering = self._answering
        has_begun = False
        if answering is not None and answering.response_complete:
            # An answer may be complete before its request is: this is then no new request.
            has_begun = self._headers_complete
        elif answering is not None:
            has_begun = answering.response_started
            answering.disconnected = True
            answering.message_event.set()
        if has_begun:
            self.transport.close()
        elif self._error is None:
            super().send_400_response(msg)
        else:
            response = response_to(self._error, self.url.partition(b"?")[0].decode("latin-1"))
            headers = [*self.server_state.default_headers, *response.raw_headers]
            lines = [b"%s: %s\r\n" % header for header in [*headers, (b"connection", b"close")]]
            head = STATUS_LINE[response.status_code] + b"".join(lines) + b"\r\n"
            self.transport.write(head + bytes(response.body))
            self.transport.close()

    def resume_writing(self) -> None:
        """Note that the client has taken nearly all of what was written."""
        super().resume_writing()
        self._active_at = self.loop.time()
        self._unsent_bytes = None

    def on_response_complete(self) -> None:
        self._active_at = self.loop.time()
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()

    def _check_writing(self) -> None:
        """Abort a connection whose client has read nothing since the last check; check again.

        While writing is paused, and after the connection was closed, what is unsent only shrinks.
        """
        is_waiting = self.flow.write_paused or self.transport.is_closing()
        unsent = self.transport.get_write_buffer_size() if is_waiting else 0
        if unsent and self._unsent_bytes is not None and unsent >= self._unsent_bytes:
            self.abort()
        else:
            self._unsent_bytes = unsent or None
            self._write_check = self.loop.call_later(self.WRITE_S, self._check_writing)


class _AnswerTransport:
    """Writes the answer to a request, and closes the connection when the request is complete."""

    def __init__(self, protocol: Protocol) -> None:
        transport = protocol.transport
        self.write, self.close = transport.write, protocol.close_after_body
        self.is_closing = transport.is_closing
