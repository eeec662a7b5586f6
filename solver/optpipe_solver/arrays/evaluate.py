"""Whether programs are legal, how long they take and what they hold: asked for every offer.

Small programs are evaluated by the reference itself (`optpipe.check`, `optpipe.simulate`,
`optpipe.memory`). It takes some 20 us per action, which for 300,000 of them is longer than a short
time limit; large ones are evaluated by the same rules on arrays, in a twentieth of that. A property
test holds the two against each other, on legal and on spoilt programs, to the last bit.
"""

from __future__ import annotations

from operator import le
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.check import find_violations
from optpipe.memory import EFFECTS, device_peak_bytes, host_peak_bytes
from optpipe.simulate import simulate
from optpipe_solver.arrays.encoding import KINDS, PAIRED_NUMBER, CompiledProblem
from optpipe_solver.arrays.simulate import (
    BACKWARD_INPUT,
    FULL_BACKWARD,
    PAIRED_BACKWARD,
    PAIRED_INPUT,
)

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Ints
    from optpipe_solver.arrays.encoding import Rows

__all__ = [
    "Evaluator",
    "Metrics",
    "device_peaks",
    "evaluate_arrays",
    "evaluate_by_reference",
    "keeps_limits",
    "keeps_turns",
    "within_hosts",
]


_LARGE = 20_000
"""Actions from which arrays are used: where the reference takes about half a second."""

_F, _I, _W, _B, _OFFLOAD, _RELEASE, _RELOAD, _RECOMPUTE = range(len(KINDS))
_IN_ORDER = tuple(
    (KINDS.index(earlier), KINDS.index(kind))
    for kind, effect in EFFECTS.items()
    for earlier in effect.comes_after
)
"""Kinds of which the first stands before the second where a cell has both (DESIGN section 3)."""


class Metrics(NamedTuple):
    """What legal programs are worth: times in ms, bytes per device and by host."""

    makespan_ms: float
    span_ms: float
    peak_bytes: tuple[int, ...]
    host_peak_bytes: dict[str, int]

    def objective_ms(self, objective: str) -> float:
        """Return makespan_ms or span_ms."""
        return self.makespan_ms if objective == "makespan" else self.span_ms


class Evaluator:
    """Evaluates programs of one problem, by the reference or on arrays as their size asks."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._compiled: CompiledProblem | None = None

    def __call__(self, programs: Programs) -> Metrics | None:
        """Return what the programs are worth, None where they are not legal."""
        if sum(map(len, programs)) < _LARGE:
            return evaluate_by_reference(self.problem, programs)
        if self._compiled is None:
            self._compiled = CompiledProblem.of(self.problem)
        return evaluate_arrays(self._compiled, programs)


def evaluate_by_reference(problem: Problem, programs: Programs) -> Metrics | None:
    """Evaluate by the one meaning of legality, time and memory."""
    if find_violations(problem, programs):
        return None
    run = simulate(problem, programs)
    peaks = tuple(device_peak_bytes(problem, device, row) for device, row in enumerate(programs))
    return Metrics(run.makespan_ms, run.span_ms, peaks, host_peak_bytes(problem, programs))


def evaluate_arrays(compiled: CompiledProblem, programs: Programs) -> Metrics | None:
    """Evaluate by the same rules on arrays; what `evaluate_by_reference` says, to the last bit."""
    if not _is_addressable(compiled.problem, programs):
        return None
    rows = compiled.encode(programs)
    if not _pairs_are_right(compiled, rows):
        return None
    place = _places(compiled, rows)
    if place is None or not _is_whole(compiled, place, rows.modes) or not _is_in_order(place):
        return None
    if not keeps_turns(compiled, rows):
        return None
    makespan_ms, span_ms = compiled.length_ms(rows)
    if makespan_ms == np.inf:
        return None
    if not keeps_limits(compiled, rows):
        return None
    return Metrics(makespan_ms, span_ms, device_peaks(compiled, rows), _host_peaks(compiled, rows))


def _is_addressable(problem: Problem, programs: Programs) -> bool:
    """Whether each action has a number, and each program fits into its row of arrays."""
    num_stages, m = len(problem.stages), problem.num_microbatches
    if len(programs) != len(problem.devices):
        return False
    for held, program in zip(problem.stages_of, programs, strict=True):
        if len(program) > len(held) * m * len(KINDS):
            return False
        if not all(0 <= s < num_stages and 0 <= j < m for s, _, j, *_ in program):
            return False
        if any(action.paired and action.type not in PAIRED_NUMBER for action in program):
            return False
    return True


def _alone(codes: Ints, cells: int) -> Ints:
    """Return codes with the backwards of pairs as those that run alone."""
    kinds = codes // cells
    shift = np.where(
        kinds == PAIRED_BACKWARD,
        PAIRED_BACKWARD - FULL_BACKWARD,
        np.where(kinds == PAIRED_INPUT, PAIRED_INPUT - BACKWARD_INPUT, 0),
    )
    alone: Ints = codes - shift * cells
    return alone


def _pairs_are_right(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether each backward of a pair stands right after an F that it may run together with."""
    times = compiled.times
    for codes in rows.programs():
        at = np.flatnonzero(codes >= PAIRED_INPUT * times.num_cells)
        if at.size == 0:
            continue
        if times.hidden.size == 0 or at[0] == 0:
            return False
        forwards, backwards = codes[at - 1], codes[at]
        if (forwards >= times.num_cells).any():
            return False
        cells = backwards % times.num_cells
        if (cells == forwards).any():
            return False
        kinds = (backwards >= PAIRED_BACKWARD * times.num_cells).astype(np.int64)
        if np.isnan(times.hidden[kinds, times.row[forwards], times.row[cells]]).any():
            return False
    return True


def _places(compiled: CompiledProblem, rows: Rows) -> Ints | None:
    """Return ``[kind, cell]`` -> index in its program, -1 = absent; None: misplaced, or twice."""
    times = compiled.times
    place = np.full(len(KINDS) * times.num_cells, -1, dtype=np.int64)
    for device, codes in enumerate(rows.programs()):
        stages = codes % times.num_cells // times.num_microbatches
        alone = _alone(codes, times.num_cells)
        if (times.device_of[stages] != device).any() or np.unique(alone).size < codes.size:
            return None
        place[alone] = np.arange(codes.size)
    return place.reshape(len(KINDS), times.num_cells)


def _is_whole(compiled: CompiledProblem, place: Ints, modes: Ints) -> bool:
    """Whether each cell has F, I and W or B, and what its mode asks for, which may be used."""
    there, memory = place >= 0, compiled.memory
    if (modes < 0).any() or _is_uneven(compiled, modes):
        return False
    stages = compiled.times.row
    split, fused = there[_I] & there[_W], there[_B] & ~there[_I] & ~there[_W]
    once = fused | (split & ~there[_B])
    goes, again = memory.adds[_RELOAD, stages, modes] > 0, memory.again[stages, modes]
    asked = there[_RECOMPUTE] == again
    for kind in (_OFFLOAD, _RELEASE, _RELOAD):
        asked &= there[kind] == goes
    return bool((there[_F] & once & asked & memory.may[stages, modes]).all())


def _is_uneven(compiled: CompiledProblem, modes: Ints) -> bool:
    """Whether a stage that uses one mode for all micro-batches has two."""
    row, uniform = compiled.times.row, compiled.memory.uniform
    if not uniform.any():
        return False
    _, first = np.unique(row, return_index=True)
    return bool((uniform[row] & (modes != modes[first][row])).any())


def _is_in_order(place: Ints) -> bool:
    """Whether what must come after something does, where both are there."""
    return not any(
        ((place[later] >= 0) & (place[later] < place[earlier])).any()
        for earlier, later in _IN_ORDER
    )


def keeps_turns(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether what a given order and samples ask of the micro-batches of a stage holds."""
    if not compiled.problem.forward_turns:
        return True
    place = _places(compiled, rows)
    if place is None:
        return False
    by_stage = (-1, compiled.times.num_stages, compiled.times.num_microbatches)
    forwards = place.reshape(by_stage)[_F]
    backwards = np.maximum(place[_I], place[_B]).reshape(by_stage[1:])
    for turns, at in (
        (compiled.problem.forward_turns, forwards),
        (compiled.problem.backward_turns, -backwards),
    ):
        if turns:
            earlier, later = np.array(turns).T
            if (at[:, earlier] > at[:, later]).any():
                return False
    return True


def keeps_limits(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether programs that are legal otherwise keep the limits of all devices and hosts."""
    usable = [device.usable_bytes for device in compiled.problem.devices]
    return all(map(le, device_peaks(compiled, rows), usable)) and within_hosts(compiled, rows)


def within_hosts(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether programs that are legal otherwise keep the limits of all hosts."""
    hosts = compiled.problem.hosts
    if all(host.memory_bytes is None for host in hosts):
        return True
    held = _host_peaks(compiled, rows)
    return all(host.memory_bytes is None or held[host.name] <= host.memory_bytes for host in hosts)


def device_peaks(compiled: CompiledProblem, rows: Rows) -> tuple[int, ...]:
    """Walk every program: static bytes plus the largest prefix sum (`optpipe.memory`)."""
    problem, memory, times = compiled.problem, compiled.memory, compiled.times
    peaks = []
    for device, codes in enumerate(rows.programs()):
        kinds, cells = codes // times.num_cells, codes % times.num_cells
        of_mode = kinds, times.row[cells], rows.modes[cells]
        adds = memory.adds[of_mode]
        most = np.cumsum(adds) - adds + memory.rises[of_mode]
        if (at := np.flatnonzero(kinds >= PAIRED_INPUT)).size:
            # The workspace of the pair's F is there as well: what F rises to above what it leaves.
            most[at] += memory.rises[of_mode][at - 1] - adds[at - 1]
        peaks.append(problem.static_bytes_of(device) + int(most.max(initial=0)))
    return tuple(peaks)


def _host_peaks(compiled: CompiledProblem, rows: Rows) -> dict[str, int]:
    """Bytes on the hosts, from OFFLOAD to just before RECOMPUTE, I or B: the devices' peaks."""
    problem, times = compiled.problem, compiled.times
    size = compiled.memory.adds[_RELOAD, times.row, rows.modes]
    gone, again = compiled.cells_with(_OFFLOAD, rows), compiled.cells_with(_RECOMPUTE, rows)
    peaks = {host.name: 0 for host in problem.hosts}
    for device, codes in zip(problem.devices, rows.programs(), strict=True):
        kinds, cells = _alone(codes, times.num_cells) // times.num_cells, codes % times.num_cells
        backward = (kinds == _I) | (kinds == _B)
        back = np.where(again[cells], kinds == _RECOMPUTE, backward) & gone[cells]
        moved = size[cells]
        held = np.cumsum(np.where(kinds == _OFFLOAD, moved, np.where(back, -moved, 0)))
        peaks[device.host] += int(held.max(initial=0))
    return peaks
