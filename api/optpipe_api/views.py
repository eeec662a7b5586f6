"""Records as they go out over HTTP: each function returns a value of `optpipe.wire`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, overload

from optpipe.plot.scene import title_of
from optpipe.schedule import gap_of
from optpipe.wire import (
    BatchView,
    DeploymentState,
    DeploymentView,
    Event,
    Failure,
    Improvement,
    Item,
    Job,
    JobState,
    MethodList,
    MethodView,
    Version,
)
from optpipe_api.access import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe_api.access import Principal
    from optpipe_api.batches import BatchItem, BatchPlan, BatchRecord
    from optpipe_api.deployments import DeploymentRecord, VersionRecord
    from optpipe_api.jobs import HistoryEntry, JobError, JobRecord, TracePoint

__all__ = [
    "batch_view",
    "deployment_view",
    "event_view",
    "job_view",
    "load_methods",
    "method_list",
    "version_view",
]


def job_view(job: JobRecord, trace: Sequence[TracePoint] | None = None, *, who: Principal) -> Job:
    """Return a job as somebody sees it; without its trace in lists."""
    return Job(
        id=job.id,
        kind=job.kind,
        state=job.state,
        has_schedule=job.has_schedule,
        cache=job.cache,
        source_id=job.source_id,
        name=job.name,
        owner=_owner(job.owner, who),
        problem_hash=job.problem_hash,
        objective=job.objective,
        objective_ms=job.objective_ms,
        bound_ms=job.bound_ms,
        gap=job.gap,
        options=job.options,
        tags=job.tags,
        priority=job.priority,
        batch_id=job.batch_id,
        batch_index=job.batch_index,
        deployment_id=job.deployment_id,
        cancel_requested=job.cancel_requested,
        attempt=job.attempt,
        spent_s=job.spent_s,
        num_schedules=job.num_schedules,
        error=_failure(job.error),
        created_at=_moment(job.created_at),
        started_at=_moment(job.started_at),
        finished_at=_moment(job.finished_at),
        trace=None if trace is None else tuple(Improvement(**asdict(one)) for one in trace),
    )


def event_view(entry: HistoryEntry) -> Event:
    """Return an entry of a job's history as an event."""
    objective_ms = entry.objective_ms
    return Event(
        number=entry.number,
        kind=entry.kind,
        at=_moment(entry.at),
        seconds=entry.seconds,
        method=entry.method,
        objective_ms=objective_ms,
        bound_ms=entry.bound_ms,
        gap=None if objective_ms is None else gap_of(objective_ms, entry.bound_ms),
        text=entry.text,
    )


def batch_view(
    batch: BatchRecord,
    who: Principal,
    plan: BatchPlan | None = None,
    items: Sequence[BatchItem] | None = None,
) -> BatchView:
    """Return a batch as somebody sees it; without plan and items in lists."""
    return BatchView(
        id=batch.id,
        name=batch.name,
        owner=_owner(batch.owner, who),
        is_finished=batch.is_finished,
        progress=batch.progress,
        num_items=batch.num_items,
        counts={state: batch.counts.get(state, 0) for state in JobState},
        created_at=_moment(batch.created_at),
        finished_at=_moment(batch.finished_at),
        axes=None if plan is None else plan.axes,
        options=None if plan is None else plan.options,
        tags=None if plan is None else plan.tags,
        priority=None if plan is None else plan.priority,
        items=None if items is None else tuple(_item(item) for item in items),
    )


def _item(item: BatchItem) -> Item:
    job = item.job
    return Item(
        index=item.index,
        job_id=job.id,
        name=job.name,
        values=item.plan.values,
        state=job.state,
        cache=job.cache,
        memory_bytes=max(item.plan.memory_bytes),
        objective_ms=job.objective_ms,
        bound_ms=job.bound_ms,
        gap=job.gap,
        error=_failure(job.error),
        started_at=_moment(job.started_at),
        finished_at=_moment(job.finished_at),
    )


def deployment_view(deployment: DeploymentRecord, who: Principal) -> DeploymentView:
    """Return a deployment as somebody sees it."""
    return DeploymentView(
        id=deployment.id,
        state=_state_of(deployment),
        name=deployment.name,
        owner=_owner(deployment.owner, who),
        version=deployment.version,
        reason=deployment.job_reason,
        job_id=deployment.job_id,
        error=_failure(deployment.error),
        options=deployment.options.job,
        threshold=deployment.options.threshold,
        num_reports=deployment.num_reports,
        num_judged=deployment.num_judged,
        current_ms=deployment.current_ms,
        expected_ms=deployment.expected_ms,
        drift=deployment.drift,
        created_at=_moment(deployment.created_at),
        ended_at=_moment(deployment.ended_at),
    )


def _state_of(deployment: DeploymentRecord) -> DeploymentState:
    if deployment.ended_at is not None:
        return DeploymentState.ENDED
    if deployment.job_id is not None:
        return DeploymentState.SOLVING
    if deployment.job_reason is not None:
        return DeploymentState.WAITING
    return DeploymentState.FOLLOWING if deployment.version else DeploymentState.FAILED


def version_view(version: VersionRecord) -> Version:
    """Return a version of a deployment."""
    return Version(**(asdict(version) | {"created_at": _moment(version.created_at)}))


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


def _failure(error: JobError | None) -> Failure | None:
    return None if error is None else Failure(**asdict(error))


@overload
def _moment(seconds: float) -> datetime: ...
@overload
def _moment(seconds: None) -> None: ...
def _moment(seconds: float | None) -> datetime | None:
    """Return a time as views show it, from seconds since the epoch."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


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
