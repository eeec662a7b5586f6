"""``/v1/jobs``: submit, list, look, cancel, resume, delete; the problem and the model back."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.concurrency import run_in_threadpool

from optpipe.answers import Event, Improvement, Job, JobList, JobState
from optpipe.explain import Explanation
from optpipe.formats.tables import dump_comparison
from optpipe.requests import CompareRequest, ResumeRequest, SolveRequest, Tag
from optpipe.schedule import gap_of
from optpipe_api.bodies import (
    FORMS,
    TABLE_FORMS,
    decode_json,
    etag_of,
    known_number,
    preferred_form,
    read_body,
    require_json,
)
from optpipe_api.errors import JobNotFoundError, StoreUnavailableError
from optpipe_api.http_errors import documented
from optpipe_api.jobs import DocumentKind
from optpipe_api.routes.common import (
    KNOWN_ALONE,
    NO_SCRIPTS,
    Accept,
    Answers,
    Cursor,
    IfNoneMatch,
    Limit,
    Reader,
    Serving,
    Submitter,
    document,
    ended,
    idempotency_key,
    json_body,
    json_content,
    owner_for,
    page_of,
    place_to_wait,
    seconds_to_wait,
    tagged,
    while_there,
)
from optpipe_api.services.events import Purpose
from optpipe_api.services.render import Shown, Theme, as_text, explanation, row_of, solution
from optpipe_api.services.submission import JobRequest, read_job

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from optpipe_api.access import Principal
    from optpipe_api.jobs import HistoryEntry, JobRecord, StoredSchedule, TracePoint, Waiting
    from optpipe_api.service import Service

__all__ = [
    "charts_router",
    "comparisons_router",
    "events_router",
    "explanations_router",
    "router",
    "schedules_router",
    "submitted",
]


router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_CANCEL_WAIT_S = 1.0


Wait = Annotated[float, seconds_to_wait("the end")]
Key = Annotated[str | None, idempotency_key("returns the first one's job")]
BatchId = Annotated[str, Query(pattern=r"^[0-9a-f]{32}$")]


_ENDED = ended(Job, "job")


@router.post(
    "",
    status_code=202,
    response_model=Job,
    responses={**_ENDED, **documented(403, 409, 413, 415, 429)},
    openapi_extra=json_body("SolveRequest"),
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
    return await submitted(request, service, who, SolveRequest, wait_s=wait, key=idempotency_key)


comparisons_router = APIRouter(prefix="/v1", tags=["methods"])


@comparisons_router.post(
    "/compare",
    status_code=202,
    response_model=Job,
    responses={**_ENDED, **documented(403, 409, 413, 415, 429)},
    openapi_extra=json_body("CompareRequest"),
    summary="Compare every method",
)
async def compare(
    request: Request,
    service: Serving,
    who: Submitter,
    wait: Wait = 0.0,
    idempotency_key: Key = None,
) -> Response:
    """Queue a job that runs every method, the optimiser among them; its rows are its comparison.

    The time limit is the optimiser's; the other methods take their time too.
    """
    return await submitted(request, service, who, CompareRequest, wait_s=wait, key=idempotency_key)


_CSV_EXAMPLE = "method,placement,makespan_ms,...\n1f1b,as given,84.0,...\n"
_MARKDOWN_EXAMPLE = "| method | makespan ms | ... |\n| --- | ---: | --- |\n| 1f1b | 84 | ... |\n"
_ROWS: Answers = {
    200: {
        "description": "A row per method, best first.",
        "content": {
            **json_content("MethodRowList"),
            "text/csv": {"schema": {"type": "string"}, "example": _CSV_EXAMPLE},
            "text/markdown": {"schema": {"type": "string"}, "example": _MARKDOWN_EXAMPLE},
        },
    }
}


@router.get(
    "/{job_id}/comparison",
    response_class=Response,
    responses={**_ROWS, **documented(404, 406)},
    summary="Fetch the rows of a comparison",
)
def comparison(
    job_id: str,
    service: Serving,
    who: Reader,
    accept: Accept = None,
    form: Annotated[Literal["json", "csv", "markdown"] | None, Query(alias="format")] = None,
) -> Response:
    """Return JSON, CSV or a Markdown table, by `?format=` or `Accept`."""
    chosen = preferred_form(accept, TABLE_FORMS) if form is None else form
    text = service.jobs.document(job_id, DocumentKind.COMPARISON, who)
    if chosen != "json":
        text = dump_comparison(json.loads(text)["rows"], chosen)
    return Response(text, media_type=TABLE_FORMS[chosen], headers={"Vary": "Accept"})


@router.get(
    "", dependencies=KNOWN_ALONE, responses=documented(404), summary="List jobs, newest first"
)
def list_jobs(
    *,
    service: Serving,
    who: Reader,
    state: JobState | None = None,
    tag: Annotated[Tag | None, Query()] = None,
    batch: BatchId | None = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> JobList:
    """Return a page of jobs in a state, with a tag, of a batch; `next` is the next `cursor`."""
    found = service.jobs.page(limit + 1, cursor, who, state=state, tag=tag, batch_id=batch)
    shown, following = page_of(found, limit)
    places = service.jobs.waiting(shown)
    views = tuple(job_view(job, who=who, places=places) for job in shown)
    return JobList(jobs=views, next=following)


@router.get("/{job_id}", responses=documented(404), summary="Look at a job")
def look(job_id: str, service: Serving, who: Reader) -> Job:
    """Return state, objective, bound, gap, error, times, and every improvement so far."""
    return _whole(service, job_id, who)


@router.delete(
    "/{job_id}", status_code=204, responses=documented(403, 404, 409), summary="Delete a job"
)
def delete(job_id: str, service: Serving, who: Submitter) -> None:
    """Forget an ended job: its problem, its schedule, its history. 409 where it goes on."""
    service.jobs.delete(job_id, who)


@router.post(
    "/{job_id}/cancel",
    status_code=202,
    response_model=Job,
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
    response_model=Job,
    responses={**_ENDED, **documented(403, 404, 409, 413, 415, 429)},
    openapi_extra=json_body("ResumeRequest"),
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
    more_s = ResumeRequest.parse(decode_json(body)).time_limit_s
    with place_to_wait(service, who, wait):
        job = await run_in_threadpool(service.jobs.resume, job_id, more_s, who)
        return await _answer(request, service, who, job, wait)


@router.get(
    "/{job_id}/problem",
    response_class=Response,
    responses={**document("Problem"), **documented(404)},
    summary="Fetch the problem",
)
def problem(job_id: str, service: Serving, who: Reader) -> Response:
    """Return the problem as it is solved, defaults filled in.

    That of a planned model is the one of its best schedule so far.
    """
    return Response(
        service.jobs.document(job_id, DocumentKind.PROBLEM, who), media_type="application/json"
    )


@router.get(
    "/{job_id}/model",
    response_class=Response,
    responses={**document("Model"), **documented(404)},
    summary="Fetch the model",
)
def model(job_id: str, service: Serving, who: Reader) -> Response:
    """Return the model of a planned job as it was submitted, defaults filled in."""
    return Response(
        service.jobs.document(job_id, DocumentKind.MODEL, who), media_type="application/json"
    )


def job_view(
    job: JobRecord,
    trace: Sequence[TracePoint] | None = None,
    *,
    who: Principal,
    places: Mapping[str, Waiting] | None = None,
) -> Job:
    """Return a job as somebody sees it, with its place in the queue; without trace in lists."""
    place = (places or {}).get(job.id)
    shown = None if trace is None else tuple(Improvement(**asdict(one)) for one in trace)
    return Job.of(
        job,
        owner=owner_for(job.owner, who),
        trace=shown,
        place=None if place is None else place.place,
        expected_start_at=None if place is None else place.starts_at,
    )


def _whole(service: Service, job_id: str, who: Principal) -> Job:
    job, trace = service.jobs.job(job_id, who)
    return job_view(job, trace, who=who, places=service.jobs.waiting([job]))


async def submitted(
    request: Request,
    service: Service,
    who: Principal,
    kind: type[JobRequest],
    *,
    wait_s: float,
    key: str | None,
) -> Response:
    """Queue the job that a body asks for, and answer."""
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    new = await service.pool.run(read_job, body, service.settings, service.methods, kind)
    del body
    with place_to_wait(service, who, wait_s):
        job = await run_in_threadpool(service.jobs.submit, new, who, key)
        return await _answer(request, service, who, job, wait_s)


async def _answer(
    request: Request, service: Service, who: Principal, job: JobRecord, wait_s: float
) -> Response:
    """Show a job that was submitted or changed; one that was deleted since, as it was last seen."""
    if wait_s > 0:
        job = await while_there(request, service.jobs.wait(job, wait_s), wait_s) or job
    view = job_view(job, [], who=who)
    if not job.is_untouched:
        with suppress(JobNotFoundError):
            view = await run_in_threadpool(_whole, service, job.id, who)
    headers = {"Location": str(request.app.url_path_for("look", job_id=job.id))}
    return Response(
        view.model_dump_json(),
        200 if view.state.is_final else 202,
        headers,
        media_type="application/json",
    )


# --- ``/v1/jobs/{id}/events``: what happens to a job, as server-sent events.

events_router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_PING_S = 15.0
_MOST = 2**53
_KEPT = 1000
_RECONNECT_MS = 1000
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_EXAMPLE = 'event: incumbent\nid: 7\ndata: {"number":7,"kind":"incumbent","objective_ms":118.0}\n\n'
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
_EVENT_ANSWERS: Answers = {
    200: {
        "description": (
            "Events `state`, `incumbent`, `bound` and `log`; `id` is the event's number, `data` a "
            "`Event`. The stream ends with the job."
        ),
        "content": {"text/event-stream": {"itemSchema": _EVENT, "example": _EXAMPLE}},
    },
    204: {"description": "The job has ended, and everything was sent: do not reconnect."},
}


async def _place(service: Serving, who: Reader) -> AsyncIterator[None]:
    """Count the stream until the last byte is sent, or the client is gone."""
    with service.connections.counted(who, Purpose.STREAM):
        yield


@events_router.get(
    "/{job_id}/events",
    dependencies=[Depends(_place)],
    response_class=Response,
    responses={**_EVENT_ANSWERS, **documented(404)},
    summary="Follow a job",
)
async def events(
    job_id: str,
    service: Serving,
    who: Reader,
    after: Annotated[
        int, Query(ge=0, le=_MOST, description="Send only events of higher numbers.")
    ] = 0,
    last_event_id: Annotated[
        int | None,
        Header(
            alias="Last-Event-ID",
            ge=0,
            le=_MOST,
            description="The same, as browsers send it when they reconnect; it wins.",
        ),
    ] = None,
) -> Response:
    """Send everything that has happened to a job, then what happens, until it ends.

    Whoever reconnects with the last number he has seen misses nothing and sees nothing twice.
    """
    seen = after if last_event_id is None else last_event_id
    entries = await service.jobs.events(job_id, seen, who)
    if entries is None:
        return Response(status_code=204)
    return EventSourceResponse(_sent(entries), headers=_HEADERS)


async def _sent(
    entries: AsyncGenerator[HistoryEntry, None], ping_s: float = _PING_S
) -> AsyncIterator[bytes]:
    """Encode entries as they come, with a ping in every pause, so that no proxy hangs up."""
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
            yield _event(entry, retry_ms)
            retry_ms = None
    except StoreUnavailableError:
        # The client comes back by itself, and goes on where it was.
        return
    finally:
        # A client that hangs up cancels us: letting go must not be cancelled with it.
        with anyio.CancelScope(shield=True):
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)
            await entries.aclose()


@lru_cache(maxsize=_KEPT)
def _event(entry: HistoryEntry, retry_ms: int | None) -> bytes:
    """Encode an entry, once for all who follow its job."""
    gap = None if entry.objective_ms is None else gap_of(entry.objective_ms, entry.bound_ms)
    data = Event.of(entry, gap=gap).model_dump_json()
    return format_sse_event(
        data_str=data, event=entry.kind.value, id=str(entry.number), retry=retry_ms
    )


# --- ``/v1/jobs/{id}/schedule``: the best schedule so far, in the form that is wanted.

schedules_router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_WITH_PROBLEM = frozenset({"trace", "svg"})
_TEXT = {"schema": {"type": "string"}}
_SCHEDULE_ANSWERS = tagged(
    {
        "description": "The best schedule so far.",
        "content": {
            FORMS["json"]: {"schema": {"$ref": "#/components/schemas/Schedule"}},
            FORMS["csv"]: {**_TEXT, "example": "0F0,0B0\n1F0,1B0\n"},
            FORMS["trace"]: {"schema": {"type": "object"}},
            FORMS["svg"]: _TEXT,
        },
    },
    of="this schedule in this form",
) | documented(404, 406, 409, 413, 429)
_SCHEDULE_ANSWERS[413]["description"] = "The schedule is too large for a picture."


@schedules_router.get(
    "/{job_id}/schedule",
    response_class=Response,
    responses=_SCHEDULE_ANSWERS,
    summary="Fetch the best schedule so far",
)
async def schedule(
    *,
    job_id: str,
    request: Request,
    service: Serving,
    who: Reader,
    accept: Accept = None,
    form: Annotated[Literal["json", "csv", "trace", "svg"] | None, Query(alias="format")] = None,
    if_none_match: IfNoneMatch = None,
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
    content: str | bytes = stored.document
    problem = ""
    if form in _WITH_PROBLEM:
        problem, stored = await run_in_threadpool(solution, service.jobs, job_id, who)
    if form == "svg":
        content = await service.charts.picture(stored.document, problem)
    elif form != "json":
        content = await service.pool.run(as_text, form, stored.document, problem)
    headers = _headers(job_id, stored.number, form)
    return Response(content, headers=headers, media_type=FORMS[form])


def _headers(job_id: str, number: int, form: str) -> dict[str, str]:
    headers = {
        "ETag": etag_of(job_id, number, form),
        "Vary": "Accept",
        "Cache-Control": "private, no-cache",
    }
    return headers | NO_SCRIPTS if form == "svg" else headers


# --- ``/v1/jobs/{id}/explanation``: why the best schedule so far is as long as it is.

explanations_router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_FORM = "explanation"
_EXPLANATION_ANSWERS = tagged(
    {"description": "What limits it.", "model": Explanation}, of="the schedule explained"
) | documented(404, 409, 413, 429)
_EXPLANATION_ANSWERS[413]["description"] = "The schedule is too large to be explained here."


@explanations_router.get(
    "/{job_id}/explanation",
    response_class=Response,
    responses=_EXPLANATION_ANSWERS,
    summary="Say what limits the best schedule so far",
)
async def explain(
    *, job_id: str, service: Serving, who: Reader, if_none_match: IfNoneMatch = None
) -> Response:
    """Return the critical path, lanes, memory, idle time and offloads, in numbers and `sentences`.

    Sizes are bytes, times ms from the start of the schedule; `topic` groups the sentences.
    """
    problem, stored = await run_in_threadpool(solution, service.jobs, job_id, who)
    headers = {"ETag": etag_of(job_id, stored.number, _FORM), "Cache-Control": "private, no-cache"}
    if known_number(if_none_match, job_id, _FORM) == stored.number:
        return Response(status_code=304, headers=headers)
    content = await explanation(service.pool, stored.document, problem)
    return Response(content, headers=headers, media_type="application/json")


# --- Charts that the page embeds: of a job's best schedule, and of a batch's frontier.

charts_router = APIRouter(prefix="/v1", tags=["charts"])

_METHOD, _ROW = "method:", "row:"
_ID_CHARS, _TITLE_CHARS = 8, 60
_ITEM = {
    "description": "For `Bokeh.embed.embed_item`.",
    "content": {"application/json": {"schema": {"type": "object"}}},
}
Themed = Annotated[Theme, Query(description="Of its colours.")]


@charts_router.get(
    "/jobs/{job_id}/chart",
    response_class=Response,
    responses=tagged(_ITEM, of="what is shown, as it is drawn")
    | documented(404, 406, 409, 413, 429),
    summary="See the best schedule so far in a browser",
)
async def chart(
    *,
    job_id: str,
    service: Serving,
    who: Reader,
    theme: Themed = "light",
    beside: Annotated[
        str | None,
        Query(
            max_length=80,
            description="On the same time axis: another job, `method:1f1b` for what a published "
            "method makes of the problem, whether it fits or not, or of a tune `row:` and a row.",
        ),
    ] = None,
    row: Annotated[
        str | None,
        Query(pattern=r"^[0-9a-f]{12}$", description="Of a tune: instead of its best schedule."),
    ] = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return the lanes of every device and its memory over time, to be zoomed and pointed at."""
    rows = [row, (beside or "").removeprefix(_ROW) if (beside or "").startswith(_ROW) else None]
    kept = [one and await row_of(service.jobs, service.pool, job_id, who, one) for one in rows]
    other = None if kept[1] else beside
    shown, number, form = await run_in_threadpool(_look, service, job_id, who, other, theme)
    if kept[0]:
        shown[0] = Shown(
            problem=kept[0].problem, schedule=kept[0].schedule, title=f"{kept[0].label}:"
        )
        form = f"{form}-{row}"
    if kept[1]:
        title = f"{kept[1].label}:"
        shown.append(Shown(problem=kept[1].problem, schedule=kept[1].schedule, title=title))
        form = f"{form}-{beside}"
    headers = {"ETag": etag_of(job_id, number, form), "Cache-Control": "private, no-cache"}
    if known_number(if_none_match, job_id, form) == number:
        return Response(status_code=304, headers=headers)
    item = await service.charts.schedules(shown, theme)
    return Response(item, headers=headers, media_type="application/json")


@charts_router.get(
    "/batches/{batch_id}/chart",
    response_class=Response,
    responses={200: _ITEM, **documented(404, 406, 413, 429)},
    summary="See in a browser what memory buys",
)
async def frontier_chart(
    batch_id: str, service: Serving, who: Reader, theme: Themed = "light"
) -> Response:
    """Return the best objective and its bound over the memory limit, to be pointed at."""
    _, lines = await run_in_threadpool(service.batches.frontier, batch_id, who)
    # The page has the batch's name above it.
    item = await service.charts.frontier(lines, "", theme)
    return Response(item, media_type="application/json")


def _look(
    service: Service, job_id: str, who: Principal, beside: str | None, theme: Theme
) -> tuple[list[Shown], int, str]:
    """Return what is shown, the number of the job's schedule, and a form that names the rest."""
    problem, stored = solution(service.jobs, job_id, who)
    form = f"chart-{theme}" + (f"-{beside}" if beside else "")
    own = Shown(problem=problem, schedule=stored.document)
    if not beside:
        return [own], stored.number, form
    if beside.startswith(_METHOD):
        return (
            [own, Shown(problem=problem, method=beside.removeprefix(_METHOD))],
            stored.number,
            form,
        )
    its_problem, its = solution(service.jobs, beside, who)
    own = replace(own, title=_title(service.jobs.find(job_id, who)))
    title = _title(service.jobs.find(beside, who))
    other = Shown(problem=its_problem, schedule=its.document, title=title)
    return [own, other], stored.number, f"{form}.{its.number}"


def _title(job: JobRecord) -> str:
    return (job.name or job.id[:_ID_CHARS])[:_TITLE_CHARS]
