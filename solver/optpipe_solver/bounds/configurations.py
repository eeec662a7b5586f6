"""What a device does with one micro-batch of a stage, piece by piece, and what it holds meanwhile.

A *phase* is a stretch of time in which a (stage, micro-batch) holds at least so many bytes and uses
at most one lane. At every moment a cell is in at most one phase. A mode of the menu, with a split
or a fused backward, says how long a cell is in which phase at least.
docs/exact.md has the phases in a table, and the argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise, product
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.bounds.relaxation import Paths
from optpipe_solver.budget import check_stop
from optpipe_solver.feasibility import backward_bytes, fusing_may_pay
from optpipe_solver.milp.highs import LinearProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe.problem import CellMode, Problem, Stage
    from optpipe_solver.arrays import Floats, Ints

__all__ = [
    "DeviceWork",
    "Pattern",
    "Patterns",
    "Phase",
    "PhaseLane",
    "PhaseMode",
    "Program",
    "Window",
    "configurations_ms",
    "device_ms",
    "windows_of",
    "work_of",
]


class PhaseLane(StrEnum):
    """What a phase occupies on its device."""

    COMPUTE = "compute"
    D2H = "d2h"
    H2D = "h2d"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of one cell.

    ``release`` is the least ms from the device's first start to its start, ``due`` that from its
    end to the end of the device's last I (or as much of a B). ``is_late`` marks what comes behind
    the I: W and REST.
    """

    stage: int
    name: str
    lane: PhaseLane
    held_bytes: int
    release: float
    due: float
    is_late: bool = False

    @property
    def takes_anything(self) -> bool:
        """Whether it uses a lane or holds bytes; any number of the others fit at one moment."""
        return self.lane is not PhaseLane.NONE or self.held_bytes > 0


@dataclass(frozen=True, slots=True)
class PhaseMode:
    """One way to treat a cell: the least ms in each phase."""

    stage: int
    needs: tuple[tuple[Phase, float], ...]


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """All that a device has to do, ``num_microbatches`` times in one mode per stage.

    ``head`` is the least ms before its first start, ``tail`` that after its last I.
    """

    num_microbatches: int
    room_bytes: int
    half_duplex: bool
    head: float
    tail: float
    stages: tuple[int, ...]
    modes: tuple[PhaseMode, ...]
    least_forward: float
    least_backward: float

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Every phase that some mode needs, once."""
        return tuple(dict.fromkeys(phase for mode in self.modes for phase, _ in mode.needs))


def work_of(paths: Paths, device: int, *, makespan: bool) -> DeviceWork:
    """Return what a device that has stages must do.

    Under span its clock runs from its own first start to its own last end, so nothing is known of
    what comes before, and behind its last backward only of its own W and gradient reduction.
    """
    problem = paths.problem
    indices = problem.stages_of[device]
    stages = [problem.stages[s] for s in indices]
    return DeviceWork(
        num_microbatches=problem.num_microbatches,
        room_bytes=problem.room_bytes(device),
        half_duplex=problem.devices[device].half_duplex,
        head=paths.head_f[indices[0]] if makespan else 0.0,
        tail=min(_tail(paths, s, makespan=makespan) for s in indices),
        stages=tuple(indices),
        modes=tuple(mode for s in indices for mode in _Cell(paths, s, indices[0]).modes()),
        least_forward=min(stage.forward_ms for stage in stages),
        least_backward=min(paths.backward[s] for s in indices),
    )


def _tail(paths: Paths, s: int, *, makespan: bool) -> float:
    """Return the least ms after the last I of a device (as much of a B) if it is one of stage s."""
    stage = paths.problem.stages[s]
    behind = paths.tail[s] if makespan else 0.0
    if not fusing_may_pay(paths.problem, s):
        return max(behind, paths.after_i(s))
    rest = stage.fused_backward_ms - paths.backward[s] + stage.grad_sync_ms
    return max(behind, min(paths.after_i(s), rest))


class _Cell:
    """The modes of one micro-batch of stage s; ``first`` is the device's first stage."""

    def __init__(self, paths: Paths, s: int, first: int) -> None:
        self.paths, self.first = paths, first
        self.problem: Problem = paths.problem
        self.stage: Stage = self.problem.stages[s]
        self.menu = paths.menus[s]
        self.s = s
        self.trip = paths.between[s]
        self.release = paths.head_f[s] - paths.head_f[first]
        back = range(first, s)
        self.due = sum(paths.backward[k] + self.problem.boundary_ms[k][1] for k in back)
        self.before_due = self.due + paths.backward[s]
        self.forward_end = self.release + self.stage.forward_ms

    def modes(self) -> Iterator[PhaseMode]:
        """Yield every way to treat the cell: until its backward, and through it."""
        for mode in self.menu:
            middle = self._middle(mode)
            for start, end in product(self._starts(mode), tuple(self._ends(mode))):
                needs = [(phase, ms) for phase, ms in (*start, *middle, *end) if ms > 0]
                yield PhaseMode(self.s, tuple(need for need in needs if need[0].takes_anything))

    def _middle(self, mode: CellMode) -> list[tuple[Phase, float]]:
        found: list[tuple[Phase, float]] = []
        apart = mode.recompute == "apart"
        again = mode.recompute_ms if apart else 0.0
        kept, moved, trip = mode.forward_bytes, mode.offload_bytes, self.trip
        name = "checkpoint" if apart else "kept"
        if moved:
            out = self.problem.offload_ms(self.s, moved)
            home = self.problem.reload_ms(self.s, moved)
            found.append((self._copy("OUT", PhaseLane.D2H, kept, 0.0, home + again), out))
            found.append((self._copy("HOME", PhaseLane.H2D, kept, out, again), home))
            name, trip = "away", trip - out - home
        if apart:
            size = mode.activation_bytes + mode.recompute_workspace_bytes
            phase = Phase(self.s, "R", PhaseLane.COMPUTE, size, self.forward_end, self.before_due)
            found.append((phase, again))
            trip -= again
        return [*found, (self._wait(name, kept - moved), max(0.0, trip))]

    def _ends(self, mode: CellMode) -> Iterator[list[tuple[Phase, float]]]:
        stage, inside = self.stage, mode.inside_ms
        most = backward_bytes(mode, split=True)
        first = stage.backward_input_ms + inside
        yield [
            (self._gradient("I", most[0]), first),
            (self._late("W", most[1], first), stage.backward_weight_ms),
        ]
        if fusing_may_pay(self.problem, self.s):
            size = backward_bytes(mode, split=False)[0]
            first = min(stage.backward_input_ms, stage.fused_backward_ms)
            rest = stage.fused_backward_ms - first
            yield [
                (self._gradient("B", size), first + inside),
                (self._late("REST", size, first + inside), rest),
            ]

    def _gradient(self, name: str, size: int) -> Phase:
        return Phase(self.s, name, PhaseLane.COMPUTE, size, self.forward_end + self.trip, self.due)

    def _late(self, name: str, size: int, first: float) -> Phase:
        release = self.forward_end + self.trip + first
        return Phase(self.s, name, PhaseLane.COMPUTE, size, release, 0.0, is_late=True)

    def _starts(self, mode: CellMode) -> Iterator[list[tuple[Phase, float]]]:
        """Yield F alone, and in each pair: first F, less what hides, then what runs beside it.

        Meanwhile the cell of the backward waits, and then that of F, so both count at F.
        """
        size = mode.forward_bytes + mode.forward_workspace_bytes
        due = self.before_due + self.trip
        name = f"F making {mode.forward_bytes}"
        phase = Phase(self.s, name, PhaseLane.COMPUTE, size, self.release, due)
        yield [(phase, self.stage.forward_ms)]
        for pair in self.problem.pairs:
            if pair.forward == self.s and pair.hidden_ms > 0:
                other = _Cell(self.paths, pair.backward, self.first)
                other_stage = other.stage
                rest = (
                    other_stage.fused_backward_ms
                    if pair.with_ == "B"
                    else other_stage.backward_input_ms
                )
                alone = self.stage.forward_ms - pair.hidden_ms
                begin = max(self.release, other.forward_end + other.trip)
                kept = min(mode.forward_bytes for mode in other.menu)
                paired = replace(phase, name=f"{name}, paired", release=begin)
                wait = Phase(
                    self.s, "paired", PhaseLane.NONE, mode.forward_bytes, begin + alone, due
                )
                turn = Phase(pair.backward, "paired", PhaseLane.NONE, kept, begin, other.before_due)
                yield [(paired, alone), (wait, rest), (turn, alone)]

    def _wait(self, name: str, size: int) -> Phase:
        return Phase(self.s, name, PhaseLane.NONE, size, self.forward_end, self.before_due)

    def _copy(self, name: str, lane: PhaseLane, size: int, before: float, after: float) -> Phase:
        due = self.before_due + after
        return Phase(self.s, name, lane, size, self.forward_end + before, due)


# --- A bound from what a device can do and hold at one moment: a configuration linear program
# (Gilmore and Gomory, "A linear programming approach to the cutting stock problem", Operations
# Research 9, 1961) with lanes, modes and windows. It only looks for good prices. What is reported
# is computed from them anew: tolerances of the program make the bound weaker, never wrong.

_MOST_ROUNDS = 60
_MOST_WINDOWS = 24
_NEW = 1e-7


def configurations_ms(
    problem: Problem, *, should_stop: Callable[[], bool] = lambda: False
) -> float:
    """Return the greatest bound of single devices, in ms of the problem's objective.

    ``should_stop`` is asked between devices and between rounds; the bound is then weaker.
    """
    paths = Paths(problem)
    makespan = problem.objective == "makespan"
    best = 0.0
    for device, stages in enumerate(problem.stages_of):
        if stages and not should_stop():
            work = work_of(paths, device, makespan=makespan)
            best = max(best, device_ms(work, should_stop=should_stop))
    return best


def device_ms(work: DeviceWork, *, should_stop: Callable[[], bool] = lambda: False) -> float:
    """Return the least time that one device's work is proven to take, head and tail included."""
    patterns = Patterns(work)
    while not patterns.is_countable:
        work = _coarser(work)
        patterns = Patterns(work)
    if not patterns.phases:
        return 0.0
    whole = Program(work, patterns, [])
    plain = whole.solve(should_stop)
    windows = windows_of(work, plain - work.head - work.tail)
    if not windows:
        return plain
    return max(plain, Program(work, patterns, windows).solve(should_stop))


def _coarser(work: DeviceWork) -> DeviceWork:
    """Return the work with one size of waiting phases less: a larger one holds as a smaller does.

    The two that differ by the smallest share become one, and below the least two there is 0.
    """
    sizes = sorted({p.held_bytes for p in work.phases if p.lane is PhaseLane.NONE} | {0})
    low, high = min(pairwise(sizes), key=lambda pair: (pair[1] - pair[0]) / pair[1])

    def lowered(phase: Phase) -> Phase:
        is_high = phase.lane is PhaseLane.NONE and phase.held_bytes == high
        return replace(phase, held_bytes=low) if is_high else phase

    modes = tuple(
        PhaseMode(
            mode.stage,
            tuple(
                (phase, ms)
                for phase, ms in ((lowered(phase), ms) for phase, ms in mode.needs)
                if phase.takes_anything
            ),
        )
        for mode in work.modes
    )
    return replace(work, modes=modes)


class Program:
    """The linear program over prices of one device's phases: its rows are patterns.

    Columns: pi of every phase, the energy of every stage, alpha of every window, the greatest pi of
    a late phase.
    """

    def __init__(self, work: DeviceWork, patterns: Patterns, windows: Sequence[Window]) -> None:
        self.work = work
        self.patterns = patterns
        self.windows = windows
        self.index = {phase: i for i, phase in enumerate(patterns.phases)}
        self.num = len(patterns.phases)
        self.always = Window(0.0, (True,) * self.num, work.num_microbatches * len(work.stages))
        self.energy_of = {s: self.num + k for k, s in enumerate(work.stages)}
        self.first_alpha = self.num + len(work.stages)
        self.dearest_late = self.first_alpha + len(windows)
        self.program = LinearProgram(self._gain(), self._tops())
        self._modes()

    def solve(self, should_stop: Callable[[], bool]) -> float:
        """Add patterns until none is missing; return the best bound that any prices prove."""
        best = 0.0
        for _ in range(_MOST_ROUNDS):
            prices, alphas = self._best_prices()
            best = max(best, self.proven(prices))
            if not self._add_missing(prices, alphas) or should_stop():
                break
        return best

    def proven(self, prices: Sequence[float]) -> float:
        """Return the bound that prices >= 0 prove once no pattern costs more than 1, in ms."""
        scale = max(1.0, self.patterns.heaviest(prices, self.always)[0])
        pi = {phase: float(prices[i]) / scale for phase, i in self.index.items()}
        least = dict.fromkeys(self.work.stages, inf)
        for mode in self.work.modes:
            energy = sum(pi[phase] * ms for phase, ms in mode.needs)
            least[mode.stage] = min(least[mode.stage], energy)
        total = self.work.num_microbatches * sum(least.values())
        for window in self.windows:
            alpha = self.patterns.heaviest(prices, window)[0] / scale
            total += window.length * (1 - min(1.0, alpha))
        late = max((price for phase, price in pi.items() if phase.is_late), default=0.0)
        return self.work.head + self.work.tail * (1 - late) + total

    def _add_missing(self, prices: Sequence[float], alphas: Sequence[float]) -> int:
        """Add the dearest pattern of every window, and of all, that costs too much."""
        missing = 0
        for k, window in enumerate([*self.windows, self.always]):
            check_stop()
            limit = alphas[k] if k < len(self.windows) else 1.0
            weight, pattern = self.patterns.heaviest(prices, window)
            if weight > limit + _NEW:
                missing += 1
                self._add(pattern, k if k < len(self.windows) else None)
        return missing

    def _best_prices(self) -> tuple[list[float], list[float]]:
        """Return the prices, and those of the windows, that prove most by the patterns so far."""
        found = [max(0.0, value) for value in self.program.best()]
        return found[: self.num], found[self.first_alpha : self.dearest_late]

    def _gain(self) -> list[float]:
        """Return what each column adds to the bound."""
        energies = [float(self.work.num_microbatches)] * len(self.work.stages)
        alphas = [-window.length for window in self.windows]
        return [*[0.0] * self.num, *energies, *alphas, -self.work.tail]

    def _tops(self) -> list[float]:
        """Return the most of each column: 1, for an energy the longest mode."""
        longest = max(sum(ms for _, ms in mode.needs) for mode in self.work.modes)
        energies = [longest] * len(self.work.stages)
        return [*[1.0] * self.num, *energies, *[1.0] * (len(self.windows) + 1)]

    def _modes(self) -> None:
        """A stage's energy is at most that of each mode; a late phase costs at most the dearest."""
        for mode in self.work.modes:
            row = {self.energy_of[mode.stage]: 1.0}
            for phase, ms in mode.needs:
                row[self.index[phase]] = -ms
            self.program.add_at_most(row, 0.0)
        for phase, i in self.index.items():
            if phase.is_late:
                self.program.add_at_most({i: 1.0, self.dearest_late: -1.0}, 0.0)

    def _add(self, pattern: Pattern, window: int | None) -> None:
        row = {i: float(pattern.count(i)) for i in sorted(set(pattern))}
        if window is None:
            self.program.add_at_most(row, 1.0)
        else:
            row[self.first_alpha + window] = -1.0
            self.program.add_at_most(row, 0.0)


def windows_of(work: DeviceWork, length: float) -> list[Window]:
    """Return windows behind the first start and before the last I or B, within ``length`` ms."""
    phases = work.phases
    most = max((p.release + p.due for p in phases), default=0.0)
    reach = min(most, length / 2)
    found = []
    for at_start in (True, False):
        step = work.least_forward if at_start else work.least_backward
        offsets = [p.release if at_start else p.due for p in phases]
        for low, high in _slices(offsets, step, reach):
            allowed = tuple(offset < high for offset in offsets)
            most_held = (
                ceil(high / step - 1e-9) if step > 0 else work.num_microbatches * len(phases)
            )
            found.append(Window(high - low, allowed, max(1, most_held)))
    return found


def _slices(offsets: Sequence[float], step: float, reach: float) -> list[tuple[float, float]]:
    """Cut the first ``reach`` ms where a phase becomes possible, or one more cell."""
    cuts = {0.0, reach, *(offset for offset in offsets if 0 < offset < reach)}
    if step > 0:
        cuts |= {k * step for k in range(1, _MOST_WINDOWS) if k * step < reach}
    marks = sorted(cuts)
    return [(low, high) for low, high in pairwise(marks) if high > low]


# --- What a device can do and hold at one moment: patterns of phases that fit its lanes and memory.
# A pattern is a set of cells of one device, each in a phase: at most one per lane (of both transfer
# lanes together where the device is half duplex), bytes within the room. `heaviest` finds the one
# with the greatest total price. Waiting phases take no lane and may come several times; of several
# with the same size only the dearest matters, so they are counted by size.

_MOST = 20_000
"""Most multisets of waiting phases looked at; devices with more are left out."""

Pattern = tuple[int, ...]
"""Indices of phases, one per cell."""


class Window(NamedTuple):
    """A time of fixed length: which phases can be in it, and how many cells between F and I."""

    length: float
    allowed: tuple[bool, ...]
    most_held: int


class _Use(NamedTuple):
    """Phases on lanes at one moment."""

    phases: Pattern
    held_bytes: int
    num_held: int


class Patterns:
    """The patterns of one device.

    Attributes
    ----------
    is_countable
        False where there are too many to look at.
    """

    def __init__(self, work: DeviceWork) -> None:
        self.phases = work.phases
        self._room = work.room_bytes
        self._sizes = sorted(
            {p.held_bytes for p in self.phases if p.lane is PhaseLane.NONE and p.held_bytes > 0},
            reverse=True,
        )
        self._most = work.num_microbatches * len(work.stages)
        self._uses = _uses(self.phases, work)
        multisets = _multisets(self._sizes, self._room, self._most)
        self.is_countable = multisets is not None
        multisets = multisets or [(0,) * len(self._sizes)]
        counts = np.array(multisets, dtype=np.int64).reshape(len(multisets), len(self._sizes))
        held_bytes = counts @ np.array(self._sizes, dtype=np.int64)
        order = np.argsort(held_bytes, kind="stable")
        self._counts, self._held = counts[order], held_bytes[order]
        self._num = self._counts.sum(axis=1)

    def heaviest(self, prices: Sequence[float], window: Window) -> tuple[float, Pattern]:
        """Return the greatest total price of a pattern possible in a window, and that pattern."""
        dearest = self._dearest(prices, window)
        value = self._counts @ np.array([prices[i] if i >= 0 else 0.0 for i in dearest])
        best, found = 0.0, (-1, _Use((), 0, 0))
        by_limit: dict[int, tuple[Ints, Floats, Ints]] = {}
        for use in self._uses:
            left = min(window.most_held, self._most) - use.num_held
            if left < 0 or not all(window.allowed[i] for i in use.phases):
                continue
            if left not in by_limit:
                rows = np.flatnonzero(self._num <= left)
                by_limit[left] = rows, np.maximum.accumulate(value[rows]), self._held[rows]
            rows, most, held_bytes = by_limit[left]
            at = int(np.searchsorted(held_bytes, self._room - use.held_bytes, side="right")) - 1
            if at < 0:
                continue
            total = sum(prices[i] for i in use.phases) + float(most[at])
            if total > best:
                row = int(rows[int(np.argmax(value[rows[: at + 1]]))])
                best, found = total, (row, use)
        row, use = found
        waits = () if row < 0 else self._counts[row]
        spread = [i for i, n in zip(dearest, waits, strict=False) for _ in range(n) if i >= 0]
        return best, (*use.phases, *spread)

    def _dearest(self, prices: Sequence[float], window: Window) -> list[int]:
        """Return, by size, the waiting phase with the greatest price; -1 = none is possible."""
        dearest = []
        for size in self._sizes:
            ways = [
                i
                for i, phase in enumerate(self.phases)
                if phase.lane is PhaseLane.NONE and phase.held_bytes == size and window.allowed[i]
            ]
            dearest.append(max(ways, key=lambda i: prices[i], default=-1))
        return dearest


def _uses(phases: Sequence[Phase], work: DeviceWork) -> list[_Use]:
    """Return what can be on the lanes at one moment, nobody waiting."""
    lanes = [
        [-1, *(i for i, phase in enumerate(phases) if phase.lane is lane)]
        for lane in (PhaseLane.COMPUTE, PhaseLane.D2H, PhaseLane.H2D)
    ]
    uses = []
    for compute, away, home in product(*lanes):
        if work.half_duplex and away >= 0 and home >= 0:
            continue
        chosen = tuple(i for i in (compute, away, home) if i >= 0)
        held_bytes = sum(phases[i].held_bytes for i in chosen)
        if held_bytes <= work.room_bytes:
            uses.append(_Use(chosen, held_bytes, sum(not phases[i].is_late for i in chosen)))
    return uses


def _multisets(sizes: Sequence[int], room: int, most: int) -> list[tuple[int, ...]] | None:
    """Return all numbers of waiting cells by size that fit; None where there are too many."""
    found: list[tuple[tuple[int, ...], int]] = [((), 0)]
    for size in sizes:
        longer = []
        for counts, held_bytes in found:
            check_stop()
            for n in range(min(most - sum(counts), (room - held_bytes) // size) + 1):
                longer.append(((*counts, n), held_bytes + n * size))
                if len(longer) > _MOST:
                    return None
        found = longer
    return [counts for counts, _ in found]
