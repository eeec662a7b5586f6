"""The composition root: from settings to an application, and the server process that runs it."""

from __future__ import annotations

import asyncio
import errno
import gc
import resource
import socket
import ssl
import sys
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn
from fastapi.openapi.utils import get_openapi
from fastapi_offline import FastAPIOffline
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool

from optpipe.answers import Event, Fault, FrontierView, MethodRowList, SweepRowList, Tuned
from optpipe.errors import WorldError
from optpipe.model import Model
from optpipe.problem import Problem
from optpipe.requests import (
    CompareRequest,
    DeployRequest,
    EstimateRequest,
    ReportRequest,
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
    Rates,
    SiteGate,
    describe_keys,
)
from optpipe_api.bodies import UnreadBodies
from optpipe_api.engine.engine import open_solvers
from optpipe_api.errors import NoKeysError
from optpipe_api.protocol import Protocol
from optpipe_api.routes import batches, catalogue, deployments, jobs, system
from optpipe_api.service import Service
from optpipe_api.services.events import Changes
from optpipe_api.store import open_stores
from optpipe_api.telemetry import ServiceMetrics, Telemetry, set_up_logs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import FrameType

    from fastapi import FastAPI

    from optpipe_api.access import ApiKey
    from optpipe_api.settings import Settings

__all__ = [
    "ApiServer",
    "allow_files",
    "create_app",
    "let_go",
    "openapi_of",
    "serve",
    "server_config",
]


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
        backlog=_BACKLOG,
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


_BACKLOG = 64
"""Connections that may wait to be accepted. The event loop accepts them all before anything else:
with 2,048 a burst delayed other clients by 45 ms (benchmarks/hostile_clients.py)."""
_BODIES_AT_ONCE = 8
_DESCRIPTION = """\
Submit a pipeline-parallel scheduling problem, follow it while it is being solved, fetch the best
schedule so far. Times are milliseconds, sizes bytes. Errors are problem details (RFC 9457) with a
stable `code`.
"""


def create_app(settings: Settings) -> FastAPI:
    """Return the application; store and engine open when it starts and close when it stops."""
    metrics = ServiceMetrics()

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

    # The package brings Swagger UI, so its page works where no CDN can be reached. We serve the
    # page and the OpenAPI document: FastAPI builds both for each request.
    app = FastAPIOffline(
        title="OptPipe",
        version=_version(),
        summary="Pipeline schedules, optimised and proven.",
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url="",
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: "_".join([*route.tags, route.name]),
    )
    app.include_router(jobs.router)
    app.include_router(jobs.events_router)
    app.include_router(jobs.schedules_router)
    app.include_router(jobs.explanations_router)
    app.include_router(batches.router)
    app.include_router(deployments.router)
    app.include_router(jobs.charts_router)
    app.include_router(catalogue.presets_router)
    app.include_router(catalogue.router)
    app.include_router(jobs.comparisons_router)
    app.include_router(catalogue.tunes_router)
    app.include_router(catalogue.configurations_router)
    app.include_router(system.questions_router)
    app.include_router(system.router)
    system.install(app)
    system.install_docs(app)
    app.openapi = openapi_of(app)  # type: ignore[method-assign]
    app.state.metrics = metrics
    app.state.unread = UnreadBodies(_BODIES_AT_ONCE * settings.max_body_bytes)
    http_errors.install(app)
    _guard(app, settings)
    app.add_middleware(http_errors.ErrorBoundary)
    app.add_middleware(Telemetry, metrics=metrics)
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
    required = settings.keys_required
    app.openapi = lambda: describe_keys(describe(), required=required)  # type: ignore[method-assign]
    per_minute = settings.max_requests_per_minute
    app.add_middleware(
        KeyGate,
        find=find,
        rates=Rates(per_minute) if per_minute else None,
        open_rates=Rates(OPEN_PER_MINUTE, burst=OPEN_BURST),
    )
    app.add_middleware(SiteGate, hosts=settings.hosts)


def serve(settings: Settings) -> None:
    """Run a server until SIGINT or SIGTERM; running jobs then go back to the queue.

    Raises `OptPipeError` if the database cannot be opened, or the address or the certificate cannot
    be had; or if requests need a key, and there is none.
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
    ApiServer(server_config(app, settings)).run([listener])
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


# --- The OpenAPI document: FastAPI's, plus the bodies that are parsed strictly and not by FastAPI.

_OURS = (
    SolveRequest,
    ResumeRequest,
    Event,
    Schedule,
    Problem,
    Model,
    Fault,
    CompareRequest,
    MethodRowList,
    DeployRequest,
    ReportRequest,
    SweepRequest,
    SweepRowList,
    FrontierView,
    EstimateRequest,
    VariantRequest,
    TuneRequest,
    Tuned,
)
_GENERATED = ("HTTPValidationError", "ValidationError")


def openapi_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Return the function that builds the document, once."""

    def make() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _make(app)
        return app.openapi_schema

    return make


def _make(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        routes=app.routes,
    )
    _, ours = models_json_schema(
        [(model, "validation") for model in _OURS], ref_template="#/components/schemas/{model}"
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    # FastAPI documents its own form of a 422, which is never sent.
    for name in _GENERATED:
        schemas.pop(name, None)
    schemas.update(ours["$defs"])
    return document
