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

    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs

__all__ = ["KINDS", "CompiledProblem", "Rows", "program_of"]


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

    actions: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CompiledProblem:
    """A problem as arrays; they mean what is said at `TimeArrays` and `MemoryArrays`."""

    problem: Problem
    times: simulate.TimeArrays
    memory: simulate.MemoryArrays

    @classmethod
    def of(cls, problem: Problem) -> CompiledProblem:
        """Return the arrays of a problem."""
        return cls(problem, _times(problem), _memory(problem))

    def encode(self, programs: Programs) -> Rows:
        """Return programs as integers, with room for one more round trip per cell."""
        m, cells = self.problem.num_microbatches, self.times.num_cells
        longest = max(len(held) * m * len(KINDS) for held in (*self.problem.stages_of, (0,)))
        actions = np.zeros((len(programs), longest), dtype=np.int64)
        lengths = np.array([len(program) for program in programs], dtype=np.int64)
        for device, program in enumerate(programs):
            for at, (stage, kind, microbatch) in enumerate(program):
                actions[device, at] = _KIND_NUMBER[kind] * cells + stage * m + microbatch
        return Rows(actions, lengths)

    def decode(self, rows: Rows) -> Programs:
        """Return the programs that rows of integers stand for."""
        m, cells = self.problem.num_microbatches, self.times.num_cells
        programs = []
        for row, length in zip(rows.actions, rows.lengths, strict=True):
            kinds, held = np.divmod(row[:length], cells)
            stages, microbatches = np.divmod(held, m)
            types = map(KINDS.__getitem__, kinds.tolist())
            programs.append(program_of(stages.tolist(), types, microbatches.tolist()))
        return tuple(programs)

    def length_ms(
        self, rows: Rows, durations: NDArray[np.float64] | None = None
    ) -> tuple[float, float]:
        """Return (makespan, span) in ms, exactly as `optpipe.simulate`; inf where stuck.

        ``durations`` replaces those of the problem, by action number.
        """
        times = self.times if durations is None else self.times._replace(duration=durations)
        work = simulate.workspace_for(times, rows.actions.shape[0])
        makespan, span, _ = simulate.length(rows.actions, rows.lengths, times, work)
        return float(makespan), float(span)


def _times(problem: Problem) -> simulate.TimeArrays:
    m, num_stages = problem.num_microbatches, len(problem.stages)
    duration = np.zeros((len(KINDS), num_stages))
    for number, kind in enumerate(KINDS):
        for s in range(num_stages):
            if not kind.is_transfer or problem.can_offload(s):
                duration[number, s] = duration_ms(problem, Action(s, kind, 0))
    shared = [d.half_duplex or d.pcie_group is not None for d in problem.devices]
    names = sorted({d.pcie_group for d in problem.devices if d.pcie_group is not None})
    return simulate.TimeArrays(
        num_stages=num_stages,
        num_microbatches=m,
        num_cells=num_stages * m,
        duration=np.repeat(duration, m, axis=1).reshape(-1),
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
    )


def _memory(problem: Problem) -> simulate.MemoryArrays:
    stages = problem.stages
    delta = np.zeros((len(KINDS), len(stages)), dtype=np.int64)
    workspace = np.zeros((len(KINDS), len(stages)), dtype=np.int64)
    for number, kind in enumerate(KINDS):
        for s, stage in enumerate(stages):
            delta[number, s] = EFFECTS[kind].delta(stage)
            workspace[number, s] = EFFECTS[kind].workspace(stage)
    hosts = {host.name: index for index, host in enumerate(problem.hosts)}
    unlimited = np.iinfo(np.int64).max
    return simulate.MemoryArrays(
        delta=delta,
        workspace=workspace,
        checkpoint=np.array([stage.checkpoint_bytes or 0 for stage in stages], dtype=np.int64),
        limit=np.array(
            [
                device.usable_bytes - problem.static_bytes_of(index)
                for index, device in enumerate(problem.devices)
            ],
            dtype=np.int64,
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
    return tuple(map(_action, zip(stages, types, microbatches, strict=True)))
