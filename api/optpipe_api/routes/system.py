"""Is it alive, is it ready, what does it speak."""

from __future__ import annotations

import html
import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict

from optpipe.answers import Health, Readiness
from optpipe.model import Model
from optpipe.plot.scene import COMPONENTS
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_api.access import Role
from optpipe_api.errors import SolverUnavailableError
from optpipe_api.http_errors import documented
from optpipe_api.routes.common import (
    Answers,
    ConstantDocument,
    IfNoneMatch,
    Reader,
    Serving,
    tagged,
)
from optpipe_api.telemetry import CONTENT_TYPE

if TYPE_CHECKING:
    from os import PathLike, stat_result

    from fastapi import FastAPI
    from starlette.types import Scope

__all__ = ["FOLDER", "POLICY", "install", "install_docs", "questions_router", "router"]


router = APIRouter(tags=["system"])


@router.get("/healthz", summary="Is the process alive")
async def healthz() -> Health:
    """Answer without looking at anything."""
    return Health()


@router.get("/readyz", responses=documented(), summary="Is the service ready")
def readyz(service: Serving) -> Readiness:
    """Ask the store, which must take what is written, and the engine."""
    if not service.is_solving:
        raise SolverUnavailableError(
            "no solver process starts, or the engine is not running: the server's log says why; "
            "mend that, or restart the server"
        )
    return Readiness(jobs=service.recent_counts())


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **documented(),
    },
    summary="Numbers for Prometheus",
)
def metrics(request: Request) -> Response:
    """Return what `optpipe_api.telemetry` lists; needs a key wherever the rest does."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE)


# --- The JSON Schemas of the file formats.


def _schema(of: type[BaseModel], name: str) -> ConstantDocument:
    def build() -> str:
        published = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"urn:optpipe:{name}:v1",
            **of.model_json_schema(),
        }
        return json.dumps(published, separators=(",", ":"))

    return ConstantDocument(build)


_PROBLEM = _schema(Problem, "problem")
_MODEL = _schema(Model, "model")
_SCHEDULE = _schema(Schedule, "schedule")
_SCHEMA_ANSWERS: Answers = tagged({"description": "A JSON Schema."}, of="it") | documented()


@router.get(
    "/v1/schemas/problem",
    response_model=dict[str, Any],
    responses=_SCHEMA_ANSWERS,
    summary="JSON Schema of optpipe/problem/v1",
)
async def problem_schema(if_none_match: IfNoneMatch = None) -> Response:
    """Return what `POST /v1/jobs` takes as `problem`."""
    return await _PROBLEM.answer(if_none_match)


@router.get(
    "/v1/schemas/model",
    response_model=dict[str, Any],
    responses=_SCHEMA_ANSWERS,
    summary="JSON Schema of optpipe/model/v1",
)
async def model_schema(if_none_match: IfNoneMatch = None) -> Response:
    """Return what `optpipe plan` takes."""
    return await _MODEL.answer(if_none_match)


@router.get(
    "/v1/schemas/schedule",
    response_model=dict[str, Any],
    responses=_SCHEMA_ANSWERS,
    summary="JSON Schema of optpipe/schedule/v1",
)
async def schedule_schema(if_none_match: IfNoneMatch = None) -> Response:
    """Return what `/v1/jobs/{id}/schedule` answers."""
    return await _SCHEDULE.answer(if_none_match)


# --- The documentation of the service: the OpenAPI document, and Swagger UI that shows it.

_OPENAPI, _DOCS = "/openapi.json", "/docs"
_SWAGGER = "static-offline-docs/"


def install_docs(app: FastAPI) -> None:
    """Serve the OpenAPI document and the page that shows it, each built once.

    The page names only relative addresses.
    """
    document = ConstantDocument(
        lambda: json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")), is_open=True
    )
    shown = ConstantDocument(lambda: _swagger(app.title), "text/html", is_open=True)

    @app.api_route(_OPENAPI, methods=["GET", "HEAD"], include_in_schema=False)
    async def openapi(if_none_match: IfNoneMatch = None) -> Response:
        """Return what the service speaks."""
        return await document.answer(if_none_match)

    @app.get(_DOCS, include_in_schema=False)
    async def docs(if_none_match: IfNoneMatch = None) -> Response:
        """Show people what the service speaks."""
        return await shown.answer(if_none_match)


def _swagger(title: str) -> str:
    page = get_swagger_ui_html(
        openapi_url=_OPENAPI.lstrip("/"),
        title=f"{title} - Swagger UI",
        swagger_js_url=f"{_SWAGGER}swagger-ui-bundle.js",
        swagger_css_url=f"{_SWAGGER}swagger-ui.css",
        swagger_favicon_url=f"{_SWAGGER}favicon.png",
    )
    return bytes(page.body).decode()


# --- The page: ``/``, its files under ``/page/``, and BokehJS from the installed package.
# What it may do is said in its Content-Security-Policy: nothing from another host, no inline
# script. Three relaxations are BokehJS's. It loads the callbacks of charts as modules from text, by
# way of ``eval`` (``unsafe-eval``, ``blob:``): the text is ours, never a client's. It sets styles
# from scripts: ``unsafe-inline``, for styles alone.

FOLDER = "/page/"
"""Below it lie files that hold nothing of anybody: no key is asked for."""

_SOURCES = {
    "default-src": "'none'",
    "script-src": "'self' blob: 'unsafe-eval'",
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "connect-src": "'self'",
    "font-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
POLICY = "; ".join(f"{what} {sources}" for what, sources in _SOURCES.items())

_WEB = Path(__file__).parent.parent / "web"
_SCRIPTS = tuple(f"{name}.min.js" for name in (*COMPONENTS, "bokeh-api"))
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class _Files(StaticFiles):
    """A folder of files, with headers of our own."""

    def __init__(self, folder: Path, caching: str, names: tuple[str, ...] | None = None) -> None:
        super().__init__(directory=folder)
        self._headers = {**_HEADERS, "Cache-Control": caching}
        self._names = names

    def lookup_path(self, path: str) -> tuple[str, stat_result | None]:
        """Find a file; where only some are served, the others do not exist."""
        if self._names is not None and path not in self._names:
            return "", None
        return super().lookup_path(path)

    def file_response(
        self,
        full_path: PathLike[str] | str,
        stat_result: stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """Return a file, or that it has not changed."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(self._headers)
        return response


def install(app: FastAPI) -> None:
    """Serve the page; without the package bokeh it has no charts, and says so."""
    bokeh = _bokeh_version()
    if bokeh is not None:
        # The version is in the address: what lies there never changes.
        files = _Files(_bokeh_folder(), "public, max-age=31536000, immutable", _SCRIPTS)
        app.mount(f"{FOLDER}bokeh/{bokeh}", files, name="bokeh")
    app.mount(FOLDER.rstrip("/"), _Files(_WEB, "no-cache"), name="page")
    headers = {**_HEADERS, "Content-Security-Policy": POLICY}
    shown = ConstantDocument(lambda: _index(bokeh), "text/html", is_open=True, headers=headers)

    @app.get("/", include_in_schema=False)
    async def page(if_none_match: IfNoneMatch = None) -> Response:
        """Show people the page."""
        return await shown.answer(if_none_match)


def _index(bokeh: str | None) -> str:
    scripts = [] if bokeh is None else [f"page/bokeh/{bokeh}/{name}" for name in _SCRIPTS]
    text = (_WEB / "index.html").read_text("utf-8")
    return text.replace("{bokeh}", html.escape(" ".join(scripts)))


def _bokeh_version() -> str | None:
    if find_spec("bokeh") is None:
        return None
    try:
        return version("bokeh")
    except PackageNotFoundError:
        return None


def _bokeh_folder() -> Path:
    """Return where BokehJS lies, without the half second that importing bokeh takes."""
    spec = find_spec("bokeh")
    if spec is None or spec.origin is None:
        raise RuntimeError("bokeh has no folder")
    return Path(spec.origin).parent / "server" / "static" / "js"


# --- ``/v1/key``: who is asking, and what he may do.

questions_router = APIRouter(prefix="/v1", tags=["system"])


class KeyView(BaseModel):
    """The key of a request; where none is asked for, no name and every right."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "ci", "role": "submit"}]})

    name: str
    role: Role


@questions_router.get("/key", responses=documented(), summary="Which key is this")
async def key(who: Reader) -> KeyView:
    """Return the name and the role of the key that the request brings, never the key."""
    return KeyView(name=who.name, role=who.role)
