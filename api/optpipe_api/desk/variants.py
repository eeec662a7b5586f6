"""Problems that a form describes: estimated from a catalogue, varied by a slider.

Both are made where request bodies are read (`optpipe_api.desk.readers`), and come back as JSON
text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from optpipe.presets import (
    Training,
    estimate,
    find_gpu,
    find_model,
    shape_from_config,
    total_parameters,
)
from optpipe.sweep import sweep
from optpipe_api.bodies import decode_json
from optpipe_api.desk.readers import Reading
from optpipe_api.preset_schemas import EstimateBody, EstimateView, VariantBody, VariantView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.presets import Estimate, ModelShape
    from optpipe.problem import Problem
    from optpipe_api.desk.readers import Readers

__all__ = ["digest_estimate", "digest_variant", "estimated", "useful_axes", "varied"]

_ALWAYS = ("num_microbatches", "memory_scale", "memory_gb", "objective")
_TRAINING = (
    "micro_batch",
    "sequence",
    "tp",
    "cp",
    "ep",
    "dp",
    "zero",
    "precision",
    "flash",
    "sequence_parallel",
    "lean",
)


async def estimated(readers: Readers, body: bytes) -> str:
    """Return the `EstimateView` of a request as JSON text; raises as `digest_estimate`."""
    # A long pipeline of many layers is a large problem however short the request.
    reading = await readers.read("optpipe_api.desk.variants:digest_estimate", body, is_heavy=True)
    return reading.documents[0]


async def varied(readers: Readers, body: bytes) -> str:
    """Return the `VariantView` of a request as JSON text; raises as `digest_variant`."""
    reading = await readers.read("optpipe_api.desk.variants:digest_variant", body)
    return reading.documents[0]


def digest_estimate(body: bytes) -> Reading:
    """Return the answer to an estimate.

    Raises
    ------
    OptPipeError
        As `decode_json`, `EstimateBody.parse`, `estimate` and `sweep`.
    """
    asked = EstimateBody.parse(decode_json(body))
    shape = _shape(asked)
    found = _estimate(shape, asked)
    view = EstimateView(
        **_told(_vary(found.problem, asked.values)),
        parameters=total_parameters(shape),
        mfu=found.mfu,
        sizes=list(found.sizes),
        notes=list(map(str, found.notes)),
    )
    return Reading({}, (view.model_dump_json(by_alias=True),))


def digest_variant(body: bytes) -> Reading:
    """Return the answer to a variation.

    Raises
    ------
    OptPipeError
        As `decode_json`, `VariantBody.parse` and `sweep`.
    """
    asked = VariantBody.parse(decode_json(body))
    view = VariantView(**_told(_vary(asked.problem, asked.values)))
    return Reading({}, (view.model_dump_json(by_alias=True),))


def useful_axes(problem: Problem) -> list[str]:
    """Return the named axes of `optpipe.sweep` that can change this problem."""
    has_bus = any(device.d2h_gb_per_s is not None for device in problem.devices)
    has_limit = any(link.bandwidth_gb_per_s is not None for link in problem.links)
    found = {
        "pcie_scale": has_bus,
        "link_scale": has_limit,
        "latency_ms": bool(problem.links),
        "placement": len(problem.stages) > len(problem.devices),
        "offload": any(map(problem.can_offload, range(len(problem.stages)))),
        "recompute": any(stage.can_recompute for stage in problem.stages),
    }
    return [*_ALWAYS, *(name for name, is_useful in found.items() if is_useful)]


def _shape(asked: EstimateBody) -> ModelShape:
    if asked.model is not None:
        return find_model(asked.model)
    return shape_from_config(json.dumps(asked.config))


def _estimate(shape: ModelShape, asked: EstimateBody) -> Estimate:
    hardware = find_gpu(asked.gpu)
    return estimate(
        shape,
        hardware,
        Training(**{name: getattr(asked, name) for name in _TRAINING}),
        pp=asked.pp,
        num_microbatches=asked.num_microbatches,
        chunks=asked.chunks,
        placement=asked.placement or ("linear" if asked.chunks == 1 else "loop"),
        efficiency=hardware.efficiency.with_pcie(asked.pcie_efficiency),
        mfu=asked.mfu,
        memory_bytes=asked.memory_bytes,
    )


def _vary(problem: Problem, values: Mapping[str, Any]) -> Problem:
    if not values:
        return problem
    (variation,) = sweep(problem, {name: [value] for name, value in values.items()})
    return variation.problem


def _told(problem: Problem) -> dict[str, Any]:
    return {
        "problem": problem,
        "problem_hash": problem.problem_hash,
        "axes": useful_axes(problem),
        "usable_bytes": [device.usable_bytes for device in problem.devices],
        "static_bytes": [problem.static_bytes_of(index) for index in range(len(problem.devices))],
    }
