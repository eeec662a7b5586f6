"""Programs for menus that v1 cannot say: by problems that it can, and with one mode per stage.

The families, and what makes programs fit, know keep, offload and recompute. Here a menu is cut down
to three of its modes that are these (`Projection`), and programs made there are programs of the
problem once their modes are named. And each stage gets one mode for all micro-batches, such that a
family's programs fit, with room left for copies to wait in (`with_uniform_modes`).

Ignored: the hosts' limits; whether copies can be hidden is estimated by the load of the lanes.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.memory import modes_of
from optpipe.schedule import ActionType
from optpipe.stage import WORKSPACES
from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import Rows, keeps_limits
from optpipe_solver.budget import check_stop
from optpipe_solver.feasibility import usable_modes
from optpipe_solver.local_search.board import board_of, rows_on, undo_for
from optpipe_solver.local_search.room import Stretch, settle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import CellMode, Problem, Stage
    from optpipe.schedule import Program, Programs
    from optpipe_solver.arrays import Ints
    from optpipe_solver.arrays.encoding import CompiledProblem

__all__ = [
    "Projection",
    "in_modes",
    "kept_alone",
    "narrow_menus",
    "projections",
    "with_uniform_modes",
]


class Projection(NamedTuple):
    """A problem with narrower menus, and which modes of another its own are.

    ``modes`` has by stage the numbers, in the other's menu, of what its own menu says. Times are
    the same, bytes no fewer: its programs are programs of the other, exactly as long.
    """

    name: str
    problem: Problem
    modes: tuple[tuple[int, ...], ...]

    def translate(self, programs: Programs, original: Problem) -> Programs:
        """Return the programs with their modes named as the original's menus number them."""
        return tuple(self._named(program, original) for program in programs)

    def _named(self, program: Program, original: Problem) -> Program:
        modes = modes_of(self.problem, program)
        return tuple(
            action._replace(mode=self.modes[action.stage][modes[action.cell]])
            if action.type is ActionType.FORWARD and original.stages[action.stage].modes
            else action
            for action in program
        )


def kept_alone(problem: Problem) -> Projection:
    """Return the projection on keep alone, whatever it holds."""
    kept = [_Choice(0)] * len(problem.stages)
    return _projection(problem, "kept", kept)


class _Rule(NamedTuple):
    """How each stage's modes of a projection are chosen.

    ``share``: how far along its modes without transfers, from the fastest to the leanest, the base
    is; None for as far as its device must go to hold what 1F1B holds. ``lean``: whether of modes
    that recompute the leanest is taken. ``offloads``, ``recomputes``: whether any such is.
    """

    name: str
    share: float | None
    lean: bool
    offloads: bool = True
    recomputes: bool = True


_PROJECTIONS = (
    _Rule("of three modes", 0.0, True),
    _Rule("of three quick modes", 0.0, False),
    _Rule("as full as 1F1B", None, True),
    _Rule("half lean", 0.5, True),
    _Rule("lean", 1.0, True),
)
_PARTS = (
    _Rule("of keep and offload", 0.0, True, recomputes=False),
    _Rule("of keep and recompute", 0.0, True, offloads=False),
)


def projections(problem: Problem) -> tuple[Projection, ...]:
    """Return projections worth a try, the one with what v1 has of the menu first.

    The base of each stage is keep, or a mode with recomputation inside: the fastest, the leanest,
    or one between, for all alike or by what their devices have to hold. Beside it stand a mode that
    offloads and one that recomputes apart, if the menu has such that differ from the base in
    nothing else.
    """
    return _projections(problem, _PROJECTIONS)


def narrow_menus(problem: Problem) -> tuple[Projection, ...]:
    """Return problems with narrower menus to search in, v1's menu first, then parts of it.

    Where all micro-batches of a stage must be alike v1's menu is no problem of v1's: it is posed
    with the same field, its menus cut down.
    """
    if not any(stage.uniform_modes for stage in problem.stages):
        first, *others = _projections(problem, _PROJECTIONS)
        return (
            first,
            *(one for one in _projections(problem, _PARTS) if one.modes != first.modes),
            *others,
        )
    short = _cut(problem)
    is_whole = all(len(a) == len(b) for a, b in zip(short.modes, problem.menus, strict=True))
    return (*(() if is_whole else (short,)), *projections(problem))


def _cut(problem: Problem) -> Projection:
    """Return the problem with keep, one mode that offloads, and one that recomputes, by stage."""
    numbers = []
    for s, stage in enumerate(problem.stages):
        chosen = _beside(problem, s, 0, lean=True)
        used = [k for k in chosen if k >= 0] if stage.modes else range(len(problem.menus[s]))
        numbers.append(tuple(used))
    stages = tuple(
        stage.model_copy(update={"modes": tuple(stage.modes[k] for k in used)})
        if stage.modes
        else stage
        for stage, used in zip(problem.stages, numbers, strict=True)
    )
    return Projection(
        "of three modes", problem.model_copy(update={"stages": stages}), tuple(numbers)
    )


def _projections(problem: Problem, rules: Sequence[_Rule]) -> tuple[Projection, ...]:
    lines = [_bases(problem, s) for s in range(len(problem.stages))]
    found: list[Projection] = []
    for rule in rules:
        far = [
            _share_of(problem, lines, d) if rule.share is None else rule.share
            for d in problem.placement
        ]
        chosen = [_allowed(problem, s, _along(line, far[s]), rule) for s, line in enumerate(lines)]
        projection = _projection(problem, rule.name, chosen)
        if all(projection.modes != other.modes for other in found):
            found.append(projection)
    return tuple(found)


def _allowed(problem: Problem, s: int, base: int, rule: _Rule) -> _Choice:
    """Return what a stage may do; nothing but the base where all must be treated alike."""
    if problem.stages[s].uniform_modes:
        return _Choice(base)
    choice = _beside(problem, s, base, lean=rule.lean)
    return _Choice(
        base,
        choice.offload if rule.offloads else -1,
        choice.recompute if rule.recomputes else -1,
    )


def _along(line: list[int], share: float) -> int:
    return line[round(share * (len(line) - 1))]


def _share_of(problem: Problem, lines: list[list[int]], device: int) -> float:
    """Return how far a device's stages go along their lines so that 1F1B fits; 1 if nothing does.

    Between its F and its backward a micro-batch passes all later stages, while each device starts
    one of them per round of its own stages.
    """
    stages, m = problem.stages_of[device], problem.num_microbatches
    last, rounds = len(problem.stages), max(1, len(stages))
    in_flight = {s: min(m, -(-(last - s) // rounds)) for s in stages}
    room = problem.room_bytes(device)
    steps = max((len(lines[s]) - 1 for s in stages), default=0)
    for step in range(steps):
        chosen = {s: problem.menus[s][_along(lines[s], step / steps)] for s in stages}
        if sum(in_flight[s] * mode.forward_bytes for s, mode in chosen.items()) <= room:
            return step / steps
    return 1.0


class _Choice(NamedTuple):
    """What a stage may do in a projection: numbers in its menu, -1 = not."""

    base: int
    offload: int = -1
    recompute: int = -1


def _bases(problem: Problem, s: int) -> list[int]:
    """Return the modes without actions of their own, fastest first, each leaner than all before."""
    menu = problem.menus[s]
    plain = [k for k, mode in enumerate(menu) if not mode.offload_bytes]
    plain = [k for k in plain if menu[k].recompute != "apart"]
    line: list[int] = []
    for k in sorted(plain, key=lambda k: (menu[k].inside_ms, menu[k].forward_bytes)):
        if not line or menu[k].forward_bytes < menu[line[-1]].forward_bytes:
            line.append(k)
    return line


def _beside(problem: Problem, s: int, base: int, *, lean: bool) -> _Choice:
    """Return a base with what goes with it.

    ``lean``: of what recomputes, take what keeps least, else what saves most for its time.
    """
    menu, known = problem.menus[s], problem.menus[s][base]
    away = [
        k
        for k in usable_modes(problem, s)
        if menu[k].offload_bytes
        and menu[k].forward_bytes == known.forward_bytes
        and menu[k].recompute != "apart"
        and menu[k].inside_ms == known.inside_ms
    ]
    again = [
        k
        for k in usable_modes(problem, s)
        if menu[k].recompute == "apart"
        and not menu[k].offload_bytes
        and known.forward_bytes == known.activation_bytes
        and known.inside_ms == 0
    ]

    def saved_per_ms(k: int) -> float:
        saved = menu[k].activation_bytes - menu[k].forward_bytes
        return saved if lean else saved / (menu[k].recompute_ms + 1e-9)

    return _Choice(
        base,
        max(away, key=lambda k: menu[k].offload_bytes, default=-1),
        max(again, key=saved_per_ms, default=-1),
    )


def _projection(problem: Problem, name: str, chosen: list[_Choice]) -> Projection:
    stages = tuple(
        _projected(problem.stages[s], problem.menus[s], choice) for s, choice in enumerate(chosen)
    )
    modes = []
    for choice, stage in zip(chosen, stages, strict=True):
        offload = (choice.offload,) if stage.offload_bytes else ()
        recompute = (choice.recompute,) if stage.can_recompute else ()
        modes.append((choice.base, *offload, *recompute))
    return Projection(name, problem.model_copy(update={"stages": stages}), tuple(modes))


def _projected(stage: Stage, menu: tuple[CellMode, ...], choice: _Choice) -> Stage:
    """Return a stage of v1 with a choice of modes; of bytes that differ it has the most."""
    base = menu[choice.base]
    used = [menu[k] for k in choice if k >= 0]
    again = menu[choice.recompute] if choice.recompute >= 0 else None
    inside = max(mode.inside_bytes for mode in used)
    most = {name: max(getattr(mode, name) for mode in used) for name in WORKSPACES}
    most["backward_input_workspace_bytes"] += inside
    most["backward_workspace_bytes"] += inside
    update = most | {
        "modes": (),
        "uniform_modes": False,
        "backward_input_ms": stage.backward_input_ms + base.inside_ms,
        "backward_ms": stage.fused_backward_ms + base.inside_ms,
        "activation_bytes": base.forward_bytes,
        "weight_context_bytes": max(mode.weight_context_bytes for mode in used),
        "offload_bytes": menu[choice.offload].offload_bytes if choice.offload >= 0 else 0,
        "recompute_ms": None if again is None else again.recompute_ms,
        "checkpoint_bytes": None if again is None else again.forward_bytes,
    }
    return stage.model_copy(update=update)


# --- One mode per stage, such that programs fit. With transfers as tight as can be (RELEASE right
# behind F, RELOAD and RECOMPUTE right before the backward) what a device holds is, at each of its
# actions, a sum over its stages of bytes that depend on the stage's mode alone. So tight, copies
# are waited for: of the modes that fit into shares of the limits, transfers then spreading out into
# all of it, the simulation says which are best.

_MOST_CHOICES = 256
"""Choices of a device up to which all are looked at; beyond, one mode after another is changed."""

_HIDDEN_COST = 0.05
"""What a copy that its lane has time for is taken to cost, as a share of its duration."""

_SHARES, _LEADS = (1.0, 0.9, 0.8, 0.7, 0.5, 0.4), (0, 1, 2, 4, 8)
"""Shares of the limits that the modes must fit into; and by how many passes RELOADs move up before
RELEASEs take what is left: each was the best for some family and problem of ``benchmarks.menus``
(measured)."""


class _Footprint(NamedTuple):
    """A stage in one mode: bytes it holds before each action, and needs for its own; its cost."""

    held_bytes: Ints
    needs: Ints
    cost_ms: float


def with_uniform_modes(compiled: CompiledProblem, rows: Rows) -> Rows | None:
    """Return compute programs with a mode for each stage so that they fit, the best of some.

    Where they move bytes, transfers take the places that memory leaves them. Where W's that wait
    hold too much, or are better not waited for, each stands right behind its I.

    Parameters
    ----------
    compiled, rows
        A problem and legal compute programs of it, over their memory limits or not; their modes are
        of no account.

    Returns
    -------
    None where no mode of some stage makes its device's program fit.
    """
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
    """Return compute programs with a given mode of each stage, None where they do not fit so."""
    modes = np.repeat(np.array(numbers, dtype=np.int64), compiled.times.num_microbatches)
    tight = _with_actions(compiled, rows, modes)
    if not keeps_limits(compiled, tight):
        return None
    return min(_settled(compiled, tight), key=compiled.objective_ms)


def _with_prompt_weights(compiled: CompiledProblem, rows: Rows) -> Rows:
    """Return compute programs with every W right behind its I."""
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
    """Return about what it costs a micro-batch that a stage is in a mode, in ms."""
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
    """Change the mode that frees most for its cost where most is held, until all fits."""
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
    """Yield what a byte less at a place costs (ms), by which stage in which mode."""
    for stage, known in enumerate(ways):
        now = known[picked[stage]]
        for mode, other in enumerate(known):
            freed = int(now.held_bytes[at] + now.needs[at] - other.held_bytes[at] - other.needs[at])
            if freed > 0:
                yield (other.cost_ms - now.cost_ms) / freed, stage, mode


def _load(ways: list[list[_Footprint]], picked: tuple[int, ...] | list[int]) -> Ints:
    """Return the most bytes held during each action of the device."""
    taken = [known[k] for known, k in zip(ways, picked, strict=True)]
    total: Ints = np.sum([way.held_bytes + way.needs for way in taken], axis=0)
    return total


def _with_actions(compiled: CompiledProblem, rows: Rows, modes: Ints) -> Rows:
    """Return compute programs with what the modes of their cells ask for, as tight as can be."""
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
    """Yield programs that fit, their transfers moved away from where they are waited for."""
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
