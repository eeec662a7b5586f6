"""What changed between two schedules, and what it cost."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from optpipe.action import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from optpipe.action import Program, Programs

__all__ = [
    "Cost",
    "ModeChange",
    "OrderChange",
    "PlacementChange",
    "ScheduleDifference",
    "compare_programs",
    "num_moved",
]

Treatment = Literal["kept", "offloaded", "recomputed"]
Backward = Literal["split (I, W)", "fused (B)"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PlacementChange(_Value):
    """A stage on another device; None where only one of the two schedules has the stage."""

    stage: int
    before: int | None
    after: int | None


class ModeChange(_Value):
    """Micro-batches of a stage that are treated, or whose backward runs, in another way."""

    stage: int
    before: Treatment | Backward
    after: Treatment | Backward
    microbatches: tuple[int, ...]


class OrderChange(_Value):
    """One program that is not the same in both.

    Parameters
    ----------
    moved
        Least number of actions that must be moved to turn one order into the other, among those
        that both have.
    common, removed, added
        Actions that both have, only the first, only the second.
    cell, before, after
        The first cell that differs and what stands there; None past the end of a program.
    """

    device: int
    moved: int
    common: int
    removed: int
    added: int
    cell: int
    before: Action | None
    after: Action | None


class Cost(_Value):
    """One number before and after; ``unit`` is ms, bytes or share, None where it is not known."""

    name: str
    unit: Literal["ms", "bytes", "share"]
    before: float | int | None
    after: float | int | None


class ScheduleDifference(_Value):
    """What changed from one schedule to another; empty for equal programs, and only for them.

    ``costs`` hold what is known of either, changed or not.
    """

    format: Literal["optpipe/difference/v1"] = "optpipe/difference/v1"
    kind: Literal["schedule"] = "schedule"
    placement: tuple[PlacementChange, ...] = ()
    treatment: tuple[ModeChange, ...] = ()
    backward: tuple[ModeChange, ...] = ()
    order: tuple[OrderChange, ...] = ()
    costs: tuple[Cost, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the two are the same programs."""
        return not (self.placement or self.treatment or self.backward or self.order)


def compare_programs(
    before: Programs, after: Programs, costs: Iterable[Cost] = ()
) -> ScheduleDifference:
    """Return what changed from one set of programs to another.

    They need not be legal, nor be for the same problem: stages are compared by their numbers,
    programs by their devices'.
    """
    old, new = _facts(before), _facts(after)
    return ScheduleDifference(
        placement=_placement_changes(old.devices, new.devices),
        treatment=_mode_changes(old.treatments, new.treatments),
        backward=_mode_changes(old.backwards, new.backwards),
        order=tuple(
            _order_change(device, *rows)
            for device, rows in enumerate(zip_longest(before, after, fillvalue=()))
            if rows[0] != rows[1]
        ),
        costs=tuple(costs),
    )


class _Facts(NamedTuple):
    """What a set of programs says of its stages and (stage, micro-batch) pairs."""

    devices: dict[int, int]
    treatments: dict[tuple[int, int], Treatment]
    backwards: dict[tuple[int, int], Backward]


def _facts(programs: Programs) -> _Facts:
    facts = _Facts({}, {}, {})
    for device, program in enumerate(programs):
        for stage, kind, microbatch in program:
            facts.devices[stage] = device
            cell = stage, microbatch
            if kind is ActionType.OFFLOAD:
                facts.treatments[cell] = "offloaded"
            elif kind is ActionType.RECOMPUTE:
                facts.treatments[cell] = "recomputed"
            else:
                facts.treatments.setdefault(cell, "kept")
            if kind.is_backward:
                is_fused = kind is ActionType.FULL_BACKWARD
                facts.backwards[cell] = "fused (B)" if is_fused else "split (I, W)"
    return facts


def _placement_changes(
    before: dict[int, int], after: dict[int, int]
) -> tuple[PlacementChange, ...]:
    return tuple(
        PlacementChange(stage=stage, before=before.get(stage), after=after.get(stage))
        for stage in sorted({*before, *after})
        if before.get(stage) != after.get(stage)
    )


def _mode_changes(
    before: Mapping[tuple[int, int], Treatment | Backward],
    after: Mapping[tuple[int, int], Treatment | Backward],
) -> tuple[ModeChange, ...]:
    """Return what became of the pairs that both have, gathered by stage and change."""
    changed: dict[tuple[int, Treatment | Backward, Treatment | Backward], list[int]]
    changed = defaultdict(list)
    for stage, microbatch in sorted(before.keys() & after.keys()):
        old, new = before[stage, microbatch], after[stage, microbatch]
        if old != new:
            changed[stage, old, new].append(microbatch)
    return tuple(
        ModeChange(stage=stage, before=old, after=new, microbatches=tuple(numbers))
        for (stage, old, new), numbers in changed.items()
    )


def _order_change(device: int, before: Program, after: Program) -> OrderChange:
    common = set(before) & set(after)
    cell, (old, new) = next(
        (cell, pair) for cell, pair in enumerate(zip_longest(before, after)) if pair[0] != pair[1]
    )
    return OrderChange(
        device=device,
        moved=num_moved(
            [action for action in before if action in common],
            [action for action in after if action in common],
        ),
        common=len(common),
        removed=len(before) - sum(action in common for action in before),
        added=len(after) - sum(action in common for action in after),
        cell=cell,
        before=old,
        after=new,
    )


def num_moved(before: Sequence[Action], after: Sequence[Action]) -> int:
    """Return how few actions must be moved to turn one order of them into the other.

    That is all but a longest common subsequence; since no action stands twice, it is a longest
    increasing subsequence of places, found by patience sorting in O(n log n).
    """
    place = {action: index for index, action in enumerate(before)}
    tails: list[int] = []
    for action in after:
        at = place[action]
        pile = bisect_left(tails, at)
        tails[pile : pile + 1] = [at]
    return len(place) - len(tails)
