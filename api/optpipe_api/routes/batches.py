"""``/v1/batches``: sweeps, lists of problems, what-ifs; solved as jobs and seen as one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from optpipe.answers import BatchList, BatchView, FrontierLineView, FrontierPointView, FrontierView, Item, JobState
from optpipe.formats.tables import dump_sweep
from optpipe_api.bodies import FRONTIER_FORMS, TABLE_FORMS, preferred_form, read_body, require_json
from optpipe_api.errors import BatchNotFoundError
from optpipe_api.http_errors import documented
from optpipe_api.routes.common import (
    KNOWN_ALONE,
    NO_SCRIPTS,
    Accept,
    Answers,
    Cursor,
    Limit,
    Reader,
    Serving,
    Submitter,
    ended,
    idempotency_key,
    json_body,
    owner_for,
    page_of,
    place_to_wait,
    seconds_to_wait,
    while_there,
)
from optpipe_api.services.submission import read_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_api.access import Principal
    from optpipe_api.jobs import BatchItem, BatchPlan, BatchRecord
    from optpipe_api.service import Service

__all__ = ["router"]


router = APIRouter(prefix="/v1/batches", tags=["batches"])

_CANCEL_WAIT_S = 1.0

Key = Annotated[str | None, idempotency_key("returns the first one's batch")]
Wait = Annotated[float, seconds_to_wait("the end of all")]

_BODY = json_body("SweepRequest")
_ENDED = ended(BatchView, "batch")
_TEXT = {"schema": {"type": "string"}}
_TABLE: Answers = {
    200: {
        "description": "A row per item, in order.",
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/SweepRowList"}},
            "text/csv": {**_TEXT, "example": "index,name,memory_scale,state,...\n0,a,1,..."},
            "text/markdown": {**_TEXT, "example": "| memory_scale | state | ...\n"},
        },
    }
}
_FRONTIER: Answers = {
    200: {
        "description": "What memory buys, as numbers or as a picture.",
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/FrontierView"}},
            "image/svg+xml": _TEXT,
        },
    }
}


@router.post(
    "",
    status_code=202,
    response_model=BatchView,
    responses={**_ENDED, **documented(403, 404, 409, 413, 415, 429)},
    openapi_extra=_BODY,
    summary="Submit a sweep, a list of problems, or a what-if",
)
async def submit(
    request: Request,
    service: Serving,
    who: Submitter,
    wait: Wait = 0.0,
    idempotency_key: Key = None,
) -> Response:
    """Make a job of every item, of all or of none, and answer 202.

    200 where all end within `?wait=`, or at once because they were solved before. Every item must
    be a valid problem; the answer to one that is not names its values.

    `what_if` names a job that has ended with a schedule (409 otherwise). The items are its problem
    as it is (unless it is proven optimal), with 1 GB more on the device that has least left, with
    a 20 % faster bus, with twice the micro-batches; what makes no sense for the problem is left
    out. Each starts from the job's best schedule.
    """
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    swept = await service.pool.run(
        read_batch, body, service.settings, service.methods, is_heavy=True
    )
    del body
    with place_to_wait(service, who, wait):
        if swept.what_if:
            swept = await service.batches.ask(swept, who)
        batch = await run_in_threadpool(service.batches.submit, swept, who, idempotency_key)
        return await _answer(request, service, who, batch, wait)


@router.get(
    "", dependencies=KNOWN_ALONE, responses=documented(404), summary="List batches, newest first"
)
def list_batches(
    service: Serving, who: Reader, limit: Limit = 50, cursor: Cursor = None
) -> BatchList:
    """Return a page of batches and how far they are; `next` is the `cursor` of the next one."""
    found = service.batches.page(limit + 1, cursor, who)
    shown, following = page_of(found, limit)
    return BatchList(batches=tuple(batch_view(batch, who) for batch in shown), next=following)


@router.get(
    "/{batch_id}", response_model=BatchView, responses=documented(404), summary="Look at a batch"
)
async def look_at_batch(
    batch_id: str, request: Request, service: Serving, who: Reader, wait: Wait = 0.0
) -> Response:
    """Return progress, items in each state, and every item with its job and what it has found."""
    if wait > 0:
        await service.batches.check(batch_id, who)
        with place_to_wait(service, who, wait):
            await while_there(request, service.batches.wait(batch_id, wait), wait)
    _, text = await _shown(service, batch_id, who)
    return Response(text, media_type="application/json")


@router.get(
    "/{batch_id}/table",
    response_class=Response,
    responses={**_TABLE, **documented(404, 406)},
    summary="Fetch one table of all items",
)
def table(
    batch_id: str,
    service: Serving,
    who: Reader,
    accept: Accept = None,
    form: Annotated[Literal["json", "csv", "markdown"] | None, Query(alias="format")] = None,
) -> Response:
    """Return a row per item, as far as it is: JSON, CSV or Markdown, by `?format=` or `Accept`."""
    chosen = preferred_form(accept, TABLE_FORMS) if form is None else form
    text = dump_sweep(service.batches.table(batch_id, who), chosen)
    return Response(text, media_type=TABLE_FORMS[chosen], headers={"Vary": "Accept"})


@router.get(
    "/{batch_id}/frontier",
    response_class=Response,
    responses={**_FRONTIER, **documented(404, 406, 413, 429)},
    summary="See what memory buys",
)
async def frontier(
    batch_id: str,
    service: Serving,
    who: Reader,
    accept: Accept = None,
    form: Annotated[Literal["json", "svg"] | None, Query(alias="format")] = None,
) -> Response:
    """Return the best objective and its bound over the memory limit, by `?format=` or `Accept`.

    A line for each combination of values on the other axes. What fits a limit fits every larger
    one, and what is proven for a limit holds for every smaller one: both are carried over.
    """
    chosen = preferred_form(accept, FRONTIER_FORMS) if form is None else form
    name, lines = await run_in_threadpool(service.batches.frontier, batch_id, who)
    headers = {"Vary": "Accept"}
    if chosen == "json":
        return Response(
            _frontier_view(lines).model_dump_json(),
            headers=headers,
            media_type=FRONTIER_FORMS["json"],
        )
    picture = await service.charts.frontier_picture(lines, name)
    return Response(picture, headers=headers | NO_SCRIPTS, media_type=FRONTIER_FORMS["svg"])


@router.post(
    "/{batch_id}/retry",
    status_code=202,
    response_model=BatchView,
    responses={**_ENDED, **documented(403, 404, 429)},
    summary="Try failed items again",
)
async def retry(
    batch_id: str, request: Request, service: Serving, who: Submitter, wait: Wait = 0.0
) -> Response:
    """Queue failed items again, the same jobs, each with the time it was given at first."""
    with place_to_wait(service, who, wait):
        batch = await run_in_threadpool(service.batches.retry, batch_id, who)
        return await _answer(request, service, who, batch, wait)


@router.delete(
    "/{batch_id}", status_code=204, responses=documented(403, 404, 409), summary="Delete a batch"
)
def delete_batch(batch_id: str, service: Serving, who: Submitter) -> None:
    """Forget an ended batch and its jobs. 409 where one of them goes on."""
    service.batches.delete(batch_id, who)


@router.post(
    "/{batch_id}/cancel",
    status_code=202,
    response_model=BatchView,
    responses={**_ENDED, **documented(403, 404)},
    summary="Cancel a batch",
)
async def cancel_batch(
    batch_id: str, request: Request, service: Serving, who: Submitter
) -> Response:
    """Cancel what has not ended; every item keeps its best schedule."""
    batch = await run_in_threadpool(service.batches.cancel, batch_id, who)
    return await _answer(request, service, who, batch, _CANCEL_WAIT_S)


async def _answer(
    request: Request, service: Service, who: Principal, batch: BatchRecord, wait_s: float
) -> Response:
    """Show a batch that was submitted or changed; one that was deleted since, as it was."""
    if not batch.is_finished:
        await while_there(request, service.batches.wait(batch.id, wait_s), wait_s)
    try:
        batch, text = await _shown(service, batch.id, who)
    except BatchNotFoundError:
        text = batch_view(batch, who).model_dump_json().encode()
    location = str(request.app.url_path_for("look_at_batch", batch_id=batch.id))
    status = 200 if batch.is_finished else 202
    return Response(text, status, {"Location": location}, media_type="application/json")


async def _shown(service: Service, batch_id: str, who: Principal) -> tuple[BatchRecord, bytes]:
    """Return a batch and its view as JSON, made once for all of a key who ask at the same time.

    Raises `BatchNotFoundError` if there is no such batch, or it is somebody else's.
    """
    return await service.shared.call(
        ("batch", batch_id, who), partial(_view, service, batch_id, who)
    )


def _view(service: Service, batch_id: str, who: Principal) -> tuple[BatchRecord, bytes]:
    batch, plan, items = service.batches.look(batch_id, who)
    return batch, batch_view(batch, who, plan, items).model_dump_json().encode()


def batch_view(
    batch: BatchRecord,
    who: Principal,
    plan: BatchPlan | None = None,
    items: Sequence[BatchItem] | None = None,
) -> BatchView:
    """Return a batch as somebody sees it; without plan and items in lists."""
    return BatchView.of(
        batch,
        owner=owner_for(batch.owner, who),
        counts={state: batch.counts.get(state, 0) for state in JobState},
        axes=None if plan is None else plan.axes,
        options=None if plan is None else plan.options,
        tags=None if plan is None else plan.tags,
        priority=None if plan is None else plan.priority,
        items=None if items is None else tuple(map(_item, items)),
    )


def _item(item: BatchItem) -> Item:
    return Item.of(
        item.job,
        index=item.index,
        job_id=item.job.id,
        values=item.plan.values,
        memory_bytes=max(item.plan.memory_bytes),
    )


def _frontier_view(lines):
    return FrontierView(
        lines=[
            FrontierLineView(
                label=line.label,
                points=[
                    FrontierPointView.of(point, memory_bytes=point.limit_bytes)
                    for point in line.points
                ],
            )
            for line in lines
        ]
    )
