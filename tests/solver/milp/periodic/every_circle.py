"""Every circle of a tiny problem with one stage per device: the judge of the periodic MILP."""

from __future__ import annotations

from itertools import permutations, product
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.milp.periodic import circular_kernel
from optpipe_solver.milp.periodic.circular_kernel import Circle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_solver.milp.periodic.circular_search import CircularSearch

_ROLES = {
    circular_kernel.KEPT: (
        circular_kernel.FORWARD,
        circular_kernel.BACKWARD,
        circular_kernel.WEIGHT,
    ),
    circular_kernel.OFFLOADED: (
        circular_kernel.FORWARD,
        circular_kernel.RELEASE,
        circular_kernel.RELOAD,
        circular_kernel.BACKWARD,
        circular_kernel.WEIGHT,
    ),
    circular_kernel.RECOMPUTED: (
        circular_kernel.FORWARD,
        circular_kernel.RECOMPUTE,
        circular_kernel.BACKWARD,
        circular_kernel.WEIGHT,
    ),
}

_Row = tuple[list[int], dict[int, int], dict[int, int]]
"""Items in their order, the turn of each, and the mode of each cell."""


def every_circle(search: CircularSearch, turns: Sequence[int]) -> Iterator[Circle]:
    """Yield all circles cut before the first F.

    ``turns`` says by device over how many of them a micro-batch's items may be spread.
    """
    devices = range(len(search.problem.devices))
    rows_of = [list(_rows(search, device, turns[device])) for device in devices]
    widest = max(int((search.rules.device[search.rules.cell] == d).sum()) for d in devices)
    for rows in product(*rows_of):
        circle = Circle(
            np.zeros((len(rows), widest), dtype=np.int64),
            np.array([len(order) for order, _, _ in rows], dtype=np.int64),
            np.zeros(len(search.nodes.all), dtype=np.int64),
            np.zeros(len(search.nodes.cells), dtype=np.int64),
        )
        for device, (order, later, modes) in enumerate(rows):
            circle.rows[device, : len(order)] = order
            for item, turn in later.items():
                circle.turn[item] = turn
            for cell, mode in modes.items():
                circle.mode[cell] = mode
        yield circle


def _rows(search: CircularSearch, device: int, turns: int) -> Iterator[_Row]:
    cells = [c for c in range(len(search.nodes.cells)) if search.rules.device[c] == device]
    allowed = [[m for m in range(3) if search.rules.may[c, m]] for c in cells]
    for modes in product(*allowed):
        chains = [
            [
                int(search.rules.item[cell, role])
                for role in _ROLES[mode]
                if search.rules.item[cell, role] >= 0
            ]
            for cell, mode in zip(cells, modes, strict=True)
        ]
        first, *others = [item for chain in chains for item in chain]
        for rest in permutations(others):
            order = [first, *rest]
            for later in product(range(turns), repeat=len(others)):
                turn = dict(zip([first, *others], (0, *later), strict=True))
                if all(_in_order(chain, order, turn) for chain in chains):
                    yield order, turn, dict(zip(cells, modes, strict=True))


def _in_order(chain: list[int], order: list[int], turn: dict[int, int]) -> bool:
    places = [(turn[item], order.index(item)) for item in chain]
    return places == sorted(places)
