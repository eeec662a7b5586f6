"""The demo from end to end in processes of its own, its failures, and a rank that breaks."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from optpipe import Provenance, dump_schedule, evaluate, load_problem, parse_action
from optpipe.runtime.demo_model import launch_ranks
from optpipe.runtime.runner import EXIT_CODE

pytestmark = pytest.mark.long

PROBLEM = Path(__file__).parents[2] / "examples" / "problems" / "tiny-gpt-pp4.json"


@pytest.fixture(scope="module")
def problem():
    return load_problem(PROBLEM.read_text())


@pytest.fixture(scope="module")
def offloading(problem):
    """Return 1F1B with split backwards whose micro-batches wait on the host, as JSON."""
    rows = []
    for stage in range(4):
        ahead, cells = 4 - stage, []
        for slot in range(problem.num_microbatches + ahead):
            if (done := slot - ahead) >= 0:
                cells += [f"{stage}RELOAD{done}", f"{stage}I{done}", f"{stage}W{done}"]
            if slot < problem.num_microbatches:
                cells += [f"{stage}F{slot}", f"{stage}OFFLOAD{slot}", f"{stage}RELEASE{slot}"]
        rows.append(tuple(parse_action(cell) for cell in cells))
    return dump_schedule(evaluate(problem, tuple(rows), Provenance(method="by hand")))


@pytest.fixture
def service(offloading):
    """Serve that schedule as the service does, for job 7; every other path is 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            found = self.path == "/v1/jobs/7/schedule"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(offloading.encode() if found else b'{"detail": "no such job"}')

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def demo(url: str, job: str, num_processes: int) -> int:
    """Let ranks train two steps by the schedule of a job."""
    arguments = ["--problem", str(PROBLEM), "--steps", "2", "--url", url, "--job", job]
    return launch_ranks("optpipe.runtime.demo", arguments, num_processes)


def test_the_problem_cannot_hold_all_activations(problem):
    for device, stage in zip(problem.devices, problem.stages, strict=True):
        room = device.usable_bytes - stage.static_bytes
        assert stage.activation_bytes <= room < 2 * stage.activation_bytes
        assert 0 < stage.offload_bytes < stage.activation_bytes


def test_the_demo_trains_by_a_schedule_from_the_service(service, problem, capfd):
    assert demo(service, "7", 4) == 0
    out = capfd.readouterr().out
    assert out.count("0.0e+00") == 2
    each = 2 * problem.num_microbatches * problem.stages[1].offload_bytes
    # The plan's offload_bytes are what really moves.
    assert f"rank 1: {each} bytes offloaded, {each} bytes reloaded" in out
    assert "losses and all gradients agree" in out


def test_the_demo_says_when_there_is_no_such_job(service, capfd):
    assert demo(service, "8", 2) == 1
    assert "answered 404" in capfd.readouterr().err


@pytest.mark.extended
def test_the_demo_fails_when_host_copies_are_wrong(offloading, tmp_path, capfd):
    schedule = tmp_path / "schedule.json"
    schedule.write_text(offloading)
    arguments = ["--problem", str(PROBLEM), "--schedule", str(schedule), "--steps", "1"]
    assert launch_ranks("tests.runtime.corrupted_demo", arguments, 4) == 1
    told = capfd.readouterr()
    assert "DISAGREES" in told.out
    assert "does NOT train like one process" in told.err


@pytest.mark.extended
def test_torchrun_refuses_a_wrong_number_of_ranks_on_all_of_them(offloading, tmp_path):
    schedule = tmp_path / "schedule.json"
    schedule.write_text(offloading)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "optpipe.runtime.demo"]
    command += ["--problem", str(PROBLEM), "--schedule", str(schedule)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "ranks 0, 1: the schedule has 4 programs for 2 ranks" in done.stderr


def test_a_rank_that_breaks_ends_the_others_with_its_cause(capfd):
    assert launch_ranks("tests.runtime.failing_rank", [], 2) in (10, 11)
    out = capfd.readouterr().out
    assert "rank 1: RuntimeError" in out
    assert "raised on rank 1, step 1, in 1F0" in out
    assert "rank 0: RankError: another rank failed and this one cannot go on; rank 1" in out
    assert "the layer broke" in out


def test_a_rank_that_breaks_and_lives_on_ends_the_others_too(capfd):
    assert launch_ranks("tests.runtime.failing_rank", ["stay"], 2) == EXIT_CODE
    told = capfd.readouterr()
    assert "rank 1: RuntimeError" in told.out
    assert "optpipe: another rank failed, and this one waits for it; rank 1, step 1" in told.err
    assert "the layer broke" in told.err
