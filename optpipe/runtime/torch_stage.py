"""torch's stage: hooks around its passes, and no boundary tensor longer than needed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from optpipe.runtime.torch_names import alias_no_view

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.distributed import ProcessGroup

    from optpipe.runtime.passes import PassHooks
    from optpipe.schedule import Pass

__all__ = ["HookedStage", "hollow"]


class HookedStage(PipelineStage):
    """torch's stage with hooks around its passes, holding no boundary tensor longer than needed.

    Parameters
    ----------
    hooks
        Called around every pass.
    inputs, outputs
        Examples of the boundary tensors of one micro-batch; only their shapes are kept.
    trains
        False: forwards only, of which nothing is kept.

    Attributes
    ----------
    next_is_here
        Whether the next stage is on this rank, so that outputs are handed over and not sent.
    over_before, let_go
        The sends that are over once a pass has its input, and what to call with them.
    """

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
        trains: bool = True,
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
        self._trains = trains
        self.next_is_here = False
        self.over_before: Mapping[Any, tuple[Pass, ...]] = {}
        self.let_go: Callable[[tuple[Pass, ...]], None] = _keep
        self._blank_inputs: tuple[Any, ...] = ()
        self._blank_gradients: tuple[Any, ...] = ()

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
        infos = () if self.is_first else self.args_recv_info[fwd_chunk_id]
        inputs: Any = args if self.is_first else [info.buffer for info in infos]
        with self._hooks.forward(self.stage_index, fwd_chunk_id, inputs):
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        for info in infos:
            info.buffer = None
        if not self.is_last:
            outputs, _ = self.fwd_cache[fwd_chunk_id]
            if self.next_is_here:
                self._hollow_out(fwd_chunk_id)
            self._hooks.forward_done(self.stage_index, fwd_chunk_id, outputs)
        return output

    def recompute_one_chunk(
        self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Run an F again, this time for its autograd graph."""
        infos = () if self.is_first else self.args_recv_info[microbatch]
        for info, held in zip(infos, self.fwd_cache[microbatch][1], strict=False):
            info.buffer = held
        output = super().forward_one_chunk(microbatch, args, kwargs, save_forward_output=False)
        for info in infos:
            info.buffer = None
        if not self.is_last:
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
        with self._hooks.backward(self.stage_index, bwd_chunk_id, split=not full_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for info in self.grad_recv_info[bwd_chunk_id]:
            info.buffer = None
        if self.is_first:
            del self.bwd_cache[bwd_chunk_id]
        self._hooks.backward_done()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run a W."""
        with self._hooks.weight(self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def drop_outputs(self, microbatch: int) -> None:
        """Let go of the last stage's outputs: after the loss only its graph may need them."""
        _, inputs = self.fwd_cache[microbatch]
        self.fwd_cache[microbatch] = ((), inputs)
        self._forget_unless_training(microbatch)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """Allocate what an F needs, and return its receives."""
        _fill(self.args_recv_info[fwd_chunk_id], self._blank_inputs, self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """Allocate the gradients a backward needs, and return their receives."""
        _fill(self.grad_recv_info[bwd_chunk_id], self._blank_gradients, self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """Return the sends of an F; from here on only they hold its outputs."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        self._hollow_out(fwd_chunk_id)
        return operations

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take gradients from the next stage on this rank; where it has none, they are zeros."""
        infos = self.grad_recv_info[mb_index]
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            _fill(infos, self._blank_gradients, self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def clear_runtime_states(self) -> None:
        """Forget everything of the step."""
        super().clear_runtime_states()
        self.bwd_cache.clear()
        self.dw_runner.clear()

    def _hollow_out(self, microbatch: int) -> None:
        outputs, inputs = self.fwd_cache[microbatch]
        self.fwd_cache[microbatch] = (hollow(outputs), inputs)
        self._forget_unless_training(microbatch)

    def _forget_unless_training(self, microbatch: int) -> None:
        if not self._trains:
            del self.fwd_cache[microbatch]

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self._blank_inputs = _blank(self.args_recv_info, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self._blank_gradients = _blank(self.grad_recv_info, num_microbatches)


def _keep(messages: tuple[Pass, ...]) -> None:
    """Let go of nothing: no schedule runs this stage yet."""


def _blank(infos_of: dict[int, tuple[Any, ...]], num_microbatches: int) -> tuple[Any, ...]:
    """Give all micro-batches the receives of the first, without memory; return its shapes."""
    first = infos_of[0]
    blanks = tuple(
        None if info.buffer is None else (info.buffer.size(), info.buffer.dtype) for info in first
    )
    for microbatch in range(num_microbatches):
        copies = tuple(copy.copy(info) for info in first)
        for info in copies:
            info.buffer = None
        infos_of[microbatch] = copies
    return blanks


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
        # A subclass (DTensor) knows more than shape and memory.
        return output
    # An alias, since the graph may hold the output itself as what another operation has read.
    alias = alias_no_view(output)
    alias.data = output.new_empty_strided(output.shape, (0,) * output.dim())
    return alias
