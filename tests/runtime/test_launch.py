"""The demo from end to end in processes of its own, its failures, and a rank that breaks."""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch.distributed as dist

from optpipe import Provenance, dump_schedule, evaluate, load_problem, parse_action
from optpipe.runtime import demo
from optpipe.runtime.demo_model import launch_ranks
from optpipe.runtime.watch import EXIT_CODE
from tests.runtime import cases
from tests.runtime.ranks import Ended, fork_ranks, free_port, start_ranks

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


def arguments(*more: str) -> list[str]:
    return ["--problem", str(PROBLEM), "--steps", "2", *more]


def test_the_problem_cannot_hold_all_activations(problem):
    for device, stage in zip(problem.devices, problem.stages, strict=True):
        room = device.usable_bytes - stage.static_bytes
        assert stage.activation_bytes <= room < 2 * stage.activation_bytes
        assert 0 < stage.offload_bytes < stage.activation_bytes


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_the_demo_trains_by_a_schedule_from_the_service(
    service, problem, capfd, tmp_path, is_forked
):
    given = arguments("--url", service, "--job", "7")
    if is_forked:
        first, *others = fork_ranks(partial(demo.main, given), 4, tmp_path)
        assert [one.code for one in (first, *others)] == [0] * 4
        out = first.output
    else:
        assert launch_ranks("optpipe.runtime.demo", given, 4) == 0
        out = capfd.readouterr().out
    assert out.count("0.0e+00") == 2
    each = 2 * problem.num_microbatches * problem.stages[1].offload_bytes
    # The plan's offload_bytes are what really moves.
    assert f"rank 1: {each} bytes offloaded, {each} bytes reloaded" in out
    assert "losses and all gradients agree" in out


def test_the_demo_says_when_there_is_no_such_job(service, tmp_path):
    given = arguments("--url", service, "--job", "8")
    first, second = fork_ranks(partial(demo.main, given), 2, tmp_path)
    assert (first.code, second.code) == (1, 1)
    assert "answered 404" in first.output
    assert second.output == ""


def test_the_demo_fails_when_host_copies_are_wrong(offloading, tmp_path):
    schedule = tmp_path / "schedule.json"
    schedule.write_text(offloading)
    main = partial(cases.demo_with_wrong_copies, arguments("--schedule", str(schedule)))
    ended = fork_ranks(main, 4, tmp_path)
    assert [one.code for one in ended] == [1] * 4
    assert "DISAGREES" in ended[0].output
    assert "does NOT train like one process" in ended[0].output


def _fail(fault: str, rank: int, copies: int, folder: Path) -> tuple[list[Ended], float]:
    """Return how four ranks ended of which one failed, and after how many seconds all had."""
    folder.mkdir()
    ended = fork_ranks(partial(cases.fail_at, rank, fault, copies, free_port()), 4, folder)
    until = time.time()
    (begun,) = re.findall(r"fault at ([\d.]+)", ended[rank].output)
    return ended, until - float(begun)


_WORDS = {
    "kill": "rank {0}: its process is dead",
    "raise": "rank {0}, step 1, in {1}F0: RuntimeError",
    "hang": "rank {0}, step 1, in {1}F0: no progress for",
}


@pytest.mark.parametrize(
    ("fault", "failing", "copies"),
    [
        ("kill", (0, 2), 1),
        ("raise", (2,), 1),
        ("hang", (0,), 1),
        *(
            pytest.param(fault, (0, 1, 2, 3), copies, marks=pytest.mark.extended)
            for fault in _WORDS
            for copies in (1, 2)
        ),
    ],
    ids=str,
)
def test_whoever_fails_all_ranks_end_soon_and_name_the_same_one(tmp_path, fault, failing, copies):
    """With rank 0 ends the store through which they would tell each other."""
    with ThreadPoolExecutor() as pool:
        runs = {
            rank: pool.submit(_fail, fault, rank, copies, tmp_path / str(rank)) for rank in failing
        }
    for culprit, run in runs.items():
        ended, seconds = run.result()
        assert seconds < 10
        for rank, one in enumerate(ended):
            if rank != culprit or fault == "hang":
                assert one.code in {10 + rank, EXIT_CODE}
                named = re.findall(r"this one cannot go on; rank (\d)", one.output)
                assert named == [str(culprit)], one.output
                assert _WORDS[fault].format(culprit, culprit % (4 // copies)) in one.output
        itself = {"kill": -signal.SIGKILL, "raise": 10 + culprit, "hang": EXIT_CODE}
        assert ended[culprit].code == itself[fault]
        if fault == "raise":
            assert f"raised on rank {culprit}, step 1, in" in ended[culprit].output


def test_a_rank_that_breaks_and_lives_on_ends_the_others_too(tmp_path):
    first, second = fork_ranks(cases.fail_and_live_on, 2, tmp_path, lives_on=1)
    assert (first.code, second.code) == (EXIT_CODE, None)
    assert "rank 1: RuntimeError" in second.output
    assert (
        "optpipe: another rank failed and this one cannot go on; rank 1, step 1, in 1F0"
        in first.output
    )
    assert "no such layer" in first.output


def test_ranks_that_stay_behind_a_failed_one_are_ended(monkeypatch):
    """Two processes without torch: one fails at once, the other sleeps."""
    monkeypatch.setattr("optpipe.runtime.demo_model._GRACE_S", 0.1)
    statement = "1 / 0 if os.environ['RANK'] == '1' else time.sleep(60)"
    given = ["-n", "1", "-r", "1", "-s", "import os, time", statement]
    assert launch_ranks("timeit", given, 2) == 1


def _fail_or_wait(failing: int) -> int:
    if dist.get_rank() == failing:
        raise ValueError("boom")
    dist.barrier()
    return os.getpid()


def test_ranks_of_which_one_failed_are_started_anew(monkeypatch):
    """Those of our own tests: a hang fails one test, and not all behind it."""
    monkeypatch.setattr("tests.runtime.ranks._AFTER_A_FAILURE_S", 0.5)
    with start_ranks(2) as ranks:
        before = ranks.run(_fail_or_wait, -1)
        with pytest.raises(AssertionError, match=r"(?s)rank 1 raised.*boom.*ranks \[0\] did not"):
            ranks.run(_fail_or_wait, 1)
        assert not set(ranks.run(_fail_or_wait, -1)) & set(before)
