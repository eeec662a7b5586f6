"""What a problem is made of: devices, hosts, stages and links, and the numbers in them.

Times are milliseconds, sizes bytes, bandwidths GB/s (1e9 bytes per second). Values are frozen and
complete: what may be left out has its default once they exist. What they may be together is
`optpipe.problem.Problem`'s to say.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from optpipe.validation import rule_broken

if TYPE_CHECKING:
    from pydantic.config import JsonDict

__all__ = [
    "Bandwidth",
    "Bytes",
    "Count",
    "Device",
    "Flag",
    "Host",
    "Index",
    "Link",
    "Milliseconds",
    "Name",
    "Stage",
]

_MAX_BYTES = 2**53
_MAX_MS = 1e12
_MAX_BITS = 1000
_WITH_UNIT = re.compile(r"[0-9.]+ ?[A-Za-z/%]+")
_MAX_INDEX = 999_999_999  # nine digits: the longest number in an action's text


def _number(value: Any) -> Any:
    if isinstance(value, str) and _WITH_UNIT.fullmatch(value):
        raise rule_broken(
            "must be a number", "write the number alone, in the unit of the field's name"
        )
    if isinstance(value, bool | str):
        raise rule_broken("must be a number", "write it without quotes")
    if isinstance(value, float) and not math.isfinite(value):
        raise rule_broken("must be finite", "give a measured number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise rule_broken("is too large", "times are in ms, sizes in bytes: check the unit")
    return 0 if value == 0 else value  # -0.0 means the same as 0 and must hash the same


def _whole(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, float):
        if not value.is_integer():
            raise rule_broken("must be a whole number", "round it")
        return int(value)
    return value


# Limits stand first: behind a validator they would not get into the published JSON Schema.
Milliseconds = Annotated[
    float, Field(ge=0, le=_MAX_MS, allow_inf_nan=False), BeforeValidator(_number)
]
Bandwidth = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False), BeforeValidator(_number)]
Bytes = Annotated[int, Field(ge=0, le=_MAX_BYTES), BeforeValidator(_whole)]
Index = Annotated[int, Field(ge=0, le=_MAX_INDEX), BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=1, le=_MAX_INDEX + 1), BeforeValidator(_whole)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Flag = Annotated[bool, Field(strict=True)]


# For published schemas: null is the same as leaving the field out.
_OR_NULL: JsonDict = {"type": ["integer", "null"], "default": None}


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class Device(_Value):
    """One accelerator.

    Parameters
    ----------
    name
        For people; ``gpu<i>`` when left out.
    memory_bytes
        The whole memory budget of the device.
    reserved_bytes
        What of it the pipeline never gets: context, NCCL, fragmentation, the pool of boundary
        tensors.
    d2h_gb_per_s, h2d_gb_per_s
        Sustained copy rates to and from the host with both directions and compute busy; both or
        neither. Without them nothing can be offloaded from this device.
    pcie_group
        Devices of one host that share each direction of one PCIe uplink.
    half_duplex
        Whether the two directions of this device exclude each other.
    host
        The host whose memory takes this device's offloaded bytes.
    """

    name: str = Field(default="", max_length=200)
    memory_bytes: Bytes
    reserved_bytes: Bytes = 0
    d2h_gb_per_s: Bandwidth | None = None
    h2d_gb_per_s: Bandwidth | None = None
    pcie_group: str | None = None
    half_duplex: Flag = False
    host: Name = "host0"

    @field_validator("pcie_group", mode="before")
    @classmethod
    def _group_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _both_directions(self) -> Self:
        if (self.d2h_gb_per_s is None) != (self.h2d_gb_per_s is None):
            raise rule_broken(
                "d2h_gb_per_s and h2d_gb_per_s go together: what is offloaded must come back",
                "give both, or neither where nothing may be offloaded",
            )
        if self.reserved_bytes > self.memory_bytes:
            raise rule_broken(
                f"reserved_bytes {self.reserved_bytes} may not exceed "
                f"memory_bytes {self.memory_bytes}",
                "lower it or raise memory_bytes",
            )
        return self

    @property
    def usable_bytes(self) -> int:
        """What static bytes and activations may fill: memory_bytes - reserved_bytes."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def can_offload(self) -> bool:
        """Whether this device has a way to and from its host."""
        return self.d2h_gb_per_s is not None


class Host(_Value):
    """One host; ``memory_bytes`` None means no limit."""

    name: Name
    memory_bytes: Bytes | None = None


class Stage(_Value):
    """A contiguous slice of the model on one device; sizes and times are per micro-batch.

    Parameters
    ----------
    device
        Index of the device that holds it.
    forward_ms, backward_input_ms, backward_weight_ms
        Durations of F, I and W.
    backward_ms
        Duration of the fused B; I + W when left out. It may be shorter than I + W.
    activation_bytes
        Held from F to the backward, the received input included.
    weight_context_bytes
        Held between I and W; may exceed activation_bytes, and equals it when left out.
    offload_bytes
        What OFFLOAD moves to the host; 0 = this stage cannot be offloaded.
    recompute_ms, checkpoint_bytes
        Duration of RECOMPUTE and what F keeps for it; both or neither.
    static_bytes
        Weights, gradients, optimizer state.
    output_bytes
        Sent to the next stage by F, and back by I or B of the next stage.
    grad_sync_ms
        Gradient reduction after the stage's last W or B, on a lane of its own.
    forward_workspace_bytes ... recompute_workspace_bytes
        Extra bytes that exist only while the action runs.
    """

    device: Index
    forward_ms: Milliseconds
    backward_input_ms: Milliseconds
    backward_weight_ms: Milliseconds
    backward_ms: Milliseconds | None = None
    activation_bytes: Bytes
    weight_context_bytes: Bytes = Field(default=0, json_schema_extra=_OR_NULL)
    offload_bytes: Bytes = 0
    recompute_ms: Milliseconds | None = None
    checkpoint_bytes: Bytes | None = None
    static_bytes: Bytes = 0
    output_bytes: Bytes = 0
    grad_sync_ms: Milliseconds = 0.0
    forward_workspace_bytes: Bytes = 0
    backward_input_workspace_bytes: Bytes = 0
    backward_weight_workspace_bytes: Bytes = 0
    backward_workspace_bytes: Bytes = 0
    recompute_workspace_bytes: Bytes = 0

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("weight_context_bytes") is None:
            if "activation_bytes" in data:
                return {**data, "weight_context_bytes": data["activation_bytes"]}
            return {key: value for key, value in data.items() if key != "weight_context_bytes"}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.offload_bytes > self.activation_bytes:
            raise rule_broken(
                f"offload_bytes {self.offload_bytes} may not exceed "
                f"activation_bytes {self.activation_bytes}",
                "give the part of the activation that is moved",
            )
        if (self.recompute_ms is None) != (self.checkpoint_bytes is None):
            raise rule_broken(
                "recompute_ms and checkpoint_bytes go together",
                "give both, or neither where nothing may be recomputed",
            )
        if self.checkpoint_bytes is not None and self.checkpoint_bytes > self.activation_bytes:
            raise rule_broken(
                f"checkpoint_bytes {self.checkpoint_bytes} may not exceed "
                f"activation_bytes {self.activation_bytes}",
                "give what F keeps when the rest is recomputed",
            )
        return self

    @property
    def fused_backward_ms(self) -> float:
        """Duration of B: backward_ms, or I + W."""
        if self.backward_ms is None:
            return self.backward_input_ms + self.backward_weight_ms
        return self.backward_ms

    @property
    def busy_ms(self) -> float:
        """Least compute time of one micro-batch, recompute aside: F + min(B, I + W)."""
        split = self.backward_input_ms + self.backward_weight_ms
        return self.forward_ms + min(self.fused_backward_ms, split)

    @property
    def can_recompute(self) -> bool:
        """Whether RECOMPUTE is allowed on this stage."""
        return self.recompute_ms is not None


class Link(_Value):
    """A directed connection between two devices; ``bandwidth_gb_per_s`` None = only latency."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, validate_by_name=True
    )

    source: Index = Field(alias="from")
    target: Index = Field(alias="to")
    latency_ms: Milliseconds = 0.0
    bandwidth_gb_per_s: Bandwidth | None = None

    def transfer_ms(self, num_bytes: int) -> float:
        """Time from the producer's end to the consumer's earliest start, in ms."""
        if self.bandwidth_gb_per_s is None:
            return self.latency_ms
        return self.latency_ms + num_bytes / (self.bandwidth_gb_per_s * 1e6)
