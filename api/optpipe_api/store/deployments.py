"""The store of deployments, over SQLite and PostgreSQL.

1. **Atomic.** Each method is one transaction. A process killed inside leaves all of it or nothing.
2. **Compare and set.** The methods that take a `Deployment` change it only where it is still the
   one that the caller knows: not ended, same version, same solve. Whoever comes too late gets None
   and must look again.
3. **Versions** count from 1 without holes, and are never changed but for what is measured of them.
4. **Once.** A second `add` under the same idempotency key of the same owner returns the first
   deployment, or refuses where the request differs. Two at the same time too.
5. **Bounded.** Of the reports of a deployment the newest few are kept (`KEPT_REPORTS`).

Methods block, and raise `StoreUnavailableError` where the database does not answer.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from optpipe.answers import JobOptions
from optpipe_api.deployments import (
    REGISTERED,
    DeploymentRecord,
    DeploymentStanding,
    Documents,
    VersionRecord,
)
from optpipe_api.errors import DeploymentNotFoundError, StateConflictError
from optpipe_api.jobs import JobError
from optpipe_api.store.database import (
    added_once,
    deployment_versions,
    deployments,
    in_groups,
    made_before,
    measurements,
    newest_first,
    reading,
    record_of,
    row_with_id,
    writing,
)
from optpipe_api.store.job_rows import (
    digest_key,
    dump,
    refuse_when_full,
    refuse_when_many,
    storable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_api.deployments import Judgement, NewDeployment, NewVersion, Report

__all__ = ["KEPT_REPORTS", "DeploymentStore"]


# Made once: to put a query together takes longer than to answer it.
_STANDINGS = sa.select(
    deployments.c.id,
    deployments.c.owner,
    deployments.c.version,
    deployments.c.ended_at,
    deployments.c.error.is_not(None).label("has_failed"),
).where(deployments.c.id.in_(sa.bindparam("ids", expanding=True)))
_SHOWN = [column for column in deployment_versions.c if column.name != "schedule"]


class DeploymentStore:
    """Keeps deployments; the promises are in the module's docstring."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._now = clock

    def add(
        self, new: NewDeployment, *, max_queued: int, max_of_owner: int | None = None
    ) -> tuple[DeploymentRecord, bool]:
        """Keep a deployment whose first solve is wanted; False where the key had made it before.

        Raises `QueueFullError` if ``max_queued`` jobs wait already; `TooManyJobsError` if
        ``max_of_owner`` jobs and deployments of its owner are under way; `KeyReusedError` if the
        idempotency key belongs to another request.
        """
        key = digest_key(new.owner, new.idempotency_key)

        def insert_new(connection: sa.Connection) -> tuple[DeploymentRecord, bool]:
            refuse_when_full(connection, max_queued)
            refuse_when_many(connection, new.owner, max_of_owner)
            return self._insert(connection, new, key), True

        def find(connection: sa.Connection) -> tuple[DeploymentRecord, bool] | None:
            query = sa.select(deployments).where(deployments.c.idempotency_key == key)
            row = None if key is None else made_before(connection, query, new, "deployment")
            return None if row is None else (_deployment_of(row), False)

        return added_once(self._engine, find, insert_new)

    def _insert(
        self, connection: sa.Connection, new: NewDeployment, key: str | None
    ) -> DeploymentRecord:
        values = {
            "id": uuid.uuid4().hex,
            "name": storable(new.name),
            "owner": new.owner,
            "idempotency_key": key,
            "created_at": self._now(),
            "request_hash": new.request_hash,
            "options": dump({"job": asdict(new.options), "threshold": new.threshold}),
            "problem": new.problem,
            "planned": new.problem,
            "version": 0,
            "job_reason": REGISTERED,
            "num_solves": 1,
            "num_seen": 0,
            "num_reports": 0,
            "num_judged": 0,
        }
        row = connection.execute(sa.insert(deployments).values(values).returning(deployments)).one()
        return _deployment_of(row)

    def get(self, deployment_id: str) -> DeploymentRecord:
        """Return a deployment.

        Raises `DeploymentNotFoundError` here and below, if none has this id.
        """
        with reading(self._engine) as connection:
            return _deployment_of(_find_row(connection, deployment_id))

    def standings(self, deployment_ids: Sequence[str]) -> dict[str, DeploymentStanding]:
        """Return how far deployments have come, by their ids; unknown ids are left out.

        One query for up to a thousand, along indices: while anybody waits for a version, it is
        asked each second.
        """
        with reading(self._engine) as connection:
            return {
                row.id: DeploymentStanding(
                    row.owner, row.version, row.ended_at is not None, bool(row.has_failed)
                )
                for ids in in_groups(deployment_ids)
                for row in connection.execute(_STANDINGS, {"ids": ids})
            }

    def page(
        self, limit: int, before: int | None = None, *, owner: str | None = None
    ) -> list[DeploymentRecord]:
        """Return deployments, newest first, of positions below ``before``."""
        query = newest_first(sa.select(deployments), deployments, limit, before, owner)
        with reading(self._engine) as connection:
            return [_deployment_of(row) for row in connection.execute(query)]

    def pending(self) -> list[str]:
        """Return the ids of the deployments for which there is something to do, oldest first."""
        query = (
            sa.select(deployments.c.id)
            .where(deployments.c.ended_at.is_(None))
            .where(
                deployments.c.job_reason.is_not(None)
                | (deployments.c.num_reports > deployments.c.num_judged)
            )
            .order_by(deployments.c.position)
        )
        with reading(self._engine) as connection:
            return list(connection.execute(query).scalars())

    def documents(self, deployment_id: str) -> Documents:
        with reading(self._engine) as connection:
            row = _find_row(connection, deployment_id)
        return Documents(problem=row.problem, measured=row.measured, planned=row.planned)

    def versions(self, deployment_id: str) -> list[VersionRecord]:
        with reading(self._engine) as connection:
            position = _find_row(connection, deployment_id).position
            query = (
                sa.select(*_SHOWN)
                .where(deployment_versions.c.position == position)
                .order_by(deployment_versions.c.version)
            )
            return [record_of(VersionRecord, row) for row in connection.execute(query)]

    def schedule(self, deployment_id: str) -> tuple[int, str] | None:
        """Return number and schedule (JSON text) of the newest version; None before the first."""
        newest = (
            sa.select(deployment_versions.c.version, deployment_versions.c.schedule)
            .join(deployments, deployments.c.position == deployment_versions.c.position)
            .where(deployments.c.id == deployment_id)
            .where(deployments.c.version == deployment_versions.c.version)
        )
        with reading(self._engine) as connection:
            _find_row(connection, deployment_id)
            found = connection.execute(newest).one_or_none()
        return None if found is None else (found.version, found.schedule)

    # What training runs do

    def report(
        self, deployment_id: str, report: Report, measure: Callable[[str, Sequence[str]], str]
    ) -> DeploymentRecord:
        """Keep a report and what is now measured.

        ``measure``: from the problem as registered and the documents of the newest reports, oldest
        first, to the problem as measured. Raises `StateConflictError` if the deployment has ended,
        or has no such version.
        """
        with writing(self._engine) as connection:
            row = _find_row(connection, deployment_id, for_update=True)
            _expect_version(row, report.version)
            self._insert_report(connection, row.position, report)
            if report.step_ms is not None:
                _average(connection, row.position, report.version, report.step_ms)
            documents = _keep_newest_reports(connection, row.position)
            changed = (
                sa.update(deployments)
                .where(deployments.c.position == row.position)
                .values(measured=measure(row.problem, documents), num_reports=row.num_reports + 1)
                .returning(deployments)
            )
            return _deployment_of(connection.execute(changed).one())

    def _insert_report(self, connection: sa.Connection, position: int, report: Report) -> None:
        connection.execute(
            sa.insert(measurements).values(
                position=position,
                at=self._now(),
                version=report.version,
                step=report.step,
                step_ms=report.step_ms,
                document=report.document,
            )
        )

    def end(self, deployment_id: str) -> DeploymentRecord:
        """End a deployment; an ended one stays as it is."""
        with writing(self._engine) as connection:
            row = _find_row(connection, deployment_id, for_update=True)
            if row.ended_at is None:
                ended = (
                    sa.update(deployments)
                    .where(deployments.c.position == row.position)
                    .values(ended_at=self._now())
                    .returning(deployments)
                )
                row = connection.execute(ended).one()
            return _deployment_of(row)

    # What servers do

    def start(self, known: DeploymentRecord, job_id: str) -> DeploymentRecord | None:
        """Write down the job of the solve that is wanted."""
        with writing(self._engine) as connection:
            return _change(connection, known, job_id=job_id)

    def saw(self, known: DeploymentRecord, num_seen: int) -> DeploymentRecord | None:
        """Write down how many schedules of the job were looked at."""
        with writing(self._engine) as connection:
            return _change(connection, known, num_seen=num_seen)

    def publish(self, known: DeploymentRecord, new: NewVersion) -> DeploymentRecord | None:
        with writing(self._engine) as connection:
            changed = _change(
                connection,
                known,
                version=known.version + 1,
                planned=new.problem,
                planned_ms=new.predicted_ms,
                num_seen=new.num_seen,
                current_ms=None,
                expected_ms=None,
            )
            if changed is not None:
                connection.execute(
                    sa.insert(deployment_versions).values(
                        position=known.position,
                        version=changed.version,
                        created_at=self._now(),
                        reason=new.reason,
                        job_id=known.job_id,
                        predicted_ms=new.predicted_ms,
                        num_measured=0,
                        schedule=new.schedule,
                    )
                )
            return changed

    def settle(
        self, known: DeploymentRecord, error: JobError | None = None
    ) -> DeploymentRecord | None:
        """Write down that the solve is over, and why it gave nothing."""
        with writing(self._engine) as connection:
            error_text = None if error is None else storable(dump(error))
            return _change(connection, known, job_id=None, job_reason=None, error=error_text)

    def judge(self, known: DeploymentRecord, judgement: Judgement) -> DeploymentRecord | None:
        """Write down how the schedule in use does, and that a solve is wanted where it is."""
        values: dict[str, Any] = {
            "num_judged": judgement.num_reports,
            "current_ms": judgement.current_ms,
            "expected_ms": judgement.expected_ms,
        }
        if judgement.reason is not None:
            values |= {
                "job_reason": judgement.reason,
                "planned": judgement.problem,
                "planned_ms": judgement.current_ms,
                "num_solves": known.num_solves + 1,
                "num_seen": 0,
                "error": None,
            }
        with writing(self._engine) as connection:
            return _change(connection, known, **values)

    def delete_ended(self, before: float, limit: int) -> int:
        """Delete up to ``limit`` deployments that ended before a moment; return how many."""
        old = (
            sa.select(deployments.c.position)
            .where(deployments.c.ended_at < before)
            .order_by(deployments.c.position)
            .limit(limit)
        )
        with writing(self._engine) as connection:
            positions = list(connection.execute(old).scalars())
            _forget(connection, positions)
        return len(positions)

    def delete(self, deployment_id: str) -> None:
        """Forget an ended deployment, its versions and its reports.

        Raises `StateConflictError` if it has not ended.
        """
        with writing(self._engine) as connection:
            row = _find_row(connection, deployment_id, for_update=True)
            if row.ended_at is None:
                raise StateConflictError(
                    f"deployment {deployment_id} goes on: only an ended one can be deleted; end it "
                    f"first: POST /v1/deployments/{deployment_id}/end"
                )
            _forget(connection, [row.position])


# --- Rows of deployments: found, read, changed by compare-and-set, and made into values.

KEPT_REPORTS: Final = 5
"""Times are medians over so many reports: a slow step now and then moves none of them."""

_BY_ID = sa.select(deployments).where(deployments.c.id == sa.bindparam("id"))
_EXPECTED = ("version", "num_solves", "job_reason", "job_id")


def _find_row(
    connection: sa.Connection, deployment_id: str, *, for_update: bool = False
) -> sa.Row[Any]:
    query = _BY_ID.with_for_update() if for_update else _BY_ID
    return row_with_id(connection, query, deployment_id, DeploymentNotFoundError)


def _forget(connection: sa.Connection, positions: list[int]) -> None:
    for table in (measurements, deployment_versions, deployments):
        connection.execute(sa.delete(table).where(table.c.position.in_(positions)))


def _change(
    connection: sa.Connection, known: DeploymentRecord, **values: Any
) -> DeploymentRecord | None:
    """Change a deployment that is still as known."""
    same = [deployments.c[name].is_not_distinct_from(getattr(known, name)) for name in _EXPECTED]
    changed = (
        sa.update(deployments)
        .where(deployments.c.position == known.position, deployments.c.ended_at.is_(None), *same)
        .values(**values)
        .returning(deployments)
    )
    row = connection.execute(changed).one_or_none()
    return None if row is None else _deployment_of(row)


def _expect_version(row: sa.Row[Any], version: int) -> None:
    """Refuse a report to an ended deployment, or about a version that is not.

    Raises `StateConflictError` with what there is.
    """
    if row.ended_at is not None:
        raise StateConflictError(f"deployment {row.id} has ended; register the training run again")
    if not 1 <= version <= row.version:
        has = f"versions 1 to {row.version}" if row.version else "no version yet"
        raise StateConflictError(
            f"version = {version}: deployment {row.id} has {has}; report the version that ran"
        )


def _average(connection: sa.Connection, position: int, version: int, step_ms: float) -> None:
    """Take a step time into the mean of a version."""
    columns = deployment_versions.c
    total = sa.func.coalesce(columns.measured_ms, 0.0) * columns.num_measured + step_ms
    connection.execute(
        sa.update(deployment_versions)
        .where(columns.position == position, columns.version == version)
        .values(
            measured_ms=total / (columns.num_measured + 1.0), num_measured=columns.num_measured + 1
        )
    )


def _keep_newest_reports(connection: sa.Connection, position: int) -> list[str]:
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


def _deployment_of(row: sa.Row[Any]) -> DeploymentRecord:
    options = json.loads(row.options)
    return record_of(
        DeploymentRecord,
        row,
        options=JobOptions(**options["job"]),
        threshold=options["threshold"],
        error=None if row.error is None else JobError(**json.loads(row.error)),
    )
