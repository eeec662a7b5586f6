"""Every program of a tiny problem, by brute force: the judge of "proven optimal"."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import inf
from typing import Any

from hypothesis import strategies as st

from optpipe import Action, ActionType, IllegalScheduleError, Problem, Program, simulate
from optpipe.memory import device_peak_bytes, host_peak_bytes, host_walk
from tests.building import problem, stage
from tests.strategies import B, Case, F, I, W, documents, random_programs, tightened

_AWAY = (ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD)


@st.composite
def tiny_problems(
    draw: st.DrawFn,
    parse: Callable[[dict[str, Any]], Problem] = Problem.parse,
    *,
    menus: bool = False,
) -> Problem:
    """Two cells in memory that some program fills; ``parse`` may leave things out."""
    document = draw(documents(menus=menus))
    del document["stages"][2:]
    document["num_microbatches"] = 2 // len(document["stages"])
    tiny = parse(document)
    rng = random.Random(draw(st.integers(0, 2**32)))
    return tightened(Case(tiny, random_programs(tiny, rng))).problem


@st.composite
def tiny_problems_with_pairs(draw: st.DrawFn) -> Problem:
    """One stage and three micro-batches, or two devices and two: all F may run with all I and B."""
    num_devices = draw(st.integers(1, 2))
    times = [[draw(st.integers(0, 4)) for _ in range(3)] for _ in range(num_devices)]
    room = draw(st.integers(1, 3))
    licences = []
    for d, (forward, back, weight) in enumerate(times):
        for letter, length in (("I", back), ("B", back + weight)):
            hidden = draw(st.integers(0, min(forward, length)))
            licences.append({"forward": d, "backward": d, "with": letter, "hidden_ms": hidden})
    return problem(
        [stage(d, *passes, activation_bytes=1) for d, passes in enumerate(times)],
        [{"memory_bytes": room}] * num_devices,
        m=4 - num_devices,
        format="optpipe/problem/v2",
        objective=draw(st.sampled_from(["makespan", "span"])),
        pairs=licences,
    )


def optimum(problem: Problem) -> float:
    """Return the least objective over all programs, inf where none fits."""
    per_device = [
        [
            program
            for program in _programs(problem, device)
            if device_peak_bytes(problem, device, program) <= limits.usable_bytes
        ]
        for device, limits in enumerate(problem.devices)
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
    for chains in product(*(chains_of(problem, s, j) for s, j in cells)):
        if not _modes_are_uniform(problem, cells, [mode for mode, _ in chains]):
            continue
        for program in interleavings(tuple(chain for _, chain in chains)):
            is_even = problem.is_even and device == problem.stages[0].device
            if _in_turn(problem, program) and (not is_even or _stage_0_in_order(program)):
                yield from _with_pairs(problem, program)


def _with_pairs(problem: Problem, program: Program) -> Iterator[Program]:
    """The program with any of its neighbours that may run together as pairs, or none."""
    if len(program) < 2 or not problem.pairs:
        yield program
        return
    first, second, *rest = program
    for tail in _with_pairs(problem, (second, *rest)):
        yield (first, *tail)
    licence = first.stage, second.stage, second.type.value
    if first.type is F and first.cell != second.cell and licence in problem.hidden_ms:
        for tail in _with_pairs(problem, tuple(rest)):
            yield (first, second._replace(paired=True), *tail)


def _modes_are_uniform(
    problem: Problem, cells: Sequence[tuple[int, int]], modes: Sequence[int]
) -> bool:
    cost = problem.cost_of
    used = {(s, cost[j], mode) for (s, j), mode in zip(cells, modes, strict=True)}
    return not any(
        problem.stages[s].uniform_modes and sum(one[:2] == (s, cost[j]) for one in used) > 1
        for s, j in cells
    )


def _in_turn(problem: Problem, program: Program) -> bool:
    """Whether forwards and backwards of each stage come in the order that is asked for."""
    ahead = {(a.stage, a.microbatch): at for at, a in enumerate(program) if a.type is F}
    back = {(a.stage, a.microbatch): at for at, a in enumerate(program) if a.type in (I, B)}
    return all(
        ahead[s, one] < ahead[s, two]
        for one, two in problem.forward_turns
        for s, j in ahead
        if j == one
    ) and all(
        back[s, one] > back[s, two]
        for one, two in problem.backward_turns
        for s, j in back
        if j == one
    )


def _stage_0_in_order(program: Program) -> bool:
    """Micro-batches are identical, so one order of stage 0's forwards stands for all."""
    forwards = [a.microbatch for a in program if a.stage == 0 and a.type is F]
    return forwards == sorted(forwards)


def chains_of(problem: Problem, s: int, j: int) -> list[tuple[int, tuple[Action, ...]]]:
    """Each usable mode with its actions, once per kind of backward."""
    chains: list[tuple[int, tuple[Action, ...]]] = []
    for number, mode in enumerate(problem.menu_of(s, j)):
        middle = _AWAY if mode.offload_bytes else ()
        middle = (*middle, ActionType.RECOMPUTE) if mode.recompute == "apart" else middle
        forward = Action(s, F, j, number if problem.stage_of(s, j).modes else 0)
        chains += [
            (number, (forward, *(Action(s, kind, j) for kind in (*middle, *end))))
            for end in ((I, W), (B,))
            if problem.can_use(s, number, problem.cost_of[j])
        ]
    return chains


def interleavings(chains: tuple[tuple[Action, ...], ...]) -> Iterator[Program]:
    if not any(chains):
        yield ()
        return
    for index, chain in enumerate(chains):
        if chain:
            rest = (*chains[:index], chain[1:], *chains[index + 1 :])
            for tail in interleavings(rest):
                yield (chain[0], *tail)


def least_of_one_microbatch(problem: Problem, limit: float = inf) -> tuple[float, float]:
    """Return device 0's least peak, and its least host peak within a limit, over all programs.

    Of micro-batch 0 alone, in bytes beside static ones: every mode and every order of its actions
    in which forwards go up the stages and backwards down again.
    """
    own = problem.stages_of[0]
    best = [inf, inf]

    def grow(
        program: Program, chains: tuple[tuple[Action, ...], ...], turn: int, least: int
    ) -> None:
        peaks = device_peak_bytes(problem, 0, program), max(host_walk(problem, program), default=0)
        cost = peaks[least]
        if cost >= best[least] or (least and peaks[0] - static > limit):
            return
        if not any(chains):
            best[least] = cost
        for at, chain in enumerate(chains):
            if not chain:
                continue
            is_pass = chain[0].type in (F, I, B)
            if not is_pass or at == (turn if turn < len(own) else 2 * len(own) - 1 - turn):
                rest = (*chains[:at], chain[1:], *chains[at + 1 :])
                grow((*program, chain[0]), rest, turn + is_pass, least)

    static = problem.static_bytes_of(0)
    for chains in product(*(chains_of(problem, s, 0) for s in own)):
        for least in (0, 1):
            grow((), tuple(chain for _, chain in chains), 0, least)
    return best[0] - static, best[1]
