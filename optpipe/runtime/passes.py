"""What this rank does around each pass: capture, split, recompute."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from optpipe.action import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from optpipe.runtime.offload import Cell, Offloader
    from optpipe.runtime.weight_gradients import WeightGradients

__all__ = ["Observer", "Passes"]

_PLAIN = nullcontext()


class Observer(Protocol):
    """Whoever wants to see a rank's actions; F includes the loss, waiting for inputs is outside."""

    def begin(self, action: Action) -> None:
        """Look at what stands before an action; on CUDA the device may be far behind."""

    def end(self, action: Action) -> None:
        """Look at what an action has left."""


class Passes:
    """Composes offload, split backward and recomputation: the runtime's `PassHooks`.

    Parameters
    ----------
    offloader
        Moves the cells that the program offloads.
    gradients
        Where linear layers put their weight gradients during an I.
    recomputed
        The (stage, micro-batch) pairs whose F keeps only its inputs.
    last_stage
        Index of the stage behind whose F the loss comes.
    device
        The device whose random state a recomputation restores, beside the CPU's.

    Attributes
    ----------
    running
        The action begun last: where an error comes from.
    observer
        Told of the begin and end of every action, if there is one.
    """

    def __init__(
        self,
        offloader: Offloader,
        gradients: WeightGradients,
        recomputed: frozenset[Cell],
        last_stage: int,
        device: torch.device,
    ) -> None:
        self.running: Action | None = None
        self.observer: Observer | None = None
        self._offloader = offloader
        self._gradients = gradients
        self._recomputed = recomputed
        self._last_stage = last_stage
        self._devices = [device] if device.type == "cuda" else []
        self._random_states: dict[Cell, list[Tensor]] = {}

    def forward(
        self, stage: int, microbatch: int, inputs: Sequence[Tensor]
    ) -> AbstractContextManager[None]:
        """Run an F: captured if it will be offloaded, without a graph if it will be recomputed."""
        self._begin(Action(stage, ActionType.FORWARD, microbatch))
        cell = (stage, microbatch)
        if cell in self._recomputed:
            self._random_states[cell] = self._random_state()
            return torch.no_grad()
        return self._offloader.capture(cell, inputs) if self._offloader.holds(cell) else _PLAIN

    def forward_done(self, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Leave what is sent on the device: it is no part of what the cell's plan offloads."""
        self._offloader.keep((stage, microbatch), outputs)
        self._end()

    def loss(self, stage: int, microbatch: int, target: Any) -> AbstractContextManager[None]:
        """Capture what the loss saves, like the rest of the last stage, but for the target."""
        cell = (stage, microbatch)
        if not self._offloader.holds(cell):
            return _PLAIN
        if isinstance(target, Tensor):
            self._offloader.keep(cell, [target])
        return self._offloader.capture(cell)

    def loss_done(self) -> None:
        """See that the last stage's F or RECOMPUTE is complete."""
        self._end()

    def backward(self, stage: int, microbatch: int, *, split: bool) -> AbstractContextManager[None]:
        """Run an I, with weight gradients put aside, or a B."""
        kind = ActionType.BACKWARD_INPUT if split else ActionType.FULL_BACKWARD
        self._begin(Action(stage, kind, microbatch))
        self._offloader.before_backward((stage, microbatch))
        return self._gradients.collect() if split else _PLAIN

    def backward_done(self) -> None:
        """See that nothing but the stage's gradients is left of an I's or B's inputs."""
        self._end()

    def weight_runner(self) -> Callable[[], None]:
        """Return what makes the weight gradients put aside by the I just run."""
        return self._gradients.take()

    @contextmanager
    def weight(self, stage: int, microbatch: int) -> Iterator[None]:
        """Run a W."""
        self._begin(Action(stage, ActionType.BACKWARD_WEIGHT, microbatch))
        yield
        self._end()

    @contextmanager
    def recompute(self, stage: int, microbatch: int) -> Iterator[None]:
        """Run a forward again with the random numbers of its F."""
        self._begin(Action(stage, ActionType.RECOMPUTE, microbatch))
        state = self._random_states.pop((stage, microbatch))
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(state[0])
            for device, device_state in zip(self._devices, state[1:], strict=True):
                torch.cuda.set_rng_state(device_state, device)
            yield
        if stage != self._last_stage:
            self._end()

    def transfer(self, action: Action) -> None:
        """Run an OFFLOAD, RELEASE or RELOAD."""
        self._begin(action)
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
        self._end()

    def reset(self) -> None:
        """Forget what an interrupted step left behind."""
        self._offloader.reset()
        self._random_states.clear()

    def _begin(self, action: Action) -> None:
        self.running = action
        if self.observer is not None:
            self.observer.begin(action)

    def _end(self) -> None:
        if self.observer is not None and self.running is not None:
            self.observer.end(self.running)

    def _random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]
