"""What a deployment store must do: the promises of `optpipe_api.store.deployments`, one by one."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import sqlalchemy as sa

from optpipe.answers import JobOptions
from optpipe_api.deployments import (
    REGISTERED,
    DeploymentRecord,
    Documents,
    Judgement,
    NewDeployment,
    NewVersion,
    Report,
)
from optpipe_api.errors import DeploymentNotFoundError, StateConflictError
from optpipe_api.jobs import JobError
from optpipe_api.store import Stores
from optpipe_api.store.database import reading
from optpipe_api.store.deployments import KEPT_REPORTS, DeploymentStore
from optpipe_api.store.tables import deployment_versions, deployments, measurements

OPTIONS = JobOptions(time_limit_s=5.0, seed=3)


def new(name: str = "run", key: str | None = None, **changes: str) -> NewDeployment:
    return NewDeployment(
        name=name,
        owner=changes.pop("owner", "ann"),
        problem='{"p": 0}',
        options=OPTIONS,
        threshold=0.02,
        request_hash=f"sha256:{name.encode().hex()}",
        idempotency_key=key,
    )


def version(ms: float = 10.0, num_seen: int = 1, reason: str = "because") -> NewVersion:
    return NewVersion(
        reason=reason,
        schedule=f'{{"ms": {ms}}}',
        predicted_ms=ms,
        problem='{"p": 1}',
        num_seen=num_seen,
    )


def joined(registered: str, reports: Sequence[str]) -> str:
    return f"{registered}: {', '.join(reports)}"


@pytest.fixture
def open_store(open_all) -> Callable[[], DeploymentStore]:
    return lambda: open_all().deployments


@pytest.fixture
def store(stores: Stores) -> DeploymentStore:
    return stores.deployments


def add(store: DeploymentStore, *args, **changes) -> DeploymentRecord:
    return store.add(new(*args, **changes), max_queued=10)[0]


def solving(store: DeploymentStore) -> DeploymentRecord:
    started = store.start(add(store), "1" * 32)
    assert started is not None
    return started


def published(store: DeploymentStore, ms: float = 10.0) -> DeploymentRecord:
    found = store.publish(solving(store), version(ms))
    assert found is not None
    return found


# Registering and reading


def test_a_new_deployment_wants_its_first_solve_and_is_read_back_whole(
    store, open_store, clock
) -> None:
    added = add(store, "na\x00me")
    assert open_store().get(added.id) == added
    assert (added.job_reason, added.job_id, added.num_solves) == (REGISTERED, None, 1)
    assert (added.version, added.created_at, added.ended_at) == (0, clock(), None)
    assert (added.options, added.threshold) == (OPTIONS, 0.02)
    assert (added.name, added.owner) == ("na\N{REPLACEMENT CHARACTER}me", "ann")
    assert store.documents(added.id) == Documents(
        problem='{"p": 0}', measured=None, planned='{"p": 0}'
    )
    assert (store.schedule(added.id), store.versions(added.id)) == (None, [])


# Solving and publishing


def test_versions_count_up_and_the_newest_is_given(store, clock) -> None:
    first = published(store)
    clock.now += 7
    second = store.publish(first, version(9.0, num_seen=4, reason="better"))
    assert (second.version, second.num_seen, second.planned_ms) == (2, 4, 9.0)
    assert store.schedule(first.id) == (2, '{"ms": 9.0}')
    assert store.documents(first.id).planned == '{"p": 1}'
    listed = [(one.version, one.reason, one.predicted_ms) for one in store.versions(first.id)]
    assert listed == [(1, "because", 10.0), (2, "better", 9.0)]
    assert [one.created_at for one in store.versions(first.id)] == [clock() - 7, clock()]
    assert {one.job_id for one in store.versions(first.id)} == {"1" * 32}


def test_a_judgement_that_wants_a_solve_begins_the_next_one(store) -> None:
    idle = store.settle(published(store))
    fine = Judgement(num_reports=2, current_ms=10.5, expected_ms=10.4)
    judged = store.judge(idle, fine)
    assert (judged.num_judged, judged.current_ms, judged.expected_ms) == (2, 10.5, 10.4)
    assert (judged.job_reason, judged.num_solves, judged.planned_ms) == (None, 1, 10.0)
    wanted = store.judge(judged, replace(fine, reason="drift", problem='{"p": 2}'))
    assert (wanted.job_reason, wanted.num_solves, wanted.num_seen) == ("drift", 2, 0)
    assert wanted.planned_ms == 10.5
    assert store.documents(idle.id).planned == '{"p": 2}'
    assert store.pending() == [idle.id]
    # A new version is not judged yet.
    again = store.start(wanted, "2" * 32)
    assert (again.drift is None, store.publish(again, version(9.0)).drift) == (False, None)


def test_who_comes_too_late_changes_nothing(store) -> None:
    old = add(store)
    solving = store.start(old, "1" * 32)
    judgement = Judgement(num_reports=1, current_ms=1.0, expected_ms=1.0, reason="drift")
    for late in (
        lambda: store.start(old, "2" * 32),
        lambda: store.publish(old, version()),
        lambda: store.settle(old),
        lambda: store.saw(old, 5),
        lambda: store.judge(old, judgement),
    ):
        assert late() is None
    assert store.get(old.id) == solving
    assert store.versions(old.id) == []


def test_an_ended_deployment_refuses_every_change(store, clock) -> None:
    known = published(store)
    clock.now += 1
    ended = store.end(known.id)
    clock.now += 1
    assert store.end(known.id) == ended
    assert (ended.ended_at, ended.job_id) == (clock() - 1, known.job_id)
    assert store.pending() == []
    for known_then in (known, ended):
        assert store.publish(known_then, version()) is None
        assert store.settle(known_then) is None
    with pytest.raises(StateConflictError, match="has ended"):
        store.report(known.id, Report(version=1, document=""), joined)
    assert store.schedule(known.id) == (1, '{"ms": 10.0}')


# Reports


def test_the_newest_reports_count_oldest_first(store) -> None:
    idle = store.settle(published(store))
    for number in range(KEPT_REPORTS + 2):
        store.report(idle.id, Report(version=1, document=str(number)), joined)
    kept = ", ".join(str(number) for number in range(2, KEPT_REPORTS + 2))
    assert store.documents(idle.id).measured == f'{{"p": 0}}: {kept}'
    with reading(store._engine) as connection:
        found = connection.execute(sa.select(measurements.c.document)).scalars().all()
    assert len(found) == KEPT_REPORTS


def test_step_times_are_averaged_by_version(store) -> None:
    known = store.publish(published(store), version(9.0))
    for number, step_ms in ((1, 10.0), (2, 8.0), (1, 13.0), (1, None), (2, 9.0)):
        report = Report(version=number, document="", step=5, step_ms=step_ms)
        store.report(known.id, report, joined)
    means = [(one.measured_ms, one.num_measured) for one in store.versions(known.id)]
    assert means == [(11.5, 2), (8.5, 2)]


@pytest.mark.parametrize("number", [0, 2])
def test_a_version_that_is_not_is_refused_and_nothing_kept(store, number) -> None:
    known = published(store)
    with pytest.raises(StateConflictError, match=rf"version = {number}: .* versions 1 to 1"):
        store.report(known.id, Report(version=number, document=""), joined)
    assert store.get(known.id) == known


def test_a_report_whose_measuring_fails_is_not_kept(store) -> None:
    known = published(store)

    def fail(registered: str, reports: Sequence[str]) -> str:
        raise StateConflictError("no")

    with pytest.raises(StateConflictError):
        store.report(known.id, Report(version=1, document="", step_ms=1.0), fail)
    assert store.get(known.id) == known
    assert store.versions(known.id)[0].num_measured == 0


# Deletion


def test_an_ended_deployment_is_deleted_with_its_versions_and_reports(store) -> None:
    gone, other = (published(store) for _ in range(2))
    for known in (gone, other):
        store.report(known.id, Report(version=1, document="a"), joined)
    with pytest.raises(StateConflictError, match=f"POST /v1/deployments/{gone.id}/end"):
        store.delete(gone.id)
    store.end(gone.id)
    store.delete(gone.id)
    with reading(store._engine) as connection:
        for table in (deployments, deployment_versions, measurements):
            kept = connection.execute(sa.select(table.c.position)).scalars()
            assert list(kept) == [other.position]
    with pytest.raises(DeploymentNotFoundError):
        store.delete(gone.id)


def test_the_standing_of_a_deployment_has_its_version_its_end_and_its_fault(stores) -> None:
    store = stores.deployments
    known, _ = store.add(new(), max_queued=9)

    def standing() -> tuple[int, bool, bool]:
        (found,) = store.standings([known.id]).values()
        return found.version, found.has_ended, found.has_failed

    assert standing() == (0, False, False)
    store.settle(known, JobError(code="job.died", message="it died"))
    assert standing() == (0, False, True)
    other, _ = store.add(new("other"), max_queued=9)
    store.publish(store.start(other, "0" * 32), version())
    assert store.standings([other.id])[other.id].version == 1
    store.end(known.id)
    assert standing() == (0, True, True)
