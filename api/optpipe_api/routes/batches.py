"""``/v1/batches``: sweeps, lists of problems and what-ifs, with a job for each item."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from optpipe.answers import (
    BatchList,
    BatchView,
    FrontierLineView,
    FrontierPointView,
    FrontierView,
    Item,
    JobState,
)
from optpipe.formats.tables import dump_sweep
from optpipe_api.bodies import FRONTIER_FORMS, TABLE_FORMS, preferred_form
from optpipe_api.errors import BatchNotFoundError
from optpipe_api.http_errors import documented
from optpipe_api.routes.common import (
    KNOWN_PARAMETERS_ONLY,
    NO_SCRIPTS,
    Accept,
    Cursor,
    JsonText,
    Limit,
    Reader,
    Serving,
    Submitter,
    count_waiting,
    document,
    ended,
    idempotency_key,
    json_body,
    parse_body,
    seconds_to_wait,
    split_page,
    visible_owner,
    wait_while_connected,
)
from optpipe_api.services.render import draw_frontier
from optpipe_api.services.submission import read_batch

if TYPE_CHECKING:
    from optpipe_api.access import Principal
    from optpipe_api.jobs import BatchRecord
    from optpipe_api.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/v1/batches", tags=["batches"])

_CANCEL_WAIT_S = 1.0

Wait = Annotated[float, seconds_to_wait("the end of all items")]
Key = Annotated[str | None, idempotency_key("returns the batch of the first one")]
_ENDED = ended(BatchView, "batch")


@router.post(
    "",
    status_code=202,
    response_model=BatchView,
    responses={**_ENDED, **documented(403, 404, 409, 413, 415, 429)},
    openapi_extra=json_body("SweepRequest"),
    summary="Submit a sweep, a list of problems, or a what-if",
)
async def submit(
    request: Request,
    service: Serving,
    caller: Submitter,
    wait: Wait = 0.0,
    idempotency_key: Key = None,
) -> Response:
    """Queue a job for every item, or for none if one is refused; answer 202.

    The answer is 200 if all jobs end within `?wait=`, or if earlier jobs solved the same. Every
    item must be a valid problem. The error of an invalid item names its values.

    `what_if` is the id of a job that has ended with a schedule (else 409). The items are:

    * its problem without a change, unless the job is proven optimal
    * 1 GB more memory on the device with the smallest free memory
    * a 20% faster bus
    * twice the number of micro-batches

    Items that make no sense for the problem are left out. Each item starts from the job's best
    schedule.
    """
    batch = await parse_body(
        request, service, read_batch, service.settings, service.methods, is_heavy=True
    )
    with count_waiting(service, caller, wait):
        if batch.what_if:
            batch = await service.batches.add_what_ifs(batch, caller)
        record = await run_in_threadpool(service.batches.submit, batch, caller, idempotency_key)
        return await _answer_batch(request, service, caller, record, wait)


@router.get(
    "",
    dependencies=KNOWN_PARAMETERS_ONLY,
    responses=documented(404),
    summary="List batches, newest first",
)
def list_batches(
    service: Serving, caller: Reader, limit: Limit = 50, cursor: Cursor = None
) -> BatchList:
    """Return a page of batches and their progress; `next` is the `cursor` of the next page."""
    found = service.batches.page(limit + 1, service.cursors.decode(cursor), caller)
    page, following = split_page(service, found, limit)
    return BatchList(batches=tuple(_view_batch(batch, caller) for batch in page), next=following)


@router.get(
    "/{batch_id}", response_model=BatchView, responses=documented(404), summary="Get a batch"
)
async def look_at_batch(
    batch_id: str, request: Request, service: Serving, caller: Reader, wait: Wait = 0.0
) -> Response:
    """Return progress, the number of items in each state, and every item with its results."""
    if wait > 0:
        await service.batches.check(batch_id, caller)
        with count_waiting(service, caller, wait):
            await wait_while_connected(request, service.batches.wait(batch_id, wait), wait)
    _, text = await _load_view(service, batch_id, caller)
    return JsonText(text)


@router.get(
    "/{batch_id}/table",
    response_class=Response,
    responses=document(
        "SweepRowList",
        "A row per item, in order.",
        {
            "text/csv": "index,name,memory_scale,state,...\n0,a,1,...",
            "text/markdown": "| memory_scale | state | ...\n",
        },
    )
    | documented(404, 406),
    summary="Fetch a table of all items",
)
def table(
    batch_id: str,
    service: Serving,
    caller: Reader,
    accept: Accept = None,
    form: Annotated[Literal["json", "csv", "markdown"] | None, Query(alias="format")] = None,
) -> Response:
    """Return a row per item with its results so far: JSON, CSV or Markdown.

    `?format=` or `Accept` chooses the format.
    """
    chosen = form or preferred_form(accept, TABLE_FORMS)
    text = dump_sweep(service.batches.table(batch_id, caller), chosen)
    return Response(text, media_type=TABLE_FORMS[chosen], headers={"Vary": "Accept"})


@router.get(
    "/{batch_id}/frontier",
    response_class=Response,
    responses=document(
        "FrontierView", "The frontier as numbers or as a picture.", {"image/svg+xml": None}
    )
    | documented(404, 406, 413, 429),
    summary="Fetch the objective over the memory limit",
)
async def frontier(
    batch_id: str,
    service: Serving,
    caller: Reader,
    accept: Accept = None,
    form: Annotated[Literal["json", "svg"] | None, Query(alias="format")] = None,
) -> Response:
    """Return the best objective and its bound over the memory limit, by `?format=` or `Accept`.

    Each combination of values on the other axes has a line. A schedule for a memory limit is valid
    for every larger limit, and a bound is valid for every smaller one. Points include both.
    """
    chosen = form or preferred_form(accept, FRONTIER_FORMS)
    name, lines = await run_in_threadpool(service.batches.frontier, batch_id, caller)
    headers = {"Vary": "Accept"}
    if chosen == "svg":
        picture = await service.charts.run(draw_frontier, tuple(lines), name, caller=caller)
        return Response(picture, headers=headers | NO_SCRIPTS, media_type=FRONTIER_FORMS["svg"])
    views = [
        FrontierLineView.of(
            line,
            points=[
                FrontierPointView.of(point, memory_bytes=point.limit_bytes) for point in line.points
            ],
        )
        for line in lines
    ]
    return JsonText(FrontierView(lines=views).model_dump_json(), headers=headers)


@router.post(
    "/{batch_id}/retry",
    status_code=202,
    response_model=BatchView,
    responses={**_ENDED, **documented(403, 404, 429)},
    summary="Queue failed items again",
)
async def retry(
    batch_id: str, request: Request, service: Serving, caller: Submitter, wait: Wait = 0.0
) -> Response:
    """Queue failed items again as the same jobs, each with its original time limit."""
    with count_waiting(service, caller, wait):
        batch = await run_in_threadpool(service.batches.retry, batch_id, caller)
        return await _answer_batch(request, service, caller, batch, wait)


@router.delete(
    "/{batch_id}", status_code=204, responses=documented(403, 404, 409), summary="Delete a batch"
)
def delete_batch(batch_id: str, service: Serving, caller: Submitter) -> None:
    """Delete an ended batch and its jobs. 409 if a job has not ended."""
    service.batches.delete(batch_id, caller)


@router.post(
    "/{batch_id}/cancel",
    status_code=202,
    response_model=BatchView,
    responses={**_ENDED, **documented(403, 404)},
    summary="Cancel a batch",
)
async def cancel_batch(
    batch_id: str, request: Request, service: Serving, caller: Submitter
) -> Response:
    """Cancel the items that have not ended. Every item keeps its best schedule."""
    batch = await run_in_threadpool(service.batches.cancel, batch_id, caller)
    return await _answer_batch(request, service, caller, batch, _CANCEL_WAIT_S)


async def _answer_batch(
    request: Request, service: Service, caller: Principal, batch: BatchRecord, wait_s: float
) -> Response:
    """Return the view of a batch after waiting for its end.

    If the batch was deleted in the meantime, the view is of the last known record.
    """
    if not batch.is_finished:
        await wait_while_connected(request, service.batches.wait(batch.id, wait_s), wait_s)
    try:
        batch, text = await _load_view(service, batch.id, caller)
    except BatchNotFoundError:
        text = _view_batch(batch, caller).model_dump_json()
    status = 200 if batch.is_finished else 202
    return JsonText(text, status, {"Location": f"/v1/batches/{batch.id}"})


async def _load_view(service: Service, batch_id: str, caller: Principal) -> tuple[BatchRecord, str]:
    """Return a batch and its view as JSON text, built once for simultaneous requests of a key.

    Raises `BatchNotFoundError` if there is no such batch, or if it belongs to another key.
    """

    def load() -> tuple[BatchRecord, str]:
        batch, plan, items = service.batches.load(batch_id, caller)
        views = [
            Item.of(
                item.job,
                index=item.index,
                job_id=item.job.id,
                values=item.plan.values,
                memory_bytes=max(item.plan.memory_bytes),
                objective_ms=item.source.objective_ms,
                gap=item.gap,
                schedule_job_id=item.schedule_job_id,
            )
            for item in items
        ]
        view = _view_batch(
            batch,
            caller,
            axes=plan.axes,
            options=plan.options,
            tags=plan.tags,
            priority=plan.priority,
            items=views,
        )
        return batch, view.model_dump_json()

    return await service.shared.call(("batch", batch_id, caller), load)


def _view_batch(batch: BatchRecord, caller: Principal, **details: Any) -> BatchView:
    """Return the view of a batch; ``details`` are the fields that are null in lists."""
    return BatchView.of(
        batch,
        owner=visible_owner(batch.owner, caller),
        counts={state: batch.counts.get(state, 0) for state in JobState},
        **details,
    )
