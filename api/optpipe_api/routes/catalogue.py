"""``/v1/methods`` and ``/v1/compare``: which methods there are, and what each would do."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response

from optpipe.wire import MethodList  # noqa: TC001 - FastAPI reads it
from optpipe_api.http_errors import documented
from optpipe_api.requests.catalogue import Catalogue, EstimateView, VariantView
from optpipe_api.requests.http import TABLE_FORMS, preferred_form, read_body, require_json
from optpipe_api.routes.common import Reader, Serving, Submitter, json_body
from optpipe_api.services.submission import read_comparison, read_estimate, read_variant
from optpipe_api.views import method_list

__all__ = ["presets_router", "router"]


router = APIRouter(prefix="/v1", tags=["methods"])

_REQUEST = json_body("Comparison")
_CSV_EXAMPLE = "method,placement,makespan_ms,...\n1f1b,as given,84.0,...\n"
_MARKDOWN_EXAMPLE = "| method | makespan ms | ... |\n| --- | ---: | --- |\n| 1f1b | 84 | ... |\n"
_ROWS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A row per method, best first.",
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/MethodRowList"}},
            "text/csv": {"schema": {"type": "string"}, "example": _CSV_EXAMPLE},
            "text/markdown": {"schema": {"type": "string"}, "example": _MARKDOWN_EXAMPLE},
        },
    }
}


@router.get("/methods", responses=documented(), summary="List the methods")
async def methods(service: Serving) -> MethodList:
    """Return what `method` of a job may be, each with one line about it."""
    return method_list(service.methods)


@router.post(
    "/compare",
    response_class=Response,
    responses={**_ROWS, **documented(403, 406, 413, 415, 429, 500)},
    openapi_extra=_REQUEST,
    summary="Compare every method",
)
async def compare(
    request: Request,
    service: Serving,
    _who: Submitter,
    accept: Annotated[str | None, Header()] = None,
    form: Annotated[Literal["json", "csv", "markdown"] | None, Query(alias="format")] = None,
) -> Response:
    """Run every method, the optimiser among them, and answer with their rows.

    The answer takes as long as the methods do; for large problems submit jobs instead. It comes as
    JSON, CSV or a Markdown table, by `?format=` or `Accept`.
    """
    chosen = preferred_form(accept, TABLE_FORMS) if form is None else form
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    problem, wanted = await service.pool.run(read_comparison, body, service.settings.max_cells)
    del body
    options = wanted.within(service.settings, chosen)
    text = await service.compare(problem, options, request.is_disconnected)
    return Response(text, media_type=TABLE_FORMS[chosen], headers={"Vary": "Accept"})


# --- ``/v1/presets``, ``/v1/estimates`` and ``/v1/variants``: problems without writing JSON.
# They change nothing, so every role may ask.

presets_router = APIRouter(prefix="/v1", tags=["presets"])


@lru_cache
def _catalogue() -> Catalogue:
    return Catalogue.make()


@presets_router.get("/presets", responses=documented(), summary="List models and accelerators")
async def presets() -> Catalogue:
    """Return the models and accelerators that an estimate knows by name, with sources."""
    return _catalogue()


@presets_router.post(
    "/estimates",
    response_model=EstimateView,
    responses=documented(413, 415),
    openapi_extra=json_body("EstimateBody"),
    summary="Estimate a problem from a model and an accelerator",
)
async def estimates(request: Request, service: Serving, _who: Reader) -> Response:
    """Return the problem of a model on an accelerator, varied by `values`: nothing is measured."""
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    # A long pipeline of many layers is a large problem however short the request.
    text = await service.pool.run(read_estimate, body, is_heavy=True)
    return Response(text, media_type="application/json")


@presets_router.post(
    "/variants",
    response_model=VariantView,
    responses=documented(413, 415),
    openapi_extra=json_body("VariantBody"),
    summary="Vary a problem",
)
async def variants(request: Request, service: Serving, _who: Reader) -> Response:
    """Return the problem with less memory, more micro-batches and so on: one value per axis."""
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    text = await service.pool.run(read_variant, body)
    return Response(text, media_type="application/json")
