"""The next step of a deployment, whoever takes it: the arrows of `optpipe_api.deployments`.

Everything a step needs is in the store, and every change is a compare-and-set there. So each server
tries all steps, now and then and whenever one of its own jobs changes; the first to come takes it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from optpipe.errors import OptPipeError
from optpipe.problem import Problem
from optpipe_api.deployments import REGISTERED, NewVersion
from optpipe_api.desk.drift import judged, length_ms, start_from, under
from optpipe_api.errors import BusyError, JobNotFoundError, StoreUnavailableError
from optpipe_api.jobs import JobError

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_api.deployments import Deployment, Documents
    from optpipe_api.jobs import Job, Start, StoredSchedule
    from optpipe_api.store import JobStore
    from optpipe_api.store.deployments import DeploymentStore

__all__ = ["PUBLISH_EVERY_S", "Steps"]

PUBLISH_EVERY_S = 5.0
"""While a job runs, at least so long passes between two versions."""


class Steps:
    """Takes the steps of deployments.

    Parameters
    ----------
    store, jobs
        Where deployments and jobs are kept.
    submit
        Adds the job of a deployment's solve: its problem, and a schedule to start from; the job
        that was added before where there is one.
    on_version
        Called with the id of a deployment that has a new version.
    clock
        The time in seconds since the epoch, as the stores see it.
    """

    def __init__(
        self,
        store: DeploymentStore,
        jobs: JobStore,
        submit: Callable[[Deployment, Problem, Start | None], Job],
        on_version: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._submit = submit
        self._on_version = on_version
        self._now = clock

    def take_all(self) -> None:
        """Take every step of every deployment that can be taken now.

        A fault of one is logged and keeps no other waiting.
        """
        for deployment_id in self._store.pending():
            try:
                self.take(deployment_id)
            except StoreUnavailableError:
                raise
            except Exception:  # noqa: BLE001 - it is logged, and the next round tries again
                structlog.get_logger(__name__).exception(
                    "a step of the deployment failed",
                    action="deployment.fault",
                    deployment=deployment_id,
                )

    def take(self, deployment_id: str) -> None:
        """Take every step of one deployment that can be taken now."""
        known: Deployment | None = self._store.get(deployment_id)
        while known is not None and known.ended_at is None:
            known = self._next(known)

    def _next(self, known: Deployment) -> Deployment | None:
        """Take one step; None where there is none, or another server was faster."""
        if known.job_reason is None:
            return self._judge(known) if known.num_reports > known.num_judged else None
        if known.job_id is None:
            return self._start(known)
        try:
            job = self._jobs.get(known.job_id)
        except JobNotFoundError:
            gone = JobError(code="job.not_found", message=f"job {known.job_id} was deleted")
            return self._store.settle(known, gone)
        return self._look(known, job)

    def _judge(self, known: Deployment) -> Deployment | None:
        found = self._store.schedule(known.id)
        if found is None:
            return None
        judgement = judged(known, self._store.documents(known.id), found[1])
        changed = self._store.judge(known, judgement)
        if changed is not None and judgement.reason is not None:
            self._log(known, "deployment.drift", judgement.reason)
        return changed

    def _start(self, known: Deployment) -> Deployment | None:
        problem = Problem.model_validate_json(self._store.documents(known.id).planned)
        found = self._store.schedule(known.id)
        start = None if found is None else start_from(problem, found[1], found[0])
        try:
            job = self._submit(known, problem, start)
        except BusyError:
            # There is no room now. The next round asks again, and views say that it waits.
            return None
        return self._store.start(known, job.id)

    def _look(self, known: Deployment, job: Job) -> Deployment | None:
        """Publish what the job found, where it is worth it; settle where the job has ended."""
        is_final = job.state.is_final
        if job.has_schedule and (is_final or self._is_due(known, job)):
            published = self._consider(known, job)
            if published is not None:
                self._on_version(known.id)
                self._log(known, "deployment.version", f"version {published.version} is published")
                return published
        return self._store.settle(known, _why_nothing(job)) if is_final else None

    def _is_due(self, known: Deployment, job: Job) -> bool:
        """Whether a running job's schedule is new, may be worth it, and does not come too soon."""
        if known.version == 0:
            return True
        if job.num_schedules <= known.num_seen or not _promises(known, job):
            return False
        last = self._store.versions(known.id)[-1]
        return self._now() >= last.created_at + PUBLISH_EVERY_S

    def _consider(self, known: Deployment, job: Job) -> Deployment | None:
        """Make the job's best schedule the next version, if it is worth it."""
        found, documents = self._jobs.schedule(job.id), self._store.documents(known.id)
        if found is None:
            return None
        if known.num_seen == found.number and documents.measured is None:
            # Looked at before, and only other times could make more of it.
            return None
        in_use = self._store.schedule(known.id)
        try:
            new = _worth_it(known, documents, found, in_use)
        except OptPipeError as error:
            self._log(known, "deployment.refused", f"a schedule of job {job.id}: {error}")
            new = None
        if new is not None:
            return self._store.publish(known, new)
        self._store.saw(known, found.number)
        return None

    def _log(self, known: Deployment, action: str, sentence: str) -> None:
        structlog.get_logger(__name__).info(
            sentence, action=action, deployment=known.id, job=known.job_id
        )


def _promises(known: Deployment, job: Job) -> bool:
    """Whether a job's objective, under the times it solves for, gains enough over what was."""
    if job.objective_ms is None or known.planned_ms is None:
        return job.objective_ms is not None
    return job.objective_ms < known.planned_ms * (1 - known.options.threshold)


def _worth_it(
    known: Deployment,
    documents: Documents,
    stored: StoredSchedule,
    in_use: tuple[int, str] | None,
) -> NewVersion | None:
    """Return the version that a schedule would be; None where it gains less than it must."""
    found = under(documents.newest, stored.document)
    reason = REGISTERED
    if in_use is not None:
        newest = Problem.model_validate_json(documents.newest)
        current_ms = length_ms(newest, in_use[1])
        if found.length_ms >= current_ms * (1 - known.options.threshold):
            return None
        reason = _reason(known, documents, current_ms, found.length_ms)
    return NewVersion(
        reason=reason,
        schedule=found.schedule,
        predicted_ms=found.length_ms,
        problem=documents.newest,
        num_seen=stored.number,
    )


def _reason(known: Deployment, documents: Documents, current_ms: float, new_ms: float) -> str:
    times = "" if documents.measured is None else " under the measured times"
    gain = f"{new_ms:.6g} ms instead of {current_ms:.6g} ms{times}"
    share = f"{1 - new_ms / current_ms:.1%} shorter" if current_ms > 0 else "no shorter"
    if known.job_reason in (None, REGISTERED):
        return f"improved: {gain}, {share}"
    return f"{known.job_reason}; this one takes {gain}, {share}"


def _why_nothing(job: Job) -> JobError | None:
    if job.has_schedule:
        return None
    return job.error or JobError(
        code=f"job.{job.state.value}", message=f"job {job.id} has {job.state.value}"
    )
