"""``/v1/jobs``: submit, list, follow, cancel, resume and delete jobs; fetch their documents."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.concurrency import run_in_threadpool

from optpipe.answers import CancelledJobs, Event, Job, JobList, JobState
from optpipe.explain import Explanation
from optpipe.formats.tables import dump_comparison
from optpipe.requests import (
    CompareRequest,
    FollowRequest,
    ResumeRequest,
    SolveRequest,
    Tag,
    TuneRequest,
)
from optpipe.schedule import gap_of
from optpipe_api.bodies import (
    SCHEDULE_FORMS,
    TABLE_FORMS,
    decode_json,
    is_known,
    known_number,
    preferred_form,
    read_json_body,
)
from optpipe_api.errors import JobNotFoundError, StoreUnavailableError
from optpipe_api.http_errors import documented
from optpipe_api.jobs import DocumentKind
from optpipe_api.routes.common import (
    KNOWN_PARAMETERS_ONLY,
    NO_SCRIPTS,
    OWNER_NAME,
    Accept,
    Answers,
    Cursor,
    IfNoneMatch,
    JsonText,
    Limit,
    Reader,
    Serving,
    Submitter,
    answer_version,
    count_waiting,
    document,
    ended,
    idempotency_key,
    json_body,
    parse_body,
    parse_model_body,
    seconds_to_wait,
    split_page,
    tagged,
    version_headers,
    visible_owner,
    wait_while_connected,
)
from optpipe_api.services.events import Purpose
from optpipe_api.services.render import (
    Shown,
    Theme,
    chart_files,
    chart_frontier,
    chart_schedules,
    draw_schedule,
    dump_schedule,
    explain_schedule,
    kept_row,
    run_on_row,
    solution,
)
from optpipe_api.services.submission import JobRequest, read_job, read_tune

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from optpipe_api.access import Principal
    from optpipe_api.jobs import HistoryEntry, JobRecord, StoredSchedule, TracePoint
    from optpipe_api.service import Service

__all__ = ["add_submit_route", "charts_router", "comparisons_router", "follow_router", "router"]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
comparisons_router = APIRouter(prefix="/v1", tags=["methods"])
follow_router = APIRouter(prefix="/v1", tags=["follow"])

_CANCEL_WAIT_S = 1.0

Wait = Annotated[float, seconds_to_wait("the end")]
Key = Annotated[str | None, idempotency_key("returns the job of the first one")]
_ENDED = ended(Job, "job")


# --- Submission.


def add_submit_route(
    target: APIRouter,
    path: str,
    model: type[JobRequest],
    *,
    name: str,
    summary: str,
    description: str,
) -> None:
    """Add the route that queues the job of a request body; ``name`` is its name in OpenAPI."""

    async def submit(
        request: Request,
        service: Serving,
        caller: Submitter,
        wait: Wait = 0.0,
        idempotency_key: Key = None,
    ) -> Response:
        limits = service.settings, service.methods
        if issubclass(model, TuneRequest):
            new = await parse_model_body(request, service, read_tune, model, *limits)
        else:
            new = await parse_body(request, service, read_job, *limits, model)
        with count_waiting(service, caller, wait):
            job, trace = await run_in_threadpool(service.jobs.submit, new, caller, idempotency_key)
            return await _answer_job(request, service, caller, job, wait, trace=trace)

    target.add_api_route(
        path,
        submit,
        methods=["POST"],
        name=name,
        status_code=202,
        response_model=Job,
        responses={**_ENDED, **documented(403, 409, 413, 415, 429)},
        openapi_extra=json_body(model.__name__),
        summary=summary,
        description=f"{description}\n\nThe answer is 202, or 200 if the job ends within `?wait=`.",
    )


add_submit_route(
    router,
    "",
    SolveRequest,
    name="submit",
    summary="Submit a problem or a model",
    description="Queue a problem to solve, or a model to cut, place and schedule. If an earlier "
    "job solved the same, the new job has already ended.",
)
add_submit_route(
    comparisons_router,
    "/compare",
    CompareRequest,
    name="compare",
    summary="Compare every method",
    description="Queue a job that runs every method, and the optimiser; its rows are its "
    "comparison. The time limit is that of the optimiser. The time of the other methods is added.",
)


add_submit_route(
    follow_router,
    "/follow",
    FollowRequest,
    name="follow",
    summary="Compare a running schedule with measured times",
    description="Queue a job that solves the problem again if drift costs more than the threshold. "
    "Its problem and schedule are those to continue with: the running schedule, unless one is "
    "shorter by the threshold under the measured times. `drift` has the reason.",
)


async def _answer_job(
    request: Request,
    service: Service,
    caller: Principal,
    job: JobRecord,
    wait_s: float,
    *,
    trace: Sequence[TracePoint] | None = None,
) -> Response:
    """Return the view of a job after waiting for its end.

    If the job was deleted in the meantime, the view is of the last known record. ``trace``: of a
    new job; a new job that has ended is not read again.
    """
    is_known = trace is not None and job.state.is_final
    if wait_s > 0 and not is_known:
        job = await wait_while_connected(request, service.jobs.wait(job, wait_s), wait_s) or job
    view = _view_job(job, caller, trace or [])
    if not (is_known or job.is_untouched):
        with suppress(JobNotFoundError):
            view = await run_in_threadpool(_load_view, service, job.id, caller)
    status = 200 if view.is_finished else 202
    return JsonText(view.model_dump_json(), status, {"Location": f"/v1/jobs/{job.id}"})


def _view_job(
    job: JobRecord,
    caller: Principal,
    trace: Sequence[TracePoint] | None = None,
    places: Mapping[str, int] | None = None,
) -> Job:
    """Return the view of a job with its place in its owner's queue. Lists leave out the trace."""
    place = (places or {}).get(job.id)
    return Job.of(job, owner=visible_owner(job.owner, caller), trace=trace, place=place)


def _load_view(service: Service, job_id: str, caller: Principal) -> Job:
    job, trace = service.jobs.job(job_id, caller)
    return _view_job(job, caller, trace, service.jobs.places([job]))


# --- Jobs that exist.


@router.get(
    "",
    dependencies=KNOWN_PARAMETERS_ONLY,
    responses=documented(404),
    summary="List jobs, newest first",
)
def list_jobs(
    *,
    service: Serving,
    caller: Reader,
    state: JobState | None = None,
    tag: Annotated[Tag | None, Query()] = None,
    batch: Annotated[str | None, Query(pattern=r"^[0-9a-f]{32}$")] = None,
    owner: Annotated[str | None, OWNER_NAME] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> JobList:
    """Return a page of the jobs in a state, with a tag, of a batch, of an owner.

    `next` is the `cursor` of the next page.
    """
    before = service.cursors.decode(cursor)
    found = service.jobs.page(
        limit + 1, before, caller, owner=owner, state=state, tag=tag, batch_id=batch
    )
    page, following = split_page(service, found, limit)
    places = service.jobs.places(page)
    views = tuple(_view_job(job, caller, places=places) for job in page)
    return JobList(jobs=views, next=following)


@router.get("/{job_id}", responses=documented(404), summary="Get a job")
def look(job_id: str, service: Serving, caller: Reader) -> Job:
    """Return state, objective, bound, gap, error and times, and every improvement so far."""
    return _load_view(service, job_id, caller)


@router.delete(
    "/{job_id}", status_code=204, responses=documented(403, 404, 409), summary="Delete a job"
)
def delete(job_id: str, service: Serving, caller: Submitter) -> None:
    """Delete an ended job with its problem, schedule and history. 409 if it has not ended."""
    service.jobs.delete(job_id, caller)


@router.post(
    "/cancel",
    status_code=202,
    dependencies=KNOWN_PARAMETERS_ONLY,
    responses=documented(403, 404),
    summary="Cancel all jobs of an owner",
)
def cancel_owner(
    service: Serving, caller: Submitter, owner: Annotated[str, OWNER_NAME]
) -> CancelledJobs:
    """Cancel the queued jobs of an owner, stop the running ones; each keeps its best schedule."""
    return CancelledJobs(num_jobs=service.jobs.cancel_owner(owner, caller))


@router.post(
    "/{job_id}/cancel",
    status_code=202,
    response_model=Job,
    responses={**_ENDED, **documented(403, 404)},
    summary="Cancel a job",
)
async def cancel(job_id: str, request: Request, service: Serving, caller: Submitter) -> Response:
    """Stop a job and keep its best schedule. An ended job does not change."""
    job = await run_in_threadpool(service.jobs.cancel, job_id, caller)
    return await _answer_job(request, service, caller, job, _CANCEL_WAIT_S)


@router.post(
    "/{job_id}/resume",
    status_code=202,
    response_model=Job,
    responses={**_ENDED, **documented(403, 404, 409, 413, 415, 429)},
    openapi_extra=json_body("ResumeRequest"),
    summary="Give an ended job more time",
)
async def resume(
    job_id: str, request: Request, service: Serving, caller: Submitter, wait: Wait = 0.0
) -> Response:
    """Queue an ended job again with a longer time limit. It continues from its best schedule.

    409 if it has not ended, or if it is proven optimal or infeasible.
    """
    body = await read_json_body(request, service.settings.max_body_bytes)
    time_limit_s = ResumeRequest.parse(decode_json(body)).time_limit_s
    with count_waiting(service, caller, wait):
        job = await run_in_threadpool(service.jobs.resume, job_id, time_limit_s, caller)
        return await _answer_job(request, service, caller, job, wait)


@router.get(
    "/{job_id}/problem",
    response_class=Response,
    responses={**document("Problem"), **documented(404)},
    summary="Fetch the problem",
)
def problem(job_id: str, service: Serving, caller: Reader) -> Response:
    """Return the problem that the job solves, defaults filled in.

    A planned model has several problems: the answer is that of its best schedule so far.
    """
    return JsonText(service.jobs.document(job_id, DocumentKind.PROBLEM, caller))


@router.get(
    "/{job_id}/model",
    response_class=Response,
    responses={**document("Model"), **documented(404)},
    summary="Fetch the model",
)
def model(job_id: str, service: Serving, caller: Reader) -> Response:
    """Return the submitted model of a planned job, defaults filled in."""
    return JsonText(service.jobs.document(job_id, DocumentKind.MODEL, caller))


_ROWS = document(
    "MethodRowList",
    "A row per method, best first.",
    {
        "text/csv": "method,placement,makespan_ms,...\n1f1b,as given,84.0,...\n",
        "text/markdown": (
            "| method | makespan ms | ... |\n| --- | ---: | --- |\n| 1f1b | 84 | ... |\n"
        ),
    },
)


@router.get(
    "/{job_id}/comparison",
    response_class=Response,
    responses={**_ROWS, **documented(404, 406)},
    summary="Fetch the rows of a comparison",
)
def comparison(
    job_id: str,
    service: Serving,
    caller: Reader,
    accept: Accept = None,
    form: Annotated[Literal["json", "csv", "markdown"] | None, Query(alias="format")] = None,
) -> Response:
    """Return JSON, CSV or a Markdown table, by `?format=` or `Accept`."""
    chosen = form or preferred_form(accept, TABLE_FORMS)
    text = service.jobs.document(job_id, DocumentKind.COMPARISON, caller)
    if chosen != "json":
        text = dump_comparison(json.loads(text)["rows"], chosen)
    return Response(text, media_type=TABLE_FORMS[chosen], headers={"Vary": "Accept"})


@follow_router.get(
    "/jobs/{job_id}/drift",
    response_class=Response,
    responses={**document("Drift"), **documented(404)},
    summary="Fetch the drift of a running schedule",
)
def drift(job_id: str, service: Serving, caller: Reader) -> Response:
    """Return the length of the running schedule under the measured times, and what follows."""
    return JsonText(service.jobs.document(job_id, DocumentKind.DRIFT, caller))


# --- Events of a job, as server-sent events.

_PING_S = 15.0
_RECONNECT_MS = 1000
_MAX_EVENT_NUMBER = 2**53
_NUM_ENCODED_EVENTS = 1000
_EVENT = {
    "type": "object",
    "required": ["event", "id", "data"],
    "properties": {
        "event": {"enum": ["state", "incumbent", "bound", "log"]},
        "id": {"type": "string"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/Event"},
        },
        "retry": {"type": "integer"},
    },
}
_EVENT_EXAMPLE = (
    'event: incumbent\nid: 7\ndata: {"number":7,"kind":"incumbent","objective_ms":118.0}\n\n'
)
_EVENT_ANSWERS: Answers = {
    200: {
        "description": "Events `state`, `incumbent`, `bound` and `log`. `id` is the number of the "
        "event, `data` is an `Event`. The stream ends with the job.",
        "content": {"text/event-stream": {"itemSchema": _EVENT, "example": _EVENT_EXAMPLE}},
    },
    204: {"description": "The job has ended and every event was sent: do not reconnect."},
}


async def _count_stream(service: Serving, caller: Reader) -> AsyncIterator[None]:
    """Count the stream until the last byte is sent, or the client disconnects."""
    with service.connections.counted(caller, Purpose.STREAM):
        yield


@router.get(
    "/{job_id}/events",
    dependencies=[Depends(_count_stream)],
    response_class=Response,
    responses={**_EVENT_ANSWERS, **documented(404)},
    summary="Follow a job",
)
async def events(
    job_id: str,
    service: Serving,
    caller: Reader,
    after: Annotated[
        int, Query(ge=0, le=_MAX_EVENT_NUMBER, description="Send only events of higher numbers.")
    ] = 0,
    last_event_id: Annotated[
        int | None,
        Header(
            alias="Last-Event-ID",
            ge=0,
            le=_MAX_EVENT_NUMBER,
            description="As `after`, and instead of it. Browsers send it when they reconnect.",
        ),
    ] = None,
) -> Response:
    """Send all events of a job so far, then each new one until the job ends.

    A client that reconnects with the last number it received gets every event exactly once.
    """
    seen = after if last_event_id is None else last_event_id
    entries = await service.jobs.events(job_id, seen, caller)
    if entries is None:
        return Response(status_code=204)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return EventSourceResponse(_encode_events(entries), headers=headers)


async def _encode_events(
    entries: AsyncGenerator[HistoryEntry, None], ping_s: float = _PING_S
) -> AsyncIterator[bytes]:
    """Yield each entry as an event, with a ping in every pause so that proxies keep the stream."""
    retry_ms: int | None = _RECONNECT_MS
    upcoming: asyncio.Future[HistoryEntry | None] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.ensure_future(anext(entries, None))
            await asyncio.wait({upcoming}, timeout=ping_s)
            if not upcoming.done():
                yield KEEPALIVE_COMMENT
                continue
            entry, upcoming = upcoming.result(), None
            if entry is None:
                return
            yield _encode_event(entry, retry_ms)
            retry_ms = None
    except StoreUnavailableError:
        # The client reconnects and continues after the last event that it received.
        return
    finally:
        # The disconnect of a client cancels this coroutine. The clean-up must not be cancelled.
        with anyio.CancelScope(shield=True):
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)
            await entries.aclose()


@lru_cache(maxsize=_NUM_ENCODED_EVENTS)
def _encode_event(entry: HistoryEntry, retry_ms: int | None) -> bytes:
    """Return an entry as an event, encoded once for all followers of its job."""
    gap = None if entry.objective_ms is None else gap_of(entry.objective_ms, entry.bound_ms)
    data = Event.of(entry, gap=gap).model_dump_json()
    return format_sse_event(
        data_str=data, event=entry.kind.value, id=str(entry.number), retry=retry_ms
    )


# --- The best schedule so far.

_SCHEDULE = document(
    "Schedule",
    "The best schedule so far.",
    {SCHEDULE_FORMS["csv"]: "0F0,0B0\n1F0,1B0\n", SCHEDULE_FORMS["svg"]: None},
)
_SCHEDULE[200]["content"][SCHEDULE_FORMS["trace"]] = {"schema": {"type": "object"}}


@router.get(
    "/{job_id}/schedule",
    response_class=Response,
    responses=tagged(_SCHEDULE, of="this schedule in this form")
    | documented(404, 406, 409, 413, 429, too_large="The schedule is too large for a picture."),
    summary="Fetch the best schedule so far",
)
async def schedule(
    *,
    job_id: str,
    request: Request,
    service: Serving,
    caller: Reader,
    accept: Accept = None,
    form: Annotated[Literal["json", "csv", "trace", "svg"] | None, Query(alias="format")] = None,
    if_none_match: IfNoneMatch = None,
    wait: Annotated[
        float, seconds_to_wait("the first schedule or a better one, unless the job has ended")
    ] = 0.0,
) -> Response:
    """Return JSON, CSV (a row per device), a Chrome trace or a picture; by `?format=` or `Accept`.

    To poll, send `If-None-Match` and `?wait=`: the answer is the next improvement, or 304.
    """
    chosen = form or preferred_form(accept)
    known = known_number(if_none_match, job_id, chosen)
    stored: StoredSchedule | None
    if wait > 0:
        with count_waiting(service, caller, wait):
            waiting = service.jobs.wait_schedule(job_id, known or 0, wait, caller)
            stored = await wait_while_connected(request, waiting, wait)
    else:
        stored = await run_in_threadpool(service.jobs.schedule, job_id, caller)
    number = (known or 0) if stored is None else stored.number
    headers = _schedule_headers(job_id, number, chosen)
    if stored is None or is_known(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    newest, problem = stored, ""
    if chosen in {"trace", "svg"}:
        problem, newest = await run_in_threadpool(solution, service.jobs, job_id, caller)
    content: str | bytes = newest.document
    if chosen == "svg":
        content = await service.charts.run(draw_schedule, newest.document, problem, caller=caller)
    elif chosen != "json":
        content = await service.pool.run(
            dump_schedule, chosen, newest.document, problem, caller=caller
        )
    headers = _schedule_headers(job_id, newest.number, chosen)
    return Response(content, headers=headers, media_type=SCHEDULE_FORMS[chosen])


def _schedule_headers(job_id: str, number: int, form: str) -> dict[str, str]:
    headers = version_headers(job_id, number, form) | {"Vary": "Accept"}
    return headers | NO_SCRIPTS if form == "svg" else headers


_EXPLANATION: Answers = {200: {"description": "What limits it.", "model": Explanation}}


@router.get(
    "/{job_id}/explanation",
    response_class=Response,
    responses=tagged(_EXPLANATION, of="the explained schedule")
    | documented(404, 409, 413, 429, too_large="The schedule is too large to be explained here."),
    summary="Explain the makespan of the best schedule so far",
)
async def explain(
    *, job_id: str, service: Serving, caller: Reader, if_none_match: IfNoneMatch = None
) -> Response:
    """Return critical path, lanes, memory, idle time and offloads, in numbers and `sentences`.

    Sizes are bytes, times are ms from the start of the schedule. `topic` groups the sentences.
    """
    problem, stored = await run_in_threadpool(solution, service.jobs, job_id, caller)
    return await answer_version(
        if_none_match,
        job_id,
        stored.number,
        "explanation",
        lambda: explain_schedule(service.pool, stored.document, problem, caller),
    )


# --- Charts that the page embeds: the best schedule of a job, and the frontier of a batch.

charts_router = APIRouter(prefix="/v1", tags=["charts"])

_METHOD, _ROW = "method:", "row:"
_CHART: Answers = {
    200: {
        "description": "For `Bokeh.embed.embed_item`.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}
ChartTheme = Annotated[Theme, Query(description="The colours.")]
RowOfTune = Annotated[
    str | None,
    Query(
        pattern=r"^[0-9a-f]{12}$",
        description="A row of a tune, shown instead of its best schedule.",
    ),
]


@charts_router.get(
    "/jobs/{job_id}/chart",
    response_class=Response,
    responses=tagged(_CHART, of="the content of the chart") | documented(404, 406, 409, 413, 429),
    summary="Show the best schedule so far in a browser",
)
async def chart(
    *,
    job_id: str,
    service: Serving,
    caller: Reader,
    theme: ChartTheme = "light",
    second: Annotated[
        str | None,
        Query(
            alias="beside",
            max_length=80,
            description="A second schedule on the same time axis: the id of another job, "
            "`method:1f1b` for a published method (its memory may exceed the limit), or `row:` "
            "and a row of a tune.",
        ),
    ] = None,
    row: RowOfTune = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return the lanes of every device and its memory over time, with zoom and tooltips."""
    second = second or ""
    second_row = second.removeprefix(_ROW) if second.startswith(_ROW) else ""
    rows = [
        row_id and await _show_row(service, job_id, caller, row_id) for row_id in (row, second_row)
    ]
    shown, number, form = await run_in_threadpool(
        _show_job, service, job_id, caller, "" if second_row else second, theme
    )
    if rows[0]:
        shown[0] = rows[0]
        form += f"-{row}"
    if rows[1]:
        shown.append(rows[1])
        form += f"-{second}"
    return await answer_version(
        if_none_match,
        job_id,
        number,
        form,
        lambda: service.charts.run(chart_schedules, tuple(shown), theme, caller=caller),
    )


async def _show_row(service: Service, job_id: str, caller: Principal, row_id: str) -> Shown:
    kept = await run_on_row(kept_row, service.jobs, service.pool, job_id, caller, row_id)
    return Shown(problem=kept.problem, schedule=kept.schedule, title=f"{kept.label}:")


def _show_job(
    service: Service, job_id: str, caller: Principal, second: str, theme: Theme
) -> tuple[list[Shown], int, str]:
    """Return the schedules of a chart, the number of the job's, and a form that names the rest."""
    problem, stored = solution(service.jobs, job_id, caller)
    own = Shown(problem=problem, schedule=stored.document)
    form = f"chart-{theme}"
    if not second:
        return [own], stored.number, form
    form += f"-{second}"
    if second.startswith(_METHOD):
        other = Shown(problem=problem, method=second.removeprefix(_METHOD))
        return [own, other], stored.number, form
    other_problem, other_stored = solution(service.jobs, second, caller)
    records = [service.jobs.find(shown_id, caller) for shown_id in (job_id, second)]
    titles = [(record.name or record.id[:8])[:60] for record in records]
    own = replace(own, title=titles[0])
    other = Shown(problem=other_problem, schedule=other_stored.document, title=titles[1])
    return [own, other], stored.number, f"{form}.{other_stored.number}"


@charts_router.post(
    "/charts",
    response_class=Response,
    responses={**_CHART, **documented(404, 406, 409, 413, 415, 429)},
    openapi_extra=json_body("ChartRequest"),
    summary="Draw schedules and traces from files",
)
async def chart_of_files(
    *,
    request: Request,
    service: Serving,
    caller: Reader,
    theme: ChartTheme = "light",
    job: Annotated[
        str | None,
        Query(max_length=80, description="A job whose schedule is the plan, shown first."),
    ] = None,
    row: RowOfTune = None,
) -> Response:
    """Return lanes over time of schedules and of the last step of traces; nothing is stored.

    With a job, or a problem in the body, devices and memory are those of the problem.
    """
    body = await read_json_body(request, service.settings.max_body_bytes)
    plan = None
    if job and row:
        plan = await _show_row(service, job, caller, row)
    elif job:
        shown, _, _ = await run_in_threadpool(_show_job, service, job, caller, "", theme)
        plan = replace(shown[0], title="planned:")
    return JsonText(await service.charts.run(chart_files, body, plan, theme, caller=caller))


@charts_router.get(
    "/batches/{batch_id}/chart",
    response_class=Response,
    responses={**_CHART, **documented(404, 406, 413, 429)},
    summary="Show the frontier of a batch in a browser",
)
async def frontier_chart(
    batch_id: str, service: Serving, caller: Reader, theme: ChartTheme = "light"
) -> Response:
    """Return the best objective and its bound over the memory limit, with tooltips."""
    _, lines = await run_in_threadpool(service.batches.frontier, batch_id, caller)
    # No title: the page shows the name of the batch above the chart.
    return JsonText(
        await service.charts.run(chart_frontier, tuple(lines), "", theme, caller=caller)
    )
