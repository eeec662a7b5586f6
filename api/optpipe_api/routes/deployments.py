"""``/v1/deployments``: training runs that follow the newest schedule of their problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from optpipe.answers import DeploymentList, DeploymentView, Version, VersionList
from optpipe_api.bodies import etag_of, known_number, read_body, require_json
from optpipe_api.http_errors import documented
from optpipe_api.routes.common import (
    KNOWN_ALONE,
    Cursor,
    Limit,
    Reader,
    Serving,
    Submitter,
    idempotency_key,
    json_body,
    json_content,
    location_of,
    owner_for,
    page_of,
    place_to_wait,
    seconds_to_wait,
    tagged,
    while_there,
)
from optpipe_api.services.render import as_text
from optpipe_api.services.submission import read_registration, read_report

if TYPE_CHECKING:
    from optpipe_api.access import Principal
    from optpipe_api.deployments import DeploymentRecord

__all__ = ["router"]

router = APIRouter(prefix="/v1/deployments", tags=["deployments"])

_MAX_REPORT_BYTES = 4 * 1024**2
_FORMS = {"json": "application/json", "csv": "text/csv"}

Key = Annotated[str | None, idempotency_key("returns the first one's deployment")]
Wait = Annotated[float, seconds_to_wait("a newer version")]


@router.post(
    "",
    status_code=202,
    response_model=DeploymentView,
    responses={202: {"headers": location_of("deployment")}, **documented(403, 413, 415, 429)},
    openapi_extra=json_body("DeployRequest"),
    summary="Register a training run",
)
async def register(
    request: Request, service: Serving, who: Submitter, idempotency_key: Key = None
) -> Response:
    """Begin to solve its problem and answer; the first version comes with the first schedule."""
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    registered = await service.pool.run(read_registration, body, service.settings, service.methods)
    del body
    found = await run_in_threadpool(service.deployments.register, registered, who, idempotency_key)
    location = str(request.app.url_path_for("look_at_deployment", deployment_id=found.id))
    return Response(
        deployment_view(found, who).model_dump_json(),
        202,
        {"Location": location},
        media_type="application/json",
    )


@router.get(
    "",
    dependencies=KNOWN_ALONE,
    responses=documented(404),
    summary="List deployments, newest first",
)
def list_deployments(
    service: Serving, who: Reader, limit: Limit = 50, cursor: Cursor = None
) -> DeploymentList:
    """Return a page of deployments; its `next` is the `cursor` of the one after."""
    found = service.deployments.page(limit + 1, cursor, who)
    shown, following = page_of(found, limit)
    views = tuple(deployment_view(deployment, who) for deployment in shown)
    return DeploymentList(deployments=views, next=following)


@router.get("/{deployment_id}", responses=documented(404), summary="Look at a deployment")
def look_at_deployment(deployment_id: str, service: Serving, who: Reader) -> DeploymentView:
    """Return what goes on: its newest version, the solve under way, and what drift costs."""
    return deployment_view(service.deployments.find(deployment_id, who), who)


@router.post("/{deployment_id}/end", responses=documented(403, 404), summary="End a deployment")
def end_deployment(deployment_id: str, service: Serving, who: Submitter) -> DeploymentView:
    """Publish nothing any more and cancel the solve under way; its versions stay."""
    return deployment_view(service.deployments.end(deployment_id, who), who)


@router.delete(
    "/{deployment_id}",
    status_code=204,
    responses=documented(403, 404, 409),
    summary="Delete a deployment",
)
def delete_deployment(deployment_id: str, service: Serving, who: Submitter) -> None:
    """Forget an ended deployment with its versions and reports. 409 where it goes on."""
    service.deployments.delete(deployment_id, who)


@router.get(
    "/{deployment_id}/schedule",
    response_class=Response,
    responses=tagged(
        {
            "description": "The newest version; `OptPipe-Version` is its number.",
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/Schedule"}},
                "text/csv": {"schema": {"type": "string"}, "example": "0F0,0B0\n1F0,1B0\n"},
            },
        },
        of="this version in this form",
        OptPipe_Version="Its number.",
    )
    | documented(404, 409, 413, 429),
    summary="Fetch the newest schedule",
)
async def newest_schedule(
    deployment_id: str,
    request: Request,
    service: Serving,
    who: Reader,
    *,
    wait: Wait = 0.0,
    if_none_match: Annotated[str | None, Header()] = None,
    form: Annotated[Literal["json", "csv"], Query(alias="format")] = "json",
) -> Response:
    """Return the newest version; with `?wait=` and `If-None-Match`, as soon as it is newer.

    This is what a training run polls: one request waits for the next version.
    """
    known = known_number(if_none_match, deployment_id, form)
    with place_to_wait(service, who, wait):
        waiting = service.deployments.wait_schedule(deployment_id, known or 0, wait, who)
        found = await while_there(request, waiting, wait)
    if found is None:
        return Response(status_code=304, headers=_marks(deployment_id, known or 0, form))
    version, text = found
    if form == "csv":
        text = await service.pool.run(as_text, form, text)
    return Response(text, headers=_marks(deployment_id, version, form), media_type=_FORMS[form])


def _marks(deployment_id: str, version: int, form: str) -> dict[str, str]:
    return {
        "ETag": etag_of(deployment_id, version, form),
        "OptPipe-Version": str(version),
        "Cache-Control": "private, no-cache",
    }


@router.post(
    "/{deployment_id}/measurements",
    status_code=202,
    responses=documented(403, 404, 409, 413, 415, 429),
    openapi_extra=json_body("ReportRequest"),
    summary="Report measured times",
)
async def report(
    deployment_id: str, request: Request, service: Serving, who: Submitter
) -> DeploymentView:
    """Keep what was measured; where drift costs more than the threshold, a solve is begun."""
    require_json(request)
    body = await read_body(request, min(_MAX_REPORT_BYTES, service.settings.max_body_bytes))
    measured = await service.pool.run(read_report, body)
    del body
    reported = await run_in_threadpool(service.deployments.report, deployment_id, measured, who)
    return deployment_view(reported, who)


@router.get("/{deployment_id}/versions", responses=documented(404), summary="List the versions")
def versions(deployment_id: str, service: Serving, who: Reader) -> VersionList:
    """Return every version: why it was published, and its predicted and measured step time."""
    found = service.deployments.versions(deployment_id, who)
    return VersionList(versions=tuple(Version.of(version) for version in found))


@router.get(
    "/{deployment_id}/problem",
    response_class=Response,
    responses={
        200: {
            "description": "The problem with the times last measured.",
            "content": json_content("Problem"),
        },
        **documented(404),
    },
    summary="Fetch the problem as measured",
)
def problem(deployment_id: str, service: Serving, who: Reader) -> Response:
    """Return the problem with the measured times; as registered, before the first report."""
    text = service.deployments.problem(deployment_id, who)
    return Response(text, media_type="application/json")


def deployment_view(deployment: DeploymentRecord, who: Principal) -> DeploymentView:
    return DeploymentView.of(
        deployment,
        owner=owner_for(deployment.owner, who),
        reason=deployment.job_reason,
    )
