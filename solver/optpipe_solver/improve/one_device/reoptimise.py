"""The best program of one device, all others' orders fixed, by a search over counts.

Only for schedules that offload and recompute nothing. *Exact* means: no program of this device,
fused and split backwards alike, makes the schedule with the other programs (micro-batches renamed
in order, see `fifo`) better by more than a thousand-millionth, if ``is_exact`` says so; the other
devices' times move along. The argument has four steps.

1. With the others in order, the device may keep every stage's passes in order too (`fifo.in_order`
   changes nothing but the device's own names), so a program is a sequence of counts.
2. Heads, lags and tails are all that the others mean (`ways`): the objective is the longest path,
   and each path is pieces of these and of the device's own passes.
3. Bytes are a function of the counts, so memory is exact.
4. Dominated labels are dropped only for better ones with the same counts (`search`).

Under span the others' first starts must not move: each device's first stage comes before any stage
that returns to a device. At most one stage of a device may have a gradient reduction, because
several queue in an order of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.improve.compiled import kernel
from optpipe_solver.improve.compiled.problem import Rows
from optpipe_solver.improve.one_device.labels import Chores, Labels, labels_for
from optpipe_solver.improve.one_device.search import LEFT_OUT, Question, search
from optpipe_solver.improve.one_device.ways import Scene, find_ways, others_for, ways_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe_solver.improve.compiled.problem import CompiledProblem

__all__ = ["OneDevice", "Outcome", "can_reoptimise"]

_LEAST_GAIN = 1e-9
"""What counts as better, as a fraction of the objective: above rounding."""


class Outcome(NamedTuple):
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
        self.work = kernel.workspace_for(compiled.times, len(compiled.problem.devices))
        self.labels: dict[int, Labels] = {}

    def reoptimise(self, rows: Rows, device: int) -> Outcome:
        """Return the best program of a device beside the others'; the rest of the rows stays.

        The rows must be plain and in order (`fifo`), and not wait in a circle.
        """
        objective = self._length(rows)
        stages = self.compiled.problem.stages_of[device]
        if not stages or objective <= 0.0:
            return Outcome(rows, objective, True, 0)
        begins = self.work.first.copy() if self.by_span else np.zeros(rows.lengths.size)
        chores = self._chores(stages, device, float(begins[device]))
        labels = self._labels(len(stages))
        times = self.compiled.times
        ways = ways_for(len(stages), times.num_microbatches)
        own = np.array(stages, dtype=np.int64)
        scene = Scene(rows.actions, rows.lengths, times, begins, device, own)
        find_ways(scene, self.others, ways)
        work = 0
        while True:
            end = search(Question(chores, ways, labels, objective * (1 - _LEAST_GAIN)))
            work += int(labels.sizes[0])
            if end < 0:
                return Outcome(rows, objective, not labels.sizes[LEFT_OUT], work)
            found = self._replaced(rows, device, stages, labels, end)
            length = self._length(found)
            if length >= objective:
                return Outcome(rows, objective, False, work)
            rows, objective = found, length

    def _length(self, rows: Rows) -> float:
        makespan, span, _ = kernel.length(
            rows.actions, rows.lengths, self.compiled.times, self.work
        )
        return float(span if self.by_span else makespan)

    def _labels(self, num_stages: int) -> Labels:
        if num_stages not in self.labels:
            m = self.compiled.times.num_microbatches
            self.labels[num_stages] = labels_for(num_stages, m, *self.sizes)
        return self.labels[num_stages]

    def _chores(self, stages: tuple[int, ...], device: int, begin: float) -> Chores:
        times, memory = self.compiled.times, self.compiled.memory
        own = list(stages)
        m = times.num_microbatches
        duration = times.duration.reshape(8, times.num_stages, m)[:4, own, 0].copy()
        delta, workspace = memory.delta[:4, own].copy(), memory.workspace[:4, own].copy()
        return Chores(
            num_stages=len(own),
            num_microbatches=m,
            duration=duration,
            delta=delta,
            workspace=workspace,
            limit=int(memory.limit[device]),
            sync=times.grad_sync[own].copy(),
            may_fuse=_may_fuse(duration, delta, workspace),
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
        return Rows(actions, lengths)


def _may_fuse(
    duration: NDArray[np.float64], delta: NDArray[np.int64], workspace: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Flag stages where B is shorter than I and W, or needs less room at any moment.

    Elsewhere I and W back to back stand wherever a B could.
    """
    i, w, b = kernel.BACKWARD_INPUT, kernel.BACKWARD_WEIGHT, kernel.FULL_BACKWARD
    shorter = duration[b] < duration[i] + duration[w]
    smaller = (workspace[b] < workspace[i]) | (workspace[b] < workspace[w]) | (delta[i] > 0)
    return np.asarray(shorter | smaller)


def _named(found: list[int], stages: tuple[int, ...], times: kernel.Times) -> list[int]:
    """Return action numbers for 4 x stage + kind, micro-batches in order."""
    m, cells = times.num_microbatches, times.num_cells
    done = [[0, 0] for _ in stages]
    waiting: list[list[int]] = [[] for _ in stages]
    codes = []
    for entry in found:
        k, kind = divmod(entry, 4)
        if kind == kernel.BACKWARD_WEIGHT:
            j = waiting[k].pop(0)
        else:
            part = min(kind, 1)
            j = done[k][part]
            done[k][part] += 1
            if kind == kernel.BACKWARD_INPUT:
                waiting[k].append(j)
        codes.append(kind * cells + stages[k] * m + j)
    return codes
