"""Legality (docs/specification.md, "Legal"): what a set of programs must satisfy to be run at all.

``Legal`` means:

* Every (stage, micro-batch) has F and either I and W or B exactly once on the right device.
* The table's order holds, and the programs have no cyclic wait.
* No peak exceeds its limit.

Durations play no part: a legal schedule is legal under every timing.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from optpipe.errors import IllegalScheduleError, ScheduleMismatchError, Violation
from optpipe.memory import EFFECTS, host_peak_bytes, host_walk, memory_walk, modes_of
from optpipe.schedule import Action, ActionType, Pass, cells_of, input_of, pass_of, starts_pair

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from optpipe.memory import CellModes
    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs, Schedule

__all__ = ["check", "check_schedule", "find_violations", "render_grid"]


_SHOWN = 5
_MOST = 10_000
_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_TRANSFERS = _OFFLOAD, _RELEASE, _RELOAD = (
    ActionType.OFFLOAD,
    ActionType.RELEASE,
    ActionType.RELOAD,
)
_RECOMPUTE = ActionType.RECOMPUTE


def check(problem: Problem, programs: Programs) -> tuple[CellModes, ...]:
    """Accept legal programs, refuse all others; return the modes of each program's cells.

    Raises
    ------
    IllegalScheduleError
        With the grid printed, the first offending cell marked, and every violation found.
    """
    violations, modes = _judge(problem, programs)
    if violations:
        raise IllegalScheduleError(_report(programs, violations), violations)
    return modes


def check_schedule(problem: Problem, schedule: Schedule) -> tuple[CellModes, ...]:
    """Accept a legal schedule of this very problem; return what `check` does.

    Raises
    ------
    ScheduleMismatchError
        If the schedule names another problem or placement.
    IllegalScheduleError
        As `check`.
    """
    if schedule.problem_hash != problem.problem_hash:
        raise ScheduleMismatchError(
            f"the schedule was made for problem {schedule.problem_hash}, but this problem is "
            f"{problem.problem_hash}; use the problem it was made for, or check its programs "
            "alone by exporting it as CSV"
        )
    if schedule.placement != problem.placement:
        raise ScheduleMismatchError(
            f"the schedule's placement is {list(schedule.placement)}, the problem's "
            f"{list(problem.placement)}; solve the problem again"
        )
    return check(problem, schedule.programs)


def find_violations(problem: Problem, programs: Programs) -> list[Violation]:
    """Return the broken rules, in program order, missing actions last; empty = legal.

    Waits and memory are checked only if the actions themselves are right. The list ends at
    10 000 faults per device: an empty program of a large problem would fill the memory.
    """
    return _judge(problem, programs)[0]


def _judge(problem: Problem, programs: Programs) -> tuple[list[Violation], tuple[CellModes, ...]]:
    """Return the broken rules, and the modes of each program's cells where there are none."""
    if len(programs) != len(problem.devices):
        message = (
            f"{len(programs)} programs for {len(problem.devices)} devices: there must be one per "
            "device; add empty ones for devices without a stage, or remove blank lines at the "
            "end of a CSV"
        )
        at = min(len(programs), len(problem.devices))
        return [Violation("programs.count", at, 0, message)], ()
    modes = tuple(modes_of(problem, _existing(problem, program)) for program in programs)
    found = [
        violation
        for device, program in enumerate(programs)
        for violation in islice(_program_violations(problem, device, program, modes[device]), _MOST)
    ]
    # A misplaced action is also missing where it belongs: the cell that exists is the one to mark.
    found.sort(key=lambda item: (item.code.startswith("missing"), item.device, item.index))
    if found or (found := list(_cyclic_waits(problem, programs))):
        return found, ()
    found += _device_overflows(problem, programs, modes)
    found += _host_overflows(problem, programs, modes)
    return found, modes


def _existing(problem: Problem, program: Program) -> Program:
    """Return the actions whose stage and micro-batch exist."""
    stages, m = len(problem.stages), problem.num_microbatches
    return tuple(one for one in program if 0 <= one.stage < stages and 0 <= one.microbatch < m)


def _program_violations(
    problem: Problem, device: int, program: Program, modes: CellModes
) -> Iterator[Violation]:
    position: dict[Action, int] = {}
    for index, action in enumerate(program):
        fault = _misplaced(problem, device, action)
        if fault is None and action.bare in position:
            fault = ("action.duplicate", f"{action} stands twice; remove one")
        if fault is not None:
            yield Violation(fault[0], device, index, fault[1])
        position.setdefault(action.bare, index)
    named = {action.cell: action.mode for action in program if action.type is _F}
    for index, action in enumerate(program):
        for code, message in (
            *_order_faults(position, action, index),
            *_mode_faults(problem, position, named.get(action.cell, 0), action),
            *(_pair_faults(problem, program, index) if action.paired else ()),
        ):
            yield Violation(code, device, index, message)
    yield from _uneven_modes(problem, device, program, modes)
    yield from _out_of_turn(problem, device, position)
    for stage in problem.stages_of[device]:
        for microbatch in range(problem.num_microbatches):
            for code, message in _missing(position, stage, microbatch):
                yield Violation(code, device, len(program), message)


def _misplaced(problem: Problem, device: int, action: Action) -> tuple[str, str] | None:
    num_stages = len(problem.stages)
    if not 0 <= action.stage < num_stages:
        return (
            "action.stage",
            f"{action}: there is no stage {action.stage}; the problem has {num_stages}, numbered "
            "from 0; remove it or correct the number",
        )
    if not 0 <= action.microbatch < problem.num_microbatches:
        return (
            "action.microbatch",
            f"{action}: there is no micro-batch {action.microbatch}; the problem has "
            f"{problem.num_microbatches}, numbered from 0; remove it or correct the number",
        )
    home = problem.stages[action.stage].device
    if home != device:
        return (
            "action.device",
            f"{action} is on device {device}, but stage {action.stage} lives on device {home}; "
            "move it there",
        )
    menu = problem.menu_of(action.stage, action.microbatch)
    if action.mode and action.type is not _F:
        return (
            "action.mode",
            f"{action} names mode {action.mode}, but a mode stands at F alone; move it there",
        )
    if action.mode >= len(menu):
        return (
            "action.mode",
            f"{action}: stage {action.stage} has no mode {action.mode}; its menu is "
            f"{', '.join(f'{index} {mode.name}' for index, mode in enumerate(menu))}; correct it",
        )
    return None


def _order_faults(
    position: dict[Action, int], action: Action, index: int
) -> Iterator[tuple[str, str]]:
    for earlier_type in EFFECTS[action.type].comes_after:
        earlier = Action(action.stage, earlier_type, action.microbatch)
        at = position.get(earlier)
        if at is not None and at > index:
            yield "order", f"{action} stands before {earlier}, but must come after it; swap them"


def _pair_faults(problem: Problem, program: Program, index: int) -> Iterator[tuple[str, str]]:
    """Hold a backward that runs together with the F before it against what the problem allows."""
    backward = program[index]
    forward = program[index - 1] if index else None
    if forward is None or forward.type is not _F or not backward.type.is_backward:
        yield (
            "pair.alone",
            f"{backward} is marked as the second of a pair, which is an I or a B right after an F; "
            "put its F before it, or unmark it",
        )
        return
    (text,) = cells_of((forward, backward))
    if forward.cell == backward.cell:
        yield (
            "pair.same_cell",
            f"{text}: {forward.cell} cannot run its forward and its backward together; pair it "
            "with another micro-batch",
        )
    key = forward.stage, backward.stage, backward.type.value
    if key not in problem.hidden_ms:
        allowed = [
            f"{one.with_} of stage {one.backward}"
            for one in problem.pairs
            if one.forward == forward.stage
        ]
        yield (
            "pair.unlicensed",
            f"{text}: pairs of the problem let F of stage {forward.stage} run together with "
            f"{', '.join(allowed) or 'nothing'}; write its two actions one after the other, or "
            "add the pair to the problem",
        )


def _mode_faults(
    problem: Problem, position: dict[Action, int], mode: int, action: Action
) -> Iterator[tuple[str, str]]:
    stage, kind, microbatch, *_ = action
    exists = 0 <= stage < len(problem.stages) and 0 <= microbatch < problem.num_microbatches
    description = problem.stage_of(stage, microbatch) if exists else None
    cell = f"({stage}, {microbatch})"

    def has(other: ActionType) -> bool:
        return Action(stage, other, microbatch) in position

    if description is not None and (mode or description.modes):
        yield from _unasked_or_missing(problem, position, mode, action)
    elif kind in _TRANSFERS:
        missing = [str(Action(stage, part, microbatch)) for part in _TRANSFERS if not has(part)]
        if missing:
            yield (
                "offload.incomplete",
                f"{action} without {' and '.join(missing)}: an offloaded micro-batch needs "
                "OFFLOAD, RELEASE and RELOAD; add or remove them together",
            )
        if kind is _OFFLOAD and description is not None and not problem.can_move(description):
            yield (
                "offload.impossible",
                f"{action}: stage {stage} cannot be offloaded (offload_bytes is "
                f"{description.offload_bytes}, or its device has no bandwidth); "
                "remove it",
            )
    elif kind is _RECOMPUTE:
        if description is not None and not description.can_recompute:
            yield (
                "recompute.impossible",
                f"{action}: stage {stage} has no recompute_ms; give it in the problem or remove it",
            )
        if has(_OFFLOAD):
            yield (
                "mode.both",
                f"{action}: {cell} is both offloaded and recomputed; keep one of the two",
            )
    if kind is _B and (has(_I) or has(_W)):
        yield "backward.both", f"{action}: {cell} has B beside I or W; keep B, or I and W"


def _unasked_or_missing(
    problem: Problem, position: dict[Action, int], number: int, action: Action
) -> Iterator[tuple[str, str]]:
    """Check that a cell has exactly the actions of the mode that its F names."""
    stage, kind, microbatch, *_ = action
    menu = problem.menu_of(stage, microbatch)
    if number >= len(menu):
        return
    mode = menu[number]
    is_in_mode: dict[ActionType, bool] = dict.fromkeys(_TRANSFERS, mode.offload_bytes > 0)
    is_in_mode[_RECOMPUTE] = mode.recompute == "apart"
    called = f"mode {number} ({mode.name})"
    if not is_in_mode.get(kind, True):
        yield (
            "mode.unasked",
            f"{action}: ({stage}, {microbatch}) is in {called}, which has no {kind}; remove it, "
            f"or name another mode at its F, for example {Action(stage, _F, microbatch, 1)}",
        )
    if kind is not _F:
        return
    missing = [Action(stage, part, microbatch) for part, needed in is_in_mode.items() if needed]
    if absent := [str(part) for part in missing if part not in position]:
        yield (
            "mode.incomplete",
            f"{action} without {' and '.join(absent)}: {called} asks for it; add it, or name "
            "another mode",
        )
    if not problem.can_use(stage, number, problem.cost_of[microbatch]):
        yield (
            "offload.impossible",
            f"{action}: {called} moves {mode.offload_bytes} bytes, but device "
            f"{problem.stages[stage].device} has no d2h_gb_per_s and h2d_gb_per_s; give them, or "
            "name another mode",
        )


def _uneven_modes(
    problem: Problem, device: int, program: Program, modes: CellModes
) -> Iterator[Violation]:
    """Find cells whose mode differs from the first one's, where a stage has one for all."""
    uniform = {stage for stage in problem.stages_of[device] if problem.stages[stage].uniform_modes}
    if not uniform:
        return
    first: dict[tuple[int, int], int] = {}
    for index, action in enumerate(program):
        if action.stage in uniform and action.type is _F and action.cell in modes:
            number = modes[action.cell]
            used = first.setdefault((action.stage, problem.cost_of[action.microbatch]), number)
            if number != used:
                yield Violation(
                    "mode.uniform",
                    device,
                    index,
                    f"{action} is in mode {number}, the first F of stage {action.stage} "
                    f"{'of its cost ' if problem.num_costs > 1 else ''}in mode {used}, and "
                    "uniform_modes allows one; use the same, or lift uniform_modes",
                )


def _out_of_turn(problem: Problem, device: int, position: dict[Action, int]) -> Iterator[Violation]:
    """Find F's against a given order, and what a sample's order forbids."""
    for stage in problem.stages_of[device]:
        for earlier, later in problem.forward_turns:
            one, two = Action(stage, _F, earlier), Action(stage, _F, later)
            at, behind = position.get(one), position.get(two)
            if at is not None and behind is not None and behind < at:
                why = "the order is given" if problem.order == "given" else "both are of one sample"
                yield Violation(
                    "order.forward",
                    device,
                    behind,
                    f"{two} stands before {one}, but {why}; swap them",
                )
        for earlier, later in problem.backward_turns:
            first, second = (
                next((a for k in (_I, _B) if (a := Action(stage, k, j)) in position), None)
                for j in (earlier, later)
            )
            if first is not None and second is not None and position[first] < position[second]:
                yield Violation(
                    "order.backward",
                    device,
                    position[first],
                    f"{first} stands before {second}, but backwards of one sample come in reverse; "
                    "swap them",
                )


def _missing(position: dict[Action, int], stage: int, microbatch: int) -> Iterator[tuple[str, str]]:
    def has(kind: ActionType) -> bool:
        return Action(stage, kind, microbatch) in position

    if not has(_F):
        yield "missing.forward", f"{Action(stage, _F, microbatch)} is missing; add it"
    if has(_B):
        return
    for kind in (_I, _W):
        if not has(kind):
            full = Action(stage, _B, microbatch)
            yield (
                "missing.backward",
                f"{Action(stage, kind, microbatch)} is missing (and there is no {full}); add it",
            )


def _cyclic_waits(problem: Problem, programs: Programs) -> Iterator[Violation]:
    """Run all programs without a clock; whatever is stuck in the end waits in a circle."""
    num_stages = len(problem.stages)
    heads = [0] * len(programs)
    done: set[Pass] = set()
    waiting: dict[Pass, int] = {}
    runnable = list(range(len(programs)))
    while runnable:
        device = runnable.pop()
        program = programs[device]
        while heads[device] < len(program):
            first = heads[device]
            together = program[first : first + 1 + starts_pair(program, first)]
            inputs = [input_of(action, num_stages) for action in together]
            missing = [one for one in inputs if one is not None and one not in done]
            if missing:
                waiting[missing[0]] = device
                break
            for completed in filter(None, map(pass_of, together)):
                done.add(completed)
                if completed in waiting:
                    runnable.append(waiting.pop(completed))
            heads[device] += len(together)
    for needed, device in sorted(waiting.items(), key=lambda item: item[1]):
        first = heads[device]
        (action,) = cells_of(
            programs[device][first : first + 1 + starts_pair(programs[device], first)]
        )
        kind = "the backward" if needed.backward else "the forward"
        yield Violation(
            "wait.cyclic",
            device,
            heads[device],
            f"{action} waits for {kind} of stage {needed.stage}, micro-batch {needed.microbatch}, "
            "which waits for it in turn; reorder one of the programs",
        )


def _device_overflows(
    problem: Problem, programs: Programs, modes: Sequence[CellModes]
) -> Iterator[Violation]:
    for device, program in enumerate(programs):
        limit = problem.devices[device].usable_bytes
        for index, step in enumerate(memory_walk(problem, device, program, modes[device])):
            if step.peak > limit:
                yield Violation(
                    "memory.device",
                    device,
                    index,
                    f"{program[index]} takes device {device} ({problem.devices[device].name}) to "
                    f"{step.peak} bytes, its limit is {limit} (memory_bytes - reserved_bytes), "
                    f"{step.peak - limit} too many; offload, recompute or start fewer "
                    "micro-batches before it",
                )
                break


def _host_overflows(
    problem: Problem, programs: Programs, modes: Sequence[CellModes]
) -> Iterator[Violation]:
    peaks = host_peak_bytes(problem, programs, modes)
    for host in problem.hosts:
        if host.memory_bytes is None or peaks[host.name] <= host.memory_bytes:
            continue
        walks = {
            device: host_walk(problem, program, modes[device])
            for device, program in enumerate(programs)
            if problem.devices[device].host == host.name
        }
        device = max(walks, key=lambda candidate: max(walks[candidate], default=0))
        index = walks[device].index(max(walks[device]))
        yield Violation(
            "memory.host",
            device,
            index,
            f"host {host.name} holds up to {peaks[host.name]} bytes (its devices' peaks together; "
            f"this cell is the largest one's), its limit is {host.memory_bytes}, "
            f"{peaks[host.name] - host.memory_bytes} too many; offload less or raise the limit",
        )


def _report(programs: Programs, violations: list[Violation]) -> str:
    first = violations[0]
    lines = [f"illegal schedule, {len(violations)} fault(s):"]
    lines += [
        f"  device {item.device}, cell {item.index}: {item.message} [{item.code}]"
        for item in violations[:_SHOWN]
    ]
    if len(violations) > _SHOWN:
        lines.append(f"  ... and {len(violations) - _SHOWN} more")
    lines.append(render_grid(programs, {(first.device, first.index)}) if programs else "")
    return "\n".join(lines)


def _texts(program: Program) -> list[str]:
    """Return a text per action; the first of a pair shows the pair, the second is in brackets."""
    return [
        cells_of(program[index : index + 2])[0]
        if starts_pair(program, index)
        else f"({action})"
        if action.paired
        else str(action)
        for index, action in enumerate(program)
    ]


# --- Programs as a grid of cells, one row per device, with some cells marked.

_CONTEXT = 6


def render_grid(programs: Programs, marked: Collection[tuple[int, int]]) -> str:
    """Return the grid as text; each ``(device, index)`` of ``marked`` is written as ``>>cell<<``.

    Rows are cut to a few cells around the first marked column. A mark one past a row's end is
    ``>>end<<`` (something is missing there).
    """
    centre = min((index for _, index in marked), default=0)
    first = max(0, centre - _CONTEXT)
    last = centre + _CONTEXT + 1
    rows = []
    for device, program in enumerate(programs):
        cells = _texts(program)
        for marked_device, index in marked:
            if marked_device != device:
                continue
            if index < len(cells):
                cells[index] = f">>{cells[index]}<<"
            else:
                cells.append(">>end<<")
        shown = cells[first:last]
        rows.append(
            (
                f"device {device}",
                (["..."] if first else []) + shown + (["..."] if last < len(cells) else []),
            )
        )
    width = max((len(cell) for _, cells in rows for cell in cells), default=1)
    head = max(len(name) for name, _ in rows)
    return "\n".join(
        f"{name:<{head}} | {' '.join(f'{cell:^{width}}' for cell in cells)}".rstrip()
        for name, cells in rows
    )
