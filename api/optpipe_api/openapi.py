"""The OpenAPI document: FastAPI's, plus the bodies that are parsed strictly and not by FastAPI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from optpipe.model import Model
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_api.batch_schemas import BatchBody, FrontierView, SweepRowList
from optpipe_api.comparison_schemas import Comparison, RowList
from optpipe_api.deployment_schemas import Registration, ReportBody
from optpipe_api.job_views import HistoryView
from optpipe_api.preset_schemas import EstimateBody, VariantBody
from optpipe_api.schemas import Fault, Resumption, Submission
from optpipe_api.what_if_schemas import WhatIfBody

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

__all__ = ["openapi_of"]

_OURS = (
    Submission,
    Resumption,
    HistoryView,
    Schedule,
    Problem,
    Model,
    Fault,
    Comparison,
    RowList,
    Registration,
    ReportBody,
    BatchBody,
    SweepRowList,
    FrontierView,
    EstimateBody,
    VariantBody,
    WhatIfBody,
)
_GENERATED = ("HTTPValidationError", "ValidationError")


def openapi_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Return the function that makes the document, once."""

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
