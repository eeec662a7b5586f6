"""Make compute programs fit: offload, and recompute where that fails, only as much as needed.

For each device, walk the program; where an action does not fit, send away the activation whose
backward is farthest (Belady's rule: it blocks memory longest and its copies have the most time).
Where none may go, a waiting weight gradient is run earlier, which frees its context.
Copies out start right behind the forward, copies back as late as still keeps them off the critical
path under the timing without offload, earlier never, later where memory is missing. In the spirit
of AdaOffload (OptPipe, arXiv 2510.05186): no more is moved than the limit asks for.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe.memory import action_delta, action_workspace, host_peak_bytes
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.action import Program, Programs
    from optpipe.problem import Problem
    from optpipe.simulate import Times

__all__ = ["fit_memory"]

_Key = tuple[int, int]


def fit_memory(problem: Problem, programs: Programs, *, slack: float = 1.0) -> Programs | None:
    """Return the programs with what must be offloaded or recomputed, or None if that fails.

    Parameters
    ----------
    problem
        Its limits are kept: device and host.
    programs
        Legal compute programs (F, I, W, B), over their memory limits or not.
    slack
        Copies back start this many times their duration before they are needed.
    """
    run = simulate(problem, programs)
    fitted = []
    for device, program in enumerate(programs):
        result = _DeviceFit(problem, device, program, run.times[device], slack).run()
        if result is None:
            return None
        fitted.append(result)
    peaks = host_peak_bytes(problem, tuple(fitted))
    for host in problem.hosts:
        if host.memory_bytes is not None and peaks[host.name] > host.memory_bytes:
            return None
    return tuple(fitted)


class _DeviceFit:
    """One device. Inserted actions are anchored to the compute action they stand before."""

    def __init__(
        self,
        problem: Problem,
        device: int,
        program: Program,
        times: Sequence[Times],
        slack: float,
    ) -> None:
        self.problem = problem
        self.order = list(program)
        self.start_of = {action: at.start for action, at in zip(program, times, strict=True)}
        self.slack = slack
        self.limit = problem.devices[device].usable_bytes - problem.static_bytes_of(device)
        self.backward = {(a.stage, a.microbatch): a for a in program if a.type.is_backward}
        self.release_before: dict[_Key, Action] = {}
        self.reload_before: dict[_Key, Action] = {}
        self.again: set[_Key] = set()

    def run(self) -> Program | None:
        while True:
            over = next((at for at, peak in enumerate(self._peaks()) if peak > self.limit), None)
            if over is None:
                self._pull_reloads_forward()
                return tuple(self._woven())
            if not self._make_room(over):
                return None

    def _make_room(self, at: int) -> bool:
        """Free bytes before a position; False if nothing can."""
        waiting = self._waiting(at)
        for key in waiting:
            if self.problem.can_offload(key[0]):
                self.release_before[key] = self.order[at]
                self.reload_before[key] = self.backward[key]
                return True
        if self._weight_first(at):
            return True
        for key in waiting:
            if self.problem.stages[key[0]].can_recompute:
                self.again.add(key)
                return True
        return False

    def _waiting(self, at: int) -> list[_Key]:
        """Return the activations kept across a position, the farthest backward first."""
        before = self.order[:at]
        kept = {(a.stage, a.microbatch) for a in before if a.type is ActionType.FORWARD}
        kept -= {(a.stage, a.microbatch) for a in self.order[: at + 1] if a.type.is_backward}
        kept -= self.release_before.keys() | self.again
        position = {action: index for index, action in enumerate(self.order)}
        return sorted(kept, key=lambda key: position[self.backward[key]], reverse=True)

    def _weight_first(self, at: int) -> bool:
        """Move the oldest weight gradient that waits across a position in front of it."""
        ready = {
            (a.stage, a.microbatch) for a in self.order[:at] if a.type is ActionType.BACKWARD_INPUT
        }
        for later in range(at + 1, len(self.order)):
            action = self.order[later]
            if (
                action.type is ActionType.BACKWARD_WEIGHT
                and (action.stage, action.microbatch) in ready
            ):
                self.order.insert(at, self.order.pop(later))
                return True
        return False

    def _peaks(self) -> list[int]:
        """Return the peak at each position, what is inserted before it included."""
        releases = _by_anchor(self.release_before)
        reloads = _by_anchor(self.reload_before)
        held = 0
        peaks = []
        for action in self.order:
            stage = self.problem.stages[action.stage]
            held -= sum(self.problem.stages[s].offload_bytes for s, _ in releases.get(action, ()))
            held += sum(self.problem.stages[s].offload_bytes for s, _ in reloads.get(action, ()))
            again = (action.stage, action.microbatch) in self.again
            peak = held
            if again and action.type.is_backward:
                held += action_delta(stage, ActionType.RECOMPUTE, is_recomputed=True)
                peak = held + stage.recompute_workspace_bytes
            after = held + action_delta(stage, action.type, is_recomputed=again)
            peak = max(peak, max(held, after) + action_workspace(stage, action.type))
            held = after
            peaks.append(peak)
        return peaks

    def _pull_reloads_forward(self) -> None:
        """Issue each copy back early enough for its backward, last one first, memory allowing."""
        lane_free = inf
        position = {action: index for index, action in enumerate(self.order)}
        for key in sorted(
            self.reload_before, key=lambda k: position[self.backward[k]], reverse=True
        ):
            length = self.problem.reload_ms(key[0])
            deadline = min(self.start_of[self.backward[key]], lane_free)
            lane_free = deadline - length
            earliest = position[self.release_before[key]] + 1
            wanted = deadline - self.slack * length
            at = self._pulled(key, position[self.backward[key]], earliest, wanted)
            self.reload_before[key] = self.order[at]

    def _pulled(self, key: _Key, at: int, earliest: int, wanted: float) -> int:
        peaks = self._peaks()
        size = self.problem.stages[key[0]].offload_bytes
        while (
            at > earliest
            and self.start_of[self.order[at]] > wanted
            and peaks[at - 1] + size <= self.limit
        ):
            at -= 1
        return at

    def _woven(self) -> list[Action]:
        releases = _by_anchor(self.release_before)
        reloads = _by_anchor(self.reload_before)
        woven: list[Action] = []
        for action in self.order:
            key = (action.stage, action.microbatch)
            woven += [Action(s, ActionType.RELEASE, j) for s, j in releases.get(action, ())]
            woven += [Action(s, ActionType.RELOAD, j) for s, j in reloads.get(action, ())]
            if key in self.again and action.type.is_backward:
                woven.append(Action(action.stage, ActionType.RECOMPUTE, action.microbatch))
            woven.append(action)
            if action.type is ActionType.FORWARD and key in self.release_before:
                woven.append(Action(action.stage, ActionType.OFFLOAD, action.microbatch))
        return woven


def _by_anchor(anchors: dict[_Key, Action]) -> dict[Action, list[_Key]]:
    rows: dict[Action, list[_Key]] = {}
    for key, anchor in anchors.items():
        rows.setdefault(anchor, []).append(key)
    return rows
