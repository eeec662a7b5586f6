"""List scheduling of F, I, W (or B) under byte limits: the engine of the greedy families.

A device that becomes free takes, of what is ready, an input gradient first, then a forward if
memory admits it, and fills idle time with weight gradients. Micro-batches go first in, first out
through every stage.

Memory-limited scheduling can deadlock when a device holds several stages: forwards of its first
fill the memory its last needs. A forward is therefore admitted only if the device could still
finish what it holds one micro-batch after the other, oldest first (the banker's rule).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.families.encoded import encoded
from optpipe_solver.families.list_kernel import schedule
from optpipe_solver.families.rules import rules_in_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe_solver.improve.compiled.problem import Rows

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
    """

    limits: tuple[int, ...]
    patience: float = 1.0
    fused: bool = False
    in_flight: float = inf


def list_schedule(problem: Problem, policy: Policy) -> Rows | None:
    """Return compute programs within the policy's limits, or None where they get stuck.

    They are integers, as `CompiledProblem.encode` makes them.
    """
    num_stages, m = len(problem.stages), problem.num_microbatches
    rules = rules_in_bytes(problem, fused=policy.fused)
    rules = rules._replace(limit=np.array(policy.limits, dtype=np.int64))
    done, rows, lengths = schedule(
        rules, _most_in_flight(policy, num_stages, m), policy.patience, m
    )
    if not done:
        return None
    codes = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return encoded(problem, codes, fused=policy.fused)


def _most_in_flight(policy: Policy, num_stages: int, m: int) -> NDArray[np.int64]:
    """Return how many micro-batches each stage may have between F and I."""
    if policy.in_flight == inf:
        return np.full(num_stages, m)
    ahead = np.arange(num_stages, 0, -1)
    return np.maximum(1, (policy.in_flight * ahead).astype(np.int64))
