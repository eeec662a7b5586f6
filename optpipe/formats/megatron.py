"""The cut of a pipeline as arguments of Megatron-Core: who holds which layers.

Written for ``PipelineParallelLayerLayout`` in
``megatron/core/transformer/pipeline_parallel_layer_layout.py`` of NVIDIA/Megatron-LM (read at
commit 00caa53): one text per virtual stage in model order, stage k on rank k mod p; E embedding, t
transformer layer, m layer of multi-token prediction, L head and loss. What its
``validate_layer_layout`` refuses is refused here.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from optpipe.errors import InputError
from optpipe.problem import StageLayers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.problem import Problem

__all__ = ["check_num_layers", "layout_text", "megatron_layout", "read_layout"]

_FIELDS = {"E": "embedding", "t": "transformer", "m": "mtp", "L": "head"}


def megatron_layout(problem: Problem) -> str:
    """Return ``--num-layers 80 ... --pipeline-model-parallel-layout 'Et*10|t*11|(t*10|)*5t*9L'``.

    Raises
    ------
    InputError
        If a stage does not say its layers, or Megatron-Core cannot place them so.
    """
    p, count = len(problem.devices), len(problem.stages)
    if problem.placement != tuple(stage % p for stage in range(count)) or count % p:
        raise InputError(
            f"placement {list(problem.placement[:16])}: Megatron-Core has stage k on rank k mod "
            f"{p}, equally many on each; choose a line or a loop over all devices"
        )
    held = _layers(problem)
    layout = layout_text(held, p)
    mtp = sum(layers.mtp for layers in held)
    return (
        f"--num-layers {sum(layers.transformer for layers in held)} "
        + (f"--mtp-num-layers {mtp} " if mtp else "")
        + f"--pipeline-model-parallel-size {p} "
        + f"--pipeline-model-parallel-layout '{layout}'"
    )


def layout_text(held: Sequence[StageLayers], num_devices: int) -> str:
    """Return ``Et*10|t*11|(t*10|)*5t*9L`` of what the stages hold, in model order.

    Raises
    ------
    InputError
        If Megatron-Core cannot place them so on that many pipeline ranks.
    """
    _check_ends(held)
    _check_mtp(held, num_devices)
    runs = [(stage, len(list(run))) for stage, run in groupby(map(_letters, held))]
    # The last run is one stage, with the head: no group's closing bar ends the text.
    return "".join(f"{stage}|" if n == 1 else f"({stage}|)*{n}" for stage, n in runs)[:-1]


def read_layout(text: str) -> tuple[StageLayers, ...]:
    """Return what the stages of such a text hold; commas and spaces mean nothing.

    Raises
    ------
    InputError
        If a letter is none of E, t, m and L.
    """
    flat = re.sub(r"[\s,]", "", text)
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"([A-Za-z|])\*(\d+)"):
        flat = re.sub(pattern, lambda found: found[1] * int(found[2]), flat)
    wrong = sorted(set(flat) - {*_FIELDS, "|"})
    if wrong or not flat:
        raise InputError(
            f"layout {text!r}: {''.join(wrong) or 'it'} is none of E, t, m, L, | and (...)*n; "
            "correct it"
        )
    return tuple(
        StageLayers(**{name: stage.count(letter) for letter, name in _FIELDS.items()})
        for stage in flat.split("|")
    )


def check_num_layers(problem: Problem, num_layers: int) -> None:
    """Raise `InputError` unless the stages hold so many transformer layers, the model's."""
    total = sum(layers.transformer for layers in _layers(problem))
    if total != num_layers:
        raise InputError(
            f"the stages hold {total} transformer layers, but the model has {num_layers} "
            "(embedding and head are counted apart); correct stages[].layers or the number"
        )


def _layers(problem: Problem) -> list[StageLayers]:
    held = []
    for index, stage in enumerate(problem.stages):
        if stage.layers is None:
            raise InputError(
                f"stages[{index}] does not say its layers, so nothing can be checked; write them "
                '(optpipe estimate does), e.g. "layers": {"transformer": 10}'
            )
        held.append(stage.layers)
    return held


def _check_ends(held: Sequence[StageLayers]) -> None:
    for name, place, index in (("embedding", "first", 0), ("head", "last", len(held) - 1)):
        counts = [getattr(layers, name) for layers in held]
        if sum(counts) != 1 or counts[index] != 1:
            raise InputError(
                f"layers.{name} of the stages = {counts}: Megatron-Core has one, in the {place} "
                "stage; correct them"
            )


def _check_mtp(held: Sequence[StageLayers], num_devices: int) -> None:
    where = [stage for stage, layers in enumerate(held) if layers.mtp]
    if not where:
        return
    after = any(layers.transformer for layers in held[where[0] + 1 :])
    if len(where) > 1 or after or where[0] < len(held) - num_devices:
        raise InputError(
            f"layers.mtp in stages {where}: Megatron-Core has all of them in one of the last "
            f"{num_devices} stages, behind every transformer layer; move them"
        )


def _letters(layers: StageLayers) -> str:
    counts = ((layers.embedding, "E"), (layers.transformer, "t"), (layers.mtp, "m"))
    inner = "".join(letter if n == 1 else f"{letter}*{n}" for n, letter in counts if n)
    return inner + "L" * layers.head
