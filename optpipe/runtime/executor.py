"""Executes one rank's program: a loop over its instructions, with a function for each kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.errors import PreflightError
from optpipe.runtime.batches import tensors_in
from optpipe.runtime.lowering import (
    Instruction,
    OverlappedPair,
    ReduceGradients,
    Reshard,
    Unshard,
    lower,
    makes_gradients,
    messages_of,
    range_name,
    with_weights,
)
from optpipe.runtime.messages import (
    MessageSend,
    MessageSlots,
    Order,
    Receive,
    sends_over_before,
    slots_of,
    window_of,
)
from optpipe.runtime.overlap import PairedPass
from optpipe.runtime.torch_names import fsdp_parts, is_profiled, tree_map
from optpipe.schedule import Action, ActionType, Pass, input_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup, Work

    from optpipe.runtime.batches import Microbatches
    from optpipe.runtime.messages import Blank
    from optpipe.runtime.overlap import Overlap
    from optpipe.runtime.passes import Passes
    from optpipe.runtime.stage_executor import StageExecutor
    from optpipe.schedule import Programs

__all__ = ["Executor"]

_NEIGHBOURS = 4
"""Instructions that an error shows before and after the failed one."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of this rank, and the sends that must end before it."""

    message: Pass
    stage: StageExecutor
    blanks: Sequence[Blank | None]
    peer: int
    over_before: tuple[Pass, ...]


@dataclass(frozen=True, slots=True)
class _Pass:
    """An F, I, W, B or RECOMPUTE of this rank, with the facts that no step changes."""

    action: Action
    stage: StageExecutor
    input: Pass | None
    over_before: tuple[Pass, ...]
    is_last: bool
    """Whether it completes the gradients of its stage."""


@dataclass(slots=True)
class _RunningStep:
    """The inputs and tensors of the running step."""

    args: Sequence[Any]
    targets: Sequence[Any]
    loss_kwargs: Mapping[str, Any]
    keeps_outputs: bool
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    sends: dict[Pass, list[Work]] = field(default_factory=dict)
    receives: dict[Pass, tuple[list[Work], list[Tensor | None]]] = field(default_factory=dict)
    handed_over: dict[Pass, Sequence[Tensor | None]] = field(default_factory=dict)
    """Tensors that one stage of this rank passes to another stage of this rank."""
    gathering: dict[int, list[Any]] = field(default_factory=dict)
    position: int = 0
    """Index of the running instruction."""


_NOTHING = _RunningStep((), (), {}, False)


class Executor:
    """Runs one rank's program of a schedule, step after step.

    Losses are kept by micro-batch. Each is divided by ``loss_divisor`` before its backward (0 =
    forwards only), so that gradients add up over steps. Sends end where they are known to be over
    (`optpipe.runtime.messages`), so the memory in flight depends on the programs alone.

    ``loss_fn`` maps (output of the last stage, target) to a scalar; None: the last stage returns
    the loss. ``overlap`` runs the two passes of a pair; without it they run one after the other.
    ``gradients_done`` is called with a stage's index when its gradients of a step are complete.
    ``group`` carries the messages, ``pool`` is the memory of those of an earlier schedule.

    Attributes
    ----------
    orders
        Passes, sends and receives of every rank.
    slots
        Where the tensors of messages lie.
    """

    def __init__(
        self,
        stages: Sequence[StageExecutor],
        programs: Programs,
        placement: Sequence[int],
        *,
        rank: int,
        device: torch.device,
        group: ProcessGroup | None,
        loss_fn: Callable[..., Tensor] | None,
        loss_divisor: int,
        passes: Passes,
        bytes_of: Callable[[Pass], int],
        gradients_done: Callable[[int], None] | None = None,
        overlap: Overlap | None = None,
        pool: MessageSlots | None = None,
    ) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._placement = placement
        self._group = group
        self._loss_fn = loss_fn
        self._loss_divisor = loss_divisor
        self._trains = trains = loss_divisor > 0
        self._passes = passes
        self._overlap = overlap
        self._gradients_done = gradients_done
        lowered = lower(programs, placement, trains=trains, in_pairs=overlap is not None)
        self.orders: tuple[Order, ...] = tuple(map(messages_of, lowered))
        window = window_of(len(placement), trains=trains)
        before = sends_over_before(self.orders, placement, window)[rank]
        self.slots = MessageSlots(
            *slots_of(self.orders[rank], before, len(placement), bytes_of), device, pool
        )
        sharded = {stage.index for stage in stages if fsdp_parts(stage.module)}
        self._instructions = with_weights(lowered[rank], sharded)
        self._known = self._look_up(before)
        self._step = _NOTHING

    def _look_up(
        self, before: Mapping[Action | MessageSend | Receive, tuple[Pass, ...]]
    ) -> dict[Instruction, _Pass | _Message]:
        """Return the facts of each pass and message that the loop reads in every step."""
        actions = [
            action
            for one in self._instructions
            for action in (one if isinstance(one, OverlappedPair) else (one,))
        ]
        left = Counter(
            one.stage for one in actions if isinstance(one, Action) and makes_gradients(one)
        )
        known: dict[Instruction, _Pass | _Message] = {}
        for one in actions:
            if isinstance(one, Action) and one.type.is_compute:
                if makes_gradients(one):
                    left[one.stage] -= 1
                known[one] = _Pass(
                    one,
                    self._stages[one.stage],
                    input_of(one, len(self._placement)),
                    before.get(one, ()),
                    is_last=makes_gradients(one) and not left[one.stage],
                )
            elif isinstance(one, MessageSend | Receive):
                message, sends = one.message, isinstance(one, MessageSend)
                index, other = message.stage, message.reader
                if not sends:
                    index, other = other, index
                stage = self._stages[index]
                known[one] = _Message(
                    message,
                    stage,
                    stage.crossing(message.microbatch, backward=message.backward, out=sends),
                    self._placement[other],
                    before.get(one, ()) if sends else (),
                )
        return known

    def run(
        self,
        microbatches: Microbatches,
        kwargs: Mapping[int, Sequence[dict[str, Any]]],
        *,
        keeps_outputs: bool,
    ) -> tuple[list[Tensor], list[Any]]:
        """Run the program once; ``kwargs`` are the keyword inputs of each stage, by micro-batch.

        On the last stage's rank, return the losses by micro-batch, if there are any. With
        ``keeps_outputs`` also return the detached outputs. Other ranks return two empty lists.
        """
        self.slots.begin()
        step = self._step = _RunningStep(
            microbatches.args, microbatches.targets, microbatches.loss_kwargs, keeps_outputs
        )
        for index, stage in self._stages.items():
            stage.clear()
            stage.kwargs = kwargs[index]
        profiled = is_profiled()
        try:
            for position, instruction in enumerate(self._instructions):
                step.position = position
                if profiled:
                    with torch.profiler.record_function(range_name(instruction)):
                        self._execute(instruction)
                else:
                    self._execute(instruction)
        except Exception as error:
            first = max(0, step.position - _NEIGHBOURS)
            following = step.position + _NEIGHBOURS + 1
            shown = [
                f"[{one}]" if index == step.position else str(one)
                for index, one in enumerate(self._instructions[first:following], start=first)
            ]
            error.add_note(
                f"in instruction {step.position} of {len(self._instructions)} of this rank's "
                f"program, marked by brackets: {', '.join(shown)}"
            )
            raise
        self.let_go(tuple(step.sends))
        for stage in self._stages.values():
            stage.clear()
        self._step = _NOTHING
        losses = [step.losses[microbatch] for microbatch in sorted(step.losses)]
        outputs = [step.outputs[microbatch] for microbatch in sorted(step.outputs)]
        return losses, outputs

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case MessageSend():
                self._send(cast("_Message", self._known[instruction]))
            case Receive():
                self._receive(cast("_Message", self._known[instruction]))
            case OverlappedPair():
                self._run_pair(instruction)
            case Unshard(stage):
                parts = fsdp_parts(self._stages[stage].module)
                self._step.gathering[stage] = [part.unshard(async_op=True) for part in parts]
            case Reshard(stage):
                for part in fsdp_parts(self._stages[stage].module):
                    part.reshard()
            case ReduceGradients(stage):
                self._stages[stage].reduce_gradients()
            case Action(_, ActionType.OFFLOAD | ActionType.RELEASE | ActionType.RELOAD):
                self._passes.transfer(instruction)
            case Action():
                self._compute(instruction)

    def _compute(self, action: Action) -> None:
        known = cast("_Pass", self._known[action])
        for handle in self._step.gathering.pop(action.stage, ()):
            handle.wait()
        match action.type:
            case ActionType.FORWARD:
                self._forward(known)
            case ActionType.BACKWARD_INPUT:
                self._backward(known, split=True)
            case ActionType.FULL_BACKWARD:
                self._backward(known, split=False)
            case ActionType.BACKWARD_WEIGHT:
                known.stage.weight(action.microbatch, is_last=known.is_last)
            case ActionType.RECOMPUTE:
                self._recompute(known)
        if known.is_last and self._gradients_done is not None:
            self._gradients_done(action.stage)

    # --- Passes.

    def _forward(self, known: _Pass) -> None:
        stage, microbatch = known.stage, known.action.microbatch
        inputs = self._inputs_of(known)
        output = stage.forward(microbatch, inputs)
        del inputs
        if stage.is_last and self._trains and self._passes.is_recomputed(stage.index, microbatch):
            # A loss may have buffers, or count its calls: only the RECOMPUTE calls it.
            self._passes.end()
        elif stage.is_last:
            self._make_loss(stage, output, microbatch)
        elif stage.index + 1 in self._stages:
            message = Pass(False, stage.index, microbatch)
            self._step.handed_over[message] = stage.hand_over(microbatch)

    def _recompute(self, known: _Pass) -> None:
        stage, microbatch = known.stage, known.action.microbatch
        with self._passes.recompute(stage.index, microbatch):
            args = self._step.args[microbatch] if stage.is_first and self._step.args else ()
            output = stage.recompute(microbatch, args)
        if stage.is_last:
            self._make_loss(stage, output, microbatch)

    def _backward(self, known: _Pass, *, split: bool) -> None:
        stage, microbatch = known.stage, known.action.microbatch
        loss: Tensor | None = None
        gradients: Sequence[Any] = ()
        if stage.is_last:
            loss = self._step.losses[microbatch]
            # The value stays until the end of the step. Its graph must not.
            self._step.losses[microbatch] = loss.detach()
            loss = loss / self._loss_divisor if self._loss_divisor > 1 else loss
            self.let_go(known.over_before)
        else:
            gradients = self._inputs_of(known)
        stage.backward(microbatch, loss, gradients, split=split, is_last=known.is_last)
        del gradients, loss
        if stage.index - 1 in self._stages:
            message = Pass(True, stage.index, microbatch)
            blanks = self._stages[stage.index - 1].crossing(microbatch, backward=True, out=False)
            self._step.handed_over[message] = [
                torch.zeros(blank[0], dtype=blank[1], device=self.slots.device)
                if tensor is None and blank is not None
                else tensor
                for tensor, blank in zip(stage.hand_back(microbatch), blanks, strict=True)
            ]

    def _run_pair(self, both: OverlappedPair) -> None:
        pair = [
            PairedPass(one, self._stages[one.stage].module, partial(self._compute, one))
            for one in both
        ]
        cast("Overlap", self._overlap)(*pair)
        for one in pair:
            one.expect_run()

    def _make_loss(self, stage: StageExecutor, output: Any, microbatch: int) -> None:
        step = self._step
        if step.keeps_outputs:
            step.outputs[microbatch] = tree_map(_without_graph, output)
        if step.targets:
            target = step.targets[microbatch]
            given = tensors_in((target, step.loss_kwargs))
            with self._passes.loss(stage.index, microbatch, given):
                loss_fn = cast("Any", self._loss_fn)
                step.losses[microbatch] = loss_fn(output, target, **step.loss_kwargs)
        elif self._loss_fn is None:
            step.losses[microbatch] = output
        if self._trains and not isinstance(loss := step.losses[microbatch], Tensor):
            raise PreflightError(
                f"the loss of micro-batch {microbatch} is a {type(loss).__name__}, but a tensor is "
                "needed; return the loss alone, and keep metrics elsewhere, for example in an "
                "attribute of the loss function"
            )
        self._passes.end()

    # --- Messages.

    def _inputs_of(self, known: _Pass) -> Sequence[Any]:
        """Return the inputs of a pass, and wait for them if another rank sends them."""
        step, needed = self._step, known.input
        if needed is None:
            self.let_go(known.over_before)
            return step.args[known.action.microbatch] if step.args else ()
        if needed in step.handed_over:
            self.let_go(known.over_before)
            return step.handed_over.pop(needed)
        works, tensors = step.receives.pop(needed)
        for work in works:
            work.wait()
        self.let_go(known.over_before)
        copies = [None if tensor is None else tensor.clone() for tensor in tensors]
        self.slots.give_back(needed)
        return copies

    def _send(self, known: _Message) -> None:
        message = known.message
        self.let_go(known.over_before)
        places = self.slots.take(message, known.blanks)
        known.stage.put_into(places, message.microbatch, backward=message.backward)
        self._step.sends[message] = [
            cast("Work", dist.isend(place, group=self._group, group_dst=known.peer))
            for place in places
        ]

    def _receive(self, known: _Message) -> None:
        places = self.slots.take(known.message, known.blanks)
        works = [
            cast("Work", dist.irecv(place, group=self._group, group_src=known.peer))
            for place in places
        ]
        left = iter(places)
        tensors = [None if blank is None else next(left) for blank in known.blanks]
        self._step.receives[known.message] = works, tensors

    def let_go(self, messages: Sequence[Pass]) -> None:
        """Wait until these have been sent, and free their memory."""
        for message in messages:
            for work in self._step.sends.pop(message):
                work.wait()
            self.slots.give_back(message)


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
