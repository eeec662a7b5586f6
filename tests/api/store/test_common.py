"""What jobs and batches have in common: keys, pages, a full queue, unknown ids."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from optpipe_api.errors import (
    BatchNotFoundError,
    JobNotFoundError,
    KeyReusedError,
    QueueFullError,
)
from optpipe_api.store import Stores
from tests.api.store import test_batches, test_jobs


@pytest.fixture(params=["jobs", "batches"])
def kind(request) -> str:
    value: str = request.param
    return value


def added(
    stores: Stores, kind: str, name: str = "a", *, key: str | None = None, owner="ann", room=99
) -> Any:
    """The record that a submission of the kind makes, or has made before."""
    if kind == "jobs":
        return stores.jobs.add(test_jobs.new(name, key, {"owner": owner}), max_queued=room)[0]
    batch, items = test_batches.batch(name, key, owner=owner), test_batches.items()
    return stores.batches.add(batch, items, max_queued=room)[0]


def test_a_key_makes_one_for_an_owner_also_when_the_queue_is_full(stores, kind: str) -> None:
    first = added(stores, kind, key="k")
    assert added(stores, kind, key="k", room=0) == first
    with pytest.raises(KeyReusedError, match="'k'"):
        added(stores, kind, "other", key="k")
    theirs = added(stores, kind, key="k", owner="bob")
    assert theirs.id != first.id
    # An owner's name cannot be moved into the key.
    moved = added(stores, kind, key="bob\0k", owner="")
    assert moved.id not in (first.id, theirs.id)
    assert len(getattr(stores, kind).page(9)) == 3


def test_one_key_from_many_threads_makes_one(open_all, kind: str) -> None:
    found: list[str] = []

    def submit(stores: Stores) -> None:
        found.append(added(stores, kind, key="k").id)

    stores = [open_all() for _ in range(4)]
    test_jobs.together([partial(submit, one) for one in stores * 2])
    assert (len(found), len(set(found))) == (8, 1)
    assert len(getattr(stores[0], kind).page(9)) == 1


def test_a_full_queue_takes_none(stores, kind: str) -> None:
    with pytest.raises(QueueFullError):
        added(stores, kind, room=0)
    assert getattr(stores, kind).page(9) == []


def test_pages_go_from_newest_to_oldest_for_one_owner_or_all(stores, kind: str) -> None:
    page = getattr(stores, kind).page
    ids = [added(stores, kind, owner=owner).id for owner in ("ann", "bob") * 2]
    first = page(2)
    added(stores, kind)
    assert [found.id for found in first + page(9, first[-1].position)] == ids[::-1]
    assert [found.id for found in page(9, first[0].position, owner="ann")] == [ids[2], ids[0]]


@pytest.mark.parametrize("unknown", ["0" * 32, "", "x", "\x00", "é" * 32, "0" * 9999])
def test_an_unknown_id_is_refused_everywhere(stores, unknown: str) -> None:
    jobs, batches = stores.jobs, stores.batches
    methods: dict[type[Exception], list[Callable[[str], object]]] = {
        JobNotFoundError: [
            *(jobs.get, jobs.documents, jobs.schedule, jobs.history, jobs.trace),
            *(jobs.request_cancel, jobs.delete),
            lambda job_id: jobs.resume(job_id, 1.0, max_time_limit_s=9.0, max_queued=9),
        ],
        BatchNotFoundError: [
            *(batches.get, batches.plan, batches.jobs, batches.cancel),
            partial(batches.retry, max_queued=9),
        ],
    }
    for error, refusing in methods.items():
        for method in refusing:
            with pytest.raises(error):
                method(unknown)


def test_standings_say_whose_things_are_and_leave_out_unknown_ids(stores, kind: str) -> None:
    store = getattr(stores, kind)
    mine, theirs = added(stores, kind).id, added(stores, kind, owner="bob").id
    unknown = ["0" * 32, "", "x", "\x00", "0" * 9999]
    # More ids than one query takes.
    many = [f"{number:032x}" for number in range(1500)]
    found = store.standings([mine, *unknown, *many, theirs])
    assert {one: standing.owner for one, standing in found.items()} == {mine: "ann", theirs: "bob"}
    assert store.standings([]) == {}
