"""Local search over circular orders: the periodic model's alternative without big-M.

It anneals the circles of every device, the period indices of their items, and which (stage, copy)
is offloaded or recomputed. The period of a state is its maximum cycle ratio (`kernel.period`), its
memory is counted exactly, and what exceeds a limit is charged. Starts are building blocks with
uniform offsets, or a block of the MILP. Its size does not depend on the number of micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import ActionType
from optpipe_solver.improve.circular import annealing, kernel
from optpipe_solver.improve.circular.kernel import FORWARD, NUM_ROLES, WEIGHT, Circle
from optpipe_solver.improve.circular.rules import Nodes, rules_of
from optpipe_solver.milp.periodic.block import Entry, PeriodicBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe_solver.families.repeat_and_squeeze import Block
    from optpipe_solver.improve.circular.rules import Node

__all__ = ["CircularSearch"]

_SLICE = 2_000_000
"""Arcs relaxed, by estimate, in one call of compiled code: some hundredths of a second."""

_MODES = {ActionType.RELEASE: kernel.OFFLOADED, ActionType.RECOMPUTE: kernel.RECOMPUTED}


class CircularSearch:
    """Circles of one problem, backwards fused everywhere or split everywhere.

    Parameters
    ----------
    problem
        Its number of micro-batches plays no part.
    fused
        Whether B stands for I and W.
    copies
        Micro-batches per period, each treated in its own way.
    shrinks
        Whether cells may be offloaded and recomputed, where the problem allows it.
    way_share
        How much of the way of a period's micro-batches beyond the period counts as period: with
        1 / (number of periods), what is judged is the mean of a whole schedule.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        fused: bool,
        copies: int = 1,
        shrinks: bool = False,
        way_share: float = 0.0,
    ) -> None:
        self.problem = problem
        self.way_share = way_share
        self.nodes = Nodes(problem, fused=fused, copies=copies, shrinks=shrinks)
        self.rules = rules_of(self.nodes)

    def from_times(self, block: Block) -> Circle:
        """Return the circle of a building block: ordered by time, each W behind its I; all kept."""
        whole = block.period * self.nodes.copies
        times = np.zeros(len(self.nodes.all))
        for number, node in enumerate(self.nodes.all):
            passes = block.forward if node.role == FORWARD else block.backward
            times[number] = passes[node.stage] + node.copy * block.period
        turns = np.floor(times / whole + 1e-9).astype(np.int64)
        phases = times - turns * whole
        kept = np.zeros(len(self.nodes.cells), dtype=np.int64)
        return self._circle(turns, phases, kept)

    def from_block(self, block: PeriodicBlock) -> Circle | None:
        """Return the circle of a block, None where one of its items is none of ours."""
        number = self.nodes.number
        entries = [(place, entry) for row in block.rows for place, entry in enumerate(row)]
        if block.copies != self.nodes.copies or any(_key(e) not in number for _, e in entries):
            return None
        turns = np.zeros(len(self.nodes.all), dtype=np.int64)
        places = np.zeros(len(self.nodes.all))
        modes = np.zeros(len(self.nodes.cells), dtype=np.int64)
        for place, entry in entries:
            at = number[_key(entry)]
            turns[at], places[at] = entry.index, place
            if entry.kind in _MODES:
                modes[self.nodes.cell(self.nodes.all[at])] = _MODES[entry.kind]
        return self._circle(turns, places, modes)

    def shrunk(self, circle: Circle, *, seed: int = 0) -> Circle:
        """Return the circle with cells offloaded or recomputed where it is charged less so."""
        made, spare = (Circle(*(field.copy() for field in circle)) for _ in range(2))
        annealing.shrink(made, spare, self.rules, kernel.new_graph(self.rules), seed)
        return made

    def excess(self, circle: Circle, device: int) -> int:
        """Return by how many bytes a device's peak exceeds its limit; negative: room left."""
        return int(kernel.excess(circle, self.rules, device))

    def judged_ms(self, circle: Circle) -> float:
        """Return the period of a circle, inf where it has none or exceeds a memory limit."""
        devices = range(len(self.problem.devices))
        ordered = all(kernel.cells_in_order(circle, self.rules, device) for device in devices)
        if not ordered or not self._fits(circle):
            return float("inf")
        return float(kernel.period(circle, self.rules, kernel.new_graph(self.rules)))

    def charged_ms(self, circle: Circle) -> float:
        """Return what the search judges a circle by: its period and a charge for memory."""
        graph = kernel.new_graph(self.rules)
        return float(annealing.charged(circle, self.rules, graph, self.way_share))

    def block_of(self, circle: Circle) -> PeriodicBlock | None:
        """Return the block of a circle, None where it has no period."""
        graph = kernel.new_graph(self.rules)
        period = float(kernel.period(circle, self.rules, graph))
        if not np.isfinite(period):
            return None
        absolute = graph.start[: len(self.nodes.all)] + period * circle.turn
        absolute -= absolute[0]
        rows = tuple(
            tuple(
                _entry(self.nodes.all[at], int(circle.turn[at]), float(absolute[at]))
                for at in row[:count].tolist()
            )
            for row, count in zip(circle.rows, circle.counts, strict=True)
        )
        return PeriodicBlock(period, self.nodes.copies, _normalised(rows))

    def improved(
        self, circle: Circle, *, num_moves: int, seed: int, hot: float = 0.02, cold: float = 0.0005
    ) -> tuple[Circle, float]:
        """Return the best circle seen while annealing, and what it is judged in ms.

        ``hot`` and ``cold`` are temperatures as fractions of the load bound. A judgement includes a
        charge for memory over the limit: ask `judged_ms` whether it keeps it.
        """
        work = Circle(*(field.copy() for field in circle))
        best = Circle(*(field.copy() for field in circle))
        judged = annealing.anneal(
            work,
            best,
            self.rules,
            kernel.new_graph(self.rules),
            self.way_share,
            hot * self.rules.least,
            cold * self.rules.least,
            num_moves,
            seed,
        )
        return best, float(judged)

    @property
    def moves_per_slice(self) -> int:
        """How many moves take some hundredths of a second."""
        arcs = self.rules.lag.size + len(self.nodes.all)
        return max(20, _SLICE // (8 * arcs))

    def _fits(self, circle: Circle) -> bool:
        devices = range(len(self.problem.devices))
        hosted = [kernel.host_peak(circle, self.rules, device) for device in devices]
        held = [0] * len(self.problem.hosts)
        for host, peak in zip(self.rules.host.tolist(), hosted, strict=True):
            held[host] += peak
        limits = self.rules.host_limit.tolist()
        fits = all(limit < 0 or peak <= limit for peak, limit in zip(held, limits, strict=True))
        return fits and all(self.excess(circle, device) <= 0 for device in devices)

    def _circle(
        self, turns: NDArray[np.int64], phases: NDArray[np.float64], modes: NDArray[np.int64]
    ) -> Circle:
        devices = range(len(self.problem.devices))
        all_of: list[list[int]] = [[] for _ in devices]
        widest = 1
        for device in devices:
            mine = [
                at
                for at in range(len(self.nodes.all))
                if self.rules.device[self.rules.cell[at]] == device
            ]
            widest = max(widest, len(mine))
            present = [at for at in mine if self._stands(at, modes)]
            all_of[device] = sorted(present, key=lambda at: (phases[at], self._depth(at)))
        rows = np.zeros((len(devices), widest), dtype=np.int64)
        for device, row in enumerate(all_of):
            rows[device, : len(row)] = row
        counts = np.array([len(row) for row in all_of], dtype=np.int64)
        return Circle(rows, counts, turns, modes)

    def _stands(self, at: int, modes: NDArray[np.int64]) -> bool:
        node = self.nodes.all[at]
        mode = int(modes[self.nodes.cell(node)])
        if node.role <= WEIGHT:
            return True
        return mode == (kernel.RECOMPUTED if node.role == NUM_ROLES - 1 else kernel.OFFLOADED)

    def _depth(self, at: int) -> int:
        """Return where an item stands in the chain: ties of phase go by it."""
        node = self.nodes.all[at]
        if node.role == FORWARD:
            return node.stage
        last = 2 * len(self.problem.stages)
        return 2 * (last - node.stage) + (1 if node.role == WEIGHT else 0)


def _key(entry: Entry) -> tuple[int, int, ActionType]:
    return entry.stage, entry.copy, entry.kind


def _entry(node: Node, index: int, start_ms: float) -> Entry:
    return Entry(node.stage, node.kind, node.copy, index, start_ms)


def _normalised(rows: tuple[tuple[Entry, ...], ...]) -> tuple[tuple[Entry, ...], ...]:
    """Return rows whose smallest index is 0."""
    moved = []
    for row in rows:
        least = min((entry.index for entry in row), default=0)
        moved.append(
            tuple(Entry(e.stage, e.kind, e.copy, e.index - least, e.start_ms) for e in row)
        )
    return tuple(moved)
