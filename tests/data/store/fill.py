"""Fills a database with a little of everything: ``python fill.py URL``.

The code of commit 84875d5 filled two databases with this script; their tables have revision 0008.
``0008.sqlite.sql`` is a dump by ``iterdump`` of Python's sqlite3, ``0008.postgres.sql`` one by
``pg_dump --inserts --no-owner`` without comments and settings.
"""

import sys
from contextlib import closing
from dataclasses import replace

from optpipe.answers import Cache, JobOptions
from optpipe.requests import JobKind
from optpipe_api.access import Role
from optpipe_api.deployments import NewDeployment, NewVersion, Report
from optpipe_api.jobs import (
    AttemptOutcome,
    BatchPlan,
    Claim,
    ItemPlan,
    JobEvent,
    JobStart,
    NewBatch,
    NewJob,
    TracePoint,
)
from optpipe_api.store import Stores, open_stores

OPTIONS = JobOptions(time_limit_s=5.0, threads=2)
ENDED = AttemptOutcome(event=JobEvent.SUCCEED, method="ls")


def new(name: str, kind: JobKind = JobKind.SOLVE, **changes: str | None) -> NewJob:
    job = NewJob(
        name=name,
        kind=kind,
        problem_hash=f"sha256:{name}",
        shape_hash="sha256:shape",
        objective="makespan",
        options=OPTIONS,
        owner="ci",
        problem=f"problem of {name}",
    )
    return replace(job, **changes)  # type: ignore[arg-type]


def claimed(stores: Stores) -> Claim:
    claim = stores.jobs.claim("server", 100.0)
    assert claim is not None
    return claim


def point(objective_ms: float | None, bound_ms: float | None = None) -> TracePoint:
    return TracePoint(seconds=1.0, method="ls", objective_ms=objective_ms, bound_ms=bound_ms)


def fill(stores: Stores) -> None:
    stores.keys.create("ci", Role.SUBMIT)
    stores.keys.create("gone", Role.READ)
    stores.keys.revoke("gone")
    jobs = stores.jobs
    for wanted in (
        replace(new("solved", idempotency_key="k"), tags=("a", "b")),
        new("planned", JobKind.PLAN, problem=None, model="model of planned"),
        new("compared", JobKind.COMPARE),
    ):
        jobs.add(wanted, max_queued=99)
    lease = claimed(stores).lease
    jobs.record(lease, point(9.0, 7.0), 100.0, schedule="schedule of 9 ms")
    jobs.finish(lease, replace(ENDED, schedule="schedule of 8 ms", objective_ms=8.0, bound_ms=7.0))
    found = {"schedule": "schedule of planned", "objective_ms": 6.0, "problem": "cut of planned"}
    jobs.finish(claimed(stores).lease, replace(ENDED, **found))  # type: ignore[arg-type]
    jobs.finish(claimed(stores).lease, replace(ENDED, comparison="rows of compared"))

    tune = new("tuned", JobKind.TUNE, problem=None, question="question of tuned")
    jobs.add(tune, max_queued=99)
    lease = claimed(stores).lease
    jobs.tell(lease, "100 configurations", 100.0)
    texts = {"schedule": "schedule of tuned", "problem": "cut of tuned", "found": "tuned so far"}
    jobs.record(lease, point(5.0), 100.0, checkpoint="search of tuned", **texts)

    start = JobStart(schedule="schedule of near", objective_ms=9.5, method="zb")
    near = replace(new("waiting"), start=start, cache=Cache.NEAR, source_id="1" * 32, priority=3)
    jobs.add(near, max_queued=99)

    items = [new(f"item {index}") for index in range(2)]
    loose, tight = (
        ItemPlan(values={"memory_scale": scale}, memory_bytes=(7,), family="f", tighter=tighter)
        for scale, tighter in ((1, (1,)), (0.5, ()))
    )
    plan = BatchPlan(
        axes={"memory_scale": [1, 0.5]},
        options=OPTIONS,
        tags=("t",),
        priority=0,
        items=(loose, tight),
    )
    sweep = NewBatch(name="sweep", owner="ann", plan=plan, request_hash="sha256:sweep")
    owned = [replace(item, owner="ann") for item in items]
    stores.batches.add(sweep, owned, max_queued=99)
    best = {"schedule": "schedule of item 1", "objective_ms": 4.0, "bound_ms": 1.0}
    jobs.finish(claimed(stores).lease, replace(ENDED, **best))  # type: ignore[arg-type]

    run = NewDeployment(
        name="run",
        owner="ci",
        problem="problem of run",
        options=OPTIONS,
        threshold=0.02,
        request_hash="sha256:run",
    )
    deployment, _ = stores.deployments.add(run, max_queued=99)
    started = stores.deployments.start(deployment, jobs.page(1, tag="a")[0].id)
    assert started is not None
    version = NewVersion(
        reason="registered",
        schedule="schedule of run",
        predicted_ms=8.0,
        problem="problem of run",
        num_seen=1,
    )
    stores.deployments.publish(started, version)
    report = Report(version=1, document="report of run", step_ms=8.5)
    stores.deployments.report(deployment.id, report, lambda *_: "problem of run as measured")


if __name__ == "__main__":
    with closing(open_stores(sys.argv[1], lambda: 1_000_000.0)) as opened:
        fill(opened)
