"""Megatron-Core's flags that come nearest to a schedule, and in words what they leave out.

Megatron-Core takes no schedule: it has its own orders (`optpipe.formats.megatron_order`) and flags
that say which layers stand where and how much is offloaded or recomputed. docs/exports.md says
where each flag is documented. The text is a piece of shell: an array of flags, comments around it.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from optpipe.action import ActionType
from optpipe.errors import InputError, ScheduleFormatError
from optpipe.formats.megatron_order import group_sizes, megatron_programs
from optpipe.memory import device_peak_bytes
from optpipe.plot.units import format_bytes, format_ms
from optpipe.presets.cut import placement_of
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.action import Action, Programs
    from optpipe.problem import Problem

__all__ = ["dump_megatron"]

_OFFLOAD_MODULES = "attn_norm qkv_linear core_attn attn_proj mlp_norm"


class _Own(NamedTuple):
    """What Megatron-Core would run, nothing offloaded or recomputed, on the same problem.

    ``over`` holds (device name, peak bytes, limit) where it does not fit.
    """

    programs: Programs
    placement: tuple[int, ...]
    group: int
    ms: float
    over: tuple[tuple[str, int, int], ...]


def dump_megatron(problem: Problem, programs: Programs, layers: Sequence[int] | None = None) -> str:
    """Return the flags as shell text.

    Parameters
    ----------
    layers
        Transformer layers of each stage, in model order; None = unknown, then the layout and the
        number of recomputed layers cannot be written.

    Raises
    ------
    ScheduleFormatError
        If stages are not as many on each device, or interleaving has fewer micro-batches than
        devices: nothing comes near then.
    InputError
        If there are not as many ``layers`` as stages, or one is negative.
    """
    chunks = _chunks(problem)
    _check_layers(problem, layers)
    own = _own(problem, chunks)
    flags = [
        *_layout_flags(problem, chunks, own, layers),
        *_memory_flags(problem, programs, layers),
    ]
    lines = [
        "# Megatron-Core flags nearest to a schedule, written by optpipe export.",
        f"# Problem {problem.problem_hash}.",
        f"# {_about(problem)}",
        "",
        "MEGATRON_PIPELINE_ARGS=(",
        *(f"    {flag}" for flag in flags),
        ")",
        "",
        "# What these flags do not say:",
        *(f"# * {line}" for line in _not_said(problem, programs, own, layers)),
    ]
    return "\n".join(lines) + "\n"


def _about(problem: Problem) -> str:
    return (
        f"{problem.num_microbatches} micro-batches: --global-batch-size is "
        f"{problem.num_microbatches} x --micro-batch-size x the data-parallel degree."
    )


def _chunks(problem: Problem) -> int:
    chunks, rest = divmod(len(problem.stages), len(problem.devices))
    if rest or {len(held) for held in problem.stages_of} != {chunks}:
        raise ScheduleFormatError(
            f"{len(problem.stages)} stages on {len(problem.devices)} devices: Megatron-Core has "
            "equally many on each; solve such a problem"
        )
    if chunks > 1 and problem.num_microbatches < len(problem.devices):
        raise ScheduleFormatError(
            f"{problem.num_microbatches} micro-batches on {len(problem.devices)} devices: with "
            "virtual stages Megatron-Core needs at least one per device; raise num_microbatches"
        )
    return chunks


def _check_layers(problem: Problem, layers: Sequence[int] | None) -> None:
    if layers is None:
        return
    if len(layers) != len(problem.stages) or min(layers) < 0:
        raise InputError(
            f"layers {','.join(map(str, layers))}: must be one number, at least 0, for each of the "
            f"{len(problem.stages)} stages in model order; count transformer layers alone"
        )


def _own(problem: Problem, chunks: int) -> _Own:
    """Return Megatron's own programs with the group size that fits and is fastest."""
    count = len(problem.devices)
    looped = _with_placement(problem, placement_of("loop", count, chunks))
    sizes = group_sizes(count, problem.num_microbatches) if chunks > 1 else (count,)
    found = []
    for group in sizes:
        programs = megatron_programs(count, chunks, problem.num_microbatches, group)
        over = tuple(_over(looped, programs))
        found.append(
            _Own(programs, looped.placement, group, simulate(looped, programs).makespan_ms, over)
        )
    return min(found, key=lambda own: (len(own.over), own.ms))


def _with_placement(problem: Problem, placement: Sequence[int]) -> Problem:
    stages = [
        stage.model_copy(update={"device": device})
        for stage, device in zip(problem.stages, placement, strict=True)
    ]
    return problem.model_copy(update={"stages": stages})


def _over(problem: Problem, programs: Programs) -> Iterator[tuple[str, int, int]]:
    for index, (device, program) in enumerate(zip(problem.devices, programs, strict=True)):
        peak = device_peak_bytes(problem, index, program)
        if peak > device.usable_bytes:
            yield device.name, peak, device.usable_bytes


def _layout_flags(
    problem: Problem, chunks: int, own: _Own, layers: Sequence[int] | None
) -> Iterator[str]:
    yield f"--pipeline-model-parallel-size {len(problem.devices)}"
    if layers is not None:
        yield f'--pipeline-model-parallel-layout "{_layout(layers)}"'
    elif chunks > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {chunks}"
    if chunks > 1:
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {own.group}"


def _layout(layers: Sequence[int]) -> str:
    """Return one part per stage: E the embedding, t a transformer layer, L the loss."""
    parts = [f"t*{count}" if count > 1 else "t" * count for count in layers]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)


def _memory_flags(
    problem: Problem, programs: Programs, layers: Sequence[int] | None
) -> Iterator[str]:
    fraction = _offloaded_share(problem, programs)
    if fraction > 0:
        yield "--fine-grained-activation-offloading"
        yield f"--offload-modules {_OFFLOAD_MODULES}"
        yield f"--activation-offload-fraction {ceil(100 * fraction - 1e-9) / 100:.2f}"
    recomputed = _recomputed_layers(problem, programs, layers)
    if recomputed:
        yield "--recompute-granularity full"
        yield "--recompute-method block"
        yield f"--recompute-num-layers {recomputed}"


def _counts(problem: Problem, programs: Programs, kind: ActionType) -> list[int]:
    """Return for how many micro-batches of each stage there is such an action."""
    counts = [0] * len(problem.stages)
    for action in _actions(programs):
        counts[action.stage] += action.type is kind
    return counts


def _offloaded_share(problem: Problem, programs: Programs) -> float:
    """Return offloaded over offloadable bytes of the device that offloads the largest share.

    The flag is one for all ranks, and a smaller one would not free what that device needs.
    """
    counts = _counts(problem, programs, ActionType.OFFLOAD)
    shares = [0.0]
    for held in problem.stages_of:
        sizes = [problem.stages[stage].offload_bytes for stage in held]
        moved = sum(counts[stage] * size for stage, size in zip(held, sizes, strict=True))
        if moved:
            shares.append(moved / (problem.num_microbatches * sum(sizes)))
    return max(shares)


def _recomputed_layers(problem: Problem, programs: Programs, layers: Sequence[int] | None) -> int:
    """Return the most layers that a stage has recomputed on average, rounded up; 0 if unknown."""
    if layers is None:
        return 0
    counts = _counts(problem, programs, ActionType.RECOMPUTE)
    pairs = zip(counts, layers, strict=True)
    return max(-(-count * held // problem.num_microbatches) for count, held in pairs)


def _actions(programs: Programs) -> Iterator[Action]:
    for program in programs:
        yield from program


def _not_said(
    problem: Problem, programs: Programs, own: _Own, layers: Sequence[int] | None
) -> Iterator[str]:
    if programs == own.programs and problem.placement == own.placement:
        yield "Nothing about the order: it is the one that Megatron-Core runs by itself."
        yield from _not_said_of_stages(problem, layers)
        return
    planned = simulate(problem, programs).makespan_ms
    yield (
        f"The order of the passes. By the same simulation the plan takes {format_ms(planned)} ms, "
        f"Megatron-Core's own order {format_ms(own.ms)} ms with nothing offloaded or recomputed."
    )
    for name, peak, limit in own.over:
        yield (
            f"That order does not fit {name} without offload or recompute: it needs "
            f"{format_bytes(peak)} of {format_bytes(limit)}."
        )
    yield from _not_said_of_stages(problem, layers)
    yield from _not_said_of_memory(problem, programs, layers)


def _not_said_of_stages(problem: Problem, layers: Sequence[int] | None) -> Iterator[str]:
    count = len(problem.devices)
    for stage, device in enumerate(problem.placement):
        if device != stage % count:
            yield (
                f"The placement: stage {stage} is on device {device} here, but Megatron-Core puts "
                f"it on rank {stage % count}; virtual stages go round the ranks in a loop."
            )
            break
    if layers is None:
        yield (
            "How many layers each stage has: a problem does not hold it. Give --layers, and the "
            "layout is written."
        )


def _not_said_of_memory(
    problem: Problem, programs: Programs, layers: Sequence[int] | None
) -> Iterator[str]:
    kinds = {action.type for action in _actions(programs)}
    if ActionType.BACKWARD_WEIGHT in kinds:
        yield (
            "The split backward (I and W): --delay-wgrad-compute delays weight gradients, but only "
            "with --overlap-moe-expert-parallel-comm, and not to where a schedule wants them."
        )
    if ActionType.OFFLOAD in kinds:
        yield (
            "Which micro-batches are offloaded, when they go and come back. The plan offloads "
            f"{_per_stage(problem, programs, ActionType.OFFLOAD)} whole; the flag takes one share "
            "of the modules of every micro-batch on every rank, here that of the device which "
            "offloads most (--delta-offload-bytes-across-pp-ranks lowers it along the ranks), and "
            "the modules named are a choice to adapt (with experts: expert_fc1 and moe_act too). "
            "Release 0.16.1 does not know --activation-offload-fraction and offloads all of the "
            "named modules."
        )
    if ActionType.RECOMPUTE in kinds:
        unknown = "" if layers else " Without --layers no flag is written for it."
        yield (
            "Which micro-batches are recomputed. The plan recomputes "
            f"{_per_stage(problem, programs, ActionType.RECOMPUTE)}; --recompute-num-layers "
            f"recomputes so many layers of every stage for all of them.{unknown}"
        )
    if {ActionType.OFFLOAD, ActionType.RECOMPUTE} <= kinds:
        yield (
            "Whether they go together: offloaded modules are documented with selective "
            "recomputation, and with full recomputation only layer_input."
        )


def _per_stage(problem: Problem, programs: Programs, kind: ActionType) -> str:
    """Return how many micro-batches of each stage, in words."""
    counts = ", ".join(map(str, _counts(problem, programs, kind)))
    return f"{counts} of {problem.num_microbatches} micro-batches of stage 0, 1, ..."
