"""Why each action starts when it does: the one thing that it waited for last.

The simulator starts everything as soon as possible, so every start is 0 or the end of something
else, plus the time on a link where data crosses one; the same floats, not merely close ones.
"""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from optpipe.action import Action, ActionType
from optpipe.explain.lanes import lanes_of
from optpipe.precedence import input_of, pass_of, transit_ms

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.explain.lanes import Lane
    from optpipe.precedence import Pass
    from optpipe.problem import Problem
    from optpipe.simulate import Simulation, Times

__all__ = ["Reason", "Reasons", "Spot", "Why"]


_TRANSFERS = frozenset({ActionType.OFFLOAD, ActionType.RELOAD})


class Why(StrEnum):
    """What an action waited for."""

    PROGRAM = "the action before it in its program"
    INPUT = "the output of another stage"
    TRANSFER = "its transfer"
    LANE = "a transfer before it on its lane"
    QUEUE = "its lane"


class Spot(NamedTuple):
    """Where an action stands: ``programs[device][cell]``."""

    device: int
    cell: int


class Reason(NamedTuple):
    """What an action waited for, and where that stands."""

    why: Why
    spot: Spot


class Reasons:
    """The reasons of all starts of one simulation of legal programs."""

    def __init__(self, problem: Problem, programs: Programs, run: Simulation) -> None:
        self._problem = problem
        self._programs = programs
        self._run = run
        self._passes: dict[Pass, Spot] = {}
        self._transfers: dict[Action, Spot] = {}
        self._before: list[list[int]] = []
        for device, program in enumerate(programs):
            self._before.append(self._read(device, program))

    def action(self, spot: Spot) -> Action:
        """Return the action that stands there."""
        return self._programs[spot.device][spot.cell]

    def times(self, spot: Spot) -> Times:
        """Return when it happens."""
        return self._run.times[spot.device][spot.cell]

    def compute_cells(self, device: int) -> list[int]:
        """Return where the actions of a device's compute lane stand, RELEASE included."""
        program = self._programs[device]
        return [cell for cell, action in enumerate(program) if action.type not in _TRANSFERS]

    def of(self, spot: Spot) -> Reason | None:
        """Return why the action there starts no earlier; None where it starts with the clock.

        Of several reasons at once the first of these: its own program, the output of another
        stage, its transfer. A transfer that waits has the one that left its lane last as reason;
        QUEUE, with the action that issued it, where rounding hides which one that was.
        """
        at = self.times(spot)
        before = self._before[spot.device][spot.cell]
        if at.start == at.issue:
            return Reason(Why.PROGRAM, Spot(spot.device, before)) if before >= 0 else None
        action = self.action(spot)
        if action.type.is_transfer:
            ahead = self._ahead_of(spot, action)
            if ahead is not None:
                return Reason(Why.LANE, ahead)
            return Reason(Why.QUEUE, Spot(spot.device, before))
        source = self.input_spot(action)
        if source is not None and self._arrival(source, action) == at.start:
            return Reason(Why.INPUT, source)
        return Reason(Why.TRANSFER, self._transfers[_awaited(action)])

    def input_spot(self, action: Action) -> Spot | None:
        """Return where the pass stands whose output an action needs."""
        needed = input_of(action, len(self._problem.stages))
        return None if needed is None else self._passes[needed]

    def _arrival(self, source: Spot, action: Action) -> float:
        made = pass_of(self.action(source))
        if made is None:
            raise AssertionError(f"{self.action(source)} has no output")
        return self.times(source).end + transit_ms(self._problem, made, action)

    def _read(self, device: int, program: tuple[Action, ...]) -> list[int]:
        """Note where passes and transfers stand; return what precedes each on the compute lane."""
        before, last = [], -1
        for cell, action in enumerate(program):
            before.append(last)
            if action.type in _TRANSFERS:
                self._transfers[action] = Spot(device, cell)
                continue
            last = cell
            made = pass_of(action)
            if made is not None:
                self._passes[made] = Spot(device, cell)
        return before

    @cached_property
    def _ended(self) -> dict[tuple[Lane, float], list[Spot]]:
        """What left a lane when; asked for only where a transfer waited on the critical path."""
        ended: dict[tuple[Lane, float], list[Spot]] = defaultdict(list)
        for spot in sorted(self._transfers.values()):
            for lane in lanes_of(self._problem, spot.device, self.action(spot).type):
                ended[lane, self.times(spot).end].append(spot)
        return ended

    def _ahead_of(self, spot: Spot, action: Action) -> Spot | None:
        """Return what left a lane of this transfer at the moment it started.

        Only what began earlier counts: a transfer so short that it takes no time in floats could
        else be its own reason.
        """
        start = self.times(spot).start
        for lane in lanes_of(self._problem, spot.device, action.type):
            for other in self._ended.get((lane, start), ()):
                if self.times(other).start < start:
                    return other
        return None


def _awaited(action: Action) -> Action:
    kind = ActionType.OFFLOAD if action.type is ActionType.RELEASE else ActionType.RELOAD
    return action._replace(type=kind)
