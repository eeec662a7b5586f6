"""What of a schedule is decided and what is given: the whole problem, or a window of programs.

A window leaves a piece in the middle of every device's program open; what stands before it
(*prefix*) and behind it (*suffix*) keeps its order. Nothing in a prefix waits for a window, so
prefix times are constants, *heads*; the suffix is a fixed graph, so what follows an action is a
constant too, its *tail*: the longest path from its end to the end of the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.action import Program
    from optpipe.problem import Problem

__all__ = ["Cell", "Context"]

Cell = tuple[int, int]
"""A (stage, micro-batch)."""

Lane = tuple[int, ActionType]
"""A device and OFFLOAD or RELOAD."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The fixed surroundings of what a model decides; times in ms from the start of the schedule.

    Attributes
    ----------
    window
        Per device, the piece of the incumbent's program that is open; None = everything is.
    prefix, suffix
        Per device, what stands before and behind it.
    heads
        By action of the window, the earliest time it may start (a transfer: be issued).
    tails
        By action of the window, the ms that follow its end. Absent: nothing follows.
    ready
        Per device, when its compute lane comes out of the prefix.
    lane_free
        When a transfer lane comes out of the prefix.
    copied
        By cell offloaded in the prefix and released in the window, the end of its copy.
    held_bytes
        Per device, what it holds when the window begins, static bytes included.
    lane_tails
        By lane, the ms that follow the end of any transfer of the window on it.
    device_tails
        By device, the ms that follow the end of any compute action of the window on it.
    recomputed
        Cells that cross an edge of the window and are recomputed.
    ends_bound
        By device, whether end + tail is at most the objective. Under span the clock of a device
        starts with its first action: in a whole problem that is known for stage 0's device only.
    frozen
        Devices whose piece keeps its order and its choices; only times move.
    """

    window: tuple[Program, ...] | None = None
    prefix: tuple[Program, ...] = ()
    suffix: tuple[Program, ...] = ()
    heads: Mapping[Action, float] = field(default_factory=dict)
    tails: Mapping[Action, float] = field(default_factory=dict)
    ready: tuple[float, ...] = ()
    lane_free: Mapping[Lane, float] = field(default_factory=dict)
    copied: Mapping[Cell, float] = field(default_factory=dict)
    held_bytes: tuple[int, ...] = ()
    lane_tails: Mapping[Lane, float] = field(default_factory=dict)
    device_tails: tuple[float, ...] = ()
    recomputed: frozenset[Cell] = frozenset()
    ends_bound: tuple[bool, ...] = ()
    frozen: frozenset[int] = frozenset()

    @classmethod
    def whole(cls, problem: Problem) -> Context:
        """Return the context of a model that decides everything."""
        tails = {}
        for s, stage in enumerate(problem.stages):
            for j in range(problem.num_microbatches):
                for kind in (ActionType.BACKWARD_WEIGHT, ActionType.FULL_BACKWARD):
                    tails[Action(s, kind, j)] = stage.grad_sync_ms
        devices = range(len(problem.devices))
        return cls(
            tails=tails,
            ready=(0.0,) * len(problem.devices),
            held_bytes=tuple(problem.static_bytes_of(device) for device in devices),
            device_tails=(0.0,) * len(problem.devices),
            ends_bound=tuple(
                problem.objective == "makespan" or device == problem.stages[0].device
                for device in devices
            ),
        )
