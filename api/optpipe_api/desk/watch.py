"""Waiting for jobs: one look at the store for all who wait, however many they and their jobs are.

Rounds follow each other while anybody waits. A round asks, in one query, where jobs stand: those
that have changed here or are newly waited for at once, and each second all of them, as another
server may have changed them and tells nobody. A thousand who wait cost one query a second, and
hundreds who come at the same time, as the followers of a job do when it has ended, one or two.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from optpipe_api.errors import StoreUnavailableError
from optpipe_api.turns import wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_api.changes import Changes
    from optpipe_api.jobs import Standing
    from optpipe_api.store import JobStore

__all__ = ["Watch"]

_LOOK_AGAIN_S = 1.0
_REST_S = 0.02


class Watch:
    """Knows where jobs stand as soon as somebody waits for it; in the event loop."""

    def __init__(self, store: JobStore, changes: Changes) -> None:
        self._store = store
        self._changes = changes
        self._waiting: dict[str, set[_Waiter]] = defaultdict(set)
        self._due: set[str] = set()
        self._is_due = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None
        changes.listen(self._heard)

    async def standing(self, job_id: str) -> Standing | None:
        """Return where a job stands now; None if there is no such job.

        One query for all who ask at the same time.

        Raises
        ------
        StoreUnavailableError
            If it cannot be told.
        """
        return await self._wait(job_id, _Waiter(lambda _: True, is_patient=False), None)

    async def until(
        self,
        job_id: str,
        is_enough: Callable[[Standing], bool],
        seconds: float | None = None,
    ) -> None:
        """Return when a job stands as wanted, or is deleted, or the time is up, or we stop.

        Parameters
        ----------
        is_enough
            Says of a standing whether it is as wanted.
        seconds
            To wait at most; None = any time.
        """
        if self._changes.is_closed:
            return
        await self._wait(job_id, _Waiter(is_enough, is_patient=True), seconds)

    async def _wait(self, job_id: str, waiter: _Waiter, seconds: float | None) -> Standing | None:
        self._waiting[job_id].add(waiter)
        self._heard(job_id)
        self._rounds = self._rounds or asyncio.create_task(self._go_round())
        try:
            await asyncio.wait({waiter.end}, timeout=seconds)
            if waiter.error is not None:
                raise waiter.error
            return waiter.seen
        finally:
            waiter.end.cancel()
            self._leave(job_id, waiter)

    def _leave(self, job_id: str, waiter: _Waiter) -> None:
        self._waiting[job_id].discard(waiter)
        if not self._waiting[job_id]:
            del self._waiting[job_id]
        if not self._waiting and self._rounds is not None:
            self._rounds.cancel()
            self._rounds = None

    def _heard(self, job_id: str | None) -> None:
        """Look at a job soon, where anybody waits for it; None: let everybody go."""
        if job_id is None:
            self._let_go(None)
        elif job_id in self._waiting:
            self._due.add(job_id)
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
        job_ids, self._due = self._due & self._waiting.keys(), set()
        self._is_due.clear()
        # Who came after this was asked is asked for again.
        asked = {job_id: tuple(self._waiting[job_id]) for job_id in sorted(job_ids)}
        if not asked:
            return
        try:
            found = await run_in_threadpool(self._store.standings, list(asked))
        except StoreUnavailableError as error:
            # It may answer again soon.
            _refuse([one for some in asked.values() for one in some if not one.is_patient], error)
            return
        served = []
        for job_id, waiters in asked.items():
            seen = found.get(job_id)
            for waiter in waiters:
                waiter.seen = seen
                if seen is None or waiter.is_enough(seen):
                    served.append(waiter.end)
        wake(served)

    def _let_go(self, error: Exception | None) -> None:
        waiters = [waiter for waiters in self._waiting.values() for waiter in waiters]
        if error is None:
            wake([waiter.end for waiter in waiters if waiter.is_patient])
        else:
            _refuse(waiters, error)


class _Waiter:
    """One who waits for a job to stand as wanted; an impatient one has his answer anyway."""

    def __init__(self, is_enough: Callable[[Standing], bool], *, is_patient: bool) -> None:
        self.is_enough = is_enough
        self.is_patient = is_patient
        self.seen: Standing | None = None
        self.error: Exception | None = None
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()


def _refuse(waiters: list[_Waiter], error: Exception) -> None:
    for waiter in waiters:
        waiter.error = error
    wake(waiter.end for waiter in waiters)
