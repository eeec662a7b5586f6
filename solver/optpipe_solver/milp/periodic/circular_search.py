"""Local search over circular orders: the periodic model's alternative without big-M.

It anneals the circles of every device, the period indices of their items, and which (stage, copy)
is offloaded or recomputed. The period of a state is its maximum cycle ratio (`kernel.period`), its
memory is counted exactly, and what exceeds a limit is charged. Starts are building blocks with
uniform offsets, or a block of the MILP. Its size does not depend on the number of micro-batches.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from optpipe.schedule import ActionType
from optpipe_solver.families.v_shape import candidate_blocks
from optpipe_solver.milp.periodic import circular_kernel, circular_moves
from optpipe_solver.milp.periodic.block import Entry, PeriodicBlock
from optpipe_solver.milp.periodic.circular_kernel import (
    FORWARD,
    NUM_ROLES,
    WEIGHT,
    Circle,
    Nodes,
    rules_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe_solver.families.squeeze import BuildingBlock
    from optpipe_solver.milp.periodic.circular_kernel import Node

__all__ = ["CircularSearch", "small_memory"]


_SLICE = 2_000_000
"""Arcs relaxed, by estimate, in one call of compiled code: some hundredths of a second."""

_MODES = {
    ActionType.RELEASE: circular_kernel.OFFLOADED,
    ActionType.RECOMPUTE: circular_kernel.RECOMPUTED,
}


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
        1 / (number of periods), what is evaluated is the mean of a whole schedule.
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

    def from_times(self, block: BuildingBlock) -> Circle:
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
        circular_moves.shrink(made, spare, self.rules, circular_kernel.new_graph(self.rules), seed)
        return made

    def excess(self, circle: Circle, device: int) -> int:
        """Return by how many bytes a device's peak exceeds its limit; negative: room left."""
        return int(circular_kernel.excess(circle, self.rules, device))

    def evaluated_ms(self, circle: Circle) -> float:
        """Return the period of a circle, inf where it has none or exceeds a memory limit."""
        devices = range(len(self.problem.devices))
        ordered = all(
            circular_kernel.cells_in_order(circle, self.rules, device) for device in devices
        )
        if not ordered or not self._fits(circle):
            return float("inf")
        return float(
            circular_kernel.period(circle, self.rules, circular_kernel.new_graph(self.rules))
        )

    def charged_ms(self, circle: Circle) -> float:
        """Return what the search evaluates a circle by: its period and a charge for memory."""
        graph = circular_kernel.new_graph(self.rules)
        return float(circular_moves.charged(circle, self.rules, graph, self.way_share))

    def block_of(self, circle: Circle) -> PeriodicBlock | None:
        """Return the block of a circle, None where it has no period."""
        graph = circular_kernel.new_graph(self.rules)
        period = float(circular_kernel.period(circle, self.rules, graph))
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
        """Return the best circle seen while annealing, and what it is evaluated in ms.

        ``hot`` and ``cold`` are temperatures as fractions of the load bound. A judgement includes a
        charge for memory over the limit: ask `evaluated_ms` whether it keeps it.
        """
        work = Circle(*(field.copy() for field in circle))
        best = Circle(*(field.copy() for field in circle))
        evaluated = circular_moves.anneal(
            work,
            best,
            self.rules,
            circular_kernel.new_graph(self.rules),
            self.way_share,
            hot * self.rules.least,
            cold * self.rules.least,
            num_moves,
            seed,
        )
        return best, float(evaluated)

    @property
    def moves_per_slice(self) -> int:
        """How many moves take some hundredths of a second."""
        arcs = self.rules.lag.size + len(self.nodes.all)
        return max(20, _SLICE // (8 * arcs))

    def _fits(self, circle: Circle) -> bool:
        devices = range(len(self.problem.devices))
        hosted = [circular_kernel.host_peak(circle, self.rules, device) for device in devices]
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
        return mode == (
            circular_kernel.RECOMPUTED if node.role == NUM_ROLES - 1 else circular_kernel.OFFLOADED
        )

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


# --- The smallest memory at a given period, by local search: for sizes where the MILP is slow.
# The limit is lowered step by step, each time a circle is found that keeps it within the period; a
# step that fails is made smaller. Nothing is proven here.

_FIRST_STEP, _LAST_STEP, _SMALLER = 0.08, 0.004, 0.6
_STARTS = 64


def small_memory(
    problem: Problem, period_ms: float, *, num_moves: int, seed: int, tries: int = 2
) -> PeriodicBlock | None:
    """Return a block of at most this period whose largest device peak is small.

    Parameters
    ----------
    problem
        Its limits play no part, nor do its fused backwards, offload and recompute.
    period_ms
        Per micro-batch, at least the load bound.
    num_moves, tries
        Moves per step, and how many times a step is tried before a smaller one.
    seed
        What is tried is a function of it.

    Returns
    -------
    PeriodicBlock or None
        None where no start has so short a period.
    """
    search = CircularSearch(problem, fused=False)
    static = [problem.static_bytes_of(device) for device in range(len(problem.devices))]
    circle = _start(search, period_ms, static)
    if circle is None:
        return None
    step = _FIRST_STEP
    runs = 0
    while step > _LAST_STEP:
        peak = _peak(search, circle, static)
        aim = _limited(search, period_ms, static, int(peak * (1 - step)))
        for _ in range(tries):
            runs += 1
            found, evaluated = aim.improved(circle, num_moves=num_moves, seed=seed + runs)
            if evaluated <= aim.rules.least:
                circle = found
                break
        else:
            step *= _SMALLER
    return search.block_of(circle)


def _start(search: CircularSearch, period_ms: float, static: list[int]) -> Circle | None:
    """Return the building block of the smallest peak that keeps the period."""
    unlimited = _limited(search, period_ms, static, 2**60)
    circles = [search.from_times(block) for block in candidate_blocks(search.problem)[:_STARTS]]
    fast = [c for c in circles if unlimited.charged_ms(c) <= unlimited.rules.least]
    if not fast:
        found = [unlimited.improved(c, num_moves=2000, seed=n) for n, c in enumerate(circles[:8])]
        fast = [c for c, evaluated in found if evaluated <= unlimited.rules.least]
    return min(fast, key=lambda c: _peak(search, c, static), default=None)


def _peak(search: CircularSearch, circle: Circle, static: list[int]) -> int:
    """Return the largest peak of a device in bytes, static bytes included."""
    over = [
        search.excess(circle, device) + int(search.rules.limit[device]) + static[device]
        for device in range(len(static))
    ]
    return max(over)


def _limited(
    search: CircularSearch, period_ms: float, static: list[int], limit: int
) -> CircularSearch:
    """Return the search with one limit for all devices, in which any period up to this is best."""
    other = copy.copy(search)
    least = max(search.rules.least, period_ms) * (1 + 1e-9)
    room = np.array([limit - held for held in static], dtype=np.int64)
    other.rules = search.rules._replace(limit=room, least=least)
    return other
