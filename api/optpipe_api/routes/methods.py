"""``/v1/methods`` and ``/v1/compare``: which methods there are, and what each would do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response

from optpipe_api.bodies import read_body, require_json
from optpipe_api.comparison_schemas import MethodList
from optpipe_api.desk.intake import read_comparison
from optpipe_api.http_errors import documented
from optpipe_api.negotiation import TABLE_FORMS, preferred_form
from optpipe_api.routes.parameters import json_body
from optpipe_api.routes.serving import Serving, Submitter  # noqa: TC001 - FastAPI reads it

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["methods"])

_REQUEST = json_body("Comparison")
_CSV_EXAMPLE = "method,placement,makespan_ms,...\n1f1b,as given,84.0,...\n"
_MARKDOWN_EXAMPLE = "| method | makespan ms | ... |\n| --- | ---: | --- |\n| 1f1b | 84 | ... |\n"
_ROWS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A row per method, best first.",
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/RowList"}},
            "text/csv": {"schema": {"type": "string"}, "example": _CSV_EXAMPLE},
            "text/markdown": {"schema": {"type": "string"}, "example": _MARKDOWN_EXAMPLE},
        },
    }
}


@router.get("/methods", responses=documented(), summary="List the methods")
async def methods(service: Serving) -> MethodList:
    """Return what `method` of a job may be, each with one line about it."""
    return MethodList.of(service.methods)


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
    intake, asked = await read_comparison(service.readers, body)
    del body
    options = asked.within(service.settings, chosen)
    text = await service.compare(intake, options, request.is_disconnected)
    return Response(text, media_type=TABLE_FORMS[chosen], headers={"Vary": "Accept"})
