"""Waits and event streams: one query serves all clients that wait, for any number of things.

Clients wait for jobs and batches. A `Watch` polls the store in rounds while at least
one client waits. Each round reads, in one query, the standings of two groups:

* immediately, the things that changed on this server, or for which a client has begun to wait;
* each second, all things that clients wait for, because other servers publish no changes here.

A thousand waiting clients cost one query a second. Hundreds of clients that come at the same time,
for example the followers of a job at its end, cost one or two queries.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
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


_POLL_S = 1.0
_PAUSE_S = 0.02
"""Between two queries: changes come in bursts, and so do clients."""


S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")


class Standings(Protocol[S_co]):
    """A store that reads the standings of many things in one query."""

    def standings(self, ids: Sequence[str], /) -> Mapping[str, S_co]:
        """Return the standings of things by their ids, without unknown ids."""
        ...


class Watch(Generic[S]):
    """Reads the standings of jobs or batches that clients wait for; in the event loop.

    Parameters
    ----------
    store
        The store of the things; its method runs in threads.
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
        changes.listen(self._note_change)

    async def standing(self, thing_id: str) -> S | None:
        """Return the current standing of a thing; None if the thing does not exist.

        Calls at the same time share one query. Raises `StoreUnavailableError` if the store does
        not answer.
        """
        return await self._wait(thing_id, _Waiter(lambda _: True, is_patient=False), None)

    async def until(
        self, thing_id: str, is_enough: Callable[[S], bool], timeout_s: float | None = None
    ) -> None:
        """Wait until the standing of a thing is enough, the thing is deleted, or the server stops.

        ``is_enough``: whether a standing ends the wait. ``timeout_s``: None = no timeout.
        """
        if self._changes.is_closed:
            return
        await self._wait(thing_id, _Waiter(is_enough, is_patient=True), timeout_s)

    async def _wait(self, thing_id: str, waiter: _Waiter[S], timeout_s: float | None) -> S | None:
        self._waiting[thing_id].add(waiter)
        self._note_change(thing_id)
        self._rounds = self._rounds or asyncio.create_task(self._poll())
        try:
            await asyncio.wait({waiter.end}, timeout=timeout_s)
            if waiter.error is not None:
                raise waiter.error
            return waiter.seen
        finally:
            waiter.end.cancel()
            self._waiting[thing_id].discard(waiter)
            if not self._waiting[thing_id]:
                del self._waiting[thing_id]
            if not self._waiting and self._rounds is not None:
                self._rounds.cancel()
                self._rounds = None

    def _note_change(self, thing_id: str | None) -> None:
        """Make a thing due if a client waits for it; None: the server stops, so end all waits."""
        if thing_id is None:
            _wake(waiter.end for waiter in self._waiters() if waiter.is_patient)
        elif thing_id in self._waiting:
            self._due.add(thing_id)
            self._is_due.set()

    def _waiters(self) -> list[_Waiter[S]]:
        return [waiter for waiters in self._waiting.values() for waiter in waiters]

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            poll_at = loop.time() + _POLL_S
            while True:
                with suppress(TimeoutError):
                    # Not `wait_for`: in Python 3.11 it can swallow a cancellation.
                    async with asyncio.timeout(max(0.0, poll_at - loop.time())):
                        await self._is_due.wait()
                if loop.time() >= poll_at:
                    poll_at = loop.time() + _POLL_S
                    self._due.update(self._waiting)
                await self._read_due()
                await asyncio.sleep(_PAUSE_S)
        except Exception as error:  # noqa: BLE001 - raised by every wait
            self._rounds = None
            _refuse(self._waiters(), error)

    async def _read_due(self) -> None:
        """Read the standings of the due things, and end the waits for which they are enough."""
        ids, self._due = self._due & self._waiting.keys(), set()
        self._is_due.clear()
        # The next query serves a client that comes after this query has begun.
        waiters_of = {thing_id: tuple(self._waiting[thing_id]) for thing_id in sorted(ids)}
        if not waiters_of:
            return
        try:
            found = await run_in_threadpool(self._store.standings, list(waiters_of))
        except StoreUnavailableError as error:
            # The patient ones wait for the next round.
            due = [waiter for waiters in waiters_of.values() for waiter in waiters]
            _refuse([waiter for waiter in due if not waiter.is_patient], error)
            return
        served = []
        for thing_id, waiters in waiters_of.items():
            seen = found.get(thing_id)
            for waiter in waiters:
                waiter.seen = seen
                if seen is None or waiter.is_enough(seen):
                    served.append(waiter.end)
        _wake(served)


class _Waiter(Generic[S]):
    """A client that waits until a standing is enough; an impatient one gets every answer."""

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


def _wake(ends: Iterable[asyncio.Future[None]]) -> None:
    """End waits, except those that a disconnected client has cancelled."""
    for end in ends:
        if not end.done():
            end.set_result(None)


# --- Reads of many clients at the same time are one read.


class SharedCalls:
    """Calls functions in threads, once for all callers with the same key; in the event loop.

    A caller never shares a call that began before its own, so its answer is not older than its
    question. Of any number of callers at the same time, one call serves the first, and a second
    call serves all others.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[Any]] = {}
        self._upcoming: dict[Hashable, asyncio.Task[Any]] = {}

    async def call(self, key: Hashable, function: Callable[[], T]) -> T:
        """Return the result of a function, or raise its error.

        ``key``: names the function and its arguments.
        """
        task: asyncio.Task[T] | None = self._upcoming.get(key)
        if task is None:
            task = asyncio.create_task(self._call(key, function))
            self._upcoming[key] = task
            # An error without a remaining caller is no fault of the event loop.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A caller that disconnects cancels its own wait, and not the shared call.
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


# --- Event streams: one reader of the store per followed job, which reads when there is a change.

_CHUNK = 500


class Followers:
    """Gives the history of jobs, as it is stored, to any number of followers; in the event loop.

    Without shared readers, two hundred followers that query the database at each change would delay
    all other clients.
    """

    def __init__(self, store: JobStore, changes: Changes, watch: Watch[Standing]) -> None:
        self._store = store
        self._changes = changes
        self._watch = watch
        self._tails: dict[str, _Tail] = {}

    async def entries(self, job_id: str, after: int) -> AsyncGenerator[HistoryEntry, None]:
        """Yield every entry of a job above a number, each as it is stored, until the job's end."""
        tail = self._tails.get(job_id)
        if tail is None or tail.is_over:
            tail = _Tail(self._store, self._changes, self._watch, job_id)
            self._tails[job_id] = tail
        tail.num_followers += 1
        try:
            async for entry in tail.after(after):
                yield entry
        finally:
            tail.num_followers -= 1
            if tail.num_followers == 0:
                if self._tails.get(job_id) is tail:
                    del self._tails[job_id]
                await tail.stop()


class _Tail:
    """A job's history so far, and the task that reads new entries."""

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
        self._task = asyncio.create_task(self._follow())

    @property
    def is_over(self) -> bool:
        """Whether it reads no more; a job that was resumed since then needs another tail."""
        return self._has_ended or self._task.done()

    async def after(self, number: int) -> AsyncIterator[HistoryEntry]:
        """Yield every entry above a number, until the last entry of a finished job."""
        while True:
            num_known = len(self._entries)
            start = bisect_right(self._entries, number, key=lambda entry: entry.number)
            for entry in self._entries[start:]:
                number = entry.number
                yield entry
            if len(self._entries) > num_known:
                continue
            if self.is_over:
                if self._task.done():
                    self._task.result()
                return
            more = asyncio.get_running_loop().create_future()
            self._waiting.append(more)
            await more

    async def stop(self) -> None:
        """Read no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        """Read new entries after each change of the job, until its end or the server's."""
        try:
            while not (self._has_ended or self._changes.is_closed):
                await self._read_new()
                if self._has_ended:
                    return
                await self._watch.until(self._job_id, lambda now: now.last_entry > self._last)
                await asyncio.sleep(_PAUSE_S)
        finally:
            self._wake_all()

    async def _read_new(self) -> None:
        num_found = _CHUNK
        while num_found == _CHUNK:
            try:
                found = await run_in_threadpool(
                    self._store.history, self._job_id, self._last, _CHUNK
                )
            except StoreUnavailableError:
                return  # the next round retries
            except JobNotFoundError:
                self._has_ended = True  # the job was deleted after its end
                return
            num_found = len(found)
            if found:
                self._entries += found
                self._wake_all()
        self._has_ended = bool(self._entries) and self._entries[-1].is_final

    @property
    def _last(self) -> int:
        """The number of the newest known entry."""
        return self._entries[-1].number if self._entries else 0

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        _wake(waiting)


# --- Changes on this server: from the engine's threads to the event loop.


class Changes:
    """Publishes the changes of this server to its watches; created in its event loop.

    One publisher serves jobs and batches, whose ids never coincide. Changes by another
    server are not published here: a `Watch` polls for them each second.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Callable[[str | None], None]] = []
        self.is_closed = False

    def publish(self, thing_id: str) -> None:
        """Publish the change of a job or batch; from any thread."""
        self._call(self._notify, thing_id)

    def close(self) -> None:
        """End all waits, and each wait that begins later; from any thread or signal handler."""
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


# --- The number of open connections is limited: event streams, and requests that wait.


class Purpose(StrEnum):
    """The reason why a connection stays open."""

    STREAM = "stream"
    """An event stream."""
    WAIT = "wait"
    """A request with ``?wait=``, which gets one answer."""


class ConnectionLimit:
    """The number of open connections of one server, and of each key; for the event loop.

    ``max_total``, ``max_per_key``: of both purposes together. Without keys, only the first counts.
    """

    def __init__(self, max_total: int, max_per_key: int) -> None:
        self._max_total = max_total
        self._max_per_key = max_per_key
        self._by_purpose: Counter[Purpose] = Counter()
        self._by_key: Counter[str] = Counter()

    def num_open(self, purpose: Purpose) -> int:
        """Return the number of open connections of a purpose; from any thread."""
        return self._by_purpose[purpose]

    @contextmanager
    def counted(self, caller: Principal, purpose: Purpose) -> Iterator[None]:
        """Count a connection as open until the block ends.

        Raises `TooManyFollowersOfKeyError` if the caller's key has the maximum number of them, and
        `TooManyFollowersError` if the server has.
        """
        key = caller.name
        if key and self._by_key[key] >= self._max_per_key:
            raise TooManyFollowersOfKeyError(key, self._max_per_key)
        if self._by_purpose.total() >= self._max_total:
            raise TooManyFollowersError(self._max_total)
        self._by_purpose[purpose] += 1
        self._by_key[key] += 1
        try:
            yield
        finally:
            self._by_purpose[purpose] -= 1
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]
