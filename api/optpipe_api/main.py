"""The composition root: from settings to an application, and to a server that runs it."""

from __future__ import annotations

import errno
import socket
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import structlog
import uvicorn
from fastapi_offline import FastAPIOffline
from starlette.concurrency import run_in_threadpool

from optpipe.errors import WorldError
from optpipe_api import http_errors
from optpipe_api.changes import Changes
from optpipe_api.logs import set_up_logs
from optpipe_api.openapi import openapi_of
from optpipe_api.routes import jobs, methods, system
from optpipe_api.service import Service
from optpipe_api.store import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import FrameType

    from fastapi import FastAPI

    from optpipe_api.settings import Settings

__all__ = ["create_app", "serve"]

_DESCRIPTION = """\
Submit a pipeline-parallel scheduling problem, follow it while it is being solved, fetch the best
schedule so far. Times are milliseconds, sizes bytes. Errors are problem details (RFC 9457) with a
stable `code`.
"""


def create_app(settings: Settings) -> FastAPI:
    """Return the application; store and engine open when it starts and close when it stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.changes = Changes()
        app.state.service = await run_in_threadpool(Service.open, settings, app.state.changes)
        try:
            yield
        finally:
            await run_in_threadpool(app.state.service.close)

    # Swagger UI comes from the package: the page works where no CDN can be reached.
    app = FastAPIOffline(
        title="OptPipe",
        version=_version(),
        summary="Pipeline schedules, optimised and proven.",
        description=_DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
    )
    app.include_router(jobs.router)
    app.include_router(methods.router)
    app.include_router(system.router)
    app.openapi = openapi_of(app)  # type: ignore[method-assign]
    http_errors.install(app)
    app.add_middleware(http_errors.ErrorBoundary)
    return app


def serve(settings: Settings) -> None:
    """Run a server until SIGINT or SIGTERM; running jobs then go back to the queue.

    Raises
    ------
    OptPipeError
        If the database cannot be opened or the address cannot be had.
    """
    set_up_logs(settings.log_format)
    log = structlog.get_logger(__name__)
    # Here, because from inside the application an error would be a stack trace.
    open_store(settings.database_url).close()
    listener = _listen(settings)
    if not settings.is_loopback:
        log.warning(
            "this address can be reached from other machines, and there are no API keys yet: "
            "whoever reaches it may submit and read jobs; put it behind a firewall",
            action="serve.open",
            host=settings.host,
        )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info("OptPipe listens", action="serve.start", url=f"http://{shown}:{port}")
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    _Server(config, app).run([listener])
    log.info("stopped; unfinished jobs wait for the next start", action="serve.stop")


class _Server(uvicorn.Server):
    """Ends with 0 on a signal, and lets waiting requests go at once.

    A second signal does not hurry it: that would leave running jobs to the end of their leases.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.should_exit = True
        changes: Changes | None = getattr(self._app.state, "changes", None)
        if changes is not None:
            changes.close()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        taken = " (something listens there already)" if error.errno == errno.EADDRINUSE else ""
        raise WorldError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}{taken}; "
            "choose another --host or --port"
        ) from None
    return listener


def _version() -> str:
    try:
        return version("optpipe")
    except PackageNotFoundError:
        return "0+unknown"
