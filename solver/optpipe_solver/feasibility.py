"""The smallest memory that admits any schedule, and a schedule that fits into it.

Removing a micro-batch from a schedule never raises a device's memory at any moment. So the smallest
memory is that of one micro-batch. *Serial* execution, one micro-batch after the other, attains it;
devices do not share memory.

Argument. Let a device hold stages s_1 < s_2 < ... in model order. While s_k runs a micro-batch (its
F, a RECOMPUTE, its I or B), every earlier s_i has run its F and not yet its backward. So s_i holds
at least the bytes that its mode does not offload, forward_bytes - offload_bytes. Stage s_k itself
needs what its mode needs at that moment. Serial execution attains this if RELEASE comes right after
F, RELOAD and RECOMPUTE right before the backward, and W right after I. RELOAD and RECOMPUTE only
add bytes, and W only frees them. So the minimum over the modes, split and fused, is found stage by
stage, last first. Only workspaces can make another order better. A W may wait until earlier stages
have run their backward, and a RECOMPUTE may precede a waiting W. So the same recursion is a *lower*
bound if W is counted without the earlier stages' bytes. The two differ only if a workspace of W is
larger than all else of its stage. Then all orders of one micro-batch are searched, smallest peak
first.

The slices of one sample are treated as one micro-batch. A stage's backwards come after its F of the
sample's last slice, and an earlier stage's backwards come after a later stage's. So during the F or
backward of the last slice in s_k, all earlier s_i hold all slices, and s_k holds all others. This
is a lower bound. Serial execution runs all slices stage by stage, and back in the reverse order, as
one micro-batch whose stages are the cells of the sample. It attains the bound if no earlier slice
needs more at its own turn. If the two differ, nothing is claimed.

Host memory adds one number per device. In serial execution, all offloaded bytes of one micro-batch
are on the host when its last stage runs. A small exact dynamic program over the stages finds their
minimum within the device's memory. Other orders may need less (a copy after the last stage's
backward). A lower bound is the bytes that must be away at any one moment. If the two differ and a
host is too small, all orders are searched, fewest host bytes first.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from optpipe.errors import InputError
from optpipe.memory import host_walk
from optpipe.schedule import Action, ActionType
from optpipe.units import format_bytes
from optpipe_solver.reductions import one_group, serial_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from optpipe.problem import CellMode, Problem
    from optpipe.schedule import Program, Programs
    from optpipe.stage import Stage

__all__ = [
    "Feasibility",
    "SerialPlan",
    "backward_bytes",
    "exact_parts_know",
    "feasibility",
    "fifo_loses_nothing",
    "fusing_may_pay",
    "knows_menu",
    "least_bytes",
    "memory_binds",
    "needs_text",
    "possible_modes",
    "refuse_unless",
    "serial_plan",
    "smallest_memory",
    "usable_modes",
]

_MOST_STATES = 200_000
"""Maximum states in a search of all orders (seconds); dozens of stages would need more."""


class _Option(NamedTuple):
    """One option of one stage: a mode of its menu, with a split or a fused backward; in bytes.

    ``held_bytes`` stay between the passes. ``needed`` is the peak of all passes but W. ``alone`` is
    what W needs if nothing else is in memory. ``host`` goes to the host.
    """

    mode: int
    split: bool
    held_bytes: int
    needed: int
    alone: int
    host: int

    @property
    def at_once(self) -> int:
        """Return the bytes needed if W runs right after I."""
        return max(self.needed, self.alone)


@dataclass(frozen=True, slots=True)
class SerialPlan:
    """Serial execution that fits: each device's program for micro-batch 0, to be repeated."""

    programs: Programs


@dataclass(frozen=True, slots=True)
class Feasibility:
    """Whether any schedule exists.

    ``plan`` is set if a schedule exists. ``needs`` is set if none does: it maps what is too small
    (``devices[2].memory_bytes``, ``hosts[0].memory_bytes``) to the smallest value that works. Both
    are empty if a device has too many stages whose W need more workspace than all else to decide.
    """

    plan: SerialPlan | None
    needs: dict[str, int]

    @property
    def message(self) -> str:
        """One sentence for people; empty if feasible."""
        if self.plan is not None:
            return ""
        if not self.needs:
            return "whether any schedule fits the memory limits was neither found nor refuted"
        return f"no schedule fits the memory limits (proven): {needs_text(self.needs)}"


def needs_text(needs: Mapping[str, int]) -> str:
    """Return the smallest values that work, in words; sizes for people are rounded up."""
    return ", ".join(
        f"{path} must be at least {value}" + (f" ({_rounded_up(value)})" if value >= 1024 else "")
        for path, value in needs.items()
    )


def _rounded_up(num_bytes: int) -> str:
    unit = 1024 ** min(4, (num_bytes.bit_length() - 1) // 10)
    return format_bytes(math.ceil(math.ceil(10 * num_bytes / unit) / 10 * unit))


def smallest_memory(problem: Problem) -> list[int]:
    """Return, per device, the smallest memory_bytes with which any schedule exists.

    Host limits are ignored here; `feasibility` checks them.
    """
    kinds = list(_kinds(problem))
    by_kind = [
        [_smallest(one, device).cost for device in range(len(problem.devices))] for one in kinds
    ]
    return [max(costs) for costs in zip(*by_kind, strict=True)]


def feasibility(problem: Problem) -> Feasibility:
    """Decide whether any schedule exists, and return one or what is missing.

    Serial execution fits if each micro-batch (of slices: each sample) fits alone. If one does not
    fit alone, no schedule fits. ``plan`` is that of the first of `serial_groups`.
    """
    if problem.num_costs > 1 or problem.has_samples:
        return _feasible_alone(problem)
    smallest = [_smallest(problem, device) for device in range(len(problem.devices))]
    limits = [device.memory_bytes for device in problem.devices]
    needs = {
        f"devices[{device}].memory_bytes": found.cost
        for device, (found, limit) in enumerate(zip(smallest, limits, strict=True))
        if found.proven > limit
    }
    if needs:
        return Feasibility(None, needs)
    if any(found.cost > limit for found, limit in zip(smallest, limits, strict=True)):
        return Feasibility(None, {})
    chosen = [_least_host(problem, device, found) for device, found in enumerate(smallest)]
    is_decided = True
    for index, host in enumerate(problem.hosts):
        shared = [d for d, device in enumerate(problem.devices) if device.host == host.name]
        limit = host.memory_bytes
        if limit is None or sum(chosen[d].cost for d in shared) <= limit:
            continue
        for device in shared:
            chosen[device] = _less_host(problem, device, chosen[device])
        if (used := sum(chosen[d].cost for d in shared)) > limit:
            if sum(chosen[d].proven for d in shared) > limit:
                needs[f"hosts[{index}].memory_bytes"] = used
            is_decided = False
    if needs or not is_decided:
        return Feasibility(None, needs)
    return Feasibility(SerialPlan(tuple(one.program for one in chosen)), {})


def serial_plan(problem: Problem, group: Sequence[int]) -> Feasibility:
    """Return how one of `serial_groups` fits; the program numbers its micro-batches 0, 1, ..."""
    alone = one_group(problem, group)
    found = feasibility(alone.problem)
    if found.plan is not None:
        return Feasibility(SerialPlan(alone.lift(found.plan.programs)), {})
    if len(group) == 1:
        return found
    known = zip(smallest_memory(alone.problem), problem.devices, strict=True)
    needs = {
        f"devices[{d}].memory_bytes": least
        for d, (least, device) in enumerate(known)
        if _least_of_samples(problem, d, group) > device.memory_bytes
    }
    return Feasibility(None, needs)


def _least_of_samples(problem: Problem, device: int, group: Sequence[int]) -> int:
    """Return a lower bound of the bytes with which a device can run the samples of a group."""
    fixed = problem.devices[device].reserved_bytes + problem.static_bytes_of(device)
    least = 0
    for sample in problem.samples:
        before = 0
        for s in problem.stages_of[device] if sample[0] in group else ():
            ways = [_options_of_cell(problem, s, problem.cost_of[j]) for j in sample]
            sizes = [min(way.held_bytes for way in cell) for cell in ways]
            own = before + sum(sizes[:-1]) + min(way.needed for way in ways[-1])
            alone = max(min(way.at_once for way in cell) for cell in ways)
            least = max(least, own, alone)
            before += sum(sizes)
    return fixed + least


def _options_of_cell(problem: Problem, s: int, cost: int) -> list[_Option]:
    menu = problem.menus_by_cost[cost][s]
    return _options([(n, mode) for n, mode in enumerate(menu) if problem.can_use(s, n, cost)])


def _kinds(problem: Problem) -> Iterator[Problem]:
    """Yield problems whose micro-batches are equal, one for each kind of `serial_groups`."""
    if problem.num_costs == 1 and not problem.has_samples:
        yield problem
        return
    for group in _different(problem):
        yield one_group(problem, group).problem


def _different(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield one of `serial_groups` per kind."""
    seen = set()
    for group in serial_groups(problem):
        kind = tuple(problem.cost_of[j] for j in group)
        if kind not in seen:
            seen.add(kind)
            yield group


def _feasible_alone(problem: Problem) -> Feasibility:
    found = [serial_plan(problem, group) for group in _different(problem)]
    needs: dict[str, int] = {}
    for one in found:
        for path, value in one.needs.items():
            needs[path] = max(value, needs.get(path, 0))
    plan = found[0].plan if all(one.plan is not None for one in found) else None
    return Feasibility(plan, needs)


def least_bytes(stage: Stage, *, can_offload: bool) -> tuple[int, int, int]:
    """Return the minimum bytes a stage holds between passes, needs until its I ends, and overall.

    On a device with one stage the last number decides whether a schedule exists. With several, the
    earlier stages hold their bytes until the I of a later one has ended; a W can wait until then.
    """
    menu = [(n, mode) for n, mode in enumerate(stage.menu) if can_offload or not mode.offload_bytes]
    options = _options(menu)
    return (
        min(way.held_bytes for way in options),
        min(way.needed for way in options),
        min(way.at_once for way in options),
    )


class _Found(NamedTuple):
    """The smallest bytes found for a device, a proven lower bound of them, and the program."""

    cost: int
    proven: int
    program: Program


def _smallest(problem: Problem, device: int) -> _Found:
    """Return the smallest memory_bytes of a device."""
    fixed = problem.devices[device].reserved_bytes + problem.static_bytes_of(device)
    at_once = 0
    states = [(0, 0)]
    taken: list[_Option] = []
    for ways in reversed(_options_of(problem, device)):
        best = min(ways, key=lambda way: max(way.at_once, way.held_bytes + at_once))
        at_once = max(best.at_once, best.held_bytes + at_once)
        taken.insert(0, best)
        states = _undominated(
            (max(way.needed, way.held_bytes + above), max(way.alone, alone))
            for way in ways
            for above, alone in states
        )
    serial = _serial(problem, device, taken)
    found = _Found(at_once, min(map(max, states)), serial)
    if found.proven < found.cost:
        found = _OneByOne(problem, device).least_peak(found)
    return _Found(fixed + found.cost, fixed + found.proven, found.program)


def _undominated(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for pair in sorted(pairs):
        if not kept or pair[1] < kept[-1][1]:
            kept.append(pair)
    return kept


def _options_of(problem: Problem, device: int) -> list[list[_Option]]:
    """Return the options of each stage of a device."""
    return [
        _options([(n, problem.menus[s][n]) for n in usable_modes(problem, s)])
        for s in problem.stages_of[device]
    ]


def _options(menu: Sequence[tuple[int, CellMode]]) -> list[_Option]:
    """Return the options of a stage; among equals, keep comes first and split before fused."""
    found = []
    for split in (True, False):
        for number, mode in menu:
            needed = mode.forward_bytes + mode.forward_workspace_bytes
            if mode.recompute == "apart":
                needed = max(needed, mode.activation_bytes + mode.recompute_workspace_bytes)
            gradient, alone = backward_bytes(mode, split=split)
            needed = max(needed, gradient)
            found.append(
                _Option(number, split, mode.least_bytes, needed, alone, mode.offload_bytes)
            )
    return found


def backward_bytes(mode: CellMode, *, split: bool) -> tuple[int, int]:
    """Return the bytes that I or B of one micro-batch needs, and those of its W (0 if fused)."""
    held_bytes = mode.backward_bytes + mode.inside_bytes
    if not split:
        return held_bytes + mode.backward_workspace_bytes, 0
    context = mode.weight_context_bytes
    return (
        max(held_bytes, context) + mode.backward_input_workspace_bytes,
        context + mode.backward_weight_workspace_bytes,
    )


def _serial(problem: Problem, device: int, taken: Sequence[_Option]) -> Program:
    """Return the program of one micro-batch, every W right after its I."""
    order: list[Action] = []
    both = list(zip(problem.stages_of[device], taken, strict=True))
    for s, way in both:
        order += _forward(problem, s, way.mode)
        order += _sent(s) if way.host else ()
    for s, way in reversed(both):
        mode = problem.menus[s][way.mode]
        order += _restored(s, mode) if mode.recompute == "apart" else ()
        order += _backward(s, mode, split=way.split)
        order += [Action(s, ActionType.BACKWARD_WEIGHT, 0)] if way.split else []
    return tuple(order)


def _forward(problem: Problem, s: int, mode: int) -> list[Action]:
    # Without an explicit menu the other actions imply the mode.
    named = mode if problem.stages[s].modes else 0
    return [Action(s, ActionType.FORWARD, 0, named)]


def _sent(s: int) -> list[Action]:
    return [Action(s, ActionType.OFFLOAD, 0), Action(s, ActionType.RELEASE, 0)]


def _restored(s: int, mode: CellMode) -> list[Action]:
    again = [Action(s, ActionType.RECOMPUTE, 0)]
    return [Action(s, ActionType.RELOAD, 0), *again] if mode.offload_bytes else again


def _backward(s: int, mode: CellMode, *, split: bool) -> list[Action]:
    kind = ActionType.BACKWARD_INPUT if split else ActionType.FULL_BACKWARD
    away = mode.offload_bytes and mode.recompute != "apart"
    return [Action(s, ActionType.RELOAD, 0), Action(s, kind, 0)] if away else [Action(s, kind, 0)]


# --- Host memory.


class _Prefix(NamedTuple):
    """The first stages of a device: bytes they hold on it and on the host, and their options."""

    held_bytes: int
    host: int
    taken: tuple[_Option, ...] = ()


def _least_host(problem: Problem, device: int, smallest: _Found) -> _Found:
    """Return the fitting options with the fewest host bytes, W right after I.

    The device must be feasible. If no such options fit, return the order of ``smallest``.
    """
    limit = problem.room_bytes(device)
    states = [_Prefix(0, 0)]
    for ways in _options_of(problem, device):
        grown = [
            _Prefix(state.held_bytes + way.held_bytes, state.host + way.host, (*state.taken, way))
            for state in states
            for way in ways
            if state.held_bytes + way.at_once <= limit
        ]
        states = _fewest(grown)
    if not states:
        return _Found(_host_peak(problem, smallest.program), 0, smallest.program)
    best = min(states, key=lambda state: state.host)
    return _Found(best.host, 0, _serial(problem, device, best.taken))


def _fewest(states: Iterable[_Prefix]) -> list[_Prefix]:
    kept: list[_Prefix] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not kept or state.host < kept[-1].host:
            kept.append(state)
    return kept


def _host_peak(problem: Problem, program: Program) -> int:
    return max(host_walk(problem, program), default=0)


def _less_host(problem: Problem, device: int, found: _Found) -> _Found:
    """Return the order of one micro-batch that needs the fewest host bytes."""
    limit = problem.room_bytes(device)
    states, least = [_Prefix(0, 0)], 0
    for ways in _options_of(problem, device):
        needed = min(way.needed for way in ways)
        least = max(
            least, min(state.host for state in states if state.held_bytes + needed <= limit)
        )
        states = _fewest(
            _Prefix(state.held_bytes + way.held_bytes + way.host - host, state.host + host)
            for state in states
            for way in ways
            for host in (0, way.host)
        )
    found = found._replace(proven=min(found.cost, least))
    return found if found.proven == found.cost else _OneByOne(problem, device).least_host(found)


# --- All orders of one micro-batch on one device.


class _Place(StrEnum):
    """State of a stage's cell."""

    KEPT = "kept"
    AWAY = "away"
    RESTORED = "restored"
    CONTEXT = "context"
    DONE = "done"


class _Moment(NamedTuple):
    """Number of F and backwards run so far; mode and state of each stage that has run its F."""

    passes: int
    cells: tuple[tuple[int, _Place], ...]


class _OneByOne:
    """Every order of one micro-batch's actions on one device, cheapest first (Dijkstra).

    A RELEASE comes right after its OFFLOAD, a RELOAD right before its consumer; anywhere else they
    would only hold more. The cost of an order is the maximum over its steps.
    """

    def __init__(self, problem: Problem, device: int) -> None:
        self.problem = problem
        self.stages = problem.stages_of[device]
        self.room = problem.room_bytes(device)

    def least_peak(self, known: _Found) -> _Found:
        """Return the order with the smallest device peak, or ``known`` if none has a smaller."""
        return self._search(known, lambda peak, _: peak)

    def least_host(self, known: _Found) -> _Found:
        """Return the order that fits with the fewest host bytes, or ``known`` if none has fewer."""
        return self._search(known, lambda peak, host: host if peak <= self.room else known.cost)

    def _search(self, known: _Found, cost_of: Callable[[int, int], int]) -> _Found:
        waiting: list[tuple[int, int, _Moment, Program]] = [(0, 0, _Moment(0, ()), ())]
        settled: set[_Moment] = set()
        numbers = count(-1, -1)
        while waiting and len(settled) < _MOST_STATES:
            cost, _, moment, program = heapq.heappop(waiting)
            if moment in settled:
                continue
            settled.add(moment)
            if moment.passes == 2 * len(self.stages) and all(
                place is _Place.DONE for _, place in moment.cells
            ):
                return _Found(cost, cost, program)
            for actions, peak, following in self._steps(moment):
                so_far = max(cost, cost_of(peak, self._host(following)))
                if so_far < known.cost and following not in settled:
                    entry = so_far, next(numbers), following, (*program, *actions)
                    heapq.heappush(waiting, entry)
        return known if waiting else known._replace(proven=known.cost)

    def _host(self, moment: _Moment) -> int:
        return sum(
            self._mode(at, number).offload_bytes
            for at, (number, place) in enumerate(moment.cells)
            if place is _Place.AWAY
        )

    def _mode(self, at: int, number: int) -> CellMode:
        return self.problem.menus[self.stages[at]][number]

    def _held(self, at: int, number: int, place: _Place) -> int:
        mode = self._mode(at, number)
        return {
            _Place.KEPT: mode.forward_bytes,
            _Place.AWAY: mode.least_bytes,
            _Place.RESTORED: mode.activation_bytes,
            _Place.CONTEXT: mode.weight_context_bytes,
            _Place.DONE: 0,
        }[place]

    def _steps(self, moment: _Moment) -> Iterator[tuple[list[Action], int, _Moment]]:
        """Yield each possible next step: its actions, its peak in bytes, and the state after it."""
        passes, cells = moment
        level = sum(self._held(at, *cell) for at, cell in enumerate(cells))
        if passes < len(self.stages):
            s = self.stages[passes]
            for number in usable_modes(self.problem, s):
                mode = self._mode(passes, number)
                peak = level + mode.forward_bytes + mode.forward_workspace_bytes
                following = _Moment(passes + 1, (*cells, (number, _Place.KEPT)))
                yield _forward(self.problem, s, number), peak, following
        for at, (number, place) in enumerate(cells):
            for actions, peak, then in self._of_cell(at, number, place):
                following = _Moment(passes, (*cells[:at], (number, then), *cells[at + 1 :]))
                yield actions, level + peak, following
        if len(self.stages) <= passes < 2 * len(self.stages):
            at = 2 * len(self.stages) - 1 - passes
            yield from self._backwards(moment, level, at)

    def _of_cell(
        self, at: int, number: int, place: _Place
    ) -> Iterator[tuple[list[Action], int, _Place]]:
        """Yield the steps of one cell alone: actions, peak above all held bytes, state after."""
        s, mode = self.stages[at], self._mode(at, number)
        if place is _Place.KEPT and mode.offload_bytes:
            yield _sent(s), 0, _Place.AWAY
        elif place in {_Place.KEPT, _Place.AWAY} and mode.recompute == "apart":
            grown = mode.activation_bytes - self._held(at, number, place)
            yield _restored(s, mode), grown + mode.recompute_workspace_bytes, _Place.RESTORED
        elif place is _Place.CONTEXT:
            weight = [Action(s, ActionType.BACKWARD_WEIGHT, 0)]
            yield weight, mode.backward_weight_workspace_bytes, _Place.DONE

    def _backwards(
        self, moment: _Moment, level: int, at: int
    ) -> Iterator[tuple[list[Action], int, _Moment]]:
        """Yield I and B of the stage that is next in the backward order, if its cell is ready."""
        passes, cells = moment
        (number, place), s = cells[at], self.stages[at]
        mode = self._mode(at, number)
        ready = _Place.AWAY if mode.offload_bytes else _Place.KEPT
        if place is not (_Place.RESTORED if mode.recompute == "apart" else ready):
            return
        for split, then in ((True, _Place.CONTEXT), (False, _Place.DONE)):
            grown = backward_bytes(mode, split=split)[0] - self._held(at, number, place)
            following = _Moment(passes + 1, (*cells[:at], (number, then), *cells[at + 1 :]))
            yield _backward(s, mode, split=split), level + grown, following


# --- What a problem leaves to choose.


def usable_modes(problem: Problem, s: int) -> list[int]:
    """Return the modes of a stage that its device has the lanes for."""
    return [number for number in range(len(problem.menus[s])) if problem.can_use(s, number)]


def possible_modes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return, per stage, the modes that fit into memory.

    A mode is left out if it does not fit with the other stages of its device in any of their modes.
    If no mode of a stage fits, all usable ones are returned.
    """
    possible: list[tuple[int, ...]] = [()] * len(problem.stages)
    for device, stages in enumerate(problem.stages_of):
        options, room = _options_of(problem, device), problem.room_bytes(device)
        above = [0]
        for ways in reversed(options):
            above.append(min(max(way.needed, way.held_bytes + above[-1]) for way in ways))
        before = 0
        for at, (s, ways) in enumerate(zip(stages, options, strict=True)):
            later = above[len(stages) - 1 - at]
            fitting = {
                way.mode
                for way in ways
                if max(way.alone, before + max(way.needed, way.held_bytes + later)) <= room
            }
            possible[s] = tuple(sorted(fitting)) or tuple(usable_modes(problem, s))
            before += min(way.held_bytes for way in ways)
    return tuple(possible)


def knows_menu(problem: Problem, device: int) -> bool:
    """Whether a device can profit from no modes other than keep, offload and recompute.

    This holds if no stage of it has an explicit menu, or if its memory never binds.
    `optpipe_solver.exact` and the full-horizon model do not support other menus. If all
    micro-batches of a stage must use one mode, their proofs hold.
    """
    stages = problem.stages_of[device]
    return not any(problem.stages[s].modes for s in stages) or not memory_binds(problem, device)


def exact_parts_know(problem: Problem) -> bool:
    """Whether the exact searches and the full-horizon model support every feature of a problem."""
    return (
        not problem.pairs
        and problem.is_even
        and all(knows_menu(problem, device) for device in range(len(problem.devices)))
    )


def refuse_unless(is_supported: bool, part: str, problem: Problem, rule: str) -> None:
    """Refuse a problem that a part of the solver does not support.

    A part that proves or searches calls this function first: elsewhere its bounds may be false.

    Parameters
    ----------
    is_supported
        Result of the part's own predicate for the problem.
    part, rule
        Name of the part, and the problems that it supports, in words.

    Raises
    ------
    InputError
        If the problem is not supported.
    """
    if is_supported:
        return
    features = {
        "pairs": bool(problem.pairs),
        "micro-batches with costs, samples or a given order": not problem.is_even,
        "menus of modes": problem.has_modes,
        f"objective {problem.objective}": True,
    }
    used = ", ".join(name for name, is_used in features.items() if is_used)
    size = f"{len(problem.stages)} stages and {problem.num_microbatches} micro-batches"
    raise InputError(
        f"{part}: the problem has {used}, {size}; this part supports {rule}; call solve, which "
        "chooses the parts that support a problem"
    )


def fifo_loses_nothing(problem: Problem) -> bool:
    """Whether some best schedule runs its micro-batches first in, first out.

    Identical micro-batches may be relabelled pass by pass if no device can profit from any mode but
    keep.
    """
    return not any(
        memory_binds(problem, stage.device) and len(usable_modes(problem, s)) > 1
        for s, stage in enumerate(problem.stages)
    )


def memory_binds(problem: Problem, device: int) -> bool:
    """Whether keeping everything of every micro-batch could exceed the device's memory."""
    most = workspace = 0
    for s in problem.stages_of[device]:
        stage = problem.stages[s]
        held_bytes = max(stage.activation_bytes, stage.weight_context_bytes)
        most += held_bytes * problem.num_microbatches
        workspace = max(
            workspace,
            stage.forward_workspace_bytes,
            stage.backward_input_workspace_bytes,
            stage.backward_weight_workspace_bytes,
            stage.backward_workspace_bytes,
        )
    limit = problem.room_bytes(device)
    return most + workspace > limit


def fusing_may_pay(problem: Problem, s: int) -> bool:
    """Whether a fused B can be better than I with W right after it, in time or in memory."""
    stage = problem.stages[s]
    if stage.fused_backward_ms < stage.backward_input_ms + stage.backward_weight_ms:
        return True
    menu = [problem.menus[s][number] for number in usable_modes(problem, s)]
    return any(
        backward_bytes(mode, split=False)[0] < max(backward_bytes(mode, split=True))
        for mode in menu
    )
