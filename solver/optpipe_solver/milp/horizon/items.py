"""What the model orders: items with windows, presence and memory, and the orders implied anyway.

An item is an action that takes a place in a device's program: compute actions, and RELOAD, which
takes no time there but must stand at a compute boundary. OFFLOAD and RELEASE need no place of
their own: an OFFLOAD issued right behind its forward never delays anything, and a RELEASE only
has to stand before the first action that needs the freed bytes (see `constraints`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe.memory import action_delta, action_workspace
from optpipe.simulate import duration_ms

if TYPE_CHECKING:
    from optpipe.problem import Problem

__all__ = ["Choice", "HorizonItems", "Item", "Presence"]


class Choice(StrEnum):
    """Binary choices of a (stage, micro-batch) on which the presence of items depends."""

    FUSED = "fused"
    SPLIT = "split"
    OFFLOADED = "offloaded"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class Presence:
    """The item exists only if this choice is made."""

    choice: Choice
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Item:
    """One action that takes a place in its device's program.

    ``earliest`` and ``latest`` bound its start in ms; ``presence`` None = always there;
    ``delta`` is what it adds to the device's bytes, ``extra`` what it holds above the bytes before
    it while it runs.
    """

    action: Action
    device: int
    duration: float
    presence: Presence | None
    delta: int
    extra: int
    earliest: float
    latest: float


class HorizonItems:
    """All items of a problem.

    Parameters
    ----------
    problem
        What is to be scheduled.
    horizon_ms
        Every schedule worth finding ends its actions within this time (an incumbent's makespan).
    fifo
        Whether micro-batches go first in, first out through every pass of every stage. It loses
        nothing where nothing can be offloaded or recomputed; elsewhere it is a restriction.
    """

    def __init__(self, problem: Problem, horizon_ms: float, *, fifo: bool) -> None:
        self.problem = problem
        self.horizon_ms = horizon_ms
        self.fifo = fifo
        self.tight = [_memory_binds(problem, device) for device in range(len(problem.devices))]
        self.may_fuse = [_fusing_may_pay(problem, s) for s in range(len(problem.stages))]
        self.may_offload = [
            problem.can_offload(s) and self.tight[stage.device]
            for s, stage in enumerate(problem.stages)
        ]
        self.may_recompute = [
            stage.can_recompute and self.tight[stage.device] for stage in problem.stages
        ]
        self._paths()
        self.by_device: list[list[Item]] = [[] for _ in problem.devices]
        for s in range(len(problem.stages)):
            for j in range(problem.num_microbatches):
                self._add(s, j)
        self.of_action = {item.action: item for row in self.by_device for item in row}

    def offloadable(self, device: int) -> list[tuple[int, int]]:
        """Return the (stage, micro-batch) pairs of a device that may be offloaded."""
        return [
            (s, j)
            for s in self.problem.stages_of[device]
            if self.may_offload[s]
            for j in range(self.problem.num_microbatches)
        ]

    def implied(self, first: Item, second: Item) -> bool:
        """Whether ``first`` stands before ``second`` in every schedule in which both exist."""
        a, b = first.action, second.action
        if a.microbatch == b.microbatch and _chained(a, b):
            return True
        if self._fifo_implied(a, b):
            return True
        return second.earliest + second.duration > first.latest + 1e-9

    def _fifo_implied(self, a: Action, b: Action) -> bool:
        if a.stage != b.stage or a.microbatch >= b.microbatch:
            return False
        if a.type is b.type is ActionType.FORWARD:
            return self.fifo or a.stage == 0
        if not self.fifo:
            return False
        forward_or_back = a.type is ActionType.FORWARD or a.type.is_backward
        if forward_or_back and b.type.is_backward:
            return True
        return _CHAIN[a.type] != 1 and b.type is ActionType.BACKWARD_WEIGHT

    def _paths(self) -> None:
        """Heads and tails: the longest path before a pass starts and after it ends, in ms."""
        stages, boundary = self.problem.stages, self.problem.boundary_ms
        self.head_f = [0.0] * len(stages)
        for s, (stage, (there, _)) in enumerate(zip(stages[:-1], boundary, strict=False)):
            self.head_f[s + 1] = self.head_f[s] + stage.forward_ms + there
        self.head_b = [0.0] * len(stages)
        self.head_b[-1] = self.head_f[-1] + stages[-1].forward_ms
        for s in reversed(range(len(stages) - 1)):
            back = min(stages[s + 1].backward_input_ms, stages[s + 1].fused_backward_ms)
            self.head_b[s] = self.head_b[s + 1] + back + boundary[s][1]
        first = stages[0]
        self.tail_b = [0.0] * len(stages)
        for s in range(1, len(stages)):
            below = stages[s - 1]
            split = below.backward_input_ms + (self.tail_b[s - 1] if s > 1 else 0.0)
            fused = below.fused_backward_ms + (self.tail_b[s - 1] if s > 1 else 0.0)
            if s == 1:
                split += first.backward_weight_ms
            self.tail_b[s] = boundary[s - 1][1] + min(split, fused)

    def _after_input_gradient(self, s: int) -> float:
        """Ms that must follow the end of I(s): its W, and the way back to stage 0.

        Under the span objective the horizon binds stage 0's device alone, so only the way counts.
        """
        if self.problem.objective == "span":
            return self.tail_b[s]
        return max(self.problem.stages[s].backward_weight_ms, self.tail_b[s])

    def _after_forward(self, s: int) -> float:
        """Ms that must follow the end of F(s): the way to the last stage and back to I(s)."""
        stage = self.problem.stages[s]
        split = stage.backward_input_ms + self._after_input_gradient(s)
        fused = stage.fused_backward_ms + self.tail_b[s]
        between = self.head_b[s] - self.head_f[s] - stage.forward_ms
        return between + min(split, fused)

    def _add(self, s: int, j: int) -> None:
        stage = self.problem.stages[s]
        split = Presence(Choice.SPLIT, s, j) if self.may_fuse[s] else None
        end = self.horizon_ms
        slack = end if self.problem.objective == "span" else 0.0
        queue = j * stage.forward_ms if self.fifo or s == 0 else 0.0
        head = self.head_b[s]
        self._item(
            Action(s, ActionType.FORWARD, j), self.head_f[s] + queue, end - self._after_forward(s)
        )
        self._item(
            Action(s, ActionType.BACKWARD_INPUT, j),
            head,
            end - self._after_input_gradient(s),
            split,
        )
        self._item(
            Action(s, ActionType.BACKWARD_WEIGHT, j),
            head + stage.backward_input_ms,
            end + slack,
            split,
        )
        if self.may_fuse[s]:
            fused = Presence(Choice.FUSED, s, j)
            self._item(Action(s, ActionType.FULL_BACKWARD, j), head, end - self.tail_b[s], fused)
        made = self.head_f[s] + stage.forward_ms
        needed = end - self.tail_b[s] - min(stage.backward_input_ms, stage.fused_backward_ms)
        if self.may_offload[s]:
            offloaded = Presence(Choice.OFFLOADED, s, j)
            away, back = self.problem.offload_ms(s), self.problem.reload_ms(s)
            self._item(Action(s, ActionType.RELOAD, j), made + away, needed - back, offloaded)
        if self.may_recompute[s]:
            recomputed = Presence(Choice.RECOMPUTED, s, j)
            self._item(Action(s, ActionType.RECOMPUTE, j), made, needed, recomputed)

    def _item(
        self,
        action: Action,
        earliest: float,
        latest_end: float,
        presence: Presence | None = None,
    ) -> None:
        stage = self.problem.stages[action.stage]
        duration = 0.0 if action.type.is_transfer else duration_ms(self.problem, action)
        delta = action_delta(stage, action.type, is_recomputed=False)
        item = Item(
            action=action,
            device=stage.device,
            duration=duration,
            presence=presence,
            delta=delta,
            extra=max(0, delta) + action_workspace(stage, action.type),
            earliest=earliest,
            # An optional item that cannot exist still needs bounds for its start.
            latest=max(earliest, latest_end - duration),
        )
        self.by_device[stage.device].append(item)


_CHAIN = {
    ActionType.FORWARD: 0,
    ActionType.RELOAD: 1,
    ActionType.RECOMPUTE: 1,
    ActionType.BACKWARD_INPUT: 2,
    ActionType.FULL_BACKWARD: 2,
    ActionType.BACKWARD_WEIGHT: 3,
}


def _chained(a: Action, b: Action) -> bool:
    """Whether a precedes b for one micro-batch: forwards in model order, backwards in reverse."""
    first, second = _CHAIN[a.type], _CHAIN[b.type]
    if a.stage == b.stage:
        return first < second
    if first == 0 and second == 0:
        return a.stage < b.stage
    if first == 0 and second >= 2:
        return True
    if first == 0:
        return a.stage < b.stage
    if first == 1 and second >= 2:
        return a.stage > b.stage
    if first == 2 and second >= 2:
        return a.stage > b.stage
    return False


def _memory_binds(problem: Problem, device: int) -> bool:
    """Whether keeping everything of every micro-batch could exceed the device's memory."""
    most = workspace = 0
    for s in problem.stages_of[device]:
        stage = problem.stages[s]
        held = max(stage.activation_bytes, stage.weight_context_bytes)
        most += held * problem.num_microbatches
        workspace = max(
            workspace,
            stage.forward_workspace_bytes,
            stage.backward_input_workspace_bytes,
            stage.backward_weight_workspace_bytes,
            stage.backward_workspace_bytes,
        )
    limit = problem.devices[device].usable_bytes - problem.static_bytes_of(device)
    return most + workspace > limit


def _fusing_may_pay(problem: Problem, s: int) -> bool:
    """Whether a fused B can be better than I with W right behind it, in time or in memory."""
    stage = problem.stages[s]
    split_peak = max(
        max(stage.activation_bytes, stage.weight_context_bytes)
        + stage.backward_input_workspace_bytes,
        stage.weight_context_bytes + stage.backward_weight_workspace_bytes,
    )
    fused_peak = stage.activation_bytes + stage.backward_workspace_bytes
    split_ms = stage.backward_input_ms + stage.backward_weight_ms
    return stage.fused_backward_ms < split_ms or fused_peak < split_peak
