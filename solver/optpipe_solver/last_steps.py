"""The last steps of a solve: less memory for the same objective, and less delay by noise.

Memory that saves no time is a fault, because allocators fragment. So a problem of v2 is solved
again with tighter limits: every device gets the same share of its free memory. Two searches look
for the known objective again: the known schedule, squeezed into the limits, and the families that
had this objective. Bisection lowers the limits if one of them succeeds, and raises them if none
does. Then a local search from the best of these tries less memory, in smaller and smaller steps.
All programs are legal for the problem itself. Nothing is proven of lower peaks, and less memory may
work even if more memory fails.

``solve(robust=...)`` judges schedules by a percentile of the objective, all under the same draws
(`NoisyTimes`). The candidates are the schedules that the search has met and those of all families.
A local search also improves the shortest schedule for slower devices (scenarios): it finds orders
that wait less for a device that may be late. Nothing is proven of a percentile: a bound of a solve
is one without noise.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from math import floor
from typing import TYPE_CHECKING

import numpy as np

from optpipe.errors import InputError
from optpipe.explain.memory import stage_reliefs
from optpipe.explain.values import Necessity
from optpipe.memory import EFFECTS, OF_MODES, device_peak_bytes, modes_of
from optpipe.schedule import Action, ActionType
from optpipe_solver.budget import RobustChoice, Stop
from optpipe_solver.families import FAMILIES
from optpipe_solver.feasibility import feasibility, refuse_unless, smallest_memory
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.local_search.search import improve_by_local_search
from optpipe_solver.portfolio import all_starts, is_large
from optpipe_solver.ranking import EQUAL, Noise, NoisyTimes, peak_shares, ranks_equals

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from optpipe.memory import CellModes
    from optpipe.problem import Problem, Stage
    from optpipe.schedule import Program
    from optpipe_solver.budget import Progress

__all__ = [
    "Robust",
    "choose_robust",
    "keep_where_peaks_allow",
    "lower_peaks",
    "peaks_can_fall",
    "with_device_factors",
    "with_free_share",
    "within_limit",
]


_STEP, _FIRST_STEP = 0.01, 0.2
"""Shares of the free memory that are closer than the first number count as the same.

The second is the part of the memory above the minimum that the first local search does without.
"""

_SEARCH_PER_CELL, _SEARCH_SHARE = 20_000, 0.25
"""Actions simulated in one local search, at most: per cell; and of what is left."""

_PER_UNIT = 10_000_000
"""Actions simulated that make a unit of work, as for the local search of `portfolio`."""

_SQUEEZED, _PEAKS = ", squeezed", ", peaks"
"""Suffix of a method's name: how a schedule was derived from another, and under which limits."""

_ROUND_COST, _START_COST = 1e-5, {False: 5e-5, True: 4e-4}
"""Units of work per pass that a tighter search and all starts of a family count for.

With menus a family counts for more. Measured in CPU seconds on the suite ``menus``; all families
took 1e-4 to 2e-3 per pass on other problems.
"""


def peaks_can_fall(problem: Problem) -> bool:
    """Whether equal schedules are ranked by peaks, and the last step knows all their actions."""
    return ranks_equals(problem) and not problem.pairs


def lower_peaks(best: Incumbent, stop: Stop, family_ms: Mapping[str, float] | None = None) -> None:
    """Offer schedules with the objective that is known, and lower peaks of the fullest devices.

    Parameters
    ----------
    best
        Receives the offers; without a schedule, nothing happens.
    stop
        The budget. If its work is limited, the attempts depend only on that, on the seed and on the
        best schedule.
    family_ms
        The objective in ms of each family under the known limits. Tighter limits hardly make a
        family shorter. So only families with the known objective are built again, and, for a local
        search to start from, the best one. None to build all.

    Raises
    ------
    InputError
        Unless `peaks_can_fall`.
    """
    problem, rule = best.problem, "problems of v2 without pairs"
    refuse_unless(peaks_can_fall(problem), "lower_peaks", problem, rule)
    if best.metrics is None:
        return
    families = nearest = None
    if family_ms is not None:
        enough_ms = best.objective_ms * (1 + EQUAL)
        families = [family for family, ms in family_ms.items() if ms <= enough_ms]
        nearest = families or sorted(family_ms, key=family_ms.__getitem__)[:1]
    floor_share = least = _least_share(problem)
    most = peak_shares(problem, best.metrics.peak_bytes)[0]
    while most - least > _STEP and not stop.is_over():
        share = (least + most) / 2
        if _TighterSearch(best, share, families).run(stop, searches=False):
            most = min(share, peak_shares(problem, best.metrics.peak_bytes)[0])
        else:
            least = share
    step = _FIRST_STEP * (most - floor_share)
    while step > _STEP and not stop.is_over():
        share = max(floor_share, most - step)
        if _TighterSearch(best, share, nearest).run(stop, searches=True):
            most = min(share, peak_shares(problem, best.metrics.peak_bytes)[0])
        else:
            step /= 2
    if not is_large(problem):
        keep_where_peaks_allow(best)


def keep_where_peaks_allow(best: Incumbent) -> None:
    """Offer the best schedule without the offloads and recomputations that lower no peak.

    A cell is kept if its device's peak stays. Searches leave such cells, for example with a RELOAD
    directly after the RELEASE.
    """
    if best.programs is None or best.metrics is None:
        return
    problem, programs = best.problem, best.programs
    devices = [
        device.model_copy(update={"memory_bytes": device.reserved_bytes + peak})
        for device, peak in zip(problem.devices, best.metrics.peak_bytes, strict=True)
    ]
    tight = problem.model_copy(update={"devices": tuple(devices)})
    modes = [modes_of(problem, program) for program in programs]
    spare = {
        (group.stage, microbatch)
        for group in stage_reliefs(tight, programs, modes)
        for microbatch in group.microbatches(Necessity.UNNEEDED)
    }
    if spare:
        kept = (
            tuple(
                action._replace(mode=0) if action.cell in spare else action
                for action in program
                if not (action.cell in spare and action.type in OF_MODES)
            )
            for program in programs
        )
        best.offer(tuple(kept), best.method)


def with_free_share(problem: Problem, share: float) -> Problem:
    """Return the problem with a share (0-1) of what each device has free for activations."""
    devices = []
    for index, device in enumerate(problem.devices):
        fixed = device.reserved_bytes + problem.static_bytes_of(index)
        memory_bytes = fixed + floor(share * problem.room_bytes(index))
        devices.append(device.model_copy(update={"memory_bytes": memory_bytes}))
    return problem.model_copy(update={"devices": tuple(devices)})


def _least_share(problem: Problem) -> float:
    """Return the share of the free memory below which some device can run nothing."""
    shares = []
    for index, (device, least) in enumerate(
        zip(problem.devices, smallest_memory(problem), strict=True)
    ):
        room = problem.room_bytes(index)
        if room > 0:
            shares.append(1.0 - (device.memory_bytes - least) / room)
    return max(shares, default=0.0)


class _TighterSearch:
    """A search for the known objective in which every device has a share of its free memory."""

    def __init__(self, best: Incumbent, share: float, families: Collection[str] | None) -> None:
        self.best = best
        self.families = families
        self.method = best.method.partition(_PEAKS)[0].removesuffix(_SQUEEZED)
        self.share = share
        self.enough_ms = best.objective_ms * (1 + EQUAL)
        self.inner = Incumbent(with_free_share(best.problem, share), self._hand_on)

    @property
    def _has_found(self) -> bool:
        return self.inner.objective_ms <= self.enough_ms

    def run(self, stop: Stop, *, searches: bool) -> bool:
        """Return whether built programs, or optionally a search, reach the objective."""
        problem = self.inner.problem
        if feasibility(problem).plan is None:
            return False
        cells = len(problem.stages) * problem.num_microbatches
        if not is_large(problem):
            self._offer_known()
        if self.families is None or self.families:
            self._offer_starts(stop)
        if stop.work is not None:
            number = len(FAMILIES if self.families is None else self.families)
            stop.spend(3 * cells * (_ROUND_COST + number * _START_COST[problem.has_modes]))
        if searches and not self._has_found:
            self._search(_SEARCH_PER_CELL * cells, stop)
        return self._has_found

    def _offer_known(self) -> None:
        known, problem = self.best.programs or (), self.inner.problem
        later = [within_limit(problem, d, program) for d, program in enumerate(known)]
        programs = tuple(program for program in later if program is not None)
        if len(programs) == len(problem.devices):
            self.inner.offer(programs, f"{self.method}{_SQUEEZED}")

    def _offer_starts(self, stop: Stop) -> None:
        starts, slowest_s = all_starts(self.inner.problem, self.families), 0.0
        # None is begun that could take longer than is left.
        while not (self._has_found or stop.is_over()) and stop.left_s() > slowest_s:
            if (start := next(starts, None)) is None:
                return
            slowest_s = max(slowest_s, start.seconds)
            if start.programs is not None and start.legal:
                self.inner.offer(start.programs, start.method, expected_ms=start.objective_ms)
                self.inner.keep(start.programs, start.objective_ms)

    def _search(self, most_work: int, stop: Stop) -> None:
        limited = stop.work is not None
        allowed = min(most_work, _SEARCH_SHARE * stop.left_work * _PER_UNIT)
        # With limited work, a search that stops early would end at another place each time.
        turn = Stop(
            stop.left_s() * (1.0 if limited else _SEARCH_SHARE),
            work=max(1, int(allowed)) if limited else most_work,
            seed=stop.seed,
            should_stop=lambda: stop.is_told() or (not limited and self._has_found),
        )
        improve_by_local_search(self.inner, turn)
        stop.spend(turn.spent / _PER_UNIT)

    def _hand_on(self, progress: Progress) -> None:
        reached = progress.objective_ms
        if progress.programs is not None and reached is not None and reached <= self.enough_ms:
            method = f"{progress.method}{_PEAKS} {100 * self.share:.0f}%"
            self.best.offer(progress.programs, method, expected_ms=reached)


# --- A program within a tighter limit: if an action does not fit, waiting weight gradients run
# first, because they free bytes. A forward that still does not fit waits until more are freed.


def within_limit(problem: Problem, device: int, program: Program) -> Program | None:
    """Return a legal program of a device with W's sooner and forwards later, so that it fits.

    All else stays in order. None if another action does not fit, or needs a forward that does not
    fit. Other devices may wait for delayed actions, and may even deadlock.
    """
    modes = modes_of(problem, program)
    moved = _RoomMaker(problem, device, program, modes).in_order()
    if moved is None:
        return None
    # The search ignores the workspace of a W, so the result is checked.
    peak = device_peak_bytes(problem, device, moved, modes)
    return moved if peak <= _usable_bytes(problem, device) else None


def _usable_bytes(problem: Problem, device: int) -> int:
    return problem.devices[device].usable_bytes


class _RoomMaker:
    """A program on its way through: what it holds, what is done, and what waits for room."""

    def __init__(self, problem: Problem, device: int, program: Program, modes: CellModes) -> None:
        self._mode = {cell: problem.menu_of(*cell)[mode] for cell, mode in modes.items()}
        self._limit = _usable_bytes(problem, device)
        self._held = problem.static_bytes_of(device)
        self._program = program
        self._done: list[Action] = []
        self._owed: dict[tuple[int, int], None] = {}
        self._waiting: deque[Action] = deque()

    def in_order(self) -> Program | None:
        for action in self._program:
            is_forward = action.type is ActionType.FORWARD
            if action.type is ActionType.BACKWARD_WEIGHT:
                if action.cell in self._owed:
                    self._do(action)
            elif (is_forward and self._waiting) or any(
                action.cell == other.cell for other in self._waiting
            ):
                if action.type.is_backward:
                    return None
                self._waiting.append(action)
            elif self._makes_room_for(action):
                self._do(action)
            elif is_forward:
                self._waiting.append(action)
            else:
                return None
            while self._waiting and self._makes_room_for(self._waiting[0]):
                self._do(self._waiting.popleft())
        return None if self._waiting else tuple(self._done)

    def _makes_room_for(self, action: Action) -> bool:
        """Run the W's that an action needs in order to fit, and return whether it fits."""
        effect, mode = EFFECTS[action.type], self._mode[action.cell]
        most = max(effect.delta(mode), effect.inside(mode)) + effect.workspace(mode)
        excess = self._held + most - self._limit
        first = []
        for cell in self._owed if excess > 0 else ():
            first.append(cell)
            excess -= self._mode[cell].weight_context_bytes
            if excess <= 0:
                break
        if excess > 0:
            return False
        for stage, microbatch in first:
            self._do(Action(stage, ActionType.BACKWARD_WEIGHT, microbatch))
        return True

    def _do(self, action: Action) -> None:
        self._done.append(action)
        self._held += EFFECTS[action.type].delta(self._mode[action.cell])
        if action.type is ActionType.BACKWARD_INPUT:
            self._owed[action.cell] = None
        elif action.type is ActionType.BACKWARD_WEIGHT:
            del self._owed[action.cell]


_WIDEN_SHARE = 0.5
"""Of what is left of the time: for making schedules, before they are judged."""

_NUM_SCENARIOS, _WIDEN_PER_CELL = 4, 20_000
"""Slow devices are drawn so often; actions simulated in the search of each, per cell."""

_PERCENTILE = re.compile(r"P([1-9]\d?(?:\.\d{1,3})?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Robust:
    """By which percentile schedules are ranked, in (0, 100), and under which noise.

    Raises
    ------
    InputError
        With value, rule and fix.
    """

    percent: float = 90.0
    noise: Noise = field(default_factory=lambda: Noise(stragglers=0.1))

    def __post_init__(self) -> None:
        if not 0 < self.percent < 100:
            raise InputError(
                f"robust.percent = {self.percent}: must be above 0 and below 100; change it"
            )

    @classmethod
    def parse(cls, text: str, *, jitter: float, stragglers: float, seed: int) -> Robust:
        """Return what a text asks for, e.g. ``P90``, under noise as `Noise`.

        Raises `InputError` if the text is no percentile, and as `Noise`.
        """
        match = _PERCENTILE.fullmatch(text)
        if match is None:
            raise InputError(
                f"robust = {text!r}: must be a percentile from P1 up to below P100; write P90"
            )
        noise = Noise(jitter=jitter, stragglers=stragglers, seed=seed)
        return cls(percent=float(match.group(1)), noise=noise)


def choose_robust(best: Incumbent, robust: Robust, stop: Stop) -> RobustChoice | None:
    """Replace the shortest schedule by the one that noise delays least; None without any.

    Among equals, the shortest without noise stays. If the time ends before all are judged, the best
    of the judged ones stays, which include the shortest of all.
    """
    if best.programs is None:
        return None
    _widen(best, robust.noise, stop.turn(_WIDEN_SHARE))
    pool = best.pool()
    noisy = NoisyTimes(best.problem, robust.noise)
    late_ms: list[float] = []
    for candidate in pool:
        if late_ms and stop.is_over():
            break
        late_ms.append(noisy.percentile(candidate.programs, robust.percent))
    chosen = min(range(len(late_ms)), key=lambda number: late_ms[number])
    if late_ms[chosen] >= late_ms[0] * (1 - EQUAL):
        chosen = 0
    if chosen > 0:
        best.put_first(pool[chosen])
    return RobustChoice(
        percent=robust.percent,
        late_ms=late_ms[chosen],
        shortest_ms=best.objective_ms,
        shortest_late_ms=late_ms[0],
        num_compared=len(late_ms),
        jitter=robust.noise.jitter,
        stragglers=robust.noise.stragglers,
    )


# --- Schedules to choose among.


def _widen(best: Incumbent, noise: Noise, stop: Stop) -> None:
    """Offer what else could be good under noise; by slower devices only where nothing may pair."""
    problem, known = best.problem, best.programs
    for start in all_starts(problem):
        if stop.is_over():
            return
        if start.programs is not None and start.legal:
            best.keep(start.programs, start.objective_ms, start.method)
    if known is None or is_large(problem) or problem.pairs:
        return
    cells = len(problem.stages) * problem.num_microbatches
    draw = np.random.default_rng(noise.seed)
    for number in range(1, _NUM_SCENARIOS + 1):
        factors = 1.0 + noise.stragglers * draw.uniform(-1.0, 1.0, len(problem.devices))
        slower = Incumbent(with_device_factors(problem, factors.tolist()))
        slower.offer(known, best.method)
        turn = Stop(
            stop.left_s(),
            work=_WIDEN_PER_CELL * cells,
            seed=noise.seed + number,
            should_stop=stop.is_over,
        )
        improve_by_local_search(slower, turn)
        if slower.programs is not None:
            best.offer(slower.programs, f"local-search, scenario {number}")
        if stop.is_over():
            return


def with_device_factors(problem: Problem, factors: Sequence[float]) -> Problem:
    """Return the problem with all compute times multiplied by a factor of their device."""
    first, *others = (
        tuple(_slower(stage, factors[stage.device]) for stage in stages)
        for stages in problem.stages_by_cost
    )
    rows = tuple(zip(*others, strict=True))
    return problem.model_copy(update={"stages": first, "other_costs": rows})


def _slower(stage: Stage, factor: float) -> Stage:
    changed: dict[str, object] = {
        name: None if (ms := getattr(stage, name)) is None else factor * ms for name in _TIMES
    }
    changed["modes"] = tuple(
        mode
        if mode.recompute_ms is None
        else mode.model_copy(update={"recompute_ms": factor * mode.recompute_ms})
        for mode in stage.modes
    )
    return stage.model_copy(update=changed)


_TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms", "backward_ms", "recompute_ms")
