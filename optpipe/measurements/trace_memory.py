"""Bytes of stages and devices in traces recorded with ``profile_memory=True``.

The profiler notes every allocation and release (``[memory]``), at the time of the CPU's call, which
is when torch's caching allocator hands a block out or takes it back. So what a range leaves
allocated, and the most it had allocated, do not depend on how fast the GPU was.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from optpipe.measurements.messages import sent_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from optpipe.measurements.pipeline_traces import RankTrace, TracedRange
    from optpipe.measurements.trace_file import Allocation, Process

__all__ = ["StageMemory", "read_memory"]

_NEGLIGIBLE = 0.01
_WORKSPACES = {
    "F": "forward_workspace_bytes",
    "I": "backward_input_workspace_bytes",
    "W": "backward_weight_workspace_bytes",
    "B": "backward_workspace_bytes",
}


class StageMemory(NamedTuple):
    """Sizes in bytes, by field of a stage, and what to know of them."""

    facts: dict[int, dict[str, int]]
    notes: tuple[str, ...]


@dataclass
class _Seen:
    """The largest values of one stage so far, and the last change of each action."""

    left: dict[str, int] = field(default_factory=dict)
    freed: dict[str, int] = field(default_factory=dict)
    change: dict[str, int] = field(default_factory=dict)
    workspace: dict[str, int] = field(default_factory=dict)
    output_bytes: int = 0

    def note(self, action: str, bytes_over_time: Sequence[int]) -> None:
        """Take in one run: what was allocated beyond what was there before, after each call."""
        after = bytes_over_time[-1] if bytes_over_time else 0
        most = max(bytes_over_time, default=0)
        self.left[action] = max(after, self.left.get(action, 0))
        self.freed[action] = max(-after, self.freed.get(action, 0))
        self.change[action] = after
        self.workspace[action] = max(most - max(0, after), self.workspace.get(action, 0))

    @property
    def kept_bytes(self) -> int:
        """What a micro-batch leaves behind when its backward is done."""
        backward = ("I", "W") if "W" in self.change else ("B",)
        return sum(self.change.get(action, 0) for action in ("F", *backward))


def read_memory(traces: Sequence[RankTrace], device_of: Mapping[int, int]) -> StageMemory:
    """Return what the ranges of each stage left allocated, freed and needed in between.

    The largest of all steps but the first counts, of the first where there is no other. A stage
    that received its input from another device holds that too. Stages with recomputed micro-batches
    are left out: their forwards keep different amounts.

    Parameters
    ----------
    traces
        The ranks' ranges.
    device_of
        Device of each rank.
    """
    seen: dict[int, _Seen] = defaultdict(_Seen)
    home: dict[int, int] = {}
    is_late = any(one.step for trace in traces for one in trace.ranges)
    for trace in traces:
        counted = [one for one in trace.ranges if one.step or not is_late]
        home |= {one.stage: device_of[trace.rank] for one in counted}
        _note_ranges(trace.process, counted, seen)
    recomputed = {stage for stage, found in seen.items() if "RECOMPUTE" in found.left}
    static = _divide(_resident(traces, device_of), home)
    facts = {
        stage: _facts(stage, seen) | _known("static_bytes", static.get(stage))
        for stage in sorted(seen)
        if stage not in recomputed
    }
    kept = {stage: seen[stage].kept_bytes for stage in facts}
    notes = (*_notes(facts, home, recomputed), *_kept_notes(facts, kept), *_static_notes(static))
    return StageMemory(facts, notes)


def _known(name: str, value: int | None) -> dict[str, int]:
    return {} if value is None else {name: value}


def _resident(traces: Iterable[RankTrace], device_of: Mapping[int, int]) -> dict[int, int]:
    """Return what lay on each device's GPU before the first action of a rank's last step."""
    found: dict[int, int] = {}
    for trace in traces:
        last = max((one.step or 0 for one in trace.ranges), default=0)
        begins = [one.event.start_us for one in trace.ranges if (one.step or 0) == last]
        before = [
            one for one in trace.process.allocations if one.on_gpu and one.at_us < min(begins)
        ]
        if before:
            device = device_of[trace.rank]
            found[device] = max(before[-1].total_bytes, found.get(device, 0))
    return found


def _divide(resident: Mapping[int, int], home: Mapping[int, int]) -> dict[int, int]:
    """Return each stage's share of its device's bytes: equal ones, the rest to the first."""
    static: dict[int, int] = {}
    for device, num_bytes in resident.items():
        stages = sorted(stage for stage, of in home.items() if of == device)
        for place, stage in enumerate(stages):
            share, rest = divmod(num_bytes, len(stages))
            static[stage] = share + (rest if place == 0 else 0)
    return static


def _note_ranges(process: Process, counted: Iterable[TracedRange], seen: dict[int, _Seen]) -> None:
    allocations = _of_the_device(process.allocations)
    for one in counted:
        if one.action == "SEND_F":
            found = sent_bytes(process, one.event)
            seen[one.stage].output_bytes = max(found, seen[one.stage].output_bytes)
        elif allocations and one.action not in ("OFFLOAD", "RELOAD"):
            first = bisect_left(allocations, one.event.start_us, key=_at)
            last = bisect_right(allocations, one.event.end_us, key=_at)
            changes = (allocation.num_bytes for allocation in allocations[first:last])
            seen[one.stage].note(one.action, list(accumulate(changes)))


def _of_the_device(allocations: Sequence[Allocation]) -> list[Allocation]:
    on_gpu = [one for one in allocations if one.on_gpu]
    return on_gpu or list(allocations)


def _at(allocation: Allocation) -> float:
    return allocation.at_us


def _facts(stage: int, seen: Mapping[int, _Seen]) -> dict[str, int]:
    own = seen[stage]
    facts = {
        _WORKSPACES[action]: size for action, size in own.workspace.items() if action in _WORKSPACES
    }
    if own.output_bytes:
        facts["output_bytes"] = own.output_bytes
    if "F" in own.left:
        facts["activation_bytes"] = own.left["F"] + _received(stage, seen)
    if "W" in own.freed:
        facts["weight_context_bytes"] = own.freed["W"]
    return facts


def _received(stage: int, seen: Mapping[int, _Seen]) -> int:
    """Return what the stage before sent; within a device nothing is."""
    before = seen.get(stage - 1)
    return 0 if before is None else before.output_bytes


def _notes(
    facts: Mapping[int, Mapping[str, int]], home: Mapping[int, int], recomputed: set[int]
) -> Iterable[str]:
    if any("activation_bytes" in found for found in facts.values()):
        yield "Bytes are what the ranges left allocated, by the allocator's own count."
    unknown = [
        str(stage)
        for stage, found in facts.items()
        if "activation_bytes" in found
        and home.get(stage - 1, home[stage]) != home[stage]
        and "output_bytes" not in facts.get(stage - 1, {})
    ]
    if unknown:
        yield (
            f"activation_bytes of stage {', '.join(unknown)} lacks the received input, whose size "
            "the traces do not hold."
        )
    if recomputed:
        yield (
            f"Bytes of stage {', '.join(map(str, sorted(recomputed)))} are not read: some of its "
            "micro-batches were recomputed."
        )


def _kept_notes(facts: Mapping[int, Mapping[str, int]], kept: Mapping[int, int]) -> Iterable[str]:
    leaky = {
        stage: size
        for stage, size in kept.items()
        if size > _NEGLIGIBLE * facts[stage].get("activation_bytes", size)
    }
    if leaky:
        sizes = ", ".join(f"{size} of stage {stage}" for stage, size in leaky.items())
        yield (
            f"Bytes that each micro-batch leaves allocated after its backward: {sizes}. A problem "
            "cannot say so; count them in reserved_bytes."
        )


def _static_notes(static: Mapping[int, int]) -> Iterable[str]:
    if static:
        yield (
            "static_bytes is all that lay on the GPU before a step's first action, divided among "
            "the stages of a device; reserved_bytes is to hold the CUDA context and NCCL."
        )
