"""Following jobs: one reader of the store per followed job, when there is something to read."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from optpipe_api.errors import JobNotFoundError, StoreUnavailableError
from optpipe_api.turns import wake

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from optpipe_api.changes import Changes
    from optpipe_api.desk.watch import Watch
    from optpipe_api.jobs import HistoryEntry, Standing
    from optpipe_api.store import JobStore

__all__ = ["Followers"]

_REST_S = 0.02
_CHUNK = 500


class Followers:
    """Gives the history of jobs as it is written, to any number of followers; in the event loop.

    Two hundred followers that each ask the database at each change would hold up everybody else.
    """

    def __init__(self, store: JobStore, changes: Changes, watch: Watch) -> None:
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

    def __init__(self, store: JobStore, changes: Changes, watch: Watch, job_id: str) -> None:
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
        wake(waiting)
