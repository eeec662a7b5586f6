"""docs/specification.md, "Memory" and "Legal" a second time, naively, to judge `optpipe`.

Legality: a regular expression per (stage, micro-batch), a graph sorted topologically, and bytes
from the state every (stage, micro-batch) is in. Time: a clock that ticks one millisecond at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from optpipe import Action, ActionType, Problem, Program, Programs
from optpipe.problem import Link, Stage

_TRIP = ("OFFLOAD", "RELEASE", "RELOAD")
_BACKWARDS = (ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD)
_PASSES = {"F": "forward", "I": "backward_input", "W": "backward_weight", "B": "backward",
           "RECOMPUTE": "recompute"}  # fmt: skip
_HORIZON = 10_000


def is_legal(problem: Problem, programs: Programs) -> bool:
    """Whether the programs are legal, limits included."""
    if len(programs) != len(problem.devices) or not _lives_are_right(problem, programs):
        return False
    if not all(_pairs_are_right(problem, row) for row in programs):
        return False
    if _waits_in_a_circle(problem, programs) or not _come_in_turn(problem, programs):
        return False
    fits = all(
        device_peak(problem, index, row) <= device.memory_bytes - device.reserved_bytes
        for index, (device, row) in enumerate(zip(problem.devices, programs, strict=True))
    )
    peaks = host_peaks(problem, programs)
    return fits and all(
        host.memory_bytes is None or peaks[host.name] <= host.memory_bytes for host in problem.hosts
    )


def _stage(problem: Problem, index: int, microbatch: int) -> Stage:
    """A stage with the times and bytes of a micro-batch's cost."""
    cost = problem.microbatches[microbatch].cost if problem.microbatches else 0
    return problem.stages[index] if cost == 0 else problem.other_costs[index][cost - 1]


def _come_in_turn(problem: Problem, programs: Programs) -> bool:
    """Whether a given order holds on every stage, and in every sample that of its pieces."""
    samples: dict[int | None, list[int]] = {}
    for j, one in enumerate(problem.microbatches):
        samples.setdefault(one.sample, []).append(j)
    samples.pop(None, None)
    for row in programs:
        for index in range(len(problem.stages)):
            own = [action for action in row if action.stage == index]
            forwards = [action.microbatch for action in own if action.type == "F"]
            backwards = [action.microbatch for action in own if action.type in _BACKWARDS]
            if problem.order == "given" and forwards != sorted(forwards):
                return False
            for members in samples.values():
                there = [j for j in forwards if j in members]
                back = [j for j in backwards if j in members]
                if there != sorted(there) or back != sorted(back, reverse=True):
                    return False
    return True


def _lives_are_right(problem: Problem, programs: Programs) -> bool:
    lives: dict[tuple[int, int, int], list[str]] = {}
    named: dict[tuple[int, int], int] = {}
    for device, row in enumerate(programs):
        for action in row:
            lives.setdefault((device, action.stage, action.microbatch), []).append(action.type)
            if action.type == "F":
                named[action.stage, action.microbatch] = action.mode
            elif action.mode:
                return False
    expected = {
        (stage.device, index, microbatch)
        for index, stage in enumerate(problem.stages)
        for microbatch in range(problem.num_microbatches)
    }
    if set(lives) != expected:
        return False
    used: dict[tuple[int, int], set[int]] = {}
    for (_, index, microbatch), life in lives.items():
        stage = _stage(problem, index, microbatch)
        number = _number(stage, named.get((index, microbatch), 0), set(life))
        ways = _ways(stage)
        if number >= len(ways):
            return False
        cost = problem.microbatches[microbatch].cost if problem.microbatches else 0
        used.setdefault((index, cost), set()).add(number)
        way = ways[number]
        middle = " ".join((*_TRIP,) * (way.moved > 0) + ("RECOMPUTE",) * (way.apart_ms is not None))
        if " ".join(life) not in {f"F {middle} {end}".replace("  ", " ") for end in ("I W", "B")}:
            return False
        if way.moved and problem.devices[problem.stages[index].device].d2h_gb_per_s is None:
            return False
    return all(
        len(numbers) == 1 or not problem.stages[index].uniform_modes
        for (index, _), numbers in used.items()
    )


def _pairs_are_right(problem: Problem, row: Program) -> bool:
    """Whether the second of each pair is a licensed backward right behind an F of another cell."""
    licences = [(one.forward, one.backward, one.with_) for one in problem.pairs]
    before: Action | None = None
    for action in row:
        if action.paired:
            if before is None or (before.type, before.paired) != ("F", False):
                return False
            if (before.stage, action.stage, action.type.value) not in licences:
                return False
            if before.cell == action.cell:
                return False
        before = action
    return True


def _hidden_ms(problem: Problem, forward: Action, backward: Action) -> float:
    return next(
        one.hidden_ms
        for one in problem.pairs
        if (one.forward, one.backward, one.with_)
        == (forward.stage, backward.stage, backward.type.value)
    )


class _Way(NamedTuple):
    """How a cell is treated: bytes that F leaves, and go; ms of a RECOMPUTE, and of one inside."""

    left: int
    moved: int
    apart_ms: float | None
    inside_ms: float
    inside: int
    context: int
    workspaces: dict[str, int]


def _ways(stage: Stage) -> list[_Way]:
    """What a stage's menu says, or the three ways of v1."""
    workspaces = {kind: getattr(stage, f"{name}_workspace_bytes") for kind, name in _PASSES.items()}
    whole, context = stage.activation_bytes, stage.weight_context_bytes
    ways = [_Way(whole, 0, None, 0, 0, context, workspaces)]
    if stage.offload_bytes:
        ways.append(_Way(whole, stage.offload_bytes, None, 0, 0, context, workspaces))
    if stage.recompute_ms is not None:
        left = stage.checkpoint_bytes or 0
        ways.append(_Way(left, 0, stage.recompute_ms, 0, 0, context, workspaces))
    for mode in stage.modes[1:]:
        assert mode.forward_bytes is not None
        assert mode.weight_context_bytes is not None
        apart = mode.recompute_ms if mode.recompute == "apart" else None
        inside = mode.recompute_ms if mode.recompute == "inside" else 0
        own = {kind: getattr(mode, f"{name}_workspace_bytes") for kind, name in _PASSES.items()}
        ways.append(
            _Way(mode.forward_bytes, mode.offload_bytes, apart, inside or 0, mode.inside_bytes,
                 mode.weight_context_bytes, own)
        )  # fmt: skip
    return ways


def _number(stage: Stage, named: int, life: set[str]) -> int:
    """The mode that F names, or that the actions of a cell show where v1 can say the menu."""
    if named or stage.modes:
        return named
    if "OFFLOAD" in life:
        return 1 if stage.offload_bytes else 99
    if "RECOMPUTE" in life:
        return len(_ways(stage)) - 1 if stage.recompute_ms is not None else 99
    return 0


def _way_of(problem: Problem, cell: tuple[int, int], row: Program) -> _Way:
    """How a cell of a legal program is treated."""
    own = [action for action in row if (action.stage, action.microbatch) == cell]
    named = max(action.mode for action in own)
    stage = _stage(problem, *cell)
    return _ways(stage)[_number(stage, named, {action.type.value for action in own})]


def _waits_in_a_circle(problem: Problem, programs: Programs) -> bool:
    """Sort the cells of the grid, of which a pair is one, after all that each needs."""
    cell_of: dict[tuple[int, str, int], tuple[int, int]] = {}
    graph: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for device, row in enumerate(programs):
        cells: list[tuple[int, int]] = []
        for index, action in enumerate(row):
            if not action.paired:
                cells.append((device, index))
            cell_of[action.stage, action.type.value, action.microbatch] = cells[-1]
            graph.setdefault(cells[-1], set())
        for before, after in pairwise(cells):
            graph[after].add(before)
    last = len(problem.stages) - 1
    for (stage, kind, microbatch), cell in cell_of.items():
        wanted = []
        if kind == "F" and stage > 0:
            wanted = [(stage - 1, "F", microbatch)]
        if kind in {"I", "B"} and stage < last:
            wanted = [(stage + 1, other, microbatch) for other in "IB"]
        graph[cell].update(cell_of[one] for one in wanted if one in cell_of)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def _held(way: _Way, whole: int, done: set[str]) -> int:
    """Bytes of one (stage, micro-batch) from what has been done to it."""
    if "F" not in done or done & {"W", "B"}:
        return 0
    if "I" in done:
        return way.context
    if "RECOMPUTE" in done:
        return whole
    away = "RELEASE" in done and "RELOAD" not in done
    return way.left - (way.moved if away else 0)


def device_levels(problem: Problem, device: int, row: Program) -> Iterator[tuple[int, ...]]:
    """Bytes before and after each action, its workspace, and what its recomputation inside holds.

    All from the state of every cell.
    """
    static = sum(stage.static_bytes for stage in problem.stages if stage.device == device)
    ways = {cell: _way_of(problem, cell, row) for cell in {action.cell for action in row}}
    done: dict[tuple[int, int], set[str]] = {}

    def total() -> int:
        return static + sum(
            _held(ways[cell], _stage(problem, *cell).activation_bytes, did)
            for cell, did in done.items()
        )

    for action in row:
        cell = action.cell
        before = total()
        inside = ways[cell].inside if action.type in _BACKWARDS else 0
        done.setdefault(cell, set()).add(action.type.value)
        yield before, total(), ways[cell].workspaces.get(action.type.value, 0), inside


def device_peak(problem: Problem, device: int, row: Program) -> int:
    """Peak bytes of a device, static bytes included."""
    static = sum(stage.static_bytes for stage in problem.stages if stage.device == device)
    peak, beside = static, 0
    for action, level in zip(row, device_levels(problem, device, row), strict=True):
        before, after, extra, inside = level
        # Of a pair both workspaces are there.
        beside = extra + (beside if action.paired else 0)
        peak = max(peak, max(before + inside, after) + beside)
    return peak


def host_peaks(problem: Problem, programs: Programs) -> dict[str, int]:
    """Peak bytes per host: from a cell's OFFLOAD to just before its RECOMPUTE, I or B."""
    peaks = {host.name: 0 for host in problem.hosts}
    for device, row in zip(problem.devices, programs, strict=True):
        peak = 0
        for upto in range(len(row)):
            away = {action.cell for action in row[: upto + 1] if action.type == "OFFLOAD"}
            used = ("I", "B", "RECOMPUTE")
            away -= {action.cell for action in row[: upto + 1] if action.type in used}
            peak = max(peak, sum(_way_of(problem, cell, row).moved for cell in away))
        peaks[device.host] += peak
    return peaks


@dataclass
class _Transfer:
    issue: int
    device: int
    index: int
    action: Action


@dataclass
class Ticking:
    """All devices at one moment; `run` ticks until nothing is left to do.

    Every duration, transfers' and links' included, must be a whole number of ms.
    """

    problem: Problem
    programs: Programs
    starts: dict[Action, int] = field(default_factory=dict)
    ends: dict[Action, int] = field(default_factory=dict)
    waiting: list[_Transfer] = field(default_factory=list)
    running: list[_Transfer] = field(default_factory=list)
    left: dict[Action, float] = field(default_factory=dict)

    def run(self) -> tuple[float, float]:
        """Return makespan and span in ms; ``starts`` and ``ends`` hold the rest."""
        self.ways = {
            cell: _way_of(self.problem, cell, row)
            for row in self.programs
            for cell in {action.cell for action in row}
        }
        self.head = [0] * len(self.programs)
        self.idle_from = [0] * len(self.programs)
        self.lanes = [list(self._sent_over(link)) for link in self.problem.links]
        self.free = [0.0] * len(self.lanes)
        now = 0
        while any(at < len(row) for at, row in zip(self.head, self.programs, strict=True)):
            while self._step_all(now) or self._start_messages(now):
                pass
            self._start_transfers(now)
            now += 1
            assert now < _HORIZON, "the programs got stuck"
        return self._lengths()

    def _step_all(self, now: int) -> int:
        return sum(self._step(device, now) for device in range(len(self.programs)))

    def _step(self, device: int, now: int) -> bool:
        row, at = self.programs[device], self.head[device]
        if at == len(row) or self.idle_from[device] > now:
            return False
        action = row[at].bare
        if action.type in (ActionType.OFFLOAD, ActionType.RELOAD):
            self.waiting.append(_Transfer(now, device, at, action))
        elif not self._inputs_there(action, now):
            return False
        elif at + 1 < len(row) and row[at + 1].paired:
            other = row[at + 1].bare
            if not self._inputs_there(other, now):
                return False
            length = self._length(action) + self._length(other)
            hidden = _hidden_ms(self.problem, action, other)
            assert hidden == int(hidden)
            self.starts[action] = self.starts[other] = now
            self.ends[action] = self.ends[other] = now + length - int(hidden)
            self.idle_from[device] = self.ends[other]
            self.head[device] += 1
        else:
            self.starts[action] = now
            self.ends[action] = self.idle_from[device] = now + self._length(action)
        self.head[device] += 1
        return True

    def _inputs_there(self, action: Action, now: int) -> bool:
        stage, kind, microbatch, *_ = action
        if kind is ActionType.RELEASE:
            return self._ended(Action(stage, ActionType.OFFLOAD, microbatch), now)
        if kind is ActionType.FORWARD:
            return stage == 0 or self._arrived(Action(stage - 1, kind, microbatch), stage, now)
        if kind not in (*_BACKWARDS, ActionType.RECOMPUTE):
            return True
        reload = Action(stage, ActionType.RELOAD, microbatch)
        if reload in self.programs[self.problem.stages[stage].device] and not self._ended(
            reload, now
        ):
            return False
        if kind is ActionType.RECOMPUTE:
            return True
        if stage == len(self.problem.stages) - 1:
            return self._ended(Action(stage, ActionType.FORWARD, microbatch), now)
        return any(
            self._arrived(Action(stage + 1, other, microbatch), stage, now) for other in _BACKWARDS
        )

    def _ended(self, action: Action, now: int) -> bool:
        return action in self.ends and self.ends[action] <= now

    def _arrived(self, action: Action, target: int, now: int) -> bool:
        pair = (self.problem.stages[action.stage].device, self.problem.stages[target].device)
        size = _stage(self.problem, min(action.stage, target), action.microbatch).output_bytes
        delay = 0.0
        for link in self.problem.links:
            if (link.source, link.target) == pair:
                rate = link.bandwidth_gb_per_s
                if rate and self._queues():
                    return action in self.left and self.left[action] + link.latency_ms <= now
                delay = link.latency_ms + (size / 1e6 / rate if rate else 0)
        return action in self.ends and self.ends[action] + delay <= now

    def _queues(self) -> bool:
        return self.problem.format == "optpipe/problem/v2"

    def _sent_over(self, link: Link) -> Iterator[Action]:
        """What is sent over a link, in the order of the sender's program."""
        placement = self.problem.placement
        for action in self.programs[link.source]:
            step = {"F": 1, "I": -1, "B": -1}.get(action.type.value, 0)
            target = action.stage + step
            if step and 0 <= target < len(placement) and placement[target] == link.target:
                yield action.bare

    def _start_messages(self, now: int) -> bool:
        """Let the next message of each free link leave, if it is there; whether any did."""
        moved = False
        for index, link in enumerate(self.problem.links if self._queues() else ()):
            queue = self.lanes[index]
            if link.bandwidth_gb_per_s is None or not queue or self.free[index] > now:
                continue
            if self._ended(queue[0], now):
                action = queue.pop(0)
                first = action.stage if action.type.value == "F" else action.stage - 1
                size = _stage(self.problem, first, action.microbatch).output_bytes
                self.free[index] = now + size / 1e6 / link.bandwidth_gb_per_s
                self.left[action] = self.free[index]
                moved = True
        return moved

    def _length(self, action: Action) -> int:
        stage, way = _stage(self.problem, *action.cell), self.ways[action.cell]
        own_device = self.problem.devices[stage.device]
        split = stage.backward_input_ms + stage.backward_weight_ms
        fused = split if stage.backward_ms is None else stage.backward_ms
        length = {
            "F": stage.forward_ms,
            "I": stage.backward_input_ms + way.inside_ms,
            "W": stage.backward_weight_ms,
            "B": fused + way.inside_ms,
            "RECOMPUTE": way.apart_ms,
            "RELEASE": 0,
            "OFFLOAD": way.moved / 1e6 / (own_device.d2h_gb_per_s or 1),
            "RELOAD": way.moved / 1e6 / (own_device.h2d_gb_per_s or 1),
        }[action.type.value]
        assert length is not None
        assert length == int(length)
        return int(length)

    def _start_transfers(self, now: int) -> None:
        self.running = [item for item in self.running if self.ends[item.action] > now]
        for item in sorted(self.waiting, key=lambda one: (one.issue, one.device, one.index)):
            first_of_its_queue = not any(
                other.device == item.device
                and other.action.type is item.action.type
                and other.index < item.index
                for other in self.waiting
            )
            if first_of_its_queue and not any(self._collide(item, other) for other in self.running):
                self.waiting.remove(item)
                self.running.append(item)
                self.starts[item.action] = now
                self.ends[item.action] = now + self._length(item.action)

    def _collide(self, one: _Transfer, other: _Transfer) -> bool:
        same_direction = one.action.type is other.action.type
        if one.device == other.device:
            return same_direction or self.problem.devices[one.device].half_duplex
        left, right = (self.problem.devices[item.device].pcie_group for item in (one, other))
        return same_direction and left is not None and left == right

    def _lengths(self) -> tuple[float, float]:
        lengths, first, last = [], [], []
        for device, row in enumerate(self.programs):
            if not row:
                continue
            first.append(min(self.starts[action.bare] for action in row))
            last.append(max([self.ends[action.bare] for action in row] + self._syncs(device, row)))
            lengths.append(last[-1] - first[-1])
        return max(last) - min(first), max(lengths)

    def _syncs(self, device: int, row: Program) -> list[float]:
        ends = []
        free = 0.0
        finals = {action.stage: action for action in row if action.type in ("W", "B")}
        for action in sorted(finals.values(), key=row.index):
            length = self.problem.stages[action.stage].grad_sync_ms
            if length > 0:
                free = max(free, self.ends[action]) + length
                ends.append(free)
        return ends
