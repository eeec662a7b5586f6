"""Waiting: one query serves all clients that wait, for however many jobs, batches, deployments.

A `Watch` asks the store in rounds while at least one client waits. A round asks, in one query, for
the standings of two groups:

* immediately, the things that changed on this server, or that a client has just begun to wait for;
* each second, all things that clients wait for: changes by other servers are not heard of here.

A thousand clients that wait cost one query a second. Hundreds of clients that come at the same
time, as the followers of a job do when it ends, cost one or two queries.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter, defaultdict
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool

from optpipe_api.errors import (
    JobNotFoundError,
    StoreUnavailableError,
    TooManyFollowersError,
    TooManyFollowersOfKeyError,
)

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Hashable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from optpipe_api.access import Principal
    from optpipe_api.jobs import HistoryEntry, Standing
    from optpipe_api.store import JobStore

__all__ = [
    "Changes",
    "ConnectionLimit",
    "Followers",
    "Purpose",
    "SharedCalls",
    "Standings",
    "Watch",
]


_LOOK_AGAIN_S = 1.0
_REST_S = 0.02


S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")


class Standings(Protocol[S_co]):
    """A store that reads the standings of many things in one query."""

    def standings(self, ids: Sequence[str], /) -> Mapping[str, S_co]:
        """Return the standings of things, by their ids; unknown ids are left out."""
        ...


class Watch(Generic[S]):
    """Reads the standings of jobs, batches or deployments that clients wait for; in the event loop.

    Parameters
    ----------
    store
        Knows the things, and is called in threads.
    changes
        Publishes the id of each thing that changes on this server.
    """

    def __init__(self, store: Standings[S], changes: Changes) -> None:
        self._store = store
        self._changes = changes
        self._waiting: dict[str, set[_Waiter[S]]] = defaultdict(set)
        self._due: set[str] = set()
        self._is_due = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None
        changes.listen(self._heard)

    async def standing(self, thing_id: str) -> S | None:
        """Return the standing of a thing now; None if there is no such thing.

        One query for all who ask at the same time.

        Raises `StoreUnavailableError` if the store does not answer.
        """
        return await self._wait(thing_id, _Waiter(lambda _: True, is_patient=False), None)

    async def until(
        self, thing_id: str, is_enough: Callable[[S], bool], seconds: float | None = None
    ) -> None:
        """Return when the standing of a thing is enough; also at the time limit, or at our stop.

        The wait ends with the deletion of the thing, too.

        ``is_enough``: whether a standing ends the wait. ``seconds``: time limit; None = no limit.
        """
        if self._changes.is_closed:
            return
        await self._wait(thing_id, _Waiter(is_enough, is_patient=True), seconds)

    async def _wait(self, thing_id: str, waiter: _Waiter[S], seconds: float | None) -> S | None:
        self._waiting[thing_id].add(waiter)
        self._heard(thing_id)
        self._rounds = self._rounds or asyncio.create_task(self._go_round())
        try:
            await asyncio.wait({waiter.end}, timeout=seconds)
            if waiter.error is not None:
                raise waiter.error
            return waiter.seen
        finally:
            waiter.end.cancel()
            self._leave(thing_id, waiter)

    def _leave(self, thing_id: str, waiter: _Waiter[S]) -> None:
        self._waiting[thing_id].discard(waiter)
        if not self._waiting[thing_id]:
            del self._waiting[thing_id]
        if not self._waiting and self._rounds is not None:
            self._rounds.cancel()
            self._rounds = None

    def _heard(self, thing_id: str | None) -> None:
        """Look at a thing soon, where anybody waits for it; None: let everybody go."""
        if thing_id is None:
            self._let_go(None)
        elif thing_id in self._waiting:
            self._due.add(thing_id)
            self._is_due.set()

    async def _go_round(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            look_at_all = loop.time() + _LOOK_AGAIN_S
            while True:
                await self._pause(look_at_all - loop.time())
                if loop.time() >= look_at_all:
                    look_at_all = loop.time() + _LOOK_AGAIN_S
                    self._due.update(self._waiting)
                await self._look()
                # Changes come in bursts, and so do those who wait.
                await asyncio.sleep(_REST_S)
        except Exception as error:  # noqa: BLE001 - raised by all who wait
            self._rounds = None
            self._let_go(error)

    async def _pause(self, seconds: float) -> None:
        """Wait until there is something to look at, or the time is up."""
        try:
            # Not `wait_for`: in Python 3.11 it may keep a cancellation for itself.
            async with asyncio.timeout(max(0.0, seconds)):
                await self._is_due.wait()
        except TimeoutError:
            return

    async def _look(self) -> None:
        ids, self._due = self._due & self._waiting.keys(), set()
        self._is_due.clear()
        # A client that comes after this query began is served by the next one.
        waiters_of = {thing_id: tuple(self._waiting[thing_id]) for thing_id in sorted(ids)}
        if not waiters_of:
            return
        try:
            found = await run_in_threadpool(self._store.standings, list(waiters_of))
        except StoreUnavailableError as error:
            # It may answer again soon.
            _refuse(
                [one for some in waiters_of.values() for one in some if not one.is_patient], error
            )
            return
        served = []
        for thing_id, waiters in waiters_of.items():
            seen = found.get(thing_id)
            for waiter in waiters:
                waiter.seen = seen
                if seen is None or waiter.is_enough(seen):
                    served.append(waiter.end)
        _wake(served)

    def _let_go(self, error: Exception | None) -> None:
        waiters = [waiter for waiters in self._waiting.values() for waiter in waiters]
        if error is None:
            _wake([waiter.end for waiter in waiters if waiter.is_patient])
        else:
            _refuse(waiters, error)


class _Waiter(Generic[S]):
    """A client that waits until a standing is enough; an impatient one is answered anyway."""

    def __init__(self, is_enough: Callable[[S], bool], *, is_patient: bool) -> None:
        self.is_enough = is_enough
        self.is_patient = is_patient
        self.seen: S | None = None
        self.error: Exception | None = None
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()


def _refuse(waiters: list[_Waiter[S]], error: Exception) -> None:
    for waiter in waiters:
        waiter.error = error
    _wake(waiter.end for waiter in waiters)


def _wake(waiting: Iterable[asyncio.Future[None]]) -> None:
    """Let all go on; who hung up meanwhile has cancelled his."""
    for end in waiting:
        if not end.done():
            end.set_result(None)


# --- What many ask for at the same time is read once.


class SharedCalls:
    """Calls functions in threads, once for all who ask under the same key; in the event loop.

    A client never shares a call that began before it asked, so every answer is read after the
    question. Of any number that ask at the same time, one call serves the first and a second call
    serves all others.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[Any]] = {}
        self._upcoming: dict[Hashable, asyncio.Task[Any]] = {}

    async def call(self, key: Hashable, function: Callable[[], T]) -> T:
        """Return what a function returns, or raise what it raises.

        ``key``: names the function and its arguments.
        """
        task: asyncio.Task[T] | None = self._upcoming.get(key)
        if task is None:
            task = asyncio.create_task(self._call(key, function))
            self._upcoming[key] = task
            # An error that nobody is left to hear is no fault of the event loop.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # One that hangs up cancels its own wait, not the call that others share.
        await asyncio.wait({task})
        return task.result()

    async def _call(self, key: Hashable, function: Callable[[], T]) -> T:
        before = self._running.get(key)
        if before is not None:
            await asyncio.wait({before})
        self._running[key] = task = self._upcoming.pop(key)
        try:
            return await run_in_threadpool(function)
        finally:
            if self._running.get(key) is task:
                del self._running[key]


# --- Following jobs: one reader of the store per followed job, when there is something to read.

_CHUNK = 500


class Followers:
    """Gives the history of jobs as it is written, to any number of followers; in the event loop.

    Two hundred followers that each ask the database at each change would hold up everybody else.
    """

    def __init__(self, store: JobStore, changes: Changes, watch: Watch[Standing]) -> None:
        self._store = store
        self._changes = changes
        self._watch = watch
        self._tails: dict[str, _Tail] = {}

    async def entries(self, job_id: str, after: int) -> AsyncGenerator[HistoryEntry, None]:
        """Give every entry of a job above a number as it comes, to the last of a finished job."""
        async with self._joined(job_id) as tail:
            async for entry in tail.after(after):
                yield entry

    @asynccontextmanager
    async def _joined(self, job_id: str) -> AsyncIterator[_Tail]:
        """The history of a job, kept up to date while anybody follows it."""
        tail = self._tails.get(job_id)
        if tail is None or tail.is_over:
            tail = _Tail(self._store, self._changes, self._watch, job_id)
            self._tails[job_id] = tail
        tail.num_followers += 1
        try:
            yield tail
        finally:
            tail.num_followers -= 1
            if tail.num_followers == 0:
                if self._tails.get(job_id) is tail:
                    del self._tails[job_id]
                await tail.stop()


class _Tail:
    """A job's history as far as it is written, and a task that reads on."""

    def __init__(
        self, store: JobStore, changes: Changes, watch: Watch[Standing], job_id: str
    ) -> None:
        self.num_followers = 0
        self._store = store
        self._changes = changes
        self._watch = watch
        self._job_id = job_id
        self._entries: list[HistoryEntry] = []
        self._has_ended = False
        self._waiting: list[asyncio.Future[None]] = []
        self._task = asyncio.create_task(self._read_on())

    @property
    def is_over(self) -> bool:
        """Whether it reads no more: a job that was resumed since needs another tail."""
        return self._has_ended or self._task.done()

    async def after(self, number: int) -> AsyncIterator[HistoryEntry]:
        """Give every entry above a number, until the last one of a finished job was given."""
        while True:
            known = len(self._entries)
            start = bisect_right(self._entries, number, key=lambda entry: entry.number)
            for entry in self._entries[start:]:
                number = entry.number
                yield entry
            if len(self._entries) > known:
                continue
            if self.is_over:
                if self._task.done():
                    self._task.result()
                return
            await self._news()

    async def _news(self) -> None:
        """Wait until there may be more."""
        news = asyncio.get_running_loop().create_future()
        self._waiting.append(news)
        await news

    async def stop(self) -> None:
        """Read no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read_on(self) -> None:
        try:
            while not (self._has_ended or self._changes.is_closed):
                await self._read_what_is_new()
                if self._has_ended:
                    return
                await self._watch.until(self._job_id, self._is_behind)
                # Improvements come in bursts.
                await asyncio.sleep(_REST_S)
        finally:
            self._wake_all()

    async def _read_what_is_new(self) -> None:
        found = _CHUNK
        while found == _CHUNK:
            try:
                found = await self._read_some()
            except StoreUnavailableError:
                return  # it may answer again soon
            except JobNotFoundError:
                self._has_ended = True  # deleted, long after its end
                return
        self._has_ended = bool(self._entries) and self._entries[-1].is_final

    async def _read_some(self) -> int:
        found = await run_in_threadpool(self._store.history, self._job_id, self._last, _CHUNK)
        self._entries += found
        if found:
            self._wake_all()
        return len(found)

    def _is_behind(self, standing: Standing) -> bool:
        return standing.last_entry > self._last

    @property
    def _last(self) -> int:
        return self._entries[-1].number if self._entries else 0

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        _wake(waiting)


# --- Changes on this server: from the engine's threads to the event loop.


class Changes:
    """Tells the watches of this server what has changed; made in its event loop.

    Ids of jobs, batches and deployments never meet, so one publisher serves all. Changes by another
    server are not heard of: a `Watch` asks for them each second.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Callable[[str | None], None]] = []
        self.is_closed = False

    def publish(self, thing_id: str) -> None:
        """Say that a job, batch or deployment has changed; from any thread."""
        self._call(self._notify, thing_id)

    def close(self) -> None:
        """Let every waiter go, now and from now on; from any thread or signal handler."""
        self._call(self._close)

    def listen(self, listener: Callable[[str | None], None]) -> None:
        """Call a function, in the event loop, with the id of each change; None at the end."""
        self._listeners.append(listener)

    def _call(self, function: Callable[..., None], *arguments: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _notify(self, thing_id: str | None) -> None:
        for listener in self._listeners:
            listener(thing_id)

    def _close(self) -> None:
        self.is_closed = True
        self._notify(None)


# --- Connections that stay open, followers of events and requests that wait, are limited in number.


class Purpose(StrEnum):
    """What somebody keeps his connection open for."""

    STREAM = "stream"
    """He hears events as they come."""
    WAIT = "wait"
    """He gets one answer, when there is news: ``?wait=``."""


class ConnectionLimit:
    """How many connections stay open on one server, and how many of one key; for the event loop.

    ``most``, ``most_per_key``: of both purposes together. Where no keys are asked for, nobody has
    one, and only the first counts.
    """

    def __init__(self, most: int, most_per_key: int) -> None:
        self._most = most
        self._most_per_key = most_per_key
        self._by_purpose: Counter[Purpose] = Counter()
        self._by_key: Counter[str] = Counter()

    def num_open(self, purpose: Purpose) -> int:
        """Return how many are open for a purpose; from any thread."""
        return self._by_purpose[purpose]

    @contextmanager
    def counted(self, who: Principal, purpose: Purpose) -> Iterator[None]:
        """Count a connection as open until the block ends, however it ends.

        Raises `TooManyFollowersOfKeyError` if his key has as many as it may;
        `TooManyFollowersError` if the server has.
        """
        if who.name and self._by_key[who.name] >= self._most_per_key:
            raise TooManyFollowersOfKeyError(who.name, self._most_per_key)
        if self._by_purpose.total() >= self._most:
            raise TooManyFollowersError(self._most)
        self._by_purpose[purpose] += 1
        self._by_key[who.name] += 1
        try:
            yield
        finally:
            self._by_purpose[purpose] -= 1
            self._by_key[who.name] -= 1
            if not self._by_key[who.name]:
                del self._by_key[who.name]
