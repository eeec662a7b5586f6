"""A whole configuration: model, accelerator, degrees of parallelism, and the pipeline's cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from optpipe.errors import InputError
from optpipe.presets.machine import Machine
from optpipe.presets.step import step_estimate
from optpipe.problem import StageLayers

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
    kinds
        The accelerator of each pipeline rank where they differ, else empty. ``hardware`` is then
        any of them.
    """

    shape: ModelShape
    hardware: Hardware
    training: Training
    pipeline: PipelineCut
    sizes: tuple[int, ...] = ()
    kinds: tuple[Hardware, ...] = ()

    @property
    def num_gpus(self) -> int:
        """Accelerators of all replicas."""
        return self.training.ranks * self.pipeline.pp

    @property
    def global_batch(self) -> int:
        """Sequences of a step, over all replicas."""
        return self.training.dp * self.training.micro_batch * self.pipeline.num_microbatches

    @property
    def gpus_per_node(self) -> int:
        """Accelerators that NVLink joins; of several kinds the fewest."""
        return min(one.gpus_per_node for one in (self.kinds or (self.hardware,)))

    @cached_property
    def stages(self) -> tuple[StageLayers, ...]:
        """What each stage holds, in model order.

        Raises
        ------
        InputError
            If there is not one size for each stage, or they are not the model's layers.
        """
        shape, count = self.shape, self.pipeline.pp * self.pipeline.chunks
        kinds = ("embedding", *["transformer"] * shape.num_layers, *["mtp"] * shape.mtp, "head")
        sizes = self.sizes or ((len(kinds),) if count == 1 else ())
        if not sizes:
            ranks = self.kinds or (self.hardware,) * self.pipeline.pp
            machines = [Machine(one, one.efficiency, self.training) for one in ranks]
            sizes = step_estimate(self.shape, machines, self.pipeline).sizes
        if len(sizes) != count or sum(sizes) != len(kinds) or min(sizes) < 0:
            raise InputError(
                f"sizes {list(sizes[:16])}: must be {count}, one for each stage, and together the "
                f"{len(kinds)} layers of {shape.name!r}, embedding and head counted; correct them"
            )
        held, start = [], 0
        for size in sizes:
            own = kinds[start : start + size]
            held.append(StageLayers(**{kind: own.count(kind) for kind in set(own)}))
            start += size
        return tuple(held)
