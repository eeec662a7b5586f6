"""The store of deployments, over SQLite and PostgreSQL.

1. **Atomic.** Each method is one transaction. If the process is killed inside a method, all of its
   changes are stored or none.
2. **Compare and set.** Some methods take a `DeploymentRecord`. They change the deployment only if
   it has not ended, and still has that version and that solve. Otherwise they return None, and the
   caller must read the deployment again.
3. **Versions** count from 1 without gaps. Only their measured times ever change.
4. **Idempotent.** A second `add` under the same idempotency key of the same owner returns the first
   deployment, or refuses if the request differs. This also holds for two calls at the same time.
5. **Bounded.** Only the newest reports of a deployment are stored (`KEPT_REPORTS`).

Methods block. They raise `StoreUnavailableError` if the database does not answer. Methods that take
the id of a deployment raise `DeploymentNotFoundError` if no deployment has this id.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

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
from optpipe_api.store import statements as sql
from optpipe_api.store.database import reading, writing
from optpipe_api.store.shared import (
    add_once,
    check_limits,
    groups_of_ids,
    new_columns,
    page_rows,
    row_by_id,
    row_by_key,
    storable,
    to_json,
    to_record,
)
from optpipe_api.store.tables import deployments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa

    from optpipe_api.deployments import Judgement, NewDeployment, NewVersion, Report

__all__ = ["KEPT_REPORTS", "DeploymentStore"]

KEPT_REPORTS: Final = 5
"""Measured times are medians over so many reports, so that one slow step changes none of them."""


class DeploymentStore:
    """Stores deployments; the module's docstring is the contract."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._now = clock

    def add(
        self, new: NewDeployment, *, max_queued: int, max_of_owner: int | None = None
    ) -> tuple[DeploymentRecord, bool]:
        """Store a deployment that wants its first solve; False if the key had stored it before.

        Raises `QueueFullError` or `TooManyJobsError` if it exceeds a limit of `check_limits`.
        Raises `KeyReusedError` if the idempotency key belongs to another request.
        """

        def insert(connection: sa.Connection) -> tuple[DeploymentRecord, bool]:
            check_limits(connection, new.owner, 1, max_queued, max_of_owner=max_of_owner)
            values = new_columns(new, self._now()) | {
                "options": to_json({"job": asdict(new.options), "threshold": new.threshold}),
                "problem": new.problem,
                "planned": new.problem,
                "version": 0,
                "job_reason": REGISTERED,
                "num_solves": 1,
                "num_seen": 0,
                "num_reports": 0,
                "num_judged": 0,
            }
            return _deployment_of(connection.execute(sql.INSERT_DEPLOYMENT, values).one()), True

        def find(connection: sa.Connection) -> tuple[DeploymentRecord, bool] | None:
            row = row_by_key(connection, sql.DEPLOYMENT_BY_KEY, new, "deployment")
            return None if row is None else (_deployment_of(row), False)

        return add_once(self._engine, find, insert)

    # Reading

    def get(self, deployment_id: str) -> DeploymentRecord:
        """Return a deployment."""
        with reading(self._engine) as connection:
            return _deployment_of(_find(connection, deployment_id))

    def standings(self, deployment_ids: Sequence[str]) -> dict[str, DeploymentStanding]:
        """Return how far deployments have come, by their ids, without ids that do not exist.

        Clients that wait for a version cause a call each second. It is one query along indices for
        up to a thousand deployments.
        """
        with reading(self._engine) as connection:
            return {
                row.id: DeploymentStanding(
                    row.owner, row.version, row.ended_at is not None, bool(row.has_failed)
                )
                for ids in groups_of_ids(deployment_ids)
                for row in connection.execute(sql.DEPLOYMENT_STANDINGS, {"ids": ids})
            }

    def page(
        self, limit: int, before: int | None = None, *, owner: str | None = None
    ) -> list[DeploymentRecord]:
        """Return deployments, newest first, of positions below ``before``."""
        with reading(self._engine) as connection:
            rows = page_rows(connection, deployments, limit, {"before": before, "owner": owner})
            return [_deployment_of(row) for row in rows]

    def pending(self) -> list[str]:
        """Return the ids of deployments that want a solve or have a new report, oldest first."""
        with reading(self._engine) as connection:
            return list(connection.execute(sql.PENDING_DEPLOYMENTS).scalars())

    def documents(self, deployment_id: str) -> Documents:
        with reading(self._engine) as connection:
            return to_record(Documents, _find(connection, deployment_id))

    def versions(self, deployment_id: str) -> list[VersionRecord]:
        with reading(self._engine) as connection:
            parameters = {"at": _find(connection, deployment_id).position}
            rows = connection.execute(sql.VERSIONS, parameters)
            return [to_record(VersionRecord, row) for row in rows]

    def schedule(self, deployment_id: str) -> tuple[int, str] | None:
        """Return number and schedule (JSON text) of the newest version; None before the first."""
        with reading(self._engine) as connection:
            parameters = {"at": _find(connection, deployment_id).position}
            found = connection.execute(sql.NEWEST_VERSION, parameters).one_or_none()
        return None if found is None else (found.version, found.schedule)

    # Methods for training runs

    def report(
        self, deployment_id: str, report: Report, measure: Callable[[str, Sequence[str]], str]
    ) -> DeploymentRecord:
        """Store a report and the problem as measured now.

        ``measure`` returns the problem as measured. It gets the problem as registered, and the
        documents of the newest reports, oldest first. Raises `StateConflictError` if the deployment
        has ended or has no such version.
        """
        with writing(self._engine) as connection:
            row = _find(connection, deployment_id, lock=True)
            if row.ended_at is not None:
                raise StateConflictError(
                    f"deployment {row.id} has ended; register the training run again"
                )
            if not 1 <= report.version <= row.version:
                has = f"versions 1 to {row.version}" if row.version else "no version yet"
                raise StateConflictError(
                    f"version = {report.version}: deployment {row.id} has {has}; report the "
                    "version that ran"
                )
            at = {"at": row.position}
            measurement = {**asdict(report), "position": row.position}
            connection.execute(sql.INSERT_MEASUREMENT, {**measurement, "at": self._now()})
            if report.step_ms is not None:
                step = {"of_version": report.version, "step_ms": report.step_ms}
                connection.execute(sql.ADD_STEP_TIME, at | step)
            kept = connection.execute(sql.NEWEST_MEASUREMENTS, at | {"most": KEPT_REPORTS}).all()
            connection.execute(sql.DELETE_MEASUREMENTS_BEFORE, at | {"number": kept[-1].number})
            values = {
                "measured": measure(row.problem, [one.document for one in reversed(kept)]),
                "num_reports": row.num_reports + 1,
            }
            return _deployment_of(connection.execute(sql.UPDATE_DEPLOYMENT, at | values).one())

    def end(self, deployment_id: str) -> DeploymentRecord:
        """End a deployment; an ended deployment does not change."""
        with writing(self._engine) as connection:
            row = _find(connection, deployment_id, lock=True)
            if row.ended_at is None:
                values = {"at": row.position, "ended_at": self._now()}
                row = connection.execute(sql.UPDATE_DEPLOYMENT, values).one()
            return _deployment_of(row)

    # Methods for servers

    def start(self, known: DeploymentRecord, job_id: str) -> DeploymentRecord | None:
        """Store the job of the solve that is wanted."""
        with writing(self._engine) as connection:
            return _change(connection, known, job_id=job_id)

    def saw(self, known: DeploymentRecord, num_seen: int) -> DeploymentRecord | None:
        """Store how many schedules of the job were considered."""
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
                values = {
                    "position": known.position,
                    "version": changed.version,
                    "created_at": self._now(),
                    "reason": new.reason,
                    "job_id": known.job_id,
                    "predicted_ms": new.predicted_ms,
                    "num_measured": 0,
                    "schedule": new.schedule,
                }
                connection.execute(sql.INSERT_VERSION, values)
            return changed

    def settle(
        self, known: DeploymentRecord, error: JobError | None = None
    ) -> DeploymentRecord | None:
        """Store that the solve has ended, and the error if it found nothing."""
        with writing(self._engine) as connection:
            error_text = None if error is None else storable(to_json(error))
            return _change(connection, known, job_id=None, job_reason=None, error=error_text)

    def judge(self, known: DeploymentRecord, judgement: Judgement) -> DeploymentRecord | None:
        """Store how good the schedule in use is, and whether a solve is wanted."""
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

    # Deletion

    def delete_ended(self, before: float, limit: int) -> int:
        """Delete up to ``limit`` deployments that ended before a moment; return how many."""
        with writing(self._engine) as connection:
            parameters = {"before": before, "most": limit}
            positions = list(connection.execute(sql.OLD_DEPLOYMENTS, parameters).scalars())
            _delete(connection, positions)
        return len(positions)

    def delete(self, deployment_id: str) -> None:
        """Delete an ended deployment, its versions and its reports.

        Raises `StateConflictError` if it has not ended.
        """
        with writing(self._engine) as connection:
            row = _find(connection, deployment_id, lock=True)
            if row.ended_at is None:
                raise StateConflictError(
                    f"deployment {deployment_id} goes on: only an ended one can be deleted; end it "
                    f"first: POST /v1/deployments/{deployment_id}/end"
                )
            _delete(connection, [row.position])


def _find(connection: sa.Connection, deployment_id: str, *, lock: bool = False) -> sa.Row[Any]:
    statement = sql.DEPLOYMENT_BY_ID_LOCKED if lock else sql.DEPLOYMENT_BY_ID
    return row_by_id(connection, statement, deployment_id, DeploymentNotFoundError)


def _change(
    connection: sa.Connection, known: DeploymentRecord, **values: Any
) -> DeploymentRecord | None:
    """Change a deployment that is still as the caller knows it; None if it is not."""
    expected = {f"known_{name}": getattr(known, name) for name in sql.KNOWN_OF_DEPLOYMENT}
    values |= expected | {"at": known.position}
    row = connection.execute(sql.CHANGE_DEPLOYMENT, values).one_or_none()
    return None if row is None else _deployment_of(row)


def _delete(connection: sa.Connection, positions: list[int]) -> None:
    for statement in sql.DELETE_DEPLOYMENTS:
        connection.execute(statement, {"positions": positions})


def _deployment_of(row: sa.Row[Any]) -> DeploymentRecord:
    options = json.loads(row.options)
    return to_record(
        DeploymentRecord,
        row,
        options=JobOptions(**options["job"]),
        threshold=options["threshold"],
        error=None if row.error is None else JobError(**json.loads(row.error)),
    )
