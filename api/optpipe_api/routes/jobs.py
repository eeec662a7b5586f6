"""``/v1/jobs``: submit, list, look, fetch, cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from optpipe.formats.csv_text import dump_csv
from optpipe.formats.json_text import load_schedule
from optpipe_api.bodies import decode_json, read_body, require_json
from optpipe_api.http_errors import documented
from optpipe_api.negotiation import FORMS, preferred_form
from optpipe_api.routes.serving import Serving  # noqa: TC001 - FastAPI reads it
from optpipe_api.schemas import JobList, JobView, Submission

if TYPE_CHECKING:
    from optpipe_api.jobs import Job
    from optpipe_api.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_CANCEL_WAIT_S = 1.0


Wait = Annotated[
    float, Query(ge=0, allow_inf_nan=False, description="Seconds to wait for the end; capped.")
]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="A repeated request with the same key returns the first one's job.",
    ),
]
_SUBMISSION: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Submission"}}},
    }
}
_ENDED: dict[int | str, dict[str, Any]] = {
    200: {"model": JobView, "description": "The job has ended."},
    202: {"model": JobView, "description": "The job goes on; look at `Location`."},
}


@router.post(
    "",
    status_code=202,
    response_model=JobView,
    responses={**_ENDED, **documented(413, 415, 429)},
    openapi_extra=_SUBMISSION,
    summary="Submit a problem",
)
async def submit(
    request: Request, service: Serving, wait: Wait = 0.0, idempotency_key: Key = None
) -> Response:
    """Queue a problem and answer 202; with `?wait=`, 200 where it ends in that time."""
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    job = await run_in_threadpool(_submit, service, body, idempotency_key)
    del body
    return await _answer(service, request, job, wait)


def _submit(service: Service, body: bytes, key: str | None) -> Job:
    submission = Submission.parse(decode_json(body))
    options = submission.options.within(service.settings, service.methods)
    return service.submit(submission.problem, options, key)


@router.get("", responses=documented(), summary="List jobs, newest first")
def page(
    service: Serving,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[int | None, Query(ge=1, le=2**53, description="`next` of a page.")] = None,
) -> JobList:
    """Return a page of jobs; its `next` is the `cursor` of the one after."""
    found = service.page(limit + 1, cursor)
    shown = found[:limit]
    following = shown[-1].position if len(found) > limit else None
    return JobList(jobs=[JobView.of(job) for job in shown], next=following)


@router.get("/{job_id}", responses=documented(404), summary="Look at a job")
def look(job_id: str, service: Serving) -> JobView:
    """Return state, objective, bound, gap, error, times, and every improvement so far."""
    return JobView.of(*service.job(job_id))


@router.delete(
    "/{job_id}",
    response_model=JobView,
    responses={**_ENDED, **documented(404)},
    summary="Cancel a job",
)
async def cancel(job_id: str, request: Request, service: Serving) -> Response:
    """Stop a job and keep its best schedule; an ended job stays as it is."""
    job = await run_in_threadpool(service.cancel, job_id)
    return await _answer(service, request, job, _CANCEL_WAIT_S)


@router.get("/{job_id}/problem", responses=documented(404), summary="Fetch the problem")
def problem(job_id: str, service: Serving) -> Response:
    """Return the problem as it is solved, defaults filled in."""
    return Response(service.problem(job_id), media_type="application/json")


@router.get(
    "/{job_id}/schedule",
    response_class=Response,
    responses={
        200: {
            "description": "The best schedule so far.",
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/Schedule"}},
                "text/csv": {"schema": {"type": "string"}, "example": "0F0,0B0\n1F0,1B0\n"},
            },
        },
        **documented(404, 406, 409),
    },
    summary="Fetch the best schedule so far",
)
def schedule(
    job_id: str,
    service: Serving,
    accept: Annotated[str | None, Header()] = None,
    form: Annotated[Literal["json", "csv"] | None, Query(alias="format")] = None,
) -> Response:
    """Return JSON or CSV (one row per device), by `?format=` or `Accept`."""
    chosen = preferred_form(accept) if form is None else form
    text = service.schedule(job_id)
    if chosen == "csv":
        text = dump_csv(load_schedule(text).programs)
    return Response(text, media_type=FORMS[chosen], headers={"Vary": "Accept"})


async def _answer(service: Service, request: Request, job: Job, wait_s: float) -> Response:
    if wait_s > 0:
        job = await service.wait(job, wait_s)
    view = JobView.of(*await run_in_threadpool(service.job, job.id))
    headers = {"Location": str(request.app.url_path_for("look", job_id=job.id))}
    return Response(
        view.model_dump_json(),
        200 if view.state.is_final else 202,
        headers,
        media_type="application/json",
    )
