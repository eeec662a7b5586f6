"""What is old goes, what is in use stays."""

import re
import time
from dataclasses import replace

import pytest
import sqlalchemy as sa

from optpipe_api.errors import JobNotFoundError
from optpipe_api.jobs import JobEvent, JobRecord
from optpipe_api.store import AttemptOutcome, Stores, open_stores, tables
from tests.api.live import make_settings, running, until
from tests.api.store.test_jobs import new

DAY_S = 86_400.0


def test_only_what_ended_long_ago_goes(stores, clock) -> None:
    old, running_job, queued = (add(stores, name) for name in ("old", "running", "queued"))
    finish(stores, old)
    claim = stores.jobs.claim("me", 1e9)
    assert claim is not None
    clock.now += 9 * DAY_S
    recent = add(stores, "recent", priority=1)
    finish(stores, recent)
    clock.now += 1.1 * DAY_S
    assert stores.jobs.delete_finished(clock() - 10 * DAY_S) == 1
    assert ids(stores) == {recent.id, running_job.id, queued.id}
    with pytest.raises(JobNotFoundError):
        stores.jobs.get(old.id)
    assert num_rows(stores, tables.documents) == 3


def test_a_server_deletes_at_its_start_what_is_old(tmp_path, capsys) -> None:
    """More than one transaction deletes."""
    settings = make_settings(tmp_path, retention_days=10)
    stores = open_stores(settings.database_url, lambda: time.time() - 11 * DAY_S)
    finish(stores, add(stores, "old"))
    with stores.engine.begin() as connection:
        row = connection.execute(sa.select(tables.jobs)).one()._asdict()
        copies = [
            {**row, "position": row["position"] + number, "id": f"{number:032x}"}
            for number in range(1, 500)
        ]
        connection.execute(sa.insert(tables.jobs), copies)
    with running(make_settings(tmp_path)):
        assert num_rows(stores, tables.jobs) == 500
    with running(settings):
        until(lambda: not ids(stores))
    assert re.search(r"deleted what ended more than 10 days ago.*jobs=500", capsys.readouterr().out)
    stores.close()


def add(stores: Stores, name: str, **values) -> JobRecord:
    job, _ = stores.jobs.add(replace(new(name), **values), max_queued=10**6)
    return job


def finish(stores: Stores, job: JobRecord) -> None:
    """End a job, now: it is claimed, and must be next in the queue."""
    claim = stores.jobs.claim("me", 60.0)
    assert claim is not None
    assert claim.job.id == job.id
    outcome = AttemptOutcome(event=JobEvent.SUCCEED)
    assert stores.jobs.finish(claim.lease, outcome) is not None


def ids(stores: Stores) -> set[str]:
    return {job.id for job in stores.jobs.page(1000)}


def num_rows(stores: Stores, table: sa.Table) -> int:
    with stores.engine.connect() as connection:
        count: int = connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
        return count
