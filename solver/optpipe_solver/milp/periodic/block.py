"""A block: what one micro-batch does, and when, repeated every T.

``rows[d]`` is the circle of device d in the order of one turn; micro-batch (or super-period) k runs
an entry in turn ``index + k``. The order of a device's program is that of (turn, place in the row).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import ActionType
from optpipe.memory import device_peak_bytes
from optpipe_solver.families.repeat_and_squeeze import Block
from optpipe_solver.milp.periodic.unroll import unroll

if TYPE_CHECKING:
    from optpipe.problem import Problem

__all__ = ["Entry", "PeriodicBlock"]


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
        plain = {
            ActionType.FORWARD,
            ActionType.BACKWARD_INPUT,
            ActionType.BACKWARD_WEIGHT,
            ActionType.FULL_BACKWARD,
        }
        return self.copies == 1 and all(entry.kind in plain for row in self.rows for entry in row)

    def kinds(self) -> frozenset[ActionType]:
        """Return the action types it holds."""
        return frozenset(entry.kind for row in self.rows for entry in row)

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
