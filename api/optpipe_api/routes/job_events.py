"""``/v1/jobs/{id}/events``: what happens to a job, as server-sent events."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event

from optpipe_api.errors import StoreUnavailableError
from optpipe_api.http_errors import documented
from optpipe_api.job_views import HistoryView
from optpipe_api.places import Purpose
from optpipe_api.routes.serving import Reader, Serving  # noqa: TC001 - FastAPI reads it

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from optpipe_api.jobs import HistoryEntry

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

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
            "contentSchema": {"$ref": "#/components/schemas/HistoryView"},
        },
        "retry": {"type": "integer"},
    },
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": (
            "Events `state`, `incumbent`, `bound` and `log`; `id` is the event's number, `data` a "
            "`HistoryView`. The stream ends with the job."
        ),
        "content": {"text/event-stream": {"itemSchema": _EVENT, "example": _EXAMPLE}},
    },
    204: {"description": "The job has ended, and everything was sent: do not reconnect."},
}


async def _place(service: Serving, who: Reader) -> AsyncIterator[None]:
    """Hold a place until the last byte is sent, or the client is gone."""
    with service.places.taken(who, Purpose.STREAM):
        yield


@router.get(
    "/{job_id}/events",
    dependencies=[Depends(_place)],
    response_class=Response,
    responses={**_ANSWERS, **documented(404)},
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
    data = HistoryView.of(entry).model_dump_json()
    return format_sse_event(
        data_str=data, event=entry.kind.value, id=str(entry.number), retry=retry_ms
    )
