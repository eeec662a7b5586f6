"""What was measured, before it is a problem: samples of times, transfers, sizes (frozen values).

Whoever measures - a trace, a log, a table, or the runtime itself - fills a `Measurements`;
`optpipe.measurements.build` alone makes a `Problem` of it. Times are ms, sizes bytes, bandwidths
GB/s (1e9), as in a problem. What was not measured is None, never 0.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from optpipe.errors import MeasurementError
from optpipe.problem import Bandwidth, Bytes, Flag, Index, Milliseconds, Name

__all__ = [
    "DeviceFacts",
    "MeasuredAction",
    "MeasurementError",
    "Sample",
    "StageFacts",
    "Transfer",
]

MeasuredAction = Literal["F", "I", "W", "B", "RECOMPUTE"]
"""The actions that have a duration of their own."""

Counted = Annotated[Bytes, Field(gt=0)]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class Sample(_Value):
    """One run of one action.

    Parameters
    ----------
    stage, action
        What ran; stages are numbered in model order from 0.
    time_ms
        How long it kept the device's compute lane busy.
    microbatch, step, rank
        Which of the runs it was, where that is known. Steps are numbered from 0.
    """

    stage: Index
    action: MeasuredAction
    time_ms: Milliseconds
    microbatch: Index | None = None
    step: Index | None = None
    rank: Index | None = None


class Transfer(_Value):
    """One message from one device to another, alone on the link; ``time_ms`` without waiting."""

    source: Index
    target: Index
    num_bytes: Counted
    time_ms: Milliseconds


class StageFacts(_Value):
    """What is known of a stage besides its times; fields as in `optpipe.problem.Stage`."""

    device: Index | None = None
    activation_bytes: Bytes | None = None
    weight_context_bytes: Bytes | None = None
    offload_bytes: Bytes | None = None
    checkpoint_bytes: Bytes | None = None
    static_bytes: Bytes | None = None
    output_bytes: Bytes | None = None
    grad_sync_ms: Milliseconds | None = None
    forward_workspace_bytes: Bytes | None = None
    backward_input_workspace_bytes: Bytes | None = None
    backward_weight_workspace_bytes: Bytes | None = None
    backward_workspace_bytes: Bytes | None = None
    recompute_workspace_bytes: Bytes | None = None

    def or_else(self, general: StageFacts) -> StageFacts:
        """Return these facts, and where one is unknown the general one."""
        return StageFacts(**(_known(general) | _known(self)))

    def known(self) -> dict[str, Any]:
        """Return the facts that are known, by field."""
        return _known(self)


class DeviceFacts(_Value):
    """What is known of a device; fields as in `optpipe.problem.Device`."""

    name: Name | None = None
    memory_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    d2h_gb_per_s: Bandwidth | None = None
    h2d_gb_per_s: Bandwidth | None = None
    pcie_group: Name | None = None
    half_duplex: Flag | None = None
    host: Name | None = None

    def or_else(self, general: DeviceFacts) -> DeviceFacts:
        """Return these facts, and where one is unknown the general one."""
        return DeviceFacts(**(_known(general) | _known(self)))

    def known(self) -> dict[str, Any]:
        """Return the facts that are known, by field."""
        return _known(self)


def _known(facts: StageFacts | DeviceFacts) -> dict[str, Any]:
    return {name: value for name, value in facts if value is not None}
