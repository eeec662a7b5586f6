"""The scheduling problem as CP-SAT sees it: intervals, lanes and memory profiles.

Compute actions of a device are intervals that may not overlap. A fused backward is the same
interval as the input gradient with another length. A RELOAD is issued between compute actions: an
interval of length 0 among them. Memory is one cumulative profile per device, made of the intervals
in which bytes are held; as compute actions follow one another, the profile over time is the prefix
walk over the program (`optpipe.memory`).

Where this is a relaxation of `optpipe.simulate`: transfers that compete between devices of a PCIe
group, or between the directions of a half-duplex device, may go in any order, while the simulator
goes by issue time; under the span objective a device's first action may be delayed; actions of
length 0 may share an instant in any order. Bounds stay bounds; solutions are lowered and judged.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.peers.cells import in_order_loses_nothing
from benchmarks.peers.cp_parts import Board
from benchmarks.peers.scale import Scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortools.sat.python import cp_model

    from benchmarks.peers.cp_parts import Linear
    from optpipe import Problem

__all__ = ["PipelineModel"]


class PipelineModel:
    """All variables and constraints of one problem.

    Parameters
    ----------
    problem
        What is to be scheduled.
    horizon_ms
        Only schedules whose objective is at most this are looked for.
    in_order
        Whether micro-batches go first in, first out through every pass of every stage. Where that
        may lose something, the model proves nothing.
    floor_ms
        A proven lower bound of the objective.
    """

    def __init__(
        self, problem: Problem, horizon_ms: float, *, in_order: bool, floor_ms: float = 0.0
    ) -> None:
        self.problem = problem
        self.in_order = in_order
        self.scale = Scale(problem)
        self.horizon = self.scale.units_up(horizon_ms)
        span = problem.objective == "span"
        self.board = Board(problem, self.scale, self.horizon * (2 if span else 1))
        self.model = self.board.model
        floor = min(self.scale.units(floor_ms), self.horizon)
        self.length = self.model.new_int_var(floor, self.horizon, "length")
        for s in range(len(problem.stages)):
            for j in range(problem.num_microbatches):
                self.board.add_cell(s, j)
        self.parts = self.board.parts
        self._add_constraints()

    @property
    def proves(self) -> bool:
        """Whether the model's bound is a bound of the problem."""
        return not self.in_order or in_order_loses_nothing(self.problem)

    def _add_constraints(self) -> None:
        self.data_arrives()
        self.one_after_another()
        self.equal_micro_batches()
        self.memory_lags()
        self.fits_device_memory()
        self.fits_host_memory()
        self.ends_within_length()
        self.model.minimize(self.length)

    def data_arrives(self) -> None:
        """A pass starts when the pass it needs has ended and its output has arrived."""
        for (s, j), parts in self.parts.items():
            if s + 1 == len(self.problem.stages):
                continue
            following = self.parts[s + 1, j]
            there, back = (self.scale.units(ms) for ms in self.problem.boundary_ms[s])
            self.model.add(following.forward >= self.board.forward_end(s, parts) + there)
            self.model.add(parts.backward >= self.board.backward_end(s + 1, following) + back)

    def one_after_another(self) -> None:
        """Compute actions of a device, and transfers of a lane, do not overlap."""
        for lane in (*self.board.compute, *self.board.lanes.values()):
            if len(lane) > 1:
                self.model.add_no_overlap(lane)

    def equal_micro_batches(self) -> None:
        """Micro-batches are identical: stage 0 takes them in order; in_order, every pass does."""
        for s in range(len(self.problem.stages)):
            for j, k in pairwise(range(self.problem.num_microbatches)):
                first, second = self.parts[s, j], self.parts[s, k]
                if s == 0 or self.in_order:
                    self.model.add(second.forward >= self.board.forward_end(s, first))
                if self.in_order:
                    self.model.add(second.backward >= self.board.backward_end(s, first))
                    split = [*first.split, *second.split]
                    end = self.board.weight_end(s, first)
                    self.model.add(second.weight >= end).only_enforce_if(split)

    def memory_lags(self) -> None:
        """With room for c activations, F(n) waits for the backward of n - c (redundant).

        In order, when F(n) starts, n + 1 forwards have started; were fewer than n + 1 - c backwards
        over, more than c activations would be held. Likewise for weight contexts: with every
        backward before n over, (room - activation) / context of them may be held at most, and
        fewer backwards hold more, as the context is not larger than the activation.
        """
        if not self.in_order or not self.proves:
            return
        for (s, n), parts in self.parts.items():
            stage = self.problem.stages[s]
            room = self._room(stage.device)
            full, context = stage.activation_bytes, stage.weight_context_bytes
            if not self.board.tight[stage.device] or full == 0:
                continue
            before = n - room // full
            if before >= 0:
                end = self.board.backward_end(s, self.parts[s, before])
                self.model.add(parts.forward >= end)
            if parts.fused is None and 0 < context <= full:
                before = n - 1 - (room - full) // context
                if before >= 0:
                    end = self.board.weight_end(s, self.parts[s, before])
                    self.model.add(parts.forward >= end)

    def _room(self, device: int) -> int:
        held = self.problem.devices[device]
        return held.usable_bytes - self.problem.static_bytes_of(device)

    def fits_device_memory(self) -> None:
        """What a device holds fits at every time."""
        for device, held in enumerate(self.board.held):
            if held:
                unit, room = self.scale.memory(device)
                sizes = [size // unit for _, size in held]
                self.model.add_cumulative([interval for interval, _ in held], sizes, room)

    def fits_host_memory(self) -> None:
        """The largest holdings of a host's devices fit it together."""
        for host in self.problem.hosts:
            if host.memory_bytes is not None:
                peaks = [
                    self._host_peak(device, host.memory_bytes)
                    for device, held in enumerate(self.board.on_host)
                    if held and self.problem.devices[device].host == host.name
                ]
                self.model.add(sum(peaks) <= host.memory_bytes)

    def _host_peak(self, device: int, most: int) -> cp_model.IntVar:
        held = self.board.on_host[device]
        peak = self.model.new_int_var(0, most, f"host peak {device}")
        self.model.add_cumulative([copy for copy, _ in held], [size for _, size in held], peak)
        return peak

    def ends_within_length(self) -> None:
        """The length covers every action and gradient reduction, from 0 or the device's first."""
        for device, stages in enumerate(self.problem.stages_of):
            origin = self._first(device, stages)
            reductions = []
            for s in stages:
                sync = self.board.time(f"sync {s}")
                size = self.scale.units(self.problem.stages[s].grad_sync_ms)
                self._sync_follows(s, sync)
                self.model.add(self.length >= sync + size - origin)
                interval = self.model.new_fixed_size_interval_var(sync, size, f"sync {s}")
                reductions.append(interval)
            if len(reductions) > 1:
                self.model.add_no_overlap(reductions)

    def _first(self, device: int, stages: Sequence[int]) -> Linear:
        """Return where the length of a device begins: 0, or under span its first forward."""
        if self.problem.objective == "makespan":
            return 0
        first = self.board.time(f"first {device}")
        for s in stages:
            for j in range(self.problem.num_microbatches):
                self.model.add(first <= self.parts[s, j].forward)
        return first

    def _sync_follows(self, s: int, sync: cp_model.IntVar) -> None:
        """A stage's gradient reduction follows its last W or B (length 0: the stage's end)."""
        for j in range(self.problem.num_microbatches):
            parts = self.parts[s, j]
            self.model.add(sync >= self.board.backward_end(s, parts))
            end = self.board.weight_end(s, parts)
            self.model.add(sync >= end).only_enforce_if(parts.split)
