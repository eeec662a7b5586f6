"""Talks to the service: submit a problem, follow it, fetch its schedule.

::

    with Client("http://planner:8000") as client:
        job = client.submit(problem, time_limit_s=60)
        for job in client.follow(job):
            print(job.state, job.objective_ms, job.gap)
        schedule = client.result(job)

    async with AsyncClient("http://planner:8000") as client:
        schedule = await client.result(await client.submit(problem, time_limit_s=60))

    answers = client.what_if(job).answers
    batch = client.sweep(problem, {"memory_scale": [1, 0.75, 0.5]})
    deployment = client.deploy(problem)

Calls that can be repeated without harm are repeated, with growing pauses, where the service cannot
be reached or asks for patience. That is nearly all of them: each submission carries a key under
which the service makes only one job. What is refused raises the error that `optpipe.client.errors`
draws.

`optpipe.client.jobs`, ``what_ifs``, ``batches`` and ``deployments`` describe the requests,
``following`` what takes many of them; ``sync`` and ``asynchronous`` only send.
"""

from optpipe.client.asynchronous import AsyncBatch, AsyncClient, AsyncDeployment
from optpipe.client.errors import (
    BusyError,
    ConflictError,
    KeyRefusedError,
    NoScheduleError,
    NotFoundError,
    RequestRefusedError,
    SolveFailedError,
)
from optpipe.client.sync import Batch, Client, Deployment
from optpipe.client.values import (
    Answer,
    BatchView,
    DeploymentView,
    Event,
    EventKind,
    Failure,
    Improvement,
    Item,
    Job,
    JobState,
    Unasked,
    Version,
    WhatIfs,
)

__all__ = [
    "Answer",
    "AsyncBatch",
    "AsyncClient",
    "AsyncDeployment",
    "Batch",
    "BatchView",
    "BusyError",
    "Client",
    "ConflictError",
    "Deployment",
    "DeploymentView",
    "Event",
    "EventKind",
    "Failure",
    "Improvement",
    "Item",
    "Job",
    "JobState",
    "KeyRefusedError",
    "NoScheduleError",
    "NotFoundError",
    "RequestRefusedError",
    "SolveFailedError",
    "Unasked",
    "Version",
    "WhatIfs",
]
