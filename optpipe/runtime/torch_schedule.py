"""torch's stage and schedule runtime: hooks around passes, our losses, sends and own actions."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import OptPipeError, PreflightError
from optpipe.runtime.batches import tensors_in
from optpipe.runtime.messages import (
    MessageSend,
    MessageSlots,
    Order,
    Receive,
    layout_of,
    sends_over_before,
    shard_of,
    slots_of,
    window_of,
)
from optpipe.runtime.overlap import PairedPass
from optpipe.runtime.preflight import called, named_tensors, received
from optpipe.runtime.torch_names import (
    add_up_in_reduce_type,
    alias_no_view,
    fsdp_parts,
    is_profiled,
    reduce_by_ddp,
)
from optpipe.schedule import Action, ActionType, Pass, Program, Programs, pass_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup, Work

    from optpipe.runtime.batches import Microbatches
    from optpipe.runtime.messages import Blank
    from optpipe.runtime.overlap import Overlap
    from optpipe.runtime.passes import Passes
    from optpipe.runtime.preflight import Shapes, Spread
    from optpipe.runtime.slices import SliceStates

__all__ = ["HookedSchedule", "HookedStage", "hollow", "order_of"]


class HookedSchedule(_PipelineScheduleRuntime):
    """torch's schedule runtime with a loop of our own, running one set of programs.

    torch prepares the stages and places the messages; then all that can be known of an action
    before it runs is looked up once, since torch's loop looks it up in every step.

    Losses are kept by micro-batch: torch keeps them in the order in which the last stage ran, and
    takes the wrong one where that is another. Each is divided by ``loss_divisor`` before its
    backward (0 = forwards only), so that gradients add up over steps, which torch's division of
    ``.grad`` at the end of a step would divide again. Sends are kept by message, and let go of
    where they are known to be over (`optpipe.runtime.messages`). ``orders`` is what each rank does,
    with torch's sends and receives; ``bytes_of`` are those of a message's tensors, ``slots`` where
    they lie: those of an earlier schedule's ``pool`` first. With ``overlap`` the two of a pair are
    one action, which it runs; else they run one after the other.
    """

    def __init__(
        self,
        stages: Sequence[HookedStage],
        programs: Programs,
        *,
        num_microbatches: int,
        loss_fn: Callable[..., Tensor] | None,
        loss_divisor: int,
        hooks: Passes,
        bytes_of: Callable[[Pass], int],
        overlap: Overlap | None = None,
        pool: MessageSlots | None = None,
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            list(stages), num_microbatches, loss_fn=loss_fn or _itself, scale_grads=False
        )
        self._output_is_loss = loss_fn is None
        self._trains = self._has_backward = loss_divisor > 0
        self._hooks = hooks
        self._overlap = overlap
        self._loss_divisor = loss_divisor
        self._loss_of: dict[int, Tensor] = {}
        self._output_of: dict[int, Any] = {}
        self._args: Sequence[Any] = ()
        self._targets: Sequence[Any] = ()
        self._loss_kwargs: Mapping[str, Any] = {}
        self._in_flight: dict[Pass, list[Work]] = {}
        self._expected: dict[Pass, list[Work]] = {}
        self._unsharding: dict[int, list[Any]] = {}
        self._over_before_send: Mapping[Pass, tuple[Pass, ...]] = {}
        self._stage_of = {stage.stage_index: stage for stage in stages}
        self._steps: list[tuple[str, Callable[[], object]]] = []
        self.orders = self._lower(programs)
        self._tell_stages(bytes_of, pool)

    def _lower(self, programs: Programs) -> tuple[Order, ...]:
        """Let torch place sends and receives, add our actions; return what every rank will do."""
        self._prepare_schedule_with_comms(
            {
                rank: _torch_actions(program, in_pairs=self._trains and self._overlap is not None)
                for rank, program in enumerate(programs)
            }
        )
        lists = self.pipeline_order_with_comms
        if self._trains:
            lists[self.rank] = _with_extra_actions(lists[self.rank], programs[self.rank])
        else:
            lists.update({rank: _forwards_of(lists[rank]) for rank in lists})
        return tuple(order_of(lists[rank]) for rank in range(len(programs)))

    def _tell_stages(self, bytes_of: Callable[[Pass], int], pool: MessageSlots | None) -> None:
        home_of = self.stage_index_to_group_rank
        placement = [home_of[index] for index in range(len(home_of))]
        window = window_of(len(placement), trains=self._trains)
        before = sends_over_before(self.orders, placement, window)[self.rank]
        counted = slots_of(self.orders[self.rank], before, len(placement), bytes_of)
        self.slots = MessageSlots(*counted, next(iter(self._stage_of.values())).device, pool)
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
            stage.slots = self.slots

    def run(
        self, microbatches: Microbatches, kwargs: Mapping[int, Sequence[dict[str, Any]]]
    ) -> tuple[list[Tensor], list[Any]]:
        """Run the programs once; ``kwargs`` are those of each stage, by micro-batch.

        Return losses by micro-batch where the last stage is and there are any, else []; outputs
        by micro-batch where the last stage is and nothing is trained, else [].
        """
        self._loss_of.clear()
        self._expected.clear()
        self.slots.begin()
        self._args = microbatches.args or [()] * self._n_microbatches
        self._targets, self._loss_kwargs = microbatches.targets, microbatches.loss_kwargs
        for index, stage in self._stage_of.items():
            stage.has_backward = self._has_backward
            stage.kwargs = kwargs[index]
            stage.clear_runtime_states()
        if not self._steps:
            self._prepare_stages()
            self._steps = self._calls_of(self.pipeline_order_with_comms[self.rank])
        if is_profiled():
            for name, step in self._steps:
                with torch.profiler.record_function(name):
                    step()
        else:
            for _, step in self._steps:
                step()
        self._args, self._targets, self._loss_kwargs = (), (), {}
        self.let_go(tuple(self._in_flight))
        for stage in self._stage_of.values():
            stage.clear_runtime_states()
            stage.kwargs = ()
        losses = [self._loss_of[microbatch] for microbatch in sorted(self._loss_of)]
        outputs = [self._output_of[microbatch] for microbatch in sorted(self._output_of)]
        self._loss_of.clear()
        self._output_of.clear()
        return losses, outputs

    def drop_slots(self) -> None:
        """Give the memory of messages back until the next step; all have been sent."""
        self.slots.drop()

    def let_go(self, messages: Sequence[Pass]) -> None:
        """Wait until these have been sent, and let go of their tensors."""
        for message in messages:
            for work in self._in_flight.pop(message):
                work.wait()
            self.slots.give_back(message)

    def _prepare_stages(self) -> None:
        """Let torch do what it does before the first action of a step, and no action."""
        lists = self.pipeline_order_with_comms
        self.pipeline_order_with_comms = {self.rank: []}
        try:
            kwargs: list[dict[str, Any]] = [{}] * self._n_microbatches
            self._step_microbatches(list(self._args), kwargs, return_outputs=False)
        finally:
            self.pipeline_order_with_comms = lists

    def _calls_of(self, actions: Sequence[_Action]) -> list[tuple[str, Callable[[], object]]]:
        """Return what is called for each action, with its name for profilers."""
        parts = [one for action in actions for one in _parts_of(action)]
        left = Counter(one.stage_index for one in parts if _makes_gradients(one))
        found: list[tuple[str, Callable[[], object]]] = []
        for action in actions:
            calls = []
            for part in _parts_of(action):
                left[part.stage_index] -= _makes_gradients(part)
                calls.append(self._call_of(part, is_last=not left[part.stage_index]))
            call = calls[0]
            if len(calls) == 2:
                call = partial(self._run_pair, _parts_of(action), calls)
            if call is not None:
                found.append((str(action), call))
        return found

    def _call_of(self, action: _Action, *, is_last: bool) -> Callable[[], object] | None:
        """Return what an action does; ``is_last`` of those that make gradients of its stage."""
        stage = self._stage_of[action.stage_index]
        microbatch = cast("int", action.microbatch_index)
        kind = action.computation_type
        if isinstance(kind, ActionType):
            if kind is ActionType.RECOMPUTE:
                return partial(self._recompute, stage, microbatch)
            return partial(self._hooks.transfer, Action(stage.stage_index, kind, microbatch))
        match kind.name:
            case "FORWARD":
                return partial(self._forward, stage, microbatch)
            case "BACKWARD_INPUT" | "FULL_BACKWARD":
                split = kind.name == "BACKWARD_INPUT"
                last = is_last and not split
                return partial(self._backward, stage, microbatch, split=split, last=last)
            case "BACKWARD_WEIGHT":
                return partial(stage.backward_weight_one_chunk, microbatch, last_backward=is_last)
            case "SEND_F" | "SEND_B" | "RECV_F" | "RECV_B":
                return self._post_of(stage, kind.name, microbatch)
            case "UNSHARD" | "RESHARD" | "REDUCE_GRAD" if isinstance(stage.submod, FSDPModule):
                if kind.name == "REDUCE_GRAD":
                    return partial(stage.perform_reduce_grad, 1)
                return partial(self._unshard if kind.name == "UNSHARD" else _reshard, stage)
            case "UNSHARD" | "RESHARD" | "REDUCE_GRAD":
                return None
        raise PreflightError(f"{action} is no action of this runtime; report it with the schedule")

    def _post_of(self, stage: HookedStage, name: str, microbatch: int) -> Callable[[], object]:
        """Return what posts a message; the peer, and the tensors' places, are known by now."""
        backward, sends = name.endswith("B"), name.startswith("SEND")
        blanks = stage.crossing(microbatch, backward=backward, out=sends)
        ahead = backward != sends
        peer = self.stage_index_to_group_rank[stage.stage_index + (1 if ahead else -1)]
        blank = torch.empty(0, device=stage.device)
        operation = dist.isend if sends else dist.irecv
        operations = [
            dist.P2POp(operation, blank, group=stage.group, group_peer=peer)
            for one in blanks
            if one is not None
        ]
        if sends:
            message = Pass(backward, stage.stage_index, microbatch)
            return partial(self._send, stage, message, blanks, operations)
        message = Pass(backward, stage.stage_index + (1 if backward else -1), microbatch)
        return partial(self._receive, stage, message, blanks, operations)

    def _send(
        self,
        stage: HookedStage,
        message: Pass,
        blanks: Sequence[Blank | None],
        operations: list[dist.P2POp],
    ) -> None:
        if over := self._over_before_send.get(message):
            self.let_go(over)
        slot = self.slots.take(message, blanks)
        stage.put_into(slot, message, blanks)
        self._in_flight[message] = self._post(operations, slot)

    def _receive(
        self,
        stage: HookedStage,
        message: Pass,
        blanks: Sequence[Blank | None],
        operations: list[dist.P2POp],
    ) -> None:
        infos = stage.grad_recv_info if message.backward else stage.args_recv_info
        self.slots.fill(message, infos[message.microbatch], blanks)
        slot = [info.buffer for info in infos[message.microbatch] if info.buffer is not None]
        self._expected[message] = self._post(operations, slot)

    def _post(self, operations: list[dist.P2POp], slot: Sequence[Tensor]) -> list[Work]:
        for operation, place in zip(operations, slot, strict=True):
            operation.tensor = place
        return schedules._batch_p2p(operations)  # noqa: SLF001

    def _wait_for(self, message: Pass) -> None:
        """Wait for what another rank sends; what a stage of this rank made is there."""
        for work in self._expected.pop(message, ()):
            work.wait()

    def _forward(self, stage: HookedStage, microbatch: int) -> None:
        index = stage.stage_index
        self._wait_for_weights(stage)
        self._wait_for(Pass(False, index - 1, microbatch))
        args = self._args[microbatch] if stage.is_first else ()
        output = stage.forward_one_chunk(microbatch, args, save_forward_output=False)
        if stage.is_last:
            self._make_loss(stage, output, microbatch)
        elif stage.next_is_here:
            self._stage_of[index + 1].set_local_fwd_input(output, microbatch)

    def _backward(self, stage: HookedStage, microbatch: int, *, split: bool, last: bool) -> None:
        index = stage.stage_index
        self._wait_for_weights(stage)
        self._wait_for(Pass(True, index + 1, microbatch))
        loss = self._loss_to_start_from(microbatch) if stage.is_last else None
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=not split, last_backward=last)
        if index - 1 in self._stage_of:
            gradients = stage.get_local_bwd_output(microbatch)  # type: ignore[no-untyped-call]
            self._stage_of[index - 1].set_local_bwd_input(gradients, microbatch)

    def _run_pair(
        self, parts: Sequence[_Action], calls: Sequence[Callable[[], object] | None]
    ) -> None:
        pair = [
            PairedPass(
                cast("Action", _step_of(part)),
                self._stage_of[part.stage_index].submod,
                cast("Callable[[], object]", call),
            )
            for part, call in zip(parts, calls, strict=True)
        ]
        cast("Overlap", self._overlap)(*pair)
        for one in pair:
            one.expect_run()

    def _recompute(self, stage: HookedStage, microbatch: int) -> None:
        with self._hooks.recompute(stage.stage_index, microbatch):
            args = self._args[microbatch] if stage.is_first else ()
            output = stage.recompute_one_chunk(microbatch, args)
        if stage.is_last:
            self._make_loss(stage, output, microbatch)

    def _unshard(self, stage: HookedStage) -> None:
        """Let FSDP2 begin to gather the weights of a stage."""
        handles = [one.unshard(async_op=True) for one in fsdp_parts(stage.submod)]
        self._unsharding[stage.stage_index] = handles

    def _wait_for_weights(self, stage: HookedStage) -> None:
        for handle in self._unsharding.pop(stage.stage_index, ()):
            handle.wait()

    def _make_loss(self, stage: HookedStage, output: Any, microbatch: int) -> None:
        if not self._trains:
            self._output_of[microbatch] = output
        if self._targets:
            target = self._targets[microbatch]
            given = tensors_in((target, self._loss_kwargs))
            with self._hooks.loss(stage.stage_index, microbatch, given):
                loss_fn = cast("Any", self._loss_fn)
                self._loss_of[microbatch] = loss_fn(output, target, **self._loss_kwargs)
        elif self._output_is_loss:
            self._loss_of[microbatch] = output
        stage.drop_outputs(microbatch)
        self._hooks.end()

    def _loss_to_start_from(self, microbatch: int) -> Tensor:
        loss = self._loss_of[microbatch]
        # The value is kept, its graph is not: it would live to the end of the step.
        self._loss_of[microbatch] = loss.detach()
        return loss / self._loss_divisor if self._loss_divisor > 1 else loss


def _reshard(stage: HookedStage) -> None:
    for one in fsdp_parts(stage.submod):
        one.reshard()


def _makes_gradients(action: _Action) -> bool:
    """Whether it is among what a stage's gradients of a step are complete after."""
    return action.computation_type.name in ("FULL_BACKWARD", "BACKWARD_WEIGHT")


def _itself(output: Tensor) -> Tensor:
    return output


# --- From programs to torch's action lists, and from those to what goes between the ranks.

_TORCH_RUNS = frozenset(ActionType(letter) for letter in "FIWB")
_OF_A_FORWARD = frozenset({"FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD"})


def _torch_actions(program: Program, *, in_pairs: bool) -> list[_Action | None]:
    """Return the actions of a program that torch runs itself."""
    found: list[_Action] = []
    for action in program:
        if action.type not in _TORCH_RUNS:
            continue
        # By name: the values became letters in 2.12.
        torch_action = _Action(action.stage, _ComputationType[action.type.name], action.microbatch)
        if in_pairs and action.paired:
            torch_action = _Action(
                -1, _ComputationType.OVERLAP_F_B, None, (found.pop(), torch_action)
            )
        found.append(torch_action)
    return list(found)


def _parts_of(action: _Action) -> tuple[_Action, ...]:
    """Return the F and the backward of a pair, else the action."""
    return action.sub_actions or (action,)


def _forwards_of(actions: Sequence[_Action]) -> list[_Action]:
    """Return the forwards of torch's list with their sends and receives, in its order.

    They never wait in a circle: their waits are some of those of the list.
    """
    return [action for action in actions if action.computation_type.name in _OF_A_FORWARD]


def order_of(actions: Sequence[_Action]) -> Order:
    """Translate what torch will do; only its passes, sends and receives concern the messages."""
    found = (_step_of(one) for action in actions for one in _parts_of(action))
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


def _with_extra_actions(order: Sequence[_Action], program: Program) -> list[_Action]:
    """Place the actions torch does not know behind the compute they follow in the program.

    Behind its send, too, which would otherwise wait for the transfer that a RELEASE waits for;
    before any receive, behind which they would wait for another rank.
    """
    extras: dict[tuple[int, str, int | None], list[_Action]] = {}
    before: tuple[int, str, int | None] | None = None
    for stage, kind, microbatch, *_ in program:
        if kind in _TORCH_RUNS:
            before = (stage, kind.name, microbatch)
        elif before is not None:
            extra = _Action(stage, cast("_ComputationType", kind), microbatch)
            extras.setdefault(before, []).append(extra)
    placed: list[_Action] = []
    waiting: list[_Action] = []
    for action in order:
        if waiting and not action.computation_type.name.startswith("SEND"):
            placed += waiting
            waiting = []
        placed.append(action)
        for one in _parts_of(action):
            key = (one.stage_index, one.computation_type.name, one.microbatch_index)
            waiting += extras.pop(key, [])
    return placed + waiting


# --- torch's stage.


class HookedStage(PipelineStage):
    """torch's stage with hooks around its passes, holding no boundary tensor longer than needed.

    ``inputs`` and ``outputs`` are the shapes of the boundary tensors of a micro-batch, by its kind,
    ``kinds`` those of all micro-batches. Of DTensors they are this rank's shards: ``spread``
    says how those received lie on its meshes. Where it does not
    train it runs forwards only, and keeps nothing. ``next_is_here`` says whether outputs are handed
    over and not sent;
    ``over_before`` names the sends that are over once a pass has its input, ``let_go`` is called
    with them. ``kwargs`` are a step's keyword inputs by micro-batch; ``gradients_done``, if any, is
    called with the stage's index behind its last W or B. ``slices``: what slices hand on, where
    micro-batches are slices.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        *,
        device: torch.device,
        inputs: Sequence[Shapes],
        outputs: Sequence[Shapes],
        kinds: Sequence[int],
        spread: Spread,
        group: ProcessGroup | None,
        hooks: Passes,
        trains: bool,
    ) -> None:
        super().__init__(
            module,
            index,
            num_stages,
            device,
            input_args=tuple(shape.empty(device) for shape in inputs[0]),
            output_args=tuple(shape.empty(device) for shape in outputs[0]),
            group=group,
            dw_builder=hooks.weight_runner,
        )
        self._hooks = hooks
        self._trains = trains
        self._gets_gradient = [output.requires_grad for output in outputs[0]]
        self._kinds = kinds
        self._blank_inputs, self._sent_back = _blanks_of(inputs)
        self._sent, self._blank_gradients = _blanks_of(outputs)
        self._input_names = [shape.name for shape in inputs[0]]
        self._output_names = [shape.name for shape in outputs[0]]
        self._takes_names = any(self._input_names)
        self._spread = spread
        layouts = [shape.layout for shape in outputs[0]]
        self._layouts = layouts if any(layouts) else ()
        self.kwargs: Sequence[dict[str, Any]] = ()
        self.next_is_here = False
        self.over_before: Mapping[Any, tuple[Pass, ...]] = {}
        self.let_go: Callable[[tuple[Pass, ...]], None]
        self.gradients_done: Callable[[int], None] | None = None
        self.slices: SliceStates | None = None
        self.slots: MessageSlots

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run an F."""
        if over := self.over_before.get((False, self.stage_index, fwd_chunk_id)):
            self.let_go(over)
        infos = self._received(fwd_chunk_id)
        if not self.is_first:
            self.slots.take_out(Pass(False, self.stage_index - 1, fwd_chunk_id), infos)
        kwargs = self.kwargs[fwd_chunk_id]
        inputs = args if self.is_first else [info.buffer for info in infos]
        # Other micro-batches, and other stages of this rank, may be given the same.
        given = tensors_in(kwargs) if kwargs else ()
        sliced = nullcontext() if self.slices is None else self.slices.forward(fwd_chunk_id)
        with self._hooks.forward(self.stage_index, fwd_chunk_id, inputs, given), sliced:
            output = self._run_forward(fwd_chunk_id, args, kwargs, save=save_forward_output)
        self._hooks.see_outputs(self.stage_index, fwd_chunk_id, self.fwd_cache[fwd_chunk_id][0])
        for info in infos:
            info.buffer = None
        if not self.is_last:
            outputs, _ = self.fwd_cache[fwd_chunk_id]
            self._check_gradients(outputs)
            if self.next_is_here:
                self._hollow_out(fwd_chunk_id)
            self._hooks.forward_done(self.stage_index, fwd_chunk_id, outputs)
        return output

    def _run_forward(
        self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, save: bool
    ) -> Any:
        """Run torch's forward; a refusal of ours keeps its type, which torch would hide."""
        try:
            return super().forward_one_chunk(microbatch, args, kwargs, save)
        except RuntimeError as error:
            if isinstance(error.__cause__, OptPipeError):
                raise error.__cause__ from None
            raise

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; what crosses a boundary by name is given and taken by name.

        Of DTensors torch, messages and everything else outside of this call see shards alone.
        """
        forward: Callable[..., Any] = super().forward_maybe_with_nosync
        if self._spread:
            args = received(args, self._spread)
        if self._takes_names:
            output = called(forward, self._input_names, args, kwargs)
        else:
            output = forward(*args, **kwargs)
        if self.is_last or not (self._layouts or isinstance(output, Mapping)):
            return output
        names, outputs = named_tensors(output, f"the output of stage {self.stage_index}")
        if names != tuple(self._output_names):
            raise PreflightError(
                f"stage {self.stage_index} returned {', '.join(names)}, but at first "
                f"{', '.join(self._output_names)}: what crosses a boundary is agreed on once; "
                "return the same, or make another runner"
            )
        return self._shards_of(outputs) if self._layouts else outputs

    def _shards_of(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for position, (output, agreed) in enumerate(zip(outputs, self._layouts, strict=True)):
            what = f"output {position} of stage {self.stage_index}"
            if (found := layout_of(output, what)) != agreed:
                raise PreflightError(
                    f"{what} is {found or 'a plain tensor'}, but {agreed or 'a plain tensor'} was "
                    "agreed on in the first step; keep to it, or give all ranks another bucket="
                )
        return tuple(map(shard_of, outputs))

    def _check_gradients(self, outputs: tuple[Any, ...]) -> None:
        """Refuse outputs that require grad though no gradients of them are sent."""
        for position, (output, blank) in enumerate(zip(outputs, self._gets_gradient, strict=True)):
            if self._trains and output.requires_grad and not blank:
                raise PreflightError(
                    f"output {position} of stage {self.stage_index} requires grad, but did not "
                    "before the first step, when it was agreed what is sent back; unfreeze "
                    "parameters before that, or make another runner"
                )

    def _received(self, microbatch: int) -> tuple[Any, ...]:
        return () if self.is_first else self.args_recv_info[microbatch]

    def recompute_one_chunk(self, microbatch: int, args: tuple[Any, ...]) -> Any:
        """Run an F again, this time for its autograd graph."""
        infos = self._received(microbatch)
        for info, tensor in zip(infos, self.fwd_cache[microbatch][1], strict=False):
            info.buffer = tensor
        kwargs = self.kwargs[microbatch]
        output = self._run_forward(microbatch, args, kwargs, save=False)
        self._hooks.see_outputs(self.stage_index, microbatch, self.fwd_cache[microbatch][0])
        for info in infos:
            info.buffer = None
        if not self.is_last:
            self._check_gradients(self.fwd_cache[microbatch][0])
            self._hollow_out(microbatch)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run an I or a B."""
        if over := self.over_before.get((True, self.stage_index, bwd_chunk_id)):
            self.let_go(over)
        if not self.is_last:
            message = Pass(True, self.stage_index + 1, bwd_chunk_id)
            self.slots.take_out(message, self.grad_recv_info[bwd_chunk_id])
        # Modules that delay weight gradients make them behind a backward, so DDP comes behind it.
        ddp = self.submod if isinstance(self.submod, DistributedDataParallel) else None
        by_us = ddp is not None and last_backward and self._hooks.delays_gradients
        with self._hooks.backward(self.stage_index, bwd_chunk_id, split=not full_backward):
            super().backward_one_chunk(
                bwd_chunk_id, loss, full_backward, last_backward and not by_us
            )
            if ddp is not None and by_us:
                reduce_by_ddp(ddp)
        for info in self.grad_recv_info[bwd_chunk_id]:
            info.buffer = None
        if self.is_first:
            del self.bwd_cache[bwd_chunk_id]
        self._hooks.end()
        if last_backward and self.gradients_done is not None:
            self.gradients_done(self.stage_index)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run a W; with the last one of a stage, DDP reduces the gradients."""
        with self._hooks.weight(self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            add_up_in_reduce_type(self.submod)
            if last_backward and isinstance(self.submod, DistributedDataParallel):
                reduce_by_ddp(self.submod)
        if last_backward and self.gradients_done is not None:
            self.gradients_done(self.stage_index)

    def drop_outputs(self, microbatch: int) -> None:
        """Let go of the last stage's outputs: after the loss only its graph may need them."""
        self._keep(microbatch, ())

    def crossing(self, microbatch: int, *, backward: bool, out: bool) -> tuple[Blank | None, ...]:
        """Return what a message is made of that goes out of this stage, or comes in."""
        if out:
            by_kind = self._sent_back if backward else self._sent
        else:
            by_kind = self._blank_gradients if backward else self._blank_inputs
        return by_kind[self._kinds[microbatch]]

    def put_into(
        self, slot: Sequence[Tensor], message: Pass, blanks: Sequence[Blank | None]
    ) -> None:
        """Copy what a pass has made, and let go of it; where there is no gradient, zeros."""
        microbatch = message.microbatch
        tensors: Any = (
            self.bwd_cache.pop(microbatch) if message.backward else self.fwd_cache[microbatch][0]
        )
        places = iter(slot)
        for tensor, blank in zip(tensors, blanks, strict=True):
            if blank is None:
                continue
            place = next(places)
            if tensor is None:
                place.zero_()
            elif (tensor.shape, tensor.dtype) == blank:
                place.copy_(tensor.detach())
            else:
                raise PreflightError(
                    f"stage {self.stage_index} made a tensor of shape {tuple(tensor.shape)} and "
                    f"{tensor.dtype} to send, but {tuple(blank[0])} and {blank[1]} were agreed on "
                    "in the first step; keep to them, or give all ranks another bucket="
                )
        if not message.backward:
            self._hollow_out(microbatch)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take gradients from the next stage on this rank; where it has none, they are zeros."""
        infos = self.grad_recv_info[mb_index]
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            _fill(infos, self.crossing(mb_index, backward=True, out=False), self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def clear_runtime_states(self) -> None:
        """Forget everything of the step."""
        super().clear_runtime_states()
        self.bwd_cache.clear()
        self.dw_runner.clear()
        if self.slices is not None:
            self.slices.clear()

    def _hollow_out(self, microbatch: int) -> None:
        self._keep(microbatch, hollow(self.fwd_cache[microbatch][0]))

    def _keep(self, microbatch: int, outputs: tuple[Any, ...]) -> None:
        """Hold these in place of a pass's outputs, and nothing where nothing is trained."""
        _, inputs = self.fwd_cache.pop(microbatch)
        if self._trains:
            self.fwd_cache[microbatch] = (outputs, inputs)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        _share(self.args_recv_info, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        _share(self.grad_recv_info, num_microbatches)


_Blanks = list[tuple["Blank | None", ...]]
"""Tensors of a message, by the kind of its micro-batch."""


def _blanks_of(shapes: Sequence[Shapes]) -> tuple[_Blanks, _Blanks]:
    """Return what crosses a boundary forward, and what of it has gradients that come back."""
    ahead: _Blanks = []
    back: _Blanks = []
    for one in shapes:
        blanks = tuple((torch.Size(shape.size), shape.dtype) for shape in one)
        ahead.append(blanks)
        pairs = zip(one, blanks, strict=True)
        back.append(tuple(blank if shape.requires_grad else None for shape, blank in pairs))
    return ahead, back


def _share(infos_of: dict[int, tuple[Any, ...]], num_microbatches: int) -> None:
    """Give all micro-batches the receives of the first, without memory."""
    first = infos_of[0]
    for microbatch in range(num_microbatches):
        copies = tuple(copy.copy(info) for info in first)
        for info in copies:
            info.buffer = None
        infos_of[microbatch] = copies


def _fill(infos: tuple[Any, ...], blanks: tuple[Any, ...], device: torch.device) -> None:
    for info, blank in zip(infos, blanks, strict=True):
        if blank is not None:
            size, dtype = blank
            info.buffer = torch.empty(size, dtype=dtype, device=device)


# --- Outputs without their memory: what is left of a tensor that has been sent.
# The backward of a stage starts from its outputs, but needs only their place in the autograd graph
# and their shapes. A hollow tensor has both, over one element of memory, so that an output's
# storage is free as soon as the next stage has it, unless autograd itself saved it.


def hollow(outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return stand-ins for outputs; a backward from them is one from the outputs.

    What needs no gradient is replaced by an empty tensor, which no backward looks at.
    """
    return tuple(_hollow(output) if isinstance(output, Tensor) else output for output in outputs)


def _hollow(output: Tensor) -> Tensor:
    if not output.requires_grad:
        return output.new_empty(0)
    if type(output) is not Tensor:
        # A subclass knows more than shape and memory.
        return output
    # An alias, since the graph may hold the output itself as what another operation has read.
    alias = alias_no_view(output)
    alias.data = output.new_empty_strided(output.shape, (0,) * output.dim())
    return alias
