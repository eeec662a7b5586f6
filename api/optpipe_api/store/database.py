"""Connections and tables: which databases there are, how they are set up and migrated.

The tables are as the newest migration leaves them (a test compares the two). Documents stand apart
from the records, so that listing jobs reads no problem and no schedule. Times are seconds since the
epoch: both databases sort and compare them alike. ``owner`` is the name of the API key that made a
thing, and empty where keys are not asked for.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import exc

from optpipe.errors import InputError, MissingExtraError
from optpipe_api.errors import KeyReusedError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "added_once",
    "api_keys",
    "batches",
    "checkpoints",
    "comparisons",
    "connect",
    "deployment_versions",
    "deployments",
    "events",
    "job_tags",
    "jobs",
    "made_before",
    "may_be_id",
    "measurements",
    "metadata",
    "models",
    "newest_first",
    "probe",
    "problems",
    "questions",
    "reading",
    "record_of",
    "row_with_id",
    "schedules",
    "tuned",
    "turns",
    "writing",
]


metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# SQLite counts up only a column of exactly this type.
_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")

# A problem, a model or a schedule may be large: those of a job are tables of their own.

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("position", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("kind", sa.String(16), nullable=False, server_default="solve"),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(100), nullable=False, server_default=""),
    sa.Column("problem_hash", sa.String(80), nullable=False),
    sa.Column("shape_hash", sa.String(80), nullable=False, server_default=""),
    sa.Column("objective", sa.String(16), nullable=False),
    sa.Column("options", sa.Text, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
    sa.Column("idempotency_key", sa.String(255), unique=True),
    sa.Column("cache", sa.String(8), nullable=False, server_default="miss"),
    sa.Column("source_id", sa.String(32)),
    sa.Column("batch_id", sa.String(32)),
    sa.Column("batch_index", sa.Integer),
    sa.Column("deployment_id", sa.String(32)),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("started_at", sa.Double),
    sa.Column("finished_at", sa.Double),
    sa.Column("cancel_requested", sa.Boolean, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("deaths", sa.Integer, nullable=False),
    sa.Column("spent_s", sa.Double, nullable=False),
    sa.Column("lease_owner", sa.String(64)),
    sa.Column("lease_expires_at", sa.Double),
    sa.Column("claimed_at", sa.Double),
    sa.Column("num_schedules", sa.Integer, nullable=False, server_default="0"),
    sa.Column("objective_ms", sa.Double),
    sa.Column("bound_ms", sa.Double),
    sa.Column("error", sa.Text),
    # Those of one owner are claimed in this order.
    sa.Index("ix_jobs_queue", "state", "owner", sa.text("priority DESC"), "position"),
    sa.Index(None, "state", "position"),
    sa.Index(None, "owner", "position"),
    sa.Index(None, "owner", "state", "position"),
    sa.Index(None, "problem_hash", "owner", "position"),
    sa.Index(None, "shape_hash", "owner", "position"),
    sa.Index(None, "batch_id", "batch_index"),
    sa.Index(None, "finished_at"),
    sqlite_autoincrement=True,
)


def _document(name: str) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("position", _BIG, sa.ForeignKey("jobs.position"), primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )


problems = _document("problems")
models = _document("models")
schedules = _document("schedules")
comparisons = _document("comparisons")
questions = _document("questions")
tuned = _document("tuned")
checkpoints = _document("checkpoints")

# When an owner's job was claimed last: claims are numbered upwards.
turns = sa.Table(
    "turns",
    metadata,
    sa.Column("owner", sa.String(100), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
)

job_tags = sa.Table(
    "job_tags",
    metadata,
    sa.Column("position", _BIG, sa.ForeignKey("jobs.position"), primary_key=True),
    sa.Column("tag", sa.String(64), primary_key=True),
    sa.Index(None, "tag", "position"),
)

# Everything that happened to a job, in order: what an event stream replays. `number` grows within
# a job, as whoever writes one holds the job's row.
events = sa.Table(
    "events",
    metadata,
    sa.Column("number", _BIG, primary_key=True, autoincrement=True),
    sa.Column("position", _BIG, sa.ForeignKey("jobs.position"), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("seconds", sa.Double),
    sa.Column("method", sa.String(100)),
    sa.Column("objective_ms", sa.Double),
    sa.Column("bound_ms", sa.Double),
    sa.Column("text", sa.Text),
    sa.Index(None, "position", "number"),
    sqlite_autoincrement=True,
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("position", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(100), nullable=False),
    sa.Column("idempotency_key", sa.String(255), unique=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("request_hash", sa.String(80), nullable=False),
    # JSON: the axes and the options, and each item's values on the axes.
    sa.Column("document", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)

deployments = sa.Table(
    "deployments",
    metadata,
    sa.Column("position", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(32), nullable=False, unique=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("owner", sa.String(100), nullable=False),
    sa.Column("idempotency_key", sa.String(255), unique=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double),
    sa.Column("request_hash", sa.String(80), nullable=False),
    sa.Column("options", sa.Text, nullable=False),
    sa.Column("problem", sa.Text, nullable=False),
    # The same problem with the times last measured; null until there are any.
    sa.Column("measured", sa.Text),
    # The problem that was solved last, and how long the schedule in use takes under its times.
    sa.Column("planned", sa.Text, nullable=False),
    sa.Column("planned_ms", sa.Double),
    sa.Column("version", sa.Integer, nullable=False),
    # Why a solve is wanted, and its job; whoever sets or clears them wins or loses by it.
    sa.Column("job_reason", sa.Text),
    sa.Column("job_id", sa.String(32)),
    sa.Column("num_solves", sa.Integer, nullable=False),
    # How many of that job's schedules were looked at.
    sa.Column("num_seen", sa.Integer, nullable=False),
    # JSON: why the last solve gave nothing.
    sa.Column("error", sa.Text),
    # How many reports came, and how many of them had come when the times were last judged.
    sa.Column("num_reports", sa.Integer, nullable=False),
    sa.Column("num_judged", sa.Integer, nullable=False),
    # Under measured times: the schedule in use, and one as good as it was when it was made.
    sa.Column("current_ms", sa.Double),
    sa.Column("expected_ms", sa.Double),
    sa.Index(None, "owner", "ended_at"),
    sqlite_autoincrement=True,
)

deployment_versions = sa.Table(
    "deployment_versions",
    metadata,
    sa.Column("position", _BIG, sa.ForeignKey("deployments.position"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("job_id", sa.String(32), nullable=False),
    sa.Column("predicted_ms", sa.Double, nullable=False),
    # Mean of the step times reported under this version, and how many they are.
    sa.Column("measured_ms", sa.Double),
    sa.Column("num_measured", sa.Integer, nullable=False),
    sa.Column("schedule", sa.Text, nullable=False),
)

measurements = sa.Table(
    "measurements",
    metadata,
    sa.Column("number", _BIG, primary_key=True, autoincrement=True),
    sa.Column("position", _BIG, sa.ForeignKey("deployments.position"), nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("step", _BIG),
    sa.Column("step_ms", sa.Double),
    sa.Column("document", sa.Text, nullable=False),
    sa.Index(None, "position", "number"),
    sqlite_autoincrement=True,
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("name", sa.String(100), nullable=False, unique=True),
    sa.Column("role", sa.String(16), nullable=False),
    # SHA-256 of 256 random bits: nothing to guess, so nothing to slow down.
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("revoked_at", sa.Double),
)


T = TypeVar("T")


_BUSY_TIMEOUT_S = 10
_POOL_SIZE = 20
# SQLite answers in the process, and Python lets one thread compute at a time: more that ask at once
# gain nothing, and the event loop would be one of many that wait for the interpreter.
_SQLITE_POOL_SIZE = 6
# A PostgreSQL whose machine went silent is noticed in half a minute instead of TCP's hours, which
# would hold up all who wait; what the URL says of these parameters of libpq wins.
_PATIENCE = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
_WRITE_LOCK = "optpipe_write_lock"
_FILE = "optpipe_file"
_HIDDEN = "***"
_MIGRATION_LOCK = 0x0F71D1FE
# What the database refuses for what it says, rather than because it cannot answer.
_OUR_FAULTS = (exc.IntegrityError, exc.ProgrammingError, exc.DataError)


def connect(url: str, *, must_exist: bool = False) -> sa.Engine:
    """Return an engine on an existing or new database, migrated to the newest tables.

    ``must_exist``: whether to refuse an SQLite file that is not there instead of making it. Raises
    `InputError` if the URL names no database that we know; `StoreUnavailableError` if the database
    cannot be opened, is not there, or belongs to a newer version.
    """
    parsed = _parse(url)
    if must_exist and _is_missing(parsed):
        raise StoreUnavailableError(
            f"there is no database {_shown(parsed)}; name the one of the service: "
            "OPTPIPE_DATABASE_URL or --database-url"
        )
    engine = _sqlite(parsed) if parsed.drivername == "sqlite" else _postgres(parsed)
    try:
        with writing(engine) as connection:
            _migrate(connection)
    except exc.ProgrammingError as error:
        engine.dispose()
        raise InputError(
            f"database_url {_shown(parsed)} is not understood: {_reason(error, parsed)}; correct it"
        ) from None
    except StoreUnavailableError:
        engine.dispose()
        raise
    engine.update_execution_options(**{_FILE: _file_id(parsed)})
    return engine


def probe(engine: sa.Engine) -> None:
    """Write a row as it was: a full disk, a lost or a read-only file is found without a job.

    Raises
    ------
    StoreUnavailableError
        If the database does not answer, or does not take what is written.
    """
    expected = engine.get_execution_options().get(_FILE)
    if expected is not None and _file_id(engine.url) != expected:
        # SQLite writes on into a file that has no name any more: all of it would be lost.
        raise StoreUnavailableError(
            f"the file of the database {_shown(engine.url)} was deleted or replaced; put it back "
            "and restart the server"
        )
    with writing(engine) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = version_num")


def _file_id(url: sa.URL) -> tuple[int, int] | None:
    """Return which file an SQLite database is in; None for others, and where there is none."""
    if url.drivername != "sqlite":
        return None
    try:
        found = Path(url.database or "").stat()
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def _secrets(url: sa.URL) -> set[str]:
    """Return the passwords of a URL: before its host, or among its parameters."""
    hidden = {name for name in url.query if "pass" in name.lower()}
    values = [value for name in hidden for value in url.normalized_query[name]]
    return {secret for secret in (url.password, *values) if secret}


def _shown(url: sa.URL) -> str:
    hidden = {name: _HIDDEN for name in url.query if "pass" in name.lower()}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def _is_missing(url: sa.URL) -> bool:
    """Whether there is no such file; what cannot be looked at is left to SQLite, which says why."""
    name = url.database or ""
    if url.drivername != "sqlite" or name.startswith("file:"):
        return False
    try:
        return not Path(name).exists()
    except OSError:
        return False


@contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """One consistent view of the database."""
    with _translated(engine), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """One transaction that writes, all of it or nothing; on the disk when the block has ended.

    SQLite has one lock for writing and no queue for it: who finds it taken tries again, later and
    later. The threads of a process therefore wait for a lock of their own; another process on the
    same file still meets SQLite's. The transaction holds it from its beginning: one that reads
    first and takes the lock later fails at once where another has written in between.
    """
    lock: threading.Lock | None = engine.get_execution_options().get(_WRITE_LOCK)
    with _translated(engine):
        if lock is None:
            with engine.begin() as connection:
                yield connection
        else:
            with _held(lock), engine.connect() as connection:
                connection.execution_options(optpipe_begin="BEGIN IMMEDIATE")
                with connection.begin():
                    yield connection


@contextmanager
def _held(lock: threading.Lock) -> Iterator[None]:
    if not lock.acquire(timeout=_BUSY_TIMEOUT_S):
        raise exc.TimeoutError(f"others have been writing to it for {_BUSY_TIMEOUT_S:g} s")
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _translated(engine: sa.Engine) -> Iterator[None]:
    try:
        yield
    except (exc.DatabaseError, exc.InterfaceError, exc.TimeoutError) as error:
        if isinstance(error, _OUR_FAULTS):
            raise
        raise StoreUnavailableError(
            f"the database {_shown(engine.url)} does not answer: {_reason(error, engine.url)}; "
            "check that it is there, reachable and writable"
        ) from error


def _reason(error: Exception, url: sa.URL) -> str:
    """Return what the driver says, in one line and without the secrets of the URL."""
    said = str(getattr(error, "orig", None) or error).strip().split("\n", maxsplit=1)[0]
    for secret in _secrets(url):
        said = said.replace(secret, _HIDDEN)
    return said


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
        f"database_url {_shown(parsed)} is not supported: jobs are kept in a file "
        "(sqlite:///file.db) or in PostgreSQL (postgresql://user@host/name)"
    )


def _sqlite(url: sa.URL) -> sa.Engine:
    folder = Path(url.database or "").absolute().parent
    if not folder.is_dir():
        raise StoreUnavailableError(
            f"the database {_shown(url)} cannot be opened: there is no folder {folder}; "
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
    # The driver would begin and commit behind our back, and leave DDL out of transactions.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    # What was accepted must survive a power cut, not only a kill.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin_sqlite(connection: sa.Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("optpipe_begin", "BEGIN"))


def _postgres(url: sa.URL) -> sa.Engine:
    if importlib.util.find_spec("psycopg") is None:
        raise MissingExtraError(
            "PostgreSQL needs psycopg, which is not installed; pip install 'optpipe[postgres]'"
        )
    patience = {name: value for name, value in _PATIENCE.items() if name not in url.query}
    return sa.create_engine(url, connect_args=patience, pool_pre_ping=True, pool_size=_POOL_SIZE)


def _migrate(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        # Two servers that start together: the second waits, and then finds nothing to do.
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreUnavailableError(
            f"the database {_shown(connection.engine.url)} cannot be migrated: {error}; "
            "was it written by a newer optpipe? Install that one, or use another database"
        ) from error


# --- What the stores do alike: rows by id, page by page, once for each key, as records.

_ID = re.compile(r"[0-9a-f]{32}")
_MOST_INSERTS, _MOST_IDS = 3, 1000


def may_be_id(text: str) -> bool:
    """Whether a text looks like an id; what does not may be what a database refuses to hear."""
    return _ID.fullmatch(text) is not None


def in_groups(ids: Sequence[str]) -> Iterator[list[str]]:
    """Yield ids in groups that one query takes; texts that are no ids are left out."""
    for start in range(0, len(ids), _MOST_IDS):
        yield [one for one in ids[start : start + _MOST_IDS] if may_be_id(one)]


def row_with_id(
    connection: sa.Connection,
    query: sa.Select[Any],
    thing_id: str,
    refuse: Callable[[str], Exception],
) -> sa.Row[Any]:
    """Return the row that a query of the parameter ``id`` finds, or raise the refusal of the id."""
    if may_be_id(thing_id):
        row = connection.execute(query, {"id": thing_id}).one_or_none()
        if row is not None:
            return row
    raise refuse(thing_id)


def newest_first(
    query: sa.Select[Any],
    table: sa.Table,
    limit: int,
    before: int | None = None,
    owner: str | None = None,
) -> sa.Select[Any]:
    """Return the query for a page: of positions below ``before``, and of an owner, where given."""
    query = query.order_by(table.c.position.desc()).limit(limit)
    if before is not None:
        query = query.where(table.c.position < before)
    return query if owner is None else query.where(table.c.owner == owner)


def added_once(
    engine: sa.Engine,
    find: Callable[[sa.Connection], T | None],
    insert: Callable[[sa.Connection], T],
) -> T:
    """Return what a key made before, or else what is inserted now."""
    for _ in range(_MOST_INSERTS - 1):
        # Another server may insert the same key between our look and our insert. What it inserted
        # may be deleted again before we look for it.
        with suppress(exc.IntegrityError):
            return _found_or_inserted(engine, find, insert)
    return _found_or_inserted(engine, find, insert)


def _found_or_inserted(
    engine: sa.Engine,
    find: Callable[[sa.Connection], T | None],
    insert: Callable[[sa.Connection], T],
) -> T:
    with writing(engine) as connection:
        known = find(connection)
        return insert(connection) if known is None else known


def made_before(
    connection: sa.Connection, query: sa.Select[Any], new: Any, thing: str
) -> sa.Row[Any] | None:
    """Return the row that a query by key finds, if any, made from the same request as ``new``.

    Raises `KeyReusedError` if it was made from another one.
    """
    row = connection.execute(query).one_or_none()
    if row is not None and row.request_hash != new.request_hash:
        raise KeyReusedError(
            f"the Idempotency-Key {new.idempotency_key!r} made {thing} {row.id} from another "
            "request; use a new key for a new request"
        )
    return row


def record_of(kind: type[T], row: sa.Row[Any], /, **others: Any) -> T:
    """Return a dataclass whose fields are the columns of the same names, but for the others."""
    names = [item.name for item in fields(kind) if item.name not in others]  # type: ignore[arg-type]
    return kind(**{name: getattr(row, name) for name in names}, **others)
