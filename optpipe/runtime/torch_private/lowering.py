"""From programs to torch's action lists, and from those to what goes between the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch.distributed.pipelining.schedules import _Action, _ComputationType

from optpipe.action import Action, ActionType, Program
from optpipe.precedence import Pass
from optpipe.runtime.messages import Order, Receive, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["forwards_of", "order_of", "torch_actions", "with_extra_actions"]

_TORCH_RUNS = frozenset(
    {
        ActionType.FORWARD,
        ActionType.BACKWARD_INPUT,
        ActionType.BACKWARD_WEIGHT,
        ActionType.FULL_BACKWARD,
    }
)
_OF_A_FORWARD = frozenset({"FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD"})


def torch_actions(program: Program) -> list[_Action | None]:
    """Return the actions of a program that torch runs itself."""
    # By name: the values became letters in 2.12.
    return [
        _Action(action.stage, _ComputationType[action.type.name], action.microbatch)
        for action in program
        if action.type in _TORCH_RUNS
    ]


def forwards_of(actions: Sequence[_Action]) -> list[_Action]:
    """Return the forwards of torch's list with their sends and receives, in its order.

    They never wait in a circle: their waits are some of those of the list.
    """
    return [action for action in actions if action.computation_type.name in _OF_A_FORWARD]


def order_of(actions: Sequence[_Action]) -> Order:
    """Translate what torch will do; only its passes, sends and receives concern the messages."""
    found = (_step_of(action) for action in actions)
    return tuple(step for step in found if step is not None)


def _step_of(action: _Action) -> Action | Send | Receive | None:
    name, stage = action.computation_type.name, action.stage_index
    microbatch = cast("int", action.microbatch_index)
    if isinstance(action.computation_type, ActionType):
        return None
    match name:
        case "SEND_F" | "SEND_B":
            return Send(Pass(name == "SEND_B", stage, microbatch))
        case "RECV_F":
            return Receive(Pass(False, stage - 1, microbatch))
        case "RECV_B":
            return Receive(Pass(True, stage + 1, microbatch))
        case _ if name in ActionType.__members__:
            return Action(stage, ActionType[name], microbatch)
    return None


def with_extra_actions(order: Sequence[_Action], program: Program) -> list[_Action]:
    """Place the actions torch does not know behind the compute they follow in the program.

    Behind its send, too, which would otherwise wait for the transfer that a RELEASE waits for;
    before any receive, behind which they would wait for another rank.
    """
    extras = _extras_by_predecessor(program)
    placed: list[_Action] = []
    waiting: list[_Action] = []
    for action in order:
        if waiting and not action.computation_type.name.startswith("SEND"):
            placed += waiting
            waiting = []
        placed.append(action)
        waiting += extras.pop(_cell(action), [])
    return placed + waiting


def _extras_by_predecessor(program: Program) -> dict[tuple[int, str, int | None], list[_Action]]:
    found: dict[tuple[int, str, int | None], list[_Action]] = {}
    before: tuple[int, str, int | None] | None = None
    for stage, kind, microbatch in program:
        if kind in _TORCH_RUNS:
            before = (stage, kind.name, microbatch)
        elif before is not None:
            extra = _Action(stage, cast("_ComputationType", kind), microbatch)
            found.setdefault(before, []).append(extra)
    return found


def _cell(action: _Action) -> tuple[int, str, int | None]:
    return action.stage_index, action.computation_type.name, action.microbatch_index
