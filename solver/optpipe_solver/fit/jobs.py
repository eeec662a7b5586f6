"""Compute programs as arrays for the sweeps of `fit_memory`, and back again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.columns import program_of
from optpipe_solver.fit.kernel import sweep
from optpipe_solver.fit.state import Job
from optpipe_solver.improve.compiled import kernel
from optpipe_solver.improve.compiled.problem import KINDS, CompiledProblem, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.fit.state import Rule

__all__ = ["UNLIMITED", "Fitted", "Frame", "Ran"]

UNLIMITED = 2**62
"""Bytes of a host, or of a device, that has no limit."""


class Ran(NamedTuple):
    """A simulation: the objective, and the end of every pass as in `kernel.Work`."""

    objective_ms: float
    ends: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Sweeps of all devices: programs as integers, and per device what was waited and held."""

    rows: Rows
    stalled_ms: tuple[float, ...]
    peaks: tuple[int, ...]


class Frame:
    """One problem and its compute programs; ``offloading`` names the stages that may leave.

    The programs may be integers already, as `CompiledProblem.encode` makes them.
    """

    def __init__(
        self, problem: Problem, programs: Programs | Rows, offloading: Sequence[int] | None = None
    ) -> None:
        self.problem = problem
        self.programs = programs
        self.compiled = CompiledProblem.of(problem)
        self.rows = programs if isinstance(programs, Rows) else self.compiled.encode(programs)
        self._may_offload = self.compiled.memory.may_offload.copy()
        if offloading is not None:
            self._may_offload &= np.isin(np.arange(len(problem.stages)), list(offloading))
        self._work = kernel.workspace_for(self.compiled.times, len(problem.devices))
        self._jobs = [self._job(device) for device in range(len(problem.devices))]

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """Bytes of each device that activations may fill."""
        return tuple(int(limit) for limit in self.compiled.memory.limit)

    @cached_property
    def fits(self) -> bool:
        """Whether the programs need neither offload nor recompute."""
        return all(peak <= limit for peak, limit in zip(self.peaks, self.limits, strict=True))

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Bytes of activations that each program holds at most."""
        return tuple(_peak(job) for job in self._jobs)

    @cached_property
    def base(self) -> Ran:
        """The programs as they are, whatever they hold."""
        return self.run(self.rows)

    @cached_property
    def lane_models(self) -> tuple[tuple[float, float], ...]:
        """Shares and lags of lanes (`Rule`) worth trying: devices of a PCIe group take turns."""
        groups = Counter(d.pcie_group for d in self.problem.devices if d.pcie_group is not None)
        sharing = float(max(groups.values(), default=1))
        if sharing == 1.0:
            return ((1.0, 0.0),)
        return ((1.0, 0.0), (1.0, 1.0), (sharing, 0.0))

    def host_shares(self) -> tuple[int, ...]:
        """Host bytes per device where each device of a host gets the same part of its limit."""
        devices = self.problem.devices
        sizes = Counter(device.host for device in devices)
        limits = {host.name: host.memory_bytes for host in self.problem.hosts}
        shares = []
        for device in devices:
            limit = limits[device.host]
            shares.append(UNLIMITED if limit is None else limit // sizes[device.host])
        return tuple(shares)

    @property
    def num_actions(self) -> int:
        """How many compute actions there are."""
        return int(self.rows.lengths.sum())

    def smallest_move(self, device: int) -> int:
        """Return half of the fewest bytes that an offload of a device moves; 0 if none may."""
        job = self._jobs[device]
        moved = job.offload_bytes[job.may_offload]
        return max(1, int(moved.min()) // 2) if moved.size else 0

    def run(self, rows: Rows) -> Ran:
        """Simulate programs."""
        makespan, span, _ = kernel.length(
            rows.actions, rows.lengths, self.compiled.times, self._work
        )
        objective = makespan if self.problem.objective == "makespan" else span
        return Ran(float(objective), self._work.end[: 2 * self.compiled.times.num_cells].copy())

    def sweep_device(
        self, device: int, rule: Rule, ran: Ran, limit: int, host_limit: int = UNLIMITED
    ) -> tuple[bool, float]:
        """Return whether one device can be fitted, and how long it then waits, in ms."""
        job = self._arriving(device, ran)
        swept = sweep(job, rule, limit, host_limit)
        return bool(swept.ok), float(swept.stalled_ms)

    def sweep_all(
        self, rules: Sequence[Rule], ran: Ran, limits: Sequence[int], host_limits: Sequence[int]
    ) -> Fitted | None:
        """Fit every device, inputs arriving as in a run; None where one cannot be fitted.

        Rules and limits are per device.
        """
        actions = np.zeros_like(self.rows.actions)
        lengths = np.zeros_like(self.rows.lengths)
        stalled, peaks = [], []
        for device, rule in enumerate(rules):
            job = self._arriving(device, ran)
            swept = sweep(job, rule, limits[device], host_limits[device])
            if not swept.ok:
                return None
            codes = swept.codes[: swept.num_codes]
            actions[device, : swept.num_codes] = self._global(device, codes)
            lengths[device] = swept.num_codes
            stalled.append(float(swept.stalled_ms))
            peaks.append(int(swept.peak))
        return Fitted(Rows(actions, lengths), tuple(stalled), tuple(peaks))

    def decode(self, rows: Rows) -> Programs:
        """Return the programs that rows of integers stand for."""
        if rows is self.rows and not isinstance(self.programs, Rows):
            return self.programs
        m, cells = self.problem.num_microbatches, self.compiled.times.num_cells
        programs = []
        for row, length in zip(rows.actions, rows.lengths, strict=True):
            kinds, held = np.divmod(row[:length], cells)
            stages, microbatches = np.divmod(held, m)
            types = map(KINDS.__getitem__, kinds.tolist())
            programs.append(program_of(stages.tolist(), types, microbatches.tolist()))
        return tuple(programs)

    def _arriving(self, device: int, ran: Ran) -> Job:
        """Return a device's job with the times at which its inputs arrive in a run."""
        times = self.compiled.times
        m, cells = times.num_microbatches, times.num_cells
        job = self._jobs[device]
        kind, cell = np.divmod(self.rows.actions[device, : self.rows.lengths[device]], cells)
        stage = cell // m
        arrival = np.zeros(kind.size)
        forward = (kind == kernel.FORWARD) & (stage > 0)
        arrival[forward] = ran.ends[cell[forward] - m] + times.there[stage[forward] - 1]
        backward = (kind == kernel.BACKWARD_INPUT) | (kind == kernel.FULL_BACKWARD)
        backward &= stage < times.num_stages - 1
        arrival[backward] = ran.ends[cells + cell[backward] + m] + times.back[stage[backward]]
        return job._replace(arrival=arrival)

    def _global(self, device: int, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        m = self.problem.num_microbatches
        stages = np.array(self.problem.stages_of[device], dtype=np.int64)
        kind, cell = np.divmod(codes, max(1, stages.size * m))
        if not stages.size:
            return codes
        made: NDArray[np.int64] = (
            kind * self.compiled.times.num_cells + stages[cell // m] * m + cell % m
        )
        return made

    def _job(self, device: int) -> Job:
        """Return a device's job; its cells are numbered stage by stage, in model order."""
        times, memory = self.compiled.times, self.compiled.memory
        m = times.num_microbatches
        stages = np.array(self.problem.stages_of[device], dtype=np.int64)
        local = np.zeros(times.num_stages, dtype=np.int64)
        local[stages] = np.arange(stages.size)
        codes = self.rows.actions[device, : self.rows.lengths[device]]
        kind, cell = np.divmod(codes, times.num_cells)
        stage = cell // m
        own = local[stage] * m + cell % m
        weight = kind == kernel.BACKWARD_WEIGHT
        backward = (kind == kernel.BACKWARD_INPUT) | (kind == kernel.FULL_BACKWARD)
        where = np.full((2, stages.size * m), -1, dtype=np.int64)
        where[0, own[backward]] = np.flatnonzero(backward)
        where[1, own[weight]] = np.flatnonzero(weight)
        held = np.repeat(stages, m)
        first = held * m  # any micro-batch of the stage: durations are the same
        return Job(
            kind=kind,
            cell=own,
            duration=times.duration[codes],
            arrival=np.zeros(kind.size),
            delta=memory.delta[kind, stage],
            workspace=memory.workspace[kind, stage],
            backward_at=where[0],
            weight_at=where[1],
            offload_bytes=memory.delta[kernel.RELOAD, held],
            offload_ms=times.duration[kernel.OFFLOAD * times.num_cells + first],
            reload_ms=times.duration[kernel.RELOAD * times.num_cells + first],
            may_offload=self._may_offload[held],
            saved_bytes=memory.delta[kernel.RECOMPUTE, held],
            recompute_ms=times.duration[kernel.RECOMPUTE * times.num_cells + first],
            recompute_workspace=memory.workspace[kernel.RECOMPUTE, held],
            may_recompute=memory.may_recompute[held],
            half_duplex=bool(times.half_duplex[device]),
        )


def _peak(job: Job) -> int:
    after = np.cumsum(job.delta)
    return int(max((after - np.minimum(job.delta, 0) + job.workspace).max(initial=0), 0))
