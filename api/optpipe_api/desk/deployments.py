"""What the service does about deployments: register, show, follow, hear what was measured, end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from optpipe.errors import InfeasibleProblemError
from optpipe_api.access import Principal, Role
from optpipe_api.deployments import NewDeployment
from optpipe_api.desk.cache import MOST_TRIED
from optpipe_api.desk.intake import intake_of
from optpipe_api.desk.jobs import check_size
from optpipe_api.desk.measured_times import check_stages, measured_problem
from optpipe_api.desk.rounds import Rounds
from optpipe_api.desk.steps import Steps
from optpipe_api.errors import DeploymentNotFoundError, NoScheduleError

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_api.changes import Changes
    from optpipe_api.deployments import Deployment, DeploymentOptions, Report, Version
    from optpipe_api.desk.intake import Intake
    from optpipe_api.desk.jobs import JobDesk
    from optpipe_api.jobs import Job, Start
    from optpipe_api.settings import Settings
    from optpipe_api.store import Stores

__all__ = ["DeploymentDesk"]

_LOOK_AGAIN_S = 1.0
_INFEASIBLE = InfeasibleProblemError.code


class DeploymentDesk:
    """Deployments as one caller sees them. Coroutines are for the event loop, all else for threads.

    A deployment of somebody else does not exist: `DeploymentNotFoundError`, here and below.
    """

    def __init__(self, settings: Settings, stores: Stores, jobs: JobDesk, changes: Changes) -> None:
        self._settings = settings
        self._store = stores.deployments
        self._job_store = stores.jobs
        self._jobs = jobs
        self._changes = changes
        self._steps = Steps(self._store, stores.jobs, self._submit, changes.publish)
        self._rounds = Rounds(self._steps.take_all, settings.poll_s, "deployments")

    def start(self) -> None:
        """Begin to look after deployments, as every server does."""
        self._rounds.start()

    def close(self) -> None:
        """Stop looking after them; other servers go on."""
        self._rounds.close()

    def register(
        self,
        intake: Intake,
        name: str,
        options: DeploymentOptions,
        who: Principal,
        key: str | None = None,
    ) -> Deployment:
        """Register a training run and begin to solve its problem; a repeated key returns the first.

        Raises
        ------
        ProblemError
            If the problem is larger than this service takes.
        QueueFullError
            If the queue has no room for its solve.
        KeyReusedError
            If the key made a deployment from another request.
        """
        check_size(self._settings, intake.num_cells, intake.num_microbatches)
        request = [intake.problem_hash, name, asdict(options)]
        deployment, is_new = self._store.add(
            NewDeployment(
                name=name or intake.name,
                owner=who.name,
                problem=intake.document,
                options=options,
                request_hash=_hash_of(request),
                idempotency_key=key,
            ),
            max_queued=self._settings.max_queued_jobs,
        )
        if is_new:
            self._steps.take(deployment.id)
        return self._store.get(deployment.id)

    def find(self, deployment_id: str, who: Principal) -> Deployment:
        """Return a deployment."""
        deployment = self._store.get(deployment_id)
        if not who.sees(deployment.owner):
            raise DeploymentNotFoundError(deployment_id)
        return deployment

    def page(self, limit: int, before: int | None, who: Principal) -> list[Deployment]:
        """Return deployments, newest first; an admin sees everybody's."""
        owner = None if who.role is Role.ADMIN else who.name
        return self._store.page(limit, before, owner=owner)

    def versions(self, deployment_id: str, who: Principal) -> list[Version]:
        """Return the versions, oldest first."""
        self.find(deployment_id, who)
        return self._store.versions(deployment_id)

    def problem(self, deployment_id: str, who: Principal) -> str:
        """Return the problem as measured, or as registered where nothing was; JSON text."""
        self.find(deployment_id, who)
        return self._store.documents(deployment_id).newest

    def schedule(self, deployment_id: str, who: Principal) -> tuple[int, str]:
        """Return number and schedule (JSON text) of the newest version.

        Raises
        ------
        InfeasibleProblemError
            If there is none, proven.
        NoScheduleError
            If there is none, or none yet.
        """
        deployment = self.find(deployment_id, who)
        found = self._store.schedule(deployment_id)
        if found is not None:
            return found
        error = deployment.error
        if error is not None and error.code == _INFEASIBLE:
            raise InfeasibleProblemError(error.message, error.needs)
        why = "is being solved and has no schedule yet; ask again later"
        if error is not None:
            why = f"has no schedule: {error.message}; register it again"
        raise NoScheduleError(f"deployment {deployment_id} {why}")

    def report(self, deployment_id: str, report: Report, who: Principal) -> Deployment:
        """Keep what a training run measured under a version; the next round judges it.

        Raises
        ------
        ConflictError
            If the deployment has ended, or has no such version.
        RequestError, MeasurementError
            If what was measured does not belong to this problem.
        """
        self.find(deployment_id, who)
        check_stages(self._store.documents(deployment_id).problem, report.document)
        reported = self._store.report(deployment_id, report, measured_problem)
        self._rounds.wake()
        return reported

    def end(self, deployment_id: str, who: Principal) -> Deployment:
        """End a deployment and cancel its solve; its versions stay."""
        self.find(deployment_id, who)
        deployment = self._store.end(deployment_id)
        if deployment.job_id is not None:
            self._jobs.cancel(deployment.job_id, _as_owner(deployment))
        self._changes.publish(deployment_id)
        return deployment

    async def wait_schedule(
        self, deployment_id: str, known_version: int, seconds: float, who: Principal
    ) -> tuple[int, str] | None:
        """Return the newest version once it is another than the known one.

        None where it is still that one when the time is up or the deployment has ended.

        Parameters
        ----------
        known_version
            What the caller has; 0 = none.

        Raises
        ------
        InfeasibleProblemError, NoScheduleError
            As `schedule`.
        """
        found = await run_in_threadpool(self.find, deployment_id, who)
        deadline = time.monotonic() + min(seconds, self._settings.max_wait_s)
        while not self._is_news(found, known_version) and time.monotonic() < deadline:
            with self._changes.subscribed(deployment_id) as changed:
                found = await run_in_threadpool(self._store.get, deployment_id)
                left = deadline - time.monotonic()
                if self._is_news(found, known_version) or left <= 0:
                    break
                await _either(changed, min(left, _LOOK_AGAIN_S))
        if found.version == known_version and known_version > 0:
            return None
        return await run_in_threadpool(self.schedule, deployment_id, who)

    def _is_news(self, deployment: Deployment, known_version: int) -> bool:
        over = deployment.ended_at is not None or self._changes.is_closed
        failed = deployment.version == 0 and deployment.error is not None
        return over or failed or deployment.version != known_version

    def _submit(self, deployment: Deployment, problem: Problem, start: Start | None) -> Job:
        """Add the job of a deployment's solve; see `Steps`."""
        drafted = self._jobs.draft(
            intake_of(problem),
            deployment.options.job,
            _as_owner(deployment),
            # No client can send this one: a header holds no control character.
            f"\x01deployment/{deployment.id}/{deployment.num_solves}",
            deployment_id=deployment.id,
            most_near=MOST_TRIED if start is None else 0,
        )
        new = replace(drafted, name=deployment.name)
        if start is not None and new.finished is None:
            new = replace(new, start=start)
        job, is_new = self._job_store.add(
            new,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._settings.max_jobs_per_key if deployment.owner else None,
        )
        if is_new:
            self._jobs.announce(job)
        return job


def _as_owner(deployment: Deployment) -> Principal:
    return Principal(deployment.owner, Role.SUBMIT)


def _hash_of(data: object) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


async def _either(changed: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return
