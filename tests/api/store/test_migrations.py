"""Jobs that an older version wrote: nothing of them is lost, and they can be followed."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

import optpipe_api.store
from optpipe.answers import EventKind, JobState
from optpipe.requests import JobKind
from optpipe_api.jobs import StoredSchedule, TracePoint
from optpipe_api.store import open_stores

SCRIPTS = Path(optpipe_api.store.__file__).parent / "migrations"
BEFORE = {
    "problem_hash": "sha256:p",
    "objective": "makespan",
    "options": '{"time_limit_s": 5.0, "threads": 2, "method": "auto"}',
    "created_at": 100.0,
    "cancel_requested": False,
    "attempt": 1,
    "deaths": 0,
    "spent_s": 0.0,
}
JOBS: list[dict[str, Any]] = [
    {
        "id": "1" * 32,
        "state": "succeeded",
        "name": "done",
        "idempotency_key": "k",
        "started_at": 101.0,
        "finished_at": 105.0,
        "objective_ms": 8.0,
        "bound_ms": 7.0,
    },
    {"id": "2" * 32, "state": "queued", "name": "waiting"},
]
TRACE = [(0.5, "zb", 9.0, None), (1.0, "bound", None, 7.0), (2.0, "ls", 8.0, 7.0)]


@contextmanager
def as_of(revision: str, url: str) -> Iterator[Callable[..., None]]:
    """Make a database as a migration left it; yields what puts a row into a table."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        tables = sa.MetaData()
        tables.reflect(connection)

        def put(table: str, **values: Any) -> None:
            connection.execute(sa.insert(tables.tables[table]).values(values))

        yield put
    engine.dispose()


def write_as_0001(url: str) -> None:
    """Put two jobs into it."""
    with as_of("0001", url) as put:
        for position, job in enumerate(JOBS, start=1):
            put("jobs", position=position, **BEFORE, **job)
            put("problems", position=position, document=job["name"])
        put("schedules", position=1, document="S")
        for row in TRACE:
            columns = ("seconds", "method", "objective_ms", "bound_ms")
            put("trace", position=1, **dict(zip(columns, row, strict=True)))


def assert_migrated(url: str) -> None:
    with closing(open_stores(url)) as stores:
        store = stores.jobs
        waiting, done = store.page(9)
        assert (done.state, done.kind, done.owner, done.tags) == (
            JobState.SUCCEEDED,
            JobKind.SOLVE,
            "",
            (),
        )
        assert (done.options.threads, done.options.cache, done.priority) == (2, "use", 0)
        assert store.schedule(done.id) == StoredSchedule(document="S", number=1)
        assert store.trace(done.id) == [
            TracePoint(seconds=s, method=m, objective_ms=o, bound_ms=b) for s, m, o, b in TRACE
        ]
        kinds = [entry.kind for entry in store.history(done.id)]
        assert kinds == [EventKind.INCUMBENT, EventKind.BOUND, EventKind.INCUMBENT, EventKind.STATE]
        assert store.history(done.id)[-1].is_final
        assert [entry.text for entry in store.history(waiting.id)] == ["queued"]
        claim = store.claim("worker", 9.0)
        assert claim is not None
        assert (claim.job.id, claim.problem) == (waiting.id, "waiting")
        (same,) = store.same("sha256:p", kind=JobKind.SOLVE, owner="", limit=9)
        assert same.id == done.id


def test_jobs_of_the_first_version_are_kept_on_sqlite(tmp_path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    write_as_0001(url)
    assert_migrated(url)


@pytest.mark.parametrize(
    ("revision", "about"), [("0003", {}), ("0004", {"about_id": "1" * 32})], ids=["0003", "0004"]
)
def test_batches_of_an_older_version_are_kept(
    tmp_path, revision: str, about: dict[str, Any]
) -> None:
    """Also those that say which job they ask about, and what: a what-if is a batch like any other.

    Its questions were kept in its plan; they are read past.
    """
    url = f"sqlite:///{tmp_path}/jobs.db"
    plan = {"axes": {}, "options": {"time_limit_s": 5.0}, "tags": ["t"], "priority": 0, "items": []}
    questions = {"asking": {"job_id": "1" * 32, "asked": [], "unasked": []}} if about else {}
    fields = {"id": "3" * 32, "name": "old", "owner": "", "created_at": 100.0}
    document = json.dumps(plan | questions)
    with as_of(revision, url) as put:
        put("batches", **fields, request_hash="sha256:b", document=document, **about)
    with closing(open_stores(url)) as stores:
        (found,) = stores.batches.page(9)
        assert (found.name, stores.batches.plan(found.id).tags) == ("old", ("t",))


@pytest.mark.postgres
def test_jobs_of_the_first_version_are_kept_on_postgres(postgres_url) -> None:
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    write_as_0001(url)
    assert_migrated(postgres_url)


def test_a_queued_job_that_shared_another_solve_is_solved_by_itself(tmp_path) -> None:
    """Versions that shared solves left such rows behind; nobody would answer them now."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    write_as_0001(url)
    with as_of("0005", url):
        pass
    with sqlite3.connect(tmp_path / "jobs.db") as connection:
        connection.execute("UPDATE jobs SET awaits_id = ? WHERE id = ?", ("1" * 32, "2" * 32))
    connection.close()
    with closing(open_stores(url)) as stores:
        claim = stores.jobs.claim("w", 10.0)
    assert claim is not None
    assert claim.job.id == "2" * 32
