"""From a block to programs: repeat it for m micro-batches, then fill warm-up and cool-down.

*Repeat*: a device's program is the infinite one with all micro-batches but 0 to m - 1 left out. It
is legal for every m >= 1. Orders: whatever an action needs runs before it in the times of the
block, which leaving out does not change. Memory: every micro-batch holds a number of bytes >= 0 at
any place of the program, so that what is left out only frees some: no peak exceeds the block's.

*Squeeze* (`families.repeat_and_squeeze`): the same order of F and I, everything as soon as
possible; forwards run early while memory admits all those they overtake, and W fill the waits of
cool-down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe_solver.families.repeat_and_squeeze import Early, Policy, Squeezer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.families.repeat_and_squeeze import Squeezed
    from optpipe_solver.milp.periodic.block import Entry, PeriodicBlock

__all__ = ["POLICIES", "squeezed", "unroll"]

POLICIES = tuple(
    Policy(early, patience) for patience in (1.0, 0.5, 0.0) for early in reversed(Early)
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
    problem: Problem, block: PeriodicBlock, policies: Sequence[Policy] = POLICIES
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
