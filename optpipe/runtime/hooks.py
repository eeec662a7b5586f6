"""What the runtime does around the passes that torch runs: the contract between the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from optpipe.action import Action

__all__ = ["PassHooks"]


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

    def loss_done(self) -> None:
        """See that an F or RECOMPUTE of the last stage is complete, its outputs dropped."""

    def backward(self, stage: int, microbatch: int, *, split: bool) -> AbstractContextManager[None]:
        """Surround an I (split) or a B."""

    def backward_done(self) -> None:
        """See that an I or B is complete, the gradient it was given dropped."""

    def weight_runner(self) -> Callable[[], None]:
        """Return what the W of the backward just run has to do; called inside `backward`."""

    def weight(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Surround a W."""

    def recompute(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Surround a RECOMPUTE's forward and loss."""

    def transfer(self, action: Action) -> None:
        """Run an OFFLOAD, RELEASE or RELOAD."""
