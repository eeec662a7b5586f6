"""torch's schedule runtime: our losses, our sends, and the actions it does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from optpipe.runtime.messages import MessageSend, Order, Receive, sends_over_before, window_of
from optpipe.schedule import Action, ActionType, Pass, Program, Programs, pass_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import Work

    from optpipe.runtime.passes import PassHooks
    from optpipe.runtime.torch_stage import HookedStage

__all__ = ["HookedSchedule", "forwards_of", "order_of", "torch_actions", "with_extra_actions"]


class HookedSchedule(_PipelineScheduleRuntime):
    """torch's schedule runtime running one set of programs.

    Losses are kept by micro-batch: torch keeps them in the order in which the last stage ran, and
    takes the wrong one where that is another. Each is divided by the number of micro-batches
    before its backward, so that gradients add up over steps, which torch's division of
    ``.grad`` at the end of a step would divide again. Sends are kept by message, and let go of
    where they are known to be over (`optpipe.runtime.messages`).

    Parameters
    ----------
    loss_fn
        From (output, target) to a scalar; not called where a step has no target.
    loss_divisor
        What a loss is divided by before its backward; 0 = only the programs' forwards are run.

    Attributes
    ----------
    orders
        What each rank does, with torch's sends and receives.
    """

    def __init__(
        self,
        stages: Sequence[HookedStage],
        programs: Programs,
        *,
        num_microbatches: int,
        loss_fn: Callable[[Any, Any], Tensor],
        loss_divisor: int,
        hooks: PassHooks,
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            list(stages), num_microbatches, loss_fn=loss_fn, scale_grads=False
        )
        self._trains = self._has_backward = loss_divisor > 0
        self._hooks = hooks
        self._loss_divisor = loss_divisor
        self._loss_of: dict[int, Tensor] = {}
        self._output_of: dict[int, Any] = {}
        self._in_flight: dict[Pass, list[Work]] = {}
        self._over_before_send: Mapping[Pass, tuple[Pass, ...]] = {}
        self._stage_of = {stage.stage_index: stage for stage in stages}
        self.orders = self._lower(programs)
        self._tell_stages()
        functions = cast("dict[Any, Callable[..., None]]", self._comp_type_to_function_map)
        functions[ActionType.RECOMPUTE] = self._recompute
        for kind in (ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD):
            functions[kind] = self._transfer
        for direction in (_ComputationType.SEND_F, _ComputationType.SEND_B):
            functions[direction] = self._send

    def _lower(self, programs: Programs) -> tuple[Order, ...]:
        """Let torch place sends and receives, add our actions; return what every rank will do."""
        self._prepare_schedule_with_comms(
            {rank: torch_actions(program) for rank, program in enumerate(programs)}
        )
        lists = self.pipeline_order_with_comms
        if self._trains:
            lists[self.rank] = with_extra_actions(lists[self.rank], programs[self.rank])
        else:
            lists.update({rank: forwards_of(lists[rank]) for rank in lists})
        return tuple(order_of(lists[rank]) for rank in range(len(programs)))

    def _tell_stages(self) -> None:
        home_of = self.stage_index_to_group_rank
        placement = [home_of[index] for index in range(len(home_of))]
        window = window_of(len(placement), trains=self._trains)
        before = sends_over_before(self.orders, placement, window)[self.rank]
        self._over_before_send = {
            step.message: messages
            for step, messages in before.items()
            if isinstance(step, MessageSend)
        }
        over = {
            pass_of(step): messages for step, messages in before.items() if isinstance(step, Action)
        }
        for index, stage in self._stage_of.items():
            stage.next_is_here = stage.is_last or index + 1 in self._stage_of
            stage.over_before = over
            stage.let_go = self.let_go

    def run(self, args: tuple[Any, ...], target: Any) -> tuple[list[Tensor], list[Any]]:
        """Run the programs once; return losses and outputs in micro-batch order.

        Parameters
        ----------
        args
            The whole batch, where the first stage is, else ().
        target
            The whole target, where the last stage is, else None.

        Returns
        -------
        tuple
            Losses by micro-batch where the last stage is and a target was given, else []; outputs
            by micro-batch where the last stage is and nothing is trained, else [].
        """
        losses: list[Tensor] = []
        self._loss_of.clear()
        self.step(*args, target=target, losses=losses, return_outputs=False)
        self.let_go(tuple(self._in_flight))
        for stage in self._stage_of.values():
            stage.clear_runtime_states()
        outputs = [self._output_of[microbatch] for microbatch in sorted(self._output_of)]
        self._output_of.clear()
        return losses, outputs

    def let_go(self, messages: Sequence[Pass]) -> None:
        """Wait until these have been sent, and let go of their tensors."""
        for message in messages:
            for work in self._in_flight.pop(message, ()):
                work.wait()

    def _send(self, action: Any, _context: Any) -> None:
        stage, microbatch = self._stage_of[action.stage_index], action.microbatch_index
        backward = action.computation_type is _ComputationType.SEND_B
        message = Pass(backward, action.stage_index, microbatch)
        if over := self._over_before_send.get(message):
            self.let_go(over)
        operations = (stage.get_bwd_send_ops if backward else stage.get_fwd_send_ops)(microbatch)
        self._in_flight[message] = schedules._batch_p2p(operations)  # noqa: SLF001

    def _transfer(self, action: Any, _context: Any) -> None:
        kind: ActionType = action.computation_type
        self._hooks.transfer(Action(action.stage_index, kind, action.microbatch_index))

    def _recompute(self, action: Any, context: Any) -> None:
        stage, microbatch = self._stage_of[action.stage_index], action.microbatch_index
        with self._hooks.recompute(stage.stage_index, microbatch):
            output = stage.recompute_one_chunk(
                microbatch, context.arg_mbs[microbatch], context.kwarg_mbs[microbatch]
            )
        self._maybe_compute_loss(stage, output, context.target_mbs, microbatch)

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, *_: Any, **__: Any
    ) -> None:
        if not stage.is_last:
            return
        if not self._trains:
            self._output_of[mb_index] = output
        if target_mbs is not None:
            target = target_mbs[mb_index]
            with self._hooks.loss(stage.stage_index, mb_index, target):
                self._loss_of[mb_index] = cast("Any", self._loss_fn)(output, target)
        stage.drop_outputs(mb_index)
        self._hooks.loss_done()

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        if not stage.is_last:
            return None
        loss = self._loss_of[mb_index]
        # The value is kept, its graph is not: it would live to the end of the step.
        self._loss_of[mb_index] = loss.detach()
        return loss / self._loss_divisor if self._loss_divisor > 1 else loss

    def _update_losses(self, _stages: Any, losses: Any) -> None:
        losses.extend(self._loss_of[microbatch] for microbatch in sorted(self._loss_of))
        self._loss_of.clear()


# --- From programs to torch's action lists, and from those to what goes between the ranks.

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


def _step_of(action: _Action) -> Action | MessageSend | Receive | None:
    name, stage = action.computation_type.name, action.stage_index
    microbatch = cast("int", action.microbatch_index)
    if isinstance(action.computation_type, ActionType):
        return None
    match name:
        case "SEND_F" | "SEND_B":
            return MessageSend(Pass(name == "SEND_B", stage, microbatch))
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
