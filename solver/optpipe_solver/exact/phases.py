"""What a device does with one micro-batch of a stage, piece by piece, and what it holds meanwhile.

A *phase* is a stretch of time in which a (stage, micro-batch) holds at least so many bytes and uses
at most one lane. At every moment a cell is in at most one phase. A *mode* (kept, offloaded or
recomputed; backward split or fused) says how long a cell is in which phase at least.

================  =======  =====================================  ===============================
phase             lane     bytes held                             least ms
================  =======  =====================================  ===============================
F                 compute  what it makes, and workspace           forward_ms
WAIT              none     activation, or the checkpoint, or      the way to the last stage and
                           what offload leaves                    back, less copies or RECOMPUTE
OUT, HOME         D2H,     activation                             one transfer each
                  H2D
RECOMPUTE         compute  activation, and workspace              recompute_ms
I                 compute  activation, or context if larger, and  backward_input_ms
                           workspace
W                 compute  context, and workspace                 backward_weight_ms
B, REST           compute  activation, and workspace              a B: as long as an I at most, then
                                                                  the rest
================  =======  =====================================  ===============================

The bytes are those of the prefix walk (`optpipe.memory`): an OFFLOAD frees nothing before its copy
has ended, a RELOAD holds from its issue on, and between F and the backward of a cell at least the
way through the later stages passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from optpipe_solver.milp.horizon.items import fusing_may_pay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem, Stage
    from optpipe_solver.bounds.paths import Paths

__all__ = ["Lane", "Mode", "Phase", "Work", "work_of"]


class Lane(StrEnum):
    """What a phase occupies on its device."""

    COMPUTE = "compute"
    D2H = "d2h"
    H2D = "h2d"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of one cell.

    ``release`` is the least ms from the device's first start to its start, ``due`` that from its
    end to the end of the device's last I (or as much of a B). ``is_late`` marks what comes behind
    the I: W and REST.
    """

    stage: int
    name: str
    lane: Lane
    held_bytes: int
    release: float
    due: float
    is_late: bool = False

    @property
    def takes_anything(self) -> bool:
        """Whether it uses a lane or holds bytes; any number of the others fit at one moment."""
        return self.lane is not Lane.NONE or self.held_bytes > 0


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to treat a cell: the least ms in each phase."""

    stage: int
    needs: tuple[tuple[Phase, float], ...]


@dataclass(frozen=True, slots=True)
class Work:
    """All that a device has to do, ``num_microbatches`` times in one mode per stage.

    ``head`` is the least ms before its first start, ``tail`` that after its last I.
    """

    num_microbatches: int
    room_bytes: int
    half_duplex: bool
    head: float
    tail: float
    stages: tuple[int, ...]
    modes: tuple[Mode, ...]
    least_forward: float
    least_backward: float

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Every phase that some mode needs, once."""
        return tuple(dict.fromkeys(phase for mode in self.modes for phase, _ in mode.needs))


def work_of(paths: Paths, device: int, *, makespan: bool) -> Work:
    """Return what a device that has stages must do.

    Under span its clock runs from its own first start to its own last end, so nothing is known of
    what comes before, and behind its last backward only of its own W and gradient reduction.
    """
    problem = paths.problem
    held = problem.stages_of[device]
    stages = [problem.stages[s] for s in held]
    return Work(
        num_microbatches=problem.num_microbatches,
        room_bytes=problem.devices[device].usable_bytes - problem.static_bytes_of(device),
        half_duplex=problem.devices[device].half_duplex,
        head=paths.head_f[held[0]] if makespan else 0.0,
        tail=min(_tail(paths, s, makespan=makespan) for s in held),
        stages=tuple(held),
        modes=tuple(mode for s in held for mode in _Cell(paths, s, held[0]).modes()),
        least_forward=min(stage.forward_ms for stage in stages),
        least_backward=min(paths.backward[s] for s in held),
    )


def _tail(paths: Paths, s: int, *, makespan: bool) -> float:
    """Return the least ms after the last I of a device (as much of a B) if it is one of stage s."""
    stage = paths.problem.stages[s]
    behind = paths.tail[s] if makespan else 0.0
    if not fusing_may_pay(paths.problem, s):
        return max(behind, paths.after_i(s))
    rest = stage.fused_backward_ms - paths.backward[s] + stage.grad_sync_ms
    return max(behind, min(paths.after_i(s), rest))


class _Cell:
    """The modes of one micro-batch of stage s; ``first`` is the device's first stage."""

    def __init__(self, paths: Paths, s: int, first: int) -> None:
        self.problem: Problem = paths.problem
        self.stage: Stage = self.problem.stages[s]
        self.s = s
        self.trip = paths.between[s]
        self.release = paths.head_f[s] - paths.head_f[first]
        back = range(first, s)
        self.due = sum(paths.backward[k] + self.problem.boundary_ms[k][1] for k in back)
        self.before_due = self.due + paths.backward[s]
        self.made = self.release + self.stage.forward_ms

    def modes(self) -> Iterator[Mode]:
        """Yield every way to treat the cell: until its backward, and through it."""
        for middle in self._middles():
            for end in self._ends():
                needs = [(phase, ms) for phase, ms in (*middle, *end) if ms > 0]
                yield Mode(self.s, tuple(need for need in needs if need[0].takes_anything))

    def _middles(self) -> Iterator[list[tuple[Phase, float]]]:
        stage, full = self.stage, self.stage.activation_bytes
        yield [self._forward(full), (self._wait("kept", full), self.trip)]
        if self.problem.can_offload(self.s):
            out, home = self.problem.offload_ms(self.s), self.problem.reload_ms(self.s)
            rest = full - stage.offload_bytes
            yield [
                self._forward(full),
                (self._copy("OUT", Lane.D2H, 0.0, home), out),
                (self._copy("HOME", Lane.H2D, out, 0.0), home),
                (self._wait("away", rest), max(0.0, self.trip - out - home)),
            ]
        if stage.recompute_ms is not None:
            again, kept = stage.recompute_ms, stage.checkpoint_bytes or 0
            size = full + stage.recompute_workspace_bytes
            phase = Phase(self.s, "R", Lane.COMPUTE, size, self.made, self.before_due)
            waits = (self._wait("checkpoint", kept), max(0.0, self.trip - again))
            yield [self._forward(kept), (phase, again), waits]

    def _ends(self) -> Iterator[list[tuple[Phase, float]]]:
        stage, context = self.stage, self.stage.weight_context_bytes
        size = max(stage.activation_bytes, context) + stage.backward_input_workspace_bytes
        after = context + stage.backward_weight_workspace_bytes
        yield [
            (self._gradient("I", size), stage.backward_input_ms),
            (self._late("W", after, stage.backward_input_ms), stage.backward_weight_ms),
        ]
        if fusing_may_pay(self.problem, self.s):
            size = stage.activation_bytes + stage.backward_workspace_bytes
            first = min(stage.backward_input_ms, stage.fused_backward_ms)
            rest = stage.fused_backward_ms - first
            yield [(self._gradient("B", size), first), (self._late("REST", size, first), rest)]

    def _gradient(self, name: str, size: int) -> Phase:
        return Phase(self.s, name, Lane.COMPUTE, size, self.made + self.trip, self.due)

    def _late(self, name: str, size: int, first: float) -> Phase:
        release = self.made + self.trip + first
        return Phase(self.s, name, Lane.COMPUTE, size, release, 0.0, is_late=True)

    def _forward(self, makes: int) -> tuple[Phase, float]:
        size = makes + self.stage.forward_workspace_bytes
        due = self.before_due + self.trip
        name = f"F making {makes}"
        return Phase(self.s, name, Lane.COMPUTE, size, self.release, due), self.stage.forward_ms

    def _wait(self, name: str, size: int) -> Phase:
        return Phase(self.s, name, Lane.NONE, size, self.made, self.before_due)

    def _copy(self, name: str, lane: Lane, before: float, after: float) -> Phase:
        size, due = self.stage.activation_bytes, self.before_due + after
        return Phase(self.s, name, lane, size, self.made + before, due)
