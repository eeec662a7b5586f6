"""The application with its routes and middleware, and the server process that runs it."""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import socket
import ssl
import sys
from collections import deque
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn
from fastapi.openapi.utils import get_openapi
from fastapi.routing import iter_route_contexts
from fastapi_offline import FastAPIOffline
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

import optpipe
from optpipe.answers import Drift, Event, Fault, FrontierView, MethodRowList, SweepRowList, Tuned
from optpipe.errors import WorldError
from optpipe.model import Model
from optpipe.problem import Problem
from optpipe.requests import (
    ChartRequest,
    CompareRequest,
    EstimateRequest,
    FollowRequest,
    ResumeRequest,
    SolveRequest,
    SweepRequest,
    TuneRequest,
    VariantRequest,
)
from optpipe.schedule import Schedule
from optpipe_api import http_errors
from optpipe_api.auth import (
    OPEN_BURST,
    OPEN_PER_MINUTE,
    KeyGate,
    KeyRing,
    NotePeer,
    ProxyUsers,
    Rates,
    SiteGate,
    describe_keys,
)
from optpipe_api.bodies import UnreadBodies
from optpipe_api.engine.engine import open_solvers
from optpipe_api.errors import NoKeysError
from optpipe_api.protocol import Protocol
from optpipe_api.routes import batches, catalogue, jobs, system
from optpipe_api.service import Service
from optpipe_api.services.events import Changes
from optpipe_api.store import open_stores
from optpipe_api.telemetry import (
    UNTRACED,
    ServiceMetrics,
    Telemetry,
    close_tracer_provider,
    open_tracer_provider,
    set_up_logs,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import FrameType

    from fastapi import FastAPI

    from optpipe_api.access import ApiKey
    from optpipe_api.settings import Settings

__all__ = [
    "ApiServer",
    "create_app",
    "end_waiting",
    "raise_file_limit",
    "serve",
    "server_config",
]


# --- The application.

_BODIES_IN_MEMORY = 8
_DESCRIPTION = """\
Submit a pipeline-parallel scheduling problem, follow the search, and fetch the best schedule so
far. Times are milliseconds, sizes bytes. Errors are problem details (RFC 9457) with a stable
`code`.
"""


def create_app(settings: Settings) -> FastAPI:
    """Return the application. Store and engine open when it starts and close when it stops."""
    metrics = ServiceMetrics()
    tracer_provider = open_tracer_provider()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.changes = Changes()
        service = await run_in_threadpool(Service.open, settings, app.state.changes, metrics)
        app.state.service = service
        metrics.watch_store(service.counts)
        metrics.watch_connections(service.connections)
        watch = asyncio.create_task(metrics.watch_loop())
        try:
            yield
        finally:
            watch.cancel()
            await run_in_threadpool(service.close)
            if tracer_provider is not None:
                await run_in_threadpool(close_tracer_provider, tracer_provider)

    # FastAPIOffline brings the files of Swagger UI, so that the page works without a CDN. FastAPI
    # would build the page and the OpenAPI document for each request; `install_docs` builds them
    # once.
    app = FastAPIOffline(
        title="OptPipe",
        version=optpipe.__version__,
        summary="Pipeline schedules, optimised and proven.",
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url="",
        docs_url=None,
        redoc_url=None,
        # A redirect would lead to whatever Host the client names.
        redirect_slashes=False,
        generate_unique_id_function=lambda route: "_".join([*route.tags, route.name]),
        telemetry={
            "tracing": tracer_provider is not None,
            "tracer_provider": tracer_provider,
            "exclude": lambda scope: scope["path"] in UNTRACED,
            **dict.fromkeys(("operation_spans", "metrics", "logs", "auto_configure"), False),
        },
    )
    for router in (
        jobs.router,
        batches.router,
        jobs.charts_router,
        catalogue.presets_router,
        catalogue.router,
        jobs.comparisons_router,
        jobs.follow_router,
        catalogue.tunes_router,
        system.router,
    ):
        app.include_router(router)
    system.install_page(app)
    system.install_docs(app)
    app.openapi = partial(  # type: ignore[method-assign]
        _build_openapi, app, keys_required=settings.keys_required
    )
    app.state.metrics = metrics
    app.state.unread = UnreadBodies(_BODIES_IN_MEMORY * settings.max_body_bytes)
    http_errors.install(app)

    def load_keys() -> list[ApiKey]:
        service: Service = app.state.service
        return service.keys.valid()

    # A request passes the middleware that is added last first.
    app.add_middleware(http_errors.CompressedAnswers)
    app.add_middleware(http_errors.HeadAsGet)
    per_minute = settings.max_requests_per_minute
    app.add_middleware(
        KeyGate,
        find=KeyRing(load_keys).find if settings.keys_required else None,
        rates=Rates(per_minute) if per_minute else None,
        open_rates=Rates(OPEN_PER_MINUTE, burst=OPEN_BURST),
        users=ProxyUsers(settings.user_header, settings.user_proxies or frozenset())
        if settings.user_header
        else None,
    )
    app.add_middleware(SiteGate, hosts=settings.hosts)
    app.add_middleware(http_errors.ErrorBoundary)
    app.add_middleware(Telemetry, metrics=metrics, is_traced=tracer_provider is not None)
    # Here instead of in uvicorn: the user of a proxy depends on the address that it replaces.
    if settings.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=sorted(settings.trusted_proxies))
    app.add_middleware(NotePeer)
    # FastAPI builds the routes of a router at the first request to it, on the event loop: 0.1 s.
    deque(iter_route_contexts(app.routes), maxlen=0)
    return app


# Models that FastAPI does not see: bodies that it does not parse, and answers that are JSON texts.
_MODELS = (
    SolveRequest,
    ResumeRequest,
    Event,
    Schedule,
    Problem,
    Model,
    Fault,
    CompareRequest,
    MethodRowList,
    FollowRequest,
    SweepRequest,
    SweepRowList,
    FrontierView,
    EstimateRequest,
    VariantRequest,
    ChartRequest,
    TuneRequest,
    Tuned,
    Drift,
)


def _build_openapi(app: FastAPI, *, keys_required: bool) -> dict[str, Any]:
    """Return the OpenAPI document: FastAPI's, our models, and how a request sends its key."""
    if app.openapi_schema is None:
        openapi = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            description=app.description,
            routes=app.routes,
        )
        _, models = models_json_schema(
            [(model, "validation") for model in _MODELS],
            ref_template="#/components/schemas/{model}",
        )
        schemas = openapi.setdefault("components", {}).setdefault("schemas", {})
        # FastAPI describes its own form of a 422, which this service never sends.
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas.update(models["$defs"])
        app.openapi_schema = describe_keys(openapi, required=keys_required)
    return app.openapi_schema


# --- The server process.

_OTHER_FILES = 1000
_RESERVED_FILES = 300
"""Files that connections leave to the database, solver processes and the page. With a limit below
600 they leave half of it."""

_BACKLOG = 64
"""Connections that wait to be accepted. The event loop accepts them all before other work: with
2,048 a burst delayed other clients by 45 ms (benchmarks/hostile_clients.py)."""


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return the configuration of uvicorn. Its connection limit leaves files to other uses."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = num_files == resource.RLIM_INFINITY
    return uvicorn.Config(
        app,
        http=Protocol,
        backlog=_BACKLOG,
        limit_concurrency=None
        if is_unlimited
        else max(num_files // 2, num_files - _RESERVED_FILES),
        ws="none",
        log_config=None,
        # Warnings are one line for each request that is not HTTP: one client could fill the log.
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )


class ApiServer(uvicorn.Server):
    """A server that exits with 0 on a signal, and first answers the requests that wait.

    A second signal does not end it earlier. Running jobs would then stay locked until their leases
    expire.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.should_exit = True
        end_waiting(self.config.app)


def end_waiting(app: Any) -> None:
    """Answer every request that waits for a change now."""
    changes: Changes | None = getattr(app.state, "changes", None)
    if changes is not None:
        changes.close()


def raise_file_limit(num_followers: int) -> int:
    """Let this process open a file per follower and its other files; return the new limit.

    The hard limit of the system bounds it. The soft limit of many shells is 1024.
    """
    wanted = num_followers + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if resource.RLIM_INFINITY in (soft, hard) else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def serve(settings: Settings) -> None:
    """Run a server until SIGINT or SIGTERM. Running jobs then return to the queue.

    Call it in the main thread, as the last thing that a process does: when the server has stopped,
    both signals are ignored. During the start they raise ``SystemExit(0)``.

    Raises `OptPipeError` if the database, the address or the certificate is not usable, or if
    requests need a key and there is none.
    """
    _handle_signals(lambda *_: sys.exit(0))
    lines = set_up_logs(settings.log_format)
    try:
        _serve(settings)
        _handle_signals(signal.SIG_IGN)
    finally:
        lines.close()


def _handle_signals(handler: Callable[..., None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _serve(settings: Settings) -> None:
    log = structlog.get_logger(__name__)
    # These checks come first, because an error inside the application would be a stack trace.
    with closing(open_stores(settings.database_url)) as stores:
        if settings.keys_required and not stores.keys.valid():
            raise NoKeysError(settings.host)
    _check_certificate(settings)
    open_solvers(settings).close()
    num_files = raise_file_limit(settings.max_followers)
    if num_files < settings.max_followers:
        log.warning(
            "this process may open fewer files than OPTPIPE_MAX_FOLLOWERS; raise the limit "
            "(ulimit -Hn) or lower the setting",
            action="serve.few_files",
            files=num_files,
        )
    app = create_app(settings)
    listener = _listen(settings)
    if not settings.is_loopback and not settings.keys_required:
        log.warning(
            "other machines can reach this address, and requests need no API keys: every client "
            "may submit and read jobs; protect it with a firewall",
            action="serve.open",
            host=settings.host,
        )
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    address = f"[{host}]" if ":" in host else host
    log.info(
        "OptPipe listens, with a page at /",
        action="serve.start",
        url=f"{scheme}://{address}:{port}",
    )
    ApiServer(server_config(app, settings)).run([listener])
    log.info("stopped; unfinished jobs wait for the next start", action="serve.stop")


def _check_certificate(settings: Settings) -> None:
    if settings.ssl_certfile is None:
        return
    try:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # Without the callback, OpenSSL would prompt for the password of a key in the terminal.
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
        # Listen now, so that clients wait for the start of the application and are not refused.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        taken = " (something listens there already)" if error.errno == errno.EADDRINUSE else ""
        raise WorldError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}{taken}; "
            "choose another --host or --port"
        ) from None
    return listener
