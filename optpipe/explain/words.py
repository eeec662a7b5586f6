"""An explanation in words: every sentence says what its numbers in the explanation say."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from optpipe.explain.path_words import path_sentences
from optpipe.explain.phrases import action_name, count, device_name, device_names, listed
from optpipe.explain.relief_words import relief_sentences
from optpipe.explain.values import IdleCause, Sentence
from optpipe.plot.units import format_bytes, format_ms, format_share
from optpipe.schedule import gap_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optpipe.explain.values import (
        DeviceIdle,
        DeviceMemory,
        Explanation,
        LaneKind,
        LaneUse,
        Topic,
    )
    from optpipe.problem import Problem

__all__ = ["sentences"]

_MOST_LINES = 12
_SATURATED = 0.95
"""Share of the length from which on a lane is called saturated."""

_LANES: dict[LaneKind, str] = {
    "compute": "compute",
    "d2h": "offload (D2H)",
    "h2d": "reload (H2D)",
    "both ways": "offload and reload (half duplex)",
    "grad sync": "gradient reduction",
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


def sentences(problem: Problem, told: Explanation) -> tuple[Sentence, ...]:
    """Return the explanation in words, topic by topic."""
    topics: dict[Topic, Iterator[str]] = {
        "length": _length(told),
        "critical path": path_sentences(problem, told.critical_path),
        "lanes": _lanes(problem, told),
        "memory": _memory(problem, told),
        "idle": _idle(problem, told),
        "offload": relief_sentences(problem, told, "offload"),
        "recompute": relief_sentences(problem, told, "recompute"),
    }
    return tuple(
        Sentence(topic=topic, text=text) for topic, texts in topics.items() for text in texts
    )


def _length(told: Explanation) -> Iterator[str]:
    busiest = f"the busiest device computes for {format_ms(told.busiest_ms)} ms of it"
    yield (
        f"The {told.objective} is {format_ms(told.length_ms)} ms; {busiest}: a bubble of "
        f"{format_share(told.bubble_rate)}."
    )
    if told.bound_ms is not None:
        gap = gap_of(told.length_ms, told.bound_ms) or 0.0
        yield (
            f"Proven: no schedule of this problem is shorter than {format_ms(told.bound_ms)} ms; "
            f"at most {format_share(gap)} can be won."
        )


def _lanes(problem: Problem, told: Explanation) -> Iterator[str]:
    if not told.lanes:
        return
    first = told.lanes[0]
    saturated = [use for use in told.lanes if use.share >= _SATURATED]
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
    for uses in _most_used(told):
        ms, share = format_ms(uses[0].busy_ms), format_share(uses[0].share)
        is_same = all(format_ms(use.busy_ms) == ms for use in uses)
        yield f"{_lane_names(problem, uses)}: busy {'' if is_same else 'up to '}{ms} ms, {share}"


def _most_used(told: Explanation) -> list[list[LaneUse]]:
    """Return the lanes that are shown: the most used of all, and of each kind.

    Lanes of one kind whose shares read the same, in whole percent, stand together.
    """
    alike: dict[tuple[str, ...], list[LaneUse]] = defaultdict(list)
    for use in told.lanes:
        alike[use.group or "", use.lane, f"{100 * use.share:.0f}"].append(use)
    groups = list(alike.values())
    shown = groups[:_MOST_LINES]
    seen = {uses[0].lane for uses in shown}
    for uses in groups[_MOST_LINES:]:
        if uses[0].lane not in seen:
            seen.add(uses[0].lane)
            shown.append(uses)
    return shown


def _lane_names(problem: Problem, uses: Sequence[LaneUse]) -> str:
    first = uses[0]
    if first.group is not None:
        names = device_names(problem, first.devices)
        return f"{_LANES[first.lane]} of PCIe group {first.group} ({names})"
    return f"{_LANES[first.lane]} of {device_names(problem, [use.devices[0] for use in uses])}"


def _memory(problem: Problem, told: Explanation) -> Iterator[str]:
    used = [held for held in told.memory if held.fullest_at is not None]
    tightest = sorted(used, key=lambda held: held.headroom_bytes)
    for held in tightest[:_MOST_LINES]:
        yield _device_memory(problem, held)
    if len(tightest) > _MOST_LINES:
        least = tightest[_MOST_LINES].headroom_bytes
        rest = count(len(tightest) - _MOST_LINES, "other device")
        yield f"{rest} with {format_bytes(least)} or more left each"
    for host in told.hosts:
        if host.peak_bytes or host.limit_bytes is not None:
            limit = "" if host.limit_bytes is None else f" of {format_bytes(host.limit_bytes)}"
            yield f"host {host.host}: up to {format_bytes(host.peak_bytes)}{limit} offloaded"


def _device_memory(problem: Problem, held: DeviceMemory) -> str:
    at = "" if held.fullest_at is None else f", fullest at {action_name(held.fullest_at)}"
    return (
        f"{device_name(problem, held.device)}: {format_bytes(held.peak_bytes)} of "
        f"{format_bytes(held.limit_bytes)}, {format_bytes(held.headroom_bytes)} left{at}"
    )


def _idle(problem: Problem, told: Explanation) -> Iterator[str]:
    total: dict[IdleCause, float] = defaultdict(float)
    for device in told.idle:
        for cause, ms in device.causes.items():
            total[cause] += ms
    idle_ms = sum(device.idle_ms for device in told.idle)
    if len(told.idle) > 1 and idle_ms > 0:
        mean = idle_ms / len(told.idle)
        yield (
            f"A device is idle for {format_ms(mean)} ms on average"
            f"{_share(mean, told.length_ms)}; of all idle time: "
            f"{listed([f'{format_share(ms / idle_ms)} {_WAITS[c]}' for c, ms in _by_size(total)])}."
        )
    most = sorted(told.idle, key=lambda device: (-round(device.idle_ms, 6), device.device))
    for device in sorted(most[:_MOST_LINES], key=lambda device: device.device):
        yield _device_idle(problem, told, device)
    if len(most) > _MOST_LINES:
        rest = count(len(most) - _MOST_LINES, "other device")
        yield f"{rest}, idle for {format_ms(most[_MOST_LINES].idle_ms)} ms or less each"


def _device_idle(problem: Problem, told: Explanation, device: DeviceIdle) -> str:
    name = device_name(problem, device.device)
    if not device.causes:
        return f"{name}: never idle"
    parts = [f"{format_ms(ms)} {_WAITS[cause]}" for cause, ms in _by_size(device.causes)]
    share = _share(device.idle_ms, told.length_ms)
    return f"{name}: idle {format_ms(device.idle_ms)} ms{share}: {listed(parts)}"


def _by_size(causes: Mapping[IdleCause, float]) -> list[tuple[IdleCause, float]]:
    return sorted(causes.items(), key=lambda item: -item[1])


def _share(part: float, whole: float) -> str:
    return f" ({format_share(part / whole)})" if whole > 0 else ""
