"""Solve the plan MILP of one placement and pattern, adding path and memory rows as needed.

The relaxation starts with few paths and moments. Violated rows are added first at the root of the
linear program, then for each integer solution, until the best integer solution violates none. The
bound covers every cut and every choice of modes for this pattern. Some patterns and stages
overestimate times or bytes (see `pattern` and `variables`). There the bound holds for the model
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from optpipe.errors import IllegalScheduleError
from optpipe.evaluate import evaluate
from optpipe.schedule import ActionType, Provenance
from optpipe_solver.milp.highs import LinearProgram, MilpModel, MilpStatus, RowByRow
from optpipe_solver.milp.plan.cut_problem import (
    TOLERANCE,
    CutProblem,
    cuts_with_a_layer_moved,
    excess,
)
from optpipe_solver.milp.plan.variables import (
    PlanChoice,
    PlanVariables,
    as_counts,
    devices_hold_whole_layers,
    durations_are_sums,
    durations_of,
    even_loads,
    makespan_is_no_shorter,
    memory_fits,
    one_mode_per_stage,
    only_usable_modes,
    runs_follow_each_other,
    stages_hold_all_layers,
)
from optpipe_solver.milp.plan.walk import walked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from optpipe.model import Model
    from optpipe.problem import Problem
    from optpipe.schedule import Action, Programs
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.budget import Stop
    from optpipe_solver.milp.highs import Variable
    from optpipe_solver.milp.plan.pattern import LongestPath, MemoryMoment, Pattern
    from optpipe_solver.milp.plan.variables import PlanTables

__all__ = ["PatternPlan", "plan_pattern"]

_ROUNDS, _MOST_ROUNDS = 600, 200
"""Maximum number of rounds of rows at the root, and of integer solutions."""

_PATIENCE = 30
"""Rounds at the root without a sufficient gain before integer solves begin. With several stages per
device the bound stays constant for dozens of rounds before it rises."""

_ROOT = 0.5
"""Share of the time for rounds at the root."""

_INWARD = 0.5
"""Share of the way from the relaxation's times to the best choice's at which paths are found, too.
This gives the deeper cuts of in-out separation (Ben-Ameur and Neto, Networks 49, 2007)."""

_SLOWEST = 4
"""Stages of a start that give layers away, or change their mode, at a time."""

_START = 0.3
"""Share of the time for starts, when there is one."""

_FIRST = 0.2
"""Share of the time in which integer solves may prove the optimum, before the annealing."""

_WALK = 0.7
"""Share of the time left after that for the annealing."""

_SLOWER = 1e4
"""Factor that makes a device so slow that the longest path contains all its work."""

_MEMORY_ROWS = 50
"""Maximum number of moments of memory used to limit a device's layers."""

_CELLS = 1e6
"""Cells of longest paths, or of moments of memory, per unit of work (see `Stop`)."""

_GIB = 2.0**30
_LEAST_GAP = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternPlan:
    """The result of the plan MILP for one placement and pattern.

    Attributes
    ----------
    pattern
        The name of the family.
    sizes, modes
        Layers of each stage, and the name of its mode.
    path_ms
        The longest path of the pattern.
    problem, programs, objective_ms
        The cut, its programs, and their objective by `optpipe.simulate`.
    bound_ms
        In this pattern, as modelled, no cut and no choice of one mode per stage is faster.
    difference
        Why ``objective_ms`` differs from ``path_ms``, in words; empty if they are equal.
    """

    pattern: str
    sizes: tuple[int, ...]
    modes: tuple[str, ...]
    path_ms: float
    problem: Problem
    programs: Programs
    objective_ms: float
    bound_ms: float
    difference: str = ""


def plan_pattern(
    model: Model, pattern: Pattern, stop: Stop, cuts: Iterable[tuple[int, ...]] = ()
) -> PatternPlan | float:
    """Return the best cut and modes of a pattern or, without one, the bound of all of them.

    The bound is infinite if nothing fits. It is 0 for models whose objective is the span, and for
    devices with shared or half-duplex lanes, because a pattern does not model these.

    ``cuts`` are starts in addition to even loads, as layers of each stage. No returned plan is
    longer than one of them with a single mode for all stages.
    """
    shared = any(device.half_duplex or device.pcie_group for device in model.devices)
    if model.objective != "makespan" or (pattern.transfers and shared):
        return 0.0
    search = _PatternSearch(model, pattern, stop, cuts)
    search.run()
    return search.result()


class _PatternSearch:
    def __init__(
        self, model: Model, pattern: Pattern, stop: Stop, cuts: Iterable[tuple[int, ...]] = ()
    ) -> None:
        self.model, self.pattern, self.stop = model, pattern, stop
        self.turn, self.num_cells = stop, len(pattern.problem.placement) * model.num_microbatches
        self.cuts = CutProblem(model, pattern)
        self.tables, self.memory = self.cuts.tables, self.cuts.memory
        self.has_chunks = len(self.tables.placement) > len(set(self.tables.placement))
        self.best: tuple[float, PlanChoice] | None = None
        self._start(cuts)
        if self.has_chunks:
            self._walk(self.stop.turn(_START), most=1)
        most_ms, most_layers = self._most()
        self.milp = MilpModel("plan")
        most_on = self._most_on_devices(most_ms)
        self.v = PlanVariables(self.milp, self.tables, most_ms, most_layers, most_on)
        for add in (
            one_mode_per_stage,
            only_usable_modes,
            stages_hold_all_layers,
            runs_follow_each_other,
            durations_are_sums,
            devices_hold_whole_layers,
        ):
            add(self.v)
        self.milp.minimise(self.v.makespan)
        self.rows = RowByRow(self.milp)
        if self.best is not None:
            self.rows.start_from(self.v.values(self.best[1], self.best[0]))
            for path in pattern.longest_paths(durations_of(self.tables, self.best[1])):
                self.rows.add(makespan_is_no_shorter(self.v, path))
        for path in self._loads():
            self.rows.add(makespan_is_no_shorter(self.v, path))
        self.known: set[tuple[int, MemoryMoment]] = set()
        self.bound_ms = 0.0

    def _loads(self) -> Iterator[LongestPath]:
        """Yield for each device the longest path with all its work, if some have many stages.

        Without these rows the relaxation underestimates the load for dozens of rounds. With one
        stage per device the first rounds find them.
        """
        if not self.has_chunks:
            return
        even = PlanChoice(even_loads(self.tables, 0), (0,) * len(self.tables.placement))
        durations = durations_of(self.tables, even)
        for own in self.pattern.stages_of:
            if own:
                slower = durations.copy()
                slower[:, list(own)] *= _SLOWER
                yield self.pattern.longest_paths(slower)[0]

    def _start(self, cuts: Iterable[tuple[int, ...]]) -> None:
        """Find a first choice: a cut with one mode for all stages, made to fit, then improved.

        The shortest one that fits comes first. Even loads follow, in each mode with a duration
        below that of the first one's mode, while a share of the time is left.
        """
        stages, turn = range(len(self.tables.placement)), self.stop.turn(_START)
        self.turn = turn
        numbers = [
            k
            for k in range(len(self.tables.names))
            if all(self.tables.may_use(s, k) for s in stages)
        ]
        even = [PlanChoice(even_loads(self.tables, k), (k,) * len(stages)) for k in numbers]
        given = [PlanChoice(tuple(cut), (k,) * len(stages)) for cut in cuts for k in numbers]
        shortest = sorted(filter(self._fits, [*even, *given]), key=self._length_ms)[:1]
        d = self.tables.durations
        for first in shortest:
            even = [one for one in even if (d[..., one.modes[0]] < d[..., first.modes[0]]).any()]
        for choice in [*shortest, *even]:
            if self.best is not None and turn.is_over():
                return
            self._climb(choice)

    def _climb(self, choice: PlanChoice) -> None:
        """Make a choice fit, then improve its modes and its cut while the path gets shorter."""
        fitting = self._made_to_fit(choice)
        if fitting is None:
            return
        choice = fitting
        length_ms = self._length_ms(choice)
        while not self.stop.is_over():
            durations = durations_of(self.tables, choice)
            path = self.pattern.longest_paths(durations)[0]
            share = (path.counts * durations).sum(axis=0)
            slowest = {int(s) for s in np.argsort(-share, kind="stable")[:_SLOWEST]}
            enough_ms = length_ms * (1 - _LEAST_GAP)
            near = [
                (self._length_ms(one), one)
                for one in _neighbours(choice, self.tables, slowest)
                if path.length_of(durations_of(self.tables, one)) < enough_ms
            ]
            better = sorted(one for one in near if one[0] < enough_ms)
            found = next((one for one in better if self._fits(one[1])), None)
            if found is None:
                break
            length_ms, choice = found
        if self.best is None or length_ms < self.best[0]:
            self.best = length_ms, choice

    def _walk(self, turn: Stop, most: int = 2**31) -> None:
        if self.best is not None:
            self.best = walked(self.cuts, self.best, turn, most=most)

    def _made_to_fit(self, choice: PlanChoice) -> PlanChoice | None:
        """Move layers, or change modes, while that lowers the excess over the limits."""
        counts = as_counts(self.tables, choice)
        excess = self._excesses(counts)
        while excess.any() and not self.stop.is_over():
            full = {s for s, device in enumerate(self.tables.placement) if excess[device] > 0}
            best = excess.sum(), choice, counts, excess
            for near in _neighbours(choice, self.tables, full):
                moved = as_counts(self.tables, near)
                left = self._excesses(moved, counts, excess)
                if (left.sum(), near) < best[:2]:
                    best = left.sum(), near, moved, left
            if best[0] >= excess.sum():
                return None
            _, choice, counts, excess = best
        return None if excess.any() else choice

    def _excesses(
        self,
        counts: tuple[Floats, Floats],
        base: tuple[Floats, Floats] | None = None,
        known: Floats | None = None,
    ) -> Floats:
        """Return by how much each device exceeds its limit, as a share of the limit; 0 if it fits.

        ``base`` are the counts of another choice and ``known`` its excesses. Given these, only
        devices whose stages differ are computed.
        """
        devices: Iterable[int] = range(len(self.pattern.programs))
        self.turn.spend(self.num_cells / _CELLS)
        found = np.zeros(len(self.pattern.programs))
        if base is not None and known is not None:
            differ = (counts[0] != base[0]).any(axis=(1, 2)) | (counts[1] != base[1]).any(axis=1)
            devices = {self.tables.placement[s] for s in np.flatnonzero(differ)}
            found = known.copy()
        found[list(devices)] = self.cuts.excesses(counts, devices)
        return found

    def _length_ms(self, choice: PlanChoice) -> float:
        self.turn.spend(self.num_cells / _CELLS)
        return self.cuts.length_ms(choice)

    def _most(self) -> tuple[float, Ints]:
        """Return an upper bound of the makespan, and the layers of each run that fit a stage."""
        tables, m = self.tables, self.model.num_microbatches
        d, one_ms = tables.durations, tables.busy_ms
        length = np.array([kind.length for kind in tables.kinds])[None, :, None]
        if self.best is None:
            most_ms = float((d.max(axis=(1, 3)) @ length[0, :, 0]).sum()) * m + 1.0
            return most_ms, np.broadcast_to(length, one_ms.shape)
        most_ms = self.best[0] * (1 + TOLERANCE)
        with np.errstate(divide="ignore"):
            most = np.floor(most_ms / (m * one_ms))
        return most_ms, np.minimum(most, length).astype(np.int64)

    def _most_on_devices(self, most_ms: float) -> dict[tuple[int, int], int]:
        """Return by device and long run the maximum layers within its memory and a makespan.

        A linear program finds each maximum, which is rounded down. The moments of memory that a
        solution violates become rows of the program.
        """
        found: dict[tuple[int, int], int] = {}
        tables, memory, m = self.tables, self.memory, self.model.num_microbatches
        for device, own in enumerate(self.pattern.stages_of):
            if not own:
                continue
            begin, end = memory.first[device], memory.first[device + 1]
            live = memory.counts[begin:end, : len(own)]
            layer_bytes = np.einsum("mac,catk->matk", live, tables.held_bytes[:, list(own)])
            layer_bytes += tables.static_bytes[list(own)][:, :, None]
            use = layer_bytes.reshape(end - begin, -1) / _GIB
            room = (memory.limits[device] - memory.workspace[begin:end]) / _GIB
            shape = layer_bytes.shape[1:]
            lengths = np.array([kind.length for kind in tables.kinds], dtype=np.float64)
            tops = np.broadcast_to(lengths[None, :, None], shape)
            for t in tables.long_runs:
                gain = np.broadcast_to((np.arange(shape[1]) == t)[None, :, None], shape)
                program = LinearProgram(gain.ravel().tolist(), tops.ravel().tolist())
                busy = m * tables.busy_ms[list(own)].ravel()
                program.add_at_most(dict(enumerate(busy.tolist())), most_ms)
                most = self._most_of(program, use, room, gain.ravel())
                found[device, t] = min(most, tables.kinds[t].length)
        return found

    def _most_of(self, program: LinearProgram, use: Floats, room: Floats, gain: Floats) -> int:
        """Return the whole layers of a program's optimum, after adding the rows that it violates.

        Without an optimum the number is very large: HiGHS may have failed.
        """
        most = inf
        for _ in range(_MEMORY_ROWS):
            values = np.array(program.best())
            if not values.any():
                break
            most = min(most, float(values @ gain))
            over = use @ values - room
            worst = int(over.argmax())
            self.turn.spend(use.size / _CELLS)
            if over[worst] <= TOLERANCE * max(1.0, room[worst]):
                break
            program.add_at_most(dict(enumerate(use[worst].tolist())), float(room[worst]))
        return 2**31 if most == inf else int(most + TOLERANCE)

    def run(self) -> None:
        """Add rows at the root, then solve and add until no row is violated or time is over."""
        self._cut_root()
        if self.has_chunks:
            if self._is_ended(self.stop.turn(_FIRST)):
                return
            self._walk(self.stop.turn(_WALK))
        self._is_ended(self.stop)

    def _is_ended(self, stop: Stop) -> bool:
        """Solve and add rows; return whether the search is complete, not whether time is over."""
        self.turn = stop
        for _ in range(_MOST_ROUNDS):
            if self._is_proven:
                return True
            if stop.is_over():
                return False
            outcome = self.rows.solve(stop, integer=True, gap=_LEAST_GAP)
            if outcome.status is MilpStatus.INFEASIBLE:
                self.bound_ms = inf if self.best is None else self.best[0]
                return True
            self.bound_ms = max(self.bound_ms, outcome.bound or 0.0)
            if outcome.values is None:
                return False
            broken = self._add_broken(outcome.values)
            choice = self.v.choice(outcome.values)
            length_ms = self._length_ms(choice)
            if (self.best is None or length_ms < self.best[0]) and self._fits(choice):
                self.best = length_ms, choice
            if not broken:
                return outcome.status is MilpStatus.OPTIMAL
        return False

    def _cut_root(self) -> None:
        recent = [-inf] * _PATIENCE
        self.turn = turn = self.stop.turn(_ROOT)
        for _ in range(_ROUNDS):
            stalls = self.bound_ms <= recent.pop(0) * (1 + _LEAST_GAP)
            if turn.is_over() or self._is_proven or stalls:
                return
            recent.append(self.bound_ms)
            outcome = self.rows.solve(turn, integer=False)
            if outcome.status is MilpStatus.INFEASIBLE:
                self.bound_ms = inf
            if outcome.values is None or outcome.bound is None:
                return
            self.bound_ms = max(self.bound_ms, outcome.bound)
            if not self._add_broken(outcome.values):
                return

    @property
    def _is_proven(self) -> bool:
        return self.best is not None and self.bound_ms >= self.best[0] * (1 - _LEAST_GAP)

    def _fits(self, choice: PlanChoice) -> bool:
        return not self._excesses(as_counts(self.tables, choice)).any()

    def _add_broken(self, values: dict[Variable, float]) -> bool:
        """Add the rows that a solution violates; return whether there are any."""
        layers = np.array(
            [[[values[one] for one in row] for row in runs] for runs in self.v.layers]
        )
        modes = np.array([[values[one] for one in row] for row in self.v.mode])
        rows = []
        self.turn.spend(2 * self.num_cells / _CELLS)
        for device in range(len(self.pattern.programs)):
            over = excess(self.memory, layers, modes, device)
            if over.size and over.max() > TOLERANCE:
                fullest = self.pattern.moments[device][int(over.argmax())]
                if (device, fullest) not in self.known:
                    self.known.add((device, fullest))
                    rows.append(memory_fits(self.v, device, fullest))
        durations = np.array([[max(0.0, values[one]) for one in row] for row in self.v.durations])
        said_ms = values[self.v.makespan]
        places = [durations]
        if self.best is not None and self.has_chunks:
            inside = durations_of(self.tables, self.best[1])
            places.append((1 - _INWARD) * durations + _INWARD * inside)
        paths = [path for place in places for path in self.pattern.longest_paths(place)]
        # Several devices may be on one path, and both points may give it.
        different = {(path.counts.tobytes(), path.constant_ms): path for path in paths}
        rows += [
            makespan_is_no_shorter(self.v, path)
            for path in different.values()
            if path.length_of(durations) > said_ms * (1 + TOLERANCE) + 1e-9
        ]
        for row in rows:
            self.rows.add(row)
        return bool(rows)

    def result(self) -> PatternPlan | float:
        """Return the best choice as a problem and its programs, or the bound."""
        if self.best is None:
            return self.bound_ms
        path_ms, choice = self.best
        names = tuple(self.tables.names[k] for k in choice.modes)
        problem = self.model.problem(self.tables.placement, choice.sizes)
        programs = _programs(self.pattern, problem, names)
        try:
            schedule = evaluate(
                problem, programs, Provenance(method=f"plan-milp {self.pattern.name}")
            )
        except IllegalScheduleError:  # a host is full: the model knows none
            return self.bound_ms
        same = abs(schedule.makespan_ms - path_ms) <= 1e-9 * path_ms
        what = (
            "passes that hide nothing wait for each other"
            if self.pattern.has_pairs
            else ("transfers that move nothing wait for their lane")
        )
        return PatternPlan(
            pattern=self.pattern.name,
            sizes=choice.sizes,
            modes=names,
            path_ms=path_ms,
            problem=problem,
            programs=programs,
            objective_ms=schedule.makespan_ms,
            bound_ms=min(self.bound_ms, path_ms),
            difference="" if same else f"{what} in the pattern, not in the schedule",
        )


def _neighbours(choice: PlanChoice, tables: PlanTables, stages: set[int]) -> Iterator[PlanChoice]:
    """Yield the choices with another mode of one of ``stages``, or one layer moved from it."""
    for s in sorted(stages):
        for k in range(len(tables.names)):
            if k != choice.modes[s] and tables.may_use(s, k):
                yield choice._replace(modes=(*choice.modes[:s], k, *choice.modes[s + 1 :]))
        for sizes in cuts_with_a_layer_moved(choice.sizes, [s]):
            yield choice._replace(sizes=sizes)


def _programs(pattern: Pattern, problem: Problem, names: tuple[str, ...]) -> Programs:
    """Return the pattern's programs with the actions that the modes need, with mode numbers.

    Passes that the problem does not allow in a pair run one after the other.
    """
    chosen = []
    for menu, name in zip(problem.menus, names, strict=True):
        chosen.append(next((n for n, mode in enumerate(menu) if mode.name == name), 0))
    modes = [menu[number] for menu, number in zip(problem.menus, chosen, strict=True)]

    def is_asked(action: Action) -> bool:
        mode = modes[action.stage]
        if action.type is ActionType.RECOMPUTE:
            return mode.recompute == "apart"
        moves = action.type.is_transfer or action.type is ActionType.RELEASE
        return not moves or mode.offload_bytes > 0

    return tuple(
        tuple(
            action._replace(
                mode=chosen[action.stage]
                if action.type is ActionType.FORWARD and problem.stages[action.stage].modes
                else action.mode,
                paired=action.paired
                and (before.stage, action.stage, action.type.value) in problem.hidden_ms,
            )
            for before, action in zip((*program[:1], *program), program, strict=False)
            if is_asked(action)
        )
        for program in pattern.programs
    )
