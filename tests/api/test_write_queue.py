"""Writers of one SQLite file: in turn, together, each on its own, and never waiting for ever."""

from __future__ import annotations

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from optpipe_api.errors import StoreUnavailableError
from optpipe_api.store import database
from optpipe_api.store.database import connect, reading, writing
from optpipe_api.store.write_queue import Turns, WriteQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NUM_THREADS = 16
INSERT = sa.text("INSERT INTO api_keys VALUES (:id, :id, 'read', '', 0, NULL)")
IDS = sa.text("SELECT id FROM api_keys ORDER BY id")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    """A new database; any table will do, this one is small."""
    engine = connect(f"sqlite:///{tmp_path}/jobs.db")
    yield engine
    engine.dispose()


def stored(engine: sa.Engine) -> list[str]:
    with reading(engine) as connection:
        return list(connection.execute(IDS).scalars())


def at_once(engine: sa.Engine, write: Callable[[sa.Connection, int], None]) -> list[object]:
    """Let threads write that have all come before the first is done; return what they got."""
    here = threading.Barrier(NUM_THREADS)
    queue = engine.get_execution_options()["optpipe_queue"]

    def one(index: int) -> object:
        here.wait()
        try:
            with writing(engine) as connection:
                if queue._group.size == 0:
                    time.sleep(0.1)  # the others come meanwhile
                write(connection, index)
        except (StoreUnavailableError, ZeroDivisionError) as error:
            return error
        assert f"{index:02}" in stored(engine), "said to be stored, and it is not"
        return None

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(one, range(NUM_THREADS)))


def insert(connection: sa.Connection, index: int) -> None:
    connection.execute(INSERT, {"id": f"{index:02}"})


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    """While one waits, nobody has two turns."""
    turns, log = Turns(), []

    def work(name: int) -> None:
        for _ in range(50):
            log.append(("asks", name))
            assert turns.take(60)
            log.append(("has", name))
            time.sleep(0)
            turns.give_back()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    for name in range(8):
        asked = [at for at, entry in enumerate(log) if entry == ("asks", name)]
        got = [at for at, entry in enumerate(log) if entry == ("has", name)]
        for first, last in zip(asked, got, strict=True):
            others = [who for what, who in log[first:last] if what == "has"]
            # Twice: its own line was written a moment before it stood in the queue.
            assert all(others.count(who) <= 2 for who in others)


def test_a_turn_that_does_not_come_is_given_up_and_goes_to_the_next() -> None:
    turns = Turns()
    assert turns.take(0)
    assert not turns.take(0.01)
    assert not turns.pass_on()
    turns.give_back()
    assert turns.take(0)


def test_writers_that_wait_share_commits_and_all_is_on_the_disk(engine: sa.Engine) -> None:
    """Each finds what it wrote, from another connection, as soon as it is told so."""
    commits: list[sa.Connection] = []
    sa.event.listen(engine, "commit", commits.append)
    assert at_once(engine, insert) == [None] * NUM_THREADS
    assert len(stored(engine)) == NUM_THREADS
    assert len([one for one in commits if one.get_execution_options().get("optpipe_begin")]) <= 3


def test_what_one_raises_takes_nothing_from_the_others(engine: sa.Engine) -> None:
    """What it had written itself is gone."""

    def write(connection: sa.Connection, index: int) -> None:
        insert(connection, index)
        if index % 2:
            raise ZeroDivisionError

    told = at_once(engine, write)
    assert [isinstance(one, ZeroDivisionError) for one in told] == [False, True] * (
        NUM_THREADS // 2
    )
    assert stored(engine) == [f"{index:02}" for index in range(0, NUM_THREADS, 2)]


def test_a_full_disk_is_told_to_everybody_whom_it_concerns(engine: sa.Engine) -> None:
    """Who is told that it is stored finds it, who is told that it is not does not."""

    def write(connection: sa.Connection, index: int) -> None:
        insert(connection, index)
        if index == 3:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            try:
                connection.execute(INSERT, {"id": "x" * 100_000})
            finally:
                connection.exec_driver_sql("PRAGMA max_page_count = 1000000")

    told = at_once(engine, write)
    refused = [index for index, one in enumerate(told) if one is not None]
    assert 3 in refused
    assert all("full" in str(told[index]) for index in refused)
    assert stored(engine) == [f"{i:02}" for i in range(NUM_THREADS) if i not in refused]
    with writing(engine) as connection:
        insert(connection, 99)


def test_a_lock_that_somebody_else_holds_is_waited_for_once_and_not_by_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are told within two timeouts, not within one for each."""
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.5)
    engine = connect(f"sqlite:///{tmp_path}/jobs.db")
    other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    def write(index: int) -> str:
        with pytest.raises(StoreUnavailableError) as caught, writing(engine) as connection:
            insert(connection, index)
        return str(caught.value)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        began = time.monotonic()
        told = list(threads.map(write, range(NUM_THREADS)))
        took_s = time.monotonic() - began
    other.close()
    assert any("locked" in one for one in told)
    assert took_s < 0.5 * NUM_THREADS / 2
    with writing(engine) as connection:
        insert(connection, 0)
    engine.dispose()


def test_a_group_does_not_grow_for_ever(engine: sa.Engine) -> None:
    """Where writers never stop coming, the first of them must have its commit all the same."""
    stop = threading.Event()

    def write_on(thread: int) -> int:
        number = 0
        while not stop.is_set():
            with writing(engine) as connection:
                insert(connection, 1000 * thread + number)
            number += 1
        return number

    with ThreadPoolExecutor(4) as threads:
        counts = [threads.submit(write_on, 1 + thread) for thread in range(4)]
        time.sleep(0.3)
        stop.set()
        assert all(count.result() > 0 for count in counts)


def test_who_cannot_begin_gives_the_turn_back(tmp_path: Path) -> None:
    """A database that cannot be opened now may be there later."""
    queue = WriteQueue(1.0)
    gone = sa.create_engine(f"sqlite:///{tmp_path}/nowhere/jobs.db")
    for _ in range(2):
        with pytest.raises(sa.exc.OperationalError), queue.turn(gone):
            raise AssertionError
