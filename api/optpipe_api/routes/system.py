"""Is it alive, is it ready, what does it speak."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from optpipe.model import Model
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.http_errors import documented
from optpipe_api.metrics import CONTENT_TYPE
from optpipe_api.routes.serving import Serving  # noqa: TC001 - FastAPI reads it
from optpipe_api.schemas import Health, Readiness

__all__ = ["router"]

router = APIRouter(tags=["system"])


@router.get("/healthz", summary="Is the process alive")
async def healthz() -> Health:
    """Answer without looking at anything."""
    return Health()


@router.get("/readyz", responses=documented(), summary="Is the service ready")
def readyz(service: Serving) -> Readiness:
    """Ask the store and the engine."""
    if not service.is_solving:
        raise StoreUnavailableError(
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
    """Return what `optpipe_api.metrics` lists; needs a key wherever the rest does."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE)


@router.get(
    "/v1/schemas/problem", responses=documented(), summary="JSON Schema of optpipe/problem/v1"
)
async def problem_schema() -> dict[str, Any]:
    """Return what `POST /v1/jobs` takes as `problem`."""
    return _published(Problem.model_json_schema(), "problem")


@router.get("/v1/schemas/model", responses=documented(), summary="JSON Schema of optpipe/model/v1")
async def model_schema() -> dict[str, Any]:
    """Return what `optpipe plan` takes."""
    return _published(Model.model_json_schema(), "model")


@router.get(
    "/v1/schemas/schedule", responses=documented(), summary="JSON Schema of optpipe/schedule/v1"
)
async def schedule_schema() -> dict[str, Any]:
    """Return what `/v1/jobs/{id}/schedule` answers."""
    return _published(Schedule.model_json_schema(), "schedule")


def _published(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:optpipe:{name}:v1",
        **schema,
    }
