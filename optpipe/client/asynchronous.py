"""The client for ``async`` code; `optpipe.client.sync` is its twin for plain code.

This file only sends, waits and listens: what is asked, and what an answer means, is described once
for both.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import httpx
from httpx_sse import EventSource

from optpipe.client import batches, deployments, following, what_ifs
from optpipe.client import jobs as asked
from optpipe.client.address import Address
from optpipe.client.call import FAILURES, Call, Hear, Listen, Pause, Send, Talk, Tell
from optpipe.client.described import described_by
from optpipe.client.patience import patient
from optpipe.client.requests import checked_id, is_stream
from optpipe.client.values import BatchView, Event, HasId, Job

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine

    from httpx_sse import ServerSentEvent

    from optpipe.client.call import Conversation, Step

__all__ = ["AsyncBatch", "AsyncClient", "AsyncDeployment"]

P = ParamSpec("P")
T = TypeVar("T")


class AsyncLine:
    """A connection that does the steps of conversations."""

    def __init__(self, address: Address, transport: httpx.AsyncBaseTransport | None) -> None:
        self._address = address
        self.http = httpx.AsyncClient(transport=transport, **address.arguments())

    async def run(self, asked: Call[T] | Conversation[T]) -> T:
        """Make a call, or have a conversation; return what it comes to."""
        conversation = self._patient(asked) if isinstance(asked, Call) else asked
        with Talk(conversation) as talk:
            async with aclosing(self._steps(talk)) as news:
                async for _ in news:
                    pass
            return talk.result

    async def told(self, conversation: Conversation[Any]) -> AsyncGenerator[Any, None]:
        """Have a conversation and give what it tells, as it comes."""
        with Talk(conversation) as talk:
            async with aclosing(self._steps(talk)) as news:
                async for told in news:
                    yield told

    async def _steps(self, talk: Talk[Any]) -> AsyncGenerator[Any, None]:
        async with AsyncExitStack() as streams:
            ear = _Ear(self.http, streams)
            while (step := talk.step) is not None:
                if isinstance(step, Tell):
                    yield step.news
                    talk.answer(None)
                    continue
                try:
                    outcome = await self._do(step, ear)
                except FAILURES as error:
                    talk.fail(error)
                else:
                    talk.answer(outcome)

    async def _do(self, step: Step, ear: _Ear) -> Any:
        match step:
            case Call():
                return await self.run(step)
            case Send(call=call):
                return await self.http.request(**call.request(self._address.timeout_s))
            case Pause(seconds=seconds):
                return await asyncio.sleep(seconds)
            case Listen(call=call):
                return await ear.listen(call.request(self._address.timeout_s))
            case Hear():
                return await ear.hear()
        raise TypeError(step)

    def _patient(self, call: Call[T]) -> Conversation[T]:
        return patient(call, self._address.num_retries, str(self._address))


class _Ear:
    """One stream of events at a time."""

    def __init__(self, http: httpx.AsyncClient, streams: AsyncExitStack) -> None:
        self._http = http
        self._streams = streams
        self._events: AsyncIterator[ServerSentEvent] | None = None

    async def listen(self, request: dict[str, Any]) -> httpx.Response:
        await self._streams.aclose()
        answer = await self._http.send(self._http.build_request(**request), stream=True)
        self._streams.push_async_callback(answer.aclose)
        if is_stream(answer):
            self._events = EventSource(answer).aiter_sse()
        else:
            await answer.aread()
        return answer

    async def hear(self) -> ServerSentEvent | None:
        return None if self._events is None else await anext(self._events, None)


class _Speaker:
    """Whatever has a line to the service."""

    _line: AsyncLine


class _Handle(_Speaker):
    """Something on the service, by its id."""

    def __init__(self, line: AsyncLine, thing_id: str) -> None:
        self._line = line
        self.id = thing_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"


H = TypeVar("H", bound=_Handle)
V = TypeVar("V", bound=HasId)


def _asks(
    describe: Callable[P, Call[T] | Conversation[T]],
) -> Callable[Concatenate[_Speaker, P], Coroutine[Any, Any, T]]:
    @described_by(describe, skips_first=False)
    async def method(self: _Speaker, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._line.run(describe(*args, **kwargs))

    return method


def _tells(
    describe: Callable[P, Conversation[Any]], _news: type[T]
) -> Callable[Concatenate[_Speaker, P], AsyncIterator[T]]:
    @described_by(describe, skips_first=False)
    def method(self: _Speaker, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._line.told(describe(*args, **kwargs))

    return method


def _makes(
    describe: Callable[P, Call[V]], handle: type[H]
) -> Callable[Concatenate[_Speaker, P], Coroutine[Any, Any, H]]:
    @described_by(describe, skips_first=False)
    async def method(self: _Speaker, /, *args: P.args, **kwargs: P.kwargs) -> H:
        return handle(self._line, (await self._line.run(describe(*args, **kwargs))).id)

    return method


def _asks_own(
    describe: Callable[Concatenate[str, P], Call[T] | Conversation[T]],
) -> Callable[Concatenate[_Handle, P], Coroutine[Any, Any, T]]:
    @described_by(describe, skips_first=True)
    async def method(self: _Handle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._line.run(describe(self.id, *args, **kwargs))

    return method


def _tells_own(
    describe: Callable[Concatenate[str, P], Conversation[Any]], _news: type[T]
) -> Callable[Concatenate[_Handle, P], AsyncIterator[T]]:
    @described_by(describe, skips_first=True)
    def method(self: _Handle, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._line.told(describe(self.id, *args, **kwargs))

    return method


class AsyncBatch(_Handle):
    """Problems that are solved together; `AsyncClient.sweep` makes it."""

    look = _asks_own(batches.look)
    follow = _tells_own(batches.follow, BatchView)
    table = _asks_own(batches.table)
    table_text = _asks_own(batches.table_text)
    frontier = _asks_own(batches.frontier)
    retry = _asks_own(batches.retry)
    cancel = _asks_own(batches.cancel)


class AsyncDeployment(_Handle):
    """A training run that follows the newest schedule; `AsyncClient.deploy` makes it."""

    look = _asks_own(deployments.look)
    schedule = _asks_own(deployments.schedule)
    schedule_if_newer = _asks_own(deployments.schedule_if_newer)
    report = _asks_own(deployments.report)
    versions = _asks_own(deployments.versions)
    problem = _asks_own(deployments.problem)
    end = _asks_own(deployments.end)


class AsyncClient(_Speaker):
    """A connection to a service; close it, or use it in an ``async with``.

    Parameters
    ----------
    base_url
        Address of the service, such as ``http://127.0.0.1:8000``.
    api_key
        What a service asks for that other machines can reach; ``optpipe keys create`` makes one.
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
        self._line = AsyncLine(
            Address.checked(base_url, api_key, timeout_s, num_retries), transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._line.http.aclose()

    submit = _asks(asked.submit)
    job = _asks(asked.job)
    jobs = _tells(asked.jobs, Job)
    follow = _tells(following.follow, Job)
    events = _tells(following.events, Event)
    result = _asks(following.result)
    schedule = _asks(asked.schedule)
    schedule_if_newer = _asks(asked.schedule_if_newer)
    schedule_csv = _asks(asked.schedule_csv)
    schedule_text = _asks(asked.schedule_text)
    problem = _asks(asked.problem)
    model = _asks(asked.model)
    cancel = _asks(asked.cancel)
    resume = _asks(asked.resume)
    what_if = _asks(what_ifs.what_if)
    what_ifs = _asks(what_ifs.what_ifs)
    methods = _asks(asked.methods)
    compare = _asks(asked.compare)
    sweep = _makes(batches.sweep, AsyncBatch)
    deploy = _makes(deployments.deploy, AsyncDeployment)

    def batch(self, batch_id: str) -> AsyncBatch:
        """Return the batch with this id; the service is not asked yet."""
        return AsyncBatch(self._line, checked_id(batch_id, "batch"))

    def deployment(self, deployment_id: str) -> AsyncDeployment:
        """Return the deployment with this id; the service is not asked yet."""
        return AsyncDeployment(self._line, checked_id(deployment_id, "deployment"))

    async def health(self) -> bool:
        """Return whether the service is ready, without retries and without raising."""
        try:
            return (await self._line.http.get("readyz")).is_success
        except httpx.TransportError:
            return False
