"""Every private name of torch.distributed that the runtime stands on, and nothing else.

torch's own `PipelineStage` and schedule runtime execute the program: they place sends and receives,
wait for them, and run the passes. Two subclasses hand each pass to `PassHooks`, and the actions
torch does not know are placed into its list. Written against torch 2.12 and 2.13;
`optpipe.runtime.requirements` refuses others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from optpipe.action import Action, ActionType, Program, Programs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

__all__ = [
    "HookedSchedule",
    "HookedStage",
    "PassHooks",
    "default_store",
    "has_gradient_hooks",
]

_TORCH_RUNS = frozenset(
    {
        ActionType.FORWARD,
        ActionType.BACKWARD_INPUT,
        ActionType.BACKWARD_WEIGHT,
        ActionType.FULL_BACKWARD,
    }
)


class PassHooks(Protocol):
    """What happens around the passes torch runs, and the actions it does not know."""

    def forward(
        self, stage: int, microbatch: int, inputs: Sequence[Tensor]
    ) -> AbstractContextManager[None]:
        """Surround an F."""

    def forward_done(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """See the outputs that an F sends on."""

    def loss(self, stage: int, microbatch: int, target: Any) -> AbstractContextManager[None]:
        """Surround the loss of a micro-batch, after the last stage's F."""

    def backward(self, stage: int, microbatch: int, *, split: bool) -> AbstractContextManager[None]:
        """Surround an I (split) or a B."""

    def weight_runner(self) -> Callable[[], None]:
        """Return what the W of the backward just run has to do; called inside `backward`."""

    def recompute(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Surround a RECOMPUTE's forward and loss."""

    def transfer(self, action: Action) -> None:
        """Run an OFFLOAD, RELEASE or RELOAD."""


class HookedStage(PipelineStage):
    """torch's stage with hooks around its passes."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        *,
        device: torch.device,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        group: ProcessGroup | None,
        hooks: PassHooks,
    ) -> None:
        super().__init__(
            module,
            index,
            num_stages,
            device,
            input_args=inputs,
            output_args=outputs,
            group=group,
            dw_builder=hooks.weight_runner,
        )
        self._hooks = hooks

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run an F."""
        inputs = args if self.is_first else self._received(fwd_chunk_id)
        with self._hooks.forward(self.stage_index, fwd_chunk_id, inputs):
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self.is_last:
            outputs, _ = self.fwd_cache[fwd_chunk_id]
            self._hooks.forward_done(self.stage_index, fwd_chunk_id, outputs)
        return output

    def recompute_one_chunk(
        self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Run an F again, this time for its autograd graph."""
        return super().forward_one_chunk(microbatch, args, kwargs, save_forward_output=False)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run an I or a B."""
        with self._hooks.backward(self.stage_index, bwd_chunk_id, split=not full_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def drop_outputs(self, microbatch: int) -> None:
        """Let go of the last stage's outputs: after the loss only its graph may need them."""
        _, inputs = self.fwd_cache[microbatch]
        self.fwd_cache[microbatch] = ((), inputs)

    def _received(self, microbatch: int) -> tuple[Tensor, ...]:
        infos = self.args_recv_info[microbatch]
        return tuple(info.buffer for info in infos if info.buffer is not None)


class HookedSchedule(_PipelineScheduleRuntime):
    """torch's schedule runtime running one set of programs.

    Losses are kept by micro-batch: torch keeps them in the order in which the last stage ran, and
    takes the wrong one where that is another. Each is divided by the number of micro-batches
    before its backward, so that gradients add up over steps, which torch's division of
    ``.grad`` at the end of a step would divide again.
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
        self._hooks = hooks
        self._loss_divisor = loss_divisor
        self._loss_of: dict[int, Tensor] = {}
        self._stage_of = {stage.stage_index: stage for stage in stages}
        self._prepare_schedule_with_comms(
            {rank: _torch_actions(program) for rank, program in enumerate(programs)}
        )
        own = self.pipeline_order_with_comms
        own[self.rank] = _with_extra_actions(own[self.rank], programs[self.rank])
        functions = cast("dict[Any, Callable[..., None]]", self._comp_type_to_function_map)
        functions[ActionType.RECOMPUTE] = self._recompute
        for kind in (ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD):
            functions[kind] = self._transfer

    def run(self, args: tuple[Any, ...], target: Any) -> list[Tensor]:
        """Run the programs once; return the losses in micro-batch order, where the last stage is.

        Parameters
        ----------
        args
            The whole batch, where the first stage is, else ().
        target
            The whole target, where the last stage is, else None.
        """
        losses: list[Tensor] = []
        self._loss_of.clear()
        self.step(*args, target=target, losses=losses, return_outputs=False)
        return losses

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
        if not stage.is_last or self._loss_fn is None:
            return
        target = target_mbs[mb_index]
        with self._hooks.loss(stage.stage_index, mb_index, target):
            self._loss_of[mb_index] = self._loss_fn(output, target)
        stage.drop_outputs(mb_index)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        if not stage.is_last:
            return None
        loss = self._loss_of[mb_index]
        # The value is kept, its graph is not: it would live to the end of the step.
        self._loss_of[mb_index] = loss.detach()
        return loss / self._loss_divisor

    def _update_losses(self, _stages: Any, losses: Any) -> None:
        losses.extend(self._loss_of[microbatch] for microbatch in sorted(self._loss_of))
        self._loss_of.clear()


def _torch_actions(program: Program) -> list[_Action | None]:
    # By name: the values became letters in 2.12.
    return [
        _Action(action.stage, _ComputationType[action.type.name], action.microbatch)
        for action in program
        if action.type in _TORCH_RUNS
    ]


def _with_extra_actions(order: Sequence[_Action], program: Program) -> list[_Action]:
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


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether somebody (DDP, a user) waits for autograd to make this parameter's gradient."""
    return bool(getattr(parameter, "_backward_hooks", None)) or bool(
        getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def default_store() -> Store:
    """Return the key-value store through which the ranks found each other."""
    return distributed_c10d._get_default_store()  # noqa: SLF001
