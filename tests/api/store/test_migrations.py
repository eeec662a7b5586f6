"""Databases of older versions: those of revision 0008 are upgraded, older ones are refused."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from optpipe.answers import EventKind, JobOptions, JobState
from optpipe_api.access import Role
from optpipe_api.errors import KeyReusedError, StoreUnavailableError
from optpipe_api.jobs import AttemptOutcome, DocumentKind, JobEvent, NewJob, TracePoint
from optpipe_api.store import JobStore, Stores, open_stores
from optpipe_api.store.tables import metadata
from tests.api.live import Clock, database_in
from tests.api.store.test_database import NOT_COMPARED
from tests.api.store.test_jobs import document_text
from tests.conftest import postgres_database

DUMPS = Path("tests/data/store")
DEPLOYMENT = "d" * 32
OF_DEPLOYMENT = f"""
UPDATE deployments SET id = '{DEPLOYMENT}';
UPDATE jobs SET deployment_id = '{DEPLOYMENT}' WHERE name = 'waiting';
"""
TEXTS = {
    "solved": {"problem": "problem of solved", "schedule": "schedule of 8 ms"},
    "planned": {
        "model": "model of planned",
        "problem": "cut of planned",
        "schedule": "schedule of planned",
    },
    "compared": {"problem": "problem of compared", "comparison": "rows of compared"},
    "tuned": {
        "question": "question of tuned",
        "problem": "cut of tuned",
        "schedule": "schedule of tuned",
        "tuned": "tuned so far",
        "checkpoint": "search of tuned",
    },
    "waiting": {"problem": "problem of waiting", "schedule": "schedule of near"},
    "item 0": {"problem": "problem of item 0"},
    "item 1": {"problem": "problem of item 1", "schedule": "schedule of item 1"},
}


def like_old(name: str, **changes: Any) -> NewJob:
    """A job as `tests/data/store/fill_84875d5.txt` adds them."""
    job = NewJob(
        name=name,
        problem_hash=f"sha256:{name}",
        shape_hash="sha256:shape",
        objective="makespan",
        options=JobOptions(time_limit_s=5.0, threads=2),
        owner="ci",
        documents={"problem": f"problem of {name}"},
    )
    return replace(job, **changes)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def old(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock):
    """The stores of a database that the code of commit 84875d5 wrote."""
    dump = (DUMPS / f"0008.{request.param}.sql").read_text("utf-8") + OF_DEPLOYMENT
    if request.param == "sqlite":
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
            connection.executescript(dump)
        with closing(open_stores(f"sqlite:///{tmp_path}/jobs.db", clock)) as stores:
            yield stores
        return
    with postgres_database() as url:
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql(dump)
        engine.dispose()
        with closing(open_stores(url, clock)) as stores:
            yield stores


def by_name(store: JobStore, name: str) -> str:
    (job_id,) = (job.id for job in store.page(99) if job.name == name)
    return job_id


def test_the_upgrade_leads_to_the_tables_of_a_new_database(old: Stores) -> None:
    options = {"include_object": lambda _object, name, *_: name not in NOT_COMPARED}
    with old.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []


def test_every_job_has_its_documents_tags_and_history(old: Stores) -> None:
    for name, texts in TEXTS.items():
        assert old.jobs.documents(by_name(old.jobs, name), *DocumentKind) == texts
    solved = old.jobs.get(by_name(old.jobs, "solved"))
    assert (solved.state, solved.tags, solved.owner) == (JobState.SUCCEEDED, ("a", "b"), "ci")
    assert (solved.objective_ms, solved.bound_ms, solved.num_schedules) == (8.0, 7.0, 2)
    kinds = [entry.kind for entry in old.jobs.history(solved.id)]
    assert kinds == [EventKind.STATE] * 2 + [EventKind.INCUMBENT] * 2 + [EventKind.STATE]
    assert [one.objective_ms for one in old.jobs.trace(solved.id)[1]] == [9.0, 8.0]
    stored = old.jobs.schedule(solved.id, with_problem=True)
    assert stored is not None
    assert (stored.number, stored.problem) == (2, "problem of solved")


def test_an_idempotency_key_still_names_its_job(old: Stores) -> None:
    again = like_old("solved", idempotency_key="k")
    with pytest.raises(KeyReusedError):
        old.jobs.add(again, max_queued=99)
    job, is_new = old.jobs.add(replace(again, tags=("b", "a")), max_queued=99)
    assert (job.id, is_new) == (by_name(old.jobs, "solved"), False)


def test_a_lease_and_the_queue_go_on(old: Stores, clock: Clock) -> None:
    """The tune that ran is claimed with all of its documents, and can end."""
    assert old.jobs.expire(3) == []
    clock.now += 1000.0
    (lapsed,) = old.jobs.expire(3)
    assert (lapsed.name, lapsed.deaths) == ("tuned", 1)
    claims = {}
    while (claim := old.jobs.claim("other", 100.0)) is not None:
        claims[claim.job.name] = claim
    assert set(claims) == {"item 0", "waiting", "tuned"}
    tune = claims["tuned"]
    assert (
        tune.documents.get("question"),
        tune.documents.get("problem"),
        tune.documents.get("schedule"),
    ) == (
        "question of tuned",
        "cut of tuned",
        "schedule of tuned",
    )
    assert (
        tune.documents.get("tuned"),
        tune.documents.get("checkpoint"),
        tune.documents.get("model"),
    ) == ("tuned so far", "search of tuned", None)
    assert claims["waiting"].documents.get("schedule") == "schedule of near"
    assert claims["item 0"].documents.get("schedule") is None
    old.jobs.record(
        tune.lease,
        TracePoint(seconds=1.0, method="ls", objective_ms=4.5),
        100.0,
        documents={"schedule": "better", "tuned": "more"},
    )
    old.jobs.finish(tune.lease, AttemptOutcome(event=JobEvent.SUCCEED, method="ls"))
    texts = TEXTS["tuned"] | {"schedule": "better", "tuned": "more"}
    assert old.jobs.documents(tune.job.id, *DocumentKind) == texts


def test_a_batch_goes_on(old: Stores) -> None:
    (batch,) = old.batches.page(9)
    assert (batch.name, batch.counts) == ("sweep", {JobState.QUEUED: 1, JobState.SUCCEEDED: 1})
    assert old.batches.plan(batch.id).items[0].tighter == (1,)
    old.batches.cancel(batch.id)
    old.batches.delete(batch.id)
    assert old.batches.page(9) == []


def test_keys_are_there_and_jobs_of_a_deployment_have_its_tag(old: Stores) -> None:
    assert [(key.name, key.role) for key in old.keys.valid()] == [("ci", Role.SUBMIT)]
    assert [key.name for key in old.keys.all()] == ["ci", "gone"]
    (run,) = old.jobs.page(9, tag=f"deployment:{DEPLOYMENT}")
    assert (run.name, document_text(old.jobs, run.id, "schedule")) == (
        "waiting",
        "schedule of near",
    )


def test_the_log_names_each_deployment_that_ends(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
        connection.executescript((DUMPS / "0008.sqlite.sql").read_text("utf-8") + OF_DEPLOYMENT)
    with structlog.testing.capture_logs() as lines:
        open_stores(f"sqlite:///{tmp_path}/jobs.db").close()
    (line,) = [one for one in lines if one["action"] == "store.deployment_dropped"]
    assert line["deployment"] == DEPLOYMENT
    assert f"its jobs have the tag deployment:{DEPLOYMENT}" in line["event"]


def test_a_new_job_comes_after_the_old_ones(old: Stores) -> None:
    newest = old.jobs.page(1)[0].position
    job, _ = old.jobs.add(like_old("next"), max_queued=99)
    assert job.position == newest + 1
    assert document_text(old.jobs, job.id, "problem") == "problem of next"


def set_revision(folder: Path, revision: str) -> str:
    """Make a database of a revision; return its URL."""
    url = database_in(folder)
    open_stores(url).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :r"), {"r": revision})
    engine.dispose()
    return url


@pytest.mark.parametrize(
    ("revision", "message"),
    [
        ("0001", r"revision 0001, .* revision 0008 or later; .* optpipe 0\.1\.0 at commit 84875d5"),
        ("0007", r"revision 0007, .* revision 0008 or later; .* optpipe 0\.1\.0 at commit 84875d5"),
        ("9999", r"9999.*newer optpipe\? Install that one"),
    ],
)
def test_a_database_of_another_revision_is_refused_and_left_alone(
    tmp_path: Path, revision: str, message: str
) -> None:
    url = set_revision(tmp_path, revision)
    with pytest.raises(StoreUnavailableError, match=message):
        open_stores(url)
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        kept = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
    engine.dispose()
    assert kept == revision
