"""The critical path in words."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from optpipe.explain.phrases import count, device_name, listed, microbatches, ranges
from optpipe.plot.units import format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.action import Action, ActionType
    from optpipe.explain.values import CriticalPath, PieceKind, Run
    from optpipe.problem import Problem

__all__ = ["path_sentences"]

_MOST_RUNS = 14
_KINDS: dict[PieceKind, str] = {
    "compute": "computing",
    "link": "on links between devices",
    "d2h": "offloading (D2H)",
    "h2d": "reloading (H2D)",
    "grad sync": "reducing gradients",
    "queue": "waiting for a transfer lane",
}


def path_sentences(problem: Problem, path: CriticalPath) -> Iterator[str]:
    """Yield a summary of the path, then its runs in the order of time.

    Of many runs the longest are told, and between them how much time the others take.
    """
    if not path.runs:
        return
    kinds = sorted(path.by_kind.items(), key=lambda item: -item[1])
    spent = [f"{format_ms(ms)} ms {_KINDS[kind]}" for kind, ms in kinds if ms > 0]
    yield (
        f"The chain that makes the length, {format_ms(path.length_ms)} ms on "
        f"{count(len(path.by_device), 'device')}: {listed(spent) or 'no time at all'}."
    )
    device, ms = max(path.by_device.items(), key=lambda item: item[1], default=(0, 0.0))
    if len(path.by_device) > 1 and path.length_ms > 0:
        yield (
            f"{device_name(problem, device)} has the largest part of it, {format_ms(ms)} ms "
            f"({format_share(ms / path.length_ms)})."
        )
    yield from _told(problem, path.runs)


def _told(problem: Problem, runs: Sequence[Run]) -> Iterator[str]:
    order = sorted(range(len(runs)), key=lambda i: (-runs[i].length_ms, i))
    shown = set(order[:_MOST_RUNS])
    for is_shown, group in groupby(range(len(runs)), key=lambda i: i in shown):
        held = [runs[i] for i in group]
        if is_shown or len(held) == 1:
            yield from (_run(problem, run) for run in held)
        else:
            total = sum(run.length_ms for run in held)
            yield f"... {len(held)} shorter runs, {format_ms(total)} ms"


def _run(problem: Problem, run: Run) -> str:
    text = f"{format_ms(run.start_ms)}: {_what(problem, run)}, {format_ms(run.length_ms)} ms"
    return f"{text} ({format_ms(run.link_ms)} on links)" if run.link_ms > 0 else text


def _what(problem: Problem, run: Run) -> str:
    name = device_name(problem, run.devices[0])
    match run.kind:
        case "wave":
            last = device_name(problem, run.devices[-1])
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
            return f"{name}: a tensor for {run.actions[0]} on its link"
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
    return listed(parts) + (" in turn" if switches >= len(groups) > 1 else "")
