"""A block: what one micro-batch does, and when, repeated every T.

``rows[d]`` is the circle of device d in the order of one turn; micro-batch (or super-period) k runs
an entry in turn ``index + k``. The order of a device's program is that of (turn, place in the row).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from optpipe.memory import device_peak_bytes
from optpipe.schedule import Action, ActionType
from optpipe_solver.families.squeeze import BuildingBlock, Early, SqueezePolicy, Squeezer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.families.squeeze import Squeezed

__all__ = ["POLICIES", "Entry", "PeriodicBlock", "squeezed", "unroll"]


_PASSES = frozenset(
    {
        ActionType.FORWARD,
        ActionType.BACKWARD_INPUT,
        ActionType.BACKWARD_WEIGHT,
        ActionType.FULL_BACKWARD,
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One action of the block; ``start_ms`` is that of the first micro-batch."""

    stage: int
    kind: ActionType
    copy: int
    index: int
    start_ms: float


@dataclass(frozen=True, slots=True)
class PeriodicBlock:
    """A block of ``copies`` micro-batches, repeated every ``period_ms``."""

    period_ms: float
    copies: int
    rows: tuple[tuple[Entry, ...], ...]

    @property
    def is_plain(self) -> bool:
        """Whether it holds one micro-batch, nothing offloaded or recomputed."""
        return self.copies == 1 and self.kinds() <= _PASSES

    def kinds(self) -> frozenset[ActionType]:
        """Return the action types it holds."""
        return frozenset(entry.kind for row in self.rows for entry in row)

    def repeated(self, times: int) -> PeriodicBlock:
        """Return so many periods of it as one: the same programs, free to differ from now on.

        Turn t of the new block is turns q t to q t + q - 1 of this one; in the r-th of them an
        entry of index n belongs to the (r - n)-th period since, whose copies are numbered anew.
        """
        return PeriodicBlock(
            self.period_ms * times,
            self.copies * times,
            tuple(
                tuple(self._moved(entry, r, times) for r in range(times) for entry in row)
                for row in self.rows
            ),
        )

    def _moved(self, entry: Entry, r: int, times: int) -> Entry:
        turn, among = divmod(r - entry.index, times)
        copy = among * self.copies + entry.copy
        return replace(
            entry, copy=copy, index=-turn, start_ms=entry.start_ms + among * self.period_ms
        )

    def kept(self) -> PeriodicBlock:
        """Return it without transfers and recomputation: its orders of F, I and W (or B)."""
        rows = tuple(tuple(entry for entry in row if entry.kind in _PASSES) for row in self.rows)
        return replace(self, rows=rows)

    def peaks(self, problem: Problem) -> tuple[int, ...]:
        """Return the steady-state peak of every device, in bytes, static bytes included.

        It is the largest prefix sum of programs long enough to reach the steady state.
        """
        turns = (
            2
            + max((entry.index for row in self.rows for entry in row), default=0)
            - min((entry.index for row in self.rows for entry in row), default=0)
        )
        longer = problem.model_copy(update={"num_microbatches": turns * self.copies})
        programs = unroll(longer, self)
        return tuple(device_peak_bytes(longer, d, row) for d, row in enumerate(programs))

    def squeezable(self, problem: Problem) -> BuildingBlock:
        """Return the times of F and I (or B), as `families.repeat_and_squeeze` repeats them."""
        forward = np.zeros(len(problem.stages))
        backward = np.zeros(len(problem.stages))
        for row in self.rows:
            for entry in row:
                if entry.kind is ActionType.FORWARD:
                    forward[entry.stage] = entry.start_ms
                elif entry.kind.is_backward:
                    backward[entry.stage] = entry.start_ms
        return BuildingBlock(forward, backward, self.period_ms)


# --- From a block to programs: repeat it for m micro-batches, then fill warm-up and cool-down.
# *Repeat*: a device's program is the infinite one with all micro-batches but 0 to m - 1 left out.
# It is legal for every m >= 1. Orders: whatever an action needs runs before it in the times of the
# block, which leaving out does not change. Memory: every micro-batch holds a number of bytes >= 0
# at any place of the program, so that what is left out only frees some: no peak exceeds the
# block's.
#
# *Squeeze* (`families.repeat_and_squeeze`): the same order of F and I, everything as soon as
# possible; forwards run early while memory admits all those they overtake, and W fill the waits of
# cool-down.

POLICIES = tuple(
    SqueezePolicy(early, patience) for patience in (1.0, 0.5, 0.0) for early in reversed(Early)
)
"""Ways of filling waits that `squeezed` may be asked to try."""


def unroll(problem: Problem, block: PeriodicBlock) -> Programs:
    """Return the block repeated for all micro-batches of the problem, by its own order."""
    return tuple(tuple(_actions(row, block.copies, problem.num_microbatches)) for row in block.rows)


def _actions(row: Sequence[Entry], copies: int, m: int) -> Iterator[Action]:
    offloaded = {(entry.stage, entry.copy) for entry in row if entry.kind is ActionType.RELEASE}
    first = min((entry.index for entry in row), default=0)
    last = max((entry.index for entry in row), default=0)
    for turn in range(first, last + -(-m // copies)):
        for entry in row:
            j = (turn - entry.index) * copies + entry.copy
            if entry.index <= turn and j < m:
                yield Action(entry.stage, entry.kind, j)
                if entry.kind is ActionType.FORWARD and (entry.stage, entry.copy) in offloaded:
                    yield Action(entry.stage, ActionType.OFFLOAD, j)


def squeezed(
    problem: Problem, block: PeriodicBlock, policies: Sequence[SqueezePolicy] = POLICIES
) -> list[Squeezed]:
    """Return the block squeezed by each policy, shortest first; none where it is not plain.

    A policy under which the order does not fit the memory limits is left out.
    """
    if not block.is_plain:
        return []
    fused = ActionType.BACKWARD_WEIGHT not in block.kinds()
    squeezer = Squeezer.in_bytes(problem, fused=fused)
    times = block.squeezable(problem)
    found = [squeezer.squeeze(times, policy) for policy in policies]
    by_span = problem.objective == "span"
    return sorted(
        (made for made in found if made is not None),
        key=lambda made: made.span_ms if by_span else made.makespan_ms,
    )
