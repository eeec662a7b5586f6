"""The problem: devices, stages, links, micro-batches (``optpipe/problem/v1``, DESIGN section 4).

What it is made of, each field with its meaning and unit, stands in `optpipe.problem_parts`; here is
what must be true of the parts together, and what follows from them. Whatever a file leaves out is
filled in on the way in, so that two files that mean the same have the same `Problem.problem_hash`.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from optpipe.errors import ProblemError
from optpipe.problem_parts import (
    Bandwidth,
    Bytes,
    Count,
    Device,
    Flag,
    Host,
    Index,
    Link,
    Milliseconds,
    Name,
    Stage,
)
from optpipe.validation import explain, rule_broken

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_CELLS",
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
    "Objective",
    "Problem",
    "Stage",
]

MAX_CELLS = 2_000_000
"""Largest stages x micro-batches that a problem may have."""

Objective = Literal["makespan", "span"]


class Problem(BaseModel):
    """What is to be scheduled; complete and consistent once it exists.

    Raises
    ------
    pydantic.ValidationError
        From the constructor. `Problem.parse` raises `ProblemError` with a line per fault instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    format: Literal["optpipe/problem/v1"] = "optpipe/problem/v1"
    name: str = Field(default="", max_length=200)
    num_microbatches: Count
    objective: Objective = "makespan"
    devices: tuple[Device, ...] = Field(min_length=1, max_length=4096)
    hosts: tuple[Host, ...] = ()
    stages: tuple[Stage, ...] = Field(min_length=1, max_length=65536)
    links: tuple[Link, ...] = ()

    @classmethod
    def parse(cls, data: Any) -> Problem:
        """Return the problem a JSON-like object describes.

        Raises
        ------
        ProblemError
            With one line per fault: path, value, rule, fix.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ProblemError(explain(error, cls)) from None

    @field_validator("devices", mode="before")
    @classmethod
    def _name_devices(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [_named(device, f"gpu{index}") for index, device in enumerate(value)]

    @field_validator("links")
    @classmethod
    def _mirror_links(cls, links: tuple[Link, ...]) -> tuple[Link, ...]:
        known: dict[tuple[int, int], Link] = {}
        for link in links:
            if link.source == link.target:
                raise rule_broken(
                    f"device {link.source} is linked to itself", "remove the link; it is free"
                )
            if (link.source, link.target) in known:
                raise rule_broken(
                    f"link {link.source} -> {link.target} stands twice", "remove one of the two"
                )
            known[link.source, link.target] = link
        for (source, target), link in list(known.items()):
            reverse = link.model_copy(update={"source": target, "target": source})
            known.setdefault((target, source), reverse)
        return tuple(known[pair] for pair in sorted(known))

    @model_validator(mode="after")
    def _references(self) -> Self:
        self._check_stages()
        self._check_links()
        self._fill_hosts()
        self._check_groups()
        return self

    def _check_stages(self) -> None:
        num_devices = len(self.devices)
        for index, stage in enumerate(self.stages):
            if stage.device >= num_devices:
                raise rule_broken(
                    f"stages[{index}].device = {stage.device} does not exist: there are "
                    f"{num_devices} devices, numbered from 0",
                    "correct the number or add the device",
                )
        cells = len(self.stages) * self.num_microbatches
        if cells > MAX_CELLS:
            raise rule_broken(
                f"stages x num_microbatches = {len(self.stages)} x {self.num_microbatches} = "
                f"{cells} exceeds {MAX_CELLS}",
                "lower num_microbatches; a schedule of that size repeats itself",
            )

    def _check_links(self) -> None:
        for link in self.links:
            for end in (link.source, link.target):
                if end >= len(self.devices):
                    raise rule_broken(
                        f"links: {link.source} -> {link.target} names device {end}, but there are "
                        f"{len(self.devices)} devices, numbered from 0",
                        "correct the number or add the device",
                    )

    def _fill_hosts(self) -> None:
        known = {host.name: host for host in self.hosts}
        if len(known) < len(self.hosts):
            raise rule_broken("hosts: two have the same name", "rename or remove one")
        used = {device.host for device in self.devices}
        for name in sorted(set(known) - used):
            raise rule_broken(
                f"hosts: no device names host {name!r} (devices name {', '.join(sorted(used))})",
                "correct the device's host or remove the entry",
            )
        filled = tuple(known.get(name, Host(name=name)) for name in sorted(used))
        object.__setattr__(self, "hosts", filled)

    def _check_groups(self) -> None:
        hosts: dict[str, str] = {}
        for device in self.devices:
            if device.pcie_group is None:
                continue
            first = hosts.setdefault(device.pcie_group, device.host)
            if first != device.host:
                raise rule_broken(
                    f"pcie_group {device.pcie_group!r} spans hosts {first} and {device.host}",
                    "a PCIe uplink belongs to one host: use another group name on each",
                )

    def model_copy(
        self,
        *,
        update: Mapping[str, Any] | None = None,
        deep: bool = False,  # noqa: ARG002 - pydantic's signature; fields are frozen all the way down
    ) -> Self:
        """Return a copy with some fields replaced, validated like any other problem.

        pydantic's own would neither validate nor forget the hash of the original.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **(update or {})})

    @property
    def placement(self) -> tuple[int, ...]:
        """Device of each stage."""
        return tuple(stage.device for stage in self.stages)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each device, in model order."""
        held: list[list[int]] = [[] for _ in self.devices]
        for index, stage in enumerate(self.stages):
            held[stage.device].append(index)
        return tuple(tuple(stages) for stages in held)

    @cached_property
    def boundary_ms(self) -> tuple[tuple[float, float], ...]:
        """Per stage s: ms from F(s) to F(s+1), and from the backward of s+1 to that of s.

        The last stage's pair is (0, 0).
        """
        links = {(link.source, link.target): link for link in self.links}
        pairs = []
        for this, following in zip(self.stages, self.stages[1:], strict=False):
            there = links.get((this.device, following.device))
            back = links.get((following.device, this.device))
            pairs.append(
                (
                    there.transfer_ms(this.output_bytes) if there else 0.0,
                    back.transfer_ms(this.output_bytes) if back else 0.0,
                )
            )
        return (*pairs, (0.0, 0.0))

    def can_offload(self, stage: int) -> bool:
        """Whether the activations of this stage may go to the host."""
        held = self.stages[stage]
        return held.offload_bytes > 0 and self.devices[held.device].can_offload

    def offload_ms(self, stage: int) -> float:
        """Duration of one OFFLOAD of this stage in ms; the stage must be offloadable."""
        rate = self.devices[self.stages[stage].device].d2h_gb_per_s
        if rate is None:
            raise ValueError(f"stage {stage} cannot be offloaded; ask can_offload first")
        return self.stages[stage].offload_bytes / (rate * 1e6)

    def reload_ms(self, stage: int) -> float:
        """Duration of one RELOAD of this stage in ms; the stage must be offloadable."""
        rate = self.devices[self.stages[stage].device].h2d_gb_per_s
        if rate is None:
            raise ValueError(f"stage {stage} cannot be offloaded; ask can_offload first")
        return self.stages[stage].offload_bytes / (rate * 1e6)

    def static_bytes_of(self, device: int) -> int:
        """Static bytes of the stages a device holds."""
        return sum(self.stages[stage].static_bytes for stage in self.stages_of[device])

    @cached_property
    def busy_ms(self) -> float:
        """Compute time of the busiest device (DESIGN section 2: the numerator of bubble rates)."""
        loads = (sum(self.stages[s].busy_ms for s in held) for held in self.stages_of)
        return self.num_microbatches * max(loads)

    @cached_property
    def problem_hash(self) -> str:
        """``sha256:...`` over canonical JSON with defaults filled in and ``name`` left out."""
        data = self.model_dump(mode="json", by_alias=True, exclude={"name"})
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _named(device: Any, name: str) -> Any:
    if isinstance(device, dict) and device.get("name") in (None, ""):
        return {**device, "name": name}
    if isinstance(device, Device) and not device.name:
        return device.model_copy(update={"name": name})
    return device
