"""Questions, rows and checkpoints as JSON values: a service keeps them, a search reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, get_args

from optpipe.errors import FieldError, FieldRef, InputError
from optpipe.formats.exports import dump_csv
from optpipe.formats.json import load_problem
from optpipe.planning import (
    PipelineCut,
    Training,
    megatron_script,
    megatron_yaml,
    read_megatron,
    read_torchtitan,
    step_estimate,
    torchtitan_config,
)
from optpipe.planning.configuration import Configuration
from optpipe.planning.estimate import check_can_be, utilisation
from optpipe.planning.frameworks.megatron_reader import check_even_cut
from optpipe.planning.frameworks.rules import check_gpus, check_starts
from optpipe.planning.step import RankMemory, find_byte_factor
from optpipe.problem import Placement, placement_of
from optpipe.schedule import cells_of, parse_cell
from optpipe_solver.tune.judge import Look, Looks, TuneCheckpoint, TuneRow, judge
from optpipe_solver.tune.scaling import auto_counts
from optpipe_solver.tune.space import TuneQuestion, candidates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.planning import Hardware
    from optpipe.planning.shape import Kernels
    from optpipe.problem import Problem
    from optpipe.requests import CurrentRun, TuneRequest
    from optpipe.schedule import Programs
    from optpipe_solver.tune.tune import TuneResult

__all__ = [
    "AskedTune",
    "calibrated",
    "checkpoint_of",
    "current_configuration",
    "needs_csv",
    "paste",
    "read_checkpoint",
    "read_current",
    "read_kept",
    "read_question",
    "read_row",
]

_SWITCHES = (
    *("precision", "flash", "cuda_graphs", "ep_overlap", "dispatcher", "dispatch"),
    *("overlap", "compiled"),
)
_KERNELS: dict[str, Kernels] = {"torchtitan": "torch", "huggingface": "torch"}
_DEGREES = ("tp", "cp", "ep", "etp", "micro_batch", "zero")
_TORCH_NAMES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
_OF_DEGREES = ("dispatcher", "sharding", "precision-aware optimizer")
"""Rules that only some degrees break."""
_MOST_KEPT = 11
_VERSION = 11
"""Of checkpoints: to be raised with every change of bounds or of the order of candidates."""


@dataclass(frozen=True, kw_only=True)
class AskedTune:
    """A question, and today's configuration and numbers of GPUs to tune for if there are any.

    ``is_auto``: the numbers are those of ``auto``, of which the smallest are not shown.
    """

    question: TuneQuestion
    current: Configuration | None
    gpu_counts: tuple[int, ...] = ()
    is_auto: bool = False


def read_question(request: TuneRequest) -> AskedTune:
    """Return the question of a request, and the configuration of today if the request has one.

    Raises
    ------
    InputError
        If the question has no answer; the error points at the field.
    """
    switches = request.chosen_switches
    request = request.complete()
    kinds = tuple((one.hardware, one.number) for one in request.gpus if one.number is not None)
    # Packed sequences are not cut into slices.
    whole = {"slices": 1} if request.packed_lengths else {}
    question = TuneQuestion(
        shape=request.shape,
        hardware=request.gpus[0].hardware,
        num_gpus=request.total_gpus,
        kinds=kinds if len(kinds) > 1 else (),
        global_batch=request.global_batch,
        training=Training(
            **({name: getattr(request, name) for name in _SWITCHES} | _settings(request)),
            optimizer=request.optimizer_settings,
            routing=request.routing,
            lora=request.lora_settings,
        ),
        framework=request.framework,
        fixed=whole | request.fixed.model_dump(exclude_none=True),
        memory_bytes=request.memory_bytes,
        headroom=request.headroom,
        price_per_gpu_hour=request.price_per_gpu_hour,
        chosen=switches,
    )
    question.training.check_divides(question.shape)
    if request.gpu_counts is not None:
        is_auto = request.gpu_counts == "auto"
        counts = auto_counts(question) if is_auto else request.gpu_counts
        return AskedTune(
            question=question, current=None, gpu_counts=tuple(map(int, counts)), is_auto=is_auto
        )
    if next(candidates(question), None) is None:
        training = question.training
        if question.shape.trace is not None or question.framework == "huggingface":
            names = question.fixed.keys() & set(Training.__dataclass_fields__)
            wanted: dict[str, Any] = {name: question.fixed[name] for name in names}
            training = replace(training, **({"dp": question.num_gpus} | wanted))
            training.check_divides(question.shape)
        one = Configuration(
            shape=question.shape,
            hardware=question.hardware,
            training=training,
            pipeline=PipelineCut(),
        )
        check_starts(one, question.framework, *_OF_DEGREES)
        degrees = {name: question.fixed.get(name) or 1 for name in ("tp", "cp", "pp", "ep", "etp")}
        try:
            check_gpus(question.num_gpus, **degrees)
        except InputError as error:
            raise error.at("/num_gpus") from None
        raise FieldError(
            FieldRef("num_gpus", question.num_gpus),
            f": no configuration of so many GPUs splits {question.shape.name} and a global batch "
            f"of {question.global_batch} evenly"
            + (", each kind by itself" if question.kinds else "")
            + "; change one of them, or ",
            FieldRef("fixed"),
        )
    if request.current is None and request.current_file is None:
        return AskedTune(question=question, current=None)
    try:
        if request.current is not None:
            current = current_configuration(question, request.current)
        else:
            current = read_current(
                question,
                request.current_file or "",
                is_torchtitan=request.current_format == "torchtitan",
            )
        calibrated(question, current)
    except InputError as error:
        if error.pointers == ("/sequence",):
            raise
        name = "current" if request.current is not None else "current_file"
        places = error.inside(f"/{name}").pointers
        raise FieldError(FieldRef(name), f": {error}").at(*places) from None
    shape = replace(question.shape, settings=current.shape.settings)
    question = replace(question, shape=shape)
    question = calibrated(question, current, request.measured_step_s, request.measured_peak_gib)
    return AskedTune(question=question, current=current)


def _settings(request: TuneRequest) -> dict[str, Any]:
    """Return sequence, lengths and kernels; of a trace also the first degree that it has."""
    kernels = request.kernels or _KERNELS.get(request.framework, "megatron")
    found = {"kernels": kernels, **request.packed_settings}
    if request.trace is None:
        return found
    tp = request.trace.degrees[0]
    return found | {"tp": tp} | request.settings_of_trace(tp)


def read_current(
    question: TuneQuestion, text: str, *, is_torchtitan: bool = False
) -> Configuration:
    """Return today's configuration, from Megatron's arguments or YAML, or a torchtitan config.

    Raises
    ------
    InputError
        As `optpipe.planning.read_megatron`, and if a step of it has another batch or sequence, or
        other multi-token prediction.
    """
    text = text.removeprefix("\ufeff")  # which some editors put in front
    read = read_torchtitan if is_torchtitan else read_megatron
    current = read(
        text,
        question.shape,
        question.hardware,
        question.num_gpus,
        global_batch=question.global_batch,
        sequence=question.training.sequence,
    )
    said = current.global_batch, current.training.sequence
    wanted = question.global_batch, question.training.sequence
    if said != wanted:
        raise InputError(
            f"a step of it is {said[0]} sequences of {said[1]:,} tokens, asked are {wanted[0]} of "
            f"{wanted[1]:,}, and two such steps cannot be compared; ask for the same global batch "
            "and sequence"
        )
    mtp, wanted_mtp = current.shape.mtp, question.shape.mtp
    if mtp != wanted_mtp:
        raise InputError(
            f"it trains {mtp} modules of multi-token prediction, asked are the {wanted_mtp} of "
            f"{question.shape.name!r}, and two such steps cannot be compared; ask for a model with "
            f"{mtp}, or say {wanted_mtp} there"
        )
    # No script has LoRA, lengths or the load of experts: its step trains what the question trains.
    searched = question.training
    routing = replace(current.training.routing, imbalance=searched.routing.imbalance)
    training = replace(
        current.training, lora=searched.lora, lengths=searched.lengths, routing=routing
    )
    return replace(current, training=training, kinds=_kinds_today(question, training))


def _kinds_today(question: TuneQuestion, training: Training) -> tuple[Hardware, ...]:
    """Return the accelerators of pipeline ranks today: in the order in which they were given.

    Raises
    ------
    InputError
        If a stage would be on two kinds.
    """
    orders = question.orders(training.ranks)
    if orders:
        return orders[0]
    numbers = " and ".join(f"{number} {one.name}" for one, number in question.kinds)
    raise InputError(
        f"{training.ranks} GPUs share a stage (tp x cp x dp), which do not divide "
        f"{numbers}, so a stage would stand on two kinds; change the degrees"
    )


def calibrated(
    question: TuneQuestion,
    current: Configuration,
    measured_step_s: float | None = None,
    measured_peak_gib: float | None = None,
) -> TuneQuestion:
    """Return the question whose estimate of today's step has the measured time and peak.

    Every time is multiplied by one factor, and all bytes but static ones by another. None leaves
    them as they are.

    Raises
    ------
    InputError
        If a measurement is out of range, or the model is not split so.
    """
    field = FieldRef("measured_step_s", measured_step_s)
    if measured_step_s is not None and not 0 < measured_step_s < 1e6:
        raise FieldError(field, ": must be above 0 and below 1000000; correct it")
    ranks = question.ranks(current.kinds, current.pipeline.pp)
    machines = [question.machine(current.training, one) for one in ranks]
    sizes = current.sizes or None
    step = step_estimate(question.shape, machines, current.pipeline, sizes=sizes)
    if measured_peak_gib is not None:
        factor = find_byte_factor(step, measured_peak_gib * 2**30)
        question = replace(question, byte_factor=factor)
    if measured_step_s is None:
        return question
    # The formula hides no exchange with experts, and a simulation of pairs does.
    row = judge(question, current) if current.pipeline.pairs else None
    factor = 1e3 * measured_step_s / (step.step_ms if row is None else row.step_ms)
    check_can_be(utilisation(question.shape, machines) / factor, field)
    return replace(question, time_factor=factor)


def current_configuration(question: TuneQuestion, run: CurrentRun) -> Configuration:
    """Return today's configuration; without layers, the model is cut as frameworks cut it.

    Raises
    ------
    InputError
        If the accelerators or the batch are not split so, or the model is not.
    """
    pp, chunks = run.pp, run.chunks
    if chunks > pp == 1:
        raise InputError(
            f"chunks = {chunks} with pp = 1: only the stages of a pipeline have several; "
            "leave chunks out, or give pp"
        )
    each = run.tp * run.cp * pp
    dp = run.dp or max(1, question.num_gpus // each)
    if run.dp is None:
        check_gpus(question.num_gpus, tp=run.tp, cp=run.cp, pp=pp, ep=run.ep, etp=run.etp)
    if each * dp != question.num_gpus:
        raise InputError(
            f"tp x cp x pp x dp = {each * dp}, but num_gpus is {question.num_gpus}; "
            "correct one of them"
        )
    batch = dp * run.micro_batch
    if question.global_batch % batch:
        raise InputError(
            f"dp x micro_batch = {batch} does not divide global_batch "
            f"{question.global_batch}; correct one of them"
        )
    degrees = {name: getattr(run, name) for name in _DEGREES}
    split = question.shape.split_settings(run.tp)
    if "etp" in run.model_fields_set:
        split.pop("etp", None)
    training = replace(
        question.training,
        **(degrees | split),
        dp=dp,
        recompute=run.recompute,
    )
    training.check_divides(question.shape)
    cut = PipelineCut(
        pp=pp,
        chunks=chunks,
        num_microbatches=question.global_batch // batch,
        placement="linear" if chunks == 1 else "loop",
        layout="even",
    )
    current = Configuration(
        shape=question.shape,
        hardware=question.hardware,
        training=training,
        pipeline=cut,
        sizes=run.layers or (),
        kinds=_kinds_today(question, training),
    )
    _ = current.stages  # checks that there are as many layers as are said, one for each at least
    if question.framework == "megatron" and not current.sizes:
        check_even_cut(question.shape, pp, chunks)
    check_starts(current, question.framework)
    return current


def read_row(
    question: TuneQuestion, row: Mapping[str, Any], problem: Problem, programs: Programs
) -> TuneRow:
    """Return a row from the output of `TuneRow.as_json` and its simulated schedule."""
    pp, chunks = row["pp"], row["chunks"]
    by_name = {one.name: one for one in question.all_kinds}
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
        pairs=row.get("pairs", False),
        slices=row.get("slices", 1),
    )
    return TuneRow(
        configuration=Configuration(
            shape=question.shape,
            hardware=question.hardware,
            training=training,
            pipeline=cut,
            sizes=tuple(row["layers"]),
            kinds=tuple(by_name[name] for name in row["gpus"]),
        ),
        step_ms=row["step_ms"],
        makespan_ms=row["makespan_ms"],
        method=row["method"],
        peak_bytes=tuple(row["peak_bytes"]),
        memory=tuple(
            RankMemory(**{name.removesuffix("_bytes"): float(part) for name, part in rank.items()})
            for rank in row["memory"]
        ),
        tokens_per_s_per_gpu=row["tokens_per_s_per_gpu"],
        mfu=row["mfu"],
        problem=problem,
        programs=programs,
    )


# --- The stored state of a running search, and of its answers afterwards.


def checkpoint_of(result: TuneResult, *, is_over: bool = False) -> str:
    """Return the JSON text for `read_checkpoint`; ``is_over``: the search has ended."""
    current = [] if result.current is None else [result.current]
    kept = {id(row): row for row in (*result.rows[:_MOST_KEPT], *result.pareto, *current)}
    looks = [[None if value == inf else value for value in look] for look in result.looks.found]
    return json.dumps(
        {
            "version": _VERSION,
            "num_candidates": result.looks.num_candidates,
            "num_entries": result.looks.num_entries,
            "looks": looks,
            "is_over": is_over,
            "work": result.work,
            "rows": [
                {
                    "row": row.as_json(),
                    "problem": row.problem.model_dump(mode="json", by_alias=True),
                    "programs": list(map(cells_of, row.programs)),
                }
                for row in kept.values()
            ],
        }
    )


def read_checkpoint(question: TuneQuestion, text: str) -> TuneCheckpoint | None:
    """Return the state of a search; None if another version of OptPipe wrote it."""
    kept = json.loads(text)
    if kept["version"] != _VERSION:
        return None
    found = tuple(
        Look(entry, level, inf if bound is None else bound, inf if formula is None else formula)
        for entry, level, bound, formula in kept["looks"]
    )
    return TuneCheckpoint(
        looks=Looks(kept["num_candidates"], kept["num_entries"], found),
        rows=tuple(_read_kept(question, row) for row in kept["rows"]),
        is_over=kept["is_over"],
        work=kept.get("work", 0.0),
    )


def read_kept(question: TuneQuestion, text: str, row_id: str) -> TuneRow | None:
    """Return a row of a checkpoint with its problem and schedule; None if it has no such row."""
    for kept in json.loads(text)["rows"]:
        if kept["row"]["id"] == row_id:
            return _read_kept(question, kept)
    return None


def _read_kept(question: TuneQuestion, kept: Mapping[str, Any]) -> TuneRow:
    problem = load_problem(json.dumps(kept["problem"]))
    programs = tuple(
        tuple(chain.from_iterable(map(parse_cell, program))) for program in kept["programs"]
    )
    return read_row(question, kept["row"], problem, programs)


def paste(row: TuneRow, form: str, csv: str = "schedule.csv") -> str:
    """Return a row as its framework takes it.

    Parameters
    ----------
    form
        Megatron-LM's ``arguments``, Megatron-Core's ``yaml``, a torchtitan config (``python``), its
        schedule for torch (``csv``).
    csv
        Where a torchtitan config finds the schedule from its own folder, unless torchtitan has it
        by name.

    Raises
    ------
    InputError
        If the framework cannot run it so.
    """
    if form == "arguments":
        return megatron_script(row.configuration)
    if form == "yaml":
        return megatron_yaml(row.configuration)
    if form == "csv":
        return dump_csv(row.programs, for_torch=True)
    if row.method in _TORCH_NAMES:
        return torchtitan_config(row.configuration, schedule=_TORCH_NAMES[row.method])
    return torchtitan_config(row.configuration, csv=csv)


def needs_csv(row: TuneRow) -> bool:
    """Whether torchtitan has no name for the schedule."""
    return row.method not in _TORCH_NAMES
