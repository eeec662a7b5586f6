"""What a stage holds for one micro-batch, counted where the offloader counts: by storage.

`optpipe.runtime.saved` is asked, with the rules it has for OFFLOAD: parameters, buffers and
boundary tensors are no activations, a storage seen by several tensors counts once, and what a
custom autograd function keeps outside ``save_for_backward`` is not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe.runtime.measuring.under_test import forget_gradients
from optpipe.runtime.offload import DEFAULT_MIN_BYTES
from optpipe.runtime.saved import SavedActivations

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from optpipe.runtime.measuring.under_test import ForwardResult, StageUnderTest

__all__ = ["Footprint", "Split", "measure_footprint"]


class Split(NamedTuple):
    """Which weight gradients W makes; I makes the others.

    Attributes
    ----------
    deferred, total
        Parameter elements whose gradients W makes, and those that get one at all.
    made_in_input_pass
        Types of the modules whose weight gradients I makes, by name.
    """

    deferred: int
    total: int
    made_in_input_pass: tuple[str, ...]

    @property
    def is_possible(self) -> bool:
        """Whether W has any work."""
        return self.deferred > 0


class Footprint(NamedTuple):
    """Bytes of one stage.

    Attributes
    ----------
    saved_sizes
        Of every storage that autograd saves, the received input aside.
    offload_sizes
        Of those an OFFLOAD moves: no outputs, and none too small to be worth a copy.
    received_bytes, output_bytes
        Boundary tensors; the batch (of the first stage) and what only the loss sees count 0.
    batch_bytes
        One micro-batch's part of the batch (first stage) and of the target (last stage): it is
        there for the whole step.
    weight_context_bytes
        Held between I and W.
    parameter_bytes, buffer_bytes
        Of the module.
    """

    saved_sizes: tuple[int, ...]
    offload_sizes: tuple[int, ...]
    received_bytes: int
    output_bytes: int
    batch_bytes: int
    weight_context_bytes: int
    parameter_bytes: int
    buffer_bytes: int
    split: Split

    @property
    def offload_bytes(self) -> int:
        """What one OFFLOAD moves."""
        return sum(self.offload_sizes)

    @property
    def checkpoint_bytes(self) -> int:
        """What an F keeps for its RECOMPUTE: the received input."""
        return self.received_bytes

    @property
    def activation_bytes(self) -> int:
        """Everything held from F to the backward: what is saved, and the received input.

        An output that is not saved is free once it has been sent; in flight it is a boundary
        buffer, which a device's reserved bytes are for.
        """
        return sum(self.saved_sizes) + self.received_bytes


def measure_footprint(
    stage: StageUnderTest, min_offload_bytes: int = DEFAULT_MIN_BYTES
) -> Footprint:
    """Run F, I and W once and count; gradients are dropped before."""
    forget_gradients(stage.module)
    received = stage.receive()
    saved = SavedActivations(
        f"stage {stage.index}", _resident(stage, received), stage.device, min_bytes=1
    )
    with saved.capture():
        result = stage.forward(received)
    sizes = tuple(parcel.num_bytes for parcel in saved.parcels())
    saved.keep(result.outputs)
    movable = tuple(parcel.num_bytes for parcel in saved.parcels())
    output_bytes = _bytes(result.outputs)
    context_bytes, split = _split_backward(stage, result)
    return Footprint(
        saved_sizes=sizes,
        offload_sizes=tuple(size for size in movable if size >= min_offload_bytes),
        received_bytes=0 if stage.is_first else _bytes(received),
        output_bytes=output_bytes,
        batch_bytes=_batch_bytes(stage),
        weight_context_bytes=context_bytes,
        parameter_bytes=_bytes(stage.module.parameters()),
        buffer_bytes=_bytes(stage.module.buffers()),
        split=split,
    )


def _resident(stage: StageUnderTest, received: Sequence[Tensor]) -> list[Tensor]:
    target = [] if stage.target is None else [stage.target]
    return [*stage.module.parameters(), *stage.module.buffers(), *received, *target]


def _batch_bytes(stage: StageUnderTest) -> int:
    batch = stage.inputs if stage.is_first else ()
    return _bytes(batch) + (0 if stage.target is None else _bytes([stage.target]))


def _split_backward(stage: StageUnderTest, result: ForwardResult) -> tuple[int, Split]:
    """Return the bytes between I and W, and which gradients were made when."""
    with stage.gradients.collect():
        stage.backward(result)
        context_bytes = stage.gradients.held_bytes()
        make_weight_gradients = stage.gradients.take()
    early = {id(p) for p in stage.module.parameters() if p.grad is not None}
    make_weight_gradients()
    made = [p for p in stage.module.parameters() if p.grad is not None]
    deferred = sum(p.numel() for p in made if id(p) not in early)
    return context_bytes, Split(
        deferred=deferred,
        total=sum(p.numel() for p in made),
        made_in_input_pass=_owners(stage.module, early),
    )


def _owners(module: nn.Module, parameters: set[int]) -> tuple[str, ...]:
    owners = {
        type(part).__name__
        for part in module.modules()
        if any(id(p) in parameters for p in part.parameters(recurse=False))
    }
    return tuple(sorted(owners))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
