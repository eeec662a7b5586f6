"""The same model in one process: what the demo's pipeline is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from optpipe.runtime.demo_model import chain, token_loss

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Agreement", "Gradients", "SingleProcess", "gather_gradients"]

Gradients = dict[int, dict[str, "Tensor"]]
"""Stage -> parameter -> gradient, on the CPU."""

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


class Agreement(NamedTuple):
    """How one step of the pipeline compares with the single process."""

    pipeline_loss: float
    reference_loss: float
    largest_difference: float
    largest_gradient: float
    num_gradients: int
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether loss and all gradients agree, relative to the largest gradient."""
        return (
            abs(self.pipeline_loss - self.reference_loss) <= self.tolerance * self.reference_loss
            and self.largest_difference <= self.tolerance * self.largest_gradient
        )


def _gradients_of(stages: dict[int, nn.Module]) -> Gradients:
    """Return all gradients of some stages; a parameter without one has zeros."""
    return {
        index: {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().cpu()
            for name, p in module.named_parameters()
        }
        for index, module in stages.items()
    }


class SingleProcess:
    """The chained model, trained beside the pipeline by an optimizer of its own."""

    def __init__(self, stages: list[nn.Module], num_microbatches: int) -> None:
        self._stages = stages
        self._model = chain(stages)
        self._num_microbatches = num_microbatches
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)

    def step(self, batch: Tensor, target: Tensor) -> float:
        """Finish the step before, then make the gradients of a batch; return its loss."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        count = self._num_microbatches
        total = 0.0
        for inputs, wanted in zip(batch.chunk(count), target.chunk(count), strict=True):
            loss = token_loss(self._model(inputs), wanted) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    def compare(
        self, pipeline_loss: float, reference_loss: float, pipeline: Gradients
    ) -> Agreement:
        """Compare every gradient of the pipeline with the one just made."""
        own = _gradients_of(dict(enumerate(self._stages)))
        pairs = [
            (pipeline[index][name], gradient)
            for index, named in own.items()
            for name, gradient in named.items()
        ]
        # NaN must not pass for agreement: max() would skip it.
        differences = torch.stack([(theirs - ours).abs().max() for theirs, ours in pairs])
        return Agreement(
            pipeline_loss=pipeline_loss,
            reference_loss=reference_loss,
            largest_difference=float(differences.max()),
            largest_gradient=max(float(ours.abs().max()) for _, ours in pairs),
            num_gradients=len(pairs),
            tolerance=_TOLERANCE[pairs[0][1].dtype],
        )


def gather_gradients(stages: dict[int, nn.Module]) -> Gradients:
    """Return the gradients of all ranks' stages on rank 0, nothing elsewhere."""
    told: list[Gradients | None] | None = None
    if dist.get_rank() == 0:
        told = [None] * dist.get_world_size()
    dist.gather_object(_gradients_of(stages), told)
    return {index: named for part in told or () for index, named in (part or {}).items()}
