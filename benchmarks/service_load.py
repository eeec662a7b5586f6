"""What the service bears while it solves: fetches, submissions, followers; beside a bare route.

``python -m benchmarks.service_load [--seconds S] [--clients N] [--followers N] [--small]``

Two real solves run all the time. Client processes ask, each over a few connections at once:

* for the best schedule of a finished job: all of it, and with the ETag of the newest (304);
* to take in the problem of that job, which the cache answers, and new problems.

In turns with each kind the same clients ask a bare FastAPI application in the same kind of process
for the same bytes. Both meet the same machine, and what a request costs the client is in both.

Then followers listen to the events of one job, and one more client
goes on asking beside them. Printed are requests per second and latencies, and for the followers
whether each had every event exactly once, and how late. The aim: with 200 followers the 99th
percentile of everything is below 250 ms. With ``--sweep`` one slot solves 500 short jobs, and the
gaps between the end of one and the start of the next are printed. Rows are added to
``benchmarks/results/service_load.csv``. `benchmarks.hostile_clients` measures what a normal client
notices of hostile ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import count, pairwise
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.ledger import load_problem, stamp, write_rows
from optpipe import Problem
from optpipe import load_problem as parse_problem
from optpipe.client import AsyncClient, Client
from tests.api.live import two_stages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.client import Job

__all__ = ["Load", "LoadRow", "main", "quantile", "scripted", "serving", "solve_one"]

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "service_load.csv"
# Neither is proven optimal within minutes.
SOLVED = ("offload-1.0-p8-m16-2.0a", "recompute-p8-m16-2.0a")
FETCHED = ROOT.parent / "examples" / "problems" / "llama3-8b-h100-pp4.json"
ROUNDS = 3
_GATHER_S = 3.0
PLACE = "987654321"
_MANY = 10_000_000
JOB_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is asked: seconds for each kind of request, processes, connections of each."""

    seconds: float
    clients: int
    connections: int
    followers: int
    events: int
    sweep: int = 500


FULL = Load(seconds=15.0, clients=3, connections=8, followers=200, events=20)
SMALL = Load(seconds=0.6, clients=1, connections=2, followers=4, events=3, sweep=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """One line of the table; latencies in ms, ``rate`` per second."""

    what: str
    server: str
    count: int
    failed: int
    rate: float
    p50_ms: float
    p99_ms: float
    worst_ms: float
    stamp: str = ""


@contextmanager
def serving(
    wanted: dict[str, Any],
    folder: Path,
    *,
    checkout: Path = ROOT.parent,
    num_files: int | None = None,
) -> Iterator[str]:
    """Run a server process of a checkout (see `benchmarks.service_load_server`); yield its URL.

    ``num_files`` limits the open files of the process, from which follows its limit of connections.
    """
    path = os.pathsep.join([str(checkout), str(checkout / "api"), *sys.path])
    command = [sys.executable, "-m", "benchmarks.service_load_server", json.dumps(wanted)]
    with (
        (folder / f"{wanted['kind']}.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=log,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        ) as process,
    ):
        if num_files is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_files, hard))
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server ended with {process.wait()}")
            yield json.loads(line)["url"]
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(frozen=True, slots=True)
class Requests:
    """What one client process does: a request again and again; picklable."""

    url: str
    load: Load
    path: str
    headers: dict[str, str]
    status: int
    # To post, with another number for `PLACE` each time: no problem is a copy of another.
    body: str = ""
    first: int = 0


def hammer(requests: Requests) -> tuple[list[float], int]:
    """Return the latencies in ms of what one process asked, and how many answers were wrong."""
    return asyncio.run(_hammer(requests))


async def _hammer(requests: Requests) -> tuple[list[float], int]:
    latencies: list[float] = []
    failed = 0
    numbers = count(requests.first)
    until = time.perf_counter() + requests.load.seconds / ROUNDS

    async def go_on(http: httpx.AsyncClient) -> None:
        nonlocal failed
        while (began := time.perf_counter()) < until:
            answer = await http.send(_request(http, requests, next(numbers)))
            latencies.append(1000 * (time.perf_counter() - began))
            failed += answer.status_code != requests.status

    async with httpx.AsyncClient(base_url=requests.url, timeout=60, trust_env=False) as http:
        await asyncio.gather(*(go_on(http) for _ in range(requests.load.connections)))
    return latencies, failed


def _request(http: httpx.AsyncClient, requests: Requests, number: int) -> httpx.Request:
    if not requests.body:
        return http.build_request("GET", requests.path, headers=requests.headers)
    kind = {"Content-Type": "application/json"}
    content = requests.body.replace(PLACE, str(number))
    return http.build_request(
        "POST", requests.path, headers=requests.headers | kind, content=content
    )


def listen(url: str, job_id: str, number: int) -> list[list[tuple[int, float]]]:
    """Follow a job so many times in one process; of each event: number, delay in ms."""
    return asyncio.run(_listen(url, job_id, number))


async def _listen(url: str, job_id: str, number: int) -> list[list[tuple[int, float]]]:
    async with AsyncClient(url, timeout_s=60) as client:

        async def one() -> list[tuple[int, float]]:
            began = time.time()
            heard = []
            async for event in client.events(job_id):
                at = event.at.timestamp()
                # What happened before is history: it is not late.
                heard.append((event.number, 1000 * (time.time() - at) if at > began else 0.0))
            return heard

        return await asyncio.gather(*(one() for _ in range(number)))


def main(arguments: Sequence[str] | None = None) -> list[LoadRow]:
    """Measure, print the table, add it to the CSV; return the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few requests, to see that it runs")
    parser.add_argument("--seconds", type=float, help="for each kind of request")
    parser.add_argument("--clients", type=int, help="client processes")
    parser.add_argument("--followers", type=int)
    parser.add_argument("--sweep", action="store_true", help="the gaps between jobs, only")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    load = SMALL if options.small else FULL
    given = {"seconds": options.seconds, "clients": options.clients, "followers": options.followers}
    load = replace(load, **{name: value for name, value in given.items() if value is not None})
    measured = gaps(load) if options.sweep else measure(load)
    rows = [replace(row, stamp=stamp()) for row in measured]
    print(table(rows))
    write_rows(rows, options.out)
    return rows


def measure(load: Load) -> list[LoadRow]:
    """Start the servers, load them, and return the rows."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        service = stack.enter_context(
            serving({"kind": "service", "settings": _settings(folder)}, folder)
        )
        spawn = multiprocessing.get_context("spawn")
        pool = stack.enter_context(ProcessPoolExecutor(load.clients + 1, mp_context=spawn))
        client = stack.enter_context(Client(service))
        fetched = solve_one(client)
        (folder / "schedule.json").write_text(client.schedule_text(fetched, "json"), "utf-8")
        (folder / "job.json").write_text(fetched.model_dump_json(), "utf-8")
        bare = stack.enter_context(serving({"kind": "bare", "folder": str(folder)}, folder))
        busy = [client.submit(load_problem(name), time_limit_s=3000) for name in SOLVED]
        # So that what is submitted waits instead of being solved beside them.
        sleeper = client.submit(scripted("improve:1:3000", 2), time_limit_s=3000)
        while not all(client.job(job).has_schedule for job in (*busy, sleeper)):
            time.sleep(0.1)
        servers = {"service": service, "bare route": bare}
        path = f"/v1/jobs/{fetched.id}/schedule"
        rows = _requests(load, servers, pool, fetched, path)
        rows += _followers(load, service, client, pool, sleeper=sleeper, path=path)
        lasted = {client.job(job).state for job in busy}
        if lasted != {"running"}:
            raise RuntimeError(f"the solves beside the requests did not last: {lasted}")
        for job in busy:
            client.cancel(job)
    return rows


def gaps(load: Load) -> list[LoadRow]:
    """Return a row about the gaps between the jobs of a sweep, solved in one slot."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = {**_settings(folder), "solver_processes": 1, "cache": False}
        url = stack.enter_context(serving({"kind": "service", "settings": settings}, folder))
        client = stack.enter_context(Client(url))
        problems = [scripted(f"improve:0:{JOB_S}", 2) for _ in range(load.sweep)]
        began = time.perf_counter()
        *_, batch = client.sweep(problems).follow()
        seconds = time.perf_counter() - began
    items = sorted(batch.items or (), key=lambda item: item.started_at or batch.created_at)
    took = [
        1000 * (after.started_at - before.finished_at).total_seconds()
        for before, after in pairwise(items)
        if after.started_at is not None and before.finished_at is not None
    ]
    failed = sum(item.state != "succeeded" for item in items)
    what = f"gap between the jobs of a {len(items)}-item sweep"
    return [_row(what, "service", took, failed, seconds)]


def _settings(folder: Path) -> dict[str, Any]:
    """Two slots for the solves and one for the job that is followed; submissions wait."""
    return {
        "database_url": f"sqlite:///{folder}/jobs.db",
        "solve_path": "benchmarks.service_load_server:solve",
        "solver_processes": 3,
        "max_threads": 1,
        "max_queued_jobs": 1_000_000,
        "max_jobs_per_key": 1_000_000,
    }


def _requests(
    load: Load, servers: dict[str, str], pool: ProcessPoolExecutor, job: Job, path: str
) -> list[LoadRow]:
    """Measure every kind of request on both servers, in turns."""
    get = Requests("", load, path, {}, 200)
    known = replace(get, headers={"If-None-Match": f'"{job.id}.{job.num_schedules}"'}, status=304)
    post = Requests("", load, "/v1/jobs", {}, 202, body=_submission())
    solved = f'{{"problem": {_solved().model_dump_json(by_alias=True)}}}'
    hit = replace(post, body=solved, status=200)
    kinds: list[tuple[str, Requests, tuple[str, ...]]] = [
        ("fetch a schedule", get, ("service", "bare route")),
        ("fetch it if newer", known, ("service",)),
        ("submit a solved problem", hit, ("service",)),
        ("submit a problem", post, ("service", "bare route")),
    ]
    return [
        row
        for what, requests, names in kinds
        for row in _turns(what, requests, names, servers, pool)
    ]


def _turns(
    what: str,
    requests: Requests,
    names: tuple[str, ...],
    servers: dict[str, str],
    pool: ProcessPoolExecutor,
) -> list[LoadRow]:
    """Ask the servers in turns; return a row each."""
    latencies: dict[str, list[float]] = {name: [] for name in names}
    failed = dict.fromkeys(names, 0)
    firsts = count(_MANY, _MANY)
    for name in names * ROUNDS:
        here = [
            replace(requests, url=servers[name], first=next(firsts))
            for _ in range(requests.load.clients)
        ]
        for took, wrong in pool.map(hammer, here):
            latencies[name] += took
            failed[name] += wrong
    return [
        _row(what, name, latencies[name], failed[name], requests.load.seconds) for name in names
    ]


def _followers(
    load: Load, service: str, client: Client, pool: ProcessPoolExecutor, *, sleeper: Job, path: str
) -> list[LoadRow]:
    """Let many follow one job, and one more client ask for a path beside them.

    Of the followers ``failed`` counts those that did not hear every event once.
    """
    job = client.submit(scripted(f"improve:{load.events}:0.25", load.events + 1), priority=100)
    share = [len(range(at, load.followers, load.clients)) for at in range(load.clients)]
    listening = [pool.submit(listen, service, job.id, number) for number in share]
    time.sleep(_GATHER_S)
    began = time.perf_counter()
    asking = pool.submit(hammer, Requests(service, replace(load, connections=2), path, {}, 200))
    client.cancel(sleeper)
    heard = [one for part in listening for one in part.result()]
    seconds = time.perf_counter() - began
    whole = [event.number for event in client.events(job)]
    failed = sum([number for number, _ in one] != whole for one in heard)
    delays = [delay for one in heard for _, delay in one if delay > 0]
    latencies, wrong = asking.result()
    followers = f"{len(heard)} followers"
    beside = f"fetch a schedule beside {followers}"
    return [
        _row(f"{followers}, {len(whole)} events", "service", delays, failed, seconds),
        _row(beside, "service", latencies, wrong, load.seconds / ROUNDS),
    ]


def _row(what: str, server: str, latencies: list[float], failed: int, seconds: float) -> LoadRow:
    ordered = sorted(latencies)
    return LoadRow(
        what=what,
        server=server,
        count=len(ordered),
        failed=failed,
        rate=round(len(ordered) / seconds, 1),
        p50_ms=quantile(ordered, 0.5),
        p99_ms=quantile(ordered, 0.99),
        worst_ms=quantile(ordered, 1.0),
    )


def quantile(ordered: list[float], share: float) -> float:
    """Return the smallest of the sorted numbers that a share of them does not exceed."""
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 2) if ordered else 0.0


def solve_one(client: Client) -> Job:
    """Return a finished job whose schedule is as large as a real one."""
    *_, job = client.follow(client.submit(_solved()))
    return job


def _solved() -> Problem:
    return parse_problem(FETCHED.read_text("utf-8")).model_copy(update={"name": "improve:0:0"})


def scripted(name: str, num_microbatches: int) -> Problem:
    """Return a problem whose name is a script; of another size it is no other one's copy."""
    return Problem.parse(two_stages(name, num_microbatches=num_microbatches))


def _submission() -> str:
    """A body whose problem no other job is near to: it has a shape of its own."""
    problem = json.loads(FETCHED.read_text("utf-8"))
    problem["num_microbatches"] += 1
    problem["stages"][0]["forward_ms"] = int(PLACE)
    return json.dumps({"problem": problem})


def table(rows: list[LoadRow]) -> str:
    names = [field.name for field in fields(LoadRow) if field.name != "stamp"]
    lines = [f"| {' | '.join(names)} |", "|---|---|" + "--:|" * (len(names) - 2)]
    lines += [f"| {' | '.join(str(getattr(row, name)) for name in names)} |" for row in rows]
    return "\n".join([rows[0].stamp, "", *lines])


if __name__ == "__main__":
    main()
