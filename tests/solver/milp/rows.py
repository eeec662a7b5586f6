"""Legal programs as a solution of the full-horizon model, and the rows that a solution breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe import Action, ActionType, simulate
from optpipe.memory import host_walk
from optpipe_solver.milp.highs import MilpModel, Variable, value_of
from optpipe_solver.milp.horizon.items import HorizonChoice

if TYPE_CHECKING:
    from optpipe import Problem, Programs
    from optpipe.simulate import Times
    from optpipe_solver.milp.horizon.constraints import HorizonVariables
    from optpipe_solver.milp.horizon.items import HorizonItem


def shares_lanes(problem: Problem) -> bool:
    """Whether transfers of different devices or directions compete (the model is then relaxed)."""
    return any(d.half_duplex or d.pcie_group is not None for d in problem.devices)


def broken(model: MilpModel, values: dict[Variable, float]) -> list[str]:
    """The constraints and bounds of a model that a solution breaks."""
    found = [
        str(constraint) for constraint in model.constraints if value_of(constraint, values) < -1e-6
    ]
    for variable in model.problem.variables():
        low, high = variable.lowBound, variable.upBound
        if not low - 1e-6 <= values[variable] <= high + 1e-6:
            found.append(f"{variable} = {values[variable]} outside {low} .. {high}")
    return found


def relabelled(programs: Programs) -> Programs:
    """Return the programs with micro-batches renamed so that stage 0 runs them in order.

    Micro-batches are identical, so this changes nothing but names.
    """
    firsts = [
        action.microbatch
        for program in programs
        for action in program
        if action.stage == 0 and action.type is ActionType.FORWARD
    ]
    rename = {old: new for new, old in enumerate(firsts)}
    return tuple(
        tuple(Action(a.stage, a.type, rename[a.microbatch]) for a in program)
        for program in programs
    )


def values_of(v: HorizonVariables, programs: Programs) -> dict[Variable, float] | None:
    """Return a full assignment, or None where the model excludes these programs.

    That is so where the model is restricted to first-in-first-out and the programs are not, or
    where they use a choice that the model knows to be pointless.
    """
    reading = _Reading(v, relabelled(programs))
    if not reading.is_allowed():
        return None
    return reading.values()


class _Reading:
    def __init__(self, v: HorizonVariables, programs: Programs) -> None:
        self.v = v
        self.programs = programs
        run = simulate(v.problem, programs)
        self.length = run.objective_ms(v.problem.objective)
        self.at: dict[Action, Times] = {}
        self.position: dict[Action, int] = {}
        for program, row in zip(programs, run.times, strict=True):
            for index, (action, times) in enumerate(zip(program, row, strict=True)):
                self.at[action] = times
                self.position[action] = index

    def is_allowed(self) -> bool:
        if not all(self._is_known(action) for row in self.programs for action in row):
            return False
        rows = self.v.items.by_device
        return not any(
            self.v.items.implied(b, a) and self._stands_before(a, b)
            for row in rows
            for a in row
            for b in row
            if a is not b
        )

    def _is_known(self, action: Action) -> bool:
        if action.type in (ActionType.OFFLOAD, ActionType.RELEASE):
            return self.v.items.has((action.stage, action.microbatch), action.type)
        return action in self.v.items.of_action

    def values(self) -> dict[Variable, float]:
        v = self.v
        values: dict[Variable, float] = {v.length: self.length}
        for (choice, s, j), variable in v.choice.items():
            values[variable] = float(self._made(choice, s, j))
        for item, variable in v.start.items():
            values[variable] = self._start(item)
        for (a, b), variable in v.order.items():
            values[variable] = float(self._stands_before(a, b))
        for ((s, j), item), variable in v.released.items():
            release = self.position.get(Action(s, ActionType.RELEASE, j))
            at = self.position.get(item.action)
            values[variable] = float(release is not None and at is not None and release < at)
        for (cell, item), variable in v.checkpointed.items():
            forward = v.items.of_action[Action(cell[0], ActionType.FORWARD, cell[1])]
            kept = self._made(HorizonChoice.RECOMPUTED, *cell)
            values[variable] = float(kept and self._stands_before(forward, item))
        values.update(self._transfers())
        values.update(self._host())
        for device, variable in enumerate(v.first_start):
            starts = [self.at[action].start for action in self.programs[device]]
            values[variable] = min(starts, default=0.0)
        return values

    def _transfers(self) -> dict[Variable, float]:
        v = self.v
        values = {}
        for (s, j), variable in v.d2h.items():
            away = self.at.get(Action(s, ActionType.OFFLOAD, j))
            forward = self.at[Action(s, ActionType.FORWARD, j)]
            values[variable] = max(forward.end, _low(variable)) if away is None else away.start
        for (s, j), variable in v.h2d.items():
            back = self.at.get(Action(s, ActionType.RELOAD, j))
            values[variable] = _low(variable) if back is None else back.start
        for (x, y), variable in v.lane.items():
            first, second = self.at.get(x), self.at.get(y)
            both = first is not None and second is not None
            values[variable] = float(bool(both and first.start <= second.start))  # type: ignore[union-attr]
        return values

    def _host(self) -> dict[Variable, float]:
        v = self.v
        values: dict[Variable, float] = {}
        for (other, cell), gone in v.host_after.items():
            x, y = (Action(c[0], ActionType.OFFLOAD, c[1]) for c in (other, cell))
            values[gone] = values[v.on_host[other, cell]] = 0.0
            if x in self.position and y in self.position and self.position[x] < self.position[y]:
                left = self._backward_position(other) < self.position[y]
                values[gone] = float(left)
                values[v.on_host[other, cell]] = float(not left)
        for device, peak in v.host_peaks.items():
            most = max(host_walk(v.problem, self.programs[device]), default=0)
            values[peak] = most / v.host_unit
        return values

    def _backward_position(self, cell: tuple[int, int]) -> int:
        kinds = (ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD)
        return min(
            self.position[Action(cell[0], kind, cell[1])]
            for kind in kinds
            if Action(cell[0], kind, cell[1]) in self.position
        )

    def _made(self, choice: HorizonChoice, s: int, j: int) -> bool:
        kind = {
            HorizonChoice.FUSED: ActionType.FULL_BACKWARD,
            HorizonChoice.SPLIT: ActionType.BACKWARD_INPUT,
            HorizonChoice.OFFLOADED: ActionType.RELOAD,
            HorizonChoice.RECOMPUTED: ActionType.RECOMPUTE,
        }[choice]
        return Action(s, kind, j) in self.position

    def _start(self, item: HorizonItem) -> float:
        times = self.at.get(item.action)
        if times is None:
            return item.earliest
        return times.issue if item.action.type is ActionType.RELOAD else times.start

    def _stands_before(self, a: HorizonItem, b: HorizonItem) -> bool:
        first, second = self.position.get(a.action), self.position.get(b.action)
        return first is not None and second is not None and first < second


def _low(variable: Variable) -> float:
    return float(variable.lowBound)
