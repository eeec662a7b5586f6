"""OR-tools CP-SAT on the problem: the peer that the optimizer is measured against.

It gets what ours gets: the best family as its start, that objective as its horizon, the closed-form
bound as its floor, the same seconds and threads. Micro-batches go in order where that loses
nothing. Elsewhere the first half of the time is spent on that restriction, which finds good
schedules sooner (measured) and proves nothing, and the rest on the free order from the best so far.
Every solution is lowered to programs and judged by `find_violations` and `simulate`.

The model: compute actions of a device are intervals that may not overlap. A fused backward is the
same interval as the input gradient with another length. A RELOAD is issued between compute actions:
an interval of length 0 among them. A cell has one literal for each mode that its device can carry
out (all cells of a stage the same ones where its modes are uniform). Messages that wait for each
other are intervals on their link. Memory is one cumulative profile per device, made of the
intervals in which bytes are held; as compute actions follow one another, the profile over time is
the prefix walk over the program (`optpipe.memory`). Pairs and unequal micro-batches are refused.

Where this is a relaxation of `optpipe.simulate`: transfers that compete between devices of a PCIe
group, or between the directions of a half-duplex device, and messages on one link, may go in any
order, while the simulator goes by issue time and by the sender's program; under the span objective
a device's first action may be delayed; actions of length 0 may share an instant in any order.
Bounds stay bounds; solutions are lowered and judged.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ortools.sat.python import cp_model

from benchmarks.jobs import BestLegal, PeerAnswer, PeerJob
from benchmarks.peers.cp_data import (
    Scale,
    fusing_may_pay,
    in_order,
    in_order_loses_nothing,
    memory_binds,
    renamed,
    usable_modes,
)
from optpipe import Action, ActionType, simulate
from optpipe.memory import modes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ortools.sat.python.cp_model import IntVar

    from benchmarks.peers.cp_data import Cell
    from optpipe import Problem, Program, Programs
    from optpipe.problem import LinkLane
    from optpipe.simulate import Times
    from optpipe.stage import CellMode

__all__ = ["Parts", "PipelineModel", "cp_sat"]


Linear: TypeAlias = cp_model.LinearExpr | int
Literal: TypeAlias = cp_model.BoolVarT
HeldIntervals: TypeAlias = list[tuple[cp_model.IntervalVar, int]]
"""Intervals with the bytes that are held in each."""

# --- The variables and intervals of one (stage, micro-batch), and what they stand on.


@dataclass(frozen=True, slots=True)
class Parts:
    """The variables of one (stage, micro-batch); None where the problem gives no choice.

    Starts are in units of time. ``modes`` has a literal for each mode of the menu that may be used,
    exactly one of which holds; it is empty where only keep may. ``done`` is when the backward ends,
    where its length is a choice; ``again`` when a RECOMPUTE starts; ``issue`` when the RELOAD
    stands in the program, ``away`` and ``back`` when the copies themselves start; ``leave`` when
    the OFFLOAD stands in the program, where the host's memory is limited.
    """

    forward: cp_model.IntVar
    backward: cp_model.IntVar
    weight: cp_model.IntVar
    modes: Mapping[int, cp_model.IntVar]
    done: cp_model.IntVar | None = None
    fused: cp_model.IntVar | None = None
    again: cp_model.IntVar | None = None
    away: cp_model.IntVar | None = None
    issue: cp_model.IntVar | None = None
    back: cp_model.IntVar | None = None
    leave: cp_model.IntVar | None = None

    @property
    def split(self) -> Sequence[Literal]:
        """What must hold for the backward to be I and W: nothing, or that it is not fused."""
        return [] if self.fused is None else [~self.fused]


# --- The model.


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
        self.top = self.horizon * (2 if span else 1)
        self.model = cp_model.CpModel()
        self.tight = [memory_binds(problem, device) for device in range(len(problem.devices))]
        self.both: dict[tuple[int, ...], cp_model.IntVar] = {}
        self.compute: list[list[cp_model.IntervalVar]] = [[] for _ in problem.devices]
        self.lanes: dict[tuple[object, ...], list[cp_model.IntervalVar]] = {}
        self.on_device: list[HeldIntervals] = [[] for _ in problem.devices]
        self.on_host: list[HeldIntervals] = [[] for _ in problem.devices]
        self.parts: dict[Cell, Parts] = {}
        self.departed: dict[tuple[int, str], cp_model.IntVar] = {}
        floor = min(self.scale.units(floor_ms), self.horizon)
        self.length = self.model.new_int_var(floor, self.horizon, "length")
        for s in range(len(problem.stages)):
            for j in range(problem.num_microbatches):
                self._add_cell(s, j)
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
            there, back = self.problem.boundary_lanes[s]
            there_ms, back_ms = self.problem.boundary_ms[s]
            departs = self._departs(there, self.forward_end(s, parts), (s, "F"))
            self.model.add(following.forward >= departs + self.scale.units(there_ms))
            departs = self._departs(back, self.backward_end(s + 1, following), (s + 1, "B"))
            self.model.add(parts.backward >= departs + self.scale.units(back_ms))

    def _departs(self, lane: LinkLane, ended: Linear, sender: tuple[int, str]) -> Linear:
        """Return when a message leaves: as its producer ends, or once the link is free."""
        size = self.scale.units(lane.ms)
        if size == 0:
            return ended
        departs = self._time("message")
        self.model.add(departs >= ended)
        message = self.model.new_fixed_size_interval_var(departs, size, "message")
        self.lanes.setdefault(("link", lane.link), []).append(message)
        before = self.departed.get(sender)
        if before is not None and self.in_order:
            self.model.add(departs >= before + size)
        self.departed[sender] = departs
        return departs

    def one_after_another(self) -> None:
        """Compute actions of a device, and transfers of a lane, do not overlap."""
        for lane in (*self.compute, *self.lanes.values()):
            if len(lane) > 1:
                self.model.add_no_overlap(lane)

    def equal_micro_batches(self) -> None:
        """Micro-batches are identical: stage 0 takes them in order; in_order, every pass does."""
        for s in range(len(self.problem.stages)):
            for j, k in pairwise(range(self.problem.num_microbatches)):
                first, second = self.parts[s, j], self.parts[s, k]
                if s == 0 or self.in_order:
                    self.model.add(second.forward >= self.forward_end(s, first))
                if self.in_order:
                    self.model.add(second.backward >= self.backward_end(s, first))
                    split = [*first.split, *second.split]
                    end = self.weight_end(s, first)
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
            if not self.tight[stage.device] or full == 0:
                continue
            before = n - room // full
            if before >= 0:
                end = self.backward_end(s, self.parts[s, before])
                self.model.add(parts.forward >= end)
            if parts.fused is None and 0 < context <= full:
                before = n - 1 - (room - full) // context
                if before >= 0:
                    end = self.weight_end(s, self.parts[s, before])
                    self.model.add(parts.forward >= end)

    def _room(self, device: int) -> int:
        description = self.problem.devices[device]
        return description.usable_bytes - self.problem.static_bytes_of(device)

    def fits_device_memory(self) -> None:
        """What a device holds fits at every time."""
        for device, intervals in enumerate(self.on_device):
            if intervals:
                unit, room = self.scale.memory(device)
                sizes = [size // unit for _, size in intervals]
                self.model.add_cumulative([interval for interval, _ in intervals], sizes, room)

    def fits_host_memory(self) -> None:
        """The largest holdings of a host's devices fit it together."""
        for host in self.problem.hosts:
            if host.memory_bytes is not None:
                peaks = [
                    self._host_peak(device, host.memory_bytes)
                    for device, copies in enumerate(self.on_host)
                    if copies and self.problem.devices[device].host == host.name
                ]
                self.model.add(sum(peaks) <= host.memory_bytes)

    def _host_peak(self, device: int, most: int) -> cp_model.IntVar:
        copies = self.on_host[device]
        peak = self.model.new_int_var(0, most, f"host peak {device}")
        self.model.add_cumulative([copy for copy, _ in copies], [size for _, size in copies], peak)
        return peak

    def ends_within_length(self) -> None:
        """The length covers every action and gradient reduction, from 0 or the device's first."""
        for device, stages in enumerate(self.problem.stages_of):
            origin = self._first(device, stages)
            reductions = []
            for s in stages:
                sync = self._time(f"sync {s}")
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
        first = self._time(f"first {device}")
        for s in stages:
            for j in range(self.problem.num_microbatches):
                self.model.add(first <= self.parts[s, j].forward)
        return first

    def _sync_follows(self, s: int, sync: cp_model.IntVar) -> None:
        """A stage's gradient reduction follows its last W or B (length 0: the stage's end)."""
        for j in range(self.problem.num_microbatches):
            parts = self.parts[s, j]
            self.model.add(sync >= self.backward_end(s, parts))
            end = self.weight_end(s, parts)
            self.model.add(sync >= end).only_enforce_if(parts.split)

    # --- The variables of a cell, and its intervals on lanes and profiles.

    def _time(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.top, name)

    def backward_end(self, s: int, parts: Parts) -> Linear:
        if parts.done is not None:
            return parts.done
        return parts.backward + self.scale.units(self.problem.stages[s].backward_input_ms)

    def weight_end(self, s: int, parts: Parts) -> Linear:
        """Return when the W ends (meaningful where there is one)."""
        return parts.weight + self.scale.units(self.problem.stages[s].backward_weight_ms)

    def forward_end(self, s: int, parts: Parts) -> Linear:
        return parts.forward + self.scale.units(self.problem.stages[s].forward_ms)

    def _add_cell(self, s: int, j: int) -> None:
        """Make the variables of a cell and put its intervals on lanes and profiles."""
        parts = self._parts(s, j)
        self.parts[s, j] = parts
        self._compute(s, parts)
        self._recompute(s, parts)
        self._transfers(s, parts)
        if self.tight[self.problem.stages[s].device]:
            self._memory(s, parts)
            self._context_and_workspace(s, parts)

    def _parts(self, s: int, j: int) -> Parts:
        stage, name = self.problem.stages[s], f"{s}_{j}"
        numbers = usable_modes(self.problem, s) if self.tight[stage.device] else [0]
        modes = [self.problem.menus[s][number] for number in numbers]
        goes = any(mode.offload_bytes for mode in modes)
        again = any(mode.recompute == "apart" for mode in modes)
        fuses = fusing_may_pay(stage)
        varies = fuses or any(self.scale.units(mode.inside_ms) for mode in modes)
        limited = goes and self._host_is_limited(stage.device)
        time, choice = self._time, self.model.new_bool_var
        return Parts(
            forward=time(f"F{name}"),
            backward=time(f"I{name}"),
            weight=time(f"W{name}"),
            modes=self._modes(s, j, numbers),
            done=time(f"done{name}") if varies else None,
            fused=choice(f"fused{name}") if fuses else None,
            again=time(f"again{name}") if again else None,
            away=time(f"away{name}") if goes else None,
            issue=time(f"issue{name}") if goes else None,
            back=time(f"back{name}") if goes else None,
            leave=time(f"leave{name}") if limited else None,
        )

    def _modes(self, s: int, j: int, numbers: Sequence[int]) -> Mapping[int, cp_model.IntVar]:
        """Make a literal for each mode; those of a stage's first cell where modes are uniform."""
        if len(numbers) == 1:
            return {}
        if self.problem.stages[s].uniform_modes and j > 0:
            return self.parts[s, 0].modes
        modes = {number: self.model.new_bool_var(f"mode{number}_{s}_{j}") for number in numbers}
        self.model.add_exactly_one(modes.values())
        return modes

    def chosen(self, s: int, parts: Parts) -> Iterator[tuple[CellMode, Sequence[Literal]]]:
        """Yield each mode that a cell may have, and what must hold for that."""
        for number in parts.modes or [0]:
            yield self.problem.menus[s][number], [parts.modes[number]] if parts.modes else []

    def _host_is_limited(self, device: int) -> bool:
        name = self.problem.devices[device].host
        return any(h.name == name and h.memory_bytes is not None for h in self.problem.hosts)

    def _compute(self, s: int, parts: Parts) -> None:
        """F, then I or B; W after I. A fused B is the same interval with another length."""
        stage, model = self.problem.stages[s], self.model
        lane, end = self.compute[stage.device], self.backward_end(s, parts)
        size = self._backward_size(s, parts)
        long_f = self.scale.units(stage.forward_ms)
        long_w = self.scale.units(stage.backward_weight_ms)
        lane.append(model.new_fixed_size_interval_var(parts.forward, long_f, "F"))
        lane.append(model.new_interval_var(parts.backward, size, end, "I or B"))
        there = parts.split[0] if parts.split else True
        lane.append(model.new_optional_fixed_size_interval_var(parts.weight, long_w, there, "W"))
        model.add(parts.backward >= self.forward_end(s, parts))
        model.add(parts.weight >= end).only_enforce_if(parts.split)

    def _backward_size(self, s: int, parts: Parts) -> Linear:
        """Return how long I or B lasts: by whether it is fused, and what it recomputes inside."""
        stage = self.problem.stages[s]
        size = self.scale.units(stage.backward_input_ms)
        if parts.done is None:
            return size
        fused = self.scale.units(stage.fused_backward_ms)
        total: Linear = size
        if parts.fused is not None:
            total = total + (fused - size) * parts.fused
        for mode, there in self.chosen(s, parts):
            total = total + self.scale.units(mode.inside_ms) * sum(there)
        # An interval's size may depend on one variable alone.
        lasts = self.model.new_int_var(0, self.top, "lasts")
        self.model.add(lasts == total)
        return lasts

    def _recompute(self, s: int, parts: Parts) -> None:
        """RECOMPUTE stands between F and the backward."""
        for mode, there in self.chosen(s, parts):
            if mode.recompute == "apart" and parts.again is not None:
                size, model = self.scale.units(mode.recompute_ms), self.model
                optional = model.new_optional_fixed_size_interval_var
                interval = optional(parts.again, size, there[0], "again")
                self.compute[self.problem.stages[s].device].append(interval)
                model.add(parts.again >= self.forward_end(s, parts)).only_enforce_if(there)
                model.add(parts.backward >= parts.again + size).only_enforce_if(there)

    def _transfers(self, s: int, parts: Parts) -> None:
        """Away after F; issued back, between compute actions, after that; back for what follows."""
        for mode, there in self.chosen(s, parts):
            if mode.offload_bytes:
                self._copies(s, parts, mode, there)

    def _copies(self, s: int, parts: Parts, mode: CellMode, there: Sequence[Literal]) -> None:
        if parts.away is None or parts.issue is None or parts.back is None:
            return
        model, device = self.model, self.problem.stages[s].device
        away = self.scale.units(self.problem.offload_ms(s, mode.offload_bytes))
        back = self.scale.units(self.problem.reload_ms(s, mode.offload_bytes))
        first = parts.away if parts.leave is None else parts.leave
        consumer = parts.again if mode.recompute == "apart" else parts.backward
        model.add(first >= self.forward_end(s, parts)).only_enforce_if(there)
        model.add(parts.issue >= parts.away + away).only_enforce_if(there)
        model.add(parts.back >= parts.issue).only_enforce_if(there)
        model.add(consumer >= parts.back + back).only_enforce_if(there)
        optional = model.new_optional_fixed_size_interval_var
        self.compute[device].append(optional(parts.issue, 0, there[0], "issue"))
        if parts.leave is not None:
            model.add(parts.away >= parts.leave).only_enforce_if(there)
            self.compute[device].append(optional(parts.leave, 0, there[0], "leave"))
        for way, start, size in (("d2h", parts.away, away), ("h2d", parts.back, back)):
            copy = optional(start, size, there[0], way)
            for lane in self._lanes_of(device, way):
                self.lanes.setdefault(lane, []).append(copy)

    def _lanes_of(self, device: int, way: str) -> list[tuple[object, ...]]:
        description = self.problem.devices[device]
        own: tuple[object, ...] = (device,) if description.half_duplex else (device, way)
        return (
            [own]
            if description.pcie_group is None
            else [own, ("group", description.pcie_group, way)]
        )

    def _memory(self, s: int, parts: Parts) -> None:
        """Bytes held from F to the end of the backward."""
        device, end = self.problem.stages[s].device, self.backward_end(s, parts)
        self._hold_by_mode(s, parts, (parts.forward, end), lambda mode: mode.least_bytes, [])
        for mode, there in self.chosen(s, parts):
            restored = end
            if mode.recompute == "apart" and parts.again is not None:
                restored = parts.again + self.scale.units(mode.recompute_ms)
                self._hold(device, parts.again, restored, mode.recompute_workspace_bytes, there)
                missing = mode.activation_bytes - mode.forward_bytes
                self._hold(device, parts.again, end, missing, there)
            if mode.offload_bytes and parts.away is not None and parts.issue is not None:
                gone = parts.away + self.scale.units(self.problem.offload_ms(s, mode.offload_bytes))
                self._hold(device, parts.forward, gone, mode.offload_bytes, there)
                self._hold(device, parts.issue, end, mode.offload_bytes, there)
                if parts.leave is not None:
                    # Nothing is issued while what needs the copy runs: its end is as its start.
                    copy = self._interval(parts.leave, restored, there)
                    self.on_host[device].append((copy, mode.offload_bytes))

    def _context_and_workspace(self, s: int, parts: Parts) -> None:
        """What is held between I and W, and what exists only while an action runs.

        Where the context exceeds what the cell held, the I itself needs the difference: its peak is
        the larger of before and after.
        """
        split, ends = parts.split, self.backward_end(s, parts)
        over = self.weight_end(s, parts)
        forward, backward = (parts.forward, self.forward_end(s, parts)), (parts.backward, ends)

        def hold(when: tuple[Linear, Linear], name: str, where: Sequence[Literal]) -> None:
            self._hold_by_mode(s, parts, when, lambda mode: getattr(mode, name), where)

        hold((ends, over), "weight_context_bytes", split)
        hold(forward, "forward_workspace_bytes", [])
        self._hold_by_mode(s, parts, backward, _needed_by_input, split)
        hold((parts.weight, over), "backward_weight_workspace_bytes", split)
        if parts.fused is not None:
            self._hold_by_mode(s, parts, backward, _needed_by_fused, [parts.fused])

    def _hold_by_mode(
        self,
        s: int,
        parts: Parts,
        when: tuple[Linear, Linear],
        size: Callable[[CellMode], int],
        where: Sequence[Literal],
    ) -> None:
        """Hold what all modes hold, then what each holds above that, where all literals hold."""
        device = self.problem.stages[s].device
        least = min(size(mode) for mode, _ in self.chosen(s, parts))
        self._hold(device, *when, least, where)
        for mode, there in self.chosen(s, parts):
            self._hold(device, *when, size(mode) - least, [*where, *there])

    def _hold(
        self, device: int, start: Linear, end: Linear, size: int, where: Sequence[Literal]
    ) -> None:
        """Hold bytes from one time to another where all literals are true."""
        if size > 0:
            self.on_device[device].append((self._interval(start, end, where), size))

    def _interval(
        self, start: Linear, end: Linear, where: Sequence[Literal]
    ) -> cp_model.IntervalVar:
        size = self.model.new_int_var(0, self.top, "held")
        if not where:
            return self.model.new_interval_var(start, size, end, "held")
        there = where[0] if len(where) == 1 else self._all_of(where)
        return self.model.new_optional_interval_var(start, size, end, there, "held")

    def _all_of(self, literals: Sequence[Literal]) -> cp_model.IntVar:
        key = tuple(literal.index for literal in literals)
        if key not in self.both:
            both = self.model.new_bool_var("all")
            self.model.add_bool_and(literals).only_enforce_if(both)
            self.model.add_bool_or(both, *(~literal for literal in literals))
            self.both[key] = both
        return self.both[key]


def _needed_by_input(mode: CellMode) -> int:
    """Return what an I needs while it runs, above what its cell held before."""
    above = max(mode.inside_bytes, mode.weight_context_bytes - mode.backward_bytes)
    return above + mode.backward_input_workspace_bytes


def _needed_by_fused(mode: CellMode) -> int:
    return mode.inside_bytes + mode.backward_workspace_bytes


_RESTRICTED = 0.5
"""Share of the time for the restriction, where it is one."""

_LOOK_S = 0.02


def cp_sat(job: PeerJob) -> PeerAnswer:
    """Minimise the objective within the job's seconds, building models included.

    Raises
    ------
    ValueError
        If the job has no legal start: the horizon of the model is its objective. If its problem has
        pairs or micro-batches that differ, which the model cannot say.
    """
    began = time.perf_counter()
    if job.problem.pairs or not job.problem.is_even:
        raise ValueError("job.problem: has pairs or unequal micro-batches; the model knows neither")
    best = BestLegal(job.problem)
    if job.start is None or not best.offer(job.start, "start"):
        raise ValueError("job.start: must be legal programs, its objective is the model's horizon")
    free = not in_order_loses_nothing(job.problem)
    if free:
        _run(job, best, ordered=True, seconds=_RESTRICTED * job.seconds)
    left = job.seconds - (time.perf_counter() - began)
    last = _run(job, best, ordered=not free, seconds=left)
    extra = {"refused": best.num_refused, "start_accepted": last.started}
    return best.answer(status=last.status, bound_ms=last.bound_ms, extra=extra)


@dataclass(frozen=True, slots=True)
class _Run:
    """How a run ended; ``started`` = its start was a solution of the model."""

    status: str
    bound_ms: float | None = None
    started: bool = False


def _run(job: PeerJob, best: BestLegal, *, ordered: bool, seconds: float) -> _Run:
    """Improve on the best known programs for some seconds, where the model holds them."""
    began = time.perf_counter()
    horizon, start = best.objective_ms, best.programs
    pipeline = PipelineModel(job.problem, horizon, in_order=ordered, floor_ms=job.floor_ms)
    if start is not None:
        hint(pipeline, in_order(start) if pipeline.proves and ordered else renamed(start))
    started = _complete_hint(pipeline, seconds / 4)
    left = seconds - (time.perf_counter() - began)
    if left <= 0:
        return _Run("time limit while building")
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = job.threads
    solver.parameters.random_seed = job.seed
    with _ended_after(solver, left):
        status = solver.solve(pipeline.model, _Watch(pipeline, best))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        best.offer(lowered(pipeline, solver.value), "cp-sat")
    proven = pipeline.proves and status != cp_model.INFEASIBLE
    bound = max(job.floor_ms, pipeline.scale.ms(solver.best_objective_bound)) if proven else None
    return _Run(solver.status_name(status).lower(), bound, started)


@contextmanager
def _ended_after(solver: cp_model.CpSolver, seconds: float) -> Iterator[None]:
    """End the search after so many seconds of our clock, which may count those of the CPU."""
    began, over = time.perf_counter(), threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if time.perf_counter() - began > seconds:
                solver.stop_search()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _complete_hint(pipeline: PipelineModel, seconds: float) -> bool:
    """Let CP-SAT work out the variables that follow from the hinted ones, and hint those too.

    An incomplete hint is only a preference of its search; a complete one is its first solution.
    """
    solver = cp_model.CpSolver()
    solver.parameters.fix_variables_to_their_hinted_value = True
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    if solver.solve(pipeline.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return False
    values = list(solver.response_proto.solution)
    pipeline.model.clear_hints()  # type: ignore[no-untyped-call]
    for index, value in enumerate(values):
        pipeline.model.add_hint(pipeline.model.get_int_var_from_proto_index(index), value)
    return True


class _Watch(cp_model.CpSolverSolutionCallback):
    """Judges every improving solution as it comes."""

    def __init__(self, pipeline: PipelineModel, best: BestLegal) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._best = best

    def on_solution_callback(self) -> None:
        """Lower the solution and offer it."""
        self._best.offer(lowered(self._pipeline, self.value), "cp-sat")


# --- From CP-SAT's values to programs, and from programs to hints.

_RELEASE, _OFFLOAD, _RELOAD, _COMPUTE = range(4)
"""At one instant: bytes are released, then copies issued, then the next action starts."""


class _Event(NamedTuple):
    time: int
    rank: int
    order: int
    action: Action


def lowered(pipeline: PipelineModel, value: Callable[[IntVar], int]) -> Programs:
    """Return the programs that a solution stands for; they may still break a relaxed rule."""
    return tuple(_program(pipeline, value, d) for d in range(len(pipeline.problem.devices)))


def _program(pipeline: PipelineModel, value: Callable[[IntVar], int], device: int) -> Program:
    problem = pipeline.problem
    cells = [(s, j) for s in problem.stages_of[device] for j in range(problem.num_microbatches)]
    events: list[_Event] = []
    away: list[tuple[Cell, CellMode]] = []
    for cell in cells:
        parts, menu = pipeline.parts[cell], problem.menus[cell[0]]
        number = next((one for one, literal in parts.modes.items() if value(literal)), 0)
        named = number if problem.stages[cell[0]].modes else 0
        events += _computed(cell, parts, value, menu[number], named)
        if menu[number].offload_bytes:
            away.append((cell, menu[number]))
    events += _issued(pipeline, away, value, device)
    return tuple(event.action for event in sorted(events, key=lambda event: event[:3]))


def _computed(
    cell: Cell, parts: Parts, value: Callable[[IntVar], int], mode: CellMode, named: int
) -> list[_Event]:
    s, j = cell

    def event(start: IntVar, kind: ActionType, order: int) -> _Event:
        return _Event(value(start), _COMPUTE, order, Action(s, kind, j))

    fused = parts.fused is not None and value(parts.fused)
    forward = Action(s, ActionType.FORWARD, j, named)
    events = [_Event(value(parts.forward), _COMPUTE, 0, forward)]
    if mode.recompute == "apart" and parts.again is not None:
        events.append(event(parts.again, ActionType.RECOMPUTE, 1))
    if fused:
        events.append(event(parts.backward, ActionType.FULL_BACKWARD, 2))
    else:
        events.append(event(parts.backward, ActionType.BACKWARD_INPUT, 2))
        events.append(event(parts.weight, ActionType.BACKWARD_WEIGHT, 3))
    return events


def _issued(
    pipeline: PipelineModel,
    away: list[tuple[Cell, CellMode]],
    value: Callable[[IntVar], int],
    device: int,
) -> list[_Event]:
    """RELEASE when the copy has ended, RELOAD and OFFLOAD in the order of their lanes.

    The model lets copies pass one another between issue and start; issuing each no earlier than
    those that start before it changes no start and only shortens what memory is held for.
    """
    problem, scale = pipeline.problem, pipeline.scale
    description = problem.devices[device]
    shared = description.half_duplex or description.pcie_group is not None
    events = []
    at = 0
    by_start = sorted(away, key=lambda one: _value(value, pipeline.parts[one[0]].away))
    for order, (cell, mode) in enumerate(by_start):
        parts = pipeline.parts[cell]
        forward_end = value(parts.forward) + scale.units(problem.stages[cell[0]].forward_ms)
        begins = _value(value, parts.away)
        issue = forward_end if parts.leave is None else value(parts.leave)
        at = max(at, begins if shared and parts.leave is None else issue)
        gone = begins + scale.units(problem.offload_ms(cell[0], mode.offload_bytes))
        events.append(_Event(at, _OFFLOAD, order, Action(cell[0], ActionType.OFFLOAD, cell[1])))
        events.append(_Event(gone, _RELEASE, order, Action(cell[0], ActionType.RELEASE, cell[1])))
    at = 0
    by_start = sorted(away, key=lambda one: _value(value, pipeline.parts[one[0]].back))
    for order, (cell, _) in enumerate(by_start):
        at = max(at, _value(value, pipeline.parts[cell].issue))
        events.append(_Event(at, _RELOAD, order, Action(cell[0], ActionType.RELOAD, cell[1])))
    return events


def _value(value: Callable[[IntVar], int], variable: IntVar | None) -> int:
    return 0 if variable is None else value(variable)


def hint(pipeline: PipelineModel, programs: Programs) -> None:
    """Hand legal programs to CP-SAT as the solution to start from."""
    run = simulate(pipeline.problem, programs)
    at: dict[Action, Times] = {}
    modes: dict[Cell, int] = {}
    for program, row in zip(programs, run.times, strict=True):
        at |= {action.bare: times for action, times in zip(program, row, strict=True)}
        modes |= modes_of(pipeline.problem, program)
    for cell, parts in pipeline.parts.items():
        _hint_cell(pipeline, cell, parts, at)
        if cell[1] == 0 or not pipeline.problem.stages[cell[0]].uniform_modes:
            for number, literal in parts.modes.items():
                pipeline.model.add_hint(literal, number == modes.get(cell, 0))
    units = pipeline.scale.units_up(run.objective_ms(pipeline.problem.objective))
    pipeline.model.add_hint(pipeline.length, min(units, pipeline.horizon))


def _hint_cell(pipeline: PipelineModel, cell: Cell, parts: Parts, at: dict[Action, Times]) -> None:
    s, j = cell

    def times(kind: ActionType) -> Times | None:
        return at.get(Action(s, kind, j))

    def say(variable: IntVar | None, units: int) -> None:
        if variable is not None:
            pipeline.model.add_hint(variable, units)

    def say_start(variable: IntVar | None, found: Times | None, *, issue: bool = False) -> None:
        ms = 0.0 if found is None else found.issue if issue else found.start
        say(variable, round(ms * pipeline.scale.per_ms))

    fused, away = times(ActionType.FULL_BACKWARD), times(ActionType.OFFLOAD)
    again, back = times(ActionType.RECOMPUTE), times(ActionType.RELOAD)
    say(parts.fused, fused is not None)
    say_start(parts.forward, times(ActionType.FORWARD))
    say_start(parts.backward, fused or times(ActionType.BACKWARD_INPUT))
    say_start(parts.weight, times(ActionType.BACKWARD_WEIGHT))
    say_start(parts.again, again)
    say_start(parts.away, away)
    say_start(parts.leave, away, issue=True)
    say_start(parts.issue, back, issue=True)
    say_start(parts.back, back)
