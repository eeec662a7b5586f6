"""Hostile requests are refused by a limit, in bounded work and bounded memory."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from optpipe import Problem, check_schedule, load_schedule
from optpipe_api.bodies import MAX_VALUES
from optpipe_solver.milp.horizon.items import MOST_PAIRS, num_order_pairs
from tests.api.live import FAKE, client, two_stages
from tests.api.test_main import ADDRESS, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Yardstick

MIB = 1024**2
LIMIT = 8 * MIB
READER = "--multiprocessing-fork"
TICK_S = 1 / 100
# Times the work of parsing a million zeros, measured at the same moment: over a second of an
# idle core. The worst body takes half of it; what is not limited takes several times as much.
MOST_WORK = 45.0


def whole(problem: dict[str, object]) -> bytes:
    return json.dumps({"problem": problem}).encode()


def with_parts(devices: bytes = b"", stages: bytes = b"", links: bytes = b"") -> bytes:
    """A problem whose lists are these bytes, whatever they say."""
    lists = b'"devices": [%s], "stages": [%s], "links": [%s]' % (devices, stages, links)
    return b'{"problem": {"num_microbatches": 1, %s}}' % lists


def many(item: bytes, count: int) -> bytes:
    return b",".join([item] * count)


def full(head: bytes, item: bytes, tail: bytes = b"") -> bytes:
    """A body of as many bytes as may be."""
    return head + item * ((LIMIT - len(head) - len(tail)) // len(item)) + tail


STAGE = json.dumps(two_stages()["stages"][0]).encode()
OBJECTS = MAX_VALUES // 5 - 10
VALUES = MAX_VALUES - 10

# What is refused, and by which status: bodies as large as may be, and bodies that hold nearly as
# many things as may be, of which each is a fault of its own.
HOSTILE = {
    "deep lists": (full(b'{"problem": ', b"["), 413),
    "deep lists, not too many": (b'{"problem": ' + b"[" * OBJECTS, 422),
    "deep objects, not too many": (b'{"problem": ' + b'{"a":' * OBJECTS, 422),
    "empty objects": (full(b'{"problem": {"stages": [', b"{},", b"{}]}}"), 413),
    "empty objects, not too many": (with_parts(stages=many(b"{}", OBJECTS)), 422),
    "zeros, not too many": (with_parts(stages=many(b"0", VALUES)), 422),
    "keys": (b'{"problem": {%s}}' % b",".join(b'"%x":0' % i for i in range(VALUES)), 422),
    "a long name": (full(b'{"problem": {"name": "', b"a", b'"}}'), 422),
    "a name of escapes": (full(b'{"problem": {"name": "', b"\\u0000", b'"}}'), 422),
    "a long number": (full(b'{"problem": {"num_microbatches": ', b"1", b"}}"), 422),
    "links": (
        with_parts(many(b'{"memory_bytes":1}', 2), STAGE, many(b'{"from":0,"to":1}', OBJECTS - 9)),
        422,
    ),
    "Infinity": (b'{"problem": {"num_microbatches": -Infinity}}', 422),
    "a number without end": (b'{"problem": {"num_microbatches": 1e999}}', 422),
    "a time without end": (
        with_parts(b'{"memory_bytes":1}', STAGE.replace(b"10", b"1e999", 1)),
        422,
    ),
    "micro-batches": (whole(two_stages(num_microbatches=10**9)), 422),
    "cells": (whole(two_stages(num_microbatches=400_000)), 422),
    "one byte more": (b" " * (LIMIT + 1), 413),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """Run a server with its own limits, in a process of its own; its reader has begun."""
    server = Server(tmp_path_factory.mktemp("hostile"), solve_path=FAKE)
    with client(address(server)) as http:
        post(http, with_parts(b'{"memory_bytes":4000}', many(STAGE, 4000)))
    yield server
    server.end(signal.SIGTERM)


def address(server: Server) -> str:
    found = ADDRESS.search(server.log.read_text("utf-8"))
    assert found is not None
    return found[0]


def post(http: httpx.Client, body: bytes) -> httpx.Response:
    return http.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})


def readers(server: Server) -> list[int]:
    """The processes that read large bodies for it."""
    return [
        pid
        for pid in server.children()
        if READER in Path(f"/proc/{pid}/cmdline").read_text("utf-8")
    ]


def cpu_s(server: Server) -> float:
    """Seconds of processor time of the server and its readers."""
    total = 0
    for pid in (server.process.pid, *readers(server)):
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * TICK_S


def watched(
    server: Server, yardstick: Yardstick, ask: Callable[[], httpx.Response]
) -> tuple[httpx.Response, float]:
    """An answer, and the server's work for it, by the yardstick."""
    answers: list[httpx.Response] = []

    def spend_s() -> float:
        before_s = cpu_s(server)
        answers.append(ask())
        return cpu_s(server) - before_s

    work = yardstick.times(spend_s)
    return answers[0], work


def peak_mib(pid: int) -> float:
    """The most memory that a process has held."""
    text = Path(f"/proc/{pid}/status").read_text("utf-8")
    line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


AGAIN = ("a long name", "deep lists", "empty objects", "empty objects, not too many",
         "micro-batches", "deep lists, not too many")  # fmt: skip
"""Bodies like another one, which are sent in `make test-long` alone."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.extended] if one in AGAIN else []) for one in HOSTILE],
)
def test_hostile_bodies_are_refused_in_bounded_work_and_memory(
    server: Server, name: str, yardstick: Yardstick
) -> None:
    """As a problem detail; the server stays small, and so does whoever reads for it."""
    body, status = HOSTILE[name]
    before_mib = peak_mib(server.process.pid)
    with client(address(server)) as http:
        answer, work = watched(server, yardstick, lambda: post(http, body))
    assert (answer.status_code, answer.headers["content-type"]) == (
        status,
        "application/problem+json",
    )
    assert len(answer.content) < 20_000
    assert work < MOST_WORK
    assert peak_mib(server.process.pid) - before_mib < 60
    assert all(peak_mib(pid) < 400 for pid in readers(server))


def test_the_service_goes_on_while_and_after_it_is_attacked(server: Server) -> None:
    """Its sign of life answers beside four bodies that are as heavy as may be; then a job runs."""
    body, _ = HOSTILE["zeros, not too many"]

    def attack() -> set[int]:
        with client(address(server)) as http:
            return {post(http, body).status_code}

    num_asked = 0
    with (
        client(address(server)) as http,
        ThreadPoolExecutor(4) as attackers,
    ):
        attacks = [attackers.submit(attack) for _ in range(4)]
        while not all(work.done() for work in attacks):
            assert http.get("/healthz").status_code == 200
            num_asked += 1
            time.sleep(0.02)
        job = http.post("/v1/jobs", params={"wait": 60}, json={"problem": two_stages()}).json()
    assert all(work.result() <= {422, 429} for work in attacks)
    assert num_asked > 3
    assert job["state"] == "succeeded"


def test_no_model_of_a_hundred_million_binaries_is_built() -> None:
    """What it would need is counted by a formula, and is beyond what the solver builds."""
    problem = Problem.parse(two_stages(num_microbatches=10_000))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    assert num_order_pairs(problem, fifo=True) >= 10**8 > MOST_PAIRS
    assert time.process_time() - began < 3  # to count a hundred million takes longer
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 10 * 1024


@pytest.mark.extended
def test_a_problem_of_a_hundred_million_binaries_is_solved_without_them(
    tmp_path, yardstick: Yardstick
) -> None:
    """Taken in a moment and solved, optimally, in two GiB of address space: it is no model there.

    The binaries alone would take some fifty.
    """
    data = two_stages(num_microbatches=10_000)
    assert num_order_pairs(Problem.parse(data), fifo=True) >= 10**8
    server = Server(tmp_path, solver_memory_bytes=2 * 1024**3)
    try:
        with client(address(server)) as http:
            http.get("/v1/methods")  # loads the solver, which takes a second on a busy machine
            order = {"problem": data, "options": {"time_limit_s": 600}}
            job, work = watched(server, yardstick, lambda: http.post("/v1/jobs", json=order))
            assert job.status_code == 202
            assert work < MOST_WORK
            while (ended := http.get(job.headers["location"]).json())["finished_at"] is None:
                time.sleep(0.1)
            schedule = load_schedule(http.get(f"{job.headers['location']}/schedule").text)
        assert (ended["state"], ended["error"]) == ("succeeded", None)
        check_schedule(Problem.parse(data), schedule)
        assert schedule.status == "optimal"
        assert peak_mib(server.process.pid) < 400
    finally:
        server.end(signal.SIGTERM)


def test_a_problem_of_64_stages_and_512_micro_batches_is_taken(server: Server) -> None:
    """Seventy million pairs, and a real one: a limit on pairs would be one on real problems."""
    stage = two_stages(num_microbatches=512)["stages"][0]
    problem = {
        "num_microbatches": 512,
        "devices": [{"memory_bytes": 10**6}] * 64,
        "stages": [{**stage, "device": device} for device in range(64)],
    }
    assert num_order_pairs(Problem.parse(problem), fifo=True) > 5 * 10**7
    with client(address(server)) as http:
        answer = post(http, whole(problem))
        assert answer.status_code == 202
        http.post(answer.headers["location"] + "/cancel")


LIMITED = """
import json, resource
from optpipe_api.engine.processes import limit_cpu, limit_process
limit_process(2**30)
limit_cpu({"threads": 2, "time_limit_s": 10.0}, 5.0)
names = ("AS", "CORE", "CPU", "NOFILE")
print(json.dumps({name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names}))
"""


def test_a_solver_process_limits_itself() -> None:
    """Memory, core files, open files; processor time as its threads may take until the end."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, check=True)
    limits = json.loads(done.stdout)
    assert limits["AS"] == [2**30] * 2
    assert limits["CORE"] == [0, 0]
    assert limits["NOFILE"][0] <= 256
    assert 30 <= limits["CPU"][0] <= 35


@pytest.mark.extended
def test_a_solver_process_that_takes_too_much_time_is_ended_by_the_system() -> None:
    """Even where nobody watches it."""
    code = (
        "from optpipe_api.engine.processes import limit_cpu\n"
        "limit_cpu({'threads': 1, 'time_limit_s': 0.1}, 0.1)\n"
        "while True: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=200)
    assert done.returncode == -signal.SIGXCPU
