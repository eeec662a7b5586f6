"""``explain``: the limits of a schedule, in numbers and in sentences made of these numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING

from optpipe.explain.memory import device_memories, host_memories, stage_reliefs
from optpipe.explain.reasons import (
    Reasons,
    critical_path,
    idle_times,
    lane_slacks,
    lane_uses,
    runs_of,
)
from optpipe.explain.values import CriticalPath, Explanation, IdleCause, Necessity, Sentence
from optpipe.schedule import gap_of
from optpipe.simulate import bubble_rate, link_warnings, simulate
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from optpipe.explain.values import (
        LaneKind,
        LaneSlack,
        LaneUse,
        PathRun,
        PieceKind,
        ReliefKind,
        StageRelief,
        Topic,
    )
    from optpipe.problem import CellMode, Problem
    from optpipe.schedule import Action, ActionType, Programs
    from optpipe.simulate import Simulation

__all__ = ["count", "explain", "microbatches", "ranges"]


def explain(
    problem: Problem,
    programs: Programs,
    *,
    bound_ms: float | None = None,
    run: Simulation | None = None,
) -> Explanation:
    """Return the limits of a schedule.

    * ``problem``, ``programs``: legal programs (see `optpipe.check.check`) of this problem.
    * ``bound_ms``: proven lower bound of the objective, where one is known.
    * ``run``: the result of `simulate` for the programs, if the caller has it.

    Raises `IllegalScheduleError` if the programs get stuck.
    """
    if run is None:
        run = simulate(problem, programs)
    length = run.objective_ms(problem.objective)
    reasons = Reasons(problem, programs, run)
    pieces = critical_path(problem, programs, run, reasons)
    by_kind: dict[PieceKind, float] = defaultdict(float)
    by_device: dict[int, float] = defaultdict(float)
    for piece in pieces:
        by_kind[piece.kind] += piece.end - piece.start
        if piece.kind != "link":
            by_device[piece.device] += piece.end - piece.start
    explanation = Explanation(
        problem_hash=problem.problem_hash,
        objective=problem.objective,
        length_ms=length,
        makespan_ms=run.makespan_ms,
        span_ms=run.span_ms,
        busiest_ms=problem.busy_ms,
        bubble_rate=bubble_rate(problem, length),
        bound_ms=bound_ms,
        critical_path=CriticalPath(
            length_ms=length,
            by_kind=dict(by_kind),
            by_device=dict(sorted(by_device.items())),
            runs=runs_of(pieces),
        ),
        lanes=lane_uses(problem, programs, run),
        slacks=lane_slacks(problem, programs, run, most=_MOST_SLACKS),
        memory=device_memories(problem, programs, run.modes),
        hosts=host_memories(problem, programs, run.modes),
        idle=idle_times(problem, programs, run, reasons),
        reliefs=stage_reliefs(problem, programs, run.modes),
    )
    return explanation.model_copy(update={"sentences": _sentences(problem, programs, explanation)})


# --- In words, topic by topic.

_MOST_LINES = 12
_MOST_SLACKS = 1_000_000
"""Maximum nodes times lanes for which slacks are computed: about a second."""
_SATURATED = 0.95
"""Share of the length from which on a lane is called saturated."""

_LANES: dict[LaneKind, str] = {
    "compute": "compute",
    "d2h": "offload (D2H)",
    "h2d": "reload (H2D)",
    "both ways": "offload and reload (half duplex)",
    "grad sync": "gradient reduction",
    "link": "messages",
}
_WAITS: dict[IdleCause, str] = {
    IdleCause.WARM_UP: "before its first action (warm-up)",
    IdleCause.FORWARD: "waiting for a forward from upstream",
    IdleCause.BACKWARD: "waiting for a backward from downstream",
    IdleCause.LINK: "waiting for a tensor on a link",
    IdleCause.RELOAD: "waiting for a reload",
    IdleCause.RELEASE: "waiting for an offload to end (RELEASE)",
    IdleCause.GRAD_SYNC: "its gradient reduction",
    IdleCause.COOL_DOWN: "after its last action (cool-down)",
}


def _sentences(
    problem: Problem, programs: Programs, explanation: Explanation
) -> tuple[Sentence, ...]:
    topics: dict[Topic, Iterator[str]] = {
        "length": chain(_length(explanation), link_warnings(problem, explanation.makespan_ms)),
        "critical path": _path_sentences(problem, explanation.critical_path),
        "lanes": _lanes(problem, explanation),
        "pairs": _pairs(problem, programs),
        "slack": _slack(problem, explanation),
        "memory": _memory(problem, explanation),
        "idle": _idle(problem, explanation),
        "offload": _relief_sentences(problem, explanation, "offload"),
        "recompute": _relief_sentences(problem, explanation, "recompute"),
        "mode": _relief_sentences(problem, explanation, "mode"),
    }
    return tuple(
        Sentence(topic=topic, text=text) for topic, texts in topics.items() for text in texts
    )


def _length(explanation: Explanation) -> Iterator[str]:
    length = f"The {explanation.objective} is {format_ms(explanation.length_ms)} ms"
    busiest = f"the busiest device computes for {format_ms(explanation.busiest_ms)} ms of it"
    if explanation.busiest_ms > explanation.length_ms:
        yield (
            f"{length}, shorter than the {format_ms(explanation.busiest_ms)} ms for which the "
            "busiest device would compute without pairs."
        )
    else:
        yield f"{length}; {busiest}. The bubble is {format_share(explanation.bubble_rate)}."
    if explanation.bound_ms is not None:
        gap = gap_of(explanation.length_ms, explanation.bound_ms) or 0.0
        yield (
            f"Proven: no schedule of this problem is shorter than "
            f"{format_ms(explanation.bound_ms)} ms; at most {format_share(gap)} can be won."
        )


def _lanes(problem: Problem, explanation: Explanation) -> Iterator[str]:
    if not explanation.lanes:
        return
    first = explanation.lanes[0]
    saturated = [use for use in explanation.lanes if use.share >= _SATURATED]
    if saturated:
        yield (
            f"Saturated, busy {format_share(_SATURATED)} of the time or more: "
            f"{count(len(saturated), 'lane')}."
        )
    else:
        yield (
            f"No lane is saturated; the most used is {_lane_names(problem, [first])}, busy "
            f"{format_share(first.share)} of the time."
        )
    for uses in _most_used(explanation):
        ms, share = format_ms(uses[0].busy_ms), format_share(uses[0].share)
        is_same = all(format_ms(use.busy_ms) == ms for use in uses)
        yield f"{_lane_names(problem, uses)}: busy {'' if is_same else 'up to '}{ms} ms, {share}"


def _pairs(problem: Problem, programs: Programs) -> Iterator[str]:
    """Yield sentences about the pairs that ran, by device and kind, most hidden time first."""
    if not problem.pairs:
        return
    used: dict[tuple[int, int, int, str], int] = defaultdict(int)
    for device, program in enumerate(programs):
        for forward, backward in pairwise(program):
            if backward.paired:
                used[device, forward.stage, backward.stage, backward.type.value] += 1
    if not used:
        yield "No forward and backward run together, though the problem has pairs that may."
        return
    hidden = {key: number * problem.hidden_ms[key[1:]] for key, number in used.items()}
    yield (
        f"{count(sum(used.values()), 'pair')} of a forward and a backward run together and hide "
        f"{format_ms(sum(hidden.values()))} ms, summed over devices."
    )
    order = sorted(used, key=lambda key: (-hidden[key], key))
    for key in order[:_MOST_LINES]:
        device, front, back, letter = key
        yield (
            f"{problem.devices[device].name}: F of stage {front} and {letter} of stage "
            f"{back} together, {used[key]} times, {format_ms(problem.hidden_ms[key[1:]])} ms "
            f"hidden each, {format_ms(hidden[key])} ms in all"
        )
    if rest := order[_MOST_LINES:]:
        ms = sum(hidden[key] for key in rest)
        yield f"{count(len(rest), 'other kind')} of pairs: {format_ms(ms)} ms in all"


def _slack(problem: Problem, explanation: Explanation) -> Iterator[str]:
    """Yield a line per group of lanes of one kind with equal slack in whole percent."""
    alike: dict[tuple[str, ...], list[LaneSlack]] = defaultdict(list)
    for slack in explanation.slacks:
        alike[slack.group or "", slack.lane, _percent(slack)].append(slack)
    groups = sorted(alike.values(), key=lambda slacks: (slacks[0].factor, slacks[0].lane))
    for slacks in groups[:_MOST_LINES]:
        name, more = _lane_names(problem, slacks), _percent(slacks[0])
        if more == "0":
            yield f"{name}: whatever gets slower there makes the step longer"
        else:
            yield f"{name}: may take {more}% longer before the step does"
    if rest := groups[_MOST_LINES:]:
        least = _percent(rest[0][0])
        yield f"{count(sum(map(len, rest)), 'other lane')}: {least}% or more"


def _percent(slack: LaneSlack) -> str:
    # Rounded down, so that the lane may really become that much slower.
    return f"{math.floor(100 * (slack.factor - 1) + 1e-6):,}"


def _most_used(explanation: Explanation) -> list[list[LaneUse]]:
    """Return the lanes that are shown: the most used of all, and of each kind.

    Lanes of one kind with equal shares, in whole percent, are one group.
    """
    alike: dict[tuple[str, ...], list[LaneUse]] = defaultdict(list)
    for use in explanation.lanes:
        alike[use.group or "", use.lane, f"{100 * use.share:.0f}"].append(use)
    groups = list(alike.values())
    shown = groups[:_MOST_LINES]
    seen = {uses[0].lane for uses in shown}
    for uses in groups[_MOST_LINES:]:
        if uses[0].lane not in seen:
            seen.add(uses[0].lane)
            shown.append(uses)
    return shown


def _lane_names(problem: Problem, uses: Sequence[LaneUse | LaneSlack]) -> str:
    first = uses[0]
    if first.group is not None:
        names = _device_names(problem, first.devices)
        return f"{_LANES[first.lane]} of PCIe group {first.group} ({names})"
    if first.lane == "link":
        links = ", ".join("{} -> {}".format(*use.devices) for use in uses)
        return f"{_LANES[first.lane]} over {'link' if len(uses) == 1 else 'links'} {links}"
    return f"{_LANES[first.lane]} of {_device_names(problem, [use.devices[0] for use in uses])}"


def _memory(problem: Problem, explanation: Explanation) -> Iterator[str]:
    used = [(one, one.fullest_at) for one in explanation.memory if one.fullest_at is not None]
    tightest = sorted(used, key=lambda pair: pair[0].headroom_bytes)
    for memory, at in tightest[:_MOST_LINES]:
        yield (
            f"{problem.devices[memory.device].name}: {format_bytes(memory.peak_bytes)} of "
            f"{format_bytes(memory.limit_bytes)}, {format_bytes(memory.headroom_bytes)} left, "
            f"fullest at {at} ({at.type} of stage {at.stage}, micro-batch {at.microbatch})"
        )
    if len(tightest) > _MOST_LINES:
        least = tightest[_MOST_LINES][0].headroom_bytes
        rest = count(len(tightest) - _MOST_LINES, "other device")
        yield f"{rest} with {format_bytes(least)} or more left each"
    for host in explanation.hosts:
        if host.peak_bytes or host.limit_bytes is not None:
            limit = "" if host.limit_bytes is None else f" of {format_bytes(host.limit_bytes)}"
            yield f"host {host.host}: up to {format_bytes(host.peak_bytes)}{limit} offloaded"


def _idle(problem: Problem, explanation: Explanation) -> Iterator[str]:
    total: dict[IdleCause, float] = defaultdict(float)
    for device in explanation.idle:
        for cause, ms in device.causes.items():
            total[cause] += ms
    idle_ms = sum(device.idle_ms for device in explanation.idle)
    if len(explanation.idle) > 1 and idle_ms > 0:
        mean = idle_ms / len(explanation.idle)
        parts = [f"{format_share(ms / idle_ms)} {_WAITS[c]}" for c, ms in _by_size(total)]
        yield (
            f"A device is idle for {format_ms(mean)} ms on average"
            f"{_share(mean, explanation.length_ms)}; of all idle time: {_listed(parts)}."
        )
    yield from _recomputation(problem, explanation)
    most = sorted(explanation.idle, key=lambda device: (-round(device.idle_ms, 6), device.device))
    for device in sorted(most[:_MOST_LINES], key=lambda device: device.device):
        name = problem.devices[device.device].name
        if not device.causes:
            yield f"{name}: never idle"
            continue
        parts = [f"{format_ms(ms)} {_WAITS[cause]}" for cause, ms in _by_size(device.causes)]
        share = _share(device.idle_ms, explanation.length_ms)
        yield f"{name}: idle {format_ms(device.idle_ms)} ms{share}: {_listed(parts)}"
    if len(most) > _MOST_LINES:
        rest = count(len(most) - _MOST_LINES, "other device")
        yield f"{rest}, idle for {format_ms(most[_MOST_LINES].idle_ms)} ms or less each"


def _recomputation(problem: Problem, explanation: Explanation) -> Iterator[str]:
    """Yield why the bubble is larger than the share of idle time, if recomputation is why."""
    whole = len(problem.devices) * explanation.length_ms
    if problem.pairs or whole <= 0 or len(explanation.idle) < len(problem.devices):
        return
    idle_ms = sum(device.idle_ms for device in explanation.idle)
    busy_ms = sum(device.busy_ms for device in explanation.idle)
    bubble, idle = format_share(explanation.bubble_rate), format_share(idle_ms / whole)
    more_ms = busy_ms - sum(problem.device_busy_ms)
    if bubble != idle and more_ms > 0:
        yield (
            f"The bubble is {bubble}, the idle time {idle}: the bubble also counts recomputation "
            f"({format_share(more_ms / whole)})."
        )


def _by_size(causes: Mapping[IdleCause, float]) -> list[tuple[IdleCause, float]]:
    return sorted(causes.items(), key=lambda item: -item[1])


def _share(part: float, whole: float) -> str:
    return f" ({format_share(part / whole)})" if whole > 0 else ""


# --- The critical path in words.

_MOST_RUNS = 14
_KINDS: dict[PieceKind, str] = {
    "compute": "computing",
    "link": "on links between devices",
    "d2h": "offloading (D2H)",
    "h2d": "reloading (H2D)",
    "grad sync": "reducing gradients",
    "queue": "waiting for a transfer lane",
}


def _path_sentences(problem: Problem, path: CriticalPath) -> Iterator[str]:
    """Yield a summary of the path, then its runs in the order of time.

    Of many runs the longest are listed, and between them the time of the others.
    """
    if not path.runs:
        return
    kinds = sorted(path.by_kind.items(), key=lambda item: -item[1])
    spent = [f"{format_ms(ms)} ms {_KINDS[kind]}" for kind, ms in kinds if ms > 0]
    yield (
        f"The chain that makes the length, {format_ms(path.length_ms)} ms on "
        f"{count(len(path.by_device), 'device')}: {_listed(spent) or 'no time at all'}."
    )
    device, ms = max(path.by_device.items(), key=lambda item: item[1], default=(0, 0.0))
    if len(path.by_device) > 1 and path.length_ms > 0:
        yield (
            f"{problem.devices[device].name} has the largest part of it, {format_ms(ms)} ms "
            f"({format_share(ms / path.length_ms)})."
        )
    runs = path.runs
    order = sorted(range(len(runs)), key=lambda i: (-runs[i].length_ms, i))
    shown = set(order[:_MOST_RUNS])
    for is_shown, group in groupby(range(len(runs)), key=lambda i: i in shown):
        grouped = [runs[i] for i in group]
        if is_shown or len(grouped) == 1:
            for run in grouped:
                start, length = format_ms(run.start_ms), format_ms(run.length_ms)
                links = f" ({format_ms(run.link_ms)} on links)" if run.link_ms > 0 else ""
                yield f"{start}: {_what(problem, run)}, {length} ms{links}"
        else:
            total = sum(run.length_ms for run in grouped)
            yield f"... {len(grouped)} shorter runs, {format_ms(total)} ms"


def _what(problem: Problem, run: PathRun) -> str:
    name = problem.devices[run.devices[0]].name
    match run.kind:
        case "wave":
            last = problem.devices[run.devices[-1]].name
            first, end = run.actions[0], run.actions[-1]
            return (
                f"{name} to {last}: {first.type} of micro-batch {first.microbatch} through "
                f"stages {first.stage}..{end.stage}"
            )
        case "device":
            return f"{name}: {_actions(problem, run.devices[0], run.actions)}"
        case "grad sync":
            return f"{name}: gradient reduction"
        case "link":
            tensors = f"tensors for {', '.join(str(action) for action in run.actions[:3])}"
            more = ", ... in turn" if len(run.actions) > 3 else " in turn"
            one = f"a tensor for {run.actions[0]}"
            return f"{name}: {one if len(run.actions) == 1 else tensors + more} on its link"
        case "queue":
            return f"{name}: {run.actions[0]} waits for its lane"
        case "d2h" | "h2d":
            kind = "offload" if run.kind == "d2h" else "reload"
            return f"{name}: {kind} of {microbatches(a.microbatch for a in run.actions)}"


def _actions(problem: Problem, device: int, actions: Sequence[Action]) -> str:
    """Return ``F of micro-batches 2..9 and B of 0..4 in turn``; with stages where it has some."""
    groups: dict[tuple[int, ActionType], list[int]] = {}
    for action in actions:
        groups.setdefault((action.stage, action.type), []).append(action.microbatch)
    several = len(problem.stages_of[device]) > 1
    parts: list[str] = []
    for (stage, kind), numbers in groups.items():
        what = microbatches(numbers) if not parts else ranges(numbers)
        parts.append(f"{kind} of {f'stage {stage}, ' if several else ''}{what}")
    switches = sum(a[:2] != b[:2] for a, b in pairwise(actions))
    return _listed(parts) + (" in turn" if switches >= len(groups) > 1 else "")


# --- Why a schedule offloads and recomputes what it does, in words.

_MOST_STAGES = 16
_DROPPED = {"offload": "offloaded", "recompute": "recomputed", "mode": "not kept"}


def _relief_sentences(
    problem: Problem, explanation: Explanation, kind: ReliefKind
) -> Iterator[str]:
    """Yield, per stage that does it, what would not fit without, and what is not needed."""
    reliefs = [relief for relief in explanation.reliefs if relief.kind == kind]
    peaks = {one.device: one.peak_bytes for one in explanation.memory}
    for relief in reliefs[:_MOST_STAGES]:
        yield from _stage(problem, relief, peaks[relief.device])
    rest = reliefs[_MOST_STAGES:]
    if rest:
        cells = sum(len(relief.reliefs) for relief in rest)
        spare = sum(len(relief.microbatches(Necessity.UNNEEDED)) for relief in rest)
        yield (
            f"{len(rest)} more stages: {cells} (stage, micro-batch) pairs {_DROPPED[kind]}, "
            f"{spare} of them not needed to fit"
        )


def _stage(problem: Problem, relief: StageRelief, peak_bytes: int) -> Iterator[str]:
    """Yield sentences about the cells that a stage does not keep.

    ``peak_bytes``: the peak of its device.
    """
    number = len(relief.reliefs)
    name = problem.devices[relief.device].name
    does = f"uses {relief.mode!r} for" if relief.kind == "mode" else f"{relief.kind}s"
    begin = (
        f"stage {relief.stage} {does} {number} of {problem.num_microbatches} "
        f"micro-batches ({_sizes(problem, relief)}, {_effort(problem, relief)})"
    )
    them = "them" if number > 1 else "it"
    if relief.excess_bytes <= 0:
        yield f"{begin}, not needed to fit: {_use(problem, relief, peak_bytes)}"
        return
    yield (
        f"{begin}: without {them} {relief.exceeds_at} would need "
        f"{format_bytes(relief.excess_bytes)} more than {name} has"
    )
    spare = relief.microbatches(Necessity.UNNEEDED)
    if spare:
        are, them = ("are", "them") if len(spare) > 1 else ("is", "it")
        yield (
            f"stage {relief.stage}: {microbatches(spare)} {are} {_DROPPED[relief.kind]}, "
            f"not needed to fit: {name} has the memory to keep {them}"
        )
    either = relief.microbatches(Necessity.INTERCHANGEABLE)
    if either:
        yield (
            f"stage {relief.stage}: {microbatches(either)} could be kept, but only instead of "
            f"others that are {_DROPPED[relief.kind]} and not needed to fit"
        )


def _sizes(problem: Problem, relief: StageRelief) -> str:
    """Return the bytes that each cell frees; of offloads that free none, the bytes they move."""
    saved = {one.saved_bytes for one in relief.reliefs}
    moved = _mode_of(problem, relief).offload_bytes
    if moved and not any(saved):
        return f"{format_bytes(moved)} each"
    return f"{'up to ' if len(saved) > 1 else ''}{format_bytes(max(saved))} each"


def _use(problem: Problem, relief: StageRelief, peak_bytes: int) -> str:
    """Return the use of offloads or recomputations that memory does not require."""
    device = problem.devices[relief.device]
    is_one = len(relief.reliefs) == 1
    left = f"{format_bytes(-relief.excess_bytes)} would still be left"
    keeping = f"keeping {'it' if is_one else 'them'}, {left}"
    if not any(one.saved_bytes for one in relief.reliefs):
        does = "it frees" if is_one else "they free"
        moves = _mode_of(problem, relief).offload_bytes > 0
        why = f", as {device.name} runs nothing between release and reload" if moves else ""
        return f"{does} nothing{why} ({keeping})"
    if device.usable_bytes + relief.excess_bytes > peak_bytes:
        return f"it lowers the peak of {device.name} ({keeping})"
    return f"it does not lower the peak of {device.name} ({keeping})"


def _mode_of(problem: Problem, relief: StageRelief) -> CellMode:
    """Return the mode of the cells; of several costs the first one that has it."""
    named = relief.mode or relief.kind
    menus = (menu[relief.stage] for menu in problem.menus_by_cost)
    return next(mode for menu in menus for mode in menu if mode.name == named)


def _effort(problem: Problem, relief: StageRelief) -> str:
    """Return the costs of a mode: ms on the transfer lanes, ms of recomputation."""
    s, mode = relief.stage, _mode_of(problem, relief)
    parts = []
    if moved := mode.offload_bytes:
        away, back = problem.offload_ms(s, moved), problem.reload_ms(s, moved)
        parts.append(f"{format_ms(away)} ms away and {format_ms(back)} ms back")
    if mode.recompute:
        inside = " inside the backward" if mode.recompute == "inside" else ""
        parts.append(f"{format_ms(mode.recompute_ms)} ms{inside}")
    return ", ".join(parts) or "at no cost in time"


# --- Small pieces of sentences: ranges, counts, names.

_MOST_PARTS = 6


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges, ``2..9, 12``; of more than six parts the first six."""
    parts: list[list[int]] = []
    ordered = sorted(set(numbers))
    for number in ordered:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [
        str(first) if first == last else f"{first}{', ' if last == first + 1 else '..'}{last}"
        for first, last in parts
    ]
    if len(texts) > _MOST_PARTS:
        return f"{', '.join(texts[:_MOST_PARTS])}, ... ({len(ordered)} in all)"
    return ", ".join(texts)


def microbatches(numbers: Iterable[int]) -> str:
    """Return ``micro-batch 3`` or ``micro-batches 2..9``."""
    distinct = set(numbers)
    return f"micro-batch{'es' if len(distinct) != 1 else ''} {ranges(distinct)}"


def count(number: int, thing: str) -> str:
    """Return ``1 device`` or ``8 devices``."""
    return f"{number} {thing}{'s' if number != 1 else ''}"


def _listed(parts: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _device_names(problem: Problem, devices: Sequence[int]) -> str:
    """Return the names of devices; numbered ones (gpu0, gpu1, ...) as ``gpu0..7, 12``."""
    names = [problem.devices[device].name for device in devices]
    if len(names) > 2 and names == [f"gpu{device}" for device in devices]:
        return f"gpu{ranges(devices)}"
    if len(names) > _MOST_PARTS:
        return f"{', '.join(names[:_MOST_PARTS])}, ... ({len(names)} in all)"
    return _listed(names)
