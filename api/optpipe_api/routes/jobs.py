"""``/v1/jobs``: submit, list, look, cancel, resume; the problem and the model back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from optpipe_api.bodies import decode_json, read_body, require_json
from optpipe_api.desk.intake import read_submission
from optpipe_api.http_errors import documented
from optpipe_api.job_views import JobList, JobView
from optpipe_api.jobs import JobState  # noqa: TC001 - FastAPI reads it
from optpipe_api.routes.parameters import idempotency_key, json_body, json_content, seconds_to_wait
from optpipe_api.routes.serving import Reader, Serving, Submitter  # noqa: TC001 - likewise
from optpipe_api.routes.waiting import place_to_wait, while_there
from optpipe_api.schemas import Resumption, Tag

if TYPE_CHECKING:
    from optpipe_api.access import Principal
    from optpipe_api.desk.intake import Submitted
    from optpipe_api.jobs import Job
    from optpipe_api.service import Service
    from optpipe_api.turns import Turns

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_CANCEL_WAIT_S = 1.0


Wait = Annotated[float, seconds_to_wait("the end")]
Key = Annotated[str | None, idempotency_key("returns the first one's job")]
BatchId = Annotated[str, Query(pattern=r"^[0-9a-f]{32}$")]


def _document(name: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": f"The {name.lower()}.", "content": json_content(name)}}


_LOCATION = {"Location": {"schema": {"type": "string"}, "description": "The job's own address."}}
_ENDED: dict[int | str, dict[str, Any]] = {
    200: {"model": JobView, "description": "The job has ended.", "headers": _LOCATION},
    202: {"model": JobView, "description": "The job goes on.", "headers": _LOCATION},
}


@router.post(
    "",
    status_code=202,
    response_model=JobView,
    responses={**_ENDED, **documented(403, 413, 415, 429)},
    openapi_extra=json_body("Submission"),
    summary="Submit a problem or a model",
)
async def submit(
    request: Request,
    service: Serving,
    who: Submitter,
    wait: Wait = 0.0,
    idempotency_key: Key = None,
) -> Response:
    """Queue a problem to solve, or a model to cut, place and schedule; answer 202.

    200 where the job ends within `?wait=`, or at once because the same was solved before.
    """
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    submitted = await read_submission(service.readers, body)
    del body
    with place_to_wait(service, who, wait):
        job = await run_in_threadpool(_submit, service, submitted, who, idempotency_key)
        return await _answer(request, service, who, job, wait)


def _submit(service: Service, submitted: Submitted, who: Principal, key: str | None) -> Job:
    intake = submitted.intake
    options = submitted.options.within(service.settings, service.methods, intake.kind)
    return service.jobs.submit(
        intake, options, who, key, tags=submitted.tags, priority=submitted.priority
    )


@router.get("", responses=documented(), summary="List jobs, newest first")
def page(
    *,
    service: Serving,
    who: Reader,
    state: JobState | None = None,
    tag: Annotated[Tag | None, Query()] = None,
    batch: BatchId | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[int | None, Query(ge=1, le=2**53, description="`next` of a page.")] = None,
) -> JobList:
    """Return a page of jobs in a state, with a tag, of a batch; `next` is the next `cursor`."""
    found = service.jobs.page(limit + 1, cursor, who, state=state, tag=tag, batch_id=batch)
    shown = found[:limit]
    following = shown[-1].position if len(found) > limit else None
    return JobList(jobs=[JobView.of(job, who=who) for job in shown], next=following)


@router.get("/{job_id}", responses=documented(404), summary="Look at a job")
def look(job_id: str, service: Serving, who: Reader) -> JobView:
    """Return state, objective, bound, gap, error, times, and every improvement so far."""
    return JobView.of(*service.jobs.job(job_id, who), who=who)


@router.delete(
    "/{job_id}",
    response_model=JobView,
    responses={**_ENDED, **documented(403, 404)},
    summary="Cancel a job",
)
async def cancel(job_id: str, request: Request, service: Serving, who: Submitter) -> Response:
    """Stop a job and keep its best schedule; an ended job stays as it is."""
    job = await run_in_threadpool(service.jobs.cancel, job_id, who)
    return await _answer(request, service, who, job, _CANCEL_WAIT_S)


@router.post(
    "/{job_id}/resume",
    status_code=202,
    response_model=JobView,
    responses={**_ENDED, **documented(403, 404, 409, 413, 415, 429)},
    openapi_extra=json_body("Resumption"),
    summary="Give an ended job more time",
)
async def resume(
    job_id: str, request: Request, service: Serving, who: Submitter, wait: Wait = 0.0
) -> Response:
    """Queue an ended job again with a longer time limit, from where it stands.

    409 where it goes on, or nothing better can be found: it is proven optimal or infeasible.
    """
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    more_s = Resumption.parse(decode_json(body)).time_limit_s
    with place_to_wait(service, who, wait):
        job = await run_in_threadpool(service.jobs.resume, job_id, more_s, who)
        return await _answer(request, service, who, job, wait)


@router.get(
    "/{job_id}/problem",
    response_class=Response,
    responses={**_document("Problem"), **documented(404)},
    summary="Fetch the problem",
)
def problem(job_id: str, service: Serving, who: Reader) -> Response:
    """Return the problem as it is solved, defaults filled in.

    That of a planned model is the one of its best schedule so far.
    """
    return Response(service.jobs.problem(job_id, who), media_type="application/json")


@router.get(
    "/{job_id}/model",
    response_class=Response,
    responses={**_document("Model"), **documented(404)},
    summary="Fetch the model",
)
def model(job_id: str, service: Serving, who: Reader) -> Response:
    """Return the model of a planned job as it was submitted, defaults filled in."""
    return Response(service.jobs.model(job_id, who), media_type="application/json")


async def _answer(
    request: Request, service: Service, who: Principal, job: Job, wait_s: float
) -> Response:
    turns: Turns = request.app.state.turns
    # Those whose jobs were written by the same commit are all here now.
    await turns.mine()
    if wait_s > 0:
        job = await while_there(request, service.jobs.wait(job, wait_s), wait_s) or job
    if job.is_untouched:
        view = JobView.of(job, [], who=who)
    else:
        view = JobView.of(*await run_in_threadpool(service.jobs.job, job.id, who), who=who)
    headers = {"Location": str(request.app.url_path_for("look", job_id=job.id))}
    return Response(
        view.model_dump_json(),
        200 if view.state.is_final else 202,
        headers,
        media_type="application/json",
    )
