"""A bound from what a device can do and hold at one moment: a configuration linear program.

At every moment a device is in some pattern (`patterns`): cells in phases, within its lanes and its
memory. So the time it takes is at least that of the cheapest mixture of patterns in which all cells
get the times that their modes need: the configuration relaxation of Gilmore and Gomory ("A linear
programming approach to the cutting stock problem", Operations Research 9, 1961), here with lanes,
modes and windows. Room for 1.5 activations is room for one: that is what bytes x time cannot see.

By duality every price per ms of phase proves something. Let ``pi`` be prices such that no pattern
costs more than 1. Then all cells together cost at least

    m x sum over stages of the least, over modes, of sum of pi x needed ms =: E,

and each ms pays at most 1. Let a schedule take T, and look at the time A from the device's first
start, not before ``head``, to T - ``tail``. Every I ends within it, so all but late phases (W and
what remains of a B) lie in it. Of those, one at a time, at most ``tail`` ms lie behind it. Hence

    E <= A + tail x max pi of late phases,    T >= head + A + tail.

*Windows.* Near its first start a device cannot do everything: phases have releases, and x ms after
it at most ceil(x / least forward) cells have begun. Let ``alpha`` be the price of the dearest
pattern in such a window; it pays length x (1 - alpha) less than was counted, which is added. Before
T - tail likewise, with dues: n cells that still need their I need more than n - 1 of them. The
windows must not overlap: they are cut to lie within the least A that is proven without them.

The linear program only looks for good prices. What is reported is computed from them anew: pi is
divided by the price of the dearest of all patterns, and alpha is found by the same search: so
tolerances of the program make the bound weaker, never wrong.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, inf
from typing import TYPE_CHECKING

from optpipe_solver.bounds.paths import Paths
from optpipe_solver.exact.patterns import Patterns, Window
from optpipe_solver.exact.phases import work_of
from optpipe_solver.milp.highs import LinearProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe.problem import Problem
    from optpipe_solver.exact.patterns import Pattern
    from optpipe_solver.exact.phases import Work

__all__ = ["Program", "configurations_ms", "device_ms", "windows_of"]

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
    for device, held in enumerate(problem.stages_of):
        if held and not should_stop():
            work = work_of(paths, device, makespan=makespan)
            best = max(best, device_ms(work, should_stop=should_stop))
    return best


def device_ms(work: Work, *, should_stop: Callable[[], bool] = lambda: False) -> float:
    """Return the least time that one device's work is proven to take, head and tail included."""
    patterns = Patterns(work)
    if not patterns.is_countable or not patterns.phases:
        return 0.0
    whole = Program(work, patterns, [])
    plain = whole.solve(should_stop)
    windows = windows_of(work, plain - work.head - work.tail)
    if not windows:
        return plain
    return max(plain, Program(work, patterns, windows).solve(should_stop))


class Program:
    """The linear program over prices of one device's phases: its rows are patterns.

    Columns: pi of every phase, the energy of every stage, alpha of every window, the greatest pi of
    a late phase.
    """

    def __init__(self, work: Work, patterns: Patterns, windows: Sequence[Window]) -> None:
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


def windows_of(work: Work, length: float) -> list[Window]:
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
            held = ceil(high / step - 1e-9) if step > 0 else work.num_microbatches * len(phases)
            found.append(Window(high - low, allowed, max(1, held)))
    return found


def _slices(offsets: Sequence[float], step: float, reach: float) -> list[tuple[float, float]]:
    """Cut the first ``reach`` ms where a phase becomes possible, or one more cell."""
    cuts = {0.0, reach, *(offset for offset in offsets if 0 < offset < reach)}
    if step > 0:
        cuts |= {k * step for k in range(1, _MOST_WINDOWS) if k * step < reach}
    marks = sorted(cuts)
    return [(low, high) for low, high in pairwise(marks) if high > low]
