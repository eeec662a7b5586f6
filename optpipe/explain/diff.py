"""The changes between two schedules, and their cost."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from optpipe.explain.explanation import count, microbatches, ranges
from optpipe.explain.reasons import idle_times
from optpipe.explain.values import IdleCause
from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.problem import FrozenValue
from optpipe.schedule import Action, ActionType
from optpipe.simulate import bubble_rate, simulate
from optpipe.units import ShortRepr, format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs, Schedule

__all__ = [
    "Cost",
    "FieldChange",
    "ModeChange",
    "OrderChange",
    "PlacementChange",
    "ProblemDifference",
    "ScheduleDifference",
    "compare_problems",
    "compare_programs",
    "cost_line",
    "difference_lines",
    "num_moved",
    "problem_costs",
    "record_costs",
    "schedule_costs",
]


class PlacementChange(FrozenValue):
    """A stage on another device; None if only one of the two schedules has the stage."""

    stage: int
    before: int | None
    after: int | None


class ModeChange(FrozenValue):
    """Micro-batches of a stage that are treated, or whose backward runs, in another way.

    A value is one of:

    * ``kept``, ``offloaded``, ``recomputed`` or ``mode <n>``, as the programs say;
    * ``split (I, W)`` or ``fused (B)``;
    * ``alone`` or ``with F of stage <n>``.
    """

    stage: int
    before: str
    after: str
    microbatches: tuple[int, ...]


class OrderChange(FrozenValue):
    """A program that differs between two schedules.

    * ``moved``: minimum number of the actions of both that must move to turn one order into the
      other.
    * ``common``, ``removed``, ``added``: actions that both have, only the first, only the second.
    * ``cell``, ``before``, ``after``: the first cell that differs and its text in either; None past
      the end of a program.
    """

    device: int
    moved: int
    common: int
    removed: int
    added: int
    cell: int
    before: Action | None
    after: Action | None


class Cost(FrozenValue):
    """One number before and after; ``unit`` is ms, bytes or share, None if it is not known."""

    name: str
    unit: Literal["ms", "bytes", "share"]
    before: float | int | None
    after: float | int | None


class ScheduleDifference(ShortRepr, FrozenValue):
    """The changes from one schedule to another; empty for equal programs, and only for them.

    ``costs`` hold all known costs of either, changed or not.
    """

    format: Literal["optpipe/difference/v1"] = "optpipe/difference/v1"
    kind: Literal["schedule"] = "schedule"
    placement: tuple[PlacementChange, ...] = ()
    treatment: tuple[ModeChange, ...] = ()
    backward: tuple[ModeChange, ...] = ()
    pairing: tuple[ModeChange, ...] = ()
    order: tuple[OrderChange, ...] = ()
    costs: tuple[Cost, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the two are the same programs."""
        return not (self.placement or self.treatment or self.backward or self.pairing or self.order)


def compare_programs(
    before: Programs, after: Programs, costs: Iterable[Cost] = ()
) -> ScheduleDifference:
    """Return the changes from one set of programs to another.

    They need not be legal, nor be for the same problem: stages are compared by their numbers,
    programs by their devices'.
    """
    old, new = _facts(before), _facts(after)
    plain = [[tuple(action.bare for action in row) for row in rows] for rows in (before, after)]
    return ScheduleDifference(
        placement=tuple(
            PlacementChange(
                stage=stage, before=old.devices.get(stage), after=new.devices.get(stage)
            )
            for stage in sorted({*old.devices, *new.devices})
            if old.devices.get(stage) != new.devices.get(stage)
        ),
        treatment=_mode_changes(old.treatments, new.treatments),
        backward=_mode_changes(old.backwards, new.backwards),
        pairing=_mode_changes(old.pairings, new.pairings),
        order=tuple(
            _order_change(device, *rows)
            for device, rows in enumerate(zip_longest(*plain, fillvalue=()))
            if rows[0] != rows[1]
        ),
        costs=tuple(costs),
    )


class _Facts(NamedTuple):
    """The placement of stages and the treatment of (stage, micro-batch) pairs in programs."""

    devices: dict[int, int]
    treatments: dict[tuple[int, int], str]
    backwards: dict[tuple[int, int], str]
    pairings: dict[tuple[int, int], str]


def _facts(programs: Programs) -> _Facts:
    facts = _Facts({}, {}, {}, {})
    for device, program in enumerate(programs):
        for index, (stage, kind, microbatch, mode, paired) in enumerate(program):
            facts.devices[stage] = device
            cell = stage, microbatch
            if mode:
                facts.treatments[cell] = f"mode {mode}"
            elif facts.treatments.get(cell, "").startswith("mode"):
                pass
            elif kind is ActionType.OFFLOAD:
                facts.treatments[cell] = "offloaded"
            elif kind is ActionType.RECOMPUTE:
                facts.treatments[cell] = "recomputed"
            else:
                facts.treatments.setdefault(cell, "kept")
            if kind.is_backward:
                is_fused = kind is ActionType.FULL_BACKWARD
                facts.backwards[cell] = "fused (B)" if is_fused else "split (I, W)"
                facts.pairings.setdefault(cell, "alone")
            if paired:
                what = "" if kind in {ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD} else kind
                other = f"with F of stage {program[index - 1].stage}" if index else "with nothing"
                facts.pairings[cell] = f"{what} {other}".lstrip()
    return facts


def _mode_changes(
    before: Mapping[tuple[int, int], str],
    after: Mapping[tuple[int, int], str],
) -> tuple[ModeChange, ...]:
    """Return the changes of the pairs that both have, grouped by stage and change."""
    changed: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    for stage, microbatch in sorted(before.keys() & after.keys()):
        old, new = before[stage, microbatch], after[stage, microbatch]
        if old != new:
            changed[stage, old, new].append(microbatch)
    return tuple(
        ModeChange(stage=stage, before=old, after=new, microbatches=tuple(numbers))
        for (stage, old, new), numbers in changed.items()
    )


def _order_change(device: int, before: Program, after: Program) -> OrderChange:
    common = set(before) & set(after)
    cell, (old, new) = next(
        (cell, pair) for cell, pair in enumerate(zip_longest(before, after)) if pair[0] != pair[1]
    )
    return OrderChange(
        device=device,
        moved=num_moved(
            [action for action in before if action in common],
            [action for action in after if action in common],
        ),
        common=len(common),
        removed=len(before) - sum(action in common for action in before),
        added=len(after) - sum(action in common for action in after),
        cell=cell,
        before=old,
        after=new,
    )


def num_moved(before: Sequence[Action], after: Sequence[Action]) -> int:
    """Return the minimum number of actions that must move to turn one order into the other.

    These are all actions but a longest common subsequence. No action occurs twice, so that is a
    longest increasing subsequence of places, which patience sorting finds in O(n log n).
    """
    place = {action: index for index, action in enumerate(before)}
    tails: list[int] = []
    for action in after:
        at = place[action]
        pile = bisect_left(tails, at)
        tails[pile : pile + 1] = [at]
    return len(place) - len(tails)


# --- The changes between two problems, field by field, and their minimum cost.

_INDEX = re.compile(r"\[(\d+)\]")
_KEYS = {"links": ("from", "to"), "hosts": ("name",)}


class FieldChange(FrozenValue):
    """A field with another value; None if the problem lacks the field's owner.

    ``path`` is as in errors and sweeps, ``devices[2].memory_bytes``. Fields of several devices or
    stages that change alike are one path, ``devices[0..3].memory_bytes``.
    """

    path: str
    before: Any
    after: Any


class ProblemDifference(ShortRepr, FrozenValue):
    """The changes from one problem to another; empty if both have the same problem_hash.

    ``costs`` hold the numbers that follow from the problems alone, changed or not.
    """

    format: Literal["optpipe/difference/v1"] = "optpipe/difference/v1"
    kind: Literal["problem"] = "problem"
    fields: tuple[FieldChange, ...] = ()
    costs: tuple[Cost, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the two are the same problem, names of problems aside."""
        return not self.fields


def compare_problems(
    before: Problem, after: Problem, costs: Iterable[Cost] = ()
) -> ProblemDifference:
    """Return the changes from one problem to another.

    Devices and stages are compared by number, hosts by name, links by the pair they connect. The
    name of the problem, which is not in its hash, is not looked at.
    """
    old, new = (
        dict(_flat("", one.model_dump(mode="json", by_alias=True, exclude={"name"})))
        for one in (before, after)
    )
    changes = [
        FieldChange(path=path, before=old.get(path), after=new.get(path))
        for path in {**old, **new}
        if path not in old or path not in new or old[path] != new[path]
    ]
    return ProblemDifference(fields=tuple(_gathered(changes)), costs=tuple(costs))


def problem_costs(before: Problem, after: Problem) -> tuple[Cost, ...]:
    """Return the numbers that follow from each problem alone.

    * The compute time of the busiest device; no schedule is shorter.
    * The bytes of all activations of one step together.
    * The bytes free for them: memory less reserved and static bytes, summed over devices.
    """
    return _joined(_numbers(before), _numbers(after))


def _numbers(problem: Problem) -> dict[str, _Row]:
    free = sum(map(problem.room_bytes, range(len(problem.devices))))
    activations = sum(
        stage.activation_bytes for cost in problem.cost_of for stage in problem.stages_by_cost[cost]
    )
    return {
        "compute of the busiest device": ("ms", problem.busy_ms),
        "activations of one step": ("bytes", activations),
        "memory for activations, all devices": ("bytes", free),
    }


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a JSON-like value with its path."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(f"{path}.{name}" if path else name, item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            names = _KEYS.get(path)
            key = "->".join(str(item[name]) for name in names) if names else str(index)
            yield from _flat(f"{path}[{key}]", item)
    else:
        yield path, value


def _gathered(changes: Iterable[FieldChange]) -> Iterator[FieldChange]:
    """Group changes that are the same except for the number of the device or stage."""
    alike: dict[tuple[str, str], list[FieldChange]] = defaultdict(list)
    for change in changes:
        values = json.dumps([change.before, change.after])
        alike[_INDEX.sub("[*]", change.path, count=1), values].append(change)
    for group in alike.values():
        first = group[0]
        numbers = [int(m[1]) for m in (_INDEX.search(change.path) for change in group) if m]
        if len(group) == 1 or len(numbers) < len(group):
            yield from group
            continue
        path = _INDEX.sub(f"[{ranges(numbers)}]", first.path, count=1)
        yield first.model_copy(update={"path": path})


# --- What a schedule costs, in ms and bytes: the numbers that a difference of schedules compares.

_Row = tuple[Literal["ms", "bytes", "share"], float | int | None]


def schedule_costs(problem: Problem, before: Programs, after: Programs) -> tuple[Cost, ...]:
    """Return the costs of two legal schedules of a problem.

    * Makespan and span, and the bubble rates of both.
    * The memory peaks of devices and hosts, and the bytes moved to the hosts.
    * The time spent on RECOMPUTE.
    * The idle time by cause (as `idle_times`, summed over devices), without causes that neither
      has.
    """
    return _joined(_measured(problem, before), _measured(problem, after))


def record_costs(before: Schedule | None, after: Schedule | None) -> tuple[Cost, ...]:
    """Return the costs recorded in two schedules, without those that neither has."""
    both: list[dict[str, _Row]] = [{}, {}]
    for rows, schedule in zip(both, (before, after), strict=True):
        if schedule is not None:
            peaks = list(schedule.peak_bytes)
            hosts = schedule.host_peak_bytes
            rows.update(_rows(schedule.makespan_ms, schedule.span_ms, peaks, hosts))
            if schedule.bound_ms is not None:
                rows["proven bound"] = "ms", schedule.bound_ms
    return _joined(*both)


def _joined(before: dict[str, _Row], after: dict[str, _Row]) -> tuple[Cost, ...]:
    def of(rows: dict[str, _Row], name: str) -> float | int | None:
        absent = 0 if name.startswith("idle, ") else None
        return rows[name][1] if name in rows else absent

    return tuple(
        Cost(name=name, unit=unit, before=of(before, name), after=of(after, name))
        for name, (unit, _) in (before | after).items()
    )


def _measured(problem: Problem, programs: Programs) -> dict[str, _Row]:
    run = simulate(problem, programs)
    peaks = [
        device_peak_bytes(problem, device, *known)
        for device, known in enumerate(zip(programs, run.modes, strict=True))
    ]
    used = [
        problem.menu_of(stage, microbatch)[mode]
        for row in run.modes
        for (stage, microbatch), mode in row.items()
    ]
    idle = idle_times(problem, programs, run)
    rows = _rows(run.makespan_ms, run.span_ms, peaks, host_peak_bytes(problem, programs, run.modes))
    rows["bubble of the makespan"] = "share", bubble_rate(problem, run.makespan_ms)
    rows["bubble of the span"] = "share", bubble_rate(problem, run.span_ms)
    rows["offloaded"] = "bytes", sum(mode.offload_bytes for mode in used)
    rows["recomputation"] = "ms", sum(mode.recompute_ms for mode in used)
    for cause in IdleCause:
        total = sum(device.causes.get(cause, 0.0) for device in idle)
        if total:
            rows[f"idle, {cause}"] = "ms", total
    return rows


def _rows(
    makespan_ms: float, span_ms: float, peaks: list[int], host_peaks: dict[str, int]
) -> dict[str, _Row]:
    rows: dict[str, _Row] = {"makespan": ("ms", makespan_ms), "span": ("ms", span_ms)}
    for device, peak in enumerate(peaks):
        rows[f"peak memory of device {device}"] = "bytes", peak
    for host, peak in sorted(host_peaks.items()):
        rows[f"peak memory of host {host}"] = "bytes", peak
    return rows


# --- Differences in words: a line each.

_MOST_LINES = 40


def difference_lines(found: ScheduleDifference | ProblemDifference) -> list[str]:
    """Return a line per change; of very many the first, and how many more there are."""
    if isinstance(found, ScheduleDifference):
        lines = list(_schedule_lines(found))
    else:
        lines = [_field_line(change) for change in found.fields]
    if len(lines) > _MOST_LINES:
        return [*lines[:_MOST_LINES], f"... and {len(lines) - _MOST_LINES} more (--json has all)"]
    return lines


def cost_line(cost: Cost) -> str:
    """Return ``makespan: 1,200.0 ms -> 1,100.0 ms (-100.0 ms, -8.3%)``."""
    before, after = _value(cost.before, cost.unit), _value(cost.after, cost.unit)
    if cost.before is None or cost.after is None:
        return f"{cost.name}: {before} -> {after}"
    change = cost.after - cost.before
    if change == 0:
        return f"{cost.name}: {before}, unchanged"
    sign = "+" if change > 0 else ""
    if cost.unit == "share":
        return f"{cost.name}: {before} -> {after} ({sign}{100 * change:.1f} points)"
    by = _value(change, cost.unit)
    if cost.before == 0:
        return f"{cost.name}: {before} -> {after} ({sign}{by})"
    share = format_share(change / cost.before)
    return f"{cost.name}: {before} -> {after} ({sign}{by}, {sign}{share})"


def _schedule_lines(found: ScheduleDifference) -> Iterator[str]:
    for place in found.placement:
        before, after = (
            "absent" if device is None else f"device {device}"
            for device in (place.before, place.after)
        )
        yield f"stage {place.stage}: {before} -> {after}"
    for change in (*found.treatment, *found.backward, *found.pairing):
        words = change.before + change.after
        what = "backward " if "(" in change.before or "F of" in words else ""
        yield (
            f"stage {change.stage}: {microbatches(change.microbatches)}: {what}{change.before} -> "
            f"{change.after}"
        )
    for order in found.order:
        yield _order_line(order)


def _order_line(order: OrderChange) -> str:
    parts = []
    if order.moved:
        parts.append(f"{order.moved} of {count(order.common, 'common action')} moved")
    if order.removed:
        parts.append(f"{order.removed} removed")
    if order.added:
        parts.append(f"{order.added} added")
    first = f"cell {order.cell}: {order.before or 'the end'} -> {order.after or 'the end'}"
    return f"device {order.device}: {', '.join(parts) or 'changed'}; first at {first}"


def _field_line(change: FieldChange) -> str:
    text = f"{change.path}: {json.dumps(change.before)} -> {json.dumps(change.after)}"
    numbers = [change.before, change.after]
    if any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        return text
    if change.before == 0:
        return text
    share = (change.after - change.before) / change.before
    return f"{text} ({'+' if share > 0 else ''}{format_share(share)})"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    match unit:
        case "ms":
            return f"{format_ms(value)} ms"
        case "bytes":
            return format_bytes(int(value))
        case _:
            return format_share(value)
