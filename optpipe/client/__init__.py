"""HTTP clients of the service: submit a problem, follow its job, fetch its schedule.

::

    with Client("http://planner:8000") as client:
        job = client.submit(problem, time_limit_s=60)
        for job in client.follow(job):
            print(job.state, job.objective_ms, job.gap)
        schedule = client.result(job)

    async with AsyncClient("http://planner:8000") as client:
        schedule = await client.result(await client.submit(problem, time_limit_s=60))

    batch = client.sweep(problem, {"memory_scale": [1, 0.75, 0.5]})
    batch = client.what_if(job)
    run = client.training_run(job)

    tuned = client.tune(model="llama3-70b", gpu="h100", num_gpus=64, current={"tp": 8, "pp": 4})

If the service is unreachable or overloaded, the client retries with growing delays. It never
repeats a call that the service may have performed and must not perform twice. Each submission has
a key, and the service creates only one job for a key. A refused call raises an error of
`optpipe.client.transport`. The types of the answers are in `optpipe.answers`.
"""

from optpipe.answers import (
    BatchView,
    Cache,
    Drift,
    Event,
    EventKind,
    Failure,
    Improvement,
    Item,
    Job,
    JobOptions,
    JobState,
    MethodRow,
    Tuned,
    TunedRow,
)
from optpipe.client.arguments import (
    CurrentDegrees,
    SearchArguments,
    SolveArguments,
    SubmitArguments,
    TuneArguments,
)
from optpipe.client.async_client import AsyncBatch, AsyncClient, AsyncTrainingRun
from optpipe.client.client import Batch, Client, TrainingRun
from optpipe.client.transport import (
    BusyError,
    ConflictError,
    KeyRefusedError,
    NoScheduleError,
    NotFoundError,
    RequestRefusedError,
    SolveFailedError,
)
from optpipe.requests import JobKind

__all__ = [
    "AsyncBatch",
    "AsyncClient",
    "AsyncTrainingRun",
    "Batch",
    "BatchView",
    "BusyError",
    "Cache",
    "Client",
    "ConflictError",
    "CurrentDegrees",
    "Drift",
    "Event",
    "EventKind",
    "Failure",
    "Improvement",
    "Item",
    "Job",
    "JobKind",
    "JobOptions",
    "JobState",
    "KeyRefusedError",
    "MethodRow",
    "NoScheduleError",
    "NotFoundError",
    "RequestRefusedError",
    "SearchArguments",
    "SolveArguments",
    "SolveFailedError",
    "SubmitArguments",
    "TrainingRun",
    "TuneArguments",
    "Tuned",
    "TunedRow",
]
