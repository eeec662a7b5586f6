"""Why a schedule offloads and recomputes what it does, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from optpipe.explain.phrases import device_name, microbatches
from optpipe.explain.values import Verdict
from optpipe.plot.units import format_bytes, format_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.explain.values import Explanation, StageRelief
    from optpipe.problem import Problem

__all__ = ["relief_sentences"]

_MOST_STAGES = 16
_DROPPED = {"offload": "offloaded", "recompute": "recomputed"}


def relief_sentences(
    problem: Problem, told: Explanation, kind: Literal["offload", "recompute"]
) -> Iterator[str]:
    """Yield, per stage that does it, what would not fit without, and what is not needed."""
    held = [relief for relief in told.reliefs if relief.kind == kind]
    for relief in held[:_MOST_STAGES]:
        yield from _stage(problem, relief)
    rest = held[_MOST_STAGES:]
    if rest:
        cells = sum(len(relief.reliefs) for relief in rest)
        spare = sum(len(_spare(relief)) for relief in rest)
        yield (
            f"{len(rest)} more stages: {cells} (stage, micro-batch) pairs {_DROPPED[kind]}, "
            f"{spare} of them without need"
        )


def _stage(problem: Problem, relief: StageRelief) -> Iterator[str]:
    number = len(relief.reliefs)
    name = device_name(problem, relief.device)
    begin = (
        f"stage {relief.stage} {relief.kind}s {number} of {problem.num_microbatches} "
        f"micro-batches ({format_bytes(relief.reliefs[0].saved_bytes)} each, "
        f"{_effort(problem, relief)})"
    )
    if relief.excess_bytes > 0:
        without = "them" if number > 1 else "it"
        yield (
            f"{begin}: without {without} {relief.exceeds_at} would need "
            f"{format_bytes(relief.excess_bytes)} more than {name} has"
        )
    else:
        yield (
            f"{begin} without need: if {name} keeps {'them' if number > 1 else 'it'}, it still has "
            f"{format_bytes(-relief.excess_bytes)} left"
        )
        return
    spare = _spare(relief)
    if spare:
        yield (
            f"stage {relief.stage}: {microbatches(spare)} {_be(spare)} {_DROPPED[relief.kind]} "
            f"without need: {name} holds {'them' if len(spare) > 1 else 'it'} all the same"
        )
    either = relief.microbatches(Verdict.INTERCHANGEABLE)
    if either:
        yield (
            f"stage {relief.stage}: {microbatches(either)} could be kept, but only instead of "
            f"others that are {_DROPPED[relief.kind]} without need"
        )


def _effort(problem: Problem, relief: StageRelief) -> str:
    if relief.kind == "recompute":
        return f"{format_ms(problem.stages[relief.stage].recompute_ms or 0.0)} ms"
    away, back = problem.offload_ms(relief.stage), problem.reload_ms(relief.stage)
    return f"{format_ms(away)} ms away and {format_ms(back)} ms back"


def _spare(relief: StageRelief) -> tuple[int, ...]:
    return relief.microbatches(Verdict.UNNEEDED)


def _be(numbers: tuple[int, ...]) -> str:
    return "are" if len(numbers) > 1 else "is"
