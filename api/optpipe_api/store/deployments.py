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

import uuid
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from optpipe_api.deployments import REGISTERED, Documents
from optpipe_api.store.database import reading, writing
from optpipe_api.store.deployments_rows import (
    average,
    change,
    deployment_of,
    expect_version,
    find_by_key,
    find_row,
    keep_newest_reports,
    version_of,
)
from optpipe_api.store.jobs_births import refuse_when_full
from optpipe_api.store.jobs_rows import digest_key, dump, storable
from optpipe_api.store.tables import deployment_versions, deployments, measurements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_api.deployments import (
        Deployment,
        Judgement,
        NewDeployment,
        NewVersion,
        Report,
        Version,
    )
    from optpipe_api.jobs import JobError

__all__ = ["DeploymentStore"]

_SHOWN = [column for column in deployment_versions.c if column.name != "schedule"]


class DeploymentStore:
    """Keeps deployments; the promises are in the module's docstring."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._now = clock

    def add(self, new: NewDeployment, *, max_queued: int) -> tuple[Deployment, bool]:
        """Keep a deployment whose first solve is wanted; False where the key had made it before.

        Raises
        ------
        QueueFullError
            If ``max_queued`` jobs wait already.
        KeyReusedError
            If the idempotency key belongs to another request.
        """
        key = digest_key(new.owner, new.idempotency_key)
        try:
            with writing(self._engine) as connection:
                known = find_by_key(connection, key, new)
                if known is not None:
                    return known
                refuse_when_full(connection, max_queued)
                return self._insert(connection, new, key), True
        except IntegrityError:
            # Another server inserted the same key between our look and our insert.
            with reading(self._engine) as connection:
                known = find_by_key(connection, key, new)
            if known is None:
                raise
            return known

    def _insert(self, connection: sa.Connection, new: NewDeployment, key: str | None) -> Deployment:
        values = {
            "id": uuid.uuid4().hex,
            "name": storable(new.name),
            "owner": new.owner,
            "idempotency_key": key,
            "created_at": self._now(),
            "request_hash": new.request_hash,
            "options": dump(new.options),
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
        return deployment_of(row)

    def get(self, deployment_id: str) -> Deployment:
        """Return a deployment.

        Raises
        ------
        DeploymentNotFoundError
            Here and below, if none has this id.
        """
        with reading(self._engine) as connection:
            return deployment_of(find_row(connection, deployment_id))

    def page(
        self, limit: int, before: int | None = None, *, owner: str | None = None
    ) -> list[Deployment]:
        """Return deployments, newest first, of positions below ``before``."""
        query = sa.select(deployments).order_by(deployments.c.position.desc()).limit(limit)
        if before is not None:
            query = query.where(deployments.c.position < before)
        if owner is not None:
            query = query.where(deployments.c.owner == owner)
        with reading(self._engine) as connection:
            return [deployment_of(row) for row in connection.execute(query)]

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
        """Return the problems of a deployment."""
        with reading(self._engine) as connection:
            row = find_row(connection, deployment_id)
        return Documents(problem=row.problem, measured=row.measured, planned=row.planned)

    def versions(self, deployment_id: str) -> list[Version]:
        """Return the versions, oldest first."""
        with reading(self._engine) as connection:
            position = find_row(connection, deployment_id).position
            query = (
                sa.select(*_SHOWN)
                .where(deployment_versions.c.position == position)
                .order_by(deployment_versions.c.version)
            )
            return [version_of(row) for row in connection.execute(query)]

    def schedule(self, deployment_id: str) -> tuple[int, str] | None:
        """Return number and schedule (JSON text) of the newest version; None before the first."""
        newest = (
            sa.select(deployment_versions.c.version, deployment_versions.c.schedule)
            .join(deployments, deployments.c.position == deployment_versions.c.position)
            .where(deployments.c.id == deployment_id)
            .where(deployments.c.version == deployment_versions.c.version)
        )
        with reading(self._engine) as connection:
            find_row(connection, deployment_id)
            found = connection.execute(newest).one_or_none()
        return None if found is None else (found.version, found.schedule)

    # What training runs do

    def report(
        self,
        deployment_id: str,
        report: Report,
        measure: Callable[[str, Sequence[str]], str],
    ) -> Deployment:
        """Keep a report and what is now measured.

        Parameters
        ----------
        measure
            From the problem as registered and the documents of the newest reports, oldest first,
            to the problem as measured.

        Raises
        ------
        ConflictError
            If the deployment has ended, or has no such version.
        """
        with writing(self._engine) as connection:
            row = find_row(connection, deployment_id, for_update=True)
            expect_version(row, report.version)
            self._insert_report(connection, row.position, report)
            if report.step_ms is not None:
                average(connection, row.position, report.version, report.step_ms)
            documents = keep_newest_reports(connection, row.position)
            changed = (
                sa.update(deployments)
                .where(deployments.c.position == row.position)
                .values(
                    measured=measure(row.problem, documents),
                    num_reports=row.num_reports + 1,
                )
                .returning(deployments)
            )
            return deployment_of(connection.execute(changed).one())

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

    def end(self, deployment_id: str) -> Deployment:
        """End a deployment; an ended one stays as it is."""
        with writing(self._engine) as connection:
            row = find_row(connection, deployment_id, for_update=True)
            if row.ended_at is None:
                ended = (
                    sa.update(deployments)
                    .where(deployments.c.position == row.position)
                    .values(ended_at=self._now())
                    .returning(deployments)
                )
                row = connection.execute(ended).one()
            return deployment_of(row)

    # What servers do

    def start(self, known: Deployment, job_id: str) -> Deployment | None:
        """Write down the job of the solve that is wanted."""
        with writing(self._engine) as connection:
            return change(connection, known, job_id=job_id)

    def saw(self, known: Deployment, num_seen: int) -> Deployment | None:
        """Write down how many schedules of the job were looked at."""
        with writing(self._engine) as connection:
            return change(connection, known, num_seen=num_seen)

    def publish(self, known: Deployment, new: NewVersion) -> Deployment | None:
        """Make a schedule of the job the next version."""
        with writing(self._engine) as connection:
            changed = change(
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

    def settle(self, known: Deployment, error: JobError | None = None) -> Deployment | None:
        """Write down that the solve is over, and why it gave nothing."""
        with writing(self._engine) as connection:
            told = None if error is None else storable(dump(error))
            return change(connection, known, job_id=None, job_reason=None, error=told)

    def judge(self, known: Deployment, judgement: Judgement) -> Deployment | None:
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
            return change(connection, known, **values)

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
            for table in (measurements, deployment_versions, deployments):
                connection.execute(sa.delete(table).where(table.c.position.in_(positions)))
        return len(positions)
