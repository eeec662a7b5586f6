"""Charts that the page embeds: of a job's best schedule, and of a batch's frontier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from starlette.concurrency import run_in_threadpool

from optpipe_api.desk.charts import Shown, Theme
from optpipe_api.desk.forms import solution
from optpipe_api.etags import etag_of, known_number
from optpipe_api.http_errors import documented
from optpipe_api.routes.serving import Reader, Serving  # noqa: TC001 - FastAPI reads it

if TYPE_CHECKING:
    from optpipe_api.access import Principal
    from optpipe_api.jobs import Job
    from optpipe_api.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["charts"])

_METHOD = "method:"
_ID_CHARS, _TITLE_CHARS = 8, 60
_TAG = {"ETag": {"schema": {"type": "string"}, "description": "Of what is shown, as it is drawn."}}
_ITEM = {"application/json": {"schema": {"type": "object"}}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "For `Bokeh.embed.embed_item`.", "headers": _TAG, "content": _ITEM},
    304: {"description": "What `If-None-Match` names is still what is to show.", "headers": _TAG},
}
_FRONTIER: dict[int | str, dict[str, Any]] = {
    200: {"description": "For `Bokeh.embed.embed_item`.", "content": _ITEM},
}
Themed = Annotated[Theme, Query(description="Of its colours.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What is shown, and what names this version of it."""

    shown: tuple[Shown, ...]
    number: int
    form: str


@router.get(
    "/jobs/{job_id}/chart",
    response_class=Response,
    responses={**_ANSWERS, **documented(404, 406, 409, 413, 429)},
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
            description="On the same time axis: another job, or `method:1f1b` for what a "
            "published method makes of the problem, whether it fits or not.",
        ),
    ] = None,
    if_none_match: Annotated[str | None, Header(description="`ETag` of the known one.")] = None,
) -> Response:
    """Return the lanes of every device and its memory over time, to be zoomed and pointed at."""
    seen = await run_in_threadpool(_look, service, job_id, who, beside, theme)
    tag = etag_of(job_id, seen.number, seen.form)
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if known_number(if_none_match, job_id, seen.form) == seen.number:
        return Response(status_code=304, headers=headers)
    item = await service.charts.schedules(seen.shown, theme)
    return Response(item, headers=headers, media_type="application/json")


@router.get(
    "/batches/{batch_id}/chart",
    response_class=Response,
    responses={**_FRONTIER, **documented(404, 406, 413, 429)},
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


def _look(service: Service, job_id: str, who: Principal, beside: str | None, theme: Theme) -> _Seen:
    problem, stored = solution(service.jobs, job_id, who)
    form = f"chart-{theme}"
    if beside and not beside.startswith(_METHOD):
        its_problem, its = solution(service.jobs, beside, who)
        both = ((job_id, problem, stored), (beside, its_problem, its))
        shown = tuple(
            Shown(problem=text, schedule=found.document, title=_title(service.jobs.find(of, who)))
            for of, text, found in both
        )
        return _Seen(shown=shown, number=stored.number, form=f"{form}-{beside}.{its.number}")
    own = Shown(problem=problem, schedule=stored.document)
    if not beside:
        return _Seen(shown=(own,), number=stored.number, form=form)
    other = Shown(problem=problem, method=beside.removeprefix(_METHOD))
    return _Seen(shown=(own, other), number=stored.number, form=f"{form}-{beside}")


def _title(job: Job) -> str:
    return (job.name or job.id[:_ID_CHARS])[:_TITLE_CHARS]
