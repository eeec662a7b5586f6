"""Why each offload and each recomputation was chosen: what would not fit without it.

Memory is a property of the program, so this is a question to the memory walk alone. An offload
lowers what its device holds at every action between its RELEASE and its RELOAD, by offload_bytes; a
recomputation from its F up to its RECOMPUTE, by what F would else keep beyond the checkpoint. Taken
out, with all else as it is, exactly these actions hold so much more, and RELEASE and RELOAD, or the
RECOMPUTE, are gone.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from optpipe.explain.values import DeviceMemory, HostMemory, Necessity, Relief, StageRelief
from optpipe.memory import host_peak_bytes, memory_walk
from optpipe.schedule import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs

__all__ = ["device_memories", "host_memories", "program_peaks", "stage_reliefs", "tightest_device"]


_GONE = -(2**62)
"""Stands for the bytes held at an action that is no longer there."""


class _Relief(NamedTuple):
    """Between ``first`` and ``end`` (not included) the device holds ``saved`` bytes less.

    ``gone`` are the actions that vanish with it.
    """

    kind: Literal["offload", "recompute"]
    stage: int
    microbatch: int
    first: int
    end: int
    saved: int
    gone: tuple[int, ...]


def stage_reliefs(
    problem: Problem, programs: Programs, peaks: Peaks | None = None
) -> tuple[StageRelief, ...]:
    """Return what every stage offloads and what it recomputes, in the order of stages.

    Each is judged against the memory of its device alone:

    * NEEDED: without this one, all else as it is, the device would exceed its limit.
    * UNNEEDED: all that are called so can be taken out together, and the rest still fits. They are
      found by taking out one after the other, in the order of the program, what still can be.
    * INTERCHANGEABLE: it could be taken out alone, but not together with the unneeded ones.

    ``peaks`` are what `program_peaks` returns, from a caller who has them.
    """
    known = peaks or program_peaks(problem, programs)
    found: list[StageRelief] = []
    for device, program in enumerate(programs):
        reliefs = _find(problem, program)
        if reliefs:
            held = np.array(known[device], dtype=np.int64)
            limit = problem.devices[device].usable_bytes
            found += _judge(device, program, reliefs, held, limit)
    return tuple(sorted(found, key=lambda item: (item.stage, item.kind)))


def _find(problem: Problem, program: Program) -> list[_Relief]:
    at = {action.bare: index for index, action in enumerate(program)}
    reliefs = []
    for action in program:
        index, kind, microbatch, _ = action
        stage = problem.stages[index]
        if kind is ActionType.RELEASE:
            release = at[action]
            reload = at[Action(index, ActionType.RELOAD, microbatch)]
            span = release + 1, reload
            gone = at[Action(index, ActionType.OFFLOAD, microbatch)], release, reload
            relief = _Relief("offload", index, microbatch, *span, stage.offload_bytes, gone)
            reliefs.append(relief)
        elif kind is ActionType.RECOMPUTE:
            span = at[Action(index, ActionType.FORWARD, microbatch)], at[action]
            saved = stage.activation_bytes - (stage.checkpoint_bytes or 0)
            reliefs.append(_Relief("recompute", index, microbatch, *span, saved, (at[action],)))
    return reliefs


def _judge(
    device: int, program: Program, reliefs: Sequence[_Relief], peaks: NDArray[np.int64], limit: int
) -> list[StageRelief]:
    unneeded = _unneeded(peaks, reliefs, limit)
    groups: dict[tuple[int, Literal["offload", "recompute"]], list[_Relief]] = defaultdict(list)
    for relief in reliefs:
        groups[relief.stage, relief.kind].append(relief)
    return [
        StageRelief(
            stage=stage,
            device=device,
            kind=kind,
            reliefs=tuple(_relief(program, peaks, item, limit, unneeded) for item in group),
            **_excess(program, _without(peaks, group), limit),
        )
        for (stage, kind), group in groups.items()
    ]


def _unneeded(peaks: NDArray[np.int64], reliefs: Sequence[_Relief], limit: int) -> set[_Relief]:
    """Return a set of reliefs without all of which the device fits, none of them needed.

    Taking out a RECOMPUTE also takes out its workspace, and what was needed for that alone would
    then seem unneeded: so those needed as things are do not get in.
    """
    held = peaks.copy()
    found = set()
    for relief in reliefs:
        if max(_most(peaks, relief), _most(held, relief)) + relief.saved <= limit:
            _take_out(held, relief)
            found.add(relief)
    return found


def _relief(
    program: Program, peaks: NDArray[np.int64], relief: _Relief, limit: int, unneeded: set[_Relief]
) -> Relief:
    if _most(peaks, relief) + relief.saved > limit:
        verdict = Necessity.NEEDED
    else:
        verdict = Necessity.UNNEEDED if relief in unneeded else Necessity.INTERCHANGEABLE
    part = peaks[relief.first : relief.end]
    at, excess = None, 0
    if len(part):
        index = relief.first + int(part.argmax())
        at, excess = program[index], int(peaks[index]) + relief.saved - limit
    return Relief(
        microbatch=relief.microbatch,
        saved_bytes=relief.saved,
        verdict=verdict,
        exceeds_at=at,
        excess_bytes=excess,
    )


def _most(held: NDArray[np.int64], relief: _Relief) -> int:
    """Return the most that is held while this relief lasts."""
    return int(held[relief.first : relief.end].max(initial=_GONE))


def _take_out(held: NDArray[np.int64], relief: _Relief) -> None:
    held[relief.first : relief.end] += relief.saved
    held[list(relief.gone)] = _GONE


def _without(peaks: NDArray[np.int64], reliefs: Sequence[_Relief]) -> NDArray[np.int64]:
    held = peaks.copy()
    for relief in reliefs:
        _take_out(held, relief)
    return held


def _excess(program: Program, held: NDArray[np.int64], limit: int) -> dict[str, Action | int]:
    index = int(held.argmax())
    return {"exceeds_at": program[index], "excess_bytes": int(held[index]) - limit}


# --- How much memory devices and hosts have left.

Peaks: TypeAlias = list[list[int]]


def program_peaks(problem: Problem, programs: Programs) -> Peaks:
    """Return, per device, the most that is held at each of its actions, in bytes."""
    return [
        [step.peak for step in memory_walk(problem, device, program)]
        for device, program in enumerate(programs)
    ]


def device_memories(
    problem: Problem, programs: Programs, peaks: Peaks | None = None
) -> tuple[DeviceMemory, ...]:
    """Return, per device, the peak of its program and what it may hold at most.

    ``peaks`` are what `program_peaks` returns, from a caller who has them.
    """
    known = peaks or program_peaks(problem, programs)
    return tuple(
        _device_memory(problem, device, program, known[device])
        for device, program in enumerate(programs)
    )


def _device_memory(
    problem: Problem, device: int, program: Program, peaks: list[int]
) -> DeviceMemory:
    static = problem.static_bytes_of(device)
    peak = max(peaks, default=static)
    return DeviceMemory(
        device=device,
        static_bytes=static,
        peak_bytes=peak,
        limit_bytes=problem.devices[device].usable_bytes,
        fullest_at=program[peaks.index(peak)] if program else None,
    )


def host_memories(problem: Problem, programs: Programs) -> tuple[HostMemory, ...]:
    """Return, per host, the sum of its devices' peaks of offloaded bytes, and its limit."""
    peaks = host_peak_bytes(problem, programs)
    return tuple(
        HostMemory(host=host.name, peak_bytes=peaks[host.name], limit_bytes=host.memory_bytes)
        for host in problem.hosts
    )


def tightest_device(problem: Problem, programs: Programs) -> int:
    """Return the device with a program and the least headroom; of equals the first."""
    memories = [held for held in device_memories(problem, programs) if programs[held.device]]
    return min(memories, key=lambda held: held.headroom_bytes).device
