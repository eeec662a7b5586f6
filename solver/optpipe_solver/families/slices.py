"""Schedules of sequence slices: Seq1F1B and SlimPipe.

Micro-batches are slices of samples. Both run samples first in, first out, the slices of one last
in, first out: a slice's keys and values get gradients from all later ones. Both are a rule of how
many slices a device holds at most; they run one F after the other until so many are there, then a
B and an F in turn, then the rest.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from optpipe.schedule import Action, ActionType
from optpipe_solver.families.common import (
    NotApplicable,
    NotApplicableReason,
    chunks_of_loop,
    one_stage_per_device,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs

__all__ = ["build_seq1f1b", "build_slimpipe"]


def build_seq1f1b(problem: Problem) -> Programs:
    """Seq1F1B: 1F1B whose unit is a slice of a sequence.

    Sun et al. 2024, "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language
    Model Training", arXiv 2406.03488: of the paper the abstract could be read, the rule and its
    numbers are those of the authors' code (thunlp/Seq1F1B, Megatron-LM with ``pipe_sp_splits``).

    Rule: device r of p runs p - r - 2 + n forwards of slices, n slices per sample, then alternates
    one forward and one backward, then drains. Backwards come sample after sample, the last slice of
    each first. The backward is fused. With samples of several sizes n is the most that any backward
    has to wait for: the largest. Memory: device r holds at most n + p - 1 - r slices, of 1F1B's
    n (p - r). Bubble at equal times per slice: (p - 1)(F + B)/n with F and B of a whole sample;
    longer where later slices attend to more and take longer, which the paper answers by slices of
    equal work: that is whoever makes the problem's to choose. Where slices are whole samples it is
    1F1B. It ignores memory limits, offload and recompute, and its interleaved variant is left out.

    Raises
    ------
    NotApplicable
        If there are no samples, or a device holds several stages.
    """
    _some_slices(problem)
    one_stage_per_device(problem)
    return _programs(problem, chunks=1, group=1, ahead=1)


def build_slimpipe(problem: Problem) -> Programs:
    """SlimPipe: slices of equal length, on a line or interleaved.

    Li et al. 2025, "SlimPipe: Memory-Thrifty and Efficient Pipeline Parallelism for Long-Context
    LLM Training", arXiv 2504.14519: of the paper the abstract could be read. The number of slices
    in flight is that of code that calls itself SlimPipe's (``pipelining_with_slicing``), the order
    of chunks that of another's (``SlimPipeSchedule``); interleaved, both together are ours.

    Rule: p devices hold v chunks each, as a line (v = 1) or a loop, stage k on device k mod p. The
    n slices of a sample go in groups of p: a device runs a group's forwards of its first chunk, of
    its second, ..., then the next group's; the backwards in exactly the reverse order, sample after
    sample. Device r holds up to n v + 2(p - 1 - r) slices of a chunk, then alternates one backward
    and one forward. Memory: (1 + 2(p - 1)/(n v))/p of what one sample holds on all devices: about
    one sample's part, where 1F1B holds p of them. Bubble at equal times per slice:
    (p - 1)(F + B)/(n v) with F and B of a whole sample and of all chunks. It ignores memory limits,
    offload, and the paper's context exchange, which lets other devices attend for the one whose
    slice is the longest: a pass on two devices is no action here.

    Raises
    ------
    NotApplicable
        If there are no samples, the placement is neither a line nor a loop, or in a loop the
        samples are no equal numbers of slices, a multiple of p.
    """
    _some_slices(problem)
    if all(len(held) <= 1 for held in problem.stages_of):
        return _programs(problem, chunks=1, group=1, ahead=2)
    chunks = chunks_of_loop(problem)
    p = len(problem.stages) // chunks
    sizes = sorted({len(sample) for sample in problem.samples})
    if len(sizes) > 1 or sizes[0] % p or problem.order == "given":
        raise NotApplicable(
            NotApplicableReason.NEEDS_SLICES,
            f"this rule interleaves groups of {p} slices and asks for samples of equally many, a "
            f"multiple of {p}, in a free order, but samples have {', '.join(map(str, sizes))}",
        )
    return _programs(problem, chunks=chunks, group=p, ahead=2)


def _some_slices(problem: Problem) -> None:
    if not problem.has_samples:
        raise NotApplicable(
            NotApplicableReason.NEEDS_SLICES,
            "this rule is for slices of sequences, but no micro-batches name a sample",
        )


def _programs(problem: Problem, *, chunks: int, group: int, ahead: int) -> Programs:
    """Return the programs: device r is ``ahead`` times p - 1 - r slices ahead of the last."""
    p = len(problem.stages) // chunks
    forwards, backwards = _forwards(problem, chunks, group), _backwards(problem, chunks, group)
    place = {unit: at for at, unit in enumerate(forwards)}
    waits, needed = 0, 0
    for at, unit in enumerate(backwards):
        needed = max(needed, place[unit] + 1)
        waits = max(waits, needed - at)
    programs: list[Program] = [()] * len(problem.devices)
    for rank in range(p):
        first = waits + ahead * (p - 1 - rank)
        ahead_of = [Action(c * p + rank, ActionType.FORWARD, j) for c, j in forwards]
        back = [Action(c * p + rank, ActionType.FULL_BACKWARD, j) for c, j in backwards]
        programs[problem.placement[rank]] = tuple(_in_turn(ahead_of, back, first))
    return tuple(programs)


def _in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], first: int
) -> Iterator[Action]:
    yield from forwards[:first]
    for at, back in enumerate(backwards):
        yield back
        yield from forwards[first + at : first + at + 1]


def _forwards(problem: Problem, chunks: int, group: int) -> list[tuple[int, int]]:
    """Return chunk and micro-batch of a device's forwards, in order."""
    if problem.order == "given":
        return [(0, j) for j in range(problem.num_microbatches)]
    return list(chain.from_iterable(_units(sample, chunks, group) for sample in problem.samples))


def _backwards(problem: Problem, chunks: int, group: int) -> list[tuple[int, int]]:
    return list(
        chain.from_iterable(_units(sample, chunks, group)[::-1] for sample in problem.samples)
    )


def _units(sample: Sequence[int], chunks: int, group: int) -> list[tuple[int, int]]:
    return [
        (chunk, j)
        for start in range(0, len(sample), group)
        for chunk in range(chunks)
        for j in sample[start : start + group]
    ]
