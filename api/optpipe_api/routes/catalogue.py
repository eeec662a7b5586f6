"""``/v1/methods``, ``/v1/presets``, ``/v1/estimates``, ``/v1/variants`` and ``/v1/tunes``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as PathParameter

from optpipe.answers import (
    Catalogue,
    EstimateView,
    MethodList,
    MethodView,
    PasteForm,
    VariantView,
)
from optpipe.plot.scene import title_of
from optpipe.requests import EstimateRequest, TuneRequest
from optpipe_api.http_errors import documented
from optpipe_api.jobs import DocumentKind
from optpipe_api.routes.common import (
    TEXT,
    Answers,
    ConstantDocument,
    IfNoneMatch,
    JsonText,
    Reader,
    Serving,
    document,
    json_body,
    parse_body,
    parse_model_body,
    tagged,
)
from optpipe_api.routes.jobs import add_submit_route
from optpipe_api.service import load_methods
from optpipe_api.services.render import kept_row, pasted_row, recut_row, run_on_row
from optpipe_api.services.submission import read_estimate, read_variant

__all__ = ["presets_router", "router", "tunes_router"]


router = APIRouter(prefix="/v1", tags=["methods"])


def _dump_methods() -> str:
    views = (
        MethodView(name=name, title=title_of(name), description=text)
        for name, text in load_methods().items()
    )
    return MethodList(methods=tuple(views)).model_dump_json()


_METHODS = ConstantDocument(_dump_methods)


@router.get(
    "/methods",
    response_model=MethodList,
    responses=tagged({200: {"description": "The methods."}}, of="the list") | documented(),
    summary="List the methods",
)
async def methods(if_none_match: IfNoneMatch = None) -> Response:
    """Return the values of the option `method` of a job, each with a description."""
    return await _METHODS.answer(if_none_match)


# --- ``/v1/presets``, ``/v1/estimates`` and ``/v1/variants``: problems without writing JSON.
# These routes store nothing, so every role may use them.

presets_router = APIRouter(prefix="/v1", tags=["presets"])


_PRESETS = ConstantDocument(lambda: Catalogue.make().model_dump_json(by_alias=True))


@presets_router.get(
    "/presets",
    response_model=Catalogue,
    responses=tagged({200: {"description": "What is known by name."}}, of="the list")
    | documented(),
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
async def estimates(request: Request, service: Serving, _caller: Reader) -> Response:
    """Return the problem of a model on an accelerator, varied by `values`: nothing is measured."""
    # Heavy: a short request can describe a large problem, a long pipeline of many layers.
    return JsonText(
        await parse_model_body(
            request, service, read_estimate, EstimateRequest, is_heavy=True, is_read=True
        )
    )


@presets_router.post(
    "/variants",
    response_model=VariantView,
    responses=documented(413, 415),
    openapi_extra=json_body("VariantRequest"),
    summary="Vary a problem",
)
async def variants(request: Request, service: Serving, _caller: Reader) -> Response:
    """Return the problem with less memory, more micro-batches and so on: one value per axis."""
    return JsonText(await parse_body(request, service, read_variant, is_read=True))


# --- Tunes: the search for the fastest configuration, and its rows.


tunes_router = APIRouter(prefix="/v1", tags=["tunes"])

RowId = Annotated[
    str, PathParameter(pattern=r"^[0-9a-f]{12}$", description="`id` of a row of `configuration`.")
]
_ROW_FAULTS = documented(404, 413, 429)


add_submit_route(
    tunes_router,
    "/tunes",
    TuneRequest,
    name="submit_tune",
    summary="Search for the fastest configuration",
    description="Queue a job that searches degrees, cut, placement, recompute and schedule "
    "together. Its objective is the duration of the whole step. Its schedule and problem are those "
    "of the best configuration. `configuration` returns all results and what is proven.",
)


@tunes_router.get(
    "/jobs/{job_id}/configuration",
    response_class=Response,
    responses={**document("Tuned"), **documented(404)},
    summary="Fetch the results of a tune",
)
def configuration(job_id: str, service: Serving, caller: Reader) -> Response:
    """Return gain, rows, Pareto front and certificate, of a running tune as found so far."""
    return JsonText(service.jobs.document(job_id, DocumentKind.TUNED, caller))


@tunes_router.get(
    "/jobs/{job_id}/question",
    response_class=Response,
    responses=document("TuneRequest", "The request without its options.") | documented(404),
    summary="Fetch the request of a tune",
)
def question(job_id: str, service: Serving, caller: Reader) -> Response:
    """Return model, GPUs, batch and current configuration, defaults filled in.

    It is a valid body of `POST /v1/tunes`.
    """
    return JsonText(service.jobs.document(job_id, DocumentKind.QUESTION, caller))


@tunes_router.get(
    "/jobs/{job_id}/rows/{row}/problem",
    response_class=Response,
    responses={**document("Problem"), **_ROW_FAULTS},
    summary="Fetch the problem of a tune's row",
)
async def row_problem(job_id: str, row: RowId, service: Serving, caller: Reader) -> Response:
    """Return the problem of a configuration. `problem` of the job is that of the best one."""
    kept = await run_on_row(kept_row, service.jobs, service.pool, job_id, caller, row)
    return JsonText(kept.problem)


@tunes_router.get(
    "/jobs/{job_id}/rows/{row}/schedule",
    response_class=Response,
    responses={**document("Schedule"), **_ROW_FAULTS},
    summary="Fetch the schedule of a tune's row",
)
async def row_schedule(job_id: str, row: RowId, service: Serving, caller: Reader) -> Response:
    """Return the schedule of a configuration. `schedule` of the job is that of the best one."""
    kept = await run_on_row(kept_row, service.jobs, service.pool, job_id, caller, row)
    return JsonText(kept.schedule)


@tunes_router.get(
    "/jobs/{job_id}/rows/{row}/recut",
    response_class=Response,
    responses={**document("TunedRow"), **_ROW_FAULTS},
    summary="Fetch a tune's row with other layers per stage",
)
async def row_recut(
    job_id: str,
    row: RowId,
    service: Serving,
    caller: Reader,
    layers: Annotated[
        str,
        Query(
            pattern=r"^[0-9]{1,4}(,[0-9]{1,4}){0,511}$",
            description="Layers of each stage in model order, separated by commas. Embedding and "
            "head count as layers.",
            examples=["17,17"],
        ),
    ],
) -> Response:
    """Return the configuration with other numbers of layers per stage, and its step time.

    The schedules of the framework are simulated. If none fits, `peak_bytes` shows by how much.
    """
    sizes = tuple(map(int, layers.split(",")))
    return JsonText(
        await run_on_row(recut_row, service.jobs, service.pool, job_id, caller, row, sizes)
    )


_PASTES: Answers = {
    200: {
        "description": "In the format of the framework.",
        "content": {"text/plain": {**TEXT, "example": "--num-layers 80\n"}},
    }
}


@tunes_router.get(
    "/jobs/{job_id}/rows/{row}/paste",
    response_class=Response,
    responses={**_PASTES, **documented(404, 406, 413, 429)},
    summary="Fetch a tune's row for its framework",
)
async def row_paste(
    job_id: str,
    row: RowId,
    service: Serving,
    caller: Reader,
    form: Annotated[PasteForm, Query(alias="format")] = "arguments",
) -> Response:
    """Return Megatron-LM's arguments, Megatron-Core's YAML, a torchtitan config, or its schedule.

    406 if the framework cannot run the configuration. If torchtitan has no name for the order, its
    config names `schedule.csv`: fetch that file as `csv`, and put it next to the config.
    """
    text = await run_on_row(pasted_row, service.jobs, service.pool, job_id, caller, row, form)
    return Response(text, media_type="text/plain")
