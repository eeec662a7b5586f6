"""HTTP/1.1 on one connection, with limits on what a client may make the server keep."""

from __future__ import annotations

import logging
import socket
import struct
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
"""Received bytes that the parser gets at once."""

_SEND_BUFFER_BYTES = 128 * 1024
"""For ``SO_SNDBUF``; without it, Linux keeps 3 MB of unread answers for each connection."""

_NO_LINGER = struct.pack("ii", 1, 0)
"""For ``SO_LINGER``: closing resets the connection and drops what was not sent."""


_LOGGER = logging.getLogger("uvicorn.error.protocol")
_LOGGER.setLevel(logging.ERROR)
"""Without uvicorn's warning for each request that is refused here: it costs half as much as the
answer, and one client could fill the log."""


class Protocol(HttpToolsProtocol):
    """Limit the bytes, the waiting requests and the time of each connection.

    * Headers and body have a deadline each: ``HEADERS_S`` and ``BODY_S``.
    * A client has to read a part of an answer every ``WRITE_S``. If it does not, the connection is
      aborted after at most two such periods. The part is a third of the kernel's send buffer.
    * The target, headers and trailers of a request have at most ``HEADER_BYTES`` and
      ``HEADER_FIELDS``; a larger request is answered 431, and the connection closes.
    * At most ``PIPELINED`` requests wait for an earlier answer; one more is answered 429, and the
      connection closes.
    * A connection that closes after an answer first reads the rest of the request, until the
      deadline of its body. Otherwise the client's system could drop the answer.
    * A new connection beyond uvicorn's ``limit_concurrency`` closes the connections that have made
      the server wait for more than ``IDLE_S``. If there are none, the new connection is aborted.
      Files are left for the database.

    An error is the answer to the first request that has none. If that answer has begun, the
    connection closes without an error.
    """

    HEADERS_S = 10.0
    BODY_S = 60.0
    WRITE_S = 20.0
    HEADER_BYTES = 64 * 1024
    HEADER_FIELDS = 200
    PIPELINED = 4
    IDLE_S = 1.0

    url = b""
    _deadline: asyncio.TimerHandle | None = None
    _write_check: asyncio.TimerHandle | None = None
    _unsent_bytes: int | None = None
    """Bytes that waited to be sent at the last check, if no answer was written since."""
    _answering: RequestResponseCycle | None = None
    _error: OptPipeError | None = None
    _header_bytes = 0
    _header_fields = 0
    _unparsed_bytes = 0
    """Bytes that were received since the parser last reported a field or a part of a body."""
    _headers_complete = False
    _closes_after_body = False
    _active_at = 0.0

    # --- The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, unless the server has as many connections as it may."""
        super().connection_made(transport)
        self._serve, self.app = self.app, self._serve_unless_refused
        self.logger = _LOGGER
        self._active_at = self.loop.time()
        self._set_option(socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if self._is_full():
            for connection in list(self.connections):
                if isinstance(connection, Protocol) and connection.is_idle():
                    connection.abort()
        if self._is_full():
            self.abort()
            return
        self._set_deadline(self.HEADERS_S)
        self._check_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._set_deadline(None)
        if self._write_check is not None:
            self._write_check.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection at once; neither this process nor the kernel sends the rest."""
        self.connections.discard(self)
        self._set_option(socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _set_option(self, option: int, value: int | bytes) -> None:
        # Some systems refuse options of a connection that the client has already ended.
        with suppress(OSError):
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, value)

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

    def _is_full(self) -> bool:
        # uvicorn answers 503 to every request while the connections are as many as the limit.
        return self.limit_concurrency is not None and (
            len(self.connections) >= self.limit_concurrency
        )

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.abort)

    # --- Requests

    def data_received(self, data: bytes) -> None:
        """Parse the data in parts, so that an unfinished header is refused before it grows."""
        self._active_at = self.loop.time()
        for start in range(0, len(data), _PART_BYTES):
            if self.transport.is_closing():
                return
            part = data[start : start + _PART_BYTES]
            self._unparsed_bytes += len(part)
            super().data_received(part)
            if self._unparsed_bytes > self.HEADER_BYTES and not self.transport.is_closing():
                self._error = self._headers_error(self._unparsed_bytes)
                self.send_400_response("")
        if self._is_between_requests() and self._deadline is None:
            # An empty line begins no request, but uvicorn then waits for the next one no longer.
            self._set_deadline(self.HEADERS_S)

    def _is_between_requests(self) -> bool:
        is_answered = self._answering is None or self._answering.response_complete
        return is_answered and not self.pipeline

    def on_message_begin(self) -> None:
        """Wait for the headers: also of the next request on a connection that was kept."""
        super().on_message_begin()
        self._header_bytes = self._header_fields = self._unparsed_bytes = 0
        self._headers_complete = False
        if self._deadline is None:
            self._set_deadline(self.HEADERS_S)

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the target like those of a header."""
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
            raise self._error
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle
        if self.cycle is not None:
            self.cycle.transport = _AnswerTransport(self)  # type: ignore[assignment]
        self._set_deadline(self.BODY_S)

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for nothing more of this request."""
        self._unparsed_bytes = 0
        self._headers_complete = False
        self._set_deadline(None)
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()

    def close_after_body(self) -> None:
        """Close the connection when the request that is being received is complete."""
        self._closes_after_body = self._headers_complete
        if not self._closes_after_body:
            self.transport.close()

    def _count(self, num_bytes: int, num_fields: int) -> None:
        self._unparsed_bytes = 0
        self._header_bytes += num_bytes
        self._header_fields += num_fields
        if self._header_bytes > self.HEADER_BYTES or self._header_fields > self.HEADER_FIELDS:
            self._error = self._headers_error(self._header_bytes)
            # The parser stops at an exception, and uvicorn then calls `send_400_response`.
            raise self._error

    def _headers_error(self, num_bytes: int) -> HeadersTooLargeError:
        return HeadersTooLargeError(
            num_bytes, self._header_fields, self.HEADER_BYTES, self.HEADER_FIELDS
        )

    # --- Answers

    async def _serve_unless_refused(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, unless a later request has ended the connection before."""
        if self._error is None:
            await self._serve(scope, receive, send)

    def send_400_response(self, msg: str) -> None:
        """Answer the error that stopped the parser, or 400, and close the connection."""
        has_begun = self._abandon_answer()
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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent_bytes = None

    def resume_writing(self) -> None:
        """Note that the client has taken nearly all of what was written."""
        super().resume_writing()
        self._active_at = self.loop.time()
        self._unsent_bytes = None

    def on_response_complete(self) -> None:
        """Start the answer to the next request that waits."""
        self._active_at = self.loop.time()
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()

    def _abandon_answer(self) -> bool:
        """Let the request under way write no more; return whether its answer has begun."""
        answering = self._answering
        if answering is None:
            return False
        if answering.response_complete:
            # An answer may be complete before its request is: this is then no new request.
            return self._headers_complete
        answering.disconnected = True
        answering.message_event.set()
        return answering.response_started

    def _check_writing(self) -> None:
        """Abort a connection whose client has read nothing since the last check; check again.

        While writing is paused, and after the connection was closed, nothing is written. So what is
        unsent then only shrinks, by what the client reads.
        """
        is_waiting = self.flow.write_paused or self.transport.is_closing()
        unsent = self.transport.get_write_buffer_size() if is_waiting else 0
        before = self._unsent_bytes
        if unsent and before is not None and unsent >= before:
            self.abort()
            return
        self._unsent_bytes = unsent or None
        self._write_check = self.loop.call_later(self.WRITE_S, self._check_writing)


class _AnswerTransport:
    """What a request writes its answer to: the connection, whose end waits for the request's."""

    def __init__(self, protocol: Protocol) -> None:
        self.write = protocol.transport.write
        self.close = protocol.close_after_body
