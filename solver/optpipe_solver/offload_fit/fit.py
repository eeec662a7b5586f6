"""Make compute programs fit into memory, with the compiled sweeps of `kernel`."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import (
    AGAIN,
    AWAY,
    CompiledProblem,
    Rows,
    device_peaks,
    within_hosts,
)
from optpipe_solver.budget import check_stop
from optpipe_solver.offload_fit.kernel import (
    FARTHEST,
    HIDDEN,
    OLDEST,
    Rule,
    fit_run_for,
    sweep,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Floats, Ints

__all__ = ["THOROUGH", "UNLIMITED", "Fit", "Frame", "Ran", "fit", "hide_offload"]


UNLIMITED = 2**62
"""Bytes of a host, or of a device, that has no limit."""


class Ran(NamedTuple):
    """A simulation: the objective, and the end of every pass as in `SimulationScratch`."""

    objective_ms: float
    ends: Floats


class Frame:
    """One problem and its compute programs; ``offloading`` names the stages that may be offloaded.

    `InputError` if programs contain transfers, recomputation or pairs.

    Stages that have a menu of their own (`Problem.has_modes`) keep everything.

    The programs may be integers already, as `CompiledProblem.encode` makes them.
    """

    def __init__(
        self, problem: Problem, programs: Programs | Rows, offloading: Sequence[int] | None = None
    ) -> None:
        self.problem = problem
        self.programs = programs
        self.compiled = CompiledProblem.of(problem)
        self.rows = programs if isinstance(programs, Rows) else self.compiled.encode(programs)
        self.compiled.refuse_transfers(self.rows, "Frame")
        times, memory = self.compiled.times, self.compiled.memory
        stages = [stage for stages in problem.stages_by_cost for stage in stages]
        away = [AWAY if problem.can_move(stage) else -1 for stage in stages]
        again = [AGAIN if stage.can_recompute else -1 for stage in stages]
        self._away, self._again = (np.where(times.varies, -1, modes) for modes in (away, again))
        if offloading is not None:
            own = np.isin(np.arange(len(problem.stages)), list(offloading))
            self._away[~np.tile(own, problem.num_costs)] = -1
        self._work = simulate.workspace_for(times, len(problem.devices))
        self._run = fit_run_for(times, memory, self.rows, self._away, self._again)

    @cached_property
    def limits(self) -> Ints:
        """Bytes of each device for activations."""
        return self.compiled.memory.limit

    @cached_property
    def fits(self) -> bool:
        """Whether the programs need neither offload nor recompute."""
        return bool((self.peaks <= self.limits).all())

    @cached_property
    def peaks(self) -> Ints:
        """Bytes of activations that each program holds at most."""
        static = [self.problem.static_bytes_of(device) for device in range(self.limits.size)]
        peaks = np.array(device_peaks(self.compiled, self.rows), dtype=np.int64)
        return peaks - np.array(static, dtype=np.int64)

    @cached_property
    def base(self) -> Ran:
        """The programs as they are, whatever they hold."""
        return self.run(self.rows)

    @cached_property
    def lane_models(self) -> tuple[tuple[float, float], ...]:
        """Shares and lags of lanes (`Rule`) worth trying: devices of a PCIe group take turns."""
        groups = Counter(d.pcie_group for d in self.problem.devices if d.pcie_group is not None)
        sharing = float(max(groups.values(), default=1))
        if sharing == 1.0:
            return ((1.0, 0.0),)
        return ((1.0, 0.0), (1.0, 1.0), (sharing, 0.0))

    @cached_property
    def unlimited(self) -> Ints:
        """No limit, by device."""
        return np.full_like(self.limits, UNLIMITED)

    def host_shares(self) -> Ints:
        """Host bytes per device where each device of a host gets the same part of its limit."""
        memory = self.compiled.memory
        sizes = np.bincount(memory.host_of)[memory.host_of]
        shares: Ints = np.minimum(UNLIMITED, memory.host_limit[memory.host_of] // sizes)
        return shares

    @property
    def num_actions(self) -> int:
        """How many compute actions there are."""
        return int(self.rows.lengths.sum())

    def smallest_move(self, device: int) -> int:
        """Return half of the fewest bytes that an offload of a device moves; 0 if none may."""
        rows = np.flatnonzero(
            np.tile(self.compiled.times.device_of, self.problem.num_costs) == device
        )
        rows = rows[self._away[rows] >= 0]
        moved = self.compiled.memory.adds[simulate.RELOAD, rows, self._away[rows]]
        return max(1, int(moved.min()) // 2) if moved.size else 0

    def run(self, rows: Rows) -> Ran:
        """Simulate programs."""
        times = self.compiled.times
        makespan, span, _ = simulate.length(rows.actions, rows.lengths, times, self._work)
        objective = makespan if self.problem.objective == "makespan" else span
        return Ran(float(objective), self._work.end[: 2 * times.num_cells].copy())

    def wait_ms(self, device: int, rule: Rule, limits: Ints) -> float:
        """Return how long a device alone waits for transfers, in ms; inf if it cannot be fitted."""
        check_stop()
        given = self._run._replace(
            ends=self.base.ends, limit=limits, host_limit=self.unlimited, rule=rule
        )
        fits, stalled_ms = sweep(given, device, device + 1)
        return float(stalled_ms) if fits else inf

    def sweep_all(self, rule: Rule, ran: Ran, limits: Ints, host_limits: Ints) -> Rows | None:
        """Fit every device, inputs arriving as in a run; None if one cannot be fitted.

        Limits are per device.
        """
        check_stop()
        given = self._run._replace(ends=ran.ends, limit=limits, host_limit=host_limits, rule=rule)
        fits, _ = sweep(given, 0, self.limits.size)
        return Rows(given.actions.copy(), given.counts.copy(), given.mode.copy()) if fits else None

    def decode(self, rows: Rows) -> Programs:
        """Return the programs that rows of integers encode."""
        if rows is self.rows and not isinstance(self.programs, Rows):
            return self.programs
        return self.compiled.decode(rows)


# --- Make compute programs fit: offload, and recompute if that fails, only as much as needed.
# A sweep processes each device's program from top to bottom (`kernel`). If an action does not fit,
# the sweep takes the option with the smallest estimated delay: offload an activation, run a waiting
# weight gradient earlier, or recompute an activation. An offloaded activation is copied out as
# early as its lane was free after its forward. It is released only when its bytes are needed, and
# comes back just in time. A few rules (which victim, how much slack) are tried, each again with the
# arrival times that its own delays cause; the best in simulation wins. In the spirit of AdaOffload
# (OptPipe, arXiv 2510.05186), no more is moved than the limit requires.
#
# It keeps the order of F and I. A device sees the delays of others only through the arrival times
# of the previous run, and PCIe groups only as slower copies.

THOROUGH = 32
"""``tries``; more gain nothing."""

_WORK = 800_000
_FEWEST = 2
_SAME = 1 + 1e-9


class Fit(NamedTuple):
    """Programs that fit, as integers, and how long they take."""

    objective_ms: float
    frame: Frame
    rows: Rows

    def programs(self) -> Programs:
        """Return the programs."""
        return self.frame.decode(self.rows)


def fit(frame: Frame, tries: int = 4) -> Fit | None:
    """Return the programs with what must be offloaded or recomputed, or None if that fails.

    Parameters
    ----------
    frame
        Legal compute programs (F, I, W, B), over their memory limits or not. Those that fit come
        back as they are. The problem's limits are kept: device and host.
    tries
        Maximum number of sweeps to choose from, up to `THOROUGH`. Large problems get fewer, so that
        it takes about a second. It ends early if a sweep costs no time.
    """
    if frame.fits:
        return Fit(frame.base.objective_ms, frame, frame.rows)
    tries = max(_FEWEST, min(tries, _WORK // frame.num_actions))
    for host_limits in (frame.unlimited, frame.host_shares()):
        best = _best(frame, tries, host_limits)
        if best is None:
            return None
        if within_hosts(frame.compiled, best.rows):
            return Fit(best.objective_ms, frame, best.rows)
    return None


class _Try(NamedTuple):
    """A sweep that fits: how long it takes, by which rule, when its passes end."""

    objective_ms: float
    rule: Rule
    ran: Ran
    rows: Rows


def _best(frame: Frame, tries: int, host_limits: Ints) -> _Try | None:
    """Return the best of ``tries`` sweeps.

    Each rule is tried once; then, best first, again with the delays that it caused.
    """
    rules = list(islice(_rules(frame), tries))
    found: list[_Try] = []
    for rule in rules:
        found += _swept(frame, rule, frame.base, host_limits)
        if found and found[-1].objective_ms <= frame.base.objective_ms * _SAME:
            return found[-1]
    for first in sorted(found, key=_length)[: tries - len(rules)]:
        found += _swept(frame, first.rule, first.ran, host_limits)
    if not found:
        found = _swept(frame, _LAST_RESORT, frame.base, host_limits)
    return min(found, key=_length, default=None)


def _length(attempt: _Try) -> float:
    return attempt.objective_ms


def _swept(frame: Frame, rule: Rule, ran: Ran, host_limits: Ints) -> list[_Try]:
    """Return the sweep of all devices by a rule, inputs arriving as in a run; none if one fails."""
    rows = frame.sweep_all(rule, ran, frame.limits, host_limits)
    if rows is None:
        return []
    after = frame.run(rows)
    return [_Try(after.objective_ms, rule, after, rows)]


def _rules(frame: Frame) -> Iterator[Rule]:
    """Yield rules, the most promising first."""
    for lanes in frame.lane_models:
        yield Rule(HIDDEN, 1.5, 0.0, *lanes)
        yield Rule(HIDDEN, 0.0, 1.0, *lanes)
        yield Rule(HIDDEN, 1.5, 0.25, *lanes)
        yield Rule(HIDDEN, 0.0, 0.0, *lanes)
        yield Rule(OLDEST, 0.5, 0.0, *lanes)
        yield Rule(FARTHEST, 0.5, 0.0, *lanes)
        yield Rule(OLDEST, 1.5, 0.25, *lanes)
        yield Rule(FARTHEST, 0.5, 0.25, *lanes)


_LAST_RESORT = Rule(HIDDEN, -1e15, 0.0)
"""Reloads as late as possible, so that no early reload occupies bytes that others need."""


# --- Offload as far as it costs no time: the smallest peaks at which a schedule is as fast as
# without offload. All devices get the same limit, in units of the bytes of one micro-batch there.
# Bisection lowers it, for a few rules of `fit`; simulation decides whether a limit costs time. The
# first guess is the smallest limit at which the fullest device alone waits for no transfer. Large
# problems take the first limit that costs no time, with slow lanes assumed.

_EXACT = 1e-9
_HIDDEN_WORK = 300_000
_FEWEST_HIDDEN, _MOST_HIDDEN = 2, 150
_FINEST = 256


def hide_offload(frame: Frame) -> Rows:
    """Return a frame's programs with its stages offloaded as far as that delays nothing.

    Memory limits are ignored.
    """
    search = _HiddenSearch(frame)
    for rule in _hidden_rules(frame.lane_models[-1:] if search.is_large else frame.lane_models):
        search.lower(rule)
    return search.best or frame.rows


def _hidden_rules(lane_models: Sequence[tuple[float, float]]) -> Iterator[Rule]:
    """Yield rules, the most promising first; slack lets copies take turns on shared lanes."""
    for slack, victim in (
        (0.0, HIDDEN),
        (4.0, OLDEST),
        (1.0, HIDDEN),
        (1.0, OLDEST),
        (1.0, FARTHEST),
    ):
        for share, lag in lane_models:
            yield Rule(victim, slack, 1.0, share, lag)


class _HiddenSearch:
    """Search levels 1 .. ``top``: limits from nearly nothing to the peak of the programs."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.best: Rows | None = None
        moves = [frame.smallest_move(device) for device in range(frame.limits.size)]
        parts = [int(peak) // move for peak, move in zip(frame.peaks, moves, strict=True) if move]
        self.top = self.level = min(_FINEST, max(parts, default=0))
        self.units = np.array([_unit(frame.problem, device) for device in range(len(moves))])
        peak_units = frame.peaks / np.maximum(1, self.units)
        self.fullest = int(peak_units.argmax())
        self.peak_units = float(peak_units[self.fullest])
        self.budget = max(
            _FEWEST_HIDDEN, min(_MOST_HIDDEN, _HIDDEN_WORK // max(1, frame.num_actions))
        )
        self.is_large = self.budget == _FEWEST_HIDDEN

    def lower(self, rule: Rule) -> None:
        """Lower the level as far as a rule can without costing time."""
        low = 0
        probe = self._guess(rule) if self.best is None else self.level - 1
        while low < probe < self.level and self.budget > 0:
            self.budget -= 1
            if self._is_free(rule, probe):
                self.level = probe
                if self.is_large:
                    self.budget = 0
            else:
                if self.best is not None and low == 0 and probe == self.level - 1:
                    return
                low = probe
            probe = (low + self.level) // 2

    def _guess(self, rule: Rule) -> int:
        low, high = 0, self.level
        while high - low > 1:
            middle = (low + high) // 2
            stalled_ms = self.frame.wait_ms(self.fullest, rule, self._limits(middle))
            if stalled_ms <= _EXACT * self.frame.base.objective_ms:
                high = middle
            else:
                low = middle
        return min(high, self.level - 1)

    def _limits(self, level: int) -> Ints:
        return (level * self.peak_units * self.units / self.top).astype(np.int64)

    def _is_free(self, rule: Rule, level: int) -> bool:
        """Whether a level costs no time; if so, remember it."""
        frame = self.frame
        rows = frame.sweep_all(rule, frame.base, self._limits(level), frame.unlimited)
        if rows is None or frame.run(rows).objective_ms > frame.base.objective_ms * (1 + _EXACT):
            return False
        self.best = rows
        return True


def _unit(problem: Problem, device: int) -> int:
    """Return what one micro-batch holds on a device."""
    return sum(problem.stages[s].activation_bytes for s in problem.stages_of[device])
