"""Rows of deployments: found, read, changed by compare-and-set, and made into values."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from optpipe_api.deployments import Deployment, DeploymentOptions, Version
from optpipe_api.errors import ConflictError, DeploymentNotFoundError, KeyReusedError
from optpipe_api.jobs import JobError, JobOptions
from optpipe_api.store.tables import deployment_versions, deployments, measurements

if TYPE_CHECKING:
    from optpipe_api.deployments import NewDeployment

__all__ = [
    "KEPT_REPORTS",
    "average",
    "change",
    "deployment_of",
    "expect_version",
    "find_by_key",
    "find_row",
    "keep_newest_reports",
    "version_of",
]

KEPT_REPORTS: Final = 5
"""Times are medians over so many reports: a slow step now and then moves none of them."""

_ID = re.compile(r"[0-9a-f]{32}")
_EXPECTED = ("version", "num_solves", "job_reason", "job_id")


def find_row(
    connection: sa.Connection, deployment_id: str, *, for_update: bool = False
) -> sa.Row[Any]:
    """Return the row of a deployment, held where it is to be changed.

    Raises
    ------
    DeploymentNotFoundError
        If none has this id.
    """
    query = sa.select(deployments).where(deployments.c.id == deployment_id)
    if for_update:
        query = query.with_for_update()
    row = connection.execute(query).one_or_none() if _ID.fullmatch(deployment_id) else None
    if row is None:
        raise DeploymentNotFoundError(deployment_id)
    return row


def find_by_key(
    connection: sa.Connection, key: str | None, new: NewDeployment
) -> tuple[Deployment, bool] | None:
    """Return the deployment that a key made before, and False.

    Raises
    ------
    KeyReusedError
        If it was made from another request.
    """
    if key is None:
        return None
    query = sa.select(deployments).where(deployments.c.idempotency_key == key)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    if row.request_hash != new.request_hash:
        raise KeyReusedError(
            f"the Idempotency-Key {new.idempotency_key!r} made deployment {row.id} from another "
            "request; use a new key for a new request"
        )
    return deployment_of(row), False


def change(connection: sa.Connection, known: Deployment, **values: Any) -> Deployment | None:
    """Change a deployment that is still as known."""
    same = [deployments.c[name].is_not_distinct_from(getattr(known, name)) for name in _EXPECTED]
    changed = (
        sa.update(deployments)
        .where(deployments.c.position == known.position, deployments.c.ended_at.is_(None), *same)
        .values(**values)
        .returning(deployments)
    )
    row = connection.execute(changed).one_or_none()
    return None if row is None else deployment_of(row)


def expect_version(row: sa.Row[Any], version: int) -> None:
    """Refuse a report to an ended deployment, or about a version that is not.

    Raises
    ------
    ConflictError
        With what there is.
    """
    if row.ended_at is not None:
        raise ConflictError(f"deployment {row.id} has ended; register the training run again")
    if not 1 <= version <= row.version:
        has = f"versions 1 to {row.version}" if row.version else "no version yet"
        raise ConflictError(
            f"version = {version}: deployment {row.id} has {has}; report the version that ran"
        )


def average(connection: sa.Connection, position: int, version: int, step_ms: float) -> None:
    """Take a step time into the mean of a version."""
    columns = deployment_versions.c
    total = sa.func.coalesce(columns.measured_ms, 0.0) * columns.num_measured + step_ms
    connection.execute(
        sa.update(deployment_versions)
        .where(columns.position == position, columns.version == version)
        .values(
            measured_ms=total / (columns.num_measured + 1.0),
            num_measured=columns.num_measured + 1,
        )
    )


def keep_newest_reports(connection: sa.Connection, position: int) -> list[str]:
    """Return the reports to keep, oldest first, and delete the others."""
    newest = (
        sa.select(measurements.c.number, measurements.c.document)
        .where(measurements.c.position == position)
        .order_by(measurements.c.number.desc())
        .limit(KEPT_REPORTS)
    )
    kept = connection.execute(newest).all()
    connection.execute(
        sa.delete(measurements).where(
            measurements.c.position == position, measurements.c.number < kept[-1].number
        )
    )
    return [row.document for row in reversed(kept)]


def deployment_of(row: sa.Row[Any]) -> Deployment:
    """Return the deployment of a row."""
    options = json.loads(row.options)
    return Deployment(
        id=row.id,
        position=row.position,
        name=row.name,
        owner=row.owner,
        options=DeploymentOptions(job=JobOptions(**options["job"]), threshold=options["threshold"]),
        created_at=row.created_at,
        ended_at=row.ended_at,
        version=row.version,
        job_reason=row.job_reason,
        job_id=row.job_id,
        num_solves=row.num_solves,
        num_seen=row.num_seen,
        error=None if row.error is None else JobError(**json.loads(row.error)),
        planned_ms=row.planned_ms,
        num_reports=row.num_reports,
        num_judged=row.num_judged,
        current_ms=row.current_ms,
        expected_ms=row.expected_ms,
    )


def version_of(row: sa.Row[Any]) -> Version:
    """Return the version of a row."""
    return Version(
        version=row.version,
        created_at=row.created_at,
        reason=row.reason,
        job_id=row.job_id,
        predicted_ms=row.predicted_ms,
        measured_ms=row.measured_ms,
        num_measured=row.num_measured,
    )
