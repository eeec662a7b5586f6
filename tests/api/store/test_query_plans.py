"""Frequent queries neither scan nor sort all jobs, by SQLite's own query plans."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
import sqlalchemy as sa

from optpipe.answers import JobState
from optpipe.requests import JobKind
from optpipe_api.jobs import DocumentKind
from optpipe_api.store import Stores, open_stores
from optpipe_api.store.shared import check_limits
from optpipe_api.store.tables import jobs
from tests.api.live import make_settings, running

NOW = 1_000_000.0
ID = f"{7:032x}"


def checked(stores: Stores) -> None:
    most = 10**6
    with stores.engine.connect() as connection:
        check_limits(connection, "o1", 1, most, max_of_owner=most, num_new=1, max_kept=most)


CALLS: dict[str, Callable[[Stores], Any]] = {
    "claim": lambda stores: stores.jobs.claim("w", 10.0),
    "page": lambda stores: stores.jobs.page(50, 900),
    "page of an owner": lambda stores: stores.jobs.page(50, 900, owner="o1"),
    "page of a state": lambda stores: stores.jobs.page(50, 900, state=JobState.SUCCEEDED),
    "page of both": lambda stores: stores.jobs.page(50, owner="o1", state=JobState.FAILED),
    "page of a tag": lambda stores: stores.jobs.page(50, 900, tag="t"),
    "page of batches": lambda stores: stores.batches.page(50, 900),
    "answer": lambda stores: stores.jobs.answer(
        "p1", kind=JobKind.SOLVE, owner="o1", limit=20, accepts=bool
    ),
    "near": lambda stores: stores.jobs.near("s1", owner="o1", limit=5),
    "get": lambda stores: stores.jobs.get(ID),
    "schedule": lambda stores: stores.jobs.schedule(ID),
    "documents": lambda stores: stores.jobs.documents(ID, *DocumentKind),
    "history": lambda stores: stores.jobs.history(ID, 5),
    "standings": lambda stores: stores.jobs.standings([ID]),
    "standings of batches": lambda stores: stores.batches.standings([ID]),
    "trace": lambda stores: stores.jobs.trace(ID),
    "retention, with nothing old": lambda stores: stores.jobs.delete_finished(1.0),
    "limits": checked,
}
# `expire` groups the few that run.


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> Iterator[Stores]:
    folder = tmp_path_factory.mktemp("plans")
    with closing(open_stores(f"sqlite:///{folder}/jobs.db", lambda: NOW)) as stores:
        with stores.engine.begin() as connection:
            connection.execute(sa.insert(jobs), [row(index) for index in range(1, 1001)])
        yield stores


def row(index: int) -> dict[str, Any]:
    state = ("succeeded", "succeeded", "queued", "failed")[index % 4]
    return {
        "id": f"{index:032x}",
        "state": state,
        "name": "",
        "owner": f"o{index % 9}",
        "problem_hash": f"p{index % 99}",
        "shape_hash": f"s{index % 9}",
        "objective": "makespan",
        "options": '{"time_limit_s": 5.0}',
        "priority": index % 3,
        "created_at": NOW,
        "finished_at": None if state == "queued" else NOW,
        "cancel_requested": False,
        "attempt": 0,
        "deaths": 0,
        "spent_s": 0.0,
    }


def statements_of(stores: Stores, call: Callable[[Stores], Any]) -> list[tuple[str, Any]]:
    """Return the statements that a call executes, with their parameters."""
    statements: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, sql: str, parameters: Any, *_: Any) -> None:
        statements.append((sql, parameters))

    sa.event.listen(stores.engine, "before_cursor_execute", note)
    try:
        call(stores)
    finally:
        sa.event.remove(stores.engine, "before_cursor_execute", note)
    return statements


def plans(stores: Stores, call: Callable[[Stores], Any]) -> list[str]:
    """Return the steps of SQLite's plans for the statements that a call executes."""
    found = []
    statements = statements_of(stores, call)
    with stores.engine.connect() as connection:
        for sql, parameters in statements:
            if sql.lstrip().startswith(("SELECT", "UPDATE", "DELETE")):
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", parameters)
                found += [step[-1] for step in plan]
    assert found
    return found


@pytest.mark.parametrize("name", CALLS)
def test_frequent_queries_use_an_index(stores: Stores, name: str) -> None:
    steps = plans(stores, CALLS[name])
    tables = ("jobs", "job_tags", "documents", "events")
    scans = [step for step in steps if step.startswith(tuple(f"SCAN {name}" for name in tables))]
    sorts = [step for step in steps if "ORDER BY" in step]
    assert (scans, sorts) == ([], [])


@pytest.mark.parametrize(("name", "number"), [("claim", 1), ("documents", 1), ("page", 0)])
def test_documents_are_read_in_one_query_or_not_at_all(
    stores: Stores, name: str, number: int
) -> None:
    """A claim reads all documents in one query, and a list of jobs reads none."""
    statements = statements_of(stores, CALLS[name])
    assert sum("documents" in sql for sql, _ in statements) == number


def test_the_first_of_the_queue_is_found_as_fast_among_many_as_among_few(stores: Stores) -> None:
    """The index has priorities in falling order, which no comparison of tables would see."""
    sql = "SELECT sql FROM sqlite_master WHERE name = 'ix_jobs_queue'"
    with stores.engine.connect() as connection:
        text = connection.exec_driver_sql(sql).scalar_one()
    assert "priority DESC" in text


def test_health_checks_within_a_second_share_one_count(tmp_path, monkeypatch) -> None:
    """A health check needs no key, and has no limit of its rate."""
    with running(make_settings(tmp_path)) as (_, app):
        service = app.state.service
        counts = Mock(return_value={JobState.QUEUED: 1})
        monkeypatch.setattr(service, "counts", counts)
        assert [service.recent_counts() for _ in range(50)] == [{JobState.QUEUED: 1}] * 50
        assert counts.call_count == 1
        monkeypatch.setattr(time, "monotonic", lambda clock=time.monotonic: clock() + 2.0)
        service.recent_counts()
        assert counts.call_count == 2
