"""The problem: devices, stages, links, micro-batches (``optpipe/problem/v1`` and ``v2``).

`optpipe.stage` has stages and their menus; `optpipe.formats.problem` has the two forms of a file.
A problem fills in what a file leaves out, so that two files that mean the same have the same
`Problem.problem_hash`.

`Problem.stages` are the stages under cost 0. `Problem.other_costs` has a row per stage: the stage
under costs 1, 2, ... Files write both into ``costs`` of a stage. `Problem.stages_by_cost` has all.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from functools import cache, cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema  # noqa: TC002 - pydantic reads it

from optpipe.errors import ProblemError, faults_of, rule_broken
from optpipe.formats.problem import V2, StageSchema, oldest_format, read_document, write_document
from optpipe.stage import (
    OF_STAGE,
    Bandwidth,
    Bytes,
    CellMode,
    Count,
    Flag,
    Flops,
    FrozenValue,
    Index,
    Milliseconds,
    Mode,
    Name,
    Stage,
    StageLayers,
    least_stage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "MAX_CELLS",
    "Bandwidth",
    "Bytes",
    "CellMode",
    "Context",
    "Count",
    "Device",
    "FileValue",
    "Flag",
    "FrozenValue",
    "Host",
    "Index",
    "LicensedPair",
    "Link",
    "LinkLane",
    "Microbatch",
    "Milliseconds",
    "Mode",
    "Name",
    "Objective",
    "Placement",
    "Problem",
    "Stage",
    "StageLayers",
    "placement_of",
]


class FileValue(FrozenValue):
    """Base of values that have a file format of their own."""

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the value that a JSON-like object describes.

        Raises
        ------
        ProblemError, ModelError, ScheduleFormatError
            With one line per fault: path, value, rule, fix.
        """
        with faults_of(cls, cls.fault):
            return cls.model_validate(data)


class Device(FrozenValue):
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
        """Bytes for static data and activations: memory_bytes - reserved_bytes."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def can_offload(self) -> bool:
        """Whether this device has a way to and from its host."""
        return self.d2h_gb_per_s is not None


class Host(FrozenValue):
    """One host.

    Parameters
    ----------
    name
        What devices call it.
    memory_bytes
        Its memory for offloaded bytes; None = no limit.
    """

    name: Name
    memory_bytes: Bytes | None = None


class Context(FrozenValue):
    """Data for tokens/s, MFU and framework files; it changes no schedule and no hash.

    Parameters
    ----------
    tokens_per_microbatch
        Tokens that one micro-batch trains.
    flops_per_token
        Of the whole model, forward and backward.
    gpus_per_device
        GPUs that one device of the problem stands for.
    peak_flops
        Of one GPU, per second.
    model
        Name of the model.
    parallelism
        Names of degrees (tp, pp, dp, ...) -> numbers >= 1.
    """

    tokens_per_microbatch: Index = 0
    flops_per_token: Flops = 0.0
    gpus_per_device: Count = 1
    peak_flops: Flops = 0.0
    model: str = Field(default="", max_length=200)
    parallelism: dict[Name, Count] = Field(default_factory=dict, max_length=20)


class Link(FrozenValue):
    """A directed connection between two devices.

    Parameters
    ----------
    source, target
        Indices of its devices; in files ``from`` and ``to``.
    latency_ms
        From the end of a pass to the earliest start of the waiting pass, without the time that its
        bytes take.
    bandwidth_gb_per_s
        Bytes that it carries, in 1e9 per second; None = only latency.
    """

    model_config = ConfigDict(validate_by_name=True)

    source: Index = Field(alias="from")
    target: Index = Field(alias="to")
    latency_ms: Milliseconds = 0.0
    bandwidth_gb_per_s: Bandwidth | None = None

    def transfer_ms(self, num_bytes: int) -> float:
        """Time from the producer's end to the consumer's earliest start, in ms."""
        if self.bandwidth_gb_per_s is None:
            return self.latency_ms
        return self.latency_ms + self.occupied_ms(num_bytes)

    def occupied_ms(self, num_bytes: int) -> float:
        """Time for which a message fills the link, in ms; 0 without a bandwidth."""
        rate = self.bandwidth_gb_per_s
        return 0.0 if rate is None else num_bytes / (rate * 1e6)


def _one_entry(value: Any) -> Any:
    """Return the number of a matrix by [cost of F][cost of the backward], where each is one."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) == 1 and isinstance(value[0], list | tuple) and len(value[0]) == 1:
        return value[0][0]
    raise rule_broken(
        "must be a number, or a matrix of one row and one column: unequal ones come later",
        "give the ms that hide for the one cost that all micro-batches have",
    )


_NUMBER = {"type": "number", "minimum": 0, "maximum": 1e12}
_ONE = {"minItems": 1, "maxItems": 1}
_ENTRY = {
    "anyOf": [
        _NUMBER,
        {"type": "array", **_ONE, "items": {"type": "array", **_ONE, "items": _NUMBER}},
    ]
}


class LicensedPair(FrozenValue):
    """An F of one stage and a backward of another, or the same, that may run together.

    Parameters
    ----------
    forward, backward
        Stages of one device. Micro-batches are free, but a cell does not pair with itself.
    ``with_``
        In files ``with``: which backward, B or I. A pair licensed for one of them is not
        licensed for the other.
    hidden_ms
        By how much the two together are shorter than one after the other, in ms: what of the one's
        communication hides behind the other's computation. At most the shorter of the two passes,
        recomputation inside not counted.
    """

    model_config = ConfigDict(validate_by_name=True)

    forward: Index
    backward: Index
    with_: Literal["B", "I"] = Field(default="B", alias="with")
    hidden_ms: Annotated[
        Milliseconds, BeforeValidator(_one_entry), WithJsonSchema(_ENTRY, mode="validation")
    ]


class Microbatch(FrozenValue):
    """The cost and the sample of a micro-batch.

    Parameters
    ----------
    cost
        Number of its cost: an index into every stage's costs.
    sample
        Number of the sample. Micro-batches of one number are slices of the same sequences, in the
        order of their indices: on every stage their F's come in order, and their I's or B's in
        reverse. None: the micro-batch belongs to no sample.
    """

    cost: Index = 0
    sample: Index | None = None


class LinkLane(NamedTuple):
    """The link that a message over a boundary occupies, by index, and for how many ms.

    ``link`` is -1 if messages do not queue.
    """

    link: int
    ms: float


_FREE = LinkLane(-1, 0.0)


_MOST_PAIRS = 1_000_000
_NAME_CHARS, _HASH_CHARS = 60, 19  # of a repr; the hash is sha256: and 12 digits

MAX_CELLS = 2_000_000
"""Largest stages x micro-batches that a problem may have."""

Objective = Literal["makespan", "span"]
Order = Literal["free", "given"]
Placement = Literal["linear", "loop", "v"]


class Problem(FileValue):
    """A scheduling problem; the constructor makes it complete and checks that it is consistent.

    Parameters
    ----------
    format
        Format of its file; v2 where it has fields that v1 has not.
    name
        For people.
    num_microbatches
        Micro-batches of a step.
    microbatches
        Cost and sample of each micro-batch; empty where all are alike.
    order
        ``given``: forwards of a stage run in the order of their micro-batches' numbers.
    objective
        Which length is minimised, in ms: ``makespan`` or ``span``.
    devices
        The accelerators; stages name them by index.
    hosts
        Hosts with a limit of memory.
    stages
        The parts of the model in their order; sizes and times are per micro-batch.
    other_costs
        Per stage, the stage under costs 1, 2, ...
    pairs
        Passes of one device that may run together.
    links
        Connections between devices that take time; others take none.
    context
        What tokens/s, MFU and framework files need.

    Raises
    ------
    ProblemError
        With one line per fault: path, value, rule, fix.
    """

    fault = ProblemError

    format: Literal["optpipe/problem/v1", "optpipe/problem/v2"] = "optpipe/problem/v1"
    name: str = Field(default="", max_length=200)
    num_microbatches: Count
    microbatches: tuple[Microbatch, ...] = Field(
        default=(), max_length=MAX_CELLS, exclude_if=lambda value: not value
    )
    order: Order = Field(default="free", exclude_if=lambda value: value == "free")
    objective: Objective = "makespan"
    devices: tuple[Device, ...] = Field(min_length=1, max_length=4096)
    hosts: tuple[Host, ...] = ()
    stages: tuple[Annotated[Stage, StageSchema], ...] = Field(min_length=1, max_length=65536)
    other_costs: SkipJsonSchema[tuple[tuple[Stage, ...], ...]] = Field(
        default=(), exclude_if=lambda value: not value
    )
    pairs: tuple[LicensedPair, ...] = Field(
        default=(), max_length=_MOST_PAIRS, exclude_if=lambda value: not value
    )
    links: tuple[Link, ...] = ()
    context: Context | None = Field(default=None, exclude_if=lambda value: value is None)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        return read_document(data)

    @model_serializer(mode="wrap", when_used="json")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return write_document(handler(self))

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

    @model_validator(mode="wrap")
    @classmethod
    def _settle(cls, data: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Check the parts together; build the problem anew where two forms mean the same."""
        given = build(data)
        fields = {name: getattr(given, name) for name in cls.model_fields}
        settled = fields | given.settled_fields()
        settled["format"] = oldest_format(settled)
        return given if settled == fields else build(settled)

    def settled_fields(self) -> dict[str, Any]:
        """Return the fields that may mean the same in two forms, in the one that problems have.

        Raises ValueError, with rule and fix, where parts do not fit together.
        """
        self._check_stages()
        self._check_links()
        hosts = self._all_hosts()
        self._check_groups()
        return {"hosts": hosts, **self._settled_costs(), "pairs": self._sorted_pairs()}

    def _settled_costs(self) -> dict[str, Any]:
        """Say what micro-batches are in one way: no cost that none has, none twice.

        Costs keep the order of their numbers; samples are numbered as they come, and one of a
        single micro-batch is none.
        """
        given, others = self.microbatches, self.other_costs
        if given and len(given) != self.num_microbatches:
            raise rule_broken(
                f"microbatches has {len(given)} entries, and num_microbatches is "
                f"{self.num_microbatches}",
                "give one entry per micro-batch, or leave microbatches out",
            )
        if others and len(others) != len(self.stages):
            raise rule_broken(
                f"other_costs has {len(others)} rows for {len(self.stages)} stages",
                "give one row per stage, or leave other_costs out",
            )
        used = sorted({one.cost for one in given}) or [0]
        for index, row in enumerate(others or [()]):
            if used[-1] > len(row):
                raise rule_broken(
                    f"stages[{index}].costs has {1 + len(row)} entries, but a micro-batch "
                    f"has cost {used[-1]}, numbered from 0",
                    "give every stage as many costs as micro-batches use",
                )
        if not given:
            return {"other_costs": ()}
        kinds: dict[tuple[Stage, ...], int] = {}
        number = {}
        for cost in used:
            kind = self.stages
            if cost:
                kind = tuple(map(_under_head, kind, (row[cost - 1] for row in others)))
            number[cost] = kinds.setdefault(kind, len(kinds))
        many = Counter(one.sample for one in given)
        samples: dict[int, int] = {}
        microbatches = tuple(
            Microbatch(
                cost=number[one.cost],
                sample=None
                if one.sample is None or many[one.sample] == 1
                else samples.setdefault(one.sample, len(samples)),
            )
            for one in given
        )
        if len(kinds) == 1 and not samples:
            microbatches = ()
        if self.pairs and microbatches:
            said = "samples" if samples else f"micro-batches of {len(kinds)} costs"
            raise rule_broken(
                f"pairs beside {said}: this optpipe does not schedule both together yet",
                "leave pairs out, or give all micro-batches one cost and no sample",
            )
        stages, *later = kinds
        rows = tuple(zip(*later, strict=True))
        return {"microbatches": microbatches, "stages": stages, "other_costs": rows}

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

    def _sorted_pairs(self) -> tuple[LicensedPair, ...]:
        num_stages = len(self.stages)
        known: dict[tuple[int, int, str], LicensedPair] = {}
        for index, pair in enumerate(self.pairs):
            at = f"pairs[{index}]"
            for name in ("forward", "backward"):
                stage = getattr(pair, name)
                if stage >= num_stages:
                    raise rule_broken(
                        f"{at}.{name} = {stage} does not exist: there are {num_stages} stages, "
                        "numbered from 0",
                        "correct the number",
                    )
            first, second = self.stages[pair.forward], self.stages[pair.backward]
            if first.device != second.device:
                raise rule_broken(
                    f"{at}: stage {pair.forward} is on device {first.device}, stage "
                    f"{pair.backward} on device {second.device}, but the passes of a pair run on "
                    "one device",
                    "name two stages of one device",
                )
            backward_ms = second.backward_input_ms
            if pair.with_ == "B":
                backward_ms = second.fused_backward_ms
            shorter = min(first.forward_ms, backward_ms)
            if pair.hidden_ms > shorter:
                raise rule_broken(
                    f"{at}.hidden_ms {pair.hidden_ms} may not exceed the shorter of the two "
                    f"passes, {shorter} ms (F {first.forward_ms}, {pair.with_} {backward_ms})",
                    "give by how much both together are shorter than one after the other",
                )
            key = pair.forward, pair.backward, pair.with_
            if key in known:
                raise rule_broken(
                    f"{at}: forward {pair.forward}, backward {pair.backward}, with {pair.with_} "
                    "stands twice",
                    "remove one of the two",
                )
            known[key] = pair
        return tuple(known[key] for key in sorted(known))

    def _all_hosts(self) -> tuple[Host, ...]:
        known = {host.name: host for host in self.hosts}
        if len(known) < len(self.hosts):
            raise rule_broken("hosts: two have the same name", "rename or remove one")
        used = {device.host for device in self.devices}
        for name in sorted(set(known) - used):
            raise rule_broken(
                f"hosts: no device names host {name!r} (devices name {', '.join(sorted(used))})",
                "correct the device's host or remove the entry",
            )
        return tuple(known.get(name, Host(name=name)) for name in sorted(used))

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
        return self.parse({**fields, **(update or {})})

    @property
    def placement(self) -> tuple[int, ...]:
        """Device of each stage."""
        return tuple(stage.device for stage in self.stages)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each device, in model order."""
        owned: list[list[int]] = [[] for _ in self.devices]
        for index, stage in enumerate(self.stages):
            owned[stage.device].append(index)
        return tuple(tuple(stages) for stages in owned)

    @property
    def num_costs(self) -> int:
        """The number of costs that micro-batches have."""
        return len(self.stages_by_cost)

    @cached_property
    def stages_by_cost(self) -> tuple[tuple[Stage, ...], ...]:
        """The `stages` of each cost."""
        return (self.stages, *zip(*self.other_costs, strict=True))

    @cached_property
    def cost_of(self) -> tuple[int, ...]:
        """Cost of each micro-batch."""
        costs = tuple(one.cost for one in self.microbatches)
        return costs or (0,) * self.num_microbatches

    def stage_of(self, stage: int, microbatch: int) -> Stage:
        """Return a stage as it is for a micro-batch: its times, bytes and menu."""
        return self.stages_by_cost[self.cost_of[microbatch]][stage]

    def menu_of(self, stage: int, microbatch: int) -> tuple[CellMode, ...]:
        """Return the modes of a cell, defaults filled in (see `Stage.menu`)."""
        return self.menus_by_cost[self.cost_of[microbatch]][stage]

    @cached_property
    def menus_by_cost(self) -> tuple[tuple[tuple[CellMode, ...], ...], ...]:
        """The `menus` of each cost."""
        return tuple(tuple(stage.menu for stage in stages) for stages in self.stages_by_cost)

    @property
    def is_even(self) -> bool:
        """Whether micro-batches are equal and their order is free."""
        return not self.microbatches and self.order == "free"

    @property
    def has_samples(self) -> bool:
        """Whether any micro-batches are pieces of the same sequences."""
        return any(one.sample is not None for one in self.microbatches)

    @cached_property
    def samples(self) -> tuple[tuple[int, ...], ...]:
        """Micro-batches by sample, in the order of the first of each; those of none alone."""
        found: dict[int | tuple[int], list[int]] = {}
        for j in range(self.num_microbatches):
            sample = self.microbatches[j].sample if self.microbatches else None
            found.setdefault((j,) if sample is None else sample, []).append(j)
        return tuple(map(tuple, found.values()))

    @cached_property
    def forward_turns(self) -> tuple[tuple[int, int], ...]:
        """Pairs of micro-batches of which the first comes first in the F's of every stage."""
        if self.order == "given":
            return tuple(pairwise(range(self.num_microbatches)))
        return self.backward_turns

    @cached_property
    def backward_turns(self) -> tuple[tuple[int, int], ...]:
        """Pairs of micro-batches of which the first comes last in the I's and B's of every stage.

        They are neighbours in a sample.
        """
        latest: dict[int, int] = {}
        turns = []
        for j, one in enumerate(self.microbatches):
            if one.sample is not None:
                if one.sample in latest:
                    turns.append((latest[one.sample], j))
                latest[one.sample] = j
        return tuple(turns)

    def alike(self, cost: int, num_microbatches: int | None = None) -> Problem:
        """Return the problem in which all micro-batches have a cost and no order."""
        return self._even(self.stages_by_cost[cost], num_microbatches)

    def _even(self, stages: tuple[Stage, ...], num_microbatches: int | None = None) -> Problem:
        m = self.num_microbatches if num_microbatches is None else num_microbatches
        even = {"stages": stages, "other_costs": (), "microbatches": (), "order": "free"}
        return self.model_copy(update=even | {"num_microbatches": m})

    @cached_property
    def least(self) -> Problem:
        """A relaxation with equal micro-batches, each field the minimum over all costs.

        Every schedule of this problem is one of the relaxation, with no greater length or memory
        there. So bounds of the relaxation hold here. In it, a stage with more modes than keep needs
        no memory. It is the problem itself if all micro-batches are equal and in free order.
        """
        if self.is_even:
            return self
        return self._even(tuple(map(least_stage, zip(*self.stages_by_cost, strict=True))))

    @cached_property
    def boundary_ms(self) -> tuple[tuple[float, float], ...]:
        """Per stage s: ms from F(s) to F(s+1), and from the backward of s+1 to that of s.

        The last stage's pair is (0, 0).
        """
        return self.boundary_ms_by_cost[0]

    @cached_property
    def boundary_ms_by_cost(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """The `boundary_ms` of each cost."""
        return tuple(map(self._boundary_ms, range(self.num_costs)))

    def _boundary_ms(self, cost: int) -> tuple[tuple[float, float], ...]:
        links = {(link.source, link.target): link for link in self.links}
        pairs = []
        for this, following in pairwise(self.stages_by_cost[cost]):
            there = links.get((this.device, following.device))
            back = links.get((following.device, this.device))
            size = this.output_bytes
            pairs.append(
                (there.transfer_ms(size) if there else 0.0, back.transfer_ms(size) if back else 0.0)
            )
        return (*pairs, (0.0, 0.0))

    @cached_property
    def queues(self) -> bool:
        """Whether messages wait for each other: whether any link is a lane over which bytes go."""
        pairs = chain.from_iterable(self.boundary_lanes_by_cost)
        return any(lane.ms > 0 for pair in pairs for lane in pair)

    @cached_property
    def boundary_lanes(self) -> tuple[tuple[LinkLane, LinkLane], ...]:
        """Per stage s: the lanes of the output of F(s), and of the backward's of s + 1.

        In v2 a directed link with a bandwidth carries one message at a time, in the order of the
        sender's program. In v1 messages never wait for each other.
        """
        return self.boundary_lanes_by_cost[0]

    @cached_property
    def boundary_lanes_by_cost(self) -> tuple[tuple[tuple[LinkLane, LinkLane], ...], ...]:
        """The `boundary_lanes` of each cost."""
        if self.format != V2:
            return (((_FREE, _FREE),) * len(self.stages),) * self.num_costs
        return tuple(map(self._boundary_lanes, range(self.num_costs)))

    def _boundary_lanes(self, cost: int) -> tuple[tuple[LinkLane, LinkLane], ...]:
        links = {
            (link.source, link.target): (index, link)
            for index, link in enumerate(self.links)
            if link.bandwidth_gb_per_s is not None
        }

        def lane(source: Stage, target: Stage, num_bytes: int) -> LinkLane:
            index, link = links.get((source.device, target.device), (-1, None))
            return _FREE if link is None else LinkLane(index, link.occupied_ms(num_bytes))

        pairs = [
            (lane(this, that, this.output_bytes), lane(that, this, this.output_bytes))
            for this, that in pairwise(self.stages_by_cost[cost])
        ]
        return (*pairs, (_FREE, _FREE))

    @cached_property
    def menus(self) -> tuple[tuple[CellMode, ...], ...]:
        """Per stage its modes, defaults filled in; the first is keep (see `Stage.menu`)."""
        return self.menus_by_cost[0]

    @property
    def has_modes(self) -> bool:
        """Whether any stage has a menu that v1 cannot express, or must use one mode for all."""
        stages = chain.from_iterable(self.stages_by_cost)
        return any(stage.uniform_modes or stage.modes for stage in stages)

    def can_use(self, stage: int, mode: int, cost: int = 0) -> bool:
        """Whether the cells of a stage may use a mode: one that moves bytes needs bandwidths."""
        moved = self.menus_by_cost[cost][stage][mode].offload_bytes
        return moved == 0 or self.devices[self.stages[stage].device].can_offload

    @property
    def may_offload(self) -> bool:
        """Whether any stage has a mode that moves bytes and may be used."""
        return any(
            mode.offload_bytes and self.can_use(s, number, cost)
            for cost, menus in enumerate(self.menus_by_cost)
            for s, menu in enumerate(menus)
            for number, mode in enumerate(menu)
        )

    @property
    def may_recompute(self) -> bool:
        """Whether any stage has a mode that recomputes."""
        menus = chain.from_iterable(self.menus_by_cost)
        return any(mode.recompute for menu in menus for mode in menu)

    def can_offload(self, stage: int) -> bool:
        """Whether the stage's activations may go to the host, in a menu that v1 can express."""
        return self.can_move(self.stages[stage])

    def can_move(self, stage: Stage) -> bool:
        """As `can_offload`, of a stage as `stage_of` gives it."""
        return stage.offload_bytes > 0 and self.devices[stage.device].can_offload

    def offload_ms(self, stage: int, num_bytes: int | None = None) -> float:
        """Duration in ms of one OFFLOAD of this stage, of ``offload_bytes`` by default.

        The stage's device must have bandwidths (`can_offload`, `can_use`).
        """
        return self._copy_ms(stage, num_bytes, self.devices[self.stages[stage].device].d2h_gb_per_s)

    def reload_ms(self, stage: int, num_bytes: int | None = None) -> float:
        """Duration in ms of one RELOAD of this stage; as `offload_ms`."""
        return self._copy_ms(stage, num_bytes, self.devices[self.stages[stage].device].h2d_gb_per_s)

    def _copy_ms(self, stage: int, num_bytes: int | None, rate: float | None) -> float:
        if rate is None:
            raise ValueError(f"stage {stage} cannot be offloaded; ask can_offload first")
        moved = self.stages[stage].offload_bytes if num_bytes is None else num_bytes
        return moved / (rate * 1e6)

    def static_bytes_of(self, device: int) -> int:
        """Static bytes of the stages a device holds."""
        return sum(self.stages[stage].static_bytes for stage in self.stages_of[device])

    def room_bytes(self, device: int) -> int:
        """Bytes of a device for activations: its memory without reserved and static bytes."""
        return self.devices[device].usable_bytes - self.static_bytes_of(device)

    @cached_property
    def hidden_ms(self) -> Mapping[tuple[int, int, str], float]:
        """Time hidden in each allowed pair, in ms, by the F's stage, the backward's, its letter."""
        return {(one.forward, one.backward, one.with_): one.hidden_ms for one in self.pairs}

    @cached_property
    def device_busy_ms(self) -> tuple[float, ...]:
        """Minimum compute time of each device without pairs and without recompute."""
        many = Counter(self.cost_of)
        return tuple(
            sum(
                number * sum(self.stages_by_cost[cost][s].busy_ms for s in owned)
                for cost, number in sorted(many.items())
            )
            for owned in self.stages_of
        )

    @property
    def busy_ms(self) -> float:
        """Compute time of the busiest device (docs/specification.md, "Words")."""
        return max(self.device_busy_ms)

    def with_pairs(self, pairs: Iterable[LicensedPair]) -> Problem:
        """Return the problem in format v2 where these may run together; raises as `parse`."""
        listed = [pair.model_dump(by_alias=True) for pair in pairs]
        fields = self.model_dump(by_alias=True)
        return Problem.parse(fields | {"format": "optpipe/problem/v2", "pairs": listed})

    @cached_property
    def problem_hash(self) -> str:
        """``sha256:...`` over canonical JSON, defaults filled in, without name and context."""
        data = self.model_dump(mode="json", by_alias=True)
        for name in ("name", "context"):
            data.pop(name, None)
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def __repr__(self) -> str:
        """Return the name, the sizes and the start of the hash; not the stages."""
        name = f"{self.name[:_NAME_CHARS]!r}: " if self.name else ""
        return (
            f"Problem({name}{len(self.devices)} devices, {len(self.stages)} stages, "
            f"{self.num_microbatches} micro-batches, {self.problem_hash[:_HASH_CHARS]})"
        )

    __str__ = __repr__


def _under_head(head: Stage, cost: Stage) -> Stage:
    """Return a stage under another cost, with what it has whatever the cost."""
    return cost.model_copy(update={name: getattr(head, name) for name in OF_STAGE})


def _named(device: Any, name: str) -> Any:
    if isinstance(device, dict) and device.get("name") in (None, ""):
        return {**device, "name": name}
    if isinstance(device, Device) and not device.name:
        return device.model_copy(update={"name": name})
    return device


@cache
def placement_of(name: str, num_devices: int, chunks: int) -> tuple[int, ...]:
    """Return the device of each stage: once along the devices, round and round, or to and fro.

    ``name`` is one of `Placement`; a line has one chunk.
    """
    line = tuple(range(num_devices))
    turns = (line[::-1] if name == "v" and turn % 2 else line for turn in range(chunks))
    return tuple(device for turn in turns for device in turn)
