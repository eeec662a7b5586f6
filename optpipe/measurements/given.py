"""What people say of a run: it counts before what was measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from optpipe.measurements.values import DeviceFacts, StageFacts
from optpipe.problem import Bandwidth, Count, Milliseconds, Name, Objective

__all__ = ["Given"]

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Given(BaseModel):
    """Facts of stages and devices that count before measured ones, and of links that do not.

    Parameters
    ----------
    name, num_microbatches, objective
        Of the problem. Left out, the name says where the times come from, and the number of
        micro-batches is the measured one.
    stages
        Facts of single stages, from stage 0 on; they count before ``stage``.
    stage, device
        Facts of every stage or device.
    link_latency_ms, link_gb_per_s
        Of every link between neighbouring stages that was not measured.
    weight_share
        Share (0-1) of a fused backward that W takes, where I and W were not measured apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: Name | None = None
    num_microbatches: Count | None = None
    objective: Objective | None = None
    stages: tuple[StageFacts, ...] = ()
    stage: StageFacts = StageFacts()
    device: DeviceFacts = DeviceFacts()
    link_latency_ms: Milliseconds | None = None
    link_gb_per_s: Bandwidth | None = None
    weight_share: Share | None = None

    def sizes(self) -> tuple[str, ...]:
        """Return the fields that a base problem would contradict."""
        links = {"link_latency_ms": self.link_latency_ms, "link_gb_per_s": self.link_gb_per_s}
        named = [name for name, value in links.items() if value is not None]
        of_stages = [name for facts in (*self.stages, self.stage) for name in facts.known()]
        return tuple(dict.fromkeys((*of_stages, *self.device.known(), *named)))
