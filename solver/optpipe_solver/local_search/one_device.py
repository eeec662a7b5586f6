"""The best program of one device, all others' orders fixed, by a search over counts.

Only for schedules that offload nothing, have no RECOMPUTE and one mode per stage. *Exact* means: no
program of this device in the same modes, fused and split backwards alike, makes the schedule with
the other programs (micro-batches renamed, see `in_order`) better by more than a
thousand-millionth, if ``is_exact`` says so; the other devices' times move along. The argument has
four steps.

1. With the others in order, the device may keep every stage's passes in order too (`in_order`
   changes nothing but the device's own names), so a program is a sequence of counts.
2. Heads, lags and tails are all that the others mean (`Ways`): the objective is the longest path,
   and each path is pieces of these and of the device's own passes.
3. Bytes are a function of the counts, so memory is exact.
4. Dominated labels are dropped only for better ones with the same counts (`search`).

Under span the others' first starts must not move: each device's first stage comes before any stage
that returns to a device. At most one stage of a device may have a gradient reduction, because
several queue in an order of their own. Where messages queue on links the ways leave that out, so
that paths are too short: what they exclude stays excluded, but a program that they promise may
prove no better; then ``is_exact`` is False.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import Rows
from optpipe_solver.arrays.simulate import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
)
from optpipe_solver.local_search.one_device_kernel import (
    LEFT_OUT,
    Chores,
    DeviceQuestion,
    Labels,
    Scene,
    find_ways,
    labels_for,
    others_for,
    search,
    ways_for,
)

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.arrays import Flags, Floats, Ints
    from optpipe_solver.arrays.encoding import CompiledProblem
    from optpipe_solver.arrays.simulate import TimeArrays

__all__ = ["OneDevice", "OneDeviceOutcome", "Polish", "can_reoptimise", "in_order"]


_LEAST_GAIN = 1e-9
"""What counts as better, as a fraction of the objective: above rounding."""


class OneDeviceOutcome(NamedTuple):
    """Programs and their objective in ms, no worse than before; see the module for ``is_exact``.

    ``work`` counts the labels made.
    """

    rows: Rows
    objective_ms: float
    is_exact: bool
    work: int


def can_reoptimise(problem: Problem) -> bool:
    """Whether what the module asks of a problem holds, and counts fit an integer."""
    most_held = max(len(stages) for stages in problem.stages_of)
    fits = (problem.num_microbatches + 1) ** (3 * most_held) < 2**62
    synced = [stage.device for stage in problem.stages if stage.grad_sync_ms > 0]
    alone = len(synced) == len(set(synced))
    return fits and alone and (problem.objective == "makespan" or _first_starts_stay(problem))


def _first_starts_stay(problem: Problem) -> bool:
    lowest = [min(stages) for stages in problem.stages_of if stages]
    return sorted(lowest) == list(range(len(lowest)))


class OneDevice:
    """Re-optimises devices of one problem, in memory that is used again.

    Parameters
    ----------
    compiled
        A problem for which `can_reoptimise` holds.
    width
        Most labels in a layer.
    most
        Most labels in all.
    most_per_state
        Most labels with the same counts.
    """

    def __init__(
        self, compiled: CompiledProblem, *, width: int, most: int, most_per_state: int
    ) -> None:
        self.compiled = compiled
        self.most_per_state = most_per_state
        self.sizes = (width, most)
        self.by_span = compiled.problem.objective == "span"
        self.others = others_for(compiled.times, len(compiled.problem.devices))
        self.times = compiled.times
        self.work = simulate.workspace_for(compiled.times, len(compiled.problem.devices))
        self.labels: dict[int, Labels] = {}

    def reoptimise(self, rows: Rows, device: int) -> OneDeviceOutcome:
        """Return the best program of a device beside the others'; the rest of the rows stays.

        The rows must be compute programs in order (`in_order`), and not wait in a circle.
        """
        self.times = self.compiled.times._replace(duration=self.compiled.durations(rows))
        objective = self._length(rows)
        stages = self.compiled.problem.stages_of[device]
        if not stages or objective <= 0.0:
            return OneDeviceOutcome(rows, objective, True, 0)
        begins = self.work.first.copy() if self.by_span else np.zeros(rows.lengths.size)
        chores = self._chores(rows, stages, device, float(begins[device]))
        labels = self._labels(len(stages))
        times = self.times
        ways = ways_for(len(stages), times.num_microbatches)
        own = np.array(stages, dtype=np.int64)
        scene = Scene(rows.actions, rows.lengths, times, begins, device, own)
        find_ways(scene, self.others, ways)
        work = 0
        while True:
            end = search(DeviceQuestion(chores, ways, labels, objective * (1 - _LEAST_GAIN)))
            work += int(labels.sizes[0])
            if end < 0:
                return OneDeviceOutcome(rows, objective, not labels.sizes[LEFT_OUT], work)
            found = self._replaced(rows, device, stages, labels, end)
            length = self._length(found)
            if length >= objective:
                return OneDeviceOutcome(rows, objective, False, work)
            rows, objective = found, length

    def _length(self, rows: Rows) -> float:
        makespan, span, _ = simulate.length(rows.actions, rows.lengths, self.times, self.work)
        return float(span if self.by_span else makespan)

    def _labels(self, num_stages: int) -> Labels:
        if num_stages not in self.labels:
            m = self.compiled.times.num_microbatches
            self.labels[num_stages] = labels_for(num_stages, m, *self.sizes)
        return self.labels[num_stages]

    def _chores(self, rows: Rows, stages: tuple[int, ...], device: int, begin: float) -> Chores:
        times, memory = self.times, self.compiled.memory
        own = list(stages)
        m = times.num_microbatches
        duration = times.duration.reshape(8, times.num_stages, m)[:4, own, 0].copy()
        modes = rows.modes.reshape(times.num_stages, m)[own, 0]
        delta, rise = memory.adds[:4, own, modes], memory.rises[:4, own, modes]
        return Chores(
            num_stages=len(own),
            num_microbatches=m,
            duration=duration,
            delta=delta,
            rise=rise,
            limit=int(memory.limit[device]),
            sync=times.grad_sync[own].copy(),
            may_fuse=_may_fuse(duration, delta, rise - np.maximum(delta, 0)),
            begin=begin,
            most_per_state=self.most_per_state,
        )

    def _replaced(
        self, rows: Rows, device: int, stages: tuple[int, ...], labels: Labels, end: int
    ) -> Rows:
        """Return the rows with the device's program read from the trail."""
        found = []
        while end >= 0:
            found.append(int(labels.action[end]))
            end = int(labels.parent[end])
        actions, lengths = rows.actions.copy(), rows.lengths.copy()
        codes = _named(found[::-1], stages, self.compiled.times)
        actions[device, : len(codes)] = codes
        lengths[device] = len(codes)
        return Rows(actions, lengths, rows.modes)


def _may_fuse(duration: Floats, delta: Ints, workspace: Ints) -> Flags:
    """Flag stages where B is shorter than I and W, or needs less room at any moment.

    Elsewhere I and W back to back stand wherever a B could.
    """
    i, w, b = simulate.BACKWARD_INPUT, simulate.BACKWARD_WEIGHT, simulate.FULL_BACKWARD
    shorter = duration[b] < duration[i] + duration[w]
    smaller = (workspace[b] < workspace[i]) | (workspace[b] < workspace[w]) | (delta[i] > 0)
    return np.asarray(shorter | smaller)


def _named(found: list[int], stages: tuple[int, ...], times: simulate.TimeArrays) -> list[int]:
    """Return action numbers for 4 x stage + kind, micro-batches in order."""
    m, cells = times.num_microbatches, times.num_cells
    done = [[0, 0] for _ in stages]
    waiting: list[list[int]] = [[] for _ in stages]
    codes = []
    for entry in found:
        k, kind = divmod(entry, 4)
        if kind == simulate.BACKWARD_WEIGHT:
            j = waiting[k].pop(0)
        else:
            part = min(kind, 1)
            j = done[k][part]
            done[k][part] += 1
            if kind == simulate.BACKWARD_INPUT:
                waiting[k].append(j)
        codes.append(kind * cells + stages[k] * m + j)
    return codes


# --- Device after device re-optimised until none gets better: a local optimum of whole programs.

_LABELS, _ALIKE = 1_000, 20
"""Most labels per layer and per state: far more than are needed where a schedule is good."""

_LAYERS = 60
"""Layers' worth of labels remembered for the way back."""

_WAY_SHARE, _LABEL_WORK = 8, 16
"""Steps along ways that cost as much as an action simulated, and what a label costs."""

_MOST_WORK = 1_000_000
"""Largest cost of looking at every device once, in actions simulated."""


def _treats_alike(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether programs have compute passes alone, and each stage one mode."""
    modes = rows.modes.reshape(compiled.times.num_stages, -1)
    return bool((modes == modes[:, :1]).all()) and compiled.is_compute_only(rows)


class Polish:
    """Re-optimises the devices of one problem in turn.

    Where it does not apply (`can_reoptimise`, or the problem is too large) rows come back as they
    are.
    """

    def __init__(self, compiled: CompiledProblem) -> None:
        self.compiled = compiled
        times = compiled.times
        passes = 2 * times.num_cells
        self.sweep_work = passes * 3 * times.num_cells // _WAY_SHARE
        self.applies = self.sweep_work <= _MOST_WORK and can_reoptimise(compiled.problem)
        if self.applies:
            self.device = OneDevice(
                compiled, width=_LABELS, most=_LAYERS * _LABELS, most_per_state=_ALIKE
            )

    def polish(self, rows: Rows, objective_ms: float) -> OneDeviceOutcome:
        """Return legal programs no worse than the given ones, and what it took.

        ``objective_ms`` is that of the rows; ``is_exact`` says that no device's program alone can
        be better.
        """
        if not self.applies or not _treats_alike(self.compiled, rows):
            return OneDeviceOutcome(rows, objective_ms, False, 0)
        best = OneDeviceOutcome(in_order(rows, self.compiled.times), objective_ms, True, 0)
        num_devices = int(rows.lengths.size)
        work, device, idle = 0, 0, 0
        proven = [False] * num_devices
        while idle < num_devices:
            found = self.device.reoptimise(best.rows, device)
            work += self.sweep_work // num_devices + found.work * _LABEL_WORK
            proven[device] = found.is_exact
            idle = 0 if found.objective_ms < best.objective_ms else idle + 1
            best = found
            device = (device + 1) % num_devices
        return best._replace(is_exact=all(proven), work=work)


# --- Micro-batches renamed so that every stage runs every pass in their order.


def in_order(rows: Rows, times: TimeArrays) -> Rows:
    """Return compute programs with each stage's k-th F, k-th backward and k-th W renamed to k's.

    W go to those of split backwards in turn. Nothing ends later, and no program holds more: when
    the k-th pass of a stage starts, k inputs have arrived, and in the renamed programs, by
    induction along the schedule, the k-th of them has; bytes depend on counts alone.
    """
    renamed = Rows(rows.actions.copy(), rows.lengths.copy(), rows.modes)
    for codes in renamed.programs():
        kinds, stages = codes // times.num_cells, codes % times.num_cells // times.num_microbatches
        for stage in np.unique(stages):
            _rename(codes, kinds, stages == stage, int(stage) * times.num_microbatches, times)
    return renamed


def _rename(
    codes: Ints,
    kinds: Ints,
    here: Flags,
    first: int,
    times: TimeArrays,
) -> None:
    """Rename one stage's passes in place; ``first`` is its first cell."""
    forwards = np.flatnonzero(here & (kinds == FORWARD))
    backwards = np.flatnonzero(here & ((kinds == BACKWARD_INPUT) | (kinds == FULL_BACKWARD)))
    weights = np.flatnonzero(here & (kinds == BACKWARD_WEIGHT))
    split = np.flatnonzero(kinds[backwards] == BACKWARD_INPUT)
    for places, labels in (
        (forwards, np.arange(forwards.size)),
        (backwards, np.arange(backwards.size)),
        (weights, split),
    ):
        codes[places] = kinds[places] * times.num_cells + first + labels
