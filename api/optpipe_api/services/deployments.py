"""Deployments as callers see them: register, show, follow, report, end; and their next steps."""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog
from starlette.concurrency import run_in_threadpool

from optpipe.errors import InfeasibleProblemError, OptPipeError, RequestError
from optpipe.evaluate import evaluate
from optpipe.formats.json import load_schedule
from optpipe.measurements import Measurements, Sample
from optpipe.problem import Problem
from optpipe.schedule import Provenance
from optpipe.simulate import simulate
from optpipe_api.access import Principal, Role
from optpipe_api.deployments import REGISTERED, Judgement, NewVersion
from optpipe_api.errors import (
    DeploymentNotFoundError,
    JobNotFoundError,
    ScheduleNotFoundError,
    ServerBusyError,
    StoreUnavailableError,
)
from optpipe_api.jobs import DocumentKind, JobError, JobStart
from optpipe_api.services.events import Watch
from optpipe_api.services.submission import solved_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe.measurements import DeviceFacts, MeasuredAction
    from optpipe.problem import Device, Stage
    from optpipe_api.deployments import (
        DeploymentRecord,
        DeploymentStanding,
        Documents,
        NewDeployment,
        Report,
        VersionRecord,
    )
    from optpipe_api.jobs import JobRecord, StoredSchedule
    from optpipe_api.services.events import Changes
    from optpipe_api.services.jobs import JobService
    from optpipe_api.settings import Settings
    from optpipe_api.store import JobStore, Stores
    from optpipe_api.store.deployments import DeploymentStore

__all__ = [
    "PUBLISH_EVERY_S",
    "DeploymentService",
    "Rounds",
    "Steps",
    "bound_ms",
    "check_stages",
    "judged",
    "largest_change",
    "measured_problem",
    "times_of",
    "under",
]


_INFEASIBLE = InfeasibleProblemError.code


class DeploymentService:
    """Deployments as one caller sees them. Coroutines are for the event loop, others for threads.

    Methods raise `DeploymentNotFoundError` if the caller may not see the deployment.
    """

    def __init__(
        self, settings: Settings, stores: Stores, jobs: JobService, changes: Changes
    ) -> None:
        self._settings = settings
        self._store = stores.deployments
        self._jobs = jobs
        self._changes = changes
        self._watch = Watch(stores.deployments, changes)
        self._steps = Steps(self._store, stores.jobs, self._submit, changes.publish)
        self._rounds = Rounds(self._steps.take_all, settings.poll_s, "deployments")

    def start(self) -> None:
        """Take the steps of all deployments in rounds, as every server does."""
        self._rounds.start()

    def close(self) -> None:
        """Take no more steps; other servers go on."""
        self._rounds.close()

    def register(
        self, new: NewDeployment, caller: Principal, key: str | None = None
    ) -> DeploymentRecord:
        """Register a training run and queue a solve; a repeated key returns the first deployment.

        Raises `QueueFullError` if the queue is full; `TooManyJobsError` if the owner has too many
        jobs and deployments; `KeyReusedError` if the key belongs to another request.
        """
        new = replace(new, owner=caller.name, idempotency_key=key)
        deployment, is_new = self._store.add(
            new,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._settings.max_jobs_per_key if new.owner else None,
        )
        if is_new:
            self._steps.take(deployment.id)
        return self._store.get(deployment.id)

    def find(self, deployment_id: str, caller: Principal) -> DeploymentRecord:
        deployment = self._store.get(deployment_id)
        if not caller.sees(deployment.owner):
            raise DeploymentNotFoundError(deployment_id)
        return deployment

    def page(self, limit: int, before: int | None, caller: Principal) -> list[DeploymentRecord]:
        """Return deployments below a position, newest first; an admin sees all."""
        owner = None if caller.role is Role.ADMIN else caller.name
        return self._store.page(limit, before, owner=owner)

    def versions(self, deployment_id: str, caller: Principal) -> list[VersionRecord]:
        self.find(deployment_id, caller)
        return self._store.versions(deployment_id)

    def problem(self, deployment_id: str, caller: Principal) -> str:
        """Return the measured problem, or the registered one if nothing was measured; JSON text."""
        self.find(deployment_id, caller)
        return self._store.documents(deployment_id).newest

    def schedule(self, deployment_id: str, caller: Principal) -> tuple[int, str]:
        """Return number and schedule (JSON text) of the newest version.

        Raises `InfeasibleProblemError` if the problem is proven infeasible, and
        `ScheduleNotFoundError` if there is no schedule (yet).
        """
        deployment = self.find(deployment_id, caller)
        found = self._store.schedule(deployment_id)
        if found is not None:
            return found
        error = deployment.error
        if error is not None and error.code == _INFEASIBLE:
            raise InfeasibleProblemError(error.message, error.needs)
        why = "is being solved and has no schedule yet; ask again later"
        if error is not None:
            why = f"has no schedule: {error.message}; register it again"
        raise ScheduleNotFoundError(f"deployment {deployment_id} {why}")

    def report(self, deployment_id: str, report: Report, caller: Principal) -> DeploymentRecord:
        """Store the measured times of a training run, which the next round judges.

        Raises `StateConflictError` if the deployment has ended, or has no such version;
        `RequestError` or `MeasurementError` if the times do not belong to its problem.
        """
        self.find(deployment_id, caller)
        check_stages(self._store.documents(deployment_id).problem, report.document)
        reported = self._store.report(deployment_id, report, measured_problem)
        self._rounds.wake()
        return reported

    def end(self, deployment_id: str, caller: Principal) -> DeploymentRecord:
        """End a deployment and cancel its solve; its versions stay."""
        self.find(deployment_id, caller)
        deployment = self._store.end(deployment_id)
        if deployment.job_id is not None:
            # The job of an ended deployment may be deleted already.
            with suppress(JobNotFoundError):
                self._jobs.cancel(deployment.job_id, Principal(deployment.owner, Role.SUBMIT))
        self._changes.publish(deployment_id)
        return deployment

    def delete(self, deployment_id: str, caller: Principal) -> None:
        """Delete an ended deployment and its documents; raises as `DeploymentStore.delete`."""
        self.find(deployment_id, caller)
        self._store.delete(deployment_id)
        self._changes.publish(deployment_id)

    async def wait_schedule(
        self, deployment_id: str, known_version: int, seconds: float, caller: Principal
    ) -> tuple[int, str] | None:
        """Return the newest version once it differs from the known one.

        None if it does not differ at the timeout, or at the end of the deployment.

        ``known_version``: the version of the caller; 0 = none. Raises `InfeasibleProblemError`,
        `ScheduleNotFoundError` as `schedule`.
        """

        def is_news(now: DeploymentStanding) -> bool:
            failed = now.version == 0 and now.has_failed
            return now.has_ended or failed or now.version != known_version

        found = await self._watch.standing(deployment_id)
        timeout_s = min(seconds, self._settings.max_wait_s)
        if found is not None and caller.sees(found.owner) and timeout_s > 0 and not is_news(found):
            await self._watch.until(deployment_id, is_news, timeout_s)
            found = await self._watch.standing(deployment_id)
        if found is None or not caller.sees(found.owner):
            raise DeploymentNotFoundError(deployment_id)
        if found.version == known_version and known_version > 0:
            return None
        return await run_in_threadpool(self.schedule, deployment_id, caller)

    def _submit(
        self, deployment: DeploymentRecord, problem: Problem, start: JobStart | None
    ) -> JobRecord:
        """Add the job of a deployment's solve; see `Steps`."""
        new = replace(
            solved_job(problem, deployment.options, self._settings.max_cells),
            name=deployment.name,
            owner=deployment.owner,
            # No client can send this key, because a header has no control characters.
            idempotency_key=f"\x01deployment/{deployment.id}/{deployment.num_solves}",
            deployment_id=deployment.id,
        )
        new = self._jobs.cache.complete(new)
        if start is not None and new.finished is None:
            new = replace(new, start=start)
        return self._jobs.add(new)


# --- The next step of a deployment: the arrows of `optpipe_api.deployments`.
# A step needs only the store, and each change is a compare-and-set there. So every server tries all
# steps in rounds, and the first one takes the step.

PUBLISH_EVERY_S = 5.0
"""Minimum time between two versions while a job runs."""


class Steps:
    """Takes the steps of deployments.

    Parameters
    ----------
    store, jobs
        The stores of deployments and of jobs.
    submit
        Adds the job of a deployment's solve, of this problem and from this start. A second call
        returns the same job.
    on_version
        Called with the id of a deployment that has a new version.
    clock
        The time of the stores, in seconds since the epoch.
    """

    def __init__(
        self,
        store: DeploymentStore,
        jobs: JobStore,
        submit: Callable[[DeploymentRecord, Problem, JobStart | None], JobRecord],
        on_version: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._submit = submit
        self._on_version = on_version
        self._now = clock

    def take_all(self) -> None:
        """Take every possible step of every deployment; log the faults of each deployment."""
        for deployment_id in self._store.pending():
            try:
                self.take(deployment_id)
            except StoreUnavailableError:
                raise
            except Exception:  # noqa: BLE001 - logged; the next round retries
                structlog.get_logger(__name__).exception(
                    "a step of the deployment failed",
                    action="deployment.fault",
                    deployment=deployment_id,
                )

    def take(self, deployment_id: str) -> None:
        """Take every possible step of one deployment."""
        known: DeploymentRecord | None = self._store.get(deployment_id)
        while known is not None and known.ended_at is None:
            known = self._next(known)

    def _next(self, known: DeploymentRecord) -> DeploymentRecord | None:
        """Take one step; None if there is none, or another server took it first."""
        if known.job_reason is None:
            return self._judge(known) if known.num_reports > known.num_judged else None
        if known.job_id is None:
            return self._start(known)
        try:
            job = self._jobs.get(known.job_id)
        except JobNotFoundError:
            gone = JobError(code="job.not_found", message=f"job {known.job_id} was deleted")
            return self._store.settle(known, gone)
        return self._publish(known, job)

    def _judge(self, known: DeploymentRecord) -> DeploymentRecord | None:
        found = self._store.schedule(known.id)
        if found is None:
            return None
        judgement = judged(known, self._store.documents(known.id), found[1])
        changed = self._store.judge(known, judgement)
        if changed is not None and judgement.reason is not None:
            self._log(known, "deployment.drift", judgement.reason)
        return changed

    def _start(self, known: DeploymentRecord) -> DeploymentRecord | None:
        problem = Problem.model_validate_json(self._store.documents(known.id).planned)
        found = self._store.schedule(known.id)
        start = None if found is None else _start_from(problem, found[1], found[0])
        try:
            job = self._submit(known, problem, start)
        except ServerBusyError:
            # The next round retries. Until then the deployment's state is waiting.
            return None
        return self._store.start(known, job.id)

    def _publish(self, known: DeploymentRecord, job: JobRecord) -> DeploymentRecord | None:
        """Publish the job's schedule if it gains enough; end the solve if the job has ended."""
        is_final = job.state.is_final
        if job.has_schedule and (is_final or self._is_due(known, job)):
            published = self._publish_version(known, job)
            if published is not None:
                self._on_version(known.id)
                self._log(known, "deployment.version", f"version {published.version} is published")
                return published
        if not is_final:
            return None
        error = job.error or JobError(
            code=f"job.{job.state.value}", message=f"job {job.id} has {job.state.value}"
        )
        return self._store.settle(known, None if job.has_schedule else error)

    def _is_due(self, known: DeploymentRecord, job: JobRecord) -> bool:
        """Return whether a running job has a new schedule of enough gain, and it is time for it."""
        if known.version == 0:
            return True
        if job.num_schedules <= known.num_seen or job.objective_ms is None:
            return False
        # The gain under the times that the job solves for.
        planned_ms = known.planned_ms
        if planned_ms is not None and job.objective_ms >= planned_ms * (1 - known.threshold):
            return False
        last = self._store.versions(known.id)[-1]
        return self._now() >= last.created_at + PUBLISH_EVERY_S

    def _publish_version(self, known: DeploymentRecord, job: JobRecord) -> DeploymentRecord | None:
        """Publish the job's best schedule as the next version; None if it gains too little."""
        found, documents = self._jobs.schedule(job.id), self._store.documents(known.id)
        if found is None:
            return None
        if known.num_seen == found.number and documents.measured is None:
            # Judged before, and without other times the result is the same.
            return None
        in_use = self._store.schedule(known.id)
        try:
            new = _new_version(known, documents, found, in_use)
        except OptPipeError as error:
            self._log(known, "deployment.refused", f"a schedule of job {job.id}: {error}")
            new = None
        if new is not None:
            return self._store.publish(known, new)
        self._store.saw(known, found.number)
        return None

    def _log(self, known: DeploymentRecord, action: str, sentence: str) -> None:
        structlog.get_logger(__name__).info(
            sentence, action=action, deployment=known.id, job=known.job_id
        )


def _new_version(
    known: DeploymentRecord,
    documents: Documents,
    stored: StoredSchedule,
    in_use: tuple[int, str] | None,
) -> NewVersion | None:
    """Return a schedule as a version; None if it gains less than the threshold."""
    schedule, new_ms = under(documents.newest, stored.document)
    reason = REGISTERED
    if in_use is not None:
        current_ms = _length_ms(Problem.model_validate_json(documents.newest), in_use[1])
        if new_ms >= current_ms * (1 - known.threshold):
            return None
        times = "" if documents.measured is None else " under the measured times"
        gain = f"{new_ms:.6g} ms instead of {current_ms:.6g} ms{times}"
        share = f"{1 - new_ms / current_ms:.1%} shorter" if current_ms > 0 else "no shorter"
        reason = f"improved: {gain}, {share}"
        if known.job_reason not in (None, REGISTERED):
            reason = f"{known.job_reason}; this one takes {gain}, {share}"
    return NewVersion(
        reason=reason,
        schedule=schedule,
        predicted_ms=new_ms,
        problem=documents.newest,
        num_seen=stored.number,
    )


# --- Drift: how much longer the schedule in use takes than a new one may be expected to take.
# Longer times alone are no reason for a solve: if every pass takes a tenth longer, the best
# schedule takes longer too. Let O be the length of the schedule in use under the planned times, for
# which it was solved. Let L be a proven lower bound, here that of `optpipe_solver.bounds.energy`,
# because it needs no compiled code in the server's process. O / L(planned) is the quality of the
# schedule, and
#
#     the expected step time: ``O * L(measured) / L(planned)``
#
# is the length of a schedule of the same quality under the measured times. O is at least
# L(planned), so the expected step time is at least L(measured). Drift is the excess over it.

_WORDS: dict[MeasuredAction, str] = {
    "F": "forward",
    "I": "input backward",
    "W": "weight backward",
    "B": "backward",
    "RECOMPUTE": "recomputation",
}


def judged(deployment: DeploymentRecord, documents: Documents, schedule: str) -> Judgement:
    """Return the drift of the schedule in use under the measured times.

    ``deployment``: one with a version and reports. ``documents``: its problems. ``schedule``: its
    newest version, as JSON text.
    """
    measured = Problem.model_validate_json(documents.newest)
    planned = Problem.model_validate_json(documents.planned)
    current_ms = _length_ms(measured, schedule)
    planned_ms = current_ms if deployment.planned_ms is None else deployment.planned_ms
    before_ms, after_ms = bound_ms(planned), bound_ms(measured)
    growth = after_ms / before_ms if before_ms > 0 and after_ms > 0 else 1.0
    expected_ms = planned_ms * growth
    judgement = Judgement(
        num_reports=deployment.num_reports, current_ms=current_ms, expected_ms=expected_ms
    )
    if current_ms <= expected_ms * (1 + deployment.threshold):
        return judgement
    reason = (
        f"drift: {largest_change(planned, measured)}; the schedule in use takes "
        f"{current_ms:.6g} ms under the measured times, {current_ms / expected_ms - 1:.1%} more "
        "than one as good for them as it was for those it was made for"
    )
    return replace(judgement, reason=reason, problem=documents.newest)


def _length_ms(problem: Problem, schedule: str) -> float:
    """Return the objective, in ms, of a schedule (JSON text) under the times of a problem."""
    run = simulate(problem, load_schedule(schedule).programs)
    return run.objective_ms(problem.objective)


def under(newest: str, schedule: str) -> tuple[str, float]:
    """Return a schedule under the times of a problem, and its length in ms; all JSON texts.

    A bound for other times is left out. Raises `IllegalScheduleError` if the schedule breaks a rule
    of the problem, or does not fit its memory.
    """
    problem, found = Problem.model_validate_json(newest), load_schedule(schedule)
    bound_ms = found.bound_ms if found.problem_hash == problem.problem_hash else None
    true = evaluate(
        problem,
        found.programs,
        found.provenance,
        bound_ms=bound_ms,
        stopped_by="work_limit" if found.stopped_by == "optimal" else found.stopped_by,
    )
    return true.model_dump_json(by_alias=True), true.objective_ms


def _start_from(problem: Problem, schedule: str, version: int) -> JobStart:
    """Return the schedule in use as the start of a solve with other times."""
    method = f"version {version} of the deployment"
    true = evaluate(problem, load_schedule(schedule).programs, Provenance(method=method))
    return JobStart(
        documents={DocumentKind.SCHEDULE: true.model_dump_json(by_alias=True)},
        objective_ms=true.objective_ms,
        method=method,
    )


def largest_change(planned: Problem, measured: Problem) -> str:
    """Return a clause on the time that changed by the most milliseconds."""
    changes = [
        (abs(after - before), what, before, after)
        for (what, before), (_, after) in zip(_times(planned), _times(measured), strict=True)
    ]
    _, what, before, after = max(changes, key=lambda change: change[0])
    if before <= 0:
        return f"{what} takes {after:.4g} ms instead of none"
    share = after / before - 1
    return f"{what} takes {abs(share):.0%} {'longer' if share >= 0 else 'less'} than planned"


def bound_ms(problem: Problem) -> float:
    """Return a proven lower bound of a problem's objective, in ms."""
    # Heavy, and imported before the first call.
    from optpipe_solver.bounds import Paths  # noqa: PLC0415
    from optpipe_solver.bounds.energy import energy_ms  # noqa: PLC0415

    return energy_ms(Paths(problem), makespan=problem.objective == "makespan")


def _times(problem: Problem) -> Iterator[tuple[str, float]]:
    """Yield every duration in ms with its name; the same names for problems of one deployment."""
    for index, stage in enumerate(problem.stages):
        times = times_of(stage) | {"B": stage.fused_backward_ms}
        for action, word in _WORDS.items():
            yield f"{word} of stage {index}", times.get(action, 0.0)
        moved = problem.can_offload(index)
        yield f"offload of stage {index}", problem.offload_ms(index) if moved else 0.0
        yield f"reload of stage {index}", problem.reload_ms(index) if moved else 0.0
    for index, (there, back) in enumerate(problem.boundary_ms):
        yield f"transfer from stage {index} to {index + 1}", there
        yield f"transfer from stage {index + 1} to {index}", back


# --- From the reports of a training run to the measured problem: other times, the same bytes.
# A time is the median over the newest reports, each of which counts with its own median. The
# schedule in use may leave some forms of a backward unmeasured. Their times change by the same
# factor as the measured backwards of the stage. An unmeasured RECOMPUTE changes with F.

_BACKWARDS: tuple[MeasuredAction, ...] = ("I", "W", "B")


def check_stages(registered: str, report: str) -> None:
    """Refuse a report, from `condense_report`, on stages that the problem does not have.

    Raises `RequestError` with the stage.
    """
    num_stages = len(Problem.model_validate_json(registered).stages)
    last = max(sample.stage for sample in Measurements.model_validate_json(report).samples)
    if last >= num_stages:
        raise RequestError(
            f"actions.samples name stage {last}, but the deployment has {num_stages} stages, "
            "numbered from 0; report to the deployment that runs"
        ).at("/actions/samples")


def measured_problem(registered: str, reports: Sequence[str]) -> str:
    """Return a problem with the times of reports from `condense_report`, oldest first.

    All of them are JSON texts. Raises `MeasurementError` if a measured link joins devices that do
    not exist.
    """
    base = Problem.model_validate_json(registered)
    reported = [Measurements.model_validate_json(report) for report in reports]
    measured = Measurements(
        source="training",
        samples=tuple(sample for report in reported for sample in report.samples),
        placement=base.placement,
        transfers=tuple(transfer for report in reported for transfer in report.transfers),
    )
    samples = measured.samples + tuple(_infer_samples(measured, base.stages))
    problem = measured.replaced(samples=samples).problem(base=base)
    facts = [report.devices for report in reported]
    devices = tuple(
        _with_rates(device, [one[index] for one in facts if index < len(one)])
        for index, device in enumerate(base.devices)
    )
    problem = problem.model_copy(update={"name": base.name, "devices": devices})
    return problem.model_dump_json(by_alias=True)


def times_of(stage: Stage) -> dict[MeasuredAction, float]:
    """Return the duration of each action that a stage has, in ms."""
    times: dict[MeasuredAction, float] = {
        "F": stage.forward_ms,
        "I": stage.backward_input_ms,
        "W": stage.backward_weight_ms,
    }
    if stage.backward_ms is not None:
        times["B"] = stage.backward_ms
    if stage.recompute_ms is not None:
        times["RECOMPUTE"] = stage.recompute_ms
    return times


def _infer_samples(measured: Measurements, stages: Sequence[Stage]) -> Iterator[Sample]:
    """Yield samples of the unmeasured actions of each stage that has measured ones."""
    for index, stage in enumerate(stages):
        known = {
            action: spread.median_ms
            for (of, action), spread in measured.spreads.items()
            if of == index
        }
        planned = times_of(stage) | {"B": stage.fused_backward_ms}
        for action, planned_ms in times_of(stage).items():
            if not known or action in known:
                continue
            group = _BACKWARDS if action in _BACKWARDS else ("F",)
            similar = [one for one in group if one in known]
            similar_ms = sum(planned[one] for one in similar)
            slowdown = sum(known[one] for one in similar) / similar_ms if similar_ms > 0 else 1.0
            yield Sample(stage=index, action=action, time_ms=planned_ms * slowdown)


def _with_rates(device: Device, facts: Sequence[DeviceFacts]) -> Device:
    """Return a device with the median of its measured copy rates.

    The rates do not change where copies wait for each other, because of shared uplinks or half
    duplex. There a measured time includes the wait, which the simulator adds, too.
    """
    if not device.can_offload or device.half_duplex or device.pcie_group is not None:
        return device
    update = {}
    for name in ("d2h_gb_per_s", "h2d_gb_per_s"):
        rates = [rate for one in facts if (rate := getattr(one, name)) is not None]
        if rates:
            update[name] = statistics.median(rates)
    return device.model_copy(update=update)


# --- Rounds: a function that every server repeats in its own thread.


class Rounds:
    """Calls a function every ``every_s`` seconds, and immediately after `wake`.

    Errors are logged. ``name``: of the thread, and of the actions in the log.
    """

    def __init__(self, function: Callable[[], None], every_s: float, name: str) -> None:
        self._function = function
        self._every_s = every_s
        self._name = name
        self._closing = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        """Stop after the current round."""
        self._closing = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._woken.clear()
            try:
                self._function()
            except StoreUnavailableError as error:
                structlog.get_logger(__name__).warning(
                    str(error), action=f"{self._name}.store_unavailable"
                )
            except Exception:  # noqa: BLE001 - a thread that ends is lost until the next restart
                structlog.get_logger(__name__).exception(
                    f"a fault of the {self._name}", action=f"{self._name}.fault"
                )
            if not self._closing:
                self._woken.wait(self._every_s)
