"""``/v1/jobs/{id}/schedule``: the best schedule so far, in the form that is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from optpipe_api.desk.forms import solution
from optpipe_api.etags import etag_of, known_number
from optpipe_api.http_errors import documented
from optpipe_api.negotiation import FORMS, preferred_form
from optpipe_api.routes.serving import Reader, Serving  # noqa: TC001 - FastAPI reads it
from optpipe_api.routes.waiting import place_to_wait, while_there

if TYPE_CHECKING:
    from optpipe_api.access import Principal
    from optpipe_api.jobs import StoredSchedule
    from optpipe_api.service import Service

__all__ = ["NO_SCRIPTS", "router"]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_WITH_PROBLEM = frozenset({"trace", "svg"})
_TEXT = {"schema": {"type": "string"}}
_TAGGED = {
    "ETag": {
        "schema": {"type": "string"},
        "description": 'Of this schedule in this form, for `If-None-Match`: `"<job>.<number>"`.',
    }
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The best schedule so far.",
        "headers": _TAGGED,
        "content": {
            FORMS["json"]: {"schema": {"$ref": "#/components/schemas/Schedule"}},
            FORMS["csv"]: {**_TEXT, "example": "0F0,0B0\n1F0,1B0\n"},
            FORMS["trace"]: {"schema": {"type": "object"}},
            FORMS["svg"]: _TEXT,
        },
    },
    304: {"description": "The schedule of `If-None-Match` is still the best.", "headers": _TAGGED},
    **documented(404, 406, 409, 413, 429),
}
_ANSWERS[413]["description"] = "The schedule is too large for a picture."
# A picture shows names that somebody else chose, and comes from our own address.
NO_SCRIPTS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox",
    "X-Content-Type-Options": "nosniff",
}


@router.get(
    "/{job_id}/schedule",
    response_class=Response,
    responses=_ANSWERS,
    summary="Fetch the best schedule so far",
)
async def schedule(
    *,
    job_id: str,
    request: Request,
    service: Serving,
    who: Reader,
    accept: Annotated[str | None, Header()] = None,
    form: Annotated[Literal["json", "csv", "trace", "svg"] | None, Query(alias="format")] = None,
    if_none_match: Annotated[str | None, Header(description="`ETag` of the known one.")] = None,
    wait: Annotated[
        float,
        Query(
            ge=0,
            allow_inf_nan=False,
            description="Seconds to wait for a better schedule than the known one, or for the "
            "first; capped. An ended job does not wait.",
        ),
    ] = 0.0,
) -> Response:
    """Return JSON, CSV (a row per device), a Chrome trace or a picture; by `?format=` or `Accept`.

    Made for polling: with `If-None-Match` and `?wait=`, the answer is the next improvement, or 304.
    """
    chosen = preferred_form(accept) if form is None else form
    known = known_number(if_none_match, job_id, chosen)
    stored: StoredSchedule | None
    if wait > 0:
        with place_to_wait(service, who, wait):
            waiting = service.jobs.wait_schedule(job_id, known or 0, wait, who)
            stored = await while_there(request, waiting, wait)
    else:
        stored = await run_in_threadpool(service.jobs.schedule, job_id, who)
    if stored is None or stored.number == known:
        return Response(status_code=304, headers=_headers(job_id, known or 0, chosen))
    return await _formed(service, who, job_id, stored, chosen)


async def _formed(
    service: Service, who: Principal, job_id: str, stored: StoredSchedule, form: str
) -> Response:
    content: bytes | str = stored.document
    problem = ""
    if form in _WITH_PROBLEM:
        problem, stored = await run_in_threadpool(solution, service.jobs, job_id, who)
    if form == "svg":
        content = await service.forms.picture(stored.document, problem)
    elif form != "json":
        content = await service.forms.text(form, stored.document, problem)
    headers = _headers(job_id, stored.number, form)
    return Response(content, headers=headers, media_type=FORMS[form])


def _headers(job_id: str, number: int, form: str) -> dict[str, str]:
    headers = {
        "ETag": etag_of(job_id, number, form),
        "Vary": "Accept",
        "Cache-Control": "private, no-cache",
    }
    return headers | NO_SCRIPTS if form == "svg" else headers
