"""Between CP-SAT's values and programs, both ways: solutions are lowered, starts are hinted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe import Action, ActionType, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from ortools.sat.python.cp_model import IntVar

    from benchmarks.peers.cells import Cell
    from benchmarks.peers.cp_model import PipelineModel
    from benchmarks.peers.cp_parts import Parts
    from optpipe import Program, Programs
    from optpipe.simulate import Times

__all__ = ["hint", "lowered"]

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
    cells = [
        ((s, j), pipeline.parts[s, j])
        for s in pipeline.problem.stages_of[device]
        for j in range(pipeline.problem.num_microbatches)
    ]
    events = [event for cell, parts in cells for event in _computed(cell, parts, value)]
    away = [
        (cell, parts)
        for cell, parts in cells
        if parts.offloaded is not None and value(parts.offloaded)
    ]
    events += _issued(pipeline, away, value, device)
    return tuple(event.action for event in sorted(events, key=lambda event: event[:3]))


def _computed(cell: Cell, parts: Parts, value: Callable[[IntVar], int]) -> list[_Event]:
    s, j = cell

    def event(start: IntVar, kind: ActionType, order: int) -> _Event:
        return _Event(value(start), _COMPUTE, order, Action(s, kind, j))

    fused = parts.fused is not None and value(parts.fused)
    events = [event(parts.forward, ActionType.FORWARD, 0)]
    if parts.recomputed is not None and parts.again is not None and value(parts.recomputed):
        events.append(event(parts.again, ActionType.RECOMPUTE, 1))
    if fused:
        events.append(event(parts.backward, ActionType.FULL_BACKWARD, 2))
    else:
        events.append(event(parts.backward, ActionType.BACKWARD_INPUT, 2))
        events.append(event(parts.weight, ActionType.BACKWARD_WEIGHT, 3))
    return events


def _issued(
    pipeline: PipelineModel,
    away: list[tuple[Cell, Parts]],
    value: Callable[[IntVar], int],
    device: int,
) -> list[_Event]:
    """RELEASE when the copy has ended, RELOAD and OFFLOAD in the order of their lanes.

    The model lets copies pass one another between issue and start; issuing each no earlier than
    those that start before it changes no start and only shortens what memory is held for.
    """
    problem, scale = pipeline.problem, pipeline.scale
    held = problem.devices[device]
    shared = held.half_duplex or held.pcie_group is not None
    events = []
    at = 0
    for order, (cell, parts) in enumerate(sorted(away, key=lambda x: _value(value, x[1].away))):
        made = value(parts.forward) + scale.units(problem.stages[cell[0]].forward_ms)
        begins = _value(value, parts.away)
        issue = made if parts.leave is None else value(parts.leave)
        at = max(at, begins if shared and parts.leave is None else issue)
        gone = begins + scale.units(problem.offload_ms(cell[0]))
        events.append(_Event(at, _OFFLOAD, order, Action(cell[0], ActionType.OFFLOAD, cell[1])))
        events.append(_Event(gone, _RELEASE, order, Action(cell[0], ActionType.RELEASE, cell[1])))
    at = 0
    for order, (cell, parts) in enumerate(sorted(away, key=lambda x: _value(value, x[1].back))):
        at = max(at, _value(value, parts.issue))
        events.append(_Event(at, _RELOAD, order, Action(cell[0], ActionType.RELOAD, cell[1])))
    return events


def _value(value: Callable[[IntVar], int], variable: IntVar | None) -> int:
    return 0 if variable is None else value(variable)


def hint(pipeline: PipelineModel, programs: Programs) -> None:
    """Hand legal programs to CP-SAT as the solution to start from."""
    run = simulate(pipeline.problem, programs)
    at: dict[Action, Times] = {}
    for program, row in zip(programs, run.times, strict=True):
        at |= dict(zip(program, row, strict=True))
    for cell, parts in pipeline.parts.items():
        _hint_cell(pipeline, cell, parts, at)
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
    say(parts.offloaded, away is not None)
    say(parts.recomputed, again is not None)
    say_start(parts.forward, times(ActionType.FORWARD))
    say_start(parts.backward, fused or times(ActionType.BACKWARD_INPUT))
    say_start(parts.weight, times(ActionType.BACKWARD_WEIGHT))
    say_start(parts.again, again)
    say_start(parts.away, away)
    say_start(parts.leave, away, issue=True)
    say_start(parts.issue, back, issue=True)
    say_start(parts.back, back)
