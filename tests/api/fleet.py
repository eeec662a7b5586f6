"""Servers of one database that are killed and started again, and their clients' patience."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.runtime.ranks import free_port

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 250.0


class Fleet:
    """Some servers, each on a port of its own that it keeps over all its lives.

    Their solvers are threads, or ``processes`` to be killed one by one.
    """

    def __init__(
        self,
        folder: Path,
        num_servers: int,
        settings: Mapping[str, object],
        points: list[str],
        *,
        processes: bool = False,
    ) -> None:
        self._processes = processes
        self._folder = folder
        self._settings = settings
        self._points = points
        self.reached = folder / "reached"
        self.reached.touch()
        self.ports = _free_ports(num_servers)
        self.pids: dict[int, int] = {}
        self.answers = dict.fromkeys(self.ports, 0)
        """How often each has answered in its present life."""
        self.num_lives = 0
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.api.mortal"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            text=True,
        )

    def tend(self) -> None:
        """Start every server that is not running."""
        for port in self.ports:
            if port not in self.pids or not is_running(self.pids[port]):
                self.answers[port] = 0
                self.pids[port] = self._start(port)
                self.num_lives += 1

    def _start(self, port: int) -> int:
        order = {
            "settings": {**self._settings, "port": port},
            "points": self._points,
            "reached": str(self.reached),
            "log": str(self._folder / "server.log"),
            "processes": self._processes,
        }
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(f"{json.dumps(order)}\n")
        self._zygote.stdin.flush()
        return int(self._zygote.stdout.readline())

    def kill(self, port: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.answers[port] = 0  # who looks before the next start must not kill it once more
        _kill(self.pids[port], number)

    def kill_solver(self, choice: random.Random) -> None:
        """Kill one of the solver processes, if there is one."""
        found = [pid for server in self.pids.values() for pid in children(server)]
        if found:
            _kill(choice.choice(sorted(found)), signal.SIGKILL)

    def points_left(self) -> set[str]:
        """Return the points where no server has died yet."""
        return set(self._points) - set(self.reached.read_text("utf-8").split())

    def log(self) -> str:
        return (self._folder / "server.log").read_text("utf-8")[-5000:]

    def close(self) -> None:
        for port in self.pids:
            self.kill(port)
        for pipe in (self._zygote.stdin, self._zygote.stdout):
            assert pipe is not None
            pipe.close()
        self._zygote.wait(PATIENCE_S)


class Caller:
    """Asks again, some server or other, until it is answered."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._choice = random.Random(seed)
        self._http = httpx.Client(timeout=10)

    def __call__(self, method: str, path: str, **request: Any) -> httpx.Response:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            port = self._choice.choice(self._fleet.ports)
            url = f"http://127.0.0.1:{port}{path}"
            try:
                answer = self._http.request(method, url, **request)
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            self._fleet.answers[port] += 1
            if answer.status_code not in (429, 503):
                return answer
            time.sleep(0.1)
        raise TimeoutError(f"{method} {path} was not answered for {PATIENCE_S} s")

    def close(self) -> None:
        self._http.close()


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that only waits to be waited for is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _kill(pid: int, number: signal.Signals) -> None:
    # It may end by itself between the question and the signal.
    if is_running(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started; its threads come and go meanwhile."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found: list[int] = []
    for task in tasks:
        try:
            found += [int(child) for child in task.read_text("utf-8").split()]
        except OSError:
            continue
    return found


def _free_ports(number: int) -> list[int]:
    found: set[int] = set()
    while len(found) < number:
        found.add(free_port())
    return sorted(found)
