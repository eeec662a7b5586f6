"""``/v1/jobs/{id}/what-ifs``: what a little more memory, bandwidth or batch would buy."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from starlette.concurrency import run_in_threadpool

from optpipe_api.bodies import decode_json, read_body, require_json
from optpipe_api.http_errors import documented
from optpipe_api.routes.parameters import idempotency_key, json_body, seconds_to_wait
from optpipe_api.routes.serving import Reader, Serving, Submitter  # noqa: TC001 - FastAPI reads it
from optpipe_api.routes.waiting import place_to_wait, while_there
from optpipe_api.what_if_schemas import WhatIfBody, WhatIfsView

if TYPE_CHECKING:
    from optpipe_api.access import Principal
    from optpipe_api.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

Wait = Annotated[float, seconds_to_wait("the end of all")]
Key = Annotated[str | None, idempotency_key("asks nothing again")]

_BODY = json_body("WhatIfBody")
_LOCATION = {"Location": {"schema": {"type": "string"}, "description": "Where the answers are."}}
_ENDED: dict[int | str, dict[str, Any]] = {
    200: {"model": WhatIfsView, "description": "All are answered.", "headers": _LOCATION},
    202: {"model": WhatIfsView, "description": "The searches go on.", "headers": _LOCATION},
}
_TAG = {"ETag": {"schema": {"type": "string"}, "description": "Of these answers."}}
_SEEN: dict[int | str, dict[str, Any]] = {
    200: {"model": WhatIfsView, "description": "What is known so far.", "headers": _TAG},
    304: {"description": "Nothing has changed since `If-None-Match`.", "headers": _TAG},
}


@router.post(
    "/{job_id}/what-ifs",
    status_code=202,
    response_model=WhatIfsView,
    responses={**_ENDED, **documented(403, 404, 409, 413, 415, 429)},
    openapi_extra=_BODY,
    summary="Ask what more would buy",
)
async def ask(
    *,
    job_id: str,
    request: Request,
    service: Serving,
    who: Submitter,
    wait: Wait = 0.0,
    idempotency_key: Key = None,
) -> Response:
    """Solve the job's problem with 1 GB more, a 20 % faster bus, and twice the micro-batches.

    Each is a job of its own, an item of one batch, and starts from the best schedule of this job,
    which must have ended (409). So that nothing is put down to a change that more searching finds
    without it: unless the job is proven optimal, first `POST /v1/jobs/{job_id}/resume` it with the
    same `time_limit_s`, and ask when that has ended.
    """
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    wanted = WhatIfBody.parse(decode_json(body))
    options = wanted.within(service.settings)
    with place_to_wait(service, who, wait):
        batch = await service.what_ifs.ask(
            job_id, options, who, idempotency_key, priority=wanted.priority
        )
        await while_there(request, service.batches.wait(batch, wait), wait)
    view = await run_in_threadpool(_view, service, job_id, who)
    location = str(request.app.url_path_for("look_at_what_ifs", job_id=job_id))
    status = 200 if view.is_finished else 202
    return Response(
        view.model_dump_json(), status, {"Location": location}, media_type="application/json"
    )


@router.get(
    "/{job_id}/what-ifs",
    response_model=WhatIfsView,
    responses={**_SEEN, **documented(404)},
    summary="See what more would buy",
)
async def look_at_what_ifs(
    *,
    job_id: str,
    request: Request,
    service: Serving,
    who: Reader,
    wait: Wait = 0.0,
    if_none_match: Annotated[str | None, Header(description="`ETag` of the known answers.")] = None,
) -> Response:
    """Return the answers to what was asked last; 404 where nobody has asked.

    Each with the job whose schedule is the one it came from; in words once that has ended.
    """
    found = await run_in_threadpool(service.what_ifs.look, job_id, who)
    with place_to_wait(service, who, wait):
        await while_there(request, service.batches.wait(found.batch, wait), wait)
    text = (await run_in_threadpool(_view, service, job_id, who)).model_dump_json()
    tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if tag in (if_none_match or ""):
        return Response(status_code=304, headers=headers)
    return Response(text, headers=headers, media_type="application/json")


def _view(service: Service, job_id: str, who: Principal) -> WhatIfsView:
    return WhatIfsView.of(service.what_ifs.look(job_id, who))
