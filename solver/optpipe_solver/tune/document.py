"""A question and a row as JSON values: what a service keeps, and whoever searches reads again."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from optpipe.errors import InputError
from optpipe.presets import (
    PipelineCut,
    Training,
    find_gpu,
    find_model,
    shape_from_config,
    step_estimate,
)
from optpipe.presets.configuration import Configuration
from optpipe.problem import Placement, placement_of
from optpipe_solver.tune.judge import TuneRow
from optpipe_solver.tune.space import TuneQuestion, candidates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.presets import ModelShape
    from optpipe.problem import Problem
    from optpipe.schedule import Programs

__all__ = ["AskedTune", "calibrated", "current_configuration", "read_question", "read_row"]

_SWITCHES = (
    *("sequence", "precision", "flash", "cuda_graphs", "ep_overlap", "dispatcher", "dispatch"),
    "overlap",
)
_ASKED = ("num_gpus", "global_batch", "framework", "memory_bytes", "headroom")
_DEGREES = ("tp", "cp", "ep", "etp", "micro_batch", "zero")


@dataclass(frozen=True, kw_only=True)
class AskedTune:
    """A question, and what is run today where that was said."""

    question: TuneQuestion
    current: Configuration | None


def read_question(asked: Mapping[str, Any]) -> AskedTune:
    """Return what plain values ask.

    Parameters
    ----------
    asked
        ``model`` or ``config`` (a Hugging Face config.json as a dictionary), ``gpu``, ``num_gpus``,
        ``global_batch``; the fields of `TuneQuestion` and the switches of `Training` by their
        names; ``network`` and ``oversubscription``; ``current`` with the degrees of what is run
        today, and ``measured_step_s``, seconds that a step of it takes.

    Raises
    ------
    InputError
        If nothing can be answered; it points at the field.
    """
    hardware = find_gpu(asked["gpu"])
    network, oversubscription = asked.get("network"), asked.get("oversubscription", 1.0)
    if network is not None or oversubscription != 1:
        hardware = hardware.on_network(network, oversubscription)
    question = TuneQuestion(
        shape=_shape(asked),
        hardware=hardware,
        training=Training(**{name: asked[name] for name in _SWITCHES if name in asked}),
        fixed=asked.get("fixed", {}),
        **{name: asked[name] for name in _ASKED if name in asked},
    )
    if next(candidates(question), None) is None:
        raise InputError(
            f"num_gpus = {question.num_gpus}: no configuration of so many GPUs splits "
            f"{question.shape.name} and a global batch of {question.global_batch} evenly; change "
            "one of them, or what is fixed"
        ).at("/num_gpus")
    measured_step_s = asked.get("measured_step_s")
    if asked.get("current") is None:
        if measured_step_s is not None:
            message = "measured_step_s says what a step of current takes; give both or none"
            raise InputError(message).at("/measured_step_s")
        return AskedTune(question=question, current=None)
    try:
        current = current_configuration(question, asked["current"])
        measured = calibrated(question, current, measured_step_s or 1.0)
    except InputError as error:
        raise error if error.pointers == ("/sequence",) else error.inside("/current") from None
    if measured_step_s is not None:
        question = measured
    return AskedTune(question=question, current=current)


def calibrated(
    question: TuneQuestion, current: Configuration, measured_step_s: float
) -> TuneQuestion:
    """Return the question with every time multiplied so that a step of today's takes so long.

    Raises
    ------
    InputError
        If that many seconds are out of range, or the model is not split so.
    """
    if not 0 < measured_step_s < 1e6:
        raise InputError(
            f"measured_step_s = {measured_step_s}: must be above 0 and below 1000000; correct it"
        )
    machine = question.machine(current.training)
    estimated_ms = step_estimate(question.shape, machine, current.pipeline).step_ms
    return replace(question, time_factor=1e3 * measured_step_s / estimated_ms)


def _shape(asked: Mapping[str, Any]) -> ModelShape:
    if asked.get("model") is not None:
        return find_model(asked["model"])
    try:
        return shape_from_config(json.dumps(asked["config"]))
    except InputError as error:
        raise error.inside("/config") from None


def current_configuration(question: TuneQuestion, asked: Mapping[str, Any]) -> Configuration:
    """Return what is run today: degrees, the layers cut as frameworks cut them.

    Parameters
    ----------
    asked
        tp, cp, ep, etp, dp, pp, chunks, micro_batch and zero, 1 where left out (dp: what the
        accelerators leave), and ``recompute``, modules by Megatron-Core's names.

    Raises
    ------
    InputError
        If the accelerators or the batch are not split so, or the model is not.
    """
    degrees = {name: asked[name] for name in _DEGREES if name in asked}
    pp, chunks = asked.get("pp", 1), asked.get("chunks", 1)
    each = degrees.get("tp", 1) * degrees.get("cp", 1) * pp
    dp = asked.get("dp") or max(1, question.num_gpus // each)
    if each * dp != question.num_gpus:
        raise InputError(
            f"current: tp x cp x pp x dp = {each * dp}, but num_gpus is {question.num_gpus}; "
            "correct one of them"
        )
    batch = dp * degrees.get("micro_batch", 1)
    if question.global_batch % batch:
        raise InputError(
            f"current: dp x micro_batch = {batch} does not divide global_batch "
            f"{question.global_batch}; correct one of them"
        )
    training = replace(
        question.training,
        **degrees,
        dp=dp,
        recompute=frozenset(asked.get("recompute", ())),
    )
    training.check_divides(question.shape)
    cut = PipelineCut(
        pp=pp,
        chunks=chunks,
        num_microbatches=question.global_batch // batch,
        placement="linear" if chunks == 1 else "loop",
        layout="even",
    )
    return Configuration(
        shape=question.shape, hardware=question.hardware, training=training, pipeline=cut
    )


def read_row(
    question: TuneQuestion, row: Mapping[str, Any], problem: Problem, programs: Programs
) -> TuneRow:
    """Return a row again, from what `TuneRow.as_json` said of it and what was simulated."""
    pp, chunks = row["pp"], row["chunks"]
    places = [name for name in get_args(Placement) if name != "linear" or chunks == 1]
    found = [name for name in places if placement_of(name, pp, chunks) == problem.placement]
    training = replace(
        question.training,
        **{name: row[name] for name in _DEGREES},
        dp=row["dp"],
        recompute=frozenset(row["recompute"]),
    )
    cut = PipelineCut(
        pp=pp,
        chunks=chunks,
        num_microbatches=row["num_microbatches"],
        placement=found[0] if found else places[0],
    )
    return TuneRow(
        configuration=Configuration(
            shape=question.shape,
            hardware=question.hardware,
            training=training,
            pipeline=cut,
            sizes=tuple(row["layers"]),
        ),
        step_ms=row["step_ms"],
        makespan_ms=row["makespan_ms"],
        method=row["method"],
        peak_bytes=tuple(row["peak_bytes"]),
        tokens_per_s_per_gpu=row["tokens_per_s_per_gpu"],
        mfu=row["mfu"],
        problem=problem,
        programs=programs,
    )
