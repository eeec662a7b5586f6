"""Local search over circular orders: the periodic model's alternative without big-M.

It anneals (Kirkpatrick et al. 1983) the circles of F, I, W (or B) of every device and their period
indices. The period of a state is its maximum cycle ratio (`circular_kernel.period`), its memory is
counted exactly, and what exceeds a limit is charged. Starts are building blocks with uniform
offsets, or a block of the MILP. Its size does not depend on the number of micro-batches. Not moved
here: offload and recompute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import Action, ActionType
from optpipe.memory import action_delta, action_workspace
from optpipe.simulate import duration_ms
from optpipe_solver.improve import circular_kernel
from optpipe_solver.improve.circular_kernel import Circle, Rules
from optpipe_solver.milp.periodic.block import Entry, PeriodicBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe_solver.families.repeat_and_squeeze import Block

__all__ = ["CircularSearch"]

_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_SLICE = 2_000_000
"""Arcs relaxed, by estimate, in one call of compiled code: some hundredths of a second."""


class CircularSearch:
    """Circles of one problem, backwards fused everywhere or split everywhere.

    Parameters
    ----------
    problem
        Its number of micro-batches plays no part.
    fused
        Whether B stands for I and W.
    """

    def __init__(self, problem: Problem, *, fused: bool) -> None:
        self.problem = problem
        self.kinds = (_F, _B) if fused else (_F, _I, _W)
        self._nodes = [(s, kind) for s in range(len(problem.stages)) for kind in self.kinds]
        self._number = {node: number for number, node in enumerate(self._nodes)}
        self.rules = self._rules()

    def from_times(self, block: Block) -> Circle:
        """Return the circle of a building block: ordered by time, each W behind its I."""
        times = np.zeros(len(self._nodes))
        for number, (s, kind) in enumerate(self._nodes):
            times[number] = block.forward[s] if kind is _F else block.backward[s]
        turns = np.floor(times / block.period + 1e-9).astype(np.int64)
        phases = times - turns * block.period
        return self._circle(turns, phases)

    def from_block(self, block: PeriodicBlock) -> Circle | None:
        """Return the circle of a plain block, None where its backwards are not all of our kind."""
        rows = [
            [self._number.get((entry.stage, entry.kind), -1) for entry in row] for row in block.rows
        ]
        if not block.is_plain or any(-1 in row for row in rows):
            return None
        turns = np.zeros(len(self._nodes), dtype=np.int64)
        places = np.zeros(len(self._nodes))
        for row, numbers in zip(block.rows, rows, strict=True):
            for place, (entry, number) in enumerate(zip(row, numbers, strict=True)):
                turns[number], places[number] = entry.index, place
        return self._circle(turns, places)

    def judged_ms(self, circle: Circle) -> float:
        """Return the period of a circle, inf where it has none or exceeds a memory limit."""
        over = [circular_kernel.excess(circle, self.rules, d) for d in range(circle.counts.size)]
        start = np.zeros(len(self._nodes))
        return float("inf") if max(over) > 0 else circular_kernel.period(circle, self.rules, start)

    def charged_ms(self, circle: Circle) -> float:
        """Return what the search judges a circle by: its period and a charge for memory."""
        return float(circular_kernel.charged(circle, self.rules))

    def block_of(self, circle: Circle) -> PeriodicBlock | None:
        """Return the block of a circle, None where it has no period."""
        start = np.zeros(len(self._nodes))
        period = float(circular_kernel.period(circle, self.rules, start))
        if not np.isfinite(period):
            return None
        absolute = start + period * circle.turn
        absolute -= absolute[self._number[0, _F]]
        rows = tuple(
            tuple(
                self._entry(node, int(circle.turn[node]), float(absolute[node]))
                for node in row[:count].tolist()
            )
            for row, count in zip(circle.rows, circle.counts, strict=True)
        )
        return PeriodicBlock(period, 1, _normalised(rows))

    def improved(
        self, circle: Circle, *, num_moves: int, seed: int, hot: float = 0.02, cold: float = 0.0005
    ) -> tuple[Circle, float]:
        """Return the best circle seen while annealing, and what it is judged in ms.

        ``hot`` and ``cold`` are temperatures as fractions of the load bound. A judgement includes a
        charge for memory over the limit: ask `judged_ms` whether it keeps it.
        """
        work = Circle(circle.rows.copy(), circle.counts, circle.turn.copy())
        best = Circle(circle.rows.copy(), circle.counts, circle.turn.copy())
        judged = circular_kernel.anneal(
            work,
            best,
            self.rules,
            hot * self.rules.least,
            cold * self.rules.least,
            num_moves,
            seed,
        )
        return best, float(judged)

    @property
    def moves_per_slice(self) -> int:
        """How many moves take some hundredths of a second."""
        arcs = self.rules.lag.size + len(self._nodes)
        return max(20, _SLICE // (8 * arcs))

    def _entry(self, node: int, index: int, start_ms: float) -> Entry:
        stage, kind = self._nodes[node]
        return Entry(stage, kind, 0, index, start_ms)

    def _circle(self, turns: NDArray[np.int64], phases: NDArray[np.float64]) -> Circle:
        widest = max(len(held) for held in self.problem.stages_of) * len(self.kinds)
        rows = np.zeros((len(self.problem.devices), widest), dtype=np.int64)
        counts = np.zeros(len(self.problem.devices), dtype=np.int64)
        for device, held in enumerate(self.problem.stages_of):
            nodes = [self._number[s, kind] for s in held for kind in self.kinds]
            ordered = sorted(nodes, key=lambda node: (phases[node], self._depth(node)))
            rows[device, : len(ordered)], counts[device] = ordered, len(ordered)
        return Circle(rows, counts, turns)

    def _depth(self, node: int) -> int:
        """Return where an item stands in the chain: ties of phase go by it."""
        s, kind = self._nodes[node]
        if kind is _F:
            return s
        last = 2 * len(self.problem.stages)
        return 2 * (last - s) + (1 if kind is _W else 0)

    def _rules(self) -> Rules:
        stages = self.problem.stages
        arcs = list(self._arcs())
        delta = [action_delta(stages[s], kind, is_recomputed=False) for s, kind in self._nodes]
        extra = [
            max(0, delta[n]) + action_workspace(stages[s], kind)
            for n, (s, kind) in enumerate(self._nodes)
        ]
        return Rules(
            duration=np.array([self._ms(node) for node in range(len(self._nodes))]),
            delta=np.array(delta, dtype=np.int64),
            extra=np.array(extra, dtype=np.int64),
            arc_from=np.array([a for a, _, _ in arcs], dtype=np.int64),
            arc_to=np.array([b for _, b, _ in arcs], dtype=np.int64),
            lag=np.array([ms for _, _, ms in arcs]),
            limit=np.array(
                [
                    device.usable_bytes - self.problem.static_bytes_of(d)
                    for d, device in enumerate(self.problem.devices)
                ],
                dtype=np.int64,
            ),
            least=max(self._load(), 1e-9),
        )

    def _load(self) -> float:
        return max(
            sum(self._ms(self._number[s, kind]) for s in held for kind in self.kinds)
            for held in self.problem.stages_of
        )

    def _ms(self, node: int) -> float:
        s, kind = self._nodes[node]
        return duration_ms(self.problem, Action(s, kind, 0))

    def _arcs(self) -> Sequence[tuple[int, int, float]]:
        """Return (a, b, ms) in the order of the chain: one sweep then reaches its end."""
        last = len(self.problem.stages) - 1
        back = self.kinds[1]
        arcs = []
        for s in range(last + 1):
            a = self._number[s, _F]
            there = self.problem.boundary_ms[s][0]
            b = self._number[s + 1, _F] if s < last else self._number[s, back]
            arcs.append((a, b, self._ms(a) + (there if s < last else 0.0)))
        for s in range(last, 0, -1):
            a, b = self._number[s, back], self._number[s - 1, back]
            arcs.append((a, b, self._ms(a) + self.problem.boundary_ms[s - 1][1]))
        if back is _I:
            for s in range(last + 1):
                a = self._number[s, _I]
                arcs.append((a, self._number[s, _W], self._ms(a)))
        return arcs


def _normalised(rows: tuple[tuple[Entry, ...], ...]) -> tuple[tuple[Entry, ...], ...]:
    """Return rows whose smallest index is 0."""
    moved = []
    for row in rows:
        least = min((entry.index for entry in row), default=0)
        moved.append(
            tuple(Entry(e.stage, e.kind, e.copy, e.index - least, e.start_ms) for e in row)
        )
    return tuple(moved)
