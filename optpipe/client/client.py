"""The client for plain code, made from `optpipe.client.async_client` by ``make client``.

Several threads may share a client.
"""

from __future__ import annotations

import time
import uuid
from contextlib import closing, suppress
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import httpx
from httpx_sse import EventSource

from optpipe.client import endpoints
from optpipe.client.endpoints import AnswerT, Endpoint, Repeat, check_id
from optpipe.client.switching import RunState
from optpipe.client.transport import (
    PING_INTERVAL_S,
    Address,
    EventCursor,
    NoScheduleError,
    NoStreamError,
    NotFoundError,
    drop_none,
    if_none_match,
    make_body,
    make_error,
    read_newer_schedule,
    to_document,
)
from optpipe.errors import InfeasibleProblemError, InputError, ServiceError
from optpipe.evaluate import evaluate
from optpipe.measurements import Measurements
from optpipe.model import Model
from optpipe.problem import Problem
from optpipe.requests import (
    CompareRequest,
    FollowRequest,
    JobKind,
    SolveOptions,
    SolveRequest,
    SweepRequest,
    TuneRequest,
)
from optpipe.schedule import Provenance

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from typing import Self, Unpack

    from optpipe.answers import (
        BatchView,
        Drift,
        EstimateView,
        Event,
        Job,
        JobState,
        MethodRow,
        PasteForm,
        Tuned,
        TunedRow,
    )
    from optpipe.client.arguments import (
        EstimateArguments,
        FollowArguments,
        SearchArguments,
        SolveArguments,
        SubmitArguments,
        SweepArguments,
        TuneArguments,
    )
    from optpipe.formats.tables import SweepRow
    from optpipe.requests import Request
    from optpipe.schedule import Schedule

__all__ = ["Batch", "Client", "TrainingRun"]

# The pause between two polls grows from the first to the maximum while nothing changes.
_FIRST_POLL_S = 0.1
_MAX_JOB_POLL_S = 2.0
_MAX_BATCH_POLL_S = 5.0
_MAX_WAIT_S = 30.0
"""The longest wait of one request for the first schedule of a training run."""


class _Connection:
    """Calls endpoints, with retries."""

    def __init__(self, address: Address, transport: httpx.BaseTransport | None) -> None:
        self.address = address
        self.http = httpx.Client(transport=transport, **address.arguments())

    def call(self, endpoint: Endpoint[AnswerT], *ids: Job | str, **request: Any) -> AnswerT:
        """Return what the endpoint answers; arguments and errors of `send` and `Endpoint.read`."""
        return endpoint.read(self.send(endpoint, *ids, **request))

    def submit(
        self,
        endpoint: Endpoint[AnswerT],
        request: type[Request],
        *,
        wait_s: float = 0.0,
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> AnswerT:
        """Return what the endpoint answers to a body of ``fields``, some of which are options."""
        body = make_body(fields, request)
        return self.call(endpoint, json=body, wait_s=wait_s, idempotency_key=idempotency_key)

    def send(
        self,
        endpoint: Endpoint[Any],
        *ids: Job | str,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        idempotency_key: str | None = None,
    ) -> httpx.Response:
        """Return the answer of an endpoint: a success or 304.

        The service may wait up to ``wait_s`` seconds before it answers. The default
        ``idempotency_key`` is a new one. Raises `ServiceUnreachableError` if no attempt got an
        answer, and the error of `read_error` if the service refused.
        """
        path = endpoint.fill_path(*ids)
        if wait_s > 0:
            params = {**(params or {}), "wait": wait_s}
        if endpoint.repeat is Repeat.WITH_KEY:
            key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
            headers = {**(headers or {}), "Idempotency-Key": key}
        attempt = 0
        while True:
            try:
                answer = self.http.request(
                    endpoint.method,
                    path,
                    json=json,
                    params=params,
                    headers=headers,
                    timeout=self.address.timeout(wait_s),
                )
            except httpx.TransportError as error:
                delay_s = self.address.delay_after_error_s(attempt, endpoint.repeat, error)
            else:
                if answer.is_success or answer.status_code == HTTPStatus.NOT_MODIFIED:
                    return answer
                delay_s = self.address.delay_after_refusal_s(attempt, endpoint.repeat, answer)
            time.sleep(delay_s)
            attempt += 1


class Batch:
    """A batch of problems and its ``id``; `sweep` and `what_if` submit one."""

    def __init__(self, connection: _Connection, batch_id: str) -> None:
        self._connection = connection
        self.id = batch_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def look(self) -> BatchView:
        """Return the current state: progress, number of items in each state, the items."""
        return self._connection.call(endpoints.GET_BATCH, self.id)

    def follow(self) -> Iterator[BatchView]:
        """Yield the current state, then each change, until every item has ended."""
        view = self.look()
        yield view
        pause_s = _FIRST_POLL_S
        while not view.is_finished:
            time.sleep(pause_s)
            before, view = view, self.look()
            pause_s = min(pause_s * 1.5, _MAX_BATCH_POLL_S) if view == before else _FIRST_POLL_S
            if view != before:
                yield view

    def table(self) -> list[SweepRow]:
        """Return one row for each item: its values on the axes, and its result."""
        return (self._connection.call(endpoints.BATCH_TABLE, self.id)).rows

    def table_text(self, form: Literal["json", "csv", "markdown"]) -> str:
        """Return the table as JSON, CSV or Markdown."""
        params = {"format": form}
        return (self._connection.send(endpoints.BATCH_TABLE, self.id, params=params)).text

    def frontier(self, form: Literal["json", "svg"] = "svg") -> str:
        """Return the best objective and its lower bound for each memory budget."""
        params = {"format": form}
        return self._connection.call(endpoints.BATCH_FRONTIER, self.id, params=params)

    def retry(self) -> BatchView:
        """Solve the failed items again."""
        return self._connection.call(endpoints.RETRY_BATCH, self.id)

    def cancel(self) -> BatchView:
        """Stop every item that has not ended; each keeps its best schedule."""
        return self._connection.call(endpoints.CANCEL_BATCH, self.id)

    def delete(self) -> None:
        """Delete the batch and its jobs. Raises `ConflictError` if a job has not ended."""
        self._connection.call(endpoints.DELETE_BATCH, self.id)


class TrainingRun(RunState):
    """A training run that switches to better schedules; `training_run` makes one.

    `optpipe.client.switching.RunState` describes its attributes. `optpipe.runtime.follow` calls
    `next_schedule` and `report`. Only one thread or task may use it at a time.
    """

    def __init__(
        self, client: Client, job_id: str, threshold: float | None, options: SolveArguments
    ) -> None:
        super().__init__(job_id, threshold, options)
        self._client = client

    def schedule(self, wait_s: float = 0.0) -> Schedule:
        """Return the running schedule; the first call waits up to ``wait_s`` seconds for it.

        Raises `InfeasibleProblemError` if it is proven that there is no schedule,
        `NoScheduleError` if there is none (yet), and `InputError` for unequal micro-batches, and
        for a plan or tune that has not ended.
        """
        if self._running is not None:
            return self._running
        client = self._client
        job = client.job(self.job_id)
        if job.kind in (JobKind.PLAN, JobKind.TUNE) and not job.is_finished:
            raise InputError(
                f"job {job.id} is a {job.kind.value}, whose schedules are for different problems; "
                "wait for its end (client.result)"
            )
        deadline = monotonic() + wait_s
        found: tuple[int, Schedule] | None = None
        while found is None:
            left_s = max(deadline - monotonic(), 0.0)
            try:
                found = client.schedule_if_newer(job, wait_s=min(left_s, _MAX_WAIT_S))
            except NoScheduleError:
                if left_s <= 0 or (client.job(job)).is_finished:
                    raise
        problem = client.problem(job)
        if not problem.is_even:
            raise InputError(
                f"job {job.id} has micro-batches with costs, samples or a given order, which jobs "
                "of kind follow do not support; plan each batch instead (follow(replan=))"
            )
        if job.kind in (JobKind.SOLVE, JobKind.FOLLOW):
            given = {name: getattr(job.options, name) for name in SolveOptions.model_fields}
            self._options = drop_none(**given) | self._options
        self._number, self._running = found
        self._add_solved(problem, job.id)
        self._search, self.tags = job.id, job.tags
        return self._running

    def next_schedule(self, wait_s: float = 0.0) -> Schedule | None:
        """Return a schedule to switch to; None if there is none after ``wait_s`` seconds.

        It is shorter than the running one by the threshold, under the newest measured times. The
        first call returns the first schedule, unless `schedule` has returned it. Without a
        job that searches, the answer is None at once. Raises as `schedule`, once for each job.
        """
        if self._running is None:
            return self.schedule(wait_s)
        if self._search is None:
            return None
        try:
            is_over = self._look(self._search, wait_s)
        except (NotFoundError, NoScheduleError, InfeasibleProblemError):
            self._search = self._candidate = None
            raise
        if is_over:
            self._search = None
        return self._take_candidate(self._running, is_over=is_over)

    def _look(self, job_id: str, wait_s: float) -> bool:
        """Read the newest schedule of a job that searches; return whether the job has ended."""
        client = self._client
        job = client.job(job_id)
        if job.is_finished:
            wait_s = 0.0
        elif self._candidate is not None:
            wait_s = min(wait_s, max(0.0, self._next_switch_s - monotonic()))
        try:
            found = client.schedule_if_newer(job, self._number, wait_s)
        except NoScheduleError:
            if job.is_finished:
                raise
            return False
        if found is not None:
            known = None if self.problem is None else self.problem.problem_hash
            if found[1].problem_hash != known:
                self._add_solved(client.problem(job), job.id)
            elif job.id != self.job_id:
                self._without_drift = job.id
            self._number, self._candidate = found
        return job.is_finished

    def report(
        self,
        schedule: Schedule,
        measurements: Measurements,
        *,
        step: int | None = None,
        step_ms: float | None = None,
    ) -> None:
        """Send times measured under a schedule; `optpipe.runtime.ActionTimer` measures them.

        A job of kind `follow` compares the schedule with the medians of the newest five reports.
        While another job searches, the report is only kept for the next one. ``step`` is the
        number of the training step, ``step_ms`` its time from start to end.

        The job counts drift from solved times: those that the schedule was made for, and those of
        each comparison that was solved without a switch. Of them it takes the nearest to the
        measured ones. So the same drift is not solved again, and earlier times may return.
        """
        self._reports.append(measurements.condensed())
        if self._search is not None or self.problem is None:
            return
        self._choose_solved()
        if self._running is None or schedule.programs != self._running.programs:
            # The ranks refused the schedule that was found last.
            self._running = evaluate(self.problem, schedule.programs, schedule.provenance)
        job = self._client.submit_follow(
            self.problem,
            self._running,
            Measurements.medians_of(self._reports),
            threshold=self._threshold,
            step=step,
            step_ms=step_ms,
            tags=self.tags,
            **self._options,
        )
        self._search, self._number, self._candidate = job.id, 0, None
        self.comparison_id, old = job.id, self._without_drift
        if old is not None:
            self._without_drift = None
            with suppress(NotFoundError):
                self._client.delete(old)


class Client:
    """A connection to a service; close it, or use it in a ``with``. Callers may share it.

    Every method raises `ServiceUnreachableError` if no service answers. If the service refuses, a
    method raises an error of `optpipe.client.transport`. Parameters of several methods:

    * ``tags`` find jobs; ``priority`` orders them (-100 to 10, for admins to 100; highest first).
    * ``options`` are ``time_limit_s`` and the others of `optpipe.requests`.
    * ``wait_s``: for so many seconds the service may wait for a change before it answers.
    * ``idempotency_key``: the service acts once on each key. By default each call has a new key.

    Parameters
    ----------
    base_url, api_key
        Address of the service, such as ``http://127.0.0.1:8000``, and the API key if the service
        requires one; ``optpipe keys create`` creates keys.
    timeout_s, num_retries
        Seconds for each answer, in addition to ``wait_s``; the maximum number of retries of a call.
    transport
        Replaces the network, in tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        num_retries: int = 5,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        address = Address.parse(base_url, api_key, timeout_s, num_retries)
        self._connection = _Connection(address, transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._connection.http.close()

    def health(self) -> bool:
        """Return whether the service is ready, without retries; never raise."""
        endpoint = endpoints.READY
        with suppress(httpx.TransportError):
            answer = self._connection.http.request(endpoint.method, endpoint.path)
            return answer.is_success
        return False

    def submit(
        self,
        problem: Problem | Model,
        **arguments: Unpack[SubmitArguments],
    ) -> Job:
        """Submit a problem to schedule, or a model to cut, place and schedule; return its job.

        Raises `ProblemError` or `ModelError` if the service refuses the problem or model.
        """
        name = "model" if isinstance(problem, Model) else "problem"
        document = {name: to_document(problem)}
        return self._connection.submit(endpoints.SUBMIT_JOB, SolveRequest, **document, **arguments)

    def job(self, job: Job | str) -> Job:
        """Return the current state of a job, with its trace."""
        return self._connection.call(endpoints.GET_JOB, job)

    def jobs(
        self, *, state: JobState | str | None = None, tag: str | None = None, batch: str = ""
    ) -> Iterator[Job]:
        """Yield all jobs, newest first; optionally those in a state, with a tag or of a batch."""
        cursor: str | None = None
        while True:
            params = drop_none(state=state, tag=tag, batch=batch or None, cursor=cursor)
            page = self._connection.call(endpoints.LIST_JOBS, params=params)
            for job in page.jobs:
                yield job
            if (cursor := page.next) is None:
                return

    def result(self, job: Job | str) -> Schedule:
        """Wait for a job's end and return its best schedule.

        Without a schedule it raises `InfeasibleProblemError` (proven), `NoScheduleError` (nothing
        found, or cancelled before), or `SolveFailedError` (the solver failed before).
        """
        return self.schedule(self._wait_for_end(job))

    def _wait_for_end(self, job: Job | str) -> Job:
        """Return a job after its end. Raises the job's error if it has no schedule."""
        with closing(self.follow(job)) as updates:
            for update in updates:
                last = update
        if not last.has_schedule and last.error is not None:
            raise make_error(last.error.code, last.error.message, last.error.needs)
        return last

    def follow(self, job: Job | str) -> Generator[Job, None, None]:
        """Yield the current state of a job, then each change, until the job has ended.

        If no events arrive, the client polls the job: often after a change, less often without one.
        """
        current = self.job(job)
        yield current
        cursor = EventCursor()
        with suppress(NoStreamError):
            while not (current.is_finished or cursor.is_over):
                with closing(self._receive(current, cursor)) as stream:
                    for event in stream:
                        if not cursor.is_new_to(current, event):
                            continue
                        before, current = current, self.job(current)
                        if current != before:
                            yield current
                        if current.is_finished:
                            return
                before, current = current, self.job(current)
                if current != before:
                    yield current
        pause_s = _FIRST_POLL_S
        while not current.is_finished:
            time.sleep(pause_s)
            before, current = current, self.job(current)
            pause_s = min(pause_s * 1.5, _MAX_JOB_POLL_S) if current == before else _FIRST_POLL_S
            if current != before:
                yield current

    def events(self, job: Job | str, *, after: int = 0) -> Iterator[Event]:
        """Yield each event of a job once: states, improvements, bounds, log lines.

        They begin after the number ``after`` and end with the job, also over broken connections.
        Raises `ServiceError` if the service sends no events; `follow` needs none.
        """
        cursor = EventCursor(after)
        try:
            while not cursor.is_over:
                with closing(self._receive(job, cursor)) as stream:
                    for event in stream:
                        yield event
                if cursor.is_failing and not cursor.is_over:
                    # This call raises, after its retries, if the service is unreachable.
                    self.job(job)
        except NoStreamError:
            raise ServiceError(
                "the service, or something in between, sends no events; use follow instead", 501
            ) from None

    def _receive(self, job: Job | str, cursor: EventCursor) -> Generator[Event, None, None]:
        """Yield the new events of one stream until it ends or breaks."""
        endpoint, connection = endpoints.JOB_EVENTS, self._connection
        path, timeout = endpoint.fill_path(job), connection.address.timeout(PING_INTERVAL_S)
        if cursor.is_failing:
            time.sleep(cursor.backoff_s())
        failure = None
        try:
            with connection.http.stream(
                endpoint.method, path, headers=cursor.headers(), timeout=timeout
            ) as answer:
                if not cursor.begin_stream(answer):
                    answer.read()
                    time.sleep(cursor.delay_after_s(answer))
                    return
                for message in EventSource(answer).iter_sse():
                    if (event := cursor.read_event(message)) is not None:
                        yield event
        except httpx.TransportError as error:
            failure = error
        cursor.end_stream(failure)

    def schedule(self, job: Job | str) -> Schedule:
        """Return the best schedule so far.

        Raises `InfeasibleProblemError` if it is proven that there is none, and `NoScheduleError` if
        there is none (yet).
        """
        return self._connection.call(endpoints.JOB_SCHEDULE, job)

    def schedule_if_newer(
        self, job: Job | str, number: int = 0, wait_s: float = 0.0
    ) -> tuple[int, Schedule] | None:
        """Return the best schedule and its number; None if it is still ``number`` (0 = none).

        The wait ends at the latest with the job. Raises as `schedule`.
        """
        headers = if_none_match(check_id(job), number)
        answer = self._connection.send(endpoints.JOB_SCHEDULE, job, headers=headers, wait_s=wait_s)
        return read_newer_schedule(answer)

    def schedule_text(self, job: Job | str, form: Literal["json", "csv", "trace", "svg"]) -> str:
        """Return the best schedule as JSON, CSV, Chrome trace or SVG; raises as `schedule`."""
        params = {"format": form}
        return (self._connection.send(endpoints.JOB_SCHEDULE, job, params=params)).text

    def problem(self, job: Job | str) -> Problem:
        """Return the problem of a job; for a planned model, that of its best schedule so far."""
        return self._connection.call(endpoints.JOB_PROBLEM, job)

    def model(self, job: Job | str) -> Model:
        """Return the model of a job that plans one."""
        return self._connection.call(endpoints.JOB_MODEL, job)

    def cancel(self, job: Job | str) -> Job:
        """Stop a job and keep its best schedule; a finished job does not change."""
        return self._connection.call(endpoints.CANCEL_JOB, job)

    def delete(self, job: Job | str) -> None:
        """Delete a job with its problem and schedule. Raises `ConflictError` before its end."""
        self._connection.call(endpoints.DELETE_JOB, job)

    def resume(self, job: Job | str, time_limit_s: float, *, wait_s: float = 0.0) -> Job:
        """Continue a finished job from its best schedule for ``time_limit_s`` more seconds.

        Raises `ConflictError` if the job has not ended, or if no better schedule can exist.
        """
        body = {"time_limit_s": time_limit_s}
        return self._connection.call(endpoints.RESUME_JOB, job, json=body, wait_s=wait_s)

    def methods(self) -> dict[str, str]:
        """Return the names that ``method`` of a job accepts, each with a one-line description."""
        listed = self._connection.call(endpoints.LIST_METHODS)
        return {method.name: method.description for method in listed.methods}

    def compare(
        self,
        problem: Problem,
        *,
        workload: Mapping[str, float] | None = None,
        **options: Unpack[SearchArguments],
    ) -> list[MethodRow]:
        """Run every method on the service, wait for the job, and return a row each, best first.

        ``time_limit_s`` limits the optimiser; the other methods need time in addition.
        ``workload`` has ``tokens_per_microbatch``, for tokens/s, and ``flops_per_microbatch`` and
        ``peak_flops_per_s``, for MFU. Raises `SolveFailedError` if the solver failed, and
        `NoScheduleError` if the job was cancelled.
        """
        document = to_document(problem)
        job = self._connection.submit(
            endpoints.SUBMIT_COMPARISON,
            CompareRequest,
            problem=document,
            workload=workload,
            **options,
        )
        return self.comparison(self._wait_for_end(job))

    def comparison(self, job: Job | str) -> list[MethodRow]:
        """Return the rows of a comparison job, best first.

        Raises `NoScheduleError` if it has none (yet).
        """
        return (self._connection.call(endpoints.COMPARISON_ROWS, job)).rows

    def estimate(self, **arguments: Unpack[EstimateArguments]) -> EstimateView:
        """Return the problem of a model on accelerators, from formulas, and what a step takes.

        ``arguments`` are those of `optpipe.client.arguments.EstimateArguments`. Raises
        `RequestRefusedError` if the service cannot estimate it.
        """
        return self._connection.call(endpoints.ESTIMATE, json=make_body(arguments))

    def submit_tune(self, **arguments: Unpack[TuneArguments]) -> Job:
        """Submit a search for the fastest training configuration of a model; return its job.

        ``arguments`` are those of `optpipe.client.arguments.TuneArguments`. Raises
        `RequestRefusedError` if the service does not support them.
        """
        return self._connection.submit(endpoints.SUBMIT_TUNE, TuneRequest, **arguments)

    def tune(self, **arguments: Unpack[TuneArguments]) -> Tuned:
        """Return the fastest configuration for a model, GPUs and a batch, with its certificate.

        Waits for the job. Use `submit_tune` to get the job, which has the winner's problem and
        schedule. Raises as `submit_tune` and `result`.
        """
        return self.tuned(self._wait_for_end(self.submit_tune(**arguments)))

    def tuned(self, job: Job | str) -> Tuned:
        """Return what a tune job has found, or has found so far.

        Raises `NoScheduleError` if it has found nothing (yet).
        """
        return self._connection.call(endpoints.TUNE_RESULT, job)

    def tuned_row(self, job: Job | str, row: TunedRow) -> tuple[Problem, Schedule]:
        """Return the problem and the schedule of a row of `tuned`.

        The service keeps those of the fastest eleven rows, the Pareto front and the current
        configuration. Raises `NoScheduleError` for other rows.
        """
        problem = self._connection.call(endpoints.ROW_PROBLEM, job, row.id)
        return problem, self._connection.call(endpoints.ROW_SCHEDULE, job, row.id)

    def recut(self, job: Job | str, row: TunedRow, layers: Sequence[int]) -> TunedRow:
        """Return a row of `tuned`, estimated with other numbers of layers per stage.

        ``layers`` is in model order and counts embedding and head. The estimate uses the
        framework's own schedules. If none of them fits, ``peak_bytes`` exceeds the memory. Raises
        `RequestRefusedError` if ``layers`` does not cut the model into as many stages, and
        `NoScheduleError` as `tuned_row`.
        """
        params = {"layers": ",".join(map(str, layers))}
        return self._connection.call(endpoints.ROW_RECUT, job, row.id, params=params)

    def paste(self, job: Job | str, row: TunedRow, form: PasteForm = "arguments") -> str:
        """Return a row of `tuned` as a configuration of its framework.

        ``form``: Megatron-LM's ``arguments``, Megatron-Core's ``yaml``, a torchtitan config as
        ``python``, or its schedule as ``csv``. Raises `RequestRefusedError` if the framework cannot
        run the row; `NoScheduleError` as `tuned_row`.
        """
        params = {"format": form}
        return self._connection.call(endpoints.ROW_PASTE, job, row.id, params=params)

    def sweep(
        self,
        problem: Problem | Sequence[Problem],
        axes: Mapping[str, Sequence[Any]] | None = None,
        **arguments: Unpack[SweepArguments],
    ) -> Batch:
        """Solve every variation of a problem, or a list of problems, as one batch.

        ``axes`` maps names or paths to values, as in `optpipe.sweep`. Each combination is an item.
        If the service refuses one item, it solves none. Raises `ProblemError` if it refuses a
        problem, and `RequestRefusedError` for invalid or too many combinations. Raises `InputError`
        for ``axes`` with a list of problems.
        """
        if isinstance(problem, Problem):
            varied = {axis: list(values) for axis, values in (axes or {}).items()}
            source: dict[str, Any] = {"problem": to_document(problem), "axes": varied}
        elif axes:
            raise InputError("axes vary one problem, not a list of them; give one of both")
        else:
            source = {"problems": [to_document(one) for one in problem]}
        view = self._connection.submit(endpoints.SUBMIT_BATCH, SweepRequest, **source, **arguments)
        return Batch(self._connection, view.id)

    def what_if(
        self,
        job: Job | str,
        *,
        priority: int | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[SearchArguments],
    ) -> Batch:
        """Solve a job's problem with 1 GB more memory, a 20% faster bus or twice the micro-batches.

        Each change that applies to the problem is an item; ``question`` in its values is its name.
        The solver starts each item from the job's best schedule. One item changes nothing: it shows
        what a longer search finds without a change. Raises `InfeasibleProblemError` if it is proven
        that the job has no schedule. Raises `ConflictError` if the job has none, or if the
        optimiser did not solve it.
        """
        view = self._connection.submit(
            endpoints.SUBMIT_BATCH,
            SweepRequest,
            what_if=check_id(job),
            priority=priority,
            idempotency_key=idempotency_key,
            **options,
        )
        return Batch(self._connection, view.id)

    def batch(self, batch_id: str) -> Batch:
        """Return the batch with this id; sends no request."""
        return Batch(self._connection, check_id(batch_id, "batch"))

    def training_run(
        self,
        job: Job | str,
        *,
        threshold: float | None = None,
        **options: Unpack[SolveArguments],
    ) -> TrainingRun:
        """Return a training run that begins with the schedule of a job; sends no request.

        The job solves the problem of the run, or is the ``job_id`` of a run that was stopped. The
        run switches to a schedule that is shorter by the share ``threshold`` (default 0.01) at
        least. ``options`` are those of each new solve, by default those of the job.
        """
        return TrainingRun(self, check_id(job), threshold, options)

    def submit_follow(
        self,
        problem: Problem,
        schedule: Schedule,
        measurements: Measurements,
        **arguments: Unpack[FollowArguments],
    ) -> Job:
        """Submit a running schedule and measured times; the service solves again after drift.

        ``problem`` is the one that ``schedule`` was made for. The job's problem and schedule are
        those to continue with; `drift` has the reason. `training_run` calls this for each report.
        Raises `RequestRefusedError` if problem, schedule and measurements do not fit together.
        """
        running = schedule.model_copy(
            update={"provenance": Provenance(method=schedule.provenance.method)}
        )
        return self._connection.submit(
            endpoints.SUBMIT_FOLLOW,
            FollowRequest,
            problem=to_document(problem),
            schedule=running.model_dump(mode="json", by_alias=True),
            measurements=measurements.model_dump(mode="json", exclude_defaults=True),
            **arguments,
        )

    def drift(self, job: Job | str) -> Drift:
        """Return how the running schedule of a job of kind `follow` does under measured times.

        Raises `NoScheduleError` if the job has not compared them (yet).
        """
        return self._connection.call(endpoints.JOB_DRIFT, job)
