"""The client for ``async`` code, written by hand; `optpipe.client.client` is made from it.

After a change here run ``make client``, which writes the twin; a test says whether it is current.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import httpx
from httpx_sse import EventSource

from optpipe.answers import (
    BatchView,
    DeploymentView,
    Event,
    Job,
    JobList,
    JobState,
    MethodList,
    MethodRow,
    MethodRowList,
    PasteForm,
    SweepRowList,
    Tuned,
    TunedRow,
    Version,
    VersionList,
)
from optpipe.client.arguments import (
    SearchArguments,
    SolveArguments,
    SubmitArguments,
    TuneArguments,
)
from optpipe.client.transport import (
    SILENCE_S,
    Address,
    EventCursor,
    NoScheduleError,
    NoStreamError,
    Repeat,
    as_model,
    checked_id,
    document,
    error_of,
    given,
    if_newer,
    is_told,
    items,
    newer_schedule,
    numbered_schedule,
    once,
    tuning,
    waiting,
)
from optpipe.errors import ServiceError
from optpipe.formats.json import load_model, load_problem, load_schedule
from optpipe.model import Model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
    from typing import Self, Unpack

    from optpipe.formats.tables import SweepRow
    from optpipe.measurements import Measurements
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["AsyncBatch", "AsyncClient", "AsyncDeployment"]

Form: TypeAlias = Literal["json", "csv", "trace", "svg"]

# Pauses between looks at a job or batch: the first after news, longer ones while there is none.
_FIRST_POLL_S = 0.1
_LONGEST_POLL_S = 2.0
_LONGEST_BATCH_POLL_S = 5.0
_LOOK_AGAIN_S = 30.0


class _AsyncConnection:
    """Sends requests, again where that may help and does no harm."""

    def __init__(self, address: Address, transport: httpx.AsyncBaseTransport | None) -> None:
        self.address = address
        self.http = httpx.AsyncClient(transport=transport, **address.arguments())

    async def send(
        self,
        method: Literal["GET", "POST", "DELETE"],
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        repeat: Repeat = Repeat.ALWAYS,
    ) -> httpx.Response:
        """Return the answer, a success or 304; it may take ``wait_s`` longer than usual.

        Raises `ServiceUnreachableError`, `OptPipeError` if nobody answered to the end; what the
        service's refusal means.
        """
        attempt = 0
        while True:
            try:
                answer = await self.http.request(
                    method,
                    path,
                    json=json,
                    params=params,
                    headers=headers,
                    timeout=self.address.timeout(wait_s),
                )
            except httpx.TransportError as error:
                pause_s = self.address.pause_after_loss(attempt, repeat, error)
            else:
                if is_told(answer):
                    return answer
                pause_s = self.address.pause_after_refusal(attempt, repeat, answer)
            await asyncio.sleep(pause_s)
            attempt += 1


class _AsyncHandle:
    """Something that the service keeps under an ``id``."""

    _room: ClassVar[str]

    def __init__(self, connection: _AsyncConnection, thing_id: str) -> None:
        self._connection = connection
        self._path = f"v1/{self._room}/{thing_id}"
        self.id = thing_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"


class AsyncBatch(_AsyncHandle):
    """Problems that are solved together, by their ``id``; `sweep` and `what_if` make it."""

    _room = "batches"

    async def look(self) -> BatchView:
        """Return the batch as it is now: progress, how many items are in each state, the items."""
        return as_model(BatchView, await self._connection.send("GET", self._path))

    async def follow(self) -> AsyncIterator[BatchView]:
        """Iterate over the news of the batch: first as it is now, last with every item ended."""
        known = await self.look()
        yield known
        wait_s = _FIRST_POLL_S
        while not known.is_finished:
            await asyncio.sleep(wait_s)
            before, known = known, await self.look()
            wait_s = min(wait_s * 1.5, _LONGEST_BATCH_POLL_S) if known == before else _FIRST_POLL_S
            if known != before:
                yield known

    async def table(self) -> list[SweepRow]:
        """Return a row per item: its values on the axes, and what was reached."""
        return SweepRowList.model_validate_json(await self.table_text("json")).rows

    async def table_text(self, form: Literal["json", "csv", "markdown"]) -> str:
        """Return the table as JSON, CSV or Markdown."""
        answer = await self._connection.send("GET", f"{self._path}/table", params={"format": form})
        return answer.text

    async def frontier(self, form: Literal["json", "svg"] = "svg") -> str:
        """Return what memory buys: the best objective for each budget, and its bound."""
        params = {"format": form}
        return (await self._connection.send("GET", f"{self._path}/frontier", params=params)).text

    async def retry(self) -> BatchView:
        """Solve the failed items again."""
        return as_model(BatchView, await self._connection.send("POST", f"{self._path}/retry"))

    async def cancel(self) -> BatchView:
        """Stop every item that has not ended; each keeps its best schedule."""
        return as_model(BatchView, await self._connection.send("POST", f"{self._path}/cancel"))

    async def delete(self) -> None:
        """Delete it and its jobs. Raises `ConflictError` if one has not ended."""
        await self._connection.send("DELETE", self._path, repeat=Repeat.UNSENT)


class AsyncDeployment(_AsyncHandle):
    """A training run that follows the newest schedule, by its ``id``; `deploy` makes it."""

    _room = "deployments"

    async def look(self) -> DeploymentView:
        """Return what goes on: the newest version, the solve under way, what drift costs."""
        return as_model(DeploymentView, await self._connection.send("GET", self._path))

    async def schedule(self, wait_s: float = 0.0) -> tuple[int, Schedule]:
        """Return the newest version and its schedule, waiting so long for the first one.

        Raises `InfeasibleProblemError` if it is proven that there is none, and `NoScheduleError` if
        there is none (yet).
        """
        deadline = monotonic() + wait_s
        while True:
            left_s = max(deadline - monotonic(), 0.0)
            try:
                return numbered_schedule(await self._newest(0, min(left_s, _LOOK_AGAIN_S)))
            except NoScheduleError:
                seen = await self.look()
                if left_s <= 0 or seen.state not in ("waiting", "solving"):
                    raise

    async def schedule_if_newer(
        self, version: int, wait_s: float = 0.0
    ) -> tuple[int, Schedule] | None:
        """Return the newest version and its schedule; None where it is the one known, 0 = none."""
        return newer_schedule(await self._newest(version, wait_s))

    async def _newest(self, version: int, wait_s: float) -> httpx.Response:
        path, headers = f"{self._path}/schedule", if_newer(self.id, version)
        params = waiting(wait_s)
        return await self._connection.send(
            "GET", path, params=params, headers=headers, wait_s=wait_s
        )

    async def report(
        self,
        version: int,
        measurements: Measurements,
        *,
        step: int | None = None,
        step_ms: float | None = None,
    ) -> DeploymentView:
        """Tell the times of actions, as `optpipe.runtime.ActionTimer` measures them, of a version.

        ``step`` says when, ``step_ms`` what a step took from start to end. Raises `ConflictError`
        if there is no such version, or the deployment has ended.
        """
        actions = measurements.model_dump(mode="json", exclude_defaults=True)
        body = given(version=version, step=step, step_ms=step_ms, actions=actions)
        path = f"{self._path}/measurements"
        answer = await self._connection.send("POST", path, json=body, repeat=Repeat.UNSENT)
        return as_model(DeploymentView, answer)

    async def versions(self) -> tuple[Version, ...]:
        """Return every version, oldest first: why, and its predicted and measured step time."""
        answer = await self._connection.send("GET", f"{self._path}/versions")
        return as_model(VersionList, answer).versions

    async def problem(self) -> Problem:
        """Return the problem with the times last measured."""
        return load_problem((await self._connection.send("GET", f"{self._path}/problem")).text)

    async def end(self) -> DeploymentView:
        """End it: nothing is published any more, its versions stay."""
        return as_model(DeploymentView, await self._connection.send("POST", f"{self._path}/end"))

    async def delete(self) -> None:
        """Forget an ended deployment, its versions and what was reported."""
        await self._connection.send("DELETE", self._path, repeat=Repeat.UNSENT)


class AsyncClient:
    """A connection to a service; close it, or use it in a ``with``. It may be shared.

    Every method raises `ServiceUnreachableError` where nobody answers, and what
    `optpipe.client.transport` draws where the service refuses. What several of them take: ``tags``
    and ``priority`` (-100 to 10, an admin's to 100; higher ones first), to find and to order jobs;
    ``options``, ``time_limit_s`` and the others of `optpipe.requests`; ``wait_s``, how many seconds
    longer the service may wait for news before it answers, as far as it does; ``idempotency_key``,
    under which the service does a thing once: by default each call has its own.

    Parameters
    ----------
    base_url, api_key
        Address of the service, such as ``http://127.0.0.1:8000``; and what it asks for if other
        machines can reach it: ``optpipe keys create`` makes one.
    timeout_s
        For each answer; waiting for a job's end does not count.
    num_retries
        How often a call is repeated before it fails.
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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        address = Address.checked(base_url, api_key, timeout_s, num_retries)
        self._connection = _AsyncConnection(address, transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.http.aclose()

    async def health(self) -> bool:
        """Return whether the service is ready, without retries and without raising."""
        try:
            return (await self._connection.http.get("readyz")).is_success
        except httpx.TransportError:
            return False

    async def submit(
        self,
        problem: Problem | Model,
        *,
        tags: Sequence[str] | None = None,
        priority: int | None = None,
        wait_s: float = 0.0,
        idempotency_key: str | None = None,
        **options: Unpack[SubmitArguments],
    ) -> Job:
        """Queue a problem, or a model to cut, to place and to schedule, and return its job.

        Raises `ProblemError`, `ModelError` if the service does not take this problem or model.
        """
        name = "model" if isinstance(problem, Model) else "problem"
        body = {name: document(problem), "options": given(**options)}
        body |= given(tags=tags, priority=priority)
        headers, params = once(idempotency_key), waiting(wait_s)
        answer = await self._connection.send(
            "POST", "v1/jobs", json=body, params=params, headers=headers, wait_s=wait_s
        )
        return as_model(Job, answer)

    async def job(self, job: Job | str) -> Job:
        """Return a job as it is now, with its trace."""
        return as_model(Job, await self._connection.send("GET", _path(job)))

    async def jobs(
        self, *, state: JobState | str | None = None, tag: str | None = None, batch: str = ""
    ) -> AsyncIterator[Job]:
        """Iterate over all jobs, newest first: those in a state, with a tag, of a batch."""
        cursor: str | None = None
        while True:
            params = given(state=state, tag=tag, batch=batch or None, cursor=cursor)
            page = as_model(JobList, await self._connection.send("GET", "v1/jobs", params=params))
            for found in page.jobs:
                yield found
            if (cursor := page.next) is None:
                return

    async def result(self, job: Job | str) -> Schedule:
        """Wait for a job's end and return its best schedule.

        Raises `InfeasibleProblemError`, `NoScheduleError`, `SolveFailedError` if it is proven that
        there is none; if the job was cancelled before there was one, or nothing was found; if the
        solver failed before.
        """
        async with aclosing(self.follow(job)) as news:
            async for now in news:
                last = now
        if not last.has_schedule and last.error is not None:
            raise error_of(last.error.code, last.error.message, last.error.needs)
        return await self.schedule(last)

    async def follow(self, job: Job | str) -> AsyncGenerator[Job, None]:
        """Iterate over the news of a job, as they come, to its end.

        The first is the job as it is now, the last one is finished. Where no events can be heard,
        the job is looked at: often while there is news, less often while there is none.
        """
        known = await self.job(job)
        yield known
        cursor = EventCursor()
        with suppress(NoStreamError):
            while not (known.is_finished or cursor.is_over):
                async with aclosing(self._listen(known, cursor)) as heard:
                    async for event in heard:
                        if not cursor.is_news(event, known):
                            continue
                        before, known = known, await self.job(known)
                        if known != before:
                            yield known
                        if known.is_finished:
                            return
                before, known = known, await self.job(known)
                if known != before:
                    yield known
        wait_s = _FIRST_POLL_S
        while not known.is_finished:
            await asyncio.sleep(wait_s)
            before, known = known, await self.job(known)
            wait_s = min(wait_s * 1.5, _LONGEST_POLL_S) if known == before else _FIRST_POLL_S
            if known != before:
                yield known

    async def events(self, job: Job | str, *, after: int = 0) -> AsyncIterator[Event]:
        """Iterate over everything that happens to a job: states, improvements, bounds, log lines.

        Begins with what has happened already, behind the number ``after``, ends with the job, and
        gives each event once, however often the connection breaks. Raises `ServiceError` if no
        events come from there; `follow` does without them.
        """
        cursor = EventCursor(after)
        try:
            while not cursor.is_over:
                async with aclosing(self._listen(job, cursor)) as heard:
                    async for event in heard:
                        yield event
                if cursor.has_trouble and not cursor.is_over:
                    # Raises, after some patience, if the whole service is away.
                    await self.job(job)
        except NoStreamError:
            raise ServiceError(
                "the service, or something in between, sends no events; use follow instead", 501
            ) from None

    async def _listen(self, job: Job | str, cursor: EventCursor) -> AsyncGenerator[Event, None]:
        """Give the new events of one stream, as far as it begins and until it ends or breaks."""
        path, timeout = f"{_path(job)}/events", self._connection.address.timeout(SILENCE_S)
        if cursor.has_trouble:
            await asyncio.sleep(cursor.pause_s())
        lost = None
        try:
            async with self._connection.http.stream(
                "GET", path, headers=cursor.headers(), timeout=timeout
            ) as answer:
                if not cursor.opens(answer):
                    await answer.aread()
                    await asyncio.sleep(cursor.pause_after(answer))
                    return
                async for sent in EventSource(answer).aiter_sse():
                    if (event := cursor.new(sent)) is not None:
                        yield event
        except httpx.TransportError as error:
            lost = error
        cursor.lose(lost)

    async def schedule(self, job: Job | str) -> Schedule:
        """Return the best schedule so far.

        Raises `InfeasibleProblemError`, `NoScheduleError` if it is proven that there is none; if
        there is none (yet).
        """
        return load_schedule(await self.schedule_text(job, "json"))

    async def schedule_if_newer(
        self, job: Job | str, number: int = 0, wait_s: float = 0.0
    ) -> tuple[int, Schedule] | None:
        """Return the best schedule and its number; None where ``number``, 0 = none, still is it.

        The end of the job ends the waiting. Raises as `schedule`.
        """
        path, headers = f"{_path(job)}/schedule", if_newer(checked_id(job), number)
        params = {"format": "json", **waiting(wait_s)}
        answer = await self._connection.send(
            "GET", path, params=params, headers=headers, wait_s=wait_s
        )
        return newer_schedule(answer)

    async def schedule_text(self, job: Job | str, form: Form) -> str:
        """Return the best schedule as JSON, CSV, Chrome trace or SVG; raises as `schedule`."""
        params = {"format": form}
        return (await self._connection.send("GET", f"{_path(job)}/schedule", params=params)).text

    async def problem(self, job: Job | str) -> Problem:
        """Return the problem of a job; of a planned model, that of its best schedule so far."""
        return load_problem((await self._connection.send("GET", f"{_path(job)}/problem")).text)

    async def model(self, job: Job | str) -> Model:
        """Return the model of a job that plans one."""
        return load_model((await self._connection.send("GET", f"{_path(job)}/model")).text)

    async def cancel(self, job: Job | str) -> Job:
        """Stop a job and keep its best schedule; a finished one stays as it is."""
        return as_model(Job, await self._connection.send("POST", f"{_path(job)}/cancel"))

    async def delete(self, job: Job | str) -> None:
        """Delete a job with its problem and schedule. Raises `ConflictError` if it goes on."""
        await self._connection.send("DELETE", _path(job), repeat=Repeat.UNSENT)

    async def resume(self, job: Job | str, time_limit_s: float, *, wait_s: float = 0.0) -> Job:
        """Give a finished job so many seconds more, from where it stands.

        Raises `ConflictError` if it goes on, or nothing better can be found.
        """
        path, body, params = f"{_path(job)}/resume", {"time_limit_s": time_limit_s}, waiting(wait_s)
        answer = await self._connection.send(
            "POST", path, json=body, params=params, wait_s=wait_s, repeat=Repeat.UNSENT
        )
        return as_model(Job, answer)

    async def methods(self) -> dict[str, str]:
        """Return what ``method`` of a job may be: each name with one line about it."""
        listed = as_model(MethodList, await self._connection.send("GET", "v1/methods"))
        return {method.name: method.description for method in listed.methods}

    async def compare(
        self,
        problem: Problem,
        *,
        time_limit_s: float = 20.0,
        threads: int | None = None,
        seed: int | None = None,
        workload: Mapping[str, float] | None = None,
    ) -> list[MethodRow]:
        """Run every method on the service and return a row each, best first.

        Waits for its job: the time limit is the optimiser's, the other methods take their time too.
        Raises `SolveFailedError` if the solver failed, `NoScheduleError` if the job was cancelled.
        ``workload`` has ``tokens_per_microbatch``, for tokens/s; ``flops_per_microbatch`` and
        ``peak_flops_per_s``, for MFU.
        """
        options = given(time_limit_s=time_limit_s, threads=threads, seed=seed, workload=workload)
        body = {"problem": document(problem), "options": options}
        answer = await self._connection.send("POST", "v1/compare", json=body, headers=once(None))
        async with aclosing(self.follow(as_model(Job, answer))) as news:
            async for now in news:
                last = now
        if last.error is not None:
            raise error_of(last.error.code, last.error.message, last.error.needs)
        return await self.comparison(last)

    async def comparison(self, job: Job | str) -> list[MethodRow]:
        """Return the rows of a job that compares, best first.

        Raises `NoScheduleError` if it has none (yet).
        """
        answer = await self._connection.send("GET", f"{_path(job)}/comparison")
        return as_model(MethodRowList, answer).rows

    async def submit_tune(
        self,
        *,
        tags: Sequence[str] | None = None,
        priority: int | None = None,
        wait_s: float = 0.0,
        idempotency_key: str | None = None,
        **arguments: Unpack[TuneArguments],
    ) -> Job:
        """Queue the question which configuration trains a model fastest, and return its job.

        ``arguments`` are ``model`` or ``config``, ``gpu``, and what else
        `optpipe.client.arguments.TuneArguments` has. Raises `RequestRefusedError` if the service
        cannot answer it.
        """
        headers, params = once(idempotency_key), waiting(wait_s)
        body = tuning(arguments) | given(tags=tags, priority=priority)
        answer = await self._connection.send(
            "POST", "v1/tunes", json=body, params=params, headers=headers, wait_s=wait_s
        )
        return as_model(Job, answer)

    async def tune(self, **arguments: Unpack[TuneArguments]) -> Tuned:
        """Return the fastest configuration for a model, GPUs and a batch, and what is proven.

        Waits for its job; the winner's problem and schedule are the job's: `submit_tune` tells it.
        Raises as `submit_tune` and `result`.
        """
        async with aclosing(self.follow(await self.submit_tune(**arguments))) as news:
            async for now in news:
                last = now
        if not last.has_schedule and last.error is not None:
            raise error_of(last.error.code, last.error.message, last.error.needs)
        return await self.tuned(last)

    async def tuned(self, job: Job | str) -> Tuned:
        """Return what a job that tunes has found, or by now.

        Raises `NoScheduleError` if that is nothing (yet).
        """
        return as_model(Tuned, await self._connection.send("GET", f"{_path(job)}/configuration"))

    async def tuned_row(self, job: Job | str, row: TunedRow) -> tuple[Problem, Schedule]:
        """Return the problem and the schedule of a row of `tuned`.

        Raises `NoScheduleError` if they are not kept: those of the fastest eleven, of the Pareto
        front and of what is run today are.
        """
        path = f"{_path(job)}/rows/{row.id}"
        problem = await self._connection.send("GET", f"{path}/problem")
        schedule = await self._connection.send("GET", f"{path}/schedule")
        return load_problem(problem.text), load_schedule(schedule.text)

    async def recut(self, job: Job | str, row: TunedRow, layers: Sequence[int]) -> TunedRow:
        """Return what a row of `tuned` would take with other numbers of layers per stage.

        ``layers`` in model order, embedding and head counted. By the framework's own schedules;
        where none fits, ``peak_bytes`` says by how much. Raises `RequestRefusedError` if they are
        no cut into as many stages; `NoScheduleError` as `tuned_row`.
        """
        path, params = f"{_path(job)}/rows/{row.id}/recut", {"layers": ",".join(map(str, layers))}
        return as_model(TunedRow, await self._connection.send("GET", path, params=params))

    async def paste(self, job: Job | str, row: TunedRow, form: PasteForm = "arguments") -> str:
        """Return a row of `tuned` as its framework takes it.

        ``form``: Megatron-LM's ``arguments``, Megatron-Core's ``yaml``, a torchtitan config as
        ``python``, or its schedule as ``csv``. Raises `RequestRefusedError` if the framework cannot
        run it; `NoScheduleError` as `tuned_row`.
        """
        path, params = f"{_path(job)}/rows/{row.id}/paste", {"format": form}
        return (await self._connection.send("GET", path, params=params)).text

    async def sweep(
        self,
        problem: Problem | Sequence[Problem],
        axes: Mapping[str, Sequence[Any]] | None = None,
        *,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        priority: int | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[SolveArguments],
    ) -> AsyncBatch:
        """Solve every variation of a problem, or a list of problems, as one batch.

        ``axes`` maps names or paths to values, as in `optpipe.sweep`; every combination is an item.
        Raises `ProblemError` if the service does not take a problem, `RequestRefusedError` if a
        combination makes no valid one, or there are too many. Nothing is solved then.
        """
        body = items(problem, axes) | {"options": given(**options)}
        body |= given(name=name, tags=tags, priority=priority)
        return await self._begun(body, idempotency_key)

    async def what_if(
        self,
        job: Job | str,
        *,
        priority: int | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[SearchArguments],
    ) -> AsyncBatch:
        """Ask what 1 GB more, a 20 % faster bus and twice the micro-batches would buy a job.

        Each question that has a meaning for the problem is an item, named by the ``question`` of
        its values and solved from the best schedule that the job has. One of them changes nothing:
        what more searching finds anyway is not put down to a change. Raises
        `InfeasibleProblemError`, `ConflictError` if it is proven that the job has no schedule; if
        it has none, or was not solved by the optimiser.
        """
        body = {"what_if": checked_id(job), **given(priority=priority)}
        if chosen := given(**options):
            body["options"] = chosen
        return await self._begun(body, idempotency_key)

    async def _begun(self, body: dict[str, Any], idempotency_key: str | None) -> AsyncBatch:
        headers = once(idempotency_key)
        answer = await self._connection.send("POST", "v1/batches", json=body, headers=headers)
        return AsyncBatch(self._connection, as_model(BatchView, answer).id)

    def batch(self, batch_id: str) -> AsyncBatch:
        """Return the batch with this id; the service is not asked yet."""
        return AsyncBatch(self._connection, checked_id(batch_id, "batch"))

    async def deploy(
        self,
        problem: Problem,
        *,
        name: str | None = None,
        threshold: float | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[SolveArguments],
    ) -> AsyncDeployment:
        """Register a training run; its problem is solved at once, and again when drift costs.

        The sizes, the placement and the micro-batches of ``problem`` stay as they are. A new
        version has to gain at least the share ``threshold`` of a step; 0.01 by default.
        """
        body = {"problem": document(problem), "options": given(**options)}
        body |= given(name=name, threshold=threshold)
        headers = once(idempotency_key)
        answer = await self._connection.send("POST", "v1/deployments", json=body, headers=headers)
        return AsyncDeployment(self._connection, as_model(DeploymentView, answer).id)

    def deployment(self, deployment_id: str) -> AsyncDeployment:
        """Return the deployment with this id; the service is not asked yet."""
        return AsyncDeployment(self._connection, checked_id(deployment_id, "deployment"))


def _path(job: Job | str) -> str:
    return f"v1/jobs/{checked_id(job)}"
