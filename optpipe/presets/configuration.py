"""A whole configuration: model, accelerator, degrees of parallelism, and the pipeline's cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe.presets.accelerators import Hardware
    from optpipe.presets.shape import ModelShape, Training
    from optpipe.presets.step import PipelineCut

__all__ = ["Configuration"]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a training run is started with, as far as time and memory depend on it.

    Parameters
    ----------
    shape, hardware, training, pipeline
        As `optpipe.presets.step_estimate` takes them.
    sizes
        Layers of each stage in model order, embedding and head counted as layers; empty where
        the pipeline's layout says them.
    """

    shape: ModelShape
    hardware: Hardware
    training: Training
    pipeline: PipelineCut
    sizes: tuple[int, ...] = ()

    @property
    def num_gpus(self) -> int:
        """Accelerators of all replicas."""
        return self.training.ranks * self.pipeline.pp

    @property
    def global_batch(self) -> int:
        """Sequences of a step, over all replicas."""
        return self.training.dp * self.training.micro_batch * self.pipeline.num_microbatches
