"""An exact search over the journeys of micro-batches, with offload and recompute, in any order.

Each micro-batch travels up the stages and down again: F on every stage, then I (or B). So all there
is to say about a partial schedule, relaxed a little, is a *state*: how far each micro-batch is and
in which *mode* it is on every stage between F and backward (kept, away or to go, coming back, with
its checkpoint alone); how many W each stage has started; the clock, which is the latest start; when
the lanes of each device are free; when the input of each micro-batch's next pass is there. Times
before the clock count as the clock. Micro-batches are identical, so a state is a multiset. An event
is an F in some mode, an I, W or B, a RECOMPUTE, or a RELOAD, which starts when it is issued.

*Some devices.* Only some devices are kept. A pass on another one is a wait of its length, which any
number may share: whatever holds for all devices holds for these, and an I takes at least its
gradient piece. So if no schedule of the kept devices lies within a horizon, none of all devices
does. Under span there is one device, the clock starts with it, and its input is there at once.

*Relaxed.* Copies of a device have one size, go one after the other, to the host in the order of the
F whose bytes they take, each from its F's end on. That is the order in which the k-th copy ends
first, for every k. That many have ended is all that is asked where bytes are needed, and a RELOAD
asks for one more ended copy than RELOADs before it, be it its own or not. So what real copies allow
at a time, these do. Where a device has room for more than `MOST_COMING` copies, only the last so
many RELOADs on their way are waited for. Hosts have room, no other device shares a lane, gradient
reductions of one device do not queue. What is kept of the whole problem are heads and tails, by
number (`bounds.heads`, `bounds.tails`): the k-th F of a stage starts no earlier than its head, and
the k-th last F, I or W ends no later than its tail before the horizon.

*Every schedule is met.* Sort its events by start, of equal ones what is needed first: each is a
step from the state before, at the earliest start that its device, input and bytes allow, or later.
If a state has the same events as a part of a schedule, and no time later, it can make the next step
no later; by induction it reaches the end no later than the schedule.

*Dominance.* For the same reason, of two states with the same codes and W, one with no time later
than the other's replaces it. Of micro-batches with the same code the one whose input is there first
makes the next pass: when the other could start it, both inputs are there.

*Left out.* An event that starts so late that an I or W of its device, which waits, would fit in
before. Among the ways to complete a state within the horizon take one with the least sum of starts:
if it began so, that I or W, which comes later, could move forward. Its device does nothing in
between; it holds no more bytes after it, if its context is not larger than its activation, and may
hold its workspace; nothing else starts later, no k-th end of a stage is later, no F moves, and the
sum is less. So each state that can be completed keeps a way to be. (Where a B is possible an I is
not moved: the way may hold a B.)

*Bound.* A state is dropped if what must follow (`journey_bounds`) ends behind the horizon.

Layers count steps: an F kept is two, one for the RELOAD or RECOMPUTE it saves, a B two, any other
event one. So all ways to a state have the same number of steps, and each state is expanded once,
after all that could dominate it are known. If a layer and the one behind it are empty, no schedule
lies within the horizon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_solver.exact.counts import Answer
from optpipe_solver.exact.journey_kernel import MODE_BITS, POSITION_BITS, make_desk, make_state
from optpipe_solver.exact.journey_layers import expand, make_layer, set_out
from optpipe_solver.exact.road import copies_are_equal, road_of, unit_ms
from optpipe_solver.exact.sweep import SLICE, expand_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe.problem import Problem

__all__ = ["JourneysOutcome", "journeys_can_search", "search_journeys"]

_MOST_MICROBATCHES = 100
"""W are counted in a byte; beyond a few dozen micro-batches no search ends anyway."""

_MOST_STAGES = (31 - POSITION_BITS) // MODE_BITS
"""Codes have 32 bits."""


@dataclass(frozen=True, slots=True)
class JourneysOutcome:
    """The end of a search and how many states it met.

    ``found_ms``: where a relaxed schedule was found, its length; none as short need exist.
    """

    answer: Answer
    found_ms: float | None
    num_states: int


def journeys_can_search(problem: Problem, devices: Sequence[int]) -> bool:
    """Whether a state says all there is about these devices."""
    stages = sum(len(problem.stages_of[device]) for device in devices)
    return (
        1 <= stages <= _MOST_STAGES
        and problem.num_microbatches <= _MOST_MICROBATCHES
        and (problem.objective == "makespan" or len(devices) == 1)
        and all(copies_are_equal(problem, device) for device in devices)
    )


def search_journeys(
    problem: Problem,
    devices: Sequence[int],
    horizon_ms: float,
    *,
    most_states: int,
    most_in_layer: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> JourneysOutcome:
    """Ask whether some devices can be through within ``horizon_ms``, the others being no obstacle.

    ``Answer.NONE`` proves that no schedule of the problem is that short. Unknown if more than
    ``most_states`` are met, ``most_in_layer`` in one layer, or if told to stop.
    """
    search = _Search(problem, devices, horizon_ms, most_in_layer)
    return search.run(most_states, should_stop)


class _Search:
    def __init__(
        self, problem: Problem, devices: Sequence[int], horizon_ms: float, most_in_layer: int
    ) -> None:
        self.road = road_of(problem, horizon_ms, devices)
        self.unit_ms = unit_ms(problem, horizon_ms)
        num_stages = len(self.road.forward)
        size = problem.num_microbatches, num_stages, len(devices)
        self.num_steps = 4 * problem.num_microbatches * num_stages
        self.layers = [make_layer(most_in_layer, *size) for _ in range(3)]
        self.work = make_state(*size), make_desk(*size[1:]), make_desk(*size[1:])
        set_out(self.layers[0], self.road)
        self.num_states = 1

    def run(self, most_states: int, should_stop: Callable[[], bool]) -> JourneysOutcome:
        """Expand layer after layer."""
        for _ in range(self.num_steps):
            if not self._expand(most_states, should_stop):
                return JourneysOutcome(Answer.UNKNOWN, None, self.num_states)
            layer, one, two = self.layers
            if one.size[0] == 0 and two.size[0] == 0:
                return JourneysOutcome(Answer.NONE, None, self.num_states)
            layer.first[:] = -1
            layer.size[0] = 0
            self.layers = [one, two, layer]
        last = self.layers[0]
        size = int(last.size[0])
        end = int(last.end[:size][last.alive[:size]].min())
        return JourneysOutcome(Answer.FOUND, end * self.unit_ms, self.num_states)

    def _expand(self, most_states: int, should_stop: Callable[[], bool]) -> bool:
        """Expand the first layer; return False where it is too much, or told to stop."""
        layer, one, two = self.layers

        def step(at: int) -> int:
            return expand(self.road, (layer, one, two), self.work, at, SLICE)

        done, self.num_states = expand_layer(
            self.layers, step, self.num_states, most_states, should_stop
        )
        return done
