"""Turns programs into the instructions of each rank: adds messages and FSDP2's steps.

A send stands right after the pass that makes the tensor. The receive stands on the other rank at
the place that this rank had reached by then. So every pair of ranks posts the same messages in the
same order, and no rank waits for a message that is placed later (`optpipe.runtime.messages`).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from optpipe.errors import PreflightError
from optpipe.runtime.messages import MessageSend, Receive
from optpipe.schedule import Action, ActionType, input_of, pass_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from optpipe.runtime.messages import Order
    from optpipe.schedule import Pass, Program, Programs

__all__ = [
    "Instruction",
    "OverlappedPair",
    "ReduceGradients",
    "Reshard",
    "Unshard",
    "lower",
    "makes_gradients",
    "messages_of",
    "range_name",
    "with_weights",
]


class OverlappedPair(NamedTuple):
    """A forward and a backward that run together."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward.bare};{self.backward.bare})OVERLAP_F_B"


class Unshard(NamedTuple):
    """FSDP2 begins to gather the weights of a stage."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}UNSHARD"


class Reshard(NamedTuple):
    """FSDP2 frees the gathered weights of a stage."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}RESHARD"


class ReduceGradients(NamedTuple):
    """FSDP2 reduces the gradients of a stage, which are complete."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}REDUCE_GRAD"


Instruction = Action | OverlappedPair | MessageSend | Receive | Unshard | Reshard | ReduceGradients
"""One thing that a rank executes."""

_COMPUTE = frozenset(ActionType(letter) for letter in "FIWB")

_MOST_GATHERED = 3
"""Stages of a rank whose weights are gathered at a time: one for a forward, one for a backward,
and the next."""


def range_name(instruction: Instruction) -> str:
    """Return an instruction's name in a profile, as torch's own schedule runtime writes it."""
    if isinstance(instruction, MessageSend | Receive):
        message = instruction.message
        sends = isinstance(instruction, MessageSend)
        place = f"{message.stage}SEND" if sends else f"{message.reader}RECV"
        return f"PP:{place}_{'B' if message.backward else 'F'}{message.microbatch}"
    return f"PP:{instruction}"


class _Unit(NamedTuple):
    """A pass or a pair, and the actions of the program that follow it before the next pass."""

    compute: Action | OverlappedPair
    others: list[Action]

    @property
    def actions(self) -> tuple[Action, ...]:
        """The passes."""
        return self.compute if isinstance(self.compute, OverlappedPair) else (self.compute,)


def lower(
    programs: Programs, placement: Sequence[int], *, trains: bool, in_pairs: bool
) -> tuple[tuple[Instruction, ...], ...]:
    """Return what each rank executes: its program with sends and receives in their places.

    Parameters
    ----------
    programs
        The actions of each rank; legal ones, as `optpipe.check.check` says.
    placement
        The rank of each stage.
    trains
        Whether all actions run; otherwise only the forwards, without pairs.
    in_pairs
        Whether the two passes of a pair are one instruction.

    Raises
    ------
    PreflightError
        If the programs wait for each other in a cycle.
    """
    waiting = [deque(_units(program, trains=trains, in_pairs=in_pairs)) for program in programs]
    placed: list[list[Instruction]] = [[] for _ in programs]
    done: set[Pass] = set()
    while any(waiting):
        progressed = False
        for rank, units in enumerate(waiting):
            if not units or not _has_inputs(units[0], done, len(placement)):
                continue
            progressed = True
            unit = units.popleft()
            placed[rank].append(unit.compute)
            for action in unit.actions:
                message = pass_of(action)
                if message is None:
                    continue
                done.add(message)
                reader = message.reader
                if 0 <= reader < len(placement) and placement[reader] != rank:
                    placed[rank].append(MessageSend(message))
                    placed[placement[reader]].append(Receive(message))
            # After the sends: a RELEASE would hold them up until its transfer has ended.
            placed[rank] += unit.others
        if not progressed:
            heads = ", ".join(
                f"rank {rank} waits at {units[0].compute}"
                for rank, units in enumerate(waiting)
                if units
            )
            raise PreflightError(
                f"the programs wait for each other in a cycle: {heads}; check the schedule with "
                "`optpipe check`"
            )
    return tuple(map(tuple, placed))


def _units(program: Program, *, trains: bool, in_pairs: bool) -> Iterator[_Unit]:
    unit: _Unit | None = None
    for action in program:
        if not trains and action.type is not ActionType.FORWARD:
            continue
        if action.type not in _COMPUTE:
            if unit is not None:
                unit.others.append(action.bare)
        elif trains and in_pairs and action.paired and unit is not None:
            unit = _Unit(OverlappedPair(unit.actions[0], action.bare), [])
        else:
            if unit is not None:
                yield unit
            unit = _Unit(action.bare, [])
    if unit is not None:
        yield unit


def _has_inputs(unit: _Unit, done: Collection[Pass], num_stages: int) -> bool:
    needed = (input_of(action, num_stages) for action in unit.actions)
    return all(one is None or one in done for one in needed)


def messages_of(instructions: Sequence[Instruction]) -> Order:
    """Return the passes, sends and receives of a rank, for `optpipe.runtime.messages`."""
    order: list[Action | MessageSend | Receive] = []
    for one in instructions:
        if isinstance(one, OverlappedPair):
            order += one
        elif isinstance(one, MessageSend | Receive) or (
            isinstance(one, Action) and one.type in _COMPUTE
        ):
            order.append(one)
    return tuple(order)


def with_weights(
    instructions: Sequence[Instruction], sharded: Collection[int]
) -> tuple[Instruction, ...]:
    """Return instructions in which FSDP2 gathers and frees the weights of the ``sharded`` stages.

    The next three stages that compute are gathered ahead. Gradients of a stage are reduced after
    its last W or B.
    """
    if not sharded:
        return tuple(instructions)
    computed = [_stages_of(one) for one in instructions]
    ahead: list[tuple[int, ...]] = []
    coming: list[int] = []
    for stages in reversed(computed):
        for stage in reversed(stages):
            coming = [stage, *(one for one in coming if one != stage)]
        ahead.append(tuple(coming[:_MOST_GATHERED]))
    ahead.reverse()
    left = Counter(
        action.stage for one in instructions for action in _passes(one) if makes_gradients(action)
    )
    gathered: list[int] = []
    placed: list[Instruction] = []
    complete: list[int] = []
    for one, stages, following in zip(instructions, computed, ahead, strict=True):
        if complete and not isinstance(one, MessageSend):
            placed += map(ReduceGradients, complete)
            complete = []
        if stages:
            placed += [Reshard(stage) for stage in gathered if stage not in following]
            placed += [
                Unshard(stage) for stage in following if stage in sharded and stage not in gathered
            ]
            gathered = [stage for stage in following if stage in sharded]
        placed.append(one)
        for action in _passes(one):
            if makes_gradients(action):
                left[action.stage] -= 1
                if not left[action.stage] and action.stage in sharded:
                    complete.append(action.stage)
    placed += map(ReduceGradients, complete)
    placed += map(Reshard, gathered)
    return tuple(placed)


def _passes(one: Instruction) -> tuple[Action, ...]:
    if isinstance(one, OverlappedPair):
        return tuple(one)
    return (one,) if isinstance(one, Action) else ()


def _stages_of(one: Instruction) -> tuple[int, ...]:
    computes = (*_COMPUTE, ActionType.RECOMPUTE)
    return tuple(action.stage for action in _passes(one) if action.type in computes)


def makes_gradients(action: Action) -> bool:
    """Whether an action makes weight gradients; the last such one of a stage completes them."""
    return action.type in (ActionType.FULL_BACKWARD, ActionType.BACKWARD_WEIGHT)
