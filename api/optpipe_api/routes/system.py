"""Health, metrics, the caller's key, JSON Schemas, OpenAPI, and the page."""

from __future__ import annotations

import html
import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict

from optpipe.answers import AuditList, AuditView, Health, Readiness
from optpipe.model import Model
from optpipe.plot.scene import COMPONENTS
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_api.access import Role
from optpipe_api.errors import SolverUnavailableError
from optpipe_api.http_errors import documented
from optpipe_api.routes.common import (
    KNOWN_PARAMETERS_ONLY,
    TEXT,
    ConstantDocument,
    Cursor,
    Limit,
    Reader,
    Serving,
    split_page,
    tagged,
    text_filter,
)
from optpipe_api.telemetry import CONTENT_TYPE

if TYPE_CHECKING:
    from os import PathLike, stat_result

    from fastapi import FastAPI
    from starlette.types import Scope

__all__ = ["install_docs", "install_page", "router"]


router = APIRouter(tags=["system"])


@router.get("/healthz", summary="Check that the process answers")
async def healthz() -> Health:
    """Answer without a check of store or engine."""
    return Health()


@router.get("/readyz", responses=documented(), summary="Check that the service is ready")
def readyz(service: Serving) -> Readiness:
    """Check that the store takes writes and that the engine solves."""
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
        200: {"description": "Text format of Prometheus.", "content": {"text/plain": TEXT}},
        **documented(),
    },
    summary="Metrics for Prometheus",
)
def metrics(request: Request) -> Response:
    """Return the metrics of `optpipe_api.telemetry`. If the service needs keys, so does this."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE)


class KeyView(BaseModel):
    """The key of a request. If the service needs no keys: an empty name and role `admin`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "ci", "role": "submit"}]})

    name: str
    role: Role


@router.get("/v1/key", responses=documented(), summary="Get name and role of the key")
async def key(caller: Reader) -> KeyView:
    """Return the name and the role of the request's key, but not the key."""
    return KeyView(name=caller.name, role=caller.role)


@router.get(
    "/v1/audit",
    dependencies=KNOWN_PARAMETERS_ONLY,
    responses=documented(403),
    summary="List who changed what, newest first",
)
def audit(
    *,
    service: Serving,
    caller: Reader,
    subject: Annotated[str | None, text_filter("Id of a job or batch, or name of a key.")] = None,
    actor: Annotated[str | None, text_filter("Name of the key that made the change.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> AuditList:
    """Return a page of cancellations, resumptions, deletions and changes of keys.

    Only admins may read it. `next` is the `cursor` of the next page. A job names its owner, who
    submitted it; its deletion adds that as an entry `submit`. Entries are deleted after
    `retention_days`.
    """
    before = service.cursors.decode(cursor)
    found = service.jobs.audit(limit + 1, before, caller, subject=subject, actor=actor)
    page, following = split_page(service, found, limit)
    return AuditList(entries=tuple(map(AuditView.of, page)), next=following)


# --- The JSON Schemas of the file formats.


def _add_schema_route(model: type[BaseModel], name: str, use: str) -> None:
    def build() -> str:
        published = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"urn:optpipe:{name}:v1",
            **model.model_json_schema(),
        }
        return json.dumps(published, separators=(",", ":"))

    router.add_api_route(
        f"/v1/schemas/{name}",
        ConstantDocument(build).answer,
        name=f"{name}_schema",
        response_model=dict[str, Any],
        responses=tagged({200: {"description": "A JSON Schema."}}, of="the schema") | documented(),
        summary=f"JSON Schema of optpipe/{name}/v1",
        description=f"Return the schema of {use}.",
    )


_add_schema_route(Problem, "problem", "`problem` in the body of `POST /v1/jobs`")
_add_schema_route(Model, "model", "the file that `optpipe plan` reads")
_add_schema_route(Schedule, "schedule", "the answer of `/v1/jobs/{id}/schedule`")


# --- The OpenAPI document, and Swagger UI that shows it.


def install_docs(app: FastAPI) -> None:
    """Add the routes of the OpenAPI document and its page. Each is built once.

    The page uses only relative addresses.
    """

    def build_page() -> str:
        folder = "static-offline-docs/"
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=f"{app.title} - Swagger UI",
            swagger_js_url=f"{folder}swagger-ui-bundle.js",
            swagger_css_url=f"{folder}swagger-ui.css",
            swagger_favicon_url=f"{folder}favicon.png",
        )
        return bytes(page.body).decode()

    openapi = ConstantDocument(
        lambda: json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")), is_open=True
    )
    page = ConstantDocument(build_page, "text/html", is_open=True)
    app.add_api_route(
        "/openapi.json", openapi.answer, methods=["GET", "HEAD"], include_in_schema=False
    )
    app.add_api_route("/docs", page.answer, include_in_schema=False)


# --- The page: ``/``, its files under ``/page/``, and BokehJS from the installed package.
# The Content-Security-Policy allows nothing from other hosts and no inline scripts. BokehJS needs
# three exceptions. It loads the callbacks of charts as modules from text with ``eval``
# (``unsafe-eval``, ``blob:``); this text is ours, never a client's. It sets styles from scripts
# (``unsafe-inline``, only for styles).

_POLICY = (
    "default-src 'none'; script-src 'self' blob: 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_WEB = Path(__file__).parent.parent / "web"
_SCRIPTS = tuple(f"{name}.min.js" for name in (*COMPONENTS, "bokeh-api"))


class _Files(StaticFiles):
    """A folder of files, or those of ``names`` in it, with our headers."""

    def __init__(self, folder: Path, caching: str, names: tuple[str, ...] | None = None) -> None:
        super().__init__(directory=folder)
        self._headers = {**_HEADERS, "Cache-Control": caching}
        self._names = names

    def lookup_path(self, path: str) -> tuple[str, stat_result | None]:
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
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(self._headers)
        return response


def install_page(app: FastAPI) -> None:
    """Add the page. Without the package bokeh it shows a notice instead of charts."""
    scripts = ""
    bokeh = _find_bokeh()
    if bokeh is not None:
        # The version is in the address, so the files of an address never change.
        folder = f"page/bokeh/{bokeh[0]}"
        files = _Files(bokeh[1], "public, max-age=31536000, immutable", _SCRIPTS)
        app.mount(f"/{folder}", files, name="bokeh")
        scripts = " ".join(f"{folder}/{name}" for name in _SCRIPTS)
    app.mount("/page", _Files(_WEB, "no-cache"), name="page")

    def build_page() -> str:
        return (_WEB / "index.html").read_text("utf-8").replace("{bokeh}", html.escape(scripts))

    headers = {**_HEADERS, "Content-Security-Policy": _POLICY}
    page = ConstantDocument(build_page, "text/html", is_open=True, headers=headers)
    app.add_api_route("/", page.answer, include_in_schema=False)


def _find_bokeh() -> tuple[str, Path] | None:
    """Return the version and the script folder of bokeh without its import, which takes 0.5 s."""
    spec = find_spec("bokeh")
    if spec is None or spec.origin is None:
        return None
    try:
        return version("bokeh"), Path(spec.origin).parent / "server" / "static" / "js"
    except PackageNotFoundError:
        return None
