"""Who writes to SQLite: first come, first served, and those who wait share one commit.

SQLite has one lock for writing, and no queue for it: whoever finds it taken tries again after a
while, and later and later, and so, where many write, some wait for seconds while others pass them.
The threads of a process therefore stand in a queue of their own. (Another process on the same file
still meets SQLite's lock.)

What takes time is the commit, for which the disk must say that it has written. Whoever has written
while others wait leaves the commit to them: the next goes on in the same transaction, within a
savepoint of its own, and all of them wait for the last one's commit. So a hundred small writes at
once cost a few commits. Each still keeps its word: when `turn` has ended well, it is on the disk.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import exc

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa

__all__ = ["Turns", "WriteQueue"]

_MOST_IN_GROUP = 32
# These leave a transaction as it was before the statement; after others nobody knows.
_HARMLESS = (exc.IntegrityError, exc.ProgrammingError, exc.DataError)


class Turns:
    """A lock that is handed from one to the next, in the order in which they asked for it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_taken = False

    def take(self, timeout_s: float) -> bool:
        """Wait for the turn; False where the time is up first."""
        with self._mutex:
            if not self._is_taken:
                self._is_taken = True
                return True
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        return mine.acquire(timeout=timeout_s) or not self._withdraw(mine)

    def pass_on(self) -> bool:
        """Hand the turn to whoever waits longest; False, and nothing happens, where nobody does."""
        with self._mutex:
            if not self._waiting:
                return False
            self._waiting.popleft().release()
            return True

    def give_back(self) -> None:
        """Hand the turn on, or leave it to whoever comes."""
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False

    def _withdraw(self, mine: threading.Lock) -> bool:
        """Leave the queue; False where the turn has come at the last moment."""
        with self._mutex:
            if mine not in self._waiting:
                return False
            self._waiting.remove(mine)
            return True


class _Group:
    """Writers that share a transaction, and how it ended."""

    def __init__(self, connection: sa.Connection, transaction: sa.RootTransaction) -> None:
        self.connection = connection
        self._transaction = transaction
        self._has_ended = threading.Event()
        self.size = 0
        self.error: Exception | None = None

    def end(self) -> None:
        """Commit, or take everything back where something has gone wrong."""
        try:
            if self.error is None:
                self._transaction.commit()
            else:
                self._transaction.rollback()
        except exc.SQLAlchemyError as error:
            self.error = self.error or error
        finally:
            self.connection.close()
            self._has_ended.set()

    def wait(self) -> None:
        """Return when everything is on the disk, or raise what went wrong."""
        self._has_ended.wait()
        if self.error is not None:
            raise self.error


class WriteQueue:
    """The queue of one SQLite database in this process.

    Parameters
    ----------
    timeout_s
        How long to stand in it at most.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._turns = Turns()
        self._group: _Group | None = None

    @contextmanager
    def turn(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        """Write, all of it or nothing; what is raised inside takes back only what is done inside.

        Raises
        ------
        sqlalchemy.exc.SQLAlchemyError
            If the turn does not come in time, or the database refuses. Where a commit fails, all
            who share it are told.
        """
        if not self._turns.take(self._timeout_s):
            raise exc.TimeoutError(f"others have been writing to it for {self._timeout_s:g} s")
        group = self._join(engine)
        try:
            with group.connection.begin_nested():
                yield group.connection
        except exc.SQLAlchemyError as error:
            if not isinstance(error, _HARMLESS):
                group.error = error
            raise
        finally:
            self._leave(group)
        group.wait()

    def _join(self, engine: sa.Engine) -> _Group:
        try:
            if self._group is None:
                self._group = _open_group(engine)
        except BaseException:
            self._turns.give_back()
            raise
        return self._group

    def _leave(self, group: _Group) -> None:
        group.size += 1
        is_open = group.error is None and group.size < _MOST_IN_GROUP
        if is_open and self._turns.pass_on():
            return
        self._group = None
        try:
            group.end()
        finally:
            self._turns.give_back()


def _open_group(engine: sa.Engine) -> _Group:
    connection = engine.connect()
    try:
        connection.execution_options(optpipe_begin="BEGIN IMMEDIATE")
        return _Group(connection, connection.begin())
    except BaseException:
        connection.close()
        raise
