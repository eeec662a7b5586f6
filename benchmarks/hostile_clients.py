"""Measure what one normal client notices of each kind of hostile client.

``python -m benchmarks.hostile_clients [--seconds S] [--only KIND] [--base FOLDER] [--small]``

The benchmark starts the service on loopback. A normal client repeats three requests: submit a
small job, fetch a schedule, get ``/healthz``. For each kind of hostile client, the normal client
runs alone for S seconds, then next to the hostile clients for S seconds. The hostile clients run in
a process of their own and end by themselves. The table has one row per kind:

* the p50 and p99 of the normal client's latencies, alone and next to the hostile clients;
* ``ratio``: the p99 next to the hostile clients, divided by the p99 alone; the aim is at most 3;
* ``failed``: the normal client's requests that had another answer than they should, or none;
* ``rate``: requests per second of sixteen connections, without hostile clients.

``--base FOLDER`` measures a second checkout in the same run, in turns; ``rate`` should be at least
80% of the rate of that checkout. Rows are added to ``benchmarks/results/hostile_clients.csv``.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import select
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.ledger import stamp, write_rows
from benchmarks.service_load import quantile, scripted, serving, solve_one
from optpipe.client import Client
from optpipe_api.main import raise_file_limit
from tests.api.live import two_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.synchronize import Event

__all__ = ["HOSTILE", "HostileRow", "Target", "main"]

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "hostile_clients.csv"
_MIB = 1024**2
_NUM_FILES = 2000
"""Open files of ``optpipe serve`` with its default settings, in a shell that allows 1024."""

_PAUSE_S = 0.01
_REOPEN_S = 3.0
_TIMEOUT_S = 30.0
_ROUNDS = 3
_RECOVERY_S = 300.0
_QUICK_MS = 1000.0
_CONNECTIONS = 16
_HOST = b" HTTP/1.1\r\nHost: localhost\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The service that hostile clients attack: where it is, for how long, and with how much."""

    port: int
    fetch_path: str
    batch_path: str
    seconds: float
    scale: float = 1.0
    """Share of the full number of bytes or connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileRow:
    """One line of the table; latencies in ms, ``rate`` in requests per second."""

    kind: str
    server: str
    count: int
    failed: int
    p50_alone_ms: float
    p99_alone_ms: float
    p50_ms: float
    p99_ms: float
    ratio: float
    rate: float
    stamp: str = ""


# --- The hostile clients: each runs until its seconds are over.


def send_huge_header(target: Target) -> None:
    """Send one header of 80 MiB, again and again on a new connection."""
    _send_large(target, b"GET /healthz" + _HOST + b"X-Large: ", b"a" * _MIB, 80)


def send_small_headers(target: Target) -> None:
    """Send 128 MiB of headers of six bytes each, again and again on a new connection."""
    _send_large(target, b"GET /healthz" + _HOST, b"a: b\r\n" * (_MIB // 6), 128)


def send_chunked_trailer(target: Target) -> None:
    """Send a chunked body that ends in a trailer of 128 MiB, again and again."""
    head = b"POST /v1/jobs" + _HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    _send_large(target, head + b"2\r\n{}\r\n0\r\nX-Large: ", b"a" * _MIB, 128)


def send_small_chunks(target: Target) -> None:
    """Send a body of 16 MiB in chunks of one byte, again and again on a new connection."""
    head = b"POST /v1/jobs" + _HOST + b"Content-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    _send_large(target, head, b"1\r\n \r\n" * (_MIB // 6), 16)


def keep_answers_unread(target: Target) -> None:
    """Hold 1,760 connections of 80 pipelined requests each, and read no answer."""
    _hold_unread(target, 80)


def keep_few_answers_unread(target: Target) -> None:
    """Hold 1,760 connections of 8 pipelined requests each, and read no answer."""
    _hold_unread(target, 8)


def repeat_openapi(target: Target) -> None:
    """Repeat a fetch of the OpenAPI document on 16 connections."""
    asyncio.run(_repeat_on_all(target, "/openapi.json", 16))


def wait_for_batch(target: Target) -> None:
    """Wait for the end of a batch with 900 clients."""
    asyncio.run(_repeat_on_all(target, f"{target.batch_path}?wait=60", 900))


HOSTILE: dict[str, Callable[[Target], None]] = {
    "one huge header": send_huge_header,
    "many small headers": send_small_headers,
    "chunked trailer": send_chunked_trailer,
    "chunks of one byte": send_small_chunks,
    "unread pipelined answers": keep_answers_unread,
    "unread answers, 8 per connection": keep_few_answers_unread,
    "OpenAPI document, 16 connections": repeat_openapi,
    "900 clients wait for a batch": wait_for_batch,
}


def _send_large(target: Target, head: bytes, part: bytes, num_parts: int) -> None:
    until = time.monotonic() + target.seconds
    while (left := until - time.monotonic()) > 0:
        with suppress(OSError), socket.create_connection(("127.0.0.1", target.port), left) as large:
            large.sendall(head)
            for _ in range(max(1, int(num_parts * target.scale))):
                large.settimeout(max(0.1, until - time.monotonic()))
                large.sendall(part)
            large.recv(4096)
        time.sleep(0.1)


async def _repeat_on_all(target: Target, path: str, full_number: int) -> None:
    """Repeat a request after each answer, on many connections at the same time."""
    number = max(1, int(full_number * target.scale))
    raise_file_limit(number)
    text = b"GET " + path.encode() + _HOST + b"\r\n"

    async def repeat() -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
                while True:
                    writer.write(text)
                    head = await reader.readuntil(b"\r\n\r\n")
                    _, _, rest = head.lower().partition(b"content-length: ")
                    await reader.readexactly(int(rest.partition(b"\r\n")[0]))
            await asyncio.sleep(0.1)

    with suppress(TimeoutError):
        async with asyncio.timeout(target.seconds):
            await asyncio.gather(*(repeat() for _ in range(number)))


def _hold_unread(target: Target, num_requests: int) -> None:
    number = max(1, int(1760 * target.scale))
    raise_file_limit(number)
    text = (b"GET " + target.fetch_path.encode() + _HOST + b"\r\n") * num_requests
    until = time.monotonic() + target.seconds
    unread_connections: list[socket.socket] = []
    while time.monotonic() < until:
        while len(unread_connections) < number and time.monotonic() < until:
            unread = socket.socket()
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.settimeout(1.0)
            with suppress(OSError):
                unread.connect(("127.0.0.1", target.port))
                unread.sendall(text)
            unread_connections.append(unread)
        time.sleep(max(0.0, min(_REOPEN_S, until - time.monotonic())))
        for unread in _ended(unread_connections):
            unread_connections.remove(unread)
            unread.close()
    for unread in unread_connections:
        unread.close()


def _ended(unread_connections: list[socket.socket]) -> list[socket.socket]:
    """Return the connections that the server has closed."""
    poll = select.poll()
    for unread in unread_connections:
        poll.register(unread, select.POLLHUP | select.POLLERR | select.POLLRDHUP)
    numbers = {number for number, _ in poll.poll(0)}
    return [unread for unread in unread_connections if unread.fileno() in numbers]


# --- The normal client


def repeat_requests(here: Target, seconds: float) -> tuple[list[float], int]:
    """Repeat a normal client's three requests; return latencies in ms and the number of faults."""
    kind = {"Content-Type": "application/json"}
    latencies: list[float] = []
    failed = 0
    until = time.perf_counter() + seconds
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=_TIMEOUT_S)
    while time.perf_counter() < until:
        problem = two_stages("improve:0:0")
        # No two problems are equal: the service would answer the second one from its cache.
        problem["stages"][0]["forward_ms"] = time.monotonic()
        body = json.dumps({"problem": problem})
        for method, path, sent, status in (
            ("POST", "/v1/jobs", body, 202),
            ("GET", here.fetch_path, None, 200),
            ("GET", "/healthz", None, 200),
        ):
            began = time.perf_counter()
            try:
                connection.request(method, path, sent, kind)
                answer = connection.getresponse()
                answer.read()
                failed += answer.status != status
            except (OSError, http.client.HTTPException):
                failed += 1
                connection.close()
            latencies.append(1000 * (time.perf_counter() - began))
        time.sleep(_PAUSE_S)
    connection.close()
    return sorted(latencies), failed


async def count_answers(port: int, fetch_path: str, seconds: float) -> int:
    """Return how many requests sixteen connections had answered."""
    texts = [b"GET " + path.encode() + _HOST + b"\r\n" for path in ("/healthz", fetch_path)]
    until = time.perf_counter() + seconds

    async def repeat() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        number = 0
        while time.perf_counter() < until:
            writer.write(texts[number % 2])
            head = await reader.readuntil(b"\r\n\r\n")
            _, _, rest = head.lower().partition(b"content-length: ")
            await reader.readexactly(int(rest.partition(b"\r\n")[0]))
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the service answered {head!r}")
            number += 1
        writer.close()
        return number

    return sum(await asyncio.gather(*(repeat() for _ in range(_CONNECTIONS))))


# --- The measurement


def measure(kinds: Sequence[str], target: Target, checkouts: dict[str, Path]) -> list[HostileRow]:
    """Return a row for each kind of hostile client and each checkout."""
    with ExitStack() as stack:
        targets = {
            name: _start_service(stack, target, checkout) for name, checkout in checkouts.items()
        }
        rates = _measure_rates(targets, target.seconds)
        rows = []
        for kind in kinds:
            for name, here in targets.items():
                rows.append(replace(_measure_kind(kind, here), server=name, rate=rates[name]))
                print(rows[-1], flush=True)
        return rows


def _measure_rates(targets: dict[str, Target], seconds: float) -> dict[str, float]:
    """Return the requests per second of every service, measured in turns."""
    answered = dict.fromkeys(targets, 0)
    for _ in range(_ROUNDS):
        for name, here in targets.items():
            counting = count_answers(here.port, here.fetch_path, seconds / _ROUNDS)
            answered[name] += asyncio.run(counting)
    return {name: round(number / seconds, 1) for name, number in answered.items()}


def _measure_kind(kind: str, here: Target) -> HostileRow:
    _wait_until_quick(here)
    alone, failed_alone = repeat_requests(here, here.seconds)
    if failed_alone:
        raise RuntimeError(f"{failed_alone} requests of the normal client failed alone")
    spawn = multiprocessing.get_context("spawn")
    has_begun = spawn.Event()
    attack = spawn.Process(target=_attack, args=(kind, here, has_begun))
    attack.start()
    # The imports of the new process take processor time from the normal client.
    has_begun.wait(_RECOVERY_S)
    time.sleep(min(1.0, here.seconds / 4))
    next_to_hostile, failed = repeat_requests(here, here.seconds)
    attack.join()
    p99_alone, p99 = quantile(alone, 0.99), quantile(next_to_hostile, 0.99)
    return HostileRow(
        kind=kind,
        server="",
        count=len(next_to_hostile),
        failed=failed,
        p50_alone_ms=quantile(alone, 0.5),
        p99_alone_ms=p99_alone,
        p50_ms=quantile(next_to_hostile, 0.5),
        p99_ms=p99,
        ratio=round(p99 / p99_alone, 2),
        rate=0.0,
    )


def _wait_until_quick(here: Target) -> None:
    """Wait, for at most five minutes, until the effects of earlier hostile clients are over."""
    until = time.monotonic() + _RECOVERY_S
    while time.monotonic() < until:
        latencies, failed = repeat_requests(here, 1.0)
        if not failed and latencies[-1] < _QUICK_MS:
            return
    raise RuntimeError(f"the service did not recover within {_RECOVERY_S} s; start it again")


def _attack(kind: str, target: Target, has_begun: Event) -> None:
    """Run the hostile clients of a kind a little longer than the normal client runs."""
    has_begun.set()
    HOSTILE[kind](replace(target, seconds=1.5 * target.seconds))


def _start_service(stack: ExitStack, target: Target, checkout: Path) -> Target:
    """Start a server that has one finished job, and whose only solver process is busy."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    settings: dict[str, Any] = {
        "database_url": f"sqlite:///{folder}/jobs.db",
        "solve_path": "benchmarks.service_load_server:solve",
        "solver_processes": 1,
        "max_queued_jobs": 1_000_000,
        "max_jobs_per_key": 1_000_000,
    }
    wanted = {"kind": "service", "settings": settings}
    url = stack.enter_context(serving(wanted, folder, checkout=checkout, num_files=_NUM_FILES))
    with Client(url) as client:
        job = solve_one(client)
        client.submit(scripted("improve:1:3000", 2), time_limit_s=3000)
        # The only solver process is busy, so the jobs of the batch wait.
        batch = client.sweep([scripted("improve:0:0", 2 + number) for number in range(20)])
    port = urlsplit(url).port
    assert port is not None
    return replace(
        target,
        port=port,
        fetch_path=f"/v1/jobs/{job.id}/schedule",
        batch_path=f"/v1/batches/{batch.id}",
    )


def main(arguments: Sequence[str] | None = None) -> list[HostileRow]:
    """Measure, print the table, add it to the CSV; return the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="alone, and next to each kind")
    parser.add_argument("--only", action="append", choices=list(HOSTILE), help="this kind")
    parser.add_argument("--base", type=Path, help="a second checkout to measure in the same run")
    parser.add_argument("--small", action="store_true", help="few bytes, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    scale, seconds = (0.01, 1.0) if options.small else (1.0, options.seconds)
    checkouts = {"this": ROOT.parent} | ({"base": options.base.resolve()} if options.base else {})
    target = Target(port=0, fetch_path="", batch_path="", seconds=seconds, scale=scale)
    rows = measure(options.only or list(HOSTILE), target, checkouts)
    rows = [replace(row, stamp=stamp()) for row in rows]
    print(table(rows))
    write_rows(rows, options.out)
    return rows


def table(rows: list[HostileRow]) -> str:
    """Return the rows as a Markdown table."""
    names = [field.name for field in fields(HostileRow) if field.name != "stamp"]
    lines = [f"| {' | '.join(names)} |", "|---|---|" + "--:|" * (len(names) - 2)]
    lines += [f"| {' | '.join(str(getattr(row, name)) for name in names)} |" for row in rows]
    return "\n".join([rows[0].stamp, "", *lines])


if __name__ == "__main__":
    main()
