"""``/v1/deployments``: training runs that follow the newest schedule of their problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from optpipe.answers import DeploymentList, DeploymentView, Version, VersionList
from optpipe_api.bodies import SCHEDULE_FORMS, known_number
from optpipe_api.http_errors import documented
from optpipe_api.routes.common import (
    KNOWN_PARAMETERS_ONLY,
    Cursor,
    JsonText,
    Limit,
    Reader,
    Serving,
    Submitter,
    count_waiting,
    document,
    idempotency_key,
    json_body,
    location_of,
    parse_body,
    seconds_to_wait,
    split_page,
    tagged,
    version_headers,
    visible_owner,
    wait_while_connected,
)
from optpipe_api.services.render import dump_schedule
from optpipe_api.services.submission import read_registration, read_report

if TYPE_CHECKING:
    from optpipe_api.access import Principal
    from optpipe_api.deployments import DeploymentRecord

__all__ = ["router"]

router = APIRouter(prefix="/v1/deployments", tags=["deployments"])

_MAX_REPORT_BYTES = 4 * 1024**2

Key = Annotated[str | None, idempotency_key("returns the deployment of the first one")]
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
    request: Request, service: Serving, caller: Submitter, idempotency_key: Key = None
) -> Response:
    """Start to solve its problem, and answer. The first schedule is the first version."""
    new = await parse_body(request, service, read_registration, service.settings, service.methods)
    found = await run_in_threadpool(service.deployments.register, new, caller, idempotency_key)
    view = _view_deployment(found, caller)
    return JsonText(view.model_dump_json(), 202, {"Location": f"/v1/deployments/{found.id}"})


@router.get(
    "",
    dependencies=KNOWN_PARAMETERS_ONLY,
    responses=documented(404),
    summary="List deployments, newest first",
)
def list_deployments(
    service: Serving, caller: Reader, limit: Limit = 50, cursor: Cursor = None
) -> DeploymentList:
    """Return a page of deployments; `next` is the `cursor` of the next page."""
    found = service.deployments.page(limit + 1, service.cursors.decode(cursor), caller)
    page, following = split_page(service, found, limit)
    views = tuple(_view_deployment(deployment, caller) for deployment in page)
    return DeploymentList(deployments=views, next=following)


@router.get("/{deployment_id}", responses=documented(404), summary="Get a deployment")
def look_at_deployment(deployment_id: str, service: Serving, caller: Reader) -> DeploymentView:
    """Return the newest version, the current solve, and the cost of drift."""
    return _view_deployment(service.deployments.find(deployment_id, caller), caller)


@router.post("/{deployment_id}/end", responses=documented(403, 404), summary="End a deployment")
def end_deployment(deployment_id: str, service: Serving, caller: Submitter) -> DeploymentView:
    """Publish no more versions and cancel the current solve. Existing versions stay."""
    return _view_deployment(service.deployments.end(deployment_id, caller), caller)


@router.delete(
    "/{deployment_id}",
    status_code=204,
    responses=documented(403, 404, 409),
    summary="Delete a deployment",
)
def delete_deployment(deployment_id: str, service: Serving, caller: Submitter) -> None:
    """Delete an ended deployment with its versions and reports. 409 if it has not ended."""
    service.deployments.delete(deployment_id, caller)


@router.get(
    "/{deployment_id}/schedule",
    response_class=Response,
    responses=tagged(
        document(
            "Schedule",
            "The newest version; `OptPipe-Version` is its number.",
            {"text/csv": "0F0,0B0\n1F0,1B0\n"},
        ),
        of="this version in this form",
        OptPipe_Version="Number of the version.",
    )
    | documented(404, 409, 413, 429),
    summary="Fetch the newest schedule",
)
async def newest_schedule(
    deployment_id: str,
    request: Request,
    service: Serving,
    caller: Reader,
    *,
    wait: Wait = 0.0,
    if_none_match: Annotated[str | None, Header()] = None,
    form: Annotated[Literal["json", "csv"], Query(alias="format")] = "json",
) -> Response:
    """Return the newest version.

    A training run polls with `?wait=` and `If-None-Match`: one request waits for the next version.
    """
    known = known_number(if_none_match, deployment_id, form) or 0
    with count_waiting(service, caller, wait):
        waiting = service.deployments.wait_schedule(deployment_id, known, wait, caller)
        found = await wait_while_connected(request, waiting, wait)
    version, text = found or (known, "")
    headers = version_headers(deployment_id, version, form) | {"OptPipe-Version": str(version)}
    if found is None:
        return Response(status_code=304, headers=headers)
    if form == "csv":
        text = await service.pool.run(dump_schedule, form, text, caller=caller)
    return Response(text, headers=headers, media_type=SCHEDULE_FORMS[form])


@router.post(
    "/{deployment_id}/measurements",
    status_code=202,
    responses=documented(403, 404, 409, 413, 415, 429),
    openapi_extra=json_body("ReportRequest"),
    summary="Report measured times",
)
async def report(
    deployment_id: str, request: Request, service: Serving, caller: Submitter
) -> DeploymentView:
    """Store measured times. If drift costs more than the threshold, a new solve starts."""
    measured = await parse_body(request, service, read_report, max_bytes=_MAX_REPORT_BYTES)
    reported = await run_in_threadpool(service.deployments.report, deployment_id, measured, caller)
    return _view_deployment(reported, caller)


@router.get("/{deployment_id}/versions", responses=documented(404), summary="List the versions")
def versions(deployment_id: str, service: Serving, caller: Reader) -> VersionList:
    """Return every version: the reason for it, and its predicted and measured step time."""
    found = service.deployments.versions(deployment_id, caller)
    return VersionList(versions=tuple(map(Version.of, found)))


@router.get(
    "/{deployment_id}/problem",
    response_class=Response,
    responses=document("Problem", "The problem with the latest measured times.") | documented(404),
    summary="Fetch the problem as measured",
)
def problem(deployment_id: str, service: Serving, caller: Reader) -> Response:
    """Return the problem with the measured times. Before the first report, as registered."""
    return JsonText(service.deployments.problem(deployment_id, caller))


def _view_deployment(deployment: DeploymentRecord, caller: Principal) -> DeploymentView:
    owner = visible_owner(deployment.owner, caller)
    return DeploymentView.of(deployment, owner=owner, reason=deployment.job_reason)
