"""The problem of a cut: costs of layers, an order of passes, and the memory of each device.

The plan MILP, the annealing of cuts and tune's choice of layers all use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.jit import jitted
from optpipe_solver.milp.plan.pattern import STATES
from optpipe_solver.milp.plan.variables import PlanTables, as_counts, durations_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe.model import Model
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.milp.plan.pattern import Pattern
    from optpipe_solver.milp.plan.variables import PlanChoice

__all__ = ["TOLERANCE", "CutProblem", "PlanMemory", "cuts_with_a_layer_moved", "excess"]

TOLERANCE = 1e-6
"""The largest excess, as a share of a device's memory, that counts as none."""


class CutProblem:
    """Which layers and which mode each stage has, in one order of passes.

    Parameters
    ----------
    model
        The layers and the devices.
    pattern
        The order, which also has the placement of the stages.
    hidden
        The ms that F and B of a layer can hide in a pair, by device and layer. None = by the model,
        for both passes alike.
    """

    def __init__(
        self,
        model: Model,
        pattern: Pattern,
        hidden: Sequence[Sequence[tuple[float, float]]] | None = None,
    ) -> None:
        if hidden is None:
            by_model = [[(ms, ms) for ms in own] for own in model.hidden_on]
            hidden = by_model if pattern.has_pairs else ()
        placement, moves = pattern.problem.placement, pattern.transfers
        self.pattern = pattern
        self.tables = PlanTables(model, placement, moves, pattern.recompute, hidden)
        self.memory = PlanMemory.of(pattern, self.tables)

    def length_ms(self, choice: PlanChoice) -> float:
        """Return the length of the longest path."""
        return self.pattern.length_ms(durations_of(self.tables, choice))

    def fits(self, choice: PlanChoice) -> bool:
        """Whether the memory of every device suffices."""
        devices = range(len(self.pattern.programs))
        return not any(self.excesses(as_counts(self.tables, choice), devices))

    def excesses(self, counts: tuple[Floats, Floats], devices: Iterable[int]) -> list[float]:
        """Return by how much each device exceeds its limit, as a share of it; 0 if it fits.

        ``counts`` is as from `as_counts`.
        """
        most = (float(excess(self.memory, *counts, one).max(initial=0.0)) for one in devices)
        return [one if one > TOLERANCE else 0.0 for one in most]


def cuts_with_a_layer_moved(
    sizes: tuple[int, ...], givers: Iterable[int]
) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one layer less on a stage of ``givers`` and one more on another stage."""
    for giver in givers:
        for taker in range(len(sizes)):
            if giver != taker and sizes[giver] > 1:
                moved = list(sizes)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)


class PlanMemory(NamedTuple):
    """The memory that the programs of a pattern need, with the moments of all devices in a row.

    The moments of a device begin at ``first[device]``. ``own`` lists the stages of each device and
    is padded with -1. ``counts`` is by moment, position of the stage on its device, and state.
    Bytes are as in `PlanTables`.
    """

    first: Ints
    own: Ints
    limits: Floats
    counts: Floats
    workspace: Floats
    inside_at: Ints
    held_bytes: Floats
    extra_bytes: Floats
    static_bytes: Floats
    inside_bytes: Floats

    @classmethod
    def of(cls, pattern: Pattern, tables: PlanTables) -> PlanMemory:
        """Return the moments of a pattern, with the bytes of each layer."""
        width = max(map(len, pattern.stages_of))
        own = np.full((len(pattern.programs), width), -1, dtype=np.int64)
        for device, stages in enumerate(pattern.stages_of):
            own[device, : len(stages)] = stages
        moments = [moment for found in pattern.moments for moment in found]
        counts = np.zeros((len(moments), width, len(STATES)))
        for row, moment in zip(counts, moments, strict=True):
            row[: len(moment.counts)] = moment.counts
        beside = [tables.beside_bytes(moment) for moment in moments]
        inside_at = [moment.stage if moment.with_inside else -1 for moment in moments]
        return cls(
            first=np.cumsum([0, *map(len, pattern.moments)]),
            own=own,
            limits=np.array([float(d.usable_bytes) for d in tables.model.devices]),
            counts=counts,
            workspace=np.array(beside, dtype=np.float64),
            inside_at=np.array(inside_at, dtype=np.int64),
            held_bytes=tables.held_bytes,
            extra_bytes=tables.extra_bytes,
            static_bytes=tables.static_bytes,
            inside_bytes=tables.inside_bytes,
        )


@jitted
def excess(memory: PlanMemory, layers: Floats, modes: Floats, device: int) -> Floats:
    """Return by how much each moment of a device exceeds the limit, as a share of the limit.

    ``layers`` is by stage, run and mode, ``modes`` by stage and mode.
    """
    own = memory.own[device]
    begin, end = memory.first[device], memory.first[device + 1]
    per_cell = np.zeros((own.size, memory.counts.shape[2]))
    inside = np.zeros(layers.shape[0])
    static = 0.0
    for place, s in enumerate(own[own >= 0]):
        inside[s] = (modes[s] * memory.inside_bytes[s]).sum()
        static += (layers[s].sum(axis=1) * memory.static_bytes[s]).sum()
        for state in range(per_cell.shape[1]):
            per_cell[place, state] = (modes[s] * memory.extra_bytes[state, s]).sum()
            per_cell[place, state] += (layers[s] * memory.held_bytes[state, s]).sum()
    limit = float(memory.limits[device])
    found: Floats = memory.workspace[begin:end] + static - limit
    for moment in range(begin, end):
        found[moment - begin] += (memory.counts[moment] * per_cell).sum()
        if memory.inside_at[moment] >= 0:
            found[moment - begin] += inside[memory.inside_at[moment]]
    found /= max(limit, 1.0)
    return found
