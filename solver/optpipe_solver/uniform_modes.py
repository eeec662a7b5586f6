"""Programs with one mode per stage for all micro-batches, such that they fit the memory limits.

With the tightest transfers, RELEASE comes right after F, and RELOAD and RECOMPUTE right before the
backward. Then the bytes of a device during an action are a sum over its stages, and each term
depends only on the stage's mode. Such tight copies delay their device. So modes are chosen for
several shares of the limits, and the transfers move as far as memory allows. Simulation decides
which modes are best.

Limits of hosts are ignored. The load of the lanes decides whether copies can be hidden.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import Rows, keeps_limits
from optpipe_solver.budget import check_stop
from optpipe_solver.local_search.board import board_of, rows_on, undo_for
from optpipe_solver.local_search.room import Stretch, settle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe_solver.arrays import Ints
    from optpipe_solver.arrays.encoding import CompiledProblem

__all__ = ["in_modes", "with_uniform_modes"]

_MOST_CHOICES = 256
"""Maximum choices of a device for which all are tried; beyond it, modes change one by one."""

_HIDDEN_COST = 0.05
"""Assumed cost of a copy that fits into its lane, as a share of its duration."""

_SHARES, _LEADS = (1.0, 0.9, 0.8, 0.7, 0.5, 0.4), (0, 1, 2, 4, 8)
"""Shares of the limits for which modes are chosen, and by how many passes RELOADs come earlier.

Each was the best for some family and problem of the suite ``menus`` (measured)."""


class _Footprint(NamedTuple):
    """A stage in one mode: bytes it holds before each action, and needs for its own; its cost."""

    held_bytes: Ints
    needs: Ints
    cost_ms: float


def with_uniform_modes(compiled: CompiledProblem, rows: Rows) -> Rows | None:
    """Return compute programs with a mode for each stage so that they fit, the best of some.

    Transfers take the places that memory leaves them. Both the order as given and the order with
    every W right after its I are tried.

    Parameters
    ----------
    compiled, rows
        A problem and legal compute programs of it, which may exceed memory limits. Their modes are
        ignored.

    Returns
    -------
    None if no mode of some stage makes its device's program fit.
    """
    compiled.refuse_transfers(rows, "with_uniform_modes")
    prompt = _with_prompt_weights(compiled, rows)
    is_same = np.array_equal(prompt.actions, rows.actions)
    candidates = [
        fitted
        for form in ((rows,) if is_same else (rows, prompt))
        for fitted in _fitted(compiled, form)
    ]
    return min(candidates, key=compiled.objective_ms, default=None)


def _fitted(compiled: CompiledProblem, rows: Rows) -> Iterator[Rows]:
    """Yield programs with one mode per stage that fit, each choice of modes once."""
    m, seen = compiled.times.num_microbatches, set()
    devices = [_DeviceWays.of(compiled, rows, d) for d in range(rows.lengths.size)]
    for share in _SHARES:
        chosen = np.zeros(compiled.times.num_stages, dtype=np.int64)
        for device in devices:
            check_stop()
            found = device.fitting(share)
            if found is None:
                return
            chosen[list(device.stages)] = found
        if (known := tuple(chosen.tolist())) in seen:
            continue
        seen.add(known)
        yield from _settled(compiled, _with_actions(compiled, rows, np.repeat(chosen, m)))


def in_modes(compiled: CompiledProblem, rows: Rows, numbers: Sequence[int]) -> Rows | None:
    """Return compute programs with a given mode of each stage, None if they do not fit."""
    compiled.refuse_transfers(rows, "in_modes")
    modes = np.repeat(np.array(numbers, dtype=np.int64), compiled.times.num_microbatches)
    tight = _with_actions(compiled, rows, modes)
    if not keeps_limits(compiled, tight):
        return None
    return min(_settled(compiled, tight), key=compiled.objective_ms)


def _with_prompt_weights(compiled: CompiledProblem, rows: Rows) -> Rows:
    """Return compute programs with every W right after its I."""
    cells = compiled.times.num_cells
    actions = np.zeros_like(rows.actions)
    for device, codes in enumerate(rows.programs()):
        check_stop()
        reordered: list[int] = []
        for code in codes.tolist():
            kind, cell = divmod(code, cells)
            if kind != simulate.BACKWARD_WEIGHT:
                reordered.append(code)
            if kind == simulate.BACKWARD_INPUT:
                reordered.append(simulate.BACKWARD_WEIGHT * cells + cell)
        actions[device, : len(reordered)] = reordered
    return rows._replace(actions=actions)


class _DeviceWays(NamedTuple):
    """A device's stages, their modes that may be used, what each holds, and the device's limit.

    ``peaks`` has the most bytes of each choice of modes that was looked at.
    """

    stages: tuple[int, ...]
    numbers: list[list[int]]
    ways: list[list[_Footprint]]
    limit: int
    peaks: dict[tuple[int, ...], int]

    @classmethod
    def of(cls, compiled: CompiledProblem, rows: Rows, device: int) -> _DeviceWays:
        check_stop()
        codes = rows.actions[device, : rows.lengths[device]]
        stages = compiled.problem.stages_of[device]
        numbers = [np.flatnonzero(compiled.memory.may[s]).tolist() for s in stages]
        ways = [
            [_footprint(compiled, codes, s, number) for number in known]
            for s, known in zip(stages, numbers, strict=True)
        ]
        return cls(stages, numbers, ways, int(compiled.memory.limit[device]), {})

    def fitting(self, share: float) -> list[int] | None:
        """Return a mode for each stage so that the program fits a share of the limit, if any."""
        limit = int(share * self.limit) if self.stages else 0
        if prod(map(len, self.ways)) <= _MOST_CHOICES:
            picked = self._cheapest(limit)
        else:
            picked = _one_by_one(self.ways, limit)
        if picked is None:
            return None
        return [known[k] for known, k in zip(self.numbers, picked, strict=True)]

    def _cheapest(self, limit: int) -> tuple[int, ...] | None:
        """Return the choice of modes that costs least, of those that fit."""

        def cost(picked: tuple[int, ...]) -> float:
            return sum(known[k].cost_ms for known, k in zip(self.ways, picked, strict=True))

        for picked in sorted(product(*(range(len(known)) for known in self.ways)), key=cost):
            if picked not in self.peaks:
                check_stop()
                self.peaks[picked] = int(_load(self.ways, picked).max(initial=0))
            if self.peaks[picked] <= limit:
                return picked
        return None


def _footprint(compiled: CompiledProblem, codes: Ints, s: int, number: int) -> _Footprint:
    memory, times = compiled.memory, compiled.times
    kinds, cells = np.divmod(codes, times.num_cells)
    own, row = cells // times.num_microbatches == s, times.row[cells]
    adds, rises = memory.adds[:, row, number], memory.rises[:, row, number]
    changes, needs = np.zeros_like(codes), np.zeros_like(codes)
    moved = adds[simulate.RELOAD]
    back, again = moved, moved
    if memory.again[s, number]:
        back, again = moved + adds[simulate.RECOMPUTE], moved + rises[simulate.RECOMPUTE]
    for kind in range(simulate.OFFLOAD):
        here = own & (kinds == kind)
        changes[here], needs[here] = adds[kind][here], rises[kind][here]
        if kind == simulate.FORWARD:
            changes[here] -= moved[here]
        elif kind != simulate.BACKWARD_WEIGHT:
            changes[here] += back[here]
            needs[here] = np.maximum(back + rises[kind], again)[here]
    return _Footprint(np.cumsum(changes) - changes, needs, _cost_ms(compiled, s, number))


def _cost_ms(compiled: CompiledProblem, s: int, number: int) -> float:
    """Return the estimated cost per micro-batch of a stage's mode, in ms."""
    problem = compiled.problem
    ms = compiled.times.mode_ms[:, s, number]
    stage = problem.stages[s]
    extra = float(ms[simulate.BACKWARD_INPUT]) - stage.backward_input_ms
    if compiled.memory.again[s, number]:
        extra += float(ms[simulate.RECOMPUTE])
    if compiled.memory.adds[simulate.RELOAD, s, number] == 0:
        return extra
    copies = [float(ms[kind]) for kind in (simulate.OFFLOAD, simulate.RELOAD)]
    lane = sum(copies) if problem.devices[stage.device].half_duplex else max(copies)
    return extra + _HIDDEN_COST * lane + max(0.0, lane - stage.busy_ms)


def _one_by_one(ways: list[list[_Footprint]], limit: int) -> tuple[int, ...] | None:
    """Change the mode that frees most per cost at the peak, until everything fits."""
    picked = [min(range(len(known)), key=lambda k: known[k].cost_ms) for known in ways]
    for _ in range(sum(map(len, ways))):
        check_stop()
        load = _load(ways, picked)
        at = int(load.argmax())
        if load[at] <= limit:
            return tuple(picked)
        better = list(_changes(ways, picked, at))
        if not better:
            return None
        _, stage, mode = min(better)
        picked[stage] = mode
    return None


def _changes(
    ways: list[list[_Footprint]], picked: list[int], at: int
) -> Iterator[tuple[float, int, int]]:
    """Yield the cost (ms) per byte freed at a place, with the stage and its mode."""
    for stage, known in enumerate(ways):
        now = known[picked[stage]]
        for mode, other in enumerate(known):
            freed = int(now.held_bytes[at] + now.needs[at] - other.held_bytes[at] - other.needs[at])
            if freed > 0:
                yield (other.cost_ms - now.cost_ms) / freed, stage, mode


def _load(ways: list[list[_Footprint]], picked: tuple[int, ...] | list[int]) -> Ints:
    """Return the peak bytes held during each action of the device."""
    taken = [known[k] for known, k in zip(ways, picked, strict=True)]
    total: Ints = np.sum([way.held_bytes + way.needs for way in taken], axis=0)
    return total


def _with_actions(compiled: CompiledProblem, rows: Rows, modes: Ints) -> Rows:
    """Return compute programs with the transfers of their cells' modes, as tight as possible."""
    cells, row = compiled.times.num_cells, compiled.times.row
    goes = compiled.memory.adds[simulate.RELOAD, row, modes] > 0
    again = compiled.memory.again[row, modes]
    actions, lengths = np.zeros_like(rows.actions), np.zeros_like(rows.lengths)
    for device, codes in enumerate(rows.programs()):
        check_stop()
        program: list[int] = []
        for code in codes.tolist():
            kind, cell = divmod(code, cells)
            if kind in (simulate.BACKWARD_INPUT, simulate.FULL_BACKWARD):
                program += [simulate.RELOAD * cells + cell] * bool(goes[cell])
                program += [simulate.RECOMPUTE * cells + cell] * bool(again[cell])
            program.append(code)
            if kind == simulate.FORWARD and goes[cell]:
                program += [simulate.OFFLOAD * cells + cell, simulate.RELEASE * cells + cell]
        actions[device, : len(program)] = program
        lengths[device] = len(program)
    return Rows(actions, lengths, modes)


def _settled(compiled: CompiledProblem, rows: Rows) -> Iterator[Rows]:
    """Yield programs that fit, with transfers moved away from the actions that wait for them."""
    if compiled.is_compute_only(rows):
        yield rows
        return
    undo = undo_for(board_of(compiled, rows))  # asked for by every move, and never gone back to
    load = np.zeros(rows.actions.shape[1], dtype=np.int64)
    for lead in _LEADS:
        board = board_of(compiled, rows)
        for device in range(rows.lengths.size):
            check_stop()
            given = (board, undo, compiled.times, compiled.memory, load, device)
            settle(Stretch(*given, 0, int(board.counts[device])), lead)
        undo.sizes[:] = 0
        undo.high[:] = -1
        yield rows_on(board)
