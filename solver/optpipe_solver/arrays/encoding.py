"""A problem and its programs as flat arrays, for compiled code.

An action is one integer, ``kind * num_cells + cell`` with ``cell = stage * m + microbatch``, so
that a program is a row of integers and every table is indexed by action or by cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.memory import EFFECTS
from optpipe.schedule import Action, ActionType
from optpipe.simulate import duration_ms
from optpipe_solver.arrays import simulate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs
    from optpipe_solver.arrays import Flags, Floats, Ints

__all__ = ["KINDS", "CompiledProblem", "Rows", "durations_of", "memory_of", "program_of"]


KINDS = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
    ActionType.OFFLOAD,
    ActionType.RELEASE,
    ActionType.RELOAD,
    ActionType.RECOMPUTE,
)
"""Action types in the order of their integers in `simulate`."""

_KIND_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


class Rows(NamedTuple):
    """Programs as integers: ``actions[d, :lengths[d]]`` is the program of device d."""

    actions: Ints
    lengths: Ints

    def programs(self) -> list[Ints]:
        """Return the program of each device."""
        return [row[:length] for row, length in zip(self.actions, self.lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class CompiledProblem:
    """A problem as arrays; they mean what is said at `TimeArrays` and `MemoryArrays`."""

    problem: Problem
    times: simulate.TimeArrays
    memory: simulate.MemoryArrays

    @classmethod
    def of(cls, problem: Problem) -> CompiledProblem:
        """Return the arrays of a problem."""
        return cls(problem, _times(problem), memory_of(problem))

    def encode(self, programs: Programs) -> Rows:
        """Return programs as integers, with room for one more round trip per cell."""
        m, cells = self.problem.num_microbatches, self.times.num_cells
        longest = max(len(held) * m * len(KINDS) for held in (*self.problem.stages_of, (0,)))
        actions = np.zeros((len(programs), longest), dtype=np.int64)
        lengths = np.array([len(program) for program in programs], dtype=np.int64)
        for device, program in enumerate(programs):
            for at, (stage, kind, microbatch, _) in enumerate(program):
                actions[device, at] = _KIND_NUMBER[kind] * cells + stage * m + microbatch
        return Rows(actions, lengths)

    def decode(self, rows: Rows) -> Programs:
        """Return the programs that rows of integers stand for."""
        m, cells = self.problem.num_microbatches, self.times.num_cells
        programs = []
        for codes in rows.programs():
            kinds, held = np.divmod(codes, cells)
            stages, microbatches = np.divmod(held, m)
            types = map(KINDS.__getitem__, kinds.tolist())
            programs.append(program_of(stages.tolist(), types, microbatches.tolist()))
        return tuple(programs)

    def length_ms(self, rows: Rows, durations: Floats | None = None) -> tuple[float, float]:
        """Return (makespan, span) in ms, exactly as `optpipe.simulate`; inf where stuck.

        ``durations`` replaces those of the problem, by action number.
        """
        times = self.times if durations is None else self.times._replace(duration=durations)
        work = simulate.workspace_for(times, rows.actions.shape[0])
        makespan, span, _ = simulate.length(rows.actions, rows.lengths, times, work)
        return float(makespan), float(span)

    def objective_ms(self, rows: Rows) -> float:
        """Return the problem's objective in ms; inf where stuck."""
        return self.length_ms(rows)[self.problem.objective == "span"]

    def is_compute_only(self, rows: Rows) -> bool:
        """Whether programs hold F, I, W and B alone."""
        first = simulate.OFFLOAD * self.times.num_cells
        return all(bool((codes < first).all()) for codes in rows.programs())

    def cells_with(self, kind: int, rows: Rows) -> Flags:
        """Flag the cells that have an action of a kind."""
        cells = self.times.num_cells
        flags = np.zeros(cells, dtype=np.bool_)
        for codes in rows.programs():
            flags[codes[codes // cells == kind] % cells] = True
        return flags


def durations_of(problem: Problem) -> Floats:
    """Return ms by kind and stage; 0 for transfers of what cannot be offloaded."""
    duration = np.zeros((len(KINDS), len(problem.stages)))
    for number, kind in enumerate(KINDS):
        for s in range(len(problem.stages)):
            if not kind.is_transfer or problem.can_offload(s):
                duration[number, s] = duration_ms(problem, Action(s, kind, 0))
    return duration


def _times(problem: Problem) -> simulate.TimeArrays:
    m, num_stages = problem.num_microbatches, len(problem.stages)
    shared = [d.half_duplex or d.pcie_group is not None for d in problem.devices]
    there, back = zip(*problem.boundary_lanes, strict=True)
    queued = any(lane.link >= 0 for lane in (*there, *back))
    names = sorted({d.pcie_group for d in problem.devices if d.pcie_group is not None})
    return simulate.TimeArrays(
        num_stages=num_stages,
        num_microbatches=m,
        num_cells=num_stages * m,
        duration=np.repeat(durations_of(problem), m, axis=1).reshape(-1),
        there=np.array([there for there, _ in problem.boundary_ms]),
        back=np.array([back for _, back in problem.boundary_ms]),
        device_of=np.array(problem.placement, dtype=np.int64),
        grad_sync=np.array([stage.grad_sync_ms for stage in problem.stages]),
        shared=np.array(shared),
        half_duplex=np.array([d.half_duplex for d in problem.devices]),
        group=np.array(
            [-1 if d.pcie_group is None else names.index(d.pcie_group) for d in problem.devices],
            dtype=np.int64,
        ),
        num_links=len(problem.links) if queued else 0,
        lane_there=np.array([lane.link for lane in there], dtype=np.int64),
        lane_back=np.array([lane.link for lane in back], dtype=np.int64),
        fill_there=np.array([lane.ms for lane in there]),
        fill_back=np.array([lane.ms for lane in back]),
    )


def memory_of(problem: Problem) -> simulate.MemoryArrays:
    """Return what memory depends on."""
    stages = problem.stages
    delta = np.zeros((len(KINDS), len(stages)), dtype=np.int64)
    workspace = np.zeros((len(KINDS), len(stages)), dtype=np.int64)
    for number, kind in enumerate(KINDS):
        for s, stage in enumerate(stages):
            mode = problem.menus[s][stage.implied_mode(kind)]
            delta[number, s] = EFFECTS[kind].delta(mode)
            workspace[number, s] = EFFECTS[kind].workspace(mode)
    hosts = {host.name: index for index, host in enumerate(problem.hosts)}
    unlimited = np.iinfo(np.int64).max
    return simulate.MemoryArrays(
        delta=delta,
        workspace=workspace,
        checkpoint=np.array([stage.checkpoint_bytes or 0 for stage in stages], dtype=np.int64),
        limit=np.array(
            [problem.room_bytes(device) for device in range(len(problem.devices))], dtype=np.int64
        ),
        host_of=np.array([hosts[device.host] for device in problem.devices], dtype=np.int64),
        host_limit=np.array(
            [unlimited if h.memory_bytes is None else h.memory_bytes for h in problem.hosts],
            dtype=np.int64,
        ),
        may_offload=np.array([problem.can_offload(s) for s in range(len(stages))]),
        may_recompute=np.array([stage.can_recompute for stage in stages]),
    )


# --- Programs from columns: where a schedule has hundreds of thousands of actions, loops count.

_action = partial(tuple.__new__, Action)  # without the two calls of Python that a call would cost


def program_of(
    stages: Iterable[int], types: Iterable[ActionType], microbatches: Iterable[int]
) -> Program:
    """Return the actions whose parts stand beside each other in columns of equal length.

    Raises
    ------
    ValueError
        If the lengths differ.
    """
    rows = zip(stages, types, microbatches, strict=True)
    return tuple(_action((stage, kind, microbatch, 0)) for stage, kind, microbatch in rows)
