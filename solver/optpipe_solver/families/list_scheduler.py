"""List scheduling of F, I, W (or B) under byte limits: the engine of the greedy families.

A device that becomes free takes, of what is ready, an input gradient first, then a forward if
memory admits it, and fills idle time with weight gradients. Micro-batches go first in, first out
through every stage.

Memory-limited scheduling can deadlock when a device holds several stages: forwards of its first
fill the memory its last needs. A forward is therefore admitted only if the device could still
finish what it holds one micro-batch after the other, oldest first (the banker's rule).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem, Stage

__all__ = ["Policy", "list_schedule"]


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices of one run.

    Parameters
    ----------
    limits
        Per device, the bytes that activations may fill (static and reserved bytes excluded).
    patience
        A weight gradient is started only if the next known arrival is at least this fraction of
        its duration away: 0 = at once, 1 = only where it delays nothing known.
    fused
        Whether the backward is B instead of I and W.
    in_flight
        Most micro-batches between F and I on a stage, as a multiple of the stages still ahead of
        it (1 = 1F1B's); inf = memory alone decides.
    deepest_first
        Among ready forwards of several stages of one device, whether the last stage goes first.
    """

    limits: tuple[int, ...]
    patience: float = 1.0
    fused: bool = False
    in_flight: float = inf
    deepest_first: bool = True


def list_schedule(problem: Problem, policy: Policy) -> Programs | None:
    """Return compute programs within the policy's limits, or None where they get stuck."""
    return _Scheduler(problem, policy).run()


class _Scheduler:
    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem = problem
        self.policy = policy
        num_stages, m = len(problem.stages), problem.num_microbatches
        self.m = m
        self.last = num_stages - 1
        self.programs: list[list[Action]] = [[] for _ in problem.devices]
        self.next_f = [0] * num_stages
        self.next_b = [0] * num_stages
        self.next_w = [0] * num_stages
        self.f_ready = [[0.0 if s == 0 else inf] * m for s in range(num_stages)]
        self.b_ready = [[inf] * m for _ in range(num_stages)]
        self.free_at = [0.0] * len(problem.devices)
        self.held = [0] * len(problem.devices)
        self.wakes: list[tuple[float, int]] = [(0.0, d) for d in range(len(problem.devices))]
        self.caps = [
            max(1, int(policy.in_flight * (num_stages - s))) if policy.in_flight < inf else m
            for s in range(num_stages)
        ]

    def run(self) -> Programs | None:
        while self.wakes:
            now, device = heapq.heappop(self.wakes)
            if self.free_at[device] <= now:
                self._decide(device, now)
        if any(done < self.m for done in (*self.next_b, *self._pending_w_done())):
            return None
        return tuple(map(tuple, self.programs))

    def _pending_w_done(self) -> list[int]:
        return [self.m] * len(self.next_w) if self.policy.fused else self.next_w

    def _decide(self, device: int, now: float) -> None:
        stages = self.problem.stages_of[device]
        later = inf
        for s in stages:
            j = self.next_b[s]
            if j < self.m and self._backward_fits(device, s):
                if self.b_ready[s][j] <= now:
                    self._backward(device, s, now)
                    return
                later = min(later, self.b_ready[s][j])
        for s in reversed(stages) if self.policy.deepest_first else stages:
            j = self.next_f[s]
            if j < self.m and self.f_ready[s][j] < inf and self._admits(device, s):
                if self.f_ready[s][j] <= now:
                    self._forward(device, s, now)
                    return
                later = min(later, self.f_ready[s][j])
        self._fill(device, now, later)

    def _fill(self, device: int, now: float, later: float) -> None:
        """Run a weight gradient if the wait is long enough for the policy's patience."""
        if self.policy.fused:
            return
        waiting = [s for s in self.problem.stages_of[device] if self.next_w[s] < self.next_b[s]]
        if not waiting:
            return
        s = min(waiting, key=lambda stage: (self.next_w[stage], -stage))
        length = self.problem.stages[s].backward_weight_ms
        if later - now >= self.policy.patience * length:
            self._weight(device, s, now)

    def _forward(self, device: int, s: int, now: float) -> None:
        j = self.next_f[s]
        self.next_f[s] += 1
        stage = self.problem.stages[s]
        self.held[device] += stage.activation_bytes
        end = self._occupy(device, Action(s, ActionType.FORWARD, j), now, stage.forward_ms)
        if s == self.last:
            self.b_ready[s][j] = end
        else:
            arrival = end + self.problem.boundary_ms[s][0]
            self.f_ready[s + 1][j] = arrival
            heapq.heappush(self.wakes, (arrival, self.problem.stages[s + 1].device))

    def _backward(self, device: int, s: int, now: float) -> None:
        j = self.next_b[s]
        self.next_b[s] += 1
        stage = self.problem.stages[s]
        if self.policy.fused:
            kind, length = ActionType.FULL_BACKWARD, stage.fused_backward_ms
            self.held[device] -= stage.activation_bytes
        else:
            kind, length = ActionType.BACKWARD_INPUT, stage.backward_input_ms
            self.held[device] += stage.weight_context_bytes - stage.activation_bytes
        end = self._occupy(device, Action(s, kind, j), now, length)
        if s > 0:
            arrival = end + self.problem.boundary_ms[s - 1][1]
            self.b_ready[s - 1][j] = arrival
            heapq.heappush(self.wakes, (arrival, self.problem.stages[s - 1].device))

    def _weight(self, device: int, s: int, now: float) -> None:
        j = self.next_w[s]
        self.next_w[s] += 1
        stage = self.problem.stages[s]
        self.held[device] -= stage.weight_context_bytes
        action = Action(s, ActionType.BACKWARD_WEIGHT, j)
        self._occupy(device, action, now, stage.backward_weight_ms)

    def _occupy(self, device: int, action: Action, now: float, length: float) -> float:
        self.programs[device].append(action)
        end = now + length
        self.free_at[device] = end
        heapq.heappush(self.wakes, (end, device))
        return end

    def _backward_fits(self, device: int, s: int) -> bool:
        extra = _backward_extra(self.problem.stages[s], self.policy.fused)
        return self.held[device] + extra <= self.policy.limits[device]

    def _admits(self, device: int, s: int) -> bool:
        stage = self.problem.stages[s]
        room = self.policy.limits[device] - self.held[device]
        if stage.activation_bytes + stage.forward_workspace_bytes > room:
            return False
        if self.next_f[s] - self.next_b[s] >= self.caps[s]:
            return False
        return self._safe_after_forward(device, s)

    def _safe_after_forward(self, device: int, admitted: int) -> bool:
        """Banker's rule: what is in flight can be finished, oldest first, after this forward."""
        stages = self.problem.stages_of[device]
        room = self.policy.limits[device] - self.held[device]
        room -= self.problem.stages[admitted].activation_bytes
        first = min(self.next_b[s] if self.policy.fused else self.next_w[s] for s in stages)
        last = max(self.next_f[s] + (s == admitted) for s in stages)
        for j in range(first, last):
            held, needed = self._to_finish(stages, j, admitted)
            if needed > room:
                return False
            room += held
            if len(stages) == 1 and held > 0:
                return True
        return True

    def _to_finish(self, stages: tuple[int, ...], j: int, admitted: int) -> tuple[int, int]:
        """Return the bytes micro-batch j holds here, and the most it adds until it is done."""
        held = extra = needed = 0
        for s in stages:
            stage = self.problem.stages[s]
            if j >= self.next_f[s] + (s == admitted):
                needed = max(needed, extra + stage.activation_bytes + stage.forward_workspace_bytes)
                extra += stage.activation_bytes
            elif j >= self.next_b[s]:
                held += stage.activation_bytes
            elif not self.policy.fused and j >= self.next_w[s]:
                held += stage.weight_context_bytes
        for s in reversed(stages):
            stage = self.problem.stages[s]
            if j >= self.next_b[s]:
                needed = max(needed, extra + _backward_extra(stage, self.policy.fused))
                extra -= stage.activation_bytes
        return held, needed


def _backward_extra(stage: Stage, fused: bool) -> int:
    """Return the most a backward (its W right behind it) holds above what its F left."""
    if fused:
        return stage.backward_workspace_bytes
    growth = stage.weight_context_bytes - stage.activation_bytes
    return max(
        max(0, growth) + stage.backward_input_workspace_bytes,
        growth + stage.backward_weight_workspace_bytes,
    )
