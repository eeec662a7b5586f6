"""Sends and receives put into programs, in one order that no executor can get stuck in.

A schedule's programs hold no communication: torch's runtime places its own. Others want it written
out. Here everything that happens is put into one line, *the joint order*: each pass after what it
needs and after what stands before it in its program, each exchange between the pass that makes the
tensor and the one that needs it. A device's row is its part of that line.

No deadlock, whatever the sizes of buffers: let every send and receive wait for its partner, and let
devices follow their rows. The first event of the joint order that has not happened yet stands at
the head of the row of everyone who takes part in it, since all earlier ones have happened; so it
can happen. By the same line, both ends of every pair of devices have its exchanges in one order.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal, NamedTuple

from optpipe.action import Action, ActionType
from optpipe.precedence import Pass, input_of, pass_of
from optpipe.simulate import duration_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.simulate import Simulation, Times

__all__ = ["Event", "Exchange", "Turn", "blocking_ms", "joint_order", "rows_of"]


class Turn(NamedTuple):
    """An action on its device."""

    device: int
    action: Action


class Exchange(NamedTuple):
    """A tensor on its way: the output of a forward, or with ``backward`` an input gradient.

    ``stage`` is that of the pass that made it; it goes from device ``source`` to ``target``.
    """

    backward: bool
    stage: int
    microbatch: int
    source: int
    target: int


Event = Turn | Exchange


def joint_order(
    problem: Problem,
    programs: Programs,
    run: Simulation,
    *,
    by: Literal["start", "end"],
    early_activations: bool,
    early_gradients: bool,
) -> list[Event]:
    """Return all events of legal programs in one line.

    Parameters
    ----------
    run
        The programs' simulation.
    by
        By which simulated time actions stand in the line, where they are free to.
    early_activations, early_gradients
        Whether an exchange stands where the tensor is made: before all that is later than that
        moment. If not, where it is needed: an activation before all that is not earlier than the
        forward, a gradient right before the backward.
    """
    return _Line(problem, programs, run, by, (early_activations, early_gradients)).events()


def rows_of(line: Sequence[Event], num_devices: int) -> list[list[Action | Exchange]]:
    """Return each device's part of the line; an exchange stands in both rows."""
    rows: list[list[Action | Exchange]] = [[] for _ in range(num_devices)]
    for event in line:
        if isinstance(event, Turn):
            rows[event.device].append(event.action)
        else:
            rows[event.source].append(event)
            rows[event.target].append(event)
    return rows


def blocking_ms(problem: Problem, line: Sequence[Event]) -> float:
    """Return how long the line takes where every send and receive holds up both devices, in ms.

    Both wait for each other and for the transfer's end, as ``torch.distributed.send`` on NCCL's
    stream makes the compute stream wait. Gradients are reduced after everything else. Lines with
    offload are not for this.
    """
    clock = [0.0] * len(problem.devices)
    first: dict[int, float] = {}
    for event in line:
        if isinstance(event, Turn):
            first.setdefault(event.device, clock[event.device])
            clock[event.device] += duration_ms(problem, event.action)
            continue
        boundary = problem.boundary_ms[min(event.stage, _next_stage(event))]
        met = max(clock[event.source], clock[event.target]) + boundary[event.backward]
        clock[event.source] = clock[event.target] = met
    for device in first:
        clock[device] += sum(
            problem.stages[stage].grad_sync_ms for stage in problem.stages_of[device]
        )
    return max(clock) - min(first.values(), default=0.0)


def _next_stage(exchange: Exchange) -> int:
    return exchange.stage - 1 if exchange.backward else exchange.stage + 1


class _Line:
    """The line as it grows: what is ready waits in a heap, by time.

    At equal times exchanges go first, then backwards: so a gradient, which is fetched right before
    the backward that needs it, leaves before the device that made it turns to a forward.
    """

    def __init__(
        self,
        problem: Problem,
        programs: Programs,
        run: Simulation,
        by: Literal["start", "end"],
        early: tuple[bool, bool],
    ) -> None:
        self._placement = problem.placement
        self._programs = programs
        self._times = run.times
        self._by = by
        self._early = early
        self._heads = [0] * len(programs)
        self._done: set[Pass] = set()
        self._ended: dict[Pass, float] = {}
        self._waiting: dict[Pass, int] = {}
        self._ready: list[tuple[float, int, Event]] = []
        self._line: list[Event] = []

    def events(self) -> list[Event]:
        for device in range(len(self._programs)):
            self._look_at(device)
        while self._ready:
            moment, _, event = heapq.heappop(self._ready)
            if isinstance(event, Turn):
                self._take(event, moment)
            else:
                self._line.append(event)
                if self._early[event.backward]:
                    self._finish(Pass(event.backward, event.stage, event.microbatch))
        return self._line

    def _look_at(self, device: int) -> None:
        """Put the next action of a device into the heap, if what it needs is done."""
        index = self._heads[device]
        if index == len(self._programs[device]):
            return
        action = self._programs[device][index]
        needed = input_of(action, len(self._placement))
        if needed is not None and needed not in self._done:
            self._waiting[needed] = device
            return
        moment = self._moment(action, self._times[device][index], needed)
        heapq.heappush(
            self._ready, (moment, 1 + (not action.type.is_backward), Turn(device, action))
        )
        exchange = None if needed is None else _exchange(self._placement, needed)
        if exchange is not None and not (exchange.backward or self._early[0]):
            heapq.heappush(self._ready, (moment, 0, exchange))

    def _moment(self, action: Action, at: Times, needed: Pass | None) -> float:
        """Return when the device deals with an action.

        By start: when it has come to the action and what it needs is made, if not yet here; the
        transfer is to stand at the same place. A transfer to or from the host counts when it is
        enqueued.
        """
        if action.type.is_transfer:
            return at.issue
        if self._by == "end" and action.type is not ActionType.RELEASE:
            return at.end
        return at.start if needed is None else max(at.issue, self._ended[needed])

    def _take(self, turn: Turn, moment: float) -> None:
        device, action = turn
        at = self._times[device][self._heads[device]]
        needed = input_of(action, len(self._placement))
        coming = None if needed is None else _exchange(self._placement, needed)
        if coming is not None and coming.backward and not self._early[1]:
            self._line.append(coming)
        self._line.append(turn)
        self._heads[device] += 1
        made = pass_of(action)
        if made is not None:
            self._ended[made] = at.end
            leaving = _exchange(self._placement, made)
            if leaving is not None and self._early[made.backward]:
                heapq.heappush(self._ready, (max(moment, at.end), 0, leaving))
            else:
                self._finish(made)
        self._look_at(device)

    def _finish(self, made: Pass) -> None:
        self._done.add(made)
        if made in self._waiting:
            self._look_at(self._waiting.pop(made))


def _exchange(placement: Sequence[int], made: Pass) -> Exchange | None:
    """Return the exchange of a pass's output; None if no other device needs it."""
    following = made.stage - 1 if made.backward else made.stage + 1
    if not 0 <= following < len(placement):
        return None
    source, target = placement[made.stage], placement[following]
    if source == target:
        return None
    return Exchange(made.backward, made.stage, made.microbatch, source, target)
