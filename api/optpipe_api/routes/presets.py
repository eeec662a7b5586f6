"""``/v1/presets``, ``/v1/estimates`` and ``/v1/variants``: problems without writing JSON.

They change nothing, so every role may ask.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Request, Response

from optpipe_api.bodies import read_body, require_json
from optpipe_api.desk.variants import estimated, varied
from optpipe_api.http_errors import documented
from optpipe_api.preset_schemas import Catalogue, EstimateView, VariantView
from optpipe_api.routes.serving import Reader, Serving  # noqa: TC001 - FastAPI reads it

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["presets"])


def _body(name: str) -> dict[str, Any]:
    schema = {"schema": {"$ref": f"#/components/schemas/{name}"}}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}


@lru_cache
def _catalogue() -> Catalogue:
    return Catalogue.make()


@router.get("/presets", responses=documented(), summary="List models and accelerators")
async def presets() -> Catalogue:
    """Return the models and accelerators that an estimate knows by name, with sources."""
    return _catalogue()


@router.post(
    "/estimates",
    response_model=EstimateView,
    responses=documented(413, 415),
    openapi_extra=_body("EstimateBody"),
    summary="Estimate a problem from a model and an accelerator",
)
async def estimates(request: Request, service: Serving, _who: Reader) -> Response:
    """Return the problem of a model on an accelerator, varied by `values`: nothing is measured."""
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    text = await estimated(service.readers, body)
    return Response(text, media_type="application/json")


@router.post(
    "/variants",
    response_model=VariantView,
    responses=documented(413, 415),
    openapi_extra=_body("VariantBody"),
    summary="Vary a problem",
)
async def variants(request: Request, service: Serving, _who: Reader) -> Response:
    """Return the problem with less memory, more micro-batches and so on: one value per axis."""
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    text = await varied(service.readers, body)
    return Response(text, media_type="application/json")
