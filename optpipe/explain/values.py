"""The values of an explanation (``optpipe/explanation/v1``): numbers, and sentences made of them.

Times are ms on the clock of `optpipe.simulate`, which starts at 0; sizes are bytes; devices and
stages are indices into the problem. The functions that make the numbers define them exactly.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from optpipe.problem import FrozenValue, Objective
from optpipe.schedule import Action
from optpipe.units import ShortRepr

__all__ = [
    "CriticalPath",
    "DeviceIdle",
    "DeviceMemory",
    "Explanation",
    "HostMemory",
    "IdleCause",
    "LaneKind",
    "LaneSlack",
    "LaneUse",
    "Necessity",
    "PathRun",
    "PieceKind",
    "Relief",
    "ReliefKind",
    "RunKind",
    "Sentence",
    "StageRelief",
    "Topic",
]

LaneKind = Literal["compute", "d2h", "h2d", "both ways", "grad sync", "link"]
PieceKind = Literal["compute", "link", "d2h", "h2d", "grad sync", "queue"]
RunKind = Literal["device", "wave", "link", "d2h", "h2d", "grad sync", "queue"]
ReliefKind = Literal["offload", "recompute", "mode"]
Topic = Literal[
    "length",
    "critical path",
    "lanes",
    "pairs",
    "slack",
    "memory",
    "idle",
    "offload",
    "recompute",
    "mode",
]


class IdleCause(StrEnum):
    """Why a compute lane was idle; `optpipe.explain.reasons` defines the causes."""

    WARM_UP = "warm-up"
    FORWARD = "forward from upstream"
    BACKWARD = "backward from downstream"
    LINK = "link"
    RELOAD = "reload"
    RELEASE = "release"
    GRAD_SYNC = "gradient reduction"
    COOL_DOWN = "cool-down"


class Necessity(StrEnum):
    """Whether an offload or a recomputation is needed; `optpipe.explain.memory` has the rule."""

    NEEDED = "needed"
    INTERCHANGEABLE = "interchangeable"
    UNNEEDED = "unneeded"


class PathRun(FrozenValue):
    """A part of the critical path that a person reads as one thing.

    * ``kind``: ``device``: one device computes without a wait. ``wave``: one micro-batch goes
      through neighbouring stages. Else a transfer, a link, a gradient reduction, or ``queue``: a
      transfer that waits for its lane.
    * ``devices``: in the order in which the path visits them.
    * ``actions``: in order; none for a gradient reduction.
    * ``start_ms``, ``end_ms``: ``end_ms - start_ms`` is what the run contributes to the length.
    * ``link_ms``: what of it is spent on links between devices.
    """

    kind: RunKind
    devices: tuple[int, ...]
    actions: tuple[Action, ...]
    start_ms: float
    end_ms: float
    link_ms: float = 0.0

    @property
    def length_ms(self) -> float:
        """The part of the length that the run takes, in ms."""
        return self.end_ms - self.start_ms


class CriticalPath(FrozenValue):
    """The chain that makes the length, see `optpipe.explain.reasons.critical_path`.

    ``by_kind`` and ``by_device`` split ``length_ms``: by what happens, and, for all but links, by
    the device it happens on.
    """

    length_ms: float
    by_kind: dict[PieceKind, float]
    by_device: dict[int, float]
    runs: tuple[PathRun, ...]


class LaneUse(FrozenValue):
    """How much of a lane is used; ``group`` is the PCIe group that shares it, if one does."""

    lane: LaneKind
    devices: tuple[int, ...]
    group: str | None
    busy_ms: float
    share: float


class LaneSlack(FrozenValue):
    """How many times as long all that runs on a lane may take before the step is longer.

    ``factor``: at least 1; 1 = any delay there makes the step longer. Alone: all other lanes are as
    fast as they are.
    """

    lane: LaneKind
    devices: tuple[int, ...]
    group: str | None
    factor: float


class DeviceMemory(FrozenValue):
    """The memory of a device: reserved bytes are in neither ``peak_bytes`` nor ``limit_bytes``.

    ``fullest_at`` is the first action at which the peak is reached; None without actions.
    """

    device: int
    static_bytes: int
    peak_bytes: int
    limit_bytes: int
    fullest_at: Action | None

    @property
    def headroom_bytes(self) -> int:
        """Bytes that are never used."""
        return self.limit_bytes - self.peak_bytes


class HostMemory(FrozenValue):
    """The memory of a host; ``limit_bytes`` None = no limit."""

    host: str
    peak_bytes: int
    limit_bytes: int | None


class DeviceIdle(FrozenValue):
    """The idle time of a device's compute lane; ``causes`` sum to ``idle_ms``, none of them 0."""

    device: int
    busy_ms: float
    idle_ms: float
    causes: dict[IdleCause, float]


class Relief(FrozenValue):
    """One (stage, micro-batch) that is offloaded, recomputed, or in another mode than keep.

    * ``saved_bytes``: what the device does not hold meanwhile, at most.
    * ``verdict``: whether that is needed.
    * ``exceeds_at``: the first action at which the device would hold most meanwhile without this
      one alone; None without other actions in between.
    * ``excess_bytes``: by how much that exceeds the limit; at most 0 if the device still fits, 0
      without other actions in between.
    """

    microbatch: int
    saved_bytes: int
    verdict: Necessity
    exceeds_at: Action | None
    excess_bytes: int


class StageRelief(FrozenValue):
    """The cells that a stage offloads, recomputes, or treats in another mode, by name.

    ``exceeds_at`` and ``excess_bytes`` are those without all of ``reliefs`` together.
    """

    stage: int
    device: int
    kind: ReliefKind
    mode: str = ""
    reliefs: tuple[Relief, ...]
    exceeds_at: Action | None
    excess_bytes: int

    def microbatches(self, *verdicts: Necessity) -> tuple[int, ...]:
        """Return the micro-batches with one of these verdicts, in ascending order."""
        return tuple(sorted(r.microbatch for r in self.reliefs if r.verdict in verdicts))


class Sentence(FrozenValue):
    """One sentence of the explanation and what it is about."""

    topic: Topic
    text: str


class Explanation(ShortRepr, FrozenValue):
    """Why a schedule is as long as it is, and why it offloads and recomputes what it does."""

    format: Literal["optpipe/explanation/v1"] = "optpipe/explanation/v1"
    problem_hash: str
    objective: Objective
    length_ms: float
    makespan_ms: float
    span_ms: float
    busiest_ms: float = Field(
        description="Compute time of the busiest device; without pairs no schedule is shorter."
    )
    bubble_rate: float = Field(description="Mean over the devices of 1 - busy / length.")
    bound_ms: float | None = None
    critical_path: CriticalPath
    lanes: tuple[LaneUse, ...]
    slacks: tuple[LaneSlack, ...] = Field(
        (), description="The least first; empty for schedules of very many actions."
    )
    memory: tuple[DeviceMemory, ...]
    hosts: tuple[HostMemory, ...]
    idle: tuple[DeviceIdle, ...]
    reliefs: tuple[StageRelief, ...]
    sentences: tuple[Sentence, ...] = ()
