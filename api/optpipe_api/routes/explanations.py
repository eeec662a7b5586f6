"""``/v1/jobs/{id}/explanation``: why the best schedule so far is as long as it is."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from starlette.concurrency import run_in_threadpool

from optpipe.explain import Explanation
from optpipe_api.desk.explain import explanation
from optpipe_api.desk.forms import solution
from optpipe_api.etags import etag_of, known_number
from optpipe_api.http_errors import documented
from optpipe_api.routes.serving import Reader, Serving  # noqa: TC001 - FastAPI reads it

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_FORM = "explanation"
_TAG = {"ETag": {"schema": {"type": "string"}, "description": "Of the schedule explained."}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "What limits it.", "headers": _TAG, "model": Explanation},
    304: {"description": "The schedule of `If-None-Match` is still the best.", "headers": _TAG},
    **documented(404, 409, 413, 429),
}
_ANSWERS[413]["description"] = "The schedule is too large to be explained here."


@router.get(
    "/{job_id}/explanation",
    response_class=Response,
    responses=_ANSWERS,
    summary="Say what limits the best schedule so far",
)
async def explain(
    *,
    job_id: str,
    service: Serving,
    who: Reader,
    if_none_match: Annotated[str | None, Header(description="`ETag` of the known one.")] = None,
) -> Response:
    """Return the critical path, lanes, memory, idle time and offloads, in numbers and `sentences`.

    Sizes are bytes, times ms from the start of the schedule; `topic` groups the sentences.
    """
    problem, stored = await run_in_threadpool(solution, service.jobs, job_id, who)
    headers = {
        "ETag": etag_of(job_id, stored.number, _FORM),
        "Cache-Control": "private, no-cache",
    }
    if known_number(if_none_match, job_id, _FORM) == stored.number:
        return Response(status_code=304, headers=headers)
    content = await explanation(service.readers, stored.document, problem)
    return Response(content, headers=headers, media_type="application/json")
