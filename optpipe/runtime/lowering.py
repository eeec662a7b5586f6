"""Lower programs to the instructions of each rank: add messages and the steps of FSDP2.

A send is right after the pass that makes the tensor. The receive is on the other rank, at the place
that this rank has reached by then. So every pair of ranks posts the same messages in the same
order, and no rank waits for a message that is placed later (`optpipe.runtime.messages`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from optpipe.errors import PreflightError
from optpipe.runtime.messages import MessageSend, Receive
from optpipe.schedule import Action, ActionType, input_of, pass_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

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
    """FSDP2 starts to gather the weights of a stage."""

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

_PASSES = frozenset(ActionType(letter) for letter in "FIWB")

_MAX_GATHERED = 3
"""The maximum number of stages of a rank whose weights are gathered: one for a forward, one for a
backward, and the next."""


def range_name(instruction: Instruction) -> str:
    """Return the name of an instruction in a profile, the same as in torch's schedule runtime."""
    if isinstance(instruction, MessageSend | Receive):
        message = instruction.message
        sends = isinstance(instruction, MessageSend)
        place = f"{message.stage}SEND" if sends else f"{message.reader}RECV"
        return f"PP:{place}_{'B' if message.backward else 'F'}{message.microbatch}"
    return f"PP:{instruction}"


class _Unit(NamedTuple):
    """A pass or the two passes of a pair, and the actions that follow before the next pass."""

    passes: tuple[Action, ...]
    others: list[Action]

    @property
    def compute(self) -> Action | OverlappedPair:
        """The passes as one instruction."""
        return OverlappedPair(*self.passes) if len(self.passes) > 1 else self.passes[0]


def lower(
    programs: Programs, placement: Sequence[int], *, trains: bool, in_pairs: bool
) -> tuple[tuple[Instruction, ...], ...]:
    """Return the instructions of each rank: its program with sends and receives.

    The programs are legal by `optpipe.check.check`. Without ``trains`` only the forwards run,
    without pairs. With ``in_pairs`` the two passes of a pair are one instruction.

    Raises
    ------
    PreflightError
        If the programs wait for each other in a cycle.
    """
    waiting = [_split_into_units(program, trains=trains, in_pairs=in_pairs) for program in programs]
    placed: list[list[Instruction]] = [[] for _ in programs]
    done: set[Pass | None] = {None}
    while any(waiting):
        progressed = False
        for rank, units in enumerate(waiting):
            if not units or not all(
                input_of(action, len(placement)) in done for action in units[0].passes
            ):
                continue
            progressed = True
            unit = units.popleft()
            placed[rank].append(unit.compute)
            for action in unit.passes:
                message = pass_of(action)
                if message is None:
                    continue
                done.add(message)
                reader = message.reader
                if 0 <= reader < len(placement) and placement[reader] != rank:
                    placed[rank].append(MessageSend(message))
                    placed[placement[reader]].append(Receive(message))
            # After the sends: a RELEASE would delay them until its transfer has ended.
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


def _split_into_units(program: Program, *, trains: bool, in_pairs: bool) -> deque[_Unit]:
    units: deque[_Unit] = deque()
    for action in program:
        if not trains and action.type is not ActionType.FORWARD:
            continue
        if action.type not in _PASSES:
            if units:
                units[-1].others.append(action.bare)
        elif in_pairs and action.paired and units:
            # The program has the forward of a pair right before its backward.
            units[-1] = _Unit((*units[-1].passes, action.bare), [])
        else:
            units.append(_Unit((action.bare,), []))
    return units


def messages_of(instructions: Sequence[Instruction]) -> Order:
    """Return the passes, sends and receives of a rank, for `optpipe.runtime.messages`."""
    order: list[Action | MessageSend | Receive] = []
    for one in instructions:
        if isinstance(one, MessageSend | Receive):
            order.append(one)
        else:
            order += [action for action in _actions_of(one) if action.type in _PASSES]
    return tuple(order)


def with_weights(
    instructions: Sequence[Instruction], sharded: Collection[int]
) -> tuple[Instruction, ...]:
    """Return instructions in which FSDP2 gathers and frees the weights of the ``sharded`` stages.

    The next three stages that compute are gathered ahead. The gradients of a stage are reduced
    after its last W or B.
    """
    if not sharded:
        return tuple(instructions)
    computed = [
        tuple(action.stage for action in _actions_of(one) if action.type.is_compute)
        for one in instructions
    ]
    ahead: list[tuple[int, ...]] = []
    coming: list[int] = []
    for stages in reversed(computed):
        for stage in reversed(stages):
            coming = [stage, *(one for one in coming if one != stage)]
        ahead.append(tuple(coming[:_MAX_GATHERED]))
    ahead.reverse()
    last = {
        action.stage: index
        for index, one in enumerate(instructions)
        for action in _actions_of(one)
        if makes_gradients(action)
    }
    completed = {index: stage for stage, index in last.items() if stage in sharded}
    gathered: list[int] = []
    placed: list[Instruction] = []
    complete: list[int] = []
    for index, (one, stages, following) in enumerate(
        zip(instructions, computed, ahead, strict=True)
    ):
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
        if index in completed:
            complete.append(completed[index])
    placed += map(ReduceGradients, complete)
    placed += map(Reshard, gathered)
    return tuple(placed)


def _actions_of(one: Instruction) -> tuple[Action, ...]:
    if isinstance(one, OverlappedPair):
        return tuple(one)
    return (one,) if isinstance(one, Action) else ()


def makes_gradients(action: Action) -> bool:
    """Whether an action makes weight gradients; the last one of a stage completes them."""
    return action.type in (ActionType.FULL_BACKWARD, ActionType.BACKWARD_WEIGHT)
