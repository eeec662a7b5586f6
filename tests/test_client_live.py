"""Both clients against a running service."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from optpipe import Problem, load_schedule
from optpipe.client import (
    AsyncClient,
    Client,
    NoScheduleError,
    NotFoundError,
    RequestRefusedError,
    SolveFailedError,
)
from optpipe.errors import InfeasibleProblemError, InputError
from optpipe.formats.exports import load_csv
from optpipe.measurements import Measurements, Sample
from tests.api.live import make_settings, running, two_stages
from tests.client_script import plain, waited

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    # Leases that outlast a busy machine: nothing here is about lost ones.
    settings = make_settings(tmp_path_factory.mktemp("server"), lease_s=60.0, heartbeat_s=1.0)
    with running(settings) as (url, _):
        yield url


@pytest.fixture(
    params=[
        pytest.param(plain, id="sync"),
        pytest.param(waited, id="async", marks=pytest.mark.extended),
    ]
)
def client(request, url: str) -> Iterator[Any]:
    """Both clients, behind one face.

    At every change the one for plain code, which a tool makes of the other (`test_client_twin`);
    `test_client` says all of both, and `test_tasks_share_a_client` runs the other one here.
    """
    opened = request.param(None, url)
    yield opened
    opened.close()


def small(name: str = "", **changes: Any) -> Problem:
    return Problem.parse(two_stages(name, **changes))


def test_a_job_is_followed_to_its_result(client) -> None:
    job = client.submit(small("improve:2:0.2"), tags=["followed"])
    events = list(client.events(job))
    assert [one.text for one in events if one.kind == "state"] == ["queued", "running", "succeeded"]
    numbers = [one.number for one in events]
    assert numbers == sorted(set(numbers))
    assert list(client.events(job, after=numbers[-2])) == events[-1:]
    other = client.submit(small("improve:2:0.2"))
    *_, last = client.follow(other)
    assert (last.state, last.has_schedule) == ("succeeded", True)
    schedule = client.result(other)
    assert schedule == client.schedule(last) == load_schedule(client.schedule_text(last, "json"))
    assert load_csv(client.schedule_text(last, "csv")) == schedule.programs
    assert client.problem(last) == small("improve:2:0.2")
    assert job.id in [one.id for one in client.jobs(tag="followed", state="succeeded")]
    assert other.id not in [one.id for one in client.jobs(tag="followed")]


def test_the_next_schedule_is_waited_for(client) -> None:
    job = client.submit(small("improve:2:0.3"))
    number, numbers = 0, []
    while (found := client.schedule_if_newer(job, number, wait_s=60)) is not None:
        number = found[0]
        numbers.append(number)
    assert numbers == sorted(set(numbers))
    assert client.job(job).num_schedules == number


def test_what_has_no_schedule_says_why(client) -> None:
    tight = small(devices=[{"memory_bytes": 10}, {"memory_bytes": 10}])
    with pytest.raises(InfeasibleProblemError) as caught:
        client.result(client.submit(tight))
    assert caught.value.needs
    with pytest.raises(NoScheduleError, match="no schedule was found"):
        client.result(client.submit(small("nothing")))
    with pytest.raises(SolveFailedError):
        client.result(client.submit(small("fails")))
    with pytest.raises(NotFoundError):
        client.model(client.submit(small()))
    with pytest.raises(RequestRefusedError, match=r"options\.method"):
        client.submit(small(), method="magic")


def test_a_training_run_begins_reports_and_resumes(client) -> None:
    job = client.submit(small("improve:1:0.1"), tags=["run"])
    run = client.training_run(job, threshold=0.05)
    first = run.schedule(wait_s=30)
    while not client.job(job).is_finished:
        run.next_schedule(wait_s=1)
    while run.next_schedule() is not None:
        pass
    running_schedule = run.schedule()
    assert running_schedule.makespan_ms <= first.makespan_ms
    times = Measurements(source="a test", samples=(Sample(stage=0, action="F", time_ms=10.0),))
    run.report(running_schedule, times, step=7)
    while not client.job(run.comparison_id).is_finished:
        assert run.next_schedule(wait_s=1) is None
    drift = client.drift(run.comparison_id)
    assert (drift.is_solved, drift.threshold, drift.step) == (False, 0.05, 7)
    assert [one.id for one in client.jobs(tag="run")][:2] == [run.comparison_id, job.id]
    resumed = client.training_run(run.comparison_id)
    assert resumed.schedule().programs == running_schedule.programs
    assert resumed.problem == small("improve:1:0.1")


def test_a_sweep_is_a_batch_with_one_table(client) -> None:
    batch = client.sweep(small(), {"memory_scale": [1, 0.001]}, name="how much", tags=["swept"])
    *_, last = batch.follow()
    assert (last.is_finished, last.progress, last.num_items, last.name) == (
        True,
        1.0,
        2,
        "how much",
    )
    assert [(item.values, item.state) for item in last.items] == [
        ({"memory_scale": 1}, "succeeded"),
        ({"memory_scale": 0.001}, "infeasible"),
    ]
    assert [row["state"] for row in batch.table()] == ["succeeded", "infeasible"]
    assert len(batch.table_text("csv").splitlines()) == 3
    assert "points" in batch.frontier("json")
    assert client.batch(batch.id).look() == last
    # The newest first; the tightest is queued before the others.
    assert [one.batch_index for one in client.jobs(batch=batch.id)] == [0, 1]
    assert batch.cancel() == last
    listed = client.sweep([small(), small(num_microbatches=3)])
    *_, last = listed.follow()
    assert last.counts["succeeded"] == 2


def test_a_sweep_that_makes_no_problem_is_refused(client) -> None:
    with pytest.raises(RequestRefusedError, match="memory_scale"):
        client.sweep(small(), {"memory_scale": [1, -1]})
    with pytest.raises(InputError, match="one of both"):
        client.sweep([small()], {"memory_scale": [1]})


def test_an_estimate_is_a_problem_and_its_step(client) -> None:
    estimated = client.estimate(model="llama3-8b", gpu="h100", pp=2, num_microbatches=4)
    assert len(estimated.problem.devices) == 2
    assert estimated.problem.num_microbatches == 4
    assert estimated.step_ms > 0
    with pytest.raises(RequestRefusedError, match="give one of model, config and trace"):
        client.estimate(gpu="h100")


def test_threads_share_a_client(url: str) -> None:
    with Client(url) as shared:
        job = shared.submit(small("improve:3:0.2"))
        heard: list[list[int]] = []
        threads = [
            threading.Thread(
                target=lambda: heard.append([one.number for one in shared.events(job)])
            )
            for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert heard == [[one.number for one in shared.events(job)]] * 20


def test_tasks_share_a_client(url: str) -> None:
    async def check() -> None:
        async with AsyncClient(url) as shared:
            job = await shared.submit(small("improve:3:0.2"))

            async def listen() -> list[int]:
                return [one.number async for one in shared.events(job)]

            given_up = asyncio.create_task(listen())
            whole = await asyncio.gather(*(listen() for _ in range(20)))
            assert whole == [whole[0]] * 20
            long = await shared.submit(small("improve:60:0.1"))
            waiting = asyncio.create_task(shared.result(long))
            await asyncio.sleep(0.3)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await given_up
            await shared.cancel(long)
            assert [one.state async for one in shared.follow(long)][-1] == "cancelled"

    asyncio.run(check())
