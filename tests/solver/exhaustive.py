"""Every program of a tiny problem, by brute force: the judge of "proven optimal"."""

from __future__ import annotations

import random
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from optpipe import Action, ActionType, IllegalScheduleError, Problem, Program, simulate
from optpipe.memory import device_peak_bytes, host_peak_bytes
from tests.strategies import Case, documents, random_programs, tightened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

F, I, W, B = (  # noqa: E741 - DESIGN's letters
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_AWAY = (ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD)


@st.composite
def tiny_problems(
    draw: st.DrawFn, parse: Callable[[dict[str, Any]], Problem] = Problem.parse
) -> Problem:
    """Two cells in memory that some program fills; ``parse`` may leave things out."""
    document = draw(documents())
    del document["stages"][2:]
    document["num_microbatches"] = 2 // len(document["stages"])
    tiny = parse(document)
    rng = random.Random(draw(st.integers(0, 2**32)))
    return tightened(Case(tiny, random_programs(tiny, rng))).problem


def optimum(problem: Problem) -> float:
    """Return the least objective over all programs, inf where none fits."""
    per_device = [
        [
            program
            for program in _programs(problem, device)
            if device_peak_bytes(problem, device, program) <= held.usable_bytes
        ]
        for device, held in enumerate(problem.devices)
    ]
    best = inf
    for programs in product(*per_device):
        if not _hosts_fit(problem, programs):
            continue
        try:
            run = simulate(problem, programs)
        except IllegalScheduleError:
            continue
        best = min(best, run.objective_ms(problem.objective))
    return best


def _hosts_fit(problem: Problem, programs: tuple[Program, ...]) -> bool:
    peaks = host_peak_bytes(problem, programs)
    return all(
        host.memory_bytes is None or peaks[host.name] <= host.memory_bytes for host in problem.hosts
    )


def _programs(problem: Problem, device: int) -> Iterator[Program]:
    cells = [(s, j) for s in problem.stages_of[device] for j in range(problem.num_microbatches)]
    for chains in product(*(_chains(problem, s, j) for s, j in cells)):
        for program in _interleavings(chains):
            if device != problem.stages[0].device or _stage_0_in_order(program):
                yield program


def _stage_0_in_order(program: Program) -> bool:
    """Micro-batches are identical, so one order of stage 0's forwards stands for all."""
    forwards = [a.microbatch for a in program if a.stage == 0 and a.type is F]
    return forwards == sorted(forwards)


def _chains(problem: Problem, s: int, j: int) -> list[tuple[Action, ...]]:
    between: list[tuple[ActionType, ...]] = [()]
    if problem.can_offload(s):
        between.append(_AWAY)
    if problem.stages[s].can_recompute:
        between.append((ActionType.RECOMPUTE,))
    return [
        tuple(Action(s, kind, j) for kind in (F, *middle, *end))
        for middle in between
        for end in ((I, W), (B,))
    ]


def _interleavings(chains: tuple[tuple[Action, ...], ...]) -> Iterator[Program]:
    if not any(chains):
        yield ()
        return
    for index, chain in enumerate(chains):
        if chain:
            rest = (*chains[:index], chain[1:], *chains[index + 1 :])
            for tail in _interleavings(rest):
                yield (chain[0], *tail)
