"""Megatron-LM's timer logs as measurements.

Megatron times the forward and the fused backward of a whole iteration on every rank, after a
device synchronisation each; so a micro-batch's time is a rank's total divided by the number of its
micro-batches and chunks. It times no I or W, and its send and receive timers include waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe.measurements.measurements import Measurements
from optpipe.measurements.megatron_log import (
    COMPUTE_TIMERS,
    MegatronLog,
    TimerBlock,
    parse_log,
)
from optpipe.measurements.values import MeasurementError, Sample, StageFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MegatronRun", "read_megatron"]

_HALF_PRECISION = ("torch.bfloat16", "torch.float16", "torch.half")


class MegatronRun(NamedTuple):
    """What a run is known to be, where its log does not say.

    Parameters
    ----------
    num_microbatches
        Per pipeline and iteration.
    num_stages
        Pipeline ranks times chunks.
    equal_stages
        Whether all stages take the same time: what the log says of all ranks together then counts
        for each stage.
    """

    num_microbatches: int | None = None
    num_stages: int | None = None
    equal_stages: bool = False


class _Layout(NamedTuple):
    """How ranks hold stages: rank r of the pipeline holds stages r, r + num_ranks, ..."""

    num_pipeline_ranks: int
    num_chunks: int
    world_size: int
    ranks_inside: int
    stages_outermost: bool

    def pipeline_rank(self, rank: int) -> int:
        """Return the pipeline rank of a global rank."""
        if self.stages_outermost:
            return rank * self.num_pipeline_ranks // self.world_size
        return rank // self.ranks_inside % self.num_pipeline_ranks

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """Return the stages a pipeline rank holds."""
        return [pipeline_rank + chunk * self.num_pipeline_ranks for chunk in range(self.num_chunks)]


def read_megatron(text: str, run: MegatronRun | None = None) -> Measurements:
    """Return what a Megatron-LM log says.

    Samples are one per stage, timer and logging interval (and rank, with ``--timing-log-option
    all``); their step counts the intervals.

    Parameters
    ----------
    text
        The log: what the last rank printed, other lines included.
    run
        What is known besides.

    Raises
    ------
    MeasurementError
        If there are no compute timers, or the log does not say whose they are.
    """
    run = run or MegatronRun()
    log = parse_log(text)
    blocks = [block for block in log.blocks if "forward-compute" in block.times]
    if not blocks:
        raise MeasurementError(_no_timers(log))
    layout = _layout(log, run, blocks)
    num_microbatches = run.num_microbatches or _num_microbatches(log)
    samples = tuple(
        sample
        for step, block in enumerate(blocks)
        for sample in _samples(block, step, layout, num_microbatches, run.equal_stages)
    )
    facts = StageFacts(output_bytes=_output_bytes(log))
    num_stages = layout.num_pipeline_ranks * layout.num_chunks
    return Measurements(
        source="a Megatron-LM log",
        samples=samples,
        num_microbatches=num_microbatches,
        placement=tuple(stage % layout.num_pipeline_ranks for stage in range(num_stages)),
        stages=(facts,) * num_stages,
        notes=tuple(_notes(log, blocks, layout, run)),
    )


def _no_timers(log: MegatronLog) -> str:
    names = sorted({name for block in log.blocks for name in block.times})
    seen = f"timers there: {', '.join(names[:8])}" if names else "no timers at all"
    return (
        f"the log has no timer forward-compute ({seen}); run Megatron-LM with "
        "--timing-log-level 2 --timing-log-option all"
    )


def _layout(log: MegatronLog, run: MegatronRun, blocks: list[TimerBlock]) -> _Layout:
    num_chunks = log.number("virtual_pipeline_model_parallel_size") or 1
    num_ranks = log.number("pipeline_model_parallel_size")
    if run.num_stages is not None:
        if run.num_stages % num_chunks:
            raise MeasurementError(
                f"num_stages = {run.num_stages}: must be a multiple of the {num_chunks} chunks per "
                "rank that the log names (virtual_pipeline_model_parallel_size); correct it"
            )
        num_ranks = run.num_stages // num_chunks
    if num_ranks is None:
        raise MeasurementError(
            "the log does not name pipeline_model_parallel_size (Megatron prints its arguments at "
            "the start); give num_stages"
        )
    named = [rank for block in blocks for rank, _ in block.times["forward-compute"] if rank]
    world_size = log.number("world_size") or max([num_ranks - 1, *named]) + 1
    if named and max(named) >= world_size:
        raise MeasurementError(
            f"the log has a time of rank {max(named)}, but names world_size {world_size}; "
            "is it the log of one run?"
        )
    if world_size % num_ranks:
        raise MeasurementError(
            f"{world_size} ranks cannot be divided into {num_ranks} pipeline stages; "
            "correct num_stages"
        )
    tensor = log.number("tensor_model_parallel_size") or 1
    context = log.number("context_parallel_size") or 1
    outermost = not log.flag("use_tp_pp_dp_mapping")
    return _Layout(num_ranks, num_chunks, world_size, tensor * context, outermost)


def _num_microbatches(log: MegatronLog) -> int:
    known = log.number("num_microbatches")
    if known is not None:
        return known
    whole, micro = log.number("global_batch_size"), log.number("micro_batch_size")
    replicas = log.number("data_parallel_size")
    if whole and micro and replicas and whole % (micro * replicas) == 0:
        return whole // (micro * replicas)
    raise MeasurementError(
        "the log names neither the number of micro-batches nor global_batch_size, "
        "micro_batch_size and data_parallel_size; give num_microbatches: "
        "Megatron's timers are totals of an iteration"
    )


def _samples(
    block: TimerBlock, step: int, layout: _Layout, num_microbatches: int, equal_stages: bool
) -> Iterator[Sample]:
    share = num_microbatches * layout.num_chunks
    for timer, action in COMPUTE_TIMERS.items():
        for rank, total_ms in block.times.get(timer, ()):
            for stage in _stages(block, rank, layout, equal_stages):
                yield Sample(
                    stage=stage,
                    action=action,
                    time_ms=round(total_ms / share, 6),
                    step=step,
                    rank=rank,
                )


def _stages(block: TimerBlock, rank: int | None, layout: _Layout, equal_stages: bool) -> list[int]:
    """Return the stages that a printed time is about."""
    last = layout.num_pipeline_ranks - 1
    if rank is not None:
        return layout.stages_of(layout.pipeline_rank(rank))
    if equal_stages or last == 0:
        return list(range(layout.num_pipeline_ranks * layout.num_chunks))
    if block.form == "last_rank":
        return layout.stages_of(last)
    raise MeasurementError(
        f"line {block.line}: {block.form} of all ranks does not say which stage took how long; "
        "run Megatron-LM with --timing-log-option all, or say that all stages take the same "
        "time (equal_stages)"
    )


def _output_bytes(log: MegatronLog) -> int | None:
    """Return the bytes of a boundary tensor: sequence x micro-batch x hidden, in the params' type.

    With sequence parallelism each tensor rank sends its part; so it is with context parallelism.
    """
    sizes = [log.number(name) for name in ("seq_length", "micro_batch_size", "hidden_size")]
    if None in sizes:
        return None
    whole = 1
    for size in sizes:
        whole *= size or 0
    item = 2 if log.arguments.get("params_dtype") in _HALF_PRECISION else 4
    parts = log.number("context_parallel_size") or 1
    if log.flag("sequence_parallel"):
        parts *= log.number("tensor_model_parallel_size") or 1
    return whole * item // parts


def _notes(
    log: MegatronLog, blocks: list[TimerBlock], layout: _Layout, run: MegatronRun
) -> Iterator[str]:
    forms = {block.form for block in blocks}
    last = layout.num_pipeline_ranks - 1
    if run.equal_stages and last and forms != {"all"}:
        yield "All stages are taken to be equal: the log has no times of single ranks."
    elif forms == {"last_rank"} and last:
        stages = ", ".join(map(str, layout.stages_of(last)))
        yield f"The log has times of the last rank only: stage {stages}."
    if layout.num_chunks > 1:
        yield "A rank's chunks are taken to be equal: Megatron's timers do not tell them apart."
    if log.arguments.get("recompute_granularity", "None") != "None":
        yield "The run recomputed activations: B includes the recomputation."
    yield "Links are not measured: Megatron's send and receive timers include waiting."
