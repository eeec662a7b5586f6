"""Measure a whole model layer by layer, as the model file that ``optpipe plan`` cuts.

The model is split into its embedding, one stage per block, and its head, which run the model's own
``forward`` (`optpipe.runtime.trainers.split`). Equal blocks are measured once.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from optpipe.errors import InputError
from optpipe.model import DefaultLink, Layer, Model, ModelDevice
from optpipe.problem import StageLayers
from optpipe.runtime.measuring.architectures import LayerKinds
from optpipe.runtime.measuring.attention import map_attention
from optpipe.runtime.measuring.measure import Profile, measure
from optpipe.runtime.measuring.operators import OperatorLog
from optpipe.runtime.measuring.traced import KnownValues, without_data
from optpipe.runtime.offload import host_memory_bytes
from optpipe.runtime.preflight import describe
from optpipe.runtime.trainers import huggingface
from optpipe.runtime.trainers.split import chain_stages, find_blocks, split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from optpipe.measurements import Given
    from optpipe.runtime.measuring.stages import ModelToMeasure

__all__ = ["ModelProfile", "RepeatedLayer", "measure_layers"]


class RepeatedLayer(NamedTuple):
    """Equal layers in a row: how many, and the number of the measured stage that they equal."""

    name: str
    repeat: int
    stage: int
    counts_as: StageLayers


class ModelProfile(NamedTuple):
    """The measurements of a model's distinct layers, and the layers in model order."""

    profile: Profile
    layers: tuple[RepeatedLayer, ...]

    def model(self, num_devices: int, num_microbatches: int, given: Given | None = None) -> Model:
        """Return the model file for this many devices like the measured one.

        Parameters
        ----------
        given
            Links that were not measured, and the name.

        Raises
        ------
        MeasurementError
            If a value that a problem needs is missing.
        """
        problem = self.profile.problem(num_microbatches, given)
        # Any device may hold any layer, so each has the most reserved bytes, and the bandwidths to
        # the host of the stage that offloads most.
        stages = problem.stages
        offloaded = [
            max((mode.offload_bytes for mode in stage.modes), default=stage.offload_bytes)
            for stage in stages
        ]
        largest = offloaded.index(max(offloaded))
        device = problem.devices[largest].model_dump(exclude={"name"}) | {
            "reserved_bytes": max(device.reserved_bytes for device in problem.devices)
        }
        links = [link for link in problem.links if link.source < link.target]
        slowest = min(links, key=lambda link: link.bandwidth_gb_per_s or float("inf"), default=None)
        return Model(
            name=problem.name,
            num_microbatches=num_microbatches,
            devices=tuple(ModelDevice(**device) for _ in range(num_devices)),
            default_link=DefaultLink()
            if slowest is None
            else DefaultLink(
                latency_ms=slowest.latency_ms, bandwidth_gb_per_s=slowest.bandwidth_gb_per_s
            ),
            layers=tuple(
                Layer(
                    **stages[run.stage].model_dump(exclude={"device", "name"}, exclude_none=True)
                    | {"name": run.name, "repeat": run.repeat, "layers": run.counts_as}
                )
                for run in self.layers
            ),
        )


def measure_layers(
    given: ModelToMeasure,
    *,
    num_devices: int,
    device: torch.device | str = "cpu",
    memory_bytes: int | None = None,
    **settings: Any,
) -> ModelProfile:
    """Measure the embedding, each distinct block, and the head of a model.

    Parameters
    ----------
    given
        The model with its sample, loss and target.
    num_devices
        How many devices the model file will have; on the CPU they share the host's memory.
    settings
        Further settings of `optpipe.runtime.measuring.measure`: ``effort``, ``modes``, ...

    Raises
    ------
    InputError
        If the model has no list of blocks, or a stage cannot be measured.
    PreflightError
        If the model does not come apart into stages that run its own ``forward``.
    """
    name, blocks = find_blocks(given.model, given.blocks)
    stages = _split(given, name, len(blocks))
    first, *middle, last = stages
    layer_kinds = LayerKinds(blocks)
    kinds = [layer_kinds.of(block) for block in blocks]
    numbers = {kind: 1 + number for number, kind in enumerate(dict.fromkeys(kinds))}
    distinct = [middle[kinds.index(kind)] for kind in numbers]
    if memory_bytes is None and str(device) == "cpu":
        memory_bytes = host_memory_bytes() // num_devices
    profile = measure(
        [first, *distinct, last],
        given.sample,
        loss_fn=given.loss_fn,
        target=given.target,
        device=device,
        memory_bytes=memory_bytes,
        **settings,
    )
    named = [(kinds[index], type(block).__name__) for index, block in enumerate(blocks)]
    runs = [
        RepeatedLayer(label, len(list(same)), numbers[kind], StageLayers(transformer=1))
        for (kind, label), same in groupby(named)
    ]
    return ModelProfile(
        profile,
        (
            RepeatedLayer("embedding", 1, 0, StageLayers(embedding=1)),
            *runs,
            RepeatedLayer("head", 1, len(distinct) + 1, StageLayers(head=1)),
        ),
    )


def _split(given: ModelToMeasure, name: str, num_blocks: int) -> Sequence[nn.Module]:
    """Return embedding, blocks and head as stages, compared with the model."""
    sizes = [0, *[1] * num_blocks, 0]
    has_values = not any(parameter.is_meta for parameter in given.model.parameters())
    if huggingface.is_language_model(given.model):
        return huggingface.split(given.model, sizes, check=False)
    stages = split(given.model, sizes, blocks=name, sample=given.sample, check=has_values)
    if not has_values:
        _check_work(given, stages)
    return stages


_MORE_WORK = 1.02
"""Ratio of bytes above which chained stages repeat work; a table of positions may be repeated."""


def _check_work(given: ModelToMeasure, stages: Sequence[nn.Module]) -> None:
    """Refuse stages without values that, chained, move more bytes in F than the model."""
    sample = given.sample if isinstance(given.sample, tuple) else (given.sample,)
    bare = without_data(sample)
    name = type(given.model).__name__
    try:
        whole = _moved_bytes(lambda: given.model(*bare))
        chained = _moved_bytes(lambda: chain_stages(stages, bare, {}))
    except Exception as error:
        raise InputError(
            f"{name} or its stages cannot run on the sample without data: {describe(error)}; "
            "correct the model or the sample, or give --stages"
        ) from error
    if chained > _MORE_WORK * whole:
        raise InputError(
            f"the stages of {name}, chained, move {chained:.4g} bytes in F, and the model "
            f"{whole:.4g}: each stage runs the model's forward, so it repeats what forward does "
            "outside of modules; move that into a module of its own, or give --stages"
        )


def _moved_bytes(run: Callable[[], Any]) -> float:
    """Return the bytes that all operators of a run read and write."""
    log = OperatorLog()
    with torch.no_grad(), map_attention(), KnownValues(), log:
        run()
    return sum(one.cost.weight_bytes + one.cost.moved_bytes for one in log.work)
