"""What one may ask for (``/v1/methods``, ``/v1/presets``), estimates made of it, and ``/v1/tunes``.

A tune asks which configuration is fastest: what was found, each row, what to paste.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as PathParameter
from starlette.concurrency import run_in_threadpool

from optpipe.answers import (
    Catalogue,
    EstimateView,
    Job,
    MethodList,
    MethodView,
    PasteForm,
    VariantView,
)
from optpipe.plot.scene import title_of
from optpipe.requests import TuneRequest
from optpipe_api.bodies import read_body, require_json
from optpipe_api.http_errors import documented
from optpipe_api.jobs import DocumentKind
from optpipe_api.routes.common import (
    ConstantDocument,
    IfNoneMatch,
    Reader,
    Serving,
    Submitter,
    document,
    ended,
    idempotency_key,
    json_body,
    json_content,
    seconds_to_wait,
    tagged,
)
from optpipe_api.routes.jobs import submitted
from optpipe_api.service import load_methods
from optpipe_api.services.render import OF_ROWS, pasted_row, recut_row, row_of
from optpipe_api.services.submission import read_estimate, read_variant

if TYPE_CHECKING:
    from optpipe_api.routes.common import Answers

__all__ = ["configurations_router", "presets_router", "router", "tunes_router"]


router = APIRouter(prefix="/v1", tags=["methods"])


def _method_list() -> str:
    views = (
        MethodView(name=name, title=title_of(name), description=text)
        for name, text in load_methods().items()
    )
    return MethodList(methods=tuple(views)).model_dump_json()


_METHODS = ConstantDocument(_method_list)


@router.get(
    "/methods",
    response_model=MethodList,
    responses=tagged({"description": "The methods."}, of="the list") | documented(),
    summary="List the methods",
)
async def methods(if_none_match: IfNoneMatch = None) -> Response:
    """Return what `method` of a job may be, each with one line about it."""
    return await _METHODS.answer(if_none_match)


# --- ``/v1/presets``, ``/v1/estimates`` and ``/v1/variants``: problems without writing JSON.
# They change nothing, so every role may ask.

presets_router = APIRouter(prefix="/v1", tags=["presets"])


_PRESETS = ConstantDocument(lambda: Catalogue.make().model_dump_json(by_alias=True))


@presets_router.get(
    "/presets",
    response_model=Catalogue,
    responses=tagged({"description": "What is known by name."}, of="the list") | documented(),
    summary="List models and accelerators",
)
async def presets(if_none_match: IfNoneMatch = None) -> Response:
    """Return the models and accelerators that an estimate knows by name, with sources."""
    return await _PRESETS.answer(if_none_match)


@presets_router.post(
    "/estimates",
    response_model=EstimateView,
    responses=documented(413, 415),
    openapi_extra=json_body("EstimateRequest"),
    summary="Estimate a problem from a model and an accelerator",
)
async def estimates(request: Request, service: Serving, _who: Reader) -> Response:
    """Return the problem of a model on an accelerator, varied by `values`: nothing is measured."""
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    # A long pipeline of many layers is a large problem however short the request.
    text = await service.pool.run(read_estimate, body, is_heavy=True)
    return Response(text, media_type="application/json")


@presets_router.post(
    "/variants",
    response_model=VariantView,
    responses=documented(413, 415),
    openapi_extra=json_body("VariantRequest"),
    summary="Vary a problem",
)
async def variants(request: Request, service: Serving, _who: Reader) -> Response:
    """Return the problem with less memory, more micro-batches and so on: one value per axis."""
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    text = await service.pool.run(read_variant, body)
    return Response(text, media_type="application/json")


# --- Tunes.


tunes_router = APIRouter(prefix="/v1", tags=["tunes"])
configurations_router = APIRouter(prefix="/v1/jobs", tags=["tunes"])

Wait = Annotated[float, seconds_to_wait("the end")]
Key = Annotated[str | None, idempotency_key("returns the first one's job")]


@tunes_router.post(
    "/tunes",
    status_code=202,
    response_model=Job,
    responses={**ended(Job, "job"), **documented(403, 409, 413, 415, 429)},
    openapi_extra=json_body("TuneRequest"),
    summary="Ask for the fastest configuration",
)
async def submit_tune(
    request: Request,
    service: Serving,
    who: Submitter,
    wait: Wait = 0.0,
    idempotency_key: Key = None,
) -> Response:
    """Queue a job that searches degrees, cut, placement, recomputation and schedule together.

    Its objective is the whole step, its schedule and problem are the winner's; what was found and
    what is proven is its configuration.
    """
    return await submitted(request, service, who, TuneRequest, wait_s=wait, key=idempotency_key)


_QUESTION: Answers = {
    200: {"description": "What is asked, options aside.", "content": json_content("TuneRequest")}
}


@configurations_router.get(
    "/{job_id}/configuration",
    response_class=Response,
    responses={**document("Tuned"), **documented(404)},
    summary="Fetch what a tune has found",
)
def configuration(job_id: str, service: Serving, who: Reader) -> Response:
    """Return gain, rows, Pareto front and certificate; while it goes on, the best row so far."""
    return Response(
        service.jobs.document(job_id, DocumentKind.TUNED, who), media_type="application/json"
    )


@configurations_router.get(
    "/{job_id}/question",
    response_class=Response,
    responses={**_QUESTION, **documented(404)},
    summary="Fetch what a tune is asked",
)
def question(job_id: str, service: Serving, who: Reader) -> Response:
    """Return model, GPUs, batch and what is run today, defaults filled in; it can be sent again."""
    return Response(
        service.jobs.document(job_id, DocumentKind.QUESTION, who), media_type="application/json"
    )


RowId = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{12}$", description="Of `configuration`.")]
_ROW_FAULTS = documented(404, 413, 429)
_PASTES: Answers = {
    200: {
        "description": "As the framework takes it.",
        "content": {"text/plain": {"schema": {"type": "string"}, "example": "--num-layers 80\n"}},
    }
}


@configurations_router.get(
    "/{job_id}/rows/{row}/problem",
    response_class=Response,
    responses={**document("Problem"), **_ROW_FAULTS},
    summary="Fetch the problem of a tune's row",
)
async def row_problem(job_id: str, row: RowId, service: Serving, who: Reader) -> Response:
    """Return the problem of a configuration, as that of the winner is `problem`."""
    found = await row_of(service.jobs, service.pool, job_id, who, row)
    return Response(found.problem, media_type="application/json")


@configurations_router.get(
    "/{job_id}/rows/{row}/schedule",
    response_class=Response,
    responses={**document("Schedule"), **_ROW_FAULTS},
    summary="Fetch the schedule of a tune's row",
)
async def row_schedule(job_id: str, row: RowId, service: Serving, who: Reader) -> Response:
    """Return the schedule of a configuration, as that of the winner is `schedule`."""
    found = await row_of(service.jobs, service.pool, job_id, who, row)
    return Response(found.schedule, media_type="application/json")


@configurations_router.get(
    "/{job_id}/rows/{row}/recut",
    response_class=Response,
    responses={**document("TunedRow"), **_ROW_FAULTS},
    summary="Fetch a tune's row with other layers per stage",
)
async def row_recut(
    job_id: str,
    row: RowId,
    service: Serving,
    who: Reader,
    layers: Annotated[
        str,
        Query(
            pattern=r"^[0-9]{1,4}(,[0-9]{1,4}){0,511}$",
            description="Of each stage in model order, with commas, embedding and head counted.",
            examples=["17,17"],
        ),
    ],
) -> Response:
    """Return what the configuration would take if its stages had other numbers of layers.

    By the framework's own schedules, simulated; where none fits, `peak_bytes` says by how much.
    """
    question, checkpoint = await run_in_threadpool(service.jobs.documents, job_id, who, *OF_ROWS)
    sizes = tuple(map(int, layers.split(",")))
    text = await service.pool.run(recut_row, question, checkpoint, row, sizes, is_heavy=True)
    return Response(text, media_type="application/json")


@configurations_router.get(
    "/{job_id}/rows/{row}/paste",
    response_class=Response,
    responses={**_PASTES, **documented(404, 406, 413, 429)},
    summary="Fetch what a framework takes of a tune's row",
)
async def row_paste(
    job_id: str,
    row: RowId,
    service: Serving,
    who: Reader,
    form: Annotated[PasteForm, Query(alias="format")] = "arguments",
) -> Response:
    """Return Megatron-LM's arguments, Megatron-Core's YAML, a torchtitan config, or its schedule.

    406 where the framework cannot run it. A torchtitan config names `schedule.csv` where torchtitan
    has no name for the order: fetch it as `csv` and say where it lies.
    """
    question, checkpoint = await run_in_threadpool(service.jobs.documents, job_id, who, *OF_ROWS)
    text = await service.pool.run(pasted_row, question, checkpoint, row, form, is_heavy=True)
    return Response(text, media_type="text/plain")
