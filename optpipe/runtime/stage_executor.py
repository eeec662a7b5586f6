"""Runs the passes of one stage, and holds its boundary tensors between them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import PreflightError
from optpipe.runtime.batches import tensors_in
from optpipe.runtime.messages import layout_of, shard_of
from optpipe.runtime.preflight import called, named_tensors, received
from optpipe.runtime.torch_names import (
    FsdpReduction,
    alias_no_view,
    prepare_ddp_reduction,
    reduce_by_ddp,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from optpipe.runtime.messages import Blank
    from optpipe.runtime.passes import Passes
    from optpipe.runtime.preflight import Shapes, Spread
    from optpipe.runtime.slices import SliceStates

__all__ = ["StageExecutor", "hollow"]


class StageExecutor:
    """Runs the passes of a stage, and frees each boundary tensor as early as possible.

    ``inputs`` and ``outputs`` are the shapes of the boundary tensors of a micro-batch, by its kind,
    ``kinds`` the kind of each micro-batch. Of DTensors the shapes are those of this rank's shards,
    and ``spread`` says how received ones lie on this rank's meshes. Without ``trains`` no backwards
    follow, and nothing is kept. ``slices`` has keys and values for later slices.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        *,
        inputs: Sequence[Shapes],
        outputs: Sequence[Shapes],
        kinds: Sequence[int],
        spread: Spread,
        passes: Passes,
        trains: bool,
        slices: SliceStates | None = None,
    ) -> None:
        self.module = module
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.kwargs: Sequence[dict[str, Any]] = ()
        """Keyword inputs of the step that runs, by micro-batch."""
        self._passes = passes
        self._trains = trains
        self._slices = slices
        self._kinds = kinds
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        self._fsdp = FsdpReduction(module) if isinstance(module, FSDPModule) else None
        self._takes_gradient = [shape.requires_grad for shape in inputs[0]]
        self._gets_gradient = [shape.requires_grad for shape in outputs[0]]
        # DDP waits for the gradient of every parameter, so there zeros stay zeros.
        self._perhaps_unused = {
            position
            for position, shapes in enumerate(zip(*outputs, strict=True))
            if self._ddp is None and not all(shape.is_used for shape in shapes)
        }
        self._blank_inputs, self._sent_back = _blanks_of(inputs)
        self._sent, self._blank_gradients = _blanks_of(outputs)
        self._input_names = [shape.name for shape in inputs[0]]
        self._output_names = [shape.name for shape in outputs[0]]
        self._spread = spread
        layouts = [shape.layout for shape in outputs[0]]
        self._layouts = layouts if any(layouts) else ()
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Any, ...]] = {}
        self._input_gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._weight_passes: dict[int, Callable[[], None]] = {}

    # --- Passes.

    def forward(self, microbatch: int, inputs: Sequence[Any]) -> Any:
        """Run an F on its positional inputs; return what the module returned, shards of DTensors.

        Received tensors become leaves of the autograd graph of this stage.
        """
        if not self.is_first:
            self._require_gradients(inputs)
        kwargs = self.kwargs[microbatch]
        # Other micro-batches, and other stages of this rank, may be given the same.
        given = tensors_in(kwargs) if kwargs else ()
        sliced = nullcontext() if self._slices is None else self._slices.forward(microbatch)
        with self._passes.forward(self.index, microbatch, inputs, given), sliced:
            output = self._call(inputs, kwargs)
        outputs = _as_tuple(output)
        self._passes.see_outputs(self.index, microbatch, outputs)
        if self._trains:
            self._inputs[microbatch] = () if self.is_first else tuple(inputs)
        if self.is_last:
            return output
        self._check_gradients(outputs)
        self._outputs[microbatch] = outputs
        self._passes.forward_done(self.index, microbatch, outputs)
        return outputs

    def recompute(self, microbatch: int, args: Sequence[Any]) -> Any:
        """Run an F again, this time for its autograd graph."""
        inputs = args if self.is_first else self._inputs[microbatch]
        if not self.is_first:
            self._require_gradients(inputs)
        output = self._call(inputs, self.kwargs[microbatch])
        outputs = _as_tuple(output)
        self._passes.see_outputs(self.index, microbatch, outputs)
        if not self.is_last:
            self._check_gradients(outputs)
            self._outputs[microbatch] = hollow(outputs)
        return output

    def backward(
        self,
        microbatch: int,
        loss: Tensor | None,
        gradients: Sequence[Tensor | None],
        *,
        split: bool,
        is_last: bool,
    ) -> None:
        """Run an I (``split``) or a B from the loss, or from the gradients of the outputs.

        ``is_last`` says that the gradients of the stage's parameters are complete after it.
        """
        # Modules that delay weight gradients make them after the backward, so DDP comes after it.
        follows = self._ddp if is_last and self._passes.gradients.delaying else None
        with self._passes.backward(self.index, microbatch, split=split):
            if self.is_last:
                roots: list[Tensor] = [] if loss is None else [loss]
                from_roots: list[Tensor | None] | None = None
            else:
                outputs = self._outputs.pop(microbatch)
                chosen = [
                    position
                    for position, (output, gradient) in enumerate(
                        zip(outputs, gradients, strict=True)
                    )
                    if output.requires_grad
                    # Parameters of an output that is not used have no gradient in one process.
                    and (
                        position not in self._perhaps_unused
                        or (gradient is not None and bool(gradient.any()))
                    )
                ]
                roots = [outputs[position] for position in chosen]
                from_roots = [gradients[position] for position in chosen]
                del outputs
            # FSDP2 reduces by an instruction of its own; DDP reduces in the last B.
            reduction: AbstractContextManager[object] = nullcontext()
            if self._fsdp is not None:
                self._fsdp.hold_back()
            if self._ddp is not None and is_last and follows is None:
                prepare_ddp_reduction(self._ddp, roots)
            elif self._ddp is not None:
                reduction = self._ddp.no_sync()
            with reduction:
                self._passes.gradients.run_backward(roots, from_roots)
            inputs = self._inputs.pop(microbatch)
            if not self.is_first:
                self._input_gradients[microbatch] = tuple(one.grad for one in inputs)
                for one in inputs:
                    one.grad = None
            weights = self._passes.gradients.take()
            if split:
                self._weight_passes[microbatch] = weights
            else:
                weights()
            if follows is not None:
                reduce_by_ddp(follows)
        self._passes.end()

    def weight(self, microbatch: int, *, is_last: bool) -> None:
        """Run a W; after the last one of a step DDP reduces the gradients."""
        with self._passes.weight(self.index, microbatch):
            self._weight_passes.pop(microbatch)()
            if self._fsdp is not None:
                self._fsdp.take_over()
            if is_last and self._ddp is not None:
                reduce_by_ddp(self._ddp)

    def reduce_gradients(self) -> None:
        """Let FSDP2 reduce the complete gradients of a step."""
        if self._fsdp is not None:
            self._fsdp.reduce()

    def _call(self, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the module; return its output, and of what is sent the tensors, shards of DTensors.

        Outside of this call everything is a plain tensor.
        """
        inputs = received(inputs, self._spread) if self._spread else inputs
        alone = nullcontext() if self._ddp is None else self._ddp.no_sync()
        with alone:
            output = called(self.module, self._input_names, inputs, kwargs)
        if self.is_last or not (self._layouts or isinstance(output, Mapping)):
            return output
        names, outputs = named_tensors(output, f"the output of stage {self.index}")
        if names != tuple(self._output_names):
            raise PreflightError(
                f"stage {self.index} returned {', '.join(names)}, but in the first step "
                f"{', '.join(self._output_names)}: the ranks agree once on what crosses a "
                "boundary; return the same tensors, or make another runner"
            )
        return self._shards_of(outputs) if self._layouts else outputs

    def _require_gradients(self, inputs: Sequence[Tensor]) -> None:
        trains = self._trains and torch.is_grad_enabled()
        for tensor, takes_gradient in zip(inputs, self._takes_gradient, strict=True):
            tensor.requires_grad_(takes_gradient and trains)

    def _shards_of(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for position, (output, agreed) in enumerate(zip(outputs, self._layouts, strict=True)):
            what = f"output {position} of stage {self.index}"
            if (found := layout_of(output, what)) != agreed:
                raise PreflightError(
                    f"{what} is {found or 'a plain tensor'}, but {agreed or 'a plain tensor'} was "
                    "agreed on in the first step; keep to it, or give all ranks another bucket="
                )
        return tuple(map(shard_of, outputs))

    def _check_gradients(self, outputs: tuple[Any, ...]) -> None:
        """Refuse outputs that require grad though no gradients of them are sent."""
        for position, (output, agreed) in enumerate(zip(outputs, self._gets_gradient, strict=True)):
            if self._trains and output.requires_grad and not agreed:
                raise PreflightError(
                    f"output {position} of stage {self.index} requires grad, but did not "
                    "before the first step, when it was agreed what is sent back; unfreeze "
                    "parameters before that, or make another runner"
                )

    # --- Boundary tensors.

    def crossing(self, microbatch: int, *, backward: bool, out: bool) -> tuple[Blank | None, ...]:
        """Return sizes and types of the tensors of a message that this stage sends or receives.

        A tensor without a gradient has None.
        """
        if out:
            by_kind = self._sent_back if backward else self._sent
        else:
            by_kind = self._blank_gradients if backward else self._blank_inputs
        return by_kind[self._kinds[microbatch]]

    def hand_over(self, microbatch: int) -> list[Tensor]:
        """Return the outputs of an F for the next stage on this rank, and keep their graph only."""
        outputs = [output.detach() for output in self._outputs[microbatch]]
        self._let_go_of_outputs(microbatch)
        return outputs

    def hand_back(self, microbatch: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs for the previous stage on this rank."""
        return self._input_gradients.pop(microbatch)

    def put_into(self, slot: Sequence[Tensor], microbatch: int, *, backward: bool) -> None:
        """Copy outputs or the gradients of inputs into the tensors of a message.

        Of outputs only the graph is kept. A gradient that does not exist is sent as zeros.
        """
        tensors: Sequence[Tensor | None] = (
            self._input_gradients.pop(microbatch) if backward else self._outputs[microbatch]
        )
        blanks = self.crossing(microbatch, backward=backward, out=True)
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
                    f"stage {self.index} made a tensor of shape {tuple(tensor.shape)} and "
                    f"{tensor.dtype} to send, but {tuple(blank[0])} and {blank[1]} were agreed on "
                    "in the first step; keep to them, or give all ranks another bucket="
                )
        if not backward:
            self._let_go_of_outputs(microbatch)

    def _let_go_of_outputs(self, microbatch: int) -> None:
        outputs = self._outputs.pop(microbatch)
        if self._trains:
            self._outputs[microbatch] = hollow(outputs)

    def clear(self) -> None:
        """Forget everything of a step."""
        self.kwargs = ()
        self._inputs.clear()
        self._outputs.clear()
        self._input_gradients.clear()
        self._weight_passes.clear()
        if self._slices is not None:
            self._slices.clear()


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, list | tuple) else (output,)


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


# --- Outputs without their memory, after they have been sent.
# The backward of a stage starts from its outputs, but needs only their place in the autograd graph
# and their shapes. A hollow tensor has both over one element of memory. So the storage of an output
# is free once the next stage has it, unless autograd itself saved it.


def hollow(outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return hollow tensors, from which a backward gives the same gradients as from the outputs.

    A tensor that needs no gradient becomes an empty tensor, because no backward reads it.
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
