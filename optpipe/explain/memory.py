"""Why each offload, recomputation or other mode was chosen: what would not fit without it.

Memory is a property of the program, so the memory of its actions alone gives the answer. A cell
that is not kept lowers the bytes that its device holds between its own actions:

* an offload from its RELEASE up to its RELOAD;
* a recomputation from its F up to its RECOMPUTE or its backward, by what F would else keep.

If the cell is kept and all else stays as it is, exactly these actions hold so much more. They hold
less if the mode holds more while its backward runs. Its transfers and its RECOMPUTE are gone.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.explain.values import DeviceMemory, HostMemory, Necessity, Relief, StageRelief
from optpipe.memory import EFFECTS, OF_MODES, host_peak_bytes, memory_walk
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from optpipe.explain.values import ReliefKind
    from optpipe.memory import CellModes, Effect
    from optpipe.problem import CellMode, Problem
    from optpipe.schedule import Action, Program, Programs

__all__ = ["device_memories", "host_memories", "stage_reliefs", "tightest_device"]


_GONE = -(2**62)
"""Stands for the bytes held at an action that is no longer there."""


class _Relief(NamedTuple):
    """In each of ``spans``, (first, end not included, bytes), the device holds so much less.

    ``gone`` are the actions that vanish with it.
    """

    kind: ReliefKind
    mode: str
    stage: int
    microbatch: int
    spans: tuple[tuple[int, int, int], ...]
    gone: tuple[int, ...]

    @property
    def saved(self) -> int:
        """The most that it saves at any action."""
        return max((saved for _, _, saved in self.spans), default=0)


def stage_reliefs(
    problem: Problem, programs: Programs, modes: Sequence[CellModes]
) -> tuple[StageRelief, ...]:
    """Return the cells that each stage does not keep, in the order of stages.

    ``modes`` are those of each program's cells, as `optpipe.memory.modes_of` returns them. Each
    cell is judged against the memory of its device alone:

    * NEEDED: without this one, all else as it is, the device would exceed its limit.
    * UNNEEDED: all that are called so can be taken out together, and the rest still fits. They are
      found by taking out one after the other, in the order of the program, what still can be.
    * INTERCHANGEABLE: it could be taken out alone, but not together with the unneeded ones.
    """
    found: list[StageRelief] = []
    for device, (program, numbers) in enumerate(zip(programs, modes, strict=True)):
        own: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, action in enumerate(program):
            if numbers[action.cell]:
                own[action.cell].append(index)
        reliefs = []
        for cell, places in sorted(own.items(), key=lambda item: _begins(program, item[1])):
            stage, menu = problem.stage_of(*cell), problem.menu_of(*cell)
            mode = menu[numbers[cell]]
            kind: ReliefKind = "mode" if stage.modes else _V1[mode.recompute]
            kinds = [(index, program[index].type) for index in places]
            spans = tuple(_spans(kinds, menu[0], mode))
            gone = tuple(index for index, action in kinds if action in OF_MODES)
            reliefs.append(_Relief(kind, mode.name, *cell, spans, gone))
        if reliefs:
            peaks = [step.peak for step in memory_walk(problem, device, program, numbers)]
            device_peaks = np.array(peaks, dtype=np.int64)
            limit = problem.devices[device].usable_bytes
            found += _judge(device, program, reliefs, device_peaks, limit)
    return tuple(sorted(found, key=lambda item: (item.stage, item.kind, item.mode)))


_V1: dict[str, ReliefKind] = {"": "offload", "apart": "recompute"}


def _begins(program: Program, places: Sequence[int]) -> int:
    """Return where a relief begins: at its RELEASE or RECOMPUTE, else at its F."""
    late = (ActionType.RELEASE, ActionType.RECOMPUTE)
    return next((index for index in places if program[index].type in late), places[0])


def _spans(
    kinds: Sequence[tuple[int, ActionType]], keep: CellMode, mode: CellMode
) -> Iterator[tuple[int, int, int]]:
    """Yield (first, end, bytes): how much less than kept a cell holds, where that differs."""
    kept = in_mode = 0
    ends = [index for index, _ in kinds[1:]] + [kinds[-1][0] + 1]
    for (index, kind), following in zip(kinds, ends, strict=True):
        effect = EFFECTS[kind]
        if kind not in OF_MODES:
            there = _peak(effect, keep, kept) - _peak(effect, mode, in_mode)
            if there:
                yield index, index + 1, there
            kept += effect.delta(keep)
        in_mode += effect.delta(mode)
        if kept != in_mode and index + 1 < following:
            yield index + 1, following, kept - in_mode


def _peak(effect: Effect, mode: CellMode, held_bytes: int) -> int:
    """Return the most that a cell holds during one of its actions."""
    inside, delta = effect.inside(mode), effect.delta(mode)
    return held_bytes + max(inside, delta, 0) + effect.workspace(mode)


def _judge(
    device: int, program: Program, reliefs: Sequence[_Relief], peaks: NDArray[np.int64], limit: int
) -> list[StageRelief]:
    unneeded = _unneeded(peaks, reliefs, limit)
    groups: dict[tuple[int, ReliefKind, str], list[_Relief]] = defaultdict(list)
    for relief in reliefs:
        groups[relief.stage, relief.kind, relief.mode].append(relief)
    return [
        StageRelief(
            stage=stage,
            device=device,
            kind=kind,
            mode=mode if kind == "mode" else "",
            reliefs=tuple(_relief(program, peaks, item, limit, unneeded) for item in group),
            **_excess(program, _without(peaks, group), limit),
        )
        for (stage, kind, mode), group in groups.items()
    ]


def _unneeded(peaks: NDArray[np.int64], reliefs: Sequence[_Relief], limit: int) -> set[_Relief]:
    """Return a set of reliefs without all of which the device fits, none of them needed.

    Taking out a RECOMPUTE also takes out its workspace. A relief that is needed for that workspace
    alone would then seem unneeded. So reliefs that the unchanged program needs are left out.
    """
    without = peaks.copy()
    found = set()
    for relief in reliefs:
        if max(_most(peaks, relief), _most(without, relief)) <= limit:
            _take_out(without, relief)
            found.add(relief)
    return found


def _relief(
    program: Program, peaks: NDArray[np.int64], relief: _Relief, limit: int, unneeded: set[_Relief]
) -> Relief:
    if _most(peaks, relief) > limit:
        verdict = Necessity.NEEDED
    else:
        verdict = Necessity.UNNEEDED if relief in unneeded else Necessity.INTERCHANGEABLE
    at, excess = None, 0
    most = _GONE
    for first, end, saved in relief.spans:
        index = first + int(peaks[first:end].argmax())
        if peaks[index] + saved > most:
            most = int(peaks[index]) + saved
            at, excess = program[index], most - limit
    return Relief(
        microbatch=relief.microbatch,
        saved_bytes=relief.saved,
        verdict=verdict,
        exceeds_at=at,
        excess_bytes=excess,
    )


def _most(peaks: NDArray[np.int64], relief: _Relief) -> int:
    """Return the most that would be held without this relief, where it makes a difference."""
    return max((int(peaks[first:end].max()) + saved for first, end, saved in relief.spans),
               default=_GONE)  # fmt: skip


def _take_out(peaks: NDArray[np.int64], relief: _Relief) -> None:
    for first, end, saved in relief.spans:
        peaks[first:end] += saved
    peaks[list(relief.gone)] = _GONE


def _without(peaks: NDArray[np.int64], reliefs: Sequence[_Relief]) -> NDArray[np.int64]:
    without = peaks.copy()
    for relief in reliefs:
        _take_out(without, relief)
    return without


def _excess(program: Program, peaks: NDArray[np.int64], limit: int) -> dict[str, Action | int]:
    index = int(peaks.argmax())
    return {"exceeds_at": program[index], "excess_bytes": int(peaks[index]) - limit}


# --- How much memory devices and hosts have left.


def device_memories(
    problem: Problem, programs: Programs, modes: Sequence[CellModes] | None = None
) -> tuple[DeviceMemory, ...]:
    """Return, per device, the peak of its program and what it may hold at most.

    ``modes`` as for `stage_reliefs`; here and below they are computed if the caller has none.
    """
    memories = []
    for device, program in enumerate(programs):
        static = problem.static_bytes_of(device)
        steps = memory_walk(problem, device, program, None if modes is None else modes[device])
        peaks = [step.peak for step in steps]
        peak = max(peaks, default=static)
        memories.append(
            DeviceMemory(
                device=device,
                static_bytes=static,
                peak_bytes=peak,
                limit_bytes=problem.devices[device].usable_bytes,
                fullest_at=program[peaks.index(peak)] if program else None,
            )
        )
    return tuple(memories)


def host_memories(
    problem: Problem, programs: Programs, modes: Sequence[CellModes] | None = None
) -> tuple[HostMemory, ...]:
    """Return, per host, the sum of its devices' peaks of offloaded bytes, and its limit."""
    peaks = host_peak_bytes(problem, programs, modes)
    return tuple(
        HostMemory(host=host.name, peak_bytes=peaks[host.name], limit_bytes=host.memory_bytes)
        for host in problem.hosts
    )


def tightest_device(problem: Problem, programs: Programs) -> int:
    """Return the device with the smallest headroom of all with a program; of equals the first."""
    memories = [memory for memory in device_memories(problem, programs) if programs[memory.device]]
    return min(memories, key=lambda memory: memory.headroom_bytes).device
