"""Make compute programs fit into memory, with the compiled sweeps of `kernel`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import AGAIN, AWAY, CompiledProblem, Rows, within_hosts
from optpipe_solver.budget import check_stop
from optpipe_solver.offload_fit.kernel import FARTHEST, HIDDEN, OLDEST, DeviceProgram, Rule, sweep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Floats, Ints

__all__ = ["THOROUGH", "UNLIMITED", "Fit", "Fitted", "Frame", "Ran", "fit", "hide_offload"]


UNLIMITED = 2**62
"""Bytes of a host, or of a device, that has no limit."""


class Ran(NamedTuple):
    """A simulation: the objective, and the end of every pass as in `SimulationScratch`."""

    objective_ms: float
    ends: Floats


@dataclass(frozen=True, slots=True)
class Fitted:
    """Programs as integers, and each device's peak bytes of activations."""

    rows: Rows
    peaks: tuple[int, ...]


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
        cells = [stage for stages in problem.stages_by_cost for stage in stages]
        self._may_offload = np.array([problem.can_move(one) for one in cells])
        self._may_recompute = np.array([one.can_recompute for one in cells])
        if offloading is not None:
            own = np.isin(np.arange(len(problem.stages)), list(offloading))
            self._may_offload &= np.tile(own, problem.num_costs)
        self._work = simulate.workspace_for(self.compiled.times, len(problem.devices))
        self._jobs = [self._job(device) for device in range(len(problem.devices))]

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """Bytes of each device for activations."""
        return tuple(int(limit) for limit in self.compiled.memory.limit)

    @cached_property
    def fits(self) -> bool:
        """Whether the programs need neither offload nor recompute."""
        return all(peak <= limit for peak, limit in zip(self.peaks, self.limits, strict=True))

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Bytes of activations that each program holds at most."""
        return tuple(_peak(job) for job in self._jobs)

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

    def host_shares(self) -> tuple[int, ...]:
        """Host bytes per device where each device of a host gets the same part of its limit."""
        devices = self.problem.devices
        sizes = Counter(device.host for device in devices)
        limits = {host.name: host.memory_bytes for host in self.problem.hosts}
        shares = []
        for device in devices:
            limit = limits[device.host]
            shares.append(UNLIMITED if limit is None else limit // sizes[device.host])
        return tuple(shares)

    @property
    def num_actions(self) -> int:
        """How many compute actions there are."""
        return int(self.rows.lengths.sum())

    def smallest_move(self, device: int) -> int:
        """Return half of the fewest bytes that an offload of a device moves; 0 if none may."""
        job = self._jobs[device]
        moved = job.offload_bytes[job.may_offload]
        return max(1, int(moved.min()) // 2) if moved.size else 0

    def run(self, rows: Rows) -> Ran:
        """Simulate programs."""
        makespan, span, _ = simulate.length(
            rows.actions, rows.lengths, self.compiled.times, self._work
        )
        objective = makespan if self.problem.objective == "makespan" else span
        return Ran(float(objective), self._work.end[: 2 * self.compiled.times.num_cells].copy())

    def sweep_device(self, device: int, rule: Rule, ran: Ran, limit: int) -> tuple[bool, float]:
        """Return whether one device can be fitted, and how long it then waits, in ms."""
        check_stop()
        job = self._arriving(device, ran)
        swept = sweep(job, rule, limit, UNLIMITED)
        return bool(swept.ok), float(swept.stalled_ms)

    def sweep_all(
        self, rules: Sequence[Rule], ran: Ran, limits: Sequence[int], host_limits: Sequence[int]
    ) -> Fitted | None:
        """Fit every device, inputs arriving as in a run; None if one cannot be fitted.

        Rules and limits are per device.
        """
        actions = np.zeros_like(self.rows.actions)
        lengths = np.zeros_like(self.rows.lengths)
        peaks = []
        for device, rule in enumerate(rules):
            check_stop()
            job = self._arriving(device, ran)
            swept = sweep(job, rule, limits[device], host_limits[device])
            if not swept.ok:
                return None
            codes = swept.codes[: swept.num_codes]
            actions[device, : swept.num_codes] = self._global(device, codes)
            lengths[device] = swept.num_codes
            peaks.append(int(swept.peak))
        return Fitted(Rows(actions, lengths, self._modes(actions, lengths)), tuple(peaks))

    def _modes(self, actions: Ints, lengths: Ints) -> Ints:
        """Return the modes that the actions imply, by cell."""
        none = np.zeros(self.compiled.times.num_cells, dtype=np.int64)
        return self.compiled.implied(Rows(actions, lengths, none))

    def decode(self, rows: Rows) -> Programs:
        """Return the programs that rows of integers encode."""
        if rows is self.rows and not isinstance(self.programs, Rows):
            return self.programs
        return self.compiled.decode(rows)

    def _arriving(self, device: int, ran: Ran) -> DeviceProgram:
        """Return a device's job with the times at which its inputs arrive in a run."""
        times = self.compiled.times
        m, cells = times.num_microbatches, times.num_cells
        job = self._jobs[device]
        kind, cell = np.divmod(self.rows.actions[device, : self.rows.lengths[device]], cells)
        stage = cell // m
        arrival = np.zeros(kind.size)
        forward = (kind == simulate.FORWARD) & (stage > 0)
        arrival[forward] = ran.ends[cell[forward] - m] + times.there[times.row[cell[forward] - m]]
        backward = (kind == simulate.BACKWARD_INPUT) | (kind == simulate.FULL_BACKWARD)
        backward &= stage < times.num_stages - 1
        arrival[backward] = ran.ends[cells + cell[backward] + m]
        arrival[backward] += times.back[times.row[cell[backward]]]
        return job._replace(arrival=arrival)

    def _global(self, device: int, codes: Ints) -> Ints:
        m = self.problem.num_microbatches
        stages = np.array(self.problem.stages_of[device], dtype=np.int64)
        kind, cell = np.divmod(codes, max(1, stages.size * m))
        if not stages.size:
            return codes
        global_codes: Ints = kind * self.compiled.times.num_cells + stages[cell // m] * m + cell % m
        return global_codes

    def _job(self, device: int) -> DeviceProgram:
        """Return a device's job; its cells are numbered stage by stage, in model order."""
        check_stop()
        times, memory = self.compiled.times, self.compiled.memory
        m = times.num_microbatches
        stages = np.array(self.problem.stages_of[device], dtype=np.int64)
        local = np.zeros(times.num_stages, dtype=np.int64)
        local[stages] = np.arange(stages.size)
        codes = self.rows.actions[device, : self.rows.lengths[device]]
        kind, cell = np.divmod(codes, times.num_cells)
        stage = cell // m
        own = local[stage] * m + cell % m
        weight = kind == simulate.BACKWARD_WEIGHT
        backward = (kind == simulate.BACKWARD_INPUT) | (kind == simulate.FULL_BACKWARD)
        where = np.full((2, stages.size * m), -1, dtype=np.int64)
        where[0, own[backward]] = np.flatnonzero(backward)
        where[1, own[weight]] = np.flatnonzero(weight)
        stage_of_cell = np.repeat(stages, m)
        cells = stage_of_cell * m + np.tile(np.arange(m, dtype=np.int64), stages.size)
        row, rows = times.row[cell], times.row[cells]
        away, again = (np.where(times.varies[rows], 0, mode) for mode in (AWAY, AGAIN))
        adds, saved = memory.adds[kind, row, 0], memory.adds[simulate.RECOMPUTE, rows, again]
        return DeviceProgram(
            kind=kind,
            cell=own,
            duration=times.duration[codes],
            arrival=np.zeros(kind.size),
            delta=adds,
            workspace=memory.rises[kind, row, 0] - np.maximum(adds, 0),
            backward_at=where[0],
            weight_at=where[1],
            offload_bytes=memory.adds[simulate.RELOAD, rows, away],
            offload_ms=times.duration[simulate.OFFLOAD * times.num_cells + cells],
            reload_ms=times.duration[simulate.RELOAD * times.num_cells + cells],
            may_offload=self._may_offload[rows],
            saved_bytes=saved,
            recompute_ms=times.duration[simulate.RECOMPUTE * times.num_cells + cells],
            recompute_workspace=memory.rises[simulate.RECOMPUTE, rows, again]
            - np.maximum(saved, 0),
            may_recompute=self._may_recompute[rows],
            half_duplex=bool(times.half_duplex[device]),
        )


def _peak(job: DeviceProgram) -> int:
    after = np.cumsum(job.delta)
    return int(max((after - np.minimum(job.delta, 0) + job.workspace).max(initial=0), 0))


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
    unlimited = (UNLIMITED,) * len(frame.limits)
    for host_limits in (unlimited, frame.host_shares()):
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


def _best(frame: Frame, tries: int, host_limits: Sequence[int]) -> _Try | None:
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


def _swept(frame: Frame, rule: Rule, ran: Ran, host_limits: Sequence[int]) -> list[_Try]:
    """Return the sweep of all devices by a rule, inputs arriving as in a run; none if one fails."""
    fitted = frame.sweep_all((rule,) * len(host_limits), ran, frame.limits, host_limits)
    if fitted is None:
        return []
    after = frame.run(fitted.rows)
    return [_Try(after.objective_ms, rule, after, fitted.rows)]


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


def hide_offload(frame: Frame) -> Fitted:
    """Return a frame's programs with its stages offloaded as far as that delays nothing.

    Memory limits are ignored.
    """
    search = _HiddenSearch(frame)
    for rule in _hidden_rules(frame.lane_models[-1:] if search.is_large else frame.lane_models):
        search.lower(rule)
    return search.best or Fitted(frame.rows, frame.peaks)


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
        self.best: Fitted | None = None
        moves = [frame.smallest_move(device) for device in range(len(frame.peaks))]
        parts = [peak // move for peak, move in zip(frame.peaks, moves, strict=True) if move]
        self.top = self.level = min(_FINEST, max(parts, default=0))
        self.units = [_unit(frame.problem, device) for device in range(len(frame.peaks))]
        fullest = max(range(len(moves)), key=lambda d: frame.peaks[d] / max(1, self.units[d]))
        self.fullest = fullest
        self.peak_units = frame.peaks[fullest] / max(1, self.units[fullest])
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
            limit = self._limits(middle)[self.fullest]
            ok, stalled_ms = self.frame.sweep_device(self.fullest, rule, self.frame.base, limit)
            if ok and stalled_ms <= _EXACT * self.frame.base.objective_ms:
                high = middle
            else:
                low = middle
        return min(high, self.level - 1)

    def _limits(self, level: int) -> list[int]:
        return [int(level * self.peak_units * unit / self.top) for unit in self.units]

    def _is_free(self, rule: Rule, level: int) -> bool:
        """Whether a level costs no time; if so, remember it."""
        frame, count = self.frame, len(self.units)
        unlimited = (UNLIMITED,) * count
        fitted = frame.sweep_all((rule,) * count, frame.base, self._limits(level), unlimited)
        if fitted is None:
            return False
        if frame.run(fitted.rows).objective_ms > frame.base.objective_ms * (1 + _EXACT):
            return False
        self.best = fitted
        return True


def _unit(problem: Problem, device: int) -> int:
    """Return what one micro-batch holds on a device."""
    return sum(problem.stages[s].activation_bytes for s in problem.stages_of[device])
