"""A problem and its programs as flat arrays, for compiled code; and the evaluation of programs.

An action is one integer, ``kind * num_cells + cell`` with ``cell = stage * m + microbatch``. So a
program is a row of integers, and every table is indexed by action or by cell. A backward that runs
together with the F before it has a kind of its own.

Every offer is *evaluated*: is it legal, how long does it take, how many bytes does it hold? The
reference itself (`optpipe.check`, `optpipe.simulate`, `optpipe.memory`) evaluates small programs.
It takes some 20 us per action: for 300,000 of them, longer than a short time limit. Arrays evaluate
large programs by the same rules, in a twentieth of that time. A property test compares the two, on
legal and on spoilt programs, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from operator import itemgetter, le
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.check import find_violations
from optpipe.errors import InputError
from optpipe.memory import EFFECTS, device_peak_bytes, host_peak_bytes
from optpipe.schedule import Action, ActionType
from optpipe.simulate import duration_ms
from optpipe.simulate import simulate as simulate_reference
from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.simulate import (
    BACKWARD_INPUT,
    FULL_BACKWARD,
    PAIRED_BACKWARD,
    PAIRED_INPUT,
)
from optpipe_solver.budget import check_stop

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from optpipe.problem import CellMode, Problem, Stage
    from optpipe.schedule import Program, Programs
    from optpipe_solver.arrays import Flags, Floats, Ints

__all__ = [
    "AGAIN",
    "AWAY",
    "CODES",
    "KINDS",
    "PAIRED_NUMBER",
    "CompiledProblem",
    "Evaluator",
    "Metrics",
    "Rows",
    "device_peaks",
    "evaluate_arrays",
    "evaluate_by_reference",
    "keeps_limits",
    "keeps_turns",
    "keeps_uniform_modes",
    "memory_of",
    "new_action",
    "numbered_menus",
    "program_of",
    "within_hosts",
]


KINDS = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
    ActionType.OFFLOAD,
    ActionType.RELEASE,
    ActionType.RELOAD,
    ActionType.RECOMPUTE,
)
"""Action types in the order of their integers in `simulate`."""

CODES = (*KINDS, ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD)
"""The type of every integer: the last two are the I and the B of pairs."""

PAIRED_NUMBER = {
    ActionType.BACKWARD_INPUT: simulate.PAIRED_INPUT,
    ActionType.FULL_BACKWARD: simulate.PAIRED_BACKWARD,
}
"""Numbers of the passes that may run as the second of a pair."""

_NUMBER_OF_ID = {id(kind): number for number, kind in enumerate(KINDS)}
"""The number of each kind, by the identity of its enum member: an enum's hash runs in Python."""

_PAIRED_OF_NUMBER = {KINDS.index(kind): number for kind, number in PAIRED_NUMBER.items()}


class Rows(NamedTuple):
    """Programs as integers: ``actions[d, :lengths[d]]`` is the program of device d.

    ``modes`` has by cell the number of its mode (see `numbered_menus`), -1 where there is none.
    """

    actions: Ints
    lengths: Ints
    modes: Ints

    def programs(self) -> list[Ints]:
        """Return the program of each device."""
        return [row[:length] for row, length in zip(self.actions, self.lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class CompiledProblem:
    """A problem as arrays; `TimeArrays` and `MemoryArrays` define them."""

    problem: Problem
    times: simulate.TimeArrays
    memory: simulate.MemoryArrays

    @classmethod
    def of(cls, problem: Problem) -> CompiledProblem:
        """Return the arrays of a problem."""
        return cls(problem, _times(problem), memory_of(problem))

    def encode(self, programs: Programs) -> Rows:
        """Return programs as integers, with room for one more round trip per cell."""
        m, cells = self.problem.num_microbatches, self.times.num_cells
        longest = max(len(stages) * m * len(KINDS) for stages in (*self.problem.stages_of, (0,)))
        actions = np.zeros((len(programs), longest), dtype=np.int64)
        lengths = np.array([len(program) for program in programs], dtype=np.int64)
        named: list[tuple[Ints, Ints]] = []
        for device, program in enumerate(programs):
            check_stop()
            # Stages, kinds, micro-batches, modes and marks of pairs, by action. These are loops in
            # C: a schedule may have millions of actions.
            columns = [map(part, program) for part in _PARTS]
            columns[1] = map(_NUMBER_OF_ID.__getitem__, map(id, columns[1]))
            stages, kinds, microbatches, modes, paired = (
                np.fromiter(column, np.int64, len(program)) for column in columns
            )
            if paired.any():
                second = paired > 0
                kinds[second] = [_PAIRED_OF_NUMBER[number] for number in kinds[second].tolist()]
            cell = stages * m + microbatches
            actions[device, : cell.size] = kinds * cells + cell
            if modes.any():
                named.append((cell[modes != 0], modes[modes != 0]))
        rows = Rows(actions, lengths, np.zeros(cells, dtype=np.int64))
        rows.modes[:] = self.implied(rows)
        if named:
            numbers = _numbers_of_modes(self.problem)
            for cell, modes in named:
                last = numbers.shape[1] - 1
                known = np.where((modes >= 0) & (modes <= last), modes, last)
                rows.modes[cell] = numbers[self.times.row[cell], known]
        return rows

    def implied(self, rows: Rows) -> Ints:
        """Return the modes that the actions imply, by cell; keep where F alone may have another."""
        tells = ~self.times.varies[self.times.row]
        away = self.cells_with(simulate.OFFLOAD, rows) & tells
        again = self.cells_with(simulate.RECOMPUTE, rows) & tells
        return np.where(again, AGAIN, np.where(away, AWAY, _KEPT))

    def decode(self, rows: Rows) -> Programs:
        """Return the programs encoded by rows of integers."""
        m, cells = self.problem.num_microbatches, self.times.num_cells
        names = np.where(self.times.varies[self.times.row], rows.modes, _KEPT)
        programs = []
        for codes in rows.programs():
            check_stop()
            kinds, cell_numbers = np.divmod(codes, cells)
            stages, microbatches = np.divmod(cell_numbers, m)
            types = map(CODES.__getitem__, kinds.tolist())
            modes = np.where(kinds == simulate.FORWARD, names[cell_numbers], _KEPT)
            paired = (kinds >= simulate.PAIRED_INPUT).tolist()
            programs.append(
                program_of(stages.tolist(), types, microbatches.tolist(), modes.tolist(), paired)
            )
        return tuple(programs)

    def durations(self, rows: Rows) -> Floats:
        """Return ms by action number, in the modes that the cells have."""
        if not self.times.varies.any():
            return self.times.duration
        return self.times.mode_ms[:, self.times.row, rows.modes].reshape(-1)

    def halves(self, rows: Rows) -> tuple[Ints, Ints]:
        """Return the action numbers of the forwards of all pairs, and of their backwards."""
        cells, first = self.times.num_cells, simulate.PAIRED_INPUT * self.times.num_cells
        forwards, backwards = [], []
        for codes in rows.programs():
            at = np.flatnonzero(codes >= first)
            fused = codes[at] >= simulate.PAIRED_BACKWARD * cells
            kinds = np.where(fused, simulate.FULL_BACKWARD, simulate.BACKWARD_INPUT)
            forwards.append(codes[at - 1])
            backwards.append(kinds * cells + codes[at] % cells)
        return np.concatenate(forwards), np.concatenate(backwards)

    def length_ms(
        self, rows: Rows, durations: Floats | None = None, messages: Floats | None = None
    ) -> tuple[float, float]:
        """Return (makespan, span) in ms, exactly as `optpipe.simulate`; inf where stuck.

        ``durations`` replaces those of the problem, by action number. ``messages`` multiplies the
        times of messages, by the pass that sends them: forwards, then backwards, by cell.
        """
        known = self.durations(rows) if durations is None else durations
        noise = self.times.noise if messages is None else messages
        times = self.times._replace(duration=known, noise=noise)
        work = simulate.workspace_for(times, rows.actions.shape[0])
        makespan, span, _ = simulate.length(rows.actions, rows.lengths, times, work)
        return float(makespan), float(span)

    def objective_ms(self, rows: Rows) -> float:
        """Return the problem's objective in ms; inf where stuck."""
        return self.length_ms(rows)[self.problem.objective == "span"]

    def is_compute_only(self, rows: Rows) -> bool:
        """Whether programs hold F, I, W and B alone, and no pairs."""
        first = simulate.OFFLOAD * self.times.num_cells
        return all(bool((codes < first).all()) for codes in rows.programs())

    def without_transfers(self, rows: Rows) -> Rows:
        """Return the F, I, W and B of programs without pairs, in the same order, in mode 0."""
        first = simulate.OFFLOAD * self.times.num_cells
        kept = [codes[codes < first] for codes in rows.programs()]
        actions, lengths = np.zeros_like(rows.actions), np.array([codes.size for codes in kept])
        for device, codes in enumerate(kept):
            actions[device, : codes.size] = codes
        return Rows(actions, lengths, np.zeros_like(rows.modes))

    def refuse_transfers(self, rows: Rows, part: str) -> None:
        """Refuse programs that a part for compute programs would read as others (`InputError`)."""
        if not self.is_compute_only(rows):
            raise InputError(
                f"{part}: the programs hold transfers, recomputation or pairs; give programs of F, "
                "I, W and B alone, each by itself"
            )

    def deal(self, rows: Rows, order: Ints) -> Rows:
        """Return programs with micro-batch ``order[k]``, in its mode, in the places of k."""
        cells, m = self.times.num_cells, self.problem.num_microbatches
        renamed = np.arange(cells) // m * m + order[np.arange(cells) % m]
        kinds, cell = np.divmod(rows.actions, cells)
        modes = np.zeros_like(rows.modes)
        modes[renamed] = rows.modes
        return Rows(kinds * cells + renamed[cell], rows.lengths, modes)

    def cells_with(self, kind: int, rows: Rows) -> Flags:
        """Flag the cells that have an action of a kind."""
        cells = self.times.num_cells
        flags = np.zeros(cells, dtype=np.bool_)
        for codes in rows.programs():
            flags[codes[codes // cells == kind] % cells] = True
        return flags


_PARTS = tuple(itemgetter(at) for at in range(5))


# --- Modes by number, as `Stage.numbered_menu` has them.

_KEPT, AWAY, AGAIN = 0, 1, 2


def numbered_menus(problem: Problem) -> tuple[tuple[CellMode | None, ...], ...]:
    """Return the modes of each row by their numbers in `Rows` (`Stage.numbered_menu`)."""
    return tuple(stage.numbered_menu for _, stage, _ in _rows(problem))


def _rows(problem: Problem) -> list[tuple[int, Stage, int]]:
    """Return each row of the tables: a stage index, the stage under a cost, and a micro-batch."""
    some = [problem.cost_of.index(cost) for cost in range(problem.num_costs)]
    return [
        (s, stage, j)
        for stages, j in zip(problem.stages_by_cost, some, strict=True)
        for s, stage in enumerate(stages)
    ]


def _numbers_of_modes(problem: Problem) -> Ints:
    """Return by row and position in the menu the number of a mode; -1 where there is no mode.

    The last column is for all positions that no menu has.
    """
    stages = [stage for _, stage, _ in _rows(problem)]
    numbers = np.full((len(stages), 1 + max(len(stage.menu) for stage in stages)), -1)
    for row, stage in enumerate(stages):
        for mode in range(len(stage.menu)):
            if stage.modes or mode == 0:
                numbers[row, mode] = mode
            else:
                numbers[row, mode] = AWAY if stage.offload_bytes and mode == 1 else AGAIN
    return numbers


def _mode_ms(problem: Problem) -> Floats:
    """Return ms by kind, row and mode; the same for all modes where actions determine the mode.

    0 for transfers of what cannot be offloaded.
    """
    rows, menus = _rows(problem), numbered_menus(problem)
    found = np.zeros((len(KINDS), len(rows), max(map(len, menus))))
    for row, (s, stage, j) in enumerate(rows):
        menu, cost = problem.menu_of(s, j), problem.cost_of[j]
        for at, kind in enumerate(KINDS):
            if not kind.is_transfer or problem.can_move(stage):
                found[at, row] = duration_ms(problem, Action(s, kind, j))
            for number in range(len(menus[row]) if stage.modes else 0):
                moves = menu[number].offload_bytes and problem.can_use(s, number, cost)
                if moves or not kind.is_transfer:
                    found[at, row, number] = duration_ms(problem, Action(s, kind, j), number)
    return found


def _times(problem: Problem) -> simulate.TimeArrays:
    m, num_stages = problem.num_microbatches, len(problem.stages)
    shared = [d.half_duplex or d.pcie_group is not None for d in problem.devices]
    there, back = zip(*chain.from_iterable(problem.boundary_lanes_by_cost), strict=True)
    transits = list(chain.from_iterable(problem.boundary_ms_by_cost))
    stages = [stage for _, stage, _ in _rows(problem)]
    costs = np.array(problem.cost_of, dtype=np.int64)
    row = (costs[None, :] * num_stages + np.arange(num_stages)[:, None]).reshape(-1)
    queued = any(lane.link >= 0 for lane in (*there, *back))
    names = sorted({d.pcie_group for d in problem.devices if d.pcie_group is not None})
    mode_ms = _mode_ms(problem)
    owned = np.full((len(problem.devices), max(map(len, problem.stages_of))), -1, dtype=np.int64)
    for device, its_stages in enumerate(problem.stages_of):
        owned[device, : len(its_stages)] = its_stages
    num_paired = num_stages if problem.pairs else 0
    hidden = np.full((2, num_paired, num_paired), np.nan)
    for (forward, backward, letter), ms in problem.hidden_ms.items():
        hidden[int(letter == "B"), forward, backward] = ms
    return simulate.TimeArrays(
        num_stages=num_stages,
        num_microbatches=m,
        num_cells=num_stages * m,
        row=row,
        duration=mode_ms[:, row, 0].reshape(-1),
        mode_ms=mode_ms,
        varies=np.array([bool(stage.modes) for stage in stages]),
        there=np.array([there for there, _ in transits]),
        back=np.array([back for _, back in transits]),
        device_of=np.array(problem.placement, dtype=np.int64),
        owned=owned,
        grad_sync=np.array([stage.grad_sync_ms for stage in problem.stages], dtype=np.float64),
        shared=np.array(shared),
        half_duplex=np.array([d.half_duplex for d in problem.devices]),
        group=np.array(
            [-1 if d.pcie_group is None else names.index(d.pcie_group) for d in problem.devices],
            dtype=np.int64,
        ),
        num_links=len(problem.links) if queued else 0,
        lane_there=np.array([lane.link for lane in there], dtype=np.int64),
        lane_back=np.array([lane.link for lane in back], dtype=np.int64),
        fill_there=np.array([lane.ms for lane in there]),
        fill_back=np.array([lane.ms for lane in back]),
        noise=np.zeros(0),
        hidden=hidden,
        forward=np.array([stage.forward_ms for stage in stages], dtype=np.float64),
    )


def memory_of(problem: Problem) -> simulate.MemoryArrays:
    """Return the data that memory depends on."""
    rows, menus = _rows(problem), numbered_menus(problem)
    stages = [stage for _, stage, _ in rows]
    most = max(map(len, menus))
    adds = np.zeros((len(CODES), len(stages), most), dtype=np.int64)
    rises = np.zeros_like(adds)
    for at, kind in enumerate(CODES):
        effect = EFFECTS[kind]
        for s in range(len(stages)):
            for number in range(most):
                # Keep in the places that the menu leaves free.
                mode = (menus[s][number] if number < len(menus[s]) else None) or menus[s][0]
                assert mode is not None  # noqa: S101 - every menu begins with keep
                adds[at, s, number] = effect.delta(mode)
                rises[at, s, number] = max(effect.inside(mode), effect.delta(mode))
                rises[at, s, number] += effect.workspace(mode)
    hosts = {host.name: index for index, host in enumerate(problem.hosts)}
    unlimited = np.iinfo(np.int64).max
    may = np.zeros((len(stages), most), dtype=np.bool_)
    again = np.zeros_like(may)
    for s, menu in enumerate(menus):
        for number, known in enumerate(menu):
            if known is not None:
                at, _, j = rows[s]
                in_menu = problem.menu_of(at, j).index(known)
                may[s, number] = problem.can_use(at, in_menu, problem.cost_of[j])
                again[s, number] = known.recompute == "apart"
    return simulate.MemoryArrays(
        adds=adds,
        rises=rises,
        may=may,
        again=again,
        num_modes=np.array(list(map(len, menus)), dtype=np.int64),
        uniform=np.array([stage.uniform_modes for stage in stages]),
        limit=np.array(
            [problem.room_bytes(device) for device in range(len(problem.devices))], dtype=np.int64
        ),
        host_of=np.array([hosts[device.host] for device in problem.devices], dtype=np.int64),
        host_limit=np.array(
            [unlimited if h.memory_bytes is None else h.memory_bytes for h in problem.hosts],
            dtype=np.int64,
        ),
    )


# --- Programs from columns: where a schedule has hundreds of thousands of actions, loops count.

new_action = partial(tuple.__new__, Action)
"""Makes an action of its five parts, without the two calls of Python that `Action` costs."""


def program_of(
    stages: Iterable[int],
    types: Iterable[ActionType],
    microbatches: Iterable[int],
    modes: Iterable[int] | None = None,
    paired: Iterable[bool] | None = None,
) -> Program:
    """Return the actions whose parts are in columns of equal length, one action per row.

    Without ``modes`` none is named, without ``paired`` none is half of a pair.

    Raises
    ------
    ValueError
        If the lengths differ.
    """
    if modes is not None:
        halves = repeat(False) if paired is None else paired
        rows = zip(stages, types, microbatches, modes, strict=True)
        return tuple(new_action((*row, half)) for row, half in zip(rows, halves, strict=False))
    plain = zip(stages, types, microbatches, strict=True)
    return tuple(
        new_action((stage, kind, microbatch, 0, False)) for stage, kind, microbatch in plain
    )


# --- Whether programs are legal, how long they take and what they hold.


_LARGE = 20_000
"""Actions from which arrays are used: where the reference takes about half a second."""

_F, _I, _W, _B, _OFFLOAD, _RELEASE, _RELOAD, _RECOMPUTE = range(len(KINDS))
_IN_ORDER = tuple(
    (KINDS.index(earlier), KINDS.index(kind))
    for kind, effect in EFFECTS.items()
    for earlier in effect.comes_after
)
"""Pairs of kinds: the first comes before the second where a cell has both.

See docs/specification.md, "Actions".
"""


class Metrics(NamedTuple):
    """The times in ms of legal programs, and their bytes per device and by host."""

    makespan_ms: float
    span_ms: float
    peak_bytes: tuple[int, ...]
    host_peak_bytes: dict[str, int]

    def objective_ms(self, objective: str) -> float:
        """Return makespan_ms or span_ms."""
        return self.makespan_ms if objective == "makespan" else self.span_ms


class Evaluator:
    """Evaluates programs of one problem, by the reference or on arrays, depending on their size.

    It uses arrays for any size if the caller has ``compiled`` it.
    """

    def __init__(self, problem: Problem, compiled: CompiledProblem | None = None) -> None:
        self.problem = problem
        self._least = _LARGE if compiled is None else 0
        self._compiled = compiled

    def __call__(self, programs: Programs) -> Metrics | None:
        """Return the evaluation of the programs, None where they are not legal."""
        if sum(map(len, programs)) < self._least:
            return evaluate_by_reference(self.problem, programs)
        if self._compiled is None:
            self._compiled = CompiledProblem.of(self.problem)
        return evaluate_arrays(self._compiled, programs)


def evaluate_by_reference(problem: Problem, programs: Programs) -> Metrics | None:
    """Evaluate by the reference: legality, time and memory."""
    if find_violations(problem, programs):
        return None
    run = simulate_reference(problem, programs)
    peaks = tuple(device_peak_bytes(problem, d, p, run.modes[d]) for d, p in enumerate(programs))
    hosts = host_peak_bytes(problem, programs, run.modes)
    return Metrics(run.makespan_ms, run.span_ms, peaks, hosts)


def evaluate_arrays(compiled: CompiledProblem, programs: Programs) -> Metrics | None:
    """Evaluate by the same rules on arrays; equal to `evaluate_by_reference` to the last bit."""
    if not _is_addressable(compiled.problem, programs):
        return None
    rows = compiled.encode(programs)
    if not _pairs_are_right(compiled, rows):
        return None
    place = _places(compiled, rows)
    if place is None or not _is_whole(compiled, place, rows.modes):
        return None
    for earlier, later in _IN_ORDER:
        if ((place[later] >= 0) & (place[later] < place[earlier])).any():
            return None
    if not keeps_turns(compiled, rows):
        return None
    check_stop()
    makespan_ms, span_ms = compiled.length_ms(rows)
    check_stop()
    if makespan_ms == np.inf or not keeps_limits(compiled, rows):
        return None
    return Metrics(makespan_ms, span_ms, device_peaks(compiled, rows), _host_peaks(compiled, rows))


def _is_addressable(problem: Problem, programs: Programs) -> bool:
    """Whether each action has a number, and each program fits into its row of arrays."""
    num_stages, m = len(problem.stages), problem.num_microbatches
    if len(programs) != len(problem.devices):
        return False
    for stages, program in zip(problem.stages_of, programs, strict=True):
        check_stop()
        if len(program) > len(stages) * m * len(KINDS):
            return False
        for part, count in ((0, num_stages), (2, m)):
            numbers = _PARTS[part]
            low = min(map(numbers, program), default=0)
            if low < 0 or max(map(numbers, program), default=0) >= count:
                return False
        if any(map(_PARTS[4], program)) and any(
            action.paired and action.type not in PAIRED_NUMBER for action in program
        ):
            return False
    return True


def _alone(codes: Ints, cells: int) -> Ints:
    """Return codes with the backwards of pairs as those that run alone."""
    kinds = codes // cells
    shift = np.where(
        kinds == PAIRED_BACKWARD,
        PAIRED_BACKWARD - FULL_BACKWARD,
        np.where(kinds == PAIRED_INPUT, PAIRED_INPUT - BACKWARD_INPUT, 0),
    )
    alone: Ints = codes - shift * cells
    return alone


def _pairs_are_right(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether each backward of a pair is right after an F that it may run together with."""
    times = compiled.times
    for codes in rows.programs():
        at = np.flatnonzero(codes >= PAIRED_INPUT * times.num_cells)
        if at.size == 0:
            continue
        if times.hidden.size == 0 or at[0] == 0:
            return False
        forwards, backwards = codes[at - 1], codes[at]
        if (forwards >= times.num_cells).any():
            return False
        cells = backwards % times.num_cells
        if (cells == forwards).any():
            return False
        kinds = (backwards >= PAIRED_BACKWARD * times.num_cells).astype(np.int64)
        if np.isnan(times.hidden[kinds, times.row[forwards], times.row[cells]]).any():
            return False
    return True


def _places(compiled: CompiledProblem, rows: Rows) -> Ints | None:
    """Return ``[kind, cell]`` -> index in its program, -1 = absent; None: misplaced, or twice."""
    times = compiled.times
    place = np.full(len(KINDS) * times.num_cells, -1, dtype=np.int64)
    for device, codes in enumerate(rows.programs()):
        stages = codes % times.num_cells // times.num_microbatches
        alone = _alone(codes, times.num_cells)
        if (times.device_of[stages] != device).any() or np.unique(alone).size < codes.size:
            return None
        place[alone] = np.arange(codes.size)
    return place.reshape(len(KINDS), times.num_cells)


def _is_whole(compiled: CompiledProblem, place: Ints, modes: Ints) -> bool:
    """Whether each cell has F, I and W or B, and the actions of its mode, which may be used."""
    there, memory = place >= 0, compiled.memory
    if (modes < 0).any() or not keeps_uniform_modes(compiled, modes):
        return False
    stages = compiled.times.row
    split, fused = there[_I] & there[_W], there[_B] & ~there[_I] & ~there[_W]
    once = fused | (split & ~there[_B])
    goes, again = memory.adds[_RELOAD, stages, modes] > 0, memory.again[stages, modes]
    matches = there[_RECOMPUTE] == again
    for kind in (_OFFLOAD, _RELEASE, _RELOAD):
        matches &= there[kind] == goes
    return bool((there[_F] & once & matches & memory.may[stages, modes]).all())


def keeps_uniform_modes(compiled: CompiledProblem, modes: Ints) -> bool:
    """Whether every stage with ``uniform_modes`` has one mode for all micro-batches of a cost."""
    row, uniform = compiled.times.row, compiled.memory.uniform
    if not uniform.any():
        return True
    _, first = np.unique(row, return_index=True)
    return not (uniform[row] & (modes != modes[first][row])).any()


def keeps_turns(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether the micro-batches of a stage keep the turns of a given order and of samples."""
    if not compiled.problem.forward_turns:
        return True
    place = _places(compiled, rows)
    if place is None:
        return False
    by_stage = (-1, compiled.times.num_stages, compiled.times.num_microbatches)
    forwards = place.reshape(by_stage)[_F]
    backwards = np.maximum(place[_I], place[_B]).reshape(by_stage[1:])
    for turns, at in (
        (compiled.problem.forward_turns, forwards),
        (compiled.problem.backward_turns, -backwards),
    ):
        if turns:
            earlier, later = np.array(turns).T
            if (at[:, earlier] > at[:, later]).any():
                return False
    return True


def keeps_limits(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether programs that are legal otherwise keep the limits of all devices and hosts."""
    usable = [device.usable_bytes for device in compiled.problem.devices]
    return all(map(le, _peaks(compiled, rows), usable)) and within_hosts(compiled, rows)


def within_hosts(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether programs that are legal otherwise keep the limits of all hosts."""
    hosts = compiled.problem.hosts
    if all(host.memory_bytes is None for host in hosts):
        return True
    peaks = _host_peaks(compiled, rows)
    return all(host.memory_bytes is None or peaks[host.name] <= host.memory_bytes for host in hosts)


def device_peaks(compiled: CompiledProblem, rows: Rows) -> tuple[int, ...]:
    """Walk every program: static bytes plus the largest prefix sum (`optpipe.memory`)."""
    return tuple(_peaks(compiled, rows))


def _peaks(compiled: CompiledProblem, rows: Rows) -> Iterator[int]:
    problem, memory, times = compiled.problem, compiled.memory, compiled.times
    for device, codes in enumerate(rows.programs()):
        kinds, cells = codes // times.num_cells, codes % times.num_cells
        of_mode = kinds, times.row[cells], rows.modes[cells]
        adds = memory.adds[of_mode]
        most = np.cumsum(adds) - adds + memory.rises[of_mode]
        if (at := np.flatnonzero(kinds >= PAIRED_INPUT)).size:
            # The workspace of the pair's F is there as well: what F rises to above what it leaves.
            most[at] += memory.rises[of_mode][at - 1] - adds[at - 1]
        yield problem.static_bytes_of(device) + int(most.max(initial=0))


def _host_peaks(compiled: CompiledProblem, rows: Rows) -> dict[str, int]:
    """Bytes on the hosts, from OFFLOAD to just before RECOMPUTE, I or B: the devices' peaks."""
    problem, times = compiled.problem, compiled.times
    size = compiled.memory.adds[_RELOAD, times.row, rows.modes]
    gone, again = compiled.cells_with(_OFFLOAD, rows), compiled.cells_with(_RECOMPUTE, rows)
    peaks = {host.name: 0 for host in problem.hosts}
    for device, codes in zip(problem.devices, rows.programs(), strict=True):
        kinds, cells = _alone(codes, times.num_cells) // times.num_cells, codes % times.num_cells
        backward = (kinds == _I) | (kinds == _B)
        back = np.where(again[cells], kinds == _RECOMPUTE, backward) & gone[cells]
        moved = size[cells]
        host_bytes = np.cumsum(np.where(kinds == _OFFLOAD, moved, np.where(back, -moved, 0)))
        peaks[device.host] += int(host_bytes.max(initial=0))
    return peaks
