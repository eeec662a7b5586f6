"""The training example: it learns as one process does, by what the service plans for it."""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from examples.train_gpt import ALPHABET, make_batch, solve, sums, with_room
from optpipe import (
    Problem,
    Programs,
    Provenance,
    dump_schedule,
    evaluate,
    load_schedule,
    parse_action,
)
from tests.building import bus, offloadable, problem, stage

ROOT = Path(__file__).parent.parent
JOB = {
    "id": "7",
    "state": "succeeded",
    "has_schedule": True,
    "problem_hash": "sha256:0",
    "objective": "makespan",
    "options": {"time_limit_s": 60.0},
    "created_at": "2026-01-31T12:00:00Z",
}


def offloading(posted: Problem) -> Programs:
    """1F1B with split backwards on four devices, whose micro-batches all wait on the host."""
    rows = []
    for device in range(4):
        ahead, cells, mode = 4 - device, [], ""
        if posted.has_modes:
            mode = f"@{[one.name for one in posted.menus[device]].index('offload')}"
        for slot in range(posted.num_microbatches + ahead):
            if (done := slot - ahead) >= 0:
                cells += [f"{device}RELOAD{done}", f"{device}I{done}", f"{device}W{done}"]
            if slot < posted.num_microbatches:
                cells += [
                    f"{device}F{slot}{mode}",
                    f"{device}OFFLOAD{slot}",
                    f"{device}RELEASE{slot}",
                ]
        rows.append(tuple(map(parse_action, cells)))
    return tuple(rows)


class _Service(BaseHTTPRequestHandler):
    """Solves every problem in no time, always in the same way."""

    schedule = ""
    options: ClassVar[dict[str, Any]] = {}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        posted = Problem.parse(body["problem"])
        _Service.options = body["options"]
        programs = offloading(posted)
        answer = evaluate(posted, programs, Provenance(method="by hand"))
        _Service.schedule = dump_schedule(answer)
        self._answer(json.dumps(JOB))

    def do_GET(self) -> None:
        is_schedule = self.path.partition("?")[0].endswith("/schedule")
        self._answer(_Service.schedule if is_schedule else json.dumps(JOB))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Stay silent."""


@pytest.fixture
def service():
    """Run it for as long as a test takes; give its address."""
    server = HTTPServer(("127.0.0.1", 0), _Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    """Start it on four ranks through the installed torchrun."""
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [str(torchrun), "--standalone", "--nproc-per-node", "4", "examples/train_gpt.py"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.extended
def test_measured_planned_by_the_service_and_trained_like_one_process(service) -> None:
    sizes = ["--hidden", "16", "--sequence", "8", "--samples", "2", "--microbatches", "4"]
    done = run_example("--url", service, "--steps", "3", "--check", "--activations", "2", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the loss curve equals that of one process" in done.stdout
    assert "DISAGREES" not in done.stdout
    for rank in range(4):
        assert f"rank {rank}: " in done.stdout
    assert " 0 bytes offloaded" not in done.stdout
    first, last = (
        float(line.split("loss ")[1].split(",")[0])
        for line in done.stdout.splitlines()
        if line.startswith("step ")
    )
    assert last < first


def test_that_nobody_plans_is_handed_on(monkeypatch) -> None:
    """Nobody answers there: told to all ranks, instead of leaving them waiting."""
    monkeypatch.setattr("optpipe.client.client.time.sleep", lambda _: None)
    options = argparse.Namespace(url="http://127.0.0.1:9", time_limit=1.0)
    schedule, fault = solve(problem([stage()]), options)
    assert schedule == ""
    assert "nobody answers at http://127.0.0.1:9" in fault


def test_the_service_is_given_the_problem_and_the_time(service) -> None:
    options = argparse.Namespace(url=service, time_limit=2.5)
    stages = [offloadable(device) for device in range(4)]
    posted = problem(stages, [bus()] * 4, m=2)
    schedule, fault = solve(posted, options)
    assert fault == ""
    assert load_schedule(schedule).programs == offloading(posted)
    assert _Service.options == {"time_limit_s": 2.5}


def test_the_text_is_sums_that_are_right() -> None:
    lines = sums(2000, seed=3).splitlines()[:-1]
    assert len(lines) > 20
    for line in lines:
        left, right, total = map(int, re.split(r" [+=] ", line))
        assert left + right == total


def test_targets_are_the_next_letters_and_a_seed_makes_the_same_text() -> None:
    batch, target = make_batch(3, 10, seed=1)
    assert batch.shape == target.shape == (3, 10)
    assert bool((batch[:, 1:] == target[:, :-1]).all())
    text = "".join(ALPHABET[code] for code in batch[0])
    assert sums(40, seed=1).startswith(text)
    assert bool((make_batch(3, 10, seed=1)[0] == batch).all())
    assert not bool((make_batch(3, 10, seed=2)[0] == batch).all())


def test_room_is_counted_in_activations_beside_what_is_always_there() -> None:
    """The larger of activation and weight context, and the larger workspace, must fit."""
    full = stage(
        activation_bytes=100,
        weight_context_bytes=120,
        static_bytes=30,
        forward_workspace_bytes=4,
        backward_input_workspace_bytes=7,
    )
    after = stage(1, activation_bytes=8)
    whole = problem([full, after], [bus(reserved_bytes=1000)] * 2, m=3)
    first, second = with_room(whole, 2.5).devices
    assert first.memory_bytes == 1000 + 30 + 7 + 300
    assert second.memory_bytes == 1000 + 20
