"""The items that the full-horizon model orders, their time windows, and orders that always hold.

An item is an action that takes a place in a device's program. Compute actions are items. RELOAD is
an item too: it takes no time there, but its place is between two compute actions. OFFLOAD and
RELEASE need no place of their own. An OFFLOAD issued right after its forward never delays anything.
A RELEASE must only come before the first action that needs the freed bytes (see `constraints`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from optpipe.memory import action_delta, action_workspace
from optpipe.schedule import Action, ActionType
from optpipe.simulate import duration_ms
from optpipe_solver.feasibility import fusing_may_pay, memory_binds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem

__all__ = [
    "MOST_PAIRS",
    "Cell",
    "HorizonChoice",
    "HorizonItem",
    "HorizonItems",
    "Presence",
    "num_order_pairs",
]


Cell = tuple[int, int]
"""A (stage, micro-batch)."""

MOST_PAIRS = 60_000
"""Maximum number of pairs of items of a device, summed over devices, to build a model for."""

_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_OFFLOAD, _RELEASE, _RELOAD = ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD
_RECOMPUTE = ActionType.RECOMPUTE

_CHAIN = {_F: 0, _RELOAD: 1, _RECOMPUTE: 1, _I: 2, _B: 2, _W: 3}
"""Position of each kind of item in the order of one cell."""

_ROUNDING = 1e-8
"""Share of the horizon subtracted from a tail, because path sums are rounded."""

_TOLERANCE = 1e-9
"""Share of the horizon by which a start must be too late before an order follows."""


class HorizonChoice(StrEnum):
    """Binary choices of a cell on which the presence of items depends."""

    FUSED = "fused"
    SPLIT = "split"
    OFFLOADED = "offloaded"
    RECOMPUTED = "recomputed"


class Presence(NamedTuple):
    """The item exists only if this choice is made."""

    choice: HorizonChoice
    stage: int
    microbatch: int


_DEPENDS_ON = {
    _I: HorizonChoice.SPLIT,
    _W: HorizonChoice.SPLIT,
    _B: HorizonChoice.FUSED,
    _RELOAD: HorizonChoice.OFFLOADED,
    _RECOMPUTE: HorizonChoice.RECOMPUTED,
}


@dataclass(frozen=True, slots=True, eq=False)
class HorizonItem:
    """One action that takes a place in its device's program; compared by identity.

    ``presence`` None: the item always exists. ``delta`` are the bytes that it adds to the device.
    ``extra`` are the bytes that it holds above those before it while it runs. ``earliest`` and
    ``latest`` bound its start in ms.
    """

    action: Action
    device: int
    duration: float
    presence: Presence | None
    delta: int
    extra: int
    earliest: float
    latest: float


def num_order_pairs(problem: Problem, *, fifo: bool) -> int:
    """Return how many pairs of items would need an order binary: the size of the model."""
    m = problem.num_microbatches
    pairs = 0
    for stages in problem.stages_of:
        count = m * sum(
            3 + problem.can_offload(s) + problem.stages[s].can_recompute for s in stages
        )
        pairs += count * (count - 1) // (3 if fifo and m > 1 else 2)
    return pairs


class HorizonItems:
    """All items of a problem.

    Windows are longest paths before and after an item, in ms. Paths contain the items that wait for
    each other's results. With ``fifo`` they also contain the micro-batches before.

    Parameters
    ----------
    problem
        The problem to schedule.
    horizon_ms
        Only schedules with at most this objective count (an incumbent's).
    fifo
        Whether micro-batches go first in, first out through every pass of every stage. This loses
        nothing if nothing can be offloaded or recomputed. Otherwise it is a restriction.

    Attributes
    ----------
    by_device
        The items of each device.
    of_action
        The item of each action.
    tight
        Whether memory can bind, by device.
    is_empty
        Whether it is proven that no schedule lies within the horizon.
    """

    def __init__(self, problem: Problem, horizon_ms: float, *, fifo: bool) -> None:
        self.problem = problem
        self.horizon_ms = horizon_ms
        self.fifo = fifo
        devices, stages = range(len(problem.devices)), range(len(problem.stages))
        self.tight = [memory_binds(problem, device) for device in devices]
        # If memory does not bind, offload and recompute gain nothing.
        binds = [s for s in stages if self.tight[problem.stages[s].device]]
        fuses = [fusing_may_pay(problem, s) for s in stages]
        self._is_open = {
            HorizonChoice.FUSED: fuses,
            HorizonChoice.SPLIT: fuses,
            HorizonChoice.OFFLOADED: [s in binds and problem.can_offload(s) for s in stages],
            HorizonChoice.RECOMPUTED: [
                s in binds and problem.stages[s].can_recompute for s in stages
            ],
        }
        actions = [
            Action(s, kind, j)
            for device in devices
            for s in problem.stages_of[device]
            for j in range(problem.num_microbatches)
            for kind in _CHAIN
            if self.has((s, j), kind)
        ]
        windows = self._windows(actions)
        items = [self._item(action, *windows[action]) for action in actions]
        self.of_action = {item.action: item for item in items}
        self.by_device = [[item for item in items if item.device == d] for d in devices]
        self.is_empty = any(
            item.presence is None and item.earliest > item.latest + self._tolerance_ms
            for item in items
        ) or any(
            self.implied(a, b) and self.implied(b, a)
            for row in self.by_device
            for a, b in combinations([item for item in row if item.presence is None], 2)
        )

    @property
    def _tolerance_ms(self) -> float:
        return _TOLERANCE * max(1e-3, self.horizon_ms)

    def is_open(self, choice: HorizonChoice, cell: Cell) -> bool:
        """Whether a choice is still to be made."""
        return self._is_open[choice][cell[0]]

    def has(self, cell: Cell, kind: ActionType) -> bool:
        """Whether a cell has, or may have, an action of a kind."""
        if kind in (_F, _I, _W):
            return True
        choice = HorizonChoice.OFFLOADED if kind in (_OFFLOAD, _RELEASE) else _DEPENDS_ON[kind]
        return self.is_open(choice, cell)

    def open_cells(self, device: int, kind: ActionType) -> list[Cell]:
        """Return the cells of a device that have, or may have, an OFFLOAD, RELEASE or RELOAD."""
        return [
            (s, j)
            for s in self.problem.stages_of[device]
            for j in range(self.problem.num_microbatches)
            if self.has((s, j), kind)
        ]

    def implied(self, first: HorizonItem, second: HorizonItem) -> bool:
        """Whether ``first`` is before ``second`` in every schedule in which both exist.

        Both are on one device. Only schedules within the horizon count. If both orders are
        excluded, the two never exist together.
        """
        is_too_late = second.earliest + second.duration > first.latest + self._tolerance_ms
        return is_too_late or self._by_definition(first.action, second.action)

    def tail(self, item: HorizonItem) -> float:
        """Return the ms between an item's latest end and the horizon, less a share for rounding."""
        return self.horizon_ms * (1 - _ROUNDING) - item.latest - item.duration

    def _item(self, action: Action, earliest: float, latest: float) -> HorizonItem:
        s, kind, *_ = action
        mode = self.problem.menus[s][self.problem.stages[s].implied_mode(kind)]
        delta, presence = action_delta(mode, kind), self._presence(action)
        if presence is not None:
            # An optional item that cannot exist still needs bounds for its start.
            earliest = min(earliest, 2.0 * self.horizon_ms)
            latest = max(earliest, latest)
        return HorizonItem(
            action=action,
            device=self.problem.stages[s].device,
            duration=self._duration_ms(action),
            presence=presence,
            delta=delta,
            extra=max(0, delta) + action_workspace(mode, kind),
            earliest=earliest,
            latest=latest,
        )

    def _presence(self, action: Action) -> Presence | None:
        s, kind, j, *_ = action
        choice = _DEPENDS_ON.get(kind)
        if choice is None or not self.is_open(choice, (s, j)):
            return None
        return Presence(choice, s, j)

    def _duration_ms(self, action: Action) -> float:
        return 0.0 if action.type.is_transfer else duration_ms(self.problem, action)

    def _by_definition(self, a: Action, b: Action) -> bool:
        """Whether a is before b in one micro-batch, or because micro-batches are equal."""
        if a.microbatch == b.microbatch:
            return _is_chained(a, b)
        if a.stage != b.stage or a.microbatch > b.microbatch:
            return False
        if a.type is b.type is _F:
            return self.fifo or a.stage == 0
        if not self.fifo:
            return False
        if b.type.is_backward:
            return a.type is _F or a.type.is_backward
        return b.type is _W and _CHAIN[a.type] != 1

    def _windows(self, actions: list[Action]) -> dict[Action, tuple[float, float]]:
        """Return the earliest and the latest start of each action in ms, by longest paths.

        Under span, the clock of a device starts with its first action. That start is known only
        for stage 0's device. A gradient reduction follows its stage's last W or B.
        """
        problem = self.problem
        duration = {action: self._duration_ms(action) for action in actions}
        earliest = dict.fromkeys(actions, 0.0)
        latest = dict.fromkeys(actions, 2.0 * self.horizon_ms)
        for action in actions:
            stage = problem.stages[action.stage]
            if action.type in (_W, _B):
                is_known = problem.objective == "makespan" or stage.device == problem.placement[0]
                end_ms = self.horizon_ms * (1 if is_known else 2)
                latest[action] = end_ms - stage.grad_sync_ms - duration[action]
        arcs = [arc for arc in self._arcs() if arc[0] and arc[1]]
        for before, after, delay_ms in arcs:
            if self._exists_with(before, after):
                there_ms = min(earliest[a] + duration[a] for a in before) + delay_ms
                earliest.update({b: max(earliest[b], there_ms) for b in after})
        for before, after, delay_ms in reversed(arcs):
            if self._exists_with(after, before):
                due_ms = max(latest[b] for b in after) - delay_ms
                latest.update({a: min(latest[a], due_ms - duration[a]) for a in before})
        return {action: (earliest[action], latest[action]) for action in actions}

    def _exists_with(self, group: list[Action], other: list[Action]) -> bool:
        """Whether one action of a group exists wherever one of the other group does."""
        presence = self._presence(group[0])
        return len(group) > 1 or presence is None or presence == self._presence(other[0])

    def _arcs(self) -> Iterator[tuple[list[Action], list[Action], float]]:
        """Yield precedences: alternatives before, alternatives after, and ms between.

        Either may be empty. All arcs to an action come before all arcs from it.
        """
        problem, num_stages = self.problem, len(self.problem.stages)

        def group(s: int, j: int, *kinds: ActionType) -> list[Action]:
            is_there = 0 <= s < num_stages and j >= 0
            return [Action(s, kind, j) for kind in kinds if is_there and self.has((s, j), kind)]

        for j in range(problem.num_microbatches):
            for s in range(num_stages):
                forward = group(s, j, _F)
                yield group(s - 1, j, _F), forward, problem.boundary_ms[s - 1][0] if s else 0.0
                yield (group(s, j - 1, _F) if self.fifo or s == 0 else []), forward, 0.0
            for s in reversed(range(num_stages)):
                forward, back = group(s, j, _F), group(s, j, _I, _B)
                reload, again = group(s, j, _RELOAD), group(s, j, _RECOMPUTE)
                yield forward, back, 0.0
                yield forward, reload, problem.offload_ms(s) if reload else 0.0
                yield forward, again, 0.0
                yield reload, back, problem.reload_ms(s) if reload else 0.0
                yield again, back, 0.0
                home_ms = problem.boundary_ms[s][1] if s + 1 < num_stages else 0.0
                yield group(s + 1, j, _I, _B), back, home_ms
                yield (group(s, j - 1, _I, _B) if self.fifo else []), back, 0.0
                yield group(s, j, _I), group(s, j, _W), 0.0


def _is_chained(a: Action, b: Action) -> bool:
    """Whether a precedes b for one micro-batch: forwards in model order, backwards in reverse."""
    first, second = _CHAIN[a.type], _CHAIN[b.type]
    if a.stage == b.stage:
        return first < second
    if first == 0:
        return second >= 2 or a.stage < b.stage
    return first <= 2 and second >= 2 and a.stage > b.stage
