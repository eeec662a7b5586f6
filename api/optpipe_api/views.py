"""Records as they go out over HTTP: each function returns a value of `optpipe.wire`."""

from __future__ import annotations

from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from optpipe.answers import (
    Answer,
    BatchView,
    DeploymentView,
    Event,
    Improvement,
    Item,
    Job,
    JobState,
    MethodList,
    MethodView,
    Version,
)
from optpipe.plot.scene import title_of
from optpipe.schedule import gap_of
from optpipe_api.access import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe_api.access import Principal
    from optpipe_api.deployments import DeploymentRecord, VersionRecord
    from optpipe_api.jobs import (
        BatchItem,
        BatchPlan,
        BatchRecord,
        HistoryEntry,
        JobRecord,
        TracePoint,
        Waiting,
    )

__all__ = [
    "batch_view",
    "deployment_view",
    "event_view",
    "job_view",
    "load_methods",
    "method_list",
    "version_view",
]

View = TypeVar("View", bound=Answer)


def job_view(
    job: JobRecord,
    trace: Sequence[TracePoint] | None = None,
    *,
    who: Principal,
    places: Mapping[str, Waiting] = MappingProxyType({}),
) -> Job:
    """Return a job as somebody sees it, with its place in the queue; without trace in lists."""
    place = places.get(job.id)
    shown = None if trace is None else tuple(Improvement(**asdict(one)) for one in trace)
    return _seen(
        Job,
        job,
        owner=_owner(job.owner, who),
        trace=shown,
        place=None if place is None else place.place,
        expected_start_at=None if place is None else place.starts_at,
    )


def event_view(entry: HistoryEntry) -> Event:
    """Return an entry of a job's history as an event."""
    gap = None if entry.objective_ms is None else gap_of(entry.objective_ms, entry.bound_ms)
    return _seen(Event, entry, gap=gap)


def batch_view(
    batch: BatchRecord,
    who: Principal,
    plan: BatchPlan | None = None,
    items: Sequence[BatchItem] | None = None,
) -> BatchView:
    """Return a batch as somebody sees it; without plan and items in lists."""
    return _seen(
        BatchView,
        batch,
        owner=_owner(batch.owner, who),
        counts={state: batch.counts.get(state, 0) for state in JobState},
        axes=None if plan is None else plan.axes,
        options=None if plan is None else plan.options,
        tags=None if plan is None else plan.tags,
        priority=None if plan is None else plan.priority,
        items=None if items is None else tuple(map(_item, items)),
    )


def _item(item: BatchItem) -> Item:
    return _seen(
        Item,
        item.job,
        index=item.index,
        job_id=item.job.id,
        values=item.plan.values,
        memory_bytes=max(item.plan.memory_bytes),
    )


def deployment_view(deployment: DeploymentRecord, who: Principal) -> DeploymentView:
    return _seen(
        DeploymentView,
        deployment,
        owner=_owner(deployment.owner, who),
        reason=deployment.job_reason,
    )


def version_view(version: VersionRecord) -> Version:
    return _seen(Version, version)


def method_list(described: Mapping[str, str]) -> MethodList:
    """Return methods, each with its title and the line about it."""
    return MethodList(
        methods=tuple(
            MethodView(name=name, title=title_of(name), description=text)
            for name, text in described.items()
        )
    )


def _owner(owner: str, who: Principal) -> str | None:
    return owner if who.role is Role.ADMIN else None


def _seen(view: type[View], record: object, /, **others: Any) -> View:
    """Return a view whose fields are the record's of the same names, but for the others.

    Its times, seconds since the epoch, become moments in UTC.
    """
    names = view.model_fields.keys() - others
    shown = {name: getattr(record, name) for name in names if hasattr(record, name)}
    return view.model_validate(shown | others, from_attributes=True)


# --- The methods that the solver knows, each with one line about it.

_AUTO = (
    "The optimiser: the best of all methods as a start, improved by local search and "
    "polished building blocks, with a bound proven by exact searches."
)
_MILP = "The full-horizon MILP alone: order and offload together, below the best published method."


def load_methods() -> dict[str, str]:
    """Return every method's name and description.

    The first call imports the solver, half a second: make it in a thread.
    """
    from optpipe_solver import METHODS  # noqa: PLC0415 - heavy; the service needs it, workers too
    from optpipe_solver.families import FAMILIES  # noqa: PLC0415 - likewise

    described = {"auto": _AUTO, "milp": _MILP} | {
        family.name: family.summary for family in FAMILIES
    }
    return {name: described[name] for name in METHODS}
