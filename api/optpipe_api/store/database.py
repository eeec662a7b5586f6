"""Connections to the two databases, their transactions, and how their tables are created.

A new database gets the tables of `optpipe_api.store.tables` and the newest revision. An older
database is upgraded by the migrations.
"""

from __future__ import annotations

import importlib.util
import secrets
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.util.exc import CommandError
from sqlalchemy import exc

from optpipe.errors import InputError, MissingExtraError, install_command
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.store import statements as sql
from optpipe_api.store.tables import metadata

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["connect", "is_failing", "load_secret", "probe", "reading", "writing"]

_BUSY_TIMEOUT_S = 10
_POOL_SIZE = 20
# SQLite runs inside the process, and Python runs one thread at a time. More connections gain
# nothing, and their threads would delay the event loop.
_SQLITE_POOL_SIZE = 6
# These parameters of libpq notice a silent PostgreSQL host within half a minute. TCP alone takes
# hours, and every caller would wait. A parameter in the URL takes precedence.
_LIBPQ_TIMEOUTS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
_WRITE_LOCK = "optpipe_write_lock"
_FILE = "optpipe_file"
_FAILURE = "optpipe_failure"
_PROBE_BYTES = 64 * 1024
_HIDDEN = "***"
_TOO_OLD = {f"{number:04}" for number in range(1, 8)}
"""Revisions whose migrations are gone."""
# The database refuses these statements for their content; it does answer.
_STATEMENT_ERRORS = (exc.IntegrityError, exc.ProgrammingError, exc.DataError)


def connect(url: str, *, must_exist: bool = False) -> sa.Engine:
    """Return an engine on an existing or new database with the newest tables.

    ``must_exist``: whether to refuse an SQLite file that does not exist instead of creating it.
    Raises `InputError` if the URL names no supported database. Raises `StoreUnavailableError` if
    the database cannot be opened, does not exist, is too old, or belongs to a newer version.
    """
    parsed = _parse(url)
    if must_exist and _is_missing(parsed):
        raise StoreUnavailableError(
            f"there is no database {_without_secrets(parsed)}; name the one of the service: "
            "OPTPIPE_DATABASE_URL or --database-url"
        )
    engine = _sqlite(parsed) if parsed.drivername == "sqlite" else _postgres(parsed)
    engine.update_execution_options(**{_FAILURE: threading.Event()})
    try:
        with writing(engine) as connection:
            _create_or_upgrade(connection)
    except exc.ProgrammingError as error:
        engine.dispose()
        raise InputError(
            f"database_url {_without_secrets(parsed)} is not understood: "
            f"{_reason(error, parsed)}; correct it"
        ) from None
    except StoreUnavailableError:
        engine.dispose()
        raise
    engine.update_execution_options(**{_FILE: _file_id(parsed)})
    return engine


def probe(engine: sa.Engine) -> None:
    """Write 64 KiB, to find a full disk, a lost file or a read-only file.

    Raises `StoreUnavailableError` if the database does not answer or does not accept the write.
    """
    expected = engine.get_execution_options().get(_FILE)
    if expected is not None and _file_id(engine.url) != expected:
        # SQLite would write on into a file without a name, and all of it would be lost.
        raise StoreUnavailableError(
            f"the file of the database {_without_secrets(engine.url)} was deleted or replaced; "
            "put it back and restart the server"
        )
    with writing(engine) as connection:
        value = secrets.token_hex(_PROBE_BYTES // 2)
        connection.execute(sql.PUT_VALUE, {"name": "probe", "value": value})
    _failure(engine).clear()


def is_failing(engine: sa.Engine) -> bool:
    """Return whether a write has failed since the last probe of this process."""
    return _failure(engine).is_set()


def load_secret(engine: sa.Engine) -> str:
    """Return a random text that belongs to the database; make it for the first caller."""
    with writing(engine) as connection:
        connection.execute(sql.ADD_VALUE, {"name": "secret", "value": secrets.token_hex(32)})
        text: str = connection.execute(sql.VALUE, {"name": "secret"}).scalar_one()
        return text


def _failure(engine: sa.Engine) -> threading.Event:
    failure: threading.Event = engine.get_execution_options()[_FAILURE]
    return failure


@contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open one consistent view of the database."""
    with _translated_errors(engine), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open one transaction that writes all or nothing; it is on the disk when the block ends.

    SQLite has one lock for writing and no queue for it: a writer that does not get it tries again
    after growing pauses. So the threads of a process first wait for a lock of their own. Another
    process on the same file still meets SQLite's lock. The transaction takes the lock at its
    beginning. If it took the lock after a read, it would fail after a write of another process.
    """
    lock: threading.Lock | None = engine.get_execution_options().get(_WRITE_LOCK)
    with _translated_errors(engine, _failure(engine)):
        if lock is None:
            with engine.begin() as connection:
                yield connection
            return
        if not lock.acquire(timeout=_BUSY_TIMEOUT_S):
            raise exc.TimeoutError(f"others have been writing to it for {_BUSY_TIMEOUT_S:g} s")
        try:
            with engine.connect() as connection:
                connection.execution_options(optpipe_begin="BEGIN IMMEDIATE")
                with connection.begin():
                    yield connection
        finally:
            lock.release()


@contextmanager
def _translated_errors(engine: sa.Engine, failure: threading.Event | None = None) -> Iterator[None]:
    try:
        yield
    except (exc.DatabaseError, exc.InterfaceError, exc.TimeoutError) as error:
        if isinstance(error, _STATEMENT_ERRORS):
            raise
        if failure is not None:
            failure.set()
        raise StoreUnavailableError(
            f"the database {_without_secrets(engine.url)} does not answer: "
            f"{_reason(error, engine.url)}; check that it is there, reachable and writable"
        ) from error


# --- URLs: which database one names, and how messages show it.


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except exc.ArgumentError:
        raise InputError(
            "database_url is not a URL; write sqlite:///file.db or postgresql://user@host/name"
        ) from None
    if parsed.drivername == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return parsed
    if parsed.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    raise InputError(
        f"database_url {_without_secrets(parsed)} is not supported: jobs are kept in a file "
        "(sqlite:///file.db) or in PostgreSQL (postgresql://user@host/name)"
    )


def _is_missing(url: sa.URL) -> bool:
    """Whether an SQLite file does not exist; SQLite itself explains a file that is unreadable."""
    name = url.database or ""
    if url.drivername != "sqlite" or name.startswith("file:"):
        return False
    try:
        return not Path(name).exists()
    except OSError:
        return False


def _file_id(url: sa.URL) -> tuple[int, int] | None:
    """Return the device and inode of an SQLite file; None for PostgreSQL."""
    if url.drivername != "sqlite":
        return None
    try:
        found = Path(url.database or "").stat()
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def _without_secrets(url: sa.URL) -> str:
    hidden = {name: _HIDDEN for name in url.query if "pass" in name.lower()}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def _reason(error: Exception, url: sa.URL) -> str:
    """Return the first line of the driver's message, without the passwords of the URL."""
    text = str(getattr(error, "orig", None) or error).strip().split("\n", maxsplit=1)[0]
    names = {name for name in url.query if "pass" in name.lower()}
    hidden = [url.password, *(value for name in names for value in url.normalized_query[name])]
    for secret in filter(None, hidden):
        text = text.replace(secret, _HIDDEN)
    return text


# --- Engines.


def _sqlite(url: sa.URL) -> sa.Engine:
    folder = Path(url.database or "").absolute().parent
    if not folder.is_dir():
        raise StoreUnavailableError(
            f"the database {_without_secrets(url)} cannot be opened: there is no folder {folder}; "
            "create it or change OPTPIPE_DATABASE_URL"
        )
    engine = sa.create_engine(
        url,
        connect_args={"timeout": _BUSY_TIMEOUT_S},
        execution_options={_WRITE_LOCK: threading.Lock()},
        pool_size=_SQLITE_POOL_SIZE,
        max_overflow=0,
    )
    sa.event.listen(engine, "connect", _set_up_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # Otherwise the driver begins and commits on its own, and keeps DDL out of transactions.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    # An accepted job must survive a power cut, not only a kill.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: sa.Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("optpipe_begin", "BEGIN"))


def _postgres(url: sa.URL) -> sa.Engine:
    if importlib.util.find_spec("psycopg") is None:
        raise MissingExtraError(
            f"PostgreSQL needs psycopg, which is not installed; {install_command('postgres')}"
        )
    timeouts = {name: value for name, value in _LIBPQ_TIMEOUTS.items() if name not in url.query}
    return sa.create_engine(url, connect_args=timeouts, pool_pre_ping=True, pool_size=_POOL_SIZE)


# --- Tables.


def _create_or_upgrade(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        # Of two servers that start together the second waits, and then finds the tables.
        connection.execute(sql.LOCK_MIGRATIONS)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is None:
        metadata.create_all(connection, checkfirst=False)
        command.stamp(config, "head")
        return
    name = _without_secrets(connection.engine.url)
    if revision in _TOO_OLD:
        raise StoreUnavailableError(
            f"the database {name} has tables of revision {revision}, and this version upgrades "
            "databases of revision 0008 or later; open it once with the last version that upgrades "
            "older ones, optpipe 0.1.0 at commit 84875d5, or use another database"
        )
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreUnavailableError(
            f"the database {name} cannot be migrated: {error}; was it written by a newer optpipe? "
            "Install that one, or use another database"
        ) from error
