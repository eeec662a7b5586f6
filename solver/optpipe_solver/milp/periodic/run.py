"""What all parts of the periodic search share: the budget, the MILP, and what is offered."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

from optpipe_solver.milp.periodic.items import Choice, Modes, PeriodicItems, load_ms
from optpipe_solver.milp.periodic.search import (
    Budget,
    num_order_pairs,
    shortest_period,
    shortest_way,
)
from optpipe_solver.milp.periodic.unroll import POLICIES, squeezed, unroll

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_solver.families.repeat_and_squeeze import Squeezed
    from optpipe_solver.incumbent import Incumbent
    from optpipe_solver.milp.periodic.block import PeriodicBlock

__all__ = ["METHOD", "NODE_WORK", "PeriodicRun"]

METHOD = "periodic"
NODE_WORK = 200
"""Moves of the local search that count as much work as one branch-and-bound node."""

_MOST_PAIRS = 480
_MILP_SHARE = 0.25
_CELLS_OF_MANY_POLICIES = 20_000


class PeriodicRun:
    """The budget, and what is offered within it."""

    def __init__(
        self,
        best: Incumbent,
        *,
        time_limit_s: float,
        threads: int,
        seed: int,
        should_stop: Callable[[], bool] | None,
        work_limit: int | None,
    ) -> None:
        self.best = best
        self.end = time.perf_counter() + time_limit_s
        self.threads = threads
        self.seed = seed
        self.should_stop = should_stop
        self.work_limit = work_limit
        self.work = 0
        self.shortest_ms = inf
        self.shortest: PeriodicBlock | None = None
        self.blocks: list[PeriodicBlock] = []
        self._seen: set[float] = set()

    def is_over(self) -> bool:
        """Whether time, work, or patience is at its end, or nothing is left to gain."""
        if self.should_stop is not None and self.should_stop():
            return True
        return self.left_s() <= 0 or self.left_work() <= 0 or self.best.is_optimal

    def left_s(self) -> float:
        """Return the seconds left."""
        return self.end - time.perf_counter()

    def left_work(self) -> float:
        """Return the moves left."""
        return inf if self.work_limit is None else self.work_limit - self.work

    def backward_kinds(self) -> list[bool]:
        """Return whether to search with fused backwards, with split ones, or with both."""
        items = PeriodicItems(self.best.problem, Modes())
        stages = range(len(self.best.problem.stages))
        may_fuse = [items.may(Choice.FUSED, s) for s in stages]
        return [False, True] if any(may_fuse) else [False]

    def may_shrink(self) -> bool:
        """Whether anything can be offloaded or recomputed."""
        problem = self.best.problem
        return any(
            problem.can_offload(s) or stage.can_recompute for s, stage in enumerate(problem.stages)
        )

    def milp_fits(self) -> bool:
        """Whether the model is small enough to be worth building."""
        return not self.is_over() and num_order_pairs(self.best.problem) <= _MOST_PAIRS

    def ask_milp(self) -> None:
        """Ask for the shortest period within the limits, then for the shortest way at it."""
        problem = self.best.problem
        serial = sum(
            stage.busy_ms + sum(hop)
            for stage, hop in zip(problem.stages, problem.boundary_ms, strict=True)
        )
        longest = min(self.shortest_ms, max(serial, load_ms(problem)))
        known = self.shortest if self.shortest_ms <= longest else None
        found = shortest_period(problem, longest * (1 + 1e-6), self._budget(), start=known)
        self.work += NODE_WORK * found.num_nodes
        if found.block is None:
            return
        self._take(found.block)
        if not self.is_over():
            period = found.block.period_ms * (1 + 1e-6)
            nearer = shortest_way(problem, period, self._budget(), start=found.block)
            self.work += NODE_WORK * nearer.num_nodes
            if nearer.block is not None:
                self._take(nearer.block)

    def offer_squeezed(self, made: Squeezed) -> bool:
        """Offer a squeezed block where it is shorter than what is known."""
        problem = self.best.problem
        length = made.span_ms if problem.objective == "span" else made.makespan_ms
        if length in self._seen or length >= self.best.objective_ms * (1 + 1e-9):
            return False
        self._seen.add(length)
        return self.best.offer(made.programs(len(problem.stages)), METHOD)

    def offer(self, block: PeriodicBlock) -> bool:
        """Offer a block squeezed, or by its own order; return whether it is better."""
        problem = self.best.problem
        large = len(problem.stages) * problem.num_microbatches > _CELLS_OF_MANY_POLICIES
        made = squeezed(problem, block, POLICIES[:2] if large else POLICIES)
        if not made:
            return self.best.offer(unroll(problem, block), METHOD)
        return self.offer_squeezed(made[0])

    def note(self, block: PeriodicBlock, period_ms: float) -> None:
        """Remember a block of one micro-batch within the limits if its period is the shortest."""
        if period_ms < self.shortest_ms:
            self.shortest, self.shortest_ms = block, period_ms

    def _take(self, block: PeriodicBlock) -> None:
        self.note(block, block.period_ms)
        self.offer(block)
        self.blocks.append(block)

    def _budget(self) -> Budget:
        nodes = None if self.work_limit is None else int(self.left_work() // NODE_WORK)
        share = _MILP_SHARE * self.left_s()
        # What is optimal among blocks bounds no schedule: nothing here needs a proof.
        return Budget(share, self.threads, self.seed, nodes, self.should_stop, proves=False)
