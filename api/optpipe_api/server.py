"""The server process around the application: how it starts, how it ends, and for whom it waits."""

from __future__ import annotations

import gc
import resource
import socket  # noqa: TC003 - uvicorn reads annotations
import sys
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio
    from types import FrameType

    from fastapi import FastAPI

    from optpipe_api.services.events import Changes
    from optpipe_api.settings import Settings

__all__ = ["ApiServer", "Protocol", "allow_files", "let_go", "server_config"]


_OTHER_FILES = 1000
_OWN_FILES = 300
"""Left for the database, solver processes and the page; of a limit below 600, half of it."""

_SWITCH_S = 0.0005
_COLLECTIONS = (10_000, 20, 20)
"""For each generation how many objects more, or collections of the one before, bring the next."""


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return how uvicorn serves the application; connections get the files that are left over."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = num_files == resource.RLIM_INFINITY
    return uvicorn.Config(
        app,
        http=Protocol,
        limit_concurrency=None if is_unlimited else max(num_files // 2, num_files - _OWN_FILES),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )


class ApiServer(uvicorn.Server):
    """Ends with 0 on a signal, and lets waiting requests go at once.

    A second signal does not hurry it: that would leave running jobs to the end of their leases.
    """

    _switch_s = sys.getswitchinterval()
    _collections = gc.get_threshold()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then make the interpreter prompt."""
        await super().startup(sockets)
        self._switch_s = _stay_prompt()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the application; the interpreter is as it was."""
        await super().shutdown(sockets)
        sys.setswitchinterval(self._switch_s)
        gc.set_threshold(*self._collections)
        gc.unfreeze()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.should_exit = True
        let_go(self.config.app)


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 from clients that may be slow, but not for ever, and many, but not all there are.

    A request's headers and its body have a time each to be here, or the connection ends: whoever
    sends half of them and waits would hold it, and a file of this process, for nothing. Beyond
    uvicorn's ``limit_concurrency`` a new connection ends at once, so that files are left for the
    database.
    """

    HEADERS_S = 10.0
    BODY_S = 60.0

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, if there is room."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.abort()
        else:
            self._wait(self.HEADERS_S)

    def on_message_begin(self) -> None:
        """Wait for the headers: also of the next request on a connection that was kept."""
        super().on_message_begin()
        if self._deadline is None:
            self._wait(self.HEADERS_S)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._wait(self.BODY_S)

    def on_message_complete(self) -> None:
        """Wait for nothing more of this request."""
        self._wait(None)
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._wait(None)
        super().connection_lost(exc)

    def _wait(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = (
            None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
        )


def let_go(app: Any) -> None:
    """Let every request that waits for something have its answer now."""
    changes: Changes | None = getattr(app.state, "changes", None)
    if changes is not None:
        changes.close()


def allow_files(num_followers: int) -> int:
    """Let this process have a file open for every follower and what else it needs; return how many.

    Where the system's hard limit is lower, that many. Many shells begin with 1024.
    """
    wanted = num_followers + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    may = wanted if resource.RLIM_INFINITY in (soft, hard) else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < may:
        resource.setrlimit(resource.RLIMIT_NOFILE, (may, hard))
    return may


def _stay_prompt() -> float:
    """Keep the event loop from waiting for its own process; return the switch interval before.

    What the imports made, some 400,000 objects, is never garbage: a full collection need not walk
    over it, which takes 0.1 s. With 200 followers one still takes 0.04 s, so they are made rarer;
    what is no cycle is let go at once without any. And a thread that computes lets the loop go on
    after half a millisecond instead of five, of which there may be one for every busy thread.
    """
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    return before
