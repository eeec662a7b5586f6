"""``/v1/methods``, ``/v1/presets`` and what is made of them: what one may ask for."""

from __future__ import annotations

from functools import lru_cache

from fastapi import APIRouter, Request, Response

from optpipe.wire import MethodList  # noqa: TC001 - FastAPI reads it
from optpipe_api.http_errors import documented
from optpipe_api.requests.catalogue import Catalogue, EstimateView, VariantView
from optpipe_api.requests.http import read_body, require_json
from optpipe_api.routes.common import Reader, Serving, json_body
from optpipe_api.services.submission import read_estimate, read_variant
from optpipe_api.views import method_list

__all__ = ["presets_router", "router"]


router = APIRouter(prefix="/v1", tags=["methods"])


@router.get("/methods", responses=documented(), summary="List the methods")
async def methods(service: Serving) -> MethodList:
    """Return what `method` of a job may be, each with one line about it."""
    return method_list(service.methods)


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
