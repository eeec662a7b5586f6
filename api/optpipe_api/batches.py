"""A batch: many problems handed in at once, and what its jobs say about it.

A batch has no state of its own. Each of its items is a job, which names the batch and the item's
place in it; progress, results and the end of the batch are read from those jobs, so there is
nothing that could disagree with them. Only what the jobs do not know is kept: the axes of a sweep,
and for each item its values on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe.wire import JobOptions, JobState
    from optpipe_api.jobs import JobRecord

__all__ = ["BatchItem", "BatchPlan", "BatchRecord", "ItemPlan", "NewBatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlan:
    """What is known of an item before it is solved.

    ``values``: on the axes of the sweep; empty where problems were listed. Of a what-if: the name
    of the question, and the number of micro-batches of its problem. ``memory_bytes``: the budget of
    each device. ``family``: equal for items that differ in nothing but names and the memory of
    devices.
    """

    values: dict[str, Any]
    memory_bytes: tuple[int, ...]
    family: str

    def __post_init__(self) -> None:
        # JSON gives a list back.
        object.__setattr__(self, "memory_bytes", tuple(self.memory_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What a batch is about: the axes, how each item is solved, and the items in order."""

    axes: dict[str, list[Any]]
    options: JobOptions
    tags: tuple[str, ...]
    priority: int
    items: tuple[ItemPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a batch is made of; keys of different owners never meet."""

    name: str
    owner: str
    plan: BatchPlan
    request_hash: str
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """One item of a batch: what was planned, and its job as it is now."""

    index: int
    plan: ItemPlan
    job: JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """The record of a batch with what its jobs say; times in seconds since the epoch, UTC.

    ``counts`` has only states in which there are jobs, ``finished_at`` is when the last of them
    ended: None while one goes on.
    """

    id: str
    position: int
    name: str
    owner: str
    created_at: float
    counts: dict[JobState, int] = field(default_factory=dict)
    finished_at: float | None = None

    @property
    def num_items(self) -> int:
        """How many jobs it has."""
        return sum(self.counts.values())

    @property
    def num_finished(self) -> int:
        """How many of them have ended."""
        return sum(number for state, number in self.counts.items() if state.is_final)

    @property
    def progress(self) -> float:
        """Share of its jobs that have ended, 0 to 1."""
        return self.num_finished / self.num_items if self.num_items else 1.0

    @property
    def is_finished(self) -> bool:
        """Whether all of them have."""
        return self.num_finished == self.num_items
