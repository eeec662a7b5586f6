"""The composition root: from settings to an application, and to a server that runs it."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import structlog
from fastapi_offline import FastAPIOffline
from starlette.concurrency import run_in_threadpool

from optpipe.errors import WorldError
from optpipe_api import http_errors
from optpipe_api.auth import KeyGate, KeyRing, describe_keys
from optpipe_api.changes import Changes
from optpipe_api.engine.solvers import open_solvers
from optpipe_api.errors import NoKeysError
from optpipe_api.logs import set_up_logs
from optpipe_api.metrics import Metrics
from optpipe_api.openapi import openapi_of
from optpipe_api.rates import Rates
from optpipe_api.routes import (
    asking,
    batches,
    charts,
    deployments,
    explanations,
    job_events,
    jobs,
    methods,
    page,
    presets,
    schedules,
    system,
    what_ifs,
)
from optpipe_api.server import Server, allow_files, server_config
from optpipe_api.service import Service
from optpipe_api.store import open_stores
from optpipe_api.telemetry import Telemetry
from optpipe_api.turns import InTurns, Turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

    from optpipe_api.keys import ApiKey
    from optpipe_api.settings import Settings

__all__ = ["create_app", "serve"]

_BACKLOG = 2048
_DESCRIPTION = """\
Submit a pipeline-parallel scheduling problem, follow it while it is being solved, fetch the best
schedule so far. Times are milliseconds, sizes bytes. Errors are problem details (RFC 9457) with a
stable `code`.
"""


def create_app(settings: Settings) -> FastAPI:
    """Return the application; store and engine open when it starts and close when it stops."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.changes = Changes()
        service = await run_in_threadpool(Service.open, settings, app.state.changes, metrics)
        app.state.service = service
        metrics.watch_store(service.counts)
        metrics.watch_places(service.places)
        watch = asyncio.create_task(metrics.watch_loop())
        try:
            yield
        finally:
            watch.cancel()
            await run_in_threadpool(service.close)

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
    app.include_router(job_events.router)
    app.include_router(schedules.router)
    app.include_router(explanations.router)
    app.include_router(what_ifs.router)
    app.include_router(batches.router)
    app.include_router(deployments.router)
    app.include_router(charts.router)
    app.include_router(presets.router)
    app.include_router(methods.router)
    app.include_router(asking.router)
    app.include_router(system.router)
    page.install(app)
    app.openapi = openapi_of(app)  # type: ignore[method-assign]
    app.state.metrics = metrics
    app.state.turns = Turns()
    http_errors.install(app)
    _guard(app, settings)
    app.add_middleware(http_errors.ErrorBoundary)
    app.add_middleware(Telemetry, metrics=metrics)
    app.add_middleware(InTurns, turns=app.state.turns)
    return app


def _guard(app: FastAPI, settings: Settings) -> None:
    """Let in who may; each layer that is added stands around those before it."""
    find = None
    if settings.keys_required:

        def valid() -> list[ApiKey]:
            service: Service = app.state.service
            return service.keys.valid()

        find = KeyRing(valid).find
        describe = app.openapi
        app.openapi = lambda: describe_keys(describe())  # type: ignore[method-assign]
    per_minute = settings.max_requests_per_minute
    app.add_middleware(KeyGate, find=find, rates=Rates(per_minute) if per_minute else None)


def serve(settings: Settings) -> None:
    """Run a server until SIGINT or SIGTERM; running jobs then go back to the queue.

    Raises
    ------
    OptPipeError
        If the database cannot be opened, or the address or the certificate cannot be had; or if
        requests need a key, and there is none.
    """
    lines = set_up_logs(settings.log_format)
    try:
        _serve(settings)
    finally:
        lines.close()


def _serve(settings: Settings) -> None:
    log = structlog.get_logger(__name__)
    # Here, because from inside the application an error would be a stack trace.
    _check_keys(settings)
    _check_certificate(settings)
    open_solvers(settings).close()
    _make_room(settings)
    listener = _listen(settings)
    if not settings.is_loopback and not settings.keys_required:
        log.warning(
            "this address can be reached from other machines, and no API keys are asked for: "
            "whoever reaches it may submit and read jobs; put it behind a firewall",
            action="serve.open",
            host=settings.host,
        )
    log.info("OptPipe listens", action="serve.start", url=_url_of(listener, settings))
    app = create_app(settings)
    Server(server_config(app, settings)).run([listener])
    log.info("stopped; unfinished jobs wait for the next start", action="serve.stop")


def _url_of(listener: socket.socket, settings: Settings) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if settings.ssl_certfile is None else 'https'}://{shown}:{port}"


def _make_room(settings: Settings) -> None:
    num_files = allow_files(settings.max_followers)
    if num_files < settings.max_followers:
        structlog.get_logger(__name__).warning(
            "this process may open fewer files than OPTPIPE_MAX_FOLLOWERS; raise the limit "
            "(ulimit -Hn) or lower the setting",
            action="serve.few_files",
            files=num_files,
        )


def _check_keys(settings: Settings) -> None:
    stores = open_stores(settings.database_url)
    try:
        if settings.keys_required and not stores.keys.valid():
            raise NoKeysError(settings.host)
    finally:
        stores.close()


def _check_certificate(settings: Settings) -> None:
    if settings.ssl_certfile is None:
        return
    try:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # Without the callback a key with a password would ask for it in the terminal.
        tls.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=lambda: "")
    except OSError as error:
        raise WorldError(
            f"cannot use the certificate {settings.ssl_certfile} with the key "
            f"{settings.ssl_keyfile}: {error}; give PEM files that belong together, the key "
            "without a password"
        ) from None


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        # Already now: who comes while the application starts waits instead of being refused.
        listener.listen(_BACKLOG)
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
