"""What this rank does around each pass: capture, split, recompute."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optpipe.action import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe.runtime.offload import Cell, Offloader
    from optpipe.runtime.weight_gradients import WeightGradients

__all__ = ["Passes"]


class Passes:
    """Composes offload, split backward and recomputation; `torch_private.PassHooks` in prose.

    Parameters
    ----------
    offloader
        Moves the cells that the program offloads.
    gradients
        Where linear layers put their weight gradients during an I.
    recomputed
        The (stage, micro-batch) pairs whose F keeps only its inputs.
    device
        The device whose random state a recomputation restores, beside the CPU's.
    """

    def __init__(
        self,
        offloader: Offloader,
        gradients: WeightGradients,
        recomputed: frozenset[Cell],
        device: torch.device,
    ) -> None:
        self._offloader = offloader
        self._gradients = gradients
        self._recomputed = recomputed
        self._devices = [device] if device.type == "cuda" else []
        self._random_states: dict[Cell, list[Tensor]] = {}

    @contextmanager
    def forward(self, stage: int, microbatch: int, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Run an F: captured if it will be offloaded, without a graph if it will be recomputed."""
        cell = (stage, microbatch)
        if cell not in self._recomputed:
            with self._offloader.capture(cell, inputs):
                yield
            return
        self._random_states[cell] = self._random_state()
        with torch.no_grad():
            yield

    def forward_done(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Leave what is sent on the device: torch holds it to the backward."""
        self._offloader.keep((stage, microbatch), outputs)

    @contextmanager
    def loss(self, stage: int, microbatch: int, target: Any) -> Iterator[None]:
        """Capture what the loss saves, like the rest of the last stage, but for the target."""
        if isinstance(target, Tensor):
            self._offloader.keep((stage, microbatch), [target])
        with self._offloader.capture((stage, microbatch)):
            yield

    @contextmanager
    def backward(self, stage: int, microbatch: int, *, split: bool) -> Iterator[None]:
        """Run an I, with weight gradients put aside, or a B."""
        self._offloader.before_backward((stage, microbatch))
        if not split:
            yield
            return
        with self._gradients.collect():
            yield

    def weight_runner(self) -> Callable[[], None]:
        """Return what makes the weight gradients put aside by the I just run."""
        return self._gradients.take()

    @contextmanager
    def recompute(self, stage: int, microbatch: int) -> Iterator[None]:
        """Run a forward again with the random numbers of its F."""
        state = self._random_states.pop((stage, microbatch))
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(state[0])
            for device, device_state in zip(self._devices, state[1:], strict=True):
                torch.cuda.set_rng_state(device_state, device)
            yield

    def transfer(self, action: Action) -> None:
        """Run an OFFLOAD, RELEASE or RELOAD."""
        cell = (action.stage, action.microbatch)
        match action.type:
            case ActionType.OFFLOAD:
                self._offloader.offload(cell)
            case ActionType.RELEASE:
                self._offloader.release(cell)
            case ActionType.RELOAD:
                self._offloader.reload(cell)
            case _:
                raise ValueError(f"{action} is not a transfer; it is run elsewhere")

    def reset(self) -> None:
        """Forget what an interrupted step left behind."""
        self._offloader.reset()
        self._random_states.clear()

    def _random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]
