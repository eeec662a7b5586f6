"""What the service does about deployments: register, show, follow, hear what was measured, end."""

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
from optpipe_api.services.jobs import MAX_NEAR_JOBS
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
    "length_ms",
    "measured_problem",
    "start_from",
    "times_of",
    "under",
]


_INFEASIBLE = InfeasibleProblemError.code


class DeploymentService:
    """Deployments as one caller sees them. Coroutines are for the event loop, all else for threads.

    A deployment of somebody else does not exist: `DeploymentNotFoundError`, here and below.
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
        """Begin to look after deployments, as every server does."""
        self._rounds.start()

    def close(self) -> None:
        """Stop looking after them; other servers go on."""
        self._rounds.close()

    def register(
        self, new: NewDeployment, who: Principal, key: str | None = None
    ) -> DeploymentRecord:
        """Register a training run and begin to solve its problem; a repeated key returns the first.

        Raises `QueueFullError` if the queue has no room for its solve; `TooManyJobsError` if too
        much of this owner is under way; `KeyReusedError` if the key made a deployment from another
        request.
        """
        new = replace(new, owner=who.name, idempotency_key=key)
        deployment, is_new = self._store.add(
            new,
            max_queued=self._settings.max_queued_jobs,
            max_of_owner=self._settings.max_jobs_per_key if new.owner else None,
        )
        if is_new:
            self._steps.take(deployment.id)
        return self._store.get(deployment.id)

    def find(self, deployment_id: str, who: Principal) -> DeploymentRecord:
        deployment = self._store.get(deployment_id)
        if not who.sees(deployment.owner):
            raise DeploymentNotFoundError(deployment_id)
        return deployment

    def page(self, limit: int, after: str | None, who: Principal) -> list[DeploymentRecord]:
        """Return deployments, newest first, from the one ``after``; an admin sees everybody's."""
        owner = None if who.role is Role.ADMIN else who.name
        before = None if after is None else self.find(after, who).position
        return self._store.page(limit, before, owner=owner)

    def versions(self, deployment_id: str, who: Principal) -> list[VersionRecord]:
        self.find(deployment_id, who)
        return self._store.versions(deployment_id)

    def problem(self, deployment_id: str, who: Principal) -> str:
        """Return the problem as measured, or as registered where nothing was; JSON text."""
        self.find(deployment_id, who)
        return self._store.documents(deployment_id).newest

    def schedule(self, deployment_id: str, who: Principal) -> tuple[int, str]:
        """Return number and schedule (JSON text) of the newest version.

        Raises `InfeasibleProblemError` if there is none, proven; `ScheduleNotFoundError` if there
        is none, or none yet.
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
        raise ScheduleNotFoundError(f"deployment {deployment_id} {why}")

    def report(self, deployment_id: str, report: Report, who: Principal) -> DeploymentRecord:
        """Keep what a training run measured under a version; the next round judges it.

        Raises `StateConflictError` if the deployment has ended, or has no such version;
        `RequestError`, `MeasurementError` if what was measured does not belong to this problem.
        """
        self.find(deployment_id, who)
        check_stages(self._store.documents(deployment_id).problem, report.document)
        reported = self._store.report(deployment_id, report, measured_problem)
        self._rounds.wake()
        return reported

    def end(self, deployment_id: str, who: Principal) -> DeploymentRecord:
        """End a deployment and cancel its solve; its versions stay."""
        self.find(deployment_id, who)
        deployment = self._store.end(deployment_id)
        if deployment.job_id is not None:
            # The job of an ended deployment may be deleted.
            with suppress(JobNotFoundError):
                self._jobs.cancel(deployment.job_id, Principal(deployment.owner, Role.SUBMIT))
        self._changes.publish(deployment_id)
        return deployment

    def delete(self, deployment_id: str, who: Principal) -> None:
        """Forget an ended deployment with all it has; raises as `DeploymentStore.delete`."""
        self.find(deployment_id, who)
        self._store.delete(deployment_id)
        self._changes.publish(deployment_id)

    async def wait_schedule(
        self, deployment_id: str, known_version: int, seconds: float, who: Principal
    ) -> tuple[int, str] | None:
        """Return the newest version once it is another than the known one.

        None where it is still that one when the time is up or the deployment has ended.

        ``known_version``: what the caller has; 0 = none. Raises `InfeasibleProblemError`,
        `ScheduleNotFoundError` as `schedule`.
        """

        def is_news(now: DeploymentStanding) -> bool:
            failed = now.version == 0 and now.has_failed
            return now.has_ended or failed or now.version != known_version

        found = await self._watch.standing(deployment_id)
        most_s = min(seconds, self._settings.max_wait_s)
        if found is not None and who.sees(found.owner) and most_s > 0 and not is_news(found):
            await self._watch.until(deployment_id, is_news, most_s)
            found = await self._watch.standing(deployment_id)
        if found is None or not who.sees(found.owner):
            raise DeploymentNotFoundError(deployment_id)
        if found.version == known_version and known_version > 0:
            return None
        return await run_in_threadpool(self.schedule, deployment_id, who)

    def _submit(
        self, deployment: DeploymentRecord, problem: Problem, start: JobStart | None
    ) -> JobRecord:
        """Add the job of a deployment's solve; see `Steps`."""
        new = replace(
            solved_job(problem, deployment.options, self._settings.max_cells),
            name=deployment.name,
            owner=deployment.owner,
            # No client can send this one: a header holds no control character.
            idempotency_key=f"\x01deployment/{deployment.id}/{deployment.num_solves}",
            deployment_id=deployment.id,
        )
        new = self._jobs.cache.complete(new, MAX_NEAR_JOBS if start is None else 0)
        if start is not None and new.finished is None:
            new = replace(new, start=start)
        return self._jobs.add(new)


# --- The next step of a deployment, whoever takes it: the arrows of `optpipe_api.deployments`.
# Everything a step needs is in the store, and every change is a compare-and-set there. So each
# server tries all steps, now and then and whenever one of its own jobs changes; the first to come
# takes it.

PUBLISH_EVERY_S = 5.0
"""While a job runs, at least so long passes between two versions."""


class Steps:
    """Takes the steps of deployments.

    ``store``, ``jobs``: where deployments and jobs are kept. ``submit``: adds the job of a
    deployment's solve: its problem, and a schedule to start from; the job that was added before
    where there is one. ``on_version``: called with the id of a deployment that has a new version.
    ``clock``: the time in seconds since the epoch, as the stores see it.
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
        known: DeploymentRecord | None = self._store.get(deployment_id)
        while known is not None and known.ended_at is None:
            known = self._next(known)

    def _next(self, known: DeploymentRecord) -> DeploymentRecord | None:
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
        start = None if found is None else start_from(problem, found[1], found[0])
        try:
            job = self._submit(known, problem, start)
        except ServerBusyError:
            # There is no room now. The next round asks again, and views say that it waits.
            return None
        return self._store.start(known, job.id)

    def _look(self, known: DeploymentRecord, job: JobRecord) -> DeploymentRecord | None:
        """Publish what the job found, where it is worth it; settle where the job has ended."""
        is_final = job.state.is_final
        if job.has_schedule and (is_final or self._is_due(known, job)):
            published = self._consider(known, job)
            if published is not None:
                self._on_version(known.id)
                self._log(known, "deployment.version", f"version {published.version} is published")
                return published
        return self._store.settle(known, _why_nothing(job)) if is_final else None

    def _is_due(self, known: DeploymentRecord, job: JobRecord) -> bool:
        """Whether a running job's schedule is new, may be worth it, and does not come too soon."""
        if known.version == 0:
            return True
        if job.num_schedules <= known.num_seen or not _promises(known, job):
            return False
        last = self._store.versions(known.id)[-1]
        return self._now() >= last.created_at + PUBLISH_EVERY_S

    def _consider(self, known: DeploymentRecord, job: JobRecord) -> DeploymentRecord | None:
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

    def _log(self, known: DeploymentRecord, action: str, sentence: str) -> None:
        structlog.get_logger(__name__).info(
            sentence, action=action, deployment=known.id, job=known.job_id
        )


def _promises(known: DeploymentRecord, job: JobRecord) -> bool:
    """Whether a job's objective, under the times it solves for, gains enough over what was."""
    if job.objective_ms is None or known.planned_ms is None:
        return job.objective_ms is not None
    return job.objective_ms < known.planned_ms * (1 - known.threshold)


def _worth_it(
    known: DeploymentRecord,
    documents: Documents,
    stored: StoredSchedule,
    in_use: tuple[int, str] | None,
) -> NewVersion | None:
    """Return the version that a schedule would be; None where it gains less than it must."""
    schedule, new_ms = under(documents.newest, stored.document)
    reason = REGISTERED
    if in_use is not None:
        newest = Problem.model_validate_json(documents.newest)
        current_ms = length_ms(newest, in_use[1])
        if new_ms >= current_ms * (1 - known.threshold):
            return None
        reason = _reason(known, documents, current_ms, new_ms)
    return NewVersion(
        reason=reason,
        schedule=schedule,
        predicted_ms=new_ms,
        problem=documents.newest,
        num_seen=stored.number,
    )


def _reason(known: DeploymentRecord, documents: Documents, current_ms: float, new_ms: float) -> str:
    times = "" if documents.measured is None else " under the measured times"
    gain = f"{new_ms:.6g} ms instead of {current_ms:.6g} ms{times}"
    share = f"{1 - new_ms / current_ms:.1%} shorter" if current_ms > 0 else "no shorter"
    if known.job_reason in (None, REGISTERED):
        return f"improved: {gain}, {share}"
    return f"{known.job_reason}; this one takes {gain}, {share}"


def _why_nothing(job: JobRecord) -> JobError | None:
    if job.has_schedule:
        return None
    return job.error or JobError(
        code=f"job.{job.state.value}", message=f"job {job.id} has {job.state.value}"
    )


# --- What measured times do to the schedule in use, and whether another one could do better.
# Times that change alone are no reason to solve again: where everything takes a tenth longer, or
# the busiest device does, the best schedule takes longer too. So the step time is held against what
# it may be expected to be. Let O be the length of the schedule in use under the times that were
# solved for, and L(.) a proven lower bound: that of `optpipe_solver.bounds.energy`, from work and
# memory, which is the one that compiles nothing in the server's process. Then O / L(planned) says
# how good the schedule was for those times, and
#
#     the expected step time: ``O * L(measured) / L(planned)``
#
# is what one as good would take under the measured ones. O is never below L(planned), so this is
# never below L(measured). Drift is what the schedule in use takes beyond it.

_WORDS: dict[MeasuredAction, str] = {
    "F": "forward",
    "I": "input backward",
    "W": "weight backward",
    "B": "backward",
    "RECOMPUTE": "recomputation",
}


def judged(deployment: DeploymentRecord, documents: Documents, schedule: str) -> Judgement:
    """Return how the schedule in use does under the measured times.

    ``deployment``: one with a version and reports. ``documents``: its problems. ``schedule``: its
    newest version, as JSON text.
    """
    measured = Problem.model_validate_json(documents.newest)
    planned = Problem.model_validate_json(documents.planned)
    current_ms = length_ms(measured, schedule)
    planned_ms = current_ms if deployment.planned_ms is None else deployment.planned_ms
    expected_ms = planned_ms * _scale(planned, measured)
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


def length_ms(problem: Problem, schedule: str) -> float:
    """Return the objective, in ms, of a schedule (JSON text) under the times of a problem."""
    run = simulate(problem, load_schedule(schedule).programs)
    return run.objective_ms(problem.objective)


def under(newest: str, schedule: str) -> tuple[str, float]:
    """Return a schedule with its numbers under the times of a problem, and its length in ms.

    All of them are JSON texts.

    A bound that was proven for other times is left out.

    Raises `IllegalScheduleError` if it breaks a rule there, or does not fit its memory.
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


def start_from(problem: Problem, schedule: str, version: int) -> JobStart:
    """Return the schedule in use as the start of a solve of other times."""
    method = f"version {version} of the deployment"
    true = evaluate(problem, load_schedule(schedule).programs, Provenance(method=method))
    return JobStart(
        documents={DocumentKind.SCHEDULE: true.model_dump_json(by_alias=True)},
        objective_ms=true.objective_ms,
        method=method,
    )


def largest_change(planned: Problem, measured: Problem) -> str:
    """Return a clause about the time that changed by the most milliseconds."""
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
    # Heavy, and loaded by then.
    from optpipe_solver.bounds import Paths  # noqa: PLC0415
    from optpipe_solver.bounds.energy import energy_ms  # noqa: PLC0415

    return energy_ms(Paths(problem), makespan=problem.objective == "makespan")


def _times(problem: Problem) -> Iterator[tuple[str, float]]:
    """Yield everything that takes time, in ms; equally many for problems of one deployment."""
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


def _scale(planned: Problem, measured: Problem) -> float:
    """Return by how much the lower bound grew; 1 where there is nothing to compare."""
    before, after = bound_ms(planned), bound_ms(measured)
    return after / before if before > 0 and after > 0 else 1.0


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
    duplex. There a measured time includes the wait, which the simulator adds by itself.
    """
    if not device.can_offload or device.half_duplex or device.pcie_group is not None:
        return device
    update = {}
    for name in ("d2h_gb_per_s", "h2d_gb_per_s"):
        rates = [rate for one in facts if (rate := getattr(one, name)) is not None]
        if rates:
            update[name] = statistics.median(rates)
    return device.model_copy(update=update)


# --- Something that every server does again and again, in a thread of its own.


class Rounds:
    """Calls a function every ``every_s`` seconds, and at once when woken, whatever happens in it.

    ``name`` is the thread's, and says in the log what went wrong.
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
        """End after the round that is under way."""
        self._closing = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        structlog.get_logger(__name__)
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
