"""A block: what one micro-batch does, and when, repeated every T.

``rows[d]`` is the circle of device d in the order of one turn; micro-batch (or super-period) k runs
an entry in turn ``index + k``. The order of a device's program is that of (turn, place in the row).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import ActionType
from optpipe.memory import device_peak_bytes
from optpipe_solver.families.repeat_and_squeeze import Block
from optpipe_solver.milp.periodic.unroll import unroll

if TYPE_CHECKING:
    from optpipe.problem import Problem

__all__ = ["Entry", "PeriodicBlock"]

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

    def squeezable(self, problem: Problem) -> Block:
        """Return the times of F and I (or B), as `families.repeat_and_squeeze` repeats them."""
        forward = np.zeros(len(problem.stages))
        backward = np.zeros(len(problem.stages))
        for row in self.rows:
            for entry in row:
                if entry.kind is ActionType.FORWARD:
                    forward[entry.stage] = entry.start_ms
                elif entry.kind.is_backward:
                    backward[entry.stage] = entry.start_ms
        return Block(forward, backward, self.period_ms)
