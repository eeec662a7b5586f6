"""Programs of a way through the states of `journeys`, all devices kept.

A state names no micro-batch: equal ones are interchangeable. Here each keeps its number all along,
and what an event asks for is looked up by rank. Copies are what states relax, so they are said in
full again: an OFFLOAD follows its F, a RELEASE stands before the first action that needs its bytes,
oldest OFFLOAD first. The programs keep the memory limit of every device (a state counts the same
bytes); where copies of a device are not each other's equal, a host is full or a lane is shared they
may take longer than the state says, or break a rule: whoever offers them asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import Action, ActionType
from optpipe_solver.exact.journey_kernel import (
    DROP,
    FUSED,
    GRADIENT,
    RECOMPUTE,
    RELOAD,
    SEND,
    WEIGHT,
    advance,
    make_desk,
    make_state,
    needs,
    start_of,
    survey,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.exact.road import Road

    Event = tuple[int, int, int]

__all__ = ["programs_of"]

_TYPES = {
    GRADIENT: ActionType.BACKWARD_INPUT,
    FUSED: ActionType.FULL_BACKWARD,
    WEIGHT: ActionType.BACKWARD_WEIGHT,
    RELOAD: ActionType.RELOAD,
    RECOMPUTE: ActionType.RECOMPUTE,
}


def programs_of(problem: Problem, road: Road, ways: Iterable[int]) -> Programs:
    """Return the programs of all events on a way, first to last; ``road`` keeps all devices."""
    rows = [_Row(problem, device) for device in range(len(problem.devices))]
    for event in _events(problem, road, ways):
        s = event[2]
        rows[problem.stages[s].device].add(event, needs(road, event[0], s))
    return tuple(tuple(row.actions) for row in rows)


def _events(problem: Problem, road: Road, ways: Iterable[int]) -> Iterable[Event]:
    """Yield the events with numbers of micro-batches that stay, instead of ranks."""
    size = problem.num_microbatches, len(road.forward), len(road.room)
    state, new, desk = make_state(*size), make_state(*size), make_desk(*size[1:])
    inputs = 1 + 3 * len(road.room)
    state.times[inputs:] = road.head
    for way in ways:
        rank, s, kind = way // 64, way // 8 % 8, way % 8
        j = int(np.lexsort((state.times[inputs:], state.codes))[rank])
        event = kind, j, s
        yield event
        survey(road, state, desk)
        advance(road, state, event, start_of(road, state, desk, event), new)
        state, new = new, state


class _Row:
    """The program of one device as it grows, with the bytes it holds."""

    def __init__(self, problem: Problem, device: int) -> None:
        self.problem = problem
        self.room = problem.devices[device].usable_bytes - problem.static_bytes_of(device)
        self.actions: list[Action] = []
        self.held = 0
        self.leaving: list[tuple[int, int]] = []
        self.waiting: dict[int, list[int]] = {s: [] for s in problem.stages_of[device]}

    def add(self, event: Event, needed: int) -> None:
        """Write an event down, behind the RELEASEs that make room for what it needs."""
        kind, j, s = event
        while self.leaving and (
            self.held + needed > self.room or (kind == RELOAD and (s, j) in self.leaving)
        ):
            self._release()
        if kind <= DROP:
            self._forward(kind, j, s)
            return
        if kind == GRADIENT:
            self.waiting[s].append(j)
        elif kind == WEIGHT:
            j = self.waiting[s].pop(0)
        self.actions.append(Action(s, _TYPES[kind], j))
        self.held += self._added(kind, s)

    def _forward(self, kind: int, j: int, s: int) -> None:
        stage = self.problem.stages[s]
        self.actions.append(Action(s, ActionType.FORWARD, j))
        self.held += (stage.checkpoint_bytes or 0) if kind == DROP else stage.activation_bytes
        if kind == SEND:
            self.actions.append(Action(s, ActionType.OFFLOAD, j))
            self.leaving.append((s, j))

    def _release(self) -> None:
        s, j = self.leaving.pop(0)
        self.actions.append(Action(s, ActionType.RELEASE, j))
        self.held -= self.problem.stages[s].offload_bytes

    def _added(self, kind: int, s: int) -> int:
        """Return the bytes held after an event that is no F, less those before."""
        stage = self.problem.stages[s]
        if kind == GRADIENT:
            return stage.weight_context_bytes - stage.activation_bytes
        if kind == FUSED:
            return -stage.activation_bytes
        if kind == WEIGHT:
            return -stage.weight_context_bytes
        if kind == RELOAD:
            return stage.offload_bytes
        return stage.activation_bytes - (stage.checkpoint_bytes or 0)
