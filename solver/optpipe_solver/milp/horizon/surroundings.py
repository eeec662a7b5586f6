"""From programs and a cut before and behind every device's window to a `Context`."""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe.memory import memory_walk, recomputed
from optpipe.precedence import input_of, pass_of, transit_ms
from optpipe.simulate import duration_ms, simulate
from optpipe_solver.milp.horizon.context import Context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.action import Program, Programs
    from optpipe.precedence import Pass
    from optpipe.problem import Problem
    from optpipe.simulate import Times
    from optpipe_solver.milp.horizon.context import Cell

__all__ = ["Surroundings"]

_BACKWARD = (ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD)


class Surroundings:
    """Legal programs with their times, from which any number of windows can be cut.

    ``after[action]`` is the longest path in ms from an action's start to the end of the schedule,
    less the device's first start where the objective is the span. On lanes that several devices
    share nothing queues here: a relaxation, for the order on them depends on timing.
    """

    def __init__(self, problem: Problem, programs: Programs) -> None:
        self.problem = problem
        self.programs = programs
        run = simulate(problem, programs)
        self.objective_ms = run.objective_ms(problem.objective)
        self.times = run.times
        self.at = {
            action: times
            for program, row in zip(programs, run.times, strict=True)
            for action, times in zip(program, row, strict=True)
        }
        self.position = {a: at for program in programs for at, a in enumerate(program)}
        self.maker = {made: action for action in self.at if (made := pass_of(action)) is not None}
        self.again = [recomputed(program) for program in programs]
        self.after = self._paths()

    def first_start(self, device: int) -> float:
        """Return where the clock of the objective starts on a device, in ms."""
        if self.problem.objective == "makespan":
            return 0.0
        return min((times.start for times in self.times[device]), default=0.0)

    def cut_at(self, time_ms: float) -> list[int]:
        """Return per device how many actions stand before a moment.

        What starts before it never waits for what does not, so every cut leaves a prefix that is
        complete in itself.
        """
        return [
            _first_from(program, row, time_ms)
            for program, row in zip(self.programs, self.times, strict=True)
        ]

    def closed(self, cut: Sequence[int]) -> list[int]:
        """Return the cut, moved back so far that every device's first action stands before it."""
        moved = [max(at, min(1, len(row))) for at, row in zip(cut, self.programs, strict=True)]
        todo = [(device, index) for device, at in enumerate(moved) for index in range(at)]
        while todo:
            device, index = todo.pop()
            needed = self._needs(self.programs[device][index])
            if needed is None:
                continue
            holder = self.problem.stages[needed.stage].device
            todo += [(holder, at) for at in range(moved[holder], self.position[needed] + 1)]
            moved[holder] = max(moved[holder], self.position[needed] + 1)
        return moved

    def context(
        self, low: Sequence[int], high: Sequence[int], frozen: frozenset[int] = frozenset()
    ) -> Context:
        """Return what surrounds the actions from ``low`` to ``high`` of each device."""
        return _Cut(self, low, high).context(frozen)

    def _needs(self, action: Action) -> Action | None:
        needed = input_of(action, len(self.problem.stages))
        return None if needed is None else self.maker[needed]

    def _paths(self) -> dict[Action, float]:
        behind = self._successors()
        graph = {action: [b for b, _ in follow] for action, follow in behind.items()}
        after: dict[Action, float] = {}
        for action in TopologicalSorter(graph).static_order():
            rest = max((delay + after[b] for b, delay in behind[action]), default=self.end(action))
            after[action] = self._length(action) + max(rest, self.end(action))
        return after

    def end(self, action: Action) -> float:
        """Return what an action's end itself adds to the objective: the reduction behind it."""
        stage = self.problem.stages[action.stage]
        last = action.type in (ActionType.BACKWARD_WEIGHT, ActionType.FULL_BACKWARD)
        return (stage.grad_sync_ms if last else 0.0) - self.first_start(stage.device)

    def _length(self, action: Action) -> float:
        return duration_ms(self.problem, action)

    def _successors(self) -> dict[Action, list[tuple[Action, float]]]:
        """Return what starts only after an action's end, and the ms between."""
        behind: dict[Action, list[tuple[Action, float]]] = {action: [] for action in self.at}
        for program in self.programs:
            for a, b in _waits(program):
                behind[a].append((b, 0.0))
        for action in self.at:
            needed = input_of(action, len(self.problem.stages))
            if needed is not None:
                delay = transit_ms(self.problem, needed, action)
                behind[self.maker[needed]].append((action, delay))
        return behind


def _first_from(program: Program, row: Sequence[Times], time_ms: float) -> int:
    for index, (action, times) in enumerate(zip(program, row, strict=True)):
        if not action.type.is_transfer and times.start >= time_ms:
            return index
    return len(program)


def _waits(program: Program) -> list[tuple[Action, Action]]:
    """Return the pairs of one program of which the second starts after the end of the first."""
    pairs: list[tuple[Action, Action]] = []
    last: dict[str, Action] = {}
    transfers: dict[Action, Action] = {}
    for action in program:
        lane = action.type.value if action.type.is_transfer else "compute"
        pairs += [(last[name], action) for name in {lane: 0, "compute": 0} if name in last]
        last[lane] = action
        stage, kind, j = action
        if action.type.is_transfer:
            transfers[action] = action
        awaited = Action(
            stage,
            ActionType.OFFLOAD if kind is ActionType.RELEASE else ActionType.RELOAD,
            j,
        )
        if (kind is ActionType.RELEASE or kind.is_backward) and awaited in transfers:
            pairs.append((awaited, action))
    return pairs


class _Cut:
    def __init__(self, around: Surroundings, low: Sequence[int], high: Sequence[int]) -> None:
        self.around = around
        self.problem = around.problem
        self.low = low
        self.high = high

    def context(self, frozen: frozenset[int]) -> Context:
        around, devices = self.around, range(len(self.problem.devices))
        window = tuple(around.programs[d][self.low[d] : self.high[d]] for d in devices)
        cells = sorted({(a.stage, a.microbatch) for row in window for a in row})
        device_tails = tuple(self._device_tail(d) for d in devices)
        return Context(
            window=window,
            prefix=tuple(around.programs[d][: self.low[d]] for d in devices),
            suffix=tuple(around.programs[d][self.high[d] :] for d in devices),
            heads=dict(item for cell in cells for item in self._heads(cell)),
            tails=dict(item for cell in cells for item in self._tails(cell, device_tails)),
            ready=tuple(self._ready(d) for d in devices),
            lane_free=dict(item for d in devices for item in self._lanes_free(d)),
            copied=dict(item for cell in cells for item in self._copied(cell)),
            held_bytes=tuple(self._held(d) for d in devices),
            lane_tails=dict(item for d in devices for item in self._lane_tails(d)),
            device_tails=device_tails,
            recomputed=frozenset(cell for again in around.again for cell in again),
            ends_bound=(True,) * len(devices),
            frozen=frozen,
        )

    def _where(self, action: Action) -> int:
        """Return -1, 0, 1 for prefix, window, suffix; 2 where there is no such action."""
        at = self.around.position.get(action)
        device = self.problem.stages[action.stage].device
        if at is None:
            return 2
        return -1 if at < self.low[device] else int(at >= self.high[device])

    def _ready(self, device: int) -> float:
        ends = [
            times.end
            for action, times in zip(
                self.around.programs[device][: self.low[device]],
                self.around.times[device],
                strict=False,
            )
            if not action.type.is_transfer
        ]
        return ends[-1] if ends else 0.0

    def _lanes_free(self, device: int) -> list[tuple[tuple[int, ActionType], float]]:
        free: dict[tuple[int, ActionType], float] = {}
        for action in self.around.programs[device][: self.low[device]]:
            if action.type.is_transfer:
                free[device, action.type] = self.around.at[action].end
        return list(free.items())

    def _lane_tails(self, device: int) -> list[tuple[tuple[int, ActionType], float]]:
        tails: dict[tuple[int, ActionType], float] = {}
        for action in self.around.programs[device][self.high[device] :]:
            if action.type.is_transfer:
                tails.setdefault((device, action.type), self.around.after[action])
        return list(tails.items())

    def _held(self, device: int) -> int:
        if self.low[device] == 0:
            return self.problem.static_bytes_of(device)
        walk = memory_walk(self.problem, device, self.around.programs[device])
        return walk[self.low[device] - 1].after

    def _device_tail(self, device: int) -> float:
        """Return what follows the window's last compute action on its own device."""
        tail = -self.around.first_start(device)
        for action in self.around.programs[device][self.high[device] :]:
            tail = max(tail, self.around.after[action])
            if not action.type.is_transfer:
                break
        return tail

    def _heads(self, cell: Cell) -> list[tuple[Action, float]]:
        stage, j = cell
        heads = []
        for kind in (ActionType.FORWARD, *_BACKWARD):
            action = Action(stage, kind, j)
            needed = input_of(action, len(self.problem.stages))
            ends = [0.0]
            if needed is not None:
                ends += self._end_of_input(needed, action)
            reload = Action(stage, ActionType.RELOAD, j)
            if kind in _BACKWARD and self._where(reload) == -1:
                ends.append(self.around.at[reload].end)
            heads.append((action, max(ends)))
        heads += [(Action(stage, ActionType.RELOAD, j), end) for _, end in self._copied(cell)]
        return heads

    def _end_of_input(self, needed: Pass, action: Action) -> list[float]:
        maker = self.around.maker[needed]
        if self._where(maker) != -1:
            return []
        return [self.around.at[maker].end + transit_ms(self.problem, needed, action)]

    def _copied(self, cell: Cell) -> list[tuple[Cell, float]]:
        away = Action(cell[0], ActionType.OFFLOAD, cell[1])
        release = Action(cell[0], ActionType.RELEASE, cell[1])
        if self._where(away) == -1 and self._where(release) == 0:
            return [(cell, self.around.at[away].end)]
        return []

    def _tails(self, cell: Cell, device_tails: tuple[float, ...]) -> list[tuple[Action, float]]:
        stage, j = cell
        own = device_tails[self.problem.stages[stage].device]
        tails = []
        for kind in ActionType:
            action = Action(stage, kind, j)
            if kind in (ActionType.OFFLOAD, ActionType.RELOAD):
                tails += self._transfer_tail(action, own)
            elif kind is not ActionType.RELEASE:
                tails.append((action, max(own, self.around.end(action), *self._readers(action))))
        return tails

    def _readers(self, action: Action) -> list[float]:
        """Return what follows because others need this action's output."""
        made = pass_of(action)
        if made is None:
            return [float("-inf")]
        stage, j = action.stage, action.microbatch
        if made.backward:
            consumers = [Action(stage - 1, kind, j) for kind in _BACKWARD]
        elif stage == len(self.problem.stages) - 1:
            consumers = [Action(stage, kind, j) for kind in _BACKWARD]
        else:
            consumers = [Action(stage + 1, ActionType.FORWARD, j)]
        return [float("-inf")] + [
            transit_ms(self.problem, made, consumer) + self.around.after[consumer]
            for consumer in consumers
            if consumer.stage >= 0 and self._where(consumer) == 1
        ]

    def _transfer_tail(self, transfer: Action, own: float) -> list[tuple[Action, float]]:
        """Return what waits behind the window for a transfer of it, if anything does."""
        stage, kind, j = transfer
        if kind is ActionType.OFFLOAD:
            awaiting = [Action(stage, ActionType.RELEASE, j)]
        else:
            awaiting = [Action(stage, backward, j) for backward in _BACKWARD]
        tails = [self.around.after[a] for a in awaiting if self._where(a) == 1]
        reload = Action(stage, ActionType.RELOAD, j)
        if kind is ActionType.OFFLOAD and self._where(reload) == 1 and not tails:
            tails.append(own)
        return [(transfer, max(tails))] if tails else []
