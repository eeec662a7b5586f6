"""Opening databases: migrated, described, or refused with a sentence."""

import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from optpipe.errors import InputError
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.store import database, open_stores
from optpipe_api.store.database import connect, reading, writing
from optpipe_api.store.shared import add_once
from optpipe_api.store.tables import metadata

NUM_THREADS = 16
INSERT = sa.text("INSERT INTO api_keys VALUES (:id, :id, 'read', '', 0, NULL, NULL, NULL)")

# A descending column is more than Alembic can compare; `test_plans` sees that the index works.
NOT_COMPARED = {"ix_jobs_queue"}


def test_migrations_lead_to_the_tables(database_url: str) -> None:
    engine = connect(database_url)
    options = {"include_object": lambda _object, name, *_: name not in NOT_COMPARED}
    with reading(engine) as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_sqlite_lets_readers_read_while_one_writes(tmp_path) -> None:
    engine = connect(f"sqlite:///{tmp_path}/jobs.db")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "kept in a file"),
        ("sqlite:///:memory:", "kept in a file"),
        ("mysql://u:secret@host/db", "not supported"),
        ("jobs.db", "not a URL"),
    ],
)
def test_other_databases_are_refused_by_name(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        open_stores(url)
    assert "secret" not in str(caught.value)


def test_a_missing_folder_and_a_file_that_is_no_database_are_explained(tmp_path) -> None:
    with pytest.raises(StoreUnavailableError, match="there is no folder"):
        open_stores(f"sqlite:///{tmp_path}/nowhere/jobs.db")
    (tmp_path / "text.db").write_text("this is not a database" * 100, encoding="utf-8")
    with pytest.raises(StoreUnavailableError, match="not a database"):
        open_stores(f"sqlite:///{tmp_path}/text.db")


@pytest.mark.postgres
def test_a_postgres_that_says_nothing_is_given_up() -> None:
    """A machine that is there and silent, as one that hangs, or a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(StoreUnavailableError, match=r"does not answer: .*timeout"):
            open_stores(f"postgresql://user@127.0.0.1:{port}/db?connect_timeout=2")


@pytest.mark.postgres
def test_a_lost_postgres_is_noticed_in_half_a_minute_unless_the_url_says_otherwise(
    postgres_url,
) -> None:
    patience = {"connect_timeout": "10", "tcp_user_timeout": "25000", "keepalives_idle": "10"}
    url = f"{postgres_url}{'&' if '?' in postgres_url else '?'}connect_timeout=3"
    for named, expected in ((postgres_url, patience), (url, patience | {"connect_timeout": "3"})):
        engine = connect(named)
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            used = driver.info.get_parameters()
        engine.dispose()
        assert {name: used[name] for name in expected} == expected


# --- Writers of one SQLite file: one after the other, each on its own, and none waits for ever.


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    """A new database; any table will do, this one is small."""
    engine = connect(f"sqlite:///{tmp_path}/jobs.db")
    yield engine
    engine.dispose()


def stored(engine: sa.Engine) -> set[str]:
    with reading(engine) as connection:
        return set(connection.execute(sa.text("SELECT id FROM api_keys")).scalars())


def insert(connection: sa.Connection, index: int) -> None:
    connection.execute(INSERT, {"id": str(index)})


def test_writers_that_come_at_once_are_all_stored_and_a_failure_takes_back_only_its_own(
    engine: sa.Engine,
) -> None:
    """Each finds its row, from another connection, as soon as the write returns."""
    barrier = threading.Barrier(NUM_THREADS)

    def write(index: int) -> None:
        barrier.wait()
        with writing(engine) as connection:
            insert(connection, index)
            if index % 2:
                raise ZeroDivisionError
        assert str(index) in stored(engine), "said to be stored, and it is not"

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        writes = [threads.submit(write, index) for index in range(NUM_THREADS)]
    errors = [write.exception() for write in writes]
    assert [type(error) for error in errors] == [type(None), ZeroDivisionError] * (NUM_THREADS // 2)
    assert stored(engine) == {str(index) for index in range(0, NUM_THREADS, 2)}


def overfill(engine: sa.Engine) -> None:
    with writing(engine) as connection:
        insert(connection, 1)
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        try:
            connection.execute(INSERT, {"id": "x" * 100_000})
        finally:
            connection.exec_driver_sql("PRAGMA max_page_count = 1000000")


def test_a_full_disk_fails_one_write_and_the_next_one_succeeds(engine: sa.Engine) -> None:
    with pytest.raises(StoreUnavailableError, match="full"):
        overfill(engine)
    with writing(engine) as connection:
        insert(connection, 2)
    assert stored(engine) == {"2"}


def test_writers_that_another_process_blocks_all_fail_in_time(tmp_path, monkeypatch) -> None:
    """Within two timeouts, not within one for each; afterwards the next one writes."""
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
        messages = list(threads.map(write, range(NUM_THREADS)))
        took_s = time.monotonic() - began
    other.close()
    assert any("locked" in message for message in messages)
    assert any("others have been writing to it" in message for message in messages)
    assert took_s < 0.5 * NUM_THREADS / 2
    with writing(engine) as connection:
        insert(connection, 0)
    engine.dispose()


@pytest.mark.parametrize("num_races", [0, 1, 2])
def test_what_another_server_inserts_and_deletes_meanwhile_is_inserted_anew(
    tmp_path, num_races: int
) -> None:
    """Its row refuses ours and is gone when we look for it."""
    engine = connect(f"sqlite:///{tmp_path}/jobs.db")
    races = [sa.exc.IntegrityError("INSERT", {}, Exception("UNIQUE"))] * num_races

    def insert(_: sa.Connection) -> str:
        if races:
            raise races.pop()
        return "inserted"

    assert add_once(engine, lambda _: None, insert) == "inserted"
    engine.dispose()
